"""`benchmarks/`: the measurements of on_cuda.py rehearsed on the CPU with tiny networks, and the field's table."""

import importlib
import itertools
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from training import ROOT, forked

SCRIPT = ROOT / "benchmarks" / "on_cuda.py"
Done = tuple[int, list[list[str]]]  # exit code, and the cells of the Markdown file's tables, without their heads


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """A function of the name of a module of `benchmarks`, which imports it."""
    monkeypatch.syspath_prepend(SCRIPT.parent)
    return importlib.import_module


@pytest.fixture
def rehearse(script: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Done]:
    """`python benchmarks/on_cuda.py --device cpu WORDS`, in this process."""
    monkeypatch.chdir(tmp_path)

    def measured(*words: str) -> Done:
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--device", "cpu", *words])
        code = script(SCRIPT.stem).main()
        lines = [line for line in Path("on_cuda.md").read_text().splitlines() if line.startswith("| ")]
        rows = [line.strip("| ").split(" | ") for line in lines]
        return code, [row for row in rows if row[0] not in ("config", "network")]

    return measured


@pytest.fixture
def forked_rows(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row is forked from the server that has torch loaded, in the place of an interpreter of its own."""
    place, numbers = tmp_path_factory.mktemp("rows"), itertools.count()

    def fork(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        number = next(numbers)
        printed = [place / f"{number}.{name}" for name in ("out", "err")]
        child = forked(run_script, command[1:], *printed)
        child.start()
        child.join()
        out, err = (path.read_text() for path in printed)
        return subprocess.CompletedProcess(command, child.exitcode or 0, out, err)

    monkeypatch.setattr(subprocess, "run", fork)


def run_script(words: list[str], *printed: Path) -> None:
    for number, path in enumerate(printed, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    torch.set_num_threads(1)
    sys.argv = words
    sys.path.insert(0, str(SCRIPT.parent))
    runpy.run_path(words[0], run_name="__main__")


@pytest.mark.slow
@pytest.mark.usefixtures("forked_rows")
def test_a_row_that_fails_is_a_line_and_the_others_go_on(rehearse: Callable[..., Done], tmp_path: Path) -> None:
    code, (failed, memory, network, lever, shares, windows) = rehearse(
        "--also", "model=unet_tiny nope=true", "--at-once", "2"
    )
    assert code == 1 and failed[0] == "model=unet_tiny nope=true"
    assert failed[1].startswith("failed: nope: ") and "--help" in failed[1], "its last line"
    tensors, predicted, requested, error = memory[1:5]
    assert tensors == predicted
    assert (tensors, error) == (requested, "+0.00%"), "the prediction is the ledger's"
    assert network[0] == "unet3d model=unet" and network[2] == lever[2] == "1.000"
    assert float(network[1]) > 0 and float(lever[1]) > 0
    assert float(windows[1]) > 0 and float(windows[3]) == 0, "equal labels"
    assert float(shares[1]) > 0 < float(shares[2]) and 0 < float(shares[3].strip("%")) < 100
    assert shares[4].count("%") == 8, "the largest other operations"
    page = (tmp_path / "on_cuda.md").read_text()
    assert "CPU" in page.splitlines()[0] and "cuDNN" in page
    assert [path.name for path in tmp_path.iterdir()] == ["on_cuda.md"]


@pytest.mark.parametrize(("words", "code", "cell"), [("--deadline 0", 0, "not run"), ("--limit 0", 1, "failed")])
def test_a_row_for_which_there_is_no_time_is_listed(
    words: str, code: int, cell: str, rehearse: Callable[..., Done]
) -> None:
    """Memory, network, lever, shares and windows."""
    ended, rows = rehearse(*words.split())
    assert (ended, [row[1].partition(":")[0] for row in rows]) == (code, [cell] * 5)


@pytest.mark.slow
def test_without_a_gpu_it_says_so_in_a_line(tmp_path: Path) -> None:
    """As a program of its own."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, str(SCRIPT)], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "CUDA" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_predicted_is_a_dash_and_no_number(script: Callable[[str], Any]) -> None:
    page, entries = script("field_page"), script("field_networks").ENTRIES[:2]
    results = {entries[0].title: {"cpu bf16": {"parameters": 5, "seconds": 12.4}}}
    rows = list(page.sources(entries, results))[-2:]
    assert [row.strip("| ").split(" | ")[-1] for row in rows] == ["12", page.DASH]

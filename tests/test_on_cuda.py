"""The measurements of `benchmarks/on_cuda.py`, rehearsed on the CPU with tiny networks in real processes."""

import importlib
import itertools
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from training import forked

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "on_cuda.py"
ROWS = 5  # of a rehearsal: memory, network, lever, shares, windows


class Done(NamedTuple):
    code: int
    cells: list[list[str]]  # of the Markdown file's tables, without their heads


@pytest.fixture
def rehearse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Done]:
    """`python benchmarks/on_cuda.py --device cpu WORDS`, in this process."""
    monkeypatch.syspath_prepend(SCRIPT.parent)
    monkeypatch.chdir(tmp_path)
    script = importlib.import_module(SCRIPT.stem)

    def measured(*words: str) -> Done:
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--device", "cpu", *words])
        code = script.main()
        lines = (tmp_path / "on_cuda.md").read_text().splitlines()
        rows = [
            line
            for line in lines
            if line.startswith("| ") and not line.startswith(("| config |", "| network |", "|---"))
        ]
        return Done(code, [line.strip("| ").split(" | ") for line in rows])

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
    done = rehearse("--also", "model=unet_tiny nope=true", "--at-once", "2")
    (failed, memory, network, lever, shares, windows) = done.cells
    assert done.code == 1 and failed[0] == "model=unet_tiny nope=true"
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
    assert sorted(path.name for path in tmp_path.iterdir()) == ["on_cuda.md"]


def test_what_the_deadline_cuts_off_is_listed_as_not_run(rehearse: Callable[..., Done]) -> None:
    done = rehearse("--deadline", "0")
    assert done.code == 0
    assert [row[1].partition(":")[0] for row in done.cells] == ["not run"] * ROWS


def test_a_row_past_its_limit_failed(rehearse: Callable[..., Done]) -> None:
    done = rehearse("--limit", "0")
    assert done.code == 1
    assert [(row[1].partition(":")[0], " 0 s" in row[1]) for row in done.cells] == [("failed", True)] * ROWS


@pytest.mark.slow
def test_without_a_gpu_it_says_so_in_a_line(tmp_path: Path) -> None:
    """As a program of its own."""
    environment = os.environ | {"PYTHONPATH": str(SCRIPT.parent.parent.parent), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, str(SCRIPT)], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "CUDA" in done.stderr
    assert list(tmp_path.iterdir()) == []

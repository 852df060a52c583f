"""The measurements of `tests/bench/on_cuda.py`, rehearsed on the CPU with tiny networks in real processes."""

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

SCRIPT = Path(__file__).parent / "bench" / "on_cuda.py"
ROWS = 4  # of a rehearsal: memory, network, lever, shares


class Done(NamedTuple):
    code: int
    err: str
    cells: list[list[str]]  # of the Markdown file's tables, without their heads


def measured(folder: Path, *words: str) -> Done:
    """A rehearsal in a folder, or what else `words` ask for."""
    environment = os.environ | {"PYTHONPATH": str(SCRIPT.parent.parent.parent), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(SCRIPT), *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    page = folder / "on_cuda.md"
    lines = page.read_text().splitlines() if page.exists() else []
    rows = [line for line in lines if line.startswith("| ") and not line.startswith(("| config |", "|---"))]
    return Done(done.returncode, done.stderr, [line.strip("| ").split(" | ") for line in rows])


@pytest.mark.slow
def test_a_row_that_fails_is_a_line_and_the_others_go_on(tmp_path: Path) -> None:
    done = measured(tmp_path, "--device", "cpu", "--also", "model=unet_tiny nope=true", "--at-once", "2")
    assert done.code == 1, done.err
    (failed, memory, network, lever, shares) = done.cells
    assert failed == [
        "model=unet_tiny nope=true",
        "failed: nope: no such option; python train.py --help lists them all",
    ]
    tensors, requested, error = memory[1:4]
    assert (tensors, error) == (requested, "+0.00%"), "the prediction is the ledger's"
    assert network[0] == "unet3d model=unet" and network[2] == lever[2] == "1.000"
    assert float(network[1]) > 0 and float(lever[1]) > 0
    assert 0 < float(shares[1].strip("%")) < 100 and shares[2].count("%") == 5
    page = (tmp_path / "on_cuda.md").read_text()
    assert page.startswith("# Rehearsal on the CPU") and "cuDNN" in page
    assert sorted(path.name for path in tmp_path.iterdir()) == ["on_cuda.md"]


def test_what_the_deadline_cuts_off_is_listed_as_not_run(tmp_path: Path) -> None:
    done = measured(tmp_path, "--device", "cpu", "--deadline", "0")
    assert done.code == 0, done.err
    assert [row[1] for row in done.cells] == ["not run: the deadline was reached"] * ROWS


def test_a_row_past_its_limit_failed(tmp_path: Path) -> None:
    done = measured(tmp_path, "--device", "cpu", "--limit", "0")
    assert done.code == 1, done.err
    assert [row[1] for row in done.cells] == ["failed: ran past its limit of 0 s"] * ROWS


def test_without_a_gpu_it_says_so_in_a_line(tmp_path: Path) -> None:
    done = measured(tmp_path)
    assert (done.code, done.cells) == (2, [])
    assert done.err == "this torch sees no CUDA device: nothing is verified here\n"

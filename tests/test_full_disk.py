"""Every command on a disk without room: a line that names the file, nothing half written, and what was there stays.

`tests/bench/full_disk.py` tries a run at every size; `tests/train/test_faults_checkpoint.py` has checkpoints and runs.
"""

import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
from promises import promise
from training import TINY, face, fill

from unet3d.cli import memory_answers
from unet3d.memory.prediction import MemoryEstimate

Act = Callable[[Path], int]


def command(name: str, run: Path) -> Act:
    """Return what writes the files of a command to a folder."""
    best = run / "checkpoints" / "best.pt"
    (data,) = (run.parent / "data" / "phantom").iterdir()
    images = sorted((data / "imagesTr").iterdir())[:2]
    words = ("data=decathlon", f"data.root={data}", "data.folds=2", "data.fold=0")
    commands: dict[str, Act] = {
        "publish": lambda disk: face("publish", best, "-o", disk / "net.pt"),
        "predict": lambda disk: face("predict", best, *images, "-o", disk / "maps", "--device", "cpu"),
        "predict --probabilities": lambda disk: face(
            *("predict", best, images[0], "-o", disk / "maps", "--device", "cpu", "--probabilities")
        ),
        "score": lambda disk: face("score", best, *words, "-o", disk / "scored"),
        "compare": lambda disk: face("compare", run, "-o", disk / "compared"),
        "memory": lambda disk: face("memory", *TINY, "-o", disk / "memory"),
        "report": lambda disk: face("report", disk / "run"),
    }
    return commands[name]


# of each command, KiB that are free: from none to nearly enough
ROOM = {"publish": (0, 24), "predict": (0, 4), "predict --probabilities": (0, 80), "score": (0,), "compare": (32,)}
ROOM |= {"report": (320,)}


@pytest.fixture(autouse=True)
def only_the_step_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """`memory` simulates no other networks beside it, which takes long and writes nothing."""
    monkeypatch.setattr(memory_answers, "narrowed", nothing_beside)
    monkeypatch.setattr(MemoryEstimate, "without", nothing_beside)


def nothing_beside(_: MemoryEstimate) -> dict:
    return {}


@promise("What scripts rely on", "exit code 2 ...")
@promise(
    "Disk and limits",
    "it is full, or a file may not grow, as another command writes",
    "exit 2 with one line that names the file; nothing is half written, old files stay",
)
@pytest.mark.parametrize(("name", "room"), [(name, room) for name, rooms in ROOM.items() for room in rooms])
def test_a_command_on_a_full_disk_is_one_line_and_leaves_nothing_half_written(
    name: str,
    room: int,
    finished: Path,
    small_disk: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(finished.parent)
    if name == "report":
        shutil.copytree(finished, small_disk / "run")
    before = {path: path.read_bytes() for path in small_disk.rglob("*") if path.is_file()}
    fill(small_disk, room * 2**10)
    act = command(name, finished)
    assert act(small_disk) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert f" {small_disk}/" in last and "No space left on device" in last
    assert not [*small_disk.rglob("*.tmp")]
    drawn = [small_disk / "run" / name for name in ("figures", "metrics.csv")]  # whole, but perhaps newer
    kept = {path: text for path, text in before.items() if not {path, *path.parents} & {*drawn}}
    assert all(content == path.read_bytes() for path, content in kept.items())
    assert all(plt.imread(path).size for path in small_disk.rglob("*.png"))
    (small_disk / "filler").unlink()
    assert act(small_disk) == 0
    assert name != "predict" or len([*small_disk.rglob("*.nii.gz")]) == 2, "no map that was cut short is left alone"


@promise("Disk and limits", "it is full, or ...")
@pytest.mark.parametrize("name", [*ROOM])
def test_a_file_that_may_not_grow_is_one_line_that_names_it(
    name: str, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a disk that is full; everywhere, not for root alone."""
    monkeypatch.chdir(finished.parent)
    if name == "report":
        shutil.copytree(finished, tmp_path / "run")
    act, (soft, hard) = command(name, finished), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        code = act(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    last = capsys.readouterr().err.splitlines()[-1]
    assert code == 2 and f" {tmp_path}/" in last and "ulimit -f" in last
    assert not [*tmp_path.rglob("*.tmp")]

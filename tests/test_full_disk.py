"""Every command on a disk without room: a line that names the file, nothing half written, and what was there stays.

`tests/bench/full_disk.py` tries a run at every size; `tests/train/test_faults_snapshot.py` has snapshots and runs.
"""

import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
from training import TINY, face, fill, train

Act = Callable[[Path], int]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run and its data."""
    folder = tmp_path_factory.mktemp("place")
    assert train(folder, *TINY, "data.root=phantom", "hydra.run.dir=run", frills=True).code == 0
    return folder


def command(name: str, place: Path) -> Act:
    best, (data,) = place / "run" / "checkpoints" / "best.pt", (place / "phantom").iterdir()
    images = sorted((data / "imagesTr").iterdir())[:2]
    words = ("data=decathlon", f"data.root={data}", "data.folds=2", "data.fold=0")
    commands: dict[str, Act] = {
        "publish": lambda disk: face("publish", best, "-o", disk / "net.pt"),
        "predict": lambda disk: face("predict", best, *images, "-o", disk / "maps", "--device", "cpu"),
        "predict --probabilities": lambda disk: face(
            *("predict", best, images[0], "-o", disk / "maps", "--device", "cpu", "--probabilities")
        ),
        "score": lambda disk: face("score", best, *words, "-o", disk / "scored"),
        "compare": lambda disk: face("compare", place / "run", "-o", disk / "compared"),
        "memory": lambda disk: face("memory", *TINY, "-o", disk / "memory"),
        "report": lambda disk: face("report", disk / "run"),
    }
    return commands[name]


# of each command, KiB that are free: from none to nearly enough
ROOM = {"publish": (0, 8, 24), "predict": (0, 4), "score": (0,), "compare": (0, 8, 32), "memory": (0, 640)}
ROOM |= {"report": (0, 16, 64, 320), "predict --probabilities": (0, 8, 80)}


@pytest.mark.parametrize(("name", "room"), [(name, room) for name, rooms in ROOM.items() for room in rooms])
def test_a_command_on_a_full_disk_is_one_line_and_leaves_nothing_half_written(
    name: str,
    room: int,
    place: Path,
    small_disk: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(place)
    if name == "report":
        shutil.copytree(place / "run", small_disk / "run")
    before = {path: path.read_bytes() for path in small_disk.rglob("*") if path.is_file()}
    fill(small_disk, room * 2**10)
    act = command(name, place)
    assert act(small_disk) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"error: {small_disk}/") and "No space left on device" in last and "make room" in last
    assert not [*small_disk.rglob("*.tmp")]
    drawn = [small_disk / "run" / name for name in ("figures", "metrics.csv")]  # whole, but perhaps newer
    kept = {path: text for path, text in before.items() if not {path, *path.parents} & {*drawn}}
    assert all(content == path.read_bytes() for path, content in kept.items())
    assert all(plt.imread(path).size for path in small_disk.rglob("*.png"))
    (small_disk / "filler").unlink()
    assert act(small_disk) == 0
    assert name != "predict" or len([*small_disk.rglob("*.nii.gz")]) == 2, "no map that was cut short is left alone"


@pytest.mark.parametrize("name", [*ROOM])
def test_a_file_that_may_not_grow_is_one_line_that_names_it(
    name: str, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a disk that is full; everywhere, not for root alone."""
    monkeypatch.chdir(place)
    if name == "report":
        shutil.copytree(place / "run", tmp_path / "run")
    act, (soft, hard) = command(name, place), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        code = act(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    last = capsys.readouterr().err.splitlines()[-1]
    assert code == 2 and last.startswith(f"error: {tmp_path}/") and "ulimit -f allows no larger file" in last
    assert not [*tmp_path.rglob("*.tmp")]

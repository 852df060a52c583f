"""A full disk, or a limit on files, their size or shared memory, is named in a line, and nothing is half written.

`tests/bench/full_disk.py` tries a run at every size; `tests/train/test_faults_checkpoint.py` has checkpoints and runs.
"""

import ctypes
import errno
import functools
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pytest
from guards import no, without
from promises import promise
from training import ROOT, TINY, face, fill, status, train

from unet3d.base import process
from unet3d.base.errors import UserError
from unet3d.config import compose
from unet3d.data import cases, loader


def act(name: str, run: Path, place: Path) -> int:
    """Run a command that writes to a folder, or the report of a run that lies there."""
    best, (data,) = run / "checkpoints" / "best.pt", (run.parent / "data" / "phantom").iterdir()
    images = sorted((data / "imagesTr").iterdir())
    words = {
        "publish": [best, "-o", place / "net.pt"],
        "predict": [best, *images[:2], "-o", place / "maps", "--device", "cpu"],
        "predict probabilities": [best, images[0], "-o", place / "maps", "--device", "cpu", "--probabilities"],
        "score": [best, "data=decathlon", f"data.root={data}", "data.folds=2", "data.fold=0", "-o", place / "scored"],
        "compare": [run, "-o", place / "compared"],
        "report": [place / "run"],
    }
    return face(name.split()[0], *words[name])


# KiB that are free as a command begins: from none to nearly enough.
ROOM = [("publish", 24), ("predict", 4), ("predict probabilities", 80), ("score", 0), ("compare", 32), ("report", 320)]


@promise("What scripts rely on", "exit code 2 ...")
@promise(
    "Disk and limits",
    "it is full, or a file may not grow, as another command writes",
    "exit 2 with one line that names the file; nothing is half written, old files stay",
)
@pytest.mark.parametrize(("name", "room"), [("publish", 0), ("predict", 0), *ROOM])
def test_a_command_on_a_full_disk_is_one_line_and_leaves_nothing_half_written(
    name: str, room: int, finished: Path, small_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if name == "report":
        shutil.copytree(finished, small_disk / "run")
    # Figures and metrics.csv are whole, too, but perhaps newer.
    old = [path for path in small_disk.rglob("*") if path.is_file() and "figures" not in path.parts]
    before = {path: path.read_bytes() for path in old if path.name != "metrics.csv"}
    fill(small_disk, room * 2**10)
    assert act(name, finished, small_disk) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert f" {small_disk}/" in last and "No space left on device" in last
    assert not [*small_disk.rglob("*.tmp")]
    assert before == {path: path.read_bytes() for path in before}
    assert all(plt.imread(path).size for path in small_disk.rglob("*.png"))
    (small_disk / "filler").unlink()
    assert act(name, finished, small_disk) == 0
    assert name != "predict" or len([*small_disk.rglob("*.nii.gz")]) == 2, "no map that was cut short is left alone"


@promise("Disk and limits", "it is full, or ...")
@pytest.mark.parametrize("name", ["publish", "predict", "predict probabilities", "score", "report"])
def test_a_file_that_may_not_grow_is_one_line_that_names_it(
    name: str, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As on a disk that is full; everywhere, not for root alone."""
    if name == "report":
        shutil.copytree(finished, tmp_path / "run")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        code = act(name, finished, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    last = capsys.readouterr().err.splitlines()[-1]
    assert code == 2 and f" {tmp_path}/" in last and "ulimit -f" in last
    assert not [*tmp_path.rglob("*.tmp")]


@pytest.mark.parametrize(
    ("program", "given", "wanted"),
    [
        ("runpy.run_path('train.py', run_name='__main__')", {}, process.SPINS),
        ("runpy.run_module('unet3d', run_name='__main__')", {"GOMP_SPINCOUNT": "7"}, "7"),
        ("runpy.run_module('unet3d', run_name='__main__')", {"OMP_WAIT_POLICY": "ACTIVE"}, None),
    ],
)
def test_threads_let_other_programs_have_the_cores_unless_the_environment_says_how_they_wait(
    program: str, given: dict[str, str], wanted: str | None
) -> None:
    """It is said before torch loads, which reads it then: a mistake is answered before."""
    code = (
        "import atexit, os, runpy, sys; sys.argv = ['unet3d', 'memory', 'chkpt=2']; "
        f"atexit.register(lambda: print(os.environ.get('GOMP_SPINCOUNT'), 'torch' in sys.modules)); {program}"
    )
    clean = {key: value for key, value in os.environ.items() if key not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    done = subprocess.run([sys.executable, "-c", code], env=clean | given, capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == f"{wanted} False\n", done.stderr


def few_files() -> None:
    """Those of a run without workers."""
    highest = max(map(int, os.listdir("/proc/self/fd")))
    while (last := os.dup(2)) < highest:  # numbers between those that are open
        pass
    resource.setrlimit(resource.RLIMIT_NOFILE, (last + 25, last + 25))


@promise("Training", "too few open files (`ulimit -n`)", "exit 2; the line names the limit")
def test_too_few_open_files_are_one_line_that_names_the_limit(tmp_path: Path) -> None:
    done = train(tmp_path, *TINY, "workers=2", "hydra.run.dir=run", hook=few_files)
    assert done.code == 2 and "Traceback" not in done.err, done.err
    (line,) = [line for line in done.err.splitlines() if "ulimit -n" in line]
    assert line.startswith("error: workers=2: ") and "Errno" not in line
    assert status(tmp_path / "run").startswith("error: ")


@promise("Training", "too few open files ...")
@without("unet3d.base.errors.is_out_of_files", no)
def test_open_files_that_run_out_elsewhere_are_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(cases, "dataset_to_check", refuse)
    assert face("check-data", "data=decathlon", "data.root=.") == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and "ulimit -n" in error and error.count("\n") == 1


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A function of options, and of blocks of shared memory and free ones in MiB: the workers that would start."""

    def start(*_: object, num_workers: int, **__: object) -> None:
        raise EOFError(num_workers)

    def started(*words: str, size: int = 10, free: int = 10) -> int:
        full = os.statvfs(tmp_path)
        mib = 2**20 // full.f_frsize
        shared = os.statvfs_result([*full[:2], size * mib, free * mib, free * mib, *full[5:]])
        monkeypatch.setattr(os, "statvfs", lambda _: shared)
        with pytest.raises(EOFError) as caught:
            next(loader.batches(None, ["a"], compose.compose(["batch=1", "data.patch=[64,64,64]", *words])))
        return caught.value.args[0]

    monkeypatch.setattr(loader, "DataLoader", start)
    monkeypatch.setattr(loader, "SHARED", tmp_path)
    monkeypatch.setattr(loader, "worker_count", lambda asked, on_gpu: 8 if asked == "auto" else asked)
    return started


@promise(
    "Training",
    "too little shared memory for data workers",
    "exit 2 before they start, exit 1 later; the line names /dev/shm and what to do",
)
def test_shared_memory_has_room_for_workers_before_they_start(
    workers: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A batch takes 1 MiB: two for each worker, one more, and 1 MiB."""
    assert workers("workers=4") == workers() == 4, "auto starts fewer than eight"
    with pytest.raises(UserError, match=r"^workers=5: .* MiB .*--shm-size=2g.*workers=0"):
        workers("workers=5")
    assert workers("workers=5", size=0, free=0) == 5, "of a size without a limit"
    monkeypatch.setattr(loader, "SHARED", tmp_path / "none")
    assert workers("workers=5") == 5, "on a system without it"


SMALL = "mount -t tmpfs -o size={} tmpfs /dev/shm"
NEW_NAMES = 0x00020000  # CLONE_NEWNS: mounts for this process and its children alone


@promise("Training", "too little shared memory ...")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a disk")
@pytest.mark.parametrize("size", ["16k", "1m"])
def test_a_run_in_a_container_with_little_shared_memory_is_one_line(tmp_path: Path, size: str) -> None:
    if subprocess.run(["unshare", "-m", "sh", "-c", SMALL.format(size)], capture_output=True).returncode:
        pytest.skip("no name space of its own can be made here")
    done = train(tmp_path, *TINY, "workers=2", "hydra.run.dir=run", hook=functools.partial(share_little, size))
    assert done.code == 2 and "Traceback" not in done.err, done.err
    assert all(part in done.err for part in ("/dev/shm", "--shm-size=2g", "workers=0"))
    assert status(tmp_path / "run").startswith("error: workers=2: ")


def share_little(size: str) -> None:
    """For this process and its children alone."""
    if ctypes.CDLL(None, use_errno=True).unshare(NEW_NAMES):
        raise OSError(ctypes.get_errno(), "unshare")
    for command in ("mount --make-rprivate /", SMALL.format(size)):
        subprocess.run(command.split(), check=True)

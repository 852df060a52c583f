"""A limit on open files or shared memory is named in a line: no run waits for what never comes."""

import ctypes
import errno
import functools
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from guards import no, without
from promises import promise
from training import ROOT, TINY, face, status
from training import train as fork

from unet3d.base import process
from unet3d.base.errors import UserError
from unet3d.config import compose
from unet3d.data import cases, loader

SMALL = "mount -t tmpfs -o size={} tmpfs /dev/shm"
NEW_NAMES = 0x00020000  # CLONE_NEWNS: mounts for this process and its children alone


@pytest.mark.parametrize(
    ("program", "given", "wanted"),
    [
        ("train.py", {}, process.SPINS),
        ("-m unet3d memory", {}, process.SPINS),
        ("train.py", {"GOMP_SPINCOUNT": "7"}, "7"),
        ("-m unet3d memory", {"OMP_WAIT_POLICY": "ACTIVE"}, None),
    ],
)
def test_threads_let_other_programs_have_the_cores_unless_the_environment_says_how_they_wait(
    program: str, given: dict[str, str], wanted: str | None
) -> None:
    """It is said before torch loads, which reads it then."""
    code = (
        "import atexit, os, runpy, sys; sys.argv = {words!r}; "
        "atexit.register(lambda: print(os.environ.get('GOMP_SPINCOUNT'), 'torch' in sys.modules)); "
        "runpy.run_{how}({name!r}, run_name='__main__')"
    )
    words = [*program.split()[-1:], "chkpt=2"]  # a mistake, which is answered before torch loads
    how, name = ("path", str(ROOT / "train.py")) if program == "train.py" else ("module", "unet3d")
    clean = {key: value for key, value in os.environ.items() if key not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    command = [sys.executable, "-c", code.format(words=["unet3d", *words][-3:], how=how, name=name)]
    done = subprocess.run(command, env=clean | given, capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == f"{wanted} False\n", done.stderr


@promise("Training", "too few open files (`ulimit -n`)", "exit 2; the line names the limit")
@pytest.mark.parametrize("workers", [0, 2])
def test_too_few_open_files_are_one_line_that_names_the_limit(tmp_path: Path, workers: int) -> None:
    done = fork(tmp_path, *TINY, f"workers={workers}", "hydra.run.dir=run", hook=few_files)
    assert done.code == 2 and "Traceback" not in done.err, done.err
    (line,) = [line for line in done.err.splitlines() if "ulimit -n" in line]
    assert line.startswith(f"error: workers={workers}: " if workers else "error: ") and "Errno" not in line
    assert (f"workers={workers}" in line) == bool(workers)
    assert not workers or status(tmp_path / "run").startswith("error: ")


def few_files() -> None:
    """With workers, those of a run without; else not even these."""
    highest = max(map(int, os.listdir("/proc/self/fd")))
    while (last := os.dup(2)) < highest:  # numbers between those that are open
        pass
    most = last + 1 + (24 if "workers=2" in sys.argv else 1)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


@promise("Training", "too few open files ...")
@without("unet3d.base.errors.is_out_of_files", no)
def test_open_files_that_run_out_elsewhere_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(cases, "dataset_to_check", refuse)
    assert face("check-data", "data=decathlon", "data.root=.") == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and "ulimit -n" in error and error.count("\n") == 1


@promise(
    "Training",
    "too little shared memory for data workers",
    "exit 2 before they start, exit 1 later; the line names /dev/shm and what to do",
)
def test_shared_memory_that_is_too_small_is_refused_before_workers_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def started(*_: object, **__: object) -> None:
        raise EOFError

    monkeypatch.setattr(loader, "DataLoader", started)
    monkeypatch.setattr(loader, "SHARED", tmp_path)
    config = compose.compose(["workers=2", "data.patch=[16,16,16]"])
    with pytest.raises(EOFError):
        next(loader.batches(None, ["a"], config))
    config.data.patch = [2**20] * 3
    with pytest.raises(UserError, match=r"^workers=2: .* MiB .*--shm-size=2g.*workers=0"):
        next(loader.batches(None, ["a"], config))
    full = os.statvfs(tmp_path)
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result([*full[:2], 0, 0, 0, *full[5:]]))
    with pytest.raises(EOFError):
        next(loader.batches(None, ["a"], config))  # of a size without a limit
    monkeypatch.setattr(loader, "SHARED", tmp_path / "none")  # a system without it
    with pytest.raises(EOFError):
        next(loader.batches(None, ["a"], config))


def test_auto_starts_fewer_workers_where_shared_memory_has_no_room_for_all(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started: list[int] = []

    def start(*_: object, num_workers: int, **__: object) -> None:
        started.append(num_workers)
        raise EOFError

    monkeypatch.setattr(loader, "DataLoader", start)
    monkeypatch.setattr(loader, "SHARED", tmp_path)
    monkeypatch.setattr(loader, "worker_count", lambda asked, on_gpu: 8 if asked == "auto" else asked)
    full = os.statvfs(tmp_path)
    mib = 2**20 // full.f_frsize  # blocks
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result([*full[:4], 10 * mib, *full[5:]]))
    words = ["batch=1", "data.patch=[64,64,64]"]  # 1 MiB a batch, two for each worker, one more, and 1 MiB
    with pytest.raises(EOFError):
        next(loader.batches(None, ["a"], compose.compose(words)))
    assert started == [4]
    with pytest.raises(UserError, match=r"^workers=8: "):
        next(loader.batches(None, ["a"], compose.compose([*words, "workers=8"])))


@promise("Training", "too little shared memory ...")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a disk")
@pytest.mark.parametrize("size", ["16k", "1m"])
def test_a_run_in_a_container_with_little_shared_memory_is_one_line(tmp_path: Path, size: str) -> None:
    if subprocess.run(["unshare", "-m", "sh", "-c", SMALL.format(size)], capture_output=True).returncode:
        pytest.skip("no name space of its own can be made here")
    done = fork(tmp_path, *TINY, "workers=2", "hydra.run.dir=run", hook=functools.partial(share_little, size))
    assert done.code == 2 and "Traceback" not in done.err, done.err
    assert all(part in done.err for part in ("/dev/shm", "--shm-size=2g", "workers=0"))
    assert status(tmp_path / "run").startswith("error: workers=2: ")


def share_little(size: str) -> None:
    """For this process and its children alone."""
    if ctypes.CDLL(None, use_errno=True).unshare(NEW_NAMES):
        raise OSError(ctypes.get_errno(), "unshare")
    for command in ("mount --make-rprivate /", SMALL.format(size)):
        subprocess.run(command.split(), check=True)

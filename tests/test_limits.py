"""A limit on address space, open files or shared memory is named in a line: no run waits for what never comes."""

import ctypes
import errno
import functools
import mmap
import os
import resource
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from guards import no, without
from training import ROOT, TINY, face, run, status
from training import train as fork

from unet3d.base.errors import OutOfMemory, UserError, is_out_of_memory
from unet3d.cli import libraries
from unet3d.config import compose
from unet3d.data import cases, loader, prepare

LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv.pop(1)) * 2**20,) * 2)
from unet3d.cli import main
sys.exit(main.main())
"""
SMALL = "mount -t tmpfs -o size={} tmpfs /dev/shm"
NEW_NAMES = 0x00020000  # CLONE_NEWNS: mounts for this process and its children alone


@pytest.mark.parametrize("mebibytes", [150, 750])
def test_too_little_address_space_for_the_libraries_is_exit_5(tmp_path: Path, mebibytes: int) -> None:
    """OpenBLAS would ask for memory without end, or end the process itself."""
    done = run(str(mebibytes), "train", *TINY, "hydra.run.dir=run", cwd=tmp_path, code=LIMITED)
    assert done.returncode == 5 and "Traceback" not in done.stderr, done.stderr
    assert "ulimit -v" in done.stderr and f"{mebibytes}.0 MiB" in done.stderr
    assert "ulimit -v" in status(tmp_path / "run")


COMMANDS = {
    **{name: ("x",) for name in ("report", "compare")},
    **{name: ("x.pt", "y", "-o", "z") for name in ("predict", "score")},
    **{"publish": ("x.pt", "-o", "z"), "check-data": ("data=decathlon", "data.root=nowhere"), "memory": ()},
}


@pytest.mark.parametrize("command", COMMANDS)
def test_too_little_address_space_is_exit_5_of_every_command(tmp_path: Path, command: str) -> None:
    done = run("300", command, *COMMANDS[command], cwd=tmp_path, code=LIMITED)
    assert done.returncode == 5 and done.stderr.count("\n") == 2 and "ulimit -v" in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("program", "given", "wanted"),
    [
        ("train.py", {}, libraries.SPINS),
        ("-m unet3d memory", {}, libraries.SPINS),
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


def test_help_needs_little_address_space(tmp_path: Path) -> None:
    assert run("300", "--help", cwd=tmp_path, code=LIMITED).returncode == 0


@pytest.fixture
def rooms(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of address space that `load_libraries` tries to get; the address space is limited."""
    found: list[int] = []
    take = mmap.mmap

    def noted(number: int, size: int) -> mmap.mmap:
        found.append(size)
        return take(number, size if size > 2**50 else 1)

    monkeypatch.setattr(mmap, "mmap", noted)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (2**45, 0))
    return found


def test_without_a_limit_nothing_is_loaded_early(rooms: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, 0))
        libraries.load_libraries()
    assert rooms == []
    libraries.load_libraries()
    assert len(rooms) == 3, "numpy, scipy and torch"
    monkeypatch.setattr(libraries, "HEAP", 2**60)
    with pytest.raises(OutOfMemory, match=r"^numpy .*\d MiB .*OMP_NUM_THREADS=1\b"):
        libraries.load_libraries()


@pytest.mark.parametrize(
    ("given", "threads"), [({"OMP_NUM_THREADS": "3"}, 3), ({"OMP_NUM_THREADS": "3", "OPENBLAS_NUM_THREADS": "500"}, 64)]
)
def test_threads_that_the_environment_names_need_room(
    rooms: list[int], monkeypatch: pytest.MonkeyPatch, given: dict[str, str], threads: int
) -> None:
    """Those that are loaded already need no more for themselves. OpenBLAS starts 64 threads at most."""
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    libraries.load_libraries()
    assert rooms[0] == libraries.HEAP + libraries.THREAD * (1 + threads)


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


def unlimited() -> str:
    """Return that no limit is set, in place of one."""
    return ""


@without("unet3d.base.errors.address_limit", unlimited)
def test_an_error_that_python_lost_is_of_memory_where_that_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = SystemError("error return without exception set"), RuntimeError("can't start new thread")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, 0))
    assert not any(map(is_out_of_memory, errors))
    monkeypatch.setattr(resource, "getrlimit", lambda _: (2**30, 0))
    assert all(map(is_out_of_memory, errors))


def test_a_run_that_holds_every_byte_ends_in_a_line(tmp_path: Path) -> None:
    done = fork(tmp_path, *TINY, "hydra.run.dir=run", hook=take_every_byte)
    assert done.code == 5 and "Traceback" not in done.err, done.err
    text = status(tmp_path / "run")
    assert "MemoryError" in text and "ulimit -v" in text and text.endswith("exit code 5\n")


def take_every_byte() -> None:
    held: list[bytes] = []

    def take(*_: object) -> None:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**24, resource.RLIM_INFINITY))
        for size in (2**20, 2**12, 2**8, 2**5):
            with suppress(MemoryError):
                while True:
                    held.append(bytes(size))
        raise MemoryError

    prepare.prepare_data = take

"""A limit on address space, open files or shared memory is named in a line: no run waits for what never comes."""

import errno
import functools
import os
import resource
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from training import ROOT, TINY, face, run, status
from training import train as fork

from unet3d import build
from unet3d.cli import libraries
from unet3d.data import cases, loader
from unet3d.errors import OutOfMemory, UserError, is_out_of_memory

LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv.pop(1)) * 2**20,) * 2)
from unet3d.cli import main
sys.exit(main.main())
"""
SMALL = 'mount -t tmpfs -o size=$0 tmpfs /dev/shm && exec "$@"'  # for this process and its children alone


@pytest.mark.parametrize("mebibytes", [150, 750])
def test_too_little_address_space_for_the_libraries_is_exit_5(tmp_path: Path, mebibytes: int) -> None:
    """OpenBLAS would ask for memory without end, or end the process itself."""
    done = run(str(mebibytes), "train", *TINY, "hydra.run.dir=run", cwd=tmp_path, code=LIMITED)
    assert done.returncode == 5 and "Traceback" not in done.stderr, done.stderr
    assert f"ulimit -v allows {mebibytes}.0 MiB: raise it" in done.stderr
    assert status(tmp_path / "run").startswith("out of memory: ")


COMMANDS = {
    **{name: ("x",) for name in ("report", "compare")},
    **{name: ("x.pt", "y", "-o", "z") for name in ("predict", "score")},
    **{"publish": ("x.pt", "-o", "z"), "check-data": ("data=decathlon", "data.root=nowhere"), "memory": ()},
}


@pytest.mark.parametrize("command", COMMANDS)
def test_too_little_address_space_is_exit_5_of_every_command(tmp_path: Path, command: str) -> None:
    done = run("300", command, *COMMANDS[command], cwd=tmp_path, code=LIMITED)
    assert done.returncode == 5 and done.stderr.count("\n") == 2, done.stderr


@pytest.mark.parametrize("program", ["train.py", "-m unet3d memory"])
def test_threads_let_other_programs_have_the_cores_unless_the_environment_says_how_they_wait(program: str) -> None:
    """It is said before torch loads, which reads it then."""
    code = (
        "import atexit, os, runpy, sys; sys.argv = {words!r}; "
        "atexit.register(lambda: print(os.environ.get('GOMP_SPINCOUNT'), 'torch' in sys.modules)); "
        "runpy.run_{how}({name!r}, run_name='__main__')"
    )
    words = [*program.split()[-1:], "chkpt=2"]  # a mistake, which is answered before torch loads
    how, name = ("path", str(ROOT / "train.py")) if program == "train.py" else ("module", "unet3d")
    for given, wanted in (({}, libraries.SPINS), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "ACTIVE"}, None)):
        clean = {key: value for key, value in os.environ.items() if key not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
        command = [sys.executable, "-c", code.format(words=["unet3d", *words][-3:], how=how, name=name)]
        done = subprocess.run(command, env=clean | given, capture_output=True, text=True, cwd=ROOT)
        assert done.stdout == f"{wanted} False\n", done.stderr


def test_help_needs_little_address_space(tmp_path: Path) -> None:
    assert run("300", "--help", cwd=tmp_path, code=LIMITED).returncode == 0


def test_without_a_limit_nothing_is_loaded_early(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[str] = []
    for name in ("numpy", "scipy", "torch"):
        monkeypatch.setattr(libraries, f"_use_{name}", functools.partial(used.append, name))
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, 0))
    libraries.load_libraries()
    assert not used
    monkeypatch.setattr(resource, "getrlimit", lambda _: (2**45, 0))
    libraries.load_libraries()
    assert used == ["numpy", "scipy", "torch"]
    monkeypatch.setattr(libraries, "HEAP", 2**60)
    with pytest.raises(OutOfMemory, match=r"^numpy does not fit: it may take "):
        libraries.load_libraries()


@pytest.mark.parametrize("workers", [0, 2])
def test_too_few_open_files_are_one_line_that_names_the_limit(tmp_path: Path, workers: int) -> None:
    done = fork(tmp_path, *TINY, f"workers={workers}", "hydra.run.dir=run", hook=few_files)
    assert done.code == 2 and "Traceback" not in done.err, done.err
    (line,) = [line for line in done.err.splitlines() if "ulimit -n allows" in line]
    assert line.startswith(f"error: workers={workers}: " if workers else "error: too many open files; ")
    assert not workers or status(tmp_path / "run").startswith("error: ")


def few_files() -> None:
    """With workers, those of a run without; else not even these."""
    highest = max(map(int, os.listdir("/proc/self/fd")))
    while (last := os.dup(2)) < highest:  # numbers between those that are open
        pass
    most = last + 1 + (24 if "workers=2" in sys.argv else 1)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def test_threads_that_the_environment_names_need_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert libraries._threads() == 3
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "500")
    assert libraries._threads() == 64


def test_open_files_that_run_out_elsewhere_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(cases, "read_dataset", refuse)
    assert face("check-data", "data=decathlon", "data.root=.") == 2
    assert capsys.readouterr().err.startswith("error: too many open files; ulimit -n allows ")


def test_shared_memory_that_is_too_small_is_refused_before_workers_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(loader, "SHARED", tmp_path)
    loader._require_room(2, 5, 100)
    with pytest.raises(UserError, match=r"^workers=2: .* MiB do not fit into .*--shm-size=2g\), or set workers=0$"):
        loader._require_room(2, 5, 2**60)
    full = os.statvfs(tmp_path)
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result([*full[:2], 0, 0, 0, *full[5:]]))
    loader._require_room(2, 5, 2**60)  # of a size without a limit
    monkeypatch.setattr(loader, "SHARED", tmp_path / "none")  # a system without it
    loader._require_room(2, 5, 2**60)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a disk")
@pytest.mark.parametrize("size", ["16k", "1m"])
def test_a_run_in_a_container_with_little_shared_memory_is_one_line(tmp_path: Path, size: str) -> None:
    words = ["unshare", "-m", "sh", "-c", SMALL, size]
    if subprocess.run([*words, "true"], capture_output=True).returncode:
        pytest.skip("no name space of its own can be made here")
    words += [sys.executable, str(ROOT / "train.py"), *TINY, "workers=2", "dry_run=false", "hydra.run.dir=run"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert "pass through /dev/shm: enlarge it (docker run --shm-size=2g), or set workers=0" in done.stderr
    assert status(tmp_path / "run").startswith("error: workers=2: ")


def test_an_error_that_python_lost_is_of_memory_where_that_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = SystemError("error return without exception set"), RuntimeError("can't start new thread")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, 0))
    assert not any(map(is_out_of_memory, errors))
    monkeypatch.setattr(resource, "getrlimit", lambda _: (2**30, 0))
    assert all(map(is_out_of_memory, errors))


def test_a_run_that_holds_every_byte_ends_in_a_line(tmp_path: Path) -> None:
    done = fork(tmp_path, *TINY, "hydra.run.dir=run", hook=take_every_byte)
    assert done.code == 5 and "Traceback" not in done.err, done.err
    assert status(tmp_path / "run").startswith("out of memory: MemoryError; ulimit -v allows ")


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

    build.data = take

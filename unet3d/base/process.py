"""What a process sets before it works: how threads wait, what the collector visits, streams that end nothing.

And the command that begins another: it works when pasted into a shell, in the same folder.
"""

import atexit
import gc
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from unet3d.base.errors import is_disk_full

SCRIPT = Path(__file__).resolve().parents[2] / "train.py"  # A checkout has it, an installed package has not.
SPINS = "3000"  # turns of a waiting thread's loop before it sleeps; libgomp's own number is 300,000


def prepare() -> None:
    """Let threads that wait for each other sleep soon, and the garbage collector rest as the process ends.

    A thread that waits awake keeps its core busy. Where two programs share the cores, steps then take six times as
    long. On idle cores sleeping costs a hundredth: `benchmarks/busy_cores.py`. The environment may say otherwise.
    The collector would take as long as loading torch. Call it before torch loads.
    """
    atexit.register(gc.freeze)
    if not os.environ.keys() & {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}:
        os.environ["GOMP_SPINCOUNT"] = SPINS


class SafeStream:
    """A text stream that loses what is written after its reader has left, or while the disk is full."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._try(self._stream.write, text)
        return len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, act: Callable[..., Any], *text: str) -> None:
        try:
            act(*text)
        except OSError as error:
            if not is_disk_full(error):  # what the stream still holds, and what Python flushes as it ends, too
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self._stream.fileno())
                os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def install_safe_streams() -> None:
    """Make sys.stdout and sys.stderr safe, also where the process began without them."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number: else the first file opened would be stdout
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name) or open(descriptor, "w", closefd=False)  # noqa: SIM115 (for good)
        setattr(sys, name, SafeStream(stream))


@contextmanager
def collector_resting() -> Iterator[None]:
    """Let the collector rest while many objects are made that all stay: it would visit them again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def loading(library: str) -> Iterator[None]:
    """Load a library within, and let the collector pass over all objects that there are then.

    That saves a tenth of the CPU time of a short run. Does nothing where the library is loaded: in a program of a
    user's own, later objects may be garbage.
    """
    if library in sys.modules or not gc.isenabled():
        yield
        return
    with collector_resting():
        yield
    gc.freeze()


def training_command(overrides: Iterable[str]) -> str:
    """Return the command that trains with these overrides: by train.py, if it is here or was run, or by the package.

    It begins with `python` where a shell finds this interpreter by that name, else with its path.
    """
    program = ["-m", "unet3d", "train"]
    for path in ("train.py", sys.argv[0]):
        with suppress(OSError, ValueError):  # one of them does not exist
            if SCRIPT.samefile(path):
                program = [path]
    found = shutil.which("python")
    is_this = found is not None and Path(found).absolute().parent == Path(sys.executable).absolute().parent
    python = "python" if is_this or not sys.executable else sys.executable
    return shlex.join([python, *program, *overrides])

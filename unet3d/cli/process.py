"""What a process sets before it works: how threads wait, and streams that outlive their reader and a full disk."""

import os
import sys
from collections.abc import Callable
from typing import Any, TextIO

from unet3d.base.errors import is_disk_full

SPINS = "3000"  # turns of a waiting thread's loop before it sleeps; libgomp's own number is 300,000


def share_cores() -> None:
    """Let threads that wait for each other sleep soon, unless the environment says how they are to wait.

    A thread that waits awake keeps its core busy. Where two programs share the cores, steps then take six times as
    long. On idle cores sleeping costs a hundredth: `benchmarks/busy_cores.py`. Call it before torch loads.
    """
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

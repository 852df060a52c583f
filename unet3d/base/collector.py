"""Python's garbage collector, and what it need not visit: objects of libraries live as long as the process."""

import atexit
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def loading(library: str) -> Iterator[None]:
    """Load a library within, and let the collector pass over all objects that there are then.

    It would visit them again and again while more are made, a tenth of the CPU time of a short run. Does nothing where
    the library is loaded: in a program of a user's own, later objects may be garbage.
    """
    if library in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.freeze()


def rest_at_exit() -> None:
    """Let the collector visit nothing as this process ends, which takes as long as loading torch."""
    atexit.register(gc.freeze)

"""A run folder is used by one process at a time. Free of torch."""

import errno
import fcntl
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from unet3d.errors import UserError

NAME = ".lock"


@contextmanager
def held(folder: Path) -> Iterator[bool]:
    """Hold the folder, as long as the process lives at most; False where it cannot be locked, which is told.

    Raises UserError where another process holds it.

    A record lock (`lockf`), since `flock` would live on in the data workers of a run that was killed.
    """
    with _open(folder / NAME) as file:
        is_locked = True
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise UserError(f"{folder}: {_holder(folder)} uses it; wait, or choose another folder") from None
            print(f"warning: {folder}: cannot be locked ({error.strerror}); use it once at a time", file=sys.stderr)
            is_locked = False
        else:
            file.truncate(0)
            file.write(f"{os.getpid()}\n")
            file.flush()
        yield is_locked


def _open(path: Path) -> IO[str]:
    try:
        return path.open("a+")
    except OSError as error:
        raise UserError(f"{path.parent}: cannot be written to ({error.strerror}); choose another folder") from error


def _holder(folder: Path) -> str:
    """Told by what the holder wrote; a second descriptor, but no lock of ours is lost when it closes."""
    number = (folder / NAME).read_text().strip()
    return f"process {number}" if number else "another process"

"""Standard streams that outlast their readers: `train.py | head`, a closed terminal, `>&-`. Free of torch."""

import os
import sys
from typing import Any, TextIO

from unet3d.errors import is_disk_full


class Outlet:
    """A text stream; once nobody reads it any more, what is written goes nowhere.

    A file on a full disk misses what is written meanwhile, but goes on once there is room.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            self._stream.write(text)
        except OSError as error:
            self._failed(error)
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._failed(error)

    def _failed(self, error: OSError) -> None:
        """What the stream still holds, and what Python flushes as it ends, goes nowhere, too."""
        if is_disk_full(error):
            return
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def install() -> None:
    """Make sys.stdout and sys.stderr such outlets, also where the process began without them."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number: else the first file opened would be stdout
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name) or open(descriptor, "w", closefd=False)  # noqa: SIM115 (for good)
        setattr(sys, name, Outlet(stream))

"""A command in a process of its own, waited for, and what its exit code means. Free of torch."""

import signal
import subprocess
from collections.abc import Sequence

INTERRUPTED = 130
GRACE = 10  # seconds in which an interrupted process ends by itself


def run(command: Sequence[str]) -> int:
    """Run it and return its exit code, or 128 + n where signal n ended it.

    Interrupted, it waits until the process has ended in good order, and returns 130. A terminal interrupts both; one
    that was not told, as by kill -INT, which names one process, is told after 10 seconds.
    """
    child = subprocess.Popen(command)
    interrupted = False
    while True:
        try:
            code = child.wait(GRACE if interrupted else None)
        except KeyboardInterrupt:
            interrupted = True
        except subprocess.TimeoutExpired:
            child.send_signal(signal.SIGINT)
        else:
            return INTERRUPTED if interrupted else code if code >= 0 else 128 - code


def fate(code: int) -> str:
    """What ended a process that could not say it itself."""
    killers = {number + 128: number.name for number in signal.Signals}
    return f"killed by {killers[code]}" if code in killers else f"ended with exit code {code}"

"""Ctrl-C ends a command with one line and an exit code, also while its libraries load: this module loads none."""

import signal
import sys
from collections.abc import Callable

INTERRUPTED = 130  # exit code: 128 + SIGINT's number


def in_one_line(command: Callable[[], int], code: int = INTERRUPTED) -> int:
    """Return the command's exit code, or `code`, after a line, where Ctrl-C has ended it."""
    try:
        return command()
    except KeyboardInterrupt:
        pass
    except Exception as error:
        if not _follows_interrupt(error):
            raise
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # nothing is left to be ended
    print("interrupted", file=sys.stderr)
    return code


def _follows_interrupt(error: BaseException) -> bool:
    """Whether a library, as it was loaded, has made another error of an interrupt."""
    cause = error.__cause__ or error.__context__
    return cause is not None and (isinstance(cause, KeyboardInterrupt) or _follows_interrupt(cause))

"""Ctrl-C ends a command with one line and an exit code, also while its libraries load: this module loads none."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = 130  # exit code: 128 + SIGINT's number
STOPPED = 75  # exit code of a training that was asked to stop


@contextmanager
def answered(code: int = INTERRUPTED) -> Iterator[None]:
    """Within, Ctrl-C prints a line and raises SystemExit with `code`, whatever a library makes of the interrupt."""
    was_asked = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal was_asked
        was_asked = True
        signal.default_int_handler(number, frame)

    is_ours = code == INTERRUPTED and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_ours:  # a training has handlers of its own
        signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    except KeyboardInterrupt:
        pass
    except Exception as error:
        if not was_asked and not _follows_interrupt(error):
            raise
    else:
        return
    finally:
        if is_ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # nothing is left to be ended
    print("interrupted", file=sys.stderr)
    raise SystemExit(code) from None


def _follows_interrupt(error: BaseException) -> bool:
    """Return whether a library, as it was loaded, has made another error of an interrupt."""
    cause = error.__cause__ or error.__context__
    return cause is not None and (isinstance(cause, KeyboardInterrupt) or _follows_interrupt(cause))

"""Ctrl-C ends a command with one line and an exit code, also while its libraries load: this module loads none."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from unet3d.base import signals

INTERRUPTED = 130  # exit code: 128 + SIGINT's number
STOPPED = 75  # exit code of a training that was asked to stop


@contextmanager
def answered(code: int = INTERRUPTED) -> Iterator[None]:
    """Within, Ctrl-C prints a line and raises SystemExit with `code`, whatever a library makes of the interrupt."""
    with signals.interrupted() if code == INTERRUPTED else nullcontext(signals.Stop()) as was_asked:
        try:  # a training has handlers of its own
            yield
        except KeyboardInterrupt:
            pass
        except Exception as error:
            if not was_asked() and not _follows_interrupt(error):
                raise
        else:
            return
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # nothing is left to be ended
    print("interrupted", file=sys.stderr)
    raise SystemExit(code) from None


def _follows_interrupt(error: BaseException) -> bool:
    """Return whether a library, as it was loaded, has made another error of an interrupt."""
    cause = error.__cause__ or error.__context__
    return cause is not None and (isinstance(cause, KeyboardInterrupt) or _follows_interrupt(cause))

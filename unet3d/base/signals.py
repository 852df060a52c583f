"""Signals set a flag, which a run reads where it can stop in good order. Free of torch.

Python swallows what a handler raises within a weakref's callback or a `__del__`, and a library may. So what was
raised is raised again by a further signal, and by `raise_again`, which every phase calls at its borders.
"""

import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType
from typing import Any

from unet3d.base import ranks
from unet3d.base.errors import Preempted

# Schedulers send SIGTERM, SIGUSR1 and, by submitit, SIGUSR2; Ctrl-C and a closed terminal the others.
ASKING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP)
INTERRUPTED = 130  # exit code: 128 + SIGINT's number
_answers: list[Callable[[], None]] = []  # Those who take signals: each raises what one has asked for; innermost last.


class Stop:
    """Call it to know whether a signal has asked to stop. A second SIGINT raises KeyboardInterrupt at once.

    Where signals raise, a further one raises Preempted again, unless that is under way already.

    With several ranks a signal only sets the flag, so that all stop after the same step; within `interruptible` (a
    validation) it raises, and `signal_on_any_rank` tells the others after the case.
    """

    def __init__(self, interrupts: bool = False) -> None:
        """`interrupts`: the first SIGINT raises KeyboardInterrupt, too, and what asks again does so."""
        self.asked: signal.Signals | None = None
        self._interrupts = interrupts
        self._raises = interrupts or ranks.SIZE == 1
        self._interrupted = interrupts

    def __call__(self) -> bool:
        return self.asked is not None

    def deferred(self) -> AbstractContextManager[None]:
        """Let a signal only set the flag inside; outside, the first signal raises Preempted."""
        return self._set(raises=False)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Let a signal raise Preempted inside `deferred`, also an earlier one, for work that can stop anywhere."""
        with self._set(raises=True):
            if self.asked:
                raise Preempted(f"stopped by {self.asked.name}")
            yield

    @contextmanager
    def _set(self, raises: bool) -> Iterator[None]:
        before = self._raises
        self._raises = raises
        try:
            yield
        finally:
            self._raises = before

    def handle(self, number: int, _: FrameType | None) -> None:
        """Keep the first signal, and raise."""
        if self.asked is None:
            self.asked = signal.Signals(number)
        if number == signal.SIGINT:
            if self._interrupted:
                raise KeyboardInterrupt
            self._interrupted = True
        self.answer()

    def answer(self) -> None:
        """Raise Preempted, or KeyboardInterrupt, where a signal has asked to stop and may raise."""
        if self.asked and self._raises and not _is_under_way():
            raise KeyboardInterrupt if self._interrupts else Preempted(f"stopped by {self.asked.name}")


def raise_again() -> None:
    """Raise what a signal has asked for, if that was swallowed: for the borders of phases, cases and pictures."""
    if _answers:
        _answers[-1]()


def _is_under_way() -> bool:
    """Return whether what a signal raised is on its way up, through a `finally` or the end of a `with`."""
    error = sys.exception()
    while error is not None:
        if isinstance(error, (Preempted, KeyboardInterrupt)):
            return True
        error = error.__context__
    return False


@contextmanager
def handled(
    handler: Callable[[int, FrameType | None], None], is_last: bool = False, signals: Iterable[int] = ASKING
) -> Iterator[dict[int, Any]]:
    """Let `handler` get the signals that ask to stop; yields the previous handlers.

    A signal that was ignored, as under nohup, stays ignored. The previous handlers are restored on exit. With `is_last`
    and several ranks, signals are ignored from then on, so that torchrun's SIGTERM does not replace the exit code.
    """
    before: dict[int, Any] = {}
    for asking in signals:
        if signal.getsignal(asking) != signal.SIG_IGN:
            before[asking] = signal.signal(asking, handler)
    try:
        yield before
    finally:
        for number, earlier in before.items():
            signal.signal(number, signal.SIG_IGN if is_last and ranks.SIZE > 1 else earlier)


@contextmanager
def _answering(answer: Callable[[], None]) -> Iterator[None]:
    """Let `raise_again` call `answer` within."""
    _answers.append(answer)
    try:
        yield
    finally:
        _answers.pop()


@contextmanager
def stopping() -> Iterator[Stop]:
    """Yield a Stop that receives the signals."""
    stop = Stop()
    with handled(stop.handle), _answering(stop.answer):
        yield stop


@contextmanager
def interrupted() -> Iterator[Stop]:
    """Yield a Stop that SIGINT alone reaches, each time raising KeyboardInterrupt; none where SIGINT has a handler."""
    stop = Stop(interrupts=True)
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield stop
        return
    with handled(stop.handle, signals=[signal.SIGINT]), _answering(stop.answer):
        yield stop


@contextmanager
def answered(is_training: bool = False) -> Iterator[None]:
    """Within, Ctrl-C prints a line and raises SystemExit, whatever a library makes of the interrupt.

    Also while libraries load: this module loads none. A training has its own handlers once it has begun.
    """
    with nullcontext(Stop()) if is_training else interrupted() as was_asked:
        try:
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
    raise SystemExit(Preempted.exit_code if is_training else INTERRUPTED) from None


def _follows_interrupt(error: BaseException) -> bool:
    """Return whether a library, as it was loaded, has made another error of an interrupt."""
    cause = error.__cause__ or error.__context__
    return cause is not None and (isinstance(cause, KeyboardInterrupt) or _follows_interrupt(cause))


def ignore() -> None:
    """Ignore signals in a helper process: one to the whole group is for the parent, which then ends the helper."""
    _answers.clear()
    for number in ASKING:
        signal.signal(number, signal.SIG_IGN)

"""Signals set a flag, which a run reads where it can stop in good order. Free of torch."""

import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Any

from unet3d.base import ranks
from unet3d.base.errors import Preempted

# from schedulers (SIGTERM, SIGUSR1, submitit's SIGUSR2), Ctrl-C and a closed terminal
ASKING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP)


class Stop:
    """Call it to know whether a signal has asked to stop. A second SIGINT raises KeyboardInterrupt at once.

    Where ranks work together, all of this is `deferred`: they stop together, and torchrun ends by a signal those that
    are left of a run, which are to say why it ended.
    """

    def __init__(self) -> None:
        self.asked: signal.Signals | None = None
        self._raises = ranks.SIZE == 1
        self._interrupted = False

    def __call__(self) -> bool:
        return self.asked is not None

    def deferred(self) -> AbstractContextManager[None]:
        """Within, a signal only sets the flag; outside, the first signal raises Preempted."""
        return self._set(raises=False)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Within `deferred`, for work that can stop anywhere: a signal, an earlier one too, raises Preempted."""
        with self._set(raises=True):
            if self.asked:
                raise Preempted(f"stopped by {self.asked.name}")
            yield

    @contextmanager
    def _set(self, raises: bool) -> Iterator[None]:
        before, self._raises = self._raises, raises
        try:
            yield
        finally:
            self._raises = before

    def handle(self, number: int, _: FrameType | None) -> None:
        """Keep the first signal, or raise."""
        if number == signal.SIGINT:
            if self._interrupted:
                raise KeyboardInterrupt
            self._interrupted = True
        if self.asked is None:
            self.asked = signal.Signals(number)
            if self._raises:
                raise Preempted(f"stopped by {self.asked.name}")


@contextmanager
def handled(handler: Callable[[int, FrameType | None], None], is_last: bool = False) -> Iterator[dict[int, Any]]:
    """Within, `handler` gets the signals that ask to stop; yields the earlier handlers.

    A signal that was ignored, as under nohup, stays ignored. Afterwards the earlier handlers get the others again. But
    a rank whose `is_last` work is done ignores all of them until its process ends: torchrun signals the ranks that are
    left of a run, and their exit codes are to say why it ended.
    """
    before: dict[int, Any] = {n: signal.signal(n, handler) for n in ASKING if signal.getsignal(n) != signal.SIG_IGN}
    try:
        yield before
    finally:
        for number, earlier in before.items():
            signal.signal(number, signal.SIG_IGN if is_last and ranks.SIZE > 1 else earlier)


@contextmanager
def stopping() -> Iterator[Stop]:
    """A Stop that receives the signals."""
    stop = Stop()
    with handled(stop.handle):
        yield stop


def ignore() -> None:
    """For helper processes: a signal to the whole group is for their parent, which then ends them."""
    for number in ASKING:
        signal.signal(number, signal.SIG_IGN)

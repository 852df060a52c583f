"""Progress of long work: a bar with the time left on a terminal, a plain line now and then elsewhere.

Each call is also a border at which a signal that was lost ends the work.
"""

import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from datetime import timedelta
from typing import Any, TypeVar

from rich import progress as bars
from rich.console import Console as Terminal

from unet3d.base import signals
from unet3d.base.errors import escaped

FIRST_LINE = 5.0  # seconds until the first plain line
BETWEEN_LINES = 15.0  # seconds between plain lines
Item = TypeVar("Item")
_open: list["Counter"] = []  # innermost last
_display: list[bars.Progress] = []  # the process's one live display: a validation's bar stands below the training's


class Counter:
    """The number of finished parts of one piece of work, shown as it grows. `total` None: not known beforehand."""

    def __init__(
        self,
        work: str,
        total: int | None = None,
        terminal: Terminal | None = None,
        plain_lines: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.work = escaped(work)
        self.total = total
        self.done = 0
        self._shown: float = 0  # finished parts, and the share of the current one
        self._terminal = terminal or Terminal(stderr=True)
        self._plain_lines = plain_lines
        self._clock = clock
        self._started = clock()
        self._next_line = self._started + FIRST_LINE
        self._task: bars.TaskID | None = None
        # A bar needs a cursor that moves. A file or pipe has none, even with FORCE_COLOR, nor has a dumb terminal.
        can_move = self._terminal.is_terminal and not self._terminal.is_dumb_terminal
        if can_move and _is_terminal(self._terminal.file):
            self._task = _shared_display(self._terminal).add_task("", total=total, work=self.work, note="")
        _open.append(self)

    @property
    def has_bar(self) -> bool:
        """Return whether it is shown as a bar."""
        return self._task is not None

    def advance(self, note: str = "") -> None:
        """Count one more part; `note` stands behind the bar."""
        self.reach(self.done + 1, note)

    def reach(self, done: int, note: str = "") -> None:
        """Set the number of finished parts."""
        self.done = done
        self._show(done, note=escaped(note))

    def within(self, share: float, part: str = "") -> None:
        """Show how much of the current part is finished; `part` is that in words."""
        self._show(self.done + share, part, note=escaped(part) or None)

    def beat(self) -> None:
        """Say now and then, in plain lines, that the current part is still at work."""
        if self._task is None and self._clock() >= self._next_line:
            self._show(self._shown)

    def _show(self, finished: float, part: str = "", note: str | None = None) -> None:
        """Show this many finished parts; `note` None: as before."""
        signals.raise_again()
        self._shown = finished
        if self._task is not None:
            _display[0].update(self._task, completed=finished)
            if note is not None:
                _display[0].update(self._task, note=note)
        elif self._plain_lines and self._clock() >= self._next_line and finished != self.total:
            self._next_line = self._clock() + BETWEEN_LINES
            self._terminal.out(self._line(finished, part), highlight=False)

    def close(self) -> None:
        """Remove the bar, and with the last bar the display."""
        if self not in _open:
            return
        _open.remove(self)
        if self._task is not None:
            try:
                _display[0].remove_task(self._task)
            finally:
                if not any(counter.has_bar for counter in _open):
                    _display.pop().stop()

    def _line(self, finished: float, part: str) -> str:
        """Return a plain line: what is finished, and the time left."""
        elapsed = self._clock() - self._started
        if self.total is None:
            return f"{self.work}: {self.done} done in {duration(elapsed)}"
        if not finished:
            return f"{self.work}: 0 of {self.total}, for {duration(elapsed)}"
        left = elapsed / finished * (self.total - finished)
        of_next = f", {escaped(part)} of the next" if part else ""
        return f"{self.work}: {self.done} of {self.total}{of_next}, about {duration(left)} left"


def _shared_display(terminal: Terminal) -> bars.Progress:
    """Return the process's display, started at the first call."""
    if not _display:
        display = bars.Progress(
            bars.TextColumn("{task.fields[work]}"),
            bars.BarColumn(),
            bars.MofNCompleteColumn(),
            bars.TimeRemainingColumn(),
            bars.TimeElapsedColumn(),
            bars.TextColumn("{task.fields[note]}", markup=False),
            console=terminal,
            # What is printed meanwhile goes through the display, except to a file or a pipe.
            redirect_stdout=_is_terminal(sys.stdout),
            redirect_stderr=_is_terminal(sys.stderr),
        )
        _display.append(display)
        display.start()
    return _display[0]


def counting(work: str, total: int | None = None) -> closing[Counter]:
    """Return a context whose counter is open within."""
    return closing(Counter(work, total))


def track(items: Iterable[Item], work: str, total: int | None = None) -> Iterator[Item]:
    """Yield the items, each counted as finished when the next is asked for. `total` None: the length of a sequence."""
    if total is None and isinstance(items, Sequence):
        total = len(items)
    with counting(work, total) as counter:
        for item in items:
            yield item
            counter.advance()


def parts(items: Sequence[Item], things: str = "", count: int = 0) -> Iterator[Item]:
    """Yield the items, each an equal share of the current part of the innermost open counter.

    With `things` (windows), there are `count` of them, in items of one size, of which the last may be smaller. Without
    an open counter, nothing is shown.
    """
    for number, item in enumerate(items, start=1):
        yield item
        if not _open:
            signals.raise_again()
            continue
        part = ""
        if things:
            done = min(count, number * math.ceil(count / len(items)))
            part = f"{done} of {count} {things}"
        _open[-1].within(number / len(items), part)


def beat() -> None:
    """Say that the innermost counter is still at work; for work of many small operations."""
    signals.raise_again()
    if _open:
        _open[-1].beat()


def _is_terminal(stream: Any) -> bool:
    """Return whether a stream is there and a person reads it."""
    return stream is not None and bool(stream.isatty())


def duration(seconds: float) -> str:
    """Return hours, minutes and seconds, `0:05:42`, as bars show them."""
    return str(timedelta(seconds=round(seconds)))

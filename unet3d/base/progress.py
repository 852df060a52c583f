"""Progress of long work: a bar with the time left on a terminal, a plain line now and then elsewhere."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from datetime import timedelta
from typing import Any, TypeVar

from rich.console import Console as Terminal
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from unet3d.base.errors import escaped

FIRST_LINE, BETWEEN_LINES = 5.0, 15.0  # seconds
Item = TypeVar("Item")
_open: list["Counter"] = []  # innermost last
_display: list[Progress] = []  # the process's one live display: a validation's bar stands below the training's


class Counter:
    """Counts the finished parts of one piece of work. `total` None: not known beforehand."""

    def __init__(
        self,
        what: str,
        total: int | None = None,
        terminal: Terminal | None = None,
        plain_lines: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        what = escaped(what)
        self.what, self.total, self.done = what, total, 0
        self._shown: float = 0  # finished parts, and the share of the current one
        self._terminal = terminal or Terminal(stderr=True)
        self._plain_lines, self._clock, self._started = plain_lines, clock, clock()
        self._next_line = self._started + FIRST_LINE
        # a bar needs a cursor that moves: not in a file or pipe, even with FORCE_COLOR, nor on a dumb terminal
        can_move = self._terminal.is_terminal and not self._terminal.is_dumb_terminal
        self.has_bar = can_move and _is_terminal(self._terminal.file)
        self._task = _shared(self._terminal).add_task("", total=total, what=what, note="") if self.has_bar else None
        _open.append(self)

    def advance(self, note: str = "") -> None:
        """Count one more part; `note` stands behind the bar."""
        self.reach(self.done + 1, note)

    def reach(self, done: int, note: str = "") -> None:
        """Set the number of finished parts."""
        self.done = done
        self._show(done, note=escaped(note))

    def within(self, share: float, part: str = "") -> None:
        """Show how much of the current part is finished; `part` is that in words."""
        self._show(self.done + share, part, **({"note": escaped(part)} if part else {}))

    def beat(self) -> None:
        """Say now and then, in plain lines, that the current part goes on."""
        if self._task is None and self._clock() >= self._next_line:
            self._show(self._shown)

    def _show(self, finished: float, part: str = "", **fields: Any) -> None:
        self._shown = finished
        if self._task is not None:
            _display[0].update(self._task, completed=finished, **fields)
        elif self._plain_lines and self._clock() >= self._next_line and finished != self.total:
            self._next_line = self._clock() + BETWEEN_LINES
            line = self._line(finished, part)
            self._terminal.print(line, highlight=False, markup=False, emoji=False, soft_wrap=True)

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
        elapsed = self._clock() - self._started
        if self.total is None:
            return f"{self.what}: {self.done} done in {duration(elapsed)}"
        if not finished:
            return f"{self.what}: 0 of {self.total}, for {duration(elapsed)}"
        left = elapsed / finished * (self.total - finished)
        of_next = f", {escaped(part)} of the next" if part else ""
        return f"{self.what}: {self.done} of {self.total}{of_next}, about {duration(left)} left"


def _shared(terminal: Terminal) -> Progress:
    if not _display:
        columns = [TextColumn("{task.fields[what]}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()]
        columns += [TimeElapsedColumn(), TextColumn("{task.fields[note]}", markup=False)]
        # what is printed meanwhile goes through the display, except to a file or a pipe
        out, err = _is_terminal(sys.stdout), _is_terminal(sys.stderr)
        _display.append(Progress(*columns, console=terminal, redirect_stdout=out, redirect_stderr=err))
        _display[0].start()
    return _display[0]


def counting(what: str, total: int | None = None) -> closing[Counter]:
    """A counter for the work within."""
    return closing(Counter(what, total))


def track(items: Iterable[Item], what: str, total: int) -> Iterator[Item]:
    """The items, each counted as finished when the next is asked for."""
    with counting(what, total) as counter:
        for item in items:
            yield item
            counter.advance()


def parts(items: Sequence[Item], things: str = "", count: int = 0) -> Iterator[Item]:
    """The items, each an equal share of the current part of the innermost open counter, if there is one.

    They are of `count` things, `windows`, in groups of one size, of which the last may be smaller.
    """
    for number, item in enumerate(items, 1):
        yield item
        if _open:
            done = min(count, number * -(-count // len(items)))
            _open[-1].within(number / len(items), f"{done} of {count} {things}" if things else "")


def beat() -> None:
    """Say that the innermost counter's work goes on; for work of many small operations."""
    if _open:
        _open[-1].beat()


def _is_terminal(stream: Any) -> bool:
    return stream is not None and bool(stream.isatty())


def duration(seconds: float) -> str:
    """Return hours, minutes and seconds, `0:05:42`, as bars show them."""
    return str(timedelta(seconds=round(seconds)))

"""Progress of work that lasts: a bar with the time left on a terminal, a plain line now and then elsewhere.

All bars of a process share one display, so that a validation's bar stands below the training's.
"""

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

from rich.console import Console as Terminal
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

FIRST_LINE, BETWEEN_LINES = 5.0, 15.0  # seconds


Item = TypeVar("Item")


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
        self.what, self.total, self.done = what, total, 0
        self._terminal = terminal or Terminal(stderr=True)
        self._plain_lines, self._clock = plain_lines, clock
        self._started = clock()
        self._next_line = self._started + FIRST_LINE
        self._display = _Display.join(self._terminal) if _takes_bars(self._terminal) else None
        self._task = self._display.add_task("", total=total, what=what, note="") if self._display else None
        _open.append(self)

    @property
    def has_bar(self) -> bool:
        """Whether it is shown as a bar."""
        return self._display is not None

    def advance(self, note: str = "") -> None:
        """Another part is finished; `note` stands behind the bar."""
        self.reach(self.done + 1, note)

    def reach(self, done: int, note: str = "") -> None:
        """So many parts are finished."""
        self.done = done
        self._show(done, note=note)

    def within(self, share: float) -> None:
        """A share of the part under way is finished."""
        self._show(self.done + share)

    def _show(self, finished: float, **fields: Any) -> None:
        """`finished` parts, the one under way included."""
        if self._display is not None and self._task is not None:
            self._display.update(self._task, completed=finished, **fields)
        elif self._plain_lines and self._clock() >= self._next_line and finished != self.total:
            self._next_line = self._clock() + BETWEEN_LINES
            self._terminal.print(self._line(finished), highlight=False, markup=False, soft_wrap=True)

    def close(self) -> None:
        """Take the bar away."""
        if self in _open:
            _open.remove(self)
            if self._display is not None and self._task is not None:
                try:
                    self._display.remove_task(self._task)
                finally:
                    _Display.leave()

    def _line(self, finished: float) -> str:
        elapsed = self._clock() - self._started
        if self.total is None:
            return f"{self.what}: {self.done} done in {_duration(elapsed)}"
        left = elapsed / finished * (self.total - finished)
        return f"{self.what}: {self.done} of {self.total}, about {_duration(left)} left"


class _Display:
    """The process's one live display, there while any counter is open."""

    progress: Progress | None = None
    users = 0

    @classmethod
    def join(cls, terminal: Terminal) -> Progress:
        if cls.progress is None:
            columns = (
                *(TextColumn("{task.fields[what]}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()),
                *(TimeElapsedColumn(), TextColumn("{task.fields[note]}", markup=False)),
            )
            # what is printed meanwhile goes through the display, except to a file or a pipe
            out, err = _is_terminal(sys.stdout), _is_terminal(sys.stderr)
            cls.progress = Progress(*columns, console=terminal, redirect_stdout=out, redirect_stderr=err)
            cls.progress.start()
        cls.users += 1
        return cls.progress

    @classmethod
    def leave(cls) -> None:
        cls.users -= 1
        if cls.users == 0 and cls.progress is not None:
            cls.progress.stop()
            cls.progress = None


_open: list[Counter] = []


@contextmanager
def counting(what: str, total: int | None = None) -> Iterator[Counter]:
    """A counter for what is done within."""
    counter = Counter(what, total)
    try:
        yield counter
    finally:
        counter.close()


def track(items: Iterable[Item], what: str, total: int) -> Iterator[Item]:
    """The items, each counted as finished when the next is asked for."""
    with counting(what, total) as counter:
        for item in items:
            yield item
            counter.advance()


def parts(items: Sequence[Item]) -> Iterator[Item]:
    """The items, each an equal share of the part under way of the innermost open piece of work, if there is one."""
    for number, item in enumerate(items, 1):
        yield item
        if _open:
            _open[-1].within(number / len(items))


def _takes_bars(terminal: Terminal) -> bool:
    """Whether the cursor can be moved: not in a file or pipe, also where FORCE_COLOR is set, nor on a dumb terminal."""
    return terminal.is_terminal and not terminal.is_dumb_terminal and _is_terminal(terminal.file)


def _is_terminal(stream: Any) -> bool:
    return stream is not None and bool(stream.isatty())


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else str(timedelta(seconds=round(seconds)))

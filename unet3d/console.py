"""A run on the terminal: a bar, or a plain line now and then; and tables as plain text."""

import io
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import rich.box
import rich.console
import rich.table
import rich.text
from rich.console import Console as Terminal

from unet3d.progress import Counter
from unet3d.table import Table

LINES = 20  # about as many plain lines a run
NARROW, WIDE = 80, 132  # characters of a plain file's line


class Console:
    """A sink that prints."""

    def __init__(self, steps: int, terminal: Terminal | None = None) -> None:
        self.steps = steps
        self.terminal = terminal or Terminal()
        self.every = max(1, steps // LINES)
        self.started = time.perf_counter()
        self.bar = Counter("training", steps, self.terminal, plain_lines=False)

    def scalars(self, values: Mapping[str, float | int | str | None], step: int) -> None:
        if "train/loss" in values:
            loss = f"loss {values['train/loss']:.4f}"
            self.bar.reach(step, loss)
            if not self.bar.has_bar and (step % self.every == 0 or step == 1):
                self._line(step, f"{loss}  {values['time/step_s']:.2f} s/step")
        elif "val/dice_mean" in values:
            dice = {key: value for key, value in values.items() if key.startswith("val/dice")}
            self._line(step, "  ".join(f"{key.removeprefix('val/')} {_shown(value)}" for key, value in dice.items()))

    def _line(self, step: int, text: str) -> None:
        elapsed = time.perf_counter() - self.started
        line = f"{elapsed:6.0f} s  step {step:>5}/{self.steps}  {text}"
        self.terminal.print(line, highlight=False, markup=False, soft_wrap=True)  # classes may be called [a] or [/b]

    def image(self, key: str, path: Path, step: int) -> None: ...
    def table(self, key: str, columns: Sequence[str], rows: Sequence[Sequence]) -> None: ...
    def summary(self, values: Mapping[str, object]) -> None: ...

    def close(self, exit_code: int) -> None:
        self.bar.close()


def _shown(value: float | int | str | None) -> str:
    return f"{value:.4f}" if isinstance(value, float) else "n/a"


def paper(width: int) -> Terminal:
    """A terminal to print results on; where it is a file, of so many characters a line."""
    terminal = Terminal(highlight=False, markup=False)
    return terminal if terminal.is_terminal else Terminal(highlight=False, markup=False, width=width)


def text(parts: Iterable[str | tuple[str, Table]], width: int) -> str:
    """Lines and titled tables as plain text; only tables keep to the width."""
    file = Terminal(file=io.StringIO(), width=width, markup=False, highlight=False)
    for part in parts:
        is_line = isinstance(part, str)
        file.print(part if isinstance(part, str) else terminal_table(*part), soft_wrap=is_line)
    return file.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def terminal_table(title: str, table: Table) -> rich.console.Group:
    """A table for the terminal, and for plain files; its title may be wider than it."""
    made = rich.table.Table(box=rich.box.SIMPLE_HEAD)
    for index, column in enumerate(table.columns):
        made.add_column(column, justify="right" if index else "left", overflow="fold")
    for row in table.rows:
        made.add_row(*row)
    return rich.console.Group(rich.text.Text(title, "bold"), made)

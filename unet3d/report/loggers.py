"""Where the numbers of a run go: metrics.jsonl, the terminal and wandb.

A logger that fails is dropped with one line on stderr; the run goes on.
"""

import io
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

import rich.box
import rich.console
import rich.table
import rich.text
from rich.console import Console as Terminal

from unet3d import build
from unet3d.config import Config
from unet3d.errors import is_disk_full, reason
from unet3d.progress import Counter
from unet3d.report.wandb_logger import WandbLogger, wandb_mode
from unet3d.types import Table

Scalar = float | int | str | None


class Logger(Protocol):
    """What a run tells: values of a step, pictures, tables, a closing summary. `step` is optimizer steps done."""

    def scalars(self, values: Mapping[str, Scalar], step: int) -> None: ...
    def image(self, key: str, path: Path, step: int) -> None: ...
    def table(self, key: str, columns: Sequence[str], rows: Sequence[Sequence]) -> None: ...
    def summary(self, values: Mapping[str, object]) -> None: ...
    def close(self, exit_code: int) -> None: ...


class JsonLines:
    """`{"step": int, **values}`, a line a record, appended by one write to the file: a killed run has lost nothing.

    JSON has no NaN and no infinity: they are the strings "nan", "inf" and "-inf", which Python's float() reads.
    Pictures, tables and the summary are files of their own in the run folder and no business of this one. Records that
    a full disk does not take wait, and follow once there is room.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab+", buffering=0)  # unbuffered: what is written is with the operating system
        self._file.seek(-1 if self._file.tell() else 0, os.SEEK_END)
        if self._file.read() not in (b"", b"\n"):  # a run that was cut short within a record
            self._file.write(b"\n")
        self._waiting, self._is_full = b"", False

    def scalars(self, values: Mapping[str, Scalar], step: int) -> None:
        record = {"step": step} | {key: _jsonable(value) for key, value in values.items()}
        self._waiting += json.dumps(record, allow_nan=False).encode() + b"\n"
        try:
            self._write()
        except OSError as error:
            if not is_disk_full(error):
                raise
            if not self._is_full:
                _warn(f"{self._file.name}: {error.strerror}; its records wait in memory until there is room")
            self._is_full = True

    def _write(self) -> None:
        while self._waiting:  # a disk with little room takes a part
            self._waiting = self._waiting[self._file.write(self._waiting) :]
        self._is_full = False

    def image(self, key: str, path: Path, step: int) -> None: ...
    def table(self, key: str, columns: Sequence[str], rows: Sequence[Sequence]) -> None: ...
    def summary(self, values: Mapping[str, object]) -> None: ...

    def close(self, exit_code: int) -> None:
        try:
            self._write()
        finally:
            self._file.close()


def _jsonable(value: Scalar) -> Scalar:
    if value is None or isinstance(value, int | str):
        return value
    number = float(value)  # which numpy's and torch's scalars are not
    return number if math.isfinite(number) else str(number)


class Loggers:
    """Tells every sink. One that raises is dropped with one line on stderr; the others, and the run, go on."""

    def __init__(self, sinks: Iterable[Logger]) -> None:
        self._sinks = list(sinks)

    def add(self, sink: Logger) -> None:
        self._sinks.append(sink)

    def scalars(self, values: Mapping[str, Scalar], step: int) -> None:
        self._tell(lambda sink: sink.scalars(values, step))

    def image(self, key: str, path: Path, step: int) -> None:
        self._tell(lambda sink: sink.image(key, path, step))

    def table(self, key: str, columns: Sequence[str], rows: Sequence[Sequence]) -> None:
        self._tell(lambda sink: sink.table(key, columns, rows))

    def summary(self, values: Mapping[str, object]) -> None:
        self._tell(lambda sink: sink.summary(values))

    def close(self, exit_code: int) -> None:
        self._tell(lambda sink: sink.close(exit_code))

    def _tell(self, tell: Callable[[Logger], None]) -> None:
        for sink in tuple(self._sinks):
            if error := _failure(partial(tell, sink)):
                self._sinks.remove(sink)
                _warn(f"{type(sink).__name__} failed ({reason(error)}); the run goes on without it")
                _failure(partial(sink.close, 1))  # its files; that this fails too is no news


def open_loggers(config: Config, folder: Path) -> Loggers:
    """The sinks of a run in its folder: metrics.jsonl, and wandb unless it is disabled or fails to start."""
    sinks: list[Logger] = [JsonLines(folder / "metrics.jsonl")]
    if wandb_mode(config) != "disabled" and (error := _failure(lambda: sinks.append(WandbLogger(config, folder)))):
        _warn(f"wandb does not start ({reason(error)}); the run goes on without it")
    for make in build.import_all(config)["loggers"]:  # the user's own
        if error := _failure(lambda make=make: sinks.append(make(config, folder))):  # type: ignore[misc]
            _warn(f"{make} does not start ({reason(error)}); the run goes on without it")
    return Loggers(sinks)


def _failure(act: Callable[[], None]) -> Exception | None:
    """What `act` raises. It takes any exception: no sink's trouble, foreseen or not, may end a run."""
    try:
        act()
    except Exception as error:
        return error
    return None


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr, flush=True)


LINES = 20  # about as many plain lines a run


NARROW, WIDE = 80, 132  # characters of a plain file's line


class TerminalLogger:
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


def plain_text(parts: Iterable[str | tuple[str, Table]], width: int) -> str:
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

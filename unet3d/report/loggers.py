"""Where the numbers of a run go: metrics.jsonl, the terminal and wandb."""

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Protocol

from rich.console import Console

from unet3d.base.errors import escaped, is_disk_full, reason
from unet3d.base.progress import Counter, duration
from unet3d.config.schema import Config
from unet3d.report.wandb_logger import WandbLogger, wandb_mode

Scalar = float | int | str | None


class Logger(Protocol):
    """Receives a run's numbers after `step` optimizer steps.

    May also have `image`, `table`, `summary`, `checkpoint` and `close`.
    """

    def scalars(self, values: Mapping[str, Scalar], step: int) -> None: ...


class Loggers:
    """Passes each call on to the loggers that have the method; one that raises is dropped with one line on stderr."""

    def __init__(self, loggers: Iterable[Logger]) -> None:
        self._loggers = list(loggers)

    def add(self, logger: Logger) -> None:
        self._loggers.append(logger)

    def scalars(self, values: Mapping[str, Scalar], step: int) -> None:
        self._call("scalars", values, step)

    def image(self, key: str, path: Path, step: int) -> None:
        self._call("image", key, path, step)

    def table(self, key: str, columns: Sequence[str], rows: Sequence[Sequence]) -> None:
        self._call("table", key, columns, rows)

    def summary(self, values: Mapping[str, object]) -> None:
        self._call("summary", values)

    def checkpoint(self, path: Path) -> None:
        self._call("checkpoint", path)

    @property
    def wants_images(self) -> bool:
        """Whether any of them would record a picture."""
        return any(hasattr(logger, "image") for logger in self._loggers)

    def close(self, exit_code: int) -> None:
        self._call("close", exit_code)

    def _call(self, method: str, *arguments: object) -> None:
        for logger in tuple(self._loggers):
            act = getattr(logger, method, None)
            if act and not _succeeds(f"{_name(logger)} failed", act, *arguments):
                self._loggers.remove(logger)
                with suppress(Exception, SystemExit):  # errors while it closes are ignored
                    logger.close(1)  # type: ignore[attr-defined]


def open_loggers(config: Config, folder: Path) -> Loggers:
    """The loggers of a run in its folder: metrics.jsonl, and wandb unless it is disabled or fails to start."""
    from unet3d import build  # loads torch, which reading a report does not need

    found: list[Logger] = [JsonLines(folder / "metrics.jsonl"), *wandb_loggers(config, folder)]
    if config.tensorboard:
        from unet3d.report.tensorboard_logger import TensorBoardLogger

        _succeeds("TensorBoard does not start", lambda: found.append(TensorBoardLogger(config, folder)))
    for path, make in zip(config.loggers, build.import_all(config)["loggers"], strict=True):  # the user's own
        _succeeds(f"loggers=[{path}] does not start", lambda make=make: found.append(_checked(make(config, folder))))
    return Loggers(found)


def _checked(logger: Logger) -> Logger:
    """Return a logger of the user's own. Raises TypeError where it would get no number."""
    if not callable(getattr(logger, "scalars", None)):
        raise TypeError(f"{type(logger).__name__} has no method scalars(values, step)")
    return logger


def _name(logger: Logger) -> str:
    """Return what a warning calls a logger: one of the user's own by its option."""
    kind = type(logger)
    return (
        kind.__name__ if kind.__module__.startswith("unet3d.") else f"loggers=[{kind.__module__}:{kind.__qualname__}]"
    )


def wandb_loggers(config: Config, folder: Path) -> list[Logger]:
    """wandb's logger; none if wandb is disabled, or fails to start, which is one line on stderr."""
    found: list[Logger] = []
    if wandb_mode(config) != "disabled":
        _succeeds("wandb does not start", lambda: found.append(WandbLogger(config, folder)))
    return found


def _succeeds(failure: str, act: Callable[..., object], *arguments: object) -> bool:
    """Call `act`. It catches every exception: a logger's failure, foreseen or not, is one line and ends no run.

    So is a SystemExit: the run would end with the logger's exit code.
    """
    try:
        act(*arguments)
    except (Exception, SystemExit) as error:
        warn(f"{failure} ({reason(error)}); the run goes on without it")
        return False
    return True


def warn(text: object) -> None:
    """Print one line on stderr, whatever it quotes."""
    print(f"warning: {escaped(text)}", file=sys.stderr, flush=True)


class JsonLines:
    """Appends `{"step": int, **values}` to a file, a line and a write per record: a run that is killed loses nothing.

    JSON has no NaN and no infinity: they are strings that float() reads. Records that do not fit on a full disk wait.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab+", buffering=0)  # unbuffered: the operating system has what is written
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
                warn(f"{self._file.name}: {error.strerror}; its records wait in memory until there is room")
            self._is_full = True

    def _write(self) -> None:
        while self._waiting:  # a disk with little room takes a part
            self._waiting = self._waiting[self._file.write(self._waiting) :]
        self._is_full = False

    def close(self, exit_code: int) -> None:
        try:
            self._write()
        finally:
            self._file.close()


def _jsonable(value: Scalar) -> Scalar:
    if value is None or isinstance(value, int | str):
        return value
    return float(value) if math.isfinite(value) else str(float(value))  # also of numpy and torch


class TerminalLogger:
    """Shows losses in a bar, or in plain lines where there is no terminal; prints the Dice of each validation."""

    def __init__(self, steps: int, terminal: Console | None = None, switches: str = "", grid: str = "") -> None:
        """`switches`: what is on, said beside the seconds of a step. `grid`: what validations score on, said there."""
        self.steps, self.terminal = steps, terminal or Console()
        self.switches = f" ({switches})" if switches else ""
        self.grid = f"  ({grid})" if grid else ""
        self.every = max(1, steps // 20)  # about 20 plain lines per run
        self.started = time.perf_counter()
        self.first: int | None = None  # step of this process, which may have resumed
        self.seconds: list[float] = []  # of each step since the last plain line
        self.validating = 0.0  # seconds so far
        self.dice: list[float] = []
        self.bar = Counter("training", steps, self.terminal, plain_lines=False)

    def scalars(self, values: Mapping[str, Scalar], step: int) -> None:
        if "train/loss" in values:
            loss = f"loss {values['train/loss']:.4f}"
            self.seconds.append(float(values["time/step_s"] or 0))
            self.first = step if self.first is None else self.first
            best = f"  Dice {self.dice[-1]:.3f}, best {max(self.dice):.3f}" if self.dice else ""
            self.bar.reach(step, f"{loss}{best}")
            if not self.bar.has_bar and (step % self.every == 0 or step == 1):
                self._line(step, f"{loss}  {fmean(self.seconds):.2f} s/step{self.switches}{self._left(step)}")
                self.seconds.clear()
        elif "val/dice_mean" in values:
            self.validating += float(values.get("time/val_s") or 0)
            if isinstance(values["val/dice_mean"], float):
                self.dice.append(values["val/dice_mean"])
            dice = {key.removeprefix("val/"): value for key, value in values.items() if key.startswith("val/dice")}
            shown = {name: f"{value:.4f}" if isinstance(value, float) else "n/a" for name, value in dice.items()}
            self._line(step, "  ".join(f"{name} {value}" for name, value in shown.items()) + self.grid)

    def _left(self, step: int) -> str:
        """The time that the other steps will take, as those since the last line did, and validations as all so far."""
        assert self.first is not None
        each, left = fmean(self.seconds) + self.validating / (step - self.first + 1), self.steps - step
        return f"  {duration(each * left)} left" if left else ""

    def _line(self, step: int, text: str) -> None:
        elapsed = time.perf_counter() - self.started
        line = escaped(f"{elapsed:6.0f} s  step {step:>5}/{self.steps}  {text}")
        # classes may be called [a], [/b] or :skull:
        self.terminal.print(line, highlight=False, markup=False, emoji=False, soft_wrap=True)

    def close(self, exit_code: int) -> None:
        self.bar.close()

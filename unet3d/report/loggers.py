"""Loggers of a run's numbers: metrics.jsonl, the terminal, TensorBoard, and others that the config asks for."""

import json
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Protocol

from rich.console import Console

from unet3d.base.errors import escaped, is_disk_full, reason, warn
from unet3d.base.progress import Counter, duration
from unet3d.config import compose
from unet3d.config.schema import Config
from unet3d.report.wandb_logger import WandbLogger, wandb_mode
from unet3d.run.run_folder import last_step, read_records

Scalar = float | int | str | None
PLAIN_LINES = 20  # of a run on the terminal, about
FAILURES = (Exception, SystemExit)  # of a logger; they end no run, nor does the exit code of a logger that exits


class Logger(Protocol):
    """Receives a run's numbers after `step` optimizer steps.

    May also have `image`, `table`, `summary`, `checkpoint` and `close`.
    """

    def scalars(self, values: Mapping[str, Scalar], step: int) -> None: ...


Make = Callable[[Config, Path], Logger]


class Loggers:
    """Passes each call of a `Logger`'s method on to the loggers that have it.

    A logger that raises is dropped with one line on stderr.
    """

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

    def close(self, exit_code: int) -> None:
        self._call("close", exit_code)

    @property
    def wants_images(self) -> bool:
        """Return whether any logger would record a picture."""
        return any(hasattr(logger, "image") for logger in self._loggers)

    def _call(self, method: str, *arguments: object) -> None:
        for logger in tuple(self._loggers):
            act = getattr(logger, method, None)
            try:
                if act is not None:
                    act(*arguments)
            except FAILURES as error:
                kind = type(logger)
                is_own = kind.__module__.startswith("unet3d.")
                name = kind.__name__ if is_own else f"loggers=[{kind.__module__}:{kind.__qualname__}]"
                _warn(f"{name} failed", error)
                self._loggers.remove(logger)
                with suppress(*FAILURES):  # errors while it closes are ignored
                    logger.close(1)  # type: ignore[attr-defined]


def open_loggers(config: Config, folder: Path) -> Loggers:
    """Return the loggers of a run in its folder: metrics.jsonl, and the others of its config that start."""
    from unet3d import build  # loads torch, which reading a report does not need

    loggers = [JsonLines(folder / "metrics.jsonl"), *wandb_loggers(config, folder)]
    if config.tensorboard:
        loggers += _started("TensorBoard", TensorBoardLogger, config, folder)
    for path, make in zip(config.loggers, build.import_all(config)["loggers"], strict=True):
        loggers += _started(f"loggers=[{path}]", make, config, folder)
    return Loggers(loggers)


def wandb_loggers(config: Config, folder: Path) -> list[Logger]:
    """Return wandb's logger; [] if wandb is disabled, or fails to start, which is one line on stderr."""
    return [] if wandb_mode(config) == "disabled" else _started("wandb", WandbLogger, config, folder)


def _started(name: str, make: Make, config: Config, folder: Path) -> list[Logger]:
    """Return a logger; [] with one line on stderr if it does not start, or would get no number."""
    try:
        logger = make(config, folder)
        if not callable(getattr(logger, "scalars", None)):
            raise TypeError(f"{type(logger).__name__} has no method scalars(values, step)")
    except FAILURES as error:
        _warn(f"{name} does not start", error)
        return []
    return [logger]


def _warn(failure: str, error: BaseException) -> None:
    warn(f"{failure} ({reason(error)}); the run goes on without it")


class JsonLines:
    """Appends `{"step": int, **values}` to a file, one line and one write per record: a killed run loses nothing.

    JSON has no NaN and no infinity: they are strings that float() reads. Records that do not fit on a full disk wait.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab+", buffering=0)  # unbuffered: the operating system has what is written
        self._file.seek(-1 if self._file.tell() else 0, os.SEEK_END)
        if self._file.read() not in (b"", b"\n"):  # a run that was cut short within a record
            self._file.write(b"\n")
        self._waiting = b""
        self._is_full = False

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
        while self._waiting:
            written = self._file.write(self._waiting)  # a disk with little room takes a part
            self._waiting = self._waiting[written:]
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
        """`switches` is printed beside the seconds per step, `grid`, on which cases are scored, beside the Dice."""
        self.steps = steps
        self.terminal = terminal or Console()
        self.switches = f" ({switches})" if switches else ""
        self.grid = f"  ({grid})" if grid else ""
        self.every = max(1, steps // PLAIN_LINES)
        self.started = time.perf_counter()
        self.first: int | None = None  # step of this process, which may have resumed
        self.seconds: list[float] = []  # of each step since the last plain line
        self.validating = 0.0  # seconds so far
        self.dice: list[float] = []
        self.bar = Counter("training", steps, self.terminal, plain_lines=False)

    def scalars(self, values: Mapping[str, Scalar], step: int) -> None:
        if "train/loss" in values:
            self._training(values, step)
        elif "val/dice_mean" in values:
            self._validation(values, step)

    def _training(self, values: Mapping[str, Scalar], step: int) -> None:
        if self.first is None:
            self.first = step
        self.seconds.append(float(values["time/step_s"] or 0))
        loss = f"loss {values['train/loss']:.4f}"
        best = f"  Dice {self.dice[-1]:.3f}, best {max(self.dice):.3f}" if self.dice else ""
        self.bar.reach(step, f"{loss}{best}")
        if (step % self.every == 0 or step == 1) and not self.bar.has_bar:
            self._line(step, f"{loss}  {fmean(self.seconds):.2f} s/step{self.switches}{self._left(step)}")
            self.seconds.clear()

    def _validation(self, values: Mapping[str, Scalar], step: int) -> None:
        self.validating += float(values.get("time/val_s") or 0)
        mean = values["val/dice_mean"]
        if isinstance(mean, float):
            self.dice.append(mean)
        scores = []
        for key, value in values.items():
            if key.startswith("val/dice"):
                shown = f"{value:.4f}" if isinstance(value, float) else "n/a"
                scores.append(f"{key.removeprefix('val/')} {shown}")
        self._line(step, "  ".join(scores) + self.grid)

    def _left(self, step: int) -> str:
        """Return the time left, from the steps since the last line and all validations so far; "" after the last."""
        assert self.first is not None
        seconds_per_step = fmean(self.seconds) + self.validating / (step - self.first + 1)
        left = self.steps - step
        return f"  {duration(seconds_per_step * left)} left" if left else ""

    def _line(self, step: int, text: str) -> None:
        elapsed = time.perf_counter() - self.started
        line = escaped(f"{duration(elapsed):>8}  step {step:>5}/{self.steps}  {text}")
        # classes may be called [a], [/b] or :skull:
        self.terminal.print(line, highlight=False, markup=False, emoji=False, soft_wrap=True)

    def close(self, exit_code: int) -> None:
        self.bar.close()


class TensorBoardLogger:
    """Event files under `folder`/tensorboard: scalars, pictures, tables and the config as text.

    A resumed run hides the steps that it repeats.
    """

    def __init__(self, config: Config, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        done = last_step(read_records(folder / "metrics.jsonl")) or 0 if config.resume else None
        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=None if done is None else done + 1)
        if done is None:
            self._writer.add_text("config", f"```yaml\n{compose.to_yaml(config)}```")

    def scalars(self, values: Mapping[str, object], step: int) -> None:
        for name, value in values.items():
            if isinstance(value, int | float):
                self._writer.add_scalar(name, value, step)

    def image(self, key: str, path: Path, step: int) -> None:
        import numpy as np
        from PIL import Image

        with Image.open(path) as picture:
            pixels = np.asarray(picture.convert("RGB"))
        self._writer.add_image(key, pixels, step, dataformats="HWC")

    def table(self, key: str, columns: Sequence[str], rows: Sequence[Sequence]) -> None:
        lines = []
        for row in (columns, ["---" for _ in columns], *rows):
            cells = ["" if cell is None else str(cell) for cell in row]
            lines.append(f"| {' | '.join(cells)} |")
        self._writer.add_text(key, "\n".join(lines))

    def summary(self, values: Mapping[str, object]) -> None:
        self.table("summary", ["key", "value"], list(values.items()))

    def close(self, exit_code: int) -> None:
        self._writer.close()

"""Loggers of a run's numbers: metrics.jsonl, the terminal, and those that the config asks for."""

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from unet3d.base.errors import is_disk_full, reason, warn
from unet3d.config.schema import Config
from unet3d.report.wandb_logger import WandbLogger, wandb_mode

Scalar = float | int | str | None
FAILURES = (Exception, SystemExit)  # of a logger; they end no run, nor does the exit code of a logger that exits


class Logger(Protocol):
    """Receives a run's numbers after `step` optimizer steps.

    May also have `image`, `table`, `summary`, `checkpoint` and `close`.
    """

    def scalars(self, values: Mapping[str, Scalar], step: int) -> None: ...


Make = Callable[[Config, Path], Logger]


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
        """Return whether any logger would record a picture."""
        return any(hasattr(logger, "image") for logger in self._loggers)

    def close(self, exit_code: int) -> None:
        self._call("close", exit_code)

    def _call(self, method: str, *arguments: object) -> None:
        for logger in tuple(self._loggers):
            act = getattr(logger, method, None)
            try:
                if act is not None:
                    act(*arguments)
            except FAILURES as error:
                _warn(f"{_name(logger)} failed", error)
                self._loggers.remove(logger)
                with suppress(*FAILURES):  # errors while it closes are ignored
                    logger.close(1)  # type: ignore[attr-defined]


def open_loggers(config: Config, folder: Path) -> Loggers:
    """Return the loggers of a run in its folder: metrics.jsonl, and the others of its config that start."""
    from unet3d import build  # loads torch, which reading a report does not need

    loggers = Loggers([JsonLines(folder / "metrics.jsonl"), *wandb_loggers(config, folder)])
    makers: list[tuple[str, Make]] = []
    if config.tensorboard:
        from unet3d.report.tensorboard_logger import TensorBoardLogger

        makers.append(("TensorBoard", TensorBoardLogger))
    names = (f"loggers=[{path}]" for path in config.loggers)
    makers += zip(names, build.import_all(config)["loggers"], strict=True)
    for name, make in makers:
        for logger in _started(name, make, config, folder):
            loggers.add(logger)
    return loggers


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


def _name(logger: Logger) -> str:
    """Return what a warning calls a logger: one of the user's own by its option."""
    kind = type(logger)
    if kind.__module__.startswith("unet3d."):
        return kind.__name__
    return f"loggers=[{kind.__module__}:{kind.__qualname__}]"


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
        record: dict[str, Scalar] = {"step": step}
        for key, value in values.items():
            record[key] = _jsonable(value)
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

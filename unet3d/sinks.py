"""Where the numbers of a run go: metrics.jsonl, which is the truth, and wandb, which mirrors it.

Nothing that happens to a sink stops a run: a sink that fails is dropped with one line on stderr.
"""

import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

from unet3d.config import Config
from unet3d.errors import is_disk_full, reason
from unet3d.tracker import Wandb, wandb_mode

Scalar = float | int | str | None


class Sink(Protocol):
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


class Sinks:
    """Tells every sink. One that raises is dropped with one line on stderr; the others, and the run, go on."""

    def __init__(self, sinks: Iterable[Sink]) -> None:
        self._sinks = list(sinks)

    def add(self, sink: Sink) -> None:
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

    def _tell(self, tell: Callable[[Sink], None]) -> None:
        for sink in tuple(self._sinks):
            if error := _failure(partial(tell, sink)):
                self._sinks.remove(sink)
                _warn(f"{type(sink).__name__} failed ({reason(error)}); the run goes on without it")
                _failure(partial(sink.close, 1))  # its files; that this fails too is no news


def open_sinks(config: Config, folder: Path) -> Sinks:
    """The sinks of a run in its folder: metrics.jsonl, and wandb unless it is disabled or fails to start."""
    sinks: list[Sink] = [JsonLines(folder / "metrics.jsonl")]
    if wandb_mode(config) != "disabled" and (error := _failure(lambda: sinks.append(Wandb(config, folder)))):
        _warn(f"wandb does not start ({reason(error)}); the run goes on without it")
    return Sinks(sinks)


def _failure(act: Callable[[], None]) -> Exception | None:
    """What `act` raises. It takes any exception: no sink's trouble, foreseen or not, may end a run."""
    try:
        act()
    except Exception as error:
        return error
    return None


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr, flush=True)

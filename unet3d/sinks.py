"""Where the numbers of a run go: metrics.jsonl, which is the truth, and wandb, which mirrors it.

Nothing that happens to a sink stops a run: a sink that fails is dropped with one line on stderr. The only module that
knows wandb, which is loaded when a run asks for it.
"""

import dataclasses
import json
import math
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from unet3d import privacy
from unet3d.config import Config
from unet3d.errors import is_disk_full

Scalar = float | int | str | None

STEP = "trainer/step"
QUIET = {
    "silent": True,
    "quiet": True,
    "symlink": False,
    "init_timeout": 20,
    "finish_timeout": 120,
    "finish_timeout_raises": True,
}


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


class Wandb:
    """One wandb run under `folder`/wandb, offline unless `config.wandb.mode` or WANDB_MODE, which wins, says online.

    A run asked to be online that cannot be (no key, no network) goes on offline after at most 20 seconds. A resumed run
    folder goes on with its wandb run. Private: nothing is recorded about the machine, its user and their paths.
    """

    def __init__(self, config: Config, folder: Path) -> None:
        self._private = config.wandb.private
        if self._private:
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # wandb would send its tracebacks home
        import wandb

        self._wandb = wandb
        try:
            self._run = self._start(config, folder)
        finally:
            for logs in folder.glob("wandb/*/logs") if self._private else ():
                shutil.rmtree(logs, ignore_errors=True)  # wandb's own, full of paths
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)

    def _start(self, config: Config, folder: Path) -> Any:
        settings = _settings(self._wandb.Settings, self._private)
        earlier = _earlier_id(folder)

        def start(mode: str) -> Any:
            self._wandb.setup(settings)  # before init, which else talks to the console, or asks there for a key
            return self._wandb.init(
                mode=mode,  # wandb lets it win over WANDB_MODE
                project=config.wandb.project,
                dir=str(folder),
                id=earlier,
                resume="allow" if earlier else None,
                config=self._open(dataclasses.asdict(config)),
                settings=settings,
            )

        mode = wandb_mode(config)
        try:
            return start(mode)
        except self._wandb.Error as error:
            if mode != "online":
                raise
            _warn(f"wandb cannot go online ({_reason(error)}); recording offline: upload later with wandb sync")
            self._wandb.teardown()  # it holds on to the id of the run that failed to start
            return start("offline")

    def scalars(self, values: Mapping[str, Scalar], step: int) -> None:
        # an own step: wandb drops silently what comes with a `step=` not above the last, as after a resume
        self._run.log({STEP: step, **self._open(values)})

    def image(self, key: str, path: Path, step: int) -> None:
        self._run.log({STEP: step, key: self._wandb.Image(str(path))})

    def table(self, key: str, columns: Sequence[str], rows: Sequence[Sequence]) -> None:
        cells = [[None if self._private and privacy.is_path(cell) else cell for cell in row] for row in rows]
        table = self._wandb.Table(columns=list(columns), data=cells, allow_mixed_types=True)
        # bound first, a table is a file of the run; else it also becomes an artifact, recorded with the home folder
        table.bind_to_run(self._run, key, self._run.step)
        self._run.log({key: table})

    def summary(self, values: Mapping[str, object]) -> None:
        self._run.summary.update(self._open(values))

    def close(self, exit_code: int) -> None:
        try:
            self._run.finish(exit_code=exit_code)
        finally:
            self._wandb.teardown(exit_code)  # else a wandb-core that died is found out, loudly, at exit

    def _open(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return privacy.without_paths(values) if self._private else dict(values)


def wandb_mode(config: Config) -> str:
    """WANDB_MODE, if it is set, else `wandb.mode`: the environment has the last word, as wandb's users expect."""
    return os.environ.get("WANDB_MODE") or config.wandb.mode


def _settings(kind: Any, private: bool) -> Any:
    """wandb.Settings of what this version of wandb has: before 0.31 some are missing."""
    wanted = QUIET | (privacy.SETTINGS if private else {})
    return kind(**{name: value for name, value in wanted.items() if name in kind.model_fields})


def _earlier_id(folder: Path) -> str | None:
    """The id of the wandb run that this folder already holds: wandb/[offline-]run-<time>-<id>."""
    runs = sorted(folder.glob("wandb/*run-*-*"), key=lambda run: run.name.removeprefix("offline-"))
    return runs[-1].name.rsplit("-", 1)[1] if runs else None


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
                _warn(f"{type(sink).__name__} failed ({_reason(error)}); the run goes on without it")
                _failure(partial(sink.close, 1))  # its files; that this fails too is no news


def open_sinks(config: Config, folder: Path) -> Sinks:
    """The sinks of a run in its folder: metrics.jsonl, and wandb unless it is disabled or fails to start."""
    sinks: list[Sink] = [JsonLines(folder / "metrics.jsonl")]
    if wandb_mode(config) != "disabled" and (error := _failure(lambda: sinks.append(Wandb(config, folder)))):
        _warn(f"wandb does not start ({_reason(error)}); the run goes on without it")
    return Sinks(sinks)


def _failure(act: Callable[[], None]) -> Exception | None:
    """What `act` raises. The one place that takes any exception: no sink's trouble, foreseen or not, may end a run."""
    try:
        act()
    except Exception as error:
        return error
    return None


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr, flush=True)

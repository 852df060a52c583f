"""Loggers of a run's numbers: metrics.jsonl, the terminal, TensorBoard, and others that the config asks for."""

import dataclasses
import json
import logging
import math
import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol

from rich.console import Console

from unet3d.base import process
from unet3d.base.errors import escaped, is_disk_full, reason, warn
from unet3d.base.progress import Counter, duration
from unet3d.config import compose
from unet3d.config.schema import FACTS, Config, Wandb, options_with
from unet3d.run.run_folder import last_step, read_records

Scalar = float | int | str | None
STEP = "trainer/step"
DATA_DIR = "WANDB_DATA_DIR"  # wandb keeps copies of files to upload there.
NOT_FINITE = ("nan", "inf", "-inf")
SWEEP_FILE = "multirun.yaml"  # Hydra writes it into the folder of a sweep
QUIET: dict[str, Any] = {  # wandb.Settings of every run
    "silent": True,
    "quiet": True,
    "symlink": False,
    "finish_timeout_raises": True,
    "init_timeout": 20,  # seconds; a scheduler that ends a job gives it two minutes
    "finish_timeout": 60,  # seconds
    "x_transaction_log_flush_interval": 1.0,  # seconds; what was logged later is not in the file of a killed run
}
PRIVATE = {  # wandb.Settings of a private run
    "host": "",  # None would be replaced by the machine's name
    "console": "off",
    "save_code": False,
    "x_save_requirements": False,
    "disable_git": True,
    "disable_code": True,
    "disable_job_creation": True,
    "x_disable_meta": True,
    "x_disable_machine_info": True,
    "x_disable_stats": True,
}
PLAIN_LINES = 20  # Lines of a run on the terminal, about.
FAILURES = (Exception, SystemExit)  # No failure of a logger ends a run; one that exits does not set the exit code.


class Logger(Protocol):
    """Receives a run's numbers after `step` optimizer steps.

    May also have `image`, `table`, `summary`, `checkpoint` and `close`.
    """

    def scalars(self, values: Mapping[str, Scalar], step: int) -> None: ...


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


def _started(name: str, make: Callable[[Config, Path], Logger], config: Config, folder: Path) -> list[Logger]:
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

    def scalars(self, values: Mapping[str, Scalar], step: int) -> None:
        record = {"step": step} | {key: _jsonable(value) for key, value in values.items()}
        was_full = bool(self._waiting)
        self._waiting += json.dumps(record, allow_nan=False).encode() + b"\n"
        try:
            self._write()
        except OSError as error:
            if not is_disk_full(error):
                raise
            if not was_full:
                warn(f"{self._file.name}: {error.strerror}; its records wait in memory until there is room")

    def _write(self) -> None:
        while self._waiting:
            written = self._file.write(self._waiting)  # a disk with little room takes a part
            self._waiting = self._waiting[written:]

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
        """`switches` is printed next to the seconds per step, `grid`, on which cases are scored, next to the Dice."""
        self.steps = steps
        self.terminal = terminal or Console()
        self.switches = f" ({switches})" if switches else ""
        self.grid = f"  ({grid})" if grid else ""
        self.every = max(1, steps // PLAIN_LINES)
        self.started = time.perf_counter()
        self.first = 0  # step of this process, which may have resumed
        self.seconds: list[float] = []  # Seconds of each step since the last plain line.
        self.validating = 0.0  # seconds so far
        self.dice: list[float] = []
        self.bar = Counter("training", steps, self.terminal, plain_lines=False)

    def scalars(self, values: Mapping[str, Scalar], step: int) -> None:
        if "train/loss" in values:
            self._training(values, step)
        elif "val/dice_mean" in values:
            self._validation(values, step)

    def _training(self, values: Mapping[str, Scalar], step: int) -> None:
        self.first = self.first or step
        self.seconds.append(float(values["time/step_s"] or 0))
        loss = f"loss {values['train/loss']:.4f}"
        best = f"  Dice {self.dice[-1]:.3f}, best {max(self.dice):.3f}" if self.dice else ""
        self.bar.reach(step, f"{loss}{best}")
        if (step % self.every == 0 or step == 1) and not self.bar.has_bar:
            mean = fmean(self.seconds)  # Mean since the last line; of validations, over all so far.
            left = (self.steps - step) * (mean + self.validating / (step - self.first + 1))
            remaining = f"  {duration(left)} left" if step < self.steps else ""
            self._line(step, f"{loss}  {mean:.2f} s/step{self.switches}{remaining}")
            self.seconds.clear()

    def _validation(self, values: Mapping[str, Scalar], step: int) -> None:
        self.validating += float(values.get("time/val_s") or 0)
        mean = values["val/dice_mean"]
        if isinstance(mean, float):
            self.dice.append(mean)
        dice = {key.removeprefix("val/"): value for key, value in values.items() if key.startswith("val/dice")}
        scores = [f"{key} {value:.4f}" if isinstance(value, float) else f"{key} n/a" for key, value in dice.items()]
        self._line(step, "  ".join(scores) + self.grid)

    def _line(self, step: int, text: str) -> None:
        elapsed = time.perf_counter() - self.started
        line = escaped(f"{duration(elapsed):>8}  step {step:>5}/{self.steps}  {text}")
        # Classes may be called [a], [/b] or :skull:.
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


class WandbLogger:
    """One wandb run under `folder`/wandb, offline unless `config.wandb.mode`, or WANDB_MODE instead, says online.

    A run that cannot go online (no key, no network) records offline after at most 20 seconds. Private: nothing is
    recorded about the machine, its user and their paths.

    A resumed run that was online and is online again continues its wandb run. Any other resumed part has an id of its
    own, since a file that is uploaded under an id replaces what is there; it begins with the records so far.
    """

    def __init__(self, config: Config, folder: Path) -> None:
        self._private = config.wandb.private
        self._folder = folder
        self._allowed: Callable[[Mapping[str, Any]], dict[str, Any]] = without_paths if self._private else dict
        self._wandb = _load(self._private)
        logging.raiseExceptions = False  # wandb's log is on the run's disk: where that is full it would print traces
        mode = wandb_mode(config)
        earlier = _last_online_id(folder) if config.resume is not None and mode == "online" else None
        try:
            self._run = self._start(mode, config, earlier)
        finally:
            if self._private:
                for logs in folder.glob("wandb/*/logs"):
                    shutil.rmtree(logs, ignore_errors=True)  # wandb's own, full of paths
        self._run.define_metric(STEP, summary="none")
        self._run.define_metric("*", step_metric=STEP, summary="none")  # the summary holds what `summary` gets
        if config.resume is not None and self._run.id != earlier:
            for record in read_records(folder / "metrics.jsonl"):
                # JSON's text of a number that is not finite is that number again
                numbers = {key: float(text) if text in NOT_FINITE else text for key, text in record.items()}
                self.scalars(numbers, int(numbers.pop("step")))

    def _start(self, mode: str, config: Config, earlier: str | None) -> Any:
        """Return the wandb run, which continues the `earlier` one; offline if online fails."""
        wanted = QUIET | PRIVATE if self._private else QUIET
        known = self._wandb.Settings.model_fields  # older versions of wandb have fewer
        settings = self._wandb.Settings(**{name: value for name, value in wanted.items() if name in known})
        try:
            self._wandb.setup(settings)  # before init, which else prints, or asks for a key
            return self._wandb.init(
                mode=mode,  # In wandb it wins over WANDB_MODE.
                dir=str(self._folder),
                **identity(config.wandb, self._folder),
                id=earlier,
                resume="allow" if earlier else None,
                config=self._allowed(dataclasses.asdict(config)),
                settings=settings,
            )
        except self._wandb.Error as error:
            if mode != "online":
                raise
            warn(f"wandb cannot go online ({reason(error)}); recording offline: upload later with wandb sync")
            self._wandb.teardown()  # it keeps the id of the run that failed to start
            return self._start("offline", config, None)

    def scalars(self, values: Mapping[str, object], step: int) -> None:
        # The step is a value, too: wandb drops values with a `step=` not above the last one, as after a resume.
        self._run.log({STEP: step, **self._allowed(values)})

    def image(self, key: str, path: Path, step: int) -> None:
        self._run.log({STEP: step, key: self._wandb.Image(str(path))})

    def table(self, key: str, columns: Sequence[str], rows: Sequence[Sequence]) -> None:
        cells = [[None if self._private and is_path(cell) else cell for cell in row] for row in rows]
        table = self._wandb.Table(columns=list(columns), data=cells, allow_mixed_types=True)
        # Bound first, a table is a file of the run; else it also becomes an artifact, recorded with the home folder.
        table.bind_to_run(self._run, key, self._run.step)
        self._run.log({key: table})

    def summary(self, values: Mapping[str, object]) -> None:
        self._run.summary.update(self._allowed(values))

    def checkpoint(self, path: Path) -> None:
        """Record a checkpoint as an artifact, as the path of a copy in the run folder, also in a private run."""
        artifact = self._wandb.Artifact(f"run-{self._run.id}-best", type="model")
        place = os.environ.get(DATA_DIR)
        os.environ[DATA_DIR] = place or str(self._folder / "wandb")  # By default copies gather in the home folder.
        try:
            artifact.add_file(str(path), name=path.name)
            self._run.log_artifact(artifact)
        finally:
            if place is None:
                os.environ.pop(DATA_DIR)
            else:
                os.environ[DATA_DIR] = place

    def close(self, exit_code: int) -> None:
        try:
            self._run.finish(exit_code=exit_code)
        finally:
            self._wandb.teardown(exit_code)  # A wandb-core that died would print at exit.


def _load(is_private: bool) -> Any:
    """Return wandb."""
    if is_private:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # By default wandb sends its tracebacks home.
    with process.loading("wandb"):
        import wandb

    return wandb


def preload(config: Config) -> None:
    """Load wandb and what `wandb.init` loads, if a run of this config records to it.

    Call it before torch loads: for each class of its API, wandb looks through all modules that are loaded. After torch
    and its compiler, that takes half a second of CPU time more.
    """
    if wandb_mode(config) == "disabled":
        return
    # `WandbLogger` meets an error again, and then it is shown
    with suppress(Exception), process.loading("wandb.apis.public"):
        _load(config.wandb.private)
        import wandb.apis.public  # noqa: F401


def _last_online_id(folder: Path) -> str | None:
    """Return the id of the last wandb run in a folder, of wandb/run-<time>-<id>; None without one, or if offline."""
    names = [path.name for path in folder.glob("wandb/*run-*-*")]
    last = max(names, key=lambda name: name.removeprefix("offline-"), default="offline-")
    return None if last.startswith("offline-") else last.rpartition("-")[2]


def identity(options: Wandb, folder: Path) -> dict[str, Any]:
    """Return the names of a run, as `wandb.init` takes them; None leaves one to wandb's environment variables.

    By default its name is the run folder's, and its group the folder of the sweep that it belongs to.
    """
    folder = folder.resolve()
    sweep = folder.parent.name if (folder.parent / SWEEP_FILE).is_file() else None  # The sweep whose job it is.
    name = f"{sweep}-{folder.name}" if sweep else folder.name
    group = name if (folder / SWEEP_FILE).is_file() else sweep  # the comparison at a sweep's end is of its group
    project = os.environ.get("WANDB_PROJECT") if options.project == Wandb().project else None
    if os.environ.get("WANDB_RUN_GROUP"):
        group = None
    return {
        "project": project or options.project,
        "entity": options.entity,
        "name": options.name or (None if os.environ.get("WANDB_NAME") else name[-FACTS["wandb.name"]["letters"] :]),
        "group": options.group or (group and group[-FACTS["wandb.group"]["letters"] :]),
        "job_type": options.job_type,
        "tags": options.tags or None,
        "notes": options.notes,
    }


def wandb_mode(config: Config) -> str:
    """Return WANDB_MODE if it is set, else `wandb.mode`: wandb's users expect that the environment wins."""
    return os.environ.get("WANDB_MODE") or config.wandb.mode


def without_paths(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return `values` without the options that are paths and without values that look like one, at any depth."""
    allowed: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            allowed[name] = without_paths(value, f"{prefix}{name}.")
        elif f"{prefix}{name}" not in options_with("private") and not is_path(value):
            allowed[name] = value
    return allowed


def is_path(value: object) -> bool:
    """Return whether a value is, or looks like, a path, or is a list with one."""
    if isinstance(value, list | tuple):
        return any(map(is_path, value))
    return isinstance(value, os.PathLike) or (isinstance(value, str) and ("/" in value or "\\" in value))

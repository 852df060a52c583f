"""A run in wandb. The only module that imports wandb, and only when a run asks for it."""

import dataclasses
import logging
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from unet3d.base import process
from unet3d.base.errors import reason
from unet3d.config.schema import FACTS, Config, Wandb, options_with
from unet3d.run.run_folder import read_records

STEP = "trainer/step"
DATA_DIR = "WANDB_DATA_DIR"  # where wandb keeps copies of what it is to upload
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
        earlier = _last_online_id(folder) if config.resume is not None else None
        try:
            self._run = self._start(wandb_mode(config), config, folder, earlier)
        finally:
            if self._private:
                for logs in folder.glob("wandb/*/logs"):
                    shutil.rmtree(logs, ignore_errors=True)  # wandb's own, full of paths
        self._run.define_metric(STEP, summary="none")
        self._run.define_metric("*", step_metric=STEP, summary="none")  # the summary holds what `summary` gets
        if config.resume is not None and (earlier is None or self._run.id != earlier):
            for record in read_records(folder / "metrics.jsonl"):
                # JSON's text of a number that is not finite is that number again
                numbers = {key: float(text) if text in NOT_FINITE else text for key, text in record.items()}
                self.scalars(numbers, int(numbers.pop("step")))

    def _start(self, mode: str, config: Config, folder: Path, earlier: str | None) -> Any:
        """Return the wandb run, which continues the `earlier` one if it is online; offline if online fails."""
        if mode != "online":
            earlier = None
        known = self._wandb.Settings.model_fields  # older versions of wandb have fewer
        wanted = QUIET | PRIVATE if self._private else QUIET
        settings = self._wandb.Settings(**{name: value for name, value in wanted.items() if name in known})
        try:
            self._wandb.setup(settings)  # before init, which else prints, or asks for a key
            return self._wandb.init(
                mode=mode,  # for wandb it wins over WANDB_MODE
                dir=str(folder),
                **identity(config.wandb, folder),
                id=earlier,
                resume="allow" if earlier else None,
                config=self._allowed(dataclasses.asdict(config)),
                settings=settings,
            )
        except self._wandb.Error as error:
            if mode != "online":
                raise
            problem = f"wandb cannot go online ({reason(error)})"
            remedy = "recording offline: upload later with wandb sync"
            print(f"warning: {problem}; {remedy}", file=sys.stderr, flush=True)
            self._wandb.teardown()  # it keeps the id of the run that failed to start
            return self._start("offline", config, folder, earlier)

    def scalars(self, values: Mapping[str, object], step: int) -> None:
        # a step of our own: wandb drops values with a `step=` not above the last one, as after a resume
        self._run.log({STEP: step, **self._allowed(values)})

    def image(self, key: str, path: Path, step: int) -> None:
        self._run.log({STEP: step, key: self._wandb.Image(str(path))})

    def table(self, key: str, columns: Sequence[str], rows: Sequence[Sequence]) -> None:
        cells = [[None if self._private and is_path(cell) else cell for cell in row] for row in rows]
        table = self._wandb.Table(columns=list(columns), data=cells, allow_mixed_types=True)
        # bound first, a table is a file of the run; else it also becomes an artifact, recorded with the home folder
        table.bind_to_run(self._run, key, self._run.step)
        self._run.log({key: table})

    def summary(self, values: Mapping[str, object]) -> None:
        self._run.summary.update(self._allowed(values))

    def checkpoint(self, path: Path) -> None:
        """Record a checkpoint as an artifact, as the path of a copy in the run folder, also in a private run."""
        artifact = self._wandb.Artifact(f"run-{self._run.id}-best", type="model")
        place = os.environ.get(DATA_DIR)
        os.environ[DATA_DIR] = place or str(self._folder / "wandb")  # else copies gather in the home folder
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
            self._wandb.teardown(exit_code)  # else a wandb-core that died prints at exit


def _load(is_private: bool) -> Any:
    """Return wandb."""
    if is_private:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # else wandb sends its tracebacks home
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
    with suppress(Exception):  # `WandbLogger` meets the error again, and then it is shown
        _load(config.wandb.private)
        with process.loading("wandb.apis.public"):
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
    name: str | None = folder.name
    group = None
    if (folder.parent / SWEEP_FILE).is_file():  # a job of a sweep
        name = f"{folder.parent.name}-{folder.name}"
        group = folder.parent.name
    if (folder / SWEEP_FILE).is_file():  # the comparison at a sweep's end
        group = name
    if os.environ.get("WANDB_NAME"):
        name = None
    if os.environ.get("WANDB_RUN_GROUP"):
        group = None
    project = os.environ.get("WANDB_PROJECT") if options.project == Wandb().project else None
    return {
        "project": project or options.project,
        "entity": options.entity,
        "name": options.name or (name and name[-FACTS["wandb.name"]["letters"] :]),
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

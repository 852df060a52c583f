"""A run as wandb records it. The only module that imports wandb, and only when a run asks for it."""

import dataclasses
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from unet3d.config import Config
from unet3d.errors import reason

STEP = "trainer/step"


QUIET = {
    "silent": True,
    "quiet": True,
    "symlink": False,
    "init_timeout": 20,
    "finish_timeout": 60,  # a scheduler that asked for the end gives two minutes, say
    "finish_timeout_raises": True,
}


class WandbLogger:
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
        earlier = _earlier_id(folder) if config.resume is not None else None

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
            told = f"wandb cannot go online ({reason(error)}); recording offline: upload later with wandb sync"
            print(f"warning: {told}", file=sys.stderr, flush=True)
            self._wandb.teardown()  # it holds on to the id of the run that failed to start
            return start("offline")

    def scalars(self, values: Mapping[str, object], step: int) -> None:
        # an own step: wandb drops silently what comes with a `step=` not above the last, as after a resume
        self._run.log({STEP: step, **self._open(values)})

    def image(self, key: str, path: Path, step: int) -> None:
        self._run.log({STEP: step, key: self._wandb.Image(str(path))})

    def table(self, key: str, columns: Sequence[str], rows: Sequence[Sequence]) -> None:
        cells = [[None if self._private and is_path(cell) else cell for cell in row] for row in rows]
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
        return without_paths(values) if self._private else dict(values)


def wandb_mode(config: Config) -> str:
    """WANDB_MODE, if it is set, else `wandb.mode`: the environment has the last word, as wandb's users expect."""
    return os.environ.get("WANDB_MODE") or config.wandb.mode


def _settings(kind: Any, private: bool) -> Any:
    """wandb.Settings of what this version of wandb has: before 0.31 some are missing."""
    wanted = QUIET | (SETTINGS if private else {})
    return kind(**{name: value for name, value in wanted.items() if name in kind.model_fields})


def _earlier_id(folder: Path) -> str | None:
    """The id of the wandb run that this folder already holds: wandb/[offline-]run-<time>-<id>."""
    runs = sorted(folder.glob("wandb/*run-*-*"), key=lambda run: run.name.removeprefix("offline-"))
    return runs[-1].name.rsplit("-", 1)[1] if runs else None


PATHS = frozenset({"data.root", "data.images", "data.labels", "data.split", "resume"})


SETTINGS = {  # wandb.Settings
    "host": "",  # None would be filled in
    "console": "off",
    "disable_git": True,
    "disable_code": True,
    "disable_job_creation": True,
    "save_code": False,
    "x_disable_meta": True,
    "x_disable_machine_info": True,
    "x_disable_stats": True,
    "x_save_requirements": False,
}


def without_paths(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`values` without the options that are paths and without whatever looks like one, at any depth."""
    kept: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            kept[name] = without_paths(value, f"{prefix}{name}.")
        elif f"{prefix}{name}" not in PATHS and not is_path(value):
            kept[name] = value
    return kept


def is_path(value: object) -> bool:
    """Whether a value is, or looks like, a path, or is a list with one."""
    if isinstance(value, list | tuple):
        return any(is_path(item) for item in value)
    return isinstance(value, os.PathLike) or (isinstance(value, str) and ("/" in value or "\\" in value))

"""Hydra's own application, for flags that show something, and its launchers, for the jobs of a sweep."""

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import NamedTuple

import hydra
from hydra._internal.callbacks import Callbacks
from hydra._internal.utils import get_args_parser  # the only place that knows which flags take a value
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, OmegaConf, open_dict

from unet3d.config import compose
from unet3d.config.compose import Composed, Job
from unet3d.config.words import as_written


def flag_parser() -> argparse.ArgumentParser:
    """Return the parser of Hydra's flags."""
    return get_args_parser()


def show(words: Sequence[str]) -> None:
    """Print what flags such as --cfg ask for, as any program of Hydra's does."""
    sys.argv[1:] = [as_written(word) for word in words]  # where Hydra looks for them; the process ends with this
    decorate = hydra.main(str(compose.config_folder()), compose.CONFIG_NAME, compose.VERSION_BASE)
    decorate(_run_nothing)()


def _run_nothing(_: DictConfig) -> None:
    raise AssertionError("a flag that only shows something runs no job")


def searchpath_overrides(overrides: Iterable[str]) -> list[str]:
    """Return the overrides that add folders of YAML files, without which others may not compose."""
    return [word for word in overrides if word.startswith("hydra.searchpath=")]


class CurrentJob(NamedTuple):
    """The job of a sweep whose task runs now."""

    number: int
    folder: Path
    overrides: list[str]
    searchpath_overrides: list[str]  # its overrides that add folders of YAML files


def current_job() -> CurrentJob:
    """Return the job whose task calls this, as its launcher has set it."""
    asked = HydraConfig.get()
    folder = Path(asked.runtime.output_dir)
    return CurrentJob(asked.job.num, folder, list(asked.overrides.task), searchpath_overrides(asked.overrides.hydra))


def options_of_job(tree: DictConfig) -> DictConfig:
    """Return the options of a job of a sweep, with those of its plan, from the tree of its task. Raises UserError."""
    whole = tree.copy()
    with open_dict(whole):
        whole.hydra = HydraConfig.get()
    composed = Composed(list(HydraConfig.get().overrides.task), whole)
    compose.apply_plan(composed)
    return composed.options


def launch(
    jobs: Sequence[Job],
    folder_override: str,
    command_line: Sequence[str],
    task: Callable[[DictConfig], None],
) -> None:
    """Let Hydra's launcher call the task for each job, here or on a cluster; return once all have ended.

    `folder_override` names the sweep's folder, which would else depend on the time in each process. `command_line`:
    the overrides of the sweep, for multirun.yaml.
    """
    tree = deepcopy(jobs[0].composed.tree)  # with the launcher and its options
    with open_dict(tree):
        tree.hydra.mode = RunMode.MULTIRUN
        tree.hydra.overrides.hydra.append(folder_override)
        tree.hydra.overrides.task = [word for word in command_line if not word.startswith("hydra")]
    folder = jobs[0].sweep_folder
    folder.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(tree, folder / "multirun.yaml")
    overrides = [job.overrides for job in jobs]
    size = tree.hydra.sweeper.get("max_batch_size") or len(jobs)
    with compose.hydra_initialized():
        callbacks = Callbacks(tree)
        context = HydraContext(GlobalHydra.instance().config_loader(), callbacks)
        callbacks.on_multirun_start(config=tree, config_name=compose.CONFIG_NAME)
        launcher = Plugins.instance().instantiate_launcher(context, task, tree)
        for first in range(0, len(jobs), size):
            for end in launcher.launch(overrides[first : first + size], initial_job_idx=first):
                _ = end.return_value  # raises the error of a job
        callbacks.on_multirun_end(config=tree, config_name=compose.CONFIG_NAME)

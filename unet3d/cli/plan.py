"""Plan what a command line of `train` asks for: one run, or the jobs of a sweep. Each is composed and checked once."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from unet3d.base import ranks
from unet3d.base.errors import UserError, is_disk_full, make_room
from unet3d.base.files import read_yaml, refuse_links_out
from unet3d.cli import hydra_app, lifecycle, sweep
from unet3d.cli.arguments import Arguments, parse
from unet3d.config import compose
from unet3d.config.compose import Composed, Job
from unet3d.config.resume_rules import resumed
from unet3d.config.schema import Config
from unet3d.config.words import refuse_misread

FIRST_FILES = 2**16  # bytes, generously, of those that a run writes before it trains
# Hydra's own options that count. Others are for what its application does around a job, which a run does by itself.
HYDRA_OPTIONS = (
    "hydra.run.",
    "hydra.sweep.",
    "hydra.searchpath=",
    "hydra.mode=",
    "hydra.launcher.",
    "hydra/launcher=",
    "hydra.sweeper.",
)


@dataclass(frozen=True)
class PlannedRun:
    """A checked config and the folder that it will run in."""

    config: Config
    folder: Path
    overrides: list[str]  # the options that its command line sets, and where their YAML files are


def plan(words: Sequence[str]) -> PlannedRun | Sequence[Job]:
    """Return the run that a command line asks for, or the jobs of its sweep. Raises UserError before any begins."""
    return plan_arguments(parse(words))


def plan_arguments(arguments: Arguments) -> PlannedRun | Sequence[Job]:
    """Return the run, or the jobs of a sweep. Raises UserError before any folder is made."""
    overrides = arguments.overrides
    if not arguments.is_sweep:
        composed = compose.compose_tree(overrides)
        added = compose.added_sweep(overrides, [composed])
        if not added:
            run = plan_run(composed)
            refuse_unwritable(run.folder, "hydra.run.dir")
            return run
        overrides = [*overrides, *added]
    if ranks.SIZE > 1:
        raise UserError("torchrun starts one run, a sweep several; leave out one of them")
    jobs = sweep.plan(overrides)
    refuse_unwritable(jobs[0].sweep_folder, "hydra.sweep.dir")
    return jobs


def plan_run(composed: Composed) -> PlannedRun:
    """Return the run of a command line. Raises UserError before anything is touched."""
    overrides = [*hydra_app.searchpath_overrides(composed.overrides), *composed.task_overrides]
    for word in composed.overrides:
        if word.startswith("hydra") and not word.startswith(HYDRA_OPTIONS):
            lifecycle.print_error(f"warning: {word}: does nothing for a run, which is not Hydra's to start")
    options = composed.options
    resume = options.get("resume")
    if resume == "auto":
        place = folder_to_go_on_in(composed.overrides)
        resume = str(place) if lifecycle.checkpoints(place) else None
    if resume is None:
        options.resume = None
        return PlannedRun(compose.load(options), composed.run_folder, overrides)
    folder = Path(resume)
    if not lifecycle.checkpoints(folder):
        raise UserError(f"resume={folder}: no run with a checkpoint there; give a run folder, outputs/DATE/TIME-ID")
    config = resumed_config(folder, composed)
    if config.dry_run:
        raise UserError("resume goes on with a run, dry_run only predicts; remove one of them")
    return PlannedRun(config, folder.resolve(), overrides)


def folder_to_go_on_in(overrides: Sequence[str]) -> Path:
    """Return the folder that a command line with `resume=auto` names. Raises UserError where it names none."""
    named = [str(word.value()) for word in compose.parsed(overrides) if word.key_or_group == "hydra.run.dir"]
    if not named or "${" in named[-1]:
        raise UserError("resume=auto: goes on in a folder, or begins there; name it: hydra.run.dir=runs/a")
    return Path(named[-1])


def resumed_config(folder: Path, composed: Composed) -> Config:
    """Return the config of the run in `folder` with what the command line sets. Raises UserError."""
    refuse_links_out(folder)
    path = folder / "config.yaml"
    values = read_yaml(path)
    if not isinstance(values, dict):
        raise UserError(f"{path}: holds no options: it is missing, or damaged")
    refuse_misread(path, values, read_yaml(path, as_written=True))
    return resumed(values, str(folder), composed)


def refuse_unwritable(folder: Path, option: str) -> None:
    """Raise UserError, which names the option of the folder, where it cannot be made."""
    path = folder.absolute()
    place = next(part for part in (path, *path.parents) if part.exists())
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(bytes(FIRST_FILES))
    except OSError as error:
        remedy = make_room(error) if is_disk_full(error) else f"give {option}=FOLDER"
        here = Path.cwd()
        shown = path.relative_to(here) if path.is_relative_to(here) else path
        raise UserError(f"{shown}: {place} cannot be written to ({error.strerror}); {remedy}") from error

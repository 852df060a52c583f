"""Plan what a command line of `train` asks for: a run, or the jobs of a sweep. Each is composed and checked once."""

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import hydra
from hydra._internal.utils import get_args_parser  # the only place that knows which flags take a value
from omegaconf import DictConfig

from unet3d.base import ranks
from unet3d.base.errors import UserError, is_disk_full, make_room
from unet3d.base.files import read_yaml_as_written, refuse_links_out
from unet3d.cli import lifecycle, sweep
from unet3d.config import compose
from unet3d.config.compose import Composed, resumed
from unet3d.config.hydra_errors import not_a_flag
from unet3d.config.schema import Config
from unet3d.config.words import as_written, refuse_misread

FOLDERS = ("hydra.run.dir", "hydra.sweep.dir", "resume")  # options that would else mean the current folder
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
class Arguments:
    """A command line: its overrides, and what its flags ask for."""

    overrides: list[str]  # the words without flags; --config-dir is an override, too
    is_sweep: bool = False  # -m
    only_shows: bool = False  # a flag of Hydra's that shows something and runs nothing: --cfg, --info, --hydra-help
    is_checked: bool = True  # whether its overrides make a config: not those of --hydra-help and --shell-completion


def parse(words: Sequence[str]) -> Arguments:
    """Return what the words of a command line ask for, before anything is composed. Raises UserError."""
    parser = get_args_parser()
    parser.error = _refuse_flag  # type: ignore[method-assign]
    flags, unknown = parser.parse_known_intermixed_args(list(words))
    if unknown:
        raise not_a_flag(unknown[0], words)
    if flags.shell_completion or flags.hydra_help:
        return Arguments(flags.overrides, only_shows=True, is_checked=False)
    for override in flags.overrides:
        _refuse_override(override)
    for name in ("config_name", "config_path", "experimental_rerun"):
        if getattr(flags, name):
            flag = f"--{name.replace('_', '-')}"
            raise UserError(f"{flag}: a run has the package's own config.yaml; choose files by experiment=NAME")
    overrides = list(flags.overrides)
    if flags.config_dir:
        overrides.insert(0, compose.search_path(flags.config_dir))
    is_sweep = flags.multirun or "hydra.mode=MULTIRUN" in overrides
    return Arguments(overrides, is_sweep, only_shows=bool(flags.cfg or flags.info))


def _refuse_flag(message: str) -> NoReturn:
    """Raise UserError in place of argparse's error, which prints every flag of Hydra."""
    raise UserError(f"{message}; options are written without dashes: batch=4")


def _refuse_override(override: str) -> None:
    """Raise UserError for an override that Hydra takes and a run does not."""
    name, _, value = override.partition("=")
    if "${" in override and not override.lstrip("+~").startswith("hydra."):  # resuming would replace it once more
        raise UserError(f"{override}: a run keeps what it was given; let the shell replace it: data.root=$PLACE/a")
    if name in FOLDERS and not value.strip("'\" "):
        raise UserError(f"{override}: is empty; give {name}=FOLDER, or leave it out")
    if override.startswith("~") and (compose.config_folder() / name[1:]).is_dir():
        raise UserError(f"{override}: cannot be removed; leave it out, or choose another")


def show(words: Sequence[str]) -> None:
    """Print what flags such as --cfg ask for, as any program of Hydra's does."""
    sys.argv[1:] = [as_written(word) for word in words]  # where Hydra looks for them; the process ends with this
    decorate = hydra.main(str(compose.config_folder()), compose.CONFIG_NAME, compose.VERSION_BASE)
    decorate(_run_nothing)()


def _run_nothing(_: DictConfig) -> None:
    raise AssertionError("a flag that only shows something runs no job")


def plan(arguments: Arguments) -> list[sweep.Job]:
    """Return the run that a command line asks for, or the jobs of its sweep. Raises UserError before any begins."""
    overrides = arguments.overrides
    if not arguments.is_sweep:
        composed = compose.compose_tree(overrides)
        added = compose.added_sweep(overrides, [composed])
        if not added:
            run = _planned(composed)
            refuse_unwritable(run.folder, "hydra.run.dir")
            return [run]
        overrides = [*overrides, *added]
    if ranks.SIZE > 1:
        raise UserError("torchrun starts one run, a sweep several; leave out one of them")
    jobs = sweep.plan(overrides)
    refuse_unwritable(jobs[0].composed.sweep_folder, "hydra.sweep.dir")
    return jobs


def _planned(composed: Composed) -> sweep.Job:
    """Return the run of a command line. Raises UserError before anything is touched."""
    for word in composed.overrides:
        if word.startswith("hydra") and not word.startswith(HYDRA_OPTIONS):
            lifecycle.print_error(f"warning: {word}: does nothing for a run, which is not Hydra's to start")
    options = composed.options
    resume = options.get("resume")
    if resume == "auto":
        place = _folder_to_go_on_in(composed.overrides)
        resume = str(place) if lifecycle.checkpoints(place) else None
    if resume is None:
        options.resume = None
        return sweep.Job(composed, compose.load(options), composed.run_folder)
    folder = Path(resume)
    if not lifecycle.checkpoints(folder):
        raise UserError(f"resume={folder}: no run with a checkpoint there; give a run folder, outputs/DATE/TIME-ID")
    config = resumed_config(folder, composed)
    if config.dry_run:
        raise UserError("resume goes on with a run, dry_run only predicts; remove one of them")
    return sweep.Job(composed, config, folder.resolve())


def _folder_to_go_on_in(overrides: Sequence[str]) -> Path:
    """Return the folder that a command line with `resume=auto` names. Raises UserError where it names none."""
    named = [str(word.value()) for word in compose.parsed(overrides) if word.key_or_group == "hydra.run.dir"]
    if not named or "${" in named[-1]:
        raise UserError("resume=auto: goes on in a folder, or begins there; name it: hydra.run.dir=runs/a")
    return Path(named[-1])


def resumed_config(folder: Path, composed: Composed) -> Config:
    """Return the config of the run in `folder` with what the command line sets. Raises UserError."""
    refuse_links_out(folder)
    path = folder / "config.yaml"
    values, written = read_yaml_as_written(path)
    if not isinstance(values, dict):
        raise UserError(f"{path}: holds no options: it is missing, or damaged")
    refuse_misread(path, values, written)
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

"""The words of a command line of `train`, before anything is composed. Raises UserError for what no run takes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from unet3d.base.errors import UserError
from unet3d.cli import hydra_app
from unet3d.config import compose
from unet3d.config.hydra_errors import not_a_flag

FOLDERS = ("hydra.run.dir", "hydra.sweep.dir", "resume")  # options that would else mean the current folder


@dataclass(frozen=True)
class Arguments:
    """A command line: its overrides, and what its flags ask for."""

    overrides: list[str]  # the words without flags; --config-dir is an override, too
    is_sweep: bool  # -m
    only_shows: bool  # a flag of Hydra's that shows something and runs nothing: --cfg, --info, --hydra-help
    is_checked: bool  # whether its overrides make a config: not those of --hydra-help and --shell-completion


def parse(words: Sequence[str]) -> Arguments:
    """Return what the words of a command line ask for. Raises UserError."""
    parser = hydra_app.flag_parser()
    parser.error = _refuse_flag  # type: ignore[method-assign]
    flags, unknown = parser.parse_known_intermixed_args(list(words))
    if unknown:
        raise not_a_flag(unknown[0], words)
    if flags.shell_completion or flags.hydra_help:
        return Arguments(flags.overrides, is_sweep=False, only_shows=True, is_checked=False)
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
    only_shows = bool(flags.cfg or flags.info)
    return Arguments(overrides, is_sweep, only_shows, is_checked=True)


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

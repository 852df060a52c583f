"""The options that a command line sets, by name or by the files of config groups that it chooses."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from hydra.core.override_parser.types import Override
from omegaconf import OmegaConf

from unet3d.base.errors import UserError
from unet3d.config.hydra_errors import ABOUT, in_one_line
from unet3d.config.plain_values import flat


def names_set(overrides: Iterable[Override], folders: Sequence[Path], purpose: str) -> set[str]:
    """Return the options that parsed overrides set, by name or by a file of a config group in one of the folders.

    `purpose` is the option that asks. Raises UserError.
    """
    names: set[str] = set()
    for override in overrides:
        key = override.key_or_group
        if key.startswith("hydra") or override.input_line == "experiment=null":
            continue
        value = override.value()
        if key in ABOUT and not override.is_delete():
            names.add(key)
        elif isinstance(value, str) and not override.is_delete() and _file_of(key, value, folders):
            names |= _names_in_file(key, value, folders)
        else:
            raise UserError(f"{purpose}: {override.input_line}: name the options that change, as in optim.lr=0.001")
    return names


def _file_of(group: str, name: str, folders: Sequence[Path]) -> Path | None:
    """Return the first file of this name in a config group; None without one."""
    paths = [folder / group / f"{name}.yaml" for folder in folders]
    return next((path for path in paths if path.is_file()), None)


def _names_in_file(group: str, name: str, folders: Sequence[Path]) -> set[str]:
    """Return the options that a file of a config group sets, and those that the files of its `defaults` set."""
    path = _file_of(group, name, folders)
    if path is None:  # `_self_`, or what Hydra has found elsewhere
        return set()
    with in_one_line():
        values = OmegaConf.to_container(OmegaConf.load(path))
    if not isinstance(values, dict):
        return set()
    names: set[str] = set()
    for entry in values.pop("defaults", None) or []:
        chosen = entry if isinstance(entry, dict) else {f"/{group}": entry}
        for key, choice in chosen.items():  # a key is `override /model`, `/model`, or a group within this one
            key = str(key).split()[-1].partition("@")[0]
            other = key.removeprefix("/") if key.startswith("/") else f"{group}/{key}"
            names |= _names_in_file(other, str(choice), folders)
    header = re.match(r"(?:\s*#.*\n|\s*\n)*?\s*#\s*@package\s+(\S+)", path.read_text(encoding="utf-8"))
    package = header[1] if header else group
    prefix = "" if package == "_global_" else f"{package.replace('/', '.')}."
    return names | (flat(values, ".", prefix).keys() & ABOUT.keys())

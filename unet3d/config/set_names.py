"""The options that a command line sets, by name or by the files of config groups that it chooses."""

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import OmegaConf

from unet3d.base.errors import UserError
from unet3d.config.hydra_errors import in_one_line
from unet3d.config.plain_values import flat
from unet3d.config.schema import FACTS


def names_set(overrides: Iterable[Any], folders: Sequence[Path], purpose: str) -> set[str]:
    """Return the options that overrides set, by name or by a file of a config group in one of the folders.

    The overrides are as Hydra parses them; `purpose` is the option that asks. Raises UserError.
    """
    names: set[str] = set()
    for override in overrides:
        key = override.key_or_group
        if key.startswith("hydra") or override.input_line == "experiment=null":
            continue
        chosen = _chosen(override)
        if key in FACTS and not override.is_delete():
            names.add(key)
        elif chosen and all(_file_of(key, name, folders) for name in chosen):
            for name in chosen:
                names |= _names_in_file(key, name, folders)
        else:
            raise UserError(f"{purpose}: {override.input_line}: name the options that change, as in optim.lr=0.001")
    return names


def _chosen(override: Any) -> list[str]:
    """Return the names that an override chooses in a config group, `experiment=[a,b]` two; [] for anything else."""
    value = override.value()
    names = value if isinstance(value, list) else [value]
    if override.is_delete() or not all(isinstance(name, str) for name in names):
        return []
    return [str(name) for name in names]


def _file_of(group: str, name: str, folders: Sequence[Path]) -> Path | None:
    """Return the first file of this name in a config group; None without one."""
    paths = [folder / group / f"{name}.yaml" for folder in folders]
    return next((path for path in paths if path.is_file()), None)


class OptionFile(NamedTuple):
    """A YAML file of a config group."""

    path: Path
    prefix: str  # of the names of its options, `optim.`
    values: dict[Any, Any]  # without its `defaults`


def files_of(group: str, name: str, folders: Sequence[Path]) -> Iterator[OptionFile]:
    """Yield the file of this name in a config group, and those that its `defaults` name. Raises UserError."""
    path = _file_of(group, name, folders)
    if path is None:  # `_self_`, or what Hydra has found elsewhere
        return
    with in_one_line():
        values = OmegaConf.to_container(OmegaConf.load(path))
    if not isinstance(values, dict):
        return
    for entry in values.pop("defaults", None) or []:
        chosen = entry if isinstance(entry, dict) else {f"/{group}": entry}
        for key, choice in chosen.items():  # a key is `override /model`, `/model`, or a group within this one
            key = str(key).split()[-1].partition("@")[0]
            other = key.removeprefix("/") if key.startswith("/") else f"{group}/{key}"
            yield from files_of(other, str(choice), folders)
    header = re.match(r"(?:\s*#.*\n|\s*\n)*?\s*#\s*@package\s+(\S+)", path.read_text(encoding="utf-8"))
    package = header[1] if header else group
    prefix = "" if package == "_global_" else f"{package.replace('/', '.')}."
    yield OptionFile(path, prefix, values)


def _names_in_file(group: str, name: str, folders: Sequence[Path]) -> set[str]:
    """Return the options that a file of a config group sets, and those that the files of its `defaults` set."""
    names: set[str] = set()
    for file in files_of(group, name, folders):
        names |= flat(file.values, ".", file.prefix).keys() & FACTS.keys()
    return names

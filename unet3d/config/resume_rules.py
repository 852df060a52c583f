"""The config of a resumed run, and the options that its command line may change."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from unet3d.base.errors import UserError
from unet3d.config.compose import Composed, Override, flat, from_plain, load, parsed, to_plain
from unet3d.config.hydra_errors import ABOUT, in_one_line
from unet3d.config.rules import IMPORTS
from unet3d.config.schema import Config

# Options that a resumed run may not change: it would be another run. One that ends in a dot stands for a whole group.
FIXED = (
    "model.",
    "data.",
    "loss.",
    "seed",
    "batch",
    "accumulate",
    "amp",
    "channels_last",
    "init",
    "optim.init_lr",
    "optim.init_names",
    "optim.name",
    "optim.average",
    "optim.weight_decay",
    "optim.momentum",
    "optim.betas",
)
# Exceptions to FIXED: they say where data lie or how they are kept, and files are compared by hash.
FREE = (
    "data.root",
    "data.split",
    "data.groups",
    "data.cache",
    "data.cache_root",
    "data.allow_outside",
    "data.fingerprint",
)


def refuse_changes(before: Mapping[Any, Any], now: Mapping[Any, Any]) -> list[str]:
    """Return the changed options but `resume`, as `name: before -> now`.

    Raises UserError for those that make it another run.
    """
    old = flat(before, ".")
    new = flat(now, ".")
    changes = []
    refused = []
    for name in sorted(old.keys() & new.keys()):  # an option that is new in this version has its default
        if name == "resume" or old[name] == new[name]:
            continue
        change = f"{name}: {old[name]} -> {new[name]}"
        changes.append(change)
        if _is_fixed(name):
            refused.append(change)
    if refused:
        raise UserError(f"resume: a run goes on as it was; start a new one to change {'; '.join(refused)}")
    return changes


def _is_fixed(name: str) -> bool:
    """Return whether an option, or the group that it is in, is FIXED."""
    group, dot, _ = name.partition(".")
    return (name in FIXED or group + dot in FIXED) and name not in FREE


def resumed(values: Mapping[Any, Any], folder: str, composed: Composed) -> Config:
    """Return the config of the run in `folder`: the plain `values` of its file, and what the command line sets.

    Raises UserError where that makes it another run, or where code would be imported that only the file names.
    """
    options = OmegaConf.structured(from_plain(values))
    asked = _flat(composed.options) | {"resume": folder}
    given = _names_set(composed) | {"resume"}
    with in_one_line():
        for name in given:
            OmegaConf.update(options, name, asked[name], merge=False)
        changed = OmegaConf.to_object(options)
    assert isinstance(changed, Config)
    now = _flat(options)
    _refuse_foreign_code(now, asked)
    refuse_changes(values, to_plain(changed))  # before `load`, whose message may name an option that only the run has
    try:
        return load(options)
    except UserError as error:
        named = sorted(name for name in now if _is_named(name, str(error)))
        others = [f"{name}={now[name]}" for name in named if name not in given]
        if not others or len(others) == len(named):
            raise
        raise UserError(f"{error}; the run that goes on has {', '.join(others)}") from error


def _flat(options: DictConfig) -> dict[str, Any]:
    """Return the values of options by their dotted names."""
    return flat(OmegaConf.to_container(options), ".")  # type: ignore[arg-type]


def _refuse_foreign_code(now: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
    """Raise UserError for code that the run's file names and the command line does not."""
    foreign = [f"{name}={now[name]}" for name in IMPORTS if now[name] and now[name] != asked[name]]
    if foreign:
        words = " ".join(foreign).replace(", ", ",").replace("'", "")
        raise UserError(f"resume: code is never taken from a run folder; name it again: {words}")


def _is_named(name: str, text: str) -> bool:
    """Return whether a text names an option, as `name=value` or before a colon."""
    return re.search(rf"(?<![\w.]){re.escape(name)}[=:]", text) is not None


def _names_set(composed: Composed) -> set[str]:
    """Return the options that a command line sets, by name or by a file of a config group. Raises UserError."""
    folders = composed.file_folders()
    names: set[str] = set()
    for override in parsed(composed.overrides):
        key = override.key_or_group
        if key.startswith("hydra") or override.input_line == "experiment=null":
            continue
        chosen = _chosen(override)
        if key in ABOUT and not override.is_delete():
            names.add(key)
        elif chosen and all(_file_of(key, name, folders) for name in chosen):
            for name in chosen:
                names |= _names_in_file(key, name, folders)
        else:
            raise UserError(f"resume: {override.input_line}: name the options that change, as in optim.lr=0.001")
    return names


def _chosen(override: Override) -> list[str]:
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

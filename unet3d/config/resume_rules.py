"""The config of a resumed run, and the options that its command line may change."""

import re
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from unet3d.base.errors import UserError
from unet3d.config.compose import Composed, from_plain, load, to_plain
from unet3d.config.hydra_errors import in_one_line
from unet3d.config.plain_values import flat
from unet3d.config.schema import Config, options_with


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
        if name in options_with("fixed"):
            refused.append(change)
    if refused:
        raise UserError(f"resume: a run goes on as it was; start a new one to change {'; '.join(refused)}")
    return changes


def resumed(values: Mapping[Any, Any], folder: str, composed: Composed) -> Config:
    """Return the config of the run in `folder`: the plain `values` of its file, and what the command line sets.

    Raises UserError where that makes it another run, or where code would be imported that only the file names.
    """
    options = OmegaConf.structured(from_plain(values))
    asked = _flat(composed.options) | {"resume": folder}
    given = composed.names_set("resume") | {"resume"}
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
    foreign = [f"{name}={now[name]}" for name in options_with("imports") if now[name] and now[name] != asked[name]]
    if foreign:
        words = " ".join(foreign).replace(", ", ",").replace("'", "")
        raise UserError(f"resume: code is never taken from a run folder; name it again: {words}")


def _is_named(name: str, text: str) -> bool:
    """Return whether a text names an option, as `name=value` or before a colon."""
    return re.search(rf"(?<![\w.]){re.escape(name)}[=:]", text) is not None

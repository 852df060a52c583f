"""From a command line to a checked `Config`, or to one line that says what is wrong."""

import difflib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from unet3d.checks import check, options
from unet3d.config import Config
from unet3d.errors import UserError

VERSION_BASE = "1.3"


CONFIG_NAME = "config"


ConfigStore.instance().store(name="schema", node=Config)


def config_folder() -> Path:
    """The YAML files: beside the package in a checkout, inside it once installed."""
    package = Path(__file__).resolve().parent
    checkout = package.parent / "configs"
    return checkout if checkout.is_dir() else package / "configs"


def compose(overrides: Sequence[str]) -> Config:
    """The checked config that `python train.py OVERRIDES` would run. Raises UserError in one line."""
    try:
        GlobalHydra.instance().clear()
        with hydra.initialize_config_dir(str(config_folder()), version_base=VERSION_BASE):
            tree = hydra.compose(CONFIG_NAME, list(overrides))
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(explain(error)) from error
    return load(tree)


def choice(group: str, overrides: Sequence[str]) -> str:
    """The name that a command line chooses in a config group, also where it leaves the default."""
    GlobalHydra.instance().clear()
    with hydra.initialize_config_dir(str(config_folder()), version_base=VERSION_BASE):
        tree = hydra.compose(CONFIG_NAME, list(overrides), return_hydra_config=True)
    return str(tree.hydra.runtime.choices[group])


def choices(group: str) -> list[str]:
    """The names in a config group."""
    return sorted(path.stem for path in (config_folder() / group).glob("*.yaml"))


def load(tree: DictConfig, here: bool = True) -> Config:
    """Typed and checked config from a composed tree; `here` False: its paths need not exist. Raises UserError."""
    try:
        _refuse_additions(tree)
        config = OmegaConf.to_object(tree)
    except OmegaConfBaseException as error:
        raise UserError(explain(error)) from error
    assert isinstance(config, Config)
    check(config, here)
    return config


def _refuse_additions(tree: DictConfig) -> None:
    """Raise UserError for options that do not exist: `+key=value` adds them in silence."""
    values = OmegaConf.to_container(tree)
    assert isinstance(values, dict)
    known = {name for name, _, _ in options(Config())}
    for name in flat(values, "."):
        if name not in known:
            raise UserError(f"{name}: no such option{_nearest(name, _names())}")


def from_plain(values: dict) -> Config:
    """The config that a snapshot carries: typed, checked, nothing instantiated but options. Raises UserError."""
    if "${" in repr(values):  # would be replaced by what it asks for, e.g. of the environment
        raise UserError("a snapshot's config holds plain values, no ${...}")
    try:
        tree = OmegaConf.merge(OmegaConf.structured(Config), values)
        assert isinstance(tree, DictConfig)
        return load(tree, here=False)
    except OmegaConfBaseException as error:
        raise UserError(explain(error)) from error


def to_plain(config: Config) -> dict:
    """The config as dicts, lists and scalars."""
    values = OmegaConf.to_container(OmegaConf.structured(config), resolve=True)
    assert isinstance(values, dict)
    return values


def to_yaml(config: Config) -> str:
    """The config as YAML."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def sweep(overrides: Sequence[str]) -> list[list[str]]:
    """The override lists of every job of a multirun: `a=1,2 b=3` gives `[[a=1, b=3], [a=2, b=3]]`."""
    try:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
        found = [
            [f"{o.get_key_element()}={value}" for value in _values(o)] if o.is_sweep_override() else [str(o.input_line)]
            for o in parsed
        ]
    except HydraException as error:
        raise UserError(explain(error)) from error
    return [list(job) for job in itertools.product(*found)]


def _values(override: Override) -> Iterable[str]:
    """The values of a sweep; `model=glob(unet*)` names configs of a group."""
    values: Any = override.value()
    is_glob = isinstance(values, Glob)
    return values.filter(choices(override.key_or_group)) if is_glob else override.sweep_string_iterator()


def added_sweep(overrides: Sequence[str]) -> list[str]:
    """What the config's `sweep` adds to a command line: options with several values that it does not name itself.

    Raises UserError where its jobs have different ones.
    """
    first, *others = (compose(job) for job in sweep(overrides))
    if any(other.sweep != first.sweep for other in others):
        raise UserError("these experiments are sweeps of different options; give one command to each")
    if first.resume is not None:
        return []
    named = {override.partition("=")[0].lstrip("+~") for override in overrides}
    return [override for override in first.sweep or [] if override.partition("=")[0] not in named]


def explain(error: Exception) -> str:
    """One line for a composition error: what is wrong, where, and the nearest name that exists."""
    chain: list[BaseException] = [error]
    while chain[-1].__cause__ is not None:
        chain.append(chain[-1].__cause__)
    for link in reversed(chain):
        if isinstance(link, MissingConfigException) and link.missing_cfg_file:
            return _explain_choice(link.missing_cfg_file, list(link.options or []))
        if isinstance(link, ConfigAttributeError | ConfigKeyError):
            return f"{link.full_key}: no such option{_nearest(str(link.full_key), _names())}"
        if isinstance(link, OmegaConfBaseException):
            return f"{link.full_key}: {str(link.msg or link).splitlines()[0]}{_meaning(str(link.full_key))}"
    said = " ".join(line.strip() for line in str(chain[-1]).splitlines()[:2])
    is_grammar = isinstance(chain[-1], OverrideParseException)
    return said + ("; write key=value, in quotes if it has spaces or brackets: \"key='a (b)'\"" if is_grammar else "")


def _explain_choice(missing: str, choices: list[str]) -> str:
    group, _, name = missing.rpartition("/")
    close = difflib.get_close_matches(name, choices, n=1)
    meant = f"did you mean {close[0]}? " if close else ""
    return f"{group}={name}: no such config; {meant}choose from {', '.join(sorted(choices))}"


def _names() -> list[str]:
    named = [name for name, _, _ in options(Config())]
    return [*named, *{name.rpartition(".")[0] for name in named if "." in name}, "experiment"]


def _nearest(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    if not close:
        last = {k.rpartition(".")[2]: k for k in known}
        close = [last[k] for k in difflib.get_close_matches(name.rpartition(".")[2], last, n=1)]
    return f"; did you mean {close[0]}?" if close else "; python train.py --cfg job lists them all"


def _meaning(name: str) -> str:
    return next((f" ({name}: {metadata['about']})" for key, _, metadata in options(Config()) if key == name), "")


# What a resumed run may not change: it would be another run. Paths and ways of working may.
FIXED = (
    *("model.", "data.", "loss.", "seed", "batch", "accumulate", "amp"),
    *("optim.name", "optim.average", "optim.weight_decay", "optim.momentum", "optim.betas"),
)


FREE = ("data.root", "data.split", "data.cache", "data.allow_outside", "amp_dtype")  # what they come to is compared


SNAPSHOTS = ("last.pt", "previous.pt", "best.pt")  # to go on from: the first that is whole


def refuse_changes(before: Mapping[Any, Any], now: Mapping[Any, Any]) -> list[str]:
    """The options that differ between two configs as plain values, `name: before -> now`, but for `resume`.

    Raises UserError with those that would make it another run.
    """
    old, new = flat(before, "."), flat(now, ".")
    changed = {
        name: f"{name}: {old[name]} -> {new[name]}"
        for name in sorted(old.keys() & new.keys())  # an option that came later is, by default, what was done before
        if old[name] != new[name] and name != "resume"
    }
    refused = [change for name, change in changed.items() if name.startswith(FIXED) and name not in FREE]
    if refused:
        raise UserError(f"resume: a run goes on as it was; start a new one to change {'; '.join(refused)}")
    return list(changed.values())


def refuse_fewer_steps(reached: int, steps: int) -> None:
    """Raise UserError where a run is beyond the steps that are asked for."""
    if reached > steps:
        raise UserError(f"steps={steps}: the run is at step {reached} already; give as many or more")


def flat(tree: Mapping[Any, Any], separator: str, prefix: str = "") -> dict[str, Any]:
    """`{a: {b: 1}}` as `{a<separator>b: 1}`."""
    values: dict[str, Any] = {}
    for key, value in tree.items():
        nested = isinstance(value, Mapping)
        values |= flat(value, separator, f"{prefix}{key}{separator}") if nested else {f"{prefix}{key}": value}
    return values

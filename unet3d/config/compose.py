"""From a command line to a checked `Config`, or to one line that says what is wrong."""

import dataclasses
import difflib
import itertools
import re
import secrets
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from unet3d.base.errors import UserError
from unet3d.config.rules import IMPORTS, check, options
from unet3d.config.schema import Config, losses, with_numbers

VERSION_BASE = "1.3"
CONFIG_NAME = "config"
CHECKPOINTS = ("last.pt", "previous.pt", "best.pt")  # to resume from: the first that is whole
# What a resumed run may not change: it would be another run. Paths and ways of working may: their data are compared.
FIXED: tuple[str, ...] = ("model.", "data.", "loss.", "seed", "batch", "accumulate", "amp", "channels_last")
FIXED += ("init", "optim.init_", "optim.name", "optim.average", "optim.weight_decay", "optim.momentum", "optim.betas")
FREE: tuple[str, ...] = ("data.root", "data.split", "data.cache", "data.cache_root", "data.allow_outside")
FREE += ("data.fingerprint", "amp_dtype")
ABOUT = {name: metadata["about"] for name, _, metadata in options(Config())}
GROUPS = sorted({name.rpartition(".")[0] for name in ABOUT} - {""})
CLOSE = 0.7  # how alike two words must be, of 1
# What other trainers call our options.
USUAL = {"epochs": "steps", "batch_size": "batch", "bs": "batch", "num_workers": "workers", "gpus": "device"}
USUAL |= {"learning_rate": "optim.lr", "patch_size": "data.patch", "fp16": "amp", "precision": "amp", "cuda": "device"}
USUAL |= {"data.path": "data.root", "data.dir": "data.root", "data.folder": "data.root", "data_dir": "data.root"}
USUAL |= {"eval_interval": "eval_every", "save_interval": "save_every", "normalization": "model.norm"}
USUAL |= {"gradient_accumulation_steps": "accumulate", "channels": "model.features or model.in_channels"}
LAUNCHERS = {"joblib": "hydra-joblib-launcher"}  # of Hydra, that are packages
LAUNCHERS |= dict.fromkeys(("submitit_local", "submitit_slurm"), "hydra-submitit-launcher")
ConfigStore.instance().store(name="schema", node=Config)
OmegaConf.register_new_resolver("uid", lambda: secrets.token_hex(3), use_cache=True, replace=True)  # of a run folder


def config_folder() -> Path:
    """The YAML files: beside the package in a checkout, inside it once installed."""
    installed = Path(__file__).resolve().parent / "configs"
    return installed if installed.is_dir() else installed.parents[1] / "configs"


def compose(overrides: Sequence[str]) -> Config:
    """The checked config that `python train.py OVERRIDES` would run. Raises UserError in one line."""
    return load(_tree(overrides))


class Job(NamedTuple):
    """One of a sweep's."""

    words: list[str]
    config: Config
    folder: Path
    sweep_folder: Path
    launcher: str  # Hydra's, that starts it


def job(words: list[str], number: int) -> Job:
    """The sweep's job of this number, from 0, with these options. Raises UserError in one line."""
    tree = _tree(words, with_hydra=True)
    with open_dict(tree), _explained():
        tree.hydra.job.num = number
        launcher, place = tree.hydra.runtime.choices["hydra/launcher"], Path(tree.hydra.sweep.dir).absolute()
        folder = place / str(tree.hydra.sweep.subdir)
        del tree.hydra
    return Job(words, load(tree), folder, place, launcher)


def choice(group: str, overrides: Sequence[str]) -> str:
    """The name that a command line chooses in a config group, also where it leaves the default."""
    return str(_tree(overrides, with_hydra=True).hydra.runtime.choices[group])


def _tree(overrides: Sequence[str], with_hydra: bool = False, name: str = CONFIG_NAME) -> DictConfig:
    GlobalHydra.instance().clear()
    with _explained(), hydra.initialize_config_dir(str(config_folder()), version_base=VERSION_BASE):
        tree = hydra.compose(name, list(overrides), return_hydra_config=with_hydra)
    _refuse_merged(tree, overrides)
    return tree


def _refuse_merged(tree: DictConfig, overrides: Sequence[str]) -> None:
    """Raise UserError where a map of labels is another one than the command line's, as Hydra adds to a file's."""
    words = [word for word in overrides if word.lstrip("+").startswith("data.label_map")]
    if "data" not in tree or "label_map" not in tree.data or not words or "=" not in words[-1]:
        return
    word, found = _parsed(words[-1:])[0], tree.data.label_map or {}
    asked = word.value() if word.key_or_group == "data.label_map" else None
    if isinstance(asked, dict) and {str(key) for key in asked} != {str(key) for key in found}:
        what = f"is added to an earlier one, or to a file's, which makes {found}"
        raise UserError(f"{words[-1]}: {what}; to have it alone, write data.label_map=null before it")


@contextmanager
def _explained() -> Iterator[None]:
    """Raise UserError, one line, for an error of Hydra or OmegaConf; Hydra refuses some words by a ValueError."""
    try:
        yield
    except UserError:
        raise
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise UserError(explain(error)) from error


def choices(group: str) -> list[str]:
    """The names in a config group."""
    return sorted(path.stem for path in (config_folder() / group).glob("*.yaml"))


def search_path(folder: str) -> str:
    """The override that adds a folder of YAML files, as `--config-dir` does. Raises UserError where there is none."""
    if not Path(folder).is_dir():
        raise UserError(f"--config-dir={folder}: no such folder")
    return f"hydra.searchpath=[{quoted(str(Path(folder).resolve()))}]"


def quoted(text: str) -> str:
    """The text as a value of Hydra's command line, which without quotes accepts few characters."""
    escaped = re.sub(r"(\\*)'", r"\1\1\'", text)  # a backslash is doubled only before a quote, and at the end
    return "'" + re.sub(r"(\\+)$", r"\1\1", escaped) + "'"


def load(tree: DictConfig, here: bool = True) -> Config:
    """Typed and checked config from a composed tree; `here` False: its paths need not exist. Raises UserError."""
    with _explained():
        values, config = OmegaConf.to_container(tree), OmegaConf.to_object(tree)
    assert isinstance(values, dict)
    if added := flat(values, ".").keys() - ABOUT.keys():  # by `+key=value`, which Hydra allows
        raise UserError(f"{min(added)}: no such option{_nearest(min(added))}")
    assert isinstance(config, Config)
    for name, value in flat(to_plain(config), ".").items():
        if "${" in str(value):  # from `\${...}` in a file: a checkpoint that holds it cannot be read
            raise UserError(f"{name}={value}: write it without ${{...}}, which a run's files do not hold")
    check(config, here)
    return config


def from_plain(values: Mapping[Any, Any]) -> Config:
    """The config that a checkpoint or a run folder holds as plain values, typed and checked. Raises UserError.

    Nothing is composed, resolved or imported; its paths need not exist.
    """
    if "${" in repr(values):  # it would be resolved, from the environment for example
        raise UserError("a config in a file holds plain values, no ${...}")
    with _explained():
        tree = OmegaConf.merge(OmegaConf.structured(Config), values)
    return load(tree, here=False)  # type: ignore[arg-type]


def resumed(values: Mapping[Any, Any], overrides: Sequence[str]) -> Config:
    """The config of a run that goes on: the plain `values` of its file, and what the command line sets.

    Raises UserError where that makes it another run, or where code would be imported that only the file names.
    """
    tree, own = OmegaConf.structured(from_plain(values)), _options(_tree(overrides))
    given = set(_set_by(overrides))
    with _explained():
        for name in given:
            OmegaConf.update(tree, name, own[name], merge=False)
        changed = OmegaConf.to_object(tree)
    assert isinstance(changed, Config)
    now = _options(tree)
    if foreign := [f"{name}={now[name]}" for name in IMPORTS if now[name] and now[name] != own[name]]:
        words = " ".join(foreign).replace(", ", ",").replace("'", "")
        raise UserError(f"resume: code is never taken from a run folder; name it again: {words}")
    refuse_changes(values, to_plain(changed))  # before `load`, whose message may name an option that only the run has
    try:
        return load(tree)
    except UserError as error:
        named = sorted(name for name in now if _is_named(name, str(error)))
        others = [f"{name}={now[name]}" for name in named if name not in given]
        if not others or len(others) == len(named):
            raise
        raise UserError(f"{error}; the run that goes on has {', '.join(others)}") from error


def _is_named(name: str, text: str) -> bool:
    """Whether a text names an option, as `name=value` or before a colon."""
    return re.search(rf"(?<![\w.]){re.escape(name)}[=:]", text) is not None


def _options(tree: DictConfig) -> dict[str, Any]:
    return flat(OmegaConf.to_container(tree), ".")  # type: ignore[arg-type]


def _set_by(overrides: Sequence[str]) -> Iterator[str]:
    """The options that a command line sets, by name, by a file of a config group or an experiment. Raises UserError."""
    found = [word for word in _parsed(overrides) if not word.key_or_group.startswith("hydra")]
    searched = [word for word in overrides if word.startswith("hydra.searchpath=")]
    for word in found:
        key = word.key_or_group
        if key in ABOUT and not word.is_delete():
            yield key
        elif key == "experiment" and not word.is_delete():
            others = [other for other in overrides if other != word.input_line]
            after, before = (_options(_tree(words)) for words in (overrides, others))
            yield from (name for name in after.keys() & ABOUT.keys() if after[name] != before.get(name))
        elif (config_folder() / key).is_dir() and isinstance(choice := word.value(), str):
            yield from _options(_tree(searched, name=f"{key}/{choice}")).keys() & ABOUT.keys()
        else:
            raise UserError(f"resume: {word.input_line}: name the options that change, as in optim.lr=0.001")


def run_folder(overrides: Sequence[str]) -> Path:
    """The folder that a command line with `resume=auto` names. Raises UserError where it names none."""
    named = [str(word.value()) for word in _parsed(overrides) if word.key_or_group == "hydra.run.dir"]
    if not named or "${" in named[-1]:
        raise UserError("resume=auto: goes on in a folder, or begins there; name it: hydra.run.dir=runs/a")
    return Path(named[-1])


def _parsed(overrides: Sequence[str]) -> list[Override]:
    with _explained():
        found: list[Override] = OverridesParser.create().parse_overrides(list(overrides))
        return found


def to_plain(config: Config) -> dict:
    """The config as dicts, lists and scalars."""
    return dataclasses.asdict(config)


def to_yaml(config: Config) -> str:
    """The config as YAML."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def sweep(overrides: Sequence[str]) -> list[list[str]]:
    """The override lists of every job of a multirun: `a=1,2 b=3` gives `[[a=1, b=3], [a=2, b=3]]`."""
    with _explained():
        return [list(job) for job in itertools.product(*map(_words, _parsed(overrides)))]


def _words(override: Override) -> list[str]:
    """The override once for each of its values; `model=glob(unet*)` names configs of a group."""
    if not override.is_sweep_override():
        return [str(override.input_line)]
    values: Any = override.value()
    is_glob = isinstance(values, Glob)
    found = values.filter(choices(override.key_or_group)) if is_glob else override.sweep_string_iterator()
    return [f"{override.get_key_element()}={value}" for value in found]


def added_sweep(overrides: Sequence[str]) -> list[str]:
    """The words of the config's `sweep` for options that the command line does not set. Raises UserError."""
    first, *others = (compose(job) for job in sweep(overrides))
    if any(other.sweep != first.sweep for other in others):
        raise UserError("these experiments are sweeps of different options; give one command to each")
    if first.resume not in (None, "auto"):
        return []
    named = {override.partition("=")[0].lstrip("+~") for override in overrides}
    return [override for override in first.sweep or [] if override.partition("=")[0] not in named]


def explain(error: Exception) -> str:
    """One line for a composition error: what is wrong, where, and the nearest name that exists."""
    chain: list[BaseException] = [error]
    while (cause := chain[-1].__cause__) is not None and cause not in chain:
        chain.append(cause)
    # Under a debugger OmegaConf adds causes that name no option, and chains that are circles.
    for link in sorted(reversed(chain), key=lambda link: not getattr(link, "full_key", None)):
        if isinstance(link, MissingConfigException) and link.missing_cfg_file:
            return _explain_choice(link.missing_cfg_file, list(link.options or []))
        if isinstance(link, ConfigAttributeError | ConfigKeyError):
            return f"{link.full_key}: no such option{_nearest(str(link.full_key))}"
        if isinstance(link, OmegaConfBaseException):
            about = f" ({link.full_key}: {ABOUT[link.full_key]})" if link.full_key in ABOUT else ""
            if "ListConfig" in str(link.msg):
                return f"{link.full_key}: is a list; write it in brackets, as in {link.full_key}=[1,2,3]{about}"
            where = f"{link.full_key}: " if link.full_key else ""
            return f"{where}{str(link.msg or link).splitlines()[0]}{about}"
    text = " ".join(line.strip() for line in str(chain[-1]).splitlines()[:2])
    if not isinstance(chain[-1], OverrideParseException):
        return text
    key, sign, value = chain[-1].override.partition("=")
    if not sign:
        meant = f"; did you mean data.root={key}?" if "/" in key else f"; write {key}=VALUE" * (key in ABOUT)
        return f"{key}: is no option=value{meant}"
    if value == "~" or value.startswith("~/"):
        return f"{key}={value}: a shell replaces ~ only where a word begins; write {key}=$HOME{value[1:]}"
    return _explain_value(key, value, text.partition(" See https")[0])


def _explain_value(key: str, value: str, problem: str) -> str:
    """Say how to write a value that Hydra's grammar does not take."""
    said = f"{key}={value}: Hydra does not understand the value"
    said += "" if "Exception" in problem else f" ({problem})"
    if value.startswith(("[", "{")):
        return f"{said}; close what it opens, and quote it for the shell: '{key}=[1,2,3]'"
    bare = value.strip("\"'")
    word = f"{key}={quoted(bare)}"
    for_shell = shlex.quote(word) if re.search(r'["$`\\!]', word) else f'"{word}"'
    return f"{said}; quote it, once for Hydra and once for the shell: {for_shell}"


def _explain_choice(missing: str, choices: list[str]) -> str:
    group, _, name = missing.rpartition("/")
    if group == "hydra/launcher" and name in LAUNCHERS:
        return f"{group}={name}: is not installed; pip install {LAUNCHERS[name]}"
    if group == "loss" and name in losses():
        return f"loss={name}: no such config; write loss.name={name}"
    close = difflib.get_close_matches(name, choices, n=1)
    meant = f"did you mean {close[0]}? " if close else ""
    return f"{group}={name}: no such config; {meant}choose from {', '.join(sorted(choices))}"


def not_a_flag(flag: str, arguments: Sequence[str]) -> UserError:
    """The error for a flag among the arguments that does not exist: how to write it as an option."""
    name, _, value = flag.lstrip("-").partition("=")
    after = arguments[arguments.index(flag) + 1 :] if flag in arguments else []
    value = value or next((word for word in after[:1] if not word.startswith("-") and "=" not in word), "VALUE")
    found, _ = _neighbour(name.replace("-", "_"))
    example = f"{found}={value}" if found else "batch=4; python train.py --help lists them all"
    return UserError(f"{flag}: no such flag; options are written without dashes: {example}")


def _nearest(name: str) -> str:
    found, choices = _neighbour(name)
    return f"; did you mean {found}?" if found else f"; {choices}"


def _neighbour(name: str) -> tuple[str, str]:
    """The option that `name` most likely means, "" where none is close; and where to look instead."""
    group, _, word = name.rpartition(".")
    group = next(iter(difflib.get_close_matches(group, GROUPS, n=1, cutoff=CLOSE)), "")
    known = sorted([*GROUPS, "experiment", *ABOUT], key=lambda option: "." not in option)
    ends = [option.rpartition(".")[2] for option in known]
    anywhere = {e: o if e == o or ends.count(e) == 1 else "" for e, o in zip(ends, known, strict=True)}
    top, own = {o: o for o in known if "." not in o}, [o for o in known if o.startswith(f"{group}.")]
    found = USUAL.get(f"{group}.{word}") or (anywhere | USUAL).get(word, "")
    for names in [{o.rpartition(".")[2]: o for o in own}] if group else [top | USUAL, anywhere]:
        found = found or "".join(names[close] for close in difflib.get_close_matches(word, names, n=1, cutoff=CLOSE))
    parts = dict.fromkeys(option.removeprefix(f"{group}.").partition(".")[0] for option in own)
    return found, f"{group} has {', '.join(parts)}" if group else "python train.py --help lists them all"


def refuse_changes(before: Mapping[Any, Any], now: Mapping[Any, Any]) -> list[str]:
    """Changed options but `resume`, as `name: before -> now`. Raises UserError for those that make it another run."""
    old, new = flat(before, "."), flat(now, ".")
    shared = sorted(old.keys() & new.keys())  # an option that is new in this version has its default: nothing changed
    changed = {n: f"{n}: {old[n]} -> {new[n]}" for n in shared if old[n] != new[n] and n != "resume"}
    if refused := [change for name, change in changed.items() if name.startswith(FIXED) and name not in FREE]:
        raise UserError(f"resume: a run goes on as it was; start a new one to change {'; '.join(refused)}")
    return list(changed.values())


def flat(tree: Mapping[Any, Any], separator: str, prefix: str = "") -> dict[str, Any]:
    """`{a: {b: 1}}` as `{a<separator>b: 1}`; a map of labels is a value, whose keys JSON makes texts."""
    values: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and key == "label_map":
            values[f"{prefix}{key}"] = with_numbers(value)
            continue
        nested = isinstance(value, Mapping)
        values |= flat(value, separator, f"{prefix}{key}{separator}") if nested else {f"{prefix}{key}": value}
    return values

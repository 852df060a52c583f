"""Compose a checked `Config` from overrides, by Hydra, or from a file's plain values, without it.

A plan's file has options as plain values, and what was predicted of the run. Reading it imports nothing.
"""

import dataclasses
import math
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import hydra
import yaml  # type: ignore[import-untyped]
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override
from omegaconf import DictConfig, OmegaConf, open_dict

from unet3d.base.errors import UserError
from unet3d.base.files import read_yaml_as_written, refuse_links_out
from unet3d.config.rules import check
from unet3d.config.schema import FACTS, KINDS, Config, flat, options_with
from unet3d.config.words import as_written, files_of, in_one_line, nearest, plain, quoted, refuse_misread, with_point

VERSION_BASE = "1.3"
CONFIG_NAME = "config"
SEARCH_PATH = "hydra.searchpath="
NEEDED = ("model", "data", "loss", "optim")  # config groups
CHECKPOINTS = ("last.pt", "previous.pt", "best.pt")  # A run resumes from the first that is whole.
SECTIONS = ("options", "promise")
PROMISED = {  # what a plan may promise of its run: the type of each
    "device": str,
    "peak_bytes": int,
    "allocated_bytes": int,
    "reserved_bytes": int,
    "validation_bytes": int,
    "step_s": float,
    "seconds": float,
}

ConfigStore.instance().store(name="schema", node=Config)
OmegaConf.register_new_resolver("uid", lambda: secrets.token_hex(3), use_cache=True, replace=True)  # Names run folders.


def config_folder() -> Path:
    """Return the folder of the YAML files: next to the package in a checkout, inside it once installed."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"


def choices(group: str) -> list[str]:
    """Return the names in a config group."""
    return sorted(path.stem for path in (config_folder() / group).glob("*.yaml"))


@dataclass(frozen=True)
class Composed:
    """A command line as Hydra composes it."""

    overrides: list[str]
    tree: DictConfig  # Hydra's node, `hydra`, is part of it.

    @property
    def options(self) -> DictConfig:
        """A copy of the tree without Hydra's node: the options of a `Config`, not checked yet."""
        options = self.tree.copy()
        with open_dict(options):
            del options["hydra"]
        return options

    @property
    def task_overrides(self) -> list[str]:
        """Overrides of options alone, without Hydra's own."""
        return list(self.tree.hydra.overrides.task)

    @property
    def all_overrides(self) -> list[str]:
        """The same, behind those that add folders of YAML files, without which others may not compose."""
        folders = [word for word in self.overrides if word.startswith(SEARCH_PATH)]
        return [*folders, *self.task_overrides]

    @property
    def run_folder(self) -> Path:
        """The folder of a run. Raises UserError where what it is made of does not exist."""
        with in_one_line():
            return Path(os.path.abspath(str(self.tree.hydra.run.dir)))

    @property
    def sweep_folder(self) -> Path:
        """The folder of a sweep. Raises UserError where what it is made of does not exist."""
        with in_one_line():
            return Path(self.tree.hydra.sweep.dir).absolute()

    def choice(self, group: str) -> str:
        """Return the name that is chosen in a config group, also where the command line leaves the default."""
        return str(self.tree.hydra.runtime.choices[group])

    def names_set(self, purpose: str) -> set[str]:
        """Return the options that the command line sets, for the option `purpose`. Raises UserError."""
        names: set[str] = set()
        for word in parsed(self.overrides):
            key = word.key_or_group
            if key.startswith("hydra") or word.input_line == "experiment=null":
                continue
            if key in FACTS and not word.is_delete():
                names.add(key)
                continue
            value = word.value()
            chosen = value if isinstance(value, list) else [value]
            files = [file for name in chosen for file in files_of(key, str(name), self.file_folders())]
            if word.is_delete() or not files:
                raise UserError(f"{purpose}: {word.input_line}: name the options that change, as in optim.lr=0.001")
            for file in files:
                names |= flat(file.values, file.prefix).keys() & FACTS.keys()
        return names

    def file_folders(self) -> list[Path]:
        """Return the folders where Hydra looks for YAML files, the package's first."""
        sources = self.tree.hydra.runtime.config_sources
        return [Path(source.path) for source in sources if source.schema == "file"]


def hydra_initialized() -> AbstractContextManager[None]:
    """Within, Hydra composes from the package's YAML files, and from no folder that another program has set."""
    GlobalHydra.instance().clear()
    return hydra.initialize_config_dir(str(config_folder()), job_name="train", version_base=VERSION_BASE)


def compose_tree(overrides: Sequence[str]) -> Composed:
    """Compose these overrides, once. Raises UserError in one line."""
    overrides = [as_written(word) for word in overrides]
    for word in overrides:
        group, _, choice = word.partition("=")
        if choice.lower() == "null" and group in NEEDED:
            raise UserError(f"{word}: a run needs one; leave it out, or choose from {', '.join(choices(group))}")
    with in_one_line(), hydra_initialized():
        tree = hydra.compose(CONFIG_NAME, overrides, return_hydra_config=True)
        HydraConfig.instance().cfg = tree  # type: ignore[assignment]  # The name of a folder may hold `${hydra:...}`.
    _refuse_merged(tree, overrides)
    composed = Composed(overrides, tree)
    folders = composed.file_folders()
    for group, choice in tree.hydra.runtime.choices.items() if folders != [config_folder()] else ():
        for file in files_of(group, str(choice), folders):
            # These files are the user's own, which may have aliases.
            written = yaml.BaseLoader(file.path.read_text()).get_single_data()
            if isinstance(written, dict):
                written.pop("defaults", None)
                refuse_misread(file.path, file.values, written, file.prefix.rstrip("."))
    apply_plan(composed)
    return composed


def apply_plan(composed: Composed) -> None:
    """Set the options of the file that `plan` names, but for those that the command line sets. Raises UserError."""
    path = composed.tree.get("plan")
    if path is None:
        return
    options = read_plan(path).options
    given = composed.names_set("plan")
    features = options.get("model.features")
    if "model.features" in given and features and len(features) != len(composed.tree.model.features):
        given.update(options_with("by_level"))  # A network of another depth needs other values.
    with in_one_line():
        for name, value in options.items():
            if name not in given:
                OmegaConf.update(composed.tree, name, value, merge=False)


class PlanFile(NamedTuple):
    """A plan that was read and checked."""

    options: Mapping[str, Any]  # Values by dotted name.
    promise: Mapping[str, Any]  # Those of PROMISED that the planner knew.


def read_plan(path: str) -> PlanFile:
    """Return the plan in a YAML file. Raises UserError, one line, for what is no plan."""
    place = f"plan={path}"
    if not Path(path).is_file():
        raise UserError(f"{place}: no such file; python -m unet3d plan data=... -o {path} writes one")
    content, written = read_yaml_as_written(Path(path))
    if not isinstance(content, dict) or not isinstance(content.get("options"), dict):
        raise UserError(f"{place}: is no plan; python -m unet3d plan data=... -o {path} writes one")
    for section in content:
        if section not in SECTIONS:
            raise UserError(f"{place}: {section}: no part of a plan; it has {' and '.join(SECTIONS)}")
    if "${" in repr(content):
        raise UserError(f"{place}: holds ${{...}}, which a plan's plain values do not")
    refuse_misread(place, content["options"], written["options"])
    options = flat(content["options"])
    for name in map(str, options):
        if name not in FACTS:
            raise UserError(f"{place}: {name}: no such option{nearest(name)}")
        if name not in options_with("kept"):
            raise UserError(f"{place}: {name}: a plan does not set this; give it on the command line")
    promise = content.get("promise") or {}
    if not isinstance(promise, dict):
        raise UserError(f"{place}: promise: is no mapping; write the plan again")
    for name, value in promise.items():
        kind = PROMISED.get(name)
        if kind is None:
            raise UserError(f"{place}: promise.{name}: nothing that a plan promises; remove it")
        is_number = type(value) in (int, float) and math.isfinite(value) and value >= 0
        if not (isinstance(value, str) if kind is str else is_number):
            raise UserError(f"{place}: promise.{name}={value}: is no {kind.__name__}; write the plan again")
    return PlanFile(options, promise)


def _refuse_merged(tree: DictConfig, overrides: Sequence[str]) -> None:
    """Raise UserError where a map is another one than the command line's, as Hydra adds to a file's."""
    for option in options_with("example"):
        name = option.removeprefix("data.")
        words = [word for word in overrides if f"{word.lstrip('+').partition('=')[0]}.".startswith(f"{option}.")]
        if "data" not in tree or name not in tree.data or not words or "=" not in words[-1]:
            continue
        word = parsed(words[-1:])[0]
        merged = tree.data[name] or {}
        asked = word.value() if word.key_or_group == option else None
        if isinstance(asked, dict) and {str(key) for key in asked} != {str(key) for key in merged}:
            problem = f"is added to an earlier one, or to a file's, which makes {merged}"
            raise UserError(f"{words[-1]}: {problem}; to have it alone, write {option}=null before it")


def compose(overrides: Sequence[str]) -> Config:
    """Return the checked config that `python train.py OVERRIDES` would run. Raises UserError in one line."""
    return load(compose_tree(overrides).options)


def load(options: DictConfig, here: bool = True) -> Config:
    """Return the typed and checked config; `here` False: its paths need not exist. Raises UserError."""
    with in_one_line():
        values = OmegaConf.to_container(options)
        config = OmegaConf.to_object(options)
    assert isinstance(values, dict)
    added = flat(values).keys() - FACTS.keys()  # Hydra lets `+key=value` add options.
    if added:
        raise UserError(f"{min(added)}: no such option{nearest(min(added))}")
    assert isinstance(config, Config)
    for name, value in flat(to_plain(config)).items():
        if "${" in str(value):  # A checkpoint that holds `\${...}` of a file cannot be read.
            raise UserError(f"{name}={value}: write it without ${{...}}, which a run's files do not hold")
    check(config, here)
    return config


def from_plain(values: Mapping[Any, Any]) -> Config:
    """Return the config that a checkpoint or a run folder holds as plain values, checked. Raises UserError.

    Nothing is composed, resolved or imported; its paths need not exist.
    """
    if "${" in repr(values):  # it would be resolved, from the environment for example
        raise UserError("a config in a file holds plain values, no ${...}")
    with in_one_line():
        options = OmegaConf.merge(_schema(), dict(values))
    return load(options, here=False)  # type: ignore[arg-type]


@cache
def _schema() -> DictConfig:
    """Return all options with their types and defaults. It is merged with values, which copies it."""
    schema: DictConfig = OmegaConf.structured(Config)
    return schema


def to_plain(config: Config) -> dict:
    """Return the config as dicts, lists and scalars."""
    return dataclasses.asdict(config)


def to_yaml(config: Config) -> str:
    """Return the config as YAML."""
    return OmegaConf.to_yaml(OmegaConf.create(to_plain(config)))


def parsed(overrides: Sequence[str]) -> list[Override]:
    """Parse overrides by Hydra's grammar. Raises UserError in one line."""
    with in_one_line():
        words: list[Override] = OverridesParser.create().parse_overrides([as_written(word) for word in overrides])
    return words


def search_path(folder: str) -> str:
    """Return the override that adds a folder of YAML files, as `--config-dir` does. Raises UserError without it."""
    if not Path(folder).is_dir():
        raise UserError(f"--config-dir={folder}: no such folder")
    return f"{SEARCH_PATH}[{quoted(str(Path(folder).resolve()))}]"


def sweep(overrides: Sequence[str]) -> list[list[str]]:
    """Return the overrides of each job of a sweep: `a=1,2 b=3` gives `[[a=1, b=3], [a=2, b=3]]`."""
    with in_one_line():
        values = [_each_value(word) for word in parsed(overrides)]
    return [list(job) for job in product(*values)]


def _each_value(override: Override) -> list[str]:
    """Return the override once for each of its values; `model=glob(unet*)` names configs of a group.

    Raises UserError for a sweep that was meant as one number: `budget=1,5GiB`, whose 1 has no unit, `lr=0,01`.
    """
    if not override.is_sweep_override():
        return [str(override.input_line)]
    values: Any = override.value()
    if isinstance(values, Glob):
        names = list(values.filter(choices(override.key_or_group)))
    else:
        names = list(override.sweep_string_iterator())
        word = str(override.input_line).replace("'", "")
        name, _, text = word.partition("=")
        is_float = KINDS.get(name, "").startswith("float")
        # Each part of a number with a comma matches it.
        part = r"'?[\d.]+'?" if name == "budget" else r"0\d+" if is_float else r"(?!)"
        if any(re.fullmatch(part, value) for value in names):
            meant = with_point(name, text) or f"{name}={'1.5GiB' if name == 'budget' else '0.01'}"
            raise UserError(f"{word}: a comma separates values; the decimal sign is a point: {meant}")
    return [f"{override.get_key_element()}={name}" for name in names]


def added_sweep(overrides: Sequence[str], jobs: Sequence[Composed]) -> list[str]:
    """Return the words of the option `sweep`, without those for options that the command line sets.

    `jobs` are all that the overrides ask for. Raises UserError where these have different sweeps.
    """
    lists = [job.tree.get("sweep") or [] for job in jobs]
    if any(words != lists[0] for words in lists):
        raise UserError("these experiments are sweeps of different options; give one command to each")
    if jobs[0].tree.get("resume") not in (None, "auto"):
        return []
    named = {override.partition("=")[0].lstrip("+~") for override in overrides}
    return [str(word) for word in lists[0] if word.partition("=")[0] not in named]


def refuse_changes(before: Mapping[Any, Any], now: Mapping[Any, Any]) -> list[str]:
    """Return the changed options but `resume`, as `name: before -> now`.

    Raises UserError for those that make it another run.
    """
    old = flat(before)
    new = flat(now)
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


def resumed(folder: Path, composed: Composed) -> Config:
    """Return the config of the run in `folder`, with what the command line sets.

    Raises UserError where that makes it another run, or where code would be imported that only its file names.
    """
    refuse_links_out(folder)
    path = folder / "config.yaml"
    values, written = read_yaml_as_written(path)
    if not isinstance(values, dict):
        raise UserError(f"{path}: holds no options: it is missing, or damaged")
    refuse_misread(path, values, written)
    options = OmegaConf.structured(from_plain(values))
    asked = _flat(composed.options) | {"resume": str(folder)}
    given = composed.names_set("resume") | {"resume"}
    with in_one_line():
        for name in given:
            OmegaConf.update(options, name, asked[name], merge=False)
        changed = OmegaConf.to_object(options)
    assert isinstance(changed, Config)
    now = _flat(options)
    foreign = [name for name in options_with("imports") if now[name] and now[name] != asked[name]]
    if foreign:
        words = " ".join(f"{name}={plain(now[name])}" for name in foreign)
        raise UserError(f"resume: code is never taken from a run folder; name it again: {words}")
    refuse_changes(values, to_plain(changed))  # before `load`, whose message may name an option that only the run has
    try:
        return load(options)
    except UserError as error:
        named = [name for name in sorted(now) if re.search(rf"(?<![\w.]){re.escape(name)}[=:]", str(error))]
        others = [f"{name}={now[name]}" for name in named if name not in given]
        if not others or len(others) == len(named):
            raise
        raise UserError(f"{error}; the run that goes on has {', '.join(others)}") from error


def _flat(options: DictConfig) -> dict[str, Any]:
    """Return the values of options by their dotted names."""
    return flat(OmegaConf.to_container(options))  # type: ignore[arg-type]

"""The words of a command line and of YAML files: which options they set, and what a text among them holds.

A text is the word that was written, where Hydra or YAML would read a number or a truth value.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import OmegaConf

from unet3d.base.errors import UserError
from unet3d.config.hydra_errors import in_one_line
from unet3d.config.schema import FACTS, KINDS, TEXTS, flat

KEYS = "data.regions"  # a map whose keys are text
CACHE = "data.cache"  # which takes true and false, since `off` is false for YAML
OF_HYDRA = ("hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir", "hydra.searchpath", "hydra.job.name")
LAUNCHER = "hydra.launcher."  # options of whatever launcher: most are text, and quotes change no number
WHOLE = r"(0|[1-9](_?\d)*)"
POINT = rf"({WHOLE}\.|{WHOLE}?\.\d(_?\d)*)"
READ = rf"(?i:[+-]?({WHOLE}|{POINT}|({WHOLE}|{POINT})e[+-]?\d(_?\d)*|inf|nan)|true|false)"  # as no text
# In Hydra's grammar, what is no word of a value: texts in quotes, what ${...} stands for, signs behind a backslash.
OTHER = r"""(['"])(?:(?:\\\\)*|.*?[^\\](?:\\\\)*)\1|\$\{[^}]+\}|\\."""
ITEM = re.compile(rf"{OTHER}|(?P<before>(?:^|[,(\[])[ \t]*)(?P<word>{READ}|(?i:null))(?=[ \t]*(?:[,)\]]|$))", re.ASCII)
KEY_OF_MAP = re.compile(rf"{OTHER}|[{{,][ \t]*(?P<word>{READ}|(?i:null))[ \t]*:", re.ASCII)
ANY_OF = {"choice", "shuffle", "sort", "str", "tag"}  # functions of any words; those of a range are numbers
MAY_BE_READ = re.compile(r"\d|true|false|null|inf|nan", re.IGNORECASE)


def _is_text(name: str) -> bool:
    """Return whether an option, also one of Hydra's, is text."""
    return KINDS.get(name) in TEXTS or name in OF_HYDRA or name.startswith(LAUNCHER)


def as_written(override: str) -> str:
    """Return an override of a text with quotes around each word that Hydra would read as something else.

    Raises UserError for such a word as the name of a region, where Hydra takes no quotes.
    """
    key, _, value = override.partition("=")
    name = key.lstrip("+").partition("@")[0]
    is_choice = "." not in name and name not in KINDS  # of a file of a config group
    is_of_words = is_choice or _is_text(name) or name == KEYS
    if override.startswith(("-", "~")) or not is_of_words or not MAY_BE_READ.search(value):
        return override
    if name == KEYS:
        for part in KEY_OF_MAP.finditer(value):
            if part["word"] and not part["word"].isdecimal():
                problem = "is no text for Hydra, which takes no quotes there"
                advice = "choose another, or quote it in a YAML file"
                raise UserError(f"{KEYS}: the name {part['word']} {problem}; {advice}")
        return override
    bare = re.sub(OTHER, "", value)
    is_open = any(bare.count(start) != bare.count(end) for start, end in ("()", "[]", "{}"))
    if is_open or "{" in bare or not ANY_OF.issuperset(re.findall(r"(\w*)\(", bare)):
        return override  # Hydra will refuse it, and is to name what was written; or its words are numbers
    in_list = value.lstrip().startswith("[")

    def quoted(part: re.Match[str]) -> str:
        word = part["word"]
        is_null = word is not None and word.lower() == "null"  # outside of a list no word is given
        return part[0] if word is None or (is_null and not in_list) else f"{part['before']}'{word}'"

    return f"{key}={ITEM.sub(quoted, value)}"


def refuse_misread(place: object, values: Any, written: Any, name: str = "") -> None:
    """Raise UserError for a text of a YAML file, at `place`, that YAML has read as something else.

    `values` are what was read, `written` the same tree with each scalar as it stands there.
    """
    if isinstance(values, Mapping) and isinstance(written, Mapping):
        if len(values) == len(written):  # a merge key adds some
            for (key, value), (word, below) in zip(values.items(), written.items(), strict=True):
                if name == KEYS:
                    _refuse_word(place, name, key, word)
                refuse_misread(place, value, below, f"{name}.{key}".lstrip("."))
    elif not _is_text(name) or name == CACHE or (name.startswith(LAUNCHER) and isinstance(values, bool)):
        return
    elif isinstance(values, list) and isinstance(written, list):
        for value, word in zip(values, written, strict=True):
            _refuse_word(place, name, value, word)
    elif values is not None:
        _refuse_word(place, name, values, written)


def _refuse_word(place: object, name: str, value: Any, word: Any) -> None:
    """Raise UserError where a value is another text than the word that stands there."""
    if isinstance(word, str) and str(value) != word:
        kind = "a number" if isinstance(value, int | float) and not isinstance(value, bool) else "no text"
        raise UserError(f"{place}: {name}: {word} is {kind} for YAML, {value}; quote it: '{word}'")


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
            for file in chain.from_iterable(files_of(key, name, folders) for name in chosen):
                names |= flat(file.values, ".", file.prefix).keys() & FACTS.keys()
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

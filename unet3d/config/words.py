"""The words of a command line and of YAML files: what is wrong with them, what they set, what a text among them holds.

A text is the word that was written, where Hydra or YAML would read a number or a truth value. What Hydra or OmegaConf
refuses is one line: what is wrong, where, and the nearest name that exists.
"""

import difflib
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import yaml  # type: ignore[import-untyped]
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from unet3d.base.errors import UserError
from unet3d.config.schema import FACTS, KINDS, LOSSES, TEXTS, options_with

GROUPS = sorted({name.rpartition(".")[0] for name in FACTS} - {""})  # Groups of options: model, data.augment and so on.
OWN = {  # config groups: what is written for something of the user's own
    "model": "your own network is model.path={}",
    "loss": "your own loss is loss.path={}",
    "data": "a folder is data.root=PATH, with data=LAYOUT",
    "optim": "an option of it is written as optim.lr=0.01",
    "experiment": "a folder with experiment/NAME.yaml of your own is --config-dir FOLDER",
}
LAUNCHERS = {  # The package that has each of Hydra's launchers.
    "joblib": "hydra-joblib-launcher",
    "submitit_local": "hydra-submitit-launcher",
    "submitit_slurm": "hydra-submitit-launcher",
}
LIST_OF_OPTIONS = "python train.py --help lists them all"
KEYS = "data.regions"  # a map whose keys are text
CACHE = "data.cache"  # It takes true and false as well, since YAML reads `off` as false.
OF_HYDRA = ("hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir", "hydra.searchpath", "hydra.job.name")
LAUNCHER = "hydra.launcher."  # options of whatever launcher: most are text, and quotes change no number
WHOLE = r"(0|[1-9](_?\d)*)"
POINT = rf"({WHOLE}\.|{WHOLE}?\.\d(_?\d)*)"
# YAML reads these as numbers or truth values, not as text.
READ = rf"(?i:[+-]?({WHOLE}|{POINT}|({WHOLE}|{POINT})e[+-]?\d(_?\d)*|inf|nan)|true|false)"
# In Hydra's grammar, what is no word of a value: texts in quotes, what ${...} stands for, signs behind a backslash.
OTHER = r"""(['"])(?:(?:\\\\)*|.*?[^\\](?:\\\\)*)\1|\$\{[^}]+\}|\\."""
ITEM = re.compile(rf"{OTHER}|(?P<before>(?:^|[,(\[])[ \t]*)(?P<word>{READ}|(?i:null))(?=[ \t]*(?:[,)\]]|$))", re.ASCII)
KEY_OF_MAP = re.compile(rf"{OTHER}|[{{,][ \t]*(?P<word>{READ}|(?i:null))[ \t]*:", re.ASCII)
ANY_OF = {"choice", "shuffle", "sort", "str", "tag"}  # functions of any words; those of a range are numbers
MAY_BE_READ = re.compile(r"\d|true|false|null|inf|nan", re.IGNORECASE)


@contextmanager
def in_one_line() -> Iterator[None]:
    """Raise UserError, one line, for an error of Hydra, OmegaConf or YAML; Hydra refuses some words by a ValueError."""
    try:
        yield
    except UserError:
        raise
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError) as error:
        raise UserError(describe(error)) from error


def describe(error: Exception) -> str:
    """Return one line for an error of a composition."""
    causes: list[BaseException] = [error]
    while (cause := causes[-1].__cause__) is not None and cause not in causes:
        causes.append(cause)
    # Under a debugger OmegaConf adds causes that name no option, and chains that are circles.
    for cause in sorted(reversed(causes), key=lambda cause: not getattr(cause, "full_key", None)):
        if isinstance(cause, MissingConfigException) and cause.missing_cfg_file:
            return _describe_choice(cause.missing_cfg_file, list(cause.options or []))
        if isinstance(cause, ConfigAttributeError | ConfigKeyError):
            return f"{cause.full_key}: no such option{nearest(str(cause.full_key))}"
        if isinstance(cause, OmegaConfBaseException):
            return _describe_type(cause)
    first = causes[-1]
    if isinstance(first, yaml.YAMLError):  # its text names the file and the line
        return " ".join(str(first).split())
    several = re.match(r"(?:Ambiguous value for argument|Sweep parameters) '(.*)'", str(first))
    if several:
        return _describe_several(re.sub(r"'([^',\s]*)'", r"\1", several[1]))
    text = " ".join(line.strip() for line in str(first).splitlines()[:2])
    if isinstance(first, OverrideParseException):
        return _describe_word(first.override, text)
    if text.startswith("Unsupported "):  # what YAML reads as a number
        return f"{text}; quote the name in the file's defaults"
    return text


def _describe_several(word: str) -> str:
    """Say how to write an option with commas, which is several values, as one."""
    name, _, value = word.partition("=")
    kind = KINDS.get(name, "")
    meant = with_point(name, value)
    if meant:
        one = f"the decimal sign is a point: {meant}"
    elif kind.startswith("list") or name in options_with("kind"):
        one = f"a list has brackets: {shlex.quote(f'{name}=[{value}]')}"
    elif kind.startswith("str") and name not in options_with("among"):
        one = f"for one text quote it, once for Hydra and once for the shell: {_for_shell(name, value)}"
    else:
        one = "one run takes one"
    return f"{word}: is several values; {one}; for a job each add -m to train.py"


def with_point(name: str, value: str) -> str:
    """Return the option with a decimal point, where its value seems to be one number with a comma; else ""."""
    is_amount = name == "budget" and re.fullmatch(r"\d+,\d+\s*[a-zA-Z]*", value)
    is_number = KINDS.get(name, "").startswith("float") and re.fullmatch(r"[-+]?\d+,\d+(e[-+]?\d+)?", value)
    return f"{name}={value.replace(',', '.')}" if is_amount or is_number else ""


def _describe_type(error: OmegaConfBaseException) -> str:
    """Say which option cannot have a value of this type, and what the option is about."""
    name = error.full_key
    about = f" ({name}: {FACTS[name]['about']})" if name in FACTS else ""
    first_line = str(error.msg or error).splitlines()[0]
    if name in GROUPS:
        value = first_line.partition(" value: ")[2] or "null"
        return f"{name}={value}: {name} is a group of options{_of_group(name, value.lower()) or _listed(name)}"
    if name in ("hydra.run", "hydra.sweep"):
        return f"{name}: is a group of options; did you mean {name}.dir?"
    if "ListConfig" in first_line:
        return f"{name}: is a list; write it in brackets, as in {_with_items(str(name))}{about}"
    where = f"{name}: " if name else ""
    if "NoneType" in first_line or "not Optional" in first_line:
        quoted_null = _for_shell(name, "null") if name and KINDS.get(name) == "str" else "'null'"
        first_line += f"; if null is a word, quote it: {quoted_null}"
    return f"{where}{first_line}{about}"


def _of_group(group: str, value: str) -> str:
    """Return which option of a group a value is for, to be put behind the problem; "" where that is not clear."""
    named = [
        name for name, choices in options_with("among").items() if name.startswith(f"{group}.") and value in choices
    ]
    if len(named) == 1:
        return f"; did you mean {named[0]}={value}{' (the default)' if value == FACTS[named[0]]['default'] else ''}?"
    if group == "wandb" and value in ("false", "null", "none", "off", "no"):
        return "; did you mean wandb.mode=disabled?"
    if group == "optim" and re.fullmatch(r"[\d.]+(e[-+]?\d+)?", value):
        return f"; did you mean optim.lr={value}?"
    return ""


def _describe_word(word: str, problem: str) -> str:
    """Say how to write a word that Hydra's grammar does not take."""
    key, sign, value = word.partition("=")
    if not sign:
        advice = f"; write {key}=VALUE" if key in FACTS else ""
        if "/" in key:
            advice = f"; did you mean data.root={key}?"
        return f"{key}: is no option=value{advice}"
    if value == "~" or value.startswith("~/"):
        return f"{key}={value}: a shell replaces ~ only where a word begins; write {key}=$HOME{value[1:]}"
    refusal = f"{key}={value}: Hydra does not understand the value"
    if "Exception" not in problem:
        refusal += f" ({problem.partition(' See https')[0]})"
    example = options_with("example").get(key)
    if value.startswith("{") or example:
        example = example or "{name:1}"
        return f"{refusal}; a map has no quotes around its keys, and is quoted for the shell: '{key}={example}'"
    if value.startswith("["):
        return f"{refusal}; close what it opens, and quote it for the shell: '{_with_items(key)}'"
    return f"{refusal}; quote it, once for Hydra and once for the shell: {_for_shell(key, value)}"


def _with_items(name: str) -> str:
    """Return how a list of an option is written."""
    return f"{name}=[a,b]" if KINDS.get(name) in TEXTS else f"{name}=[1,2,3]"


def _for_shell(key: str, value: str) -> str:
    """Return an option with its value in quotes for Hydra, in quotes for a shell."""
    opened = value[:1] if value[:1] in ("'", '"') and value.count(value[:1]) < 3 else ""
    bare = value.removeprefix(opened).removesuffix(opened) if opened else value
    word = f"{key}={quoted(bare)}"
    needs_single_quotes = re.search(r'["$`\\!]', word)
    return shlex.quote(word) if needs_single_quotes else f'"{word}"'


def quoted(text: str) -> str:
    """Return the text as a value of Hydra's command line, which without quotes accepts few characters."""
    escaped = re.sub(r"(\\*)'", r"\1\1\'", text)  # a backslash is doubled only before a quote, and at the end
    return "'" + re.sub(r"(\\+)$", r"\1\1", escaped) + "'"


def path_option(name: str, path: Path) -> str:
    """Return the override `name=path` as Hydra's command line takes it, which without quotes accepts few characters."""
    if re.fullmatch(r"[A-Za-z0-9_/.+%@:-]+", str(path)):
        return f"{name}={path}"
    escaped = re.sub(r"(\\*)(\$\{)", r"\1\1\\\2", str(path))  # OmegaConf would look for what ${name} stands for
    return f"{name}={quoted(escaped)}"


def plain(value: Any) -> str:
    """Return a value of an option as a command line takes it."""
    if isinstance(value, list):
        return f"[{','.join(map(plain, value))}]"
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _describe_choice(missing: str, choices: list[str]) -> str:
    """Say that a config group has no file of this name, and what it has or which option is meant."""
    group, _, name = missing.partition("/") if missing.partition("/")[0] in OWN else missing.rpartition("/")
    if group == "hydra/launcher" and name in LAUNCHERS:
        return f"{group}={name}: is not installed; pip install {LAUNCHERS[name]}"
    if group == "loss" and name in LOSSES:
        return f"loss={name}: no such config; write loss.name={name}"
    close = difflib.get_close_matches(name, choices, n=1)
    meant = f"; did you mean {close[0]}?" if close else _of_group(group, name)
    if not meant and group in OWN:
        path = name if ":" in name else f"package.module:{name if name.isidentifier() else 'NAME'}"
        meant = f"; {OWN[group].format(path)}"
    listed = f"; choose from {', '.join(sorted(choices))}" if choices else ""
    return f"{group}={name}: no such config{meant}{listed}".replace("?;", "?")


def not_a_flag(flag: str, words: Sequence[str]) -> UserError:
    """Return the error for a flag that does not exist, among these words: how to write it as an option."""
    name, _, value = flag.lstrip("-").partition("=")
    if not value:
        after = words[words.index(flag) + 1 :][:1] if flag in words else []
        value = next((word for word in after if not word.startswith("-") and "=" not in word), "VALUE")
    option = _meant(name.replace("-", "_"))
    example = f"{option}={value}" if option else f"batch=4; {LIST_OF_OPTIONS}"
    return UserError(f"{flag}: no such flag; options are written without dashes: {example}")


def nearest(name: str) -> str:
    """Return what to write instead of an option that does not exist, to be put behind the line that says so."""
    meant = _meant(name)
    return f"; did you mean {meant}?" if meant else _listed(name.rpartition(".")[0])


def _meant(name: str) -> str:
    """Return the one option with this last word, or the most similar one of its group; "" where there is none."""
    group, dot, word = name.rpartition(".")
    called = [option for option in (*GROUPS, *FACTS) if option.rpartition(".")[2] == word]
    if len(called) == 1:
        return called[0]
    close = difflib.get_close_matches(word, _parts(group), n=1, cutoff=0.7)
    return f"{group}{dot}{close[0]}" if close else ""


def _parts(group: str) -> list[str]:
    """Return the options and groups in a group, or of the whole config for ""."""
    prefix = f"{group}." if group else ""
    inside = [option.removeprefix(prefix) for option in ("experiment", *FACTS) if option.startswith(prefix)]
    return list(dict.fromkeys(option.partition(".")[0] for option in inside))


def _listed(group: str) -> str:
    """Return the options of a group, or where all are listed, to be put behind a line that refuses another one."""
    parts = _parts(group) if group else []
    return f"; {group} has {', '.join(parts)}" if parts else f"; {LIST_OF_OPTIONS}"


def _is_text(name: str) -> bool:
    """Return whether an option, also one of Hydra's, is text."""
    return KINDS.get(name) in TEXTS or name in OF_HYDRA or name.startswith(LAUNCHER)


def as_written(override: str) -> str:
    """Return an override of a text with quotes around each word that Hydra would read as something else.

    Raises UserError for such a word as the name of a region, where Hydra takes no quotes.
    """
    key, _, value = override.partition("=")
    name = key.lstrip("+").partition("@")[0]
    is_choice = "." not in name and name not in KINDS  # Such a name chooses a file of a config group.
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


class OptionFile(NamedTuple):
    """A YAML file of a config group."""

    path: Path
    prefix: str  # Prefix of its options' names, `optim.`
    values: dict[Any, Any]  # without its `defaults`


def files_of(group: str, name: str, folders: Sequence[Path]) -> Iterator[OptionFile]:
    """Yield the file of this name in a config group, and those that its `defaults` name. Raises UserError."""
    path = next(filter(Path.is_file, (folder / group / f"{name}.yaml" for folder in folders)), None)
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

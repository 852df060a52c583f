"""One line for what Hydra or OmegaConf refuses: what is wrong, where, and the nearest name that exists."""

import difflib
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import yaml  # type: ignore[import-untyped]
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from unet3d.base.errors import UserError
from unet3d.config.schema import FACTS, KINDS, LOSSES, TEXTS, options_with

GROUPS = sorted({name.rpartition(".")[0] for name in FACTS} - {""})  # of options: model, data.augment and so on
OWN = {  # config groups: what is written for something of the user's own
    "model": "your own network is model.path={}",
    "loss": "your own loss is loss.path={}",
    "data": "a folder is data.root=PATH, with data=LAYOUT",
    "optim": "an option of it is written as optim.lr=0.01",
    "experiment": "a folder with experiment/NAME.yaml of your own is --config-dir FOLDER",
}
LAUNCHERS = {  # of Hydra: the package that has each
    "joblib": "hydra-joblib-launcher",
    "submitit_local": "hydra-submitit-launcher",
    "submitit_slurm": "hydra-submitit-launcher",
}
LIST_OF_OPTIONS = "python train.py --help lists them all"


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
    lines = str(first).splitlines()[:2]
    text = " ".join(line.strip() for line in lines)
    if isinstance(first, OverrideParseException):
        return _describe_word(first.override, text)
    if text.startswith("Unsupported "):  # what YAML reads as a number
        return f"{text}; quote the name in the file's defaults"
    return text


def _describe_several(word: str) -> str:
    """Say how to write an option with commas, which is several values, as one."""
    name, _, value = word.partition("=")
    kind = KINDS.get(name, "")
    with_point = point_for_comma(name, value)
    if with_point:
        one = f"the decimal sign is a point: {with_point}"
    elif kind.startswith("list") or name in options_with("kind"):
        one = f"a list has brackets: {shlex.quote(f'{name}=[{value}]')}"
    elif kind.startswith("str") and name not in options_with("among"):
        one = f"for one text quote it, once for Hydra and once for the shell: {_for_shell(name, value)}"
    else:
        one = "one run takes one"
    return f"{word}: is several values; {one}; for a job each add -m to train.py"


def point_for_comma(name: str, value: str) -> str:
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
        example = "a,b" if KINDS.get(name or "") in TEXTS else "1,2,3"
        return f"{name}: is a list; write it in brackets, as in {name}=[{example}]{about}"
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
        advice = ""
        if "/" in key:
            advice = f"; did you mean data.root={key}?"
        elif key in FACTS:
            advice = f"; write {key}=VALUE"
        return f"{key}: is no option=value{advice}"
    if value == "~" or value.startswith("~/"):
        return f"{key}={value}: a shell replaces ~ only where a word begins; write {key}=$HOME{value[1:]}"
    return _describe_value(key, value, problem.partition(" See https")[0])


def _describe_value(key: str, value: str, problem: str) -> str:
    """Say how to write a value that Hydra's grammar does not take."""
    refusal = f"{key}={value}: Hydra does not understand the value"
    if "Exception" not in problem:
        refusal += f" ({problem})"
    example = options_with("example").get(key)
    if value.startswith("{") or example:
        example = example or "{name:1}"
        return f"{refusal}; a map has no quotes around its keys, and is quoted for the shell: '{key}={example}'"
    if value.startswith("["):
        example = "a,b" if KINDS.get(key) in TEXTS else "1,2,3"
        return f"{refusal}; close what it opens, and quote it for the shell: '{key}=[{example}]'"
    return f"{refusal}; quote it, once for Hydra and once for the shell: {_for_shell(key, value)}"


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

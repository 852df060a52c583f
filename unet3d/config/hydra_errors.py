"""One line for what Hydra or OmegaConf refuses: what is wrong, where, and the nearest name that exists."""

import difflib
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from unet3d.base.errors import UserError
from unet3d.config.earlier import INSTEAD
from unet3d.config.schema import FACTS, LOSSES, options_with
from unet3d.config.words import KINDS, TEXTS

GROUPS = sorted({name.rpartition(".")[0] for name in FACTS} - {""})  # of options: model, data.augment and so on
SIMILARITY = 0.7  # of 1: how alike a word and the option that it may mean must be
# What other trainers call our options.
USUAL = {
    "epochs": "steps",
    "batch_size": "batch",
    "bs": "batch",
    "num_workers": "workers",
    "gpus": "device",
    "learning_rate": "optim.lr",
    "patch_size": "data.patch",
    "fp16": "amp",
    "precision": "amp",
    "cuda": "device",
    "data.path": "data.root",
    "data.dir": "data.root",
    "data.folder": "data.root",
    "data_dir": "data.root",
    "eval_interval": "eval_every",
    "save_interval": "save_every",
    "normalization": "model.norm",
    "gradient_accumulation_steps": "accumulate",
    "channels": "model.features or model.in_channels",
}
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
    """Raise UserError, one line, for an error of Hydra or OmegaConf; Hydra refuses some words by a ValueError."""
    try:
        yield
    except UserError:
        raise
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise UserError(describe(error)) from error


def _describe_unknown(name: str) -> str:
    """Return one line for an option that does not exist."""
    if name in INSTEAD:
        return f"{name}: no such option any more; use {INSTEAD[name]}"
    return f"{name}: no such option{nearest(name)}"


def describe(error: Exception) -> str:
    """Return one line for an error of a composition."""
    causes = _causes(error)
    # Under a debugger OmegaConf adds causes that name no option, and chains that are circles.
    for cause in sorted(reversed(causes), key=lambda cause: not getattr(cause, "full_key", None)):
        if isinstance(cause, MissingConfigException) and cause.missing_cfg_file:
            return _describe_choice(cause.missing_cfg_file, list(cause.options or []))
        if isinstance(cause, ConfigAttributeError | ConfigKeyError):
            return _describe_unknown(str(cause.full_key))
        if isinstance(cause, OmegaConfBaseException):
            return _describe_type(cause)
    first = causes[-1]
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


def _causes(error: BaseException) -> list[BaseException]:
    """Return the error, its cause, the cause of that, and so on; each once."""
    causes = [error]
    while True:
        cause = causes[-1].__cause__
        if cause is None or cause in causes:
            return causes
        causes.append(cause)


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
        return f"{name}={value}: {name} is a group of options{_of_group(name, value.lower()) or nearest(f'{name}.')}"
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
        value = _next_word(flag, words) or "VALUE"
    option, _ = _neighbour(name.replace("-", "_"))
    example = f"{option}={value}" if option else f"batch=4; {LIST_OF_OPTIONS}"
    return UserError(f"{flag}: no such flag; options are written without dashes: {example}")


def _next_word(flag: str, words: Sequence[str]) -> str:
    """Return the word after a flag where it may be the flag's value, else an empty text."""
    if flag not in words:
        return ""
    for word in words[words.index(flag) + 1 :]:
        is_value = not word.startswith("-") and "=" not in word
        return word if is_value else ""
    return ""


def nearest(name: str) -> str:
    """Return what to write instead of an option that does not exist, to be put behind the line that says so."""
    option, choices = _neighbour(name)
    return f"; did you mean {option}?" if option else f"; {choices}"


def _neighbour(name: str) -> tuple[str, str]:
    """Return the option that `name` most likely means, "" where none is close; and where to look instead."""
    group, _, word = name.rpartition(".")
    group = _closest(group, GROUPS)
    known = sorted([*GROUPS, "experiment", *FACTS], key=lambda option: "." not in option)
    by_last_word = _by_last_word(known)
    in_group = [option for option in known if option.startswith(f"{group}.")]
    option = USUAL.get(f"{group}.{word}") or (by_last_word | USUAL).get(word, "")
    if option:
        pass
    elif group:
        names = {option.rpartition(".")[2]: option for option in in_group}
        option = names.get(_closest(word, names), "")
    else:
        names = {option: option for option in known if "." not in option} | USUAL
        option = names.get(_closest(word, names), "") or by_last_word.get(_closest(word, by_last_word), "")
    if not group:
        return option, LIST_OF_OPTIONS
    parts = dict.fromkeys(option.removeprefix(f"{group}.").partition(".")[0] for option in in_group)
    return option, f"{group} has {', '.join(parts)}"


def _closest(word: str, names: Sequence[str] | dict[str, str]) -> str:
    """Return the name that is most like the word, "" where none is like it."""
    matches = difflib.get_close_matches(word, names, n=1, cutoff=SIMILARITY)
    return matches[0] if matches else ""


def _by_last_word(known: Sequence[str]) -> dict[str, str]:
    """Return options by their last word; "" for a word that ends several, none of which it is itself."""
    last_words = [option.rpartition(".")[2] for option in known]
    named: dict[str, str] = {}
    for word, option in zip(last_words, known, strict=True):
        is_clear = word == option or last_words.count(word) == 1
        named[word] = option if is_clear else ""
    return named

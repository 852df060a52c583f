"""An option of type text holds the word that was written, where Hydra or YAML would read a number or a truth value."""

import re
from collections.abc import Mapping
from typing import Any

from antlr4 import InputStream  # type: ignore[import-untyped]
from hydra.grammar.gen.OverrideLexer import OverrideLexer

from unet3d.base.errors import UserError
from unet3d.config.schema import FACTS

TEXTS = ("str", "str | None", "list[str]", "list[str] | None")
KEYS = "data.regions"  # a map whose keys are text
CACHE = "data.cache"  # which takes true and false, since `off` is false for YAML
OF_HYDRA = ("hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir", "hydra.searchpath", "hydra.job.name")
LAUNCHER = "hydra.launcher."  # options of whatever launcher: most are text, and quotes change no number
READ = (OverrideLexer.INT, OverrideLexer.FLOAT, OverrideLexer.BOOL)
OPENING = (OverrideLexer.COMMA, OverrideLexer.BRACKET_OPEN, OverrideLexer.POPEN)
CLOSING = (OverrideLexer.COMMA, OverrideLexer.BRACKET_CLOSE, OverrideLexer.PCLOSE)
ENDS = (OverrideLexer.BRACKET_CLOSE, OverrideLexer.PCLOSE, OverrideLexer.BRACE_CLOSE)
LIST = "["
ANY_OF = {LIST, "choice", "shuffle", "sort", "str", "tag"}  # what words may stand in; those of a range are numbers
MAY_BE_READ = re.compile(r"\d|true|false|null|inf|nan", re.IGNORECASE)
KINDS = {name: facts["type"] for name, facts in FACTS.items()}


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
    lexer = OverrideLexer(InputStream(override))
    lexer.removeErrorListeners()
    every = lexer.getAllTokens()
    if "".join(token.text for token in every) != override:  # Hydra will refuse it, and is to name what was written
        return override
    tokens = [token for token in every if token.type != OverrideLexer.WS]
    written = ""
    end = 0
    places: list[str] = []  # that are open: lists, maps, functions
    assigns = next((token for token in tokens if token.type == OverrideLexer.EQUAL), None)  # no later `=` does
    if assigns is not None:
        assigns.type = OverrideLexer.COMMA  # a value begins after it
    for before, token, after in zip(tokens[:-1], tokens[1:], [*tokens[2:], None], strict=True):
        if token.type == OverrideLexer.POPEN:
            places.append(before.text)
        elif token.type in (OverrideLexer.BRACKET_OPEN, OverrideLexer.BRACE_OPEN):
            places.append(token.text.strip())
        elif token.type in ENDS:
            del places[-1:]
        if name == KEYS:
            _refuse_key(before, token, after, places)
        elif _is_misread(before, token, after, places):
            written += f"{override[end : token.start]}'{token.text}'"
            end = token.stop + 1
    return override if places else written + override[end:]


def _is_misread(before: Any, token: Any, after: Any, places: list[str]) -> bool:
    """Return whether Hydra reads a token, which is a whole word, as something else than text."""
    is_whole = before.type in OPENING and (after is None or after.type in CLOSING)
    if not is_whole or not ANY_OF.issuperset(places):
        return False
    is_null = token.type == OverrideLexer.NULL and places[-1:] == [LIST]  # outside of a list no word is given
    return is_null or token.type in READ


def _refuse_key(before: Any, token: Any, after: Any, places: list[str]) -> None:
    """Raise UserError for a region's name that Hydra reads as something else than text."""
    is_key = places == ["{"] and before.type in (OverrideLexer.BRACE_OPEN, OverrideLexer.COMMA)
    if not is_key or after is None or after.type != OverrideLexer.COLON:
        return
    if token.type == OverrideLexer.NULL or (token.type in READ and not token.text.isdecimal()):
        problem = "is no text for Hydra, which takes no quotes there"
        raise UserError(f"{KEYS}: the name {token.text} {problem}; choose another, or quote it in a YAML file")


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

"""Texts that are not trusted: JSON and tables of bounded size, and names and values as errors show them."""

import codecs
import json
import reprlib
from collections.abc import Iterable
from pathlib import Path
from textwrap import shorten
from typing import Any

from unet3d.base.errors import UserError, escaped
from unet3d.base.files import open_regular

MAX_BYTES = 2**24  # ten thousand cases are 2 MB; parsed, JSON takes many times its size
MAX_SHOWN = 200  # characters of a value in a message
MAX_ITEMS_SHOWN = 20
MAX_NAMES = 2_000  # letters of names in a line
MAX_OTHERS_LISTED = 300  # letters of the names of volumes that are not read


def read_json(path: Path, root: Path | None = None) -> dict[str, Any]:
    """Return the JSON object in `path`, which must not be a link that leaves `root`, if one is given.

    Raises UserError.
    """
    if root is not None and leaves(root, path):
        raise UserError(f"{path}: is a link out of {root}; put the file there, or set data.allow_outside=true")
    content = read_any_json(path)
    if not isinstance(content, dict):
        raise UserError(f"{path}: holds no JSON object {{...}}; repair or replace it")
    return content


def read_any_json(path: Path) -> Any:
    """Return the value in a JSON file, whatever it is; else as `read_json`. Raises UserError."""
    content = read_bytes(path)
    try:
        return json.loads(decoded(content), object_pairs_hook=_unique_names)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not readable as JSON ({error}); repair or replace it") from error


def decoded(text: bytes, errors: str = "strict") -> str:
    """Return text in UTF-8, or in what its byte order mark says, which PowerShell and spreadsheets write."""
    is_wide = text.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    return text.decode("utf-16" if is_wide else "utf-8-sig", errors)


def read_bytes(path: Path) -> bytes:
    """Return the bytes of a file that is not large. Raises UserError."""
    if not path.exists():
        raise UserError(f"{path}: no such file; check the path, data/README.md shows the layouts")
    try:
        with open_regular(path) as stream:
            text = stream.read(MAX_BYTES + 1)
    except ValueError as error:
        raise UserError(f"{path}: is not a file; replace it") from error
    except OSError as error:
        raise UserError(f"{path}: not readable ({error}); repair or replace it") from error
    if len(text) > MAX_BYTES:
        raise UserError(f"{path}: is larger than {MAX_BYTES:,} bytes; a data set's JSON is not")
    return text


def _unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object. Raises ValueError for repeated names, of which json would silently keep the last value."""
    if len({name for name, _ in pairs}) < len(pairs):
        raise ValueError("a name occurs twice in one object")
    return dict(pairs)


def leaves(root: Path, path: Path) -> bool:
    """Return whether `path`, its links followed, lies outside of `root`."""
    try:
        return not path.resolve().is_relative_to(root.resolve())
    except (OSError, RuntimeError):  # the name is too long; links form a circle
        return True


def is_plain(text: Any) -> bool:
    """Return whether this is text without characters that break a line, control a terminal or cannot be encoded."""
    return isinstance(text, str) and escaped(text) == text


def shown(value: Any) -> str:
    """Return a value for a message: on one line, shortened."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = MAX_SHOWN
    short.maxlist = short.maxdict = MAX_ITEMS_SHOWN
    return short.repr(value)


def shown_names(names: Iterable[object], letters: int = MAX_NAMES) -> str:
    """Return names in one line of a bounded length."""
    return shorten(", ".join(map(str, names)), letters, placeholder=" ...")

"""dataset.json, which is not trusted. Every UserError names the file, what is wrong in it and what to do."""

import codecs
import json
import os
import reprlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from textwrap import shorten
from typing import Any

from unet3d.base.errors import UserError, escaped
from unet3d.base.files import open_regular

JSON_TYPES: dict[type, str] = {dict: "object", list: "list", str: "string"}
MAX_BYTES = 2**24  # ten thousand cases are 2 MB; parsed, JSON takes many times its size
MAX_PATH = 1024  # characters of a path
LONGEST_NAME = 250  # characters of the name of a data set, channel or class
MAX_SHOWN = 200  # characters of a value in a message
MAX_ITEMS_SHOWN = 20


def read_json(path: Path, root: Path | None = None) -> dict[str, Any]:
    """Return the JSON object in `path`, which must not be a link that leaves `root`, if one is given.

    Raises UserError.
    """
    content = read_any_json(path, root)
    if not isinstance(content, dict):
        raise UserError(f"{path}: holds no JSON object {{...}}; repair or replace it")
    return content


def read_any_json(path: Path, root: Path | None = None) -> Any:
    """Return the value in a JSON file, whatever it is; else as `read_json`. Raises UserError."""
    text = _read_bytes(path, root)
    try:
        return json.loads(_decoded(text), object_pairs_hook=_unique_names)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not readable as JSON ({error}); repair or replace it") from error


def read_words(path: Path) -> str:
    """Return the text of a table, in which letters that cannot be read are replaced. Raises UserError."""
    return _decoded(_read_bytes(path), "replace")


def _decoded(text: bytes, errors: str = "strict") -> str:
    """Return text in UTF-8, or in what its byte order mark says, which PowerShell and spreadsheets write."""
    is_wide = text.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    return text.decode("utf-16" if is_wide else "utf-8-sig", errors)


def _read_bytes(path: Path, root: Path | None = None) -> bytes:
    """Return the bytes of a file that is not large, nor a link out of `root`. Raises UserError."""
    if root is not None and leaves(root, path):
        raise UserError(f"{path}: is a link out of {root}; put the file there, or set data.allow_outside=true")
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


class DatasetJson:
    """The fields of a data set's dataset.json in the folder `root`."""

    def __init__(self, root: Path, allow_outside: bool) -> None:
        self.root = root
        self.where = root / "dataset.json"
        self.allow_outside = allow_outside
        self.content = read_json(self.where, None if allow_outside else root)
        self.title = self.content.get("name", root.name)
        if not is_plain(self.title):
            raise self.error(f'"name" is {shown(self.title)}; give one line of text')
        self.refuse_long("name", [self.title])

    def error(self, what: str) -> UserError:
        """Return the error for this file."""
        return UserError(f"{self.where}: {what}")

    def field(self, name: str, kind: type) -> Any:
        """Return a field that must be a dict, list or str. Raises UserError."""
        if not isinstance(self.content.get(name), kind):
            raise self.error(f'"{name}" is missing or no JSON {JSON_TYPES[kind]}; data/README.md shows one')
        return self.content[name]

    def numbered(self, name: str) -> dict[int, str]:
        """Return a field {"number": text} as {number: text}. Raises UserError."""
        texts = self.field(name, dict)
        try:
            by_number = {int(number): text for number, text in texts.items()}
        except ValueError as error:
            raise self.error(f'{name} {shown(texts)}; the keys must be numbers: {{"0": name, ...}}') from error
        if len(by_number) < len(texts):
            raise self.error(f"{name} {shown(texts)}; a number occurs twice, give each name its own")
        self.refuse_long(name, by_number.values())
        return by_number

    def by_value(self, name: str) -> dict[int, str]:
        """Return a field {text: number}, as nnU-Net names labels, as {number: text}. Raises UserError."""
        given = self.field(name, dict)
        if given and all(key.isdecimal() and is_plain(text) and not text.isdecimal() for key, text in given.items()):
            turned = {text: int(number) for number, text in given.items()}
            raise self.error(f"{name} {shown(given)}: the names come first, as in {_as_json(turned)}")
        values = {text: _of_one(value) for text, value in self.field(name, dict).items()}
        for text, value in values.items():
            if type(value) is not int:  # JSON's true would count as 1
                raise self.error(f"label {shown(text)} is {shown(value)}; give one integer, or a region's list of them")
        if len({*values.values()}) < len(values):
            raise self.error(f"{name} {shown(values)}; two names share a value, give each its own")
        self.refuse_long(name, values)
        return {value: text for text, value in values.items()}

    @property
    def announced(self) -> int | None:
        """The number of cases that "numTraining" says; None where it is no number."""
        count = self.content.get("numTraining")
        return count if type(count) is int else None

    def refuse_version_1(self, image: Path) -> None:
        """Raise UserError where an image is not there, but a file of its first channel: the layout of nnU-Net v1."""
        stem = image.name.removesuffix(".gz").removesuffix(".nii")
        beside = [image.with_name(f"{stem}_0000{ending}") for ending in (".nii.gz", ".nii")]
        found = next((path for path in beside if os.path.exists(path)), None)
        if found is None or os.path.exists(image):
            return
        channels = _as_json(self.numbered("modality"))
        values = _as_json({text: number for number, text in self.numbered("labels").items()})
        ending = found.name.removeprefix(f"{stem}_0000")
        fields = f'"channel_names": {channels}, "labels": {values}, "file_ending": "{ending}"'
        raise self.error(f"is nnU-Net v1's, with {found.name} for a case; write {fields}, and read it with data=nnunet")

    def refuse_long(self, field: str, names: Iterable[Any]) -> None:
        """Raise UserError for a name that no line or table has room for."""
        for name in names:
            if isinstance(name, str) and len(name) > LONGEST_NAME:
                what = f"has {len(name):,} letters; give it {LONGEST_NAME} at most"
                raise self.error(f'"{field}": {shown(name)} {what}')

    def path(self, name: Any) -> Path:
        """Return the path `name` below the root.

        Raises UserError for what leaves it: an absolute path, `..`, or a link to elsewhere.
        """
        if is_plain(name) and len(name) <= MAX_PATH:
            relative = Path(name)
            path = self.root / relative
            if "\\" in name and not os.path.exists(path):
                raise self.error(f"{shown(name)}: has backslashes, as on Windows; write / between folders")
            is_outside = relative.is_absolute() or ".." in relative.parts or leaves(self.root, path)
            if self.allow_outside or not is_outside:
                return path
        remedy = "move the file there and give its relative path, or set data.allow_outside=true"
        raise self.error(f"{shown(name)} is not a path inside {self.root}; {remedy}")


def _as_json(fields: Mapping[Any, Any]) -> str:
    """Return an object for a message, as it is to be written, shortened."""
    return shorten(json.dumps(fields, ensure_ascii=False), MAX_SHOWN, placeholder=" ...")


def _of_one(value: Any) -> Any:
    """Return the item of a list of one; other values as they are."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


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
    short.maxstring = MAX_SHOWN
    short.maxother = MAX_SHOWN
    short.maxlist = MAX_ITEMS_SHOWN
    short.maxdict = MAX_ITEMS_SHOWN
    return short.repr(value)

"""Values from a data set's JSON files, which are not trusted: types, consecutive numbers, paths that stay inside.

Every function raises UserError: the file (`where`), what is wrong in it, what to do.
"""

import json
import reprlib
import unicodedata
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unet3d.errors import UserError

JSON_TYPES: dict[type, str] = {dict: "object", list: "list", str: "string"}
MAX_BYTES = 2**24  # ten thousand cases are 2 MB; parsed, JSON takes many times its size
MAX_PATH = 1024  # characters
MAX_LABEL = 65535  # label maps are uint16 at most
REORDERING = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}  # Unicode that shows text in another order


def read_json(path: Path, root: Path | None = None) -> dict[str, Any]:
    """The JSON object in `path`, which must not be a link that leaves `root`, if one is given."""
    if root is not None and leaves(root, path):
        raise UserError(f"{path}: is a link out of {root}; put the file there, or set data.allow_outside=true")
    text = _read_bytes(path)
    try:
        content = json.loads(text.decode(), object_pairs_hook=_unique_names)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not readable as JSON ({error}); repair or replace it") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: holds no JSON object {{...}}; repair or replace it")
    return content


def _read_bytes(path: Path) -> bytes:
    try:
        if not path.exists():
            raise UserError(f"{path}: no such file; check the path, data/README.md shows the layouts")
        if not path.is_file():  # reading would wait for a pipe, and may never reach a device's end
            raise UserError(f"{path}: is not a file; replace it")
        with path.open("rb") as stream:
            text = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise UserError(f"{path}: not readable ({error}); repair or replace it") from error
    if len(text) > MAX_BYTES:
        raise UserError(f"{path}: is larger than {MAX_BYTES:,} bytes; a data set's JSON is not")
    return text


def _unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object without repeated names: json would silently keep the last value."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name occurs twice in one object")
    return found


def is_plain(text: Any) -> bool:
    """Whether this is text without characters that break a line, control a terminal or cannot be encoded."""
    return isinstance(text, str) and not any(
        unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") or unicodedata.bidirectional(c) in REORDERING for c in text
    )


def leaves(root: Path, path: Path) -> bool:
    """Whether `path`, its links followed, lies outside of `root`."""
    try:
        return not path.resolve().is_relative_to(root.resolve())
    except (OSError, RuntimeError):  # the name is too long; links form a circle
        return True


def path_inside(root: Path, name: Any, where: Path, allow_outside: bool) -> Path:
    """The path `name` below `root`. Refuses what leaves it: an absolute path, `..`, or a link to elsewhere."""
    if is_plain(name) and len(name) <= MAX_PATH:
        relative = Path(name)
        if allow_outside or not (relative.is_absolute() or ".." in relative.parts or leaves(root, root / relative)):
            return root / relative
    raise UserError(
        f"{where}: {shown(name)} is not a path inside {root}; move the file there and give its relative path, "
        "or set data.allow_outside=true"
    )


def field(content: Mapping[str, Any], name: str, kind: type, where: Path) -> Any:
    """`content[name]`, which must be a dict, list or str."""
    if not isinstance(content.get(name), kind):
        raise UserError(f'{where}: "{name}" is missing or no JSON {JSON_TYPES[kind]}; data/README.md shows one')
    return content[name]


def title(content: Mapping[str, Any], default: str, where: Path) -> str:
    """The data set's "name", or `default`."""
    found: Any = content.get("name", default)
    if not is_plain(found):
        raise UserError(f'{where}: "name" is {shown(found)}; give one line of text')
    return str(found)


def channels(content: Mapping[str, Any], name: str, where: Path) -> tuple[str, ...]:
    """The channel names of `content[name]`, {"0": channel, "1": channel ...}."""
    return _in_order(numbered(content, name, where), name, where)


def numbered(content: Mapping[str, Any], name: str, where: Path) -> dict[int, str]:
    """`content[name]` as {number: text}, from {"number": text}."""
    texts = field(content, name, dict, where)
    try:
        found = {int(number): text for number, text in texts.items()}
    except ValueError as error:
        raise UserError(f'{where}: {name} {shown(texts)}; the keys must be numbers: {{"0": name, ...}}') from error
    if len(found) < len(texts):
        raise UserError(f"{where}: {name} {shown(texts)}; a number occurs twice, give each name its own")
    return found


def by_value(labels: Mapping[str, Any], where: Path) -> dict[int, str]:
    """{value: name} from nnU-Net's {name: value}."""
    for name, value in labels.items():
        if type(value) is not int:  # JSON's true would count as 1
            raise UserError(
                f"{where}: label {shown(name)} is {shown(value)}; regions are not supported, give each name one integer"
            )
    if len({*labels.values()}) < len(labels):
        raise UserError(f"{where}: labels {shown(labels)}; two names share a value, give each its own")
    return {value: name for name, value in labels.items()}


def classes(names: Mapping[int, str], ignore: int | None, where: Path | str) -> tuple[str, ...]:
    """Class names by label value, without the ignored one, which must be above all the others."""
    kept = {value: name for value, name in names.items() if value != ignore}
    if ignore is not None and kept and ignore < max(kept):
        raise UserError(f"{where}: {ignore} is the label to ignore; it must be above all others ({max(kept)})")
    if ignore is not None and ignore > MAX_LABEL:
        raise UserError(f"{where}: {shown(ignore)} is the label to ignore; the highest possible is {MAX_LABEL}")
    found = _in_order(kept, "labels", where)
    if len(found) < 2 or len({*found}) < len(found):
        raise UserError(
            f"{where}: labels {shown(list(found))}; give the background and one class or more, each its own name"
        )
    return found


def _in_order(names: Mapping[int, str], what: str, where: Path | str) -> tuple[str, ...]:
    """Names by number: 0, 1, 2 ..."""
    if not names or sorted(names) != list(range(len(names))):
        raise UserError(f"{where}: {what} are numbered {shown(sorted(names))}; number them 0, 1, 2 ... without a gap")
    for name in names.values():
        if not is_plain(name):
            raise UserError(f"{where}: {what}: {shown(name)} is not a name; give one line of text")
    return tuple(names[number] for number in sorted(names))


def shown(value: Any) -> str:
    """A value for a message: on one line, shortened."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = 200
    short.maxlist = short.maxdict = 20
    return short.repr(dict(value) if isinstance(value, Mapping) else value)

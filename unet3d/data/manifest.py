"""Values from a data set's JSON files, which are not trusted: typed, numbered without gaps, paths that stay inside.

Every function raises UserError that names the file (`where`), what is wrong in it and what to do.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unet3d.errors import UserError

JSON_KINDS: dict[type, str] = {dict: "object", list: "list", str: "string"}


def read(path: Path) -> dict[str, Any]:
    """The JSON object in `path`."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file; check the path, data/README.md shows the layouts") from error
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: not readable as JSON ({error}); mend or replace it") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: holds no JSON object {{...}}; mend or replace it")
    return content


def field(content: Mapping[str, Any], name: str, kind: type, where: Path) -> Any:
    """`content[name]`, which must be a dict, list or str."""
    if not isinstance(content.get(name), kind):
        raise UserError(f'{where}: "{name}" is missing or no JSON {JSON_KINDS[kind]}; data/README.md shows one')
    return content[name]


def inside(root: Path, name: Any, where: Path) -> Path:
    """The path `name` below `root`. Refuses what leaves it: an absolute path, `..`, or a link to elsewhere."""
    try:
        relative, target = Path(name), (root / name).resolve()
        if not relative.is_absolute() and ".." not in relative.parts and target.is_relative_to(root.resolve()):
            return root / relative
    except (TypeError, ValueError, OSError, RuntimeError):  # not a string; a NUL in it; too long; links in a circle
        pass
    raise UserError(f"{where}: {name!r} is no path inside {root}; move the file there and give its relative path")


def numbered(names: Mapping[str, Any], what: str, where: Path) -> dict[int, str]:
    """{number: name} from {"number": name}, as in {"0": "background"}."""
    try:
        return {int(number): str(name) for number, name in names.items()}
    except ValueError as error:
        raise UserError(f'{where}: {what} {dict(names)}; the keys must be numbers: {{"0": name, ...}}') from error


def by_value(labels: Mapping[str, Any], where: Path) -> dict[int, str]:
    """{value: name} from nnU-Net's {name: value}."""
    for name, value in labels.items():
        if not isinstance(value, int):
            raise UserError(
                f'{where}: label "{name}" is {value}; regions are not supported, give each name one integer'
            )
    if len({*labels.values()}) < len(labels):
        raise UserError(f"{where}: labels {dict(labels)}; two names share a value, give each its own")
    return {value: name for name, value in labels.items()}


def in_order(names: Mapping[int, str], what: str, where: Path | str) -> tuple[str, ...]:
    """Names by number, which must run 0, 1, 2 ..."""
    if not names or sorted(names) != list(range(len(names))):
        raise UserError(f"{where}: {what} are numbered {sorted(names)}; number them 0, 1, 2 ... without a gap")
    return tuple(names[number] for number in sorted(names))


def classes(names: Mapping[int, str], ignore: int | None, where: Path | str) -> tuple[str, ...]:
    """Class names by label value, without the ignored one, which must lie above all others."""
    scored = {value: name for value, name in names.items() if value != ignore}
    if ignore is not None and scored and ignore < max(scored):
        raise UserError(f"{where}: {ignore} is the label to ignore; it must be above all others ({max(scored)})")
    found = in_order(scored, "labels", where)
    if len(found) < 2 or len({*found}) < len(found):
        raise UserError(f"{where}: labels {list(found)}; give the background and one class or more, each its own name")
    return found

"""Which values of a run folder are of the kind that tables and pictures read, whoever wrote its files. No torch."""

import math
from dataclasses import is_dataclass
from functools import cache
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from unet3d.config.schema import Config

LARGEST = 2**53  # of a number: more bytes are not exact in a picture
MOST_ITEMS = 500  # of a list or a text in memory.json


def sound(values: Any, node: Any = Config) -> dict[str, Any]:
    """Return the options below `node` without those of another type; what this version does not know stays.

    Whoever wrote the file, an option that is a number may then be multiplied, and one that is a list be counted.
    """
    if not isinstance(values, dict):
        return {}
    types, found = _types(node), {}
    for name, value in values.items():
        kind = types.get(name, Any)
        if is_dataclass(kind) and isinstance(value, dict):
            found[name] = sound(value, kind)
        elif not is_dataclass(kind) and _is_of(value, kind):
            found[name] = value
    return found


@cache
def _types(node: Any) -> dict[str, Any]:
    return get_type_hints(node)


def _is_of(value: Any, kind: Any) -> bool:
    if kind is Any:
        return True
    if isinstance(kind, UnionType):
        return any(_is_of(value, one) for one in get_args(kind))
    if get_origin(kind) is list:
        return isinstance(value, list) and all(_is_of(item, *get_args(kind)) for item in value)
    return type(value) is kind or (kind is float and type(value) is int)


def fits(value: Any, shape: Any) -> bool:
    """Whether JSON has this shape: a type, [shape of all items], {key: shape} or {...: shape of all values}."""
    if isinstance(value, (str, list, dict)) and len(value) > MOST_ITEMS:
        return False
    if isinstance(shape, list):
        return isinstance(value, list) and bool(value) and all(fits(item, shape[0]) for item in value)
    if isinstance(shape, dict) and ... in shape:
        return isinstance(value, dict) and bool(value) and all(fits(item, shape[...]) for item in value.values())
    if isinstance(shape, dict):
        return isinstance(value, dict) and all(key in value and fits(value[key], shape[key]) for key in shape)
    is_number = isinstance(value, int)  # JSON's true is one, too
    return isinstance(value, shape) and not (is_number and (isinstance(value, bool) or abs(value) > LARGEST))


def is_shallow(value: Any, levels: int) -> bool:
    """Whether lists and dictionaries are nested in at most so many levels."""
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels >= 0 and all(is_shallow(item, levels - 1) for item in items)


def as_number(cell: Any) -> float | None:
    """The number in a cell or record; None if there is none, or one too large for a picture."""
    try:
        number = float(cell)
    except (TypeError, ValueError, OverflowError):
        return None
    return None if LARGEST < abs(number) < math.inf else number


def finite(cell: Any) -> float | None:
    """The number in a cell or record if means can be taken of it; None of NaN and infinity."""
    number = as_number(cell)
    return number if number is not None and math.isfinite(number) else None

"""Checks of the values that tables and pictures read from a run folder, which anybody may have written. No torch."""

import math
from dataclasses import is_dataclass
from functools import cache
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from unet3d.config.schema import Config

LARGEST_NUMBER = 2**53  # more bytes are not exact in a picture
MOST_ITEMS = 500  # of a list or a text in memory.json


def sound(values: Any, node: Any = Config) -> dict[str, Any]:
    """Return the options below `node` that have the right type, beside options that this version does not know.

    So an option that is a number may be multiplied, and one that is a list counted, also in a file of strangers.
    """
    if not isinstance(values, dict):
        return {}
    types = _types(node)
    checked: dict[str, Any] = {}
    for name, value in values.items():
        kind = types.get(name, Any)
        if is_dataclass(kind):
            if isinstance(value, dict):
                checked[name] = sound(value, kind)
        elif _is_of(value, kind):
            checked[name] = value
    return checked


@cache
def _types(node: Any) -> dict[str, Any]:
    return get_type_hints(node)


def _is_of(value: Any, kind: Any) -> bool:
    """Return whether a plain value is of an option's type; an integer also serves as a float."""
    if kind is Any:
        return True
    if isinstance(kind, UnionType):
        return any(_is_of(value, member) for member in get_args(kind))
    if get_origin(kind) is list:
        (item_kind,) = get_args(kind)
        return isinstance(value, list) and all(_is_of(item, item_kind) for item in value)
    if kind is float and type(value) is int:
        return True
    return type(value) is kind


def fits(value: Any, shape: Any) -> bool:
    """Return whether JSON has this shape: a type, [shape of all items], {key: shape} or {...: shape of all values}."""
    if isinstance(value, (str, list, dict)) and len(value) > MOST_ITEMS:
        return False
    if isinstance(shape, list):
        if not isinstance(value, list) or not value:
            return False
        return all(fits(item, shape[0]) for item in value)
    if isinstance(shape, dict):
        return isinstance(value, dict) and _has_entries(value, shape)
    if not isinstance(value, shape):
        return False
    if isinstance(value, bool):  # JSON's true is no number
        return False
    return not isinstance(value, int) or abs(value) <= LARGEST_NUMBER


def _has_entries(value: dict[Any, Any], shape: dict[Any, Any]) -> bool:
    if ... in shape:
        return bool(value) and all(fits(item, shape[...]) for item in value.values())
    return all(key in value and fits(value[key], shape[key]) for key in shape)


def is_shallow(value: Any, levels: int) -> bool:
    """Return whether lists and dictionaries are nested in at most this many levels."""
    if levels < 0:
        return False
    items: Any = ()
    if isinstance(value, dict):
        items = value.values()
    elif isinstance(value, list):
        items = value
    return all(is_shallow(item, levels - 1) for item in items)


def as_number(cell: Any) -> float | None:
    """Return the number in a cell or record; None without one, or for one too large for a picture."""
    try:
        number = float(cell)
    except (TypeError, ValueError, OverflowError):
        return None
    if LARGEST_NUMBER < abs(number) < math.inf:
        return None
    return number


def finite(cell: Any) -> float | None:
    """Return the number in a cell or record if means can be taken of it; None for NaN and infinity."""
    number = as_number(cell)
    if number is None or not math.isfinite(number):
        return None
    return number

"""A config's plain values by the dotted names of its options."""

from collections.abc import Mapping
from typing import Any

from unet3d.config.schema import with_numbers


def flat(tree: Mapping[Any, Any], separator: str, prefix: str = "") -> dict[str, Any]:
    """Return `{a: {b: 1}}` as `{a<separator>b: 1}`; a map of labels is a value, whose keys JSON makes texts."""
    values: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and key == "label_map":
            values[f"{prefix}{key}"] = with_numbers(value)
        elif isinstance(value, Mapping):
            values |= flat(value, separator, f"{prefix}{key}{separator}")
        else:
            values[f"{prefix}{key}"] = value
    return values

"""Options of earlier versions, which files of old runs and old command lines have."""

from collections.abc import Mapping
from typing import Any

INSTEAD = {"lean": "recompute=lean", "slab": "recompute=tiles"}


def of_today(values: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return a config's plain values with today's options in the place of earlier ones."""
    today = {name: value for name, value in values.items() if name not in INSTEAD}
    for name, instead in INSTEAD.items():
        if values.get(name):
            option, _, value = instead.partition("=")
            today[option] = value
    return today

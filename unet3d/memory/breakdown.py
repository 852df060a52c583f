"""Bytes alive at a moment, by level of the U and by layer."""

import re
from collections.abc import Callable
from math import log, prod
from typing import Any

from unet3d.memory.ledger import CATEGORIES, Ledger, Storage, alive_at, category

OTHER = "other"  # what belongs to no level: losses on their way, the optimizer's temporaries


def layer(path: str) -> str:
    """A module path cut to a layer: `up1.block.conv2.norm` is `up1.conv2`."""
    return ".".join([part for part in path.split(".") if part != "block"][:2])


def level_of_module(path: str, down: int) -> int | None:
    """The level of the U that a module works on, of a U with so many steps down; 0 is full resolution."""
    stage = path.partition(".")[0]
    if stage in ("inc", "outc", "data", "loss"):
        return 0
    if found := re.fullmatch(r"(down|up)(\d+)", stage):
        return int(found[2]) if found[1] == "down" else down - int(found[2])
    return None


def resolutions(ledger: Ledger) -> list[int]:
    """Voxels of a map at each level: the largest that a convolution of the encoder makes there."""
    voxels: dict[int, int] = {}
    for s in ledger.storages:
        if s.operation == "aten.convolution.default" and s.place.module.startswith(("inc", "down")):
            at = level_of_module(s.place.module, 0) or 0
            voxels[at] = max(voxels.get(at, 0), prod(s.shape[2:]))
    return [voxels[at] for at in sorted(voxels)]


def level_of(ledger: Ledger) -> Callable[[Storage], int | str]:
    """Tells a storage's level: that of its resolution if it is a map, whatever module made it; else its module's.

    A pooling makes maps at the resolution it comes from, in backward above all.
    """
    sizes, weights = resolutions(ledger), {s.shape for s in ledger.storages if s.role == "params"}

    def tell(s: Storage) -> int | str:
        if s.role is None and len(s.shape) in (4, 5) and s.shape not in weights and sizes:
            voxels = prod(s.shape[-3:])
            return min(range(len(sizes)), key=lambda at: abs(log(voxels / sizes[at])))
        found = level_of_module(s.place.module, len(sizes) - 1)
        return OTHER if found is None else found

    return tell


def by_level(ledger: Ledger, moment: int) -> list[dict[str, Any]]:
    """A row a level, shallowest first, then `other`: its bytes, also by category."""
    rows = _grouped(ledger, moment, level_of(ledger))
    order = sorted(rows, key=lambda found: (found == OTHER, found))
    return [{"level": found, **rows[found]} for found in order]


def by_layer(ledger: Ledger, moment: int) -> list[dict[str, Any]]:
    """A row a layer, along the U: the level that it works on, the bytes that it made, also by category."""
    down = len(resolutions(ledger)) - 1
    rows = _grouped(ledger, moment, lambda s: layer(s.place.module))
    made = sorted(ledger.storages, key=lambda s: s.role is not None)  # weights lie in no order of work
    order = dict.fromkeys(layer(s.place.module) for s in made)
    return [{"module": key, "level": level_of_module(key, down), **rows[key]} for key in order if key in rows]


def _grouped(ledger: Ledger, moment: int, key: Callable[[Storage], int | str]) -> dict[Any, dict[str, int]]:
    rows: dict[Any, dict[str, int]] = {}
    for storage in alive_at(ledger, moment):
        row = rows.setdefault(key(storage), {"bytes": 0} | dict.fromkeys(CATEGORIES, 0))
        row["bytes"] += storage.bytes
        row[category(ledger, storage)] += storage.bytes
    return rows

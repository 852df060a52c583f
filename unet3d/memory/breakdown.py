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


ENCODER, DECODER = ("inc", "down"), ("up",)
Sizes = dict[int, set[int]]  # level -> voxels of the maps that convolutions make there


def steps_down(ledger: Ledger) -> int:
    """Of the U."""
    return max(_sizes(ledger, ENCODER, 0), default=0)


def _sizes(ledger: Ledger, side: tuple[str, ...], down: int) -> Sizes:
    """Of one side of the U, from the smallest map of a block up: a 1x1x1 convolution may come before an upsampling."""
    made: Sizes = {}
    blocks: Sizes = {}
    for s in ledger.storages:
        stage, _, name = layer(s.place.module).partition(".")
        if s.operation == "aten.convolution.default" and stage.startswith(side):
            at = level_of_module(stage, down) or 0
            for sizes in (made, blocks) if name.startswith("conv") else (made,):
                sizes.setdefault(at, set()).add(prod(s.shape[2:]))
    return {at: {size for size in made[at] if size >= min(blocks[at])} for at in blocks}


def level_of(ledger: Ledger) -> Callable[[Storage], int | str]:
    """Tells a storage's level: that of its resolution if it is a map, whatever module made it; else its module's.

    A pooling makes maps at the resolution it comes from, in backward above all. Valid convolutions make the decoder's
    maps smaller than the encoder's of the same level, which a decoder stage sees only as the skip that it crops.
    """
    encoder, down = _sizes(ledger, ENCODER, 0), steps_down(ledger)
    decoder = {down: encoder.get(down, set())} | _sizes(ledger, DECODER, down)
    weights = {s.shape for s in ledger.storages if s.role == "params"}

    def tell(s: Storage) -> int | str:
        own = level_of_module(s.place.module, down)
        if s.role is not None or len(s.shape) not in (4, 5) or s.shape in weights or not encoder:
            return OTHER if own is None else own
        sizes = encoder if s.place.module.startswith(ENCODER) else decoder
        voxels, here = prod(s.shape[-3:]), sizes.get(own, set()) if own is not None else set()
        if own is not None and here and min(here) <= voxels <= max(here):
            return own
        known = [(level, size) for level, found in sizes.items() for size in (min(found), max(found))]
        known += [(own, size) for size in encoder.get(own, set())] if own is not None else []
        return min(known, key=lambda level: abs(log(voxels / level[1])))[0]

    return tell


def by_level(ledger: Ledger, moment: int) -> list[dict[str, Any]]:
    """A row a level, shallowest first, then `other`: its bytes, also by category."""
    rows = _grouped(ledger, moment, level_of(ledger))
    order = sorted(rows, key=lambda found: (found == OTHER, found))
    return [{"level": found, **rows[found]} for found in order]


def by_layer(ledger: Ledger, moment: int) -> list[dict[str, Any]]:
    """A row a layer, along the U: the level that it works on, the bytes that it made, also by category."""
    down = steps_down(ledger)
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

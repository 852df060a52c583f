"""Layers and levels of a network in a ledger: short names, and bytes at a moment by level and by layer."""

import re
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from math import log, prod
from typing import Any

from torch import nn

from unet3d.memory.ledger import CATEGORIES, Ledger, Storage
from unet3d.model.unet import UNet3D
from unet3d.recomputing.workspaces import CONVOLUTION

LevelSizes = dict[int | None, set[int]]  # level -> voxels of the maps that convolutions make there
Row = dict[str, int]  # "bytes", and bytes by category


def layer_names(model: nn.Module, depth: int | None = None) -> Callable[[str], str]:
    """Return a function from a module's path to its name in tables: the path, or its first `depth` parts.

    Without `depth`, names of the package's own network are short: `up1.block.conv2.norm` is `up1.conv2`.
    """
    if depth is not None:
        return partial(cut_name, depth)
    return short_name if isinstance(model, UNet3D) else str


def cut_name(depth: int, path: str) -> str:
    """Return the first `depth` parts of a module's path."""
    return ".".join(path.split(".")[:depth])


def short_name(path: str) -> str:
    """Return `up1.conv2` for `up1.block.conv2.norm`."""
    parts = [part for part in path.split(".") if part != "block"]
    return ".".join(parts[:2])


def stage_of(path: str) -> str:
    """Return the first part of a module's path."""
    return path.partition(".")[0]


class Levels:
    """The levels of a U-Net with stages inc, down1 ..., up1 ..., outc; 0 is full resolution, None elsewhere."""

    def __init__(self, ledger: Ledger) -> None:
        self._depth = self._depth_of(ledger)
        self._weight_shapes = set()
        for storage in ledger.storages:
            if storage.role == "params":
                self._weight_shapes.add(storage.shape)
        self._encoder = self._map_sizes(ledger, r"inc|down\d+")
        self._decoder: LevelSizes = {}
        if self._depth in self._encoder:  # the bottom is where the decoder begins
            self._decoder[self._depth] = self._encoder[self._depth]
        self._decoder |= self._map_sizes(ledger, r"up\d+")

    def of_module(self, path: str) -> int | None:
        """Return the level that a module or phase works on."""
        if self._depth is None:
            return None
        stage = stage_of(path)
        match = re.fullmatch(r"(down|up)(\d+)", stage)
        if match is None:
            return 0 if stage in ("inc", "outc", "data", "loss") else None
        number = int(match[2])
        return number if match[1] == "down" else self._depth - number

    def of_storage(self, storage: Storage) -> int | None:
        """Return the level of a map's resolution, whatever module made it; else its module's level.

        In backward, pooling makes maps of the finer level. Valid convolutions make the decoder's maps smaller than the
        encoder's of the same level; a decoder stage sees those only as the skip that it crops.
        """
        module = storage.scope.module
        module_level = self.of_module(module)
        sizes = self._encoder if module.startswith(("inc", "down")) else self._decoder
        if not sizes or not self._is_map(storage):
            return module_level
        voxels = prod(storage.shape[-3:])
        if module_level in sizes:
            own_sizes = sizes[module_level]
            if min(own_sizes) <= voxels <= max(own_sizes):
                return module_level
        known: list[tuple[int | None, int]] = []
        for level, level_sizes in sizes.items():
            known.append((level, min(level_sizes)))
            known.append((level, max(level_sizes)))
        for size in self._encoder.get(module_level, ()):
            known.append((module_level, size))
        nearest, _ = min(known, key=lambda entry: abs(log(voxels / entry[1])))
        return nearest

    def _depth_of(self, ledger: Ledger) -> int | None:
        """Return the deepest level; None for another network."""
        stages = {stage_of(storage.scope.module) for storage in ledger.storages}
        if "inc" not in stages:
            return None
        depths = [int(stage.removeprefix("down")) for stage in stages if re.fullmatch(r"down\d+", stage)]
        return max(depths, default=0)

    def _is_map(self, storage: Storage) -> bool:
        is_volume = len(storage.shape) in (4, 5) and storage.shape not in self._weight_shapes
        return storage.role is None and is_volume

    def _map_sizes(self, ledger: Ledger, stages: str) -> LevelSizes:
        """Return the sizes of one side of the U, from the smallest map of a block up.

        A 1x1x1 convolution may precede an upsampling.
        """
        all_sizes: LevelSizes = defaultdict(set)
        block_sizes: LevelSizes = defaultdict(set)
        for storage in ledger.storages:
            stage, _, name = short_name(storage.scope.module).partition(".")
            if storage.operation != str(CONVOLUTION) or storage.scope.is_in_tiles:
                continue  # a tile is a few rows of a map
            if not re.fullmatch(stages, stage):
                continue
            level = self.of_module(stage)
            voxels = prod(storage.shape[2:])
            all_sizes[level].add(voxels)
            if name.startswith("conv"):
                block_sizes[level].add(voxels)
        sizes: LevelSizes = {}
        for level, voxels_of_maps in all_sizes.items():
            smallest = min(block_sizes[level], default=0)
            sizes[level] = {voxels for voxels in voxels_of_maps if voxels >= smallest}
        return sizes


def by_level(ledger: Ledger, moment: int) -> list[dict[str, Any]]:
    """Return one row per level, shallowest first, then `other` for bytes of no level: its bytes, also by category."""
    rows = _grouped(ledger, moment, Levels(ledger).of_storage)
    order = sorted(rows, key=lambda level: (level is None, level))
    named = []
    for level in order:
        name = "other" if level is None else level
        named.append({"level": name, **rows[level]})
    return named


def by_layer(ledger: Ledger, moment: int) -> list[dict[str, Any]]:
    """Return one row per layer, in the order of work: its level, the bytes that it made, also by category."""
    levels = Levels(ledger)

    def layer_of(storage: Storage) -> str:
        return ledger.layer(storage.scope.module)

    rows = _grouped(ledger, moment, layer_of)
    in_order = sorted(ledger.storages, key=lambda storage: storage.role is not None)  # claimed ones are in no order
    layers = dict.fromkeys(map(layer_of, in_order))
    named = []
    for layer in layers:
        if layer in rows:
            named.append({"module": layer, "level": levels.of_module(layer), **rows[layer]})
    return named


def _grouped(ledger: Ledger, moment: int, key: Callable[[Storage], Any]) -> dict[Any, Row]:
    rows: dict[Any, Row] = {}
    empty = dict.fromkeys(("bytes", *CATEGORIES), 0)
    for storage in ledger.alive_at(moment):
        row = rows.setdefault(key(storage), dict(empty))
        category = ledger.category(storage)
        row["bytes"] += storage.bytes
        row[category] += storage.bytes
    return rows

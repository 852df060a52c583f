"""A ledger in numbers and words: who holds the bytes, by phase, level of the U and layer, and each event.

`write_snapshot` writes it as a file for PyTorch's memory visualiser.
"""

import pickle
import re
from bisect import insort
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from math import log, prod
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from unet3d.base.files import replacing
from unet3d.memory.ledger import ADOPTED, CATEGORIES, WHOLE, Ledger, Storage
from unet3d.model.unet import UNet3D
from unet3d.recomputing.workspaces import CONVOLUTION
from unet3d.training.step import PHASES

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
        stages = {stage_of(storage.scope.module) for storage in ledger.storages}
        depth = max((int(stage[4:]) for stage in stages if re.fullmatch(r"down\d+", stage)), default=0)
        self._level_of: dict[str, int] = {}  # Of each stage; empty for another network.
        if "inc" in stages:
            self._level_of = dict.fromkeys(("inc", "outc", "data", "loss"), 0)
            for number in range(depth + 1):
                self._level_of |= {f"down{number}": number, f"up{number}": depth - number}
        self._weight_shapes = {storage.shape for storage in ledger.storages if storage.role == "params"}
        self._encoder = self._map_sizes(ledger, r"inc|down\d+")
        self._decoder: LevelSizes = {}
        if depth in self._encoder:  # the bottom is where the decoder begins
            self._decoder[depth] = self._encoder[depth]
        self._decoder |= self._map_sizes(ledger, r"up\d+")

    def of_module(self, path: str) -> int | None:
        """Return the level that a module or phase works on."""
        return self._level_of.get(stage_of(path))

    def of_storage(self, storage: Storage) -> int | None:
        """Return the level of a map's resolution, whatever module made it; else its module's level.

        In backward, pooling makes maps of the finer level. Valid convolutions make the decoder's maps smaller than the
        encoder's of the same level; a decoder stage sees those only as the skip that it crops.
        """
        module = storage.scope.module
        module_level = self.of_module(module)
        sizes = self._encoder if module.startswith(("inc", "down")) else self._decoder
        is_volume = len(storage.shape) in (4, 5) and storage.shape not in self._weight_shapes
        if not sizes or storage.role is not None or not is_volume:
            return module_level
        voxels = prod(storage.shape[-3:])
        if module_level in sizes and min(sizes[module_level]) <= voxels <= max(sizes[module_level]):
            return module_level
        known = [(level, size) for level, found in sizes.items() for size in (min(found), max(found))]
        known += [(module_level, size) for size in self._encoder.get(module_level, ())]
        nearest, _ = min(known, key=lambda entry: abs(log(voxels / entry[1])))
        return nearest

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
        sizes = {}
        for level, found in all_sizes.items():
            smallest = min(block_sizes[level], default=0)
            sizes[level] = {voxels for voxels in found if voxels >= smallest}
        return sizes


def by_level(ledger: Ledger, moment: int) -> list[dict[str, Any]]:
    """Return one row per level, shallowest first, then `other` for bytes of no level: its bytes, also by category."""
    rows = _grouped(ledger, moment, Levels(ledger).of_storage)
    order = sorted(rows, key=lambda level: (level is None, level))
    return [{"level": "other" if level is None else level, **rows[level]} for level in order]


def by_layer(ledger: Ledger, moment: int) -> list[dict[str, Any]]:
    """Return one row per layer, in the order of work: its level, the bytes that it made, also by category."""
    levels = Levels(ledger)

    def layer_of(storage: Storage) -> str:
        return ledger.layer(storage.scope.module)

    rows = _grouped(ledger, moment, layer_of)
    in_order = sorted(ledger.storages, key=lambda storage: storage.role is not None)  # claimed ones are in no order
    layers = dict.fromkeys(map(layer_of, in_order))
    return [{"module": layer, "level": levels.of_module(layer), **rows[layer]} for layer in layers if layer in rows]


def _grouped(ledger: Ledger, moment: int, key: Callable[[Storage], Any]) -> dict[Any, Row]:
    rows: dict[Any, Row] = {}
    empty = dict.fromkeys(("bytes", *CATEGORIES), 0)
    for storage in ledger.alive_at(moment):
        row = rows.setdefault(key(storage), dict(empty))
        category = ledger.category(storage)
        row["bytes"] += storage.bytes
        row[category] += storage.bytes
    return rows


PhaseBytes = dict[str, dict[str, int]]  # phase -> bytes in the "first" step, where known, and in later ones, "steady"


def summarise_ledger(ledger: Ledger) -> dict[str, Any]:
    """Return a step's entries in memory.json, in bytes.

    `phases` are peaks; `phase_ends` what statements between phases would see, after the last micro-batch; `state` what
    parameters cost: weights (with buffers) and gradients as the last update begins, the optimizer's state after it.
    """
    alive = ledger.alive_bytes()
    spans = ledger.phase_spans()
    peak = peak_moment(ledger)
    moments = defaultdict[str, list[int]](list)
    for phase, start, end in last_step(ledger):
        moments[phase] += range(start, end + 1)
    highest = {phase: max(of_phase, key=alive.__getitem__) for phase, of_phase in moments.items()}
    last_marks = {name: start for start, name in ledger.marks}
    before = ledger.categories_at(last_marks.get("step", 0))
    after = ledger.categories_at(last_marks.get("end", 0))
    return {
        "peak_bytes": alive[peak],
        "phases": by_phase((name, max(alive[start : end + 1])) for name, start, end in spans),
        "moment": describe(ledger, peak),
        "categories": ledger.categories_at(peak),
        "phase_categories": {phase: ledger.categories_at(moment) for phase, moment in highest.items()},
        "phase_ends": by_phase(((name, alive[end]) for name, _, end in spans), lambda earlier, last: last),
        "levels": by_level(ledger, peak),
        "layers": by_layer(ledger, peak),
        "state": {"params": before["params"], "grads": before["grads"], "optimizer": after["optimizer"]},
    }


def peak_moment(ledger: Ledger) -> int:
    """Return how many events had happened when most bytes were alive, for the first time."""
    alive = ledger.alive_bytes()
    return alive.index(max(alive))


def describe(ledger: Ledger, moment: int) -> dict[str, Any]:
    """Return the allocation that led to a moment: its phase, module and operation, and in words."""
    index, _ = ledger.events[moment - 1]
    storage = ledger.storages[index]
    phase = next(name for start, name in reversed(ledger.marks) if start < moment)
    module = ledger.layer(storage.scope.module)
    is_recomputed = storage.scope.is_recomputed
    work = "recomputation" if is_recomputed else phase
    owner = {"loss": "the loss", WHOLE: f"the network's {WHOLE}"}.get(module, module)
    is_outside = module in (phase, f"({phase})", "before", "end")
    return {
        "phase": phase,
        "module": module,
        "operation": storage.operation.removeprefix("aten.").partition(".")[0],
        "is_recomputed": is_recomputed,
        "words": work if is_outside else f"{work} of {owner}",
    }


def dtype_name(dtype: Any) -> str:
    """Return `float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def last_step(ledger: Ledger) -> list[tuple[str, int, int]]:
    """Return the `phase_spans` of the last complete step; empty without one."""
    spans = ledger.phase_spans()
    ends = [index for index, (name, _, _) in enumerate(spans) if name == "end"]
    if not ends:
        return []
    begin = ends[-2] + 1 if len(ends) > 1 else 0
    return [span for span in spans[begin : ends[-1]] if span[0] in PHASES]


def by_phase(values: Iterable[tuple[str, int]], combine: Callable[[int, int], int] = max) -> PhaseBytes:
    """Return a value per phase, from (phase, value) in order of time.

    `combine` merges the values of several micro-batches.
    """
    steps: list[dict[str, int]] = [{}]
    for name, value in values:
        if name == "end":
            steps.append({})
        elif name in PHASES:
            steps[-1][name] = combine(steps[-1].get(name, 0), value)
    whole_steps = [step for step in steps if len(step) == len(PHASES)]
    return first_and_steady(whole_steps)


def first_and_steady(steps: list[dict[str, int]]) -> PhaseBytes:
    """Return the first step's values, and the highest of the later steps (of the first without another)."""
    if not steps:
        return {}
    first = steps[0]
    later = steps[1:] or steps
    return {phase: {"first": first[phase], "steady": max(step[phase] for step in later)} for phase in PHASES}


class Group(NamedTuple):
    """Storages of one shape, type and category."""

    number: int
    shape: tuple[int, ...]
    dtype: str
    category: str
    bytes: int  # The sum of all of them.


def held(ledger: Ledger, moment: int) -> list[Group]:
    """Return the storages alive at a moment in groups, the largest first."""
    counts: Counter[tuple] = Counter()
    for storage in ledger.alive_at(moment):
        counts[storage.shape, dtype_name(storage.dtype), ledger.category(storage), storage.bytes] += 1
    groups = []
    for (shape, dtype, category, size), number in counts.items():
        groups.append(Group(number, shape, dtype, category, number * size))
    return sorted(groups, key=lambda group: -group.bytes)


class TimelineRow(NamedTuple):
    """One event of a ledger. `module` and `category` belong to its storage."""

    phase: str
    module: str
    category: str
    change_bytes: int  # > 0: allocated


def timeline_rows(ledger: Ledger) -> tuple[dict[str, int], list[TimelineRow]]:
    """Return the bytes alive by category as the last step begins, and every event from there to its end."""
    spans = last_step(ledger)
    rows = []
    for phase, start, end in spans:
        for index, change in ledger.events[start:end]:
            if not change:  # The storage does not count.
                continue
            storage = ledger.storages[index]
            layer = ledger.layer(storage.scope.module)
            rows.append(TimelineRow(phase, layer, ledger.category(storage), change))
    begin = spans[0][1] if spans else 0
    return ledger.categories_at(begin), rows


def write_snapshot(ledger: Ledger, path: Path) -> None:
    """Write a pickle for pytorch.org/memory_viz and torch/cuda/_memory_viz.py, as device 0.

    Sizes in bytes. The addresses are not an allocator's: each storage takes the lowest gap that holds it, and the one
    segment is as long as that needs. A frame says what made the storage, and gives its event as the line number.
    """
    with replacing(path) as file:
        pickle.dump(viewer_snapshot(ledger), file, protocol=4)  # the viewer reads 2 to 4


def viewer_snapshot(ledger: Ledger) -> dict[str, list]:
    """Return `segments` and `device_traces` in the layout of `torch.cuda.memory._snapshot`."""
    taken: list[tuple[int, int]] = []  # (address, storage) of what is alive, in order
    blocks: dict[int, dict[str, Any]] = {}  # Where these storages lie.
    actions = []
    end = 0
    for index, change in ledger.events:
        if change > 0:
            storage = ledger.storages[index]
            address = 0
            for start, other in taken:
                if start - address >= change:
                    break
                address = start + blocks[other]["size"]
            insort(taken, (address, index))
            blocks[index] = {"addr": address, "size": change, "stream": 0, "frames": _frames(ledger, storage)}
            actions.append({"action": "alloc", **blocks[index], "category": ledger.category(storage)})
            end = max(end, address + change)
        elif change < 0:
            block = blocks.pop(index)
            taken.remove((block["addr"], index))
            actions += [{"action": "free_requested", **block}, {"action": "free_completed", **block}]
    if not end:
        return {"segments": [], "device_traces": [[]]}
    opening = {
        "action": "segment_alloc",
        "addr": 0,
        "size": end,
        "stream": 0,
        "frames": [{"filename": "all storages", "line": 0, "name": "ledger"}],
        "category": "unknown",  # the viewer fails where there are categories and none is "unknown"
    }
    return {"segments": [_segment([blocks[index] for _, index in taken], end)], "device_traces": [[opening, *actions]]}


def _segment(alive: Sequence[Mapping[str, Any]], end: int) -> dict[str, Any]:
    """Return the segment at the last event, from what is alive, by address.

    Its blocks leave no gap, because the viewer adds up their sizes to place them.
    """
    blocks = []
    cursor = 0
    for block in [*alive, {"addr": end, "size": 0, "frames": []}]:
        gap = {"addr": cursor, "size": block["addr"] - cursor, "frames": []}
        for state, part in (("inactive", gap), ("active_allocated", block)):
            if part["size"]:
                place = {"address": part["addr"], "size": part["size"], "requested_size": part["size"]}
                blocks.append({**place, "state": state, "frames": part["frames"]})
        cursor = block["addr"] + block["size"]
    used = sum(block["size"] for block in alive)
    sizes = {"total_size": end, "allocated_size": used, "active_size": used, "requested_size": used}
    return {"device": 0, "address": 0, "stream": 0, "segment_type": "large", **sizes, "blocks": blocks}


def _frames(ledger: Ledger, storage: Storage) -> list[dict[str, Any]]:
    """Return a stack of two, innermost first: what made the storage, and in which step (from 1) and phase."""
    origin = describe(ledger, storage.born + 1)
    words = origin["words"]
    if storage.operation == ADOPTED:  # made by nothing that the ledger saw
        words = f"{ledger.category(storage)} of {ledger.layer(storage.scope.module)}"
    description = f"{words}, {dtype_name(storage.dtype)} {storage.shape}"
    innermost = {"filename": description, "line": storage.born, "name": origin["operation"]}
    step = 1 + sum(name == "end" for _, name in ledger.marks[: storage.phase])
    return [innermost, {"filename": "step", "line": step, "name": origin["phase"]}]

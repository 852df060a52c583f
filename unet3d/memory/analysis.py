"""What a ledger's events mean: who holds the bytes at the peak, at which level of the U, and when."""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from math import log, prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from unet3d.memory.ledger import CATEGORIES, WHOLE, Ledger, Storage
from unet3d.model.unet import UNet3D
from unet3d.training.step import PHASES

ADAM = 16  # bytes per parameter in float32: weight 4, gradient 4, two moments 8
Sizes = dict[int | None, set[int]]  # level -> voxels of the maps that convolutions make there
PhaseBytes = dict[str, dict[str, int]]  # phase -> bytes in the "first" step, where known, and in later ones, "steady"


def summarise_ledger(ledger: Ledger) -> dict[str, Any]:
    """A step's entries in memory.json beside its peaks, in bytes; `state` is what parameters cost."""
    moment = ledger.peak_moment()
    return {
        "moment": describe(ledger, moment),
        "categories": ledger.categories_at(moment),
        "phase_categories": {phase: ledger.categories_at(at) for phase, at in _steady_moments(ledger).items()},
        "phase_ends": phase_ends(ledger),
        "levels": by_level(ledger, moment),
        "layers": by_layer(ledger, moment),
        "state": state_bytes(ledger),
    }


def describe(ledger: Ledger, moment: int) -> dict[str, Any]:
    """The allocation that led to a moment: its phase, module and operation, and in words."""
    storage = ledger.storages[ledger.events[moment - 1][0]]
    phase = next(name for start, name in reversed(ledger.marks) if start < moment)
    module, operation = ledger.layer(storage.scope.module), operation_name(storage.operation)
    is_recomputed = storage.scope.is_recomputed
    work = "recomputation" if is_recomputed else phase
    owner = {"loss": "the loss", WHOLE: f"the network's {WHOLE}"}.get(module, module)
    words = work if module in (phase, f"({phase})", "before", "end") else f"{work} of {owner}"
    return {"phase": phase, "module": module, "operation": operation, "is_recomputed": is_recomputed, "words": words}


def layer_names(model: nn.Module, depth: int | None = None) -> Callable[[str], str]:
    """Return what names a module's path in tables: all of it, or its first `depth` parts.

    Without `depth`, those of the package's own network are short: `up1.block.conv2.norm` is `up1.conv2`.
    """
    if depth is not None:
        return lambda path: ".".join(path.split(".")[:depth])
    return _own_layer if isinstance(model, UNet3D) else str


def _own_layer(path: str) -> str:
    return ".".join([part for part in path.split(".") if part != "block"][:2])


def operation_name(operation: str) -> str:
    """`aten.convolution_backward.default` as `convolution_backward`."""
    return operation.removeprefix("aten.").partition(".")[0]


def last_step(ledger: Ledger) -> list[tuple[str, int, int]]:
    """The `phase_spans` of the last complete step."""
    spans = ledger.phase_spans()
    ends = [-1, *(i for i, (name, _, _) in enumerate(spans) if name == "end")]
    return [span for span in spans[ends[-2] + 1 : ends[-1]] if span[0] in PHASES] if len(ends) > 1 else []


def _steady_moments(ledger: Ledger) -> dict[str, int]:
    """For each phase, the moment in the last step when most bytes were alive."""
    alive, moments = ledger.alive_bytes(), defaultdict[str, list[int]](list)
    for name, start, end in last_step(ledger):
        moments[name] += range(start, end + 1)
    return {name: max(found, key=alive.__getitem__) for name, found in moments.items()}


def by_phase(values: Iterable[tuple[str, int]], combine: Callable[[int, int], int] = max) -> PhaseBytes:
    """A value of each phase, from (phase, value) in order of time; `combine` merges those of several micro-batches."""
    steps: list[dict[str, int]] = [{}]
    for name, value in values:
        if name == "end":
            steps.append({})
        elif name in PHASES:
            steps[-1][name] = combine(steps[-1].get(name, 0), value)
    return first_and_steady([step for step in steps if len(step) == len(PHASES)])


def first_and_steady(steps: list[dict[str, int]]) -> PhaseBytes:
    """The first step's values, and the highest of the later steps (of the first if there is no other)."""
    later = steps[1:] or steps
    return {p: {"first": steps[0][p], "steady": max(step[p] for step in later)} for p in PHASES if steps}


def phase_ends(ledger: Ledger) -> PhaseBytes:
    """Bytes alive as each phase ends, of the last micro-batch: what statements between phases would see."""
    alive = ledger.alive_bytes()
    return by_phase(((name, alive[end]) for name, _, end in ledger.phase_spans()), lambda earlier, last: last)


def state_bytes(ledger: Ledger) -> dict[str, int]:
    """Bytes of weights (with buffers) and gradients as the last update begins, of optimizer state after it."""
    moments = {name: start for start, name in ledger.marks}  # the last of each name
    before, after = (ledger.categories_at(moments.get(name, 0)) for name in ("step", "end"))
    return {"params": before["params"], "grads": before["grads"], "optimizer": after["optimizer"]}


class Levels:
    """The levels of a U-Net with stages inc, down1 ..., up1 ..., outc; 0 is full resolution, None elsewhere."""

    def __init__(self, ledger: Ledger) -> None:
        stages = {s.scope.module.partition(".")[0] for s in ledger.storages}
        depths = [int(stage[4:]) for stage in stages if re.fullmatch(r"down\d+", stage)]
        self._depth = max(depths, default=0) if "inc" in stages else None
        self._weights = {s.shape for s in ledger.storages if s.role == "params"}
        self._encoder = self._map_sizes(ledger, r"inc|down\d+")
        bottom = {level: sizes for level, sizes in self._encoder.items() if level == self._depth}
        self._decoder = bottom | self._map_sizes(ledger, r"up\d+")

    def of_module(self, path: str) -> int | None:
        """The level that a module or phase works on."""
        stage = path.partition(".")[0]
        if self._depth is None:
            return None
        if found := re.fullmatch(r"(down|up)(\d+)", stage):
            return int(found[2]) if found[1] == "down" else self._depth - int(found[2])
        return 0 if stage in ("inc", "outc", "data", "loss") else None

    def of_storage(self, s: Storage) -> int | None:
        """The level of a map's resolution, whatever module made it; else its module's level.

        In backward, pooling makes maps of the finer level. Valid convolutions make the decoder's maps smaller than the
        encoder's of the same level; a decoder stage sees those only as the skip that it crops.
        """
        own, is_map = self.of_module(s.scope.module), len(s.shape) in (4, 5) and s.shape not in self._weights
        sizes = self._encoder if s.scope.module.startswith(("inc", "down")) else self._decoder
        if s.role is not None or not is_map or not sizes:
            return own
        voxels, ends = prod(s.shape[-3:]), {level: (min(found), max(found)) for level, found in sizes.items()}
        if own in ends and ends[own][0] <= voxels <= ends[own][1]:
            return own
        known = [(level, size) for level, pair in ends.items() for size in pair]
        known += [(own, size) for size in self._encoder.get(own, ())]
        return min(known, key=lambda pair: abs(log(voxels / pair[1])))[0]

    def _map_sizes(self, ledger: Ledger, stages: str) -> Sizes:
        """Of one side of the U, from the smallest map of a block up: a 1x1x1 convolution may precede an upsampling."""
        made: dict[int | None, list[tuple[int, bool]]] = defaultdict(list)
        for s in ledger.storages:
            stage, _, name = _own_layer(s.scope.module).partition(".")
            is_map = s.operation == "aten.convolution.default" and not s.scope.is_in_slabs  # else of a few rows
            if is_map and re.fullmatch(stages, stage):
                made[self.of_module(stage)].append((prod(s.shape[2:]), name.startswith("conv")))
        least = {level: min((size for size, in_block in found if in_block), default=0) for level, found in made.items()}
        return {level: {size for size, _ in found if size >= least[level]} for level, found in made.items()}


def by_level(ledger: Ledger, moment: int) -> list[dict[str, Any]]:
    """A row a level, shallowest first, then `other` for bytes of no level: its bytes, also by category."""
    rows = _grouped(ledger, moment, Levels(ledger).of_storage)
    order = sorted(rows, key=lambda level: (level is None, level))
    return [{"level": "other" if level is None else level, **rows[level]} for level in order]


def by_layer(ledger: Ledger, moment: int) -> list[dict[str, Any]]:
    """A row a layer, in the order of work: its level, the bytes that it made, also by category."""
    levels, rows = Levels(ledger), _grouped(ledger, moment, lambda s: ledger.layer(s.scope.module))
    made = sorted(ledger.storages, key=lambda s: s.role is not None)  # claimed ones are in no order of work
    order = dict.fromkeys(ledger.layer(s.scope.module) for s in made)
    return [{"module": name, "level": levels.of_module(name), **rows[name]} for name in order if name in rows]


def _grouped(ledger: Ledger, moment: int, key: Callable[[Storage], Any]) -> dict[Any, dict[str, int]]:
    rows: dict[Any, dict[str, int]] = {}
    for storage in ledger.alive_at(moment):
        row = rows.setdefault(key(storage), {"bytes": 0} | dict.fromkeys(CATEGORIES, 0))
        row["bytes"] += storage.bytes
        row[ledger.category(storage)] += storage.bytes
    return rows


class Group(NamedTuple):
    """Storages of one shape, type and category."""

    number: int
    shape: tuple[int, ...]
    dtype: str
    category: str
    bytes: int  # of all of them


def held(ledger: Ledger, moment: int) -> list[Group]:
    """What is alive at a moment, largest group first."""
    return _groups(ledger, ledger.alive_at(moment))


def changed_groups(ledger: Ledger, start: int, end: int) -> tuple[list[Group], list[Group]]:
    """What is alive at event `end` and was not at `start`, and the reverse, largest groups first."""
    appeared = _groups(ledger, (s for s in ledger.alive_at(end) if s.born >= start))
    return appeared, _groups(ledger, (s for s in ledger.alive_at(start) if s.died is not None and s.died < end))


def _groups(ledger: Ledger, storages: Iterable[Storage]) -> list[Group]:
    counts: Counter[tuple] = Counter()
    for s in storages:
        counts[s.shape, str(s.dtype).removeprefix("torch."), ledger.category(s), s.bytes] += 1
    found = [Group(n, shape, dtype, kind, n * size) for (shape, dtype, kind, size), n in counts.items()]
    return sorted(found, key=lambda group: -group.bytes)


class TimelineRow(NamedTuple):
    """One event. `module`, `operation` and `category` are those of its storage."""

    event: int
    phase: str
    module: str
    operation: str
    category: str
    change_bytes: int  # > 0: allocated
    alive_bytes: int  # after the event


def timeline_rows(ledger: Ledger) -> tuple[dict[str, int], list[TimelineRow]]:
    """Bytes alive by category as the last step begins, and every event from there to its end."""
    spans, alive, rows = last_step(ledger), ledger.alive_bytes(), []
    for phase, start, end in spans:
        for event, (index, change) in enumerate(ledger.events[start:end], start):
            if not change:  # of a storage that does not count
                continue
            s = ledger.storages[index]
            words = (ledger.layer(s.scope.module), operation_name(s.operation), ledger.category(s))
            rows.append(TimelineRow(event, phase, *words, change, alive[event + 1]))
    return ledger.categories_at(spans[0][1] if spans else 0), rows


class LayerCount(NamedTuple):
    """One module in one forward pass; counts are elements, `output_bytes` bytes of the output map."""

    module: str
    parameters: int  # its own, not its children's
    inputs: int
    outputs: int
    output_bytes: int
    is_leaf: bool
    is_in_place: bool


def layer_counts(model: nn.Module, forward: Callable[[], Any]) -> list[LayerCount]:
    """Run `forward` once, which runs `model`, and count every module's input and output in the order they finish."""
    counts: list[LayerCount] = []

    def count(path: str, module: nn.Module, inputs: Any, output: Any) -> None:
        given, made, own = _first(inputs), _first(output), sum(p.numel() for p in module.parameters(recurse=False))
        is_leaf, is_in_place = not any(module.children()), bool(getattr(module, "inplace", False))
        counts.append(LayerCount(path, own, given.numel(), made.numel(), made.nbytes, is_leaf, is_in_place))

    with ExitStack() as hooks:
        for path, module in model.named_modules():
            hooks.enter_context(module.register_forward_hook(partial(count, path)))
        forward()
    return counts


def _first(tree: Any) -> Tensor:
    """The map that flows on; the skips that a state also carries are other modules' outputs. Empty if there is none."""
    return next((leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)), torch.empty(0))


def usual_estimates(counts: Sequence[LayerCount], parameters: int, weights: int, saved: int) -> dict[str, int]:
    """Estimate -> bytes. `weights`: bytes of the parameters; `saved`: bytes that autograd holds as backward begins."""
    leaves = [count for count in counts if count.is_leaf]
    outputs = sum(count.output_bytes for count in leaves if not count.is_in_place)
    weighted = sum(count.output_bytes for count in leaves if count.parameters)
    return {
        "4 x parameters (weights, gradients, Adam)": 4 * weights,
        "modelsize, forward: weights + outputs of layers": weights + outputs,
        "modelsize, with backward: weights + 2 x those": weights + 2 * outputs,
        "torchinfo: weights + 2 x outputs of layers with weights": weights + 2 * weighted,
        "hooks: 16 B/parameter + outputs of layers": ADAM * parameters + sum(c.output_bytes for c in leaves),
        "hooks: 16 B/parameter + outputs of all modules": ADAM * parameters + sum(c.output_bytes for c in counts),
        "16 B/parameter + what autograd saves": ADAM * parameters + saved,
    }

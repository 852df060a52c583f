"""What a ledger's events mean: who holds the bytes at the peak, at which level of the U, and when."""

import re
from collections import Counter
from collections.abc import Callable, Iterable
from math import log, prod
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from unet3d.memory.ledger import (
    CATEGORIES,
    Ledger,
    Row,
    Storage,
    alive_at,
    categories_at,
    category,
    levels,
    peak_moment,
    phase_spans,
)
from unet3d.train.step import PHASES

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
        level = int(found[2]) if found[1] == "down" else down - int(found[2])
        return level if level >= 0 else None  # None: a network of the user's own whose names are like the U's
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
        known = [(level, size) for level, found in sizes.items() if found for size in (min(found), max(found))]
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


def summarise_ledger(ledger: Ledger) -> dict[str, Any]:
    """What memory.json says of a step beside its peaks, in bytes: `moment`, `categories`, `levels` and `layers` of the
    peak, `phase_categories` and `phase_ends` of every phase, and `state`, what parameters cost.
    """
    moment = peak_moment(ledger)
    return {
        "moment": describe(ledger, moment),
        "categories": categories_at(ledger, moment),
        "phase_categories": {phase: categories_at(ledger, at) for phase, at in steady_moments(ledger).items()},
        "phase_ends": phase_ends(ledger),
        "levels": by_level(ledger, moment),
        "layers": by_layer(ledger, moment),
        "state": state_bytes(ledger),
    }


def describe(ledger: Ledger, moment: int) -> dict[str, Any]:
    """The allocation that led to a moment: its phase, module and operation, and in words."""
    storage = ledger.storages[ledger.events[moment - 1][0]]
    phase = next(name for start, name in reversed(ledger.marks) if start < moment)
    module, operation = layer(storage.place.module), operation_name(storage.operation)
    done = "recomputation" if storage.place.is_recomputed else phase
    of = "the loss" if module == "loss" else module
    words = done if module in (phase, "before", "end") else f"{done} of {of}"
    return {
        "phase": phase,
        "module": module,
        "operation": operation,
        "is_recomputed": storage.place.is_recomputed,
        "words": words,
    }


def operation_name(operation: str) -> str:
    """`aten.convolution_backward.default` as people say it."""
    return operation.removeprefix("aten.").partition(".")[0]


def steady_moments(ledger: Ledger) -> dict[str, int]:
    """For each phase, the moment in the last step when most bytes were alive."""
    alive = levels(ledger)
    best: dict[str, int] = {}
    for name, start, end in last_step(ledger):
        moment = max(range(start, end + 1), key=lambda at: (alive[at], -at))
        if name not in best or alive[moment] > alive[best[name]]:
            best[name] = moment
    return best


def last_step(ledger: Ledger) -> list[tuple[str, int, int]]:
    """The phases of the last complete step."""
    spans = phase_spans(ledger)
    ends = [i for i, (name, _, _) in enumerate(spans) if name == "end"]
    if not ends:
        return []
    first = ends[-2] + 1 if len(ends) > 1 else 0
    return [span for span in spans[first : ends[-1]] if span[0] in PHASES]


def phase_ends(ledger: Ledger) -> dict[str, dict[str, int]]:
    """Bytes alive as each phase ends, in the first step and in the last: what statements between phases would see.

    With several micro-batches, as the phase of the last one ends.
    """
    alive = levels(ledger)
    steps: list[dict[str, int]] = [{}]
    for name, _, end in phase_spans(ledger):
        if name == "end":
            steps.append({})
        elif name in PHASES:
            steps[-1][name] = alive[end]
    steps = [step for step in steps if len(step) == len(PHASES)]
    return {phase: {"first": steps[0][phase], "steady": steps[-1][phase]} for phase in PHASES if steps}


def state_bytes(ledger: Ledger) -> dict[str, int]:
    """Bytes of weights (with buffers) and gradients as the last update begins, of optimizer state after it."""
    begins = [start for start, name in ledger.marks if name == "step"]
    ends = [start for start, name in ledger.marks if name == "end"]
    before, after = (categories_at(ledger, moments[-1] if moments else 0) for moments in (begins, ends))
    return {"params": before["params"], "grads": before["grads"], "optimizer": after["optimizer"]}


class Group(NamedTuple):
    """Storages of one shape, type and purpose."""

    number: int
    shape: tuple[int, ...]
    dtype: str
    category: str
    bytes: int  # of all of them


def appeared(ledger: Ledger, start: int, end: int) -> list[Group]:
    """What is alive at event `end` and was not at `start`, largest group first."""
    return _groups(ledger, (s for s in alive_at(ledger, end) if s.born >= start))


def vanished(ledger: Ledger, start: int, end: int) -> list[Group]:
    """What was alive at event `start` and is no more at `end`, largest group first."""
    return _groups(ledger, (s for s in alive_at(ledger, start) if s.died is not None and s.died < end))


def held(ledger: Ledger, moment: int) -> list[Group]:
    """What is alive at a moment, largest group first."""
    return _groups(ledger, alive_at(ledger, moment))


def _groups(ledger: Ledger, storages: Iterable[Storage]) -> list[Group]:
    counts: Counter[tuple] = Counter()
    for s in storages:
        counts[s.shape, str(s.dtype).removeprefix("torch."), category(ledger, s), s.bytes] += 1
    found = [Group(n, shape, dtype, kind, n * size) for (shape, dtype, kind, size), n in counts.items()]
    return sorted(found, key=lambda group: -group.bytes)


def timeline_rows(ledger: Ledger) -> tuple[dict[str, int], list[Row]]:
    """Bytes alive by category as the last step begins, and every event from there to its end."""
    spans = last_step(ledger)
    if not spans:
        return dict.fromkeys(CATEGORIES, 0), []
    alive, rows = levels(ledger), []
    for phase, start, end in spans:
        for event in range(start, end):
            index, change = ledger.events[event]
            s = ledger.storages[index]
            name = operation_name(s.operation)
            rows.append(Row(event, phase, layer(s.place.module), name, category(ledger, s), change, alive[event + 1]))
    return categories_at(ledger, spans[0][1]), rows


ADAM = 16  # bytes per parameter in float32: weight 4, gradient 4, two moments 8


class LayerCount(NamedTuple):
    """One module in one forward pass; counts are elements, `output_bytes` bytes of the output map."""

    module: str
    layer: str
    parameters: int  # its own, not its children's
    inputs: int
    outputs: int
    output_bytes: int
    is_leaf: bool
    is_in_place: bool


def layer_counts(model: nn.Module, forward: Callable[[], Any]) -> list[LayerCount]:
    """Run `forward` once, which runs `model`, and count every module's input and output in the order they finish."""
    found: list[LayerCount] = []
    handles: list[RemovableHandle] = []
    for path, module in model.named_modules():

        def count(module: nn.Module, inputs: Any, output: Any, path: str = path) -> None:
            found.append(_count(path, module, _first(inputs), _first(output)))

        handles.append(module.register_forward_hook(count))
    try:
        forward()
    finally:
        for handle in handles:
            handle.remove()
    return found


def _count(path: str, module: nn.Module, given: Tensor, made: Tensor) -> LayerCount:
    parameters = sum(p.numel() for p in module.parameters(recurse=False))
    in_place = bool(getattr(module, "inplace", False))
    is_leaf = not any(module.children())
    name = type(module).__name__
    return LayerCount(path, name, parameters, given.numel(), made.numel(), made.nbytes, is_leaf, in_place)


def _first(tree: Any) -> Tensor:
    """The map that flows on; a state also carries skips, which are outputs of others."""
    found: Tensor = next(leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))
    return found


def usual_estimates(counts: Iterable[LayerCount], parameters: int, weights: int, saved: int) -> dict[str, int]:
    """Estimate -> bytes. `weights`: bytes of the parameters; `saved`: bytes that autograd holds as backward begins."""
    counts = list(counts)
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

"""The sizes by which a schedule is chosen: bytes of maps, work of making them, what lies beside them meanwhile."""

import itertools
from collections.abc import Sequence

import torch
from torch.utils.flop_counter import FlopCounterMode

from unet3d.recomputing.graph import Value
from unet3d.recomputing.maps import Map, Maps, bytes_of
from unet3d.recomputing.run import Program
from unet3d.recomputing.schedule import Sizes
from unet3d.recomputing.scratch import Scratch
from unet3d.recomputing.tiles import MapPlan

THIN = 0.04  # of a forward pass: less work than this may be done again for each tile that reads a map


def wanted_values(maps: Maps, trained: frozenset[str], image_needs_gradient: bool) -> frozenset[Value]:
    """Return the values of which a gradient is needed, where these weights are trained."""
    wanted: set[Value] = set()
    if image_needs_gradient:
        wanted.add(maps.graph.image)
    for value in maps.graph.values:
        is_trained = any(weight.name in trained for weight in value.weights())
        if is_trained or any(source in wanted for source in value.inputs):
            wanted.add(value)
    return frozenset(wanted)


def sizes_of(
    program: Program,
    dtype: torch.dtype,
    trained: dict[str, int],
    scratch: Sequence[Scratch],
) -> Sizes:
    """Return the sizes of a program's maps.

    `trained`: bytes of the gradients of weights by name.
    """
    maps = program.maps.maps
    index_of = {map_.value: map_.index for map_ in maps}
    operations = [_operations(map_) for map_ in maps]
    total = max(sum(operations), 1)
    work = [number / total for number in operations]
    sources = []
    for map_ in maps:
        of_maps = [index_of[source] for source in map_.sources if source in index_of]
        sources.append(tuple(of_maps))
    plans = [None if map_.rule is None else program.plan(map_) for map_ in maps]
    outputs = frozenset(index_of[value] for value in program.maps.graph.outputs)
    of_weights = [0] * len(maps)
    seen: set[str] = set()
    for map_ in reversed(maps):
        fresh = [name for name in map_.weights if name in trained and name not in seen]
        seen.update(fresh)
        of_weights[map_.index] = sum(trained[name] for name in fresh)
    over = [_over(program, plan, index_of, outputs) for plan in plans]
    return Sizes(
        bytes=[bytes_of(map_.value, dtype) for map_ in maps],
        work=work,
        sources=sources,
        needs_gradient=[map_.value in program.wanted for map_ in maps],
        is_normalised=[_is_normalised(program, map_) for map_ in maps],
        outputs=outputs,
        over_map=[frozenset(over_map) for over_map, _, _ in over],
        over_gradient=[frozenset(over_gradient) for _, over_gradient, _ in over],
        over_source=[frozenset(over_source) for _, _, over_source in over],
        is_thin=[_is_thin(program, map_, share) for map_, share in zip(maps, work, strict=True)],
        of_weights=of_weights,
        make_scratch=[beside.make for beside in scratch],
        pull_scratch=[beside.send for beside in scratch],
        twice_scratch=[beside.send_twice for beside in scratch],
        complete_scratch=[beside.complete for beside in scratch],
        pull_work=work,
    )


def _operations(map_: Map) -> int:
    """Return the multiplications and additions of a map; of an operation without a rule they are counted."""
    if map_.rule is not None:
        return map_.operations
    counter = FlopCounterMode(display=False)
    value = map_.value

    def fill(tree: object) -> object:
        if isinstance(tree, tuple):
            return [fill(leaf) for leaf in tree]
        if hasattr(tree, "shape"):
            dtype = tree.dtype if isinstance(tree, Value) else torch.float32
            return torch.empty(tree.shape, dtype=dtype, device="meta")
        return tree

    try:
        with counter:
            value.target(*map(fill, value.args), **{name: fill(leaf) for name, leaf in value.kwargs.items()})
    except (RuntimeError, NotImplementedError, TypeError):  # not on meta
        return value.shape.numel()
    return max(counter.get_total_flops() // 2, value.shape.numel())


def _is_normalised(program: Program, map_: Map) -> bool:
    """Return whether the gradient of a map has a part that its statistics give."""
    return any(norm in program.wanted for norm in map_.norms)


def _is_thin(program: Program, map_: Map, work: float) -> bool:
    """Return whether a map is made from the image alone, by little work, and read by tiles alone."""
    is_of_image = map_.sources == (program.maps.graph.image,) and map_.rule is not None
    readers = [other for other in program.maps.maps if map_.value in other.sources]
    return is_of_image and work < THIN and all(other.rule is not None for other in readers)


def _over(
    program: Program,
    plan: MapPlan | None,
    index_of: dict[Value, int],
    outputs: frozenset[int],
) -> tuple[set[int], set[int], set[int]]:
    """Return sources over which the map may be made, whose gradient may lie over its gradient, and over themselves."""
    over_map: set[int] = set()
    over_gradient: set[int] = set()
    over_source: set[int] = set()
    if plan is None or len(plan.tiles) == 1:  # what one tile gives has memory of its own
        return over_map, over_gradient, over_source
    value = plan.map.value
    for source in plan.map.sources:
        if source not in index_of or not source.dtype.is_floating_point or len(source.shape) != 5:
            continue
        index = index_of[source]
        has_shape = source.shape == value.shape
        lows = [(tile.spans[source][0], tile.span[1]) for tile in plan.tiles]
        if index not in outputs:
            over_source.add(index)
            is_behind = all(after[0] >= before[1] for before, after in itertools.pairwise(lows))
            if has_shape and is_behind:
                over_map.add(index)
        firsts = [(tile.spans[source][0], tile.span[0]) for tile in plan.tiles]
        is_ours = index_of[value] not in outputs
        if is_ours and has_shape and all(low <= first for low, first in firsts):
            over_gradient.add(index)
    return over_map, over_gradient, over_source

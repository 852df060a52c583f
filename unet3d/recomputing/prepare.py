"""Prepares the program of a network: traced, cut into tiles, measured on tensors without data, its schedules found."""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from unet3d.base.errors import UserError
from unet3d.base.fit import fit
from unet3d.base.types import mib
from unet3d.recomputing import search
from unet3d.recomputing.derived import drawn_bytes, trained_names
from unet3d.recomputing.function import tensors_of
from unet3d.recomputing.graph import Graph
from unet3d.recomputing.groups import first_of_group
from unet3d.recomputing.maps import Map, Maps
from unet3d.recomputing.program import Program
from unet3d.recomputing.schedule import compile_schedule
from unet3d.recomputing.scratch import fixed_bytes, scratch_bytes
from unet3d.recomputing.sizes import converted_bytes, sizes_of, wanted_values
from unet3d.recomputing.trace import trace

PLANS = ("lean", "tiles", "auto")  # little work, little memory, what a budget allows
TILES = 24  # of the largest value, on the CPU
FEWEST_TILES = 12  # the same where tiles are small, and calls take longer than what they compute
SMALL_TILE = 2**18  # numbers
LEAN_TILES_IN_HALF = 8  # for "lean" in half precision, where copies and calls take longer than in float32 beside
LEAN_FEWEST_IN_HALF = 4  # convolutions, and a tile takes half of the bytes
CUDA_TILES = 3  # of it on a GPU, where a step of more waits for its launches
CUDA_MOST_TILES = 12  # where tiles are so large that it does not, and workspaces of cuDNN would be large
CUDA_LARGE_TILE = 43 * 2**20  # numbers
CUDA_TILE = 2**22  # numbers of a tile there, at least
FEW = 50  # times fewer numbers than the largest value has: so small is an excitation beside the map that it scales


def prepare(
    network: nn.Module, image: Tensor, autocast: torch.dtype | None, on_cpu: bool, plan: str = "tiles"
) -> Program:
    """Return the program for images N C D H W of this size in the network's present mode; it has no schedule yet.

    `autocast`: the type of mixed precision; `on_cpu`: passes run on the CPU; `plan`: what its tiles are for. Neither
    tensors of the network nor the image need to have data. Raises UserError for a network that cannot be traced.
    """
    if image.dim() != 5:
        raise UserError(f"recompute: the image has {image.dim()} dimensions, not the 5 of N C D H W")
    dtype = autocast or image.dtype
    graph = _traced(network, image, autocast)
    size = list(image.shape[2:])
    maps = Maps(graph, axis=2 + size.index(max(size)))
    tensors = tensors_of(network)
    trained = {name: t.nbytes for name, t in tensors.items() if t.requires_grad}
    wanted = wanted_values(maps, trained_names(graph, trained), image.requires_grad)
    values = [value for value in graph.values if len(value.shape) == 5] or graph.values
    largest = max(value.shape.numel() for value in values)
    if has_larger_tiles(plan, dtype, on_cpu):
        numbers = max(largest // LEAN_TILES_IN_HALF, min(largest // LEAN_FEWEST_IN_HALF, SMALL_TILE))
    elif on_cpu:
        numbers = max(largest // TILES, min(largest // FEWEST_TILES, SMALL_TILE))
    else:
        numbers = min(math.ceil(largest / CUDA_TILES), CUDA_LARGE_TILE)
        numbers = max(numbers, math.ceil(largest / CUDA_MOST_TILES), CUDA_TILE)
    program = Program(maps, numbers, on_cpu, wanted)
    scratch = scratch_bytes(program, tensors, dtype, autocast, image.device)
    program.sizes = sizes_of(program, dtype, trained, scratch)
    program.fixed_bytes = fixed_bytes(tensors, image) + drawn_bytes(graph, maps.weights)
    if dtype != image.dtype:
        program.fixed_bytes += image.numel() * dtype.itemsize
    if not on_cpu:
        program.fixed_bytes += converted_bytes(maps, tensors, dtype)
    return program


def _traced(network: nn.Module, image: Tensor, autocast: torch.dtype | None) -> Graph:
    """Return the graph of a network in mixed precision: a part of it may turn that off."""
    with torch.autocast(image.device.type, dtype=autocast, enabled=autocast is not None):
        return trace(network, image)


def has_larger_tiles(plan: str, dtype: torch.dtype, on_cpu: bool) -> bool:
    """Return whether a plan's tiles are larger than other plans' in this precision."""
    return on_cpu and plan == "lean" and dtype.itemsize == 2


def by_plan(program: Program, plan: str, budget: int | None = None) -> Program:
    """Return the program by the schedule of a plan, and for "auto" of a budget in bytes.

    Raises UserError for a budget that neither a schedule nor the network's own pass keeps.
    """
    if plan == "lean":
        plain = math.inf if program.plain_bytes is None else program.plain_bytes - program.fixed_bytes
        return program.by(search.leanest(program.schedules, plain))
    if plan == "tiles":
        return program.by(search.smallest(program.schedules))
    assert budget is not None
    number = fit(program.schedules, lambda schedule: schedule.peak_bytes, budget - program.fixed_bytes)
    if number is None and program.plain_bytes is not None and program.plain_bytes <= budget:
        return program.by(search.least_memory(program.schedules))
    if number is None:
        raise UserError(
            f"budget={mib(budget)}MiB: a step needs at least {mib(least_bytes(program))} MiB of "
            "tensors; take a smaller patch or a smaller network"
        )
    return program.by(program.schedules[number])


def without_backward(program: Program) -> Program:
    """Return the program whose pass keeps nothing for a backward pass."""
    assert program.sizes is not None
    nothing: list[set[int]] = [set() for _ in range(program.sizes.count + 1)]
    return program.by(compile_schedule(program.sizes, nothing))


def least_bytes(program: Program) -> int:
    """Return the least that a pass can need at once."""
    return program.fixed_bytes + min(schedule.peak_bytes for schedule in program.schedules)


def retraced(program: Program, network: nn.Module, image: Tensor, autocast: torch.dtype | None = None) -> Program:
    """Return the program for a network of the same graph: another object, perhaps on another device.

    Raises UserError for another graph.
    """
    maps = Maps(_traced(network, image, autocast), program.maps.axis)
    if _signature(maps.maps) != _signature(program.maps.maps):
        raise UserError(
            f"recompute: {type(network).__name__} is not the network that its schedule was found for; "
            "give it the same layers each time it is made"
        )
    trained = frozenset(name for name, tensor in tensors_of(network).items() if tensor.requires_grad)
    wanted = wanted_values(maps, trained_names(maps.graph, trained), image.requires_grad)
    return replace(program, maps=maps, wanted=wanted, plans={}, spans={})


def _signature(maps: Sequence[Map]) -> list[tuple[str, str, torch.Size, tuple[str, ...], tuple[str, ...]]]:
    """Return what two networks share if the schedule of one serves the other."""
    signature = []
    for map_ in maps:
        sources = tuple(source.name for source in map_.sources)
        operations = tuple(value.op for value in map_.passing)
        signature.append((map_.value.name, map_.value.op, map_.value.shape, sources, operations))
    return signature


def work_line(program: Program) -> str:
    """Return the work of a program, and which operations have no rule."""
    return f"{_more_work(program.schedule.work)}{_without_rule(program)}"


def describe(program: Program, plan: str, held: int = 0) -> str:
    """Return a line: the bytes of a schedule and of the network's own pass, the schedule's work, what has no rule.

    `held`: bytes that lie in memory besides, and are counted in both.
    """
    kinds = ["weights", "gradients", "activations"]
    if not program.on_cpu:
        kinds.append("workspaces of cuDNN")
    if held:
        kinds.append(f"{mib(held)} MiB held")
    *first, last = kinds
    size = f"{mib(program.peak_bytes)} MiB"
    if program.plain_bytes is not None:
        size = f"{size} instead of {mib(program.plain_bytes)} MiB"
    sizes = f"{size} (predicted) for {', '.join(first)} and {last}"
    if program.saves_memory:
        return f"recompute={plan}: {sizes}, {_more_work(program.schedule.work)}{_without_rule(program)}"
    assert program.plain_bytes is not None
    line = f"recompute={plan}: would need {sizes}, so the network runs plain"
    if plan == "lean" and program.by(search.smallest(program.schedules)).saves_memory:
        return f"{line}; plan='tiles' would need less"
    return line


def _more_work(work: float) -> str:
    percent = round(100 * (work - 1))
    return f"{percent} % more forward work" if percent > 0 else "no more forward work"


def _without_rule(program: Program) -> str:
    """Return which operations have no rule, as the end of a line; not those of few numbers, which cost nothing."""
    largest = max(value.shape.numel() for value in program.maps.graph.values)
    whole: dict[str, None] = {}
    for map_ in program.maps.whole:
        if FEW * max(value.shape.numel() for value in (*map_.passing, *map_.sources)) < largest:
            continue
        value = first_of_group(map_.passing)
        whole[f"{value.op} in {value.layer}" if value.layer else value.op] = None
    if not whole:
        return ""
    first = ", ".join(list(whole)[:3])
    more = f" and {len(whole) - 3} others" if len(whole) > 3 else ""
    return f"; checkpointed as a whole (correct, saves less): {first}{more}"

"""Prepares the program of a network: traced, cut into tiles, measured on tensors without data, its schedules found."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from unet3d.base.errors import UserError
from unet3d.recomputing.compiler import Sizes, Workspace
from unet3d.recomputing.graph import Graph, Value, drawn_bytes, has_gradients, trained_names
from unet3d.recomputing.maps import Map, Maps, bytes_of
from unet3d.recomputing.program import Program, reads_back, reads_far_back
from unet3d.recomputing.readable import Code, code_of, snapshot, tensors_of
from unet3d.recomputing.scratch import fixed_bytes, is_normalised, scratch_bytes
from unet3d.recomputing.trace import trace

CHEAP_STEM = 0.05  # Up to this share of a forward pass, work may be done anew for each tile that reads a map.


def wanted_values(maps: Maps, tensors: Mapping[str, Tensor], image: Tensor) -> frozenset[Value]:
    """Return the values of which a gradient is needed, not whole numbers, nor what is detached."""
    wanted = {maps.graph.image} if image.requires_grad else set()
    trained = trained_names(maps.graph, [name for name, tensor in tensors.items() if tensor.requires_grad])
    for value in maps.graph.values:
        if value.op == "detach" or not has_gradients(value.dtype):
            continue
        is_trained = any(weight.name in trained for weight in value.weights())
        if is_trained or any(source in wanted for source in value.inputs):
            wanted.add(value)
    return frozenset(wanted)


def sizes_of(
    program: Program, dtype: torch.dtype, tensors: Mapping[str, Tensor], scratch: Sequence[tuple[Workspace, Workspace]]
) -> Sizes:
    """Return the sizes of a program's maps; `tensors`: parameters and buffers by name."""
    maps = program.maps.maps
    index_of = program.maps.index_of
    total = max(sum(map_.operations for map_ in maps), 1)
    work = [map_.operations / total for map_ in maps]
    outputs = frozenset(index_of[value] for value in program.maps.graph.outputs)
    reads = [set(map_.sources) if map_.rule is None else program.plan(map_).read for map_ in maps]
    over_map, over_gradient, over_source = zip(*(_over(program, map_, dtype) for map_ in maps), strict=True)
    # The bytes of the gradients of weights that appear first as each map's gradient is sent.
    left = {name: tensor.nbytes for name, tensor in tensors.items() if tensor.requires_grad}
    of_weights = [sum(left.pop(name, 0) for name in map_.weights) for map_ in reversed(maps)]
    workspace, workspace_streamed = zip(*scratch, strict=True)
    return Sizes(
        bytes=[bytes_of(map_.value, _type_of(program, map_, dtype)) for map_ in maps],
        work=work,
        sources=[_indices(map_.sources, index_of) for map_ in maps],
        reads=[frozenset(_indices(read & set(map_.sources), index_of)) for map_, read in zip(maps, reads, strict=True)],
        needs_gradient=[map_.value in program.wanted for map_ in maps],
        is_normalised=[is_normalised(program, map_) for map_ in maps],
        outputs=outputs,
        can_overwrite_input=over_map,
        grad_can_reuse_grad=over_gradient,
        grad_can_reuse_input=over_source,
        is_one_tile=[map_.rule is None or len(program.plan(map_).tiles) == 1 for map_ in maps],
        has_rows=[map_.rule is not None for map_ in maps],
        is_cheap_stem=[_is_cheap_stem(program, map_, share) for map_, share in zip(maps, work, strict=True)],
        of_weights=of_weights[::-1],
        workspace=workspace,
        workspace_streamed=workspace_streamed,
        inplace_workspace=[
            _inplace_workspace(program, map_, over, dtype) for map_, over in zip(maps, over_map, strict=True)
        ],
    )


def _type_of(program: Program, map_: Map, dtype: torch.dtype) -> torch.dtype:
    """Return the type of a map of floating-point numbers: a group's result stays in plain's, where that is known."""
    is_known = map_.rule is None and program.maps.graph.is_in(dtype)
    return map_.value.dtype if is_known else dtype


def _indices(values: Collection[Value], index_of: dict[Value, int]) -> tuple[int, ...]:
    """Return the indices of maps, without the image."""
    return tuple(index_of[value] for value in values if value in index_of)


def _is_cheap_stem(program: Program, map_: Map, work: float) -> bool:
    """Return whether a map is made from the image alone, by little work, and read by tiles alone."""
    if map_.rule is None or map_.sources != (program.maps.graph.image,):
        return False
    readers = [other for other in program.maps.maps if map_.value in other.sources]
    return work < CHEAP_STEM and all(reader.rule is not None for reader in readers)


def _over(program: Program, map_: Map, dtype: torch.dtype) -> tuple[frozenset[int], frozenset[int], frozenset[int]]:
    """Return sources over which a map may be made, whose gradient may lie over the map's, or over themselves."""
    over_map, over_gradient, over_source = set(), set(), set()
    # The rows of one tile have their own memory.
    tiles = () if map_.rule is None else program.plan(map_).tiles
    outputs = program.maps.graph.outputs
    for source in map_.sources if len(tiles) > 1 else ():
        index = program.maps.index_of.get(source)
        if index is None or not source.dtype.is_floating_point or len(source.shape) != 5:
            continue
        if source not in outputs:
            over_source.add(index)
        if source.shape != map_.value.shape:
            continue
        is_alike = _type_of(program, program.maps.maps[index], dtype) == _type_of(program, map_, dtype)
        if source not in outputs and is_alike and not reads_far_back(tiles, source):
            over_map.add(index)
        if map_.value not in outputs and all(tile.spans[source][0] <= tile.span[0] for tile in tiles):
            over_gradient.add(index)
    return frozenset(over_map), frozenset(over_gradient), frozenset(over_source)


def _inplace_workspace(program: Program, map_: Map, over: frozenset[int], dtype: torch.dtype) -> int:
    """Return the bytes of the rows of a map that wait where it is made over a source."""
    if not over:
        return 0
    tiles = program.plan(map_).tiles
    sources = [program.maps.maps[index].value for index in over]
    if not any(reads_back(tiles, source) for source in sources):
        return 0
    longest = max(end - first for first, end in (tile.span for tile in tiles))
    return bytes_of(map_.value, dtype) // map_.value.shape[program.maps.axis] * longest


TILES = 24  # Tiles of the largest value on the CPU.
FEWEST_TILES = 12  # the same where tiles are small, and calls take longer than what they compute
SMALL_TILE = 2**18  # numbers
# In half precision, copies and calls weigh more against convolutions than in float32; a tile takes half of the bytes.
LEAN_TILES_IN_HALF = 8
LEAN_FEWEST_IN_HALF = 4
CUDA_TILES = 3  # On a GPU a step of more tiles waits for its launches.
CUDA_MOST_TILES = 12  # Tiles that are so large that launches do not show: more of them keep cuDNN's workspaces small.
CUDA_LARGE_TILE = 43 * 2**20  # numbers
CUDA_TILE = 2**22  # numbers of a tile there, at least


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
    code = code_of(network)
    traced = code, _what_is_traced(network, code, image, autocast)
    graph = _traced(network, image, autocast)
    size = list(image.shape[2:])
    maps = Maps(graph, axis=2 + size.index(max(size)))
    tensors = tensors_of(network)
    wanted = wanted_values(maps, tensors, image)
    values = [value for value in graph.values if len(value.shape) == 5] or graph.values
    largest = max(value.shape.numel() for value in values)
    if on_cpu:
        is_larger = has_larger_tiles(plan, dtype, on_cpu)
        most, fewest = (LEAN_TILES_IN_HALF, LEAN_FEWEST_IN_HALF) if is_larger else (TILES, FEWEST_TILES)
        numbers = max(largest // most, min(largest // fewest, SMALL_TILE))
    else:
        numbers = min(math.ceil(largest / CUDA_TILES), CUDA_LARGE_TILE)
        numbers = max(numbers, math.ceil(largest / CUDA_MOST_TILES), CUDA_TILE)
    program = Program(maps, numbers, on_cpu, wanted, traced=traced)
    scratch = scratch_bytes(program, tensors, image, autocast)
    program.sizes = sizes_of(program, dtype, tensors, scratch)
    program.fixed_bytes = fixed_bytes(tensors, image) + drawn_bytes(graph, maps.weights)
    if dtype != image.dtype:
        program.fixed_bytes += image.numel() * dtype.itemsize
    if not on_cpu:
        for weight in maps.converted_weights:  # A pass on a GPU keeps them in the type of maps.
            tensor = tensors.get(weight.name)
            known = torch.float32 if tensor is None else tensor.dtype  # A derived value has no tensor yet.
            if known.is_floating_point and known != dtype:
                program.fixed_bytes += weight.shape.numel() * dtype.itemsize
    return program


def _traced(network: nn.Module, image: Tensor, autocast: torch.dtype | None) -> Graph:
    """Return the graph of a network in mixed precision: a part of it may turn that off."""
    with torch.autocast(image.device.type, dtype=autocast, enabled=autocast is not None):
        return trace(network, image)


def bound(program: Program, network: nn.Module, image: Tensor, autocast: torch.dtype | None = None) -> Program:
    """Return the program for another object of the network that it was prepared for, or for an equal one.

    A graph names parameters and buffers, which each pass reads anew: where all else that forward can read is equal, it
    is also this network's. Else that is traced. Raises UserError for another graph.
    """
    if program.traced and not program.maps.graph.constants:
        code, known = program.traced
        if known == _what_is_traced(network, code, image, autocast):
            return program
    maps = Maps(_traced(network, image, autocast), program.maps.axis)
    if _signature(maps.maps) != _signature(program.maps.maps):
        raise UserError(
            f"recompute: {type(network).__name__} is not the network that its schedule was found for; "
            "give it the same layers each time it is made"
        )
    wanted = wanted_values(maps, tensors_of(network), image)
    return replace(program, maps=maps, wanted=wanted, traced=None, plans={}, spans={})


def _what_is_traced(network: nn.Module, code: Code, image: Tensor, autocast: torch.dtype | None) -> tuple[Any, ...]:
    """Return what a trace depends on, as a value to compare."""
    return image.shape, image.dtype, image.device.type, image.requires_grad, autocast, snapshot(network, code)


def _signature(maps: Sequence[Map]) -> list[tuple[Any, ...]]:
    """Return what two networks share if the schedule of one serves the other."""
    signature = []
    for map_ in maps:
        sources = [source.name for source in map_.sources]
        operations = [value.op for value in map_.fused]
        signature.append((map_.value.name, map_.value.op, map_.value.shape, sources, operations))
    return signature


def has_larger_tiles(plan: str, dtype: torch.dtype, on_cpu: bool) -> bool:
    """Return whether a plan's tiles are larger than other plans' in this precision."""
    return on_cpu and plan == "lean" and dtype.itemsize == 2

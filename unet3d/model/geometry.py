"""Kernels, strides and sizes along the U, in plain integers and without torch."""

from collections.abc import Sequence
from math import prod
from typing import Any

from unet3d.base.errors import UserError
from unet3d.config.schema import Model

Triple = tuple[int, int, int]
ONES: Triple = (1, 1, 1)
SEARCHED = 10_000  # sizes tried on either side for one that fits


def triples(name: str, value: Any, count: int) -> list[Triple]:
    """Return `3`, `[3,3,3]` or `[3,[1,3,3],...]` as one triple for each of `count` levels. Raises UserError."""
    entries: list[Any] = []
    if isinstance(value, Sequence) and not isinstance(value, str):
        entries = list(value)
    holds_integers = all(isinstance(entry, int) for entry in entries)
    is_one_triple = len(entries) == 3 and holds_integers
    if isinstance(value, int) or is_one_triple:
        return [_triple(name, value) for _ in range(count)]
    if len(entries) != count:
        raise UserError(f"{name}={value}: use one integer, three, or one entry for each of {count} levels")
    return [_triple(name, entry) for entry in entries]


def _triple(name: str, entry: Any) -> Triple:
    """Return an integer or three of them as a triple. Raises UserError."""
    values: list[Any] = []
    if isinstance(entry, int):
        values = [entry, entry, entry]
    elif isinstance(entry, Sequence):
        values = list(entry)
    if len(values) != 3 or any(type(value) is not int or value < 1 for value in values):
        raise UserError(f"{name}: {entry} is neither an integer >= 1 nor three of them")
    return values[0], values[1], values[2]


def kernels(model: Model) -> list[Triple]:
    """Return the kernel of each level, shallowest first (voxels). Raises UserError."""
    sizes = triples("model.kernels", model.kernels, len(model.features))
    if any(length % 2 == 0 for kernel in sizes for length in kernel):
        raise UserError(f"model.kernels={model.kernels}: kernels must be odd, or the output shifts by half a voxel")
    return sizes


def strides(model: Model) -> list[Triple]:
    """Return the stride of each step from one level to the next, shallowest first. Raises UserError."""
    steps = len(model.features) - 1
    if steps <= 0:
        return []  # a user's own network may have no level
    return triples("model.strides", model.strides, steps)


def level_sizes(size: Sequence[int], model: Model) -> list[Triple]:
    """Return the size of each level's map for padded convolutions (voxels), shallowest first."""
    sizes = [_triple("size", size)]
    for stride in strides(model):
        size = [-(-length // factor) for length, factor in zip(sizes[-1], stride, strict=True)]
        sizes.append(_triple("size", size))
    return sizes


def output_size(size: Sequence[int], model: Model) -> Triple:
    """Return the size of the logits for an input of `size` (voxels). Raises UserError, with the nearest that fits."""
    if model.padding == "same":
        return _triple("size", size)
    nearest = [_nearest(length, model, axis) for axis, length in enumerate(size)]
    if nearest != list(size):
        raise UserError(f"data.patch={size} does not fit model.padding=valid; nearest that fits: data.patch={nearest}")
    return _triple("size", [lengths(length, model, axis)[-1] for axis, length in enumerate(size)])


def lengths(length: int, model: Model, axis: int) -> list[int]:
    """Return the length along one axis after each convolution of a unit, encoder first.

    [] where valid convolutions leave nothing, or a stride does not fit.
    """
    kernel = [sizes[axis] for sizes in kernels(model)]
    stride = [1, *(sizes[axis] for sizes in strides(model))]
    lost = [0 if model.padding == "same" else size - 1 for size in kernel]
    found = []
    skips = []
    for level, factor in enumerate(stride):
        if model.padding == "same":
            first = -(-length // factor)
        else:
            reach = kernel[level] if model.downsampling == "strided_conv" else factor
            if length < reach or (length - reach) % factor:
                return []
            first = (length - reach) // factor + 1
            if model.downsampling != "strided_conv":
                first -= lost[level]
        length = first - lost[level]
        found += [first, length]
        skips.append(length)
    for level in reversed(range(len(stride) - 1)):
        first = min(length * stride[level + 1], skips[level]) - lost[level]
        length = first - lost[level]
        found += [first, length]
    return found if length >= 1 else []


def _nearest(length: int, model: Model, axis: int) -> int:
    """Return the nearest length that fits valid convolutions; of two, the shorter."""
    for distance in range(SEARCHED):
        for candidate in (length - distance, length + distance):
            if candidate > 0 and lengths(candidate, model, axis):
                return candidate
    raise AssertionError("no length fits")


def normalised_maps(size: Sequence[int], model: Model) -> list[tuple[int, Triple]]:
    """Return channels and size (voxels) of every map that a normalisation sees; [] for a patch that does not fit.

    All maps of a level are alike with residual blocks: there is one entry for them.
    """
    decoder = model.decoder or model.features[:-1]
    if model.blocks is not None:
        level_maps = level_sizes(size, model)
        encoder_maps = zip(model.features, level_maps, strict=True)
        decoder_maps = zip(decoder, level_maps[:-1], strict=True)
        return [*encoder_maps, *decoder_maps]
    widths = []
    for width in model.features:
        first = width if model.widen == "first" else max(1, width // 2)
        widths += [first, width]
    for width in reversed(decoder):
        widths += [width, width]
    axes = [lengths(length, model, axis) for axis, length in enumerate(size)]
    if not all(axes):
        return []
    sizes = [_triple("size", size) for size in zip(*axes, strict=True)]
    return list(zip(widths, sizes, strict=True))


def larger_patch(size: Sequence[int], model: Model) -> list[int]:
    """Return the next larger patch that fits and leaves more than one voxel of each map."""
    larger = list(size)
    while True:
        sizes = [map_size for _, map_size in normalised_maps(larger, model)]
        if sizes and ONES not in sizes:
            return larger
        larger = [_next_length(length, model, axis) for axis, length in enumerate(larger)]


def _next_length(length: int, model: Model, axis: int) -> int:
    """Return the next longer length of an axis that fits."""
    if model.padding == "same":
        step = prod(stride[axis] for stride in strides(model))
        return (length // step + 1) * step
    length += 1
    while not lengths(length, model, axis):
        length += 1
    return length

"""Kernels, strides and sizes along the U, in plain integers and without torch."""

import itertools
from collections.abc import Sequence
from math import prod
from typing import Any

from unet3d.base.errors import UserError
from unet3d.config.schema import Model

Triple = tuple[int, int, int]
ONES: Triple = (1, 1, 1)


def triples(name: str, value: Any, count: int) -> list[Triple]:
    """`3`, `[3,3,3]` or `[3,[1,3,3],...]` for `count` levels. Raises UserError."""
    entries = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else []
    if isinstance(value, int) or (len(entries) == 3 and all(isinstance(entry, int) for entry in entries)):
        entries = [value] * count
    if len(entries) != count:
        raise UserError(f"{name}={value}: use one integer, three, or one entry for each of {count} levels")
    return [_triple(name, entry) for entry in entries]


def _triple(name: str, entry: Any) -> Triple:
    values = [entry] * 3 if isinstance(entry, int) else list(entry) if isinstance(entry, Sequence) else []
    if len(values) != 3 or not all(isinstance(v, int) and not isinstance(v, bool) and v >= 1 for v in values):
        raise UserError(f"{name}: {entry} is neither an integer >= 1 nor three of them")
    return values[0], values[1], values[2]


def kernels(model: Model) -> list[Triple]:
    """Kernel of each level, shallowest first (voxels)."""
    found = triples("model.kernels", model.kernels, len(model.features))
    if any(k % 2 == 0 for kernel in found for k in kernel):
        raise UserError(f"model.kernels={model.kernels}: kernels must be odd, or the output shifts by half a voxel")
    return found


def strides(model: Model) -> list[Triple]:
    """Stride of each step from one level to the next, shallowest first."""
    steps = len(model.features) - 1
    return triples("model.strides", model.strides, steps) if steps > 0 else []  # no level: a user's own network


def from_spacing(spacing: Sequence[float], patch: Sequence[int], levels: int) -> tuple[list[Triple], list[Triple]]:
    """Kernels and strides that bring voxels towards cubes, after nnU-Net's planner (arXiv:1809.10486, 2.2)."""
    # An axis is halved while it has 8 voxels or more and its spacing is below twice that of the finest such axis; it is
    # convolved from the level on where its spacing is that close.
    size, step = list(patch), list(spacing)
    convolved = [s < 2 * min(step) for s in step]
    found: list[tuple[Triple, Triple]] = []
    for _ in range(levels):
        finest = min((s for s, n in zip(step, size, strict=True) if n >= 8), default=min(step))
        near = [s < 2 * finest for s in step]
        convolved = [a or b for a, b in zip(convolved, near, strict=True)]
        halved = [2 if b and n >= 8 else 1 for b, n in zip(near, size, strict=True)]
        found.append((_triple("kernel", [3 if c else 1 for c in convolved]), _triple("stride", halved)))
        size = [-(-n // h) for n, h in zip(size, halved, strict=True)]
        step = [s * h for s, h in zip(step, halved, strict=True)]
    return [kernel for kernel, _ in found], [stride for _, stride in found[:-1]]


def level_sizes(size: Sequence[int], model: Model) -> list[Triple]:
    """Size of each level's map for padded convolutions (voxels), shallowest first."""
    found = [_triple("size", size)]
    for stride in strides(model):
        found.append(_triple("size", [-(-n // s) for n, s in zip(found[-1], stride, strict=True)]))
    return found


def output_size(size: Sequence[int], model: Model) -> Triple:
    """Size of the logits for an input of `size` (voxels). Raises UserError, with the nearest that fits."""
    if model.padding == "same":
        return _triple("size", size)
    nearest = [_nearest(n, model, axis) for axis, n in enumerate(size)]
    if nearest != [*size]:
        raise UserError(f"data.patch={size} does not fit model.padding=valid; nearest that fits: data.patch={nearest}")
    return _triple("size", [valid_length(n, model, axis) for axis, n in enumerate(size)])


def valid_length(n: int, model: Model, axis: int) -> int | None:
    """Length along one axis after all valid convolutions; None if it ends empty or a stride does not divide."""
    kernel, stride = [k[axis] for k in kernels(model)], [s[axis] for s in strides(model)]
    is_strided = model.downsampling == "strided_conv"
    n -= 2 * (kernel[0] - 1)
    skips = []
    for k, s in zip(kernel[1:], stride, strict=True):
        skips.append(n)
        reach = k if is_strided else s
        if n < reach or (n - reach) % s:
            return None
        n = (n - reach) // s + 1 - (k - 1) * (1 if is_strided else 2)
    for k, s, skip in [*zip(kernel, stride, skips, strict=False)][::-1]:
        n = min(n * s, skip) - 2 * (k - 1)
    return n if n >= 1 else None


def _nearest(n: int, model: Model, axis: int) -> int:
    return next(m for step in range(10_000) for m in (n - step, n + step) if m > 0 and valid_length(m, model, axis))


def normalised_maps(size: Sequence[int], model: Model) -> list[tuple[int, Triple]]:
    """Return channels and size (voxels) of every map that a normalisation sees, for a patch that fits."""
    steps, decoder = strides(model), [*(model.decoder or model.features[:-1])]
    axes = [_lengths(n, model, axis) for axis, n in enumerate(size)]
    sizes = [_triple("size", list(lengths)) for lengths in zip(*axes, strict=True)]
    widths = [c for width in model.features for c in (width if model.widen == "first" else max(1, width // 2), width)]
    widths += [width for width in reversed(decoder) for _ in range(2)]
    assert len(sizes) == len(widths) == 4 * len(steps) + 2
    return list(zip(widths, sizes, strict=True))


def _lengths(n: int, model: Model, axis: int) -> list[int]:
    """Return the length along one axis after each convolution of a unit, encoder first."""
    is_strided, is_same = model.downsampling == "strided_conv", model.padding == "same"
    kernel, stride = [k[axis] for k in kernels(model)], [1, *(s[axis] for s in strides(model))]
    found, skips = list[int](), list[int]()
    for k, s in zip(kernel, stride, strict=True):
        lost = 0 if is_same else k - 1
        first = -(-n // s) if is_same else (n - k) // s + 1 if is_strided else n // s - lost
        n = first - lost
        found += [first, n]
        skips.append(n)
    for k, s, skip in [*zip(kernel, stride[1:], skips, strict=False)][::-1]:
        lost = 0 if is_same else k - 1
        n = min(n * s, skip) - lost
        found += [n, n - lost]
        n -= lost
    return found


def larger_patch(size: Sequence[int], model: Model) -> list[int]:
    """Return the next larger patch that fits and leaves more than one voxel of each map."""
    found = list(size)
    while any(map_size == ONES for _, map_size in normalised_maps(found, model)):
        found = [_next_length(n, model, axis) for axis, n in enumerate(found)]
    return found


def _next_length(n: int, model: Model, axis: int) -> int:
    if model.padding == "same":
        step = prod(stride[axis] for stride in strides(model))
        return (n // step + 1) * step
    return next(m for m in itertools.count(n + 1) if valid_length(m, model, axis))

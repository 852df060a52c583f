"""Kernels, strides and sizes along the U, in plain integers: what fits, and what comes out. Free of torch."""

from collections.abc import Sequence
from typing import Any

from unet3d.config import Model
from unet3d.errors import UserError

Triple = tuple[int, int, int]


def triples(name: str, value: Any, count: int) -> list[Triple]:
    """Spread `3`, `[3,3,3]` or `[3,[1,3,3],...]` over `count` levels."""
    if isinstance(value, int):
        value = [value] * 3
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise UserError(f"{name}={value}: use one integer, three, or one entry a level ({count})")
    entries = list(value)
    if len(entries) == 3 and all(isinstance(entry, int) for entry in entries):
        entries = [entries] * count
    if len(entries) != count:
        raise UserError(f"{name} has {len(entries)} entries; this model needs {count}, or one for all")
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
    """Kernels and strides that bring the voxels towards cubes, after nnU-Net's planner (arXiv:1809.10486, 2.2).

    An axis is halved while 8 voxels or more are left of it, and only once the finest of such axes has come within a
    factor of 2 of it; it is convolved from then on.
    """
    size, step = list(patch), list(spacing)
    convolved = [s < 2 * min(step) for s in step]
    chosen_kernels: list[Triple] = []
    chosen_strides: list[Triple] = []
    for level in range(levels):
        finest = min((s for s, n in zip(step, size, strict=True) if n >= 8), default=min(step))
        near = [s < 2 * finest for s in step]
        convolved = [a or b for a, b in zip(convolved, near, strict=True)]
        chosen_kernels.append(_triple("kernel", [3 if c else 1 for c in convolved]))
        halved = [2 if b and n >= 8 else 1 for b, n in zip(near, size, strict=True)]
        if level < levels - 1:
            chosen_strides.append(_triple("stride", halved))
        size = [-(-n // h) for n, h in zip(size, halved, strict=True)]
        step = [s * h for s, h in zip(step, halved, strict=True)]
    return chosen_kernels, chosen_strides


def level_sizes(size: Sequence[int], model: Model) -> list[Triple]:
    """Size of each level's map for padded convolutions (voxels), shallowest first."""
    found = [(size[0], size[1], size[2])]
    for stride in strides(model):
        z, y, x = (-(-n // s) for n, s in zip(found[-1], stride, strict=True))
        found.append((z, y, x))
    return found


def output_size(size: Sequence[int], model: Model) -> Triple:
    """Size of the logits for an input of `size` (voxels).

    Raises UserError where valid convolutions leave nothing, or a stride does not divide; names the nearest good sizes.
    """
    if model.padding == "same":
        return size[0], size[1], size[2]
    out = [_valid_length(n, model, axis) for axis, n in enumerate(size)]
    if None in out:
        nearest = [n if _valid_length(n, model, axis) else _nearest(n, model, axis) for axis, n in enumerate(size)]
        raise UserError(
            f"data.patch={list(size)} does not fit model.padding=valid; nearest that fits: data.patch={nearest}"
        )
    return out[0] or 0, out[1] or 0, out[2] or 0


def _valid_length(n: int, model: Model, axis: int) -> int | None:
    """Length after the whole U along one axis, or None where it does not fit."""
    kernel = [k[axis] for k in kernels(model)]
    stride = [s[axis] for s in strides(model)]
    skips = []
    for level, k in enumerate(kernel):
        s = stride[level - 1] if level else 1
        reach = k if model.downsampling == "strided_conv" else s
        if level:
            skips.append(n)
            if n < reach or (n - reach) % s:
                return None
            n = (n - reach) // s + 1
        first_in_step = level and model.downsampling == "strided_conv"
        n -= (k - 1) * (1 if first_in_step else 2)
        if n < 1:
            return None
    for level in reversed(range(len(stride))):
        n = min(n * stride[level], skips[level]) - 2 * (kernel[level] - 1)
        if n < 1:
            return None
    return n


def _nearest(n: int, model: Model, axis: int) -> int:
    return next(m for step in range(1, 10_000) for m in (n - step, n + step) if m > 0 and _valid_length(m, model, axis))

"""The patch and batch that nnU-Net's own planner chooses (version 2, `3d_fullres`), for comparisons: `like=nnunet`.

Its network follows `architecture`; what is here is its measure of memory, a count of numbers that convolutions return.
That count knows neither types nor what a step keeps, so it is used for nothing else.
"""

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from unet3d.model.architecture import Levels, Spacing, levels_of, median_shape, target_spacing
from unet3d.model.geometry import Triple

COUNT = 560_000_000  # numbers that convolutions return for one patch, at most, for each COUNT_GB of target
COUNT_GB = 8
FIRST_VOLUME = 256**3  # voxels of the patch that is shrunk
LEAST_BATCH = 2
MOST_COVERED = 0.05  # of all voxels of a data set, by one batch
CONVOLUTIONS = 2  # of a level, on the way down and on the way up


class NnunetPlan(NamedTuple):
    """A plan as nnU-Net makes it. Axes x, y, z."""

    spacing: Spacing  # mm
    patch: Triple  # voxels
    batch: int
    levels: Levels
    outputs: int  # that nnU-Net counts for the patch


def nnunet_plan(
    shapes: Sequence[Sequence[int]],
    spacings: Sequence[Sequence[float]],
    classes: int,
    gigabytes: float = COUNT_GB,
    cases: int | None = None,
) -> NnunetPlan:
    """Return nnU-Net's plan for cases of these shapes (voxels) and spacings (mm), axes x, y, z.

    `classes` counts the background. `gigabytes` is nnU-Net's target. `cases`: the number of training cases; None: as
    many as there are shapes. nnU-Net takes shapes after cropping to what is not 0.
    """
    target = target_spacing(shapes, spacings)
    shape = median_shape(shapes, spacings, target)
    order = _axis_order(target)
    spacing = [target[axis] for axis in order]
    lengths = [shape[axis] for axis in order]
    limit = COUNT * gigabytes / COUNT_GB
    levels, patch, count = _largest(spacing, lengths, classes, limit)
    voxels = prod(lengths) * (cases or len(shapes))
    most = round(voxels * MOST_COVERED / prod(patch))
    batch = max(LEAST_BATCH, min(round(limit / count * LEAST_BATCH), most))
    levels = Levels(
        kernels=[_in_place(kernel, order) for kernel in levels.kernels],
        strides=[_in_place(stride, order) for stride in levels.strides],
    )
    return NnunetPlan(target, _in_place(patch, order), batch, levels, count)


def _axis_order(spacing: Sequence[float]) -> list[int]:
    """Return the axes x, y, z as nnU-Net orders them: the coarsest first, then z, y, x. The order decides ties."""
    order = [2, 1, 0]
    coarsest = max(order, key=lambda axis: spacing[axis])
    order.remove(coarsest)
    return [coarsest, *order]


def _in_place(values: Triple, order: Sequence[int]) -> Triple:
    """Return values in nnU-Net's order of axes as x, y, z."""
    x, y, z = (values[order.index(axis)] for axis in range(3))
    return x, y, z


def _largest(
    spacing: Sequence[float],
    shape: Sequence[float],
    classes: int,
    limit: float,
) -> tuple[Levels, Triple, int]:
    """Return levels, patch and count of the patch that nnU-Net shrinks until its count is within the limit."""
    scale = (FIRST_VOLUME * prod(spacing)) ** (1 / 3)
    first = [min(round(scale / mm), length) for mm, length in zip(spacing, shape, strict=True)]
    levels = levels_of(spacing, first)
    patch = levels.padded(first)
    count = nnunet_count(patch, levels, classes)
    while count > limit:
        longest = max(range(3), key=lambda axis: (patch[axis] / shape[axis], axis))
        lengths = list(patch)
        lengths[longest] -= levels.units[longest]
        unit = levels_of(spacing, lengths).units[longest]  # a shorter axis may be halved less often
        lengths[longest] = patch[longest] - unit
        levels = levels_of(spacing, lengths)
        patch = levels.padded(lengths)
        count = nnunet_count(patch, levels, classes)
    return levels, patch, count


def nnunet_count(patch: Sequence[int], levels: Levels, classes: int) -> int:
    """Return how many numbers the convolutions of nnU-Net's network return for one patch, as its planner counts them.

    Of its outputs only that at full resolution counts.
    """
    size = list(patch)
    count = classes * prod(size)
    for level, width in enumerate(levels.features):
        if level:
            size = [length // stride for length, stride in zip(size, levels.strides[level - 1], strict=True)]
        is_deepest = level == len(levels.strides)
        convolutions = CONVOLUTIONS if is_deepest else 2 * CONVOLUTIONS + 1  # down, up and transposed
        count += convolutions * width * prod(size)
    return count

"""Rules from the sizes of a data set to the sizes of a network, in plain numbers and without torch.

They are those that nnU-Net documents (arXiv:1809.10486, 2.2, and version 2 of its planner): the spacing to resample to,
how often each axis is halved, and which kernels do not cross coarse axes. Axes may come in any order, the same in all
arguments. What fits into memory is not decided here: a patch is an argument.
"""

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import numpy as np

from unet3d.model.geometry import Triple

LEAST_LENGTH = 4  # voxels that an axis of the deepest map has at least
LEAST_ALONE = 12  # voxels of an axis that is halved though no other is
ISOTROPIC = 2  # an axis counts as fine while its spacing is below this many times the finest
COARSE = 3  # ratio to the other axes, of spacing and of voxels, from which on an axis takes a finer spacing
FINER_PERCENTILE = 10  # Percentile of the cases' spacings that becomes the target of such an axis.
FIRST_WIDTH = 32  # channels of the first level
MOST_WIDTH = 320  # channels of any level: each has twice those of the level above, up to here
Spacing = tuple[float, float, float]  # mm


class Levels(NamedTuple):
    """Kernels and strides of a U-Net along its depth, shallowest first."""

    kernels: list[Triple]  # Kernel sizes by level, voxels.
    strides: list[Triple]  # Strides from each level to the next.

    @property
    def units(self) -> Triple:
        """Return what the lengths of a patch are multiples of, so that every stride divides its map."""
        x, y, z = (prod(stride[axis] for stride in self.strides) for axis in range(3))
        return x, y, z

    @property
    def features(self) -> list[int]:
        """Return the channels of each level."""
        return [min(MOST_WIDTH, FIRST_WIDTH * 2**level) for level in range(len(self.kernels))]

    def padded(self, size: Sequence[float]) -> Triple:
        """Return the least patch (voxels) of at least this size that every stride divides."""
        x, y, z = (int(-(-length // unit) * unit) for length, unit in zip(size, self.units, strict=True))
        return x, y, z


def target_spacing(shapes: Sequence[Sequence[int]], spacings: Sequence[Sequence[float]]) -> Spacing:
    """Return the spacing (mm) to resample to: the median of the cases, from their shapes (voxels) and spacings (mm).

    An axis more than three times as coarse as each other, with less than a third of their voxels, takes the 10th
    percentile instead, but nothing finer than the others: the median would blur the cases with thin slices.
    """
    target = np.percentile(spacings, 50, axis=0)
    shape = np.percentile(shapes, 50, axis=0)
    coarsest = int(np.argmax(target))
    others = [axis for axis in range(3) if axis != coarsest]
    coarsest_other = max(target[axis] for axis in others)
    is_coarse = target[coarsest] > COARSE * coarsest_other
    has_few = COARSE * shape[coarsest] < min(shape[axis] for axis in others)
    if is_coarse and has_few:
        finer = np.percentile([spacing[coarsest] for spacing in spacings], FINER_PERCENTILE)
        target[coarsest] = max(finer, coarsest_other)
    x, y, z = target.tolist()
    return x, y, z


def median_shape(
    shapes: Sequence[Sequence[int]],
    spacings: Sequence[Sequence[float]],
    target: Sequence[float],
) -> Spacing:
    """Return the median shape (voxels) of cases resampled to a spacing (mm); of an even number, it may end on .5."""
    resampled = []
    for shape, spacing in zip(shapes, spacings, strict=True):
        lengths = [
            max(1, round(mm / wanted * voxels)) for voxels, mm, wanted in zip(shape, spacing, target, strict=True)
        ]
        resampled.append(lengths)
    x, y, z = np.median(resampled, axis=0).tolist()
    return x, y, z


def levels_of(spacing: Sequence[float], size: Sequence[float], count: int | None = None) -> Levels:
    """Return kernels and strides that bring voxels of a spacing (mm) towards cubes, for maps of a size (voxels).

    An axis is halved while 4 voxels of it are left and its spacing is below twice the finest that can be halved; one
    axis alone only while it has 12 voxels. A kernel crosses an axis from the first level on at which its spacing is
    below twice the finest. `count`: the number of levels; None: until no axis is halved.
    """
    lengths = list(size)
    step = list(spacing)
    kernel = [1, 1, 1]
    kernels: list[Triple] = []
    strides: list[Triple] = []
    while count is None or len(kernels) < count:
        halved = _halved_axes(step, lengths)
        for axis in range(3):
            is_fine = step[axis] < ISOTROPIC * min(step)
            if is_fine or not halved:
                kernel[axis] = 3
        kernels.append((kernel[0], kernel[1], kernel[2]))
        x, y, z = (2 if axis in halved else 1 for axis in range(3))
        strides.append((x, y, z))
        if count is None and not halved:
            break
        for axis in halved:
            lengths[axis] = -(-lengths[axis] // 2)
            step[axis] *= 2
    return Levels(kernels, strides[:-1])


def _halved_axes(step: Sequence[float], lengths: Sequence[float]) -> list[int]:
    """Return the axes that are halved next, of maps with these spacings (mm) and lengths (voxels)."""
    long_enough = [axis for axis in range(3) if lengths[axis] >= 2 * LEAST_LENGTH]
    finest = min((step[axis] for axis in long_enough), default=0.0)
    halved = [axis for axis in long_enough if step[axis] < ISOTROPIC * finest]
    if len(halved) == 1 and lengths[halved[0]] < LEAST_ALONE:
        return []
    return halved


class Architecture(NamedTuple):
    """Spacing, patch and levels of a network, by the sizes of a data set."""

    spacing: Spacing  # Target spacing, mm.
    shape: Spacing  # median of the cases at that spacing (voxels)
    patch: Triple  # the least that the strides divide and that holds the patch asked for (voxels)
    levels: Levels


def architecture(
    shapes: Sequence[Sequence[int]],
    spacings: Sequence[Sequence[float]],
    patch: Sequence[float] | None = None,
    spacing: Spacing | None = None,
) -> Architecture:
    """Return the architecture for cases of these shapes (voxels) and spacings (mm), as stored.

    `patch`: lengths (voxels) that it is for; None: the median shape. `spacing`: to resample to (mm); None: by
    `target_spacing`.
    """
    target = spacing or target_spacing(shapes, spacings)
    shape = median_shape(shapes, spacings, target)
    levels = levels_of(target, patch or shape)
    return Architecture(target, shape, levels.padded(patch or shape), levels)

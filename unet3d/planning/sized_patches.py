"""Patches in the proportions of a data set's volumes, the largest first, each with the levels that suit it."""

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from unet3d.model.architecture import Levels, levels_of
from unet3d.model.geometry import Triple

MOST_LEVELS = 7  # deeper maps of large patches would halve again and again what all of it is seen by already
NEARLY = 1.05  # an axis is rounded up to a multiple of the strides where that adds at most 5 %
MOST_CUT = 0.75  # else down, where at least this share of it is left
LEAST_VOXELS = 16**3  # of a patch that is smaller than its volume
LONGEST = 2048  # voxels of an axis, as data.patch has it


class SizedPatch(NamedTuple):
    """A patch (voxels) that the strides of its levels divide."""

    patch: Triple
    levels: Levels

    @property
    def voxels(self) -> int:
        return prod(self.patch)


class SizedSeries:
    """Some patches by number, from the smallest on, as `largest` takes them."""

    def __init__(self, sizes: Sequence[SizedPatch]) -> None:
        """Take patches, the largest first."""
        self._sizes = sizes[::-1]
        self._by_patch = {size.patch: size for size in sizes}

    def __getitem__(self, number: int) -> Triple:
        return self._sizes[number].patch

    def is_last(self, number: int) -> bool:
        """Return whether a patch is the largest."""
        return number == len(self._sizes) - 1

    def of(self, patch: Triple) -> SizedPatch:
        """Return a patch with its levels."""
        return self._by_patch[patch]


def sized_patches(spacing: Sequence[float], shape: Sequence[float], levels: int | None = None) -> list[SizedPatch]:
    """Return patches from about a median volume (voxels) down, each shorter in the axis that is relatively longest.

    The first is at most the volume where the strides allow it; a volume of fewer than 16^3 voxels has one patch, which
    holds all of it. `levels`: the depth that all have; None: by their sizes.
    """
    shape = [min(length, LONGEST) for length in shape]
    strides = _levels(spacing, shape, levels)
    if prod(shape) < LEAST_VOXELS:
        return [SizedPatch(strides.padded(shape), strides)]
    lengths = [_useful(length, unit) for length, unit in zip(shape, strides.units, strict=True)]
    sizes: list[SizedPatch] = []
    while not sizes or prod(lengths) >= LEAST_VOXELS:
        strides = _levels(spacing, lengths, levels)
        patch = strides.padded(lengths)
        if not sizes or prod(patch) < sizes[-1].voxels:
            sizes.append(SizedPatch(patch, strides))
        axis = max(range(3), key=lambda axis: lengths[axis] / shape[axis])
        step = max(1, strides.units[axis])
        if lengths[axis] <= step:
            step = max(1, lengths[axis] // 2)
        lengths[axis] -= step
        if lengths[axis] < 1:
            break
    return sizes


def _levels(spacing: Sequence[float], size: Sequence[float], count: int | None) -> Levels:
    """Return the levels for maps of a size (voxels), `count` of them or as many as suit it."""
    levels = levels_of(spacing, size, count)
    if count is None and len(levels.kernels) > MOST_LEVELS:
        return levels_of(spacing, size, MOST_LEVELS)
    return levels


def _useful(length: float, unit: int) -> int:
    """Return a multiple of `unit` voxels near the length of a volume, below it where little is lost by that."""
    above = int(-(-length // unit) * unit)
    below = int(length // unit * unit)
    if above <= NEARLY * length or below < MOST_CUT * length:
        return above
    return below

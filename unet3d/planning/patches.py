"""Series of patches, the largest first: in the proportions of a data set's volumes, or of what a network takes."""

from collections.abc import Callable, Sequence
from math import prod
from typing import NamedTuple

from unet3d.model.architecture import Levels, levels_of
from unet3d.model.geometry import Triple

MOST_LEVELS = 7  # Deeper maps of large patches would halve again and again what all of it is seen by already.
NEARLY = 1.05  # An axis is rounded up to a multiple of the strides where that adds at most 5 %,
MOST_CUT = 0.75  # else down, where at least this share of it is left.
LEAST_VOXELS = 16**3  # Of a patch that is smaller than its volume.
LONGEST = 2048  # Voxels of an axis, as data.patch has it.
LEAST = 16  # Voxels of an axis of a network's smallest patch.
CUBE: Triple = (1, 1, 1)
VOXEL = (1.0, 1.0, 1.0)  # mm
Padding = Callable[[Sequence[int]], Triple]  # Returns the least patch of at least a size that a network takes.


class SizedPatch(NamedTuple):
    """A patch (voxels) that the strides of its levels divide."""

    patch: Triple
    levels: Levels

    @property
    def voxels(self) -> int:
        return prod(self.patch)


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
        step = strides.units[axis]
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


def plain_sizes(triples: Sequence[Triple], usual: int) -> int | list[list[int]]:
    """Return the usual size where all are it, else a list of them."""
    if all(set(triple) == {usual} for triple in triples):
        return usual
    return [list(triple) for triple in triples]


def patches_of_network(padded: Padding, proportions: Triple | None = None) -> list[Triple]:
    """Return all patches that a network takes: cubes, or those of given proportions, which grow one axis at a time."""
    patches = [padded((LEAST, LEAST, LEAST))]
    while True:
        lengths = [max(patches[-1]) + 1] * 3
        if proportions is not None:
            lengths = list(patches[-1])
            shares = [length / part for length, part in zip(lengths, proportions, strict=True)]
            lengths[shares.index(min(shares))] += 1
        patch = padded(lengths)
        if max(patch) > LONGEST:
            return patches[::-1]
        patches.append(patch)


def padded_by_rules(size: Sequence[int]) -> Triple:
    """Return the least patch of at least this size that a network by nnU-Net's rules takes, for cubic voxels."""
    return levels_of(VOXEL, size).padded(size)


def padded_to(units: Sequence[int]) -> Padding:
    """Return the padding to multiples of `units`, twice each at least."""

    def padded(size: Sequence[int]) -> Triple:
        x, y, z = (max(2, -(-length // unit)) * unit for length, unit in zip(size, units, strict=True))
        return x, y, z

    return padded

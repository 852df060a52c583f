"""Series of patches, each the next larger that a network takes: cubes, or patches of given proportions."""

from collections.abc import Callable, Sequence
from typing import Protocol

from unet3d.model.architecture import levels_of
from unet3d.model.geometry import Triple
from unet3d.planning.sized_patches import LONGEST

LEAST = 16  # voxels of an axis of the first patch
CUBE: Triple = (1, 1, 1)
VOXEL = (1.0, 1.0, 1.0)  # mm
Padding = Callable[[Sequence[int]], Triple]  # returns the least patch of at least a size that a network takes


class PatchSeries(Protocol):
    """Patches by number, from the smallest on."""

    def __getitem__(self, number: int) -> Triple:
        """Return a patch."""

    def is_last(self, number: int) -> bool:
        """Return whether no larger patch is allowed."""


class Series:
    """Patches by number, from the smallest on; each is made from the one before when it is asked for."""

    def __init__(self, padded: Padding, proportions: Sequence[int] = CUBE, is_cube: bool = True) -> None:
        """Begin the series. `proportions`: of the axes; `is_cube`: all axes grow together, else one at a time."""
        self.padded = padded
        self.proportions = proportions
        self.is_cube = is_cube
        self._patches = [padded((LEAST, LEAST, LEAST))]

    def __getitem__(self, number: int) -> Triple:
        while number >= len(self._patches):
            self._patches.append(self._next(self._patches[-1]))
        return self._patches[number]

    def is_last(self, number: int) -> bool:
        """Return whether the next patch would have an axis that is too long."""
        return max(self[number + 1]) > LONGEST

    def _next(self, patch: Triple) -> Triple:
        """Return the next larger patch."""
        if self.is_cube:
            longer = max(patch) + 1
            return self.padded((longer, longer, longer))
        shares = [length / part for length, part in zip(patch, self.proportions, strict=True)]
        lengths = list(patch)
        lengths[shares.index(min(shares))] += 1
        return self.padded(lengths)


def padded_by_rules(size: Sequence[int]) -> Triple:
    """Return the least patch of at least this size that a network by nnU-Net's rules takes, for cubic voxels."""
    return levels_of(VOXEL, size).padded(size)


def padded_to(units: Sequence[int]) -> Padding:
    """Return the padding to multiples of `units`, twice each at least."""

    def padded(size: Sequence[int]) -> Triple:
        x, y, z = (max(2, -(-length // unit)) * unit for length, unit in zip(size, units, strict=True))
        return x, y, z

    return padded

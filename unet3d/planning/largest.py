"""The search for the largest patch of a series whose step fits: few steps are simulated, the answer's and the next."""

from collections.abc import Callable, Mapping
from math import prod
from typing import NamedTuple

from unet3d.model.geometry import Triple
from unet3d.planning.patches import PatchSeries

Occupied = Callable[[Triple], int]  # returns the bytes that a budget limits, of a step with a patch
Points = Mapping[int, float]  # voxels -> bytes of steps that are known, or a guess of them


class Largest(NamedTuple):
    """The largest patch that fits, and the next one, which does not."""

    patch: Triple | None  # None: not even the smallest fits
    next: Triple | None  # None: no larger patch is allowed


def largest(series: PatchSeries, occupied: Occupied, budget: int, guess: Points) -> Largest:
    """Return the largest patch of the series whose step occupies at most `budget` bytes, by simulated steps alone.

    `guess` says where to look first. Each step that is simulated then tells where to look next: bytes are taken to be
    linear in voxels. A larger patch of a series is taken to need more.
    """
    known: dict[int, int] = {}
    fitting = -1
    above: int | None = None
    while above is None or above > fitting + 1:
        number = _likely(series, known or guess, budget)
        number = max(number, fitting + 1)
        if above is not None:
            number = min(number, above - 1)
        patch = series[number]
        known[prod(patch)] = occupied(patch)
        if known[prod(patch)] > budget:
            above = number
        elif series.is_last(number):
            return Largest(patch, None)
        else:
            fitting = number
    return Largest(series[fitting] if fitting >= 0 else None, series[above])


def _likely(series: PatchSeries, points: Points, budget: int) -> int:
    """Return the number of the largest patch that fits if bytes are linear in voxels."""
    voxels = _voxels_within(points, budget)
    number = 0
    while not series.is_last(number) and prod(series[number + 1]) <= voxels:
        number += 1
    return number


def _voxels_within(points: Points, budget: int) -> float:
    """Return how many voxels fit, by the two points nearest to the budget, or by one and the origin."""
    nearest = sorted(points, key=lambda voxels: abs(points[voxels] - budget))[:2]
    slope = points[nearest[0]] / nearest[0]
    if len(nearest) == 2:
        rise = (points[nearest[1]] - points[nearest[0]]) / (nearest[1] - nearest[0])
        slope = rise if rise > 0 else slope
    return nearest[0] + (budget - points[nearest[0]]) / slope

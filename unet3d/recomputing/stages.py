"""Stages of a pass: what is alive before and after, as sets of bits, and what happens between."""

from collections.abc import Iterable
from typing import NamedTuple

from unet3d.recomputing.instructions import Instruction


class State(NamedTuple):
    """What there is between two stages. Each is a set of maps, bit i for map i."""

    alive: int
    gradients: int
    completed: int  # maps whose gradients have the statistics' part
    trained: int  # maps whose weights have gradients


class Stage(NamedTuple):
    """A stage of a pass. Bytes count from those that are alive as it begins."""

    instructions: tuple[Instruction, ...]
    growth: int  # bytes, until its end
    most: int | None  # bytes at once; None where it makes nothing
    maps: int  # that are there then, bit i for map i
    work: tuple[float, ...]  # of the maps that it makes, in forward passes
    after: State


NOTHING = State(0, 0, 0, 0)


def mask_of(indices: Iterable[int]) -> int:
    """Return a set of maps as bits."""
    mask = 0
    for index in indices:
        mask |= 1 << index
    return mask


def indices_of(mask: int) -> list[int]:
    """Return the maps of a set, in order."""
    indices = []
    while mask:
        lowest = mask & -mask
        indices.append(lowest.bit_length() - 1)
        mask ^= lowest
    return indices

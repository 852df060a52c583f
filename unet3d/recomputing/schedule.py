"""The schedule of a pass, and its bytes.

Which maps stay is a table: `keep[stage]` are those that stay after a stage, where stage n is the forward pass and
stage i the gradient of map i, from the last map to the first. From it follow the instructions, by `Compiler`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from unet3d.recomputing.compiler import Compiler, Keep
from unet3d.recomputing.costs import Sizes
from unet3d.recomputing.instructions import Instruction


@dataclass(frozen=True)
class Schedule:
    """Instructions of a pass and its backward pass."""

    instructions: tuple[Instruction, ...]
    peak_bytes: int  # of maps, gradients and what is beside them in an instruction
    work: float  # of all maps made, in forward passes
    keep: Sequence[frozenset[int]] = ()  # the table


EMPTY = Schedule((), 0, 0.0)


def compile_schedule(sizes: Sizes, keep: Keep) -> Schedule:
    """Return the schedule in which these maps stay."""
    compiler = Compiler(sizes, keep, writes=True)
    compiler.run()
    table = tuple(frozenset(stays) for stays in keep)
    return Schedule(tuple(compiler.instructions), compiler.peak, compiler.work, table)


class Peak(NamedTuple):
    """The most bytes of a schedule, and where that is."""

    bytes: int
    work: float  # of the whole schedule
    stage: int
    maps: tuple[int, ...]  # that are there
    mean: float  # of the most bytes of each stage


def locate_peak(sizes: Sizes, keep: Keep) -> Peak:
    """Return the peak of that schedule."""
    compiler = Compiler(sizes, keep, writes=False)
    compiler.run()
    mean = sum(compiler.of_stages) / len(compiler.of_stages)
    return Peak(compiler.peak, compiler.work, compiler.peak_stage, compiler.peak_maps, mean)


def every_map(sizes: Sizes) -> list[set[int]]:
    """Return the table in which all maps stay."""
    return [set(range(sizes.count)) for _ in range(sizes.count + 1)]

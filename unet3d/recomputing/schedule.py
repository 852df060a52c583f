"""The schedule of a pass, and its bytes.

Which maps stay is a table: `keep[stage]` are those that stay after a stage, where stage n is the forward pass and
stage i the gradient of map i, from the last map to the first. From it follow the instructions, by `Compiler`.
"""

from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

from unet3d.recomputing.compiler import Compiler
from unet3d.recomputing.costs import Sizes
from unet3d.recomputing.instructions import Instruction
from unet3d.recomputing.stages import NOTHING, Stage, State, indices_of, mask_of

Keep = Iterable[Set[int]]  # a table
Masks = Sequence[int]  # the same, bit i for map i


@dataclass(frozen=True)
class Schedule:
    """Instructions of a pass and its backward pass."""

    instructions: tuple[Instruction, ...]
    peak_bytes: int  # of maps, gradients and what is beside them in an instruction
    work: float  # of all maps made, in forward passes
    keep: Sequence[frozenset[int]] = ()  # the table


EMPTY = Schedule((), 0, 0.0)


class Peak(NamedTuple):
    """The most bytes of a schedule, and where that is."""

    bytes: int
    work: float  # of the whole schedule
    stage: int
    maps: list[int]  # that are there, in order
    mean: float  # of the most bytes of each stage


class PlacedStage(NamedTuple):
    """A stage among maps that only stay over it."""

    stage: Stage
    others: int  # the maps that only stay, bit i for map i
    after: State


Key = tuple[int, State, int]  # of a stage: its number, what there is before, the maps that stay after it


class Passes:
    """Passes over the same maps, whose stages are compiled once.

    A map that only stays over a stage makes no difference to it. So stages are compiled without such maps, and those
    that are alike but for them are one.
    """

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self._placed: dict[Key, PlacedStage] = {}
        self._made: dict[tuple[int, int], Stage] = {}  # by a map and what stays of its sources that nothing reads later
        self._sent: dict[Key, Stage] = {}
        self._last_reads = [mask_of(sources) for sources in sizes.last_reads]
        self._concerned: dict[tuple[int, int], int] = {}  # by the number of a stage and the maps that are there

    def schedule(self, table: Masks) -> Schedule:
        """Return the schedule in which the maps of a table stay."""
        instructions: list[Instruction] = []
        for _, placed in self._stages(table):
            instructions += placed.stage.instructions
        peak = self.peak(table)
        keep = tuple(frozenset(indices_of(stays)) for stays in table)
        return Schedule(tuple(instructions), peak.bytes, peak.work, keep)

    def peak(self, table: Masks) -> Peak:
        """Return the peak of that schedule."""
        alive = 0
        total = 0
        work = 0.0
        peak_bytes = 0
        peak_stage = self.sizes.count
        peak_maps = 0
        for number, placed in self._stages(table):
            stage = placed.stage
            if stage.most is not None:
                most = alive + stage.most
                total += most
                if most > peak_bytes:
                    peak_bytes = most
                    peak_stage = number
                    peak_maps = stage.maps | placed.others
            alive += stage.growth
            for share in stage.work:
                work += share
        mean = total / len(table)
        return Peak(peak_bytes, work, peak_stage, indices_of(peak_maps), mean)

    def _stages(self, table: Masks) -> Iterator[tuple[int, PlacedStage]]:
        """Yield the stages of a pass by their numbers."""
        state = NOTHING
        for number in range(self.sizes.count, -1, -1):
            key = (number, state, table[number])
            placed = self._placed.get(key)
            if placed is None:
                placed = self._place(number, state, table[number])
                self._placed[key] = placed
            yield number, placed
            state = placed.after

    def _place(self, number: int, before: State, stays: int) -> PlacedStage:
        """Return a stage, compiled without the maps that only stay."""
        if number == self.sizes.count:
            return self._forward(stays)
        concerned = self._maps_concerned(number, before.alive) | before.alive & ~stays
        others = before.alive & ~concerned
        alive, gradients, completed, trained = before
        before = State(alive & concerned, gradients, completed, trained)
        key = (number, before, stays & concerned)
        stage = self._sent.get(key)
        if stage is None:
            stage = Compiler(self.sizes, before, stays & concerned).sent(number)
            self._sent[key] = stage
        alive, gradients, completed, trained = stage.after
        after = State(alive | others, gradients, completed, trained)
        return PlacedStage(stage, others, after)

    def _forward(self, stays: int) -> PlacedStage:
        """Return the forward pass, joined from the making of one map after the other."""
        instructions: list[Instruction] = []
        work: list[float] = []
        alive = 0
        growth = 0
        most = 0
        maps = 0
        for index, last_reads in enumerate(self._last_reads):
            staying = last_reads & stays
            stage = self._made.get((index, staying))
            if stage is None:
                stage = Compiler(self.sizes, NOTHING._replace(alive=last_reads), staying).made(index)
                self._made[index, staying] = stage
            assert stage.most is not None
            if growth + stage.most > most:
                most = growth + stage.most
                maps = alive
            growth += stage.growth
            instructions += stage.instructions
            work += stage.work
            alive = alive & ~last_reads | stage.after.alive
        stage = Compiler(self.sizes, NOTHING._replace(alive=alive), stays).turned()
        if stage.most is not None and growth + stage.most > most:
            most = growth + stage.most
            maps = stage.maps
        growth += stage.growth
        instructions += stage.instructions
        joined = Stage(tuple(instructions), growth, most, maps, tuple(work), stage.after)
        return PlacedStage(joined, 0, joined.after)

    def _maps_concerned(self, number: int, alive: int) -> int:
        """Return the maps that a stage may read or make: those of which its gradient is sent, and what they need."""
        sizes = self.sizes
        key = (number, alive)
        if key not in self._concerned:
            maps = 1 << number
            waiting = [number]
            while waiting:
                for source in sizes.sources[waiting.pop()]:
                    is_new = not maps >> source & 1
                    is_there = alive >> source & 1
                    maps |= 1 << source
                    if is_new and not is_there:
                        waiting.append(source)
            self._concerned[key] = maps
        return self._concerned[key]


def compile_schedule(sizes: Sizes, keep: Keep) -> Schedule:
    """Return the schedule in which these maps stay."""
    return Passes(sizes).schedule(_masks(keep))


def locate_peak(sizes: Sizes, keep: Keep) -> Peak:
    """Return the peak of that schedule."""
    return Passes(sizes).peak(_masks(keep))


def every_map(sizes: Sizes) -> list[set[int]]:
    """Return the table in which all maps stay."""
    return [set(range(sizes.count)) for _ in range(sizes.count + 1)]


def _masks(keep: Keep) -> list[int]:
    return [mask_of(stays) for stays in keep]

"""The schedule of a pass, and its bytes.

Which maps stay is a table: `keep[stage]` are those that stay after a stage, where stage n is the forward pass and
stage i the gradient of map i, from the last map to the first. From it follow the instructions, by `Compiler`.

`is_sound` follows the maps and gradients that are there through the instructions of a schedule.
"""

from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

from unet3d.recomputing.compiler import Compiler
from unet3d.recomputing.instructions import (
    NOTHING,
    Backward,
    BackwardTwoPass,
    BeginBackward,
    Compute,
    Instruction,
    Liveness,
    NormBackward,
    NormBackwardTiled,
    Release,
    Sizes,
    Stage,
    indices_of,
    mask_of,
)

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
    after: Liveness


Key = tuple[int, Liveness, int]  # of a stage: its number, what there is before, the maps that stay after it


class StageCache:
    """Compile schedules over the same maps, each stage once.

    A stage is independent of maps that are merely live across it, so it is compiled without them, and stages that
    differ in nothing else are one.
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

    def _place(self, number: int, before: Liveness, stays: int) -> PlacedStage:
        """Return a stage, compiled without the maps that only stay."""
        if number == self.sizes.count:
            return self._forward(stays)
        concerned = self._maps_concerned(number, before.alive) | before.alive & ~stays
        others = before.alive & ~concerned
        alive, gradients, completed, trained = before
        before = Liveness(alive & concerned, gradients, completed, trained)
        key = (number, before, stays & concerned)
        stage = self._sent.get(key)
        if stage is None:
            stage = Compiler(self.sizes, before, stays & concerned).sent(number)
            self._sent[key] = stage
        alive, gradients, completed, trained = stage.after
        after = Liveness(alive | others, gradients, completed, trained)
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
    return StageCache(sizes).schedule(_masks(keep))


def locate_peak(sizes: Sizes, keep: Keep) -> Peak:
    """Return the peak of that schedule."""
    return StageCache(sizes).peak(_masks(keep))


def every_map(sizes: Sizes) -> list[set[int]]:
    """Return the table in which all maps stay."""
    return [set(range(sizes.count)) for _ in range(sizes.count + 1)]


def _masks(keep: Keep) -> list[int]:
    return [mask_of(stays) for stays in keep]


def is_sound(sizes: Sizes, schedule: Schedule) -> bool:
    """Return whether no instruction reads a map or a gradient that is not there, and all gradients are complete."""
    alive = _Alive(sizes)
    for instruction in schedule.instructions:
        if not alive.takes(instruction):
            return False
    return not alive.gradients


class _Alive:
    """The maps and gradients that are there between two instructions."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.maps: set[int] = set()
        self.gradients: set[int] = set()
        self.complete: set[int] = set()  # maps whose gradients have the statistics' part

    def takes(self, instruction: Instruction) -> bool:
        """Return whether all that an instruction reads is there, and follow it."""
        sizes = self.sizes
        match instruction:
            case Compute():
                return self._takes_compute(instruction)
            case Release(index):
                if index not in self.maps:
                    return False
                self.maps.discard(index)
            case BeginBackward():
                self.gradients |= {index for index in sizes.outputs if sizes.needs_gradient[index]}
                self.maps -= {index for index in self.gradients if not sizes.users[index]}
            case NormBackward(index):
                self.complete.add(index)
                return index in self.maps and index in self.gradients
            case NormBackwardTiled(index, streamed):
                self.complete.add(index)
                return self._has(sizes.sources[index], streamed) and index in self.gradients
            case Backward() | BackwardTwoPass():
                return self._takes_backward(instruction)
        return True

    def _has(self, sources: Iterable[int], streamed: Sequence[int]) -> bool:
        """Return whether sources are there, or cheap stems that are streamed."""
        are_cheap = all(self.sizes.is_cheap_stem[source] for source in streamed)
        return are_cheap and set(sources) - set(streamed) <= self.maps

    def _takes_compute(self, make: Compute) -> bool:
        if not self._has(self.sizes.sources[make.map], make.streamed) or make.map in self.maps:
            return False
        if make.inplace_on is not None:
            self.maps.discard(make.inplace_on)
        self.maps.add(make.map)
        return True

    def _takes_backward(self, send: Backward | BackwardTwoPass) -> bool:
        index = send.map
        is_complete = not self.sizes.is_normalised[index] or index in self.complete
        has_sources = self._has(self.sizes.reads[index], send.streamed)
        if not is_complete or not has_sources or index not in self.gradients:
            return False
        self.gradients.discard(index)
        self.complete.discard(index)  # another part of it may follow
        is_twice = isinstance(send, BackwardTwoPass)
        for source, place in send.targets:
            if (place == "add") != (source in self.gradients):
                return False
            if place == "map":
                if source not in self.maps:
                    return False
                if is_twice and source != send.targets[-1].source:
                    return False  # the second pass reads it
                self.maps.discard(source)
            self.gradients.add(source)
        if is_twice:
            self.complete.add(send.targets[-1].source)
        return True

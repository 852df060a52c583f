"""The schedule of a pass, and its bytes.

Which maps stay is a table: `keep[stage]` are those that stay after a stage, where stage n is the forward pass and
stage i the gradient of map i, from the last map to the first. From it follow the instructions, by `Compiler`.
"""

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

from unet3d.recomputing.compiler import NOTHING, Compiler, Instruction, Liveness, Sizes, Stage, indices_of, mask_of

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


class Cost(NamedTuple):
    """The most bytes of a schedule, where that is, and its work."""

    bytes: int
    work: float  # of the whole schedule, in forward passes
    stage: int
    maps: int  # that are there at the most bytes, bit i for map i
    mean: float  # of the most bytes of each stage


class PlacedStage(NamedTuple):
    """A stage among maps that only stay over it. Bytes count from those that are alive as it begins."""

    most: int | None
    growth: int
    work: tuple[float, ...]
    maps: int  # that are there at the most bytes, bit i for map i
    after: int  # the number of what there is after it
    parts: Sequence[Stage]  # as compiled, in order


class StageCache:
    """Compile schedules over the same maps, each stage once.

    A stage is independent of maps that are merely live across it, so it is compiled without them, and stages that
    differ in nothing else are one. A search asks for the cost of tens of thousands of tables, so what there is between
    two stages is named by a number, which is a shorter key.
    """

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self._states = [NOTHING]  # by their numbers
        self._numbers = {NOTHING: 0}
        # For each stage, by the number of what there is before, and the maps that stay after it.
        self._placed: list[dict[tuple[int, int], PlacedStage]] = [{} for _ in range(sizes.count + 1)]
        self._made: dict[tuple[int, int], Stage] = {}  # by a map and what stays of its sources that nothing reads later
        self._sent: dict[tuple[int, Liveness, int], Stage] = {}
        self._last_reads = [mask_of(sources) for sources in sizes.last_reads]
        self._concerned: dict[tuple[int, int], int] = {}  # by the number of a stage and the maps that are there

    def schedule(self, table: Masks) -> Schedule:
        """Return the schedule in which the maps of a table stay."""
        instructions: list[Instruction] = []
        state = 0
        for number in range(self.sizes.count, -1, -1):
            placed = self._place(number, state, table[number])
            for part in placed.parts:
                instructions += part.instructions
            state = placed.after
        cost = self.cost(table)
        keep = tuple(frozenset(indices_of(stays)) for stays in table)
        return Schedule(tuple(instructions), cost.bytes, cost.work, keep)

    def cost(self, table: Masks) -> Cost:
        """Return the cost of that schedule."""
        state = 0
        alive = 0
        total = 0
        work = 0.0
        most_bytes = 0
        most_stage = self.sizes.count
        most_maps = 0
        for number in range(self.sizes.count, -1, -1):
            placed = self._placed[number].get((state, table[number]))
            if placed is None:
                placed = self._place(number, state, table[number])
            most, growth, shares, maps, state, _ = placed
            if most is not None:
                most += alive
                total += most
                if most > most_bytes:
                    most_bytes = most
                    most_stage = number
                    most_maps = maps
            alive += growth
            for share in shares:
                work += share
        return Cost(most_bytes, work, most_stage, most_maps, total / len(table))

    def _place(self, number: int, state: int, stays: int) -> PlacedStage:
        """Return a stage, compiled without the maps that only stay."""
        placed = self._placed[number].get((state, stays))
        if placed is None:
            before = self._states[state]
            placed = self._forward(stays) if number == self.sizes.count else self._backward(number, before, stays)
            self._placed[number][state, stays] = placed
        return placed

    def _number(self, state: Liveness) -> int:
        """Return the number that stands for what there is between two stages."""
        number = self._numbers.setdefault(state, len(self._states))
        if number == len(self._states):
            self._states.append(state)
        return number

    def _backward(self, number: int, before: Liveness, stays: int) -> PlacedStage:
        """Return the stage that sends the gradient of a map."""
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
        after = self._number(Liveness(alive | others, gradients, completed, trained))
        return PlacedStage(stage.most, stage.growth, stage.work, stage.maps | others, after, (stage,))

    def _forward(self, stays: int) -> PlacedStage:
        """Return the forward pass, joined from the making of one map after the other."""
        parts: list[Stage] = []
        work = 0.0
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
            for share in stage.work:
                work += share
            parts.append(stage)
            alive = alive & ~last_reads | stage.after.alive
        stage = Compiler(self.sizes, NOTHING._replace(alive=alive), stays).turned()
        if stage.most is not None and growth + stage.most > most:
            most = growth + stage.most
            maps = stage.maps
        parts.append(stage)
        return PlacedStage(most, growth + stage.growth, (work,), maps, self._number(stage.after), parts)

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
    return StageCache(sizes).schedule([mask_of(stays) for stays in keep])

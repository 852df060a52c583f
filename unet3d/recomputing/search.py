"""The schedules of a pass, their bytes, and the search for those that need least memory for each amount of work.

Which maps stay is a table: `keep[stage]` are those that stay after a stage, where stage n is the forward pass and
stage i the gradient of map i, from the last map to the first. From it follow the instructions, by `Compiler`.

The search begins with the tables that keep the smaller maps, and changes them at random: most often, whether a map
stays from one use of it to the next, or whether one is there at the peak. The number of tries is fixed and the random
numbers are seeded, so that a network's schedules are always the same. The schedules that it went through and that no
other beats in both bytes and work are the front; a budget takes the one of least work that fits. So less budget never
needs more memory.

Changes at random seldom leave a table in which a large map stays while all that is small is made again. So a few of
the first tables are also followed down: each time, of all maps that are there at the peak that one is given up which
helps most.
"""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import and_, itemgetter, or_
from typing import NamedTuple

from unet3d.base import signals
from unet3d.base.process import collector_resting
from unet3d.recomputing.compiler import NOTHING, Compiler, Instruction, Liveness, Sizes, Stage, indices_of, mask_of

Masks = Sequence[int]  # a table: for each stage, the maps that stay after it, bit i for map i


@dataclass(frozen=True)
class Schedule:
    """Instructions of a pass and its backward pass."""

    instructions: tuple[Instruction, ...]
    peak_bytes: int  # Maps, gradients and an instruction's workspace together.
    work: float  # Forward passes that making all maps takes.
    keep: Masks = ()


EMPTY = Schedule((), 0, 0.0)


class Cost(NamedTuple):
    """The most bytes of a schedule, where that is, and its work."""

    bytes: int
    work: float  # Forward passes that the whole schedule takes.
    stage: int
    maps: int  # Maps that are held at the peak, bit i for map i.
    mean: float  # Mean over stages of their peaks.


class StageCache:
    """Compile schedules over the same maps, each stage once.

    A stage is independent of maps that are merely live across it, so it is compiled without them, and stages that
    differ in nothing else are one. A search asks for the cost of tens of thousands of tables, so what there is between
    two stages is named by a number, which is a shorter key.
    """

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self._states = [NOTHING]  # Position is the state's number.
        self._numbers = {NOTHING: 0}
        # Each stage, among maps that only stay over it, and the number of what there is after it: by the number of what
        # there is before, and the maps that stay after it.
        self._placed: list[dict[tuple[int, int], tuple[Stage, int]]] = [{} for _ in range(sizes.count + 1)]
        # Keys: a map, and which of its sources stay that nothing reads later.
        self._made: dict[tuple[int, int], Stage] = {}
        self._sent: dict[tuple[int, Liveness, int], Stage] = {}
        self._last_reads = [mask_of(sources) for sources in sizes.last_reads]
        self._concerned: dict[tuple[int, int], int] = {}  # Keys: a stage's number and the maps that are held.

    def schedule(self, table: Masks) -> Schedule:
        """Return the schedule in which the maps of a table stay."""
        instructions: list[Instruction] = []
        state = 0
        for number in range(self.sizes.count, -1, -1):
            stage, state = self._place(number, state, table[number])
            instructions += stage.instructions
        cost = self.cost(table)
        return Schedule(tuple(instructions), cost.bytes, cost.work, tuple(table))

    def cost(self, table: Masks) -> Cost:
        """Return the cost of that schedule."""
        state = alive = total = most_bytes = most_maps = 0
        most_stage = self.sizes.count
        work = 0.0
        for number in range(self.sizes.count, -1, -1):
            stays = table[number]
            stage, state = self._placed[number].get((state, stays)) or self._place(number, state, stays)
            _, growth, most, maps, shares, _ = stage
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

    def _place(self, number: int, state: int, stays: int) -> tuple[Stage, int]:
        """Return a stage, compiled without the maps that only stay, and the number of what there is after it."""
        placed = self._placed[number].get((state, stays))
        if placed is None:
            before = self._states[state]
            stage = self._forward(stays) if number == self.sizes.count else self._backward(number, before, stays)
            after = self._numbers.setdefault(stage.after, len(self._states))
            if after == len(self._states):
                self._states.append(stage.after)
            placed = self._placed[number][state, stays] = stage, after
        return placed

    def _backward(self, number: int, before: Liveness, stays: int) -> Stage:
        """Return the stage that sends the gradient of a map."""
        concerned = self._maps_concerned(number, before.alive) | before.alive & ~stays
        others = before.alive & ~concerned
        before = before._replace(alive=before.alive & concerned)
        key = (number, before, stays & concerned)
        stage = self._sent.get(key)
        if stage is None:
            stage = Compiler(self.sizes, before, stays & concerned).sent(number)
            self._sent[key] = stage
        after = stage.after._replace(alive=stage.after.alive | others)
        return stage._replace(maps=stage.maps | others, after=after)

    def _forward(self, stays: int) -> Stage:
        """Return the forward pass, joined from the making of one map after the other."""
        instructions: list[Instruction] = []
        alive = growth = most = maps = 0
        work = 0.0
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
            instructions += stage.instructions
            alive = alive & ~last_reads | stage.after.alive
        stage = Compiler(self.sizes, NOTHING._replace(alive=alive), stays).turned()
        if stage.most is not None and growth + stage.most > most:
            most = growth + stage.most
            maps = stage.maps
        instructions += stage.instructions
        return Stage(tuple(instructions), growth + stage.growth, most, maps, (work,), stage.after)

    def _maps_concerned(self, number: int, alive: int) -> int:
        """Return the maps that a stage may read or make: those of which its gradient is sent, and what they need."""
        sizes = self.sizes
        key = (number, alive)
        if key not in self._concerned:
            maps = 1 << number
            waiting = [number]
            while waiting:
                for source in sizes.sources[waiting.pop()]:
                    if not (maps | alive) >> source & 1:
                        waiting.append(source)
                    maps |= 1 << source
            self._concerned[key] = maps
        return self._concerned[key]


def compile_schedule(sizes: Sizes, keep: Masks) -> Schedule:
    """Return the schedule in which these maps stay."""
    return StageCache(sizes).schedule(keep)


# Search

Table = list[int]  # A table to be changed.
Flip = tuple[int, int]  # a stage, and a map that stays after it from now on, or no longer does
AT_PEAK = 0.5  # So many of the changes let less stay where the peak is.
FIRST_GAP = slice(0, 1)  # after the forward pass
LAST_GAP = slice(-1, None)
ALL_GAPS = slice(None)


def flip(table: Table, flips: Sequence[Flip]) -> None:
    """Change whether maps stay, each after one stage."""
    for stage, index in flips:
        table[stage] ^= 1 << index


class Changes:
    """Changes of a table, drawn at random."""

    def __init__(self, sizes: Sizes, draw: random.Random) -> None:
        self.count = sizes.count
        self.draw = draw
        self.gaps = [_gaps(sizes, index) for index in range(sizes.count)]
        self.neighbours = [(*sizes.sources[index], *sizes.users[index]) for index in range(sizes.count)]

    def of(self, table: Table, cost: Cost) -> list[Flip]:
        """Return the stages and maps of one change."""
        if cost.maps and self.draw.random() < AT_PEAK:
            return self._evict(table, cost)
        kind = self.draw.random()
        if kind < 0.45:
            return self._between_uses(table)
        if kind < 0.6:
            flips = {*self._between_uses(table), *self._between_uses(table)}
            return sorted(flips)
        if kind < 0.75:
            return self._of_neighbours(table)
        if kind < 0.9:
            return self._over_stages(table)
        stage = self.draw.randrange(self.count + 1)
        index = self.draw.randrange(self.count)
        return [(stage, index)]

    def _between_uses(self, table: Table) -> list[Flip]:
        """Let a map stay, or not, from one use of it to the next."""
        index = self.draw.randrange(self.count)
        gap = self.draw.choice(self.gaps[index])
        stays = _stays(table, index, gap[-1])
        return _flips(table, index, gap, not stays)

    def _evict(self, table: Table, cost: Cost) -> list[Flip]:
        """Let a map that is there at the peak stay no longer, and perhaps one that it is made from, or a reader."""
        index = self.draw.choice(indices_of(cost.maps))
        stages = range(cost.stage, cost.stage + 1)
        if self.draw.random() < 0.8:
            stages = next((gap for gap in self.gaps[index] if cost.stage in gap), stages)
        flips = set(_flips(table, index, stages, False))
        kind = self.draw.random()
        if kind < 0.3:
            flips ^= set(self._between_uses(table))
        elif kind < 0.7 and self.neighbours[index]:
            other = self.draw.choice(self.neighbours[index])
            flips |= set(_flips(table, other, stages, True))
        return sorted(flips)

    def evictions(self, table: Table, cost: Cost) -> Iterator[list[Flip]]:
        """Yield the changes that give up a map that is there at the peak, also for a neighbour."""
        for index in indices_of(cost.maps):
            for gap in self.gaps[index]:
                if cost.stage not in gap:
                    continue
                for stages in (gap, range(cost.stage, cost.stage + 1)):
                    flips = _flips(table, index, stages, False)
                    if flips:
                        yield flips
                for other in self.neighbours[index]:
                    yield sorted({*_flips(table, index, gap, False), *_flips(table, other, gap, True)})

    def _of_neighbours(self, table: Table) -> list[Flip]:
        """Let several maps in a row stay, or not, from the forward pass on, or until their last use, or throughout."""
        first = self.draw.randrange(self.count)
        most = max(2, self.count // 4)
        number = 1 + self.draw.randrange(most)
        end = min(self.count, first + number)
        stays = self.draw.random() < 0.5
        which = self.draw.choice((FIRST_GAP, LAST_GAP, ALL_GAPS))
        flips = []
        for index in range(first, end):
            for gap in self.gaps[index][which]:
                flips += _flips(table, index, gap, stays)
        return flips

    def _over_stages(self, table: Table) -> list[Flip]:
        """Let a map stay, or not, over some stages."""
        index = self.draw.randrange(self.count)
        first = self.draw.randrange(self.count + 1)
        last = self.draw.randrange(first, self.count + 1)
        stays = self.draw.random() < 0.5
        stages = range(first, last + 1)
        return _flips(table, index, stages, stays)


def _flips(table: Table, index: int, stages: range, stays: bool) -> list[Flip]:
    """Return the flips after which a map stays, or does not, after each of these stages."""
    flips = []
    for stage in stages:
        if _stays(table, index, stage) != stays:
            flips.append((stage, index))
    return flips


def _stays(table: Table, index: int, stage: int) -> bool:
    """Return whether a map stays after a stage."""
    return bool(table[stage] >> index & 1)


def _gaps(sizes: Sizes, index: int) -> list[range]:
    """Return the stages between one use of a map and the next, from the forward pass on."""
    uses = [sizes.count, *reversed(sizes.users[index])]
    if sizes.is_normalised[index]:
        uses.append(index)
    gaps = []
    for before, after in pairwise(uses):
        if after < before:
            gaps.append(range(after + 1, before + 1))
    if not gaps:
        gaps.append(range(index + 1, sizes.count + 1))
    return gaps


LIMITS = (1.0, 1.1, 1.3, 1.6, 1.9)  # Work in forward passes, which may exceed it by LITTLE_WORK.
LITTLE_WORK = 0.14  # Forward passes: small convolutions and sums take as much.
MOST_WORK = 2.2  # Forward passes; with more of them, memory falls by little.
TRIES = 3000  # So many tables are tried for each limit.
FEWEST_TRIES = 50
LOOKS = 3_000_000  # So many entries of tables are tried: of many maps fewer tables.
ROUNDS = 3  # Rounds start from the limit's best table, from one of more work, and from the best of both.
DESCENTS = 3  # So many of the first tables, the best of the last limit, are followed down.
SHARE_OF_DESCENT = 1 / 6  # A descent gets this share of a limit's tries.
MUCH_WORK = 1.3  # From this limit on the other table is that of the least memory.
STEP = 0.15  # Before, it is the best of a limit so much higher.
HEAT = 0.03  # Share of the largest map: a change worse by it is accepted at first, one time in e.
PRICE = 0.05  # Price of a forward pass in shares of the largest map: else work up to the limit is wasted.
MEAN = 0.02  # Weight of a stage's mean bytes: else only the peak tells a better change.
SHARES = (0.0, 0.1, 0.2, 0.3, 0.6, 1.0)  # Maps up to such a share of the largest stay in the first tables.


class Front:
    """Schedules that none beats in both bytes and work, by their tables."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.largest = max(sizes.bytes)
        self.stages = StageCache(sizes)
        self.points: dict[tuple[int, float], Masks] = {}

    def add(self, peak: int, work: float, table: Table) -> None:
        """Add a schedule, if it is of the front, and drop those that it beats."""
        for other_peak, other_work in self.points:
            if other_peak <= peak and other_work <= work:
                return
        kept = {point: other for point, other in self.points.items() if point[0] < peak or point[1] < work}
        self.points = {**kept, (peak, work): tuple(table)}

    def scored(self, table: Masks, limit: float) -> tuple[Cost, float]:
        """Return the cost of a schedule, and its score: bytes, and many more for work beyond the limit."""
        cost = self.stages.cost(table)
        excess = max(0.0, cost.work - limit - LITTLE_WORK)
        return cost, cost.bytes + MEAN * cost.mean + self.largest * (PRICE * cost.work + 10 * excess)


@collector_resting()
def front(sizes: Sizes) -> list[Schedule]:
    """Return the schedules that none beats, from the least work to the least memory."""
    best = Front(sizes)
    tries = max(FEWEST_TRIES, LOOKS // sizes.count**2)
    tries = min(TRIES, tries)
    starts: dict[float, Table] = {}  # The keys are their scores.
    for table in _starts(sizes):
        cost, score = best.scored(table, LIMITS[-1])
        best.add(cost.bytes, cost.work, table)
        starts.setdefault(score, table)
    for score in sorted(starts)[:DESCENTS]:
        _descend(best, starts[score], LIMITS[-1], round(tries * SHARE_OF_DESCENT))
    draw = random.Random(0)
    for limit in LIMITS:
        signals.raise_again()
        least = _improve(best, _least_within(best, limit), limit, tries // ROUNDS, draw)
        # A table of less memory and more work than the limit, from which the search comes down.
        elsewhere = best.points[min(best.points)] if limit >= MUCH_WORK else _least_within(best, limit + STEP)
        other = _improve(best, elsewhere, limit, tries // ROUNDS, draw)
        _, table_of_least = min(least, other, key=itemgetter(0))
        _improve(best, table_of_least, limit, tries // ROUNDS, draw)
    ordered = sorted(best.points, reverse=True)  # From the most bytes to the least.
    return [best.stages.schedule(best.points[point]) for point in ordered]


def _starts(sizes: Sizes) -> Iterator[Table]:
    """Yield tables in which maps stay that are small and much work, and tables of maps that are small or much work."""
    stages = sizes.count + 1
    maps = range(sizes.count)
    largest = max(sizes.bytes)
    small = [mask_of(index for index in maps if sizes.bytes[index] <= share * largest) for share in SHARES]
    yield [mask_of(maps)] * stages
    for joined, shares_of_work in ((and_, (0.0, 1e-9, 0.01, 0.05)), (or_, (1e-9, 0.002, 0.01, 0.05))):
        for least_work in shares_of_work:
            much_work = mask_of(index for index in maps if sizes.work[index] >= least_work)
            for are_small in small:
                yield [joined(are_small, much_work)] * stages


def _least_within(best: Front, limit: float) -> Masks:
    """Return the table of least memory whose work is within the limit."""
    within = [point for point in best.points if point[1] <= limit + LITTLE_WORK]
    point = min(within or best.points)
    return best.points[point]


def _improve(best: Front, first: Masks, limit: float, tries: int, draw: random.Random) -> tuple[float, Masks]:
    """Change a table at random, as long as that scores less, and return the least score with its table.

    At first, changes for the worse are accepted too, rarely and the less the worse: simulated annealing.
    """
    changes = Changes(best.sizes, draw)
    table = list(first)
    cost, score = best.scored(table, limit)
    least = (score, first)
    for number in range(tries):
        flips = changes.of(table, cost)
        flip(table, flips)
        new_cost, new_score = best.scored(table, limit)
        worse = new_score - score
        temperature = HEAT * best.largest * (1 - number / tries)
        if worse <= 0 or draw.random() < math.exp(-worse / temperature):
            score = new_score
            cost = new_cost
            best.add(cost.bytes, cost.work, table)
            if score < least[0]:
                least = (score, tuple(table))
        else:
            flip(table, flips)
    return least


def _descend(best: Front, table: Table, limit: float, tries: int) -> None:
    """Change a table as long as giving up a map at the peak helps, each time by the change that helps most."""
    changes = Changes(best.sizes, random.Random(0))
    cost, least = best.scored(table, limit)
    while tries > 0:
        best_flips: Sequence[Flip] = ()
        for flips in changes.evictions(table, cost):
            flip(table, flips)
            new_cost, score = best.scored(table, limit)
            best.add(new_cost.bytes, new_cost.work, table)
            flip(table, flips)
            tries -= 1
            if score < least:
                least = score
                best_flips = flips
        if not best_flips:
            return
        flip(table, best_flips)
        cost = best.stages.cost(table)

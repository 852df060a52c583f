"""The search for schedules: for each amount of work, the one that needs least memory.

It begins with the tables that keep the smaller maps, and changes them at random: most often, whether a map stays from
one use of it to the next, or whether one is there at the peak. The number of tries is fixed and the random numbers are
seeded, so that a network's schedules are always the same. The schedules that it went through and that no other beats
in both bytes and work are the front; a budget takes the one of least work that fits. So less budget never needs more
memory.

Changes at random seldom leave a table in which a large map stays while all that is small is made again. So a few of
the first tables are also followed down: each time, of all maps that are there at the peak that one is given up which
helps most.
"""

import math
import random
from collections.abc import Iterator, Sequence
from itertools import pairwise
from operator import and_, attrgetter, or_
from typing import NamedTuple

from unet3d.base import signals
from unet3d.base.process import collector_resting
from unet3d.recomputing.compiler import Sizes, indices_of, mask_of
from unet3d.recomputing.schedule import Cost, Schedule, StageCache

Table = list[int]  # for each stage, the maps that stay after it, bit i for map i
Flip = tuple[int, int]  # a stage, and a map that stays after it from now on, or no longer does
AT_PEAK = 0.5  # of the changes: less stays where the peak is
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
        """Yield the changes that give up a map that is there at the peak, also for one beside it."""
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


LIMITS = (1.0, 1.1, 1.3, 1.6, 1.9)  # of work, in forward passes, exceeded by LITTLE_WORK
LITTLE_WORK = 0.14  # forward passes: small convolutions, sums
MOST_WORK = 2.2  # forward passes in all; beyond, memory falls by little
TRIES = 3000  # tables, for each limit
FEWEST_TRIES = 50
LOOKS = 3_000_000  # entries of all tables: of many maps fewer tables are tried
ROUNDS = 3  # of these tries: from the limit's best table, from one of more work, and from the best of both
DESCENTS = 3  # of the first tables, the best of the last limit
SHARE_OF_DESCENT = 1 / 6  # of the tries of a limit
MUCH_WORK = 1.3  # from this limit on the other table is that of the least memory
STEP = 0.15  # before, the best of a limit so much higher
HEAT = 0.03  # of the largest map: bytes for which a change for the worse is accepted at first, one time in e
PRICE = 0.05  # of the largest map, in bytes, for a forward pass of work: else work up to the limit is done in vain
MEAN = 0.02  # of the bytes of a stage, on average: else nothing tells a change for the better beside the peak
SHARES = (0.0, 0.1, 0.2, 0.3, 0.6, 1.0)  # of the largest map, up to which maps stay in the first tables
Packed = tuple[int, ...]


class Front:
    """Schedules that none beats in both bytes and work, by their tables."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.stages = StageCache(sizes)
        self.points: dict[tuple[int, float], Packed] = {}

    def add(self, peak: int, work: float, table: Table) -> None:
        """Add a schedule, if it is of the front, and drop those that it beats."""
        for other_peak, other_work in self.points:
            if other_peak <= peak and other_work <= work:
                return
        kept = {point: other for point, other in self.points.items() if point[0] < peak or point[1] < work}
        self.points = {**kept, (peak, work): tuple(table)}

    def schedules(self) -> list[Schedule]:
        """Return the schedules, from the most bytes to the least."""
        ordered = sorted(self.points, reverse=True)
        return [self.stages.schedule(self.points[point]) for point in ordered]


@collector_resting()
def front(sizes: Sizes) -> list[Schedule]:
    """Return the schedules that none beats, from the least work to the least memory."""
    best = Front(sizes)
    tries = max(FEWEST_TRIES, LOOKS // sizes.count**2)
    tries = min(TRIES, tries)
    starts: dict[float, Table] = {}  # by their scores
    for table in _starts(sizes):
        cost = best.stages.cost(table)
        best.add(cost.bytes, cost.work, table)
        starts.setdefault(_score(cost, LIMITS[-1], max(sizes.bytes)), table)
    for score in sorted(starts)[:DESCENTS]:
        _descend(best, starts[score], LIMITS[-1], round(tries * SHARE_OF_DESCENT))
    draw = random.Random(0)
    for limit in LIMITS:
        signals.raise_again()
        least = _improve(best, _least_within(best, limit), limit, tries // ROUNDS, draw)
        other = _improve(best, _elsewhere(best, limit), limit, tries // ROUNDS, draw)
        _improve(best, min(least, other, key=attrgetter("score")).table, limit, tries // ROUNDS, draw)
    return best.schedules()


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


def _elsewhere(best: Front, limit: float) -> Packed:
    """Return a table of less memory and more work than the limit, from which the search comes down."""
    if limit >= MUCH_WORK:
        return best.points[min(best.points)]
    return _least_within(best, limit + STEP)


def _least_within(best: Front, limit: float) -> Packed:
    """Return the table of least memory whose work is within the limit."""
    within = [point for point in best.points if point[1] <= limit + LITTLE_WORK]
    point = min(within or best.points)
    return best.points[point]


class _Scored(NamedTuple):
    """The table of the least score of some tries."""

    score: float
    table: Packed


def _improve(best: Front, first: Packed, limit: float, tries: int, draw: random.Random) -> _Scored:
    """Change a table at random, as long as that needs less memory within the limit of work.

    At first, changes for the worse are accepted too, rarely and the less the worse: simulated annealing.
    """
    sizes = best.sizes
    changes = Changes(sizes, draw)
    largest = max(sizes.bytes)
    table = list(first)
    cost = best.stages.cost(table)
    score = _score(cost, limit, largest)
    least = _Scored(score, first)
    for number in range(tries):
        flips = changes.of(table, cost)
        flip(table, flips)
        new_cost = best.stages.cost(table)
        new_score = _score(new_cost, limit, largest)
        worse = new_score - score
        temperature = HEAT * largest * (1 - number / tries)
        if worse <= 0 or draw.random() < math.exp(-worse / temperature):
            score = new_score
            cost = new_cost
            best.add(cost.bytes, cost.work, table)
            if score < least.score:
                least = _Scored(score, tuple(table))
        else:
            flip(table, flips)
    return least


def _descend(best: Front, table: Table, limit: float, tries: int) -> None:
    """Change a table as long as giving up a map at the peak helps, each time by the change that helps most."""
    sizes = best.sizes
    changes = Changes(sizes, random.Random(0))
    largest = max(sizes.bytes)
    cost = best.stages.cost(table)
    least = _score(cost, limit, largest)
    while tries > 0:
        best_flips: Sequence[Flip] = ()
        for flips in changes.evictions(table, cost):
            flip(table, flips)
            new_cost = best.stages.cost(table)
            best.add(new_cost.bytes, new_cost.work, table)
            score = _score(new_cost, limit, largest)
            flip(table, flips)
            tries -= 1
            if score < least:
                least = score
                best_flips = flips
        if not best_flips:
            return
        flip(table, best_flips)
        cost = best.stages.cost(table)


def _score(cost: Cost, limit: float, largest: int) -> float:
    """Return bytes, and many more for work beyond the limit."""
    excess = max(0.0, cost.work - limit - LITTLE_WORK)
    return cost.bytes + MEAN * cost.mean + largest * (PRICE * cost.work + 10 * excess)

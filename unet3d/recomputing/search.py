"""The search for schedules: for each amount of work, the one that needs least memory.

It begins with the tables that keep the smaller maps, and changes them at random: most often, whether a map stays from
one use of it to the next. The number of tries is fixed and the random numbers are seeded, so that a network's schedules
are always the same. All schedules that were met and that no other beats in both bytes and work are the front; a budget
takes the one of least work that fits. So less budget never needs more memory.
"""

import math
import random
from collections.abc import Iterator, Sequence
from itertools import pairwise

from unet3d.recomputing.schedule import Schedule, Sizes, compile_schedule, every_map, measure

LIMITS = (1.0, 1.1, 1.3, 1.6, 2.0)  # of work, in forward passes
LITTLE_WORK = 0.06  # forward passes more than the least: first convolutions, sums
MOST_WORK = 2.06  # forward passes in all, two; beyond, memory falls by little
TRIES = 2000  # tables, for each limit
FEWEST_TRIES = 50
LOOKS = 3_000_000  # entries of all tables: of many maps fewer tables are tried
HEAT = 0.01  # of the largest map: bytes for which a change for the worse is accepted at first, one time in e
SHARES = (0.0, 0.1, 0.2, 0.3, 0.6, 1.0)  # of the largest map, up to which maps stay in the first tables
Table = list[set[int]]  # for each stage, the maps that stay after it
Packed = tuple[frozenset[int], ...]
Flip = tuple[int, int]  # a stage, and a map that stays after it from now on, or no longer does
FIRST_GAP = slice(0, 1)  # after the forward pass
LAST_GAP = slice(-1, None)
ALL_GAPS = slice(None)


class Front:
    """Schedules that none beats in both bytes and work, by their tables."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.points: dict[tuple[int, float], Packed] = {}

    def add(self, peak: int, work: float, table: Table) -> None:
        """Add a schedule, if it is of the front, and drop those that it beats."""
        for other_peak, other_work in self.points:
            if other_peak <= peak and other_work <= work:
                return
        points = {}
        for point, other in self.points.items():
            other_peak, other_work = point
            if other_peak < peak or other_work < work:
                points[point] = other
        points[peak, work] = tuple(frozenset(stays) for stays in table)
        self.points = points

    def schedules(self) -> list[Schedule]:
        """Return the schedules, from the most bytes to the least."""
        ordered = sorted(self.points, reverse=True)
        return [compile_schedule(self.sizes, self.points[point]) for point in ordered]


def front(sizes: Sizes) -> list[Schedule]:
    """Return the schedules that none beats, from the least work to the least memory."""
    best = Front(sizes)
    for table in _starts(sizes):
        peak, work = measure(sizes, table)
        best.add(peak, work, table)
    tries = max(FEWEST_TRIES, LOOKS // sizes.count**2)
    tries = min(TRIES, tries)
    draw = random.Random(0)
    for limit in LIMITS:
        table = [set(stays) for stays in _nearest(best, limit)]
        _improve(best, table, limit, tries, draw)
    return best.schedules()


def leanest(schedules: Sequence[Schedule]) -> Schedule:
    """Return the schedule of least memory that computes only convolutions of little work a second time."""
    least_work = min(schedule.work for schedule in schedules)
    return _least_memory(schedules, least_work + LITTLE_WORK)


def smallest(schedules: Sequence[Schedule]) -> Schedule:
    """Return the schedule of least memory whose work is bearable."""
    return _least_memory(schedules, MOST_WORK)


def within(schedules: Sequence[Schedule], room: int) -> Schedule | None:
    """Return the schedule of least work that needs at most `room` bytes; None without one."""
    fitting = [schedule for schedule in schedules if schedule.peak_bytes <= room]
    return min(fitting, key=_work, default=None)


def _least_memory(schedules: Sequence[Schedule], most_work: float) -> Schedule:
    bearable = [schedule for schedule in schedules if schedule.work <= most_work]
    return min(bearable or schedules, key=_memory)


def _work(schedule: Schedule) -> float:
    return schedule.work


def _memory(schedule: Schedule) -> int:
    return schedule.peak_bytes


def _starts(sizes: Sizes) -> Iterator[Table]:
    """Yield tables in which the smaller maps stay, all others or only those that are little work to make again."""
    yield every_map(sizes)
    largest = max(sizes.bytes)
    for least_work in (0.0, 1e-9, 0.01, 0.05):
        for share in SHARES:
            stays = set()
            for index in range(sizes.count):
                is_small = sizes.bytes[index] <= share * largest
                if is_small and sizes.work[index] >= least_work:
                    stays.add(index)
            yield [set(stays) for _ in range(sizes.count + 1)]


def _nearest(best: Front, limit: float) -> Packed:
    """Return the table of least memory whose work is within the limit."""
    within = [point for point in best.points if point[1] <= limit + LITTLE_WORK]
    point = min(within or best.points)
    return best.points[point]


def _improve(best: Front, table: Table, limit: float, tries: int, draw: random.Random) -> None:
    """Change a table at random, as long as that needs less memory within the limit of work.

    At first, changes for the worse are accepted too, rarely and the less the worse: simulated annealing.
    """
    sizes = best.sizes
    changes = _Changes(sizes, draw)
    largest = max(sizes.bytes)
    peak, work = measure(sizes, table)
    score = _score(peak, work, limit, largest)
    for number in range(tries):
        flips = changes.of(table)
        _flip(table, flips)
        peak, work = measure(sizes, table)
        new_score = _score(peak, work, limit, largest)
        worse = new_score - score
        temperature = HEAT * largest * (1 - number / tries)
        if worse <= 0 or draw.random() < math.exp(-worse / temperature):
            score = new_score
            best.add(peak, work, table)
        else:
            _flip(table, flips)


def _score(peak: int, work: float, limit: float, largest: int) -> float:
    """Return bytes, and many more for work beyond the limit."""
    excess = max(0.0, work - limit - LITTLE_WORK)
    return peak + 10 * largest * excess


def _flip(table: Table, flips: Sequence[Flip]) -> None:
    """Change whether maps stay, each after one stage."""
    for stage, index in flips:
        table[stage] ^= {index}


class _Changes:
    """Changes of a table, drawn at random."""

    def __init__(self, sizes: Sizes, draw: random.Random) -> None:
        self.count = sizes.count
        self.draw = draw
        self.gaps = [_gaps(sizes, index) for index in range(sizes.count)]

    def of(self, table: Table) -> list[Flip]:
        """Return the stages and maps of one change."""
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
        stays = index in table[gap[-1]]
        return _flips(table, index, gap, not stays)

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
        if (index in table[stage]) != stays:
            flips.append((stage, index))
    return flips


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

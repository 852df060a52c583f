"""The search for schedules: for each amount of work, the one that needs least memory.

It begins with the tables that keep the smaller maps, and changes them at random: one entry, one map over some stages,
a few entries. The number of tries is fixed and the random numbers are seeded, so that a network's schedules are always
the same. All schedules that were met and that no other beats in both bytes and work are the front; a budget takes the
one of least work that fits. So less budget never needs more memory.
"""

import random
from collections.abc import Iterator, Sequence

from unet3d.recomputing.schedule import Schedule, Sizes, compile_schedule, every_map, measure

LIMITS = (1.0, 1.1, 1.3, 1.6, 2.0)  # of work, in forward passes
LITTLE_WORK = 0.06  # that is no second convolution to speak of: first convolutions, sums
MOST_WORK = 2.06  # a second forward pass; beyond, memory falls by little
TRIES = 1000  # tables, for each limit
SHARES = (0.0, 0.1, 0.2, 0.3, 0.6, 1.0)  # of the largest map, up to which maps stay in the first tables
Table = list[list[bool]]
Packed = tuple[tuple[bool, ...], ...]


class Front:
    """Schedules that none beats in both bytes and work, by their tables."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.points: dict[tuple[int, float], Packed] = {}

    def add(self, peak: int, work: float, table: Table) -> None:
        """Add a schedule, if it is of the front, and drop those that it beats."""
        if any(p <= peak and w <= work for p, w in self.points):
            return
        self.points = {(p, w): t for (p, w), t in self.points.items() if p < peak or w < work}
        self.points[peak, work] = tuple(map(tuple, table))

    def schedules(self) -> list[Schedule]:
        """Return the schedules, from the most bytes to the least."""
        ordered = sorted(self.points, reverse=True)
        return [compile_schedule(self.sizes, self.points[point]) for point in ordered]


def front(sizes: Sizes) -> list[Schedule]:
    """Return the schedules that none beats, from the least work to the least memory."""
    best = Front(sizes)
    for table in _starts(sizes):
        best.add(*measure(sizes, table), table)
    draw = random.Random(0)
    for limit in LIMITS:
        _improve(best, [list(row) for row in _nearest(best, limit)], limit, TRIES, draw)
    return best.schedules()


def leanest(schedules: Sequence[Schedule]) -> Schedule:
    """Return the schedule of least memory that makes no convolution a second time, but for those of little work."""
    least_work = min(schedule.work for schedule in schedules)
    return _least_memory(schedules, least_work + LITTLE_WORK)


def smallest(schedules: Sequence[Schedule]) -> Schedule:
    """Return the schedule of least memory whose work is bearable."""
    return _least_memory(schedules, MOST_WORK)


def within(schedules: Sequence[Schedule], room: int) -> Schedule | None:
    """Return the schedule of least work that takes no more bytes; None if there is none."""
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
            stays = [size <= share * largest for size in sizes.bytes]
            row = [stay and work >= least_work for stay, work in zip(stays, sizes.work, strict=True)]
            yield [list(row) for _ in range(sizes.count + 1)]


def _nearest(best: Front, limit: float) -> Packed:
    """Return the table of least memory whose work is within the limit."""
    within = [point for point in best.points if point[1] <= limit + LITTLE_WORK]
    point = min(within or best.points)
    return best.points[point]


def _improve(best: Front, table: Table, limit: float, tries: int, draw: random.Random) -> None:
    """Change a table at random, as long as that needs less memory within the limit of work."""
    sizes = best.sizes

    def score(peak: int, work: float) -> tuple[float, float]:
        excess = max(0.0, work - limit - LITTLE_WORK)
        return excess * 10 * max(sizes.bytes) + peak, work

    peak, work = measure(sizes, table)
    lowest = score(peak, work)
    for _ in range(tries):
        flips = _changes(sizes.count, table, draw)
        for stage, index in flips:
            table[stage][index] = not table[stage][index]
        peak, work = measure(sizes, table)
        now = score(peak, work)
        if now <= lowest:
            lowest = now
            best.add(peak, work, table)
        else:
            for stage, index in flips:
                table[stage][index] = not table[stage][index]


def _changes(count: int, table: Sequence[Sequence[bool]], draw: random.Random) -> list[tuple[int, int]]:
    """Return entries of a table to change."""
    kind = draw.random()
    if kind < 0.4:
        return [(draw.randrange(count + 1), draw.randrange(count))]
    if kind < 0.8:
        index = draw.randrange(count)
        first = draw.randrange(count + 1)
        last = draw.randrange(first, count + 1)
        keeps = draw.random() < 0.5
        return [(stage, index) for stage in range(first, last + 1) if table[stage][index] != keeps]
    several = {(draw.randrange(count + 1), draw.randrange(count)) for _ in range(3)}
    return sorted(several)

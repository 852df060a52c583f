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
from typing import NamedTuple

from unet3d.base import signals
from unet3d.recomputing.changes import Changes, Flip, Table, flip
from unet3d.recomputing.costs import Sizes
from unet3d.recomputing.schedule import Passes, Peak, Schedule
from unet3d.recomputing.stages import mask_of

LIMITS = (1.0, 1.1, 1.3, 1.6, 1.9)  # of work, in forward passes, exceeded by LITTLE_WORK
LITTLE_WORK = 0.14  # forward passes: small convolutions, sums
MOST_WORK = 2.2  # forward passes in all; beyond, memory falls by little
WORTH_FOR_LEAN = 1.3  # 1 % of a forward pass less is as good as so many % of memory less
WORTH_FOR_TILES = 0.1
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
        self.passes = Passes(sizes)
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
        points[peak, work] = tuple(table)
        self.points = points

    def schedules(self) -> list[Schedule]:
        """Return the schedules, from the most bytes to the least."""
        ordered = sorted(self.points, reverse=True)
        return [self.passes.schedule(self.points[point]) for point in ordered]


def front(sizes: Sizes) -> list[Schedule]:
    """Return the schedules that none beats, from the least work to the least memory."""
    best = Front(sizes)
    tries = max(FEWEST_TRIES, LOOKS // sizes.count**2)
    tries = min(TRIES, tries)
    starts: dict[float, Table] = {}  # by their scores
    for table in _starts(sizes):
        peak = best.passes.peak(table)
        best.add(peak.bytes, peak.work, table)
        starts.setdefault(_score(peak, LIMITS[-1], max(sizes.bytes)), table)
    for score in sorted(starts)[:DESCENTS]:
        _descend(best, starts[score], LIMITS[-1], round(tries * SHARE_OF_DESCENT))
    draw = random.Random(0)
    for limit in LIMITS:
        signals.raise_again()
        least = _improve(best, _least_within(best, limit), limit, tries // ROUNDS, draw)
        other = _improve(best, _elsewhere(best, limit), limit, tries // ROUNDS, draw)
        _improve(best, min(least, other, key=_scored).table, limit, tries // ROUNDS, draw)
    return best.schedules()


def leanest(schedules: Sequence[Schedule], plain: float = math.inf) -> Schedule:
    """Return the schedule that weighs memory and work best, of those with little more than the least work.

    Where that needs no less than the `plain` pass (bytes without weights and image), twice as much more work may be
    taken for one that does.
    """
    least_work = min(schedule.work for schedule in schedules)
    best = _best(schedules, least_work + LITTLE_WORK, WORTH_FOR_LEAN)
    if best.peak_bytes < plain:
        return best
    most_work = least_work + 2 * LITTLE_WORK
    saving = [schedule for schedule in schedules if schedule.peak_bytes < plain and schedule.work <= most_work]
    return _best(saving or [best], most_work, WORTH_FOR_LEAN)


def smallest(schedules: Sequence[Schedule]) -> Schedule:
    """Return the schedule of bearable work that needs least memory, or hardly more at much less work."""
    return _best(schedules, MOST_WORK, WORTH_FOR_TILES)


def least_memory(schedules: Sequence[Schedule]) -> Schedule:
    """Return the schedule of least memory, whatever its work."""
    return min(schedules, key=_memory)


def _best(schedules: Sequence[Schedule], most_work: float, worth: float) -> Schedule:
    """Return the schedule that weighs memory and work best, of those of at most that work if there are any."""

    def cost(schedule: Schedule) -> float:
        return math.log(schedule.peak_bytes) + worth * schedule.work

    bearable = [schedule for schedule in schedules if schedule.work <= most_work]
    return min(bearable or schedules, key=cost)


def _memory(schedule: Schedule) -> int:
    return schedule.peak_bytes


def _starts(sizes: Sizes) -> Iterator[Table]:
    """Yield tables in which maps stay that are small and much work, and tables of maps that are small or much work."""
    stages = sizes.count + 1
    every_map = mask_of(range(sizes.count))
    yield [every_map for _ in range(stages)]
    largest = max(sizes.bytes)
    for least_work in (0.0, 1e-9, 0.01, 0.05):
        for share in SHARES:
            stays = []
            for index in range(sizes.count):
                is_small = sizes.bytes[index] <= share * largest
                if is_small and sizes.work[index] >= least_work:
                    stays.append(index)
            mask = mask_of(stays)
            yield [mask for _ in range(stages)]
    for most_work in (1e-9, 0.002, 0.01, 0.05):
        for share in SHARES:
            stays = []
            for index in range(sizes.count):
                is_small = sizes.bytes[index] <= share * largest
                if is_small or sizes.work[index] >= most_work:
                    stays.append(index)
            mask = mask_of(stays)
            yield [mask for _ in range(stages)]


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


def _scored(scored: _Scored) -> float:
    return scored.score


def _improve(best: Front, first: Packed, limit: float, tries: int, draw: random.Random) -> _Scored:
    """Change a table at random, as long as that needs less memory within the limit of work.

    At first, changes for the worse are accepted too, rarely and the less the worse: simulated annealing.
    """
    sizes = best.sizes
    changes = Changes(sizes, draw)
    largest = max(sizes.bytes)
    table = list(first)
    peak = best.passes.peak(table)
    score = _score(peak, limit, largest)
    least = _Scored(score, first)
    for number in range(tries):
        flips = changes.of(table, peak)
        flip(table, flips)
        new_peak = best.passes.peak(table)
        new_score = _score(new_peak, limit, largest)
        worse = new_score - score
        temperature = HEAT * largest * (1 - number / tries)
        if worse <= 0 or draw.random() < math.exp(-worse / temperature):
            score = new_score
            peak = new_peak
            best.add(peak.bytes, peak.work, table)
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
    peak = best.passes.peak(table)
    least = _score(peak, limit, largest)
    while tries > 0:
        best_flips: Sequence[Flip] = ()
        for flips in changes.all_at_peak(table, peak):
            flip(table, flips)
            new_peak = best.passes.peak(table)
            best.add(new_peak.bytes, new_peak.work, table)
            score = _score(new_peak, limit, largest)
            flip(table, flips)
            tries -= 1
            if score < least:
                least = score
                best_flips = flips
        if not best_flips:
            return
        flip(table, best_flips)
        peak = best.passes.peak(table)


def _score(peak: Peak, limit: float, largest: int) -> float:
    """Return bytes, and many more for work beyond the limit."""
    excess = max(0.0, peak.work - limit - LITTLE_WORK)
    return peak.bytes + MEAN * peak.mean + largest * (PRICE * peak.work + 10 * excess)

"""Changes of a table of the maps that stay, from which the search chooses."""

import random
from collections.abc import Iterator, Sequence
from itertools import pairwise

from unet3d.recomputing.costs import Sizes
from unet3d.recomputing.schedule import Peak

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

    def of(self, table: Table, peak: Peak) -> list[Flip]:
        """Return the stages and maps of one change."""
        if peak.maps and self.draw.random() < AT_PEAK:
            return self._at_peak(table, peak)
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

    def _at_peak(self, table: Table, peak: Peak) -> list[Flip]:
        """Let a map that is there at the peak stay no longer, and perhaps one that it is made from, or a reader."""
        index = self.draw.choice(peak.maps)
        stages = range(peak.stage, peak.stage + 1)
        if self.draw.random() < 0.8:
            stages = next((gap for gap in self.gaps[index] if peak.stage in gap), stages)
        flips = set(_flips(table, index, stages, False))
        kind = self.draw.random()
        if kind < 0.3:
            flips ^= set(self._between_uses(table))
        elif kind < 0.7 and self.neighbours[index]:
            other = self.draw.choice(self.neighbours[index])
            flips |= set(_flips(table, other, stages, True))
        return sorted(flips)

    def all_at_peak(self, table: Table, peak: Peak) -> Iterator[list[Flip]]:
        """Yield the changes that give up a map that is there at the peak, also for one beside it."""
        for index in peak.maps:
            for gap in self.gaps[index]:
                if peak.stage not in gap:
                    continue
                for stages in (gap, range(peak.stage, peak.stage + 1)):
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

"""What torch's CUDA caching allocator would hold for a list of allocations and releases.

A replay by its documented rules on one stream, with the native backend, no garbage collection and enough memory, so
that nothing cached is ever returned. Segments are assumed to lie at ascending addresses. The order of events is the
ledger's; another order, or kernels' scratch, may fragment otherwise.
"""

import re
from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from unet3d.base.types import MIB

ROUND = 512  # bytes; every request is rounded up to it, and no split leaves less
SMALL = MIB  # the largest request that the small pool serves
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB  # for requests below OWN_SEGMENT, unless the settings say otherwise
OWN_SEGMENT = 10 * MIB  # from here on a segment is as large as its first request, rounded up to SMALL_SEGMENT
DOUBLINGS = 16  # of a request's size, from 1 MiB to 64 GiB, each with its own number of divisions
POWERS = {str(2**power): power for power in range(64)}


class Settings(NamedTuple):
    """Those of torch's settings that the replay models; the defaults are torch's."""

    expandable: bool = False  # expandable_segments
    max_split: int = 2**63  # bytes, max_split_size_mb: larger blocks are not split
    divisions: tuple[int, ...] = (0,) * DOUBLINGS  # roundup_power2_divisions: steps from a power of two to the next
    large_segment: int = LARGE_SEGMENT  # bytes, large_segment_size_mb; also a page of an expandable segment


class Reserved(NamedTuple):
    """Peaks in bytes, as `max_memory_allocated` and `max_memory_reserved` give them."""

    allocated_bytes: int  # of blocks in use, with rounding and tails that were not split off
    reserved_bytes: int  # of segments


def replay(events: Sequence[tuple[int, int]], settings: Settings | None = None) -> Reserved:
    """The peaks after (index, bytes gained or lost) in order."""
    allocator, allocated = Allocator(settings or Settings()), 0
    for index, change in events:
        allocator.apply(index, change)
        allocated = max(allocated, allocator.allocated_bytes)
    return Reserved(allocated, allocator.reserved_bytes)  # what is reserved never shrinks


def read_settings(environment: Mapping[str, str]) -> tuple[Settings, list[str]]:
    """As torch reads them, the older name first; a line names what the replay leaves out, if anything."""
    name = "PYTORCH_CUDA_ALLOC_CONF" if "PYTORCH_CUDA_ALLOC_CONF" in environment else "PYTORCH_ALLOC_CONF"
    text = "".join(environment.get(name, "").split())
    parts = list(filter(None, re.split(r",(?![^\[]*\])", text)))  # not at commas within brackets
    parts.sort(key=lambda part: not part.startswith("large_segment_size_mb"))  # it bounds max_split_size_mb
    found = Settings()
    left_out = []
    for part in parts:
        key, _, value = part.partition(":")
        try:
            if key == "expandable_segments":
                found = found._replace(expandable=("False", "True").index(value) == 1)
            elif key == "large_segment_size_mb" and int(value) * MIB > OWN_SEGMENT:  # torch takes no less
                found = found._replace(large_segment=int(value) * MIB)
            elif key == "max_split_size_mb" and int(value) * MIB >= found.large_segment:  # here neither
                found = found._replace(max_split=int(value) * MIB)
            elif key == "roundup_power2_divisions":
                found = found._replace(divisions=_divisions(value))
            elif part != "backend:native":
                left_out.append(part)
        except (KeyError, ValueError):
            left_out.append(part)
    if not left_out:
        return found, []
    return found, [f"{name}: the replay leaves out {', '.join(left_out)}: malformed or not modelled"]


def _divisions(text: str) -> tuple[int, ...]:
    """Of each doubling, from `4` or `[256:1,512:2,>:8]`: for sizes from so many MiB, or the rest. As torch reads it.

    The rest begins one doubling after the last one that is named, or after the first one if none is.
    """
    if not text.startswith("["):
        return (_number_of_divisions(text),) * DOUBLINGS
    found = [0] * DOUBLINGS
    last = None
    for pair in text[1 : text.index("]")].split(","):
        start, _, number = pair.partition(":")
        divisions = _number_of_divisions(number)
        if start == ">":
            begin = 1 if last is None else last + 1
            end = DOUBLINGS
        else:
            index = min(POWERS[start], DOUBLINGS - 1)
            begin = 0 if last is None else index
            end = index + 1
            last = index
        found[begin:end] = [divisions] * (end - begin)
    return tuple(found)


def _number_of_divisions(text: str) -> int:
    """0, or a power of two. KeyError or ValueError for anything else."""
    return int(text) and 2 ** POWERS[text]


def rounded(size: int, unit: int) -> int:
    """The next multiple of a unit."""
    return -(-size // unit) * unit


@dataclass(eq=False)
class Block:
    """A stretch of a segment, between its neighbours in it; sizes and addresses in bytes."""

    address: int
    size: int
    before: "Block | None" = None
    after: "Block | None" = None
    is_free: bool = False


class Allocator:
    """Both pools, and who holds which block."""

    def __init__(self, settings: Settings) -> None:
        self.small, self.large = Pool(is_small=True, settings=settings), Pool(is_small=False, settings=settings)
        self.divisions = settings.divisions
        self.held: dict[int, tuple[Pool, Block]] = {}
        self.allocated_bytes = 0

    @property
    def reserved_bytes(self) -> int:
        return self.small.reserved_bytes + self.large.reserved_bytes

    def apply(self, index: int, change: int) -> None:
        """Take or release what an event of a ledger says; a change of 0 is neither."""
        if change > 0:
            self.take(index, change)
        elif change < 0:
            self.release(index)

    def take(self, index: int, size: int) -> None:
        assert size > 0, "a request for nothing"
        assert index not in self.held, f"{index} is held already"
        power = size.bit_length() - 1
        divisions = self.divisions[min(max(power - 20, 0), DOUBLINGS - 1)]  # below 1 MiB those of the first doubling
        size = rounded(size, 2**power // divisions if 1 < divisions < size / ROUND else ROUND)
        pool = self.small if size <= SMALL else self.large
        block = pool.take(size)
        self.held[index] = pool, block
        self.allocated_bytes += block.size

    def release(self, index: int) -> None:
        assert index in self.held, f"{index} is released and was not held"
        pool, block = self.held.pop(index)
        self.allocated_bytes -= block.size
        pool.release(block)


class Pool:
    """Segments for small or for large requests. `free` holds (size, address) in ascending order."""

    def __init__(self, is_small: bool, settings: Settings) -> None:
        self.splits_any, self.expandable = is_small or settings.expandable, settings.expandable
        self.max_split = settings.max_split
        self.waste = settings.large_segment  # less than this may be left of a block that is not to be split
        self.page = SMALL_SEGMENT if is_small else settings.large_segment
        self.reserved_bytes = 0
        self.free: list[tuple[int, int]] = []
        self.blocks: dict[int, Block] = {}  # by address, free or not
        self._last: Block | None = None  # at the highest address

    def take(self, size: int) -> Block:
        """The smallest free block that fits, else a new one, cut to size if that leaves enough."""
        if (found := self._best(size)) is not None:
            block = self.blocks[self.free.pop(found)[1]]
        elif self.expandable:
            block = self._grown(size)
        else:
            block = self._segment(self.page if size < OWN_SEGMENT else rounded(size, SMALL_SEGMENT))
        block.is_free = False
        rest = block.size - size
        if rest >= ROUND if self.splits_any else rest > SMALL and size < self.max_split:
            self._split(block, size)
        return block

    def release(self, block: Block) -> None:
        """Merge the block with its free neighbours into one free block."""
        for other in (block.before, block.after):
            if other is not None and other.is_free:
                del self.free[bisect_left(self.free, (other.size, other.address))]
                block = self._joined(other, block) if other is block.before else self._joined(block, other)
        block.is_free = True
        insort(self.free, (block.size, block.address))

    def _best(self, size: int) -> int | None:
        """Index in `free`. The last block of an expandable segment could grow and counts as the largest."""
        at = bisect_left(self.free, (size, 0))
        if self.expandable and at + 1 < len(self.free) and self.blocks[self.free[at][1]] is self._last:
            at += 1
        limit = self.max_split if size < self.max_split else size + self.waste
        return at if at < len(self.free) and self.free[at][0] < limit else None

    def _segment(self, size: int, before: Block | None = None) -> Block:
        """A new block at the end: a segment of its own, or more of the segment whose last block is `before`."""
        block = Block(self.reserved_bytes, size, before)
        if before is not None:
            before.after = block
        self.blocks[block.address] = self._last = block
        self.reserved_bytes += size
        return block

    def _grown(self, size: int) -> Block:
        """The pool's one segment grows at its end by whole pages; a free block there is part of the result."""
        last = self._last
        if last is None or not last.is_free:
            return self._segment(rounded(size, self.page), last)
        self.free.remove((last.size, last.address))
        more = rounded(max(0, size - last.size), self.page)  # it may be there and too large to be split
        last.size += more
        self.reserved_bytes += more
        return last

    def _split(self, block: Block, size: int) -> None:
        rest = Block(block.address + size, block.size - size, block, block.after, is_free=True)
        if block.after is not None:
            block.after.before = rest
        block.size, block.after = size, rest
        self.blocks[rest.address] = rest
        insort(self.free, (rest.size, rest.address))
        self._last = rest if self._last is block else self._last

    def _joined(self, block: Block, other: Block) -> Block:
        """A block grown by its neighbour behind it."""
        block.size, block.after = block.size + other.size, other.after
        if other.after is not None:
            other.after.before = block
        del self.blocks[other.address]
        self._last = block if self._last is other else self._last
        return block

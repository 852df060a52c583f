"""A replay of torch's CUDA caching allocator: what it would hold for a list of allocations and releases.

It follows the documented rules on one stream, with the native backend, no garbage collection and enough memory, so
that nothing cached is ever returned, unless `EMPTY_CACHE` says so. Segments are assumed to lie at ascending addresses.
The order of events is the ledger's; another order, or kernels' scratch, may fragment otherwise.
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
LARGE_SEGMENT = 20 * MIB  # Requests below OWN_SEGMENT share it, unless the settings say otherwise.
OWN_SEGMENT = 10 * MIB  # A larger request has its own segment, rounded up to SMALL_SEGMENT.
DOUBLINGS = 16  # Sizes from 1 MiB to 64 GiB; each doubling has its own number of divisions.
OLD_NAME = "PYTORCH_CUDA_ALLOC_CONF"
EMPTY_CACHE = -1  # the index of an event at which free segments go back to the driver
POWERS = {str(2**power): power for power in range(64)}


class Settings(NamedTuple):
    """The settings of torch's allocator that the replay models; the defaults are torch's."""

    expandable: bool = False  # expandable_segments
    max_split: int = 2**63  # bytes, max_split_size_mb: larger blocks are not split
    divisions: tuple[int, ...] = (0,) * DOUBLINGS  # roundup_power2_divisions: steps from a power of two to the next
    large_segment: int = LARGE_SEGMENT  # bytes, large_segment_size_mb; also a page of an expandable segment


def replay(events: Sequence[tuple[int, int]], settings: Settings | None = None) -> tuple[int, int]:
    """Return the most bytes allocated, and reserved, after (index, bytes gained or lost) in order.

    They are those of `max_memory_allocated`, with rounding and tails that were not split off, and of
    `max_memory_reserved`.
    """
    allocator = Allocator(settings or Settings())
    allocated = 0
    reserved = 0
    for index, change in events:
        allocator.apply(index, change)
        now_allocated, now_reserved = allocator.sizes()
        allocated = max(allocated, now_allocated)
        reserved = max(reserved, now_reserved)
    return allocated, reserved


def read_settings(environment: Mapping[str, str]) -> tuple[Settings, list[str]]:
    """Return the settings of an environment as torch reads them, the older name first.

    A line names what the replay leaves out, if anything.
    """
    name = OLD_NAME if OLD_NAME in environment else "PYTORCH_ALLOC_CONF"
    text = "".join(environment.get(name, "").split())
    parts = [part for part in re.split(r",(?![^\[]*\])", text) if part]  # not at commas within brackets
    parts.sort(key=lambda part: not part.startswith("large_segment_size_mb"))  # it bounds max_split_size_mb
    settings = Settings()
    left_out = []
    for part in parts:
        key, _, value = part.partition(":")
        try:
            if key == "expandable_segments":
                settings = settings._replace(expandable={"False": False, "True": True}[value])
            elif key == "roundup_power2_divisions":
                settings = settings._replace(divisions=_divisions(value))
            elif part != "backend:native":
                least = {"large_segment_size_mb": OWN_SEGMENT + 1, "max_split_size_mb": settings.large_segment}[key]
                size = int(value) * MIB
                if size < least:
                    raise ValueError(part)  # Torch takes no less.
                is_segment = key.startswith("large")
                settings = settings._replace(large_segment=size) if is_segment else settings._replace(max_split=size)
        except (KeyError, ValueError):
            left_out.append(part)
    line = f"{name}: the replay leaves out {', '.join(left_out)}: malformed or not modelled"
    return settings, [line] if left_out else []


def _divisions(text: str) -> tuple[int, ...]:
    """Return the divisions of each doubling, from `4` or `[256:1,512:2,>:8]`: for sizes from 256 MiB ... or the rest.

    As torch reads it, the rest begins one doubling after the last one that is named; without one, after the first.
    """
    if not text.startswith("["):
        return (_number_of_divisions(text),) * DOUBLINGS
    divisions_of_doublings = [0 for _ in range(DOUBLINGS)]
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
        for doubling in range(begin, end):
            divisions_of_doublings[doubling] = divisions
    return tuple(divisions_of_doublings)


def _number_of_divisions(text: str) -> int:
    """Return 0, or a power of two. KeyError or ValueError for anything else."""
    if int(text) == 0:
        return 0
    return 1 << POWERS[text]


def rounded(size: int, unit: int) -> int:
    """Return the next multiple of a unit."""
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
    """Both pools of an allocator, and who holds which block."""

    def __init__(self, settings: Settings) -> None:
        self.small = Pool(is_small=True, settings=settings)
        self.large = Pool(is_small=False, settings=settings)
        self.divisions = settings.divisions
        self.held: dict[int, tuple[Pool, Block]] = {}
        self.allocated_bytes = 0

    def sizes(self) -> tuple[int, int]:
        """Return the bytes that are allocated, and reserved."""
        return self.allocated_bytes, self.small.reserved_bytes + self.large.reserved_bytes

    def apply(self, index: int, change: int) -> None:
        """Take or release what an event of a ledger says; a change of 0 is neither."""
        if index == EMPTY_CACHE:
            self.small.empty()
            self.large.empty()
        elif change > 0:
            self.take(index, change)
        elif change < 0:
            self.release(index)

    def take(self, index: int, size: int) -> None:
        assert size > 0, "a request for nothing"
        assert index not in self.held, f"{index} is held already"
        power = size.bit_length() - 1
        doubling = min(max(power - 20, 0), DOUBLINGS - 1)  # below 1 MiB the first
        divisions = self.divisions[doubling]
        unit = ROUND
        if 1 < divisions < size / ROUND:
            unit = 2**power // divisions
        size = rounded(size, unit)
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
        self.expandable = settings.expandable
        self.splits_any = is_small or settings.expandable
        self.max_split = settings.max_split
        self.waste = settings.large_segment  # less than this may be left of a block that is not to be split
        self.page = SMALL_SEGMENT if is_small else settings.large_segment
        self.reserved_bytes = 0
        self._end = 0  # the address behind all segments there ever were
        self.free: list[tuple[int, int]] = []
        self.blocks: dict[int, Block] = {}  # All blocks by address, also those in use.
        self._last: Block | None = None  # at the highest address

    def take(self, size: int) -> Block:
        """Take the smallest free block that fits, else a new one, cut to size if that leaves enough."""
        best = self._best(size)
        if best is not None:
            _, address = self.free.pop(best)
            block = self.blocks[address]
        elif self.expandable:
            block = self._grown(size)
        else:
            block = self._segment(self.page if size < OWN_SEGMENT else rounded(size, SMALL_SEGMENT))
        block.is_free = False
        rest = block.size - size
        is_split = rest >= ROUND if self.splits_any else rest > SMALL and size < self.max_split
        if is_split:
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

    def empty(self) -> None:
        """Give segments without a block in use back to the driver.

        Of an expandable one, free pages at its end; torch gives others back, too, and takes them again where they were.
        """
        for size, address in list(self.free):
            block = self.blocks[address]
            if self.expandable:
                if block is self._last:
                    self._shrink(block)
            elif block.before is None and block.after is None:
                self.free.remove((size, address))
                del self.blocks[address]
                self.reserved_bytes -= size

    def _shrink(self, last: Block) -> None:
        """Give the whole pages of the last block, which is free, back to the driver."""
        rest = rounded(last.address, self.page) - last.address
        gone = last.size - rest
        if gone <= 0:
            return
        self.free.remove((last.size, last.address))
        self.reserved_bytes -= gone
        self._end -= gone
        last.size = rest
        if rest:
            insort(self.free, (rest, last.address))
            return
        del self.blocks[last.address]
        self._last = last.before
        if last.before is not None:
            last.before.after = None

    def _best(self, size: int) -> int | None:
        """Return the index in `free` of the smallest block that fits; None without one.

        The last block of an expandable segment could grow and counts as the largest.
        """
        best = bisect_left(self.free, (size, 0))
        if self.expandable and best + 1 < len(self.free):
            _, address = self.free[best]
            if self.blocks[address] is self._last:
                best += 1
        if best >= len(self.free):
            return None
        limit = self.max_split if size < self.max_split else size + self.waste
        block_size, _ = self.free[best]
        return best if block_size < limit else None

    def _segment(self, size: int, before: Block | None = None) -> Block:
        """Return a new block at the end: a new segment, or more of the segment whose last block is `before`."""
        block = Block(self._end, size, before)
        self._end += size
        if before is not None:
            before.after = block
        self.blocks[block.address] = self._last = block
        self.reserved_bytes += size
        return block

    def _grown(self, size: int) -> Block:
        """Let the pool's one segment grow at its end by whole pages; a free block there is part of the result."""
        last = self._last
        if last is None or not last.is_free:
            return self._segment(rounded(size, self.page), last)
        self.free.remove((last.size, last.address))
        more = rounded(max(0, size - last.size), self.page)  # it may be there and too large to be split
        last.size += more
        self._end += more
        self.reserved_bytes += more
        return last

    def _split(self, block: Block, size: int) -> None:
        rest = Block(block.address + size, block.size - size, block, block.after, is_free=True)
        if block.after is not None:
            block.after.before = rest
        block.size = size
        block.after = rest
        self.blocks[rest.address] = rest
        insort(self.free, (rest.size, rest.address))
        if self._last is block:
            self._last = rest

    def _joined(self, block: Block, other: Block) -> Block:
        """Return a block grown by its neighbour behind it."""
        block.size += other.size
        block.after = other.after
        if other.after is not None:
            other.after.before = block
        del self.blocks[other.address]
        if self._last is other:
            self._last = block
        return block

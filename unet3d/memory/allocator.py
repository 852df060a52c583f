"""What torch's CUDA caching allocator would hold for a list of allocations and releases.

A replay by its documented rules on one stream, with default settings: no `max_split_size`, no garbage collection, and
enough memory, so that nothing cached is ever returned. Segments are assumed to lie at ascending addresses. The order of
events is the ledger's; another order, or kernels' scratch, may fragment otherwise.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from unet3d.types import MIB

ROUND = 512  # bytes; every request is rounded up to it, and no split leaves less
SMALL = MIB  # the largest request that the small pool serves
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB  # for requests below OWN_SEGMENT
OWN_SEGMENT = 10 * MIB  # from here on a segment is as large as its first request, rounded up to SMALL_SEGMENT


class Reserved(NamedTuple):
    """Peaks in bytes, as `max_memory_allocated` and `max_memory_reserved` give them."""

    allocated_bytes: int  # of blocks in use, with rounding and tails that were not split off
    reserved_bytes: int  # of segments


def replay(events: Sequence[tuple[int, int]], expandable: bool = False) -> Reserved:
    """The peaks after (index, bytes gained or lost) in order; `expandable` as `expandable_segments:True`."""
    allocator = Allocator(expandable)
    allocated = 0
    for index, change in events:
        if change > 0:
            allocator.take(index, change)
        else:
            allocator.release(index)
        allocated = max(allocated, allocator.allocated_bytes)
    return Reserved(allocated, allocator.reserved_bytes)  # what is reserved never shrinks


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

    def __init__(self, expandable: bool) -> None:
        self.small, self.large = Pool(is_small=True, expandable=expandable), Pool(is_small=False, expandable=expandable)
        self.held: dict[int, tuple[Pool, Block]] = {}
        self.allocated_bytes = 0

    @property
    def reserved_bytes(self) -> int:
        return self.small.reserved_bytes + self.large.reserved_bytes

    def take(self, index: int, size: int) -> None:
        assert size > 0, "a request for nothing"
        assert index not in self.held, f"{index} is held already"
        size = rounded(size, ROUND)
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

    def __init__(self, is_small: bool, expandable: bool) -> None:
        self.splits_any, self.expandable = is_small or expandable, expandable
        self.page = SMALL_SEGMENT if is_small else LARGE_SEGMENT
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
        if rest >= ROUND if self.splits_any else rest > SMALL:
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
        return at if at < len(self.free) else None

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
        more = rounded(size - last.size, self.page)
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

"""The sizes of a network's maps: all that a schedule is made from, and judged by."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Beside(NamedTuple):
    """Bytes beside maps and all gradients, in the instructions of one map."""

    make: int
    send: int  # its gradient
    send_twice: int  # its gradient, in two passes over the tiles
    complete_rows: int  # its gradient, by rows that are made meanwhile


@dataclass(frozen=True)
class Sizes:
    """The sizes of n maps and how they depend on each other: all that a schedule is made from."""

    bytes: Sequence[int]
    work: Sequence[float]  # of making a map, or of sending its gradient a second time, in shares of a forward pass
    sources: Sequence[Sequence[int]]  # without the image
    reads: Sequence[frozenset[int]]  # sources from which its gradient is computed
    needs_gradient: Sequence[bool]
    is_normalised: Sequence[bool]  # its gradient is complete only with its map
    outputs: frozenset[int]
    over_map: Sequence[frozenset[int]]  # sources over which a map may be made
    over_gradient: Sequence[frozenset[int]]  # sources whose gradient may be written over the map's
    over_source: Sequence[frozenset[int]]  # sources whose gradient may be written over their own map
    is_one_tile: Sequence[bool]  # all rows of its sources' gradients are there before they are added to others
    has_rows: Sequence[bool]  # it can be made a few rows at a time
    is_thin: Sequence[bool]  # made from the image by little work: may be rows in passing where others are made again
    of_weights: Sequence[int]  # bytes of gradients of weights that appear as its gradient is sent
    beside: Sequence[Beside]
    beside_through: Sequence[Beside]  # the same where thin maps are in passing
    over_scratch: Sequence[int]  # bytes more while it is made over another map
    complete_scratch: Sequence[int]  # bytes beside a map and its gradient while that is completed
    users: Sequence[Sequence[int]] = field(init=False)
    last_reads: Sequence[Sequence[int]] = field(init=False)  # sources that nothing reads later in the forward pass

    def __post_init__(self) -> None:
        users: list[list[int]] = [[] for _ in self.bytes]
        for index, sources in enumerate(self.sources):
            for source in sources:
                users[source].append(index)
        last_reads = []
        for index, sources in enumerate(self.sources):
            last_reads.append([s for s in sources if users[s][-1] == index and s not in self.outputs])
        object.__setattr__(self, "users", users)
        object.__setattr__(self, "last_reads", last_reads)

    @property
    def count(self) -> int:
        """Number of maps."""
        return len(self.bytes)

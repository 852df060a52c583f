"""What a schedule is made from and consists of: sizes of maps, instructions, and stages of a pass.

Maps are named by their index; sets of maps are the bits of a number.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple


class Workspace(NamedTuple):
    """Bytes beside maps and all gradients, in the instructions of one map."""

    compute: int
    backward: int  # its gradient
    backward_two_pass: int  # its gradient, in two passes over the tiles
    norm_backward_tiled: int  # its gradient, by rows that are made meanwhile


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
    can_overwrite_input: Sequence[frozenset[int]]  # sources over which a map may be made
    grad_can_reuse_grad: Sequence[frozenset[int]]  # sources whose gradient may be written over the map's
    grad_can_reuse_input: Sequence[frozenset[int]]  # sources whose gradient may be written over their own map
    is_one_tile: Sequence[bool]  # all rows of its sources' gradients are there before they are added to others
    has_rows: Sequence[bool]  # it can be made a few rows at a time
    is_cheap_stem: Sequence[bool]  # made from the image by little work: may be streamed where others are made again
    of_weights: Sequence[int]  # bytes of gradients of weights that appear as its gradient is sent
    workspace: Sequence[Workspace]
    workspace_streamed: Sequence[Workspace]  # the same where cheap stems are streamed
    inplace_workspace: Sequence[int]  # bytes more while it is made over another map
    norm_workspace: Sequence[int]  # bytes beside a map and its gradient while that is completed
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


Place = Literal["new", "add", "map", "gradient"]


class Compute(NamedTuple):
    """Compute a map, in memory of its own or in that of a source; `streamed` sources are computed with its tiles."""

    map: int
    inplace_on: int | None
    streamed: tuple[int, ...]


class Release(NamedTuple):
    """Forget a map."""

    map: int


class BeginBackward(NamedTuple):
    """The forward pass ends; gradients of the outputs arrive."""


class NormBackward(NamedTuple):
    """Add to the gradient of a map what the statistics of its normalisations give."""

    map: int


class NormBackwardTiled(NamedTuple):
    """`NormBackward`, of a map that is not there: its rows are made, a tile at a time, from its sources."""

    map: int
    streamed: tuple[int, ...]


class Target(NamedTuple):
    """The place of a source's gradient: a new one, added to one, over the source's map, or over the gradient."""

    source: int
    place: Place


class Backward(NamedTuple):
    """Send the gradient of a map to its sources, and forget it."""

    map: int
    targets: tuple[Target, ...]
    streamed: tuple[int, ...] = ()


class BackwardTwoPass(NamedTuple):
    """`Backward`, the last source's gradient over its map and completed: a first pass over the tiles takes the sums.

    What is written over the gradient is written in the second pass, too.
    """

    map: int
    targets: tuple[Target, ...]
    streamed: tuple[int, ...] = ()


Instruction = Compute | Release | BeginBackward | NormBackward | NormBackwardTiled | Backward | BackwardTwoPass


class Liveness(NamedTuple):
    """What there is between two stages. Each is a set of maps, bit i for map i."""

    alive: int
    gradients: int
    completed: int  # maps whose gradients have the statistics' part
    trained: int  # maps whose weights have gradients


class Stage(NamedTuple):
    """A stage of a pass. Bytes count from those that are alive as it begins."""

    instructions: tuple[Instruction, ...]
    growth: int  # bytes, until its end
    most: int | None  # bytes at once; None where it makes nothing
    maps: int  # that are there then, bit i for map i
    work: tuple[float, ...]  # of the maps that it makes, in forward passes
    after: Liveness


NOTHING = Liveness(0, 0, 0, 0)


def mask_of(indices: Iterable[int]) -> int:
    """Return a set of maps as bits."""
    mask = 0
    for index in indices:
        mask |= 1 << index
    return mask


def indices_of(mask: int) -> list[int]:
    """Return the maps of a set, in order."""
    indices = []
    while mask:
        lowest = mask & -mask
        indices.append(lowest.bit_length() - 1)
        mask ^= lowest
    return indices

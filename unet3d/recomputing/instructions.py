"""The instructions of which a schedule consists. Maps are named by their index."""

from typing import Literal, NamedTuple

Place = Literal["new", "add", "map", "gradient"]


class Make(NamedTuple):
    """Make a map, in memory of its own or over another; `through` are sources that are only rows in passing."""

    map: int
    over: int | None
    through: tuple[int, ...]


class Free(NamedTuple):
    """Forget a map."""

    map: int


class Turn(NamedTuple):
    """The forward pass ends; gradients of the outputs arrive."""


class Complete(NamedTuple):
    """Add to the gradient of a map what the statistics of its normalisations give."""

    map: int


class CompleteRows(NamedTuple):
    """`Complete`, of a map that is not there: its rows are made, a tile at a time, from its sources."""

    map: int
    through: tuple[int, ...]  # sources that are only rows in passing


class Target(NamedTuple):
    """The place of a source's gradient: a new one, added to one, over the source's map, or over the gradient."""

    source: int
    place: Place


class Send(NamedTuple):
    """Send the gradient of a map to its sources, and forget it; `through` are sources that are only rows in passing."""

    map: int
    targets: tuple[Target, ...]
    through: tuple[int, ...] = ()


class SendTwice(NamedTuple):
    """`Send`, the last source's gradient over its map and completed: a first pass over the tiles takes the sums.

    What is written over the gradient is written in the second pass, too.
    """

    map: int
    targets: tuple[Target, ...]
    through: tuple[int, ...] = ()


Instruction = Make | Free | Turn | Complete | CompleteRows | Send | SendTwice

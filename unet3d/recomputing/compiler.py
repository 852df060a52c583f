"""Compiles a stage of a pass into instructions, and counts the bytes that are alive at each.

What is there as the stage begins, and which maps stay after it, is given. A map that is needed and is not there is
computed a second time, from those that are. Where a map or a gradient lies is decided here, once: over another one that
nothing reads any more, or in new memory. Maps are named by their index; sets of maps are the bits of a number.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

HALO = 1.3  # rows of a cheap stem that tiles of its reader make, to those that it has: tiles overlap
TWO_PASS_WORK = 0.03  # Up to this share of a forward pass, work may be done a second time to save a map.


class Workspace(NamedTuple):
    """Workspaces, bytes besides maps and all gradients, in the instructions of one map."""

    compute: int
    backward: int  # its gradient
    backward_two_pass: int  # its gradient, in two passes over the tiles
    norm_backward: int  # while what its statistics give is added to its gradient
    norm_backward_tiled: int  # the same, by rows that are made meanwhile


@dataclass(frozen=True)
class Sizes:
    """The sizes of n maps and how they depend on each other: all that a schedule is made from."""

    bytes: Sequence[int]
    work: Sequence[float]  # Making a map, or sending its gradient a second time, in shares of a forward pass.
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

    @cached_property
    def users(self) -> Sequence[Sequence[int]]:
        """Maps that each is a source of."""
        users: list[list[int]] = [[] for _ in self.bytes]
        for index, sources in enumerate(self.sources):
            for source in sources:
                users[source].append(index)
        return users

    @cached_property
    def last_reads(self) -> Sequence[Sequence[int]]:
        """Sources of each that nothing reads later in the forward pass."""
        last_reads = []
        for index, sources in enumerate(self.sources):
            last_reads.append([s for s in sources if self.users[s][-1] == index and s not in self.outputs])
        return last_reads

    @property
    def count(self) -> int:
        """Number of maps."""
        return len(self.bytes)


Place = Literal["new", "add", "map", "gradient"]


class Compute(NamedTuple):
    """Compute a map, in new memory or in that of a source; `streamed` sources are computed with its tiles."""

    map: int
    inplace_on: int | None
    streamed: tuple[int, ...]


class Release(NamedTuple):
    """Forget a map."""

    map: int


class BeginBackward(NamedTuple):
    """The forward pass ends; gradients of the outputs arrive."""


class NormBackward(NamedTuple):
    """Add to the gradient of a map what the statistics of its normalisations give.

    `streamed`: None where the map is there. Else its rows are made, a tile at a time, from its sources, of which these
    are computed with them.
    """

    map: int
    streamed: tuple[int, ...] | None


class Target(NamedTuple):
    """The place of a source's gradient: a new one, added to one, over the source's map, or over the gradient."""

    source: int
    place: Place


class Backward(NamedTuple):
    """Send the gradient of a map to its sources, and forget it.

    In two passes over the tiles, the first takes the sums, and the second writes the last source's gradient over its
    map, completed, and what lies over the gradient.
    """

    map: int
    targets: tuple[Target, ...]
    streamed: tuple[int, ...] = ()
    is_two_pass: bool = False


Instruction = Compute | Release | BeginBackward | NormBackward | Backward


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
    maps: int  # Maps that are held then, bit i for map i.
    work: tuple[float, ...]  # Work of the maps that it makes, in forward passes.
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


class Compiler:
    """A walk through a stage: what is alive, and the most bytes so far."""

    def __init__(self, sizes: Sizes, before: Liveness, stays: int) -> None:
        """Begin the stage after which the maps of the set `stays` stay."""
        self.sizes = sizes
        self.stays = frozenset(indices_of(stays))
        self.alive, self.gradients, self.completed, self.trained = (set(indices_of(mask)) for mask in before)
        self.instructions: list[Instruction] = []
        self.bytes = 0
        self.most: int | None = None
        self.maps_at_most: tuple[int, ...] = ()
        self.work: list[float] = []

    def made(self, index: int) -> Stage:
        """Return the making of a map in the forward pass, after which its sources that do not stay are forgotten."""
        sources = self.sizes.last_reads[index]
        self._make(index, [source for source in sources if source not in self.stays], ())
        return self._stage()

    def turned(self) -> Stage:
        """Return the end of the forward pass: gradients of outputs arrive, over those that nothing reads."""
        sizes = self.sizes
        self.instructions.append(BeginBackward())
        for index in sizes.outputs:
            if not sizes.needs_gradient[index]:
                continue
            self.gradients.add(index)
            if sizes.users[index]:
                self.bytes += sizes.bytes[index]
                self._note(self.bytes)
            else:
                self.alive.discard(index)
        return self._stage()

    def sent(self, index: int) -> Stage:
        """Return the stage of the backward pass in which a map's gradient is sent to its sources."""
        if self.sizes.needs_gradient[index] and index in self.gradients:
            self._backward(index)
        elif index in self.alive:
            self._free(index)
        return self._stage()

    def _stage(self) -> Stage:
        """Return what has been compiled."""
        sets = (self.alive, self.gradients, self.completed, self.trained)
        after = Liveness._make(mask_of(maps) for maps in sets)
        work = tuple(share for share in self.work if share)
        return Stage(tuple(self.instructions), self.bytes, self.most, mask_of(self.maps_at_most), work, after)

    # Forward

    def _make(self, index: int, dying: Iterable[int], streamed: tuple[int, ...]) -> None:
        """Compute a map and forget those that are not read after it."""
        sizes = self.sizes
        over = next((source for source in dying if source in sizes.can_overwrite_input[index]), None)
        self.instructions.append(Compute(index, over, streamed))
        self.work.append(sizes.work[index])
        scratch = self._workspace(index, streamed).compute
        if over is None:
            self.bytes += sizes.bytes[index]
        else:
            scratch += sizes.inplace_workspace[index]
        self._note(self.bytes + scratch)
        self.alive.add(index)
        for source in dying:
            if source == over:
                self.alive.discard(source)
            else:
                self._free(source)

    def _note(self, most: int) -> None:
        """Take note of bytes that are there at once."""
        if self.most is None or most > self.most:
            self.most = most
            self.maps_at_most = tuple(self.alive)

    def _free(self, index: int) -> None:
        self.instructions.append(Release(index))
        self.alive.discard(index)
        self.bytes -= self.sizes.bytes[index]

    # Backward

    def _backward(self, index: int) -> None:
        """Complete the gradient of a map and send it to its sources."""
        sizes = self.sizes
        if sizes.is_normalised[index] and index not in self.completed:
            self._complete(index)
        if index in self.alive:
            self._free(index)
        reads = sizes.reads[index]
        streamed = self._streamed_inputs(index)
        self._make_again(reads.difference(streamed))
        for other in sorted(self.alive - self.stays - reads):
            self._free(other)
        self._send(index, streamed)
        for source in sizes.sources[index]:
            # The source's gradient is complete, or one of several parts that can be sent.
            is_last = sizes.is_cheap_stem[source] and source not in sizes.outputs and sizes.users[source][0] == index
            if source in self.gradients and (is_last or self._flush_partially(source, index)):
                self._flush(source, index)
        for other in sorted(self.alive - self.stays):
            self._free(other)

    def _complete(self, index: int) -> None:
        """Complete the gradient of a map: where that is not there, by rows that are made of its sources."""
        sizes = self.sizes
        if index in self.alive or not sizes.has_rows[index]:
            self._make_again([index])
            self.instructions.append(NormBackward(index, None))
            self._note(self.bytes + sizes.workspace[index].norm_backward)
            return
        streamed = tuple(source for source in sizes.sources[index] if self._can_stream(source))
        self._make_again([source for source in sizes.sources[index] if source not in streamed])
        self.instructions.append(NormBackward(index, streamed))
        self.work.append(sizes.work[index] + self._streaming_work(streamed))
        self._note(self.bytes + self._workspace(index, streamed).norm_backward_tiled)

    def _can_stream(self, source: int) -> bool:
        """Return whether a cheap stem need not be there: its rows are made where they are read."""
        return self.sizes.is_cheap_stem[source] and source not in self.alive and source not in self.stays

    def _streamed_inputs(self, index: int) -> tuple[int, ...]:
        """Return the sources that are streamed as a gradient is sent: computed tile by tile and never stored.

        Not those over which the gradient would be written: it would need new memory.
        """
        sizes = self.sizes
        streamed = []
        for source in sizes.sources[index]:
            if source in sizes.reads[index] and self._can_stream(source):
                has_place = source in self.gradients or source in sizes.grad_can_reuse_grad[index]
                if has_place or self._flush_partially(source, index) or not sizes.needs_gradient[source]:
                    streamed.append(source)
        return tuple(streamed)

    def _streaming_work(self, streamed: Sequence[int]) -> float:
        return HALO * sum(self.sizes.work[source] for source in streamed)

    def _workspace(self, index: int, streamed: Sequence[int]) -> Workspace:
        return self.sizes.workspace_streamed[index] if streamed else self.sizes.workspace[index]

    def _send(self, index: int, streamed: tuple[int, ...]) -> None:
        """Send the gradient of a map to its sources, and release it."""
        sizes = self.sizes
        self.gradients.discard(index)
        wanted = [source for source in sizes.sources[index] if sizes.needs_gradient[source]]
        two_pass = self._two_pass_source(index, wanted)
        targets = self._targets(index, wanted, two_pass)
        workspace = self._workspace(index, streamed)
        scratch = workspace.backward
        if two_pass is not None:
            scratch = workspace.backward_two_pass
            self.work.append(sizes.work[index] + self._streaming_work(streamed))
            targets.append(Target(two_pass, "map"))
            self.completed.add(two_pass)
        self.instructions.append(Backward(index, tuple(targets), streamed, two_pass is not None))
        self.work.append(self._streaming_work(streamed))
        before = self.bytes
        for source, place in targets:
            if place == "map":
                self.alive.discard(source)
            elif place == "new":
                self.bytes += sizes.bytes[source]
            self.gradients.add(source)
        if index not in self.trained:
            self.trained.add(index)
            self.bytes += sizes.of_weights[index]
        if sizes.is_one_tile[index]:
            scratch += sum(sizes.bytes[source] for source, place in targets if place == "add")
        self._note(max(self.bytes, before) + scratch)
        if all(place != "gradient" for _, place in targets):
            self.bytes -= sizes.bytes[index]

    def _targets(self, index: int, wanted: Sequence[int], two_pass: int | None) -> list[Target]:
        """Return where the gradient of each source goes, without the source that is sent to in two passes."""
        targets = []
        is_reused = False
        for source in wanted:
            if source == two_pass:
                continue
            place: Place = "new"
            if source in self.gradients:
                place = "add"
            elif two_pass is None and self._lies_over_map(source, index):
                place = "map"
            elif not is_reused and source in self.sizes.grad_can_reuse_grad[index]:
                place = "gradient"
                is_reused = True
            targets.append(Target(source, place))
        return targets

    def _lies_over_map(self, source: int, index: int) -> bool:
        """Return whether the gradient of a source is written over its map."""
        if source not in self.alive or source in self.stays:
            return False
        return source in self.sizes.grad_can_reuse_input[index] and not self._flush_partially(source, index)

    def _flush_partially(self, source: int, index: int) -> bool:
        """Return whether a cheap source's gradient is sent on after each of its users, part by part.

        A cheap stem has no source but the image, so that the parts add up in its weights' gradients.
        """
        sizes = self.sizes
        is_little = sizes.is_cheap_stem[source] and sizes.work[source] <= TWO_PASS_WORK
        return is_little and source not in sizes.outputs and sizes.users[source][0] < index

    def _flush(self, index: int, reader: int) -> None:
        """Send on what a reader has sent to a cheap stem."""
        sizes = self.sizes
        if sizes.is_normalised[index] and index not in self.completed:
            self._complete(index)
        if index in self.alive and index not in self.stays:
            self._free(index)
        if sizes.users[index][0] != reader:
            self.work.append(sizes.work[index])
        self._send(index, ())  # a cheap stem has no source but the image

    def _two_pass_source(self, index: int, wanted: Sequence[int]) -> int | None:
        """Return the source whose gradient is written over its map, if a second pass over the tiles is little work."""
        sizes = self.sizes
        if sizes.work[index] > TWO_PASS_WORK:
            return None
        for source in wanted:
            is_first = source not in self.gradients and sizes.users[source][0] == index
            is_there = source in self.alive and source in sizes.grad_can_reuse_input[index]
            if is_first and is_there and sizes.is_normalised[source]:
                return source
        return None

    def _make_again(self, targets: Iterable[int]) -> None:
        """Compute maps that are not there, from those that are."""
        sizes = self.sizes
        if self.alive.issuperset(targets):
            return
        wanted = set(targets)
        missing: set[int] = set()
        waiting = [index for index in wanted if index not in self.alive]
        while waiting:
            index = waiting.pop()
            if index not in missing:
                missing.add(index)
                waiting.extend(source for source in sizes.sources[index] if source not in self.alive)
        order = sorted(missing)
        streaming: set[int] = set()
        for place, index in enumerate(order):
            readers = sum(index in sizes.sources[later] for later in order[place + 1 :])
            if sizes.is_cheap_stem[index] and index not in self.stays and (readers > 0 or index not in wanted):
                streaming.add(index)
                self.work.append(HALO * sizes.work[index] * readers)
                continue
            later_sources = {source for later in order[place + 1 :] for source in sizes.sources[later]}
            dying = []
            for source in sizes.sources[index]:
                is_needed = source in later_sources or source in wanted or source in self.stays
                if source in missing and source not in streaming and not is_needed:
                    dying.append(source)
            streamed = tuple(source for source in sizes.sources[index] if source in streaming)
            self._make(index, dying, streamed)
        for index in sorted(streaming & wanted):  # last, so that they are not there beside what is made of them
            self._make(index, (), ())

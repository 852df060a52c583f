"""Compiles a stage of a pass into instructions, and counts the bytes that are alive at each.

What is there as the stage begins, and which maps stay after it, is given. A map that is needed and is not there is
computed a second time, from those that are. Where a map or a gradient lies is decided here, once: over another one that
nothing reads any more, or in memory of its own.
"""

from collections.abc import Iterable, Sequence

from unet3d.recomputing.instructions import (
    Backward,
    BackwardTwoPass,
    BeginBackward,
    Compute,
    Instruction,
    Liveness,
    NormBackward,
    NormBackwardTiled,
    Place,
    Release,
    Sizes,
    Stage,
    Target,
    Workspace,
    indices_of,
    mask_of,
)

HALO = 1.3  # rows of a cheap stem that tiles of its reader make, to those that it has: tiles overlap
TWO_PASS_WORK = 0.03  # of a forward pass: less work than this may be done a second time to save a map


class Compiler:
    """A walk through a stage: what is alive, and the most bytes so far."""

    def __init__(self, sizes: Sizes, before: Liveness, stays: int) -> None:
        """Begin the stage after which the maps of the set `stays` stay."""
        self.sizes = sizes
        self.stays = frozenset(indices_of(stays))
        self.alive = set(indices_of(before.alive))
        self.gradients = set(indices_of(before.gradients))
        self.completed = set(indices_of(before.completed))
        self.trained = set(indices_of(before.trained))
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
        """Return the end of the forward pass, as gradients of the outputs arrive."""
        self._turn()
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
        after = Liveness(
            alive=mask_of(self.alive),
            gradients=mask_of(self.gradients),
            completed=mask_of(self.completed),
            trained=mask_of(self.trained),
        )
        return Stage(
            instructions=tuple(self.instructions),
            growth=self.bytes,
            most=self.most,
            maps=mask_of(self.maps_at_most),
            work=tuple(share for share in self.work if share),
            after=after,
        )

    # Forward

    def _make(self, index: int, dying: Iterable[int], streamed: tuple[int, ...]) -> None:
        """Compute a map and forget those that are not read after it."""
        sizes = self.sizes
        over = None
        for source in dying:
            if source in sizes.can_overwrite_input[index]:
                over = source
                break
        self.instructions.append(Compute(index, over, streamed))
        self.work.append(sizes.work[index])
        scratch = self._workspace(index, streamed).compute
        if over is None:
            self._grow(sizes.bytes[index], scratch)
        else:
            self._grow(0, scratch + sizes.inplace_workspace[index])
            self.alive.discard(over)
        self.alive.add(index)
        for source in dying:
            if source != over:
                self._free(source)

    def _grow(self, more: int, scratch: int = 0) -> None:
        self.bytes += more
        self._note(self.bytes + scratch)

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

    def _turn(self) -> None:
        """Count the gradients of the outputs, which are written over them where nothing reads these."""
        sizes = self.sizes
        self.instructions.append(BeginBackward())
        for index in sizes.outputs:
            if not sizes.needs_gradient[index]:
                continue
            self.gradients.add(index)
            if sizes.users[index]:
                self._grow(sizes.bytes[index])
            else:
                self.alive.discard(index)

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
            if source in self.gradients and self._flush_now(source, index):
                self._flush(source, index)
        for other in sorted(self.alive - self.stays):
            self._free(other)

    def _complete(self, index: int) -> None:
        """Complete the gradient of a map: where that is not there, by rows that are made of its sources."""
        sizes = self.sizes
        if index in self.alive or not sizes.has_rows[index]:
            self._make_again([index])
            self.instructions.append(NormBackward(index))
            self._note(self.bytes + sizes.norm_workspace[index])
            return
        streamed = tuple(source for source in sizes.sources[index] if self._can_stream(source))
        self._make_again([source for source in sizes.sources[index] if source not in streamed])
        self.instructions.append(NormBackwardTiled(index, streamed))
        self.work.append(sizes.work[index] + self._streaming_work(streamed))
        self._note(self.bytes + self._workspace(index, streamed).norm_backward_tiled)

    def _can_stream(self, source: int) -> bool:
        """Return whether a cheap stem need not be there: its rows are made where they are read."""
        return self.sizes.is_cheap_stem[source] and source not in self.alive and source not in self.stays

    def _streamed_inputs(self, index: int) -> tuple[int, ...]:
        """Return the sources that are streamed as a gradient is sent: computed tile by tile and never stored.

        Not those over which the gradient would be written: it would need memory of its own.
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
        before = self.bytes
        self._hold(targets)
        if index not in self.trained:
            self.trained.add(index)
            self.bytes += sizes.of_weights[index]
        workspace = self._workspace(index, streamed)
        scratch = workspace.backward
        if two_pass is not None:
            scratch = workspace.backward_two_pass
            self.work.append(sizes.work[index] + self._streaming_work(streamed))
            targets.append(Target(two_pass, "map"))
            self._hold(targets[-1:])
            self.completed.add(two_pass)
        instruction = Backward if two_pass is None else BackwardTwoPass
        self.instructions.append(instruction(index, tuple(targets), streamed))
        self.work.append(self._streaming_work(streamed))
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

    def _hold(self, targets: Sequence[Target]) -> None:
        """Count gradients of sources, which lie over their maps or take new bytes."""
        for source, place in targets:
            if place == "map":
                self.alive.discard(source)
            elif place == "new":
                self.bytes += self.sizes.bytes[source]
            self.gradients.add(source)

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

    def _flush_now(self, source: int, index: int) -> bool:
        """Return whether the gradient of a source goes on at once: it is complete, or one of several parts."""
        sizes = self.sizes
        is_last = sizes.is_cheap_stem[source] and source not in sizes.outputs and sizes.users[source][0] == index
        return is_last or self._flush_partially(source, index)

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

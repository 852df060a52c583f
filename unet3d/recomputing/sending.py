"""Maps and their gradients, written tile by tile where they belong, also over a source that the next tile reads."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from unet3d.recomputing.graph import Value
from unet3d.recomputing.instructions import Place, Target
from unet3d.recomputing.maps import Map
from unet3d.recomputing.program import MapPlan, Program, TilePlan, reads_back
from unet3d.recomputing.rules import Span, normalisation
from unet3d.recomputing.state import State
from unet3d.recomputing.tiles import RowGradient, make_rows, send_gradient
from unet3d.recomputing.whole import apart


def make_into(
    plan: MapPlan, target: Tensor, maps: Mapping[Value, Tensor], state: State, over: Value | None = None
) -> None:
    """Write a map into a target; `over`: the source whose memory that is."""
    waits = over is not None and reads_back(plan.tiles, over)
    before: tuple[TilePlan, Tensor] | None = None  # rows to be written once the tile behind them is made
    for tile in plan.tiles:
        rows = make_rows(plan, tile, maps, state)
        if before is not None:
            _write(target, *before, state.axis)
        before = (tile, rows)
        if not waits:
            _write(target, *before, state.axis)
            before = None
        del rows
    if before is not None:
        _write(target, *before, state.axis)


def _write(target: Tensor, tile: TilePlan, rows: Tensor, axis: int) -> None:
    first, end = tile.span
    target.narrow(axis, first, end - first).copy_(rows)


class Sink:
    """Collects gradients of a map's rows, tile by tile, and writes those to which no later tile adds.

    Rows that no tile reads get a gradient of zero, or, where the target lies over a normalised map, what
    `complete(raw, gradient)` adds to it: the part that the statistics give.
    """

    def __init__(
        self,
        target: Tensor,
        axis: int,
        adds: bool,
        complete: Callable[[Tensor, Tensor], None] | None = None,
    ) -> None:
        self.target = target
        self.axis = axis
        self.adds = adds
        self.complete = complete
        self.written = 0
        self.carried: Tensor | None = None  # rows that the next tile adds to

    def add(self, first: int, gradient: RowGradient, done: int) -> Span:
        """Add rows from `first` on; no later tile adds to those before `done`. Return the rows that are final."""
        rows = gradient.rows
        assert rows is not None
        end = first + rows.shape[self.axis]
        done = min(max(done, first), end)
        if self.carried is not None:
            rows = self.with_carried(rows if gradient.is_own else rows.clone())
        finished = rows.narrow(self.axis, 0, done - first)
        target = self.target.narrow(self.axis, first, done - first)
        if self.adds:
            target.add_(finished)
        else:
            self._clear(first)
            target.copy_(finished)
        self.written = done
        self.carried = None
        if done < end:
            self.carried = rows.narrow(self.axis, done - first, end - done).clone()
        return first, done

    def with_carried(self, rows: Tensor) -> Tensor:
        """Return rows with what the tile before has left for them, added in place."""
        if self.carried is not None:
            rows.narrow(self.axis, 0, self.carried.shape[self.axis]).add_(self.carried)
            self.carried = None
        return rows

    def close(self) -> None:
        """Write zeros where nothing was added."""
        if not self.adds:
            self._clear(self.target.shape[self.axis])

    def _clear(self, until: int) -> None:
        if until <= self.written:
            return
        rows = self.target.narrow(self.axis, self.written, until - self.written)
        if self.complete is None:
            rows.zero_()
        else:
            raw = rows.clone()
            self.complete(raw, rows.zero_())


class TileSender:
    """The maps and gradients of a pass, of which it sends one map's gradient to the sources at a time."""

    def __init__(
        self,
        program: Program,
        state: State,
        device: torch.device,
        maps: dict[Value, Tensor],
        gradients: dict[Value, Tensor | None],
    ) -> None:
        self.program = program
        self.state = state
        self.device = device
        self.maps = maps
        self.gradients = gradients
        self.by_index = program.maps.maps

    def complete(self, map_: Map, raw: Tensor, gradient: Tensor) -> None:
        """Add the part that follows from the statistics, to as few rows at a time as in a tile."""
        axis = self.state.axis
        length = raw.shape[axis]
        rows = self.program.numbers * length // max(raw.numel(), 1)
        rows = max(1, rows)
        for first in range(0, length, rows):
            count = min(rows, length - first)
            part_of_raw = raw.narrow(axis, first, count)
            part = gradient.narrow(axis, first, count)
            for norm in map_.norms:
                normalisation.complete(norm, part_of_raw, part, self.state)

    def norm_backward_tiled(self, plan: MapPlan, gradient: Tensor) -> None:
        """Complete the gradient of a map that is not there: each tile's rows are made first."""
        for tile in plan.tiles:
            first, end = tile.span
            raw = make_rows(plan, tile, self.maps, self.state)
            self.complete(plan.map, raw, gradient.narrow(self.state.axis, first, end - first))
            del raw

    def send(
        self,
        plan: MapPlan,
        gradient: Tensor,
        targets: Sequence[Target],
        may_overwrite: bool,
        completed: Map | None = None,
    ) -> None:
        """Send a gradient to the sources; `completed`: a source whose gradient also gets its statistics' part."""
        places = {self.by_index[source].value: place for source, place in targets}
        image = self.program.maps.graph.image
        sources = self.by_index[plan.map.index].sources
        if image in plan.wanted and image in sources and completed is None:  # else the first of two passes has sent it
            places[image] = "new" if self.gradients.get(image) is None else "add"
        # The gradients of a sum's terms may all be rows of the gradient: what is written over it comes last.
        values = sorted(places, key=lambda value: places[value] == "gradient")
        sinks: dict[Value, Sink | None] = {}
        for value in values:
            sink = self._sink(plan, value, places[value], gradient)
            if sink is not None and completed is not None and value is completed.value:
                sink.complete = partial(self.complete, completed)
            sinks[value] = sink
        for number, tile in enumerate(plan.tiles):
            rows = gradient
            if len(plan.tiles) > 1:
                first, end = tile.span
                rows = gradient.narrow(self.state.axis, first, end - first)
            sent = send_gradient(plan, tile, self.maps, rows, may_overwrite, values, self.state)
            self.state.close_tile()
            del rows
            self._collect(plan, number, sinks, sent, completed)
            sent.clear()  # before the next tile's rows are made
        for value, sink in sinks.items():
            if sink is not None:
                sink.close()
                self.gradients[value] = sink.target
            if places[value] == "map":
                self.maps.pop(value, None)

    def _collect(
        self,
        plan: MapPlan,
        number: int,
        sinks: Mapping[Value, Sink | None],
        sent: Sequence[RowGradient],
        completed: Map | None,
    ) -> None:
        """Write or keep the gradients that a tile sends to the rows of its sources."""
        spans = plan.tiles[number].spans
        is_last = number + 1 == len(plan.tiles)
        for (value, sink), of_rows in zip(sinks.items(), sent, strict=True):
            low, high = spans[value]
            done = high  # no later tile adds to the rows before
            if not is_last:
                done, _ = plan.tiles[number + 1].spans[value]
            if of_rows.rows is None:
                of_rows = self._zeros(value, low, high)
            if completed is not None and value is completed.value:
                of_rows = self._completed(completed, of_rows, low, sink, done)
            if sink is not None:
                sink.add(low, of_rows, done)
                continue
            assert of_rows.rows is not None
            others = [] if of_rows.is_own else [of_rows.rows]
            self.gradients[value] = apart(of_rows.rows, others)

    def _completed(self, map_: Map, gradient: RowGradient, low: int, sink: Sink | None, done: int) -> RowGradient:
        """Return a gradient whose final rows have the statistics' part; rows that the next tile adds to wait."""
        assert gradient.rows is not None
        axis = self.state.axis
        rows = gradient.rows
        if not gradient.is_own:
            rows = rows.clone()
        if sink is not None:
            rows = sink.with_carried(rows)
            high = low + rows.shape[axis]
            done = min(max(done, low), high)
        count = done - low
        raw = self.maps[map_.value].narrow(axis, low, count)
        self.complete(map_, raw, rows.narrow(axis, 0, count))
        return RowGradient(rows, True)

    def _zeros(self, value: Value, low: int, high: int) -> RowGradient:
        shape = list(value.shape)
        shape[self.state.axis] = high - low
        zeros = torch.zeros(shape, dtype=self.state.dtype, device=self.device)
        return RowGradient(zeros, True)

    def _sink(self, plan: MapPlan, value: Value, place: Place, gradient: Tensor) -> Sink | None:
        """Return where the gradient of a source is collected; None where one tile has all of it."""
        known = self.gradients.get(value)
        if place == "add" and known is not None:
            return Sink(known, self.state.axis, adds=True)
        whole = (0, value.shape[self.state.axis])
        if len(plan.tiles) == 1 and plan.tiles[0].spans[value] == whole:
            return None
        if place == "map":
            return Sink(self.maps[value], self.state.axis, adds=False)
        if place == "gradient":
            return Sink(gradient, self.state.axis, adds=False)
        target = torch.empty(value.shape, dtype=self.state.dtype, device=self.device)
        return Sink(target, self.state.axis, adds=False)

"""One map's rows, a tile at a time: computed from the maps before it, and their gradient sent to them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from unet3d.recomputing.graph import Value
from unet3d.recomputing.program import MapPlan, TilePlan, read_by_gradient
from unet3d.recomputing.rules import RULES, Span, Tile, Work
from unet3d.recomputing.state import State


def make_rows(plan: MapPlan, tile: TilePlan, maps: Mapping[Value, Tensor], state: State) -> Tensor:
    """Return the rows of a tile."""
    forward = _Forward(plan, tile, maps, state, plan.map.fused)
    forward.run()
    return forward.rows.pop(plan.map.value)


def send_gradient(
    plan: MapPlan,
    tile: TilePlan,
    maps: Mapping[Value, Tensor],
    gradient: Tensor,
    may_overwrite: bool,
    targets: Sequence[Value],
    state: State,
) -> list["RowGradient"]:
    """Return the gradients of the targets' rows; gradients of weights and sums are added to the state."""
    forward = _Forward(plan, tile, maps, state, plan.known)
    for value in plan.map.fused:
        if value in plan.wanted and value not in plan.ends:
            for known in read_by_gradient(value):
                forward.keep(known)
    forward.run()
    backward = _Backward(plan, tile, forward, state)
    backward.run(gradient, may_overwrite)
    return [backward.take(target) for target in targets]


class _Forward:
    """Rows of fused values, as long as something reads them."""

    def __init__(
        self,
        plan: MapPlan,
        tile: TilePlan,
        maps: Mapping[Value, Tensor],
        state: State,
        values: Iterable[Value],
    ) -> None:
        self.tile = tile
        self.maps = maps
        self.state = state
        self.values = [value for value in plan.map.fused if value in set(values)]
        self.sources = [maps[source] for source in plan.map.sources if source in maps]
        self.rows: dict[Value, Tensor] = {}
        self.readers: dict[Value, int] = {}
        for value in self.values:
            for source in value.inputs:
                self.readers[source] = self.readers.get(source, 0) + 1

    def run(self) -> None:
        """Make the rows of all values."""
        for value in self.values:
            tile = self.tile.tiles[value]
            inputs = self.inputs(value, tile)
            may_overwrite = bool(inputs) and self._may_overwrite(value.inputs[0], tile.inputs[0])
            work = Work(value, tile, self.state, may_overwrite)
            self.rows[value] = RULES[value.op].run(work, inputs)
            del inputs
            for source in value.inputs:
                self.release(source)

    def inputs(self, value: Value, tile: Tile) -> list[Tensor]:
        """Return the rows that an operation reads, in the type of maps.

        A group's result may have another: float32 in half precision, which a normalisation reads as exactly as it is.
        """
        inputs = []
        for source, span in zip(value.inputs, tile.inputs, strict=True):
            rows = self.read(source, span)
            if rows.is_floating_point() and not RULES[value.op].takes_statistics:
                rows = rows.to(self.state.dtype)
            inputs.append(rows)
        return inputs

    def read(self, value: Value, span: Span) -> Tensor:
        """Return rows of a map or of a fused value."""
        if value in self.rows:
            rows = self.rows[value]
            first = self.tile.spans[value][0]
        else:
            rows = self.maps[value]
            first = 0
        if span == (first, first + rows.shape[self.state.axis]):
            return rows
        return rows.narrow(self.state.axis, span[0] - first, span[1] - span[0])

    def keep(self, value: Value) -> None:
        """Count one more reader."""
        self.readers[value] = self.readers.get(value, 0) + 1

    def release(self, value: Value) -> None:
        """Forget rows that nothing reads any more."""
        self.readers[value] -= 1
        if self.readers[value] == 0:
            self.rows.pop(value, None)

    def _may_overwrite(self, value: Value, span: Span) -> bool:
        """Return whether a value's rows may be written over: this is their last reader, and they are no view."""
        if value not in self.rows or self.readers[value] > 1 or span != self.tile.spans[value]:
            return False
        others = [rows for other, rows in self.rows.items() if other is not value]
        memory = self.rows[value].untyped_storage()._cdata
        return all(rows.untyped_storage()._cdata != memory for rows in (*self.sources, *others))


@dataclass
class RowGradient:
    """A gradient of rows; `is_own`: nothing else reads its memory."""

    rows: Tensor | None
    is_own: bool = False


class _Backward:
    """Gradients of rows of the fused values and the sources of one tile."""

    def __init__(self, plan: MapPlan, tile: TilePlan, forward: _Forward, state: State) -> None:
        self.plan = plan
        self.tile = tile
        self.forward = forward
        self.state = state
        self.gradients: dict[Value, RowGradient] = {}

    def run(self, gradient: Tensor, may_overwrite: bool) -> None:
        """Send a gradient of the map's rows down to the sources."""
        self.gradients[self.plan.map.value] = RowGradient(gradient, may_overwrite)
        for value in reversed(self.plan.map.fused):
            if value in self.plan.wanted and value not in self.plan.ends:
                self._send(value)

    def take(self, value: Value) -> RowGradient:
        """Return the gradient of a source's rows."""
        return self.gradients.pop(value, RowGradient(None))

    def _send(self, value: Value) -> None:
        of_result = self.gradients.pop(value, None)
        if of_result is None or of_result.rows is None:
            self._release(value)
            return
        rule = RULES[value.op]
        tile = self.tile.tiles[value]
        known: list[Tensor] = []
        if rule.reads == "result":
            known = [self.forward.rows[value]]
        elif rule.reads == "inputs":
            known = self.forward.inputs(value, tile)
        wanted = [source in self.plan.wanted for source in value.inputs]
        work = Work(value, tile, self.state, of_result.is_own, wanted)
        self._release(value)
        gradients = rule.gradients(work, known, of_result.rows)
        del known
        memory = of_result.rows.untyped_storage()._cdata
        shared = [g is not None and g.untyped_storage()._cdata == memory for g in gradients]
        for source, span, rows, is_shared in zip(value.inputs, tile.inputs, gradients, shared, strict=True):
            if rows is None or source not in self.plan.wanted:
                continue
            is_own = not is_shared or (of_result.is_own and (rule.splits_gradient or sum(shared) == 1))
            self._add(source, span, rows, is_own)

    def _release(self, value: Value) -> None:
        """Forget rows that the gradient of this value alone was computed from."""
        for known in read_by_gradient(value):
            self.forward.release(known)

    def _add(self, value: Value, span: Span, rows: Tensor, is_own: bool) -> None:
        """Add to the gradient of a value what one reader of some of its rows gives."""
        axis = self.state.axis
        first, end = self.tile.spans[value]
        known = self.gradients.get(value)
        if known is None and span == (first, end):
            self.gradients[value] = RowGradient(rows, is_own)
            return
        if known is None or known.rows is None:
            shape = list(value.shape)
            shape[axis] = end - first
            known = RowGradient(rows.new_zeros(shape), True)
        elif not known.is_own:
            known = RowGradient(known.rows.clone(), True)
        assert known.rows is not None
        known.rows.narrow(axis, span[0] - first, span[1] - span[0]).add_(rows)
        self.gradients[value] = known

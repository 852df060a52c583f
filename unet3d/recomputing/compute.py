"""One map: computed from the maps before it, and its gradient sent to these, a tile at a time or by a group.

A group is carried out of whole maps, plainly in forward, and again under autograd in backward: where a dimension allows
it in parts, a few windows of an attention at a time.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from unet3d.recomputing.graph import Value, derive, has_gradients, names_read
from unet3d.recomputing.groups import SIZED
from unet3d.recomputing.maps import Map
from unet3d.recomputing.program import MapPlan, Program, TilePlan, read_by_gradient
from unet3d.recomputing.rules import RULES, Span, Work, call, gradients_by_autograd, memory_of, rows_of, shape_of_rows
from unet3d.recomputing.state import State


def apart(tensor: Tensor, others: Sequence[Tensor]) -> Tensor:
    """Return a contiguous tensor that shares no memory with others."""
    is_shared = any(memory_of(other) == memory_of(tensor) for other in others)
    has_gaps = tensor.untyped_storage().nbytes() != tensor.numel() * tensor.itemsize
    if is_shared or has_gaps:
        return tensor.clone(memory_format=torch.contiguous_format)
    return tensor.contiguous()


# Tiles


class RowGradient(NamedTuple):
    """A gradient of rows; `is_own`: nothing else reads its memory."""

    rows: Tensor
    is_own: bool


class TileRun:
    """Rows of the fused values of one tile, as long as something reads them, and their gradients."""

    def __init__(self, plan: MapPlan, tile: TilePlan, maps: Mapping[Value, Tensor], state: State) -> None:
        self.plan = plan
        self.tile = tile
        self.maps = maps
        self.state = state
        self.sources = [maps[source] for source in plan.map.sources if source in maps]
        self.rows: dict[Value, Tensor] = {}
        self.readers: Counter[Value] = Counter()
        self.gradients: dict[Value, RowGradient] = {}

    def compute(self) -> Tensor:
        """Return the rows of the map."""
        self._forward(self.plan.map.fused)
        return self.rows.pop(self.plan.map.value)

    def send(self, gradient: Tensor, may_overwrite: bool, targets: Collection[Value]) -> dict[Value, RowGradient]:
        """Return the targets' gradients, of those that have one; what weights and sums get is added to the state."""
        sent = [value for value in self.plan.map.fused if value in self.plan.wanted and value not in self.plan.ends]
        for value in sent:
            self.readers.update(read_by_gradient(value))
        self._forward([value for value in self.plan.map.fused if value in self.plan.read])
        self.gradients[self.plan.map.value] = RowGradient(gradient, may_overwrite)
        for value in reversed(sent):
            self._backward(value)
        return {target: self.gradients[target] for target in targets if target in self.gradients}

    def _forward(self, values: Sequence[Value]) -> None:
        """Make the rows of fused values."""
        for value in values:
            self.readers.update(value.inputs)
        for value in values:
            spans = self.tile.inputs[value]
            inputs = self._inputs(value)
            may_overwrite = bool(inputs) and self._may_overwrite(value.inputs[0], spans[0])
            work = Work(value, self.state, self.tile.spans[value], spans, may_overwrite)
            self.rows[value] = RULES[value.op].run(work, inputs)
            del inputs
            self._release(value.inputs)

    def _inputs(self, value: Value) -> list[Tensor]:
        """Return the rows that an operation reads, in the type of maps.

        A group's result may have another: float32 in half precision, which a normalisation reads without rounding it.
        """
        inputs = []
        for source, span in zip(value.inputs, self.tile.inputs[value], strict=True):
            if source in self.rows:
                rows = rows_of(self.rows[source], self.state.axis, span, self.tile.spans[source][0])
            else:
                rows = rows_of(self.maps[source], self.state.axis, span)
            if rows.is_floating_point() and not RULES[value.op].takes_statistics:
                rows = rows.to(self.state.dtype)
            inputs.append(rows)
        return inputs

    def _release(self, values: Sequence[Value]) -> None:
        """Forget rows that nothing reads any more."""
        for value in values:
            self.readers[value] -= 1
            if self.readers[value] == 0:
                self.rows.pop(value, None)

    def _may_overwrite(self, value: Value, span: Span) -> bool:
        """Return whether a value's rows may be written over: this is their last reader, and they are no view."""
        if value not in self.rows or self.readers[value] > 1 or span != self.tile.spans[value]:
            return False
        others = [rows for other, rows in self.rows.items() if other is not value]
        memory = memory_of(self.rows[value])
        return all(memory_of(rows) != memory for rows in (*self.sources, *others))

    def _backward(self, value: Value) -> None:
        """Send the gradient of a value to its inputs."""
        of_result = self.gradients.pop(value, None)
        rule = RULES[value.op]
        known: list[Tensor] = []
        if of_result is not None and rule.reads == "result":
            known = [self.rows[value]]
        elif of_result is not None and rule.reads == "inputs":
            known = self._inputs(value)
        self._release(read_by_gradient(value))
        if of_result is None:
            return
        wanted = [source in self.plan.wanted for source in value.inputs]
        spans = self.tile.inputs[value]
        work = Work(value, self.state, self.tile.spans[value], spans, of_result.is_own, wanted)
        gradients = rule.gradients(work, known, of_result.rows)
        del known
        memory = memory_of(of_result.rows)
        shared = [rows is not None and memory_of(rows) == memory for rows in gradients]
        may_share = of_result.is_own and (rule.splits_gradient or sum(shared) == 1)
        for source, span, rows, is_shared in zip(value.inputs, spans, gradients, shared, strict=True):
            if rows is not None and source in self.plan.wanted:
                self._add(source, span, RowGradient(rows, may_share or not is_shared))

    def _add(self, value: Value, span: Span, gradient: RowGradient) -> None:
        """Add to the gradient of a value what one reader of some of its rows gives."""
        axis = self.state.axis
        whole = self.tile.spans[value]
        known = self.gradients.get(value)
        if known is None and span == whole:
            self.gradients[value] = gradient
            return
        if known is None:
            known = RowGradient(gradient.rows.new_zeros(shape_of_rows(value, axis, whole)), True)
        elif not known.is_own:
            known = RowGradient(known.rows.clone(), True)
        rows_of(known.rows, axis, span, whole[0]).add_(gradient.rows)
        self.gradients[value] = known


@dataclass
class Sink:
    """Collects gradients of a map's rows, tile by tile, and writes those to which no later tile adds.

    Rows that no tile reads get a gradient of zero, completed.
    """

    axis: int
    target: Tensor | None = None  # None until the one tile is there that has all rows
    adds: bool = False  # Add to the gradients that the target has.
    # Adds the part that statistics give to the gradient of raw rows, where the target lies over a normalised map.
    complete: Callable[[Tensor, Tensor], None] | None = None
    written: int = 0
    carried: Tensor | None = None  # rows that the next tile adds to

    def add(self, first: int, gradient: RowGradient, done: int) -> None:
        """Add rows from `first` on; no later tile adds to those before `done`."""
        rows = gradient.rows
        if self.target is None:
            self.target = apart(rows, [] if gradient.is_own else [rows])
            self.written = rows.shape[self.axis]
            return
        end = first + rows.shape[self.axis]
        done = min(max(done, first), end)
        if not gradient.is_own and (self.carried is not None or self.complete is not None):
            rows = rows.clone()
        if self.carried is not None:
            rows_of(rows, self.axis, (0, self.carried.shape[self.axis])).add_(self.carried)
            self.carried = None
        finished = rows_of(rows, self.axis, (first, done), first)
        target = rows_of(self.target, self.axis, (first, done))
        if self.complete is not None:
            self.complete(target, finished)
        if self.adds:
            target.add_(finished)
        else:
            self.clear(first)
            target.copy_(finished)
        self.written = done
        if done < end:
            self.carried = rows_of(rows, self.axis, (done, end), first).clone()

    def clear(self, until: int) -> None:
        """Write zeros where nothing was added."""
        if self.adds or self.target is None or until <= self.written:
            return
        rows = rows_of(self.target, self.axis, (self.written, until))
        if self.complete is None:
            rows.zero_()
        else:
            raw = rows.clone()
            self.complete(raw, rows.zero_())


# Groups


def compute_group(map_: Map, sources: Sequence[Tensor], state: State, parts: Sequence[Span]) -> Tensor:
    """Return the result of a group. It may share the memory of a source where it is not made in parts."""
    state = replace(state, weights=_weights(map_, state, bool(parts)))
    if not parts:
        return _run(map_, sources, state, None)
    result: Tensor | None = None
    for span in parts:
        of_sources = [_part(map_, source, x, span) for source, x in zip(map_.sources, sources, strict=True)]
        rows = _run(map_, of_sources, state, span)
        if result is None:
            result = rows.new_empty(map_.value.shape)
        _part(map_, map_.value, result, span).copy_(rows)
        del rows
    assert result is not None
    return result


def gradients_of_group(
    map_: Map, sources: Sequence[Tensor], gradient: Tensor, state: State, program: Program
) -> Sequence[Tensor | None]:
    """Return the sources' gradients, by running the group again; weights' are added to the state."""
    parts = program.parts(map_)
    weights = _weights(map_, state, bool(parts))
    for name in map_.weights:
        weights[name] = weights[name].detach().requires_grad_(weights[name].requires_grad)
    trained = {name: weights[name] for name in map_.weights if weights[name].requires_grad}
    inner = replace(state, weights=weights, updated=set(map_.fused))

    def of_part(span: Span | None) -> list[Tensor | None]:
        leaves = []
        for source, x in zip(map_.sources, sources, strict=True):
            leaf = _part(map_, source, x, span).detach()
            leaves.append(leaf.requires_grad_(source in program.wanted and has_gradients(leaf.dtype)))
        run = partial(_run, map_, leaves, inner, span)
        of_result = _part(map_, map_.value, gradient, span)
        return gradients_by_autograd(run, leaves, trained, of_result, state, frees_result=True)

    if not parts:
        return of_part(None)
    totals: dict[Value, Tensor] = {}
    for span in parts:
        gradients = of_part(span)
        for source in map_.sources:
            of_source = gradients.pop(0)
            if of_source is None:
                continue
            if source not in totals:
                totals[source] = of_source.new_empty(source.shape)
            _part(map_, source, totals[source], span).copy_(of_source)
            del of_source
    return [totals.get(source) for source in map_.sources]


def _weights(map_: Map, state: State, is_in_parts: bool) -> dict[str, Tensor]:
    """Return the weights that a group reads; for all parts, also what is derived of those that are not trained."""
    weights = {name: state.weights[name] for name in map_.weights}
    if is_in_parts:
        for steps in map_.derived:
            if not any(weights[name].requires_grad for name in names_read(steps)):
                weights |= derive(steps, weights, map_.names_read)
    return weights


def _run(map_: Map, sources: Sequence[Tensor], state: State, span: Span | None) -> Tensor:
    """Return the result of a group, or of a part of it; a value is forgotten behind its last reader."""
    tensors: dict[Value, Tensor] = dict(zip(map_.sources, sources, strict=True))
    weights = dict(state.weights)
    state = replace(state, weights=weights)
    for value in map_.fused:
        missing = {weight.name for weight in value.weights()} - weights.keys()
        for steps in map_.derived:
            if any(derived.name in missing for derived in steps):
                weights.update(derive(steps, weights, map_.names_read))
        inputs = [tensors[source] for source in value.inputs]
        if span is None or map_.along is None:
            tensors[value] = call(value, inputs, state, keeps_types=True)
        elif value.op in SIZED:
            sizes = list(value.args[1])
            sizes[map_.along.places[value]] = span[1] - span[0]
            tensors[value] = inputs[0].reshape(sizes)
        else:
            places = {leaf.name: place for leaf, place in map_.along.weights[value].items()}
            narrowed = {name: rows_of(weights[name], place, span) for name, place in places.items()}
            of_part = replace(state, weights={**weights, **narrowed}) if narrowed else state
            tensors[value] = call(value, inputs, of_part, keeps_types=True)
            del narrowed, of_part
        del inputs
        for leaf in map_.forgotten[value]:
            if isinstance(leaf, Value):
                del tensors[leaf]
            else:
                weights.pop(leaf.name, None)
    return tensors[map_.value]


def _part(map_: Map, value: Value, tensor: Tensor, span: Span | None) -> Tensor:
    """Return a part of a value's tensor, or all of it."""
    if span is None or map_.along is None:
        return tensor
    return rows_of(tensor, map_.along.places[value], span)

"""A group of operations, carried out of whole maps: plainly in forward, and again under autograd in backward.

Where a dimension allows it, it is carried out in parts: a few windows of an attention at a time.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from unet3d.recomputing.along import SIZED
from unet3d.recomputing.graph import Value, Weight, derive, has_gradients, names_read
from unet3d.recomputing.maps import Map
from unet3d.recomputing.rules import Gradients, Span, State, call


def make_whole(map_: Map, sources: Sequence[Tensor], state: State, parts: Sequence[Span]) -> Tensor:
    """Return the result of a group. It may share the memory of a source where it is not made in parts."""
    state = replace(state, weights=_weights(map_, state, bool(parts)))
    if not parts:
        return _run(map_, sources, state)
    result: Tensor | None = None
    for span in parts:
        rows = _run(map_, _narrowed(map_, sources, span), state, span)
        if result is None:
            result = rows.new_empty(map_.value.shape)
        _rows(map_, map_.value, result, span).copy_(rows)
        del rows
    assert result is not None
    return result


def gradients_of_whole(
    map_: Map,
    sources: Sequence[Tensor],
    gradient: Tensor,
    state: State,
    wanted: Sequence[bool],
    parts: Sequence[Span],
) -> Gradients:
    """Return the sources' gradients, by running the group again; weights' are added to the state."""
    weights = _weights(map_, state, bool(parts))
    for name in map_.weights:
        weights[name] = weights[name].detach().requires_grad_(weights[name].requires_grad)
    inner = replace(state, weights=weights, updated=set(map_.fused))
    if not parts:
        return _gradients(map_, sources, gradient, state, inner, wanted)
    totals: list[Tensor | None] = [None for _ in sources]
    for span in parts:
        rows = _narrowed(map_, sources, span)
        of_rows = list(_gradients(map_, rows, _rows(map_, map_.value, gradient, span), state, inner, wanted, span))
        for index, source in enumerate(map_.sources):
            of_source = of_rows[index]
            of_rows[index] = None
            if of_source is None:
                continue
            total = totals[index]
            if total is None:
                total = of_source.new_empty(source.shape)
                totals[index] = total
            _rows(map_, source, total, span).copy_(of_source)
            del of_source
    return totals


def apart(tensor: Tensor, others: Sequence[Tensor]) -> Tensor:
    """Return a contiguous tensor that shares no memory with others."""
    storage = tensor.untyped_storage()
    is_shared = any(other.untyped_storage()._cdata == storage._cdata for other in others)
    has_gaps = storage.nbytes() != tensor.numel() * tensor.itemsize
    if is_shared or has_gaps:
        return tensor.clone(memory_format=torch.contiguous_format)
    return tensor.contiguous()


def _gradients(
    map_: Map,
    sources: Sequence[Tensor],
    gradient: Tensor,
    state: State,
    inner: State,
    wanted: Sequence[bool],
    span: Span | None = None,
) -> Gradients:
    """Return the gradients of the sources, or of the rows of a part; `inner` has the weights as leaves."""
    inputs = []
    for source, is_wanted in zip(sources, wanted, strict=True):
        leaf = source.detach()
        inputs.append(leaf.requires_grad_(is_wanted and has_gradients(source.dtype)))
    with torch.enable_grad():
        result = _run(map_, inputs, inner, span)
    if not result.requires_grad:
        return [None for _ in inputs]
    gradient = gradient.to(result.dtype)
    edge = get_gradient_edge(result)
    del result  # backward reads its gradient, and itself only where autograd saved it
    trained = [name for name in map_.weights if inner.weights[name].requires_grad]
    leaves = [leaf for leaf in inputs if leaf.requires_grad]
    computed: list[Tensor | None] = list(
        torch.autograd.grad(
            edge,
            [*leaves, *(inner.weights[name] for name in trained)],
            gradient,
            allow_unused=True,
        )
    )
    memory = {_memory(of_leaf) for of_leaf in (gradient, *computed[: len(leaves)]) if of_leaf is not None}
    for name in reversed(trained):
        of_weight = computed.pop()
        if of_weight is None:
            continue
        if _memory(of_weight) in memory:
            of_weight = of_weight.clone()  # the gradient of a sum's terms is the same tensor, and is added to
        memory.add(_memory(of_weight))
        state.add_gradient(Weight(name, of_weight.shape), of_weight)
    of_leaf = dict(zip(map(id, leaves), computed, strict=True))
    return [of_leaf.get(id(leaf)) for leaf in inputs]


def _weights(map_: Map, state: State, is_in_parts: bool) -> dict[str, Tensor]:
    """Return the weights that a group reads; for all parts, also what is derived of those that are not trained."""
    weights = {name: state.weights[name] for name in map_.weights}
    if not is_in_parts:
        return weights
    for steps in map_.derived:
        if not any(weights[name].requires_grad for name in names_read(steps)):
            weights |= derive(steps, weights, map_.names_read)
    return weights


def _run(map_: Map, sources: Sequence[Tensor], state: State, span: Span | None = None) -> Tensor:
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
        if span is None:
            tensors[value] = call(value, inputs, state, keeps_types=True)
        else:
            tensors[value] = _call_on_part(map_, value, inputs, state, span)
        del inputs
        for leaf in map_.forgotten[value]:
            if isinstance(leaf, Value):
                del tensors[leaf]
            else:
                weights.pop(leaf.name, None)
    return tensors[map_.value]


def _call_on_part(map_: Map, value: Value, inputs: Sequence[Tensor], state: State, span: Span) -> Tensor:
    """Return an operation's result for a part of its inputs."""
    assert map_.along is not None
    if value.op in SIZED:
        sizes = list(value.args[1])
        sizes[map_.along.places[value]] = span[1] - span[0]
        return inputs[0].reshape(sizes)
    narrowed = {}
    for weight, place in map_.along.weights[value].items():
        narrowed[weight.name] = _narrow(state.weights[weight.name], place, span)
    if narrowed:
        state = replace(state, weights={**state.weights, **narrowed})
    return call(value, inputs, state, keeps_types=True)


def _narrowed(map_: Map, sources: Sequence[Tensor], span: Span) -> list[Tensor]:
    return [_rows(map_, source, tensor, span) for source, tensor in zip(map_.sources, sources, strict=True)]


def _rows(map_: Map, value: Value, tensor: Tensor, span: Span) -> Tensor:
    """Return a part of a value's tensor."""
    assert map_.along is not None
    return _narrow(tensor, map_.along.places[value], span)


def _narrow(tensor: Tensor, place: int, span: Span) -> Tensor:
    first, end = span
    return tensor.narrow(place, first, end - first)


def _memory(tensor: Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address

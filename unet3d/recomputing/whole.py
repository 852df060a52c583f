"""A group of operations, carried out of whole maps: plainly in forward, and again under autograd in backward."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from unet3d.recomputing.derived import derive
from unet3d.recomputing.graph import Value, Weight
from unet3d.recomputing.maps import Map
from unet3d.recomputing.rules import Gradients, State, call


def make_whole(map_: Map, sources: Sequence[Tensor], state: State) -> Tensor:
    """Return the result of a group. It may share the memory of a source."""
    weights = {name: state.weights[name] for name in map_.weights}
    return _run(map_, sources, replace(state, weights=weights))


def gradients_of_whole(
    map_: Map,
    sources: Sequence[Tensor],
    gradient: Tensor,
    state: State,
    wanted: Sequence[bool],
) -> Gradients:
    """Return the sources' gradients, by running the group again; weights' are added to the state."""
    inputs = []
    for source, is_wanted in zip(sources, wanted, strict=True):
        leaf = source.detach()
        inputs.append(leaf.requires_grad_(is_wanted and source.is_floating_point()))
    weights = {}
    for name in map_.weights:
        tensor = state.weights[name].detach()
        weights[name] = tensor.requires_grad_(state.weights[name].requires_grad)
    inner = replace(state, weights=weights, updated=set(map_.passing))
    with torch.enable_grad():
        result = _run(map_, inputs, inner)
    if not result.requires_grad:
        return [None for _ in inputs]
    gradient = gradient.to(result.dtype)
    edge = get_gradient_edge(result)
    del result  # backward reads its gradient, and itself only where autograd saved it
    trained = [name for name, tensor in weights.items() if tensor.requires_grad]
    leaves = [leaf for leaf in inputs if leaf.requires_grad]
    computed = list(
        torch.autograd.grad(
            edge,
            [*leaves, *(weights[name] for name in trained)],
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


def _run(map_: Map, sources: Sequence[Tensor], state: State) -> Tensor:
    """Return the result of a group; a value is forgotten behind its last reader."""
    tensors: dict[Value, Tensor] = dict(zip(map_.sources, sources, strict=True))
    weights = dict(state.weights)
    state = replace(state, weights=weights)
    forgotten = map_.forgotten
    for value in map_.passing:
        missing = {weight.name for weight in value.weights()} - weights.keys()
        for steps in map_.derived:
            if any(derived.name in missing for derived in steps):
                weights.update(derive(steps, weights, map_.names_read))
        inputs = [tensors[source] for source in value.inputs]
        tensors[value] = call(value, inputs, state, keeps_types=True)
        del inputs
        for leaf in forgotten[value]:
            if isinstance(leaf, Value):
                del tensors[leaf]
            else:
                weights.pop(leaf.name, None)
    return tensors[map_.value]


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata

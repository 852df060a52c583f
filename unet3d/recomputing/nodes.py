"""Questions about the operations of a traced network: what they write, share, draw and return."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from unet3d.base.errors import UserError
from unet3d.recomputing.graph import DROPOUTS, Like, Value, gives_view, operation_name
from unet3d.recomputing.refusals import layer_of, place_of

# Operations that return their first argument itself where their rate is 0, or in evaluation.
SWITCHED = (*DROPOUTS, "alpha_dropout", "feature_alpha_dropout")


def is_same_memory(tensor: Tensor, other: Tensor) -> bool:
    if tensor.untyped_storage()._cdata != other.untyped_storage()._cdata:
        return False
    return (tensor.shape, tensor.stride(), tensor.storage_offset()) == (
        other.shape,
        other.stride(),
        other.storage_offset(),
    )


def without_writing(target: Any, node: fx.Node) -> Any:
    """Return the operation that gives a new tensor where this one writes over its first argument."""
    packet = getattr(torch.ops.aten, operation_name(target), None)
    overload = getattr(packet, target._overloadname, None)
    if overload is None:
        raise UserError(
            f"{layer_of(node) or 'the network'}: {target} has no variant that gives a new tensor{place_of(node)}"
        )
    return overload


def types_of(result: Any) -> list[Any]:
    """Return the types of an operation's results."""
    results = result if isinstance(result, tuple | list) else [result]
    return [getattr(tensor, "dtype", None) for tensor in results]


def layout_like(fake: Tensor) -> Like:
    """Return a tensor of the size and layout that torch gives to random numbers for this one."""
    return Like(fake.shape, torch.empty_like(fake).stride(), fake.dtype, fake.device)


def written_argument(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return the argument that an operation changes; None where it gives a new tensor."""
    for place, argument in enumerate(target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            return args[place] if place < len(args) else kwargs.get(argument.name)
    return None


def is_in_place(node: fx.Node) -> bool:
    return operation_name(node.target) != operation_name(node.target, keeps_underscore=True)


def is_view_of(value: Value, source: Any) -> bool:
    """Return whether a value shares the memory of another."""
    if source not in value.inputs or (value.op == "to" and value.dtype != source.dtype):
        return False
    return gives_view(value.target)


def is_same(node: fx.Node, op: str) -> bool:
    """Return whether an operation returns its argument itself: a conversion to the type or the layout that it has."""
    if op not in ("contiguous", "to"):
        return False
    source = node.args[0]
    assert isinstance(source, fx.Node)
    if op == "contiguous":
        layout: Any = node.kwargs.get("memory_format", torch.contiguous_format)
        return bool(source.meta["val"].is_contiguous(memory_format=layout))
    return len(node.args) == 2 and not node.kwargs and node.args[1] == source.meta["val"].dtype


def is_off(op: str, args: tuple[Any, ...]) -> bool:
    """Return whether an operation is a dropout that leaves its argument alone."""
    return op in SWITCHED and not (args[1] and args[2])


def is_random(op: str, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether an operation draws random numbers with these arguments."""
    if torch.Tag.nondeterministic_seeded not in getattr(target, "tags", ()):
        return False
    if op == "scaled_dot_product_attention":
        probability = args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)
        return bool(probability)
    if op == "rrelu":
        return len(args) > 3 and bool(args[3])
    return not is_off(op, args)

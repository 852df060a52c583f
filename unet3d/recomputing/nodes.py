"""Questions about the operations of a traced network: what they write, share, draw and return, and where they stand."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.utils import _pytree

from unet3d.base.errors import UserError
from unet3d.recomputing.graph import DROPOUTS, Value, arguments, gives_view, operation_name

OURS = str(Path(__file__).parent) + os.sep
# Operations that return their first argument itself where their rate is 0, or in evaluation.
SWITCHED = (*DROPOUTS, "alpha_dropout", "feature_alpha_dropout")


@dataclass(frozen=True, eq=False)
class Call:
    """An operation and its arguments; of several results, each that is used becomes a value or a derived tensor."""

    op: str
    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def reads_maps(self) -> bool:
        """Return whether it depends on the image."""
        return any(isinstance(leaf, Value | Call) for leaf in arguments(self))

    def is_off(self) -> bool:
        """Return whether it is a dropout that leaves its argument alone."""
        return self.op in SWITCHED and not (self.args[1] and self.args[2])

    def is_random(self) -> bool:
        """Return whether it draws random numbers with these arguments."""
        if torch.Tag.nondeterministic_seeded not in getattr(self.target, "tags", ()):
            return False
        if self.op == "scaled_dot_product_attention":
            return bool(self.args[4] if len(self.args) > 4 else self.kwargs.get("dropout_p", 0.0))
        if self.op == "rrelu":
            return len(self.args) > 3 and bool(self.args[3])
        return not self.is_off()

    def written_argument(self) -> Any:
        """Return the argument that it changes; None where it gives a new tensor."""
        schema: Any = self.target
        for place, argument in enumerate(schema._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                return self.args[place] if place < len(self.args) else self.kwargs.get(argument.name)
        return None


def without_writing(node: fx.Node) -> Any:
    """Return the operation that gives a new tensor where a node's writes over its first argument."""
    target: Any = node.target
    overload = getattr(getattr(torch.ops.aten, operation_name(target), None), target._overloadname, None)
    if overload is None:
        raise refusal(node, f"{target} has no variant that gives a new tensor")
    return overload


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


class Precision(NamedTuple):
    """What torch.autocast is set to for a type of device."""

    device_type: str
    dtype: torch.dtype
    enabled: bool

    def is_ours(self) -> bool:
        """Return whether operations compute alike under the autocast that is on now."""
        is_on = torch.is_autocast_enabled(self.device_type)
        if not self.enabled or not is_on:
            return self.enabled == is_on
        return torch.get_autocast_dtype(self.device_type) == self.dtype


class InPrecision:
    """An operation in a precision of its own, of tensors in the types that plain's have."""

    def __init__(self, target: Callable[..., Any], precision: Precision, node: fx.Node) -> None:
        self.target = target
        self.precision = precision
        self.dtypes = []  # of the tensors among the arguments, in order
        for leaf in arguments(node):
            if isinstance(leaf, fx.Node) and isinstance(leaf.meta.get("val"), Tensor):
                self.dtypes.append(leaf.meta["val"].dtype)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the operation, such as its schema."""
        if name == "target":
            raise AttributeError(name)
        return getattr(self.target, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the operation's result."""
        arguments, structure = _pytree.tree_flatten((args, kwargs))
        dtypes = iter(self.dtypes)
        for place, leaf in enumerate(arguments):
            if isinstance(leaf, Tensor):
                arguments[place] = leaf.to(next(dtypes, leaf.dtype))
        args, kwargs = _pytree.tree_unflatten(arguments, structure)
        device_type, dtype, enabled = self.precision
        with torch.autocast(device_type, dtype, enabled, cache_enabled=False):
            return self.target(*args, **kwargs)


def refusal(node: fx.Node, fault: str, advice: str = "") -> UserError:
    """Return the error about an operation that recompute cannot carry out: the layer, the place, and what to do."""
    return UserError(f"{layer_of(node) or 'the network'}: {fault}{place_of(node)}{advice}")


def layer_of(node: fx.Node) -> str:
    """Return the path of the module that calls a node."""
    stack = node.meta.get("nn_module_stack") or {}
    paths = [path for path, _ in stack.values()]
    return str(paths[-1]) if paths else ""


def place_of(node: fx.Node) -> str:
    """Return where in the source a node is called, in words."""
    lines = (node.meta.get("stack_trace") or "").strip().splitlines()
    calls = [line.strip() for line in lines if line.strip().startswith("File ") and OURS not in line]
    return f" ({calls[-1]})" if calls else ""

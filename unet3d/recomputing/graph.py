"""A network as a graph of operations on maps, traced by torch.export.

A `Value` is the result of one operation that depends on the image. Parameters and buffers are `Weight`s; what is
computed from them alone, as `weight_norm` does, is `Derived` and runs under plain autograd before each pass or, where
groups alone read it, within the group.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

DROPOUTS = ("dropout", "feature_dropout")  # their numbers are drawn when a pass begins


@dataclass(eq=False, repr=False)
class Value:
    """The result of one operation; in-place variants are described as the operation that returns a new tensor."""

    name: str
    op: str  # "conv3d", "leaky_relu"
    target: Callable[..., Any]
    args: tuple[Any, ...]  # Values, Weights and constants, also in lists
    kwargs: Mapping[str, Any]
    shape: torch.Size
    dtype: torch.dtype
    layer: str  # path of the module that calls it
    element: int | None = None  # which of several results
    inputs: tuple["Value", ...] = field(init=False)  # once each, in the order of the arguments

    def __post_init__(self) -> None:
        arguments = leaves((self.args, tuple(self.kwargs.values())))
        self.inputs = tuple(dict.fromkeys(leaf for leaf in arguments if isinstance(leaf, Value)))

    def __repr__(self) -> str:
        return f"{self.name}: {self.op} {list(self.shape)}"

    def weights(self) -> list["Weight"]:
        """Return the parameters and buffers among the arguments, once each."""
        arguments = leaves((self.args, tuple(self.kwargs.values())))
        return list(dict.fromkeys(leaf for leaf in arguments if isinstance(leaf, Weight)))

    def argument(self, position: int, default: Any = None) -> Any:
        """Return a positional argument, or the default that the operation's schema leaves out."""
        return self.args[position] if position < len(self.args) else default


@dataclass(frozen=True)
class Weight:
    """A parameter, a buffer, a constant, or a tensor derived from them, by its name."""

    name: str
    shape: torch.Size


@dataclass(frozen=True, eq=False)
class Derived:
    """A tensor that is computed without the image."""

    name: str
    target: Callable[..., Any]
    args: tuple[Any, ...]  # Weights and constants
    kwargs: Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Graph:
    """The operations of one forward pass, in the order in which the network calls them."""

    image: Value
    values: tuple[Value, ...]
    outputs: tuple[Value, ...]
    out_spec: Any  # torch.utils._pytree.TreeSpec of what the network returns
    derived: tuple[Derived, ...]
    constants: Mapping[str, Tensor]
    counters: tuple[str, ...]  # buffers that count the passes

    def users(self) -> dict[Value, list[Value]]:
        """Return the values that read each value."""
        users: dict[Value, list[Value]] = {value: [] for value in (self.image, *self.values)}
        for value in self.values:
            for source in value.inputs:
                users[source].append(value)
        return users


def leaves(tree: Any) -> Iterator[Any]:
    """Yield what is in lists within lists."""
    for leaf in tree:
        if isinstance(leaf, list | tuple):
            yield from leaves(leaf)
        else:
            yield leaf


def operation_name(target: Any, keeps_underscore: bool = False) -> str:
    """Return "leaky_relu" of aten::leaky_relu_.default."""
    packet = getattr(target, "overloadpacket", target)
    name = getattr(packet, "__name__", str(packet))
    is_operator = name.startswith("__")  # aten::__and__ is no and_
    return name if keeps_underscore or is_operator else name.rstrip("_")


def gives_view(target: Any) -> bool:
    """Return whether the result of an operation may share the memory of an argument."""
    schema = getattr(target, "_schema", None)
    return schema is None or any(result.alias_info is not None for result in schema.returns)

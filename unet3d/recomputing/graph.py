"""A network as a graph of operations on maps, traced by torch.export.

A `Value` is the result of one operation that depends on the image. Parameters and buffers are `Weight`s; what is
computed from them alone, as `weight_norm` does, is `Derived` and runs under plain autograd before each pass or, where
groups alone read it, within the group. So are random numbers, of dropout too: they are drawn before the pass.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

DROPOUTS = ("dropout", "feature_dropout")  # their last argument is what they have drawn when the pass began


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


@dataclass(frozen=True)
class Like:
    """A tensor of ones, as large as a value: an argument of an operation that reads no numbers of it."""

    shape: torch.Size
    strides: tuple[int, ...]  # in whose order random numbers are drawn
    dtype: torch.dtype
    device: torch.device

    def tensor(self) -> Tensor:
        """Return it."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device).fill_(1)


@dataclass(frozen=True, eq=False)
class Derived:
    """A tensor that is computed without the image."""

    name: str
    target: Callable[..., Any]
    args: tuple[Any, ...]  # Weights, Likes and constants
    kwargs: Mapping[str, Any]
    size: int = 0  # bytes
    is_once: bool = False  # drawn once, when a pass begins, or changes a buffer
    element: int | None = None  # which of several results


@dataclass(frozen=True, eq=False)
class Graph:
    """The operations of one forward pass, in the order in which the network calls them."""

    image: Value
    values: tuple[Value, ...]
    outputs: tuple[Value, ...]  # once each
    returned: tuple[Any, ...]  # what the network returns: outputs, the image, Weights, and what is no tensor
    out_spec: Any  # torch.utils._pytree.TreeSpec of `returned`; None: it is a tensor
    derived: tuple[Derived, ...]
    constants: Mapping[str, Tensor]
    counters: tuple[str, ...]  # buffers that count the passes

    def returned_weights(self) -> set[str]:
        """Return the names of weights that the network returns."""
        return {leaf.name for leaf in self.returned if isinstance(leaf, Weight)}

    def is_in(self, dtype: torch.dtype) -> bool:
        """Return whether it was traced in the precision of its passes, so that values have the types of plain's."""
        return any(value.dtype == dtype for value in (self.image, *self.values))

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


def has_gradients(dtype: torch.dtype) -> bool:
    """Return whether tensors of a type can have gradients: not whole numbers, not truths."""
    return dtype.is_floating_point or dtype.is_complex


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

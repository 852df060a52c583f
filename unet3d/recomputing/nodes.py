"""Questions about the operations of a traced network: what they write, share, draw and return.

Parts of forward without gradients, or in a precision of their own, are marked: torch.export makes graphs of such parts,
and loses that one lies within another; here the marks stay in the graph.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, fx
from torch._export.passes import replace_autocast_with_hop_pass, replace_set_grad_with_hop_pass
from torch._subclasses import fake_tensor
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree

from unet3d.recomputing.graph import DROPOUTS, Value, arguments, gives_view, operation_name
from unet3d.recomputing.refusals import TORCH, refusal

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


SWITCHES_GRADIENTS: Any = torch._C._set_grad_enabled
ENTERS_AUTOCAST: Any = _enter_autocast
LEAVES_AUTOCAST: Any = _exit_autocast
MARKS = (SWITCHES_GRADIENTS, ENTERS_AUTOCAST, LEAVES_AUTOCAST)
SMALL = 64  # numbers of a tensor that torch.export computes where they depend on sizes alone


@contextmanager
def marked() -> Iterator[None]:
    """Let torch.export mark where gradients and autocast are switched, and read what it would not.

    Small tensors that are computed of sizes alone, as those of crops, are known. `tensor.data` is `tensor.detach()`.
    """
    with ExitStack() as patches:
        for passes in (replace_autocast_with_hop_pass, replace_set_grad_with_hop_pass):
            name = passes.__name__.rpartition(".")[2]
            patches.enter_context(mock.patch.object(passes, name, _stays))
        patches.enter_context(mock.patch.object(fake_tensor, "CONSTANT_NUMEL_LIMIT", SMALL))
        patches.enter_context(mock.patch.object(torch.inference_mode, "__enter__", _entered))
        patches.enter_context(_Detached())
        yield


def _stays(module: fx.GraphModule, signature: Any) -> tuple[fx.GraphModule, Any]:
    """Return a graph as it is, in the place of a pass that makes graphs of parts of it."""
    return module, signature


def _entered(mode: torch.inference_mode, enter: Callable[..., None] = torch.inference_mode.__enter__) -> None:
    """Enter inference mode where torch does so, and not where a network does: a trace has no mark of it."""
    frame = sys._getframe(1)
    if frame.f_code.co_name == "decorate_context" and frame.f_back is not None:
        frame = frame.f_back
    if not frame.f_code.co_filename.startswith(TORCH):
        raise RuntimeError("inference_mode")
    enter(mode)


class _Detached(TorchFunctionMode):
    """Lets `tensor.data` be `tensor.detach()`, which torch.export traces."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == Tensor.data.__get__:  # type: ignore[attr-defined]
            return args[0].detach()
        if func == Tensor.data.__set__:  # type: ignore[attr-defined]
            raise RuntimeError(".data =")
        return func(*args, **(kwargs or {}))


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

"""Parts of forward without gradients, or in a precision of their own, as a trace marks them.

torch.export makes graphs of such parts, and loses that one lies within another; here the marks stay in the graph.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, fx
from torch._export.passes import replace_autocast_with_hop_pass, replace_set_grad_with_hop_pass
from torch._subclasses import fake_tensor
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree

from unet3d.recomputing.graph import leaves
from unet3d.recomputing.refusals import TORCH

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
        for leaf in leaves((node.args, tuple(node.kwargs.values()))):
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

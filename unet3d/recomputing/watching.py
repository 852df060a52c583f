"""Refuses, while forward is traced, what a schedule would not repeat.

Functions with a backward of their own, hooks of tensors, gradients taken within forward, numbers of generators that are
not torch's, and all that forward leaves behind.
"""

import functools
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree
from torch.utils.checkpoint import CheckpointFunction

from unet3d.base.errors import UserError
from unet3d.recomputing.readable import code_of, difference, hooked, modules_of, snapshot
from unet3d.recomputing.refusals import TORCH

# Functions whose backward is that of the operations in their forward.
TRACEABLE_FUNCTIONS = ("monai.networks.blocks.activation.SwishImplementation", "unet3d.model.blocks._LeanSwish")
OF_A_TRACE = {"constant", "dispatch_keys", "fake_mode", "pytype", "real_tensor"}  # Attributes of torch's own.
REFUSED_METHODS = ("register_hook", "register_post_accumulate_grad_hook", "retain_grad", "requires_grad_", "backward")


class Watch:
    """A watch over one trace. `cause`: a line about the first thing that a trace cannot carry."""

    def __init__(self, network: nn.Module) -> None:
        self.name = type(network).__name__
        self.cause: str | None = None

    def refuse(self, problem: str, frame: FrameType | None = None) -> None:
        """Raise UserError, and keep the first line, since torch.export may raise another error in its place."""
        place = "" if frame is None else f" (at {frame.f_code.co_filename}:{frame.f_lineno})"
        self.cause = self.cause or f"{self.name}: {problem}{place}"
        raise UserError(self.cause)


@contextmanager
def watched(network: nn.Module) -> Iterator[tuple[nn.Module, Watch]]:
    """Give a twin of a network to trace, and the watch over it.

    The twin shares the network's layers. It has none of the network's own hooks, which run around a pass.
    """
    watch = Watch(network)
    twin = _twin(network)
    forward = twin.forward

    @functools.wraps(forward)
    def checked(*args: Any, **kwargs: Any) -> Any:
        own = [_own_attributes(tensor) for tensor in args if isinstance(tensor, Tensor)]
        with _nothing_left_behind(twin, watch):
            result = forward(*args, **kwargs)
        tensors = [leaf for leaf in (*args, *_pytree.tree_leaves(result)) if isinstance(leaf, Tensor)]
        for name in set().union(*map(_own_attributes, tensors)).difference(*own):
            watch.refuse(
                f"forward sets {name} of the image or of an output, and a schedule would not; return it instead"
            )
        return result

    vars(twin)["forward"] = checked
    with ExitStack() as patches:
        _patch(patches, torch.autograd.Function, "apply", classmethod(_apply(watch)))
        for name in REFUSED_METHODS:
            _patch(patches, Tensor, name, _refused(watch, name, getattr(Tensor, name)))
        _patch(patches, torch.autograd, "grad", _refused(watch, "torch.autograd.grad", torch.autograd.grad))
        for name in ("is_compiling", "is_exporting", "is_dynamo_compiling"):
            _patch(patches, torch.compiler, name, _denied(getattr(torch.compiler, name)))
        hooks = _refused(watch, "saved_tensors_hooks", saved_tensors_hooks.__init__)
        _patch(patches, saved_tensors_hooks, "__init__", hooks)
        yield twin, watch


def _twin(network: nn.Module) -> nn.Module:
    """Return an object of the network's class and state, but without hooks and with the usual call."""
    kind: Any = type(network)
    if kind.__call__ is not nn.Module.__call__:
        kind = type(kind)(kind.__name__, (kind,), {"__call__": nn.Module.__call__, "__module__": kind.__module__})
    twin: nn.Module = object.__new__(kind)
    state = dict(vars(network))
    empty = vars(nn.Module())
    for name in state:
        if name.endswith("_hooks") or "_hooks_" in name:
            state[name] = empty.get(name, state[name])
    forward = state.get("forward")
    if isinstance(forward, MethodType) and forward.__self__ is network:
        state["forward"] = MethodType(forward.__func__, twin)
    object.__setattr__(twin, "__dict__", state)
    return twin


@contextmanager
def _nothing_left_behind(network: nn.Module, watch: Watch) -> Iterator[None]:
    """Refuse a forward pass that changes what it or others could read later."""
    code = code_of(network)
    before = snapshot(network, code)
    held = _tensors_by_path(network)
    python, numpy = random.getstate(), _numpy_state()
    yield
    if random.getstate() != python:
        watch.refuse("forward draws from Python's generator `random`, which a schedule would not; draw with torch")
    if _numpy_state() != numpy:
        watch.refuse("forward draws from NumPy's generator `np.random`, which a schedule would not; draw with torch")
    changed = difference(network, before, snapshot(network, code)) or next(
        (path for path, tensor in _tensors_by_path(network).items() if held.get(path) is not tensor), None
    )
    if changed is not None:
        problem = f"forward changes {changed}, and a schedule would not; let forward return it, and keep it outside"
        watch.refuse(problem)
    hooks = hooked(network)
    if hooks:
        watch.refuse(f"forward adds hooks ({hooks[0]}), which would not run in recompute")


def _own_attributes(tensor: Tensor) -> set[str]:
    """Return the attributes that somebody gave to a tensor, besides those of a trace."""
    return {name for name in vars(tensor) if not name.startswith("_") and not hasattr(type(tensor), name)} - OF_A_TRACE


def _tensors_by_path(network: nn.Module) -> dict[str, Tensor | None]:
    """Return parameters and buffers by their paths."""
    path_of = {module: path for path, module in network.named_modules()}
    tensors = {}
    for module in modules_of(network):
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            tensors[f"{path_of[module]}.{name}".removeprefix(".")] = tensor
    return tensors


def _numpy_state() -> tuple[Any, ...]:
    state: Any = np.random.get_state()
    return state[1].tobytes(), *state[2:]


def _apply(watch: Watch) -> Callable[..., Any]:
    """Return what `torch.autograd.Function.apply` is meanwhile."""
    original = torch.autograd.Function.apply.__func__  # type: ignore[attr-defined]

    def apply(kind: Any, *args: Any, **kwargs: Any) -> Any:
        name = f"{kind.__module__}.{kind.__qualname__}"
        if kind is CheckpointFunction:
            return _call_checkpointed(watch, *args)
        if name not in TRACEABLE_FUNCTIONS:
            problem = f"{name} has a backward of its own, which a trace does not see"
            advice = "compute it by torch's operations, or leave this network to torch.utils.checkpoint"
            watch.refuse(f"{problem}; {advice}", sys._getframe(1))
        return original(kind, *args, **kwargs)

    return apply


def _call_checkpointed(watch: Watch, function: Callable[..., Any], _: bool, *args: Any) -> Any:
    """Return the result of a part that is checkpointed with use_reentrant=True: without it, gradients are the same."""
    if not any(isinstance(argument, Tensor) and argument.requires_grad for argument in args):
        problem = "torch.utils.checkpoint(use_reentrant=True) of what needs no gradient gives its weights none"
        watch.refuse(f"{problem}; give it use_reentrant=False")
    return function(*args)


def _refused(watch: Watch, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of torch's that is refused where a network calls it, and carried out where torch does."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        frame = sys._getframe(1)
        if not frame.f_code.co_filename.startswith(TORCH):
            watch.refuse(f"forward calls {name}, which would not happen again in recompute; leave it out", frame)
        return original(*args, **kwargs)

    return call


def _denied(original: Callable[[], bool]) -> Callable[[], bool]:
    """Return a replacement for `is_compiling` and others: False for code outside of torch."""

    @functools.wraps(original)
    def ask() -> bool:
        return sys._getframe(1).f_code.co_filename.startswith(TORCH) and original()

    return ask


def _patch(patches: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Put a value in the place of an attribute until the stack closes."""
    if name in vars(owner):
        patches.callback(setattr, owner, name, vars(owner)[name])
    else:
        patches.callback(delattr, owner, name)
    setattr(owner, name, value)

"""Traces a network by torch.export, and refuses what a schedule would not repeat.

Functions with a backward of their own, hooks of tensors, gradients taken within forward, numbers of generators that are
not torch's, and all that forward leaves behind are watched for while it is traced.
"""

import functools
import io
import logging
import math
import random
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from types import FrameType, MethodType
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree
from torch.utils.checkpoint import CheckpointFunction

from unet3d.base.errors import UserError, reason
from unet3d.recomputing.exported import Reader
from unet3d.recomputing.function import refuse_hooks
from unet3d.recomputing.graph import Graph
from unet3d.recomputing.nodes import marked
from unet3d.recomputing.readable import code_of, hooked, values_by_path
from unet3d.recomputing.refusals import TORCH, cannot_trace, has_known_cause, place_in_forward, refuse_layers

# What tensors with data do not raise.
WITHOUT_DATA = re.compile(r"fake ?tensor|meta|\.numpy\(\)|data pointer|storage", re.IGNORECASE)
FACTORS = (2, 4, 8, 16, 32, 64)  # of lengths that a network may ask for


def trace(model: nn.Module, image: Tensor) -> Graph:
    """Return the graph of `model(image)` in its present mode, with the sizes of this image.

    Raises UserError where the network cannot be described so, and names the place.
    """
    refuse_hooks(model, with_root=False)
    refuse_layers(model)
    example = image.detach().requires_grad_(image.requires_grad)
    with attributes_stay(model), watched(model) as (twin, watch):
        try:
            with silence(), marked():
                program = torch.export.export(twin, (example,), strict=False)
            return Reader(program, model).graph()
        except UserError:
            raise
        except Exception as error:  # torch.export has no common type of error
            line = watch.cause
            if line is None and not has_known_cause(error):
                line = cannot_take(model, image.shape, image.dtype, image.device)
            raise UserError(line or cannot_trace(model, error)) from error


def cannot_take(
    model: nn.Module, size: Sequence[int], dtype: torch.dtype, device: torch.device | None = None
) -> str | None:
    """Return in a line what the network's own forward raises for images N C D H W of a size and type.

    The line ends with lengths that it takes, where a power of 2 is what these have to be multiples of. None where it
    raises nothing, or where that depends on numbers. Nothing of this has data, and the network stays.
    """
    with silence(), attributes_stay(model), torch.random.fork_rng([]):
        error = _raised(model, size, dtype, device)
        if error is None:
            return None
        image = f"{'x'.join(map(str, size))}, {str(dtype).removeprefix('torch.')}"
        problem = f"{type(model).__name__} cannot take an image of {image}{place_in_forward(error)}: {reason(error)}"
        for factor in FACTORS:
            larger = [*size[:2], *(math.ceil(length / factor) * factor for length in size[2:])]
            if larger != list(size) and _raised(model, larger, dtype, device) is None:
                return f"{problem}; it takes {'x'.join(map(str, larger))}, lengths of multiples of {factor}"
    return problem


def _raised(model: nn.Module, size: Sequence[int], dtype: torch.dtype, device: torch.device | None) -> Exception | None:
    """Return what forward raises for an image, on tensors without data."""
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as fakes:
            fake: dict[str, Tensor] = {name: fakes.from_tensor(tensor) for name, tensor in tensors}
            image = torch.empty(tuple(size), dtype=dtype, device=device)
            torch.func.functional_call(model, fake, (image,))
    except ImportError:
        return None
    except Exception as error:  # A network of others may raise anything.
        is_of_data = type(error).__module__ == FakeTensorMode.__module__ or WITHOUT_DATA.search(str(error))
        return None if is_of_data else error
    return None


@contextmanager
def silence() -> Iterator[None]:
    """Keep torch.export's remarks on what it cannot trace to itself: the error says it."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what forward keeps in the module
            yield
    finally:
        logging.disable(disabled)


@contextmanager
def attributes_stay(model: nn.Module) -> Iterator[None]:
    """Undo what tracing does to attributes that are no parameters: a list that two modules share becomes two."""
    before = [(vars(module), dict(vars(module))) for module in model.modules()]
    lists = [(value, list(value)) for _, known in before for value in known.values() if isinstance(value, list)]
    dicts = [(value, dict(value)) for _, known in before for value in known.values() if isinstance(value, dict)]
    try:
        yield
    finally:
        for attributes, known in [*before, *dicts]:
            attributes.clear()
            attributes.update(known)
        for value, items in lists:
            value[:] = items


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
    hooks = _refused(watch, "saved_tensors_hooks", saved_tensors_hooks.__init__)
    with ExitStack() as patches:

        def patch(owner: Any, name: str, value: Any) -> None:
            patches.enter_context(mock.patch.object(owner, name, value))

        patch(torch.autograd.Function, "apply", classmethod(_apply(watch)))
        for name in REFUSED_METHODS:
            patch(Tensor, name, _refused(watch, name, getattr(Tensor, name)))
        patch(torch.autograd, "grad", _refused(watch, "torch.autograd.grad", torch.autograd.grad))
        for name in ("is_compiling", "is_exporting", "is_dynamo_compiling"):
            patch(torch.compiler, name, _denied(getattr(torch.compiler, name)))
        patch(saved_tensors_hooks, "__init__", hooks)
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
    before = values_by_path(network, code)
    python, numpy = random.getstate(), _numpy_state()
    yield
    if random.getstate() != python:
        watch.refuse("forward draws from Python's generator `random`, which a schedule would not; draw with torch")
    if _numpy_state() != numpy:
        watch.refuse("forward draws from NumPy's generator `np.random`, which a schedule would not; draw with torch")
    now = values_by_path(network, code)
    new_or_gone = [path for path in now | before if path not in before or path not in now]
    for path in (*new_or_gone, *now):
        if before.get(path) != now.get(path):
            problem = f"forward changes {path}, and a schedule would not"
            watch.refuse(f"{problem}; let forward return it, and keep it outside")
    hooks = hooked(network)
    if hooks:
        watch.refuse(f"forward adds hooks ({hooks[0]}), which would not run in recompute")


def _own_attributes(tensor: Tensor) -> set[str]:
    """Return the attributes that somebody gave to a tensor, besides those of a trace."""
    return {name for name in vars(tensor) if not name.startswith("_") and not hasattr(type(tensor), name)} - OF_A_TRACE


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

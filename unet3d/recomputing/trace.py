"""Traces a network by torch.export, and refuses what a schedule would not repeat.

Functions with their own backward, hooks of tensors, gradients taken within forward, numbers of generators that are
not torch's, and all that forward leaves behind are watched for while it is traced. Parts of forward without gradients,
or in another precision, are marked: torch.export makes graphs of such parts, and loses that one lies within another;
here the marks stay in the graph. Lines of refusals name the place in the source.
"""

import functools
import io
import logging
import math
import os
import random
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, MethodType
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._export.passes import replace_autocast_with_hop_pass, replace_set_grad_with_hop_pass
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree
from torch.utils.checkpoint import CheckpointFunction

from unet3d.base.errors import UserError, reason
from unet3d.recomputing.exported import Reader
from unet3d.recomputing.graph import OURS, Graph
from unet3d.recomputing.readable import code_of, modules_of, tensors_of, values_by_path
from unet3d.recomputing.state import only_watches

TORCH = str(Path(torch.__file__).parent) + os.sep
# What tensors with data do not raise.
WITHOUT_DATA = re.compile(r"fake ?tensor|meta|\.numpy\(\)|data pointer|storage", re.IGNORECASE)
FACTORS = (2, 4, 8, 16, 32, 64)  # Multiples of these are lengths that a network may ask for.

# What torch.export says, in parts of its lines, and what that is in words.
CAUSES = (
    (
        "data-dependent",
        "forward branches on a value: what it does depends on the numbers of a tensor, as in `if`, `int()`, an index; "
        "compute with tensors",
    ),
    (".data =", "forward sets .data of a tensor, which recompute would not repeat; change it outside of forward"),
    ("inference_mode", "forward enters torch.inference_mode(); use torch.no_grad() there"),
    (".numpy()", "forward gives a tensor to NumPy; compute with torch"),
    ("in output, which is not a known type", "forward returns {0}; return a tensor, or a list, tuple or dict of them"),
    (
        "fake tensor in the exported program constant's list",
        "forward reads a tensor that is neither a parameter nor a buffer; let register_buffer keep it",
    ),
    ("One of the differentiated Tensors does not require grad", "forward takes gradients by itself"),
)


def trace(model: nn.Module, image: Tensor) -> Graph:
    """Return the graph of `model(image)` in its present mode, with the sizes of this image.

    Raises UserError where the network cannot be described so, and names the place.
    """
    refuse_hooks(model, with_root=False)
    refuse_layers(model)
    example = image.detach().requires_grad_(image.requires_grad)
    with unseen(model, image.device), watched(model) as (twin, watch):
        try:
            with marked():
                program = torch.export.export(twin, (example,), strict=False)
            return Reader(program, model).graph()
        except UserError:
            raise
        except Exception as error:  # torch.export has no common type of error.
            names = re.findall(r"<class '([^']*)'>", str(error)) or ["an object of its own"]
            problem = next((cause.format(*names) for part, cause in CAUSES if part in str(error)), None)
            line = watch.cause
            if line is None and problem is None:
                line = cannot_take(model, image.shape, image.dtype, image.device)
                first = next(filter(str.strip, str(error).splitlines()), type(error).__name__).strip()
                problem = f"{first}; use torch.utils.checkpoint on its children instead"
            name = type(model).__name__
            raise UserError(line or f"{name} cannot be traced{_place_in_forward(error)}: {problem}") from error


def _place_in_forward(error: BaseException) -> str:
    """Return the line at which an error left the network's own code, in words."""
    place = ""
    is_within = False
    frame = error.__traceback__
    while frame is not None:
        code = frame.tb_frame.f_code
        is_within = is_within or (code.co_name == "forward" and not code.co_filename.startswith((TORCH, OURS)))
        if is_within and not code.co_filename.startswith((TORCH, OURS)):
            place = f" at {code.co_filename}:{frame.tb_lineno}"
        frame = frame.tb_next
    return place


def cannot_take(
    model: nn.Module, size: Sequence[int], dtype: torch.dtype, device: torch.device | None = None
) -> str | None:
    """Return in a line what the network's own forward raises for images N C D H W of a size and type.

    The line ends with lengths that it takes, where a power of 2 is what these have to be multiples of. None where it
    raises nothing, or where that depends on numbers. Nothing of this has data, and the network stays.
    """
    with unseen(model):
        error = _raised(model, size, dtype, device)
        if error is None:
            return None
        image = f"{'x'.join(map(str, size))}, {str(dtype).removeprefix('torch.')}"
        problem = f"{type(model).__name__} cannot take an image of {image}{_place_in_forward(error)}: {reason(error)}"
        for factor in FACTORS:
            larger = [*size[:2], *(math.ceil(length / factor) * factor for length in size[2:])]
            if larger != list(size) and _raised(model, larger, dtype, device) is None:
                return f"{problem}; it takes {'x'.join(map(str, larger))}, lengths of multiples of {factor}"
    return problem


def _raised(model: nn.Module, size: Sequence[int], dtype: torch.dtype, device: torch.device | None) -> Exception | None:
    """Return what forward raises for an image, on tensors without data."""
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as fakes:
            fake: dict[str, Tensor] = {name: fakes.from_tensor(tensor) for name, tensor in tensors_of(model).items()}
            image = torch.empty(tuple(size), dtype=dtype, device=device)
            torch.func.functional_call(model, fake, (image,))
    except ImportError:
        return None
    except Exception as error:  # A network of others may raise anything.
        is_of_data = type(error).__module__ == FakeTensorMode.__module__ or WITHOUT_DATA.search(str(error))
        return None if is_of_data else error
    return None


@contextmanager
def unseen(model: nn.Module, device: torch.device | None = None) -> Iterator[None]:
    """Let nobody see that forward runs again: what it says, draws, or does to attributes that are no parameters.

    Also what torch.export remarks on what it cannot trace, since the error says it, and that it makes two of a list
    which two modules share.
    """
    nothing = io.StringIO()
    devices = [device] if device is not None and device.type == "cuda" else []
    disabled = logging.root.manager.disable
    of_python, of_numpy = random.getstate(), np.random.get_state()
    before = [(vars(module), dict(vars(module))) for module in model.modules()]
    values = [value for _, known in before for value in known.values()]
    lists = [(value, list(value)) for value in values if isinstance(value, list)]
    dicts = [(value, dict(value)) for value in values if isinstance(value, dict)]
    logging.disable(logging.CRITICAL)
    try:
        with (
            redirect_stdout(nothing),
            redirect_stderr(nothing),
            warnings.catch_warnings(action="ignore"),
            torch.random.fork_rng(devices),
        ):
            yield
    finally:
        logging.disable(disabled)
        random.setstate(of_python)
        np.random.set_state(of_numpy)
        for attributes, known in [*before, *dicts]:
            attributes.clear()
            attributes.update(known)
        for value, items in lists:
            value[:] = items


# What runs around modules, which a schedule does not call

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
NORMS_BY_HOOKS = {"SpectralNorm": "spectral_norm", "WeightNorm": "weight_norm"}


def hooked(network: nn.Module) -> Iterator[tuple[str, str, Mapping[int, Any]]]:
    """Yield the hooks of modules: a module's path, empty for the network itself, and the kind; observers' are none.

    Hooks of all modules that there are count, too.
    """
    for owner in (*modules_of(network), nn.modules.module):
        of_all = "_global" if owner is nn.modules.module else ""
        attributes = vars(owner)
        for kind in HOOKS:
            hooks = attributes[of_all + kind]
            if hooks and not all(map(only_watches, hooks.values())):
                paths = (path for path, module in network.named_modules() if module is owner)
                yield next(paths, "all modules"), kind[1:], hooks


def refuse_hooks(model: nn.Module, with_root: bool = True) -> None:
    """Raise UserError if a module has hooks that would not run, since a schedule does not call modules.

    `with_root`: the network itself is not called either, so that its own hooks and its own `__call__` count.
    """
    name = type(model).__name__
    for path, kind, hooks in hooked(model):
        for hook in hooks.values():
            norm = NORMS_BY_HOOKS.get(type(hook).__name__)
            if norm is not None:
                problem = f"{path}: torch.nn.utils.{norm} works by a hook, which would not run in recompute"
                raise UserError(f"{problem}; use torch.nn.utils.parametrizations.{norm}")
        if path or with_root:
            problem = f"{path or name}: {kind} would not run in recompute"
            raise UserError(f"{problem}; remove them, or put what they do into forward")
    if with_root and type(model).__call__ is not nn.Module.__call__:
        raise UserError(f"{name}: its own __call__ would not run in recompute; put what it does into forward")


def refuse_layers(model: nn.Module) -> None:
    """Raise UserError for layers that a trace or a schedule cannot follow.

    Those are tensors in the place of parameters, since torch.export takes none there; running statistics whose weights
    are counted, since a trace would keep the count of its pass; and, over several ranks, normalisations that exchange
    statistics, since a schedule makes them again.
    """
    has_others = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    for path, module in model.named_modules():
        where = path or type(model).__name__
        for name, parameter in module._parameters.items():
            if parameter is not None and not isinstance(parameter, nn.Parameter):
                fault = "is a plain tensor in the place of a parameter, as functional_call puts it there"
                name = f"{path}.{name}".removeprefix(".")
                raise UserError(f"{name} {fault}; call the network without recompute so")
        if has_others and isinstance(module, nn.SyncBatchNorm) and module.training:
            fault = "SyncBatchNorm would exchange statistics between ranks again in recompute"
            raise UserError(f"{where}: {fault}; train with BatchNorm, InstanceNorm or GroupNorm")
        is_counted = isinstance(module, nn.modules.batchnorm._BatchNorm) and module.momentum is None
        if is_counted and module.training and module.track_running_stats:
            fault = "averages by the number of passes, which a schedule would not know"
            raise UserError(f"{where}: {type(module).__name__} with momentum=None {fault}; set its momentum, as 0.1")


# Functions whose backward is that of the operations in their forward.
TRACEABLE_FUNCTIONS = ("monai.networks.blocks.activation.SwishImplementation", "unet3d.model.blocks._LeanSwish")
OF_A_TRACE = {"constant", "dispatch_keys", "fake_mode", "pytype", "real_tensor"}  # Attributes of torch's own.
METHODS = ("register_hook", "register_post_accumulate_grad_hook", "retain_grad", "requires_grad_", "backward")
# Functions that are refused where a network calls them, by owner and attribute.
REFUSED: dict[str, tuple[Any, str]] = {
    **{name: (Tensor, name) for name in METHODS},
    "torch.autograd.grad": (torch.autograd, "grad"),
    "saved_tensors_hooks": (saved_tensors_hooks, "__init__"),
}


@dataclass
class Watch:
    """A watch over one trace of a network of this class."""

    name: str
    cause: str | None = None  # a line about the first thing that a trace cannot carry

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
    watch = Watch(type(network).__name__)
    twin = without_hooks(network)
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

        def patch(owner: Any, name: str, value: Any) -> None:
            patches.enter_context(mock.patch.object(owner, name, value))

        patch(torch.autograd.Function, "apply", classmethod(_apply(watch)))
        for what, (owner, name) in REFUSED.items():
            patch(owner, name, _refused(watch, what, getattr(owner, name)))
        for name in ("is_compiling", "is_exporting", "is_dynamo_compiling"):
            patch(torch.compiler, name, _denied(getattr(torch.compiler, name)))
        yield twin, watch


def without_hooks(network: nn.Module) -> nn.Module:
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
    for path, kind, _ in hooked(network):
        watch.refuse(f"forward adds hooks ({path or watch.name}: {kind}), which would not run in recompute")


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
            function, _, *inputs = args
            if not any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in inputs):
                problem = "torch.utils.checkpoint(use_reentrant=True) of what needs no gradient gives its weights none"
                watch.refuse(f"{problem}; give it use_reentrant=False")
            return function(*inputs)  # Without checkpoint, gradients are the same.
        if name not in TRACEABLE_FUNCTIONS:
            problem = f"{name} has its own backward, which a trace does not see"
            advice = "compute it by torch's operations, or leave this network to torch.utils.checkpoint"
            watch.refuse(f"{problem}; {advice}", sys._getframe(1))
        return original(kind, *args, **kwargs)

    return apply


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


SMALL = 64  # numbers of a tensor that torch.export computes where they depend on sizes alone


@contextmanager
def marked() -> Iterator[None]:
    """Let torch.export mark where gradients and autocast are switched, and read what it would not.

    Small tensors that are computed of sizes alone, as those of crops, are known. `tensor.data` is `tensor.detach()`.
    """
    with ExitStack() as patches:
        for passes in (replace_autocast_with_hop_pass, replace_set_grad_with_hop_pass):
            name = passes.__name__.rpartition(".")[2]
            # Without the pass, parts of the graph stay in it.
            patches.enter_context(mock.patch.object(passes, name, lambda module, signature: (module, signature)))
        patches.enter_context(mock.patch.object(fake_tensor, "CONSTANT_NUMEL_LIMIT", SMALL))
        patches.enter_context(mock.patch.object(torch.inference_mode, "__enter__", _entered))
        patches.enter_context(_Detached())
        yield


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

"""Refuse a network that a pass in slabs has no exact rules for, before the first step.

Slabs never call a module: `slab_run` computes what the package's own U-Net computes, by the rules of `rows`. So every
module must stand where `slab_run` visits it, be of exactly a known type, and carry nothing that its call would run too.
Methods and functions that others have replaced are known by the file of their code. Errors name the first such part.
"""

import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as of_all_modules
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from unet3d.base.errors import UserError
from unet3d.model import blocks
from unet3d.model.blocks import DoubleConv, Down, Inc, LeanSwish, OutConv, Swish, Up
from unet3d.model.geometry import ONES
from unet3d.model.unet import UNet3D
from unet3d.training import slabs

ZEROS = (0, 0, 0)
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
PLAIN = (nn.Parameter.__torch_function__, Tensor.__torch_function__)  # of tensors that compute nothing of their own
Attributes = Mapping[str, Callable[[Any], bool]]  # attribute of a layer: whether its value has a rule

WEIGHTS = ("weight", "bias")
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
CONVOLUTION: Attributes = {
    "padding_mode": lambda layer: layer.padding_mode == "zeros",
    "dilation": lambda layer: layer.dilation == ONES,
    "groups": lambda layer: layer.groups == 1,
}
AFFINE: Attributes = {"bias": lambda layer: (layer.bias is None) == (layer.weight is None)}


def _pads_less_than_kernel(layer: nn.Conv3d) -> bool:
    """Return whether the padding is of whole numbers, each less than the kernel's length."""
    for padding, length in zip(layer.padding, layer.kernel_size, strict=False):
        if type(padding) is not int or padding >= length:
            return False
    return True


def _has_whole_scale(layer: nn.Upsample) -> bool:
    """Return whether the scale is one whole number per axis."""
    factors = layer.scale_factor
    return isinstance(factors, tuple) and all(factor == int(factor) for factor in factors)


def _has_statistics_as_told(layer: nn.BatchNorm3d) -> bool:
    """Return whether a layer has running statistics exactly if it tracks them."""
    return all((getattr(layer, name) is not None) == layer.track_running_stats for name in STATISTICS)


LAYERS: dict[Any, Attributes] = {  # the types that `rows` has a rule for
    nn.Conv3d: {
        **CONVOLUTION,
        "kernel_size": lambda layer: layer.kernel_size == layer.weight.shape[2:],
        "padding": _pads_less_than_kernel,
    },
    nn.ConvTranspose3d: {
        **CONVOLUTION,
        "kernel_size": lambda layer: layer.kernel_size == layer.stride == layer.weight.shape[2:],
        "padding": lambda layer: layer.padding == ZEROS,
        "output_padding": lambda layer: layer.output_padding == ZEROS,
    },
    nn.MaxPool3d: {
        "kernel_size": lambda layer: isinstance(layer.kernel_size, tuple) and layer.kernel_size == layer.stride,
        "padding": lambda layer: layer.padding in (0, ZEROS),
        "dilation": lambda layer: layer.dilation in (1, ONES),
        "return_indices": lambda layer: not layer.return_indices,
    },
    nn.Upsample: {
        "mode": lambda layer: layer.mode in ("nearest", "trilinear"),
        "align_corners": lambda layer: not layer.align_corners,
        "size": lambda layer: layer.size is None,
        "scale_factor": _has_whole_scale,
        "recompute_scale_factor": lambda layer: not layer.recompute_scale_factor,
    },
    nn.InstanceNorm3d: {**AFFINE, "track_running_stats": lambda layer: not layer.track_running_stats},
    nn.BatchNorm3d: {
        **AFFINE,
        "momentum": lambda layer: layer.momentum is not None,
        "track_running_stats": _has_statistics_as_told,
    },
    nn.GroupNorm: AFFINE,
    nn.ReLU: {},
    nn.LeakyReLU: {"negative_slope": lambda layer: layer.negative_slope >= 0},
    nn.PReLU: {},
    nn.SiLU: {},
    Swish: {},
    LeanSwish: {},
    nn.Dropout3d: {},
}
TENSORS = {  # the only ones that a layer may have
    **dict.fromkeys((nn.Conv3d, nn.ConvTranspose3d, nn.InstanceNorm3d, nn.GroupNorm, nn.PReLU), WEIGHTS),
    nn.BatchNorm3d: WEIGHTS + STATISTICS,
}
USED_ONCE = (nn.InstanceNorm3d, nn.BatchNorm3d, nn.GroupNorm, nn.Dropout3d)  # a pass keeps statistics or a mask of each


@dataclass(frozen=True)
class Place:
    """A place in the network, for a module of one of these types, with these children if it is no layer."""

    types: tuple[type, ...]
    children: Mapping[str, "Place"] = field(default_factory=dict)
    is_optional: bool = False


CONV = Place((nn.Conv3d,))
HEAD = Place((nn.Conv3d,), is_optional=True)
ACT = Place((nn.ReLU, nn.LeakyReLU, nn.PReLU, nn.SiLU, Swish, LeanSwish), is_optional=True)
NORM = Place((nn.InstanceNorm3d, nn.BatchNorm3d, nn.GroupNorm), is_optional=True)
DROPOUT = Place((nn.Dropout3d,), is_optional=True)
UNIT = Place((nn.Sequential,), {"conv": CONV, "norm": NORM, "act": ACT, "dropout": DROPOUT})
BLOCK = Place((DoubleConv,), {"conv1": UNIT, "conv2": UNIT, "act": ACT, "project": HEAD})
POOL = Place((nn.MaxPool3d,), is_optional=True)
UPSAMPLER = Place((nn.ConvTranspose3d, nn.Sequential), {"reduce": HEAD, "interpolate": Place((nn.Upsample,))})
INC = Place((Inc,), {"block": BLOCK})
DOWN = Place((Down,), {"pool": POOL, "block": BLOCK})
UP = Place((Up,), {"up": UPSAMPLER, "block": BLOCK, "head": HEAD})
LAST_UP = Place((Up,), {"up": UPSAMPLER, "block": BLOCK})  # its head is outc
OUTC = Place((OutConv,), {"conv": CONV})
CONTAINERS: tuple[Any, ...] = (UNet3D, Inc, Down, Up, OutConv, DoubleConv, nn.Sequential)
FORWARD = {kind: kind.forward for kind in (*CONTAINERS, *LAYERS)}  # the code that the rules are made for
CALL = ("__call__", "_call_impl", "_wrapped_call_impl", "__getattr__")  # methods of all modules that a call runs
NO_PART_OF_A_CALL = ("__init__", "reset_parameters", "reset_running_stats", "extra_repr", "__repr__")
FUNCTIONS: dict[ModuleType, tuple[str, ...]] = {  # that the layers' own forwards call
    blocks: ("join", "crop"),
    F: (
        *("conv3d", "conv_transpose3d", "max_pool3d", "interpolate", "instance_norm", "batch_norm", "group_norm"),
        *("relu", "relu_", "leaky_relu", "leaky_relu_", "prelu", "silu", "dropout3d"),
    ),
    torch: ("cat", "sigmoid", "instance_norm", "batch_norm", "group_norm", "relu", "feature_dropout"),
}
SOURCES = (  # folders of torch and of this package, as their code names them
    f"{Path(nn.Module.add_module.__code__.co_filename).parents[2]}{os.sep}",
    f"{Path(__file__).parents[1]}{os.sep}",
)


def refuse_unknown(model: nn.Module, way: str) -> None:
    """Raise UserError with the first part of a network for which `way`, lean or slab, has no exact rule."""
    part = next(_without_rule(model), None)
    if part is not None:
        advice = f"use ckpt=auto in place of {way}, or add a rule as docs/extending.md says"
        raise UserError(f"{way}: no exact rule for {part}; {advice}")


def _without_rule(model: nn.Module) -> Iterator[str]:
    """Yield the parts of a network that have no rule."""
    if any(getattr(of_all_modules, f"_global{name}") for name in HOOKS):
        yield "a hook of all modules"
    if type(model) is not UNet3D:
        yield f"a network of type {type(model).__name__}"
        return
    paths: dict[nn.Module, str] = {}
    yield from _walk("the network", model, _network(depth=len(model.options.features)), paths)
    types = {parameter.dtype: name for name, parameter in model.named_parameters()}
    if len(types) > 1:
        examples = [f"{name} is {dtype}" for dtype, name in types.items()]
        yield f"weights of several types: {', '.join(examples)}"
    yield from _replaced()


def _network(depth: int) -> Place:
    """Return the place of a whole U-Net with this many levels."""
    below = range(1, depth)
    stages = {"inc": INC}
    for level in below:
        stages[f"down{level}"] = DOWN
    for level in below:
        stages[f"up{level}"] = UP
    if below:
        stages[f"up{below[-1]}"] = LAST_UP
    stages["outc"] = OUTC
    return Place((UNet3D,), stages)


def _walk(path: str, module: nn.Module, place: Place, paths: dict[nn.Module, str]) -> Iterator[str]:
    """Yield what has no rule in the module at `path` and in its children; `paths` has the modules before it."""
    kind = type(module)
    if kind not in place.types:
        yield f"{path} ({kind.__module__}.{kind.__qualname__})"
        return
    for fault in _attached(module):
        yield f"{path} ({kind.__name__} {fault})"
    if kind in USED_ONCE and module in paths:
        yield f"{path} ({kind.__name__} that is {paths[module]}, too)"
    paths[module] = path
    for name, has_rule in LAYERS.get(kind, {}).items():
        if not has_rule(module):
            yield f"{path} ({kind.__name__} with {name}={getattr(module, name)})"
    places = {} if kind in LAYERS else place.children
    children = {name: child for name, child in module._modules.items() if child is not None}
    prefix = "" if kind is UNet3D else f"{path}."
    for name, child in children.items():
        if name not in places:
            yield f"{prefix}{name} ({type(child).__name__})"
    for name, child_place in places.items():
        if name not in children and not child_place.is_optional:
            yield f"{path} without {name}"
            return
    known = [name for name in places if name in children]
    if isinstance(module, nn.Sequential) and known != list(children):
        yield f"{path} with the order {', '.join(children)}"
    for name in known:
        yield from _walk(f"{prefix}{name}", children[name], places[name], paths)


def _attached(module: nn.Module) -> Iterator[str]:
    """Yield what a call of the module would run, or use, beside its type's own forward."""
    kind: Any = type(module)
    if kind.forward is not FORWARD[kind]:
        yield "whose class has another forward"
    for name in vars(module):
        if callable(getattr(kind, name, None)):
            yield f"with a {name} of its own"
    for name in HOOKS:
        if not all(map(slabs.only_watches, getattr(module, name).values())):
            yield f"with hooks in {name}"
    tensors = module._parameters | module._buffers
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if name not in TENSORS.get(kind, ()):
            yield f"with {name}"
        elif not tensor.is_leaf:
            yield f"with {name} that is computed from others"
        elif any(getattr(tensor, hooks, None) for hooks in TENSOR_HOOKS):
            yield f"with hooks of {name}"
        elif type(tensor).__torch_function__ not in PLAIN:
            yield f"with {name} of type {type(tensor).__name__}"
    for name in TENSORS.get(kind, ()):
        if name in vars(module):  # a tensor that a hook makes anew
            yield f"with {name} that is no parameter"


def _replaced() -> Iterator[str]:
    """Yield methods, functions and modes by which a call of the network would run code of others."""
    for owner in _module_classes():
        called = CALL if owner is nn.Module else vars(owner).keys() - NO_PART_OF_A_CALL
        for name in sorted(called):
            method = vars(owner).get(name)
            if callable(method) and not _is_original(method):
                yield f"a {owner.__name__}.{name} that is not its own"
    for module, names in FUNCTIONS.items():
        for name in names:
            if not _is_original(getattr(module, name)):
                yield f"a {module.__name__}.{name} that is not its own"
    for mode in _get_current_function_mode_stack():
        if not _is_original(type(mode).__torch_function__):
            yield f"the torch function mode {type(mode).__name__}"
    for mode in _get_current_dispatch_mode_stack():
        dispatch = inspect.unwrap(type(mode).__torch_dispatch__)  # torch wraps it
        if not isinstance(mode, slabs.Observer) and not _is_original(dispatch):
            yield f"the torch dispatch mode {type(mode).__name__}"


def _module_classes() -> list[Any]:
    """Return the known types of modules and the classes that they inherit from, once each."""
    classes: list[Any] = []
    for kind in FORWARD:
        for base in kind.__mro__:
            if issubclass(base, nn.Module) and base not in classes:
                classes.append(base)
    return classes


def _is_original(function: Any) -> bool:
    """Return whether a function's code is torch's, whose modes watch or have no data, or this package's."""
    function = getattr(function, "__func__", function)  # of a class's or a static method
    if isinstance(function, FunctionType):
        return function.__code__.co_filename.startswith(SOURCES)
    return isinstance(function, BuiltinFunctionType)

"""Run real code on tensors that have shapes but no data.

A `DryTensor` is a tensor of torch's meta device with the dispatch keys of the CPU: autograd and autocast treat it as
the CPU's, kernels only compute shapes. An operation on shapes that came before is not computed again. torch's own
FakeTensorMode serves more programs, takes several times as long, and loads torch's compiler.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._decomp import decomposition_table, decompositions, meta_table
from torch.utils._python_dispatch import TorchDispatchMode

from unet3d.eager import stay_eager
from unet3d.memory.ledger import CONVOLUTIONS, DEVICE, tensors

aten = torch.ops.aten
CPU, META = torch.device("cpu"), torch.device("meta")
NORMALISATIONS = (aten.native_batch_norm.default, aten.native_group_norm.default)
LIFTS = (aten.lift_fresh.default, aten.lift_fresh_copy.default)


@contextmanager
def dry() -> Iterator[None]:
    """Tensors made inside occupy nothing; reading a number out of one gives 0, or what is known of it."""
    stay_eager()
    with Dry():
        yield


class DryTensor(Tensor):
    """Its storage has a size and no memory."""

    known: Tensor | None = None  # the value of a number that does not depend on data: Adam's count of steps

    @staticmethod
    def __new__(cls, meta: Tensor, known: Tensor | None = None) -> "DryTensor":
        made: DryTensor = Tensor._make_subclass(cls, meta, False, dispatch_device=True, device_for_backend_keys=CPU)
        torch._C._set_throw_on_mutable_data_ptr(made)  # reading its data would end the process
        if known is not None:
            made.known = known
        return made

    def __init__(self, *_: Any) -> None:
        super().__init__()

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return META if torch._C._meta_in_tls_dispatch_include() else CPU

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is DEVICE:
            return args[0].device
        with Dry():
            return func(*args, **(kwargs or {}))

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


class Dry(TorchDispatchMode):
    """Computes shapes, and what is known.

    `.item()` gives 0 for what is not known (a loss of 0, no overflow found). The statistics that normalisation saves
    are float32 if its parameters are, also for half-precision maps, whose gradients are of their own type.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch loads its compiler, to keep it away from here

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is DEVICE:
            return args[0].device
        if func is aten._local_scalar_dense.default:
            value = args[0].known
            return args[0].dtype.is_floating_point * 0.0 if value is None else value.item()
        if func.namespace == "profiler":
            return func(*args, **kwargs)
        if func in LIFTS and type(args[0]) is Tensor:
            return _lifted(args[0])
        known, change = _known(func, args, kwargs), _change(func)
        made = _remembered(func, args, kwargs) if change is None else change(args)
        return made if known is None else _know(made, known)


class Like(NamedTuple):
    """A new tensor of an operation that was seen before."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


_seen: dict[Any, Any] = {}  # what operations made of arguments like these: Like, None, or a tuple of them


@cache
def _change(func: Any) -> Callable[[Any], Any] | None:
    """What an operation returns that only changes values in place; None for another."""
    given, made = func._schema.arguments, func._schema.returns
    if not func._schema.is_mutable or torch.Tag.inplace_view in func.tags:
        return None
    if not made:
        return lambda args: None
    changed = [one.alias_info is not None and one.alias_info.is_write for one in (given[0], *made)]
    return itemgetter(0) if changed == [True, True] else None


def _remembered(func: Any, args: Any, kwargs: Any) -> Any:
    has_no_say = torch.Tag.pointwise in func.tags  # a number, in the result's shape
    key = func, torch.get_default_dtype(), _like(args, has_no_say), _like(tuple(kwargs.items()), has_no_say)
    if key in _seen:
        return _again(_seen[key])
    with Dry():  # what is within asks for the device
        made = _corrected(func, args, _shaped(func, args, kwargs))
    if all(_is_new(one, args) for one in (made if isinstance(made, list | tuple) else (made,))):
        _seen[key] = _like(made, has_no_say)
    return made


def _like(tree: Any, has_no_say: bool) -> Any:
    """What decides the result of an operation; for numbers also their type, as 1 == 1.0."""
    if isinstance(tree, Tensor):
        return Like(tree.shape, tree.stride(), tree.dtype)
    if isinstance(tree, list | tuple):
        return tuple(_like(part, has_no_say) for part in tree)
    if isinstance(tree, float) and has_no_say:
        return float
    return (type(tree), tree) if isinstance(tree, int | float) else tree


def _is_new(made: Any, args: Any) -> bool:
    """Whether an operation made a tensor that fills a storage of its own, or nothing."""
    if not isinstance(made, Tensor):
        return made is None
    own, like = made.untyped_storage(), Like(made.shape, made.stride(), made.dtype)
    is_shared = any(own._cdata == tensor.untyped_storage()._cdata for tensor in tensors(args))
    return not is_shared and own.nbytes() == _new(like).untyped_storage().nbytes()


def _again(recipe: Any) -> Any:
    if isinstance(recipe, Like):
        return DryTensor(_new(recipe))
    return recipe if recipe is None else tuple(map(_again, recipe))


def _new(like: Like) -> Tensor:
    return torch.empty_strided(like.shape, like.stride, dtype=like.dtype, device=META)


def _shaped(func: Any, args: Any, kwargs: Any) -> Any:
    """What the operation makes, as torch's kernels for the meta device or its decompositions tell."""
    if (parts := _parts(func)) is not None:
        return parts(*args, **kwargs)
    if _takes_a_device(func):
        kwargs = {**kwargs, "device": META}
    with shapes_alone():
        made = func(*args, **kwargs)
    return _wrapped(_laid_out(made, args) if func in CONVOLUTIONS else made)


@contextmanager
def shapes_alone() -> Iterator[None]:
    """Operations on dry tensors go to the kernels of the meta device."""
    with torch._C._DisableTorchDispatch(), torch._C._PreserveDispatchKeyGuard():
        torch._C._set_meta_in_tls_dispatch_include(True)
        yield


@cache
def _parts(func: Any) -> Callable[..., Any] | None:
    """The operation in terms of others, where FakeTensorMode would choose that; these may ask for the device."""
    if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
        return partial(func.decompose)
    if func in meta_table or func not in decomposition_table:
        return None
    found: Callable[..., Any] = decomposition_table[func]
    is_parts = found.__module__.startswith("torch._decomp") and hasattr(decompositions, found.__name__)
    return found if is_parts else None


@cache
def _takes_a_device(func: Any) -> bool:
    return any(argument.name == "device" and argument.kwarg_only for argument in func._schema.arguments)


def _lifted(real: Tensor) -> DryTensor:
    """A tensor that `torch.tensor` made of numbers; the value of a single one stays known."""
    like = Like(real.shape, real.stride(), real.dtype)
    return DryTensor(_new(like), real.clone() if real.numel() == 1 else None)


def _known(func: Any, args: Any, kwargs: Any) -> Any:
    """The result of an operation on known numbers alone; what is written with others is known no more."""
    given = [tensor for tensor in tensors((args, kwargs)) if isinstance(tensor, DryTensor)]
    if all(tensor.known is None for tensor in given):
        return None
    if all(tensor.known is not None for tensor in given) and torch.Tag.nondeterministic_seeded not in func.tags:
        return func(*_values(args), **{name: _values(value) for name, value in kwargs.items()})
    if func._schema.is_mutable:
        for tensor in given:
            tensor.known = None
    return None


def _values(tree: Any) -> Any:
    if isinstance(tree, DryTensor):
        return tree.known
    return type(tree)(map(_values, tree)) if isinstance(tree, list | tuple) else tree


def _know(made: Any, known: Any) -> Any:
    if isinstance(made, list | tuple):
        return type(made)(map(_know, made, known))
    if isinstance(made, DryTensor) and known.numel() == 1:
        made.known = known
    return made


def _wrapped(made: Any) -> Any:
    if type(made) is Tensor:
        return DryTensor(made)
    return tuple(map(_wrapped, made)) if isinstance(made, list | tuple) else made


def _laid_out(made: Any, args: Any) -> Any:
    """A convolution's results with the strides that its kernel on the CPU would choose."""
    is_forward = isinstance(made, Tensor)
    image, weight = args[:2] if is_forward else args[1:3]
    names = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")
    options = dict(zip(names, args[3:9] if is_forward else args[4:10], strict=True))
    sizes = {"bias": args[2]} if is_forward else {"bias": None, "bias_sizes": args[3]}
    backend = torch._C._select_conv_backend(image, weight, **options, **sizes)
    layout = torch._C._conv_determine_backend_memory_format(image, weight, backend)
    if is_forward:
        return made.to(memory_format=layout)
    return (*(one if one is None else one.to(memory_format=layout) for one in made[:2]), made[2])


def _corrected(func: Any, args: Any, made: Any) -> Any:
    if func in NORMALISATIONS and args[1] is not None:
        output, mean, inverse_std = made
        return output, mean.to(args[1].dtype), inverse_std.to(args[1].dtype)
    if func is aten.native_group_norm_backward.default and made[0] is not None:
        return made[0].to(args[1].dtype), *made[1:]
    return made

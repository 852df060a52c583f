"""What operations give on tensors without data, quickly, and as kernels give it on real ones.

A fake mode looks for an operation in its cache, by a key made from all that its tensors have. Views, copies and sums do
not need that: their kernels for meta tensors are compiled, take microseconds and say all of a result.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager
from torch.utils._python_dispatch import TorchDispatchMode

CPU = torch.device("cpu")
DEVICE = torch.ops.prim.device.default  # Called for fake tensors only.


def _operations(names: str) -> set[Any]:
    """Return operations of torch by their names, each with the arguments that come after the dot."""
    return {attrgetter(name if "." in name else f"{name}.default")(torch.ops.aten) for name in names.split()}


COMPILED = _operations(
    "_to_copy _unsafe_view add_.Tensor alias cat clone constant_pad_nd copy_ detach empty_like expand full_like "
    "mul_.Tensor new_empty new_empty_strided new_zeros repeat select.int slice.Tensor split_with_sizes sum.dim_IntList "
    "unsqueeze view zero_"
)
# Operations whose meta kernels are not compiled: of tensors of one kind they give one more of it, as `clone` does.
ELEMENTWISE = _operations("_foreach_add.List add.Tensor addcmul leaky_relu leaky_relu_backward mul.Tensor")
# Operations that give the tensor that they write over, by the name of it if it is not the first.
WRITTEN = {
    torch.ops.aten.addcmul.out: "out",
    torch.ops.aten.leaky_relu_.default: None,
    torch.ops.aten.leaky_relu_backward.grad_input: "grad_input",
}
WRITTEN_LISTS = _operations("_foreach_add_.List _foreach_copy_")  # They give nothing.
CLONE = torch.ops.aten.clone.default
NEW_EMPTY = torch.ops.aten.new_empty.default
EMPTY_LIKE = torch.ops.aten.empty_like.default
TO_COPY = torch.ops.aten._to_copy.default
# Has no meta kernel: a fake mode would carry it out on real numbers, in memory as large as the map.
UPDATE_STATISTICS = torch.ops.aten.batch_norm_update_stats.default
# A fake mode decomposes them into a dozen operations.
NORMALISE = torch.ops.aten.native_batch_norm.default
NORMALISE_BACKWARD = torch.ops.aten.native_batch_norm_backward.default
OPERATIONS = COMPILED | ELEMENTWISE | {*WRITTEN} | WRITTEN_LISTS | {UPDATE_STATISTICS, NORMALISE, NORMALISE_BACKWARD}
# Normalisations, and which of their arguments is the weight: what they save has its type, also of half-precision maps.
WEIGHT_OF = {
    NORMALISE: 1,
    torch.ops.aten.native_group_norm.default: 1,
    torch.ops.aten.native_layer_norm.default: 2,
}
LAYER_NORM_BACKWARD = torch.ops.aten.native_layer_norm_backward.default
GROUP_NORM_BACKWARD = torch.ops.aten.native_group_norm_backward.default


def run(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return what an operation gives real tensors, within a fake mode: by its meta kernel where that is enough."""
    if func is DEVICE and isinstance(args[0], FakeTensor):
        return args[0].fake_device
    if func is UPDATE_STATISTICS and isinstance(args[0], FakeTensor):
        _, running_mean, running_variance, _ = args
        return run(EMPTY_LIKE, [running_mean], {}), run(EMPTY_LIKE, [running_variance], {})
    if func not in OPERATIONS or not _are_plain(args, kwargs):
        return _corrected(func, args, func(*args, **kwargs))
    if func is NORMALISE or func is NORMALISE_BACKWARD:
        return _normalised(func, args)
    if func in WRITTEN:
        name = WRITTEN[func]
        return args[0] if name is None else kwargs[name]
    if func in WRITTEN_LISTS:
        return None
    if func in ELEMENTWISE and _are_of_one_kind(args, kwargs):
        first = args[0]
        return [run(CLONE, [x], {}) for x in first] if isinstance(first, list) else run(CLONE, [first], {})
    mode = _first(args).fake_mode
    with in_kernel_invocation_manager(mode):
        result = func(*args, **kwargs)
    if isinstance(result, list | tuple):
        return [_fake(mode, tensor) for tensor in result]
    return _fake(mode, result)


def _normalised(func: Any, args: Sequence[Any]) -> Any:
    """Return a batch normalisation, or its gradients; by the fake mode where it has no weight."""
    if func is NORMALISE:
        x, weight, _, running_mean, _, is_training, *_ = args
        saves = is_training or running_mean is None
        if saves and weight is None:
            return func(*args)
        length = x.shape[1] if saves else 0
        saved = [run(NEW_EMPTY, [weight if saves else x, [length]], {}) for _ in range(2)]
        return run(EMPTY_LIKE, [x], {}), *saved
    _, x, weight, *_, wanted = args
    if weight is None:
        return _corrected(func, args, func(*args))
    of_what = (x, weight, weight)
    return tuple(
        run(EMPTY_LIKE, [tensor], {}) if is_wanted else None for tensor, is_wanted in zip(of_what, wanted, strict=True)
    )


def _corrected(func: Any, args: Sequence[Any], result: Any) -> Any:
    """Return the result of a fake kernel as real kernels give it."""
    if func in WEIGHT_OF:
        weight = args[WEIGHT_OF[func]]
        if weight is None:
            return result
        output, *statistics = result
        return output, *(_in_type(statistic, weight.dtype) for statistic in statistics)
    if func is NORMALISE_BACKWARD and not args[-1][0]:
        return None, *result[1:]  # Nobody asked for that gradient.
    if func is LAYER_NORM_BACKWARD and result[0] is not None:
        return result[0].contiguous(), *result[1:]  # The fake one has the strides of the input.
    if func is GROUP_NORM_BACKWARD and result[0] is not None:
        return _in_type(result[0], args[1].dtype), *result[1:]  # The fake one has the type of the weight.
    return result


def _in_type(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `tensor.to(dtype)`, which a fake mode would take apart."""
    if tensor.dtype == dtype:
        return tensor
    converted: Tensor = run(TO_COPY, [tensor], {"dtype": dtype})
    return converted


def _are_plain(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether all tensors are fake ones on the CPU whose numbers are not known, and stay there."""
    if kwargs.get("device") is not None:
        return False
    for tensor in _tensors((*args, *kwargs.values())):
        if not isinstance(tensor, FakeTensor) or tensor.constant is not None or tensor.fake_device != CPU:
            return False
    return isinstance(_first(args), FakeTensor)


def _are_of_one_kind(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether tensors, or those at each place of lists, are alike in shape, layout and floating-point type."""
    if isinstance(args[0], list):
        return all(_are_of_one_kind(tensors, {}) for tensors in zip(*args, strict=True))
    first, *others = _tensors((*args, *kwargs.values()))
    kind = (first.shape, first.dtype)
    is_simple = first.is_floating_point() and first.is_contiguous()
    return is_simple and all((x.shape, x.dtype) == kind and x.is_contiguous() for x in others)


def _first(args: Sequence[Any]) -> Any:
    """Return the first argument, or of a list the first of it."""
    first = args[0]
    return first[0] if isinstance(first, list | tuple) else first


def _fake(mode: Any, result: Any) -> Any:
    """Return a kernel's result as a fake tensor; one that was written to is one already."""
    if result is None or isinstance(result, FakeTensor):
        return result
    return FakeTensor(mode, result, CPU)


def _tensors(tree: Iterable[Any]) -> Iterable[torch.Tensor]:
    """Yield the tensors among arguments, also those in lists."""
    for part in tree:
        if isinstance(part, torch.Tensor):
            yield part
        elif isinstance(part, list | tuple):
            yield from _tensors(part)


SUM = torch.ops.aten.add.Tensor
UNKNOWN = (0, 0, 0)


class GradientSums:
    """Tells a dispatch mode which sums would take no memory, after `try_out`.

    Autograd adds in place to a dense tensor that it alone holds (`can_accumulate_inplace` in torch's input_buffer.cpp),
    but never while a mode is active. Counts of references say what it holds; versions of torch differ in them.
    """

    def __init__(self) -> None:
        self._owners = UNKNOWN  # Counts of references to the last first term.
        self._sole_owner = UNKNOWN  # Those of a gradient that autograd alone holds.

    def try_out(self) -> None:
        """Learn the counts of a gradient that autograd alone holds, below the modes that are active."""
        if self._sole_owner != UNKNOWN:
            return
        sums = GradientSums()
        with torch.enable_grad(), _TryOut(sums):
            x = torch.ones(2, requires_grad=True) * 1
            (x.sin() + x.cos()).sum().backward()
        self._sole_owner = sums._owners

    def is_in_place(self, func: Any, args: Any) -> bool:
        """Return whether an operation is such a sum. `__torch_dispatch__` itself calls this, with its own arguments."""
        if func is not SUM or torch.is_grad_enabled() or torch._C._current_autograd_node() is None:
            return False
        gradient: Tensor = args[0]
        storage = torch._C._storage_Use_Count(gradient.untyped_storage()._cdata)
        tensor: int = gradient._use_count()  # type: ignore[attr-defined]
        self._owners = tensor, storage, sys.getrefcount(gradient)
        return self._owners == self._sole_owner and gradient.is_contiguous()


class _TryOut(TorchDispatchMode):
    def __init__(self, sums: GradientSums) -> None:
        super().__init__()
        self._sums = sums

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # With True, torch loads its compiler.

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._sums.is_in_place(func, args)
        return func(*args, **(kwargs or {}))

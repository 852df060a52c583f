"""Operations on fake tensors by torch's meta kernels alone, where a fake mode takes ten times as long for the same.

A fake mode looks for an operation in its cache, whose key is made from all that a tensor has, or follows a definition
in Python. Views, sums and products need neither: their kernels for meta tensors are compiled and say it all.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager

CPU = torch.device("cpu")
DEVICE = torch.ops.prim.device.default  # called for fake tensors only
NAMES = (
    "view.default",
    "slice.Tensor",
    "unsqueeze.default",
    "expand.default",
    "detach.default",
    "alias.default",
    "select.int",
    "split_with_sizes.default",
    "empty_like.default",
    "clone.default",
    "copy_.default",
    "zero_.default",
    "add.Tensor",
    "add_.Tensor",
    "sub.Tensor",
    "sub_.Tensor",
    "mul.Tensor",
    "mul_.Tensor",
    "addcmul.default",
    "addcmul.out",
    "leaky_relu_.default",
    "leaky_relu_backward.default",
    "leaky_relu_backward.grad_input",
    "rsqrt.default",
    "sum.dim_IntList",
    "_foreach_add_.List",
    "_foreach_copy_.default",
)


def _overload(name: str) -> Any:
    operation, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, operation), overload)


OPERATIONS = {_overload(name) for name in NAMES}


def run(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return what an operation gives within a fake mode, by its meta kernel where that is enough."""
    if func is DEVICE and isinstance(args[0], FakeTensor):
        return args[0].fake_device
    if func not in OPERATIONS:
        return func(*args, **kwargs)
    mode = None
    for tensor in _tensors((args, tuple(kwargs.values()))):
        is_plain = isinstance(tensor, FakeTensor) and tensor.constant is None and tensor.fake_device == CPU
        if not is_plain or (mode is not None and tensor.fake_mode is not mode):
            return func(*args, **kwargs)
        mode = tensor.fake_mode
    if mode is None:
        return func(*args, **kwargs)
    with in_kernel_invocation_manager(mode):
        result = func(*args, **kwargs)
    if isinstance(result, list | tuple):
        return [_fake(mode, tensor) for tensor in result]
    return _fake(mode, result)


def _fake(mode: Any, result: Any) -> Any:
    """Return a kernel's result as a fake tensor; one that was written to is one already."""
    if result is None or isinstance(result, FakeTensor):
        return result
    return FakeTensor(mode, result, CPU)


def _tensors(tree: Iterable[Any]) -> Iterable[torch.Tensor]:
    for part in tree:
        if isinstance(part, torch.Tensor):
            yield part
        elif isinstance(part, list | tuple):
            yield from _tensors(part)

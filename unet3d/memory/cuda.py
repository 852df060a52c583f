"""Mixed precision as CUDA does it, on a machine without a GPU."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

# What autocast computes in float32 on CUDA and not on the CPU, as far as forward passes of this package go: the loss
# runs outside of autocast. torch's documentation lists all (section "CUDA Ops that autocast to float32").
FLOAT32 = ("group_norm", "upsample_nearest3d", "upsample_trilinear3d")


@contextmanager
def cuda_policy() -> Iterator[None]:
    """Within, `torch.autocast("cpu")` casts what CUDA's autocast would cast, and nothing else.

    Operations that only the CPU's autocast treats (pooling and concatenation above all) are left alone.
    """
    library = torch.library.Library("aten", "IMPL", "AutocastCPU")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*only once for all operators", UserWarning)  # that they are overridden
            for name in _only_on_the_cpu():
                library.impl(name, torch.library.fallthrough_kernel, allow_override=True)
            for name in FLOAT32:
                overload = getattr(torch.ops.aten, name).default
                library.impl(name, partial(_in_float32, overload), allow_override=True)
        yield
    finally:
        library._destroy()


def _only_on_the_cpu() -> list[str]:
    """Names that have a kernel for the CPU's autocast and none for CUDA's."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    found = set()
    for schema in torch._C._jit_get_all_schemas():
        name = schema.name + (f".{schema.overload_name}" if schema.overload_name else "")
        is_known = name.startswith("aten::") and torch._C._dispatch_has_kernel(name)
        if is_known and has(name, "AutocastCPU") and not has(name, "AutocastCUDA"):
            found.add(name.removeprefix("aten::"))
    return sorted(found)


def _in_float32(overload: Any, *args: Any) -> Any:
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
    with torch._C._ExcludeDispatchKeyGuard(keys):
        return overload(*(a.float() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args))

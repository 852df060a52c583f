"""Sums of gradients that autograd would write over their first term, if no dispatch mode looked on."""

import sys
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

SUM = torch.ops.aten.add.Tensor
UNKNOWN = (0, 0, 0)


class GradientSums:
    """Tells a dispatch mode which sums would take no memory, after `try_out`.

    Autograd adds in place to a dense tensor that it alone holds (`can_accumulate_inplace` in torch's input_buffer.cpp),
    but never while a mode is active. Counts of references say what it holds; versions of torch differ in them.
    """

    def __init__(self) -> None:
        self._owners = UNKNOWN  # counts of references to the last first term
        self._sole_owner = UNKNOWN  # those of a gradient that autograd alone holds

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
        return False  # with True, torch loads its compiler

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._sums.is_in_place(func, args)
        return func(*args, **(kwargs or {}))

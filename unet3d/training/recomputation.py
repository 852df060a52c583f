"""Check that backward's second call of a stage computes what the first one did, in a network's first passes.

A stage may have a state that `stage_state` neither puts back nor sees, as an iterator. Its second call then computes
other values, and gradients would be wrong. So a few numbers of each operation's result are noted in the first call, and
the numbers of the second call must be among them. Nothing is compared where tensors have no data, and nothing in later
passes: a state that changes values only there, or none of the noted numbers, is not seen.
"""

import math
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from unet3d.base.errors import UserError
from unet3d.recomputing.state import Observer

PASSES = 2  # of a network, that are compared
NUMBERS = 256  # that are compared of a result, at most
# How far they may differ: relative to their norm, root mean square. Kernels of a GPU need not give equal bits.
TOLERANCE = {"cpu": (1e-6, 0.0)}
TOLERANCE_ELSEWHERE = (2e-2, 1e-3)
MADE_OF_NUMBERS = torch.ops.aten.lift_fresh.default  # by torch.tensor; it counts as a view
Numbers = npt.NDArray[np.float64]

_passes: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()


def is_compared(model: nn.Module, image: Tensor) -> bool:
    """Count a pass with gradients, and return whether it is one of the first, of tensors with data."""
    if isinstance(image, FakeTensor) or image.is_meta:
        return False
    _passes[model] = _passes.get(model, 0) + 1
    return _passes[model] <= PASSES


class FirstCall(Observer, TorchDispatchMode):
    """A record of what the operations of a stage's first call compute."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage
        self.noted: dict[tuple[Any, torch.Size], deque[Numbers]] = defaultdict(deque)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as in a memory ledger

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        first = result
        if isinstance(result, tuple | list) and result:
            first = result[0]  # others may be no values
        if not isinstance(first, Tensor) or not _has_values(func) or _is_cast_of_weight(func, args):
            return result
        numbers = _numbers(first)
        if numbers is not None:
            self.see(func, first, numbers)
        return result

    def see(self, func: Any, result: Tensor, numbers: Numbers) -> None:
        """Note a result."""
        self.noted[func, result.shape].append(numbers)


class SecondCall(FirstCall):
    """A comparison that raises UserError for an operation whose result the first call did not have."""

    def __init__(self, first: FirstCall) -> None:
        super().__init__(first.stage)
        self.noted = first.noted

    def see(self, func: Any, result: Tensor, numbers: Numbers) -> None:
        """Compare a result."""
        relative, absolute = TOLERANCE.get(result.device.type, TOLERANCE_ELSEWHERE)
        absolute *= len(numbers) ** 0.5  # from a root mean square to a norm
        noted = self.noted[func, result.shape]
        for _ in range(len(noted)):
            candidate = noted[0]
            difference = np.linalg.norm(numbers - candidate)
            allowed = relative * np.linalg.norm(candidate) + absolute
            noted.rotate(-1)  # to what followed in the first call, which is likely to be next
            if not difference > allowed:  # NaN is equal
                return
        fault = f"backward computes other values again ({_name(func)}) than forward did"
        advice = "keep what changes in a buffer (register_buffer), or set ckpt=0"
        raise UserError(f"ckpt: the stage {type(self.stage).__name__} keeps a state, so {fault}; {advice}")


def _name(func: Any) -> str:
    """Return an operation's name, without its overload."""
    name: str = func.overloadpacket.__name__
    return name


def _has_values(func: Any) -> bool:
    """Return whether an operation gives values of its own: no view, and no memory that is yet to be written to."""
    return func is MADE_OF_NUMBERS or not (func.is_view or "empty" in _name(func))


def _is_cast_of_weight(func: Any, args: Sequence[Any]) -> bool:
    """Return whether this is a cast that autocast may make once for several calls."""
    return _name(func) == "_to_copy" and args[0].requires_grad and args[0].is_leaf


def _numbers(tensor: Tensor) -> Numbers | None:
    """Return evenly spaced numbers of a tensor, in the order of its memory; None where there is nothing to compare."""
    is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    if not is_plain or not tensor.is_floating_point() or not tensor.numel():
        return None
    with _disable_current_modes():  # a ledger
        size = 1
        for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
            size += (length - 1) * stride
        if size != tensor.numel():  # not dense: its memory holds more
            return None
        step = max(1, size // NUMBERS) | 1  # odd, or all may be of a few channels or columns
        count = math.ceil(size / step)
        sample = tensor.detach().as_strided((count,), (step,))
        return _as_numpy(sample.cpu())


def _as_numpy(sample: Tensor) -> Numbers:
    """Return a copy of numbers on the CPU, in memory of NumPy: torch's allocator is measured."""
    if sample.dtype == torch.bfloat16:  # the upper half of a float32; NumPy has no such type
        bits = sample.view(torch.int16).numpy().astype(np.int32)
        return (bits << 16).view(np.float32).astype(np.float64)
    return sample.numpy().astype(np.float64)

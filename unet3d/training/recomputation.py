"""Whether backward's second call of a stage computes what the first one did, compared in a network's first passes.

A stage may keep a state that `kept_state` neither puts back nor sees, as an iterator. Its second call then computes
other values, and gradients would be wrong. So a few numbers of each operation's result are noted in the first call, and
those of the second call must be among them. Nothing is compared where tensors have no data, and nothing later: a state
that changes values in later passes alone, or none of the noted numbers, is not seen.
"""

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
from unet3d.training.slabs import Observer

PASSES = 2  # of a network, that are compared
NUMBERS = 256  # of a result, at most
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
    """Notes what operations of a stage's first call compute."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage
        self.noted: dict[tuple[Any, torch.Size], deque[Numbers]] = defaultdict(deque)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as in a memory ledger

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        first = result[0] if isinstance(result, tuple | list) and result else result  # others may be no values
        if isinstance(first, Tensor) and _has_values(func) and not _is_cast_of_weight(func, args):
            numbers = _numbers(first)
            if numbers is not None:
                self.see(func, first, numbers)
        return result

    def see(self, func: Any, result: Tensor, numbers: Numbers) -> None:
        """Note a result."""
        self.noted[func, result.shape].append(numbers)


class SecondCall(FirstCall):
    """Raises UserError for an operation whose result is none of the first call's."""

    def __init__(self, first: FirstCall) -> None:
        super().__init__(first.stage)
        self.noted = first.noted

    def see(self, func: Any, result: Tensor, numbers: Numbers) -> None:
        """Compare a result."""
        relative, least = TOLERANCE.get(result.device.type, TOLERANCE_ELSEWHERE)
        least *= len(numbers) ** 0.5
        noted = self.noted[func, result.shape]
        for _ in range(len(noted)):
            difference, allowed = np.linalg.norm(numbers - noted[0]), relative * np.linalg.norm(noted[0]) + least
            noted.rotate(-1)  # to what followed in the first call, which is likely to be next
            if not difference > allowed:  # NaN is equal
                return
        what = f"backward computes other values again ({_name(func)}) than forward did"
        advice = "keep what changes in a buffer (register_buffer), or set ckpt=0"
        raise UserError(f"ckpt: the stage {type(self.stage).__name__} keeps a state, so {what}; {advice}")


def _name(func: Any) -> str:
    name: str = func.overloadpacket.__name__
    return name


def _has_values(func: Any) -> bool:
    """Return whether an operation gives values of its own: no view, and no memory that is yet to be written to."""
    return func is MADE_OF_NUMBERS or not (func.is_view or "empty" in _name(func))


def _is_cast_of_weight(func: Any, args: Sequence[Any]) -> bool:
    """Return whether this is a cast that autocast may make once for several calls."""
    return _name(func) == "_to_copy" and args[0].requires_grad and args[0].is_leaf


def _numbers(tensor: Tensor) -> Numbers | None:
    """Return evenly spaced numbers of a tensor, in the order of its memory; None where there are none to compare."""
    is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    if not is_plain or not tensor.is_floating_point() or not tensor.numel():
        return None
    with _disable_current_modes():  # a ledger
        size = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
        if size != tensor.numel():  # not dense: its memory holds more
            return None
        step = max(1, size // NUMBERS) | 1  # odd, or all may be of a few channels or columns
        few = tensor.detach().as_strided((-(-size // step),), (step,))
        return few.to("cpu", torch.float64, copy=True).numpy()

"""Meta kernels give what a fake mode gives, of maps in several layouts and types."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from unet3d.recomputing import fake_kernels

aten = torch.ops.aten
SHAPE = (2, 4, 6, 5, 3)
LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "contiguous": lambda: torch.empty(SHAPE),
    "rows": lambda: torch.empty(2, 4, 12, 5, 3)[:, :, 3:9],
    "channels last": lambda: torch.empty(SHAPE).to(memory_format=torch.channels_last_3d),
    "half precision": lambda: torch.empty(SHAPE, dtype=torch.bfloat16),
}


def four(y: Tensor) -> list[Tensor]:
    """Return weight, bias and running statistics of four channels."""
    return [y.new_empty(4) for _ in range(4)]


CALLS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "view": lambda x, y: aten.view(x.contiguous(), [1, 8, 6, 5, 3]),
    "_unsafe_view": lambda x, y: aten._unsafe_view(x.contiguous(), [1, 8, 6, 5, 3]),
    "slice": lambda x, y: aten.slice(x, 2, 1, 4),
    "unsqueeze": lambda x, y: aten.unsqueeze(x, 1),
    "expand": lambda x, y: aten.expand(x[:, :1], SHAPE),
    "detach": lambda x, y: aten.detach(x),
    "alias": lambda x, y: aten.alias(x),
    "select": lambda x, y: aten.select(x, 1, 2),
    "split": lambda x, y: aten.split_with_sizes(x, [1, 3], 1),
    "empty_like": lambda x, y: aten.empty_like(x, dtype=torch.float32),
    "clone": lambda x, y: aten.clone(x),
    "clone contiguous": lambda x, y: aten.clone(x, memory_format=torch.contiguous_format),
    "copy_": lambda x, y: aten.copy_(x, y),
    "zero_": lambda x, y: aten.zero_(x),
    "add_": lambda x, y: aten.add_(y, x, alpha=2),
    "mul_": lambda x, y: aten.mul_(x, y[:, :, :1, :1, :1]),
    "mul": lambda x, y: aten.mul(x, y[:, :, :1, :1, :1]),
    "mul of one kind": lambda x, y: aten.mul(x, torch.empty_like(x)),
    "add of whole numbers": lambda x, y: aten.add(x.int(), x),
    "mul by a number": lambda x, y: aten.mul(x, 2),
    "mul_ by a number": lambda x, y: aten.mul_(x, 2),
    "addcmul": lambda x, y: aten.addcmul(y[:, :, :1, :1, :1], x, y[:, :, :1, :1, :1]),
    "addcmul over": lambda x, y: aten.addcmul.out(y[:, :, :1, :1, :1], x, y[:, :, :1, :1, :1], out=x),
    "leaky_relu_": lambda x, y: aten.leaky_relu_(x, 0.01),
    "leaky_relu_backward over": lambda x, y: aten.leaky_relu_backward.grad_input(x, x, 0.01, False, grad_input=x),
    "to another type": lambda x, y: aten._to_copy(x, dtype=torch.float16),
    "to channels last": lambda x, y: aten._to_copy(x, memory_format=torch.channels_last_3d),
    "to a device": lambda x, y: aten._to_copy(x, device=torch.device("cpu")),
    "sum": lambda x, y: aten.sum(x, [0, 2], True, dtype=torch.float32),
    "statistics": lambda x, y: aten.batch_norm_update_stats(x.contiguous(), y.new_empty(4), y.new_empty(4), 1.0),
    "cat": lambda x, y: aten.cat([x, x], 1),
    "cat of several layouts": lambda x, y: aten.cat([x, y], 1),
    "constant_pad_nd": lambda x, y: aten.constant_pad_nd(x, [0, 0, 1, 1], 0.0),
    "full_like": lambda x, y: aten.full_like(x, 1.0),
    "full_like in another type": lambda x, y: aten.full_like(x, 0, dtype=torch.float16),
    "new_zeros": lambda x, y: aten.new_zeros(x, [3, 2]),
    "new_empty": lambda x, y: aten.new_empty(x, [3, 2]),
    "normalisation": lambda x, y: aten.native_batch_norm(x, *four(y), False, 0.0, 0.0),
    "normalisation backward": lambda x, y: aten.native_batch_norm_backward(
        x, x, *four(y)[:3], *four(y)[:2], False, 0.0, [True, True, True]
    ),
    "normalisation in training": lambda x, y: aten.native_batch_norm(
        x.float(), *four(y)[:2], None, None, True, 0.1, 1e-5
    ),
    "normalisation in training, with running statistics": lambda x, y: aten.native_batch_norm(
        x.float(), *four(y), True, 0.1, 1e-5
    ),
    "normalisation in training, backward": lambda x, y: aten.native_batch_norm_backward(
        x, x, *four(y)[:3], *four(y)[:2], True, 1e-5, [True, True, True]
    ),
    "add": lambda x, y: aten.add(x, y),
    "add a number": lambda x, y: aten.add(x, 1e-5),
    "leaky_relu": lambda x, y: aten.leaky_relu(x, 0.01),
    "leaky_relu_backward": lambda x, y: aten.leaky_relu_backward(x, x, 0.01, False),
    "leaky_relu_backward of two layouts": lambda x, y: aten.leaky_relu_backward(y.to(x.dtype), x, 0.01, False),
    "new_empty_strided": lambda x, y: aten.new_empty_strided(x, [2, 3], [1, 2]),
    "repeat": lambda x, y: aten.repeat(x, [1, 2, 1, 1, 1]),
    "addcmul of one kind": lambda x, y: aten.addcmul(x, x, x),
    "_foreach_add of one kind": lambda x, y: aten._foreach_add([x, y], [x, y]),
    "_foreach_add": lambda x, y: aten._foreach_add([y, x], [x, y], alpha=2),
    "_foreach_add_": lambda x, y: aten._foreach_add_([y, y], [x, x]),
    "_foreach_copy_": lambda x, y: aten._foreach_copy_([y, x], [x, y]),
}


class Noted(TorchDispatchMode):
    """Carries out operations, by meta kernels or as a fake mode does, and notes what they give."""

    def __init__(self, by_meta_kernels: bool) -> None:
        super().__init__()
        self.run = fake_kernels.run if by_meta_kernels else _as_it_is
        self.results: list[Any] = []
        self.operations: set[Any] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations.add(func)
        result = self.run(func, args, kwargs or {})
        written = tree_leaves(args) if result is None else []  # of an operation on lists
        for tensor in (*tree_leaves(result), *written):
            self.results.append(_described(tensor, args))
        return result


def _as_it_is(func: Any, args: Any, kwargs: Any) -> Any:
    return func(*args, **kwargs)


def _described(tensor: Any, args: Any) -> Any:
    """Return all that counts of a result: its layout, and which arguments it shares memory with."""
    if not isinstance(tensor, Tensor):
        return tensor
    storage = tensor.untyped_storage()
    tensors = [value for value in tree_leaves(args) if isinstance(value, Tensor)]
    return (
        tuple(tensor.shape),
        tensor.stride(),
        tensor.storage_offset(),
        tensor.dtype,
        tensor.device,
        storage.nbytes(),
        [value is tensor for value in tensors],
        [value.untyped_storage()._cdata == storage._cdata for value in tensors],
    )


def noted(call: Callable[[Tensor, Tensor], Any], layout: Callable[[], Tensor], by_meta_kernels: bool) -> Noted:
    """Return what a call's operations give."""
    notes = Noted(by_meta_kernels)
    with FakeTensorMode(), torch.no_grad():
        x = layout()
        y = torch.empty(SHAPE)
        with notes:
            call(x, y)
    return notes


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("call", CALLS)
def test_meta_kernels_give_what_a_fake_mode_gives(call: str, layout: str) -> None:
    results = noted(CALLS[call], LAYOUTS[layout], True).results
    assert results == noted(CALLS[call], LAYOUTS[layout], False).results
    assert results


def test_each_operation_is_compared() -> None:
    operations = set()
    for call in CALLS.values():
        operations |= noted(call, LAYOUTS["rows"], True).operations
    assert operations >= fake_kernels.OPERATIONS


def test_a_known_number_stays_known() -> None:
    with FakeTensorMode(), Noted(True):
        assert (torch.tensor(3) * torch.tensor(2)).item() == 6

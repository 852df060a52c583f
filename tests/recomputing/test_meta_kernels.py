"""Operations of a step give on tensors without data, by meta kernels, what they give on real ones."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from attention import windows
from equality import drawn_schedules
from test_budgets import network as chain
from test_passing import Branches
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from unet3d.recomputing import fake_kernels
from unet3d.recomputing.prepare import prepare
from unet3d.recomputing.run import call_by_program

aten = torch.ops.aten


class Noted(TorchDispatchMode):
    """Carries out operations, and notes what they give, where the fast kernels are meant."""

    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self.run = run
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = self.run(func, args, kwargs or {})
        if func in fake_kernels.OPERATIONS:
            written = args if result is None else []  # of an operation on lists
            self.seen.append((func, [described(tensor, args) for tensor in tree_leaves((result, written))]))
        return result


def described(tensor: Any, args: Any) -> Any:
    """Return all that counts of a result of several numbers: its layout, and which arguments it shares memory with."""
    if not isinstance(tensor, Tensor) or tensor.numel() < 2:
        return None
    storage = tensor.untyped_storage()
    tensors = [value for value in tree_leaves(args) if isinstance(value, Tensor)]
    shared = [value.untyped_storage()._cdata == storage._cdata for value in tensors]
    strides = [stride for stride, length in zip(tensor.stride(), tensor.shape, strict=True) if length > 1]
    return tensor.shape, strides, tensor.storage_offset(), tensor.dtype, storage.nbytes(), shared


@pytest.mark.parametrize(
    ("make", "on_cpu", "dtype"),
    [
        (chain, True, None),
        (Branches, True, torch.bfloat16),
        (chain, False, torch.bfloat16),
        (Branches, False, None),
        (Branches, None, None),
        (windows, None, torch.bfloat16),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_step_on_tensors_without_data_is_the_real_one(
    make: Callable[[], nn.Module], on_cpu: bool | None, dtype: torch.dtype | None
) -> None:
    size = (1, 1, 16, 16, 8)
    if on_cpu is not None:
        with drawn_schedules(seed=1, tiles=4):
            program = prepare(make().train(), torch.randn(size), dtype, on_cpu)
        program = program.by(program.schedules[0])

    def build() -> tuple[nn.Module, torch.optim.Optimizer, Tensor]:
        network = make().train()
        return network, torch.optim.SGD(network.parameters(), 0.1, momentum=0.9, foreach=True), torch.randn(size)

    def steps(network: nn.Module, optimizer: torch.optim.Optimizer, image: Tensor) -> None:
        for _ in range(2):
            with torch.autocast("cpu", dtype, enabled=dtype is not None):
                outputs = network(image) if on_cpu is None else call_by_program(program, network, image)
            outputs.float().square().mean().backward()
            optimizer.step()

    built = build()
    with Noted(lambda func, args, kwargs: func(*args, **kwargs)) as real:
        steps(*built)
    with FakeTensorMode(allow_non_fake_inputs=True):
        built = build()
        with Noted(fake_kernels.run) as fake:
            steps(*built)
    for expected, found in zip(real.seen, fake.seen, strict=True):
        assert found == expected


def by_both(call: Callable[[], object]) -> list[Noted]:
    """Return what a call gives by torch, and by meta kernels on tensors without data."""
    notes = [Noted(lambda func, args, kwargs: func(*args, **kwargs)), Noted(fake_kernels.run)]
    with notes[0]:
        call()
    with FakeTensorMode(), notes[1]:
        call()
    return notes


# What steps above do not take, of maps x of a type and layout and y of float32.
OTHERS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "repeat": lambda x, y: aten.repeat(x, [1, 2, 1, 1, 1]),
    "new_empty": lambda x, y: aten.new_empty(x, [3, 2]),
    "new_empty_strided": lambda x, y: aten.new_empty_strided(x, [2, 3], [1, 2]),
    "zero_": lambda x, y: aten.zero_(x),
    "empty_like": lambda x, y: aten.empty_like(x, dtype=torch.float16),
    "_foreach_add": lambda x, y: aten._foreach_add([x, y], [x, y]),
    "_foreach_add of two kinds": lambda x, y: aten._foreach_add([y, x], [x, y], alpha=2),
    "_foreach_copy_": lambda x, y: aten._foreach_copy_([y, x], [x, y]),
    "add of whole numbers": lambda x, y: aten.add(x.int(), x),
    "leaky_relu": lambda x, y: aten.leaky_relu(x, 0.01),
    "leaky_relu_backward": lambda x, y: aten.leaky_relu_backward(x, x, 0.01, False),
    "cat of two kinds": lambda x, y: aten.cat([x, y], 1),
}
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda y: y.clone(),
    "rows": lambda y: torch.cat([y, y], 2)[:, :, 3:9],
    "channels last": lambda y: y.to(memory_format=torch.channels_last_3d),
    "half precision": lambda y: y.bfloat16(),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", OTHERS)
def test_other_operations_give_what_torch_gives(name: str, layout: str) -> None:
    def call() -> None:
        y = torch.ones(2, 4, 6, 5, 3)
        OTHERS[name](LAYOUTS[layout](y), y)

    real, fake = by_both(call)
    assert name.split()[0] in str(real.seen[-1][0])
    assert fake.seen == real.seen


def test_a_known_number_stays_known() -> None:
    with FakeTensorMode(), Noted(fake_kernels.run):
        assert (torch.tensor(3) * torch.tensor(2)).item() == 6

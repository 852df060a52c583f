"""The predicted peak of a step against a ledger of it, and both against torch's CPU allocator without a mode on.

The prediction is of weights, their gradients, maps and what rules make beside them. Beside it lie the label, which is
the caller's, and while the loss runs, what that makes of a chunk of logits. The plain pass is predicted, too.
"""

import copy
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from allocator import peak_bytes, recorded
from attention import windows
from test_budgets import network as chain
from test_networks import monai_network
from test_passing import Branches
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from unet3d.memory.ledger import Ledger, most_held
from unet3d.model.unet import UNet3D
from unet3d.recomputing import prepare, workspaces
from unet3d.recomputing.module import Plan, Recomputed, schedules_of
from unet3d.recomputing.program import by_plan
from unet3d.recomputing.rules import normalisation
from unet3d.recomputing.scratch import plain_bytes
from unet3d.training.losses import SegmentationLoss, dice_ce

SIZE = (40, 16, 16)
CLOSE = 16 * 2**10  # bytes: statistics, numbers, weights of norms
NUMBERS = 512  # bytes that kernels make on their way
WITHIN = ("aten::convolution", "aten::convolution_backward", "aten::native_batch_norm_backward")
LOSS = SegmentationLoss(dice_ce)


def loss_bytes(label: Tensor) -> int:
    """Return what the loss makes beside logits."""
    layer = nn.Conv3d(1, 3, 1)
    logits = layer(torch.randn(1, 1, *SIZE))
    ledger = Ledger()
    with ledger:
        ledger.count([logits, label])
        LOSS(logits, label)
    return most_held(ledger.events) - logits.nbytes - label.nbytes


def check(model: nn.Module, plans: Sequence[Plan], device_type: str = "cpu") -> None:
    """Compare the three for a step by each plan; the program is prepared once."""
    torch.manual_seed(0)
    recomputed = Recomputed(model.train(), plans[0], device_type=device_type)
    image = torch.randn(1, 1, *SIZE)
    label = torch.randint(0, 3, (1, *SIZE))
    schedules_of(recomputed).program(image)
    for plan in plans:
        programs = schedules_of(recomputed).programs
        programs |= {key: by_plan(program, plan) for key, program in programs.items()}
        check_step(recomputed, image, label)


def check_step(recomputed: Recomputed, image: Tensor, label: Tensor) -> None:
    """Compare prediction, ledger and allocator for a step."""

    def step() -> None:
        LOSS(recomputed(image), label).backward()

    step()
    recomputed.zero_grad(set_to_none=True)
    prediction = schedules_of(recomputed).program(image)
    ledger = Ledger()
    with ledger:
        ledger.count([*recomputed.parameters(), *recomputed.buffers(), image, label])
        step()
    measured = most_held(ledger.events) - label.nbytes
    recomputed.zero_grad(set_to_none=True)
    before = {tensor for tensor in (*recomputed.parameters(), *recomputed.buffers(), image)}
    truth = peak_bytes(recorded(step), WITHIN) + sum(tensor.nbytes for tensor in before)
    recomputed.zero_grad(set_to_none=True)
    assert abs(truth - measured) <= NUMBERS
    assert measured >= prediction.peak_bytes - CLOSE
    assert measured <= prediction.peak_bytes + loss_bytes(label) + CLOSE


def branches() -> nn.Module:
    """Return a network in which two convolutions have the same weights."""
    network = Branches(8)
    network.second.weight = network.first.weight
    return network


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "chain": chain,
    **{name: partial(monai_network, name) for name in ("DynUNet", "DynUNet, residual", "UNet", "SegResNet")},
    "branches": branches,
    "attention with dropout": lambda: windows(16, dropout=0.1),
}


@pytest.mark.slow
@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
@pytest.mark.parametrize("name", ["chain", "DynUNet", "UNet", "SegResNet", "attention with dropout"])
def test_the_peak_is_as_predicted(name: str, device_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also that of a program for a GPU, carried out on the CPU."""
    monkeypatch.setattr(prepare, "CUDA_TILE", 1)  # else each map is one tile
    monkeypatch.setattr(workspaces, "bytes_of_call", lambda *_: [0])  # of cuDNN, which is not here
    monkeypatch.setattr(normalisation, "LARGE", 2**14)  # numbers; else no map's normalisation is carried out in pieces
    monkeypatch.setattr(normalisation, "BLOCKS", 32)
    torch.manual_seed(0)
    check(NETWORKS[name](), ["lean", "tiles"], device_type)


@pytest.mark.slow
def test_the_peak_of_our_network(network: Callable[..., UNet3D]) -> None:
    """Here some maps are one tile: the gradient of a source has memory of its own meanwhile."""
    model = network("model=unet_tiny", "model.features=[8,16,32]", "model.activation=leaky_relu")
    check(model, ["tiles"])


class Forgetful(torch.autograd.Function):
    """A loss that keeps nothing of a network's outputs."""

    @staticmethod
    def forward(ctx: Any, *outputs: Tensor) -> Tensor:
        ctx.shapes = [(output.shape, output.dtype) for output in outputs]
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        return tuple(torch.zeros(shape, dtype=dtype) for shape, dtype in ctx.shapes)


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize("name", ["chain", "DynUNet, residual", "branches", "attention with dropout"])
def test_what_the_plain_pass_needs_is_predicted_to_the_byte(name: str, autocast: torch.dtype | None) -> None:
    model = NETWORKS[name]().train()
    image = torch.randn(1, 1, 16, 16, 16)
    ledger = Ledger()
    with ledger:
        ledger.count([*model.parameters(), *model.buffers(), image])
        with torch.autocast("cpu", autocast, enabled=autocast is not None):
            loss = Forgetful.apply(*tree_leaves(model(image)))
        loss.backward(torch.empty(0))
    model.zero_grad(set_to_none=True)
    assert plain_bytes(model, image, autocast, on_cpu=True) == most_held(ledger.events)


def test_predicting_the_plain_pass_leaves_no_trace() -> None:
    model = Branches(8).train()
    seen: list[Any] = []
    model.register_forward_hook(lambda *_: seen.append(1))
    before = copy.deepcopy(model.state_dict())
    generators = torch.get_rng_state(), random.getstate()
    assert plain_bytes(model, torch.randn(1, 1, 8, 8, 8, requires_grad=True), None, on_cpu=True)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert all(type(parameter) is nn.Parameter and parameter.grad is None for parameter in model.parameters())
    assert not seen
    assert random.getstate() == generators[1]


class Reads(nn.Module):
    """A pass that needs the numbers of its image."""

    def forward(self, image: Tensor) -> Tensor:
        return image * image.sum().item()


def test_where_the_plain_pass_cannot_be_predicted_nothing_fails() -> None:
    image = torch.randn(1, 1, 8, 8, 8, requires_grad=True)
    assert plain_bytes(Reads(), image, None, on_cpu=True) is None

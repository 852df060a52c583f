"""Mixed precision by operation, and programs that are found for one network and followed by another."""

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from equality import drawn_schedules
from torch import Tensor, nn
from uses import gained, image

from unet3d.memory.fake_tensors import cuda_autocast
from unet3d.recomputing.module import Recomputed
from unet3d.recomputing.prepare import bound, prepare
from unet3d.recomputing.run import call_by_program

WITHIN_ROUNDING = 0.03  # of the largest gradient, in bfloat16


@pytest.fixture(autouse=True)
def any_schedule() -> Iterator[None]:
    """Without a search: these tests hold for each schedule."""
    with drawn_schedules(seed=2, tiles=5):
        yield


class Function(nn.Module):
    """A function as a layer."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        """Return the map."""
        return self.function(x)


def sampled(x: Tensor) -> Tensor:
    """Return a map that is read between its voxels."""
    turn = torch.tensor([[1.0, 0.2, 0, 0], [-0.2, 1, 0, 0], [0, 0, 1, 0]]).expand(len(x), -1, -1)
    return F.grid_sample(x, F.affine_grid(turn, list(x.shape), align_corners=False), align_corners=False)


IN_FLOAT32 = {
    "max-pool": nn.MaxPool3d(3, 2, 1),
    "adaptive pool": nn.AdaptiveAvgPool3d(6),
    "adaptive max-pool": nn.AdaptiveMaxPool3d(6),
    "replication": nn.ReplicationPad3d(1),
    "sampled": Function(sampled),
    "interpolated": nn.Upsample(scale_factor=1.5, mode="trilinear"),
    "summed up": Function(lambda x: 0.1 * x.cumsum(2)),
    "cast": Function(lambda x: x.float()),
    "of tokens": Function(lambda x: F.layer_norm(x.flatten(2), (x[0, 0].numel(),)).view(x.shape)),
}
BEHIND = {
    "batch norm": nn.BatchNorm3d(4),
    "PReLU": nn.PReLU(4),
    "instance norm": nn.InstanceNorm3d(4, affine=True),
    "group norm": nn.GroupNorm(2, 4),
    "ReLU": nn.ReLU(),
    "sum": Function(lambda x: x + F.leaky_relu(x)),
    "pool and interpolation": nn.Sequential(nn.MaxPool3d(2), nn.Upsample(scale_factor=2, mode="trilinear")),
    "softmax": nn.Softmax(1),
    "nothing": nn.Identity(),
}
PAIRS = [("max-pool", behind) for behind in BEHIND]
PAIRS += [(operation, list(BEHIND)[number % 2]) for number, operation in enumerate(IN_FLOAT32)][1:]


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
@pytest.mark.parametrize(("operation", "behind"), PAIRS)
def test_operations_that_autocast_computes_in_float32(operation: str, behind: str, device_type: str) -> None:
    """In groups, with rules behind them; a GPU's autocast, which has other operations, is carried out on the CPU.

    Results are about as close to those of float32 as plain's are.
    """
    torch.manual_seed(0)
    exact = nn.Sequential(nn.Conv3d(1, 4, 3, padding=1, bias=False), IN_FLOAT32[operation], BEHIND[behind]).train()
    x = torch.randn(2, 1, 16, 12, 8)
    plain, recomputed = copy.deepcopy(exact), Recomputed(copy.deepcopy(exact), device_type=device_type)
    results = []
    for network in (exact, plain, recomputed):
        with cuda_autocast() if device_type == "cuda" else nullcontext():
            with torch.autocast("cpu", torch.bfloat16, enabled=network is not exact):
                output = network(x)
            (output.float() * torch.linspace(-1, 1, output.numel()).view(output.shape)).sum().backward()
        results.append([output.detach(), *(parameter.grad for parameter in network.parameters())])
    assert results[2][0].dtype == results[1][0].dtype
    largest = max(float(gradient.abs().max()) for gradient in results[0][1:])
    for number, (expected, of_plain, found) in enumerate(zip(*results, strict=True)):
        scale = largest if number else float(expected.abs().max())
        allowed = WITHIN_ROUNDING * scale + 2 * float((of_plain - expected).abs().max())
        assert float((found - expected).abs().max()) <= allowed


@pytest.mark.parametrize(
    ("gain", "change", "is_equal"),
    [
        (0.1, lambda net: None, True),
        (0.1, lambda net: setattr(net, "gain", 0.2), False),
        (torch.rand(4, 1, 1, 1), lambda net: None, False),
        (0.1, lambda net: net.first.requires_grad_(False), False),
    ],
    ids=["equal", "another factor", "a constant", "frozen"],
)
def test_a_program_is_bound_to_an_equal_network_alone(
    gain: Any, change: Callable[[Any], object], is_equal: bool
) -> None:
    """Others are traced, and gradients are theirs in each case."""
    prepared_for = gained(gain=gain)
    other = copy.deepcopy(prepared_for)
    change(other)
    program = prepare(prepared_for, image(), None, on_cpu=True)
    program = program.by(program.schedules[0])
    assert bound(program, other, image(), torch.bfloat16) is not program
    found = bound(program, other, image())
    assert (found is program) is is_equal
    gradients = []
    for logits in (other(image()), call_by_program(found, other, image())):
        logits.square().mean().backward()
        gradients.append([parameter.grad for parameter in other.parameters()])
        other.zero_grad()
    torch.testing.assert_close(*gradients)

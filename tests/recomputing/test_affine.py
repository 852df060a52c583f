"""Normalisations of large maps on a GPU, carried out on the CPU: of pieces of channels, and of rows with gaps."""

import copy

import pytest
import torch
from equality import drawn_schedules
from torch import Tensor, nn

from unet3d.recomputing.module import Recomputed
from unet3d.recomputing.rules import normalisation

NORMS = {"instance": nn.InstanceNorm3d(4, affine=True), "batch": nn.BatchNorm3d(4), "group": nn.GroupNorm(2, 4)}


@pytest.mark.parametrize(("dtype", "factor"), [(torch.float32, 20), (torch.bfloat16, 1.5)])
@pytest.mark.parametrize("name", NORMS)
def test_gradients_are_about_as_near_as_those_of_autograd(
    name: str, dtype: torch.dtype, factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32 the mean is far larger than the deviation: a difference of squares would lose a hundred times more."""
    monkeypatch.setattr(normalisation, "BLOCKS", 40)  # so that a channel has some pieces
    torch.manual_seed(1)
    unit = nn.Sequential(nn.Conv3d(4, 4, 3, padding=1), NORMS[name], nn.LeakyReLU())
    units = [copy.deepcopy(unit) for _ in range(3)]
    plain = nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), *units, nn.Conv3d(4, 2, 1)).train()
    if dtype == torch.float32:
        torch.nn.init.constant_(plain[1][0].bias, 1000)
    image = torch.randn(2, 1, 24, 10, 8)
    exact = gradients(copy.deepcopy(plain).double(), image.double())
    recomputed = Recomputed(copy.deepcopy(plain), device_type="cuda")
    with torch.autocast("cpu", dtype, enabled=dtype == torch.bfloat16):
        of_autograd = gradients(plain, image)
        with drawn_schedules(seed=1, tiles=4):
            of_recompute = gradients(recomputed, image)
    assert (of_recompute - exact).norm() <= factor * (of_autograd - exact).norm()


def gradients(network: nn.Module, image: Tensor) -> Tensor:
    """Return all gradients of a step in a vector."""
    output = network(image).double()
    weights = torch.linspace(-1, 1, output.numel(), dtype=torch.float64).view_as(output)
    (output * weights).sin().mean().backward()
    return torch.cat([p.grad.flatten().double() for p in network.parameters() if p.grad is not None])

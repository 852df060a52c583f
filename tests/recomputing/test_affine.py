"""Normalisations of large maps on a GPU, carried out on the CPU: of pieces of channels, and of rows with gaps."""

import copy
from collections.abc import Iterator

import pytest
import torch
from equality import drawn_schedules
from torch import Tensor, nn

from unet3d.recomputing.module import Recomputed
from unet3d.recomputing.rules import normalisation
from unet3d.recomputing.rules.normalisation import Affine, take_statistics
from unet3d.recomputing.state import State
from unet3d.recomputing.trace import trace

SHAPE = (2, 4, 9, 8, 6)
NORMS = {
    "instance": (nn.InstanceNorm3d(4, affine=True), (2, 4, 1)),
    "batch": (nn.BatchNorm3d(4), (1, 4, 1)),
    "group": (nn.GroupNorm(2, 4), (2, 2, 2)),
}
CLOSE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2**-8}  # of one rounding, relative to the largest


@pytest.fixture(autouse=True)
def all_maps_are_large(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """With some pieces a channel."""
    monkeypatch.setattr(normalisation, "LARGE", 1)
    monkeypatch.setattr(normalisation, "BLOCKS", 40)
    yield


def state_of(dtype: torch.dtype, network: nn.Module | None = None) -> State:
    """Return the state of a pass on a GPU, here with the tensors of the CPU."""
    weights = {} if network is None else {**dict(network.named_parameters()), **dict(network.named_buffers())}
    return State(axis=2, dtype=dtype, weights=weights, on_cpu=False)


def drawn(dtype: torch.dtype, mean: float = 0.0) -> Tensor:
    torch.manual_seed(0)
    return (torch.randn(SHAPE, dtype=torch.float64) + mean).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NORMS)
def test_statistics_of_pieces_are_those_of_channels(name: str, dtype: torch.dtype) -> None:
    """The mean is far larger than the deviation: a difference of squares would lose it."""
    norm, (images, groups, width) = NORMS[name]
    network = nn.Sequential(nn.Conv3d(4, 4, 1), norm).train()
    value = next(value for value in trace(network, torch.randn(SHAPE)).values if value.op.endswith("_norm"))
    raw = drawn(dtype, mean=1000 if dtype != torch.bfloat16 else 10)
    assert normalisation.pieces(raw, state_of(dtype)) > 1
    state = state_of(dtype, network)
    take_statistics(value, raw, state)
    known = normalisation.norm_of(value, state)
    together = raw.double().unflatten(1, (groups, width))
    variance, mean = torch.var_mean(together, (0, 2, 3, 4, 5) if images == 1 else (2, 3, 4, 5), correction=0)
    assert known.voxels == raw.numel() // (images * groups)
    torch.testing.assert_close(known.mean.double(), mean.view(images, groups), rtol=1e-6, atol=0)
    expected = (variance.view(images, groups) + 1e-5).rsqrt()
    torch.testing.assert_close(known.inverse_std.double(), expected, rtol=1e-4, atol=0)


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("images", [1, 2])
@pytest.mark.parametrize("rows", [(0, 9), (2, 7)])
def test_an_affine_function_is_rounded_once(dtype: torch.dtype, images: int, rows: tuple[int, int]) -> None:
    """Of whole maps and of rows with gaps between them, whose result has none."""
    state = state_of(dtype)
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    terms = torch.randn(3, images, 4, dtype=exact)
    first, end = rows
    x = drawn(dtype, mean=5)[:, :, first:end]
    result = Affine(*terms).apply(x, state)
    mean, scale, shift = terms.double()[..., None, None, None]
    expected = (x.double() - mean) * scale + shift
    assert result.dtype == dtype
    assert result.is_contiguous()
    assert (result.double() - expected).abs().max() <= CLOSE[dtype] * expected.abs().max()


@pytest.mark.parametrize("dtype", CLOSE)
def test_sums_of_pieces_are_those_of_channels(dtype: torch.dtype) -> None:
    state = state_of(dtype)
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    mean, scale = torch.randn(2, 2, 4, dtype=exact)
    raw = drawn(dtype)
    gradient = torch.randn(SHAPE).to(dtype)
    function = Affine(mean, scale, None)
    of_bias, of_scale = (sums.sum(2).double() for sums in function.sums(gradient, raw, state))
    centred = raw.double() - mean.double()[..., None, None, None]
    tolerances = {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(of_bias, gradient.double().sum((2, 3, 4)), **tolerances)
    torch.testing.assert_close(of_scale, (gradient.double() * centred).sum((2, 3, 4)), **tolerances)
    of_x = function.gradient(gradient, state)
    expected = gradient.double() * scale.double()[..., None, None, None]
    assert (of_x.double() - expected).abs().max() <= CLOSE[dtype] * expected.abs().max()


def unit(norm: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv3d(4, 4, 3, padding=1), norm, nn.LeakyReLU())


@pytest.mark.parametrize("name", NORMS)
def test_gradients_in_half_precision_are_as_near_as_those_of_autograd(name: str) -> None:
    torch.manual_seed(1)
    norm, _ = NORMS[name]
    units = [unit(copy.deepcopy(norm)) for _ in range(3)]
    plain = nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), *units, nn.Conv3d(4, 2, 1)).train()
    image = torch.randn(2, 1, 24, 10, 8)
    exact = gradients(copy.deepcopy(plain).double(), image.double())
    with drawn_schedules(seed=1, tiles=4):
        recomputed = Recomputed(copy.deepcopy(plain), device_type="cuda")
        with torch.autocast("cpu", torch.bfloat16):
            of_recompute = gradients(recomputed, image)
            of_autograd = gradients(plain, image)
    error = (of_recompute - exact).norm()
    assert error <= 1.5 * (of_autograd - exact).norm()


def gradients(network: nn.Module, image: Tensor) -> Tensor:
    """Return all gradients of a step in a vector."""
    output = network(image).double()
    weights = torch.linspace(-1, 1, output.numel(), dtype=torch.float64).view_as(output)
    (output * weights).sin().mean().backward()
    return torch.cat([p.grad.flatten().double() for p in network.parameters() if p.grad is not None])

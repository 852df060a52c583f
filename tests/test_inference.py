"""The sliding window: complete, seamless where it must be, independent of sizes."""

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from unet3d.config import Model
from unet3d.inference import Predictor, _aligned, _overlapping, gaussian
from unet3d.model.unet import UNet3D
from unet3d.policy import MemoryPolicy

Network = Callable[..., UNet3D]


class Pointwise(nn.Sequential):
    """Logits that depend on each voxel alone: what a sliding window must leave untouched."""

    def __init__(self) -> None:
        super().__init__(nn.Conv3d(1, 2, 1))


def predictor(model: nn.Sequential, window: tuple, options: Model | None = None, **changes: object) -> Predictor:
    return Predictor(model, options or Model(), MemoryPolicy(), window, **changes)


@pytest.mark.parametrize("size", [(8, 8, 8), (17, 9, 8), (5, 30, 3), (1, 1, 1)])
@pytest.mark.parametrize("overlap", [0.0, 0.5, 0.75])
def test_windows_partition_unity(size: tuple, overlap: float) -> None:
    model = Pointwise()
    image = torch.randn(1, *size)
    with torch.no_grad():
        expected = model(image[None])[0].softmax(0)
    found = predictor(model, (8, 8, 8), overlap=overlap).probabilities(image)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("size", "window", "overlap"), [(100, 32, 0.5), (33, 32, 0.0), (32, 32, 0.5), (64, 10, 0.25)])
def test_windows_cover_everything_with_the_asked_overlap(size: int, window: int, overlap: float) -> None:
    found = _overlapping((size, 1, 1), (window, 1, 1), overlap)[0]
    assert found[0] == 0 and found[-1] == size - window
    assert all(b - a <= window * (1 - overlap) + 0.5 for a, b in pairwise(found))


def test_gaussian_is_centred_symmetric_and_positive() -> None:
    weight = gaussian((9, 8, 7))
    assert torch.equal(weight, weight.flip((0, 1, 2)))
    assert weight[4, 3, 3] == weight.max() and weight.min() > 0


VALID = ("model=unet_tiny", "model.padding=valid", "model.norm=none", "data.patch=[52,52,52]")


def test_valid_tiles_have_no_seams(network: Network) -> None:
    """Tiled and whole output are equal, and the volume needs no fitting size."""
    model = network(*VALID)
    image = torch.randn(1, 23, 9, 14)
    tiled = predictor(model, (52, 52, 52), model.options).probabilities(image)
    whole = predictor(model, (64, 52, 60), model.options).probabilities(image)
    assert tiled.shape == (3, 23, 9, 14)
    torch.testing.assert_close(tiled, whole, atol=1e-5, rtol=0)


def test_valid_tiles_see_mirrored_context(network: Network) -> None:
    model = network(*VALID)
    image = torch.randn(1, 24, 24, 24)
    with torch.no_grad():
        expected = model(torch.nn.functional.pad(image[None], (20,) * 6, mode="reflect"))[0].softmax(0)
    found = predictor(model, (52, 52, 52), model.options).probabilities(image)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_valid_tiles_start_on_multiples_of_the_total_stride(options: Callable[..., Model]) -> None:
    paper = options("model=cicek2016", "data.patch=[132,132,116]")
    assert _aligned((100, 44, 28), (44, 44, 28), paper) == [[0, 40, 80], [0], [0]]


def test_mirroring_makes_the_prediction_symmetric(network: Network) -> None:
    model = network("model=unet_tiny")
    image = torch.randn(1, 16, 16, 16)
    averaged = predictor(model, (16, 16, 16), mirror=(0, 1, 2))
    found = averaged.probabilities(image)
    torch.testing.assert_close(averaged.probabilities(image.flip(2)), found.flip(2), atol=1e-5, rtol=0)
    plain = predictor(model, (16, 16, 16))
    assert not torch.allclose(plain.probabilities(image.flip(2)), plain.probabilities(image).flip(2), atol=1e-3)


def test_predicting_leaves_the_training_mode_and_no_gradient(network: Network) -> None:
    model = network("model=unet_tiny").train()
    found = predictor(model, (16, 16, 16)).probabilities(torch.randn(1, 5, 16, 20))
    assert model.training and not found.requires_grad
    assert found.shape == (3, 5, 16, 20)
    torch.testing.assert_close(found.sum(0), torch.ones(5, 16, 20))


@pytest.mark.parametrize("size", [(33, 17, 5), (31, 40, 24)])
def test_odd_sizes(network: Network, size: tuple) -> None:
    found: Tensor = predictor(network("model=unet_tiny"), size).probabilities(torch.randn(1, *size))
    assert found.shape == (3, *size)

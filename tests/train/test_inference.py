"""The sliding window: complete, seamless where it must be, independent of sizes."""

from collections.abc import Callable
from itertools import pairwise, product

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from unet3d.config import Model
from unet3d.data.patches import choose_centre, crop, prepare
from unet3d.model import geometry
from unet3d.model.unet import UNet3D
from unet3d.train.inference import Predictor, aligned_corners, even_corners, gaussian
from unet3d.train.policy import MemoryPolicy
from unet3d.types import IGNORE

Network = Callable[..., UNet3D]


def predictor(model: nn.Module, window: tuple, options: Model | None = None, **changes: object) -> Predictor:
    return Predictor((model,), options or Model(), MemoryPolicy(), window, **changes)


@pytest.mark.parametrize("size", [(8, 8, 8), (17, 9, 8), (5, 30, 3), (1, 1, 1)])
@pytest.mark.parametrize("overlap", [0.0, 0.5, 0.75])
def test_windows_of_any_number_leave_pointwise_logits_as_they_are(size: tuple, overlap: float) -> None:
    model = nn.Conv3d(1, 2, 1)
    image = torch.randn(1, *size)
    with torch.no_grad():
        expected = model(image[None])[0].softmax(0)
    found = predictor(model, (8, 8, 8), overlap=overlap).probabilities(image)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("size", "window", "overlap"), [(100, 32, 0.5), (33, 32, 0.0), (32, 32, 0.5), (64, 10, 0.25)])
def test_windows_cover_everything_with_at_least_the_overlap(size: int, window: int, overlap: float) -> None:
    found = even_corners((size, 1, 1), (window, 1, 1), overlap)[0]
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


def test_valid_tiles_of_strided_convolutions_fit_though_they_lose_an_odd_number_of_voxels(network: Network) -> None:
    model = network(*VALID, "model.downsampling=strided_conv", "data.patch=[51,51,51]")
    lost = 51 - geometry.output_size((51, 51, 51), model.options)[0]
    assert lost % 2
    found = predictor(model, (51, 51, 51), model.options).probabilities(torch.randn(1, 23, 9, 14))
    assert found.shape == (3, 23, 9, 14)


def test_valid_tiles_see_mirrored_context(network: Network) -> None:
    model = network(*VALID)
    image = torch.randn(1, 24, 24, 24)
    with torch.no_grad():
        expected = model(torch.nn.functional.pad(image[None], (20,) * 6, mode="reflect"))[0].softmax(0)
    found = predictor(model, (52, 52, 52), model.options).probabilities(image)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_valid_tiles_begin_on_multiples_of_the_total_stride() -> None:
    assert aligned_corners((100, 44, 28), (44, 44, 28), (8, 8, 8)) == [[0, 24, 56], [0], [0]]
    for length, window in product(range(1, 200), (4, 12, 28, 44)):
        (corners,) = aligned_corners((length,), (window,), (8,))
        stride = min(8, window)
        assert corners[0] == 0 and not any(corner % stride for corner in corners)
        assert all(0 < b - a <= window for a, b in pairwise(corners)), "no voxel is left out"
        assert length <= corners[-1] + window < max(length, window) + stride, "nor is a window far outside"


FULL = ("data.patch=[132,132,116]", "model.features=[4,4,4,4]")


def at_once(model: UNet3D, image: Tensor) -> Tensor:
    """Probabilities of the network run once over the mirrored volume, which is enlarged to a length that fits."""
    lengths = []
    for axis, n in enumerate(image.shape[1:]):
        border = 44 if geometry.kernels(model.options)[0][axis] == 3 else 0
        lengths.append((border, border + (4 - n) % 8 if border else 0))
    context = np.pad(image.numpy(), [(0, 0), *lengths], mode="reflect")
    with torch.no_grad():
        whole = model(torch.from_numpy(context)[None])[0].softmax(0)
    return whole[:, : image.shape[1], : image.shape[2], : image.shape[3]]


@pytest.mark.parametrize(
    ("overrides", "window", "sizes"),
    [
        (["model=cicek2016_no_bn"], (100, 100, 100), [(12, 4, 4), (21, 9, 5), (1, 14, 12)]),
        (["model=cicek2016_no_bn"], (108, 100, 92), [(45, 13, 4)]),
        (["model=cicek2016_2d", "model.norm=none"], (100, 108, 3), [(12, 20, 3), (47, 21, 7), (61, 100, 1)]),
    ],
    ids=["cubes", "other windows", "2D"],
)
def test_the_papers_tiles_are_the_network_run_once(
    network: Network, overrides: list, window: tuple, sizes: list
) -> None:
    """Up to the border, where the context is mirrored, and for volumes smaller than their context."""
    model = network(*overrides, *FULL)
    for size in sizes:
        image = torch.randn(3, *size)
        found = predictor(model, window, model.options).probabilities(image)
        torch.testing.assert_close(found, at_once(model, image), atol=1e-6, rtol=0)


def test_the_2d_network_sees_each_slice_by_itself(network: Network) -> None:
    model = network("model=cicek2016_2d", "model.norm=none", *FULL)
    image = torch.randn(3, 14, 9, 5)
    found = predictor(model, (100, 100, 4), model.options).probabilities(image)
    for index in range(5):
        alone = predictor(model, (100, 100, 1), model.options).probabilities(image[..., index : index + 1])
        torch.testing.assert_close(found[..., index : index + 1], alone, atol=1e-6, rtol=0)


def test_statistics_of_a_window_are_its_own(network: Network) -> None:
    """With the paper's batch norm a tile is the network on that window, and where tiles meet, their logits' mean."""
    model = network("model=cicek2016", *FULL)
    image = torch.randn(3, 20, 12, 12) * torch.linspace(1, 3, 20)[:, None, None]
    found = predictor(model, (100, 100, 100), model.options).probabilities(image)
    context = torch.from_numpy(np.pad(image.numpy(), [(0, 0), *[(44, 44)] * 3], mode="reflect"))
    with torch.no_grad():
        first, second = (model(context[None, :, start : start + 100])[0] for start in (0, 8))
        whole = model(context[None])[0].softmax(0)
    expected = torch.cat((first[:, :8], (first[:, 8:] + second[:, :4]) / 2, second[:, 4:]), dim=1).softmax(0)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    assert (whole - expected).abs().max() > 1e-3  # so the window belongs to what was trained


def test_mirroring_makes_the_prediction_symmetric(network: Network) -> None:
    model = network("model=unet_tiny")
    image = torch.randn(1, 16, 16, 16)
    mirrored = predictor(model, (16, 16, 16), mirror=(0, 1, 2))
    found = mirrored.probabilities(image)
    torch.testing.assert_close(mirrored.probabilities(image.flip(2)), found.flip(2), atol=1e-5, rtol=0)
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


def test_a_volume_thinner_than_a_tile_lies_where_training_puts_it(network: Network) -> None:
    """Else statistics of the window would be of slices that are repeated more or less often."""
    model = network("model=cicek2016_2d", "model.features=[4,8]", "model.in_channels=1", "model.classes=3")
    window, tile = (60, 60, 20), [44, 44, 20]
    image = np.random.default_rng(0).normal(size=(1, 44, 44, 7)).astype(np.float32)
    case = prepare("a", image, np.zeros((44, 44, 7), np.uint8), (1.0, 1.0, 1.0), None)
    centre = choose_centre(case, tile, 0, np.random.default_rng(0))
    patch, label = crop(case.image, case.label, centre, window, mirror=True)
    with torch.no_grad():
        seen = model.eval()(patch[None]).softmax(1)[0]
    there = (label[8:-8, 8:-8] != IGNORE).any(0).any(0)
    assert seen.shape[1:] == tuple(tile) and there.sum() == 7
    found = predictor(model, window, model.options).probabilities(case.image)
    torch.testing.assert_close(found, seen[..., there], atol=1e-5, rtol=0)

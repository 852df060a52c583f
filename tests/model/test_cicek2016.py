"""The 3D U-Net paper (Cicek et al. 2016, arXiv:1606.06650): its networks, what a voxel sees, what is learned from."""

from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from unet3d.base.types import IGNORE
from unet3d.config import compose
from unet3d.config.schema import Model
from unet3d.data.patches import prepare
from unet3d.model import geometry
from unet3d.model.blocks import crop
from unet3d.model.unet import UNet3D
from unet3d.training.losses import LossOptions, SegmentationLoss, ce

PATCH = "data.patch=[132,132,116]"
COUNTS = {"cicek2016": 19_069_955, "cicek2016_no_bn": 19_069_955, "cicek2016_2d": 6_817_091}
CHANGES = {"cicek2016_no_bn": {"norm": "none"}, "cicek2016_2d": {"kernels": [3, 3, 1], "strides": [2, 2, 1]}}


@pytest.fixture
def full(options: Callable[..., Model]) -> Callable[..., UNet3D]:
    """A network of the paper's width, without data."""

    def make(*overrides: str) -> UNet3D:
        with torch.device("meta"):
            return UNet3D(options(*overrides, PATCH))

    return make


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(("name", "expected"), COUNTS.items())
def test_parameters_are_as_many_as_the_header_says(full: Callable[..., UNet3D], name: str, expected: int) -> None:
    assert count(full(f"model={name}")) == expected
    header, *_ = (compose.config_folder() / "model" / f"{name}.yaml").read_text().splitlines()
    assert f" {expected:,} " in header


def test_scale_and_shift_of_the_batch_norm_give_the_papers_other_count(full: Callable[..., UNet3D]) -> None:
    assert count(full("model=cicek2016", "model.norm_affine=true")) == 19_074_627


@pytest.mark.parametrize("name", CHANGES)
def test_the_tables_other_columns_differ_in_nothing_else(options: Callable[..., Model], name: str) -> None:
    assert options(f"model={name}", PATCH) == replace(options("model=cicek2016", PATCH), **CHANGES[name])


@pytest.mark.parametrize("name", COUNTS)
def test_channel_plan(full: Callable[..., UNet3D], name: str) -> None:
    """Figure 2."""
    modules = list(full(f"model={name}").modules())
    widths = [(m.in_channels, m.out_channels) for m in modules if isinstance(m, nn.Conv3d)]
    encoder = [(3, 32), (32, 64), (64, 64), (64, 128), (128, 128), (128, 256), (256, 256), (256, 512)]
    decoder = [(768, 256), (256, 256), (384, 128), (128, 128), (192, 64), (64, 64), (64, 3)]
    assert widths == encoder + decoder
    raised = [(m.in_channels, m.out_channels) for m in modules if isinstance(m, nn.ConvTranspose3d)]
    assert raised == [(512, 512), (256, 256), (128, 128)]


def test_batch_norm_comes_before_each_relu(full: Callable[..., UNet3D]) -> None:
    units = [m for m in full("model=cicek2016").modules() if isinstance(m, nn.Sequential) and hasattr(m, "act")]
    assert [[type(layer) for layer in unit] for unit in units] == [[nn.Conv3d, nn.BatchNorm3d, nn.ReLU]] * 14


@pytest.mark.parametrize(
    ("name", "size", "expected"),
    [
        ("cicek2016", (132, 132, 116), (44, 44, 28)),
        ("cicek2016_no_bn", (132, 132, 116), (44, 44, 28)),
        ("cicek2016_2d", (108, 108, 108), (20, 20, 108)),
        ("cicek2016_2d", (132, 92, 1), (44, 4, 1)),
    ],
)
def test_tile_sizes(full: Callable[..., UNet3D], name: str, size: tuple, expected: tuple) -> None:
    model = full(f"model={name}")
    assert model(torch.empty(1, 3, *size, device="meta")).shape == (1, 3, *expected)
    assert geometry.output_size(size, model.options) == expected


def seen(model: UNet3D, size: tuple, voxels: Iterable[tuple]) -> dict[tuple, list[tuple[int, int]]]:
    """First and last input voxel that each of these output voxels depends on, along each axis.

    Under positive weights, an image that rises along every axis keeps every ReLU open and every pooling at the last
    voxel of its group; one that falls, at the first. So no path to the far ends is hidden from the gradient.
    """
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.abs_()
    model.requires_grad_(False)
    rising = sum(
        torch.arange(1.0, n + 1).reshape([-1 if a == axis else 1 for a in range(3)]) for axis, n in enumerate(size)
    )
    first, last = (gradients(model, image.expand(1, 3, *size), voxels) for image in (rising.flip(0, 1, 2), rising))
    return {
        voxel: list(zip(first[voxel].amin(0).tolist(), last[voxel].amax(0).tolist(), strict=True)) for voxel in voxels
    }


def gradients(model: UNet3D, image: Tensor, voxels: Iterable[tuple]) -> dict[tuple, Tensor]:
    """The input voxels by which each of these output voxels has a gradient."""
    image = image.clone().requires_grad_()
    logits = model(image)[0, 0]
    found = {}
    for voxel in voxels:
        (gradient,) = torch.autograd.grad(logits[voxel], image, retain_graph=True)
        found[voxel] = gradient[0, 0].nonzero()
    return found


@pytest.mark.parametrize(
    ("overrides", "size", "fields"),
    [
        pytest.param(
            ["model=cicek2016_no_bn", "model.features=[2,2,2,2]"],
            (100, 100, 100),
            {(0, 3, 4): [(0, 91), (0, 91), (0, 99)], (7, 8, 11): [(0, 99), (8, 99), (8, 99)]},
            marks=pytest.mark.slow,
        ),
        (
            ["model=cicek2016_no_bn", "model.features=[2,2,2]"],
            (52, 52, 52),
            {(0, 3, 4): [(0, 43), (0, 43), (4, 47)], (7, 8, 11): [(4, 47), (8, 51), (8, 51)]},
        ),
        (
            ["model=cicek2016_2d", "model.norm=none", "model.features=[2,2,2,2]"],
            (100, 100, 3),
            {(0, 4, 0): [(0, 91), (0, 99), (0, 0)], (3, 11, 1): [(0, 91), (8, 99), (1, 1)]},
        ),
    ],
    ids=["four levels", "three levels", "2D"],
)
def test_what_one_output_voxel_sees(network: Callable[..., UNet3D], overrides: list, size: tuple, fields: dict) -> None:
    """The paper's "approximate receptive field", 88 voxels, is what a tile loses: an output of 12 needs 12 + 88.

    Within it, a voxel sees 92 voxels in the first half of its group of 8 (the total stride) and 100 in the second.
    With three levels: 40, and 44 voxels anywhere. In 2D, one slice.
    """
    model = network(*overrides, PATCH)
    assert seen(model, size, fields) == fields


def test_batch_norm_takes_the_current_statistics_in_evaluation_too(network: Callable[..., UNet3D]) -> None:
    model = network("model=cicek2016", PATCH, "model.features=[4,4,4,4]")
    image = torch.randn(1, 3, 92, 92, 92)
    with torch.no_grad():
        training, evaluation = model.train()(image), model.eval()(image)
        louder = model(1 + 2 * image)
    assert torch.equal(training, evaluation)
    torch.testing.assert_close(louder, evaluation, atol=1e-4, rtol=0)  # the statistics are those of this very image
    assert {name.rpartition(".")[2] for name in model.state_dict()} == {"weight", "bias"}


WEIGHTS = torch.tensor([1.0, 2.0, 0.2])  # inside the tubule, tubule, background: the paper gives no values


def learn(model: UNet3D, image: Tensor, label: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The paper's loss, its gradient by the logits and by the parameters."""
    model.zero_grad()
    logits = model(image)
    logits.retain_grad()
    loss = SegmentationLoss(ce, LossOptions(WEIGHTS))(logits, label)
    loss.backward()
    assert logits.grad is not None
    return loss.detach(), logits.grad, [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.slow
def test_unlabelled_voxels_teach_nothing_and_labelled_ones_only_what_they_see(network: Callable[..., UNet3D]) -> None:
    """Label 3 is unlabelled. The labelled voxels 0 to 3 along x see the input's voxels 0 to 91."""
    model = network("model=cicek2016_no_bn", PATCH, "model.features=[2,2,2,2]")
    rng = np.random.default_rng(0)
    stored = np.full((100, 92, 92), 3, dtype=np.uint8)
    stored[44:48] = rng.integers(0, 4, (4, 92, 92))
    image = rng.standard_normal((3, 100, 92, 92), dtype=np.float32)
    case = prepare("kidney", image, stored, (1.0, 1.0, 1.0), ignore=3)
    images, labels = case.image[None], case.label[None]
    loss, by_logits, by_parameters = learn(model, images, labels)
    labelled = crop(labels, by_logits.shape[2:]) != IGNORE
    assert 0 < labelled.sum() < 64
    assert torch.equal(by_logits.abs().amax(1) > 0, labelled)

    beyond, within = images.clone(), images.clone()
    beyond[:, :, 92:] += 100
    within[:, :, 84:92] += 100
    same, other = learn(model, beyond, labels), learn(model, within, labels)
    assert torch.equal(same[0], loss) and all(map(torch.equal, same[2], by_parameters))
    assert not torch.equal(other[0], loss)

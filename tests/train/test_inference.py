"""The sliding window: complete, seamless where it must be, independent of sizes."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count, pairwise, product
from typing import Any

import numpy as np
import pytest
import torch
from guards import without
from promises import promise
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from training import probabilities

from unet3d import build
from unet3d.base.errors import NonFinitePrediction, UserError
from unet3d.base.types import IGNORE, ProbabilityBlock
from unet3d.config import compose
from unet3d.config.schema import Model
from unet3d.data.patches import choose_centre, crop, prepare
from unet3d.data.restore import ArgmaxCollector
from unet3d.memory.fake_tensors import fake_mode
from unet3d.memory.ledger import Ledger, most_held
from unet3d.memory.simulate import fitted
from unet3d.model import geometry
from unet3d.model.unet import UNet3D
from unet3d.training import inference
from unet3d.training.inference import (
    HostMemory,
    Predictor,
    aligned_corners,
    even_corners,
    free_bytes,
    gaussian,
    scan_order,
    sums_bytes,
)
from unet3d.training.policy import MemoryPolicy

Network = Callable[..., UNet3D]


def predictor(model: nn.Module, window: tuple, options: Model | None = None, **changes: object) -> Predictor:
    return Predictor((model,), options or Model(), MemoryPolicy(), window, **changes)


@promise(
    "Prediction",
    "windows of any number, overlap and padding; mirroring",
    "no seam, every voxel weighs in full; mirrored predictions are symmetric",
)
@pytest.mark.parametrize("size", [(8, 8, 8), (17, 9, 8), (5, 30, 3), (1, 1, 1)])
@pytest.mark.parametrize("overlap", [0.0, 0.5, 0.75])
def test_windows_of_any_number_leave_pointwise_logits_as_they_are(size: tuple, overlap: float) -> None:
    model = nn.Conv3d(1, 2, 1)
    image = torch.randn(1, *size)
    with torch.no_grad():
        expected = model(image[None])[0].softmax(0)
    found = probabilities(predictor(model, (8, 8, 8), overlap=overlap), image)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@promise(
    "Checkpoints",
    "sound weights whose outputs for an image are NaN or infinite, as where fp16 overflows",
    "`predict`, `score` and `segment` refuse the file; a validation ends the run with exit 4",
)
@pytest.mark.parametrize(
    ("value", "dtype", "advice"), [("nan", None, "checkpoint"), ("inf", torch.float16, "amp_dtype=bf16")]
)
def test_outputs_that_are_not_finite_are_refused(value: str, dtype: torch.dtype | None, advice: str) -> None:
    """NaN is more than no other number: such a voxel would be background."""
    image = torch.zeros(1, 9, 20, 9)
    found = replace(predictor(nn.Conv3d(1, 3, 1), (8, 8, 8)), policy=MemoryPolicy(dtype=dtype))
    probabilities(found, image)
    image[0, 8, 19, 0] = float(value)
    with pytest.raises(NonFinitePrediction, match=rf"^a: a\.nii: .*\bNaN\b.*\b{advice}\b"):
        ArgmaxCollector(found.strips(image, "a: a.nii")).whole()


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
TWO_LEVELS = ("model=unet_tiny", "model.features=[4,8]")
VALID_TWO_LEVELS = (*TWO_LEVELS, "model.padding=valid", "model.norm=none", "data.patch=[28,28,28]")  # 28 -> 12 voxels


def corners_anywhere(sizes: Sequence[int], window: Sequence[int], strides: Sequence[int]) -> list[list[int]]:
    """Return corners of tiles that need not be on multiples of the stride."""
    return aligned_corners(sizes, window, [1] * len(strides))


@promise("Prediction", "windows of any number ...")
@without("unet3d.training.inference.aligned_corners", corners_anywhere)
def test_valid_tiles_have_no_seams(network: Network) -> None:
    """Tiled and whole output are equal, and the volume needs no fitting size."""
    model = network(*VALID)
    image = torch.randn(1, 23, 9, 14)
    tiled = probabilities(predictor(model, (52, 52, 52), model.options), image)
    whole = probabilities(predictor(model, (64, 52, 60), model.options), image)
    assert tiled.shape == (3, 23, 9, 14)
    torch.testing.assert_close(tiled, whole, atol=1e-5, rtol=0)


def test_valid_tiles_of_strided_convolutions_fit_though_they_lose_an_odd_number_of_voxels(network: Network) -> None:
    model = network(*VALID, "model.downsampling=strided_conv", "data.patch=[51,51,51]")
    lost = 51 - geometry.output_size((51, 51, 51), model.options)[0]
    assert lost % 2
    found = probabilities(predictor(model, (51, 51, 51), model.options), torch.randn(1, 23, 9, 14))
    assert found.shape == (3, 23, 9, 14)


def test_valid_tiles_see_mirrored_context(network: Network) -> None:
    model = network(*VALID_TWO_LEVELS)
    image = torch.randn(1, 24, 24, 24)
    with torch.no_grad():
        expected = model(torch.nn.functional.pad(image[None], (8,) * 6, mode="reflect"))[0].softmax(0)
    found = probabilities(predictor(model, (28, 28, 28), model.options), image)
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
THREE_LEVELS = ("data.patch=[132,132,116]", "model.features=[4,4,4]")


def at_once(model: UNet3D, window: tuple[int, ...], image: Tensor) -> Tensor:
    """Probabilities of the network run once over the mirrored volume, which is enlarged to a length that fits."""
    context = [(0, 0)]
    output = geometry.output_size(window, model.options)
    for axis, n in enumerate(image.shape[1:]):
        border = (window[axis] - output[axis]) // 2
        length = next(m for m in count(n + 2 * border) if geometry.lengths(m, model.options, axis))
        context.append((border, length - n - border))
    padded = np.pad(image.numpy(), context, mode="reflect")
    with torch.no_grad():
        whole = model(torch.from_numpy(padded)[None])[0].softmax(0)
    return whole[:, : image.shape[1], : image.shape[2], : image.shape[3]]


@pytest.mark.parametrize(
    ("overrides", "window", "sizes"),
    [
        pytest.param(["model=cicek2016_no_bn", *FULL], (100, 92, 92), [(13, 4, 4)], marks=pytest.mark.slow),
        (["model=cicek2016_no_bn", *THREE_LEVELS], (52, 52, 52), [(12, 4, 4), (21, 9, 5), (1, 14, 12)]),
        (["model=cicek2016_no_bn", *THREE_LEVELS], (60, 52, 44), [(45, 13, 4)]),
        (["model=cicek2016_2d", "model.norm=none", *FULL], (100, 108, 3), [(12, 20, 3), (47, 21, 7), (61, 100, 1)]),
    ],
    ids=["the paper's", "cubes", "other windows", "2D"],
)
def test_the_papers_tiles_are_the_network_run_once(
    network: Network, overrides: list, window: tuple, sizes: list
) -> None:
    """Up to the border, where the context is mirrored, and for volumes smaller than their context."""
    model = network(*overrides)
    for size in sizes:
        image = torch.randn(3, *size)
        found = probabilities(predictor(model, window, model.options), image)
        torch.testing.assert_close(found, at_once(model, window, image), atol=1e-6, rtol=0)


def test_the_2d_network_sees_each_slice_by_itself(network: Network) -> None:
    model = network("model=cicek2016_2d", "model.norm=none", *FULL)
    image = torch.randn(3, 14, 9, 5)
    found = probabilities(predictor(model, (100, 100, 4), model.options), image)
    for index in range(5):
        alone = probabilities(predictor(model, (100, 100, 1), model.options), image[..., index : index + 1])
        torch.testing.assert_close(found[..., index : index + 1], alone, atol=1e-6, rtol=0)


def test_statistics_of_a_window_are_its_own(network: Network) -> None:
    """With the paper's batch norm a tile is the network on that window, and where tiles meet, their logits' mean."""
    model = network("model=cicek2016", *THREE_LEVELS)
    image = torch.randn(3, 20, 12, 12) * torch.linspace(1, 3, 20)[:, None, None]
    found = probabilities(predictor(model, (52, 52, 52), model.options), image)
    context = torch.from_numpy(np.pad(image.numpy(), [(0, 0), *[(20, 20)] * 3], mode="reflect"))
    with torch.no_grad():
        first, second = (model(context[None, :, start : start + 52])[0] for start in (0, 8))
        whole = model(context[None])[0].softmax(0)
    expected = torch.cat((first[:, :8], (first[:, 8:] + second[:, :4]) / 2, second[:, 4:]), dim=1).softmax(0)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    assert (whole - expected).abs().max() > 1e-3  # so the window belongs to what was trained


@promise("Prediction", "windows of any number ...")
def test_mirroring_makes_the_prediction_symmetric(network: Network) -> None:
    model = network("model=unet_tiny")
    image = torch.randn(1, 16, 16, 16)
    mirrored = predictor(model, (16, 16, 16), mirror=(0, 1, 2))
    found = probabilities(mirrored, image)
    torch.testing.assert_close(probabilities(mirrored, image.flip(2)), found.flip(2), atol=1e-5, rtol=0)
    plain = predictor(model, (16, 16, 16))
    assert not torch.allclose(probabilities(plain, image.flip(2)), probabilities(plain, image).flip(2), atol=1e-3)


def test_predicting_leaves_the_training_mode_and_no_gradient(network: Network) -> None:
    model = network("model=unet_tiny").train()
    found = probabilities(predictor(model, (16, 16, 16)), torch.randn(1, 5, 16, 20))
    assert model.training and not found.requires_grad
    assert found.shape == (3, 5, 16, 20)
    torch.testing.assert_close(found.sum(0), torch.ones(5, 16, 20))


@pytest.mark.parametrize("size", [(33, 17, 5), (31, 40, 24)])
def test_odd_sizes(network: Network, size: tuple) -> None:
    found: Tensor = probabilities(predictor(network("model=unet_tiny"), size), torch.randn(1, *size))
    assert found.shape == (3, *size)


def test_a_volume_thinner_than_a_tile_lies_where_training_puts_it(network: Network) -> None:
    """Else statistics of the window would be of slices that are repeated more or less often."""
    model = network("model=cicek2016_2d", "model.features=[4,8]", "model.in_channels=1", "model.classes=3")
    window = (28, 28, 20)
    tile = [12, 12, 20]
    image = np.random.default_rng(0).normal(size=(1, 12, 12, 7)).astype(np.float32)
    case = prepare("a", image, np.zeros((12, 12, 7), np.uint8), (1.0, 1.0, 1.0), None)
    centre = choose_centre(case, tile, 0, np.random.default_rng(0))
    patch, label = crop(case.image, case.label, centre, window, mirror=True)
    with torch.no_grad():
        seen = model.eval()(patch[None]).softmax(1)[0]
    there = (label[8:-8, 8:-8] != IGNORE).any(0).any(0)
    assert seen.shape[1:] == tuple(tile) and there.sum() == 7
    found = probabilities(predictor(model, window, model.options), case.image)
    torch.testing.assert_close(found, seen[..., there], atol=1e-5, rtol=0)


def dense(found: Predictor, image: Tensor) -> Tensor:
    """Probabilities from one sum over all windows of the whole volume, in the order of the strips."""
    out, sizes = geometry.output_size(found.window, found.options), image.shape[1:]
    lost = [w - o for w, o in zip(found.window, out, strict=True)]
    if any(lost):
        corners, weight = aligned_corners(sizes, out, (8, 8, 8)), torch.ones(out)
    else:
        corners, weight = even_corners(sizes, found.window, found.overlap), gaussian(out)
    total = [starts[-1] + w for starts, w in zip(corners, out, strict=True)]
    offset = [0 if any(lost) else (t - n) // 2 for t, n in zip(total, sizes, strict=True)]
    ends = [(o + c // 2, t - n - o + c - c // 2) for t, n, o, c in zip(total, sizes, offset, lost, strict=True)]
    padded = torch.from_numpy(np.pad(image.numpy(), [(0, 0), *ends], mode="reflect" if any(lost) else "constant"))
    sums, weights = torch.zeros(3, *total), torch.zeros(total)
    axes = next(iter(found.strips(image))).axes
    for corner in sorted(product(*corners), key=lambda corner: [corner[axis] for axis in axes]):
        seen, box = (tuple(slice(c, c + w) for c, w in zip(corner, size, strict=True)) for size in (found.window, out))
        with torch.no_grad():
            sums[:, *box] += found.window_logits(padded[:, *seen][None])[0] * weight
        weights[box] += weight
    inside = tuple(slice(o, o + n) for o, n in zip(offset, sizes, strict=True))
    return (sums / weights)[:, *inside].softmax(0)


def assert_dense(found: Predictor, size: tuple[int, ...]) -> tuple[int, ...]:
    """Labels of a volume equal those of dense probabilities; each voxel is in one strip. Returns the strips' axes."""
    image = torch.randn(1, *size, generator=torch.Generator().manual_seed(1))
    expected, times = dense(found, image), torch.zeros(size)
    for strip in found.strips(image):
        times[strip.box] += 1
    assert (times == 1).all()
    assert np.array_equal(ArgmaxCollector(found.strips(image)).whole(), expected.argmax(0))
    torch.testing.assert_close(probabilities(found, image), expected, atol=1e-6, rtol=0)
    return strip.axes


@promise(
    "Prediction",
    "a volume whose probabilities do not fit into memory",
    "the same labels, with the memory of a strip; an early end leaves no score",
)
@pytest.mark.parametrize(
    ("size", "window", "overlap"),
    [
        ((19, 9, 12), (8, 8, 8), 0.0),
        ((19, 9, 12), (4, 8, 12), 0.7),
        ((9, 21, 9), (8, 8, 8), 0.5),
        ((9, 21, 9), (4, 8, 12), 0.0),
        ((9, 13, 26), (8, 8, 8), 0.7),
        ((9, 13, 26), (4, 8, 12), 0.5),
        ((3, 15, 2), (8, 8, 8), 0.7),
        ((8, 8, 8), (8, 8, 8), 0.5),
        ((3, 2, 1), (4, 8, 12), 0.5),
    ],
)
def test_labels_by_strips_are_the_dense_ones(network: Network, size: tuple, window: tuple, overlap: float) -> None:
    assert_dense(predictor(network(*TWO_LEVELS), window, overlap=overlap), size)


def test_labels_by_strips_are_the_dense_ones_mirrored_and_of_two_networks(network: Network) -> None:
    first, second = network(*TWO_LEVELS), network(*TWO_LEVELS)
    for parameter in second.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    both = Predictor((first, second), first.options, MemoryPolicy(), (8, 8, 8), mirror=(0, 2))
    assert_dense(both, (10, 8, 17))
    image = torch.randn(1, 1, 8, 8, 8)
    views = [((), first), ((2,), first), ((4,), first), ((2, 4), first), ((), second), ((2,), second)]
    views += [((4,), second), ((2, 4), second)]
    with torch.no_grad():
        mean = torch.stack([model.eval()(image.flip(axes)).flip(axes)[0] for axes, model in views]).mean(0)
        torch.testing.assert_close(both.window_logits(image)[0], mean)


@pytest.mark.parametrize("size", [(23, 9, 14), (9, 29, 11), (11, 12, 37), (4, 4, 4)])
def test_labels_by_strips_are_the_dense_ones_of_valid_networks(network: Network, size: tuple) -> None:
    model = network(*VALID_TWO_LEVELS)
    assert_dense(predictor(model, (28, 28, 28), model.options), size)


@pytest.mark.parametrize("axes", [(0, 1, 2), (1, 0, 2), (2, 0, 1), (1, 2, 0), (0, 2, 1), (2, 1, 0)])
def test_strips_follow_the_axes_that_need_least_memory(network: Network, axes: tuple) -> None:
    """Slabs along the longest axis, so that what they share is smallest; strips along the shortest."""
    size = [0, 0, 0]
    for axis, length in zip(axes, (20, 14, 10), strict=True):
        size[axis] = length
    assert assert_dense(predictor(network(*TWO_LEVELS), (8, 8, 8)), tuple(size)) == axes


def most_bytes(size: tuple[int, ...], window: int, classes: int) -> int:
    """Most bytes that a prediction makes."""
    found, ledger = predictor(nn.Conv3d(1, classes, 1), (window,) * 3), Ledger()
    image = torch.randn(1, *size)
    with ledger:
        for _ in found.strips(image):
            pass
    return most_held(ledger.events) - image.nbytes


def worst_order(corners: Sequence[Sequence[int]], window: Sequence[int]) -> tuple[int, ...]:
    """Return the axes in the order that needs most memory."""
    return scan_order(corners, window)[::-1]


@promise("Prediction", "a volume whose probabilities ...")
@without("unet3d.training.inference.scan_order", worst_order)
def test_memory_is_that_of_a_strip_and_of_what_slabs_share_whatever_the_length() -> None:
    """Beside the window's own logits: K maps of 4 bytes, half a window deep across the volume, and one strip."""
    classes, w = 20, 16
    formula = 4 * (classes + 1) * (w // 2 * 32 * 40 + w * w * 32)
    extra = 4 * classes * w**3 + 20 * 4 * (w // 2) ** 2 * 32  # a window's logits; maps of single classes
    found = [most_bytes((length, 40, 32), w, classes) for length in (48, 96, 200)]
    assert found[0] == found[1] == found[2] <= formula + extra
    assert found[0] < 4 * classes * 200 * 40 * 32 / 5, "far below the whole volume's maps"


def test_a_network_that_changes_its_input_changes_no_image() -> None:
    image = torch.randn(1, 20, 8, 8)
    before = image.clone()
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Conv3d(1, 2, 1))
    probabilities(predictor(model, (8, 8, 8)), image)
    assert torch.equal(image, before)


def test_a_prediction_given_up_early_leaves_the_training_mode(network: Network) -> None:
    model = network("model=unet_tiny").train()
    strips = predictor(model, (16, 16, 16)).strips(torch.randn(1, 40, 16, 16))
    first: ProbabilityBlock = next(strips)
    assert not model.training and not first.probabilities.requires_grad and torch.is_grad_enabled()
    strips.close()
    assert model.training


@promise(
    "Prediction",
    "several windows in one pass, sums on a device",
    "probabilities are equal wherever sums are, on the CPU bit-identical; labels of single windows; one "
    "copy per strip to the host; a network that would mix windows sees one at a time; fewer on a smaller "
    "GPU",
)
def test_the_place_of_the_sums_changes_no_bit(network: Network) -> None:
    first, second = network(*TWO_LEVELS), network("model.norm=batch", *TWO_LEVELS)
    image = torch.randn(1, 10, 21, 17)
    both = Predictor((first, second), first.options, MemoryPolicy(), (8, 8, 8), mirror=(0, 2))
    host, device = (probabilities(replace(both, sums_on_device=place), image) for place in (False, True))
    assert torch.equal(host, device) and torch.equal(host, probabilities(both, image))


def moved_statistics(model: UNet3D) -> UNet3D:
    """Return the network after its batch normalisation has seen other images."""
    with torch.no_grad():
        model.train()(torch.randn(2, 1, 16, 16, 16) * 3 + 1)
    return model


SEVERAL = {
    "instance norm": ((*TWO_LEVELS,), (8, 8, 8), {}),
    "batch norm": (("model.norm=batch", *TWO_LEVELS), (8, 8, 8), {"overlap": 0.3}),
    "group norm": (("model.norm=group", "model.groups=2", *TWO_LEVELS), (4, 8, 12), {}),
    "mirrored": (("model.norm=none", *TWO_LEVELS), (8, 8, 8), {"mirror": (0, 2)}),
    "valid": (VALID_TWO_LEVELS, (28, 28, 28), {}),
}


@promise("Prediction", "several windows in one ...")
@pytest.mark.parametrize("batch", [2, 3, 100])
@pytest.mark.parametrize("name", SEVERAL)
def test_several_windows_at_once_give_the_labels_of_single_ones(network: Network, name: str, batch: int) -> None:
    """Also where their number is no multiple, and of a volume smaller than one."""
    words, window, changes = SEVERAL[name]
    model = network(*words)
    if name == "batch norm":
        moved_statistics(model)
    single = predictor(model, window, model.options, **changes)
    for size in ((19, 9, 12), (3, 15, 2), (2, 2, 2)):
        image = torch.randn(1, *size)
        several = probabilities(replace(single, batch=batch), image)
        torch.testing.assert_close(several, probabilities(single, image), atol=1e-5, rtol=0)
        labels = [ArgmaxCollector(found.strips(image)).whole() for found in (single, replace(single, batch=batch))]
        assert np.array_equal(*labels)


class Statistics(nn.Module):
    """A network of a user, with a batch normalisation by the current batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv3d(1, 3, 1), nn.BatchNorm3d(3, track_running_stats=False))

    def forward(self, image: Tensor) -> Tensor:
        return self.layers(image)


def seen_at_once(model: nn.Module, *words: str) -> int:
    """Return how many windows of this network one pass sees."""
    return build.windows(compose.compose(["batch=4", *words]), [model])


def test_windows_at_once_are_one_on_the_cpu_and_a_micro_batch_on_cuda(network: Network) -> None:
    model = network(*TWO_LEVELS)
    assert seen_at_once(model, "device=cpu") == 1
    assert seen_at_once(model, "device=cuda") == seen_at_once(model, "device=cuda", "ckpt=2") == 4
    assert seen_at_once(model, "device=cuda", "recompute=lean") == 1
    assert seen_at_once(model, "device=cpu", "inference.batch=3") == 3
    assert seen_at_once(model, "device=cuda", "inference.batch=3") == 3
    assert seen_at_once(network("model.norm=batch", *TWO_LEVELS), "device=cuda") == 4


@promise("Prediction", "several windows in one ...")
def test_windows_whose_statistics_would_mix_are_seen_one_at_a_time() -> None:
    assert seen_at_once(Statistics(), "device=cuda") == 1
    assert seen_at_once(Statistics(), "device=cuda", "inference.batch=1") == 1
    with pytest.raises(UserError, match=r"inference\.batch=2"):
        seen_at_once(Statistics(), "device=cuda", "inference.batch=2")


@pytest.mark.parametrize(
    "words", ["=0", "=4097", "=1.5", "=true", "=[1,2]", "=many", "=null", "=2 model.norm=batch_current"]
)
def test_other_numbers_of_windows_are_refused(words: str) -> None:
    with pytest.raises(UserError, match=r"inference\.batch="):
        compose.compose(f"inference.batch{words}".split())


class Arrivals(TorchDispatchMode):
    """Counts the copies between a device and the host, of so many numbers at least."""

    def __init__(self, least: int) -> None:
        super().__init__()
        self.least = least
        self.to = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default:
            there, here = args[0].device, result.device
        elif func is torch.ops.aten.copy_.default:
            there, here = args[1].device, args[0].device
        else:
            return result
        if there != here and result.numel() >= self.least:
            self.to[here.type] += 1
        return result


class Seen:
    """What a prediction of fake networks on a device of their own ("meta") does: 1x1x1 convolutions, 20 classes."""

    classes, window, size = 20, (8, 8, 8), (20, 12, 9)

    def __init__(self, **changes: object) -> None:
        corners = even_corners(self.size, self.window, 0.5)
        self.windows = len([*product(*corners)])
        self.needed = sums_bytes(corners, self.window, self.classes)
        self.ledger = Ledger(device_type="meta")
        arrivals = Arrivals(8**3 + 1)  # which a window's weights have not
        self.strips = 0
        self.were_on_host = True
        with fake_mode(), arrivals, self.ledger:
            model = nn.Conv3d(1, self.classes, 1, device="meta")
            found = predictor(model, self.window, Model(in_channels=1, classes=self.classes), **changes)
            for strip in found.strips(torch.zeros(1, *self.size)):
                self.strips += 1
                self.were_on_host &= strip.probabilities.device.type == "cpu"
        self.copies = arrivals.to["cpu"]


@promise("Prediction", "several windows in one ...")
@pytest.mark.parametrize("batch", [1, 4])
def test_sums_on_a_device_cost_a_copy_a_strip_and_sums_on_the_host_one_a_pass(batch: int) -> None:
    device, host = Seen(batch=batch, sums_on_device=True), Seen(batch=batch, sums_on_device=False)
    assert device.were_on_host and host.were_on_host and device.strips == host.strips < device.windows
    assert device.copies == device.strips
    assert host.copies == -(-host.windows // batch)


@pytest.mark.parametrize("batch", [1, 4])
def test_the_bytes_of_sums_are_those_that_a_device_holds(batch: int) -> None:
    """Sums and their weights, and the window's weights; beside them the pass, or the strip's copy."""
    seen = Seen(batch=batch, sums_on_device=True)
    window = 4 * 8**3
    sums = [s.bytes for s in seen.ledger.storages if s.shape[:1] == (seen.classes + 1,)]
    strip = sums[0] // (seen.classes + 1) * seen.classes
    assert len(sums) == 2 and sum(sums) + window + strip == seen.needed
    a_pass = batch * (1 + 1 + seen.classes) * window  # tiles, their copies for the network, logits
    weights = 4 * 2 * seen.classes
    assert sum(sums) + window < most_held(seen.ledger.events) <= seen.needed + a_pass + weights
    elsewhere = Seen(batch=batch, sums_on_device=False)
    assert most_held(elsewhere.ledger.events) == a_pass + weights


def test_sums_are_on_the_device_where_they_fit_beside_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    window_bytes = 1000
    needed = Seen().needed + window_bytes
    for free, is_there in ((needed, True), (needed - 1, False), (0, False)):
        monkeypatch.setattr(inference, "free_bytes", lambda device, free=free: free)
        seen = Seen(window_bytes=window_bytes)
        assert (seen.copies == seen.strips) == is_there
    monkeypatch.setattr(inference, "free_bytes", lambda device: needed)
    unknown = Seen()
    assert unknown.copies == unknown.windows, "what a pass needs is not known"


def test_only_a_gpu_has_memory_for_sums_of_its_own() -> None:
    assert free_bytes(torch.device("cpu")) == 0


def test_free_memory_is_what_a_gpu_and_torchs_cache_have_less_an_eighth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3000, 8000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 500)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 200)
    assert free_bytes(torch.device("cuda")) == 3000 + 300 - 1000


@promise("Prediction", "several windows in one ...")
def test_fewer_windows_at_once_where_a_device_has_less(network: Network) -> None:
    model = network(*TWO_LEVELS)
    options = replace(model.options, in_channels=1, classes=3)
    asked = predictor(model, (8, 8, 8), options, batch=6)
    needs = {n: fitted(replace(asked, batch=n)).window_bytes for n in (1, 3, 6)}
    state = torch.get_rng_state()
    for free, batch in ((needs[6], 6), (needs[6] - 1, 3), (needs[3] - 1, 1), (0, 1)):
        found = fitted(asked, free)
        assert (found.batch, found.window_bytes) == (batch, needs[batch])
    assert torch.equal(torch.get_rng_state(), state)


def test_a_result_in_host_memory_takes_the_place_of_the_last() -> None:
    host = HostMemory(is_pinned=False)
    large, small = torch.randn(3, 4, 5), torch.randn(4, 3).T
    first = host.take(large)
    assert torch.equal(first, large) and first.data_ptr() != large.data_ptr()
    second = host.take(small)
    assert torch.equal(second, small) and second.data_ptr() == first.data_ptr()

"""The sliding window: complete, seamless where it must be, independent of sizes."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import count, pairwise, product
from typing import Any

import numpy as np
import pytest
import torch
from guards import without
from hypothesis import given
from hypothesis import strategies as st
from promises import promise
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from training import probabilities

from unet3d import build
from unet3d.base.errors import NonFinitePrediction, UserError
from unet3d.base.types import IGNORE
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
    Predictor,
    aligned_corners,
    even_corners,
    free_bytes,
    gaussian,
    pad,
    scan_order,
    sums_bytes,
)
from unet3d.training.policy import MemoryPolicy

Network = Callable[..., UNet3D]
TWO_LEVELS = ("model=unet_tiny", "model.features=[4,8]")
VALID = ("model=unet_tiny", "model.padding=valid", "model.norm=none")
PAPERS = ("model=cicek2016", "model.norm=none", "data.patch=[132,132,116]", "model.features=[4,4,4]")


def predictor(model: nn.Module, window: tuple, options: Model | None = None, **changes: object) -> Predictor:
    return Predictor((model,), options or Model(), MemoryPolicy(), window, **changes)


def dense(found: Predictor, image: Tensor) -> Tensor:
    """Probabilities of a padded network from one sum over all windows of the whole volume."""
    model, window = found.models[0], found.window
    corners = even_corners(image.shape[1:], window, found.overlap)
    padded, offset = pad(image, corners, window, window, (1, 1, 1))
    sums = torch.zeros(3, *padded.shape[1:])
    for corner in product(*corners):
        box = [slice(start, start + length) for start, length in zip(corner, window, strict=True)]
        logits = model(padded[:, *box][None])[0].detach()
        sums[:, *box] += torch.cat((logits, torch.ones(1, *window))) * gaussian(window)
    inside = [slice(start, start + length) for start, length in zip(offset, image.shape[1:], strict=True)]
    return (sums[:2] / sums[2])[:, *inside].softmax(0)


@promise(
    "Prediction",
    "a volume whose probabilities do not fit into memory",
    "the same labels, with the memory of a strip; an early end leaves no score",
)
@promise(
    "Prediction",
    "windows of any number, overlap and padding; mirroring",
    "no seam, every voxel weighs in full; mirrored predictions are symmetric",
)
@given(
    size=st.tuples(*[st.integers(1, 20)] * 3),
    window=st.tuples(*[st.integers(4, 12)] * 3),
    overlap=st.sampled_from([0.0, 0.5, 0.7]),
)
def test_strips_are_parts_of_one_sum_over_all_windows(size: tuple, window: tuple, overlap: float) -> None:
    torch.manual_seed(0)
    found, image = predictor(nn.Conv3d(1, 2, 3, padding=1), window, overlap=overlap), torch.randn(1, *size)
    expected, times = dense(found, image), torch.zeros(size)
    for strip in found.strips(image):
        times[strip.box] += 1
    assert (times == 1).all()
    torch.testing.assert_close(probabilities(found, image), expected, atol=1e-6, rtol=0)
    labels = torch.from_numpy(ArgmaxCollector(found.strips(image)).whole())
    chosen = expected.gather(0, labels[None].long())
    torch.testing.assert_close(chosen[0], expected.amax(0), atol=1e-6, rtol=0)


@given(size=st.integers(1, 200), window=st.integers(4, 44), overlap=st.floats(0, 0.75))
def test_windows_cover_everything_and_reach_less_than_a_stride_beyond(size: int, window: int, overlap: float) -> None:
    (even,), (aligned,) = even_corners([size], [window], overlap), aligned_corners([size], [window], [8])
    stride = min(8, window)
    assert even[-1] == max(0, size - window)
    assert all(b - a <= window * (1 - overlap) + 1 for a, b in pairwise(even))
    assert all(b - a <= window for a, b in pairwise(aligned))
    assert size <= aligned[-1] + window < max(size, window) + stride


def test_gaussian_is_centred_symmetric_and_positive() -> None:
    weight = gaussian((9, 8, 7))
    assert torch.equal(weight, weight.flip((0, 1, 2)))
    assert weight[4, 3, 3] == weight.max() and weight.min() > 0


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


def at_once(model: UNet3D, window: tuple[int, ...], image: Tensor) -> Tensor:
    """Probabilities of a valid network run once over the mirrored volume, enlarged to a length that fits."""
    context = [(0, 0)]
    for axis, n in enumerate(image.shape[1:]):
        lost = window[axis] - geometry.output_size(window, model.options)[axis]
        length = next(m for m in count(n + lost) if geometry.lengths(m, model.options, axis))
        context.append((lost // 2, length - n - lost // 2))
    padded = np.pad(image.numpy(), context, mode="reflect")
    with torch.no_grad():
        whole = model(torch.from_numpy(padded)[None])[0].softmax(0)
    return whole[:, *map(slice, image.shape[1:])]


def corners_anywhere(sizes: Sequence[int], window: Sequence[int], strides: Sequence[int]) -> list[list[int]]:
    """Return corners of tiles that need not be on multiples of the stride."""
    return aligned_corners(sizes, window, [1] * len(strides))


@promise("Prediction", "windows of any number ...")
@without("unet3d.training.inference.aligned_corners", corners_anywhere, only="cubes")
@pytest.mark.parametrize(
    ("words", "window", "sizes"),
    [
        (PAPERS, (52, 52, 52), [(12, 4, 4), (21, 9, 5), (1, 14, 12)]),
        (PAPERS, (60, 52, 44), [(45, 13, 4)]),
        ((*PAPERS, "model=cicek2016_2d", "model.features=[4,4,4,4]"), (100, 108, 3), [(47, 21, 7), (61, 100, 1)]),
        ((*VALID, "model.downsampling=strided_conv", "data.patch=[51,51,51]"), (51, 51, 51), [(23, 9, 14)]),
    ],
    ids=["cubes", "other windows", "2D", "an odd number of voxels is lost"],
)
def test_tiles_of_valid_networks_are_the_network_run_once(
    network: Network, words: tuple, window: tuple, sizes: list
) -> None:
    """Up to the border, where the context is mirrored, and for volumes smaller than their context."""
    model = network(*words)
    for size in sizes:
        image = torch.randn(model.options.in_channels, *size)
        found = probabilities(predictor(model, window, model.options), image)
        torch.testing.assert_close(found, at_once(model, window, image), atol=1e-6, rtol=0)


def test_a_volume_thinner_than_a_tile_lies_where_training_puts_it() -> None:
    """Along an axis without stride; else statistics of the window would be of slices repeated more or less often."""
    window, tile, image = (28, 28, 20), (12, 12, 20), torch.ones(1, 12, 12, 7)
    case = prepare("a", image.numpy(), np.zeros((12, 12, 7), np.uint8), (1.0, 1.0, 1.0), None)
    centre = choose_centre(case, [*tile], 0, np.random.default_rng(0))
    _, label = crop(case.image, case.label, centre, window, mirror=True)
    (z,) = np.flatnonzero(label[14, 14] != IGNORE)[:1]
    assert pad(image, [[0]] * 3, window, tile, (4, 4, 1))[1] == [0, 0, z] == [0, 0, 6]


@promise("Prediction", "windows of any number ...")
def test_predictions_are_means_over_networks_and_mirrorings_and_so_symmetric(network: Network) -> None:
    models = network(*TWO_LEVELS), network(*TWO_LEVELS, "model.norm=batch")
    both = Predictor(models, models[0].options, MemoryPolicy(), (8, 8, 8), mirror=(0, 2))
    image = torch.randn(1, 1, 12, 8, 8)
    found = probabilities(both, image[0])
    torch.testing.assert_close(probabilities(both, image[0].flip(1)), found.flip(1), atol=1e-5, rtol=0)
    views = product([model.eval() for model in models], ((), (2,), (4,), (2, 4)))
    mean = torch.stack([model(image.flip(axes)).flip(axes) for model, axes in views]).mean(0)
    torch.testing.assert_close(both.window_logits(image), mean)


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
    found = []
    for length in (48, 200):
        image, ledger = torch.randn(1, length, 40, 32), Ledger()
        with ledger:
            list(predictor(nn.Conv3d(1, classes, 1), (w, w, w)).strips(image))
        found.append(most_held(ledger.events) - image.nbytes)
    assert found[0] == found[1] <= formula + extra


def test_a_prediction_given_up_early_leaves_the_training_mode_and_the_image() -> None:
    model, image = nn.Sequential(nn.ReLU(inplace=True), nn.Conv3d(1, 2, 1)).train(), torch.randn(1, 20, 8, 8)
    before, strips = image.clone(), predictor(model, (8, 8, 8)).strips(image)
    first = next(strips)
    assert not model.training and not first.probabilities.requires_grad and torch.is_grad_enabled()
    strips.close()
    assert model.training and torch.equal(image, before)


SEVERAL = {
    "batch norm": ((*TWO_LEVELS, "model.norm=batch"), (8, 8, 8), {"overlap": 0.3}),
    "mirrored": (TWO_LEVELS, (4, 8, 12), {"mirror": (0, 2)}),
    "valid": ((*TWO_LEVELS, *VALID[1:], "data.patch=[28,28,28]"), (28, 28, 28), {}),
}


@promise(
    "Prediction",
    "several windows in one pass, sums on a device",
    "probabilities are equal wherever sums are, on the CPU bit-identical; labels of single windows but for rounding; "
    "one copy per strip to the host; a network that would mix windows sees one at a time; fewer on a smaller "
    "GPU",
)
@pytest.mark.parametrize("name", SEVERAL)
def test_neither_windows_at_once_nor_the_place_of_sums_change_labels(network: Network, name: str) -> None:
    """Also where the number of windows is no multiple, and of a volume smaller than one."""
    words, window, changes = SEVERAL[name]
    model = network(*words)
    with torch.no_grad():
        model.train()(torch.randn(2, 1, 28, 28, 28) * 3 + 1)  # moves running statistics
    single = predictor(model, window, model.options, **changes)
    several = replace(single, batch=3)
    for size in ((19, 9, 12), (2, 2, 2)):
        image = torch.randn(1, *size)
        found = probabilities(several, image)
        torch.testing.assert_close(found, probabilities(single, image), atol=1e-5, rtol=0)
        assert np.array_equal(*[ArgmaxCollector(way.strips(image)).whole() for way in (single, several)])
        for is_on_device in (False, True):
            assert torch.equal(probabilities(replace(several, sums_on_device=is_on_device), image), found)


MIXING = nn.Sequential(nn.Conv3d(1, 3, 1), nn.BatchNorm3d(3, track_running_stats=False))


@promise("Prediction", "several windows in one ...")
@pytest.mark.parametrize(
    ("model", "words", "windows"),
    [
        (nn.BatchNorm3d(3), "device=cpu", 1),
        (nn.BatchNorm3d(3), "device=cpu inference.batch=3", 3),
        (nn.BatchNorm3d(3), "device=cuda", 4),
        (nn.BatchNorm3d(3), "device=cuda ckpt=2", 4),
        (nn.BatchNorm3d(3), "device=cuda recompute=lean", 1),
        (MIXING, "device=cuda", 1),
        (MIXING, "device=cuda inference.batch=2", 0),
        (MIXING, "inference.batch=4097", 0),
        (MIXING, "inference.batch=2 model.norm=batch_current", 0),
    ],
)
def test_one_pass_sees_a_window_on_the_cpu_and_a_micro_batch_on_cuda_unless_that_would_mix_them(
    model: nn.Module, words: str, windows: int
) -> None:
    with nullcontext() if windows else pytest.raises(UserError, match=r"inference\.batch="):
        assert build.windows(compose.compose(["batch=4", *words.split()]), [model]) == windows


class Arrivals(TorchDispatchMode):
    """Counts tensors on the host that are made of a device's."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        devices = [tensor.device.type for tensor in (*args, result) if isinstance(tensor, Tensor)]
        self.count += devices[-1:] == ["cpu"] and "meta" in devices
        return result


CLASSES, WINDOWS = 20, even_corners((20, 12, 9), (8, 8, 8), 0.5)


def copies_strips_bytes(**changes: object) -> tuple[int, int, int]:
    """Return how often a prediction of a fake network on a device ("meta") copies to the host, its strips and bytes."""
    ledger = Ledger(device_type="meta")
    with fake_mode(), Arrivals() as arrivals, ledger:
        options = Model(in_channels=1, classes=CLASSES)
        found = predictor(nn.Conv3d(1, CLASSES, 1, device="meta"), (8, 8, 8), options, **changes)
        devices = [strip.probabilities.device.type for strip in found.strips(torch.zeros(1, 20, 12, 9))]
    assert {*devices} == {"cpu"}
    return arrivals.count, len(devices), most_held(ledger.events)


@promise("Prediction", "several windows in one ...")
@pytest.mark.parametrize(("batch", "passes"), [(1, 16), (5, 4)])
def test_sums_on_a_device_cost_a_copy_a_strip_and_sums_on_the_host_one_a_pass(batch: int, passes: int) -> None:
    copies, strips, held = copies_strips_bytes(batch=batch, sums_on_device=True)
    assert copies == strips < 16
    *others, of_a_pass = copies_strips_bytes(batch=batch, sums_on_device=False)
    assert others == [passes, strips]
    # What is predicted, but for the copy of a strip, for which no pass waits.
    assert held - of_a_pass == sums_bytes(WINDOWS, (8, 8, 8), CLASSES) - 4 * CLASSES * 8 * 8 * 9


@pytest.mark.parametrize(("free", "window_bytes", "is_there"), [(0, 1000, True), (-1, 1000, False), (0, None, False)])
def test_sums_are_on_the_device_where_they_fit_beside_a_pass(
    monkeypatch: pytest.MonkeyPatch, free: int, window_bytes: int | None, is_there: bool
) -> None:
    needed = sums_bytes(WINDOWS, (8, 8, 8), CLASSES) + 1000
    monkeypatch.setattr(inference, "free_bytes", lambda device: needed + free)
    copies, strips, _ = copies_strips_bytes(window_bytes=window_bytes)
    assert copies == (strips if is_there else 16)


def test_free_memory_is_what_a_gpu_and_torchs_cache_have_less_an_eighth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3000, 8000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 500)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 200)
    assert free_bytes(torch.device("cuda")) == 3000 + 300 - 1000
    assert free_bytes(torch.device("cpu")) == 0


@promise("Prediction", "several windows in one ...")
def test_fewer_windows_at_once_where_a_device_has_less(network: Network) -> None:
    model = network(*TWO_LEVELS)
    asked = predictor(model, (8, 8, 8), replace(model.options, in_channels=1, classes=3), batch=6)
    needs = {n: fitted(replace(asked, batch=n)).window_bytes for n in (1, 3, 6)}
    state = torch.get_rng_state()
    for free, batch in ((needs[6], 6), (needs[6] - 1, 3), (needs[3] - 1, 1), (0, 1)):
        found = fitted(asked, free)
        assert (found.batch, found.window_bytes) == (batch, needs[batch])
    assert torch.equal(torch.get_rng_state(), state)

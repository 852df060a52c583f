"""Losses against the formula written out, with ignored voxels, in half precision, over several scales."""

import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from calls import Calls
from promises import promise
from torch import Tensor

from unet3d import build
from unet3d.base.types import IGNORE
from unet3d.config import compose
from unet3d.config.schema import LOSSES as NAMES
from unet3d.config.schema import Config
from unet3d.memory.ledger import Ledger, most_held
from unet3d.training import losses
from unet3d.training.losses import (
    IN_CHUNKS,
    LOSSES,
    SMOOTH,
    LossOptions,
    LossTerm,
    SegmentationLoss,
    ce,
    dice,
    dice_ce,
    subsample,
)

ROOT = Path(losses.__file__).parents[2]


def of_the_guide() -> LossTerm:
    """Return the loss that docs/extending.md shows how to write; of any in the package, these tests ask the same."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "extending.md").read_text(), re.DOTALL)
    (block,) = (block for block in blocks if "def focal" in block)
    names: dict[str, LossTerm] = {}
    exec(block, names)
    return names["focal"]


every_loss = pytest.mark.parametrize("function", [*LOSSES.values(), of_the_guide()], ids=[*LOSSES, "of the guide"])


def example() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, 6, 5, 4, generator=generator)
    return logits, torch.randint(0, 3, (2, 6, 5, 4), generator=generator).short()


@pytest.fixture
def mine() -> Iterator[LossTerm]:
    """A loss of one's own: `1 - probability` of the labelled class, if it got what every loss gets."""

    @losses.loss(about="1 - probability")
    def mine(logits: Tensor, label: Tensor, options: LossOptions) -> Tensor:
        assert (logits.dtype, label.dtype, options.batch_dice) == (torch.float32, torch.int64, True)
        return (1 - logits.softmax(1).gather(1, label.clamp(min=0)[:, None])).mean()

    yield mine
    del LOSSES["mine"]


def test_a_decorated_function_is_a_loss_by_its_name(mine: LossTerm) -> None:
    config = Config()
    config.loss.name = "mine"
    logits, label = example()
    assert build.loss(config, 3)(logits.bfloat16(), label) == SegmentationLoss(mine)(logits.bfloat16(), label) > 0


def test_the_names_can_be_read_without_torch() -> None:
    """The config, its help and its errors read them so."""
    assert [*NAMES] == [*LOSSES] and {*LOSSES.values()} >= IN_CHUNKS == {ce, dice, dice_ce}


def test_cross_entropy_is_torchs() -> None:
    logits, label = example()
    torch.testing.assert_close(SegmentationLoss(ce)(logits, label), F.cross_entropy(logits, label.long()))
    weights = torch.tensor([0.2, 1.0, 3.0])
    expected = F.cross_entropy(logits, label.long(), weights)
    torch.testing.assert_close(SegmentationLoss(ce, LossOptions(weights))(logits, label), expected)


def test_weights_and_ignored_voxels_together_are_torchs_mean_and_gradient() -> None:
    """The labelled voxels' sum by the sum of their weights: the paper's weighted softmax, weight 0 elsewhere."""
    weights = torch.tensor([1.0, 2.0, 0.2])
    logits, label = example()
    label[torch.rand(label.shape, generator=torch.Generator().manual_seed(1)) < 0.7] = IGNORE
    ours, torchs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    value = SegmentationLoss(ce, LossOptions(weights))(ours, label)
    expected = F.cross_entropy(torchs, label.long(), weights, ignore_index=IGNORE)
    (value + expected).backward()
    torch.testing.assert_close(value, expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(ours.grad, torchs.grad, atol=1e-6, rtol=0)
    by_hand = weights[label.clamp(min=0).long()] * (label != IGNORE)
    surprise = -logits.log_softmax(1).gather(1, label.clamp(min=0)[:, None].long())[:, 0]
    torch.testing.assert_close(value, (by_hand * surprise).sum() / by_hand.sum(), atol=1e-6, rtol=0)


@pytest.mark.parametrize(("batch_dice", "axes"), [(True, (0, 2, 3, 4)), (False, (2, 3, 4))])
def test_dice_is_the_one_hot_formula(batch_dice: bool, axes: tuple[int, ...]) -> None:
    logits, label = example()
    found = SegmentationLoss(dice, LossOptions(batch_dice=batch_dice))(logits, label)
    p = logits.double().softmax(1)[:, 1:]
    t = F.one_hot(label.long(), 3).permute(0, 4, 1, 2, 3)[:, 1:].double()
    expected = 1 - (2 * (p * t).sum(axes) / (p.sum(axes) + t.sum(axes))).mean()
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=0)


def test_dice_ce_is_the_sum() -> None:
    logits, label = example()
    parts = SegmentationLoss(ce)(logits, label) + SegmentationLoss(dice)(logits, label)
    torch.testing.assert_close(SegmentationLoss(dice_ce)(logits, label), parts, atol=1e-6, rtol=0)


def plain(name: str, logits: Tensor, label: Tensor, options: LossOptions) -> Tensor:
    """The formulas on whole maps, for autograd to differentiate."""
    valid = (label != IGNORE)[:, None]
    truth = F.one_hot(label.clamp(min=0).long(), logits.shape[1]).movedim(-1, 1) * valid
    weights = torch.ones(logits.shape[1]) if options.weights is None else options.weights
    weighed = truth * weights.to(logits)[:, None, None, None]
    value = -(logits.log_softmax(1) * weighed).sum() / weighed.sum() if name != "dice" else logits.new_zeros(())
    if name != "ce":
        axes = (0, 2, 3, 4) if options.batch_dice else (2, 3, 4)
        p, t = (logits.softmax(1) * valid)[:, 1:], truth[:, 1:]
        score = (2 * (p * t).sum(axes) + SMOOTH) / ((p + t).sum(axes) + SMOOTH)
        value = value + 1 - score.mean()
    return value


@pytest.mark.parametrize("weights", [None, torch.rand(7, dtype=torch.float64) + 0.1], ids=("even", "weighted"))
@pytest.mark.parametrize(("batch_dice", "chunk"), [(True, 900), (False, None)], ids=("ten chunks", "as on the CPU"))
@pytest.mark.parametrize("function", IN_CHUNKS)
def test_value_and_gradient_are_those_of_whole_maps(
    function: LossTerm, batch_dice: bool, chunk: int | None, weights: Tensor
) -> None:
    generator, convolution = torch.Generator().manual_seed(0), torch.nn.Conv3d(2, 7, 1).double()
    image = torch.randn(2, 2, 19, 6, 5, generator=generator, dtype=torch.float64)
    label = torch.randint(-2, 7, (2, 19, 6, 5), generator=generator)
    label[label < 0] = IGNORE
    found = []
    for loss in (function, functools.partial(plain, function.__name__)):
        convolution.zero_grad()
        value = loss(convolution(image), label, LossOptions(weights, batch_dice, chunk))
        (3 * value).backward()
        assert convolution.weight.grad is not None
        found.append((value.detach(), convolution.weight.grad))
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-14)


@every_loss
def test_a_deterministic_loss_is_the_same_to_the_bit(function: LossTerm) -> None:
    logits, label = example()
    label[:, 2:4] = IGNORE
    results = []
    for is_deterministic in (False, True):
        torch.use_deterministic_algorithms(is_deterministic)
        try:
            x = logits.clone().requires_grad_()
            value = SegmentationLoss(function)(x, label)
            value.backward()
        finally:
            torch.use_deterministic_algorithms(False)
        results.append((value.detach(), x.grad))
    (value, gradient), (other, other_gradient) = results
    assert torch.equal(value, other) and torch.equal(gradient, other_gradient)


def test_the_gradient_is_written_over_logits_that_nothing_else_needs() -> None:
    """An output that its operation has kept, or that someone still holds, stays as it is."""
    image, label = torch.randn(1, 2, 6, 5, 4), torch.zeros(1, 6, 5, 4, dtype=torch.int16)
    convolution, places = torch.nn.Conv3d(2, 3, 1), list[bool]()
    for after, holds in ((torch.nn.Identity(), False), (torch.nn.Identity(), True), (torch.nn.Sigmoid(), False)):
        logits = after(convolution(image))
        place, before = logits.data_ptr(), logits.detach().clone()
        logits.grad_fn.register_prehook(lambda grads, place=place: places.append(grads[0].data_ptr() == place))
        value = dice_ce(logits, label, LossOptions())
        held = logits if holds else None
        del logits
        value.backward()
        assert held is None or torch.equal(held, before)
    assert places == [True, False, False]


def test_many_classes_need_little_more_than_their_logits() -> None:
    """A map for each class would take four times as much, and time that grows with the square of their number."""
    image, label = torch.randn(1, 1, 48, 16, 16), torch.zeros(1, 48, 16, 16, dtype=torch.int16)
    convolution, ledger = torch.nn.Conv3d(1, 105, 1), Ledger()
    with ledger:
        logits = convolution(image)
        size, before = logits.nbytes, ledger.alive_bytes()[-1] - logits.nbytes
        value = dice_ce(logits, label, LossOptions())
        del logits
        value.backward()
    assert most_held(ledger.events) - before < 1.4 * size


@pytest.mark.parametrize(
    ("length", "chunk", "chunks"),
    [(2, None, 1), (4, None, 2), (128, None, 16), (128, 2**22, 1), (128, 2**16, 3), (128, 1, 128)],
)
def test_a_map_is_cut_into_chunks_by_its_size(length: int, chunk: int | None, chunks: int) -> None:
    """Of 2 images and 3 classes, 15 x 16 voxels wide: 1440 numbers a row."""
    logits, calls = torch.randn(2, 3, length, 15, 16), Calls()
    with calls:
        dice_ce(logits, torch.zeros(2, length, 15, 16, dtype=torch.int16), LossOptions(chunk=chunk))
    assert calls.counts[torch.ops.aten._log_softmax.default] == chunks


def test_for_a_gpu_small_maps_are_computed_whole_with_weights_on_the_device() -> None:
    config = compose.compose(["device=cuda", "loss.weights=[1,2,3]"])
    options = build.loss(config, 3, "meta").options
    assert options.chunk is not None and options.chunk >= 2 * 3 * 64**3
    assert options.weights is not None and options.weights.device.type == "meta"


@pytest.mark.parametrize("weights", [None, torch.tensor([0.5, 1.0, 2.0])])
@every_loss
def test_ignored_voxels_count_for_nothing(function: LossTerm, weights: Tensor | None) -> None:
    """The loss of a volume whose border is ignored is the loss of the volume without the border."""
    loss = SegmentationLoss(function, LossOptions(weights))
    logits, label = example()
    label[:, 4:] = IGNORE
    logits.requires_grad_()
    value = loss(logits, label)
    torch.testing.assert_close(value, loss(logits[:, :, :4], label[:, :4]))
    value.backward()
    assert logits.grad is not None
    assert logits.grad[:, :, 4:].abs().max() == 0 < logits.grad[:, :, :4].abs().max()


@promise("Training", "a patch of which every voxel is ignored", "the loss and its gradients are 0")
@every_loss
def test_nothing_but_ignored_voxels_gives_zero_and_zero_gradients(function: LossTerm) -> None:
    logits, label = example()
    logits.requires_grad_()
    value = SegmentationLoss(function)(logits, torch.full_like(label, IGNORE))
    value.backward()
    assert value.item() == 0
    assert logits.grad is not None and logits.grad.abs().max() == 0


@promise("Training", "half-precision logits of a large patch", "the loss is summed in float32")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@every_loss
def test_half_precision_logits_are_summed_in_float32(function: LossTerm, dtype: torch.dtype) -> None:
    """48^3 voxels overflow fp16's largest number, 65504."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 2, 48, 48, 48, generator=generator).to(dtype)
    label = torch.randint(0, 2, (1, 48, 48, 48), generator=generator).short()
    value = SegmentationLoss(function)(logits, label)
    assert value.dtype is torch.float32
    torch.testing.assert_close(value, SegmentationLoss(function)(logits.float(), label), atol=1e-3, rtol=0)


def test_scales_are_weighted_by_halves_and_labels_subsampled() -> None:
    logits, label = example()
    coarse = torch.randn(2, 3, 3, 3, 2)
    single = SegmentationLoss(dice_ce)
    small = subsample(label, torch.Size((3, 3, 2)))
    assert small.shape == (2, 3, 3, 2)
    found = single((logits, coarse), label)
    torch.testing.assert_close(found, (single(logits, label) + 0.5 * single(coarse, small)) / 1.5)


@pytest.mark.parametrize("length", range(5, 40))
def test_a_coarse_voxel_is_labelled_by_one_of_its_own_cell(length: int) -> None:
    """Also where a length is no multiple of the stride, as 26 -> 13 -> 7, whose cells begin at 0, 4, 8 and so on."""
    label, stride = torch.arange(length).reshape(1, length, 1, 1), 1
    while label.shape[1] > 2:
        stride *= 2
        label = subsample(label, torch.Size((-(-label.shape[1] // 2), 1, 1)))
        assert label.flatten().tolist() == [*range(0, length, stride)]


def test_valid_logits_meet_the_centre_of_the_label() -> None:
    logits, label = example()
    border = F.pad(label, (2, 2, 2, 2, 2, 2), value=1)
    assert torch.equal(SegmentationLoss(dice_ce)(logits, border), SegmentationLoss(dice_ce)(logits, label))

"""Losses against the formula written out, with ignored voxels, in half precision, over several scales."""

import pytest
import torch
import torch.nn.functional as F

from unet3d.train.losses import SegmentationLoss, subsample
from unet3d.types import IGNORE

NAMES = ("ce", "dice", "dice_ce")


def example(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, 6, 5, 4, generator=generator).to(dtype)
    return logits, torch.randint(0, 3, (2, 6, 5, 4), generator=generator).short()


def one_hot_dice(logits: torch.Tensor, label: torch.Tensor, axes: tuple[int, ...]) -> torch.Tensor:
    p = logits.double().softmax(1)[:, 1:]
    t = F.one_hot(label.long(), 3).permute(0, 4, 1, 2, 3)[:, 1:].double()
    return 1 - (2 * (p * t).sum(axes) / (p.sum(axes) + t.sum(axes))).mean()


def test_cross_entropy_is_torchs() -> None:
    logits, label = example()
    torch.testing.assert_close(SegmentationLoss("ce")(logits, label), F.cross_entropy(logits, label.long()))
    weights = torch.tensor([0.2, 1.0, 3.0])
    expected = F.cross_entropy(logits, label.long(), weights)
    torch.testing.assert_close(SegmentationLoss("ce", weights)(logits, label), expected)


def test_weights_and_ignored_voxels_together_are_torchs_mean_and_gradient() -> None:
    """The labelled voxels' sum by the sum of their weights: the paper's weighted softmax, weight 0 elsewhere."""
    weights = torch.tensor([1.0, 2.0, 0.2])
    logits, label = example()
    label[torch.rand(label.shape, generator=torch.Generator().manual_seed(1)) < 0.7] = IGNORE
    ours, torchs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    value = SegmentationLoss("ce", weights)(ours, label)
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
    found = SegmentationLoss("dice", batch_dice=batch_dice)(logits, label)
    torch.testing.assert_close(found.double(), one_hot_dice(logits, label, axes), atol=1e-5, rtol=0)


def test_sum_is_the_sum() -> None:
    logits, label = example()
    parts = SegmentationLoss("ce")(logits, label) + SegmentationLoss("dice")(logits, label)
    assert torch.equal(SegmentationLoss("dice_ce")(logits, label), parts)


@pytest.mark.parametrize("weights", [None, torch.tensor([0.5, 1.0, 2.0])])
@pytest.mark.parametrize("name", NAMES)
def test_ignored_voxels_count_for_nothing(name: str, weights: torch.Tensor | None) -> None:
    """The loss of a volume whose border is ignored is the loss of the volume without the border."""
    loss = SegmentationLoss(name, weights)
    logits, label = example()
    label[:, 4:] = IGNORE
    logits.requires_grad_()
    value = loss(logits, label)
    torch.testing.assert_close(value, loss(logits[:, :, :4], label[:, :4]))
    value.backward()
    assert logits.grad is not None
    assert logits.grad[:, :, 4:].abs().max() == 0 < logits.grad[:, :, :4].abs().max()


@pytest.mark.parametrize("name", NAMES)
def test_t4_nothing_but_ignored_voxels_gives_zero_and_zero_gradients(name: str) -> None:
    logits, label = example()
    logits.requires_grad_()
    value = SegmentationLoss(name)(logits, torch.full_like(label, IGNORE))
    value.backward()
    assert value.item() == 0
    assert logits.grad is not None and logits.grad.abs().max() == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_t5_half_precision_logits_are_summed_in_float32(name: str, dtype: torch.dtype) -> None:
    """96^3 voxels overflow fp16's largest number, 65504."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 2, 96, 96, 96, generator=generator).to(dtype)
    label = torch.randint(0, 2, (1, 96, 96, 96), generator=generator).short()
    value = SegmentationLoss(name)(logits, label)
    assert value.dtype is torch.float32
    torch.testing.assert_close(value, SegmentationLoss(name)(logits.float(), label), atol=1e-3, rtol=0)


def test_scales_are_weighted_by_halves_and_labels_subsampled() -> None:
    logits, label = example()
    coarse = torch.randn(2, 3, 3, 3, 2)
    single = SegmentationLoss("dice_ce")
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
    assert torch.equal(SegmentationLoss("dice_ce")(logits, border), SegmentationLoss("dice_ce")(logits, label))

"""The losses of regions against MONAI's Dice and torch's binary cross-entropy, and their memory."""

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from unet3d import build
from unet3d.base.types import IGNORE, Regions
from unet3d.config.schema import Config
from unet3d.memory.ledger import Ledger, most_held
from unet3d.training.losses import SMOOTH, LossOptions, LossTerm, SegmentationLoss, ce, dice, dice_ce

TUMOUR = Regions(((1, 2, 3), (2, 3), (3,)), (1, 2, 3))
TABLE = torch.tensor(TUMOUR.table(), dtype=torch.float32)
every_loss = pytest.mark.parametrize("function", [ce, dice, dice_ce])


def example(dtype: torch.dtype = torch.float64, ignored: float = 0.0) -> tuple[Tensor, Tensor]:
    """Return logits of two images and labels, a share of which is ignored."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(2, 3, 19, 6, 5, generator=generator, dtype=dtype)
    label = torch.randint(0, 4, (2, 19, 6, 5), generator=generator).short()
    label[torch.rand(label.shape, generator=generator) < ignored] = IGNORE
    return logits, label


def truth_of(label: Tensor) -> Tensor:
    """Return the regions' masks N K D H W, written out."""
    return torch.stack([label > 0, label > 1, label > 2], 1).double()


def plain(name: str, logits: Tensor, label: Tensor, options: LossOptions) -> Tensor:
    """The formulas on whole maps, for autograd to differentiate."""
    valid = (label != IGNORE)[:, None].expand_as(logits).to(logits.dtype)
    truth = truth_of(label)
    weights = torch.ones(3) if options.weights is None else options.weights
    weighed = valid * weights.to(logits)[:, None, None, None]
    value = logits.new_zeros(())
    if name != "dice":
        surprise = F.binary_cross_entropy_with_logits(logits, truth, reduction="none")
        value = (surprise * weighed).sum() / weighed.sum()
    if name != "ce":
        axes = (0, 2, 3, 4) if options.batch_dice else (2, 3, 4)
        p = logits.sigmoid() * valid
        score = (2 * (p * truth).sum(axes) + SMOOTH) / ((p + truth).sum(axes) + SMOOTH)
        value = value + 1 - score.mean()
    return value


@pytest.mark.parametrize("batch_dice", [True, False])
def test_value_and_gradient_are_those_of_monais_dice_and_torchs_binary_cross_entropy(batch_dice: bool) -> None:
    from monai.losses import DiceLoss

    logits, label = example()
    ours = logits.clone().requires_grad_()
    theirs = logits.clone().requires_grad_()
    value = SegmentationLoss(dice_ce, LossOptions(batch_dice=batch_dice, regions=TABLE))(ours, label)
    settings: dict[str, Any] = {"sigmoid": True, "batch": batch_dice, "smooth_nr": SMOOTH, "smooth_dr": SMOOTH}
    expected = DiceLoss(**settings)(theirs, truth_of(label))
    expected = expected + F.binary_cross_entropy_with_logits(theirs, truth_of(label))
    value.backward()
    expected.backward()
    torch.testing.assert_close(value, expected, rtol=1e-13, atol=0)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-16)


@pytest.mark.parametrize("weights", [None, torch.tensor([0.2, 1.0, 3.0])], ids=("even", "weighted"))
@pytest.mark.parametrize(("batch_dice", "chunk"), [(True, 400), (False, None)], ids=("chunks", "as on the CPU"))
@every_loss
def test_value_and_gradient_are_those_of_whole_maps(
    function: LossTerm, batch_dice: bool, chunk: int | None, weights: Tensor | None
) -> None:
    """With a third of the voxels ignored, through a convolution whose output the gradient is written over."""
    _, label = example(ignored=0.3)
    image = torch.randn(2, 2, 19, 6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    convolution = torch.nn.Conv3d(2, 3, 1).double()
    found = []
    for loss in (function, functools.partial(plain, function.__name__)):
        convolution.zero_grad()
        value = loss(convolution(image), label, LossOptions(weights, batch_dice, chunk, TABLE))
        (3 * value).backward()
        assert convolution.weight.grad is not None
        found.append((value.detach(), convolution.weight.grad))
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-14)


@every_loss
def test_ignored_voxels_count_for_nothing(function: LossTerm) -> None:
    loss = SegmentationLoss(function, LossOptions(regions=TABLE))
    logits, label = example(torch.float32)
    label[:, 12:] = IGNORE
    logits.requires_grad_()
    value = loss(logits, label)
    torch.testing.assert_close(value, loss(logits[:, :, :12], label[:, :12]))
    value.backward()
    assert logits.grad is not None
    assert logits.grad[:, :, 12:].abs().max() == 0 < logits.grad[:, :, :12].abs().max()
    nothing = loss(logits, torch.full_like(label, IGNORE))
    logits.grad = None
    nothing.backward()
    assert nothing.item() == 0 and logits.grad.abs().max() == 0


@every_loss
def test_large_logits_have_a_finite_value_and_gradient(function: LossTerm) -> None:
    logits, label = example(torch.float32)
    logits = (1000 * logits).requires_grad_()
    value = SegmentationLoss(function, LossOptions(regions=TABLE))(logits, label)
    value.backward()
    assert value.isfinite() and logits.grad is not None and logits.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_logits_are_summed_in_float32(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 3, 48, 48, 48, generator=generator).to(dtype)
    label = torch.randint(0, 4, (1, 48, 48, 48), generator=generator).short()
    loss = SegmentationLoss(dice_ce, LossOptions(regions=TABLE))
    assert loss(logits, label).dtype is torch.float32
    torch.testing.assert_close(loss(logits, label), loss(logits.float(), label), atol=1e-5, rtol=0)


def test_the_gradient_is_written_over_logits_that_nothing_else_needs() -> None:
    image = torch.randn(1, 2, 6, 5, 4)
    label = torch.zeros(1, 6, 5, 4, dtype=torch.int16)
    convolution = torch.nn.Conv3d(2, 3, 1)
    places = list[bool]()
    for holds in (False, True):
        logits = convolution(image)
        place = logits.data_ptr()
        before = logits.detach().clone()
        logits.grad_fn.register_prehook(lambda grads, place=place: places.append(grads[0].data_ptr() == place))
        value = dice_ce(logits, label, LossOptions(regions=TABLE))
        held = logits if holds else None
        del logits
        value.backward()
        assert held is None or torch.equal(held, before)
    assert places == [True, False]


def peak_of_step(outputs: int, options: LossOptions) -> int:
    """Return the most bytes of logits and what the loss makes, in forward and backward."""
    image = torch.randn(1, 1, 48, 16, 16)
    label = torch.zeros(1, 48, 16, 16, dtype=torch.int16)
    convolution = torch.nn.Conv3d(1, outputs, 1)
    ledger = Ledger()
    with ledger:
        logits = convolution(image)
        before = ledger.alive_bytes()[-1] - logits.nbytes
        value = dice_ce(logits, label, options)
        del logits
        value.backward()
    return most_held(ledger.events) - before


@pytest.mark.parametrize("outputs", [3, 12, 105])
def test_regions_need_no_more_memory_than_as_many_classes(outputs: int) -> None:
    regions = torch.eye(outputs + 1)[1:]
    needed = peak_of_step(outputs, LossOptions(regions=regions))
    assert needed <= peak_of_step(outputs, LossOptions()) + regions.nbytes
    assert outputs < 12 or needed < 1.35 * outputs * 4 * 48 * 16 * 16  # of few, a chunk's labels weigh more


def test_the_loss_of_a_config_has_the_table_of_its_regions() -> None:
    loss = build.loss(Config(), 3, regions=TUMOUR)
    assert loss.options.regions is not None and torch.equal(loss.options.regions, TABLE)
    logits, label = example(torch.float32)
    expected = plain("dice_ce", logits.double(), label, LossOptions())
    assert loss(logits, label).item() == pytest.approx(expected.item(), rel=1e-6)

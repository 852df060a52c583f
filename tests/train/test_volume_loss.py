"""The loss of a validation is that of the training, of the whole volume, whatever the strips."""

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from unet3d.base.types import IGNORE, ProbabilityBlock, Regions
from unet3d.config.schema import Loss
from unet3d.training.losses import LOSSES, SMOOTH, LossOptions, VolumeLoss
from unet3d.training.metrics import CaseScore, summarise

SIZES = (7, 5, 4)
CLASSES = 3


def strips(probabilities: torch.Tensor) -> Iterator[ProbabilityBlock]:
    """Boxes of K X Y Z that cover it once."""
    for x, y in ((slice(0, 3), slice(0, 5)), (slice(3, 7), slice(0, 2)), (slice(3, 7), slice(2, 5))):
        yield ProbabilityBlock(SIZES, (0, 1, 2), (x.start, y.start, 0), probabilities[:, x, y].contiguous())


def loss_of(options: Loss, logits: torch.Tensor, label: torch.Tensor) -> float | None:
    volume = VolumeLoss(options, CLASSES)
    before = [strip.probabilities.clone() for strip in strips(logits.softmax(0))]
    after = [strip.probabilities for strip in volume.adding(strips(logits.softmax(0)), label.numpy())]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    return volume.value()


@pytest.mark.parametrize("name", ["ce", "dice", "dice_ce"])
@pytest.mark.parametrize("weights", [None, [0.5, 1.0, 3.0]])
@pytest.mark.parametrize("ignored", [False, True])
def test_it_is_the_training_loss_of_the_whole_volume(name: str, weights: list[float] | None, ignored: bool) -> None:
    torch.manual_seed(0)
    logits = torch.randn(CLASSES, *SIZES) * 3
    label = torch.randint(0, CLASSES, SIZES)
    if ignored:
        label[torch.rand(SIZES) < 0.4] = IGNORE
    tensor = torch.tensor(weights) if weights else None
    expected = LOSSES[name](logits[None], label[None], LossOptions(weights=tensor)).item()
    assert loss_of(Loss(name=name, weights=weights), logits, label) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", ["ce", "dice", "dice_ce"])
def test_of_regions_it_is_the_formula_by_hand(name: str) -> None:
    """Weighted, with ignored voxels, and with logits that a sigmoid in float32 rounds to 1."""
    torch.manual_seed(0)
    logits = torch.randn(2, *SIZES) * 3
    logits[0, 0, 0, 0] = 40.0
    label = torch.randint(0, 3, SIZES)
    label[torch.rand(SIZES) < 0.4] = IGNORE
    label[0, 0, 0] = 2
    volume = VolumeLoss(Loss(name=name, weights=[1.0, 3.0]), 2, Regions(((1, 2), (2,)), (1, 2)))
    list(volume.adding(strips(logits.sigmoid()), label.numpy()))
    is_labelled = label != IGNORE
    p = logits.sigmoid()[:, is_labelled].double()
    truth = torch.stack([label > 0, label == 2])[:, is_labelled]
    surprise = -torch.where(truth, p, 1 - p).log().mean(1)
    dice = (2 * (p * truth).sum(1) + SMOOTH) / ((p + truth.double()).sum(1) + SMOOTH)
    expected = 0.0
    if name != "dice":
        expected += (surprise[0] + 3 * surprise[1]).item() / 4
    if name != "ce":
        expected += 1 - dice.mean().item()
    assert volume.value() == pytest.approx(expected, rel=1e-6)


def test_a_region_that_is_surely_wrong_costs_what_float32_can_say() -> None:
    volume = VolumeLoss(Loss(name="ce"), 1, Regions(((1,),), (1,)))
    list(volume.adding(strips(torch.ones(1, *SIZES)), np.zeros(SIZES, np.int16)))
    assert volume.value() == pytest.approx(25 * math.log(2), rel=1e-6)


def test_a_probability_of_zero_is_finite_and_a_volume_without_labels_has_no_loss() -> None:
    logits = torch.zeros(CLASSES, *SIZES)
    logits[0] = 1000
    value = loss_of(Loss(name="ce"), logits, torch.ones(SIZES, dtype=torch.long))
    assert value is not None and 80 < value < 100
    assert loss_of(Loss(), logits, torch.full(SIZES, IGNORE)) is None


def test_a_loss_of_the_users_own_has_none_in_validation() -> None:
    assert not VolumeLoss.exists(Loss(path="package.module:name"))


def test_the_mean_over_cases_is_recorded_where_any_has_it() -> None:
    scores = [CaseScore(case, (0.5,), (0.4,), loss=loss) for case, loss in (("a", 1.0), ("b", 2.0), ("c", None))]
    assert summarise(scores, ["background", "x"])["val/loss"] == 1.5
    assert "val/loss" not in summarise([CaseScore("a", (0.5,), (0.4,))], ["background", "x"])

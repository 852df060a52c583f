"""Losses of classes and of regions against the formulas on whole maps, and those of validations."""

import functools
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from promises import promise
from torch import Tensor, nn

from unet3d import build
from unet3d.base.types import IGNORE, ProbabilityBlock, Regions
from unet3d.config import compose
from unet3d.config.schema import LOSSES as NAMES
from unet3d.config.schema import Config, Loss
from unet3d.memory.ledger import Ledger, most_held
from unet3d.training import losses
from unet3d.training.losses import (
    IN_CHUNKS,
    LOSSES,
    SMOOTH,
    LossOptions,
    LossTerm,
    SegmentationLoss,
    VolumeLoss,
    ce,
    dice,
    dice_ce,
    subsample,
)

ROOT = Path(losses.__file__).parents[2]
TUMOUR = Regions(((1, 2, 3), (2, 3), (3,)), (1, 2, 3))
TABLE = torch.tensor(TUMOUR.table(), dtype=torch.float32)
WEIGHTS = torch.tensor([0.2, 1.0, 3.0])
SIZES = (7, 6, 5)
of_classes_and_regions = pytest.mark.parametrize("table", [None, TABLE], ids=["classes", "regions"])


def of_the_guide() -> LossTerm:
    """Return the loss that docs/extending.md shows how to write; of any in the package, these tests ask the same."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "extending.md").read_text(), re.DOTALL)
    (block,) = (block for block in blocks if "def focal" in block)
    names: dict[str, LossTerm] = {}
    exec(block, names)
    return names["focal"]


every_loss = pytest.mark.parametrize(
    "loss",
    [
        *map(SegmentationLoss, (*LOSSES.values(), of_the_guide())),
        SegmentationLoss(dice_ce, LossOptions(regions=TABLE)),
    ],
    ids=[*LOSSES, "of the guide", "of regions"],
)


def example(ignored: float = 0.0) -> tuple[Tensor, Tensor]:
    """Return logits of two images, of three classes or regions, one very large, and labels, a share of them ignored."""
    generator = torch.Generator().manual_seed(0)
    label = torch.randint(0, 3, (2, *SIZES), generator=generator).short()
    label[torch.rand(label.shape, generator=generator) < ignored] = IGNORE
    logits = 3 * torch.randn(2, 3, *SIZES, generator=generator)
    logits[0, 0, 0, 0, 0] = 3000
    return logits, label


def plain(name: str, logits: Tensor, label: Tensor, options: LossOptions) -> Tensor:
    """The formulas on whole maps, for autograd to differentiate."""
    index, valid = label.clamp(min=0).long(), (label != IGNORE)[:, None].to(logits)
    weights = (torch.ones(3) if options.weights is None else options.weights).to(logits)
    if options.regions is None:
        surprise = F.cross_entropy(logits, label.long(), weights, ignore_index=IGNORE)
        p, truth = logits.softmax(1)[:, 1:], F.one_hot(index, 3).movedim(-1, 1)[:, 1:]
    else:
        p, truth = logits.sigmoid(), options.regions[:, index].movedim(0, 1).to(logits)
        weighed = valid * weights[:, None, None, None]
        surprise = F.binary_cross_entropy_with_logits(logits, truth, weighed, reduction="sum") / weighed.sum()
    axes = (0, 2, 3, 4) if options.batch_dice else (2, 3, 4)
    overlap, size = (p * truth * valid).sum(axes), ((p + truth) * valid).sum(axes)
    score = ((2 * overlap + SMOOTH) / (size + SMOOTH)).mean()
    return {"ce": surprise, "dice": 1 - score, "dice_ce": surprise + 1 - score}[name]


@of_classes_and_regions
@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=("even", "weighted"))
@pytest.mark.parametrize(
    ("batch_dice", "chunk", "is_kept"), [(True, 400, False), (False, 1, True), (False, None, False)], ids=str
)
@pytest.mark.parametrize("function", [ce, dice, dice_ce])
def test_value_and_gradient_are_those_of_whole_maps(
    function: LossTerm,
    batch_dice: bool,
    chunk: int | None,
    is_kept: bool,
    weights: Tensor | None,
    table: Tensor | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a third of the voxels ignored, through a convolution whose output the gradient is written over.

    Also through a sigmoid, which has kept its output; and with the kernels that are deterministic on a GPU.
    """
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: is_kept)
    convolution = nn.Conv3d(3, 3, 1).double()
    image, label = example(ignored=0.3)
    network = nn.Sequential(convolution, nn.Sigmoid()) if is_kept else convolution
    found = []
    for loss in (function, functools.partial(plain, function.__name__)):
        value = loss(network(image.double()), label, LossOptions(weights, batch_dice, chunk, table))
        found.append((value, *torch.autograd.grad(3 * value, convolution.parameters())))
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-14)


def test_the_loss_of_a_config_has_its_regions_weights_and_on_a_gpu_whole_small_maps() -> None:
    asked = Config(loss=Loss(weights=WEIGHTS.tolist()))
    logits, label = example()
    expected = plain("dice_ce", logits, label, LossOptions(WEIGHTS, regions=TABLE))
    torch.testing.assert_close(build.loss(asked, 3, regions=TUMOUR)(logits, label), expected)
    options = build.loss(compose.compose(["device=cuda", "loss.weights=[1,2,3]"]), 3, "meta").options
    assert options.chunk is not None and options.chunk >= 2 * 3 * 64**3
    assert options.weights is not None and options.weights.device.type == "meta"


def test_the_names_can_be_read_without_torch() -> None:
    """The config, its help and its errors read them so."""
    assert [*NAMES] == [*LOSSES] and {*LOSSES.values()} >= IN_CHUNKS == {ce, dice, dice_ce}


@promise("Training", "a patch of which every voxel is ignored", "the loss and its gradients are 0")
@every_loss
def test_ignored_voxels_count_for_nothing(loss: SegmentationLoss) -> None:
    """The loss of a volume whose border is ignored is the loss of the volume without the border."""
    logits, label = example()
    label[:, 4:] = IGNORE
    logits.requires_grad_()
    value = loss(logits, label)
    torch.testing.assert_close(value, loss(logits[:, :, :4], label[:, :4]))
    (gradient,) = torch.autograd.grad(value, logits)
    assert gradient[:, :, 4:].abs().max() == 0 < gradient[:, :, :4].abs().max()
    nothing = loss(logits, torch.full_like(label, IGNORE))
    (gradient,) = torch.autograd.grad(nothing, logits)
    assert nothing.item() == gradient.abs().max() == 0


@promise("Training", "half-precision logits of a large patch", "the loss is summed in float32")
@every_loss
def test_half_precision_logits_are_summed_in_float32(loss: SegmentationLoss) -> None:
    """48^3 voxels overflow fp16's largest number, 65504."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 3, 48, 48, 48, generator=generator).half()
    label = torch.randint(0, 3, (1, 48, 48, 48), generator=generator).short()
    torch.testing.assert_close(loss(logits, label), loss(logits.float(), label), atol=1e-3, rtol=0)


def test_logits_that_someone_holds_are_not_written_over() -> None:
    image, label = example()
    logits = nn.Conv3d(3, 3, 1)(image)
    before = logits.detach().clone()
    dice_ce(logits, label, LossOptions()).backward()
    assert torch.equal(logits, before)


@pytest.mark.parametrize("regions", [None, torch.eye(106)[1:]], ids=["classes", "regions"])
def test_many_classes_or_regions_need_little_more_than_their_logits(regions: Tensor | None) -> None:
    """A map for each would take four times as much, and time that grows with the square of their number."""
    image, label = torch.randn(1, 1, 48, 16, 16), torch.zeros(1, 48, 16, 16, dtype=torch.int16)
    convolution, ledger = nn.Conv3d(1, 105, 1), Ledger()
    with ledger:
        logits = convolution(image)
        size, before = logits.nbytes, ledger.alive_bytes()[-1] - logits.nbytes
        value = dice_ce(logits, label, LossOptions(regions=regions))
        del logits
        value.backward()
    assert most_held(ledger.events) - before < 1.4 * size


def test_scales_are_weighted_by_halves_and_labels_subsampled() -> None:
    logits, label = example()
    single, coarse = SegmentationLoss(dice_ce), torch.randn(2, 3, 4, 3, 3)
    small = subsample(label, torch.Size((4, 3, 3)))
    found = single((logits, coarse), label)
    torch.testing.assert_close(found, (single(logits, label) + 0.5 * single(coarse, small)) / 1.5)


@given(length=st.integers(5, 60))
def test_a_coarse_voxel_is_labelled_by_one_of_its_own_cell(length: int) -> None:
    """Also where a length is no multiple of the stride, as 26 -> 13 -> 7, whose cells begin at 0, 4, 8 and so on."""
    label, stride = torch.arange(length).reshape(1, length, 1, 1), 1
    while label.shape[1] > 2:
        stride *= 2
        label = subsample(label, torch.Size((-(-label.shape[1] // 2), 1, 1)))
        assert label.flatten().tolist() == [*range(0, length, stride)]


def volume_loss(options: Loss, probabilities: Tensor, label: Any, regions: Regions | None = None) -> float | None:
    """Return the loss of a volume that passes in two strips, unchanged."""
    volume, parts = VolumeLoss(options, len(probabilities), regions), probabilities.split(4, dim=1)
    strips = [ProbabilityBlock(SIZES, (0, 1, 2), (x, 0, 0), part) for x, part in zip((0, 4), parts, strict=True)]
    passed = [strip.probabilities for strip in volume.adding(iter(strips), np.asarray(label))]
    assert torch.equal(torch.cat(passed, 1), probabilities)
    return volume.value()


@of_classes_and_regions
@pytest.mark.parametrize("weights", [None, [0.2, 1.0, 3.0]], ids=("even", "weighted"))
@pytest.mark.parametrize("name", ["ce", "dice", "dice_ce"])
def test_the_loss_of_a_validation_is_the_trainings_of_the_whole_volume(
    name: str, weights: list[float] | None, table: Tensor | None
) -> None:
    """With ignored voxels, and a logit of which a sigmoid in float32 is 1."""
    logits, label = (tensor[0] for tensor in example(ignored=0.4))
    logits[0, 0, 0, 0], label[0, 0, 0] = 40.0, 2
    options = LossOptions(None if weights is None else WEIGHTS, regions=table)
    expected = plain(name, logits[None].double(), label[None], options).item()
    found = (
        volume_loss(Loss(name=name, weights=weights), logits.softmax(0), label)
        if table is None
        else volume_loss(Loss(name=name, weights=weights), logits.sigmoid(), label, TUMOUR)
    )
    assert found == pytest.approx(expected, rel=1e-4)


def test_what_is_surely_wrong_has_a_finite_loss_and_what_has_no_labels_or_own_code_none() -> None:
    sure, label = torch.zeros(2, *SIZES), np.ones(SIZES, int)
    sure[0] = 1
    assert volume_loss(Loss(name="ce"), sure, label) == pytest.approx(-math.log(1e-38))
    lost = volume_loss(Loss(name="ce"), torch.ones(1, *SIZES), 0 * label, Regions(((1,),), (1,)))
    assert lost == pytest.approx(25 * math.log(2), rel=1e-6), "what float32 can say"
    assert volume_loss(Loss(), sure, IGNORE * label) is None
    assert not VolumeLoss.exists(Loss(path="package.module:name"))

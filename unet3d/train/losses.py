"""Losses on logits N K D H W and labels N D H W, always in float32. To add one, write a function below `@loss`.

No loss here makes a one-hot map: with many classes, that map would be the peak of memory. Voxels labelled IGNORE add
nothing to value and gradient; a batch of only such voxels gives 0 and zero gradients.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from unet3d.model.blocks import crop
from unet3d.types import IGNORE

SMOOTH = 1e-5  # keeps Dice finite for a class that neither side has


@dataclass(frozen=True)
class LossOptions:
    """What the config gives to every loss."""

    weights: Tensor | None = None  # K, of the classes in the cross-entropy
    batch_dice: bool = True  # one Dice over the batch; else the mean over its images


LossTerm = Callable[[Tensor, Tensor, LossOptions], Tensor]
LOSSES: dict[str, LossTerm] = {}


def loss(function: LossTerm) -> LossTerm:
    """Register `(logits N K D H W float32, label N D H W int64 with IGNORE, options) -> scalar` under its name."""
    LOSSES[function.__name__] = function
    return function


@dataclass(frozen=True)
class SegmentationLoss:
    """A loss at every scale of deep supervision: the mean, weighted by 1, 1/2, 1/4 ... from the finest on."""

    function: LossTerm
    options: LossOptions = LossOptions()

    def __call__(self, logits: Any, label: Tensor) -> Tensor:
        """`logits`: one tensor, or a tuple of them, finest first. Labels are cropped or subsampled to each."""
        scales: tuple[Tensor, ...] = logits if isinstance(logits, tuple) else (logits,)
        label = crop(label, scales[0].shape[2:])  # valid convolutions lose the border
        total = self.function(scales[0].float(), label.long(), self.options)
        for level, scale in enumerate(scales[1:], start=1):
            label = subsample(label, scale.shape[2:])
            total = total + 0.5**level * self.function(scale.float(), label.long(), self.options)
        return total / sum(0.5**level for level in range(len(scales)))


@loss
def ce(logits: Tensor, label: Tensor, options: LossOptions) -> Tensor:
    """Cross-entropy: mean over the labelled voxels, weighted by class; 0 if there are none (torch's mean is NaN)."""
    weights = None if options.weights is None else options.weights.to(logits.device)
    total = F.cross_entropy(logits, label, weights, ignore_index=IGNORE, reduction="sum")
    valid = label != IGNORE
    count = valid.float().sum() if weights is None else (weights[label.clamp(min=0)] * valid).sum()
    return total / count.clamp(min=1e-8)


@loss
def dice(logits: Tensor, label: Tensor, options: LossOptions) -> Tensor:
    """1 - mean soft Dice of the foreground classes (Milletari et al. 2016 with nnU-Net's unsquared denominator)."""
    probability = logits.softmax(1)
    valid = label != IGNORE
    axes = (0, 1, 2, 3) if options.batch_dice else (1, 2, 3)
    scores = []
    for k in range(1, logits.shape[1]):
        truth = label == k
        p = probability[:, k]
        overlap = p.where(truth, 0).sum(axes)
        size = p.where(valid, 0).sum(axes) + truth.float().sum(axes)
        scores.append((2 * overlap + SMOOTH) / (size + SMOOTH))
    return 1 - torch.stack(scores).mean()


@loss
def dice_ce(logits: Tensor, label: Tensor, options: LossOptions) -> Tensor:
    """The sum of Dice and cross-entropy."""
    return dice(logits, label, options) + ce(logits, label, options)


def subsample(label: Tensor, size: torch.Size) -> Tensor:
    """N D H W -> N size, the next coarser level's: the first voxel of each cell; the last cell may be shorter."""
    for axis, (have, want) in enumerate(zip(label.shape[1:], size, strict=True), start=1):
        label = label.index_select(axis, torch.arange(want, device=label.device) * -(-have // want))
    return label

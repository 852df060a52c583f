"""Losses on logits N K D H W and labels N D H W: cross-entropy, soft Dice, their sum. Always in float32.

They hold no one-hot map: with many classes the loss, not the network, would set the peak of memory. Voxels labelled
`ignore` are neither learned nor counted; a batch of nothing else gives 0 and zero gradients.
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
class SegmentationLoss:
    """Weighted mean over the scales of deep supervision: 1, 1/2, 1/4 ... of the finest, the next, and so on."""

    name: str
    weights: Tensor | None = None  # K, of the cross-entropy
    batch_dice: bool = True

    def __call__(self, logits: Any, label: Tensor) -> Tensor:
        """`logits`: one tensor, or a tuple of them, finest first. Labels are cropped or subsampled to each."""
        scales: tuple[Tensor, ...] = logits if isinstance(logits, tuple) else (logits,)
        shares = [0.5**i for i in range(len(scales))]
        label = crop(label, scales[0].shape[2:])  # valid convolutions lose the border
        total = self._single(scales[0], label)
        for share, scale in zip(shares[1:], scales[1:], strict=True):
            label = subsample(label, scale.shape[2:])
            total = total + share * self._single(scale, label)
        return total / sum(shares)

    def _single(self, logits: Tensor, label: Tensor) -> Tensor:
        logits, label = logits.float(), label.long()
        terms = [LOSSES[term](logits, label, self) for term in self.name.split("_")]
        return torch.stack(terms).sum()


def cross_entropy(logits: Tensor, label: Tensor, options: SegmentationLoss) -> Tensor:
    """Mean over the labelled voxels, weighted by class; 0 where there are none (torch's own mean is NaN)."""
    weights = None if options.weights is None else options.weights.to(logits.device)
    total = F.cross_entropy(logits, label, weights, ignore_index=IGNORE, reduction="sum")
    valid = label != IGNORE
    count = valid.sum() if weights is None else (weights[label.clamp(min=0)] * valid).sum()
    return total / count.clamp(min=1e-8)


def soft_dice(logits: Tensor, label: Tensor, options: SegmentationLoss) -> Tensor:
    """1 - mean soft Dice of the foreground classes (Milletari et al. 2016 with nnU-Net's unsquared denominator)."""
    probability = logits.softmax(1)
    valid = label != IGNORE
    axes = (0, 1, 2, 3) if options.batch_dice else (1, 2, 3)
    scores = []
    for k in range(1, logits.shape[1]):
        truth = label == k
        p = probability[:, k]
        overlap = p.where(truth, 0).sum(axes)
        size = p.where(valid, 0).sum(axes) + truth.sum(axes)
        scores.append((2 * overlap + SMOOTH) / (size + SMOOTH))
    return 1 - torch.stack(scores).mean()


def subsample(label: Tensor, size: torch.Size) -> Tensor:
    """N D H W -> N size, the next coarser level's: the first voxel of each cell, of which the last may be cut short."""
    for axis, (have, want) in enumerate(zip(label.shape[1:], size, strict=True), start=1):
        label = label.index_select(axis, torch.arange(want, device=label.device) * -(-have // want))
    return label


LOSSES: dict[str, Callable[[Tensor, Tensor, SegmentationLoss], Tensor]] = {"ce": cross_entropy, "dice": soft_dice}

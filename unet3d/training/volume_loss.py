"""The training loss of a whole volume, from the class probabilities that its sliding window gives anyway.

It takes no memory of the device: strips are on the CPU, and a plane of one is in memory a second time.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from unet3d.base.types import IGNORE, ProbabilityBlock
from unet3d.config.schema import Loss
from unet3d.training.loss_chunks import SMOOTH

LEAST = 1e-38  # of a probability whose logarithm is taken; a softmax in float32 may give 0
WITH_DICE = ("dice", "dice_ce")
WITH_CE = ("ce", "dice_ce")


@dataclass
class VolumeLoss:
    """Sums over the voxels of one volume, from which its loss follows."""

    name: str
    weights: NDArray[np.float64]  # of the classes in the cross-entropy
    overlap: NDArray[np.float64] = field(init=False)  # by class, probability on its voxels
    size: NDArray[np.float64] = field(init=False)  # by class, probability plus voxels
    log_likelihood: float = field(default=0.0, init=False)  # of the labels, weighted by class
    weight: float = field(default=0.0, init=False)  # of all labelled voxels

    def __post_init__(self) -> None:
        self.overlap = np.zeros(len(self.weights))
        self.size = np.zeros(len(self.weights))

    @classmethod
    def of(cls, options: Loss, classes: int) -> "VolumeLoss | None":
        """Return a loss without voxels; None for a function of the user's own, which may want other tensors."""
        if options.path is not None or options.name not in (*WITH_DICE, *WITH_CE):
            return None
        weights = np.ones(classes) if options.weights is None else np.array(options.weights, np.float64)
        return cls(options.name, weights)

    def adding(self, strips: Iterator[ProbabilityBlock], label: NDArray[np.integer]) -> Iterator[ProbabilityBlock]:
        """Yield the strips unchanged, each once it is added; `label` (X, Y, Z) is of the whole volume."""
        for strip in strips:
            planes = strip.probabilities.numpy().swapaxes(0, 1)
            for plane, truth in zip(planes, label[strip.box], strict=True):
                self._add(plane, truth)
            yield strip

    def _add(self, plane: NDArray[np.float32], truth: NDArray[np.integer]) -> None:
        """Add class probabilities (K, Y, Z) of a plane with these labels (Y, Z)."""
        classes = len(self.weights)
        is_labelled = truth != IGNORE
        labels = truth[is_labelled].astype(np.intp)
        probabilities = plane[:, is_labelled]
        (of_labels,) = np.take_along_axis(probabilities, labels[None], 0)
        of_labels = of_labels.astype(np.float64)
        voxels = np.bincount(labels, minlength=classes)
        gains = np.log(of_labels.clip(LEAST)) * self.weights[labels]
        self.overlap += np.bincount(labels, of_labels, classes)
        self.size += probabilities.sum(1, dtype=np.float64)
        self.size += voxels
        self.log_likelihood += float(gains.sum())
        self.weight += float(voxels @ self.weights)

    def value(self) -> float | None:
        """Return the loss of the voxels so far; None where none is labelled."""
        if not self.size.any():
            return None
        value = 0.0
        if self.name in WITH_DICE:
            dice = (2 * self.overlap + SMOOTH) / (self.size + SMOOTH)
            value += 1 - float(dice[1:].mean())
        if self.name in WITH_CE:
            value -= self.log_likelihood / max(self.weight, 1e-8)
        return value

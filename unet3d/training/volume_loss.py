"""The training loss of a whole volume, from the probabilities of classes or regions that its windows give anyway.

It takes no memory of a GPU: strips are on the host, where one plane has a few copies in float64.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unet3d.base.types import IGNORE, ProbabilityBlock, Regions
from unet3d.config.schema import LOSSES, Loss
from unet3d.training import losses, region_losses
from unet3d.training.loss_chunks import Sums, value_of

LEAST = 1e-38  # of a probability whose logarithm is taken; a softmax in float32 may give 0
MOST = 1 - 2**-25  # of a region's probability; a sigmoid in float32 gives 1 for all that is nearer to 1


class VolumeLoss:
    """Sums over the voxels of one volume, from which its loss follows."""

    def __init__(self, name: str, weights: Tensor, regions: Regions | None = None) -> None:
        """Begin without voxels. `weights` K, float64: of classes or `regions` in the cross-entropy."""
        self._has_dice = LOSSES[name].get("dice", False)
        self._has_ce = LOSSES[name].get("ce", False)
        self._weights = weights
        self._table = None if regions is None else torch.tensor(regions.table(), dtype=weights.dtype)
        self._sums = Sums()
        self._has_labels = False

    @classmethod
    def of(cls, options: Loss, outputs: int, regions: Regions | None = None) -> "VolumeLoss | None":
        """Return a loss without voxels; None for a function of the user's own, which may want other tensors.

        `outputs`: the number of classes, or of regions.
        """
        if options.path is not None or not LOSSES[options.name].get("in_chunks"):
            return None
        weights = [1.0] * outputs if options.weights is None else options.weights
        return cls(options.name, torch.tensor(weights, dtype=torch.float64), regions)

    def adding(self, strips: Iterator[ProbabilityBlock], label: NDArray[np.integer]) -> Iterator[ProbabilityBlock]:
        """Yield the strips unchanged, each once it is added; `label` (X, Y, Z) is of the whole volume."""
        for strip in strips:
            planes = strip.probabilities.unbind(1)
            for plane, truth in zip(planes, label[strip.box], strict=True):
                self._add(plane, torch.tensor(truth))
            yield strip

    def _add(self, plane: Tensor, truth: Tensor) -> None:
        """Add probabilities (K, Y, Z) of a plane with these labels (Y, Z)."""
        logits = self._logits(plane.double())[None, :, None]
        label = truth[None, None]
        terms = (self._has_dice, self._has_ce)
        if self._table is None:
            part = losses.sum_chunks(logits, label, None, self._weights, *terms)
        else:
            part = region_losses.sum_chunks(logits, label, self._table, self._weights, None, *terms)
        self._sums.add(part)
        self._has_labels |= bool((truth != IGNORE).any())

    def _logits(self, probabilities: Tensor) -> Tensor:
        """Return logits with these probabilities: softmax makes them of classes again, sigmoid of regions."""
        if self._table is None:
            return probabilities.clamp(min=LEAST).log()
        return probabilities.clamp(LEAST, MOST).logit()

    def value(self) -> float | None:
        """Return the loss of the voxels so far; None where none is labelled."""
        if not self._has_labels:
            return None
        first = 1 if self._table is None else 0  # of classes, Dice leaves out the background
        return value_of(replace(self._sums), shares=1, first=first).item()

"""Sparse annotation (Cicek et al. 2016, section 2): a few orthogonal slices are labelled, all other voxels are not.

Slices to learn from lie at (k + 1/2) / n of the foreground's extent along an axis, slices to score at k / (n + 1): the
scored ones are the same however many are learned from, but for the voxels where these cross them: no voxel is both.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from unet3d.config import Data
from unet3d.data.cases import Case
from unet3d.data.patches import Prepared, foreground, remembered
from unet3d.errors import UserError
from unet3d.losses import IGNORE


@dataclass(frozen=True)
class SparseReader:
    """Reads a case with the labels of some slices alone; the image is shared with the dense one."""

    read: Callable[[Case], Prepared]
    options: Data
    mask: Callable[[Tensor, Data], Tensor]
    cache: dict[str, Prepared] | None

    def __call__(self, case: Case) -> Prepared:
        return remembered(self.cache, case, self._masked)

    def _masked(self, case: Case) -> Prepared:
        dense = self.read(case)
        label = dense.label.masked_fill(~self.mask(dense.label, self.options), IGNORE)
        if (label == IGNORE).all():
            use = f"choose other numbers in {self._chosen()}"
            raise UserError(f"{case.id}: no labelled voxel is left to be {self.mask.__name__}; {use}")
        return replace(dense, label=label, foreground=foreground(label.numpy()))

    def _chosen(self) -> str:
        scores_others = self.options.semi and self.options.sparse_fold is None
        return "data.sparse and data.scored" if scores_others else "data.sparse"


def learned(label: Tensor, options: Data) -> Tensor:
    """Which voxels of a label map X Y Z are learned from."""
    return planes(label.shape, learned_slices(label, options))


def scored(label: Tensor, options: Data) -> Tensor:
    """Which voxels are scored: those of held-out slices that no learned slice crosses."""
    return planes(label.shape, scored_slices(label, options)) & ~learned(label, options)


def learned_slices(label: Tensor, options: Data) -> list[list[int]]:
    """Slices along each axis."""
    parts = _parts(label, options)
    return [
        [index for index, part in axis if options.sparse_fold is None or part != options.sparse_fold] for axis in parts
    ]


def scored_slices(label: Tensor, options: Data) -> list[list[int]]:
    """Slices along each axis: those of the part left out, or those of `options.scored`."""
    if options.sparse_fold is None:
        return [
            [round(low + (k + 1) / (count + 1) * (high - low)) for k in range(count)]
            for (low, high), count in zip(extent(label), options.scored, strict=True)
        ]
    return [[index for index, part in axis if part == options.sparse_fold] for axis in _parts(label, options)]


def planes(shape: torch.Size, slices: list[list[int]]) -> Tensor:
    """A mask of the slices: bool X Y Z."""
    mask = torch.zeros(shape, dtype=torch.bool)
    for axis, indices in enumerate(slices):
        mask.index_fill_(axis, torch.tensor(indices, dtype=torch.long), True)
    return mask


def extent(label: Tensor) -> list[tuple[int, int]]:
    """First and last voxel of the foreground along each axis; of the volume where there is none."""
    there = label.numpy() > 0
    if not there.any():
        return [(0, n - 1) for n in label.shape]
    found = (np.flatnonzero(there.any(axis=axes)) for axes in ((1, 2), (0, 2), (0, 1)))
    return [(int(at[0]), int(at[-1])) for at in found]


def _parts(label: Tensor, options: Data) -> list[list[tuple[int, int]]]:
    """(slice, the part it belongs to) along each axis; neighbours belong to different parts."""
    assert options.sparse is not None
    return [
        [(round(low + (k + 0.5) / count * (high - low)), k % options.sparse_folds) for k in range(count)]
        for (low, high), count in zip(extent(label), options.sparse, strict=True)
    ]

"""Sparse annotation: labels of some slices are learned, of others scored (Cicek et al. 2016)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from unet3d.base.errors import UserError
from unet3d.base.types import IGNORE
from unet3d.config.schema import Data
from unet3d.data.cache import LABELS, fit_labels, label_arrays, labels_of
from unet3d.data.cases import Case
from unet3d.data.patches import PreparedCase, cached, foreground
from unet3d.data.preprocess import CaseReader

Slices = list[list[int]]  # indices along each axis


@dataclass(frozen=True)
class SparseReader:
    """Reads a case with the labels of some slices only: the learned or the scored ones. The image is `read`'s."""

    read: CaseReader
    options: Data
    scored: bool
    cache: dict[str, PreparedCase] | None

    def __call__(self, case: Case) -> PreparedCase:
        return cached(self.cache, case, self._make)

    def _make(self, case: Case) -> PreparedCase:
        dense = self.read(case)
        disk = self.read.disk
        if disk is None:
            return self._masked(dense)
        options = self.options
        slices = (options.sparse, options.sparse_folds, options.sparse_fold, options.scored, self.scored)
        arrays = disk.read(
            self.read.key(case, *slices),
            LABELS,
            lambda: label_arrays(self._masked(dense)),
            lambda found: fit_labels(found, tuple(dense.label.shape)),
        )
        label, voxels = labels_of(arrays)
        return replace(dense, label=label, foreground=voxels)

    def _masked(self, dense: PreparedCase) -> PreparedCase:
        """Return the case without the labels of other slices. Raises UserError if none is left."""
        options = self.options
        find_mask = scored_mask if self.scored else learned_mask
        label = dense.label.masked_fill(~find_mask(dense.label, options), IGNORE)
        if (label == IGNORE).all():
            purpose = "scored" if self.scored else "learned"
            remedy = "choose other numbers in data.sparse"
            if options.semi and options.sparse_fold is None:
                remedy += " and data.scored"
            raise UserError(f"{dense.case_id}: no label is left to be {purpose}; {remedy}")
        return replace(dense, label=label, foreground=foreground(label.numpy()))


def learned_mask(label: Tensor, options: Data) -> Tensor:
    """Return which voxels of a label map X Y Z are learned from, bool X Y Z."""
    return planes(label.shape, learned_slices(label, options))


def scored_mask(label: Tensor, options: Data) -> Tensor:
    """Return which voxels are scored, bool X Y Z: scored slices, but where a learned slice crosses."""
    return planes(label.shape, scored_slices(label, options)) & ~learned_mask(label, options)


def learned_slices(label: Tensor, options: Data) -> Slices:
    """Return the slices of `options.sparse`, without the part of `options.sparse_fold`.

    Neighbours belong to different parts.
    """
    assert options.sparse is not None
    slices = _spread(label, options.sparse, 0.5, 0)
    if options.sparse_fold is None:
        return slices
    return [[n for k, n in enumerate(axis) if k % options.sparse_folds != options.sparse_fold] for axis in slices]


def scored_slices(label: Tensor, options: Data) -> Slices:
    """Return the slices of the part `options.sparse_fold`, or else of `options.scored`."""
    if options.sparse_fold is None:
        return _spread(label, options.scored, 1, 1)
    assert options.sparse is not None
    return [axis[options.sparse_fold :: options.sparse_folds] for axis in _spread(label, options.sparse, 0.5, 0)]


def _spread(label: Tensor, counts: Sequence[int], first: float, more: int) -> Slices:
    """Return slices across each axis of the foreground, so many, at shares (k + first) / (count + more) of it."""
    slices = Slices()
    for (low, high), count in zip(extent(label), counts, strict=True):
        shares = [(k + first) / (count + more) for k in range(count)]
        slices.append([round(low + share * (high - low)) for share in shares])
    return slices


def extent(label: Tensor) -> list[tuple[int, int]]:
    """Return the first and last voxel of the foreground along each axis; of the volume if it has none."""
    from scipy.ndimage import find_objects  # takes a third of a second to load

    boxes = find_objects((label.numpy() > 0).astype(np.uint8))
    if not boxes:
        return [(0, n - 1) for n in label.shape]
    return [(axis.start, axis.stop - 1) for axis in boxes[0]]


def planes(shape: torch.Size, slices: Slices) -> Tensor:
    """Return a mask of the slices, bool X Y Z."""
    mask = torch.zeros(shape, dtype=torch.bool)
    for axis, indices in enumerate(slices):
        index = torch.tensor(indices, dtype=torch.long)
        mask.index_fill_(axis, index, True)
    return mask

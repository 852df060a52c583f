"""Losses on logits N K D H W and labels N D H W, summed in float32. To add one, write a function below `@loss`.

With several ranks, value and gradient are taken over the whole batch. A function of your own gets this rank's images,
and its values are averaged.

No loss here makes a map of all classes beside the logits: with many classes, that map would be the peak of memory.
Voxels labelled IGNORE add nothing to value and gradient; a batch of only such voxels gives 0 and zero gradients.
"""

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from unet3d.base import ranks
from unet3d.base.types import IGNORE
from unet3d.model.blocks import crop
from unet3d.training.own_parts import refuse_odd_logits, refuse_odd_loss

SMOOTH = 1e-5  # keeps Dice finite for a class that neither side has
VOXELS = (2, 3, 4)  # dimensions of N K D H W
CHUNKS = 16  # of a map on the CPU, at most
SMALL = 2**12  # numbers of logits; with less in a chunk on the CPU, most of the time goes to calls
CUDA_CHUNK = 2**22  # numbers of logits; a GPU has work for all of its cores, and a step few launches for the loss


@dataclass(frozen=True)
class LossOptions:
    """Settings from the config that every loss gets."""

    weights: Tensor | None = None  # K, of the classes in the cross-entropy
    batch_dice: bool = True  # one Dice over the batch; else the mean over its images
    chunk: int | None = None  # numbers of logits in a chunk; None: as suits the CPU


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
    path: str | None = None  # of the function, if it is the user's own
    network: tuple[str, int] | None = None  # path and number of classes of a network of the user's own

    def __call__(self, logits: Any, label: Tensor) -> Tensor:
        """Return the loss of `logits`: one tensor, or a tuple of them, finest first.

        Labels are cropped or subsampled to each. Raises UserError for outputs of a user's own network, and values of a
        user's own loss, of another kind.
        """
        if self.network is not None:
            refuse_odd_logits(logits, *self.network, label.shape, may_be_several=True)
        scales: tuple[Tensor, ...] = logits if isinstance(logits, tuple) else (logits,)
        finest, *coarser = scales
        label = crop(label, finest.shape[2:])  # valid convolutions lose the border
        total = self._term(finest, label)
        for level, scale in enumerate(coarser, start=1):
            label = subsample(label, scale.shape[2:])
            total = total + 0.5**level * self._term(scale, label)
        return total / sum(0.5**level for level in range(len(scales)))

    def _term(self, logits: Tensor, label: Tensor) -> Tensor:
        """Return the loss at one scale."""
        if self.function in IN_CHUNKS:  # they convert a chunk at a time
            return self.function(logits, label, self.options)
        value = self.function(logits.float(), label.long(), self.options)
        if self.path is not None:
            refuse_odd_loss(value, self.path, logits.requires_grad)
        return MeanOverRanks.apply(value) if ranks.count() > 1 else value


class MeanOverRanks(torch.autograd.Function):
    """Mean of the ranks' values; gradients are shares, because they are added up over the ranks."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        mean = value / ranks.count()
        ranks.all_reduce_sum([mean])
        return mean

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient / ranks.count()


@loss
def ce(logits: Tensor, label: Tensor, options: LossOptions) -> Tensor:
    """Return the mean cross-entropy of the labelled voxels, weighted by class; 0 without any (torch's mean is NaN)."""
    value: Tensor = InChunks.apply(logits, label, options, False, True)
    return value


@loss
def dice(logits: Tensor, label: Tensor, options: LossOptions) -> Tensor:
    """Return 1 - mean soft Dice of the foreground classes (Milletari et al. 2016, nnU-Net's unsquared denominator)."""
    value: Tensor = InChunks.apply(logits, label, options, True, False)
    return value


@loss
def dice_ce(logits: Tensor, label: Tensor, options: LossOptions) -> Tensor:
    """Return the sum of Dice and cross-entropy."""
    value: Tensor = InChunks.apply(logits, label, options, True, True)
    return value


IN_CHUNKS = (ce, dice, dice_ce)


@dataclass
class _Sums:
    """Sums over voxels from which the losses follow; None in a loss that does not need them."""

    overlap: Tensor | None = None  # N K, probability on voxels of the class
    size: Tensor | None = None  # N K, probability plus voxels of the class
    log_likelihood: Tensor | None = None  # of the labels, weighted by class
    weight: Tensor | None = None  # of all labelled voxels


class InChunks(torch.autograd.Function):
    """Dice and cross-entropy of a chunk of rows at a time: their maps of all classes are as thin as a chunk.

    The gradient is written over the logits, where nothing else needs them: no second map of all classes is made.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        label: Tensor,
        options: LossOptions,
        dice: bool,
        ce: bool,
    ) -> Tensor:
        weights = options.weights
        if weights is not None:
            weights = weights.to(logits.device, _exact(logits.dtype))
        sums = _sum_chunks(logits, label, options.chunk, weights, dice, ce)
        _sum_over_ranks(sums, options.batch_dice)
        ctx.shares = 1 if options.batch_dice else ranks.count()  # of the mean over images, of which others have theirs
        value: Tensor | None = None
        if sums.overlap is not None and sums.size is not None:
            sums.overlap = 2 * sums.overlap + SMOOTH
            sums.size = sums.size + SMOOTH
            score = (sums.overlap / sums.size)[:, 1:].mean()
            if ctx.shares > 1:
                score = score / ctx.shares
                ranks.all_reduce_sum([score])
            value = 1 - score
        if sums.log_likelihood is not None and sums.weight is not None:
            sums.weight = sums.weight.clamp(min=1e-8)
            gain = sums.log_likelihood / sums.weight
            value = -gain if value is None else value - gain
        ctx.save_for_backward(logits, label, sums.overlap, sums.size, sums.weight)
        ctx.weights = weights
        ctx.producer_keeps_no_output = _producer_keeps_no_output(logits)
        ctx.chunk = options.chunk
        assert value is not None
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        logits, label, overlap, size, weight = ctx.saved_tensors
        may_overwrite = ctx.producer_keeps_no_output and _reference_counts(logits) == _Probe.reference_counts()
        out = logits if may_overwrite else torch.empty_like(logits)
        if size is not None:
            images, classes = size.shape
            scores = images * (classes - 1) * ctx.shares
            by_overlap = -2 / size / scores
            by_size = overlap / size**2 / scores
            by_overlap[:, 0] = 0  # the background
            by_size[:, 0] = 0
        row = 0
        for x, truth in _chunks(logits, label, ctx.chunk):
            p = x.softmax(1)
            valid = truth.sum(1, keepdim=True)
            if size is not None:
                grad_x = truth * _as_maps(by_overlap)
                grad_x.add_(_as_maps(by_size)).mul_(valid)
                grad_x.sub_((p * grad_x).sum(1, keepdim=True)).mul_(p)  # through the softmax
            else:
                grad_x = torch.zeros_like(p)
            if weight is not None:
                voxel_weight = valid
                if ctx.weights is not None:
                    voxel_weight = (truth * _as_maps(ctx.weights[None])).sum(1, keepdim=True)
                p.sub_(truth).mul_(voxel_weight / weight)
                grad_x.add_(p)
            end = row + x.shape[2]
            out[:, :, row:end] = grad_x.mul_(gradient)
            row = end
        return out, None, None, None, None


def _sum_chunks(
    logits: Tensor,
    label: Tensor,
    chunk: int | None,
    weights: Tensor | None,
    dice: bool,
    ce: bool,
) -> _Sums:
    """Return this rank's sums over all chunks, for Dice, cross-entropy or both."""
    sums = _Sums()
    for x, truth in _chunks(logits, label, chunk):
        log_p = x.log_softmax(1)
        if ce:
            weighted = truth if weights is None else truth * _as_maps(weights[None])
            sums.log_likelihood = _add(sums.log_likelihood, (log_p * weighted).sum())
            sums.weight = _add(sums.weight, weighted.sum())
            del weighted
        if dice:
            p = log_p.exp_()
            p.mul_(truth.sum(1, keepdim=True))  # 0 where the label is ignored
            sums.overlap = _add(sums.overlap, (p * truth).sum(VOXELS))
            p.add_(truth)
            sums.size = _add(sums.size, p.sum(VOXELS))
    return sums


def _add(total: Tensor | None, part: Tensor) -> Tensor:
    """Return the sum so far; the first part becomes the total."""
    return part if total is None else total.add_(part)


def _sum_over_ranks(sums: _Sums, batch_dice: bool) -> None:
    """Add up the sums of all ranks; with `batch_dice`, also the sums of images to one of the batch."""
    shared = [sums.log_likelihood, sums.weight]
    if batch_dice and sums.overlap is not None and sums.size is not None:
        sums.overlap = sums.overlap.sum(0, keepdim=True)
        sums.size = sums.size.sum(0, keepdim=True)
        shared += [sums.overlap, sums.size]
    ranks.all_reduce_sum(tensor for tensor in shared if tensor is not None)


def _producer_keeps_no_output(logits: Tensor) -> bool:
    """Return whether a convolution or a network by a program made the logits: neither reads its output in backward."""
    return type(logits.grad_fn).__name__ in ("ConvolutionBackward0", "InSlabsBackward", "InTilesBackward")


def _reference_counts(tensor: Tensor) -> tuple[int, int]:
    """Return the references to a tensor in C++ and in Python.

    They depend on the versions of Python and torch: compare them with `_Probe.reference_counts()` alone.
    """
    return tensor._use_count(), sys.getrefcount(tensor)  # type: ignore[attr-defined]


class _Probe(torch.autograd.Function):
    """A measurement of how many references a tensor has in `backward` where autograd alone has kept it.

    Its backward unpacks and counts exactly as `InChunks.backward` does, because local names count, too.
    """

    counts = (0, 0)

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        _Probe.counts = _reference_counts(x)
        return gradient.expand(x.shape)

    @classmethod
    def reference_counts(cls) -> tuple[int, int]:
        """Return the counts, measured at the first call."""
        if cls.counts == (0, 0):
            with torch.enable_grad():
                leaf = torch.ones(1, requires_grad=True)
                cls.apply(leaf * 1).backward()
        return cls.counts


def _chunks(logits: Tensor, label: Tensor, numbers: int | None) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield logits and one-hot labels N K d H W, of a few rows at a time; all classes 0 where the label is IGNORE."""
    rows = _rows_of_chunk(logits, numbers)
    dtype = _exact(logits.dtype)
    for first in range(0, logits.shape[2], rows):
        last = first + rows
        x = logits[:, :, first:last].to(dtype).contiguous()  # softmax would do so unseen
        index = label[:, None, first:last].long()
        if torch.are_deterministic_algorithms_enabled():
            # On a GPU, torch would sort the values of a tensor before it scatters them; the number 1 it need not.
            truth = torch.zeros_like(x).scatter_(1, index.clamp(min=0), 1).masked_fill_(index == IGNORE, 0)
        else:
            truth = torch.zeros_like(x).scatter_(1, index.clamp(min=0), (index != IGNORE).to(x.dtype))
        del index
        yield x, truth


def _rows_of_chunk(logits: Tensor, numbers: int | None) -> int:
    """Return how many rows have at most `numbers` logits, at least 1; None: as suits the CPU."""
    numbers_of_row = logits.numel() // logits.shape[2]
    if numbers is not None:
        return max(1, numbers // numbers_of_row)
    rows = math.ceil(logits.shape[2] / CHUNKS)
    return max(rows, SMALL // numbers_of_row)


def _exact(dtype: torch.dtype) -> torch.dtype:
    """Return the type to sum in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _as_maps(values: Tensor) -> Tensor:
    """Return values N K as N K 1 1 1."""
    return values[:, :, None, None, None]


def subsample(label: Tensor, size: torch.Size) -> Tensor:
    """Return a label map N D H W at the next coarser level's size, D H W: the first voxel of each cell.

    The last cell of an axis may be shorter.
    """
    for axis, cells in enumerate(size, start=1):
        stride = math.ceil(label.shape[axis] / cells)
        first_voxels = torch.arange(cells, device=label.device) * stride
        label = label.index_select(axis, first_voxels)
    return label

"""Losses on logits N K D H W and labels N D H W, summed in float32. To add one, write a function below `@loss(...)`.

Where the data has regions, classes that overlap, K are these and each logit is a sigmoid's: `region_losses` has them.
With several ranks, value and gradient are taken over the whole batch. A function of your own gets this rank's images,
and its values are averaged.

No loss here makes a map of all classes beside the logits: with many classes, that map would be the peak of memory.
Voxels labelled IGNORE add nothing to value and gradient; a batch of only such voxels gives 0 and zero gradients.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from unet3d.base import ranks
from unet3d.base.types import IGNORE
from unet3d.model.blocks import crop
from unet3d.training.loss_chunks import (
    VOXELS,
    Probe,
    Sums,
    add,
    as_maps,
    exact,
    producer_keeps_no_output,
    reference_counts,
    rows_of_chunk,
    sum_over_ranks,
    value_of,
)
from unet3d.training.own_parts import refuse_odd_logits, refuse_odd_loss
from unet3d.training.region_losses import RegionsInChunks

CUDA_CHUNK = 2**22  # numbers of logits; a GPU has work for all of its cores, and a step few launches for the loss


@dataclass(frozen=True)
class LossOptions:
    """Settings from the config that every loss gets."""

    weights: Tensor | None = None  # K, of the classes or regions in the cross-entropy
    batch_dice: bool = True  # one Dice over the batch; else the mean over its images
    chunk: int | None = None  # numbers of logits in a chunk; None: as suits the CPU
    regions: Tensor | None = None  # K L, 1 where a region holds a label; None: classes exclude each other


LossTerm = Callable[[Tensor, Tensor, LossOptions], Tensor]
LOSSES: dict[str, LossTerm] = {}
IN_CHUNKS: set[LossTerm] = set()


def loss(
    *,
    about: str,
    ce: bool = False,
    dice: bool = False,
    by_image: bool = False,
    in_chunks: bool = False,
) -> Callable[[LossTerm], LossTerm]:
    """Register `(logits N K D H W float32, label N D H W int64 with IGNORE, options) -> scalar` under its name.

    `config/schema.py` reads the arguments, which are written as constants, without loading this file. `about`: words of
    a methods paragraph. `ce`, `dice`: whether `options.weights` and `options.batch_dice` count. `by_image`: without
    batch_dice it is the mean of its images' values. `in_chunks`: the sum of `dice` and `ce` that `sum_chunks` has the
    sums for; logits are not converted for it.
    """

    def register(function: LossTerm) -> LossTerm:
        LOSSES[function.__name__] = function
        if in_chunks:
            IN_CHUNKS.add(function)
        return function

    return register


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


@loss(about="cross-entropy", ce=True, in_chunks=True)
def ce(logits: Tensor, label: Tensor, options: LossOptions) -> Tensor:
    """Return the mean cross-entropy of the labelled voxels, weighted by class; 0 without any (torch's mean is NaN).

    Of regions it is the mean binary cross-entropy, over regions too.
    """
    return _in_chunks(logits, label, options, dice=False, ce=True)


@loss(about="soft Dice loss", dice=True, by_image=True, in_chunks=True)
def dice(logits: Tensor, label: Tensor, options: LossOptions) -> Tensor:
    """Return 1 - mean soft Dice of the foreground classes (Milletari et al. 2016, nnU-Net's unsquared denominator)."""
    return _in_chunks(logits, label, options, dice=True, ce=False)


@loss(about="the sum of soft Dice loss and cross-entropy", ce=True, dice=True, in_chunks=True)
def dice_ce(logits: Tensor, label: Tensor, options: LossOptions) -> Tensor:
    """Return the sum of Dice and cross-entropy."""
    return _in_chunks(logits, label, options, dice=True, ce=True)


def _in_chunks(logits: Tensor, label: Tensor, options: LossOptions, dice: bool, ce: bool) -> Tensor:
    """Return Dice, cross-entropy or their sum."""
    value: Tensor
    if options.regions is None:
        value = InChunks.apply(logits, label, options, dice, ce)
    else:
        settings = (options.weights, options.batch_dice, options.chunk)
        value = RegionsInChunks.apply(logits, label, options.regions, *settings, dice, ce)
    return value


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
            weights = weights.to(logits.device, exact(logits.dtype))
        sums = sum_chunks(logits, label, options.chunk, weights, dice, ce)
        sum_over_ranks(sums, options.batch_dice)
        ctx.shares = 1 if options.batch_dice else ranks.count()  # of the mean over images, of which others have theirs
        value = value_of(sums, ctx.shares, first=1)  # without the background
        ctx.save_for_backward(logits, label, sums.overlap, sums.size, sums.weight)
        ctx.weights = weights
        ctx.producer_keeps_no_output = producer_keeps_no_output(logits)
        ctx.chunk = options.chunk
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        logits, label, overlap, size, weight = ctx.saved_tensors
        may_overwrite = ctx.producer_keeps_no_output and reference_counts(logits) == Probe.reference_counts()
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
                grad_x = truth * as_maps(by_overlap)
                grad_x.add_(as_maps(by_size)).mul_(valid)
                grad_x.sub_((p * grad_x).sum(1, keepdim=True)).mul_(p)  # through the softmax
            else:
                grad_x = torch.zeros_like(p)
            if weight is not None:
                voxel_weight = valid
                if ctx.weights is not None:
                    voxel_weight = (truth * as_maps(ctx.weights[None])).sum(1, keepdim=True)
                p.sub_(truth).mul_(voxel_weight / weight)
                grad_x.add_(p)
            end = row + x.shape[2]
            out[:, :, row:end] = grad_x.mul_(gradient)
            row = end
        return out, None, None, None, None


def sum_chunks(
    logits: Tensor,
    label: Tensor,
    chunk: int | None,
    weights: Tensor | None,
    dice: bool,
    ce: bool,
) -> Sums:
    """Return this rank's sums over all chunks, for Dice, cross-entropy or both."""
    sums = Sums()
    for x, truth in _chunks(logits, label, chunk):
        log_p = x.log_softmax(1)
        if ce:
            weighted = truth if weights is None else truth * as_maps(weights[None])
            sums.log_likelihood = add(sums.log_likelihood, (log_p * weighted).sum())
            sums.weight = add(sums.weight, weighted.sum())
            del weighted
        if dice:
            p = log_p.exp_()
            p.mul_(truth.sum(1, keepdim=True))  # 0 where the label is ignored
            sums.overlap = add(sums.overlap, (p * truth).sum(VOXELS))
            p.add_(truth)
            sums.size = add(sums.size, p.sum(VOXELS))
    return sums


def _chunks(logits: Tensor, label: Tensor, numbers: int | None) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield logits and one-hot labels N K d H W, of a few rows at a time; all classes 0 where the label is IGNORE."""
    rows = rows_of_chunk(logits, numbers)
    dtype = exact(logits.dtype)
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


def subsample(label: Tensor, size: torch.Size) -> Tensor:
    """Return a label map N D H W at the next coarser level's size, D H W: the first voxel of each cell.

    The last cell of an axis may be shorter.
    """
    for axis, cells in enumerate(size, start=1):
        stride = math.ceil(label.shape[axis] / cells)
        first_voxels = torch.arange(cells, device=label.device) * stride
        label = label.index_select(axis, first_voxels)
    return label

"""Dice and binary cross-entropy of regions, classes that may overlap: each logit is a sigmoid's, none the background's.

As in `losses`, no map of all regions is made beside the logits, and the gradient is written over them where it may be.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from unet3d.base import ranks
from unet3d.base.types import IGNORE
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


class RegionsInChunks(torch.autograd.Function):
    """Dice of all regions and the mean binary cross-entropy of all voxels and regions, a chunk of rows at a time.

    `table` K L has 1 where a region holds a label, and `weights` K are of the regions in the cross-entropy.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        label: Tensor,
        table: Tensor,
        weights: Tensor | None,
        batch_dice: bool,
        chunk: int | None,
        dice: bool,
        ce: bool,
    ) -> Tensor:
        table = table.to(logits.device, exact(logits.dtype))
        weights = torch.ones_like(table[:, 0]) if weights is None else weights.to(table)
        sums = sum_chunks(logits, label, table, weights, chunk, dice, ce)
        sum_over_ranks(sums, batch_dice)
        ctx.shares = 1 if batch_dice else ranks.count()  # of the mean over images, of which others have theirs
        value = value_of(sums, ctx.shares, first=0)
        ctx.save_for_backward(logits, label, sums.overlap, sums.size, sums.weight)
        ctx.table = table
        ctx.weights = weights
        ctx.producer_keeps_no_output = producer_keeps_no_output(logits)
        ctx.chunk = chunk
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, *tuple[None, ...]]:
        logits, label, overlap, size, weight = ctx.saved_tensors
        may_overwrite = ctx.producer_keeps_no_output and reference_counts(logits) == Probe.reference_counts()
        out = logits if may_overwrite else torch.empty_like(logits)
        if size is not None:
            scores = size.numel() * ctx.shares
            by_overlap = -2 / size / scores
            by_size = overlap / size**2 / scores
        row = 0
        for x, truth, valid in _chunks(logits, label, ctx.table, ctx.chunk):
            p = x.sigmoid()
            if size is not None:
                grad_x = truth * as_maps(by_overlap)
                grad_x.add_(as_maps(by_size)).mul_(p)
                grad_x.addcmul_(grad_x, p, value=-1)  # through the sigmoid
            else:
                grad_x = torch.zeros_like(p)
            if weight is not None:
                p.sub_(truth).mul_(as_maps(ctx.weights[None] / weight))
                grad_x.add_(p)
            end = row + x.shape[2]
            out[:, :, row:end] = grad_x.mul_(valid).mul_(gradient)
            row = end
            del x, truth, valid, p, grad_x  # before the next chunk is made
        return out, None, None, None, None, None, None, None


def sum_chunks(
    logits: Tensor,
    label: Tensor,
    table: Tensor,
    weights: Tensor,
    chunk: int | None,
    dice: bool,
    ce: bool,
) -> Sums:
    """Return this rank's sums over all chunks, for Dice, cross-entropy or both."""
    sums = Sums()
    zero = torch.zeros_like(weights[0])
    for x, truth, valid in _chunks(logits, label, table, chunk):
        if ce:
            surprise = torch.logaddexp(x, zero).addcmul_(x, truth, value=-1)  # -log of the truth's probability
            surprise.mul_(valid).mul_(as_maps(weights[None]))
            sums.log_likelihood = add(sums.log_likelihood, -surprise.sum())
            sums.weight = add(sums.weight, valid.sum() * weights.sum())
            del surprise
        if dice:
            p = x.sigmoid().mul_(valid)
            sums.size = add(sums.size, p.sum(VOXELS) + truth.sum(VOXELS))
            sums.overlap = add(sums.overlap, p.mul_(truth).sum(VOXELS))
            del p
        del x, truth, valid  # before the next chunk is made
    return sums


def _chunks(
    logits: Tensor,
    label: Tensor,
    table: Tensor,
    numbers: int | None,
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield logits and truth N K d H W of a few rows at a time, and N 1 d H W, 0 where the label is IGNORE.

    The truth of each region is 1 on its labels and 0 elsewhere, also where the label is IGNORE.
    """
    rows = rows_of_chunk(logits, numbers)
    for first in range(0, logits.shape[2], rows):
        last = first + rows
        x = logits[:, :, first:last].to(table.dtype).contiguous()
        index = label[:, first:last].long()
        valid = (index != IGNORE).to(table.dtype)[:, None]
        index = index.clamp(min=0)
        truth = torch.empty_like(x)
        for number, holds in enumerate(table):
            truth[:, number] = holds[index]
        del index
        yield x, truth, valid
        del x, truth, valid

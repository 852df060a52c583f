"""What losses of chunks of rows share: a chunk's size, sums, and whether logits may be overwritten."""

import math
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unet3d.base import ranks

SMOOTH = 1e-5  # keeps Dice finite for a class that neither side has
VOXELS = (2, 3, 4)  # dimensions of N K D H W
CHUNKS = 16  # of a map on the CPU, at most
SMALL = 2**12  # numbers of logits; with less in a chunk on the CPU, most of the time goes to calls


@dataclass
class Sums:
    """Sums over voxels from which the losses follow; None in a loss that does not need them."""

    overlap: Tensor | None = None  # N K, probability on voxels of the class
    size: Tensor | None = None  # N K, probability plus voxels of the class
    log_likelihood: Tensor | None = None  # of the labels, weighted by class
    weight: Tensor | None = None  # of all labelled voxels

    def add(self, part: "Sums") -> None:
        """Add the sums of other voxels of the same images."""
        for name, value in vars(part).items():
            if value is not None:
                setattr(self, name, add(getattr(self, name), value))


def add(total: Tensor | None, part: Tensor) -> Tensor:
    """Return the sum so far; the first part becomes the total."""
    return part if total is None else total.add_(part)


def sum_over_ranks(sums: Sums, batch_dice: bool) -> None:
    """Add up the sums of all ranks; with `batch_dice`, also the sums of images to one of the batch."""
    shared = [sums.log_likelihood, sums.weight]
    if batch_dice and sums.overlap is not None and sums.size is not None:
        sums.overlap = sums.overlap.sum(0, keepdim=True)
        sums.size = sums.size.sum(0, keepdim=True)
        shared += [sums.overlap, sums.size]
    ranks.all_reduce_sum(tensor for tensor in shared if tensor is not None)


def value_of(sums: Sums, shares: int, first: int) -> Tensor:
    """Return the loss of the sums, which become smooth; Dice is of the classes from `first` on.

    `shares`: the number of ranks of whose images Dice is the mean; 1 if these are one batch.
    """
    value: Tensor | None = None
    if sums.overlap is not None and sums.size is not None:
        sums.overlap = 2 * sums.overlap + SMOOTH
        sums.size = sums.size + SMOOTH
        score = (sums.overlap / sums.size)[:, first:].mean()
        if shares > 1:
            score = score / shares
            ranks.all_reduce_sum([score])
        value = 1 - score
    if sums.log_likelihood is not None and sums.weight is not None:
        sums.weight = sums.weight.clamp(min=1e-8)
        gain = sums.log_likelihood / sums.weight
        value = -gain if value is None else value - gain
    assert value is not None
    return value


def producer_keeps_no_output(logits: Tensor) -> bool:
    """Return whether a convolution or a network by a program made the logits: neither reads its output in backward."""
    return type(logits.grad_fn).__name__ in ("ConvolutionBackward0", "InTilesBackward")


def reference_counts(tensor: Tensor) -> tuple[int, int]:
    """Return the references to a tensor in C++ and in Python.

    They depend on the versions of Python and torch: compare them with `Probe.reference_counts()` alone.
    """
    return tensor._use_count(), sys.getrefcount(tensor)  # type: ignore[attr-defined]


class Probe(torch.autograd.Function):
    """A measurement of how many references a tensor has in `backward` where autograd alone has kept it.

    Its backward unpacks and counts exactly as those of `InChunks` and `RegionsInChunks` do, because local names count.
    """

    counts = (0, 0)

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        Probe.counts = reference_counts(x)
        return gradient.expand(x.shape)

    @classmethod
    def reference_counts(cls) -> tuple[int, int]:
        """Return the counts, measured at the first call."""
        if cls.counts == (0, 0):
            with torch.enable_grad():
                leaf = torch.ones(1, requires_grad=True)
                cls.apply(leaf * 1).backward()
        return cls.counts


def rows_of_chunk(logits: Tensor, numbers: int | None) -> int:
    """Return how many rows have at most `numbers` logits, at least 1; None: as suits the CPU."""
    numbers_of_row = logits.numel() // logits.shape[2]
    if numbers is not None:
        return max(1, numbers // numbers_of_row)
    rows = math.ceil(logits.shape[2] / CHUNKS)
    return max(rows, SMALL // numbers_of_row)


def exact(dtype: torch.dtype) -> torch.dtype:
    """Return the type to sum in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def as_maps(values: Tensor) -> Tensor:
    """Return values N K as N K 1 1 1."""
    return values[:, :, None, None, None]

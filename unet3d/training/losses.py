"""Losses on logits N K D H W and labels N D H W, summed in float32. To add one, write a function below `@loss(...)`.

Where the data has regions, classes that overlap, K are these and each logit is a sigmoid's. With several ranks, value
and gradient are taken over the whole batch. A function of your own gets this rank's images, and its values are
averaged. Voxels labelled IGNORE add nothing to value and gradient; a batch of only such voxels gives 0 and zero
gradients.

No loss here makes a map of all classes besides the logits: with many classes, that map would be the peak of memory. So
`InChunks` takes a few rows at a time, and writes the gradient over the logits where nothing else needs them.
"""

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable

from unet3d.base import ranks
from unet3d.base.errors import UserError
from unet3d.base.types import IGNORE, ProbabilityBlock, Regions
from unet3d.config import schema
from unet3d.model.blocks import crop
from unet3d.training.policy import refuse_odd_logits

CUDA_CHUNK = 2**22  # numbers of logits; a GPU has work for all of its cores, and a step few launches for the loss
SMOOTH = 1e-5  # keeps Dice finite for a class that neither side has
VOXELS = (2, 3, 4)  # dimensions of N K D H W
CHUNKS = 16  # Most chunks of a map on the CPU.
SMALL = 2**12  # numbers of logits; with less in a chunk on the CPU, most of the time goes to calls
LEAST = 1e-38  # Logarithms are taken of no smaller probability: a softmax in float32 may give 0.
MOST = 1 - 2**-25  # No region is likelier: a sigmoid in float32 gives 1 for all that is nearer to 1.


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
    batch_dice it is the mean of its images' values. `in_chunks`: the sum of `dice` and `ce` that `InChunks` computes;
    logits are not converted for it.
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
    path: str | None = None  # Where the user's own function lies.
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
        """Return the loss at one scale. Raises UserError for one that cannot be learned from."""
        if self.function in IN_CHUNKS:  # they convert a chunk at a time
            return self.function(logits, label, self.options)
        value: object = self.function(logits.float(), label.long(), self.options)
        place = f"loss.path={self.path}" if self.path else f"loss {self.function.__name__}"
        if not isinstance(value, Tensor):
            raise UserError(f"{place}: returns {type(value).__name__}; return a torch tensor, one number")
        if value.dim() or not value.is_floating_point():
            fault = f"returns {value.dtype} of shape {tuple(value.shape)}"
            raise UserError(f"{place}: {fault}; return one floating-point number, as by .mean()")
        if logits.requires_grad and torch.is_grad_enabled() and not value.requires_grad:
            raise UserError(f"{place}: returns a number without a gradient; compute it from the logits by torch")
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
    value: Tensor = InChunks.apply(logits, label, options, dice, ce)
    return value


def subsample(label: Tensor, size: torch.Size) -> Tensor:
    """Return a label map N D H W at the next coarser level's size, D H W: the first voxel of each cell.

    The last cell of an axis may be shorter.
    """
    for axis, cells in enumerate(size, start=1):
        stride = math.ceil(label.shape[axis] / cells)
        first_voxels = torch.arange(cells, device=label.device) * stride
        label = label.index_select(axis, first_voxels)
    return label


# Sums over voxels from which the losses follow, those that a loss needs:
# "overlap", N K: probability on voxels of the class; "size", N K: probability plus voxels of the class;
# "log_likelihood" of the labels, weighted by class; "weight" of all labelled voxels.
Sums = dict[str, Tensor]


def _add(sums: Sums, **parts: Tensor) -> None:
    """Add the sums of other voxels of the same images."""
    for name, part in parts.items():
        sums[name] = sums[name].add_(part) if name in sums else part


class InChunks(torch.autograd.Function):
    """Dice, cross-entropy or their sum; of classes or, by a sigmoid, of regions."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        label: Tensor,
        options: LossOptions,
        dice: bool,
        ce: bool,
    ) -> Tensor:
        weights, table = (
            None if tensor is None else tensor.to(logits.device, _exact(logits.dtype))
            for tensor in (options.weights, options.regions)
        )
        if table is not None and weights is None:
            weights = torch.ones_like(table[:, 0])
        options = replace(options, weights=weights, regions=table)
        sums = _sum_chunks(logits, label, options, dice, ce)
        shared = [sums[name] for name in ("log_likelihood", "weight") if name in sums]
        if options.batch_dice and dice:
            for name in ("overlap", "size"):
                sums[name] = sums[name].sum(0, keepdim=True)
                shared.append(sums[name])
        ranks.all_reduce_sum(shared)
        del shared  # The sums that are replaced below end there.
        ctx.shares = 1 if options.batch_dice else ranks.count()  # Other ranks have their share of the mean over images.
        value = _value_of(sums, ctx.shares, has_background=options.regions is None)
        ctx.save_for_backward(logits, label, *map(sums.get, ("overlap", "size", "weight")))
        ctx.options = options
        # A convolution or a network by a program: neither reads its output in backward.
        producers = ("ConvolutionBackward0", "RecomputeFunctionBackward")
        ctx.producer_keeps_no_output = type(logits.grad_fn).__name__ in producers
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        logits, label, overlap, size, weight = ctx.saved_tensors
        may_overwrite = ctx.producer_keeps_no_output and _reference_counts(logits) == Probe.reference_counts()
        out = logits if may_overwrite else torch.empty_like(logits)
        by_overlap = by_size = None
        if size is not None:
            background = 1 if ctx.options.regions is None else 0
            images, classes = size.shape
            scores = images * (classes - background) * ctx.shares
            by_overlap = -2 / size / scores
            by_size = overlap / size**2 / scores
            by_overlap[:, :background] = 0
            by_size[:, :background] = 0
        _write_gradient(out, logits, label, ctx.options, by_overlap, by_size, weight, gradient)
        return out, None, None, None, None


def _sum_chunks(logits: Tensor, label: Tensor, options: LossOptions, dice: bool, ce: bool) -> Sums:
    """Return this rank's sums over all chunks, for Dice, cross-entropy or both."""
    weights = options.weights
    sums: Sums = {}
    for x, rows in _chunks(logits, options.chunk):
        if options.regions is None:
            truth = _one_hot(x, label[:, rows])
            log_p = x.log_softmax(1)
            if ce:
                weighted = truth if weights is None else truth * _as_maps(weights[None])
                _add(sums, log_likelihood=(log_p * weighted).sum(), weight=weighted.sum())
                del weighted
            if dice:
                p = log_p.exp_()
                p.mul_(truth.sum(1, keepdim=True))  # 0 where the label is ignored
                _add(sums, overlap=(p * truth).sum(VOXELS))
                p.add_(truth)
                _add(sums, size=p.sum(VOXELS))
            continue
        assert weights is not None
        truth, valid = _in_regions(x, label[:, rows], options.regions)
        if ce:
            surprise = torch.logaddexp(x, torch.zeros_like(weights[0])).addcmul_(x, truth, value=-1)
            surprise.mul_(valid).mul_(_as_maps(weights[None]))  # -log of the truth's probability
            _add(sums, log_likelihood=-surprise.sum(), weight=valid.sum() * weights.sum())
            del surprise
        if dice:
            p = x.sigmoid().mul_(valid)
            _add(sums, size=p.sum(VOXELS) + truth.sum(VOXELS))
            _add(sums, overlap=p.mul_(truth).sum(VOXELS))
            del p
        del x, truth, valid  # before the next chunk is made
    return sums


def _write_gradient(
    out: Tensor,
    logits: Tensor,
    label: Tensor,
    options: LossOptions,
    by_overlap: Tensor | None,
    by_size: Tensor | None,
    weight: Tensor | None,
    gradient: Tensor,
) -> None:
    """Write the gradient of logits to `out`, which may be `logits`."""
    weights = options.weights
    for x, rows in _chunks(logits, options.chunk):
        if options.regions is None:
            truth = _one_hot(x, label[:, rows])
            p = x.softmax(1)
            valid = truth.sum(1, keepdim=True)
        else:
            truth, valid = _in_regions(x, label[:, rows], options.regions)
            p = x.sigmoid()
        if by_overlap is not None and by_size is not None:
            grad_x = truth * _as_maps(by_overlap)
            grad_x.add_(_as_maps(by_size))
            if options.regions is None:
                grad_x.mul_(valid)
                grad_x.sub_((p * grad_x).sum(1, keepdim=True)).mul_(p)  # through the softmax
            else:
                grad_x.mul_(p)
                grad_x.addcmul_(grad_x, p, value=-1)  # through the sigmoid
        else:
            grad_x = torch.zeros_like(p)
        if weight is not None:
            voxel_weight = valid
            if weights is not None:
                voxel_weight = _as_maps(weights[None])
                if options.regions is None:
                    voxel_weight = (truth * voxel_weight).sum(1, keepdim=True)
            p.sub_(truth).mul_(voxel_weight / weight)
            grad_x.add_(p)
        if options.regions is not None:
            grad_x.mul_(valid)
        out[:, :, rows] = grad_x.mul_(gradient)
        if options.regions is not None:
            del x, truth, valid, p, grad_x  # before the next chunk is made


def _one_hot(x: Tensor, label: Tensor) -> Tensor:
    """Return labels N d H W as N K d H W, like `x`; all classes are 0 where the label is IGNORE."""
    index = label[:, None].long()
    if torch.are_deterministic_algorithms_enabled():
        # On a GPU, torch would sort the values of a tensor before it scatters them; the number 1 it need not.
        return torch.zeros_like(x).scatter_(1, index.clamp(min=0), 1).masked_fill_(index == IGNORE, 0)
    return torch.zeros_like(x).scatter_(1, index.clamp(min=0), (index != IGNORE).to(x.dtype))


def _in_regions(x: Tensor, label: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Return the truth of regions, like `x` N K d H W, and N 1 d H W, which is 0 where the label is IGNORE.

    The truth of each region is 1 on its labels and 0 elsewhere, also where the label is IGNORE.
    """
    index = label.long()
    valid = (index != IGNORE).to(table.dtype)[:, None]
    index = index.clamp(min=0)
    truth = torch.empty_like(x)
    for number, holds in enumerate(table):
        truth[:, number] = holds[index]
    return truth, valid


def _chunks(logits: Tensor, numbers: int | None) -> Iterator[tuple[Tensor, slice]]:
    """Yield logits N K d H W in the type to sum in, and their rows: as many as have at most `numbers` logits.

    A chunk has at least one row. `numbers` None: as suits the CPU.
    """
    length = logits.shape[2]
    numbers_of_row = logits.numel() // length
    if numbers is not None:
        count = max(1, numbers // numbers_of_row)
    else:
        count = max(math.ceil(length / CHUNKS), SMALL // numbers_of_row)
    for first in range(0, length, count):
        rows = slice(first, first + count)
        x = logits[:, :, rows].to(_exact(logits.dtype)).contiguous()  # softmax would do so unseen
        yield x, rows
        del x


def _exact(dtype: torch.dtype) -> torch.dtype:
    """Return the type to sum in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _as_maps(values: Tensor) -> Tensor:
    """Return values N K as N K 1 1 1."""
    return values[:, :, None, None, None]


def _value_of(sums: Sums, shares: int, has_background: bool) -> Tensor:
    """Return the loss of the sums, which become smooth; Dice leaves out a background, the first class.

    `shares`: the number of ranks of whose images Dice is the mean; 1 if these are one batch.
    """
    value: Tensor | None = None
    if "size" in sums:
        sums["overlap"] = 2 * sums["overlap"] + SMOOTH
        sums["size"] = sums["size"] + SMOOTH
        score = (sums["overlap"] / sums["size"])[:, int(has_background) :].mean()
        if shares > 1:
            score = score / shares
            ranks.all_reduce_sum([score])
        value = 1 - score
    if "weight" in sums:
        sums["weight"] = sums["weight"].clamp(min=1e-8)
        gain = sums["log_likelihood"] / sums["weight"]
        value = -gain if value is None else value - gain
    assert value is not None
    return value


def _reference_counts(tensor: Tensor) -> tuple[int, int]:
    """Return the references to a tensor in C++ and in Python.

    They depend on the versions of Python and torch: compare them with `Probe.reference_counts()` alone.
    """
    return tensor._use_count(), sys.getrefcount(tensor)  # type: ignore[attr-defined]


class Probe(torch.autograd.Function):
    """A measurement of how many references a tensor has in `backward` where autograd alone has kept it.

    Its backward unpacks and counts exactly as that of `InChunks` does, because local names count.
    """

    counts = (0, 0)

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        Probe.counts = _reference_counts(x)
        return gradient.expand(x.shape)

    @classmethod
    def reference_counts(cls) -> tuple[int, int]:
        """Return the counts, measured at the first call."""
        if cls.counts == (0, 0):
            with torch.enable_grad():
                leaf = torch.ones(1, requires_grad=True)
                cls.apply(leaf * 1).backward()
        return cls.counts


class VolumeLoss:
    """The training loss of one whole volume, from the probabilities of classes or regions that its windows give anyway.

    It takes no memory of a GPU: strips are on the host, where one plane has a few copies in float64.
    """

    def __init__(self, options: schema.Loss, outputs: int, regions: Regions | None = None) -> None:
        """Begin without voxels. `outputs`: the number of classes, or of regions."""
        facts = schema.LOSSES[options.name]
        self._terms = (facts.get("dice", False), facts.get("ce", False))
        weights = torch.tensor(options.weights or [1.0] * outputs, dtype=torch.float64)
        table = None if regions is None else torch.tensor(regions.table(), dtype=torch.float64)
        self._options = LossOptions(weights, regions=table)
        self._sums: Sums = {}
        self._has_labels = False
        self._is_softmax = regions is None

    @staticmethod
    def exists(options: schema.Loss) -> bool:
        """Return whether a loss is one of these sums: a function of the user's own may want other tensors."""
        return options.path is None and bool(schema.LOSSES[options.name].get("in_chunks"))

    def adding(self, strips: Iterator[ProbabilityBlock], label: NDArray[np.integer]) -> Iterator[ProbabilityBlock]:
        """Yield the strips unchanged, each once it is added; `label` (X, Y, Z) is of the whole volume."""
        for strip in strips:
            planes = strip.probabilities.unbind(1)
            for plane, truth in zip(planes, label[strip.box], strict=True):
                self._add(plane.double(), torch.tensor(truth))
            yield strip

    def _add(self, plane: Tensor, truth: Tensor) -> None:
        """Add probabilities (K, Y, Z) of a plane with these labels (Y, Z), as of the logits that have them."""
        logits = plane.clamp(min=LEAST).log() if self._is_softmax else plane.clamp(LEAST, MOST).logit()
        _add(self._sums, **_sum_chunks(logits[None, :, None], truth[None, None], self._options, *self._terms))
        self._has_labels |= bool((truth != IGNORE).any())

    def value(self) -> float | None:
        """Return the loss of the voxels so far; None where none is labelled."""
        if not self._has_labels:
            return None
        return _value_of(dict(self._sums), shares=1, has_background=self._is_softmax).item()

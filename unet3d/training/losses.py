"""Losses on logits N K D H W and labels N D H W, summed in float32. To add one, write a function below `@loss`.

Where several ranks share a batch, value and gradient are those of the whole batch; a function of your own gets this
rank's images, and its values are averaged.

No loss here makes a map of all classes beside the logits: with many classes, that map would be the peak of memory.
Voxels labelled IGNORE add nothing to value and gradient; a batch of only such voxels gives 0 and zero gradients.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from unet3d.base import ranks
from unet3d.base.errors import UserError
from unet3d.base.types import IGNORE
from unet3d.model.blocks import crop

SMOOTH = 1e-5  # keeps Dice finite for a class that neither side has
SLABS = 16  # of a map on the CPU, at most
SMALL = 2**12  # numbers of logits; with less in a slab on the CPU, most of the time goes to calls
CUDA_SLAB = 2**22  # numbers of logits; a GPU has work for all of its cores, and a step few launches for the loss


@dataclass(frozen=True)
class LossOptions:
    """What the config gives to every loss."""

    weights: Tensor | None = None  # K, of the classes in the cross-entropy
    batch_dice: bool = True  # one Dice over the batch; else the mean over its images
    slab: int | None = None  # numbers of logits in a slab; None: as suits the CPU


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
    path: str | None = None  # that names the function, of the user's own
    network: tuple[str, int] | None = None  # the path and the classes of a network of the user's own

    def __call__(self, logits: Any, label: Tensor) -> Tensor:
        """`logits`: one tensor, or a tuple of them, finest first. Labels are cropped or subsampled to each.

        Raises UserError for outputs of a user's own network, and values of a user's own loss, of another kind.
        """
        if self.network is not None:
            refuse_odd_logits(logits, *self.network, label.shape, may_be_several=True)
        scales: tuple[Tensor, ...] = logits if isinstance(logits, tuple) else (logits,)
        label = crop(label, scales[0].shape[2:])  # valid convolutions lose the border
        total = self._term(scales[0], label)
        for level, scale in enumerate(scales[1:], start=1):
            label = subsample(label, scale.shape[2:])
            total = total + 0.5**level * self._term(scale, label)
        return total / sum(0.5**level for level in range(len(scales)))

    def _term(self, logits: Tensor, label: Tensor) -> Tensor:
        if self.function in BY_SLABS:  # they convert a slab at a time
            return self.function(logits, label, self.options)
        value = self.function(logits.float(), label.long(), self.options)
        if self.path is not None:
            refuse_odd_loss(value, self.path, logits.requires_grad)
        return MeanOverRanks.apply(value) if ranks.count() > 1 else value


def refuse_odd_logits(
    output: object, path: str, classes: int, sizes: Sequence[int], may_be_several: bool = False
) -> None:
    """Raise UserError unless a user's own network, named by its path, returns logits for images of `sizes`, N D H W.

    `may_be_several`: a tuple of logits, for deep supervision, of which the first are of the images' size.
    """
    scales = output if may_be_several and isinstance(output, tuple) and output else (output,)
    count, *size = sizes
    wanted = (count, classes, *size)
    for number, scale in enumerate(scales):
        found = tuple(scale.shape) if isinstance(scale, Tensor) else type(scale).__name__
        is_coarser = number > 0 and len(found) == 5 and found[:2] == wanted[:2]
        if found != wanted and not is_coarser:
            name = "returns" if len(scales) == 1 else f"returns as number {number + 1}"
            what = f"{name} {found}; return logits N K D H W of the image's size, here {wanted}"
            raise UserError(f"model.path={path}: {what}")
        if not scale.is_floating_point():
            raise UserError(f"model.path={path}: returns {scale.dtype}; return logits, floating-point numbers")
        if may_be_several and torch.is_grad_enabled() and not scale.requires_grad:
            what = "returns logits without a gradient: they are detached, or none of its parameters requires one"
            raise UserError(f"model.path={path}: {what}")


def refuse_odd_loss(value: object, path: str, has_gradient: bool) -> None:
    """Raise UserError unless a user's own loss, named by its path, returns a number that can be learned from."""
    if not isinstance(value, Tensor):
        raise UserError(f"loss.path={path}: returns {type(value).__name__}; return a torch tensor, one number")
    if value.dim() or not value.is_floating_point():
        what = f"returns {value.dtype} of shape {tuple(value.shape)}; return one floating-point number, as by .mean()"
        raise UserError(f"loss.path={path}: {what}")
    if has_gradient and torch.is_grad_enabled() and not value.requires_grad:
        raise UserError(f"loss.path={path}: returns a number without a gradient; compute it from the logits by torch")


@loss
def ce(logits: Tensor, label: Tensor, options: LossOptions) -> Tensor:
    """Cross-entropy: mean over the labelled voxels, weighted by class; 0 if there are none (torch's mean is NaN)."""
    value: Tensor = BySlabs.apply(logits, label, options, False, True)
    return value


@loss
def dice(logits: Tensor, label: Tensor, options: LossOptions) -> Tensor:
    """1 - mean soft Dice of the foreground classes (Milletari et al. 2016 with nnU-Net's unsquared denominator)."""
    value: Tensor = BySlabs.apply(logits, label, options, True, False)
    return value


@loss
def dice_ce(logits: Tensor, label: Tensor, options: LossOptions) -> Tensor:
    """The sum of Dice and cross-entropy."""
    value: Tensor = BySlabs.apply(logits, label, options, True, True)
    return value


BY_SLABS = (ce, dice, dice_ce)


class BySlabs(torch.autograd.Function):
    """Dice and cross-entropy of a slab of rows at a time: their maps of all classes are as thin as a slab.

    The gradient is written over the logits, where nothing else needs them: no second map of all classes is made.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, label: Tensor, options: LossOptions, dice: bool, ce: bool) -> Tensor:
        weights = None if options.weights is None else options.weights.to(logits.device, _exact(logits.dtype))
        overlap: Tensor | None = None  # N K, as the size
        size: Tensor | None = None
        likelihood: Tensor | None = None
        mass: Tensor | None = None
        for x, truth in _slabs(logits, label, options.slab):
            log_p = x.log_softmax(1)
            if ce:
                weighed = truth if weights is None else truth * weights.view(1, -1, 1, 1, 1)
                likelihood = _added(likelihood, (log_p * weighed).sum())
                mass = _added(mass, weighed.sum())
                del weighed
            if dice:
                p = log_p.exp_().mul_(truth.sum(1, keepdim=True))  # 0 where the label is ignored
                overlap = _added(overlap, (p * truth).sum((2, 3, 4)))
                size = _added(size, p.add_(truth).sum((2, 3, 4)))
        if options.batch_dice and overlap is not None and size is not None:
            overlap = overlap.sum(0, keepdim=True)
            size = size.sum(0, keepdim=True)
        sums = (likelihood, mass, *((overlap, size) if options.batch_dice else ()))
        ranks.all_reduce_sum(tensor for tensor in sums if tensor is not None)
        ctx.shares = 1 if options.batch_dice else ranks.count()  # of the mean over images, of which others have theirs
        value: Tensor | None = None
        if overlap is not None and size is not None:
            overlap = 2 * overlap + SMOOTH
            size = size + SMOOTH
            score = (overlap / size)[:, 1:].mean()
            if ctx.shares > 1:
                score = score / ctx.shares
                ranks.all_reduce_sum([score])
            value = 1 - score
        if likelihood is not None and mass is not None:
            mass = mass.clamp(min=1e-8)
            gain = likelihood / mass
            value = -gain if value is None else value - gain
        ctx.save_for_backward(logits, label, overlap, size, mass)
        ctx.weights, ctx.is_convolved, ctx.slab = weights, _keeps_no_output(logits), options.slab
        assert value is not None
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        logits, label, overlap, size, mass = ctx.saved_tensors
        is_free = ctx.is_convolved and _holders(logits) == _Probe.holders()  # a convolution keeps no output
        out = logits if is_free else torch.empty_like(logits)
        if size is not None:
            scores = size.shape[0] * (size.shape[1] - 1) * ctx.shares
            by_overlap = -2 / size / scores
            by_size = overlap / size**2 / scores
            by_overlap[:, 0] = by_size[:, 0] = 0  # the background
        rows = 0
        for x, truth in _slabs(logits, label, ctx.slab):
            p, valid = x.softmax(1), truth.sum(1, keepdim=True)
            if size is not None:
                slab = (truth * _maps(by_overlap)).add_(_maps(by_size)).mul_(valid)
                slab = slab.sub_((p * slab).sum(1, keepdim=True)).mul_(p)
            else:
                slab = torch.zeros_like(p)
            if mass is not None:
                share = valid if ctx.weights is None else (truth * _maps(ctx.weights[None])).sum(1, keepdim=True)
                slab.add_(p.sub_(truth).mul_(share / mass))
            out[:, :, rows : rows + x.shape[2]] = slab.mul_(gradient)
            rows += x.shape[2]
        return out, None, None, None, None


def _added(total: Tensor | None, part: Tensor) -> Tensor:
    """Return the sum so far; its first part is the beginning."""
    return part if total is None else total.add_(part)


class MeanOverRanks(torch.autograd.Function):
    """The mean of what each rank has; gradients, which are added up over the ranks, are shares."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        mean = value / ranks.count()
        ranks.all_reduce_sum([mean])
        return mean

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient / ranks.count()


def _keeps_no_output(tensor: Tensor) -> bool:
    """Whether what made it, a convolution or the model in slabs, does not read it in backward."""
    return type(tensor.grad_fn).__name__ in ("ConvolutionBackward0", "InSlabsBackward")


def _holders(tensor: Tensor) -> tuple[int, int]:
    """Counts of references to a tensor; compared alone, as they depend on the versions of Python and torch."""
    return tensor._use_count(), sys.getrefcount(tensor)  # type: ignore[attr-defined]


class _Probe(torch.autograd.Function):
    """Finds the holders of a tensor that autograd alone has kept."""

    found = (0, 0)

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        _Probe.found = _holders(x)
        return gradient.expand(x.shape)

    @classmethod
    def holders(cls) -> tuple[int, int]:
        if cls.found == (0, 0):
            with torch.enable_grad():
                cls.apply(torch.ones(1, requires_grad=True) * 1).backward()
        return cls.found


def _slabs(logits: Tensor, label: Tensor, numbers: int | None) -> Iterator[tuple[Tensor, Tensor]]:
    """Logits and one-hot labels N K d H W, of a few rows at a time; all classes 0 where the label is IGNORE."""
    rows = _rows(logits, numbers)
    for first in range(0, logits.shape[2], rows):
        x = logits[:, :, first : first + rows].to(_exact(logits.dtype)).contiguous()  # softmax would do so unseen
        index = label[:, None, first : first + rows].long()
        if torch.are_deterministic_algorithms_enabled():
            # On a GPU, torch would sort the values of a tensor before it scatters them; the number 1 it need not.
            truth = torch.zeros_like(x).scatter_(1, index.clamp(min=0), 1).masked_fill_(index == IGNORE, 0)
        else:
            truth = torch.zeros_like(x).scatter_(1, index.clamp(min=0), (index != IGNORE).to(x.dtype))
        del index
        yield x, truth


def _rows(logits: Tensor, numbers: int | None) -> int:
    """Return the rows of a slab of at most so many numbers, if a row has no more; None: as suits the CPU."""
    numbers_of_row = logits.numel() // logits.shape[2]
    if numbers is not None:
        return max(1, numbers // numbers_of_row)
    return max(-(-logits.shape[2] // SLABS), SMALL // numbers_of_row)


def _exact(dtype: torch.dtype) -> torch.dtype:
    """The type to sum in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _maps(values: Tensor) -> Tensor:
    """N K -> N K 1 1 1."""
    return values[:, :, None, None, None]


def subsample(label: Tensor, size: torch.Size) -> Tensor:
    """N D H W -> N size, the next coarser level's: the first voxel of each cell; the last cell may be shorter."""
    for axis, (have, want) in enumerate(zip(label.shape[1:], size, strict=True), start=1):
        label = label.index_select(axis, torch.arange(want, device=label.device) * -(-have // want))
    return label

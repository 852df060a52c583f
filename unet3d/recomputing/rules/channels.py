"""Statistics of normalisations, and an affine function and sums of each channel, of maps on a GPU.

Statistics are taken of a whole map once it is made. torch's kernels of batch normalisation give a channel one block:
few channels of many voxels leave most of a GPU idle. A large contiguous map is therefore viewed as one of more
channels: pieces of each, to which the same numbers belong.
"""

from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from unet3d.recomputing.graph import Value, Weight
from unet3d.recomputing.state import State, Statistics

LARGE = 2**24  # numbers from which on a kernel of few blocks takes longer than one more launch
BLOCKS = 1024  # that keep all multiprocessors of a GPU at work


@dataclass(eq=False)
class Affine:
    """The function (x - mean) * scale + shift of each channel; each N or 1, C, in the type of statistics."""

    mean: Tensor
    scale: Tensor
    shift: Tensor | None  # None: 0
    repeated: dict[tuple[str, int, int], Tensor] = field(default_factory=dict)  # by name, images and pieces

    def apply(self, x: Tensor, state: State) -> Tensor:
        """Return the function of N C D H W, contiguous: computed in the type of statistics, rounded to that of x.

        Rows with gaps between them are read as they are, by a kernel to which channels are nothing special.
        """
        images, count = len(x), 1
        if x.is_contiguous():
            count = pieces(x)
        mean = self._of_pieces("mean", images, count)
        scale = self._of_pieces("scale", images, count)
        shift = constant(0, mean, state)
        if self.shift is not None:
            shift = self._of_pieces("shift", images, count)
        return _normalised(x, mean, scale, shift, state)

    def gradient(self, of_result: Tensor, state: State) -> Tensor:
        """Return the gradient of x from a contiguous one of the result."""
        scale = self._of_pieces("scale", len(of_result), pieces(of_result))
        zeros = constant(0, scale, state)
        return _normalised(of_result, zeros, scale, zeros, state)

    def sums(self, gradient: Tensor, x: Tensor, state: State) -> tuple[Tensor, Tensor]:
        """Return sums of a gradient N C D H W, and of its product with x - mean: N C, and of each channel's pieces.

        Both are contiguous.
        """
        images, channels = x.shape[:2]
        count = pieces(x)
        mean = self._of_pieces("mean", images, count)
        ones = constant(1, mean, state)
        flat = (1, mean.numel(), -1)
        _, of_scale, of_bias = torch.ops.aten.native_batch_norm_backward(
            gradient.view(flat),
            x.view(flat),
            ones,
            mean,
            ones,
            mean,  # as saved: CUDA's kernel reads them
            ones,
            False,
            0.0,
            [False, True, True],
        )
        shape = (images, channels, count)
        return of_bias.view(shape), of_scale.view(shape)

    def _of_pieces(self, name: str, images: int, count: int) -> Tensor:
        """Return a term for each piece of each channel of all images."""
        key = (name, images, count)
        if key not in self.repeated:
            term: Tensor = getattr(self, name)
            spread = term[..., None].expand(images, -1, count)
            self.repeated[key] = spread.reshape(-1)
        return self.repeated[key]


def _normalised(x: Tensor, mean: Tensor, scale: Tensor, shift: Tensor, state: State) -> Tensor:
    """Return (x - mean) * scale + shift of N C D H W, whose channels or their pieces these terms are of."""
    rows = (-1,) if x.is_contiguous() else x.shape[2:]
    flat = x.reshape(1, mean.numel(), *rows)
    result: Tensor = torch.ops.aten.native_batch_norm(
        flat,
        scale,
        shift,
        mean,
        constant(1, mean, state),
        False,  # by these statistics
        0.0,
        0.0,
    )[0]
    return result.view(x.shape)


def is_large(x: Tensor, state: State) -> bool:
    """Return whether rows lie on a GPU and are so many that a kernel of few blocks takes longer than a launch."""
    return not state.on_cpu and x.numel() >= LARGE


def pieces(x: Tensor) -> int:
    """Return the number of pieces of each channel of N C D H W, all of one length; 1 where channels fill a GPU."""
    if x.numel() < LARGE:
        return 1
    images, channels = x.shape[:2]
    return _divisor(x[0, 0].numel(), -(-BLOCKS // (images * channels)))


@cache
def _divisor(number: int, least: int) -> int:
    """Return the smallest divisor of a number between another and sixteen times that; 1 where there is none."""
    return next((divisor for divisor in range(least, 16 * least) if number % divisor == 0), 1)


def constant(number: int, like: Tensor, state: State) -> Tensor:
    """Return a tensor of the shape of another and of one number, made once in a pass on a GPU."""
    filled: Tensor = state.once((number, like.shape), lambda: torch.full_like(like, number))
    return filled


class NormalisationSettings(NamedTuple):
    """The arguments of a normalisation."""

    weight: Weight | None
    bias: Weight | None
    running_mean: Weight | None
    running_var: Weight | None
    uses_batch: bool  # and not the running statistics
    momentum: float
    eps: float
    groups: int | None = None  # of a group normalisation


def settings_of(value: Value) -> NormalisationSettings:
    """Return the settings of an instance_norm, batch_norm or group_norm."""
    if value.op != "group_norm":
        return NormalisationSettings(*value.args[1:8])
    return NormalisationSettings(
        weight=value.argument(2),
        bias=value.argument(3),
        running_mean=None,
        running_var=None,
        uses_batch=True,
        momentum=0.0,
        eps=value.argument(4, 1e-5),
        groups=value.args[1],
    )


def take_statistics(value: Value, raw: Tensor, state: State) -> None:
    """Add to the state the statistics of a normalisation's input N C D H W; running ones are updated."""
    settings = settings_of(value)
    running = None
    if settings.running_mean is not None and settings.running_var is not None:
        running = (
            state.weights[settings.running_mean.name],
            state.weights[settings.running_var.name],
        )
    if not settings.uses_batch:
        assert running is not None
        state.statistics[value] = _constant_statistics(running, settings.eps, _exact(raw))
        return
    images, channels = raw.shape[:2]
    if value.op == "group_norm":
        assert settings.groups is not None
        per_image = raw.reshape(1, images * settings.groups, -1, *raw.shape[3:])
    elif value.op == "batch_norm":
        per_image = raw
    else:
        per_image = raw.reshape(1, -1, *raw.shape[2:])
    voxels = per_image.numel() // per_image.shape[1]
    if voxels == 1 and (value.op != "group_norm" or images * channels == settings.groups):
        raise ValueError(f"{value.op}: expected more than 1 value per channel when training")
    mean, variance = _moments(per_image, state)
    if running is not None:
        averaged = images if value.op == "instance_norm" else 1
        _update(running, mean, variance, voxels, settings.momentum, averaged)
    inverse_std = (variance + settings.eps).rsqrt()
    rows = 1 if value.op == "batch_norm" else images
    state.statistics[value] = Statistics(
        mean=mean.view(rows, -1),
        inverse_std=inverse_std.view(rows, -1),
        voxels=voxels,
    )


def _constant_statistics(running: tuple[Tensor, Tensor], eps: float, dtype: torch.dtype) -> Statistics:
    """Return running mean and variance as the statistics of one image, for all."""
    mean, variance = running
    inverse_std = (variance.to(dtype) + eps).rsqrt()
    return Statistics(
        mean=mean.to(dtype)[None],
        inverse_std=inverse_std[None],
        voxels=0,
    )


def per_channel(values: Tensor, channels: int) -> Tensor:
    """Return values of groups N G as values of channels N C."""
    groups = values.shape[1]
    if groups == channels:
        return values
    return values.repeat_interleave(channels // groups, 1)


def _moments(x: Tensor, state: State) -> tuple[Tensor, Tensor]:
    """Return mean and biased variance of each channel of N C D H W; of half precision, in float32."""
    x = x.contiguous()
    count = 1 if state.on_cpu else pieces(x)
    if count == 1:
        return _moments_of_channels(x)
    images, channels = x.shape[:2]
    of_pieces = _moments_of_channels(x.view(1, images * channels * count, -1))
    means, variances = (moment.view(images, channels, count) for moment in of_pieces)
    between, mean = torch.var_mean(means, (0, 2), correction=0)
    return mean, variances.mean((0, 2)).add_(between)


def _moments_of_channels(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the same of contiguous maps, by one block a channel on a GPU."""
    exact = _exact(x)
    channels = x.shape[1]
    # The kernel also updates running statistics, which nothing reads: without them it may round to the type of x.
    running_mean = torch.empty(channels, dtype=exact, device=x.device)
    running_var = torch.empty(channels, dtype=exact, device=x.device)
    mean, variance = torch.ops.aten.batch_norm_update_stats(
        x,
        running_mean,
        running_var,
        1.0,
    )
    return mean.to(exact), variance.to(exact)


def _update(
    running: tuple[Tensor, Tensor],
    mean: Tensor,
    variance: Tensor,
    count: int,
    momentum: float,
    images: int,
) -> None:
    """Update running mean and variance as the layer does it, of several images by their mean."""
    unbiased = variance * (count / max(count - 1, 1))
    for average, now in zip(running, (mean, unbiased), strict=True):
        new = now.view(images, -1).mean(0)
        average.lerp_(new.to(average.dtype), momentum)


def _exact(x: Tensor) -> torch.dtype:
    if x.dtype == torch.float64:
        return torch.float64
    return torch.float32

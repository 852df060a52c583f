"""Instance, batch and group normalisation on rows, in three parts.

Statistics are taken of the whole map once it is made. From then on a normalisation is an affine function of each
channel, on any rows. Backward adds up two sums a channel as gradients of rows go by; when all have, `complete` adds to
the gradient of the normalisation's input what its mean and variance give.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from unet3d.recomputing.graph import Value, Weight
from unet3d.recomputing.pointwise import Pointwise, multiplied
from unet3d.recomputing.rules import RULES, Gradients, State, Statistics, Work


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


class Normalisation(Pointwise):
    """A normalisation by known statistics."""

    def serves(self, value: Value, axis: int) -> bool:
        if not super().serves(value, axis) or len(value.inputs) != 1:
            return False
        if value.inputs[0].op == "image":
            return False  # statistics are taken of what the schedule makes
        settings = settings_of(value)
        weights = (settings.weight, settings.bias)
        return all(isinstance(weight, Weight | None) for weight in weights)

    def run(self, work: Work, inputs: Sequence[Tensor]) -> Tensor:
        value, _, state, *_ = work
        mean, scale, bias, ones = state.prepare(value, lambda: _of_channels(value, state))
        if not state.on_cpu:
            return _affine(inputs[0], scale, bias, state.dtype)
        rows = _as_one(inputs[0], state)
        # A batch normalisation of constant statistics: its kernels convert half precision as they go.
        result: Tensor = torch.ops.aten.native_batch_norm(
            rows,
            scale,
            bias,
            mean,
            ones,
            False,  # by these statistics
            0.0,
            0.0,
        )[0]
        return result.view(inputs[0].shape)

    def gradients(self, work: Work, known: list[Tensor], gradient: Tensor) -> Gradients:
        value, _, state, *_ = work
        mean, scale, _, ones = state.prepare(value, lambda: _of_channels(value, state))
        if state.on_cpu:
            gradient = gradient.contiguous()
        is_fused = work.wanted[0] and not state.on_cpu  # in a launch, and memory of its own
        images, channels = known[0].shape[:2]
        if state.takes_sums or is_fused:
            of_rows, of_scale, of_bias = torch.ops.aten.native_batch_norm_backward(
                _as_one(gradient, state),
                _as_one(known[0], state),
                scale,
                mean,
                ones,
                mean,
                ones,
                False,
                0.0,
                [is_fused, state.takes_sums, state.takes_sums],
            )
            if state.takes_sums:
                shape = (images, channels)
                _add_sums(value, state, of_bias.view(shape), of_scale.view(shape))
            if is_fused:
                return [of_rows.view(known[0].shape)]
        if not work.wanted[0]:
            return [None]
        factor = scale.view(images, channels, 1, 1, 1).to(gradient.dtype)
        return [multiplied(gradient, factor, work.may_overwrite)]


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
    mean, variance = _moments(per_image)
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


def complete(value: Value, raw: Tensor, gradient: Tensor, state: State) -> None:
    """Add the part that follows from mean and variance to the gradient of a normalisation's input.

    `raw` and `gradient`: the same rows of the input and of its gradient.
    """
    terms = state.prepare(("completion", value), lambda: _completion(value, state))
    if terms is None:
        return
    mean, slope, shift = terms
    if not state.on_cpu:  # kernels that convert as they go
        part = raw - mean
        torch.addcmul(shift, part, slope, out=part)
        gradient.add_(part, alpha=-1 / state.statistics[value].voxels)
        return
    part = raw.to(mean.dtype) - mean
    part.mul_(slope).add_(shift)
    if gradient.dtype == part.dtype:
        gradient.add_(part)
    else:
        gradient.copy_(part.add_(gradient.to(part.dtype)))


def close_sums(value: Value, state: State) -> None:
    """Add to the gradients of weight and bias what has been summed up, when all rows have gone by."""
    sums = state.sums.get(value)
    if sums is None:
        return
    settings = settings_of(value)
    of_bias, of_scale = sums
    channels = of_scale.shape[1]
    inverse_std = _per_channel(state.statistics[value].inverse_std, channels)
    of_weight = of_scale * inverse_std
    state.sums[value] = (of_bias, of_weight)
    state.add_gradient_of_images(settings.bias, of_bias)
    state.add_gradient_of_images(settings.weight, of_weight)


def _completion(value: Value, state: State) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return mean, slope and shift of each channel, N or 1, C 1 1 1; None where statistics are constants.

    On a GPU slope and shift are still to be divided by -voxels.
    """
    sums = state.sums.pop(value, None)
    known = state.statistics[value]
    if sums is None or known.voxels == 0:
        return None
    of_bias, of_weight = sums
    images, channels = of_bias.shape
    settings = settings_of(value)
    inverse_std = _per_channel(known.inverse_std, channels)
    scale = inverse_std
    if value.op == "group_norm":
        assert settings.groups is not None
        grouped = (images, settings.groups, -1)
        if settings.weight is not None:
            weight = state.weights[settings.weight.name].detach().to(of_bias.dtype)
            of_bias = of_bias * weight
            of_weight = of_weight * weight
        of_bias = _per_channel(of_bias.view(grouped).sum(2), channels)
        of_weight = _per_channel(of_weight.view(grouped).sum(2), channels)
    else:
        scale = _scale(value, state)
    if value.op == "batch_norm":
        of_bias = of_bias.sum(0, keepdim=True)
        of_weight = of_weight.sum(0, keepdim=True)
    if state.on_cpu:
        scale = scale / -known.voxels
    shift = scale * of_bias
    slope = scale * inverse_std * of_weight
    mean = _per_channel(known.mean, channels)
    return (
        mean[..., None, None, None],
        slope[..., None, None, None],
        shift[..., None, None, None],
    )


def _add_sums(value: Value, state: State, of_bias: Tensor, of_scale: Tensor) -> None:
    if value in state.sums:
        torch._foreach_add_(list(state.sums[value]), [of_bias, of_scale])
    else:
        state.sums[value] = (of_bias, of_scale)


def _of_channels(value: Value, state: State) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return mean, scale, bias and ones of each of the N C channels; on a GPU the bias of what the mean is still in."""
    settings = settings_of(value)
    known = state.statistics[value]
    images, channels = value.shape[:2]
    mean = _per_channel(known.mean, channels)
    scale = _scale(value, state)
    bias = torch.zeros_like(scale) if settings.bias is None or state.on_cpu else None
    if settings.bias is not None:
        shift = state.weights[settings.bias.name].detach().to(scale.dtype)
        bias = shift.expand_as(scale).clone() if state.on_cpu else shift
    if not state.on_cpu:
        bias = torch.addcmul(bias, mean, scale, value=-1)
    mean = mean.expand(images, channels).reshape(-1)
    scale = scale.expand(images, channels).reshape(-1)
    bias = bias.expand(images, channels).reshape(-1)
    if state.on_cpu:
        return mean, scale, bias, torch.ones_like(mean)
    ones = state.prepare(("ones", images * channels), lambda: torch.ones_like(mean))
    return mean, scale, bias, ones


def _scale(value: Value, state: State) -> Tensor:
    """Return the factor of each channel, (N or 1, C)."""
    inverse_std = _per_channel(state.statistics[value].inverse_std, value.shape[1])
    weight = settings_of(value).weight
    if weight is None:
        return inverse_std
    if state.on_cpu:
        return inverse_std * state.weights[weight.name].detach().to(inverse_std.dtype)
    key = ("scale", value)
    scale: Tensor = state.prepare(key, lambda: inverse_std * state.weights[weight.name].detach().to(inverse_std.dtype))
    return scale


def _affine(rows: Tensor, scale: Tensor, bias: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a normalisation in one launch, whatever the strides of the rows; kernels convert as they go."""
    shape = (*rows.shape[:2], 1, 1, 1)
    result = torch.empty(rows.shape, dtype=dtype, device=rows.device)
    return torch.addcmul(bias.view(shape), rows, scale.view(shape), out=result)


def _moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and biased variance of each channel of N C D H W; of half precision, in float32."""
    exact = _exact(x)
    channels = x.shape[1]
    # The kernel also updates running statistics, which nothing reads: without them it may round to the type of x.
    running_mean = torch.empty(channels, dtype=exact, device=x.device)
    running_var = torch.empty(channels, dtype=exact, device=x.device)
    mean, variance = torch.ops.aten.batch_norm_update_stats(
        x.contiguous(),
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


def _per_channel(values: Tensor, channels: int) -> Tensor:
    """Return values of groups N G as values of channels N C."""
    groups = values.shape[1]
    if groups == channels:
        return values
    return values.repeat_interleave(channels // groups, 1)


def _as_one(x: Tensor, state: State) -> Tensor:
    """Return N C D H W as 1 NC D H W: on the CPU, torch's kernels are fast where it is contiguous."""
    if state.on_cpu:
        x = x.contiguous()
    return x.reshape(1, -1, *x.shape[2:])


NORMALISATIONS = ("instance_norm", "batch_norm", "group_norm")
for _name in NORMALISATIONS:
    RULES[_name] = Normalisation()

"""Instance, batch and group normalisation on rows, in three parts.

Statistics are taken of the whole map once it is made, by `statistics`. From then on a normalisation is an affine
function of each channel, on any rows. Backward adds up two sums a channel as gradients of rows go by; when all have,
`complete` adds to the gradient of the normalisation's input what its mean and variance give.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from unet3d.recomputing.graph import Value, Weight
from unet3d.recomputing.pointwise import Pointwise, multiplied
from unet3d.recomputing.rules import RULES, Gradients, Work
from unet3d.recomputing.state import State
from unet3d.recomputing.statistics import per_channel, settings_of


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
        is_fused = work.wanted[0] and not state.on_cpu  # of rows too: in one launch, and memory of its own
        images, channels = known[0].shape[:2]
        if state.takes_sums or is_fused:
            of_rows, of_scale, of_bias = torch.ops.aten.native_batch_norm_backward(
                _as_one(gradient, state),
                _as_one(known[0], state),
                scale,
                mean,
                ones,
                mean,  # as saved: CUDA's kernel reads them where the gradient of rows is not wanted
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


def complete(value: Value, raw: Tensor, gradient: Tensor, state: State) -> None:
    """Add the part that follows from mean and variance to the gradient of a normalisation's input.

    `raw` and `gradient`: the same rows of the input and of its gradient.
    """
    terms = state.prepare(("completion", value), lambda: _completion(value, state))
    if terms is None:
        return
    mean, slope, shift, factor = terms
    if not state.on_cpu:  # kernels convert as they go
        part = raw - mean
        torch.addcmul(shift, part, slope, out=part)
        gradient.add_(part, alpha=factor)
        return
    part = raw.to(mean.dtype) - mean
    part.mul_(slope).add_(shift)
    if gradient.dtype == part.dtype:
        gradient.add_(part)
    else:
        gradient.copy_(part.add_(gradient.to(part.dtype)))


def close_sums(value: Value, state: State) -> None:
    """Add to the gradients of weight and bias what has been summed up, when all rows have gone by."""
    state.forget("completion", value)  # of another part of the gradient
    state.forget("of weight", value)
    sums = state.sums.get(value)
    if sums is None:
        return
    settings = settings_of(value)
    of_bias, of_scale = sums
    state.add_gradient_of_images(settings.bias, of_bias)
    state.add_gradient_of_images(settings.weight, _of_weight(value, of_scale, state))


class _Completion(NamedTuple):
    """The part of a gradient that statistics give is ((raw - mean) * slope + shift) * factor; each N or 1, C 1 1 1."""

    mean: Tensor
    slope: Tensor
    shift: Tensor
    factor: float


def _completion(value: Value, state: State) -> _Completion | None:
    """Return what statistics give; None where they are constants."""
    sums = state.sums.pop(value, None)
    known = state.statistics[value]
    if sums is None or known.voxels == 0:
        return None
    if state.on_cpu or value.op == "group_norm":
        slope, shift = _slope_and_shift(value, *sums, state)
        factor = 1.0
    else:
        slope, shift = _in_few_launches(value, *sums, state)
        factor = -1 / known.voxels
    mean = per_channel(known.mean, value.shape[1])
    return _Completion(
        mean=mean[..., None, None, None],
        slope=slope[..., None, None, None],
        shift=shift[..., None, None, None],
        factor=factor,
    )


def _slope_and_shift(value: Value, of_bias: Tensor, of_scale: Tensor, state: State) -> tuple[Tensor, Tensor]:
    """Return slope and shift, each N or 1, C, from the sums of the gradient and of its product with raw - mean."""
    images, channels = of_bias.shape
    settings = settings_of(value)
    known = state.statistics[value]
    if settings.weight is not None:
        weight = state.weights[settings.weight.name].detach().to(of_bias.dtype)
        of_bias = of_bias * weight
        of_scale = of_scale * weight
    inverse_std = per_channel(known.inverse_std, channels)
    of_scale = of_scale * inverse_std
    if value.op == "batch_norm":
        of_bias = of_bias.sum(0, keepdim=True)
        of_scale = of_scale.sum(0, keepdim=True)
    elif value.op == "group_norm":
        assert settings.groups is not None
        grouped = (images, settings.groups, -1)
        of_bias = per_channel(of_bias.view(grouped).sum(2), channels)
        of_scale = per_channel(of_scale.view(grouped).sum(2), channels)
    shift = -inverse_std * of_bias / known.voxels
    slope = -(inverse_std**2) * of_scale / known.voxels
    return slope, shift


def _in_few_launches(value: Value, of_bias: Tensor, of_scale: Tensor, state: State) -> tuple[Tensor, Tensor]:
    """Return the same times -voxels, from what the pass has computed before."""
    of_weight = _of_weight(value, of_scale, state)
    if value.op == "batch_norm":
        of_bias = of_bias.sum(0, keepdim=True)
        of_weight = of_weight.sum(0, keepdim=True)
    scale = _scale(value, state)
    slope = scale * state.statistics[value].inverse_std * of_weight
    return slope, scale * of_bias


def _of_weight(value: Value, of_scale: Tensor, state: State) -> Tensor:
    """Return the gradients of the weight, N C, of each image's part."""
    inverse_std = per_channel(state.statistics[value].inverse_std, of_scale.shape[1])
    of_weight: Tensor = state.once(("of weight", value), lambda: of_scale * inverse_std)
    return of_weight


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
    mean = per_channel(known.mean, channels)
    scale = _scale(value, state)
    if settings.bias is None:
        bias = torch.zeros_like(scale)
    else:
        bias = state.weights[settings.bias.name].detach().to(scale.dtype).expand_as(scale)
        if state.on_cpu:
            bias = bias.clone()
    if not state.on_cpu:
        bias = torch.addcmul(bias, mean, scale, value=-1)
    mean = mean.expand(images, channels).reshape(-1)
    scale = scale.expand(images, channels).reshape(-1)
    bias = bias.expand(images, channels).reshape(-1)
    ones = state.once(("ones", images * channels), lambda: torch.ones_like(mean))
    return mean, scale, bias, ones


def _scale(value: Value, state: State) -> Tensor:
    """Return the factor of each channel, (N or 1, C)."""
    inverse_std = per_channel(state.statistics[value].inverse_std, value.shape[1])
    settings = settings_of(value)
    if settings.weight is None:
        return inverse_std
    weight = state.weights[settings.weight.name].detach().to(inverse_std.dtype)
    scale: Tensor = state.once(("scale", value), lambda: inverse_std * weight)
    return scale


def _affine(rows: Tensor, scale: Tensor, bias: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a normalisation in one launch, whatever the strides of the rows; kernels convert as they go."""
    shape = (*rows.shape[:2], 1, 1, 1)
    result = torch.empty(rows.shape, dtype=dtype, device=rows.device)
    return torch.addcmul(bias.view(shape), rows, scale.view(shape), out=result)


def _as_one(x: Tensor, state: State) -> Tensor:
    """Return N C D H W as 1 NC D H W: on the CPU, torch's kernels are fast where it is contiguous."""
    if state.on_cpu:
        x = x.contiguous()
    return x.reshape(1, -1, *x.shape[2:])


NORMALISATIONS = ("instance_norm", "batch_norm", "group_norm")
for _name in NORMALISATIONS:
    RULES[_name] = Normalisation()

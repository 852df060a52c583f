"""Instance, batch and group normalisation on rows, in three parts.

Statistics are taken of the whole map once it is made, by `statistics`. From then on a normalisation is an affine
function of each channel, on any rows. Backward adds up two sums a channel as gradients of rows go by; when all have,
`complete` adds to the gradient of the normalisation's input what its mean and variance give.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from unet3d.recomputing.graph import Value, Weight
from unet3d.recomputing.rules import Gradients, Work, rule
from unet3d.recomputing.rules.channels import Affine, constant, is_large, per_channel, settings_of
from unet3d.recomputing.rules.pointwise import Pointwise, multiplied
from unet3d.recomputing.state import State


@rule("instance_norm", "batch_norm", "group_norm")
class Normalisation(Pointwise):
    """A normalisation by known statistics."""

    takes_statistics = True
    reads_maps = True
    is_never_grouped = True

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
        rows = inputs[0]
        if is_large(rows, state) and rows.dtype == state.dtype:
            return _affine(value, state).apply(rows, state)
        mean, scale, bias, unit = state.prepare(value, lambda: _of_channels(value, state))
        if not state.on_cpu:
            return _in_one_launch(rows, scale, bias, state.dtype)
        # A batch normalisation of constant statistics: its kernels convert half precision as they go.
        result: Tensor = torch.ops.aten.native_batch_norm(
            _as_one(rows, state),
            scale,
            bias,
            mean,
            unit,
            False,  # by these statistics
            0.0,
            0.0,
        )[0]
        return result.view(rows.shape).to(state.dtype)

    def gradients(self, work: Work, known: list[Tensor], gradient: Tensor) -> Gradients:
        value, _, state, *_ = work
        if gradient.dtype != known[0].dtype:
            of_exact = gradient.to(known[0].dtype)
            (of_rows,) = self.gradients(work._replace(may_overwrite=True), known, of_exact)
            return [None if of_rows is None else of_rows.to(gradient.dtype)]
        if is_large(gradient, state):
            return [_gradient_of_large(work, known, gradient.contiguous())]
        mean, scale, _, unit = state.prepare(value, lambda: _of_channels(value, state))
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
                unit,
                mean,  # as saved: CUDA's kernel reads them where the gradient of rows is not wanted
                unit,
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


def _gradient_of_large(work: Work, known: list[Tensor], gradient: Tensor) -> Tensor | None:
    """Return the gradient of rows on a GPU, if it is wanted, and add both sums, by kernels that fill it.

    Rows with gaps are copied for the sums; the result then takes the memory of the copy.
    """
    affine = _affine(work.value, work.state)
    raw = known.pop()
    if work.state.takes_sums:
        of_bias, of_scale = affine.sums(gradient, raw.contiguous(), work.state)
        _add_sums(work.value, work.state, of_bias, of_scale)
    del raw
    if not work.wanted[0]:
        return None
    return affine.gradient(gradient, work.state)


def complete(value: Value, raw: Tensor, gradient: Tensor, state: State) -> None:
    """Add the part that follows from mean and variance to the gradient of a normalisation's input.

    `raw` and `gradient`: the same rows of the input and of its gradient. In half precision, the part is rounded before
    it is added on a GPU, where a map of float32 would be as large as both.
    """
    part_of = state.prepare(("completion", value), lambda: _completion(value, state))
    if part_of is None:
        return
    if not state.on_cpu:
        gradient.add_(part_of.apply(raw, state))
        return
    assert part_of.shift is not None
    mean = part_of.mean[..., None, None, None]
    part = raw.to(mean.dtype) - mean
    part.mul_(part_of.scale[..., None, None, None]).add_(part_of.shift[..., None, None, None])
    if gradient.dtype == part.dtype:
        gradient.add_(part)
    else:
        gradient.copy_(part.add_(gradient.to(part.dtype)))


def close_sums(value: Value, state: State) -> None:
    """Add to the gradients of weight and bias what has been summed up, when all rows have gone by."""
    state.forget("completion", value)  # of another part of the gradient
    state.forget("of weight", value)
    if value not in state.sums:
        return
    of_bias, of_scale = _of_whole_channels(state.sums[value])
    state.sums[value] = (of_bias, of_scale)
    settings = settings_of(value)
    state.add_gradient_of_images(settings.bias, of_bias)
    state.add_gradient_of_images(settings.weight, _of_weight(value, of_scale, state))


def _completion(value: Value, state: State) -> Affine | None:
    """Return the part of a gradient that statistics give, as a function of raw; None where they are constants."""
    sums = state.sums.pop(value, None)
    known = state.statistics[value]
    if sums is None or known.voxels == 0:
        return None
    if state.on_cpu or value.op == "group_norm":
        slope, shift = _slope_and_shift(value, *sums, state)
    else:
        slope, shift = _in_few_launches(value, *sums, state)
    return Affine(per_channel(known.mean, value.shape[1]), slope, shift)


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
    """Return the same from what the pass has computed before."""
    known = state.statistics[value]
    of_weight = _of_weight(value, of_scale, state)
    if value.op == "batch_norm":
        of_bias = of_bias.sum(0, keepdim=True)
        of_weight = of_weight.sum(0, keepdim=True)
    scale = _scale(value, state)
    zero = state.once("zero", lambda: scale.new_zeros(1))
    slope = torch.addcmul(zero, scale * known.inverse_std, of_weight, value=-1 / known.voxels)
    shift = torch.addcmul(zero, scale, of_bias, value=-1 / known.voxels)
    return slope, shift


def _of_weight(value: Value, of_scale: Tensor, state: State) -> Tensor:
    """Return the gradients of the weight, N C, of each image's part."""
    inverse_std = per_channel(state.statistics[value].inverse_std, of_scale.shape[1])
    of_weight: Tensor = state.once(("of weight", value), lambda: of_scale * inverse_std)
    return of_weight


def _add_sums(value: Value, state: State, of_bias: Tensor, of_scale: Tensor) -> None:
    """Add to the sums of a normalisation, N C, or N C and of each channel's pieces."""
    known = state.sums.get(value)
    sums = (of_bias, of_scale)
    if known is None:
        state.sums[value] = sums
        return
    if known[0].shape != of_bias.shape:
        known = _of_whole_channels(known)
        sums = _of_whole_channels(sums)
        state.sums[value] = known
    torch._foreach_add_(list(known), list(sums))


def _of_whole_channels(sums: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return sums N C, where they are of pieces of channels."""
    of_bias, of_scale = sums
    if of_bias.dim() == 2:
        return sums
    return of_bias.sum(2), of_scale.sum(2)


def _affine(value: Value, state: State) -> Affine:
    """Return a normalisation on a GPU as a function of its input."""
    affine: Affine = state.prepare(("affine", value), lambda: Affine(*_terms(value, state)))
    return affine


def _of_channels(value: Value, state: State) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return mean, scale, bias and ones of each of the N C channels; on a GPU the bias of what the mean is still in."""
    images, channels = value.shape[:2]
    mean, scale, bias = _terms(value, state)
    if bias is None:
        bias = constant(0, scale, state)
    elif state.on_cpu:
        bias = bias.clone()
    if not state.on_cpu:
        bias = torch.addcmul(bias, mean, scale, value=-1)
    mean = mean.expand(images, channels).reshape(-1)
    scale = scale.expand(images, channels).reshape(-1)
    bias = bias.expand(images, channels).reshape(-1)
    return mean, scale, bias, constant(1, mean, state)


def _terms(value: Value, state: State) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return mean, scale and bias of each channel, (N or 1, C)."""
    settings = settings_of(value)
    mean = per_channel(state.statistics[value].mean, value.shape[1])
    scale = _scale(value, state)
    if settings.bias is None:
        return mean, scale, None
    bias = state.weights[settings.bias.name].detach().to(scale.dtype)
    return mean, scale, bias.expand_as(scale)


def _scale(value: Value, state: State) -> Tensor:
    """Return the factor of each channel, (N or 1, C)."""
    inverse_std = per_channel(state.statistics[value].inverse_std, value.shape[1])
    settings = settings_of(value)
    if settings.weight is None:
        return inverse_std
    weight = state.weights[settings.weight.name].detach().to(inverse_std.dtype)
    scale: Tensor = state.once(("scale", value), lambda: inverse_std * weight)
    return scale


def _in_one_launch(rows: Tensor, scale: Tensor, bias: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a normalisation in one launch, whatever the strides of the rows; kernels convert as they go."""
    shape = (*rows.shape[:2], 1, 1, 1)
    result = torch.empty(rows.shape, dtype=dtype, device=rows.device)
    return torch.addcmul(bias.view(shape), rows, scale.view(shape), out=result)


def _as_one(x: Tensor, state: State) -> Tensor:
    """Return N C D H W as 1 NC D H W: on the CPU, torch's kernels are fast where it is contiguous."""
    if state.on_cpu:
        x = x.contiguous()
    return x.reshape(1, -1, *x.shape[2:])

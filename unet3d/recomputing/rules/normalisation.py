"""Instance, batch and group normalisation on rows, in three parts.

Statistics are taken of the whole map once it is made, by `take_statistics`. From then on a normalisation is an affine
function of each channel, on any rows. Backward adds up two sums a channel as gradients of rows go by; when all have,
`complete` adds to the gradient of the normalisation's input what its mean and variance give.

torch's kernels of batch normalisation compute all of it. On a GPU they give a channel one block: few channels of many
voxels leave most of a GPU idle. A large contiguous map is therefore viewed as one of more channels: pieces of each, to
which the same numbers belong.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unet3d.recomputing.graph import Value, Weight
from unet3d.recomputing.rules import Gradients, Work, rule
from unet3d.recomputing.rules.pointwise import Pointwise, multiplied
from unet3d.recomputing.state import State, Statistics

LARGE = 2**24  # numbers from which on a kernel of few blocks takes longer than one more launch
BLOCKS = 1024  # that keep all multiprocessors of a GPU at work


class Settings(NamedTuple):
    """The arguments of a normalisation."""

    weight: Weight | None
    bias: Weight | None
    running_mean: Weight | None
    running_var: Weight | None
    uses_batch: bool  # and not the running statistics
    momentum: float
    eps: float
    groups: int | None  # of the channels of an image, which have the same statistics; None: a channel of all images


def settings_of(value: Value) -> Settings:
    """Return the settings of an instance_norm, batch_norm or group_norm."""
    if value.op == "group_norm":
        weight, bias, eps = value.argument(2), value.argument(3), value.argument(4, 1e-5)
        return Settings(weight, bias, None, None, True, 0.0, eps, value.args[1])
    groups = None if value.op == "batch_norm" else value.shape[1]
    return Settings._make((*value.args[1:8], groups))


# Statistics


def take_statistics(value: Value, raw: Tensor, state: State) -> None:
    """Add to the state the statistics of a normalisation's input N C D H W; running ones are updated."""
    settings = settings_of(value)
    running = [state.weights[weight.name] for weight in (settings.running_mean, settings.running_var) if weight]
    if not settings.uses_batch:
        mean, variance = (statistic.to(_exact(raw)) for statistic in running)
        inverse_std = (variance + settings.eps).rsqrt()
        state.statistics[value] = Statistics(mean[None], inverse_std[None], voxels=0)
        return
    images = 1 if settings.groups is None else len(raw)
    x = raw
    if settings.groups is not None:
        x = raw.reshape(1, images * settings.groups, -1, *raw.shape[3:])
    voxels = x.numel() // x.shape[1]
    if voxels == 1 and (value.op != "group_norm" or images == 1):
        raise ValueError(f"{value.op}: expected more than 1 value per channel when training")
    mean, variance = _moments(x, state)
    if running:
        _update(running, mean.view(images, -1), variance.view(images, -1), voxels, settings.momentum)
    inverse_std = (variance + settings.eps).rsqrt()
    state.statistics[value] = Statistics(mean.view(images, -1), inverse_std.view(images, -1), voxels)


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
    # The kernel also updates running statistics, which nothing reads: without them it may round to the type of x.
    running = [torch.empty(x.shape[1], dtype=exact, device=x.device) for _ in range(2)]
    mean, variance = torch.ops.aten.batch_norm_update_stats(x, *running, 1.0)
    return mean.to(exact), variance.to(exact)


def _update(running: Sequence[Tensor], mean: Tensor, variance: Tensor, voxels: int, momentum: float) -> None:
    """Update running mean and variance as the layer does it, of several images by their mean."""
    unbiased = variance * (voxels / max(voxels - 1, 1))
    for average, now in zip(running, (mean, unbiased), strict=True):
        average.lerp_(now.mean(0).to(average.dtype), momentum)


def _exact(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def per_channel(values: Tensor, channels: int) -> Tensor:
    """Return values of groups N G as values of channels N C."""
    groups = values.shape[1]
    return values if groups == channels else values.repeat_interleave(channels // groups, 1)


# Kernels


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
    return state.once((number, like.shape), lambda: torch.full_like(like, number))


def _as_one(x: Tensor, channels: int) -> Tensor:
    """Return N C D H W as one image of so many channels, of all images or their pieces."""
    size = x.shape[2:] if channels == len(x) * x.shape[1] else (-1,)
    return x.reshape(1, channels, *size)


def _normalised(x: Tensor, mean: Tensor, scale: Tensor, shift: Tensor, ones: Tensor) -> Tensor:
    """Return (x - mean) * scale + shift of N C D H W: a normalisation by constant statistics.

    Terms are of the channels of all images, or of their pieces. Kernels convert half precision.
    """
    flat = _as_one(x, mean.numel())
    result: Tensor = torch.ops.aten.native_batch_norm(flat, scale, shift, mean, ones, False, 0.0, 0.0)[0]
    return result.view(x.shape)


def _normalised_backward(
    gradient: Tensor, x: Tensor, mean: Tensor, scale: Tensor, ones: Tensor, wanted: Sequence[bool]
) -> Any:
    """Return the gradient of x, and sums of the gradient's product with x - mean, and of the gradient.

    Each is computed if it is wanted. The mean stands for the saved one, too, which CUDA's kernel reads.
    """
    flat = (_as_one(gradient, mean.numel()), _as_one(x, mean.numel()))
    return torch.ops.aten.native_batch_norm_backward(*flat, scale, mean, ones, mean, ones, False, 0.0, wanted)


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
        mean = self._of_pieces(x, "mean")
        scale = self._of_pieces(x, "scale")
        shift = constant(0, mean, state)
        if self.shift is not None:
            shift = self._of_pieces(x, "shift")
        return _normalised(x, mean, scale, shift, constant(1, mean, state))

    def gradient(self, of_result: Tensor, state: State) -> Tensor:
        """Return the gradient of x from a contiguous one of the result."""
        scale = self._of_pieces(of_result, "scale")
        zeros = constant(0, scale, state)
        return _normalised(of_result, zeros, scale, zeros, constant(1, scale, state))

    def sums(self, gradient: Tensor, x: Tensor, state: State) -> tuple[Tensor, Tensor]:
        """Return sums of a gradient N C D H W, and of its product with x - mean: N C, and of each channel's pieces.

        Both are contiguous.
        """
        mean = self._of_pieces(x, "mean")
        ones = constant(1, mean, state)
        _, of_scale, of_bias = _normalised_backward(gradient, x, mean, ones, ones, [False, True, True])
        shape = (*x.shape[:2], -1)
        return of_bias.view(shape), of_scale.view(shape)

    def _of_pieces(self, x: Tensor, name: str) -> Tensor:
        """Return a term for each piece of each channel of all images of x; of rows with gaps, for each channel."""
        count = pieces(x) if x.is_contiguous() else 1
        key = (name, len(x), count)
        if key not in self.repeated:
            term: Tensor = getattr(self, name)
            self.repeated[key] = term[..., None].expand(len(x), -1, count).reshape(-1)
        return self.repeated[key]


# Rows


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
        return all(isinstance(weight, Weight | None) for weight in settings_of(value)[:2])

    def run(self, work: Work, inputs: Sequence[Tensor]) -> Tensor:
        value, _, state, *_ = work
        rows = inputs[0]
        if is_large(rows, state) and rows.dtype == state.dtype:
            return _affine(value, state).apply(rows, state)
        mean, scale, bias, ones = state.prepare(value, lambda: _of_channels(value, state))
        if state.on_cpu:
            return _normalised(rows.contiguous(), mean, scale, bias, ones).to(state.dtype)
        # In one launch, whatever the strides of the rows; it converts, too.
        shape = (*rows.shape[:2], 1, 1, 1)
        result = torch.empty(rows.shape, dtype=state.dtype, device=rows.device)
        return torch.addcmul(bias.view(shape), rows, scale.view(shape), out=result)

    def gradients(self, work: Work, known: list[Tensor], gradient: Tensor) -> Gradients:
        value, _, state, *_ = work
        if gradient.dtype != known[0].dtype:
            of_exact = gradient.to(known[0].dtype)
            (of_rows,) = self.gradients(work._replace(may_overwrite=True), known, of_exact)
            return [None if of_rows is None else of_rows.to(gradient.dtype)]
        if is_large(gradient, state):
            return [_gradient_of_large(work, known, gradient.contiguous())]
        mean, scale, _, ones = state.prepare(value, lambda: _of_channels(value, state))
        if state.on_cpu:
            gradient = gradient.contiguous()
        is_fused = work.wanted[0] and not state.on_cpu  # of rows too: in one launch, into new memory
        if state.takes_sums or is_fused:
            wanted = [is_fused, state.takes_sums, state.takes_sums]
            rows = known[0].contiguous() if state.on_cpu else known[0]
            of_rows, of_scale, of_bias = _normalised_backward(gradient, rows, mean, scale, ones, wanted)
            del rows
            if state.takes_sums:
                shape = gradient.shape[:2]
                _add_sums(value, state, of_bias.view(shape), of_scale.view(shape))
            if is_fused:
                return [of_rows.view(gradient.shape)]
        if not work.wanted[0]:
            return [None]
        factor = scale.view(*gradient.shape[:2], 1, 1, 1).to(gradient.dtype)
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
    return affine.gradient(gradient, work.state) if work.wanted[0] else None


def _affine(value: Value, state: State) -> Affine:
    """Return a normalisation on a GPU as a function of its input."""
    return state.prepare(("affine", value), lambda: Affine(*_terms(value, state)))


def _of_channels(value: Value, state: State) -> list[Tensor]:
    """Return mean, scale, bias and ones of each of the N C channels; on a GPU the bias of what the mean is still in."""
    mean, scale, bias = _terms(value, state)
    if bias is None:
        bias = constant(0, scale, state)
    elif state.on_cpu:
        bias = bias.clone()
    if not state.on_cpu:
        bias = torch.addcmul(bias, mean, scale, value=-1)
    terms = [term.expand(value.shape[:2]).reshape(-1) for term in (mean, scale, bias)]
    return [*terms, constant(1, terms[0], state)]


def _terms(value: Value, state: State) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return mean, scale and bias of each channel, (N or 1, C)."""
    mean = per_channel(state.statistics[value].mean, value.shape[1])
    scale = _scale(value, state)
    bias = settings_of(value).bias
    if bias is None:
        return mean, scale, None
    return mean, scale, state.weights[bias.name].detach().to(scale.dtype).expand_as(scale)


def _scale(value: Value, state: State) -> Tensor:
    """Return the factor of each channel, (N or 1, C)."""
    inverse_std = _inverse_std(value, state)
    weight = settings_of(value).weight
    if weight is None:
        return inverse_std
    factor = state.weights[weight.name].detach().to(inverse_std.dtype)
    return state.once(("scale", value), lambda: inverse_std * factor)


def _inverse_std(value: Value, state: State) -> Tensor:
    return per_channel(state.statistics[value].inverse_std, value.shape[1])


# What statistics give


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


def _completion(value: Value, state: State) -> Affine | None:
    """Return the part of a gradient that statistics give, as a function of raw; None where they are constants."""
    sums = state.sums.pop(value, None)
    known = state.statistics[value]
    if sums is None or known.voxels == 0:
        return None
    of_terms = _in_few_launches
    if state.on_cpu or value.op == "group_norm":
        of_terms = _slope_and_shift
    return Affine(per_channel(known.mean, value.shape[1]), *of_terms(value, *sums, state))


def _slope_and_shift(value: Value, of_bias: Tensor, of_scale: Tensor, state: State) -> tuple[Tensor, Tensor]:
    """Return slope and shift, each N or 1, C, from the sums of the gradient and of its product with raw - mean."""
    settings = settings_of(value)
    known = state.statistics[value]
    if settings.weight is not None:
        weight = state.weights[settings.weight.name].detach().to(of_bias.dtype)
        of_bias = of_bias * weight
        of_scale = of_scale * weight
    inverse_std = _inverse_std(value, state)
    of_bias = _of_statistics(value, of_bias)
    of_scale = _of_statistics(value, of_scale * inverse_std)
    shift = -inverse_std * of_bias / known.voxels
    slope = -(inverse_std**2) * of_scale / known.voxels
    return slope, shift


def _in_few_launches(value: Value, of_bias: Tensor, of_scale: Tensor, state: State) -> tuple[Tensor, Tensor]:
    """Return the same from what the pass has computed before, of an instance or batch normalisation."""
    known = state.statistics[value]
    of_weight = _of_statistics(value, _of_weight(value, of_scale, state))
    of_bias = _of_statistics(value, of_bias)
    scale = _scale(value, state)
    zero = state.once("zero", lambda: scale.new_zeros(1))
    slope = torch.addcmul(zero, scale * known.inverse_std, of_weight, value=-1 / known.voxels)
    shift = torch.addcmul(zero, scale, of_bias, value=-1 / known.voxels)
    return slope, shift


def _of_statistics(value: Value, sums: Tensor) -> Tensor:
    """Return sums N C for each channel, N or 1, C, of all that has the same statistics."""
    groups = settings_of(value).groups
    if groups is None:
        return sums.sum(0, keepdim=True)
    images, channels = sums.shape
    return sums if groups == channels else per_channel(sums.view(images, groups, -1).sum(2), channels)


def _of_weight(value: Value, of_scale: Tensor, state: State) -> Tensor:
    """Return the gradients of the weight, N C, of each image's part."""
    inverse_std = _inverse_std(value, state)
    return state.once(("of weight", value), lambda: of_scale * inverse_std)


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


def close_sums(value: Value, state: State) -> None:
    """Add to the gradients of weight and bias what has been summed up, when all rows have gone by."""
    state.prepared.pop(("completion", value), None)  # of another part of the gradient
    state.prepared.pop(("of weight", value), None)
    if value not in state.sums:
        return
    of_bias, of_scale = _of_whole_channels(state.sums[value])
    state.sums[value] = (of_bias, of_scale)
    settings = settings_of(value)
    state.add_gradient_of_images(settings.bias, of_bias)
    state.add_gradient_of_images(settings.weight, _of_weight(value, of_scale, state))

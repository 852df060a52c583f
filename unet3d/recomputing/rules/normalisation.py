"""Instance, batch and group normalisation on rows, in three parts.

Statistics are taken of the whole map once it is made, by `take_statistics`. From then on a normalisation is an affine
function of each channel, on any rows. Backward adds up two sums a channel as gradients of rows go by; when all have,
`Norm.complete` adds to the gradient of the normalisation's input what its mean and variance give.

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
from unet3d.recomputing.state import State

LARGE = 2**24  # Above this, a kernel of few blocks takes longer than one more launch.
BLOCKS = 1024  # So many keep all multiprocessors of a GPU at work.


# Statistics


def take_statistics(value: Value, raw: Tensor, state: State) -> None:
    """Add to the state the statistics of a normalisation's input N C D H W; running ones are updated."""
    images, groups = raw.shape[:2]
    averages: list[Tensor] = []  # running mean and variance
    uses_batch = True
    if value.op == "group_norm":
        groups = value.args[1]
        eps = value.argument(4, 1e-5)
    else:
        uses_batch, momentum, eps = value.args[5:8]
        averages = [state.weights[weight.name] for weight in value.args[3:5] if weight is not None]
    x = raw
    if value.op == "batch_norm" or not uses_batch:
        images = 1
    else:
        x = raw.reshape(1, images * groups, -1, *raw.shape[3:])
    voxels = x.numel() // x.shape[1]
    if not uses_batch:
        voxels = 0
        mean, variance = (average.to(_exact(raw)) for average in averages)
    elif voxels == 1 and (value.op != "group_norm" or images == 1):
        raise ValueError(f"{value.op}: expected more than 1 value per channel when training")
    else:
        mean, variance = _moments(x, state)
    if averages and uses_batch:
        # As the layer does it, of several images by their mean.
        unbiased = variance * (voxels / max(voxels - 1, 1))
        for average, now in zip(averages, (mean, unbiased), strict=True):
            average.lerp_(now.view(images, -1).mean(0).to(average.dtype), momentum)
        del unbiased, now  # What follows takes their memory.
    inverse_std = (variance + eps).rsqrt()
    state.statistics[value] = mean.view(images, -1), inverse_std.view(images, -1), voxels


def _moments(x: Tensor, state: State) -> tuple[Tensor, Tensor]:
    """Return mean and biased variance of each channel of N C D H W; of half precision, in float32."""
    x = x.contiguous()
    images, channels = x.shape[:2]
    exact = _exact(x)
    count = pieces(x, state)
    if count > 1:
        x = x.view(1, images * channels * count, -1)
    # The kernel also updates running statistics, which nothing reads: without them it may round to the type of x.
    running = [torch.empty(x.shape[1], dtype=exact, device=x.device) for _ in range(2)]
    mean, variance = (moment.to(exact) for moment in torch.ops.aten.batch_norm_update_stats(x, *running, 1.0))
    del running
    if count == 1:
        return mean, variance
    means, variances = (moment.view(images, channels, count) for moment in (mean, variance))
    between, mean = torch.var_mean(means, (0, 2), correction=0)
    return mean, variances.mean((0, 2)).add_(between)


def _exact(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


# Kernels


def _is_large(x: Tensor, state: State) -> bool:
    """Return whether rows lie on a GPU and are enough that a kernel of few blocks takes longer than a launch."""
    return not state.on_cpu and x.numel() >= LARGE


def pieces(x: Tensor, state: State) -> int:
    """Return the number of pieces of each channel of N C D H W, all of one length; 1 where channels fill a GPU.

    Rows with gaps have one, too: they are read as they are, by a kernel to which channels are nothing special.
    """
    if not _is_large(x, state) or not x.is_contiguous():
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


def _as_one_image(x: Tensor, channels: int) -> Tensor:
    """Return N C D H W as one image of this number of channels, of all images or their pieces."""
    size = x.shape[2:] if channels == len(x) * x.shape[1] else (-1,)
    return x.reshape(1, channels, *size)


def _normalised(x: Tensor, mean: Tensor, scale: Tensor, shift: Tensor, ones: Tensor) -> Tensor:
    """Return (x - mean) * scale + shift of N C D H W: a normalisation by constant statistics.

    Terms are of the channels of all images, or of their pieces. Kernels convert half precision.
    """
    flat = _as_one_image(x, mean.numel())
    result: Tensor = torch.ops.aten.native_batch_norm(flat, scale, shift, mean, ones, False, 0.0, 0.0)[0]
    return result.view(x.shape)


def _normalised_backward(
    gradient: Tensor, x: Tensor, mean: Tensor, scale: Tensor, ones: Tensor, wanted: Sequence[bool]
) -> Any:
    """Return the gradient of x, and sums of the gradient's product with x - mean, and of the gradient.

    Each is computed if it is wanted. The mean stands for the saved one, too, which CUDA's kernel reads.
    """
    flat = [_as_one_image(rows, mean.numel()) for rows in (gradient, x)]
    return torch.ops.aten.native_batch_norm_backward(*flat, scale, mean, ones, mean, ones, False, 0.0, wanted)


@dataclass(eq=False)
class Affine:
    """The function (x - mean) * scale + shift of each channel; each N or 1, C, in the type of statistics."""

    mean: Tensor
    scale: Tensor
    shift: Tensor | None  # None: 0
    repeated: dict[tuple[str, int, int], Tensor] = field(default_factory=dict)  # Keys: name, images and pieces.

    def apply(self, x: Tensor, state: State) -> Tensor:
        """Return the function of N C D H W, contiguous: computed in the type of statistics, rounded to that of x."""
        mean = self._of_pieces("mean", x, state)
        scale = self._of_pieces("scale", x, state)
        shift = constant(0, mean, state)
        if self.shift is not None:
            shift = self._of_pieces("shift", x, state)
        return _normalised(x, mean, scale, shift, constant(1, mean, state))

    def gradient(self, of_result: Tensor, state: State) -> Tensor:
        """Return the gradient of x from a contiguous one of the result."""
        scale = self._of_pieces("scale", of_result, state)
        zeros = constant(0, scale, state)
        return _normalised(of_result, zeros, scale, zeros, constant(1, scale, state))

    def sums(self, gradient: Tensor, x: Tensor, state: State) -> tuple[Tensor, Tensor]:
        """Return sums of a gradient, and of its product with x - mean, of each channel's pieces.

        Both are contiguous.
        """
        mean = self._of_pieces("mean", x, state)
        ones = constant(1, mean, state)
        _, of_scale, of_bias = _normalised_backward(gradient, x, mean, ones, ones, [False, True, True])
        shape = (*x.shape[:2], -1)
        return of_bias.view(shape), of_scale.view(shape)

    def _of_pieces(self, name: str, x: Tensor, state: State) -> Tensor:
        """Return a term for each piece of each channel of all images of x."""
        count = pieces(x, state)
        key = (name, len(x), count)
        if key not in self.repeated:
            term: Tensor = getattr(self, name)
            self.repeated[key] = term[..., None].expand(len(x), -1, count).reshape(-1)
        return self.repeated[key]


# Rows


def weight_and_bias(value: Value) -> tuple[Any, Any]:
    """Return the Weights, or None, by which a normalisation scales and shifts its channels."""
    first = 2 if value.op == "group_norm" else 1
    return value.argument(first), value.argument(first + 1)


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
            return False  # Statistics are taken of what the schedule makes.
        return all(isinstance(weight, Weight | None) for weight in weight_and_bias(value))

    def run(self, work: Work, inputs: Sequence[Tensor]) -> Tensor:
        state = work.state
        norm = norm_of(work.value, state)
        rows = inputs[0]
        if _is_large(rows, state) and rows.dtype == state.dtype:
            return norm.affine().apply(rows, state)
        mean, scale, bias, ones = norm.of_channels()
        if state.on_cpu:
            return _normalised(rows.contiguous(), mean, scale, bias, ones).to(state.dtype)
        # In one launch, whatever the strides of the rows; it converts, too.
        shape = (*rows.shape[:2], 1, 1, 1)
        result = torch.empty(rows.shape, dtype=state.dtype, device=rows.device)
        return torch.addcmul(bias.view(shape), rows, scale.view(shape), out=result)

    def gradients(self, work: Work, known: list[Tensor], gradient: Tensor) -> Gradients:
        state = work.state
        norm = norm_of(work.value, state)
        if gradient.dtype != known[0].dtype:
            of_exact = gradient.to(known[0].dtype)
            (of_rows,) = self.gradients(work._replace(may_overwrite=True), known, of_exact)
            return [None if of_rows is None else of_rows.to(gradient.dtype)]
        if _is_large(gradient, state):
            return [self._of_large(work, known, gradient.contiguous())]
        mean, scale, _, ones = norm.of_channels()
        if state.on_cpu:
            gradient = gradient.contiguous()
        # Gradients of rows come with the sums, in one launch, into new memory.
        is_fused = work.wanted[0] and not state.on_cpu
        if state.takes_sums or is_fused:
            wanted = [is_fused, state.takes_sums, state.takes_sums]
            rows = known[0].contiguous() if state.on_cpu else known[0]
            of_rows, of_scale, of_bias = _normalised_backward(gradient, rows, mean, scale, ones, wanted)
            del rows
            if state.takes_sums:
                shape = gradient.shape[:2]
                norm.add_sums(of_bias.view(shape), of_scale.view(shape))
            if is_fused:
                return [of_rows.view(gradient.shape)]
        if not work.wanted[0]:
            return [None]
        factor = scale.view(*gradient.shape[:2], 1, 1, 1).to(gradient.dtype)
        return [multiplied(gradient, factor, work.may_overwrite)]

    def _of_large(self, work: Work, known: list[Tensor], gradient: Tensor) -> Tensor | None:
        """Return the gradient of rows on a GPU, if it is wanted, and add both sums, by kernels that fill it.

        Rows with gaps are copied for the sums; the result then takes the memory of the copy.
        """
        norm = norm_of(work.value, work.state)
        affine = norm.affine()
        raw = known.pop()
        if norm.state.takes_sums:
            of_bias, of_scale = affine.sums(gradient, raw.contiguous(), norm.state)
            norm.add_sums(of_bias, of_scale)
        del raw
        return affine.gradient(gradient, norm.state) if work.wanted[0] else None


def norm_of(value: Value, state: State) -> "Norm":
    """Return a normalisation whose statistics have been taken."""
    return Norm(value, state, *state.statistics[value], *weight_and_bias(value))


class Norm(NamedTuple):
    """A normalisation (x - mean) * inverse_std in a pass, whose statistics are known."""

    value: Value
    state: State
    mean: Tensor  # N or 1, C or groups
    inverse_std: Tensor
    voxels: int  # Voxels in each statistic; 0 for evaluation, whose statistics are constants.
    weight: Weight | None
    bias: Weight | None

    def affine(self) -> Affine:
        """Return it as a function of its input, on a GPU."""
        return self.state.prepare(("affine", self.value), lambda: Affine(*self._terms()))

    def of_channels(self) -> list[Tensor]:
        """Return mean, scale, bias and ones of all N C channels; on a GPU the bias of what the mean is still in."""
        return self.state.prepare(self.value, self._of_channels)

    def _of_channels(self) -> list[Tensor]:
        mean, scale, bias = self._terms()
        if bias is None:
            bias = constant(0, scale, self.state)
        elif self.state.on_cpu:
            bias = bias.clone()
        if not self.state.on_cpu:
            bias = torch.addcmul(bias, mean, scale, value=-1)
        terms = [term.expand(self.value.shape[:2]).reshape(-1) for term in (mean, scale, bias)]
        return [*terms, constant(1, terms[0], self.state)]

    def _terms(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return mean, scale and bias of each channel, (N or 1, C)."""
        mean = self._per_channel(self.mean)
        scale = self._scale()
        return mean, scale, None if self.bias is None else self._exact(self.bias).expand_as(scale)

    def _scale(self) -> Tensor:
        """Return the factor of each channel, (N or 1, C)."""
        inverse_std = self._per_channel(self.inverse_std)
        weight = self.weight
        if weight is None:
            return inverse_std
        return self.state.once(("scale", self.value), lambda: inverse_std * self._exact(weight))

    def _exact(self, weight: Weight) -> Tensor:
        """Return a weight in the type of statistics."""
        return self.state.weights[weight.name].detach().to(self.mean.dtype)

    def _per_channel(self, values: Tensor) -> Tensor:
        """Return values of groups N G as values of channels N C."""
        repeats = self.value.shape[1] // values.shape[1]
        return values if repeats == 1 else values.repeat_interleave(repeats, 1)

    def add_sums(self, of_bias: Tensor, of_scale: Tensor) -> None:
        """Add sums of a gradient and of its product with x - mean, N C, or N C and of each channel's pieces."""
        known = self.state.sums.get(self.value)
        sums = (of_bias, of_scale)
        if known is None:
            self.state.sums[self.value] = sums
            return
        if known[0].shape != of_bias.shape:
            known = _of_whole_channels(known)
            sums = _of_whole_channels(sums)
            self.state.sums[self.value] = known
        torch._foreach_add_(list(known), list(sums))

    def close_sums(self) -> None:
        """Add to the gradients of weight and bias what has been summed up, when all rows have gone by."""
        state = self.state
        state.prepared.pop(("completion", self.value), None)  # This was for another part of the gradient.
        state.prepared.pop(("of weight", self.value), None)
        if self.value not in state.sums:
            return
        of_bias, of_scale = _of_whole_channels(state.sums[self.value])
        state.sums[self.value] = (of_bias, of_scale)
        state.add_gradient_of_images(self.bias, of_bias)
        state.add_gradient_of_images(self.weight, self._of_weight(of_scale))

    def _of_weight(self, of_scale: Tensor) -> Tensor:
        """Return the gradients of the weight, N C, of each image's part."""
        inverse_std = self._per_channel(self.inverse_std)
        return self.state.once(("of weight", self.value), lambda: of_scale * inverse_std)

    def complete(self, raw: Tensor, gradient: Tensor) -> None:
        """Add the part that follows from mean and variance to the gradient of the input.

        `raw` and `gradient`: the same rows of the input and of its gradient. In half precision, the part is rounded
        before it is added on a GPU, where a map of float32 would be as large as both.
        """
        part_of = self.state.prepare(("completion", self.value), self._completion)
        if part_of is None:
            return
        if not self.state.on_cpu:
            gradient.add_(part_of.apply(raw, self.state))
            return
        assert part_of.shift is not None
        mean = part_of.mean[..., None, None, None]
        part = raw.to(mean.dtype) - mean
        part.mul_(part_of.scale[..., None, None, None]).add_(part_of.shift[..., None, None, None])
        if gradient.dtype == part.dtype:
            gradient.add_(part)
        else:
            gradient.copy_(part.add_(gradient.to(part.dtype)))

    def _completion(self) -> Affine | None:
        """Return that part as a function of raw; None where statistics are constants."""
        sums = self.state.sums.pop(self.value, None)
        if sums is None or self.voxels == 0:
            return None
        of_bias, of_scale = sums
        if self.state.on_cpu or self.value.op == "group_norm":
            if self.weight is not None:
                factor = self._exact(self.weight)
                of_bias = of_bias * factor
                of_scale = of_scale * factor
            inverse_std = self._per_channel(self.inverse_std)
            of_bias = self._of_statistics(of_bias)
            of_scale = self._of_statistics(of_scale * inverse_std)
            shift = -inverse_std * of_bias / self.voxels
            slope = -(inverse_std**2) * of_scale / self.voxels
        else:  # In few launches, from what the pass has computed before.
            of_weight = self._of_statistics(self._of_weight(of_scale))
            of_bias = self._of_statistics(of_bias)
            scale = self._scale()
            zero = self.state.once("zero", lambda: scale.new_zeros(1))
            slope = torch.addcmul(zero, scale * self.inverse_std, of_weight, value=-1 / self.voxels)
            shift = torch.addcmul(zero, scale, of_bias, value=-1 / self.voxels)
        return Affine(self._per_channel(self.mean), slope, shift)

    def _of_statistics(self, sums: Tensor) -> Tensor:
        """Return sums N C for each channel, N or 1, C, of all that has the same statistics."""
        if self.value.op == "batch_norm":
            return sums.sum(0, keepdim=True)
        images, groups = self.mean.shape
        return sums if groups == sums.shape[1] else self._per_channel(sums.view(images, groups, -1).sum(2))


def _of_whole_channels(sums: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return sums N C, where they are of pieces of channels."""
    of_bias, of_scale = sums
    if of_bias.dim() == 2:
        return sums
    return of_bias.sum(2), of_scale.sum(2)

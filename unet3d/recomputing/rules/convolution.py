"""Convolutions on rows, with any kernel, stride, padding, dilation and groups; the settings of all convolutions.

On the CPU torch convolves one image of few rows by a kernel that is several times slower than oneDNN's, by which it
convolves two images, however small: few rows of one image are convolved as two images of half the rows.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from unet3d.model.half_precision import ONEDNN
from unet3d.recomputing.graph import Value, Weight
from unet3d.recomputing.rules import Gradients, Rule, Span, State, Work, pad_along, rule

Three = tuple[int, int, int]


class AxisSettings(NamedTuple):
    """The arguments of a convolution along one axis."""

    kernel: int
    stride: int
    padding: int
    dilation: int

    @property
    def reach(self) -> int:
        """Number of rows from the kernel's first to its last."""
        return self.dilation * (self.kernel - 1) + 1


class ConvolutionSettings(NamedTuple):
    """The arguments of a convolution, one number for each axis D H W."""

    weight: Weight
    bias: Weight | None
    kernel: Three
    stride: Three
    padding: Three
    dilation: Three
    groups: int
    output_padding: Three = (0, 0, 0)

    def along(self, axis: int) -> AxisSettings:
        """Return the arguments along an axis of N C D H W."""
        place = axis - 2
        return AxisSettings(
            kernel=self.kernel[place],
            stride=self.stride[place],
            padding=self.padding[place],
            dilation=self.dilation[place],
        )


def convolution(value: Value) -> ConvolutionSettings:
    """Return the settings of a conv3d."""
    return _settings(value, dilation=value.argument(5, 1), groups=value.argument(6, 1))


def transposed(value: Value) -> ConvolutionSettings:
    """Return the settings of a conv_transpose3d."""
    settings = _settings(value, dilation=value.argument(7, 1), groups=value.argument(6, 1))
    return settings._replace(output_padding=three(value.argument(5, 0)))


def _settings(value: Value, dilation: int | Sequence[int], groups: int) -> ConvolutionSettings:
    """Return the settings whose arguments have the same places in both operations, with the others."""
    weight = value.args[1]
    return ConvolutionSettings(
        weight=weight,
        bias=value.argument(2),
        kernel=three(weight.shape[2:]),
        stride=three(value.argument(3, 1)),
        padding=three(value.argument(4, 0)),
        dilation=three(dilation),
        groups=groups,
    )


def three(numbers: int | Sequence[int]) -> Three:
    """Return one number for each axis D H W."""
    if isinstance(numbers, int):
        return (numbers, numbers, numbers)
    if len(numbers) == 1:
        return (numbers[0], numbers[0], numbers[0])
    return (numbers[0], numbers[1], numbers[2])


FEWEST_CHANNELS = 4  # of the input: of fewer torch's own kernel is not slower
HALF_PRECISION = 2  # bytes of a number, which oneDNN takes whatever the size


class Halves(NamedTuple):
    """How rows of a convolution's result, and of the input that they are made from, are cut into two images."""

    axis: int
    rows: int  # of the result
    stride: int
    reach: int

    @property
    def half(self) -> int:
        """Number of rows of an image's result; of an odd number, the last row of the second is too many."""
        return (self.rows + 1) // 2

    @property
    def surplus(self) -> int:
        """Number of rows that are too many."""
        return 2 * self.half - self.rows

    def input_images(self, x: Tensor) -> Tensor:
        """Return the input, with its padding, as two images that share the rows between the halves."""
        length = (self.half - 1) * self.stride + self.reach
        first = x.narrow(self.axis, 0, length)
        start = self.half * self.stride
        if not self.surplus:
            return torch.cat([first, x.narrow(self.axis, start, length)])
        second = x.narrow(self.axis, start, length - self.stride)
        return torch.cat([first, pad_along(second, self.axis, 0, self.stride)])

    def result_images(self, y: Tensor) -> Tensor:
        """Return the result, or its gradient, as two images."""
        if self.surplus:
            y = pad_along(y, self.axis, 0, self.surplus)
        return torch.cat(y.split(self.half, self.axis))

    def result(self, images: Tensor) -> Tensor:
        """Return the result of two images as one."""
        rows = torch.cat(images.split(1), self.axis)
        return rows.narrow(self.axis, 0, self.rows)

    def input_gradient(self, images: Tensor) -> Tensor:
        """Return the gradient of the input from the gradients of the two images."""
        first, second = images.split(1)
        start = self.half * self.stride
        length = first.shape[self.axis] - self.surplus * self.stride
        total = pad_along(first, self.axis, 0, start + length - first.shape[self.axis])
        total.narrow(self.axis, start, length).add_(second.narrow(self.axis, 0, length))
        return total


def is_slow(rows: Tensor, more: int, axis: int) -> bool:
    """Return whether torch has a slow kernel for these rows of an input and `more` rows of padding."""
    images, channels, *size = rows.shape
    size[axis - 2] += more
    is_small = channels * size[0] * size[1] <= ONEDNN
    return images == 1 and is_small and channels >= FEWEST_CHANNELS and rows.element_size() > HALF_PRECISION


def is_plain_convolution(value: Value) -> bool:
    """Return whether input and parameters are a map and weights, and the padding is given in numbers."""
    weight = value.args[1]
    bias = value.argument(2)
    padding = value.argument(4, 0)
    if not isinstance(weight, Weight) or not isinstance(bias, Weight | None):
        return False
    return len(value.inputs) == 1 and not isinstance(padding, str)


@rule("conv3d")
class Convolution(Rule):
    """A convolution; its gradients need its input and not its result."""

    is_never_grouped = True

    def serves(self, value: Value, axis: int) -> bool:
        if not super().serves(value, axis) or not is_plain_convolution(value):
            return False
        along = convolution(value).along(axis)
        return along.padding < along.reach  # else some rows are made from padding alone

    def rows(self, value: Value, axis: int, span: Span) -> list[Span]:
        length = value.inputs[0].shape[axis]
        low, high = self._reach(value, axis, span)
        return [(max(low, 0), min(high, length))]

    def run(self, work: Work, inputs: Sequence[Tensor]) -> Tensor:
        settings = convolution(work.value)
        weight = work.state.weight(settings.weight)
        bias = work.state.weight(settings.bias)
        assert weight is not None
        halves = self._halves(work, inputs[0])
        rows, padding, surplus = self._padded(work, inputs[0], halves)
        result = F.conv3d(
            rows,
            weight,
            bias,
            settings.stride,
            padding,
            settings.dilation,
            settings.groups,
        )
        if halves is not None:
            return halves.result(result)
        if surplus == (0, 0):
            return result
        return result.narrow(work.state.axis, surplus[0], work.tile.rows)

    def gradients(self, work: Work, known: list[Tensor], gradient: Tensor) -> Gradients:
        value, tile, state, *_ = work
        settings = convolution(value)
        size = known[0].shape
        halves = self._halves(work, known[0])
        rows, padding, surplus = self._padded(work, known.pop(), halves)  # the copy with padding alone is alive
        if halves is not None:
            gradient = halves.result_images(gradient)
        if surplus != (0, 0):
            gradient = pad_along(gradient, state.axis, *surplus)
        of_input, of_weight, of_bias = torch.ops.aten.convolution_backward(
            gradient.contiguous(),
            rows,
            state.weight(settings.weight),
            bias_size(value, settings),
            settings.stride,
            padding,
            settings.dilation,
            False,  # not transposed
            settings.output_padding,
            settings.groups,
            wanted_gradients(work, settings),
        )
        state.add_gradient(settings.weight, of_weight)
        state.add_gradient(settings.bias, of_bias)
        if of_input is not None and halves is not None:
            of_input = halves.input_gradient(of_input)
        if of_input is not None and of_input.shape != size:
            low, _ = self._reach(value, state.axis, tile.span)
            before = max(-low, 0)
            of_input = of_input.narrow(state.axis, before, size[state.axis])
        return [of_input]

    def operations(self, value: Value) -> int:
        weight: Weight = value.args[1]
        return value.shape.numel() * math.prod(weight.shape[1:])

    def is_costly(self, value: Value) -> bool:
        return True

    def fewest_rows(self, value: Value, axis: int) -> int:
        """Return the rows of a tile for which torch computes by oneDNN: that depends on C x D x H of one image."""
        if value.shape[0] > 1 or axis == 4:
            return 1
        along = convolution(value).along(axis)
        source = value.inputs[0].shape
        row = source[1] * source[5 - axis]
        fewest = ONEDNN // row + 1  # rows of the input
        steps = math.ceil((fewest - along.reach) / along.stride)
        return max(1, steps + 1)

    def _reach(self, value: Value, axis: int, span: Span) -> Span:
        """Return the rows of the input under the kernel, also those outside of it."""
        along = convolution(value).along(axis)
        first, end = span
        low = first * along.stride - along.padding
        last = (end - 1) * along.stride - along.padding
        return low, last + along.reach

    def _halves(self, work: Work, rows: Tensor) -> Halves | None:
        """Return how a tile is cut into two images; None where torch's kernel is fast for one."""
        value, tile, state, *_ = work
        settings = convolution(value)
        if not state.on_cpu or tile.rows == 1 or max(settings.kernel) == 1 or settings.groups > 1:
            return None
        low, high = self._reach(value, state.axis, tile.span)
        if not is_slow(rows, high - low - rows.shape[state.axis], state.axis):
            return None
        along = settings.along(state.axis)
        return Halves(state.axis, tile.rows, along.stride, along.reach)

    def _padded(self, work: Work, rows: Tensor, halves: Halves | None) -> tuple[Tensor, list[int], Span]:
        """Return the input's rows with zeros for those outside of the map, and the padding that is left to do.

        On a GPU, where each copy is a launch, torch pads both sides of a tile at an end of the map: the last numbers
        say how many rows of its result come before the tile's, and behind them.
        """
        value, tile, state, *_ = work
        axis = state.axis
        rows = in_type(rows, state)
        padding = list(convolution(value).padding)
        if tile.span == (0, value.shape[axis]) and halves is None:
            return rows.contiguous(), padding, (0, 0)
        low, high = self._reach(value, axis, tile.span)
        before = max(-low, 0)
        behind = max(high - value.inputs[0].shape[axis], 0)
        along = convolution(value).along(axis)
        is_at_end = before > 0 or behind > 0
        if is_at_end and not state.on_cpu and along.stride == 1 and {before, behind} <= {0, along.padding}:
            return rows.contiguous(), padding, (along.padding - before, along.padding - behind)
        padding[axis - 2] = 0
        if is_at_end:
            rows = pad_along(rows, axis, before, behind)
        if halves is not None:
            rows = halves.input_images(rows)
        return rows.contiguous(), padding, (0, 0)


def in_type(rows: Tensor, state: State) -> Tensor:
    """Return rows in the pass's type; those of a group may be in autocast's, as float32 after a layer norm."""
    return rows.to(state.dtype)


def bias_size(value: Value, settings: ConvolutionSettings) -> list[int] | None:
    """Return the size of the bias, as the gradient of a convolution is asked for it; None without one."""
    if settings.bias is None:
        return None
    return [value.shape[1]]


def wanted_gradients(work: Work, settings: ConvolutionSettings) -> list[bool]:
    """Return whether the gradients of input, weight and bias are wanted."""
    return [
        work.wanted[0],
        work.state.wants(settings.weight),
        work.state.wants(settings.bias),
    ]

"""Convolutions and transposed convolutions on rows: any kernel, stride, padding, dilation and groups."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from unet3d.recomputing.graph import Value, Weight
from unet3d.recomputing.rules import RULES, Gradients, Rule, Span, Work
from unet3d.training.half_precision import ONEDNN

Three = tuple[int, int, int]


class Settings(NamedTuple):
    """The arguments of a convolution, one number for each axis D H W."""

    weight: Weight
    bias: Weight | None
    kernel: Three
    stride: Three
    padding: Three
    dilation: Three
    groups: int
    output_padding: Three = (0, 0, 0)


def convolution(value: Value) -> Settings:
    """Return the settings of a conv3d."""
    weight = value.args[1]
    return Settings(
        weight=weight,
        bias=value.argument(2),
        kernel=three(weight.shape[2:]),
        stride=three(value.argument(3, 1)),
        padding=three(value.argument(4, 0)),
        dilation=three(value.argument(5, 1)),
        groups=value.argument(6, 1),
    )


def transposed(value: Value) -> Settings:
    """Return the settings of a conv_transpose3d."""
    weight = value.args[1]
    return Settings(
        weight=weight,
        bias=value.argument(2),
        kernel=three(weight.shape[2:]),
        stride=three(value.argument(3, 1)),
        padding=three(value.argument(4, 0)),
        output_padding=three(value.argument(5, 0)),
        groups=value.argument(6, 1),
        dilation=three(value.argument(7, 1)),
    )


def three(numbers: int | Sequence[int]) -> Three:
    """Return one number for each axis D H W."""
    if isinstance(numbers, int):
        return (numbers, numbers, numbers)
    if len(numbers) == 1:
        return (numbers[0], numbers[0], numbers[0])
    return (numbers[0], numbers[1], numbers[2])


def _is_plain_convolution(value: Value, axis: int) -> bool:
    """Return whether input and parameters are a map and weights, and the padding is given in numbers."""
    if not isinstance(value.args[1], Weight) or not isinstance(value.argument(2), Weight | None):
        return False
    return len(value.inputs) == 1 and not isinstance(value.argument(4, 0), str)


class Convolution(Rule):
    """A convolution; its gradients need its input and not its result."""

    def serves(self, value: Value, axis: int) -> bool:
        if not super().serves(value, axis) or not _is_plain_convolution(value, axis):
            return False
        kernel, _, padding, dilation = (numbers[axis - 2] for numbers in convolution(value)[2:6])
        return padding <= dilation * (kernel - 1) + 1  # else some rows are made from padding alone

    def rows(self, value: Value, axis: int, span: Span) -> list[Span]:
        low, high = self._reach(value, axis, span)
        return [(max(low, 0), min(high, value.inputs[0].shape[axis]))]

    def run(self, work: Work, inputs: Sequence[Tensor]) -> Tensor:
        settings = convolution(work.value)
        weight = work.state.weight(settings.weight)
        bias = work.state.weight(settings.bias)
        assert weight is not None
        rows, padding = self._padded(work, inputs[0])
        return F.conv3d(rows, weight, bias, settings.stride, padding, settings.dilation, settings.groups)

    def gradients(self, work: Work, known: list[Tensor], gradient: Tensor) -> Gradients:
        value, tile, state, *_ = work
        settings = convolution(value)
        size = known[0].shape
        rows, padding = self._padded(work, known.pop())  # the copy with padding alone is alive
        of_input, of_weight, of_bias = torch.ops.aten.convolution_backward(
            gradient.contiguous(),
            rows,
            state.weight(settings.weight),
            None if settings.bias is None else [value.shape[1]],
            settings.stride,
            padding,
            settings.dilation,
            False,
            (0, 0, 0),
            settings.groups,
            [work.wanted[0], state.wants(settings.weight), state.wants(settings.bias)],
        )
        state.add_gradient(settings.weight, of_weight)
        state.add_gradient(settings.bias, of_bias)
        if of_input is not None and of_input.shape != size:
            low, _ = self._reach(value, state.axis, tile.span)
            of_input = of_input.narrow(state.axis, max(-low, 0), size[state.axis])
        return [of_input]

    def operations(self, value: Value) -> int:
        weight: Weight = value.args[1]
        return value.shape.numel() * math.prod(weight.shape[1:])

    def fewest_rows(self, value: Value, axis: int) -> int:
        """Return the rows of a tile for which torch computes by oneDNN on the CPU; fewer go to its slow kernel.

        That depends on C x D x H of one image's input.
        """
        if value.shape[0] > 1 or axis == 4:
            return 1
        settings = convolution(value)
        source = value.inputs[0].shape
        fewest = ONEDNN // (source[1] * source[5 - axis]) + 1
        reach = settings.dilation[axis - 2] * (settings.kernel[axis - 2] - 1) + 1
        return max(1, -(-(fewest - reach) // settings.stride[axis - 2]) + 1)

    def _reach(self, value: Value, axis: int, span: Span) -> Span:
        """Return the rows of the input under the kernel, also those outside of it."""
        settings = convolution(value)
        kernel, stride, padding, dilation = (numbers[axis - 2] for numbers in settings[2:6])
        return span[0] * stride - padding, (span[1] - 1) * stride - padding + dilation * (kernel - 1) + 1

    def _padded(self, work: Work, rows: Tensor) -> tuple[Tensor, list[int]]:
        """Return the input's rows with zeros for those outside of the map, and the padding that is left to do."""
        value, tile, state, *_ = work
        axis = state.axis
        padding = list(convolution(value).padding)
        if tile.span == (0, value.shape[axis]):
            return rows.contiguous(), padding
        padding[axis - 2] = 0
        low, high = self._reach(value, axis, tile.span)
        before = max(-low, 0)
        behind = max(high - value.inputs[0].shape[axis], 0)
        if before or behind:
            rows = F.pad(rows, [0, 0] * (4 - axis) + [before, behind])
        return rows.contiguous(), padding


class TransposedConvolution(Rule):
    """A transposed convolution; its gradients need its input and not its result."""

    def serves(self, value: Value, axis: int) -> bool:
        if not super().serves(value, axis) or not _is_plain_convolution(value, axis):
            return False
        kernel, stride, padding, dilation = (numbers[axis - 2] for numbers in transposed(value)[2:6])
        reach = dilation * (kernel - 1) + 1
        last = (value.inputs[0].shape[axis] - 1) * stride - padding + reach
        return value.shape[axis] <= last and stride <= reach  # else there are rows that no kernel reaches

    def rows(self, value: Value, axis: int, span: Span) -> list[Span]:
        kernel, stride, padding, dilation = (numbers[axis - 2] for numbers in transposed(value)[2:6])
        low = -(-(span[0] + padding - dilation * (kernel - 1)) // stride)
        high = (span[1] - 1 + padding) // stride + 1
        length = value.inputs[0].shape[axis]
        low = min(max(low, 0), length - 1)
        return [(low, max(min(high, length), low + 1))]

    def run(self, work: Work, inputs: Sequence[Tensor]) -> Tensor:
        settings = transposed(work.value)
        weight = work.state.weight(settings.weight)
        bias = work.state.weight(settings.bias)
        assert weight is not None
        padding, output_padding, offset = self._of_tile(work)
        rows = F.conv_transpose3d(
            inputs[0].contiguous(),
            weight,
            bias,
            settings.stride,
            padding,
            output_padding,
            settings.groups,
            settings.dilation,
        )
        return rows.narrow(work.state.axis, offset, work.tile.rows)

    def gradients(self, work: Work, known: list[Tensor], gradient: Tensor) -> Gradients:
        value, tile, state, *_ = work
        axis = state.axis
        settings = transposed(value)
        padding, output_padding, offset = self._of_tile(work)
        rows = known.pop().contiguous()
        behind = self._length(work) - offset - tile.rows
        if offset or behind:
            gradient = F.pad(gradient, [0, 0] * (4 - axis) + [offset, behind])
        of_input, of_weight, of_bias = torch.ops.aten.convolution_backward(
            gradient.contiguous(),
            rows,
            state.weight(settings.weight),
            None if settings.bias is None else [value.shape[1]],
            settings.stride,
            padding,
            settings.dilation,
            True,
            output_padding,
            settings.groups,
            [work.wanted[0], state.wants(settings.weight), state.wants(settings.bias)],
        )
        state.add_gradient(settings.weight, of_weight)
        state.add_gradient(settings.bias, of_bias)
        return [of_input]

    def operations(self, value: Value) -> int:
        weight: Weight = value.args[1]
        return value.inputs[0].shape.numel() * math.prod(weight.shape[1:])

    def is_spread_apart(self, value: Value) -> bool:
        """Return whether each number of the result is made from one voxel alone."""
        settings = transposed(value)
        is_kernel_stride = all(k <= s for k, s in zip(settings.kernel, settings.stride, strict=True))
        return is_kernel_stride and settings.dilation == (1, 1, 1)

    def _of_tile(self, work: Work) -> tuple[list[int], list[int], int]:
        """Return padding and output padding of a tile, and how many of its rows come before those asked for."""
        value, tile, state, *_ = work
        settings = transposed(value)
        place = state.axis - 2
        padding, output_padding = list(settings.padding), list(settings.output_padding)
        if self._is_whole(work):
            return padding, output_padding, 0
        first_row = tile.inputs[0][0] * settings.stride[place] - padding[place]
        padding[place] = 0
        output_padding[place] = 0
        return padding, output_padding, tile.span[0] - first_row

    def _is_whole(self, work: Work) -> bool:
        length = work.value.inputs[0].shape[work.state.axis]
        return work.tile.inputs[0] == (0, length) and work.tile.span == (0, work.value.shape[work.state.axis])

    def _length(self, work: Work) -> int:
        """Return how many rows the tile's input makes."""
        if self._is_whole(work):
            return work.tile.rows
        kernel, stride, _, dilation = (numbers[work.state.axis - 2] for numbers in transposed(work.value)[2:6])
        low, high = work.tile.inputs[0]
        return (high - low - 1) * stride + dilation * (kernel - 1) + 1


RULES["conv3d"] = Convolution()
RULES["conv_transpose3d"] = TransposedConvolution()

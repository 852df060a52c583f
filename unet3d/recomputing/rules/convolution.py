"""Convolutions and transposed convolutions on rows, with any kernel, stride, padding, dilation and groups.

On the CPU torch convolves one image of few rows by a kernel that is several times slower than oneDNN's, by which it
convolves two images, however small: few rows of one image are convolved as two images of half the rows.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unet3d.model.half_precision import ONEDNN
from unet3d.recomputing.graph import Value, Weight
from unet3d.recomputing.rules import Gradients, Rule, Span, Work, pad_along, rows_of, rule

Three = tuple[int, ...]  # a number for each axis D H W


class ConvolutionSettings(NamedTuple):
    """The arguments of a convolution."""

    weight: Weight
    bias: Weight | None
    kernel: Three
    stride: Three
    padding: Three
    dilation: Three
    groups: int
    output_padding: Three
    is_transposed: bool

    def of_tile(self, tile: "TileInput") -> tuple[Any, ...]:
        """Return the arguments with which torch's kernels are called."""
        return self.stride, tile.padding, self.dilation, self.is_transposed, tile.output_padding, self.groups

    def along(self, axis: int) -> Three:
        """Return stride, padding and reach along an axis of N C D H W: the rows from a kernel's first to its last."""
        place = axis - 2
        reach = self.dilation[place] * (self.kernel[place] - 1) + 1
        return self.stride[place], self.padding[place], reach


def settings_of(value: Value) -> ConvolutionSettings:
    """Return the settings of a conv3d or conv_transpose3d."""
    weight = value.args[1]
    is_transposed = value.op == "conv_transpose3d"
    return ConvolutionSettings(
        weight=weight,
        bias=value.argument(2),
        kernel=three(weight.shape[2:]),
        stride=three(value.argument(3, 1)),
        padding=three(value.argument(4, 0)),
        dilation=three(value.argument(7 if is_transposed else 5, 1)),
        groups=value.argument(6, 1),
        output_padding=three(value.argument(5, 0) if is_transposed else 0),
        is_transposed=is_transposed,
    )


def three(numbers: int | Sequence[int]) -> Three:
    """Return one number for each axis D H W."""
    numbers = (numbers,) if isinstance(numbers, int) else tuple(numbers)
    return 3 * numbers if len(numbers) == 1 else numbers


FEWEST_CHANNELS = 4  # Of fewer channels of the input, torch's own kernel is not slower.
HALF_PRECISION = 2  # Bytes of numbers that go to oneDNN, whatever the size.


class Halves(NamedTuple):
    """How rows of a convolution's result, and of the input that they are made from, are cut into two images."""

    axis: int
    rows: int  # Rows of the result.
    half: int  # rows of an image's result
    surplus: int  # rows too many, of an odd number: the second image's last
    stride: int
    reach: int

    def input_images(self, x: Tensor) -> Tensor:
        """Return the input, with its padding, as two images that share the rows between the halves."""
        length = (self.half - 1) * self.stride + self.reach
        first = x.narrow(self.axis, 0, length)
        second = x.narrow(self.axis, self.half * self.stride, length - self.surplus * self.stride)
        if self.surplus:
            second = pad_along(second, self.axis, 0, self.stride)
        return torch.cat([first, second])

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


class TileInput(NamedTuple):
    """What the kernels are given for a tile, and where its rows lie in their result."""

    rows: Tensor  # Rows outside of the map are zeros.
    padding: Sequence[int]  # Padding that is left to do.
    output_padding: Sequence[int] = (0, 0, 0)
    before: int = 0  # rows of the result that come before the tile's
    behind: int = 0
    zeros: int = 0  # rows before the input's
    halves: Halves | None = None


class AnyConvolution(Rule):
    """A convolution; its gradients need its input and not its result."""

    is_never_grouped = True

    def serves(self, value: Value, axis: int) -> bool:
        """Return whether input and parameters are a map and weights, and the padding is given in numbers."""
        if not super().serves(value, axis) or len(value.inputs) != 1 or isinstance(value.argument(4, 0), str):
            return False
        return isinstance(value.args[1], Weight) and isinstance(value.argument(2), Weight | None)

    def run(self, work: Work, inputs: Sequence[Tensor]) -> Tensor:
        state = work.state
        settings = settings_of(work.value)
        weight = state.weight(settings.weight)
        bias = None if settings.bias is None else state.weight(settings.bias)
        tile = self.tile_input(work, inputs[0])
        result: Tensor = torch.ops.aten.convolution(tile.rows, weight, bias, *settings.of_tile(tile))
        if tile.halves is not None:
            return tile.halves.result(result)
        return rows_of(result, state.axis, (tile.before, tile.before + work.rows))

    def gradients(self, work: Work, known: list[Tensor], gradient: Tensor) -> Gradients:
        value, state, *_ = work
        settings = settings_of(value)
        length = known[0].shape[state.axis]
        tile = self.tile_input(work, known.pop())  # The copy with padding alone is alive.
        if tile.halves is not None:
            gradient = tile.halves.result_images(gradient)
        if tile.before or tile.behind:
            gradient = pad_along(gradient, state.axis, tile.before, tile.behind)
        of_input, of_weight, of_bias = torch.ops.aten.convolution_backward(
            gradient.contiguous(),
            tile.rows,
            state.weight(settings.weight),
            None if settings.bias is None else [value.shape[1]],
            *settings.of_tile(tile),
            [work.wanted[0], state.wants(settings.weight), state.wants(settings.bias)],
        )
        state.add_gradient(settings.weight, of_weight)
        state.add_gradient(settings.bias, of_bias)
        if of_input is not None and tile.halves is not None:
            of_input = tile.halves.input_gradient(of_input)
        if of_input is not None and of_input.shape[state.axis] != length:
            of_input = of_input.narrow(state.axis, tile.zeros, length)
        return [of_input]

    def operations(self, value: Value) -> int:
        weight: Weight = value.args[1]
        points = value if value.op == "conv3d" else value.inputs[0]
        return points.shape.numel() * math.prod(weight.shape[1:])

    def tile_input(self, work: Work, rows: Tensor) -> TileInput:
        """Return what the kernels are given for the input's rows.

        Those of a group may be in autocast's type, as float32 after a layer norm.
        """
        raise NotImplementedError


@rule("conv3d")
class Convolution(AnyConvolution):
    """A convolution with any kernel, stride, padding, dilation and groups."""

    def serves(self, value: Value, axis: int) -> bool:
        if not super().serves(value, axis):
            return False
        _, padding, reach = settings_of(value).along(axis)
        return padding < reach  # Else some rows are made from padding alone.

    def rows(self, value: Value, axis: int, span: Span) -> list[Span]:
        low, high = self._reach(value, axis, span)
        return [(max(low, 0), min(high, value.inputs[0].shape[axis]))]

    def is_costly(self, value: Value) -> bool:
        return True

    def fewest_rows(self, value: Value, axis: int) -> int:
        """Return the rows of a tile for which torch computes by oneDNN: that depends on C x D x H of one image."""
        if value.shape[0] > 1 or axis == 4:
            return 1
        stride, _, reach = settings_of(value).along(axis)
        source = value.inputs[0].shape
        row = source[1] * source[5 - axis]
        fewest = ONEDNN // row + 1  # rows of the input
        steps = math.ceil((fewest - reach) / stride)
        return max(1, steps + 1)

    def tile_input(self, work: Work, rows: Tensor) -> TileInput:
        """Return what the kernels are given for the input's rows.

        On a GPU, where each copy is a launch, torch pads both sides of a tile at an end of the map.
        """
        value, state, *_ = work
        axis = state.axis
        low, high = self._reach(value, axis, work.span)
        halves = self._halves(work, rows, high - low)
        rows = rows.to(state.dtype)
        padding = list(settings_of(value).padding)
        if work.span == (0, value.shape[axis]) and halves is None:
            return TileInput(rows.contiguous(), padding)
        before = max(-low, 0)
        behind = max(high - value.inputs[0].shape[axis], 0)
        stride, all_padding, _ = settings_of(value).along(axis)
        is_at_end = before > 0 or behind > 0
        if is_at_end and not state.on_cpu and stride == 1 and {before, behind} <= {0, all_padding}:
            return TileInput(rows.contiguous(), padding, (0, 0, 0), all_padding - before, all_padding - behind)
        padding[axis - 2] = 0
        if is_at_end:
            rows = pad_along(rows, axis, before, behind)
        if halves is not None:
            rows = halves.input_images(rows)
        return TileInput(rows.contiguous(), padding, zeros=before, halves=halves)

    def _reach(self, value: Value, axis: int, span: Span) -> Span:
        """Return the rows of the input under the kernel, also those outside of it."""
        stride, padding, reach = settings_of(value).along(axis)
        first, end = span
        low = first * stride - padding
        return low, (end - 1) * stride - padding + reach

    def _halves(self, work: Work, rows: Tensor, length: int) -> Halves | None:
        """Return how a tile is cut into two images; None where torch's kernel is fast for one.

        `length`: rows of the input with padding.
        """
        state = work.state
        settings = settings_of(work.value)
        if not state.on_cpu or work.rows == 1 or max(settings.kernel) == 1 or settings.groups > 1:
            return None
        images, channels, *size = rows.shape
        size[state.axis - 2] = length
        is_small = channels * size[0] * size[1] <= ONEDNN
        if images > 1 or not is_small or channels < FEWEST_CHANNELS or rows.element_size() <= HALF_PRECISION:
            return None
        stride, _, reach = settings.along(state.axis)
        half = (work.rows + 1) // 2
        return Halves(state.axis, work.rows, half, 2 * half - work.rows, stride, reach)


@rule("conv_transpose3d")
class TransposedConvolution(AnyConvolution):
    """A transposed convolution with any kernel, stride, padding, dilation and groups."""

    def serves(self, value: Value, axis: int) -> bool:
        if not super().serves(value, axis):
            return False
        stride, padding, reach = settings_of(value).along(axis)
        length = value.inputs[0].shape[axis]
        # Else there are rows that no kernel reaches.
        return value.shape[axis] <= (length - 1) * stride - padding + reach and stride <= reach

    def rows(self, value: Value, axis: int, span: Span) -> list[Span]:
        stride, padding, reach = settings_of(value).along(axis)
        length = value.inputs[0].shape[axis]
        first, end = span
        low = math.ceil((first + padding + 1 - reach) / stride)
        high = (end - 1 + padding) // stride + 1
        # One row at least, also for rows that are made from none.
        low = min(max(low, 0), length - 1)
        high = max(min(high, length), low + 1)
        return [(low, high)]

    def is_costly(self, value: Value) -> bool:
        """Return whether kernels overlap: else each number of the result is made from one voxel alone."""
        settings = settings_of(value)
        if settings.dilation != (1, 1, 1):
            return True
        return any(k > s for k, s in zip(settings.kernel, settings.stride, strict=True))

    def tile_input(self, work: Work, rows: Tensor) -> TileInput:
        value, state, *_ = work
        axis = state.axis
        settings = settings_of(value)
        stride, padding_before, reach = settings.along(axis)
        rows = rows.to(state.dtype).contiguous()
        padding = list(settings.padding)
        low, high = work.sources[0]
        first, end = work.span
        if (low, high, first, end) == (0, value.inputs[0].shape[axis], 0, value.shape[axis]):
            return TileInput(rows, padding, settings.output_padding)
        before = first + padding_before - low * stride
        behind = (high - low - 1) * stride + reach - before - work.rows
        left_out = min(before, behind)  # Of rows that are not asked for, torch leaves out as many at both ends.
        padding[axis - 2] = left_out
        output_padding = list(settings.output_padding)
        output_padding[axis - 2] = 0
        return TileInput(rows, padding, output_padding, before - left_out, behind - left_out)

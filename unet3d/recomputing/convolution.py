"""Convolutions and transposed convolutions on rows: any kernel, stride, padding, dilation and groups."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from unet3d.model.half_precision import ONEDNN
from unet3d.recomputing.convolution_settings import ConvolutionSettings, convolution, transposed
from unet3d.recomputing.graph import Value, Weight
from unet3d.recomputing.halves import Halves, is_slow
from unet3d.recomputing.rules import RULES, Gradients, Rule, Span, State, Work, pad_along


def _is_plain_convolution(value: Value) -> bool:
    """Return whether input and parameters are a map and weights, and the padding is given in numbers."""
    weight = value.args[1]
    bias = value.argument(2)
    padding = value.argument(4, 0)
    if not isinstance(weight, Weight) or not isinstance(bias, Weight | None):
        return False
    return len(value.inputs) == 1 and not isinstance(padding, str)


class Convolution(Rule):
    """A convolution; its gradients need its input and not its result."""

    def serves(self, value: Value, axis: int) -> bool:
        if not super().serves(value, axis) or not _is_plain_convolution(value):
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
            _bias_size(value, settings),
            settings.stride,
            padding,
            settings.dilation,
            False,  # not transposed
            settings.output_padding,
            settings.groups,
            _wanted(work, settings),
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

    def fewest_rows(self, value: Value, axis: int) -> int:
        """Return the rows of a tile for which torch computes by oneDNN on the CPU; fewer go to its slow kernel.

        That depends on C x D x H of one image's input.
        """
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
        rows = _in_type(rows, state)
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


class TransposedConvolution(Rule):
    """A transposed convolution; its gradients need its input and not its result."""

    def serves(self, value: Value, axis: int) -> bool:
        if not super().serves(value, axis) or not _is_plain_convolution(value):
            return False
        along = transposed(value).along(axis)
        length = value.inputs[0].shape[axis]
        end = (length - 1) * along.stride - along.padding + along.reach
        # Else there are rows that no kernel reaches.
        return value.shape[axis] <= end and along.stride <= along.reach

    def rows(self, value: Value, axis: int, span: Span) -> list[Span]:
        along = transposed(value).along(axis)
        length = value.inputs[0].shape[axis]
        first, end = span
        low = math.ceil((first + along.padding + 1 - along.reach) / along.stride)
        high = (end - 1 + along.padding) // along.stride + 1
        # One row at least, also for rows that are made from none.
        low = min(max(low, 0), length - 1)
        high = max(min(high, length), low + 1)
        return [(low, high)]

    def run(self, work: Work, inputs: Sequence[Tensor]) -> Tensor:
        settings = transposed(work.value)
        weight = work.state.weight(settings.weight)
        bias = work.state.weight(settings.bias)
        assert weight is not None
        padding, output_padding, offset = self._of_tile(work)
        rows = F.conv_transpose3d(
            _in_type(inputs[0], work.state).contiguous(),
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
        settings = transposed(value)
        padding, output_padding, offset = self._of_tile(work)
        rows = _in_type(known.pop(), state).contiguous()
        behind = self._length(work, padding) - offset - tile.rows
        if offset or behind:
            gradient = pad_along(gradient, state.axis, offset, behind)
        of_input, of_weight, of_bias = torch.ops.aten.convolution_backward(
            gradient.contiguous(),
            rows,
            state.weight(settings.weight),
            _bias_size(value, settings),
            settings.stride,
            padding,
            settings.dilation,
            True,  # transposed
            output_padding,
            settings.groups,
            _wanted(work, settings),
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
        if settings.dilation != (1, 1, 1):
            return False
        return all(k <= s for k, s in zip(settings.kernel, settings.stride, strict=True))

    def _of_tile(self, work: Work) -> tuple[list[int], list[int], int]:
        """Return padding and output padding of a tile, and how many of its rows come before those asked for."""
        value, tile, state, *_ = work
        settings = transposed(value)
        place = state.axis - 2
        padding = list(settings.padding)
        output_padding = list(settings.output_padding)
        if self._is_whole(work):
            return padding, output_padding, 0
        low, high = tile.inputs[0]
        first, _ = tile.span
        first_row = low * settings.stride[place] - padding[place]
        length = (high - low - 1) * settings.stride[place] + settings.along(state.axis).reach
        before = first - first_row
        behind = length - before - tile.rows
        padding[place] = min(before, behind)  # of rows that are not asked for, torch leaves out as many at both ends
        output_padding[place] = 0
        return padding, output_padding, before - padding[place]

    def _is_whole(self, work: Work) -> bool:
        axis = work.state.axis
        value = work.value
        has_all_inputs = work.tile.inputs[0] == (0, value.inputs[0].shape[axis])
        return has_all_inputs and work.tile.span == (0, value.shape[axis])

    def _length(self, work: Work, padding: Sequence[int]) -> int:
        """Return how many rows the tile's input makes with this padding."""
        if self._is_whole(work):
            return work.tile.rows
        axis = work.state.axis
        along = transposed(work.value).along(axis)
        low, high = work.tile.inputs[0]
        return (high - low - 1) * along.stride + along.reach - 2 * padding[axis - 2]


def _in_type(rows: Tensor, state: State) -> Tensor:
    """Return rows in the pass's type; those of a group may be in autocast's, as float32 after a layer norm."""
    return rows.to(state.dtype)


def _bias_size(value: Value, settings: ConvolutionSettings) -> list[int] | None:
    if settings.bias is None:
        return None
    return [value.shape[1]]


def _wanted(work: Work, settings: ConvolutionSettings) -> list[bool]:
    """Return whether the gradients of input, weight and bias are wanted."""
    return [
        work.wanted[0],
        work.state.wants(settings.weight),
        work.state.wants(settings.bias),
    ]


RULES["conv3d"] = Convolution()
RULES["conv_transpose3d"] = TransposedConvolution()

"""Transposed convolutions on rows: any kernel, stride, padding, dilation and groups."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from unet3d.recomputing.graph import Value, Weight
from unet3d.recomputing.rules import Gradients, Rule, Span, Work, pad_along, rule
from unet3d.recomputing.rules.convolution import bias_size, in_type, is_plain_convolution, transposed, wanted_gradients


@rule("conv_transpose3d")
class TransposedConvolution(Rule):
    """A transposed convolution; its gradients need its input and not its result."""

    is_never_grouped = True

    def serves(self, value: Value, axis: int) -> bool:
        if not super().serves(value, axis) or not is_plain_convolution(value):
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
            in_type(inputs[0], work.state).contiguous(),
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
        rows = in_type(known.pop(), state).contiguous()
        behind = self._length(work, padding) - offset - tile.rows
        if offset or behind:
            gradient = pad_along(gradient, state.axis, offset, behind)
        of_input, of_weight, of_bias = torch.ops.aten.convolution_backward(
            gradient.contiguous(),
            rows,
            state.weight(settings.weight),
            bias_size(value, settings),
            settings.stride,
            padding,
            settings.dilation,
            True,  # transposed
            output_padding,
            settings.groups,
            wanted_gradients(work, settings),
        )
        state.add_gradient(settings.weight, of_weight)
        state.add_gradient(settings.bias, of_bias)
        return [of_input]

    def operations(self, value: Value) -> int:
        weight: Weight = value.args[1]
        return value.inputs[0].shape.numel() * math.prod(weight.shape[1:])

    def is_costly(self, value: Value) -> bool:
        """Return whether kernels overlap: else each number of the result is made from one voxel alone."""
        settings = transposed(value)
        if settings.dilation != (1, 1, 1):
            return True
        return any(k > s for k, s in zip(settings.kernel, settings.stride, strict=True))

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

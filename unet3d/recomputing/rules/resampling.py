"""Pooling without overlap and interpolation by whole factors, on rows."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from unet3d.recomputing.graph import Value, leaves
from unet3d.recomputing.rules import Gradients, Rule, Span, Work, pad_along, rule
from unet3d.recomputing.rules.convolution import three


@rule("max_pool3d")
class Pool(Rule):
    """Max or average pooling whose kernel is its stride."""

    def serves(self, value: Value, axis: int) -> bool:
        kernel = three(value.argument(1))
        stride = three(value.argument(2) or value.argument(1))
        padding = three(value.argument(3, 0))
        if kernel != stride or padding[axis - 2] > 0:
            return False
        if value.op == "max_pool3d":
            dilation = three(value.argument(4, 1))
            if dilation != (1, 1, 1):
                return False
        if value.element not in (None, 0):
            return False  # the indices of the largest numbers count voxels of the whole map
        return super().serves(value, axis)

    def rows(self, value: Value, axis: int, span: Span) -> list[Span]:
        factor = three(value.argument(1))[axis - 2]
        length = value.inputs[0].shape[axis]
        first, end = span
        low = first * factor
        high = min(end * factor, length)
        return [(low, high)]


@rule("avg_pool3d")
class AveragePool(Pool):
    """Average pooling; in float32 where maps are half precision, for which torch has no kernel on the CPU."""

    def run(self, work: Work, inputs: Sequence[Tensor]) -> Tensor:
        result = self._pooled(work, inputs[0])
        return result.to(work.state.dtype)

    def gradients(self, work: Work, known: list[Tensor], gradient: Tensor) -> Gradients:
        rows = known.pop().detach().requires_grad_()
        with torch.enable_grad():
            result = self._pooled(work, rows)
        return torch.autograd.grad(result, [rows], gradient.to(result.dtype))

    def _pooled(self, work: Work, rows: Tensor) -> Tensor:
        value = work.value
        axis = work.state.axis
        if rows.dtype != torch.float64:
            rows = rows.float()
        settings = value.args[1:]
        kernel = three(value.argument(1))
        count = rows.shape[axis]
        if (
            count < kernel[axis - 2]
        ):  # The last window of ceil_mode alone: torch takes none with more rows than there are.
            cut = (*kernel[: axis - 2], count, *kernel[axis - 1 :])
            settings = (cut, cut, *settings[2:])
        result: Tensor = value.target(rows, *settings)
        return result


TRILINEAR = 300  # multiplications and additions of a convolution that take as long as one interpolated number


@rule("upsample_nearest3d", "upsample_trilinear3d")
class Interpolation(Rule):
    """Nearest and trilinear interpolation by whole factors, without aligned corners."""

    reads = ""

    def serves(self, value: Value, axis: int) -> bool:
        if not super().serves(value, axis):
            return False
        source = value.inputs[0].shape
        for length, length_before in zip(value.shape[2:], source[2:], strict=True):
            if length % length_before != 0:
                return False
        for scale in leaves(value.args[2:]):
            if isinstance(scale, float) and scale != round(scale):
                return False  # of 5 rows, 2.1 makes 10 at other places than 2 does
        aligns_corners = value.op == "upsample_trilinear3d" and value.argument(2, False)
        return not aligns_corners

    def rows(self, value: Value, axis: int, span: Span) -> list[Span]:
        length = value.inputs[0].shape[axis]
        factor = value.shape[axis] // length
        margin = 1  # rows that a row reads on each side of its own
        if value.op == "upsample_nearest3d":
            margin = 0
        first, end = span
        low = first // factor - margin
        high = math.ceil(end / factor) + margin
        return [(max(low, 0), min(high, length))]

    def operations(self, value: Value) -> int:
        return TRILINEAR * value.shape.numel() if value.op == "upsample_trilinear3d" else 0

    def run(self, work: Work, inputs: Sequence[Tensor]) -> Tensor:
        before, size, factors = self._of_tile(work)
        rows: Tensor
        if work.value.op == "upsample_nearest3d":
            rows = torch.ops.aten.upsample_nearest3d(inputs[0], size)
        else:
            rows = torch.ops.aten.upsample_trilinear3d(inputs[0], size, False, *factors)
        return rows.narrow(work.state.axis, before, work.tile.rows)

    def gradients(self, work: Work, known: list[Tensor], gradient: Tensor) -> Gradients:
        axis = work.state.axis
        before, size, factors = self._of_tile(work)
        behind = size[axis - 2] - before - work.tile.rows
        if before or behind:
            gradient = pad_along(gradient, axis, before, behind)
        source = list(work.value.inputs[0].shape)
        low, high = work.tile.inputs[0]
        source[axis] = high - low
        if work.value.op == "upsample_nearest3d":
            return [torch.ops.aten.upsample_nearest3d_backward(gradient, size, source)]
        return [torch.ops.aten.upsample_trilinear3d_backward(gradient, size, source, False, *factors)]

    def _of_tile(self, work: Work) -> tuple[int, list[int], list[float]]:
        """Return how many rows come before a tile's, the size that its input is interpolated to, and the factors.

        Trilinear interpolation does not compute rows behind the tile's. Nearest neighbours do: where their result
        is cut, torch's gradient takes the factor from the sizes, whatever factor it is given.
        """
        value = work.value
        axis = work.state.axis
        size = list(value.shape[2:])
        source = value.inputs[0].shape[2:]
        factors = [length // length_before for length, length_before in zip(size, source, strict=True)]
        low, high = work.tile.inputs[0]
        first, _ = work.tile.span
        factor = factors[axis - 2]
        before = first - low * factor
        count = before + work.tile.rows
        if value.op == "upsample_nearest3d":
            count = (high - low) * factor
        elif count == high - low and factor > 1:
            count += 1  # of as many rows as there are, torch makes a copy, whatever the factor
        size[axis - 2] = count
        return before, size, [float(factor) for factor in factors]

"""Pooling without overlap and interpolation by whole factors, on rows."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from unet3d.recomputing.convolution_settings import three
from unet3d.recomputing.graph import Value, leaves
from unet3d.recomputing.rules import RULES, Gradients, Rule, Span, Work


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
        if rows.dtype != torch.float64:
            rows = rows.float()
        settings = value.args[1:]
        result: Tensor = value.target(rows, *settings)
        return result


TRILINEAR = 300  # multiplications and additions of a convolution that take as long as one interpolated number


class Interpolation(Rule):
    """Nearest and trilinear interpolation by whole factors, without aligned corners."""

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
        value = work.value
        tile = work.tile
        axis = work.state.axis
        source = value.inputs[0].shape
        size = []
        for dimension in (2, 3, 4):
            factor = value.shape[dimension] // source[dimension]
            size.append(inputs[0].shape[dimension] * factor)
        mode = "nearest" if value.op == "upsample_nearest3d" else "trilinear"
        rows = F.interpolate(inputs[0], size, mode=mode)
        low, _ = tile.inputs[0]
        first, _ = tile.span
        first_row = low * (value.shape[axis] // source[axis])
        return rows.narrow(axis, first - first_row, tile.rows)

    def gradients(self, work: Work, known: list[Tensor], gradient: Tensor) -> Gradients:
        rows = known[0].detach().requires_grad_()
        with torch.enable_grad():
            result = self.run(work, [rows])
        return torch.autograd.grad(result, [rows], gradient)


RULES["max_pool3d"] = Pool()
RULES["avg_pool3d"] = AveragePool()
RULES["upsample_nearest3d"] = Interpolation()
RULES["upsample_trilinear3d"] = Interpolation()

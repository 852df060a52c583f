"""Pooling without overlap and interpolation by whole factors, on rows."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from unet3d.recomputing.convolution import three
from unet3d.recomputing.graph import Value, leaves
from unet3d.recomputing.rules import RULES, Gradients, Rule, Span, Work


class Pool(Rule):
    """Max or average pooling whose kernel is its stride."""

    def serves(self, value: Value, axis: int) -> bool:
        kernel = three(value.argument(1))
        stride = three(value.argument(2) or value.argument(1))
        padding = three(value.argument(3, 0))
        has_dilation = value.op == "max_pool3d" and three(value.argument(4, 1)) != (1, 1, 1)
        if kernel != stride or padding[axis - 2] or has_dilation or value.element not in (None, 0):
            return False
        return super().serves(value, axis)

    def rows(self, value: Value, axis: int, span: Span) -> list[Span]:
        factor = three(value.argument(1))[axis - 2]
        length = value.inputs[0].shape[axis]
        return [(span[0] * factor, min(span[1] * factor, length))]


class AveragePool(Pool):
    """Average pooling; in float32 where maps are half precision, for which torch has no kernel on the CPU."""

    def run(self, work: Work, inputs: Sequence[Tensor]) -> Tensor:
        return self._pooled(work, inputs[0]).to(work.state.dtype)

    def gradients(self, work: Work, known: list[Tensor], gradient: Tensor) -> Gradients:
        rows = known.pop().detach().requires_grad_()
        with torch.enable_grad():
            result = self._pooled(work, rows)
        return torch.autograd.grad(result, [rows], gradient.to(result.dtype))

    def _pooled(self, work: Work, rows: Tensor) -> Tensor:
        exact = rows.double() if rows.dtype == torch.float64 else rows.float()
        result: Tensor = work.value.target(exact, *work.value.args[1:])
        return result


class Interpolation(Rule):
    """Nearest and trilinear interpolation by whole factors, without aligned corners."""

    def serves(self, value: Value, axis: int) -> bool:
        if not super().serves(value, axis):
            return False
        source = value.inputs[0].shape
        if any(n % m for n, m in zip(value.shape[2:], source[2:], strict=True)):
            return False
        scales = [scale for scale in leaves(value.args[2:]) if isinstance(scale, float)]
        if any(scale != round(scale) for scale in scales):
            return False  # of 5 rows, 2.1 makes 10 at other places than 2 does
        return value.op != "upsample_trilinear3d" or not value.argument(2, False)

    def rows(self, value: Value, axis: int, span: Span) -> list[Span]:
        length = value.inputs[0].shape[axis]
        factor = value.shape[axis] // length
        margin = 0 if value.op == "upsample_nearest3d" else 1  # rows that a row reads beside its own
        return [(max(span[0] // factor - margin, 0), min(-(-span[1] // factor) + margin, length))]

    def run(self, work: Work, inputs: Sequence[Tensor]) -> Tensor:
        value, tile, state, *_ = work
        factors = [n // m for n, m in zip(value.shape[2:], value.inputs[0].shape[2:], strict=True)]
        size = [n * factor for n, factor in zip(inputs[0].shape[2:], factors, strict=True)]
        mode = "nearest" if value.op == "upsample_nearest3d" else "trilinear"
        rows = F.interpolate(inputs[0], size, mode=mode)
        first_row = tile.inputs[0][0] * factors[state.axis - 2]
        return rows.narrow(state.axis, tile.span[0] - first_row, tile.rows)

    def gradients(self, work: Work, known: list[Tensor], gradient: Tensor) -> Gradients:
        rows = known[0].detach().requires_grad_()
        with torch.enable_grad():
            result = self.run(work, [rows])
        return torch.autograd.grad(result, [rows], gradient)


RULES["max_pool3d"] = Pool()
RULES["avg_pool3d"] = AveragePool()
RULES["upsample_nearest3d"] = Interpolation()
RULES["upsample_trilinear3d"] = Interpolation()

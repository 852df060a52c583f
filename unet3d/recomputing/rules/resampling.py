"""Pooling without overlap, interpolation by whole factors, and means, sums and norms over all rows.

The last, as of squeeze and excitation, are carried out in two steps. The first is of each row, and has a rule as any
operation on rows; what it gives is small, a map N C D 1 1, say. The second is of that map. Both together are the
operation: rows are as long as each other.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from unet3d.recomputing.graph import Graph, Value, leaves, needed_for
from unet3d.recomputing.rules import Gradients, Rule, Span, Work, pad_along, rule, shape_of_rows
from unet3d.recomputing.rules.convolution import three


@rule("max_pool3d")
class Pool(Rule):
    """Max or average pooling whose kernel is its stride."""

    def serves(self, value: Value, axis: int) -> bool:
        kernel = three(value.argument(1))
        stride = three(value.argument(2) or value.argument(1))
        dilation = three(value.argument(4, 1) if value.op == "max_pool3d" else 1)
        if kernel != stride or dilation != (1, 1, 1) or three(value.argument(3, 0))[axis - 2] > 0:
            return False
        if value.element not in (None, 0):
            return False  # Indices of the largest numbers count voxels of the whole map.
        return super().serves(value, axis)

    def rows(self, value: Value, axis: int, span: Span) -> list[Span]:
        factor = three(value.argument(1))[axis - 2]
        first, end = span
        return [(first * factor, min(end * factor, value.inputs[0].shape[axis]))]


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
        # The last window of ceil_mode alone: torch takes none with more rows than there are.
        if rows.shape[axis] < kernel[axis - 2]:
            cut = (*kernel[: axis - 2], rows.shape[axis], *kernel[axis - 1 :])
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
        if any(length % before != 0 for length, before in zip(value.shape[2:], value.inputs[0].shape[2:], strict=True)):
            return False
        if any(isinstance(scale, float) and scale != round(scale) for scale in leaves(value.args[2:])):
            return False  # Of 5 rows, 2.1 makes 10 at other places than 2 does.
        aligns_corners = value.op == "upsample_trilinear3d" and value.argument(2, False)
        return not aligns_corners

    def rows(self, value: Value, axis: int, span: Span) -> list[Span]:
        length = value.inputs[0].shape[axis]
        factor = value.shape[axis] // length
        margin = 0 if value.op == "upsample_nearest3d" else 1  # Rows that a row reads on each side.
        first, end = span
        return [(max(first // factor - margin, 0), min(math.ceil(end / factor) + margin, length))]

    def operations(self, value: Value) -> int:
        return TRILINEAR * value.shape.numel() if value.op == "upsample_trilinear3d" else 0

    def run(self, work: Work, inputs: Sequence[Tensor]) -> Tensor:
        before, size, factors = self._of_tile(work)
        rows: Tensor
        if work.value.op == "upsample_nearest3d":
            rows = torch.ops.aten.upsample_nearest3d(inputs[0], size)
        else:
            rows = torch.ops.aten.upsample_trilinear3d(inputs[0], size, False, *factors)
        return rows.narrow(work.state.axis, before, work.rows)

    def gradients(self, work: Work, known: list[Tensor], gradient: Tensor) -> Gradients:
        axis = work.state.axis
        before, size, factors = self._of_tile(work)
        behind = size[axis - 2] - before - work.rows
        if before or behind:
            gradient = pad_along(gradient, axis, before, behind)
        source = shape_of_rows(work.value.inputs[0], axis, work.sources[0])
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
        low, high = work.sources[0]
        first, _ = work.span
        factor = factors[axis - 2]
        before = first - low * factor
        count = before + work.rows
        if value.op == "upsample_nearest3d":
            count = (high - low) * factor
        elif count == high - low and factor > 1:
            count += 1  # Of as many rows as there are, torch makes a copy, whatever the factor.
        size[axis - 2] = count
        return before, size, [float(factor) for factor in factors]


BY_ROWS = " by rows"  # the end of the first step's operation
OVER_ROWS = " over rows"  # the same of the second, where its result has five dimensions, too
LEAST = 4  # numbers of a map to those of its rows' results, or nothing is saved
MEAN = torch.ops.aten.mean.dim
PLACE = {"mean": 1, "sum": 1, "linalg_vector_norm": 2}  # Position of the argument that names the dimensions.
VIEWS = ("flatten", "reshape", "view")


@rule(f"mean{BY_ROWS}", f"sum{BY_ROWS}")
class OfEachRow(Rule):
    """The mean or sum of each row; its gradient is that of the result, spread."""

    reads = ""

    def gradients(self, work: Work, known: list[Tensor], gradient: Tensor) -> Gradients:
        (source,) = work.value.inputs
        size = shape_of_rows(source, work.state.axis, work.sources[0])
        if work.value.op.startswith("mean"):
            gradient = gradient * (work.value.shape.numel() / source.shape.numel())
        return [gradient.expand(size).contiguous()]


@rule(f"linalg_vector_norm{BY_ROWS}")
class NormOfEachRow(Rule):
    """The same of a norm, whose gradient is computed from the rows."""


@rule(*(f"{op}{OVER_ROWS}" for op in PLACE))
class OfAllRows(Rule):
    """The second step: one row, made of all rows of a small map, which has to be whole."""

    reads_maps = True

    def rows(self, value: Value, axis: int, span: Span) -> list[Span]:
        return [(0, value.inputs[0].shape[axis])]


def in_two_steps(graph: Graph, axis: int) -> Graph:
    """Return the graph with a step by rows before each operation over all rows of a map, which then reads that."""
    values: list[Value] = []
    for value in graph.values:
        values += [*_first_steps(value, axis), value]
    return replace(graph, values=needed_for(graph.outputs, values))


def _first_steps(value: Value, axis: int) -> list[Value]:
    """Return the values that come before an operation from now on, which reads the last of them."""
    dimensions = _dimensions(value)
    if dimensions is None:
        return []
    source = value.inputs[0]
    is_of_view = len(source.shape) == 3 and source.op in VIEWS and dimensions == (2,) and len(source.inputs) == 1
    if is_of_view:
        (source,) = source.inputs
        if value.inputs[0].shape[:2] != source.shape[:2]:
            return []
        dimensions = (2, 3, 4)
    others = tuple(dimension for dimension in dimensions if dimension != axis)
    shape = torch.Size([1 if dimension in others else length for dimension, length in enumerate(source.shape)])
    is_over_rows = len(source.shape) == 5 and axis in dimensions and source.shape[axis] > 1
    if not is_over_rows or LEAST * shape.numel() > source.shape.numel():
        return []
    op = value.op if value.op in PLACE else "mean"
    target: Any = {"mean": MEAN, "sum": torch.ops.aten.sum.dim_IntList}.get(op, value.target)
    args: tuple[Any, ...] = (source, 2, others, True) if op == "linalg_vector_norm" else (source, others, True)
    name = f"{value.name}{BY_ROWS}"
    steps = [Value(name, f"{op}{BY_ROWS}", target, args, {}, shape, source.dtype, value.layer)]
    if is_of_view:  # The view N C DHW of the source becomes one of its rows' results.
        shape = torch.Size([*shape[:2], shape[2:].numel()])
        reshape: Any = torch.ops.aten.reshape.default
        args = (steps[0], tuple(shape))
        steps.append(Value(f"{name} flat", "reshape", reshape, args, {}, shape, source.dtype, value.layer))
    if value.op == "avg_pool3d":  # Whose window would be larger than that.
        value.op = "mean"
        value.target = MEAN
        value.args = (source, (2, 3, 4), True)
    value.args = (steps[-1], *value.args[1:])
    value.inputs = (steps[-1],)
    if len(value.shape) == 5:
        value.op = f"{op}{OVER_ROWS}"
    return steps


def _dimensions(value: Value) -> tuple[int, ...] | None:
    """Return the dimensions over which an operation goes, of a map's five or a view's three; None if it is none."""
    if len(value.inputs) != 1 or value.kwargs or value.has_own_precision:
        return None
    source = value.inputs[0].shape
    if value.op in PLACE:
        if value.op == "linalg_vector_norm" and value.argument(1, 2) != 2:
            return None
        named = value.argument(PLACE[value.op])
        if isinstance(named, int):
            named = (named,)
        return tuple(sorted(dimension % len(source) for dimension in named or range(len(source))))
    is_plain = value.op == "avg_pool3d" and three(value.argument(3, 0)) == (0, 0, 0) and value.argument(6) is None
    has_one_window = is_plain and len(source) == 5 and three(value.argument(1)) == tuple(source[2:])
    is_adaptive = value.op == "adaptive_avg_pool3d" and value.shape[2:].numel() == 1
    return (2, 3, 4) if has_one_window or is_adaptive else None

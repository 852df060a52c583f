"""Means, sums and norms over all rows of a map, as of squeeze and excitation, in two steps.

The first is of each row, and has a rule as any operation on rows; what it gives is small, a map N C D 1 1, say. The
second is of that map. Both together are the operation: rows are as long as each other.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from unet3d.recomputing.graph import Graph, Value
from unet3d.recomputing.nodes import InPrecision
from unet3d.recomputing.rules import Gradients, Rule, Span, Work, rule
from unet3d.recomputing.rules.convolution import three

BY_ROWS = " by rows"  # the end of the first step's operation
OVER_ROWS = " over rows"  # the same of the second, where its result has five dimensions, too
LEAST = 4  # numbers of a map to those of its rows' results, or nothing is saved
MEAN = torch.ops.aten.mean.dim
PLACE = {"mean": 1, "sum": 1, "linalg_vector_norm": 2}  # of the argument that names the dimensions
VIEWS = ("flatten", "reshape", "view")


@rule(f"mean{BY_ROWS}", f"sum{BY_ROWS}")
class OfEachRow(Rule):
    """The mean or sum of each row; its gradient is that of the result, spread."""

    reads = ""

    def gradients(self, work: Work, known: list[Tensor], gradient: Tensor) -> Gradients:
        (source,) = work.value.inputs
        low, high = work.tile.inputs[0]
        size = list(source.shape)
        size[work.state.axis] = high - low
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
        values += _first_steps(value, axis)
        values.append(value)
    needed = _read(values, graph.outputs)
    return replace(graph, values=tuple(value for value in values if value in needed))


def _first_steps(value: Value, axis: int) -> list[Value]:
    """Return the values that come before an operation from now on, which reads the last of them."""
    dimensions = _dimensions(value)
    if dimensions is None:
        return []
    source = value.inputs[0]
    view = source if source.op in VIEWS else None
    if len(source.shape) == 3 and view is not None and dimensions == (2,) and len(view.inputs) == 1:
        (source,) = view.inputs
        if len(source.shape) != 5 or view.shape[:2] != source.shape[:2]:
            return []
        dimensions = (2, 3, 4)
    else:
        view = None
    others = [dimension for dimension in dimensions if dimension != axis]
    shape = [1 if dimension in others else length for dimension, length in enumerate(source.shape)]
    is_over_rows = len(source.shape) == 5 and axis in dimensions and source.shape[axis] > 1
    if not is_over_rows or LEAST * math.prod(shape) > source.shape.numel():
        return []
    steps = [_of_each_row(value, source, others, shape)]
    if view is not None:
        steps.append(_flat(value, steps[0]))
    _read_instead(value, steps[-1])
    return steps


def _dimensions(value: Value) -> tuple[int, ...] | None:
    """Return the dimensions over which an operation goes, of a map's five or a view's three; None if it is none."""
    if len(value.inputs) != 1 or value.kwargs or isinstance(value.target, InPrecision):
        return None
    source = value.inputs[0]
    if value.op in PLACE:
        if value.op == "linalg_vector_norm" and value.argument(1, 2) != 2:
            return None
        named = value.argument(PLACE[value.op])
        if isinstance(named, int):
            named = (named,)
        count = len(source.shape)
        return tuple(sorted(dimension % count for dimension in named or range(count)))
    if value.op == "adaptive_avg_pool3d" and value.shape[2:].numel() == 1:
        return 2, 3, 4
    if value.op == "avg_pool3d" and len(source.shape) == 5 and _is_of_whole_map(value, source):
        return 2, 3, 4
    return None


def _is_of_whole_map(value: Value, source: Value) -> bool:
    """Return whether a pooling has the map as its window."""
    is_plain = three(value.argument(3, 0)) == (0, 0, 0) and value.argument(6) is None
    return is_plain and three(value.argument(1)) == tuple(source.shape[2:])


def _of_each_row(value: Value, source: Value, dimensions: list[int], shape: Sequence[int]) -> Value:
    """Return the first step, which keeps all dimensions."""
    op = value.op if value.op in PLACE else "mean"
    target: Any = {"mean": MEAN, "sum": torch.ops.aten.sum.dim_IntList}.get(op, value.target)
    args: tuple[Any, ...] = (source, tuple(dimensions), True)
    if op == "linalg_vector_norm":
        args = (source, 2, *args[1:])
    name = f"{value.name}{BY_ROWS}"
    return Value(name, f"{op}{BY_ROWS}", target, args, {}, torch.Size(shape), source.dtype, value.layer)


def _flat(value: Value, rows: Value) -> Value:
    """Return the view of a first step that stands for a view N C DHW of its source."""
    shape = torch.Size([*rows.shape[:2], rows.shape[2:].numel()])
    target: Any = torch.ops.aten.reshape.default
    return Value(f"{rows.name} flat", "reshape", target, (rows, tuple(shape)), {}, shape, rows.dtype, value.layer)


def _read_instead(value: Value, source: Value) -> None:
    """Let an operation read the first step in the place of the map."""
    if value.op == "avg_pool3d":  # Whose window would be larger than that.
        value.op = "mean"
        value.target = MEAN
        value.args = (source, (2, 3, 4), True)
    value.args = (source, *value.args[1:])
    value.inputs = (source,)
    if len(value.shape) == 5:
        value.op = f"{value.op if value.op in PLACE else 'mean'}{OVER_ROWS}"


def _read(values: Sequence[Value], outputs: Sequence[Value]) -> set[Value]:
    """Return the values from which outputs are computed."""
    read = set(outputs)
    for value in reversed(values):
        if value in read:
            read.update(value.inputs)
    return read

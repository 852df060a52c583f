"""Rules of pointwise operations, of operations along any dimensions but the rows', and of dropout."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from unet3d.recomputing.graph import Value, Weight
from unet3d.recomputing.rules import RULES, Gradients, Rule, Work, dropout_factor

OF_TWO = ("add", "div", "mul", "pow", "sub")  # operations that match the shapes of two arguments
POINTWISE = (
    "abs celu clamp clone contiguous div elu exp gelu hardsigmoid hardswish hardtanh leaky_relu log_sigmoid mish mul "
    "neg pow prelu relu6 rsqrt selu sigmoid silu softplus sqrt square tanh"
)


class Pointwise(Rule):
    """An operation on each voxel alone; inputs of length 1 along an axis are spread over it."""

    def serves(self, value: Value, axis: int) -> bool:
        if not super().serves(value, axis) or not value.inputs:
            return False
        if value.op in OF_TWO and any(_has_rows(weight, axis) for weight in value.weights()):
            return False
        return all(_fits_rows(source.shape, value.shape, axis) for source in value.inputs)


def _fits_rows(shape: torch.Size, result: torch.Size, axis: int) -> bool:
    return shape[axis] in (1, result[axis])


def _has_rows(weight: Weight, axis: int) -> bool:
    """Return whether a weight has other numbers for each row, as a positional embedding has."""
    place = axis - 5  # from the last dimension on, by which shapes are matched
    return len(weight.shape) >= -place and weight.shape[place] > 1


class Along(Pointwise):
    """An operation along any dimensions but the rows': softmax over channels, a mean that stays a map."""

    def __init__(self, position: int, default: Any = None, keepdim: int | None = None) -> None:
        self.position = position  # of the argument that names the dimensions
        self.default = default
        self.keepdim = keepdim  # position of the argument that must be true

    def serves(self, value: Value, axis: int) -> bool:
        dimensions = value.kwargs.get("dim", value.argument(self.position, self.default))
        if dimensions is None or not super().serves(value, axis):
            return False
        if self.keepdim is not None and not value.argument(self.keepdim, value.kwargs.get("keepdim", False)):
            return False
        several = dimensions if isinstance(dimensions, tuple) else (dimensions,)
        return all(dimension % 5 != axis for dimension in several)


class Rectified(Pointwise):
    """ReLU or leaky ReLU; the result has the sign of the input, so that either may be kept."""

    reads = "result"

    def serves(self, value: Value, axis: int) -> bool:
        return super().serves(value, axis) and _slope(value) >= 0

    def run(self, work: Work, inputs: Sequence[Tensor]) -> Tensor:
        slope = _slope(work.value)
        if work.may_overwrite:
            return F.leaky_relu_(inputs[0], slope) if slope else F.relu_(inputs[0])
        return F.leaky_relu(inputs[0], slope) if slope else F.relu(inputs[0])

    def gradients(self, work: Work, known: list[Tensor], gradient: Tensor) -> Gradients:
        slope = _slope(work.value)
        result = known[0]
        aten = torch.ops.aten
        if not slope:
            if work.may_overwrite:
                return [aten.threshold_backward.grad_input(gradient, result, 0, grad_input=gradient)]
            return [aten.threshold_backward(gradient, result, 0)]
        if work.may_overwrite:
            return [aten.leaky_relu_backward.grad_input(gradient, result, slope, True, grad_input=gradient)]
        return [aten.leaky_relu_backward(gradient, result, slope, True)]


def _slope(value: Value) -> float:
    return 0.0 if value.op == "relu" else float(value.argument(1, 0.01))


class Sum(Pointwise):
    """A sum or difference of two maps, or of a map and a number; its gradient needs no map."""

    reads = ""

    def run(self, work: Work, inputs: Sequence[Tensor]) -> Tensor:
        value = work.value
        is_of_two = len(inputs) == 2 and inputs[0].shape == inputs[1].shape
        if work.may_overwrite and is_of_two and value.args[0] is value.inputs[0]:
            alpha = value.kwargs.get("alpha", 1)
            return inputs[0].add_(inputs[1], alpha=alpha if value.op == "add" else -alpha)
        return super().run(work, inputs)

    def gradients(self, work: Work, known: list[Tensor], gradient: Tensor) -> Gradients:
        value, state = work.value, work.state
        totals: dict[Value, Tensor] = {}
        for position, term in enumerate(value.args[:2]):
            if isinstance(term, int | float):
                continue
            factor = 1
            if position == 1:
                factor = value.kwargs.get("alpha", 1) * (1 if value.op == "add" else -1)
            of_term = gradient if factor == 1 else gradient * factor
            if isinstance(term, Weight):
                state.add_gradient(term, of_term.sum_to_size(state.weights[term.name].shape))
                continue
            rows = work.tile.inputs[value.inputs.index(term)]
            size = list(term.shape)
            size[state.axis] = rows[1] - rows[0]
            of_term = of_term.sum_to_size(size)
            totals[term] = totals[term] + of_term if term in totals else of_term
        return [totals.get(source) for source in value.inputs]


class Dropout(Pointwise):
    """Dropout by a mask that was drawn when the pass began."""

    reads = ""

    def run(self, work: Work, inputs: Sequence[Tensor]) -> Tensor:
        factor = self._factor(work)
        if factor is None:
            return inputs[0]
        return inputs[0].mul_(factor) if work.may_overwrite else inputs[0] * factor

    def gradients(self, work: Work, known: list[Tensor], gradient: Tensor) -> Gradients:
        factor = self._factor(work)
        if factor is None:
            return [gradient]
        return [gradient.mul_(factor) if work.may_overwrite else gradient * factor]

    def _factor(self, work: Work) -> Tensor | None:
        return dropout_factor(work.value, work.state, work.state.dtype, work.tile)


RULES |= {name: Pointwise() for name in POINTWISE.split()}
RULES |= {
    "relu": Rectified(),
    "leaky_relu": Rectified(),
    "add": Sum(),
    "sub": Sum(),
    "dropout": Dropout(),
    "feature_dropout": Dropout(),
    "softmax": Along(1),
    "log_softmax": Along(1),
    "mean": Along(1, keepdim=2),
    "sum": Along(1, keepdim=2),
}

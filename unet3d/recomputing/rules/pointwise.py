"""Rules of operations on each voxel or over any dimensions but the rows', of dropout, and of those that join maps."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from unet3d.recomputing.graph import DROPOUTS, Value, Weight
from unet3d.recomputing.rules import Gradients, Rule, Span, Work, dropout_factor, pad_along, rule, shape_of_rows
from unet3d.recomputing.state import State

OF_TWO = ("add", "div", "mul", "pow", "sub")  # operations that match the shapes of two arguments
POINTWISE = (
    "abs celu clamp clone contiguous div elu exp gelu hardsigmoid hardswish hardtanh leaky_relu log_sigmoid mish mul "
    "neg pow relu6 rsqrt selu sigmoid silu softplus sqrt square tanh"
)


@rule(*POINTWISE.split())
class Pointwise(Rule):
    """An operation on each voxel alone; inputs of length 1 along an axis are spread over it."""

    def serves(self, value: Value, axis: int) -> bool:
        if not super().serves(value, axis) or not value.inputs:
            return False
        # A weight may have other numbers for each row, as a positional embedding has.
        if value.op in OF_TWO and any(len(w.shape) >= 5 - axis and w.shape[axis - 5] > 1 for w in value.weights()):
            return False
        return all(source.shape[axis] in (1, value.shape[axis]) for source in value.inputs)


@rule("softmax", "log_softmax")
class OverDimensions(Pointwise):
    """An operation over any dimensions but the rows': softmax over channels, a mean that stays a map."""

    position = 1  # Position of the argument that names the dimensions.
    default: int | None = None
    keepdim: int | None = None  # position of the argument that must be true

    def serves(self, value: Value, axis: int) -> bool:
        dimensions = value.kwargs.get("dim", value.argument(self.position, self.default))
        if dimensions is None or not super().serves(value, axis):
            return False
        if self.keepdim is not None and not value.argument(self.keepdim, value.kwargs.get("keepdim", False)):
            return False
        if not isinstance(dimensions, tuple):
            dimensions = (dimensions,)
        return all(dimension % 5 != axis for dimension in dimensions)


@rule("mean", "sum")
class MeanOrSum(OverDimensions):
    """A mean or sum that keeps the dimensions over which it goes."""

    keepdim = 2


@rule("relu", "leaky_relu")
class Rectified(Pointwise):
    """ReLU or leaky ReLU; the result has the sign of the input, so that either may be kept."""

    reads = "result"

    def serves(self, value: Value, axis: int) -> bool:
        return super().serves(value, axis) and _slope(value) >= 0

    def run(self, work: Work, inputs: Sequence[Tensor]) -> Tensor:
        slope = _slope(work.value)
        rows = inputs[0]
        if slope == 0:
            return F.relu(rows, inplace=work.may_overwrite)
        return F.leaky_relu(rows, slope, inplace=work.may_overwrite)

    def gradients(self, work: Work, known: list[Tensor], gradient: Tensor) -> Gradients:
        slope = _slope(work.value)
        settings: tuple[float, ...] = (slope, True)  # The result is given, not the input.
        backward = torch.ops.aten.leaky_relu_backward
        if slope == 0:
            settings = (0,)
            backward = torch.ops.aten.threshold_backward
        if work.may_overwrite:
            return [backward.grad_input(gradient, known[0], *settings, grad_input=gradient)]
        return [backward(gradient, known[0], *settings)]


def _slope(value: Value) -> float:
    return 0.0 if value.op == "relu" else float(value.argument(1, 0.01))


@rule("prelu")
class PReLU(Pointwise):
    """ReLU with a slope that is learnt, of all channels or of each."""

    def gradients(self, work: Work, known: list[Tensor], gradient: Tensor) -> Gradients:
        value, state, *_ = work
        rows = known[0]
        weight: Weight = value.args[1]
        slope = state.weight(weight).view(-1, 1, 1, 1)
        if not state.on_cpu:
            of_rows, of_slope = torch.ops.aten._prelu_kernel_backward(gradient, rows, slope.unsqueeze(0))
            self._add_gradient(weight, of_slope, state)
            return [of_rows]
        # Not by torch's kernel, which computes one number at a time.
        positive = torch.ops.aten.threshold_backward(gradient, rows, 0)
        negative = gradient.sub_(positive) if work.may_overwrite else gradient - positive
        if state.wants(weight):
            self._add_gradient(weight, negative * rows, state)
        return [negative.mul_(slope).add_(positive)]

    def _add_gradient(self, weight: Weight, of_slope: Tensor, state: State) -> None:
        over = None if weight.shape.numel() == 1 else (0, 2, 3, 4)
        state.add_gradient(weight, of_slope.sum(over))


@rule("add", "sub")
class Sum(Pointwise):
    """A sum or difference of two maps, or of a map and a number; its gradient needs no map."""

    reads = ""

    def run(self, work: Work, inputs: Sequence[Tensor]) -> Tensor:
        has_two_maps = len(inputs) == 2 and inputs[0].shape == inputs[1].shape
        if work.may_overwrite and has_two_maps:
            return inputs[0].add_(inputs[1], alpha=self._factor_of_second(work.value))
        return super().run(work, inputs)

    def gradients(self, work: Work, known: list[Tensor], gradient: Tensor) -> Gradients:
        value = work.value
        totals: dict[Value, Tensor] = {}
        for position, term in enumerate(value.args[:2]):
            if isinstance(term, int | float):
                continue
            factor = self._factor_of_second(value) if position == 1 else 1
            of_term = gradient if factor == 1 else gradient * factor
            if isinstance(term, Weight):
                of_weight = of_term.sum_to_size(term.shape)
                if of_weight.numel() == of_term.numel():  # It lies in the gradient's memory, which may be written over.
                    of_weight = of_weight.clone()
                work.state.add_gradient(term, of_weight)
                continue
            span = work.sources[value.inputs.index(term)]
            of_term = of_term.sum_to_size(shape_of_rows(term, work.state.axis, span))
            totals[term] = totals[term] + of_term if term in totals else of_term
        return [totals.get(source) for source in value.inputs]

    def _factor_of_second(self, value: Value) -> float:
        alpha: float = value.kwargs.get("alpha", 1)
        return alpha if value.op == "add" else -alpha


@rule(*DROPOUTS)
class Dropout(Pointwise):
    """Dropout by numbers that were drawn when the pass began."""

    reads = ""

    def run(self, work: Work, inputs: Sequence[Tensor]) -> Tensor:
        factor = dropout_factor(work.value, work.state, work.state.dtype, work.span)
        return multiplied(inputs[0], factor, work.may_overwrite)

    def gradients(self, work: Work, known: list[Tensor], gradient: Tensor) -> Gradients:
        return [self.run(work, [gradient])]


def multiplied(rows: Tensor, factor: Tensor, may_overwrite: bool) -> Tensor:
    """Return a product, in the memory of the rows where that may be written over."""
    if may_overwrite:
        return rows.mul_(factor)
    return rows * factor


@rule("cat")
class Cat(Pointwise):
    """Concatenation along any dimension but the rows'."""

    reads = ""
    splits_gradient = True

    def serves(self, value: Value, axis: int) -> bool:
        parts = value.args[0]
        is_of_maps = all(isinstance(part, Value) for part in parts)
        if not is_of_maps or len(set(parts)) < len(parts):  # A map that is joined with itself has one gradient.
            return False
        return value.argument(1, 0) % 5 != axis and super().serves(value, axis)

    def gradients(self, work: Work, known: list[Tensor], gradient: Tensor) -> Gradients:
        dimension = work.value.argument(1, 0) % 5
        lengths = [source.shape[dimension] for source in work.value.inputs]
        return list(torch.split(gradient, lengths, dimension))


@rule("chunk", "split")
class Parts(OverDimensions):
    """Parts of a map along any dimension but the rows'."""

    position = 2
    default = 0
    splits_gradient = True


@rule("slice", "narrow")
class Slice(Rule):
    """A part of a map, with a step of 1."""

    reads = ""

    def serves(self, value: Value, axis: int) -> bool:
        return value.argument(4, 1) == 1 and super().serves(value, axis)

    def rows(self, value: Value, axis: int, span: Span) -> list[Span]:
        dimension, start = self._start(value)
        if dimension != axis:
            return [span]
        first, end = span
        return [(first + start, end + start)]

    def run(self, work: Work, inputs: Sequence[Tensor]) -> Tensor:
        dimension, start = self._start(work.value)
        if dimension == work.state.axis:
            return inputs[0]
        return inputs[0].narrow(dimension, start, work.value.shape[dimension])

    def gradients(self, work: Work, known: list[Tensor], gradient: Tensor) -> Gradients:
        value = work.value
        dimension, start = self._start(value)
        if dimension == work.state.axis:
            return [gradient]
        length = value.inputs[0].shape[dimension]
        behind = length - start - value.shape[dimension]
        return [pad_along(gradient, dimension, start, behind)]

    def _start(self, value: Value) -> tuple[int, int]:
        """Return the dimension that is cut, and the place of the first part that stays."""
        dimension = value.argument(1, 0) % 5
        start, _, _ = slice(value.argument(2), None).indices(value.inputs[0].shape[dimension])
        return dimension, start


@rule("pad")
class Pad(Pointwise):
    """Padding along any axes but the rows', in any mode."""

    def serves(self, value: Value, axis: int) -> bool:
        place = 2 * (4 - axis)  # There are two numbers for each dimension, from the last on.
        return not any(value.argument(1)[place : place + 2]) and super().serves(value, axis)


@rule("repeat")
class Repeat(Pointwise):
    """Repetition of a map along any dimensions but the rows'."""

    def serves(self, value: Value, axis: int) -> bool:
        repeats = value.argument(1)
        return len(repeats) == 5 and repeats[axis] == 1 and super().serves(value, axis)

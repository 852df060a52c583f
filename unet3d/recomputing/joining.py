"""Rules of operations that join maps, or take a part of one: concatenation, slices, padding, repetition."""

from collections.abc import Sequence

import torch
from torch import Tensor

from unet3d.recomputing.graph import Value
from unet3d.recomputing.pointwise import Along, Pointwise
from unet3d.recomputing.rules import RULES, Gradients, Rule, Span, Work, pad_along


class Cat(Pointwise):
    """Concatenation along any dimension but the rows'."""

    reads = ""

    def serves(self, value: Value, axis: int) -> bool:
        parts = value.args[0]
        if not all(isinstance(part, Value) for part in parts):
            return False
        if len(set(parts)) < len(parts):
            return False  # a map that is joined with itself
        dimension = value.argument(1, 0) % 5
        return dimension != axis and super().serves(value, axis)

    def gradients(self, work: Work, known: list[Tensor], gradient: Tensor) -> Gradients:
        dimension = work.value.argument(1, 0) % 5
        lengths = [source.shape[dimension] for source in work.value.inputs]
        return list(torch.split(gradient, lengths, dimension))


class Slice(Rule):
    """A part of a map, with a step of 1."""

    reads = ""

    def serves(self, value: Value, axis: int) -> bool:
        step = value.argument(4, 1)
        return step == 1 and super().serves(value, axis)

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
        start = value.argument(2) or 0
        length = value.inputs[0].shape[dimension]
        if start < 0:
            start += length
        start = min(max(start, 0), length)
        return dimension, start


class Pad(Pointwise):
    """Padding along any axes but the rows', in any mode."""

    def serves(self, value: Value, axis: int) -> bool:
        pads = value.argument(1)
        # Two numbers for each dimension, from the last on.
        place = 2 * (4 - axis)
        pads_of_rows = pads[place : place + 2]
        if any(pads_of_rows):
            return False
        return super().serves(value, axis)


class Repeat(Pointwise):
    """Repetition of a map along any dimensions but the rows'."""

    def serves(self, value: Value, axis: int) -> bool:
        repeats = value.argument(1)
        if len(repeats) != 5 or repeats[axis] != 1:
            return False
        return super().serves(value, axis)


RULES |= {
    "cat": Cat(),
    "slice": Slice(),
    "narrow": Slice(),
    "pad": Pad(),
    "repeat": Repeat(),
    "chunk": Along(2, default=0),
    "split": Along(2, default=0),
}

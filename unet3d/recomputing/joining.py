"""Rules of operations that join maps, or take a part of one: concatenation, slices, padding, repetition."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from unet3d.recomputing.graph import Value
from unet3d.recomputing.pointwise import Along, Pointwise
from unet3d.recomputing.rules import RULES, Gradients, Rule, Span, Work


class Cat(Pointwise):
    """Concatenation along any dimension but the rows'."""

    reads = ""

    def serves(self, value: Value, axis: int) -> bool:
        parts = value.args[0]
        is_of_maps = all(isinstance(part, Value) for part in parts) and len(set(parts)) == len(parts)
        return is_of_maps and super().serves(value, axis) and value.argument(1, 0) % 5 != axis

    def gradients(self, work: Work, known: list[Tensor], gradient: Tensor) -> Gradients:
        dimension = work.value.argument(1, 0) % 5
        lengths = [source.shape[dimension] for source in work.value.inputs]
        return list(torch.split(gradient, lengths, dimension))


class Slice(Rule):
    """A part of a map, with a step of 1."""

    reads = ""

    def serves(self, value: Value, axis: int) -> bool:
        return super().serves(value, axis) and value.argument(4, 1) == 1

    def rows(self, value: Value, axis: int, span: Span) -> list[Span]:
        dimension, start = self._start(value)
        offset = start if dimension == axis else 0
        return [(span[0] + offset, span[1] + offset)]

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
        padding = [0, 0] * (4 - dimension) + [start, behind]
        return [F.pad(gradient, padding)]

    def _start(self, value: Value) -> tuple[int, int]:
        dimension = value.argument(1, 0) % 5
        start = value.argument(2) or 0
        length = value.inputs[0].shape[dimension]
        if start < 0:
            start += length
        return dimension, min(max(start, 0), length)


class Pad(Pointwise):
    """Padding along any axes but the rows', in any mode."""

    def serves(self, value: Value, axis: int) -> bool:
        pads = value.argument(1)
        of_rows = pads[2 * (4 - axis) : 2 * (4 - axis) + 2]
        return super().serves(value, axis) and not any(of_rows)


class Repeat(Pointwise):
    """Repetition of a map along any dimensions but the rows'."""

    def serves(self, value: Value, axis: int) -> bool:
        repeats = value.argument(1)
        return super().serves(value, axis) and len(repeats) == 5 and repeats[axis] == 1


RULES |= {
    "cat": Cat(),
    "slice": Slice(),
    "narrow": Slice(),
    "pad": Pad(),
    "repeat": Repeat(),
    "chunk": Along(2, default=0),
    "split": Along(2, default=0),
}

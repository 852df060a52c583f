"""The arguments of convolutions and transposed convolutions."""

from collections.abc import Sequence
from typing import NamedTuple

from unet3d.recomputing.graph import Value, Weight

Three = tuple[int, int, int]


class AxisSettings(NamedTuple):
    """The arguments of a convolution along one axis."""

    kernel: int
    stride: int
    padding: int
    dilation: int

    @property
    def reach(self) -> int:
        """Number of rows from the kernel's first to its last."""
        return self.dilation * (self.kernel - 1) + 1


class ConvolutionSettings(NamedTuple):
    """The arguments of a convolution, one number for each axis D H W."""

    weight: Weight
    bias: Weight | None
    kernel: Three
    stride: Three
    padding: Three
    dilation: Three
    groups: int
    output_padding: Three = (0, 0, 0)

    def along(self, axis: int) -> AxisSettings:
        """Return the arguments along an axis of N C D H W."""
        place = axis - 2
        return AxisSettings(
            kernel=self.kernel[place],
            stride=self.stride[place],
            padding=self.padding[place],
            dilation=self.dilation[place],
        )


def convolution(value: Value) -> ConvolutionSettings:
    """Return the settings of a conv3d."""
    return _settings(value, dilation=value.argument(5, 1), groups=value.argument(6, 1))


def transposed(value: Value) -> ConvolutionSettings:
    """Return the settings of a conv_transpose3d."""
    settings = _settings(value, dilation=value.argument(7, 1), groups=value.argument(6, 1))
    return settings._replace(output_padding=three(value.argument(5, 0)))


def _settings(value: Value, dilation: int | Sequence[int], groups: int) -> ConvolutionSettings:
    """Return the settings whose arguments have the same places in both operations, with the others."""
    weight = value.args[1]
    return ConvolutionSettings(
        weight=weight,
        bias=value.argument(2),
        kernel=three(weight.shape[2:]),
        stride=three(value.argument(3, 1)),
        padding=three(value.argument(4, 0)),
        dilation=three(dilation),
        groups=groups,
    )


def three(numbers: int | Sequence[int]) -> Three:
    """Return one number for each axis D H W."""
    if isinstance(numbers, int):
        return (numbers, numbers, numbers)
    if len(numbers) == 1:
        return (numbers[0], numbers[0], numbers[0])
    return (numbers[0], numbers[1], numbers[2])

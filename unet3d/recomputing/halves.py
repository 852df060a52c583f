"""Few rows of one image as two images of half the rows.

On the CPU torch convolves one image of few rows by a kernel that is several times slower than oneDNN's, by which it
convolves two images, however small.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from unet3d.model.half_precision import ONEDNN
from unet3d.recomputing.rules import pad_along

FEWEST_CHANNELS = 4  # of the input: of fewer torch's own kernel is not slower
HALF_PRECISION = 2  # bytes of a number, which oneDNN takes whatever the size


class Halves(NamedTuple):
    """How rows of a convolution's result, and of the input that they are made from, are cut into two images."""

    axis: int
    rows: int  # of the result
    stride: int
    reach: int

    @property
    def half(self) -> int:
        """Number of rows of an image's result; of an odd number, the last row of the second is too many."""
        return (self.rows + 1) // 2

    @property
    def surplus(self) -> int:
        """Number of rows that are too many."""
        return 2 * self.half - self.rows

    def input_images(self, x: Tensor) -> Tensor:
        """Return the input, with its padding, as two images that share the rows between the halves."""
        length = (self.half - 1) * self.stride + self.reach
        first = x.narrow(self.axis, 0, length)
        start = self.half * self.stride
        if not self.surplus:
            return torch.cat([first, x.narrow(self.axis, start, length)])
        second = x.narrow(self.axis, start, length - self.stride)
        return torch.cat([first, pad_along(second, self.axis, 0, self.stride)])

    def result_images(self, y: Tensor) -> Tensor:
        """Return the result, or its gradient, as two images."""
        if self.surplus:
            y = pad_along(y, self.axis, 0, self.surplus)
        return torch.cat(y.split(self.half, self.axis))

    def result(self, images: Tensor) -> Tensor:
        """Return the result of two images as one."""
        rows = torch.cat(images.split(1), self.axis)
        return rows.narrow(self.axis, 0, self.rows)

    def input_gradient(self, images: Tensor) -> Tensor:
        """Return the gradient of the input from the gradients of the two images."""
        first, second = images.split(1)
        start = self.half * self.stride
        length = first.shape[self.axis] - self.surplus * self.stride
        total = pad_along(first, self.axis, 0, start + length - first.shape[self.axis])
        total.narrow(self.axis, start, length).add_(second.narrow(self.axis, 0, length))
        return total


def is_slow(rows: Tensor, more: int, axis: int) -> bool:
    """Return whether torch has a slow kernel for these rows of an input and `more` rows of padding."""
    images, channels, *size = rows.shape
    size[axis - 2] += more
    is_small = channels * size[0] * size[1] <= ONEDNN
    return images == 1 and is_small and channels >= FEWEST_CHANNELS and rows.element_size() > HALF_PRECISION

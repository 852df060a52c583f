"""An affine function of each channel, and sums of each channel, of maps on a GPU.

torch's kernels of batch normalisation give a channel one block: few channels of many voxels leave most of a GPU idle.
A large contiguous map is therefore viewed as one of more channels: pieces of each, to which the same numbers belong.
"""

from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor

from unet3d.recomputing.state import State

LARGE = 2**24  # numbers from which on a kernel of few blocks takes longer than one more launch
BLOCKS = 1024  # that keep all multiprocessors of a GPU at work


@dataclass(eq=False)
class Affine:
    """The function (x - mean) * scale + shift of each channel; each N or 1, C, in the type of statistics."""

    mean: Tensor
    scale: Tensor
    shift: Tensor | None  # None: 0
    repeated: dict[tuple[str, int, int], Tensor] = field(default_factory=dict)  # by name, images and pieces

    def apply(self, x: Tensor, state: State) -> Tensor:
        """Return the function of N C D H W, contiguous: computed in the type of statistics, rounded to that of x.

        Rows with gaps between them are read as they are, by a kernel to which channels are nothing special.
        """
        images, count = len(x), 1
        if x.is_contiguous():
            count = pieces(x)
        mean = self._of_pieces("mean", images, count)
        scale = self._of_pieces("scale", images, count)
        shift = constant(0, mean, state)
        if self.shift is not None:
            shift = self._of_pieces("shift", images, count)
        return _normalised(x, mean, scale, shift, state)

    def gradient(self, of_result: Tensor, state: State) -> Tensor:
        """Return the gradient of x from a contiguous one of the result."""
        scale = self._of_pieces("scale", len(of_result), pieces(of_result))
        zeros = constant(0, scale, state)
        return _normalised(of_result, zeros, scale, zeros, state)

    def sums(self, gradient: Tensor, x: Tensor, state: State) -> tuple[Tensor, Tensor]:
        """Return sums of a gradient N C D H W, and of its product with x - mean: N C, and of each channel's pieces.

        Both are contiguous.
        """
        images, channels = x.shape[:2]
        count = pieces(x)
        mean = self._of_pieces("mean", images, count)
        ones = constant(1, mean, state)
        flat = (1, mean.numel(), -1)
        _, of_scale, of_bias = torch.ops.aten.native_batch_norm_backward(
            gradient.view(flat),
            x.view(flat),
            ones,
            mean,
            ones,
            mean,  # as saved: CUDA's kernel reads them
            ones,
            False,
            0.0,
            [False, True, True],
        )
        shape = (images, channels, count)
        return of_bias.view(shape), of_scale.view(shape)

    def _of_pieces(self, name: str, images: int, count: int) -> Tensor:
        """Return a term for each piece of each channel of all images."""
        key = (name, images, count)
        if key not in self.repeated:
            term: Tensor = getattr(self, name)
            spread = term[..., None].expand(images, -1, count)
            self.repeated[key] = spread.reshape(-1)
        return self.repeated[key]


def _normalised(x: Tensor, mean: Tensor, scale: Tensor, shift: Tensor, state: State) -> Tensor:
    """Return (x - mean) * scale + shift of N C D H W, whose channels or their pieces these terms are of."""
    rows = (-1,) if x.is_contiguous() else x.shape[2:]
    flat = x.reshape(1, mean.numel(), *rows)
    result: Tensor = torch.ops.aten.native_batch_norm(
        flat,
        scale,
        shift,
        mean,
        constant(1, mean, state),
        False,  # by these statistics
        0.0,
        0.0,
    )[0]
    return result.view(x.shape)


def is_large(x: Tensor, state: State) -> bool:
    """Return whether rows lie on a GPU and are so many that a kernel of few blocks takes longer than a launch."""
    return not state.on_cpu and x.numel() >= LARGE


def pieces(x: Tensor) -> int:
    """Return the number of pieces of each channel of N C D H W, all of one length; 1 where channels fill a GPU."""
    if x.numel() < LARGE:
        return 1
    images, channels = x.shape[:2]
    return _divisor(x[0, 0].numel(), -(-BLOCKS // (images * channels)))


@cache
def _divisor(number: int, least: int) -> int:
    """Return the smallest divisor of a number between another and sixteen times that; 1 where there is none."""
    return next((divisor for divisor in range(least, 16 * least) if number % divisor == 0), 1)


def constant(number: int, like: Tensor, state: State) -> Tensor:
    """Return a tensor of the shape of another and of one number, made once in a pass on a GPU."""
    filled: Tensor = state.once((number, like.shape), lambda: torch.full_like(like, number))
    return filled

"""Whole volumes through a sliding window of the training patch's size; volumes and label maps of any size.

Padded networks overlap their windows and weigh them by a Gaussian. Valid ones see mirrored context beyond the border
(the paper's overlap-tile strategy) and their outputs tile the volume without overlap: each voxel is computed as it
would be in one piece.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from unet3d.config import Model
from unet3d.model import geometry
from unet3d.policy import MemoryPolicy


@dataclass(frozen=True)
class Predictor:
    """A model with how to slide it: `window` D H W (voxels), share of `overlap`, averaging over `mirror` axes."""

    model: nn.Sequential
    options: Model
    policy: MemoryPolicy
    window: tuple[int, int, int]
    overlap: float = 0.5
    mirror: tuple[int, ...] = ()

    @torch.no_grad()
    def probabilities(self, image: Tensor) -> Tensor:
        """Image C X Y Z (normalised) to class probabilities K X Y Z, float32, on the CPU."""
        was_training = self.model.training
        self.model.eval()
        try:
            return self._slide(image).softmax(0)
        finally:
            self.model.train(was_training)

    def _slide(self, image: Tensor) -> Tensor:
        device = next(self.model.parameters()).device
        out_window = geometry.output_size(self.window, self.options)
        overlap = self.overlap if out_window == self.window else 0.0
        padded, size, offset = _pad(image, self.window, out_window)
        weight = gaussian(out_window) if overlap else torch.ones(out_window)
        total: Tensor | None = None
        weights = torch.zeros(size)
        for start in starts(size, out_window, overlap):
            tile = padded[(slice(None), *(slice(s, s + w) for s, w in zip(start, self.window, strict=True)))]
            logits = self._logits(tile[None].to(device)).cpu()
            total = logits.new_zeros(len(logits), *size) if total is None else total
            place = tuple(slice(s, s + w) for s, w in zip(start, out_window, strict=True))
            total[(slice(None), *place)] += logits * weight
            weights[place] += weight
        assert total is not None
        inside = tuple(slice(o, o + n) for o, n in zip(offset, image.shape[1:], strict=True))
        return total[(slice(None), *inside)] / weights[inside]

    def _logits(self, tile: Tensor) -> Tensor:
        """Mean logits K D H W over all combinations of the mirrored axes."""
        total: Tensor | None = None
        flips = list(_subsets(self.mirror))
        for axes in flips:
            dims = [axis + 2 for axis in axes]
            logits = self.policy.forward(self.model, tile.flip(dims)).float().flip(dims)[0]
            total = logits if total is None else total + logits
        assert total is not None
        return total / len(flips)


def _pad(
    image: Tensor, window: Sequence[int], out_window: Sequence[int]
) -> tuple[Tensor, tuple[int, ...], tuple[int, ...]]:
    """The image with room for one window at least, the size of the output over it, and where the volume lies in that.

    Zeros (the mean) around a volume smaller than the window; mirrored context for valid convolutions.
    """
    sizes = image.shape[1:]
    missing = [max(0, o - n) for n, o in zip(sizes, out_window, strict=True)]
    border = [(w - o) // 2 for w, o in zip(window, out_window, strict=True)]
    before = [m // 2 for m in missing]
    widths = [(b + e, b + m - e) for b, m, e in zip(border, missing, before, strict=True)]
    room = [(0, 0), *widths]
    padded = np.pad(image.numpy(), room, mode="reflect") if any(border) else np.pad(image.numpy(), room)
    return torch.from_numpy(padded), tuple(n + m for n, m in zip(sizes, missing, strict=True)), tuple(before)


def starts(size: Sequence[int], window: Sequence[int], overlap: float) -> Iterator[tuple[int, ...]]:
    """Corners of windows that cover `size`, evenly spread, sharing at least `overlap` of their length."""
    axes = []
    for n, w in zip(size, window, strict=True):
        count = int(np.ceil((n - w) / (w * (1 - overlap)))) + 1
        axes.append([round(i * (n - w) / max(1, count - 1)) for i in range(count)])
    return itertools.product(*axes)


def gaussian(window: Sequence[int]) -> Tensor:
    """Weights of a window, falling towards its border (sigma an eighth of the length, as in nnU-Net), never 0."""
    weight = torch.ones(tuple(window))
    for axis, n in enumerate(window):
        x = (torch.arange(n) - (n - 1) / 2) / (n / 8)
        weight = weight * torch.exp(-(x**2) / 2).clamp(min=1e-3).reshape([-1 if a == axis else 1 for a in range(3)])
    return weight


def _subsets(axes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    return itertools.chain.from_iterable(itertools.combinations(axes, n) for n in range(len(axes) + 1))

"""Whole volumes through a sliding window of the training patch's size; volumes and label maps of any size.

Windows of padded networks overlap and are weighted by a Gaussian. Those of valid networks see mirrored context beyond
the border (the paper's overlap-tile strategy) and begin on multiples of the network's total stride, so that each voxel
is computed as it would be in one piece, unless a normalisation takes its statistics from the window.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from unet3d import progress
from unet3d.config import Model
from unet3d.model import geometry
from unet3d.train.policy import MemoryPolicy


@dataclass(frozen=True)
class Predictor:
    """Networks of the same options, whose logits are averaged, and how to slide them over a volume."""

    models: tuple[nn.Module, ...]
    options: Model
    policy: MemoryPolicy
    window: tuple[int, int, int]  # D H W, voxels
    overlap: float = 0.5  # least share of a window that its neighbour covers too
    mirror: tuple[int, ...] = ()  # axes; logits are averaged over all combinations of their mirrorings

    @torch.no_grad()
    def probabilities(self, image: Tensor) -> Tensor:
        """Image C X Y Z (normalised) to class probabilities K X Y Z, float32, on the CPU."""
        were_training = [model.training for model in self.models]
        for model in self.models:
            model.eval()
        try:
            logits = self._slide(image)
            for plane in logits.unbind(1):  # in place: a large volume of many classes is gigabytes
                plane.copy_(plane.softmax(0))
            return logits
        finally:
            for model, was_training in zip(self.models, were_training, strict=True):
                model.train(was_training)

    def _slide(self, image: Tensor) -> Tensor:
        device, sizes = next(self.models[0].parameters()).device, image.shape[1:]
        out_window = geometry.output_size(self.window, self.options)
        strides = [math.prod(axis) for axis in zip((1, 1, 1), *geometry.strides(self.options), strict=True)]
        if self.options.padding == "valid":
            corners, weight = aligned_corners(sizes, out_window, strides), torch.ones(out_window)
        else:
            corners, weight = even_corners(sizes, self.window, self.overlap), gaussian(out_window)
        size = [max(axis) + w for axis, w in zip(corners, out_window, strict=True)]
        padded, offset = _pad(image, size, self.window, out_window, strides)
        weights = torch.zeros(size)
        total: Tensor | None = None
        for corner in progress.parts([*itertools.product(*corners)]):
            logits = self.window_logits(padded[_box(corner, self.window)][None].to(device)).cpu()
            total = logits.new_zeros(len(logits), *size) if total is None else total
            total[_box(corner, out_window)] += logits * weight
            weights[_box(corner, out_window)[1:]] += weight
        assert total is not None
        inside = _box(offset, sizes)
        return total[inside].div_(weights[inside[1:]])

    def window_logits(self, tile: Tensor) -> Tensor:
        """Mean logits K D H W of a window 1 C D H W, over the networks and all combinations of the mirrored axes."""
        dims = [axis + 2 for axis in self.mirror]
        subsets = [subset for n in range(len(dims) + 1) for subset in itertools.combinations(dims, n)]
        total: Tensor | None = None
        for model, flipped in itertools.product(self.models, subsets):
            logits = self.policy.forward(model, tile.flip(flipped)).float().flip(flipped)[0]
            total = logits if total is None else total + logits
        assert total is not None
        return total / (len(self.models) * len(subsets))


def _box(corner: Sequence[int], size: Sequence[int]) -> tuple[slice, ...]:
    """All channels of a box."""
    return (slice(None), *(slice(start, start + n) for start, n in zip(corner, size, strict=True)))


def even_corners(sizes: Sequence[int], window: Sequence[int], overlap: float) -> list[list[int]]:
    """Where windows begin along each axis (voxels): evenly spread, sharing at least `overlap` of a window."""
    found = []
    for n, w in zip(sizes, window, strict=True):
        gaps = max(0, math.ceil((n - w) / (w * (1 - overlap))))
        found.append([round(i * (n - w) / max(1, gaps)) for i in range(gaps + 1)])
    return found


def aligned_corners(sizes: Sequence[int], out_window: Sequence[int], strides: Sequence[int]) -> list[list[int]]:
    """Where windows begin along each axis: on multiples of the total stride, else pooling would group other voxels.

    Evenly spread, so that windows reach beyond the volume by less than a stride: training saw none further out.
    """
    found = []
    for n, w, total_stride in zip(sizes, out_window, strides, strict=True):
        stride = min(total_stride, w)  # a shorter output cannot be aligned
        last, most = math.ceil(max(0, n - w) / stride), w // stride  # the last corner and the largest gap, in strides
        gaps = math.ceil(last / most)
        found.append([i * last // max(1, gaps) * stride for i in range(gaps + 1)])
    return found


def _pad(
    image: Tensor, size: Sequence[int], window: Sequence[int], out_window: Sequence[int], strides: Sequence[int]
) -> tuple[Tensor, tuple[int, ...]]:
    """The image with room for windows over an output of `size`, and where in that output the volume begins.

    A padded network gets zeros (the mean) on all sides of a volume smaller than its window, a valid one mirrored
    context. There a volume shorter than an output lies in the middle of it, as in training, along axes without stride:
    along others, pooling would group other voxels than in a larger window.
    """
    has_border = any(w - o > 1 for w, o in zip(window, out_window, strict=True))
    widths, ahead = [(0, 0)], []
    for n, total, w, o, stride in zip(image.shape[1:], size, window, out_window, strides, strict=True):
        ahead.append(0 if has_border and (n >= o or stride > 1) else (total - n) // 2)
        before = (w - o) // 2 + ahead[-1]
        widths.append((before, total - n + w - o - before))  # w - o is odd where convolutions stride
    padded = np.pad(image.numpy(), widths, mode="reflect") if has_border else np.pad(image.numpy(), widths)
    return torch.from_numpy(padded), tuple(ahead)


def gaussian(window: Sequence[int]) -> Tensor:
    """Weights of a window, falling towards its border (sigma an eighth of the length, as in nnU-Net), never 0."""
    weight = torch.ones(())
    for n in window:
        x = (torch.arange(n) - (n - 1) / 2) / (n / 8)
        weight = weight[..., None] * torch.exp(-(x**2) / 2).clamp(min=1e-3)
    return weight

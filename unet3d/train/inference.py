"""Whole volumes through a sliding window of the training patch's size; volumes and label maps of any size.

Padded networks overlap their windows and weigh them by a Gaussian. Valid ones see mirrored context beyond the border
(the paper's overlap-tile strategy); their windows start on multiples of the network's total stride, so that each voxel
is computed as it would be in one piece, unless a normalisation takes its statistics from the window.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
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
    """Networks with how to slide them: `window` D H W (voxels), share of `overlap`, averaging over `mirror` axes.

    Several networks are of the same options; their logits are averaged.
    """

    models: tuple[nn.Module, ...]
    options: Model
    policy: MemoryPolicy
    window: tuple[int, int, int]
    overlap: float = 0.5
    mirror: tuple[int, ...] = ()

    @torch.no_grad()
    def probabilities(self, image: Tensor) -> Tensor:
        """Image C X Y Z (normalised) to class probabilities K X Y Z, float32, on the CPU."""
        were_training = [model.training for model in self.models]
        for model in self.models:
            model.eval()
        try:
            logits = self._slide(image)
            for plane in logits.unbind(1):  # in place: of many classes, a large volume is gigabytes
                plane.copy_(plane.softmax(0))
            return logits
        finally:
            for model, was_training in zip(self.models, were_training, strict=True):
                model.train(was_training)

    def _slide(self, image: Tensor) -> Tensor:
        device = next(self.models[0].parameters()).device
        out_window = geometry.output_size(self.window, self.options)
        is_valid = self.options.padding == "valid"
        sizes = image.shape[1:]
        corners = (
            _aligned(sizes, out_window, self.options) if is_valid else _overlapping(sizes, self.window, self.overlap)
        )
        size = [max(axis) + w for axis, w in zip(corners, out_window, strict=True)]
        unstrided = [all(s[axis] == 1 for s in geometry.strides(self.options)) for axis in range(3)]
        padded, offset = _pad(image, size, self.window, out_window, unstrided)
        weight = torch.ones(out_window) if is_valid else gaussian(out_window)
        total: Tensor | None = None
        weights = torch.zeros(size)
        for corner in progress.parts([*itertools.product(*corners)]):
            tile = padded[_box(corner, self.window)]
            logits = self.window_logits(tile[None].to(device)).cpu()
            total = logits.new_zeros(len(logits), *size) if total is None else total
            total[_box(corner, out_window)] += logits * weight
            weights[_box(corner, out_window)[1:]] += weight
        assert total is not None
        inside = _box(offset, sizes)
        return total[inside].div_(weights[inside[1:]])

    def window_logits(self, tile: Tensor) -> Tensor:
        """Mean logits K D H W of a window 1 C D H W, over the networks and all combinations of the mirrored axes."""
        total: Tensor | None = None
        views = [(model, axes) for model in self.models for axes in _subsets(self.mirror)]
        for model, axes in views:
            dims = [axis + 2 for axis in axes]
            logits = self.policy.forward(model, tile.flip(dims)).float().flip(dims)[0]
            total = logits if total is None else total + logits
        assert total is not None
        return total / len(views)


def _box(corner: Sequence[int], size: Sequence[int]) -> tuple[slice, ...]:
    """All channels of a box."""
    return (slice(None), *(slice(start, start + n) for start, n in zip(corner, size, strict=True)))


def _overlapping(sizes: Sequence[int], window: Sequence[int], overlap: float) -> list[list[int]]:
    """Starts along each axis: evenly spread, sharing at least `overlap` of a window."""
    starts = []
    for n, w in zip(sizes, window, strict=True):
        count = max(0, math.ceil((n - w) / (w * (1 - overlap)))) + 1
        starts.append([round(i * (n - w) / max(1, count - 1)) for i in range(count)])
    return starts


def _aligned(sizes: Sequence[int], out_window: Sequence[int], options: Model) -> list[list[int]]:
    """Starts along each axis on multiples of the total stride: elsewhere pooling would see other groups of voxels.

    Evenly spread, so that windows reach beyond the volume by less than a stride: training saw none further out.
    """
    starts = []
    for axis, (n, w) in enumerate(zip(sizes, out_window, strict=True)):
        stride = min(math.prod(s[axis] for s in geometry.strides(options)), w)  # a shorter output cannot be aligned
        last, most = (
            math.ceil(max(0, n - w) / stride),
            w // stride,
        )  # in strides: the last start, and from one to the next
        count = math.ceil(last / most)
        starts.append([i * last // max(1, count) * stride for i in range(count + 1)])
    return starts


def _pad(
    image: Tensor, size: Sequence[int], window: Sequence[int], out_window: Sequence[int], unstrided: Sequence[bool]
) -> tuple[Tensor, tuple[int, ...]]:
    """The image with room for windows over an output of `size`, and where in that output the volume begins.

    A padded network gets zeros (the mean) all around a volume smaller than its window; a valid one mirrored context,
    in the middle of which lies what is shorter than an output, as in training, along axes that are `unstrided`: along
    others that would show pooling other groups of voxels than a larger window does.
    """
    surplus = [total - n for total, n in zip(size, image.shape[1:], strict=True)]
    border = [(w - o) // 2 for w, o in zip(window, out_window, strict=True)]
    if any(border):
        # what a window loses may be odd where convolutions stride
        needed = [w - o + s for w, o, s in zip(window, out_window, surplus, strict=True)]
        shorter = [n < o for n, o in zip(image.shape[1:], out_window, strict=True)]
        ahead = [s // 2 if short and free else 0 for s, short, free in zip(surplus, shorter, unstrided, strict=True)]
        widths = [(0, 0), *((b + a, n - b - a) for b, a, n in zip(border, ahead, needed, strict=True))]
        return torch.from_numpy(np.pad(image.numpy(), widths, mode="reflect")), tuple(ahead)
    widths = [(0, 0), *((s // 2, s - s // 2) for s in surplus)]
    return torch.from_numpy(np.pad(image.numpy(), widths)), tuple(s // 2 for s in surplus)


def gaussian(window: Sequence[int]) -> Tensor:
    """Weights of a window, falling towards its border (sigma an eighth of the length, as in nnU-Net), never 0."""
    weight = torch.ones(tuple(window))
    for axis, n in enumerate(window):
        x = (torch.arange(n) - (n - 1) / 2) / (n / 8)
        weight = weight * torch.exp(-(x**2) / 2).clamp(min=1e-3).reshape([-1 if a == axis else 1 for a in range(3)])
    return weight


def _subsets(axes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    return itertools.chain.from_iterable(itertools.combinations(axes, n) for n in range(len(axes) + 1))

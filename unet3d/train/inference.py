"""Whole volumes through a sliding window of the training patch's size; volumes and label maps of any size.

Memory holds a strip of windows and what later strips share with it, never a map of the volume for each class.

Windows of padded networks overlap and are weighted by a Gaussian. Those of valid networks see mirrored context beyond
the border (the paper's overlap-tile strategy) and begin on multiples of the network's total stride, so that each voxel
is computed as it would be in one piece, unless a normalisation takes its statistics from the window.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn

from unet3d import progress
from unet3d.config import Model
from unet3d.model import geometry
from unet3d.train.policy import MemoryPolicy
from unet3d.types import Strip

Axes = tuple[int, int, int]  # slabs of the volume lie along the first, strips of a slab along the second


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
    def strips(self, image: Tensor) -> Iterator[Strip]:
        """Image C X Y Z (normalised) to class probabilities on the CPU, each voxel in one strip."""
        were_training = [model.training for model in self.models]
        for model in self.models:
            model.eval()
        try:
            yield from self._slide(image)
        finally:
            for model, was_training in zip(self.models, were_training, strict=True):
                model.train(was_training)

    def labels(self, image: Tensor) -> Tensor:
        """The likeliest class of each voxel X Y Z of an image C X Y Z (normalised)."""
        return LabelMap(self.strips(image)).whole()

    def probabilities(self, image: Tensor) -> Tensor:
        """All class probabilities K X Y Z of an image C X Y Z (normalised), float32: gigabytes, for many classes."""
        found: Tensor | None = None
        for strip in self.strips(image):
            found = strip.probabilities.new_empty(len(strip.probabilities), *strip.sizes) if found is None else found
            found[(slice(None), *strip.box)] = strip.probabilities
        assert found is not None
        return found

    def _slide(self, image: Tensor) -> Iterator[Strip]:
        device, (x, y, z) = next(self.models[0].parameters()).device, image.shape[1:]
        out_window = geometry.output_size(self.window, self.options)
        strides = [math.prod(axis) for axis in zip((1, 1, 1), *geometry.strides(self.options), strict=True)]
        if self.options.padding == "valid":
            corners, weight = aligned_corners((x, y, z), out_window, strides), torch.ones(out_window)
        else:
            corners, weight = even_corners((x, y, z), self.window, self.overlap), gaussian(out_window)
        sums = _Sums(corners, weight)
        padded, offset = _pad(image, sums.sizes, self.window, out_window, strides)
        for corner in progress.parts(sums.windows()):
            sums.add(corner, self.window_logits(padded[_box(corner, self.window)][None].to(device)).cpu())
            if sums.is_done(corner):
                yield from _finished(*sums.finish(), offset, (x, y, z), sums.axes)

    def window_logits(self, tile: Tensor) -> Tensor:
        """Mean logits K D H W of a window 1 C D H W, over the networks and all combinations of the mirrored axes."""
        dims = [axis + 2 for axis in self.mirror]
        subsets = [subset for n in range(len(dims) + 1) for subset in itertools.combinations(dims, n)]
        total: Tensor | None = None
        for model, flipped in itertools.product(self.models, subsets):
            logits = self.policy.forward(model, tile.flip(flipped)).float()[0]  # a copy, which a network may change
            logits = logits.flip([axis - 1 for axis in flipped]) if flipped else logits
            total = logits if total is None else total.add_(logits)
        assert total is not None
        count = len(self.models) * len(subsets)
        return total.div_(count) if count > 1 else total


class LabelMap:
    """The likeliest class of each voxel, the first in a tie, noted as strips pass through on their way to others."""

    def __init__(self, strips: Iterator[Strip]) -> None:
        self._strips, self._labels = strips, torch.empty(0)
        self._error: Exception | None = None

    def __iter__(self) -> Iterator[Strip]:
        """The strips that have not passed yet."""
        try:
            for strip in self._strips:
                if not len(self._labels):
                    kind = torch.uint8 if len(strip.probabilities) <= 256 else torch.int16
                    self._labels = torch.empty(strip.sizes, dtype=kind)
                self._labels[strip.box] = strip.probabilities.max(0).indices  # quicker than argmax, and equal
                yield strip
        except Exception as error:
            self._error = error
            raise

    def whole(self) -> Tensor:
        """Labels X Y Z, once all strips have passed. Raises what has ended them early, also where others caught it."""
        for _ in self:
            pass
        if self._error is not None:
            raise self._error
        return self._labels


class _Sums:
    """Sums over windows, of logits by weight and of the weights, for one strip; and those that later strips go on with.

    A strip is as wide as a window along the first two axes, and reaches through the volume along the third. Each voxel
    adds its windows in the order in which one sum over the whole volume would.
    """

    def __init__(self, corners: Sequence[Sequence[int]], weight: Tensor) -> None:
        self.corners, self.weight, self.window = corners, weight, weight.shape
        self.sizes = [starts[-1] + w for starts, w in zip(corners, self.window, strict=True)]
        # what a window shares with the one before it, along each axis, by where it begins
        pairs = zip(corners, self.window, strict=True)
        self._shared = [{b: a + w - b for a, b in pairwise(starts)} | {starts[0]: 0} for starts, w in pairs]
        self.axes: Axes = min(itertools.permutations(range(3)), key=self._voxels)  # type: ignore[assignment]
        self._corner = [-1, -1, -1]  # of the strip
        self._strip, self._carried = torch.empty(0), torch.empty(0)

    def _voxels(self, axes: Sequence[int]) -> int:
        """How many voxels are held with this order of axes."""
        slab, strip, row = axes
        carried = max(self._shared[slab].values()) * self.sizes[strip]
        return (carried + self.window[slab] * self.window[strip]) * self.sizes[row]

    def windows(self) -> list[tuple[int, ...]]:
        """Where windows begin, in their order."""
        return sorted(itertools.product(*self.corners), key=lambda corner: [corner[axis] for axis in self.axes])

    def is_done(self, corner: Sequence[int]) -> bool:
        """Whether no window follows in its strip."""
        return corner[self.axes[2]] == self.corners[self.axes[2]][-1]

    def add(self, corner: Sequence[int], logits: Tensor) -> None:
        """Add a window's logits K D H W."""
        row = self.axes[2]
        if any(corner[axis] != self._corner[axis] for axis in self.axes[:2]):
            self._move([0 if axis == row else corner[axis] for axis in range(3)], len(logits))
        part = self._strip.narrow(row + 1, corner[row], self.window[row])
        part[:-1].addcmul_(logits, self.weight)
        part[-1].add_(self.weight)

    def _move(self, corner: list[int], classes: int) -> None:
        """The strip at another place, with what earlier windows have added there."""
        slab, strip, _ = self.axes
        if not len(self._strip):
            self._allocate(classes + 1)
        width, kept = self.window[strip], self._shared[strip][corner[strip]]
        for at in range(0, kept, width - kept):  # piece by piece, each of which lies behind where it goes
            n = min(width - kept, kept - at)
            self._strip.narrow(strip + 1, at, n).copy_(self._strip.narrow(strip + 1, at + width - kept, n))
        new, held = self._strip.narrow(strip + 1, kept, width - kept), self._shared[slab][corner[slab]]
        carried = self._carried.narrow(strip + 1, corner[strip] + kept, width - kept)
        new.narrow(slab + 1, 0, held).copy_(carried.narrow(slab + 1, 0, held))
        new.narrow(slab + 1, held, self.window[slab] - held).zero_()
        self._corner = corner

    def _allocate(self, maps: int) -> None:
        slab, _, row = self.axes
        held, carried = list(self.window), list(self.sizes)
        held[row], carried[slab] = self.sizes[row], max(self._shared[slab].values())
        self._strip, self._carried = torch.empty(maps, *held), torch.empty(maps, *carried)

    def finish(self) -> tuple[list[int], Tensor]:
        """Where the voxels begin that no further window reaches, and their mean logits; the rest is carried on."""
        done, part = list(self.sizes), self._strip
        for axis in self.axes[:2]:
            later = [start for start in self.corners[axis] if start > self._corner[axis]]
            done[axis] = later[0] - self._corner[axis] if later else self.window[axis]
        slab, strip, _ = self.axes
        part = self._strip.narrow(strip + 1, 0, done[strip])
        left = self.window[slab] - done[slab]
        rest = self._carried.narrow(strip + 1, self._corner[strip], done[strip]).narrow(slab + 1, 0, left)
        rest.copy_(part.narrow(slab + 1, done[slab], left))
        part = part.narrow(slab + 1, 0, done[slab])
        return self._corner, part[:-1].div_(part[-1])


def _finished(
    corner: Sequence[int], logits: Tensor, offset: Sequence[int], sizes: tuple[int, int, int], axes: Axes
) -> Iterator[Strip]:
    """Those of these logits that lie in the volume, which begins at `offset`, as probabilities; none if none does."""
    low = [max(0, o - c) for c, o in zip(corner, offset, strict=True)]
    high = [min(n, o + size - c) for c, n, o, size in zip(corner, logits.shape[1:], offset, sizes, strict=True)]
    if all(a < b for a, b in zip(low, high, strict=True)):
        part = logits[(slice(None), *itertools.starmap(slice, zip(low, high, strict=True)))]
        part.sub_(part.amax(0)).exp_()  # a softmax in place
        x, y, z = (c + a - o for c, a, o in zip(corner, low, offset, strict=True))
        yield Strip(sizes, axes, (x, y, z), part.div_(part.sum(0)))


def _box(corner: Sequence[int], size: Sequence[int]) -> tuple[slice, ...]:
    """All channels of a box."""
    return (slice(None), *(slice(start, start + n) for start, n in zip(corner, size, strict=True)))


def even_corners(sizes: Sequence[int], window: Sequence[int], overlap: float) -> list[list[int]]:
    """Where windows begin along each axis (voxels): evenly spread, sharing at least `overlap` of a window."""
    found = []
    for n, w in zip(sizes, window, strict=True):
        gaps = max(0, math.ceil((n - w) / (w * (1 - overlap))))
        found.append(sorted({round(i * (n - w) / max(1, gaps)) for i in range(gaps + 1)}))  # short ones may coincide
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
    if not any(map(any, widths)):
        return image, tuple(ahead)  # not a copy
    padded = np.pad(image.numpy(), widths, mode="reflect") if has_border else np.pad(image.numpy(), widths)
    return torch.from_numpy(padded), tuple(ahead)


def gaussian(window: Sequence[int]) -> Tensor:
    """Weights of a window, falling towards its border (sigma an eighth of the length, as in nnU-Net), never 0."""
    weight = torch.ones(())
    for n in window:
        x = (torch.arange(n) - (n - 1) / 2) / (n / 8)
        weight = weight[..., None] * torch.exp(-(x**2) / 2).clamp(min=1e-3)
    return weight

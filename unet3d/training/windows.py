"""Windows over a volume: where they begin, how they are weighted, what is padded around the volume.

Windows of padded networks overlap and are weighted by a Gaussian. Windows of valid networks see mirrored context beyond
the border (the paper's overlap-tile strategy) and begin on multiples of the network's total stride, so that each voxel
is computed as it would be in one piece, unless a normalisation takes its statistics from the window.
"""

import itertools
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import numpy as np
import torch
from torch import Tensor

Axes = tuple[int, int, int]  # slabs follow one another along the first, strips of a slab along the second
Corners = Sequence[Sequence[int]]  # where windows begin along each axis, voxels


def even_corners(sizes: Sequence[int], window: Sequence[int], overlap: float) -> list[list[int]]:
    """Return where windows begin along each axis (voxels): evenly spread, sharing at least `overlap` of a window."""
    corners = []
    for size, length in zip(sizes, window, strict=True):
        free = size - length
        largest_gap = length * (1 - overlap)
        gaps = max(0, math.ceil(free / largest_gap))
        starts = {round(i * free / max(1, gaps)) for i in range(gaps + 1)}  # short gaps may coincide
        corners.append(sorted(starts))
    return corners


def aligned_corners(
    sizes: Sequence[int],
    out_window: Sequence[int],
    strides: Sequence[int],
) -> list[list[int]]:
    """Return where windows begin along each axis (voxels): on multiples of the network's total strides.

    Elsewhere, pooling would group other voxels. Windows are evenly spread, so that they reach beyond the volume by less
    than a stride: training saw none further out.
    """
    corners = []
    for size, length, total_stride in zip(sizes, out_window, strides, strict=True):
        stride = min(total_stride, length)  # a shorter output cannot be aligned
        last = math.ceil(max(0, size - length) / stride)  # corner, in strides
        largest_gap = length // stride
        gaps = math.ceil(last / largest_gap)
        starts = [i * last // max(1, gaps) for i in range(gaps + 1)]  # in strides
        corners.append([start * stride for start in starts])
    return corners


def gaussian(window: Sequence[int]) -> Tensor:
    """Return weights of a window, falling towards its border (sigma is 1/8 of the length, as in nnU-Net), never 0."""
    weight = torch.ones(())
    for length in window:
        centre = (length - 1) / 2
        sigma = length / 8
        x = (torch.arange(length) - centre) / sigma
        along_axis = torch.exp(-(x**2) / 2).clamp(min=1e-3)
        weight = weight[..., None] * along_axis
    return weight


def scan_order(corners: Corners, window: Sequence[int]) -> Axes:
    """Return the axes along which slabs, strips in a slab and windows in a strip follow, so that memory is least."""
    sizes = []
    shared = []  # the largest overlap of two neighbours
    for starts, length in zip(corners, window, strict=True):
        sizes.append(starts[-1] + length)
        overlaps = [start + length - next_start for start, next_start in pairwise(starts)]
        shared.append(max(overlaps, default=0))

    def voxels(axes: Sequence[int]) -> int:
        slab, strip, row = axes
        carried = shared[slab] * sizes[strip]
        current = window[slab] * window[strip]
        return (carried + current) * sizes[row]

    slab, strip, row = min(itertools.permutations(range(3)), key=voxels)
    return slab, strip, row


def pad(
    image: Tensor,
    corners: Corners,
    window: Sequence[int],
    out_window: Sequence[int],
    strides: Sequence[int],
) -> tuple[Tensor, list[int]]:
    """Return an image C X Y Z with room for windows at `corners` of an output, and where in it the volume begins.

    A padded network gets zeros (the mean) on all sides of a volume smaller than its window, a valid one mirrored
    context. There a volume shorter than an output lies in the middle of it, as in training, along axes without stride:
    along others, pooling would group other voxels than in a larger window.
    """
    borders = [length - out for length, out in zip(window, out_window, strict=True)]
    has_border = any(border > 1 for border in borders)
    widths = [(0, 0)]  # of the channels
    offset = []
    for axis, starts in enumerate(corners):
        size = image.shape[1 + axis]
        out = out_window[axis]
        spare = starts[-1] + out - size
        is_at_start = has_border and (size >= out or strides[axis] > 1)
        ahead = 0 if is_at_start else spare // 2
        before = borders[axis] // 2 + ahead
        after = spare + borders[axis] - before  # borders are odd where convolutions stride
        offset.append(ahead)
        widths.append((before, after))
    if not any(map(any, widths)):
        return image, offset  # not a copy
    mode: Literal["reflect", "constant"] = "reflect" if has_border else "constant"
    padded = np.pad(image.numpy(), widths, mode=mode)
    return torch.from_numpy(padded), offset


def box(corner: Sequence[int], size: Sequence[int]) -> tuple[slice, ...]:
    """Return the slices of a box of this size, with all channels."""
    slices = [slice(start, start + length) for start, length in zip(corner, size, strict=True)]
    return (slice(None), *slices)

"""Windows over a volume: where they begin, how they are weighted, what is padded around it, and their weighted means.

Windows of padded networks overlap and are weighted by a Gaussian. Windows of valid networks see mirrored context beyond
the border (the paper's overlap-tile strategy) and begin on multiples of the network's total stride, so that each voxel
is computed as it would be in one piece, unless a normalisation takes its statistics from the window.

Memory holds a strip of windows and what later strips share with it, never a map of the volume for each class.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

Axes = tuple[int, int, int]  # slabs follow one another along the first, strips of a slab along the second
Corners = Sequence[Sequence[int]]  # where windows begin along each axis, voxels
FLOAT32 = 4  # bytes
MARGIN = 8  # 1/8 of a GPU's memory stays free: gaps are not predicted, workspaces of convolutions estimated


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


class HostMemory:
    """Host memory for results of a device, one after another: the next takes the place of the last."""

    def __init__(self, is_pinned: bool, numbers: int = 0) -> None:
        """Take memory for `numbers` numbers at the first result: torch keeps the pages of every smaller buffer.

        `is_pinned`: pages are locked, so that a GPU writes into them at full speed.
        """
        self._is_pinned = is_pinned
        self._numbers = numbers
        self._buffer = torch.empty(0)

    def take(self, result: Tensor) -> Tensor:
        """Return a copy of the result, once all of it is there."""
        if self._buffer.numel() < result.numel():
            self._buffer = torch.empty(0)  # before there is a larger one
            numbers = max(self._numbers, result.numel())
            self._buffer = torch.empty(numbers, pin_memory=self._is_pinned)
        part = self._buffer[: result.numel()]
        return part.view(result.shape).copy_(result)


def free_bytes(device: torch.device) -> int:
    """Return the bytes that tensors can still take of a GPU, less a margin; 0 for other devices.

    They are what no process has taken, and what torch has reserved and no tensor uses.
    """
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free + unused - total // MARGIN


def sums_bytes(corners: Corners, window: Sequence[int], classes: int) -> int:
    """Return the predicted bytes of the sums of windows at `corners`, on their device; `window` is an output's size.

    Sums and their weights are float32. As a strip goes to the host, there is one copy of its probabilities.
    """
    strip_size, carried_size = sum_sizes(corners, window, scan_order(corners, window))
    strip = math.prod(strip_size)
    carried = math.prod(carried_size)
    sums = (classes + 1) * (strip + carried)
    probabilities = classes * strip
    return FLOAT32 * (sums + probabilities + math.prod(window))


def sum_sizes(corners: Corners, window: Sequence[int], axes: Axes) -> tuple[Axes, Axes]:
    """Return the sizes (voxels, along `axes`) of a strip and of what a slab shares with the next."""
    slab_starts, strip_starts, window_starts = (corners[axis] for axis in axes)
    deep, wide, long = (window[axis] for axis in axes)
    most_shared = max(slab.shared for slab in _steps(slab_starts, deep))
    width = strip_starts[-1] + wide
    length = window_starts[-1] + long
    strip_size = (deep, wide, length)
    carried_size = (most_shared, width, length)
    return strip_size, carried_size


def window_means(
    logits: Iterator[Tensor],
    corners: Corners,
    weight: Tensor,
    axes: Axes,
) -> Iterator[tuple[Axes, Tensor]]:
    """Yield weighted means K X Y Z of the windows' logits, box by box as windows complete them, after its corner.

    One strip of windows is in memory, and what a slab shares with the next: on the device of the logits. Each voxel
    adds its windows in the order in which one sum over the whole volume would.
    """
    slab_starts, strip_starts, window_starts = (corners[axis] for axis in axes)
    deep, wide, long = (weight.shape[axis] for axis in axes)
    strip_size, carried_size = sum_sizes(corners, weight.shape, axes)
    strip = torch.empty(0)  # K maps of sums, and their weights
    carried = torch.empty(0)  # to the next slab, of the same maps
    slabs = _steps(slab_starts, deep)
    rows = _steps(strip_starts, wide)
    for slab, row in itertools.product(slabs, rows):
        for start in window_starts:
            window = _in_scan_order(next(logits), axes)
            if not len(strip):
                maps = len(window) + 1
                strip = _empty(maps, strip_size, axes, window.device)
                carried = _empty(maps, carried_size, axes, window.device)
                weight = weight.to(window.device).permute(axes)
            if start == 0:
                first_new = row.start + row.shared
                from_last_slab = carried[:, : slab.shared, first_new : row.start + wide]
                _advance(strip, row.shared, from_last_slab)
            part = strip[..., start : start + long]
            part[:-1].addcmul_(window, weight)
            part[-1].add_(weight)
            del window  # before the next one
        depth = slab.next_start - slab.start
        complete = strip[:, :, : row.next_start - row.start]
        shared = complete[:, depth:]
        carried[:, : deep - depth, row.start : row.next_start] = shared
        means = _as_volume(complete[:, :depth], axes)
        corner = in_volume_order((slab.start, row.start, 0), axes)
        yield corner, means[:-1].div_(means[-1])


class _Step(NamedTuple):
    """A window's place along one axis, in voxels."""

    start: int
    next_start: int  # of the next window; after the last, the end
    shared: int  # with the window before


def _steps(starts: Sequence[int], length: int) -> list[_Step]:
    """Return the places of windows of this length along one axis."""
    end = starts[-1] + length
    steps = []
    shared = 0
    for start, next_start in pairwise([*starts, end]):
        steps.append(_Step(start, next_start, shared))
        shared = start + length - next_start
    return steps


def _empty(maps: int, size: Sequence[int], axes: Axes, device: torch.device) -> Tensor:
    """Return maps of this size along `axes`; in memory the axes lie as the volume's do."""
    volume_size = in_volume_order(size, axes)
    return _in_scan_order(torch.empty(maps, *volume_size, device=device), axes)


def _in_scan_order(maps: Tensor, axes: Axes) -> Tensor:
    """Return maps K X Y Z as K and the axes in their scan order."""
    dims = [axis + 1 for axis in axes]
    return maps.permute(0, *dims)


def _as_volume(maps: Tensor, axes: Axes) -> Tensor:
    """Return maps in scan order as K X Y Z."""
    dims = [axes.index(axis) + 1 for axis in range(3)]
    return maps.permute(0, *dims)


def in_volume_order(values: Sequence[int], axes: Axes) -> Axes:
    """Return values along `axes` in the order of the volume's axes."""
    places = [axes.index(axis) for axis in range(3)]
    x, y, z = (values[place] for place in places)
    return x, y, z


def _advance(strip: Tensor, shared: int, carried: Tensor) -> None:
    """Move the strip on by a step: it keeps the rows that it shares with its last place.

    In its other rows, it begins with what the slab before has carried.
    """
    step = strip.shape[2] - shared
    for row in range(0, shared, step):  # what is copied lies behind where it goes
        last = min(row + step, shared)
        moved = strip[:, :, row + step : last + step]
        strip[:, :, row:last] = moved
    new_rows = strip[:, :, shared:]
    depth = carried.shape[1]
    new_rows[:, :depth] = carried
    new_rows[:, depth:] = 0

"""Weighted means of overlapping windows, and the memory that their sums take.

Memory holds a strip of windows and what later strips share with it, never a map of the volume for each class.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from unet3d.training.windows import Axes, Corners, scan_order

FLOAT32 = 4  # bytes
MARGIN = 8  # 1/8 of a GPU's memory stays free: gaps are not predicted, workspaces of convolutions estimated


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

"""Whole volumes through a sliding window of the training patch's size; volumes and label maps of any size.

Windows of padded networks overlap and are weighted by a Gaussian. Windows of valid networks see mirrored context beyond
the border (the paper's overlap-tile strategy) and begin on multiples of the network's total stride, so that each voxel
is computed as it would be in one piece, unless a normalisation takes its statistics from the window.

Memory holds a strip of windows and what later strips share with it, never a map of the volume for each class. On a GPU
these sums are in its memory where they fit along with a forward pass, else in the host's.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from unet3d.base import progress
from unet3d.base.errors import NonFinitePrediction
from unet3d.base.types import ProbabilityBlock
from unet3d.config.schema import Model
from unet3d.model import geometry
from unet3d.training.policy import MemoryPolicy, refuse_odd_logits

Axes = tuple[int, int, int]  # slabs follow one another along the first, strips of a slab along the second
Corners = Sequence[Sequence[int]]  # Where windows begin along each axis, voxels.
FLOAT32 = 4  # bytes
MARGIN = 8  # 1/8 of a GPU's memory stays free: gaps are not predicted, workspaces of convolutions estimated


@dataclass
class HostMemory:
    """Host memory for results of a device, one after another: the next takes the place of the last."""

    is_pinned: bool  # pages are locked, so that a GPU writes into them at full speed
    numbers: int = 0  # The first result takes memory for this number: torch keeps the pages of smaller buffers.
    buffer: Tensor = field(default_factory=lambda: torch.empty(0))

    def take(self, result: Tensor) -> Tensor:
        """Return a copy of the result, once all of it is there."""
        if self.buffer.numel() < result.numel():
            self.buffer = torch.empty(0)  # before there is a larger one
            self.buffer = torch.empty(max(self.numbers, result.numel()), pin_memory=self.is_pinned)
        part = self.buffer[: result.numel()]
        return part.view(result.shape).copy_(result)


@dataclass(frozen=True)
class Predictor:
    """Networks of the same options, and how to slide them over a volume.

    Logits are averaged over networks, mirrorings and windows; of regions, their probabilities.
    """

    models: tuple[nn.Module, ...]
    options: Model
    policy: MemoryPolicy
    window: tuple[int, int, int]  # D H W, voxels
    overlap: float = 0.5  # least share of a window that its neighbour covers too
    mirror: tuple[int, ...] = ()  # axes; outputs are averaged over all combinations of their mirrorings
    batch: int = 1  # windows in one forward pass
    window_bytes: int | None = None  # predicted bytes that a forward pass needs besides the weights; None: not known
    sums_on_device: bool | None = None  # whether the networks' device has the sums; None: where they fit

    @torch.no_grad()
    def strips(self, image: Tensor, name: str = "image") -> Iterator[ProbabilityBlock]:
        """Yield class probabilities of an image C X Y Z (normalised) on the CPU, each voxel in one strip.

        A strip is valid until the next one is asked for, which takes its memory. Raises NonFinitePrediction, which
        calls the image by its `name`.
        """
        were_training = [model.training for model in self.models]
        for model in self.models:
            model.eval()
        try:
            yield from self._slide(image, name)
        finally:
            for model, was_training in zip(self.models, were_training, strict=True):
                model.train(was_training)

    def _slide(self, image: Tensor, name: str) -> Iterator[ProbabilityBlock]:
        """Yield the strips of `strips`; networks are in evaluation mode."""
        x, y, z = image.shape[1:]
        out_window = geometry.output_size(self.window, self.options)
        strides = [math.prod(levels) for levels in zip((1, 1, 1), *geometry.strides(self.options), strict=True)]
        if self.options.padding == "valid":
            corners = aligned_corners((x, y, z), out_window, strides)
            weight = torch.ones(out_window)
        else:
            corners = even_corners((x, y, z), self.window, self.overlap)
            weight = gaussian(out_window)
        axes = scan_order(corners, out_window)
        padded, offset = pad(image, corners, self.window, out_window, strides)
        on_device = self.sums_on_device
        if on_device is None and self.window_bytes is not None and self.options.classes is not None:
            needed = sums_bytes(corners, out_window, self.options.classes) + self.window_bytes
            on_device = needed <= free_bytes(self._device)
        # Of probabilities of one strip after another, if sums are on the device, else of logits.
        strip_size, _ = sum_sizes(corners, out_window, axes)
        numbers = math.prod(strip_size) * (self.options.classes or 0) if on_device else 0
        host = HostMemory(is_pinned=self._device.type == "cuda", numbers=numbers)
        places = [_in_volume_order(place, axes) for place in itertools.product(*(corners[axis] for axis in axes))]
        logits = self._logits(padded, places, host=None if on_device else host)
        for (a, b, c), means in window_means(logits, corners, weight, axes):
            corner = (a - offset[0], b - offset[1], c - offset[2])
            block = ProbabilityBlock((x, y, z), axes, corner, means)
            strip = _probabilities_inside(block, self.options.output_regions is not None)
            if strip is None:
                continue
            if on_device:
                strip = strip._replace(probabilities=host.take(strip.probabilities))
            # Softmax makes a voxel NaN in all classes; of regions, `window_logits` makes a whole window so.
            if not math.isfinite(strip.probabilities[0].sum().item()):
                advice = "take another checkpoint, or mend extreme values in the image"
                if self.policy.dtype is torch.float16:
                    advice = "numbers in fp16 end at 65,504: train with amp_dtype=bf16 or amp=false"
                fault = f"{name}: outputs of the network are NaN or infinite: no class is the likeliest"
                raise NonFinitePrediction(f"{fault}; {advice}")
            yield strip

    @property
    def _device(self) -> torch.device:
        """Return the networks' device."""
        return next(self.models[0].parameters()).device

    def _logits(self, padded: Tensor, places: Sequence[Axes], host: HostMemory | None) -> Iterator[Tensor]:
        """Yield logits K D H W of the windows at `places`, on the networks' device, or in `host` memory."""
        starts = range(0, len(places), self.batch)
        for start in progress.parts(starts, "windows", len(places)):
            parts = []
            for place in places[start : start + self.batch]:
                box = [slice(first, first + length) for first, length in zip(place, self.window, strict=True)]
                parts.append(padded[(slice(None), *box)])
            if self._device.type == "cpu" and len(parts) == 1:
                tiles = parts[0][None]  # not a copy
            else:
                shape = (len(parts), *parts[0].shape)
                tiles = torch.empty(shape, dtype=padded.dtype, pin_memory=self._device.type == "cuda")
                # The copy may still run when `tiles` is let go of: torch gives its pages to no other tensor before.
                tiles = torch.stack(parts, out=tiles).to(self._device, non_blocking=True)
            logits = self.window_logits(tiles)
            del tiles
            if host is not None and logits.device.type != "cpu":
                logits = host.take(logits)
            of_windows = [*logits.unbind()]
            del logits  # so the batch is freed once the caller drops its last window
            while of_windows:
                yield of_windows.pop(0)

    def window_logits(self, tiles: Tensor) -> Tensor:
        """Return mean logits N K D H W of windows N C D H W, over networks and all combinations of mirrored axes.

        Of regions they are mean probabilities, NaN where any logit is not finite.
        """
        dims = [axis + 2 for axis in self.mirror]
        mirrorings: list[tuple[int, ...]] = []
        for count in range(len(dims) + 1):
            mirrorings += itertools.combinations(dims, count)
        total: Tensor | None = None
        for model, flipped in itertools.product(self.models, mirrorings):
            # `flip` copies even without axes, so a network that works in place changes no other pass.
            output = self.policy.forward(model, tiles.flip(flipped))
            if self.options.path is not None and self.options.classes is not None:
                sizes = (len(tiles), *self.window)
                refuse_odd_logits(output, self.options.path, self.options.classes, sizes)
            logits = output.float()
            del output
            if self.options.output_regions is not None:
                flaw = logits.sum() * 0  # NaN if any logit is not finite: of an infinite one, sigmoid is finite
                logits = logits.sigmoid_().add_(flaw)
            logits = logits.flip(flipped) if flipped else logits
            total = logits if total is None else total.add_(logits)
        assert total is not None
        passes = len(self.models) * len(mirrorings)
        return total.div_(passes) if passes > 1 else total


def _probabilities_inside(strip: ProbabilityBlock, has_regions: bool) -> ProbabilityBlock | None:
    """Return the part of a strip that lies in the volume, after a softmax in place; None outside.

    Of regions, the strip has probabilities already, but for the rounding of means.
    """
    inside = []  # Parts within the strip.
    for start, size in zip(strip.corner, strip.sizes, strict=True):
        inside.append(slice(max(0, -start), max(0, size - start)))
    part = strip.probabilities[(slice(None), *inside)]
    if not part.numel():
        return None
    if has_regions:
        part.clamp_(0, 1)
    else:
        part.sub_(part.amax(0)).exp_()
        part.div_(part.sum(0))
    x, y, z = (max(0, start) for start in strip.corner)
    return strip._replace(corner=(x, y, z), probabilities=part)


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
        starts = [i * last // max(1, gaps) for i in range(gaps + 1)]  # Starts in strides.
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

    def voxels(axes: Sequence[int]) -> int:
        return sum(map(math.prod, sum_sizes(corners, window, axes)))

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
    widths = [(0, 0)]  # Channels are not padded.
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
    strip, carried = map(math.prod, sum_sizes(corners, window, scan_order(corners, window)))
    sums = (classes + 1) * (strip + carried)
    probabilities = classes * strip
    return FLOAT32 * (sums + probabilities + math.prod(window))


def sum_sizes(corners: Corners, window: Sequence[int], axes: Sequence[int]) -> tuple[Axes, Axes]:
    """Return the sizes (voxels, along `axes`) of a strip and of what a slab shares with the next."""
    slab_starts, strip_starts, window_starts = (corners[axis] for axis in axes)
    deep, wide, long = (window[axis] for axis in axes)
    most_shared = max(slab.shared for slab in _steps(slab_starts, deep))
    length = window_starts[-1] + long
    return (deep, wide, length), (most_shared, strip_starts[-1] + wide, length)


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
    in_scan_order = [0, *(axis + 1 for axis in axes)]  # Axes of maps K X Y Z.
    in_volume_order = [0, *(axis + 1 for axis in _in_volume_order((0, 1, 2), axes))]
    sizes = [_in_volume_order(size, axes) for size in sum_sizes(corners, weight.shape, axes)]
    strip = torch.empty(0)  # K maps of sums, and their weights
    carried = torch.empty(0)  # What the next slab takes over of the same maps.
    for slab, row in itertools.product(_steps(slab_starts, deep), _steps(strip_starts, wide)):
        for start in window_starts:
            window = next(logits).permute(in_scan_order)
            if not len(strip):  # The axes in memory lie as the volume's do.
                maps = [torch.empty(len(window) + 1, *size, device=window.device) for size in sizes]
                strip, carried = (sums.permute(in_scan_order) for sums in maps)
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
        carried[:, : deep - depth, row.start : row.next_start] = complete[:, depth:]
        means = complete[:, :depth].permute(in_volume_order)
        corner = _in_volume_order((slab.start, row.start, 0), axes)
        yield corner, means[:-1].div_(means[-1])


class _Step(NamedTuple):
    """A window's place along one axis, in voxels."""

    start: int
    next_start: int  # Where the next window begins; the end for the last.
    shared: int  # Planes that it shares with the window before.


def _steps(starts: Sequence[int], length: int) -> list[_Step]:
    """Return the places of windows of this length along one axis."""
    end = starts[-1] + length
    steps = []
    shared = 0
    for start, next_start in pairwise([*starts, end]):
        steps.append(_Step(start, next_start, shared))
        shared = start + length - next_start
    return steps


def _in_volume_order(values: Sequence[int], axes: Axes) -> Axes:
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

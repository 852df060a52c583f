"""Whole volumes through a sliding window of the training patch's size; volumes and label maps of any size.

Memory holds a strip of windows and what later strips share with it, never a map of the volume for each class. On a GPU
these sums are in its memory where they fit beside a forward pass, else in the host's.

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

from unet3d.base import progress
from unet3d.base.errors import NonFinitePrediction
from unet3d.base.types import ProbabilityBlock
from unet3d.config.schema import Model
from unet3d.model import geometry
from unet3d.training.losses import refuse_odd_logits
from unet3d.training.policy import MemoryPolicy

Axes = tuple[int, int, int]  # slabs follow one another along the first, strips of a slab along the second
FLOAT32 = 4  # bytes
MARGIN = 8  # 1/8 of a GPU's memory stays free: workspaces of convolutions and gaps are not predicted


@dataclass(frozen=True)
class Predictor:
    """Networks of the same options, whose logits are averaged, and how to slide them over a volume."""

    models: tuple[nn.Module, ...]
    options: Model
    policy: MemoryPolicy
    window: tuple[int, int, int]  # D H W, voxels
    overlap: float = 0.5  # least share of a window that its neighbour covers too
    mirror: tuple[int, ...] = ()  # axes; logits are averaged over all combinations of their mirrorings
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

    def probabilities(self, image: Tensor) -> Tensor:
        """All class probabilities K X Y Z of an image C X Y Z (normalised), float32: gigabytes, for many classes."""
        found: Tensor | None = None
        for strip in self.strips(image):
            found = strip.probabilities.new_empty(len(strip.probabilities), *strip.sizes) if found is None else found
            found[(slice(None), *strip.box)] = strip.probabilities
        assert found is not None
        return found

    def _slide(self, image: Tensor, name: str) -> Iterator[ProbabilityBlock]:
        x, y, z = image.shape[1:]
        out_window = geometry.output_size(self.window, self.options)
        strides = [math.prod(axis) for axis in zip((1, 1, 1), *geometry.strides(self.options), strict=True)]
        if self.options.padding == "valid":
            corners, weight = aligned_corners((x, y, z), out_window, strides), torch.ones(out_window)
        else:
            corners, weight = even_corners((x, y, z), self.window, self.overlap), gaussian(out_window)
        axes, (padded, offset) = scan_order(corners, out_window), _pad(image, corners, self.window, out_window, strides)
        places = [_in_place(place, axes) for place in itertools.product(*(corners[axis] for axis in axes))]
        on_device = self.sums_on_device
        if on_device is None:
            on_device = self.sums_fit(corners, out_window)
        largest = math.prod(sum_sizes(corners, out_window, axes)[0]) * (self.options.classes or 0) if on_device else 0
        host = HostMemory(self._device.type == "cuda", largest)
        logits = self._logits(padded, places, None if on_device else host)
        for (a, b, c), means in _means(logits, corners, weight, axes):
            for strip in _inside(
                ProbabilityBlock((x, y, z), axes, (a - offset[0], b - offset[1], c - offset[2]), means)
            ):
                if on_device:
                    strip = strip._replace(probabilities=host.take(strip.probabilities))
                if not math.isfinite(strip.probabilities[0].sum().item()):  # softmax makes a voxel NaN in all classes
                    raise self._not_finite(name)
                yield strip

    def _not_finite(self, name: str) -> NonFinitePrediction:
        what = f"{name}: outputs of the network are NaN or infinite: no class is the likeliest"
        if self.policy.dtype is torch.float16:
            return NonFinitePrediction(f"{what}; numbers in fp16 end at 65,504: train with amp_dtype=bf16 or amp=false")
        return NonFinitePrediction(f"{what}; take another checkpoint, or mend extreme values in the image")

    @property
    def _device(self) -> torch.device:
        return next(self.models[0].parameters()).device

    def sums_fit(self, corners: Sequence[Sequence[int]], out_window: Sequence[int]) -> bool:
        """Return whether the sums are predicted to fit on the networks' device, beside a pass."""
        if self.window_bytes is None or self.options.classes is None:
            return False
        needed = sums_bytes(corners, out_window, self.options.classes) + self.window_bytes
        return needed <= free_bytes(self._device)

    def _logits(self, padded: Tensor, places: Sequence[Axes], host: "HostMemory | None") -> Iterator[Tensor]:
        """Yield logits K D H W of the windows at `places`, on the networks' device, or in `host` memory."""
        for start in progress.parts(range(0, len(places), self.batch), "windows", len(places)):
            logits = self.window_logits(self._tiles(padded, places[start : start + self.batch]))
            if host is not None and logits.device.type != "cpu":
                logits = host.take(logits)
            windows = [*logits.unbind()]
            del logits  # so the batch is freed once the caller drops its last window
            while windows:
                yield windows.pop(0)

    def _tiles(self, padded: Tensor, places: Sequence[Axes]) -> Tensor:
        """Return the windows N C D H W at `places`, on the networks' device."""
        boxes = [padded[_box(place, self.window)] for place in places]
        if self._device.type == "cpu" and len(boxes) == 1:
            return boxes[0][None]  # not a copy
        tiles = torch.empty(len(boxes), *boxes[0].shape, dtype=padded.dtype, pin_memory=self._device.type == "cuda")
        # The copy may still run when `tiles` is let go of: torch gives its pages to no other tensor before it is over.
        return torch.stack(boxes, out=tiles).to(self._device, non_blocking=True)

    def window_logits(self, tiles: Tensor) -> Tensor:
        """Return mean logits N K D H W of windows N C D H W, over networks and all combinations of mirrored axes."""
        dims = [axis + 2 for axis in self.mirror]
        subsets = [subset for n in range(len(dims) + 1) for subset in itertools.combinations(dims, n)]
        total: Tensor | None = None
        for model, flipped in itertools.product(self.models, subsets):
            # `flip` copies even without axes, so a network that works in place changes no other pass.
            output = self.policy.forward(model, tiles.flip(flipped))
            if self.options.path is not None and self.options.classes is not None:
                sizes = (len(tiles), *self.window)
                refuse_odd_logits(output, self.options.path, self.options.classes, sizes)
            logits = output.float()
            del output
            logits = logits.flip(flipped) if flipped else logits
            total = logits if total is None else total.add_(logits)
        assert total is not None
        count = len(self.models) * len(subsets)
        return total.div_(count) if count > 1 else total


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
            self._buffer = torch.empty(max(self._numbers, result.numel()), pin_memory=self._is_pinned)
        return self._buffer[: result.numel()].view(result.shape).copy_(result)


def free_bytes(device: torch.device) -> int:
    """Return the bytes that tensors can still take of a GPU, less a margin; 0 for other devices.

    They are what no process has taken, and what torch has and no tensor uses.
    """
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free + unused - total // MARGIN


def sums_bytes(corners: Sequence[Sequence[int]], window: Sequence[int], classes: int) -> int:
    """Return the bytes that a device needs for sums of windows at `corners`, of so many voxels of output.

    Sums and their weights are float32. As a strip goes to the host, there is one copy of its probabilities.
    """
    strip, carried = (math.prod(size) for size in sum_sizes(corners, window, scan_order(corners, window)))
    return FLOAT32 * ((classes + 1) * (strip + carried) + classes * strip + math.prod(window))


def sum_sizes(corners: Sequence[Sequence[int]], window: Sequence[int], axes: Axes) -> tuple[Axes, Axes]:
    """Return the sizes (voxels, along `axes`) of a strip and of what a slab shares with the next."""
    starts = [corners[axis] for axis in axes]
    deep, wide, long = (window[axis] for axis in axes)
    most = max(held for _, _, held in _steps(starts[0], deep))
    length = starts[2][-1] + long
    return (deep, wide, length), (most, starts[1][-1] + wide, length)


def scan_order(corners: Sequence[Sequence[int]], window: Sequence[int]) -> Axes:
    """The axes along which slabs, strips within a slab and windows within a strip follow, so that memory is least."""
    sizes = [starts[-1] + w for starts, w in zip(corners, window, strict=True)]
    shared = [max((a + w - b for a, b in pairwise(s)), default=0) for s, w in zip(corners, window, strict=True)]

    def voxels(axes: Sequence[int]) -> int:
        slab, strip, row = axes
        return (shared[slab] * sizes[strip] + window[slab] * window[strip]) * sizes[row]

    slab, strip, row = min(itertools.permutations(range(3)), key=voxels)
    return slab, strip, row


def _means(
    logits: Iterator[Tensor], corners: Sequence[Sequence[int]], weight: Tensor, axes: Axes
) -> Iterator[tuple[Axes, Tensor]]:
    """Weighted means of the windows' logits, box by box as windows complete them, and where each box begins.

    One strip of windows is in memory, and what a slab shares with the next: on the device of the logits. Each voxel
    adds its windows in the order in which one sum over the whole volume would.
    """
    starts, (deep, wide, long) = [corners[axis] for axis in axes], (weight.shape[axis] for axis in axes)
    slabs, rows = _steps(starts[0], deep), _steps(starts[1], wide)
    sizes = sum_sizes(corners, weight.shape, axes)
    strip = carried = torch.empty(0)  # both: K maps of sums, and their weights
    for (a, next_a, held), (b, next_b, kept) in itertools.product(slabs, rows):
        for c in starts[2]:
            found = next(logits).permute(0, *(axis + 1 for axis in axes))
            if not len(strip):
                strip, carried = (_empty(len(found) + 1, size, axes, found.device) for size in sizes)
                weight = weight.to(found.device)
            if c == 0:
                _move(strip, kept, carried[:, :held, b + kept : b + wide])
            strip[:-1, ..., c : c + long].addcmul_(found, weight.permute(axes))
            strip[-1, ..., c : c + long].add_(weight.permute(axes))
            del found  # before the next window
        done, part = next_a - a, strip[:, :, : next_b - b]
        carried[:, : deep - done, b:next_b] = part[:, done:]
        part = part[:, :done].permute(0, *(axes.index(axis) + 1 for axis in range(3)))
        yield _in_place((a, b, 0), axes), part[:-1].div_(part[-1])


def _steps(starts: Sequence[int], window: int) -> list[tuple[int, int, int]]:
    """For each window where it begins, where the next does, and how much it shares with the one before."""
    shared = [0, *(a + window - b for a, b in pairwise(starts))]
    return [*zip(starts, [*starts[1:], starts[-1] + window], shared, strict=True)]


def _empty(maps: int, size: Sequence[int], axes: Axes, device: torch.device) -> Tensor:
    """Of this size along these axes; in memory the axes lie as the volume's do."""
    return torch.empty(maps, *_in_place(size, axes), device=device).permute(0, *(axis + 1 for axis in axes))


def _in_place(values: Sequence[int], axes: Axes) -> Axes:
    """Values along these axes, in the order of the volume's."""
    x, y, z = (values[axes.index(axis)] for axis in range(3))
    return x, y, z


def _move(strip: Tensor, kept: int, carried: Tensor) -> None:
    """Move the strip on, to where it shares `kept` rows with its last place and finds what slabs before have added."""
    step = strip.shape[2] - kept
    for row in range(0, kept, step):  # what is copied lies behind where it goes
        last = min(row + step, kept)
        strip[:, :, row:last] = strip[:, :, row + step : last + step]
    strip[:, : carried.shape[1], kept:] = carried
    strip[:, carried.shape[1] :, kept:] = 0


def _inside(strip: ProbabilityBlock) -> Iterator[ProbabilityBlock]:
    """The part of the strip that lies in the volume, if there is one, with a softmax of its logits in place."""
    x, y, z = (max(0, at) for at in strip.corner)
    limits = zip(strip.box, strip.sizes, (x, y, z), strict=True)
    ends = [(start - at.start, min(at.stop, size) - at.start) for at, size, start in limits]
    if all(first < last for first, last in ends):
        part = strip.probabilities[(slice(None), *itertools.starmap(slice, ends))]
        part.sub_(part.amax(0)).exp_()
        yield strip._replace(corner=(x, y, z), probabilities=part.div_(part.sum(0)))


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
    image: Tensor,
    corners: Sequence[Sequence[int]],
    window: Sequence[int],
    out_window: Sequence[int],
    strides: Sequence[int],
) -> tuple[Tensor, list[int]]:
    """The image with room for windows at `corners` of an output, and where in that output the volume begins.

    A padded network gets zeros (the mean) on all sides of a volume smaller than its window, a valid one mirrored
    context. There a volume shorter than an output lies in the middle of it, as in training, along axes without stride:
    along others, pooling would group other voxels than in a larger window.
    """
    has_border = any(w - o > 1 for w, o in zip(window, out_window, strict=True))
    widths, ahead = [(0, 0)], []
    for n, starts, w, o, stride in zip(image.shape[1:], corners, window, out_window, strides, strict=True):
        total = starts[-1] + o
        ahead.append(0 if has_border and (n >= o or stride > 1) else (total - n) // 2)
        before = (w - o) // 2 + ahead[-1]
        widths.append((before, total - n + w - o - before))  # w - o is odd where convolutions stride
    if not any(map(any, widths)):
        return image, ahead  # not a copy
    padded = np.pad(image.numpy(), widths, mode="reflect") if has_border else np.pad(image.numpy(), widths)
    return torch.from_numpy(padded), ahead


def gaussian(window: Sequence[int]) -> Tensor:
    """Weights of a window, falling towards its border (sigma an eighth of the length, as in nnU-Net), never 0."""
    weight = torch.ones(())
    for n in window:
        x = (torch.arange(n) - (n - 1) / 2) / (n / 8)
        weight = weight[..., None] * torch.exp(-(x**2) / 2).clamp(min=1e-3)
    return weight

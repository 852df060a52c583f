"""Whole volumes through a sliding window of the training patch's size; volumes and label maps of any size.

Memory holds a strip of windows and what later strips share with it, never a map of the volume for each class. On a GPU
these sums are in its memory where they fit beside a forward pass, else in the host's.

`windows` says where windows lie and how they are weighted, and adds them up.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from unet3d.base import progress
from unet3d.base.errors import NonFinitePrediction
from unet3d.base.types import ProbabilityBlock
from unet3d.config.schema import Model
from unet3d.model import geometry
from unet3d.training import windows
from unet3d.training.policy import MemoryPolicy, refuse_odd_logits
from unet3d.training.windows import Axes, Corners, HostMemory


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

    def probabilities(self, image: Tensor) -> Tensor:
        """Return all class probabilities K X Y Z of an image C X Y Z (normalised): gigabytes, for many classes.

        They are float32, on the CPU.
        """
        whole: Tensor | None = None
        for strip in self.strips(image):
            if whole is None:
                whole = strip.probabilities.new_empty(len(strip.probabilities), *strip.sizes)
            whole[(slice(None), *strip.box)] = strip.probabilities
        assert whole is not None
        return whole

    def _slide(self, image: Tensor, name: str) -> Iterator[ProbabilityBlock]:
        """Yield the strips of `strips`; networks are in evaluation mode."""
        x, y, z = image.shape[1:]
        out_window = geometry.output_size(self.window, self.options)
        strides = [math.prod(levels) for levels in zip((1, 1, 1), *geometry.strides(self.options), strict=True)]
        if self.options.padding == "valid":
            corners = windows.aligned_corners((x, y, z), out_window, strides)
            weight = torch.ones(out_window)
        else:
            corners = windows.even_corners((x, y, z), self.window, self.overlap)
            weight = windows.gaussian(out_window)
        axes = windows.scan_order(corners, out_window)
        padded, offset = windows.pad(image, corners, self.window, out_window, strides)
        on_device = self.sums_on_device
        if on_device is None:
            on_device = self.sums_fit(corners, out_window)
        # Of probabilities of one strip after another, if sums are on the device, else of logits.
        strip_size, _ = windows.sum_sizes(corners, out_window, axes)
        numbers = math.prod(strip_size) * (self.options.classes or 0) if on_device else 0
        host = HostMemory(is_pinned=self._device.type == "cuda", numbers=numbers)
        in_scan_order = itertools.product(*(corners[axis] for axis in axes))
        places = [windows.in_volume_order(place, axes) for place in in_scan_order]
        logits = self._logits(padded, places, host=None if on_device else host)
        for (a, b, c), means in windows.window_means(logits, corners, weight, axes):
            corner = (a - offset[0], b - offset[1], c - offset[2])
            block = ProbabilityBlock((x, y, z), axes, corner, means)
            strip = _probabilities_inside(block, self._has_regions)
            if strip is None:
                continue
            if on_device:
                strip = strip._replace(probabilities=host.take(strip.probabilities))
            # Softmax makes a voxel NaN in all classes; of regions, `window_logits` makes a whole window so.
            if not math.isfinite(strip.probabilities[0].sum().item()):
                raise self._not_finite(name)
            yield strip

    def _not_finite(self, name: str) -> NonFinitePrediction:
        """Return the error to raise for an image."""
        fault = f"{name}: outputs of the network are NaN or infinite: no class is the likeliest"
        if self.policy.dtype is torch.float16:
            advice = "numbers in fp16 end at 65,504: train with amp_dtype=bf16 or amp=false"
        else:
            advice = "take another checkpoint, or mend extreme values in the image"
        return NonFinitePrediction(f"{fault}; {advice}")

    @property
    def _has_regions(self) -> bool:
        return self.options.output_regions is not None

    @property
    def _device(self) -> torch.device:
        """Return the networks' device."""
        return next(self.models[0].parameters()).device

    def sums_fit(self, corners: Corners, out_window: Sequence[int]) -> bool:
        """Return whether the sums are predicted to fit on the networks' device, beside a pass."""
        if self.window_bytes is None or self.options.classes is None:
            return False
        needed = windows.sums_bytes(corners, out_window, self.options.classes) + self.window_bytes
        return needed <= windows.free_bytes(self._device)

    def _logits(self, padded: Tensor, places: Sequence[Axes], host: HostMemory | None) -> Iterator[Tensor]:
        """Yield logits K D H W of the windows at `places`, on the networks' device, or in `host` memory."""
        starts = range(0, len(places), self.batch)
        for start in progress.parts(starts, "windows", len(places)):
            batch = places[start : start + self.batch]
            logits = self.window_logits(self._tiles(padded, batch))
            if host is not None and logits.device.type != "cpu":
                logits = host.take(logits)
            of_windows = [*logits.unbind()]
            del logits  # so the batch is freed once the caller drops its last window
            while of_windows:
                yield of_windows.pop(0)

    def _tiles(self, padded: Tensor, places: Sequence[Axes]) -> Tensor:
        """Return the windows N C D H W at `places`, on the networks' device."""
        parts = [padded[windows.box(place, self.window)] for place in places]
        if self._device.type == "cpu" and len(parts) == 1:
            return parts[0][None]  # not a copy
        shape = (len(parts), *parts[0].shape)
        tiles = torch.empty(shape, dtype=padded.dtype, pin_memory=self._device.type == "cuda")
        # The copy may still run when `tiles` is let go of: torch gives its pages to no other tensor before it is over.
        return torch.stack(parts, out=tiles).to(self._device, non_blocking=True)

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
            if self._has_regions:
                logits = _sigmoid_in_place(logits)
            logits = logits.flip(flipped) if flipped else logits
            total = logits if total is None else total.add_(logits)
        assert total is not None
        passes = len(self.models) * len(mirrorings)
        return total.div_(passes) if passes > 1 else total


def _sigmoid_in_place(logits: Tensor) -> Tensor:
    """Return probabilities in the memory of logits, NaN if any is not finite: of an infinite one, sigmoid is finite."""
    flaw = logits.sum() * 0
    return logits.sigmoid_().add_(flaw)


def _probabilities_inside(strip: ProbabilityBlock, has_regions: bool) -> ProbabilityBlock | None:
    """Return the part of a strip that lies in the volume, after a softmax in place; None outside.

    Of regions, the strip has probabilities already, but for the rounding of means.
    """
    begin: list[int] = []
    inside: list[slice] = []  # in the strip
    for block, size in zip(strip.box, strip.sizes, strict=True):
        first = max(0, block.start)
        last = min(block.stop, size)
        if first >= last:
            return None
        begin.append(first)
        inside.append(slice(first - block.start, last - block.start))
    part = strip.probabilities[(slice(None), *inside)]
    if has_regions:
        part.clamp_(0, 1)
    else:
        part.sub_(part.amax(0)).exp_()
        part.div_(part.sum(0))
    x, y, z = begin
    return strip._replace(corner=(x, y, z), probabilities=part)

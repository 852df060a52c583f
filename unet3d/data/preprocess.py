"""From a case on disk to tensors ready for the network: a cache, normalised intensities, sparse annotation."""

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from unet3d import progress
from unet3d.config import Data
from unet3d.data.cases import Case, DatasetInfo
from unet3d.data.nifti import STRICT, ValidationRules, open_image, replacement
from unet3d.data.patches import PreparedCase, cached, foreground, prepare, subsample_indices
from unet3d.data.volume import Volume, read_volume, target_grid
from unet3d.errors import UserError
from unet3d.types import IGNORE, mib

T = TypeVar("T")
SAMPLED_VOXELS = 10_000  # foreground voxels a case, enough to settle the scale of CT


@dataclass(frozen=True)
class Intensity:
    """`zscore`: each volume to mean 0, std 1. `ct`: clip to low..high, then subtract mean and divide by std."""

    kind: str
    low: float = 0.0
    high: float = 0.0
    mean: float = 0.0
    std: float = 1.0


@dataclass
class CaseReader:
    """Prepares a case when called with it. `cache` None: reads from disk each time."""

    dataset: DatasetInfo
    spacing: list[float] | None
    intensity: tuple[Intensity, ...] = ()
    cache: dict[str, PreparedCase] | None = field(default_factory=dict, repr=False)
    rules: ValidationRules = STRICT
    warned: set[str] = field(default_factory=set, repr=False)  # cases with replaced voxels

    def __call__(self, case: Case) -> PreparedCase:
        return cached(self.cache, case, self._prepare)

    def raw(self, case: Case) -> Volume:
        """The volume as stored, except for orientation and spacing."""
        volume = read_volume(case, len(self.dataset.classes), self.dataset.ignore, self.spacing, self.rules)
        if volume.replaced and case.id not in self.warned:
            self.warned.add(case.id)
            print(f"warning: {case.id}: {replacement(volume.replaced)}", file=sys.stderr)
        return volume

    def refuse_more_than_memory(self, maps: Mapping[Case, int]) -> None:
        """Print the predicted size of these cases, each with so many label maps. Raises UserError if too large."""
        needed = 0
        for case, labels in maps.items():
            grid = target_grid(case, open_image(case.id, case.images[0]), self.spacing)
            needed += prod(grid.shape) * (4 * len(self.dataset.channels) + 2 * labels)  # float32, and int16
        available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        size = f"{len(maps)} cases kept in memory: {mib(needed)} MiB (predicted)"
        if needed >= available:
            raise UserError(f"{size}, of {mib(available)} MiB; add data.cache=false to read each case when it is used")
        print(size, flush=True)

    def fit_intensity(self, choice: str, train: Sequence[Case]) -> None:
        """Choose the normalisation, for CT by the training cases."""
        volumes = _usable(train, "measuring intensities", self.raw)
        self.intensity = intensity_rules(choice, self.dataset.channels, map(self._foreground, volumes))

    def fill(self, cases: Sequence[Case]) -> None:
        """Read every case now. Raises UserError that lists all that cannot be used."""
        for _ in _usable(cases, "reading cases", self):
            pass

    def _prepare(self, case: Case) -> PreparedCase:
        volume = self.raw(case)
        assert volume.label is not None, case.id
        image = normalise(volume.image, self.intensity)
        return prepare(case.id, image, volume.label, volume.spacing, self.dataset.ignore)

    def _foreground(self, volume: Volume) -> np.ndarray:
        assert volume.label is not None, volume.case
        used = volume.label > 0
        if self.dataset.ignore is not None:
            used &= volume.label != self.dataset.ignore
        voxels = volume.image[:, used]
        return voxels[:, subsample_indices(voxels.shape[1], SAMPLED_VOXELS)]


def _usable(cases: Sequence[Case], what: str, read: Callable[[Case], T]) -> Iterator[T]:
    """Each case read. Raises UserError at the end that lists all cases that cannot be used."""
    problems = []
    for case in progress.track(cases, what, len(cases)):
        try:
            found = read(case)
        except UserError as error:
            problems.append(str(error))
        else:
            yield found
    if problems:
        raise UserError("\n".join(problems))


def intensity_rules(choice: str, channels: Sequence[str], foreground: Iterable[np.ndarray]) -> tuple[Intensity, ...]:
    """One rule a channel; `foreground` yields the intensities (C, voxels) of training cases, used only for CT."""
    auto = ["ct" if name.upper() == "CT" else "zscore" for name in channels]
    kinds = auto if choice == "auto" else [choice] * len(channels)
    if "ct" not in kinds:
        return tuple(Intensity(kind) for kind in kinds)
    values = np.concatenate(list(foreground), axis=1)
    if not values.size:
        raise UserError("data.intensity=ct: no training case has a foreground voxel to take the scale from; use zscore")
    return tuple(_ct(values[i]) if kind == "ct" else Intensity(kind) for i, kind in enumerate(kinds))


def _ct(values: np.ndarray) -> Intensity:
    """CT numbers mean the same in every scan: these are nnU-Net's percentiles, mean and std (arXiv:1809.10486)."""
    low, high = np.percentile(values, [0.5, 99.5])
    clipped = values.clip(low, high)
    return Intensity("ct", float(low), float(high), float(clipped.mean()), float(clipped.std()) if low < high else 1.0)


def checked_intensity(values: Any) -> Intensity:
    """The rule that a snapshot holds as plain values. Raises ValueError or TypeError if they are not a rule."""
    rule = Intensity(**values)
    is_finite = np.isfinite([float(number) for number in (rule.low, rule.high, rule.mean, rule.std)]).all()
    if rule.kind not in ("zscore", "ct", "none") or not is_finite or rule.std <= 0:
        raise ValueError(f"not a rule of intensity: {values}")
    return rule


def normalise(image: np.ndarray, rules: Sequence[Intensity]) -> np.ndarray:
    """Float32 C X Y Z with each channel's rule applied; a constant channel becomes 0."""
    return np.stack([_apply(channel, rule) for channel, rule in zip(image, rules, strict=True)])


def _apply(channel: np.ndarray, rule: Intensity) -> np.ndarray:
    if rule.kind == "none":
        return channel.astype(np.float32)
    if rule.kind == "ct":
        return ((channel.clip(rule.low, rule.high) - rule.mean) / rule.std).astype(np.float32)
    std = channel.std(dtype=np.float64) if channel.min() < channel.max() else 1.0
    normal: np.ndarray = (channel - channel.mean(dtype=np.float64)) / std
    return normal.astype(np.float32)


@dataclass(frozen=True)
class SparseReader:
    """Reads a case with the labels of some slices only: the learned or the scored ones. The image is `read`'s."""

    read: Callable[[Case], PreparedCase]
    options: Data
    scored: bool
    cache: dict[str, PreparedCase] | None

    def __call__(self, case: Case) -> PreparedCase:
        return cached(self.cache, case, self._masked)

    def _masked(self, case: Case) -> PreparedCase:
        dense = self.read(case)
        mask = (scored_mask if self.scored else learned_mask)(dense.label, self.options)
        label = dense.label.masked_fill(~mask, IGNORE)
        if (label == IGNORE).all():
            purpose = "scored" if self.scored else "learned"
            more = " and data.scored" if self.options.semi and self.options.sparse_fold is None else ""
            raise UserError(f"{case.id}: no label is left to be {purpose}; choose other numbers in data.sparse{more}")
        return replace(dense, label=label, foreground=foreground(label.numpy()))


def learned_mask(label: Tensor, options: Data) -> Tensor:
    """Which voxels of a label map X Y Z are learned from."""
    return planes(label.shape, learned_slices(label, options))


def scored_mask(label: Tensor, options: Data) -> Tensor:
    """Which voxels are scored: those of scored slices that no learned slice crosses."""
    return planes(label.shape, scored_slices(label, options)) & ~learned_mask(label, options)


def learned_slices(label: Tensor, options: Data) -> list[list[int]]:
    """Slices along each axis: those of `options.sparse`, without the part of `options.sparse_fold`."""
    return [[index for index, part in axis if part != options.sparse_fold] for axis in _parts(label, options)]


def scored_slices(label: Tensor, options: Data) -> list[list[int]]:
    """Slices along each axis: the part of `options.sparse_fold`, or those of `options.scored`."""
    if options.sparse_fold is not None:
        return [[index for index, part in axis if part == options.sparse_fold] for axis in _parts(label, options)]
    return [
        [round(low + (k + 1) / (count + 1) * (high - low)) for k in range(count)]
        for (low, high), count in zip(extent(label), options.scored, strict=True)
    ]


def _parts(label: Tensor, options: Data) -> list[list[tuple[int, int]]]:
    """(slice, the part that it belongs to) along each axis; neighbours belong to different parts."""
    assert options.sparse is not None
    return [
        [(round(low + (k + 0.5) / count * (high - low)), k % options.sparse_folds) for k in range(count)]
        for (low, high), count in zip(extent(label), options.sparse, strict=True)
    ]


def extent(label: Tensor) -> list[tuple[int, int]]:
    """First and last voxel of the foreground along each axis; of the volume if it has none."""
    from scipy.ndimage import find_objects  # takes a third of a second to load

    boxes = find_objects((label.numpy() > 0).astype(np.uint8)) or [tuple(slice(0, n) for n in label.shape)]
    return [(axis.start, axis.stop - 1) for axis in boxes[0]]


def planes(shape: torch.Size, slices: list[list[int]]) -> Tensor:
    """A mask of the slices: bool X Y Z."""
    mask = torch.zeros(shape, dtype=torch.bool)
    for axis, indices in enumerate(slices):
        mask.index_fill_(axis, torch.tensor(indices, dtype=torch.long), True)
    return mask

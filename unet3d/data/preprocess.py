"""From a case on disk to tensors ready for the network: intensities, sparse annotation, a cache."""

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

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


@dataclass(frozen=True)
class Intensity:
    """`zscore`: each volume to mean 0, std 1. `ct`: clip to low..high, then subtract mean and divide by std."""

    kind: str
    low: float = 0.0
    high: float = 0.0
    mean: float = 0.0
    std: float = 1.0


def checked_intensity(values: Any) -> Intensity:
    """The rule of a snapshot's plain values. Raises ValueError or TypeError for what is none."""
    rule = Intensity(**values)
    numbers = [float(number) for number in (rule.low, rule.high, rule.mean, rule.std)]
    if rule.kind not in ("zscore", "ct", "none") or not np.isfinite(numbers).all() or rule.std <= 0:
        raise ValueError(f"no rule of intensity: {values}")
    return rule


def intensity_rules(choice: str, channels: Sequence[str], foreground: Iterable[np.ndarray]) -> tuple[Intensity, ...]:
    """One rule a channel. `foreground` yields training foreground intensities (C, voxels), read only for CT.

    CT numbers mean the same in every scan, so their range is taken from the training set: percentiles 0.5 and 99.5 of
    the foreground, its mean and std (nnU-Net, arXiv:1809.10486). Other modalities have no such scale.
    """
    kinds = [_kind(choice, name) for name in channels]
    if "ct" not in kinds:
        return tuple(Intensity(kind) for kind in kinds)
    values = np.concatenate(list(foreground), axis=1)
    if not values.size:
        raise UserError("data.intensity=ct: no training case has a foreground voxel to take the scale from; use zscore")
    return tuple(_ct(values[i]) if kind == "ct" else Intensity(kind) for i, kind in enumerate(kinds))


def normalise(image: np.ndarray, rules: Sequence[Intensity]) -> np.ndarray:
    """Float32 C X Y Z with each channel's rule applied; a constant channel becomes 0."""
    assert len(image) == len(rules), (len(image), len(rules))
    return np.stack([_apply(channel, rule) for channel, rule in zip(image, rules, strict=True)])


def _kind(choice: str, channel: str) -> str:
    if choice == "auto":
        return "ct" if channel.upper() == "CT" else "zscore"
    return choice


def _ct(values: np.ndarray) -> Intensity:
    low, high = np.percentile(values, [0.5, 99.5])
    clipped = values.clip(low, high)
    return Intensity("ct", float(low), float(high), float(clipped.mean()), float(clipped.std()) if low < high else 1.0)


def _apply(channel: np.ndarray, rule: Intensity) -> np.ndarray:
    if rule.kind == "none":
        return channel.astype(np.float32)
    if rule.kind == "ct":
        return ((channel.clip(rule.low, rule.high) - rule.mean) / rule.std).astype(np.float32)
    std = channel.std(dtype=np.float64) if np.ptp(channel) else 1.0
    normal: np.ndarray = (channel - channel.mean(dtype=np.float64)) / std
    return normal.astype(np.float32)


SAMPLED_VOXELS = 10_000  # about as many foreground voxels a case settle the scale of CT


@dataclass
class CaseReader:
    """Call it with a case. `cache` None: read from disk each time."""

    dataset: DatasetInfo
    spacing: list[float] | None
    intensity: tuple[Intensity, ...] = ()
    cache: dict[str, PreparedCase] | None = field(default_factory=dict, repr=False)
    leniency: ValidationRules = STRICT
    told: set[str] = field(default_factory=set, repr=False)  # cases whose replaced voxels were told

    def __call__(self, case: Case) -> PreparedCase:
        return cached(self.cache, case, self._prepare)

    def raw(self, case: Case) -> Volume:
        """The volume as stored, but for orientation and spacing."""
        volume = read_volume(case, len(self.dataset.classes), self.dataset.ignore, self.spacing, self.leniency)
        if volume.replaced and case.id not in self.told:
            self.told.add(case.id)
            print(f"warning: {case.id}: {replacement(volume.replaced)}", file=sys.stderr)
        return volume

    def refuse_more_than_memory(self, maps: Mapping[Case, int]) -> None:
        """Say what the prepared cases take, each with so many label maps; their headers tell.

        Raises UserError where it is all memory or more.
        """
        needed = 0
        for case, labels in maps.items():
            grid = target_grid(case, open_image(case.id, case.images[0]), self.spacing)
            needed += prod(grid.shape) * (4 * len(self.dataset.channels) + 2 * labels)  # float32, and int16
        there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        said = f"{len(maps)} cases kept in memory: {mib(needed)} MiB (predicted)"
        if needed >= there:
            raise UserError(f"{said}, of {mib(there)} MiB; add data.cache=false to read each when its turn comes")
        print(said, flush=True)

    def fit_intensity(self, choice: str, train: Sequence[Case]) -> None:
        """Settle the normalisation from the training cases."""
        self.intensity = intensity_rules(choice, self.dataset.channels, self._foreground(train))

    def fill(self, cases: Sequence[Case]) -> None:
        """Read every case now. Raises UserError that lists all that cannot be used."""
        problems = []
        with progress.counting("reading cases", len(cases)) as counter:
            for case in cases:
                try:
                    self(case)
                except UserError as error:
                    problems.append(str(error))
                counter.advance()
        _refuse(problems)

    def _prepare(self, case: Case) -> PreparedCase:
        volume = self.raw(case)
        assert volume.label is not None, case.id
        image = normalise(volume.image, self.intensity)
        return prepare(volume.case, image, volume.label, volume.spacing, self.dataset.ignore)

    def _foreground(self, cases: Sequence[Case]) -> Iterator[np.ndarray]:
        problems = []
        for case in progress.track(cases, "measuring intensities", len(cases)):
            try:
                volume = self.raw(case)
            except UserError as error:
                problems.append(str(error))
                continue
            assert volume.label is not None, case.id
            learned = volume.label > 0
            if self.dataset.ignore is not None:
                learned &= volume.label != self.dataset.ignore
            voxels = volume.image[:, learned]
            yield voxels[:, subsample_indices(voxels.shape[1], SAMPLED_VOXELS)]
        _refuse(problems)


def _refuse(problems: list[str]) -> None:
    if problems:
        raise UserError("\n".join(problems))


@dataclass(frozen=True)
class SparseReader:
    """Reads a case with the labels of some slices alone; the image is shared with the dense one."""

    read: Callable[[Case], PreparedCase]
    options: Data
    mask: Callable[[Tensor, Data], Tensor]
    cache: dict[str, PreparedCase] | None

    def __call__(self, case: Case) -> PreparedCase:
        return cached(self.cache, case, self._masked)

    def _masked(self, case: Case) -> PreparedCase:
        dense = self.read(case)
        label = dense.label.masked_fill(~self.mask(dense.label, self.options), IGNORE)
        if (label == IGNORE).all():
            use = f"choose other numbers in {self._chosen()}"
            raise UserError(f"{case.id}: no labelled voxel is left to be {self.mask.__name__}; {use}")
        return replace(dense, label=label, foreground=foreground(label.numpy()))

    def _chosen(self) -> str:
        scores_others = self.options.semi and self.options.sparse_fold is None
        return "data.sparse and data.scored" if scores_others else "data.sparse"


def learned_mask(label: Tensor, options: Data) -> Tensor:
    """Which voxels of a label map X Y Z are learned from."""
    return planes(label.shape, learned_slices(label, options))


def scored_mask(label: Tensor, options: Data) -> Tensor:
    """Which voxels are scored: those of held-out slices that no learned slice crosses."""
    return planes(label.shape, scored_slices(label, options)) & ~learned_mask(label, options)


def learned_slices(label: Tensor, options: Data) -> list[list[int]]:
    """Slices along each axis."""
    parts = _parts(label, options)
    return [
        [index for index, part in axis if options.sparse_fold is None or part != options.sparse_fold] for axis in parts
    ]


def scored_slices(label: Tensor, options: Data) -> list[list[int]]:
    """Slices along each axis: those of the part left out, or those of `options.scored`."""
    if options.sparse_fold is None:
        return [
            [round(low + (k + 1) / (count + 1) * (high - low)) for k in range(count)]
            for (low, high), count in zip(extent(label), options.scored, strict=True)
        ]
    return [[index for index, part in axis if part == options.sparse_fold] for axis in _parts(label, options)]


def planes(shape: torch.Size, slices: list[list[int]]) -> Tensor:
    """A mask of the slices: bool X Y Z."""
    mask = torch.zeros(shape, dtype=torch.bool)
    for axis, indices in enumerate(slices):
        mask.index_fill_(axis, torch.tensor(indices, dtype=torch.long), True)
    return mask


def extent(label: Tensor) -> list[tuple[int, int]]:
    """First and last voxel of the foreground along each axis; of the volume where there is none."""
    there = label.numpy() > 0
    if not there.any():
        return [(0, n - 1) for n in label.shape]
    found = (np.flatnonzero(there.any(axis=axes)) for axes in ((1, 2), (0, 2), (0, 1)))
    return [(int(at[0]), int(at[-1])) for at in found]


def _parts(label: Tensor, options: Data) -> list[list[tuple[int, int]]]:
    """(slice, the part it belongs to) along each axis; neighbours belong to different parts."""
    assert options.sparse is not None
    return [
        [(round(low + (k + 0.5) / count * (high - low)), k % options.sparse_folds) for k in range(count)]
        for (low, high), count in zip(extent(label), options.sparse, strict=True)
    ]

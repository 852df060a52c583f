"""From a case on disk to tensors ready for the network: a cache, normalised intensities, sparse annotation."""

import math
import secrets
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import prod
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from unet3d.base import progress, ranks
from unet3d.base.errors import UserError, escaped, listed
from unet3d.base.types import IGNORE, host_bytes, mib
from unet3d.config.schema import Data
from unet3d.data.case_arrays import CASE, LABELS, fit_case, fit_kinds, fit_labels, label_arrays, labels_of
from unet3d.data.cases import Case, DatasetInfo
from unet3d.data.disk_cache import Arrays, DiskCache, key_of
from unet3d.data.nifti import STRICT, ValidationRules, open_image, problem, replacement
from unet3d.data.patches import PreparedCase, cached, foreground, prepare, subsample_indices
from unet3d.data.validate import content_hashes
from unet3d.data.volume import Volume, read_volume, target_grid

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
    """Prepares a case when called with it, or maps what `disk` holds of it. `cache` None: each time."""

    dataset: DatasetInfo
    spacing: list[float] | None
    intensity: tuple[Intensity, ...] = ()
    cache: dict[str, PreparedCase] | None = field(default_factory=dict, repr=False)
    rules: ValidationRules = STRICT
    warned: set[str] = field(default_factory=set, repr=False)  # cases with replaced voxels
    disk: DiskCache | None = None
    files: Mapping[str, Any] = field(default_factory=dict, repr=False)  # `content_hashes` by case id, for `disk`

    def __call__(self, case: Case) -> PreparedCase:
        return cached(self.cache, case, self._prepare if self.disk is None else self._map)

    def raw(self, case: Case) -> Volume:
        """The volume as stored, except for orientation and spacing."""
        volume = read_volume(
            case, len(self.dataset.classes), self.dataset.ignore, self.spacing, self.rules, self.dataset.relabel
        )
        self._warn(case, volume.replaced)
        return volume

    def refuse_more_than_memory(self, maps: Mapping[Case, int]) -> None:
        """Print the predicted size of these cases, each with so many label maps. Raises UserError if too large."""
        needed = sum(self._bytes(case, maps[case]) for case in maps) * ranks.LOCAL_SIZE
        available = host_bytes()
        each = f" by each of {ranks.LOCAL_SIZE} ranks" if ranks.LOCAL_SIZE > 1 else ""
        size = f"{len(maps)} cases kept in memory{each}: {mib(needed)} MiB (predicted)"
        if needed >= available:
            raise UserError(f"{size}, of {mib(available)} MiB; add data.cache=disk to keep them in files")
        print(size, flush=True)

    def refuse_more_than_disk(self, maps: Mapping[Case, int]) -> None:
        """The same for the disk, where some may be already."""
        assert self.disk is not None
        sizes = {case: self._bytes(case, maps[case]) for case in maps}
        missing = [case for case in maps if not self.disk.holds(self.key(case))]
        if missing:
            self.disk.sweep()
        needed, free = sum(sizes[case] for case in missing), self.disk.room()
        where = f"{len(maps)} cases kept in {escaped(self.disk.root)}: {mib(sum(sizes.values()))} MiB (predicted)"
        print(f"{where}, {len(missing)} of them to prepare", flush=True)
        if needed >= free:
            what = f"{mib(needed)} MiB to write, but {mib(free)} MiB free; make room, or give another data.cache_root"
            raise UserError(f"data.cache=disk: {self.disk.root}: {what}")

    def fit_intensity(self, choice: str, train: Sequence[Case]) -> None:
        """Choose the normalisation, for CT by the training cases."""
        self.intensity = intensity_rules(choice, self.dataset.channels, self._samples(train))

    def fill(self, cases: Sequence[Case]) -> None:
        """Read every case now. Raises UserError that lists all that cannot be used."""
        for _ in _usable(self._ordered(cases), "reading cases", self):
            pass

    def key(self, case: Case, *about: object) -> str:
        """The name on disk of what is prepared from this case by these options, and by those of `about`."""
        found = (self.files[case.id][kind] for kind in ("images", "labels"))
        hashes = [one["full"] or [one["sample"], one["times"]] for one in found]
        options: tuple = len(self.dataset.classes), self.dataset.ignore, self.spacing, self.rules
        if self.dataset.relabel is not None:
            options += (sorted(self.dataset.relabel.items()),)
        return key_of(hashes, options, [asdict(rule) for rule in self.intensity], about)

    def _bytes(self, case: Case, labels: int) -> int:
        grid = target_grid(case, open_image(case.id, case.images[0]), self.spacing)
        return prod(grid.shape) * (4 * len(self.dataset.channels) + 2 * labels)  # float32, and int16

    def _ordered(self, cases: Sequence[Case]) -> Sequence[Case]:
        """At random where other processes may prepare the same cases: they wait for each other less."""
        return cases if self.disk is None else secrets.SystemRandom().sample(cases, len(cases))

    def _warn(self, case: Case, replaced: int) -> None:
        if replaced and case.id not in self.warned:
            self.warned.add(case.id)
            print(f"warning: {case.id}: {replacement(replaced)}", file=sys.stderr)

    def _prepare(self, case: Case) -> PreparedCase:
        return self._prepared(self.raw(case))

    def _prepared(self, volume: Volume) -> PreparedCase:
        assert volume.label is not None, volume.case
        image = normalise(volume.image, self.intensity)
        return prepare(volume.case, image, volume.label, volume.spacing, self.dataset.ignore)

    def _map(self, case: Case) -> PreparedCase:
        """The case with an image and a label map that are read from `disk` where they are used."""
        assert self.disk is not None
        channels = len(self.dataset.channels)
        arrays = self.disk.read(
            self.key(case), CASE, lambda: self._arrays(case), lambda found: fit_case(found, channels)
        )
        self._warn(case, int(arrays["replaced"]))
        image, (label, voxels), (x, y, z) = arrays["image"], labels_of(arrays), arrays["spacing"].tolist()
        return PreparedCase(case.id, torch.from_dlpack(image), label, (x, y, z), voxels)

    def _arrays(self, case: Case) -> Arrays:
        volume = self.raw(case)
        found = self._prepared(volume)
        self._refuse_changed(case)
        values = {"spacing": np.array(found.spacing), "replaced": np.array(volume.replaced)}
        return {"image": found.image.numpy(), **label_arrays(found), **values}

    def _refuse_changed(self, case: Case) -> None:
        """Raise UserError where the files are not those any more whose hashes name what is written."""
        now, before = content_hashes(case, full=False), self.files[case.id]
        if any(now[kind][of] != before[kind][of] for kind in now for of in ("sample", "times")):
            raise problem(case.id, case.images[0], "changed while it was prepared, or its label map; start again")

    def _samples(self, train: Sequence[Case]) -> Iterator[np.ndarray]:
        """Foreground voxels (C, n) of each case, in this order."""
        if self.disk is None:
            yield from map(self._foreground, _usable(train, "measuring intensities", self.raw))
            return
        for _ in _usable(self._ordered(train), "measuring intensities", self._sample):
            pass
        yield from map(self._sample, train)

    def _sample(self, case: Case) -> np.ndarray:
        assert self.disk is not None

        def make() -> Arrays:
            found = self._foreground(self.raw(case))
            self._refuse_changed(case)
            return {"voxels": found}

        channels = len(self.dataset.channels)
        key = self.key(case, "foreground")
        found = self.disk.read(key, ("voxels",), make, lambda kept: fit_kinds(kept) and len(kept["voxels"]) == channels)
        return found["voxels"]

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
        raise UserError("\n".join(listed(problems)))


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
    """The rule that a checkpoint holds as plain values. Raises ValueError or TypeError if they are not a rule."""
    rule = Intensity(**values)
    numbers = (rule.low, rule.high, rule.mean, rule.std)
    are_finite = all(isinstance(number, int | float) and math.isfinite(number) for number in numbers)
    if rule.kind not in ("zscore", "ct", "none") or not are_finite or rule.std <= 0:
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

    read: CaseReader
    options: Data
    scored: bool
    cache: dict[str, PreparedCase] | None

    def __call__(self, case: Case) -> PreparedCase:
        return cached(self.cache, case, self._make)

    def _make(self, case: Case) -> PreparedCase:
        dense, options = self.read(case), self.options
        if self.read.disk is None:
            return self._masked(dense)
        slices = options.sparse, options.sparse_folds, options.sparse_fold, options.scored, self.scored
        key = self.read.key(case, *slices)
        arrays = self.read.disk.read(
            key, LABELS, lambda: label_arrays(self._masked(dense)), lambda found: fit_labels(found, dense.label.shape)
        )
        label, voxels = labels_of(arrays)
        return replace(dense, label=label, foreground=voxels)

    def _masked(self, dense: PreparedCase) -> PreparedCase:
        mask = (scored_mask if self.scored else learned_mask)(dense.label, self.options)
        label = dense.label.masked_fill(~mask, IGNORE)
        if (label == IGNORE).all():
            purpose = "scored" if self.scored else "learned"
            more = " and data.scored" if self.options.semi and self.options.sparse_fold is None else ""
            what = f"no label is left to be {purpose}; choose other numbers in data.sparse{more}"
            raise UserError(f"{dense.case}: {what}")
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

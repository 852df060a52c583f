"""Read the files of a case as tensors ready for the network, kept in memory, on disk or not at all.

Of sparse annotation, labels of some slices are learned, of others scored (Cicek et al. 2016).
"""

import secrets
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from unet3d.base import progress
from unet3d.base.errors import UserError
from unet3d.base.types import IGNORE
from unet3d.config.schema import Data
from unet3d.data.cache import Arrays, DiskCache, Shapes, key_of
from unet3d.data.cases import Case, DatasetInfo, raise_listed
from unet3d.data.intensity import Intensity, Seen, foreground_sample, normalise
from unet3d.data.nifti import problem, replacement
from unet3d.data.patches import PreparedCase, cached, foreground, prepare
from unet3d.data.scan import DIGEST, CaseHeader, channel_digest, have_changed, image_digest
from unet3d.data.volume import Grid, ImageFiles, LabelValues, UnknownLabels, Volume, read_volume

T = TypeVar("T")
Slices = list[list[int]]  # indices along each axis


@dataclass
class CaseReader:
    """Prepares a case when called with it, or maps what `disk` holds of it. `cache` None: each time."""

    dataset: DatasetInfo
    spacing: list[float] | None
    intensity: tuple[Intensity, ...] = ()
    cache: dict[str, PreparedCase] | None = field(default_factory=dict, repr=False)
    replaced: dict[str, int] = field(default_factory=dict, repr=False)  # by case id, voxels that were not finite
    disk: DiskCache | None = None
    headers: Mapping[str, CaseHeader] = field(default_factory=dict, repr=False)  # by case id, for `disk` with hashes
    files: ImageFiles = field(default_factory=ImageFiles, repr=False)
    seen: Seen | None = field(default=None, repr=False)  # what the training cases are like, once they were measured

    def __call__(self, case: Case) -> PreparedCase:
        return cached(self.cache, case, self._prepare if self.disk is None else self._map)

    def read_volume(self, case: Case) -> Volume:
        """Read the volume on the network's grid, not yet normalised. Raises UserError, also if files have changed.

        Labels are classes already, and with data.nonfinite=zero NaN and infinite voxels are 0.
        """
        volume = read_volume(case, LabelValues.of_files(self.dataset), self.spacing, self.files)
        if case.id in self.headers and have_changed(case, self.headers[case.id].hashes):
            raise problem(case.id, case.images[0], "changed since its header was read, or its label map; start again")
        self._note(case, volume.nonfinite_voxels)
        return volume

    def as_case(self, volume: Volume) -> PreparedCase:
        """Return a volume as a training case, its image as it is."""
        assert volume.label is not None, volume.case_id
        return prepare(volume.case_id, volume.image, volume.label, volume.grid.spacing, self.dataset.ignore)

    def digest(self, case: Case) -> bytes:
        """Return the digest of the prepared image, by which twins are found."""
        if self.disk is not None:
            return self._arrays(case)["digest"].tobytes()
        return image_digest(map(channel_digest, self(case).image.numpy()))

    def foreground(self, case: Case) -> np.ndarray:
        """Return foreground voxels (C, n) of a case, not normalised; from `disk` where there is one."""
        if self.disk is None:
            return self.foreground_of(self.read_volume(case))
        shapes: Shapes = {"voxels": (len(self.dataset.channels), None)}
        key = self.key(case, "foreground")
        return self.disk.read(key, shapes, lambda: {"voxels": self.foreground_of(self.read_volume(case))})["voxels"]

    def foreground_of(self, volume: Volume) -> np.ndarray:
        """Return foreground voxels (C, n) of a volume."""
        assert volume.label is not None, volume.case_id
        return foreground_sample(volume.image, volume.label, self.dataset.ignore)

    def key(self, case: Case, *about: object) -> str:
        """Return the name on disk of what is prepared from this case by the reader's options, and `about`."""
        parts = self.headers[case.id].hashes.values()
        hashes = [part["full"] or [part["sample"], part["times"]] for part in parts]
        relabel = sorted((self.dataset.relabel or {}).items())
        labels = (self.dataset.label_count, self.dataset.ignore, relabel)
        accepted = (self.files.replaces_nonfinite, self.files.accepts_apart)
        return key_of(hashes, labels, self.spacing, accepted, case.affine, [*map(asdict, self.intensity)], about)

    def _note(self, case: Case, nonfinite_voxels: int) -> None:
        """Print a warning about a case's voxels that were not finite, once."""
        if nonfinite_voxels and case.id not in self.replaced:
            print(f"warning: {case.id}: {replacement(nonfinite_voxels)}", file=sys.stderr)
        self.replaced[case.id] = nonfinite_voxels

    def _prepare(self, case: Case) -> PreparedCase:
        volume = self.read_volume(case)
        normalise(volume.image, self.intensity)
        return self.as_case(volume)

    def _map(self, case: Case) -> PreparedCase:
        """Return the case with an image and a label map that are read from `disk` where they are used."""
        arrays = self._arrays(case)
        self._note(case, int(arrays["replaced"]))
        label, voxels = labels_of(arrays)
        return PreparedCase(case.id, torch.from_dlpack(arrays["image"]), label, self.grid(case).spacing, voxels)

    def grid(self, case: Case) -> Grid:
        """Return the grid that the network sees, by the case's header."""
        grid = self.headers[case.id].target
        assert grid is not None, case.id
        return grid

    def _arrays(self, case: Case) -> Arrays:
        """Return the prepared case as arrays on disk. Raises UserError."""

        def make() -> Arrays:
            prepared = self._prepare(case)
            image = prepared.image.numpy()
            more = {
                "replaced": np.array(self.replaced[case.id]),
                "digest": np.frombuffer(image_digest(map(channel_digest, image)), np.uint8),
            }
            return {"image": image, **label_arrays(prepared), **more}

        shape = self.grid(case).shape
        image = (len(self.dataset.channels), *shape)
        shapes: Shapes = {"image": image, **label_shapes(shape), "replaced": (), "digest": (DIGEST,)}
        assert self.disk is not None
        return self.disk.read(self.key(case), shapes, make)


def label_shapes(shape: tuple[int, ...]) -> Shapes:
    """Return the shapes of `label_arrays` of a case of this shape."""
    return {"label": shape, "centres": (None, 4)}


def label_arrays(case: PreparedCase) -> Arrays:
    """Return a label map, and the voxels of its classes in one array."""
    numbered = [np.insert(voxels, 0, number, axis=1) for number, voxels in enumerate(case.foreground)]
    return {"label": case.label.numpy(), "centres": np.concatenate([np.empty((0, 4), np.int32), *numbered])}


def labels_of(arrays: Arrays) -> tuple[Tensor, tuple[np.ndarray, ...]]:
    """Return the label map and the voxels of its classes, from `label_arrays`."""
    centres = arrays["centres"]
    classes = min(int(centres[-1, 0]) + 1, len(centres)) if len(centres) else 0  # each has a voxel
    starts = np.searchsorted(centres[:, 0], range(classes))  # Their numbers ascend: few of them are read.
    return torch.from_dlpack(arrays["label"]), tuple(np.split(centres[:, 1:], starts)[1:])


def usable(
    cases: Sequence[Case], what: str, read: Callable[[Case], T], at_random: bool = False
) -> Iterator[tuple[Case, T]]:
    """Yield each case, and what is read of it. Raises UserError at the end that lists all that cannot be used.

    `at_random`: in another order than other processes, which may read and write them on disk, too.
    """
    problems = list[UserError]()
    ordered = secrets.SystemRandom().sample(cases, len(cases)) if at_random else cases
    for case in progress.track(ordered, what, len(cases)):
        try:
            result = read(case)
        except UserError as error:
            problems.append(error)
        else:
            yield case, result
    lines = [*map(str, problems)]
    unknown = sum(isinstance(error, UnknownLabels) for error in problems)
    if unknown > 1:  # what suits one map may not suit another
        what = "python -m unet3d check-data looks at all maps, and says what suits them"
        lines.insert(0, f"{unknown} label maps hold other labels: {what}")
    raise_listed(lines)


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
        dense = self.read(case)
        disk = self.read.disk
        if disk is None:
            return self._masked(dense)
        options = self.options
        slices = (options.sparse, options.sparse_folds, options.sparse_fold, options.scored, self.scored)
        shapes = label_shapes(tuple(dense.label.shape))
        arrays = disk.read(self.read.key(case, *slices), shapes, lambda: label_arrays(self._masked(dense)))
        label, voxels = labels_of(arrays)
        return replace(dense, label=label, foreground=voxels)

    def _masked(self, dense: PreparedCase) -> PreparedCase:
        """Return the case without the labels of other slices. Raises UserError if none is left."""
        options = self.options
        label = dense.label.masked_fill(~chosen_mask(dense.label, options, self.scored), IGNORE)
        if (label == IGNORE).all():
            purpose = "scored" if self.scored else "learned"
            remedy = "choose other numbers in data.sparse"
            if options.semi and options.sparse_fold is None:
                remedy += " and data.scored"
            raise UserError(f"{dense.case_id}: no label is left to be {purpose}; {remedy}")
        return replace(dense, label=label, foreground=foreground(label.numpy()))


def chosen_mask(label: Tensor, options: Data, scored: bool) -> Tensor:
    """Return the voxels of a label map X Y Z that are scored or learned, bool; where both cross, they are learned."""
    mask = planes(label.shape, chosen_slices(label, options, scored))
    return mask & ~chosen_mask(label, options, False) if scored else mask


def chosen_slices(label: Tensor, options: Data, scored: bool) -> Slices:
    """Return the slices of data.sparse that are scored, the part data.sparse_fold, or learned, the other parts.

    Without parts those of data.scored and of data.sparse. Neighbours belong to different parts.
    """
    assert options.sparse is not None
    fold = options.sparse_fold
    counts, first, more = (options.scored, 1.0, 1) if scored and fold is None else (options.sparse, 0.5, 0)
    slices = Slices()
    for (low, high), count in zip(extent(label), counts, strict=True):
        axis = [round(low + (k + first) / (count + more) * (high - low)) for k in range(count)]
        slices.append([n for k, n in enumerate(axis) if fold is None or (k % options.sparse_folds == fold) == scored])
    return slices


def extent(label: Tensor) -> list[tuple[int, int]]:
    """Return the first and last voxel of the foreground along each axis; of the volume if it has none."""
    from scipy.ndimage import find_objects  # takes a third of a second to load

    boxes = find_objects((label.numpy() > 0).astype(np.uint8))
    if not boxes:
        return [(0, n - 1) for n in label.shape]
    return [(axis.start, axis.stop - 1) for axis in boxes[0]]


def planes(shape: torch.Size, slices: Slices) -> Tensor:
    """Return a mask of the slices, bool X Y Z."""
    x, y, z = slices
    mask = torch.zeros(shape, dtype=torch.bool)
    mask[x] = True
    mask[:, y] = True
    mask[:, :, z] = True
    return mask

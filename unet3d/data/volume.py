"""A case as arrays on one grid, with RAS+ axes, one spacing and exact labels; and label maps: each voxel is a class."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import nibabel as nib
import numpy as np
from nibabel.affines import voxel_sizes
from nibabel.arrayproxy import ArrayProxy
from nibabel.orientations import apply_orientation

from unet3d.base.errors import UserError
from unet3d.data import nifti
from unet3d.data.cases import Case, DatasetInfo
from unet3d.data.grids import CUBIC, Grid, canonical_grid, contradictions, resample, resample_labels, target_grid
from unet3d.data.labels import Relabel, proposal
from unet3d.data.nifti import OpenFile, open_image, read_image
from unet3d.data.scan import ImageFiles, read_grid

ROUNDING = 1e-6  # float32's relative rounding of a scaled label
QUANTUM = 1e-3  # the largest rounding of a label to a file's integers
LABELS_LISTED = 5  # unknown labels in a message


class LabelValues(NamedTuple):
    """What label maps may hold: classes below a number and `ignore`; or the keys of `relabel`, which become these."""

    classes: int
    ignore: int | None = None
    relabel: Relabel = None

    @classmethod
    def of_files(cls, dataset: DatasetInfo) -> "LabelValues":
        """Return those of a data set's files."""
        return cls(dataset.label_count, dataset.ignore, dataset.relabel)

    @classmethod
    def written(cls, values: Sequence[int]) -> "LabelValues":
        """Return those of label maps that were written with these values of the classes."""
        if [*values] == [*range(len(values))]:
            return cls(len(values))
        return cls(len(values), relabel={value: number for number, value in enumerate(values)})


class Volume(NamedTuple):
    """A case: `image` float32 (C, X, Y, Z), `label` uint8 or uint16 (X, Y, Z), and the grid of both."""

    case_id: str
    image: np.ndarray
    label: np.ndarray | None
    grid: Grid
    nonfinite_voxels: int = 0  # that were NaN or infinite and became 0


def read_volume(
    case: Case, values: LabelValues, spacing: Sequence[float] | None, files: ImageFiles | None = None
) -> Volume:
    """Return the case with RAS+ axes and this `spacing` (mm; None: as stored), its labels checked.

    Reads from `files` where they are still open since their scan. Raises UserError.
    """
    files = files or ImageFiles()
    with ExitStack() as stack:
        opened = {path: stack.enter_context(files.opened(case, path)) for path in case.files}
        headers = {path: file.image for path, file in opened.items()}
        for error, is_accepted in contradictions(case, headers, files.accepts_apart):
            if not is_accepted:
                raise error
        first = headers[case.images[0]]
        source = canonical_grid(first)
        target = target_grid(case, first, spacing)
        axes = nib.io_orientation(first.affine)
        channels = list[np.ndarray]()
        nonfinite_voxels = 0
        for path in case.images:
            voxels, nonfinite = read_image(opened[path], files.replaces_nonfinite)
            nonfinite_voxels += nonfinite
            channels += [resample(apply_orientation(channel, axes), source, target, CUBIC) for channel in voxels]
        label = None
        if case.label is not None:
            stored = read_classes(opened[case.label], values)
            label = on_network_grid(stored, case, first, spacing, values.ignore)
    return Volume(case.id, np.ascontiguousarray(np.stack(channels)), label, target, nonfinite_voxels)


def read_label_map(case: Case, path: Path, values: LabelValues) -> tuple[np.ndarray, nib.Nifti1Image]:
    """Return the classes of a label map of the case, as `read_classes`, and its header. Raises UserError."""
    with ImageFiles().opened(case, path) as file:
        return read_classes(file, values), file.image


def on_network_grid(
    label: np.ndarray, case: Case, image: nib.Nifti1Image, spacing: Sequence[float] | None, ignore: int | None
) -> np.ndarray:
    """Return a label map (X, Y, Z) that lies as `image` as the network sees it at this spacing. Raises UserError."""
    turned = apply_orientation(label, nib.io_orientation(image.affine))
    target = target_grid(case, image, spacing)
    return np.ascontiguousarray(resample_labels(turned, canonical_grid(image), target, ignore))


def stored_spacing(case: Case) -> tuple[float, float, float]:
    """Return the voxel size (mm) along the axes of the case's first file. Raises UserError."""
    x, y, z = voxel_sizes(open_image(case.id, case.images[0], case.affine).affine).tolist()
    return x, y, z


def with_values(labels: np.ndarray, values: Sequence[int] | None) -> np.ndarray:
    """Return classes as the values that are written for them; None: their numbers."""
    if values is None or [*values] == [*range(len(values))]:
        return labels
    written: np.ndarray = np.array(values, np.min_scalar_type(max(values)))[labels]
    return written


def is_resampled(case: Case, spacing: Sequence[float] | None) -> bool:
    """Return whether the network sees the case on another grid than its file's, whatever their axes.

    Raises UserError.
    """
    return spacing is not None and not read_grid(case, spacing).is_same(read_grid(case, None))


class UnknownLabels(UserError):
    """A label map holds values that are no class.

    `labels` are its labels but 0, where they are whole numbers; `alone` is the message without the remedy.
    """

    def __init__(self, message: str, labels: frozenset[int] = frozenset(), option: str = "") -> None:
        remedy = f"correct the file, or add {option}" if option else "map them with data.label_map"
        super().__init__(f"{message}; {remedy}")
        self.labels = labels
        self.alone = message


def messages(errors: Sequence[UserError]) -> list[str]:
    """Return the lines of errors, after one about labels, where those of several maps are unknown.

    What suits one map may not suit another.
    """
    lines = [*map(str, errors)]
    count = sum(isinstance(error, UnknownLabels) for error in errors)
    if count > 1:
        what = "python -m unet3d check-data looks at all maps, and says what suits them"
        lines.insert(0, f"{count} label maps hold other labels: {what}")
    return lines


def read_classes(file: OpenFile, values: LabelValues) -> np.ndarray:
    """Return the classes, uint8 or uint16 (X, Y, Z), of a label map in its file's axes.

    Each voxel is a class or `values.ignore`. Raises UnknownLabels, UserError.
    """
    classes, ignore, relabel = values
    array = nifti.read_array(file)
    if not np.issubdtype(array.dtype, np.integer):
        array = _rounded(array, file.image.dataobj)
    kind = np.min_scalar_type(max(classes - 1, ignore or 0))
    if relabel is None:
        label = array
        is_unknown = ~((array >= 0) & (array < classes) & (array == np.rint(array)))
        if ignore is not None:
            is_unknown &= array != ignore
    else:
        label = np.zeros(array.shape, kind)
        is_unknown = np.ones(array.shape, bool)
        for old, new in {**relabel, **({} if ignore is None else {ignore: ignore})}.items():
            label[array == old] = new
            is_unknown[array == old] = False
    if is_unknown.any():
        raise _unknown_labels(file, array, is_unknown, values)
    return label.astype(kind, copy=False)


def _rounded(array: np.ndarray, voxels: ArrayProxy) -> np.ndarray:
    """Return labels that were read as floats, with those that are nearly whole numbers as these.

    255 scaled by 1/255 is not quite 1; nor are floats that nibabel scales to fit the 2^16 values of an integer.
    """
    half_step = abs(voxels.slope) / 2
    tolerance = ROUNDING
    if voxels.dtype.kind in "iu" and half_step < QUANTUM:
        tolerance += half_step
    whole = np.rint(array)
    is_near = np.isclose(array, whole, rtol=ROUNDING, atol=tolerance)
    return np.where(is_near, whole, array)


def _unknown_labels(file: OpenFile, array: np.ndarray, is_unknown: np.ndarray, values: LabelValues) -> UnknownLabels:
    """Return the error for the labels of a file that are neither a class nor `ignore`."""
    classes, ignore, relabel = values
    stored = np.unique(array)
    unknown = np.unique(array[is_unknown])
    allowed = f"0 to {classes - 1}" if relabel is None else ", ".join(map(str, sorted(relabel)))
    if ignore is not None:
        allowed += f" and {ignore} (ignored)"
    listed = ", ".join(f"{value:g}" for value in unknown[:LABELS_LISTED].tolist())
    labels = frozenset[int]()
    if np.isfinite(unknown).all() and (unknown == np.rint(unknown)).all():
        labels = frozenset(int(value) for value in stored if value not in (0, ignore))
    what = f"{is_unknown.sum()} voxels have the label {listed}; allowed are {allowed}"
    return UnknownLabels(f"{file.case_id}: {file.path}: {what}", labels, proposal(labels, classes, relabel))

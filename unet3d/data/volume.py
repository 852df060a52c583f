"""A case as arrays on one grid, with RAS+ axes, one spacing and exact labels; and label maps that were written."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import nibabel as nib
import numpy as np
from nibabel.affines import voxel_sizes
from nibabel.orientations import apply_orientation

from unet3d.data import nifti
from unet3d.data.cases import Case
from unet3d.data.grids import (
    CUBIC,
    canonical_grid,
    contradictions,
    resample,
    resample_labels,
    target_grid,
)
from unet3d.data.image_files import ImageFiles, OpenFile
from unet3d.data.labels import Relabel
from unet3d.data.nifti import STRICT, ValidationRules, read_image
from unet3d.data.nifti_labels import read_label


class Volume(NamedTuple):
    """A case: `image` float32 (C, X, Y, Z), `label` uint8 or uint16 (X, Y, Z), and where both lie (mm)."""

    case_id: str
    image: np.ndarray
    label: np.ndarray | None
    affine: np.ndarray
    spacing: tuple[float, float, float]
    nonfinite_voxels: int = 0  # that were NaN or infinite and became 0


def read_volume(
    case: Case,
    classes: int,
    ignore: int | None,
    spacing: Sequence[float] | None,
    rules: ValidationRules = STRICT,
    relabel: Relabel = None,
    files: ImageFiles | None = None,
) -> Volume:
    """Return the case with RAS+ axes and this `spacing` (mm; None: as stored), its labels checked.

    Reads from `files` where they are still open. Raises UserError.
    """
    if files is None:
        files = ImageFiles()
    with files.opened(case) as opened:
        headers = {path: file.image for path, file in opened.items()}
        for error in contradictions(case, headers, rules):
            raise error
        first = headers[case.images[0]]
        source = canonical_grid(first)
        target = target_grid(case, first, spacing)
        axes = nib.io_orientation(first.affine)
        channels, nonfinite_voxels = _read_channels(case, opened, rules)
        image = np.stack([resample(apply_orientation(channel, axes), source, target, CUBIC) for channel in channels])
        label = None
        if case.label is not None:
            file = opened[case.label]
            label = read_label(case.id, case.label, file.image, classes, ignore, relabel, file.stream)
            label = resample_labels(apply_orientation(label, axes), source, target, ignore)
            label = np.ascontiguousarray(label)
    return Volume(
        case.id,
        np.ascontiguousarray(image),
        label,
        target.affine,
        target.spacing,
        nonfinite_voxels,
    )


def _read_channels(case: Case, opened: Mapping[Path, OpenFile], rules: ValidationRules) -> tuple[list[np.ndarray], int]:
    """Return the channels (X, Y, Z) of a case's open files, and how many voxels were not finite. Raises UserError."""
    channels = list[np.ndarray]()
    nonfinite_voxels = 0
    for path in case.images:
        file = opened[path]
        voxels, nonfinite = read_image(case.id, path, file.image, rules, file.stream)
        nonfinite_voxels += nonfinite
        channels.extend(voxels)
    return channels, nonfinite_voxels


def read_label_map(case: Case, path: Path, values: Sequence[int], spacing: Sequence[float] | None) -> np.ndarray:
    """Return a predicted label map of the case (X, Y, Z) on the grid of `read_volume`. Raises UserError.

    `values` are how the file stores the classes.
    """
    with nifti.open_file(case.id, path) as stream:
        image = nifti.read_header(case.id, path, stream, case.affine)
        written = read_label(case.id, path, image, len(values), None, _relabel_of(values), stream)
    label = apply_orientation(written, nib.io_orientation(image.affine))
    target = target_grid(case, image, spacing)
    return np.ascontiguousarray(resample_labels(label, canonical_grid(image), target, None))


def read_written(case: Case, path: Path, values: Sequence[int]) -> np.ndarray:
    """Return the classes (X, Y, Z) of a predicted label map with these values, in the file's axes. Raises UserError."""
    with nifti.open_file(case.id, path) as stream:
        image = nifti.read_header(case.id, path, stream, case.affine)
        return read_label(case.id, path, image, len(values), None, _relabel_of(values), stream)


def _relabel_of(values: Sequence[int]) -> Relabel:
    """Return the class of each value in a file; None where the values are the classes' numbers."""
    if [*values] == [*range(len(values))]:
        return None
    return {value: number for number, value in enumerate(values)}


def read_truth(
    case: Case, classes: int, ignore: int | None, relabel: Relabel
) -> tuple[np.ndarray, tuple[float, float, float]]:
    """Return the labels (X, Y, Z) of a case in its file's axes, and the spacing (mm) along these. Raises UserError."""
    assert case.label is not None, case.id
    with nifti.open_file(case.id, case.label) as stream:
        image = nifti.read_header(case.id, case.label, stream, case.affine)
        label = read_label(case.id, case.label, image, classes, ignore, relabel, stream)
    x, y, z = voxel_sizes(nifti.open_image(case.id, case.images[0], case.affine).affine).tolist()
    return label, (x, y, z)


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
    if spacing is None:
        return False
    image = nifti.open_image(case.id, case.images[0], case.affine)
    return not target_grid(case, image, spacing).is_same(canonical_grid(image))

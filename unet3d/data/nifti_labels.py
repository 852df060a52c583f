"""Label maps in NIfTI files: every voxel is a class or is ignored, or the file is refused."""

from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import nibabel as nib
import numpy as np
from nibabel.arrayproxy import ArrayProxy

from unet3d.base.errors import UserError
from unet3d.data import nifti
from unet3d.data.labels import Relabel, proposal

ROUNDING = 1e-6  # float32's relative rounding of a scaled label
QUANTUM = 1e-3  # the largest rounding of a label to a file's integers
LABELS_LISTED = 5  # unknown labels in a message


class UnknownLabels(UserError):
    """A label map holds values that are no class.

    `labels` are its labels but 0, where they are whole numbers; `alone` is the message without the remedy, the `option`
    that would suit this file.
    """

    def __init__(self, message: str, labels: frozenset[int] = frozenset(), option: str = "") -> None:
        remedy = f"correct the file, or add {option}" if option else "map them with data.label_map"
        super().__init__(f"{message}; {remedy}")
        self.labels = labels
        self.alone = message
        self.option = option


def messages(errors: Sequence[UserError]) -> list[str]:
    """Return the lines of errors, after one about labels, where those of several maps are unknown.

    What suits one map may not suit another; `check-data` reads them all.
    """
    unknown = [error for error in errors if isinstance(error, UnknownLabels)]
    if len(unknown) < 2:
        return [*map(str, errors)]
    lines = [error.alone if isinstance(error, UnknownLabels) else str(error) for error in errors]
    options = {error.option for error in unknown}
    add = f"add {options.pop()}" if len(options) == 1 and unknown[0].option else "map them with data.label_map"
    advice = f"{len(unknown)} label maps hold other labels: {add}; python -m unet3d check-data looks at all maps"
    return [advice, *lines]


def read_label(
    case_id: str,
    path: Path,
    image: nib.Nifti1Image,
    classes: int,
    ignore: int | None,
    relabel: Relabel = None,
    stream: BinaryIO | None = None,
) -> np.ndarray:
    """Return voxels as uint8 or uint16 (X, Y, Z), each a class or `ignore`. Raises UnknownLabels, UserError."""
    array = nifti.read_array(case_id, path, image, stream)
    if not np.issubdtype(array.dtype, np.integer):
        array = _rounded(array, image.dataobj)
    kind = np.min_scalar_type(max(classes - 1, ignore or 0))
    if relabel is None:
        label = array
        is_unknown = ~((array >= 0) & (array < classes) & (array == np.rint(array)))
    else:
        label = np.zeros(array.shape, kind)
        is_unknown = np.ones(array.shape, bool)
        for old, new in relabel.items():
            voxels = array == old
            label[voxels] = new
            is_unknown[voxels] = False
    if ignore is not None:
        if relabel is not None:
            label = np.where(array == ignore, kind.type(ignore), label)
        is_unknown &= array != ignore
    if is_unknown.any():
        raise _unknown_labels(f"{case_id}: {path}", array, is_unknown, classes, ignore, relabel)
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


def _unknown_labels(
    place: str,
    array: np.ndarray,
    is_unknown: np.ndarray,
    classes: int,
    ignore: int | None,
    relabel: Relabel,
) -> UnknownLabels:
    """Return the error for the labels of a file that are neither a class nor `ignore`."""
    values = np.unique(array)
    unknown = np.unique(array[is_unknown])
    allowed = f"0 to {classes - 1}" if relabel is None else ", ".join(map(str, sorted(relabel)))
    if ignore is not None:
        allowed += f" and {ignore} (ignored)"
    listed = ", ".join(f"{value:g}" for value in unknown[:LABELS_LISTED].tolist())
    labels = frozenset[int]()
    if np.isfinite(unknown).all() and (unknown == np.rint(unknown)).all():
        labels = frozenset(int(value) for value in values if value not in (0, ignore))
    what = f"{is_unknown.sum()} voxels have the label {listed}; allowed are {allowed}"
    return UnknownLabels(f"{place}: {what}", labels, proposal(labels, classes, relabel))

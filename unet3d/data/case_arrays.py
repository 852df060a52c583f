"""A prepared case as arrays for the disk, and whether arrays from there can be one."""

import numpy as np
import torch
from torch import Tensor

from unet3d.data.disk_cache import Arrays
from unet3d.data.patches import PreparedCase

LABELS = ("label", "foreground", "counts")  # arrays on disk of a label map
CASE = ("image", *LABELS, "spacing", "replaced")  # and of a case
KINDS = {  # type and number of axes of each array on disk
    "image": (np.float32, 4),
    "label": (np.int16, 3),
    "foreground": (np.int32, 2),
    "counts": (np.int64, 1),
    "spacing": (np.float64, 1),
    "replaced": (np.int64, 0),  # voxels that were not finite
    "voxels": (np.float32, 2),
}


def fit_case(arrays: Arrays, channels: int) -> bool:
    """Return whether arrays from the disk can be a case; the values of its voxels are not read."""
    if not fit_kinds(arrays):
        return False
    spacing = arrays["spacing"]
    if spacing.shape != (3,):
        return False
    if not np.isfinite(spacing).all() or (spacing <= 0).any():
        return False
    image = arrays["image"]
    if len(image) != channels:
        return False
    return fit_labels(arrays, image.shape[1:])


def label_arrays(case: PreparedCase) -> dict[str, np.ndarray]:
    """Return a label map and the voxels of its classes, for the disk."""
    counts = np.array([len(voxels) for voxels in case.foreground], np.int64)
    voxels = np.concatenate([np.empty((0, 3), np.int32), *case.foreground])
    return {
        "label": case.label.numpy(),
        "foreground": voxels,
        "counts": counts,
    }


def fit_kinds(arrays: Arrays) -> bool:
    """Return whether arrays from the disk have the types and axes that are written, in this machine's byte order."""
    for name, array in arrays.items():
        kind, axes = KINDS[name]
        if array.dtype != np.dtype(kind) or array.ndim != axes:
            return False
    return True


def fit_labels(arrays: Arrays, shape: tuple[int, ...]) -> bool:
    """Return whether these can be the `label_arrays` of a case of this shape."""
    if not fit_kinds(arrays):
        return False
    if arrays["label"].shape != shape or min(shape) == 0:
        return False
    voxels = arrays["foreground"]
    counts = arrays["counts"]
    if voxels.shape[1] != 3 or (counts < 0).any():
        return False
    return bool(counts.sum() == len(voxels))


def labels_of(arrays: Arrays) -> tuple[Tensor, tuple[np.ndarray, ...]]:
    """Return the label map and the voxels of its classes, from `label_arrays`."""
    parts = np.split(arrays["foreground"], np.cumsum(arrays["counts"]))
    return torch.from_dlpack(arrays["label"]), tuple(parts[:-1])  # the last part is empty

"""A prepared case as arrays for the disk, and whether arrays from there can be one."""

import numpy as np
import torch
from torch import Tensor

from unet3d.data.disk_cache import Arrays
from unet3d.data.patches import PreparedCase

LABELS = ("label", "foreground", "counts")  # arrays on disk of a label map, and of a case
CASE = ("image", *LABELS, "spacing", "replaced")
KINDS = {  # of the arrays on disk: number, axes
    "image": (np.dtype(np.float32), 4),
    "label": (np.dtype(np.int16), 3),
    "foreground": (np.dtype(np.int32), 2),
    "counts": (np.dtype(np.int64), 1),
    "spacing": (np.dtype(np.float64), 1),
    "replaced": (np.dtype(np.int64), 0),
    "voxels": (np.dtype(np.float32), 2),
}


def fit_case(arrays: Arrays, channels: int) -> bool:
    """Whether the arrays can be a case, whoever has written them; the values of its voxels are not read."""
    if not fit_kinds(arrays) or arrays["spacing"].shape != (3,):
        return False
    image, spacing = arrays["image"], arrays["spacing"]
    is_case = len(image) == channels and bool((np.isfinite(spacing) & (spacing > 0)).all())
    return is_case and fit_labels(arrays, image.shape[1:])


def label_arrays(case: PreparedCase) -> dict[str, np.ndarray]:
    """A label map and the voxels of its classes, for the disk."""
    counts = np.array([len(voxels) for voxels in case.foreground], np.int64)
    voxels = np.concatenate([np.empty((0, 3), np.int32), *case.foreground])
    return {"label": case.label.numpy(), "foreground": voxels, "counts": counts}


def fit_kinds(arrays: Arrays) -> bool:
    """Whether arrays from the disk have the types, in this machine's order of bytes, and axes that were written."""
    return all((array.dtype, array.ndim) == KINDS[name] for name, array in arrays.items())


def fit_labels(arrays: Arrays, shape: tuple[int, ...]) -> bool:
    """Whether `label_arrays` may have given these for a case of this shape."""
    voxels, counts = arrays["foreground"], arrays["counts"]
    is_whole = fit_kinds(arrays) and arrays["label"].shape == shape and min(shape) > 0
    return is_whole and voxels.shape[1] == 3 and bool((counts >= 0).all()) and counts.sum() == len(voxels)


def labels_of(arrays: Arrays) -> tuple[Tensor, tuple[np.ndarray, ...]]:
    """The label map and the voxels of its classes, from what `label_arrays` gave."""
    parts = np.split(arrays["foreground"], np.cumsum(arrays["counts"]))  # the last one is empty
    return torch.from_dlpack(arrays["label"]), tuple(parts[:-1])

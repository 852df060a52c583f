"""Label maps, scores and images as NIfTI files on the grid of another file; each is written whole or not at all."""

import gzip
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path

import nibabel as nib
import numpy as np

from unet3d.base.files import replacing
from unet3d.data.nifti import is_compressed, open_image, quiet_nibabel, stem

LEVEL = 6  # of gzip; 9, Python's own, takes ten times as long on a noisy label map, whose file is then 5% smaller


def save_labels(path: Path, labels: np.ndarray, like: Path | nib.Nifti1Image) -> None:
    """Write integer labels (X, Y, Z) on the grid of the image `like`, as uint8 or uint16. Raises UserError, OSError."""
    save_image(path, labels_like(labels, _header_of(like, path)))


def _header_of(like: Path | nib.Nifti1Image, path: Path) -> nib.Nifti1Image:
    """Return the image whose grid the file at `path` is to have. Raises UserError."""
    return open_image(stem(path), like) if isinstance(like, Path) else like


@quiet_nibabel()
def labels_like(labels: np.ndarray, source: nib.Nifti1Image) -> nib.Nifti1Image:
    """Return integer labels (X, Y, Z) as an image on the grid of `source`, uint8 or uint16."""
    assert labels.shape == source.shape[:3], f"{labels.shape} labels for an image of {source.shape}"
    kind = np.min_scalar_type(int(labels.max()))
    return type(source)(labels.astype(kind), None, _header_like(source, kind))


@quiet_nibabel()
def scores_like(scores: np.ndarray, source: nib.Nifti1Image) -> nib.Nifti1Image:
    """Return scores (X, Y, Z, K) as an image on the grid of `source`, float32."""
    return type(source)(scores, None, _header_like(source, np.float32))


@quiet_nibabel()
def _header_like(source: nib.Nifti1Image, kind: np.dtype | type) -> nib.Nifti1Header:
    """Return the header of `source` for other values of this type."""
    header = source.header.copy()
    header.extensions.clear()  # their DICOM fields may name the patient
    header.set_slope_inter(1, 0)
    header["cal_min"] = 0  # the display range of intensities
    header["cal_max"] = 0
    header.set_data_dtype(kind)
    return header


@contextmanager
def saving_scores(path: Path, like: Path | nib.Nifti1Image) -> Iterator[Callable[[int, int], np.ndarray]]:
    """Write float32 scores (X, Y, Z, K) on the grid of the image `like` to `path` (.nii). Raises UserError, OSError.

    Yields `open_scores(label, classes)`, which returns a memory map (X, Y, Z) of that class.
    """
    source = _header_of(like, path)
    header = _header_like(source, np.float32)
    shape = source.shape[:3]
    offset = header.single_vox_offset
    header["vox_offset"] = offset
    class_bytes = 4 * prod(shape)
    with replacing(path) as file:

        def open_scores(label: int, classes: int) -> np.ndarray:
            if not file.tell():
                header.set_data_shape((*shape, classes))
                header.write_to(file)
                file.flush()
                # on a disk that fills later, a write to mapped memory would kill the process
                os.posix_fallocate(file.fileno(), 0, offset + class_bytes * classes)
            return np.memmap(
                file,
                header.get_data_dtype(),
                "r+",
                offset + class_bytes * label,
                shape,
                "F",
            )

        yield open_scores


@quiet_nibabel()
def save_image(path: Path, image: nib.Nifti1Image) -> None:
    """Write `image` to `path` (.nii or .nii.gz), whole or not at all. Same image, same bytes. Raises OSError."""
    content = image.to_bytes()
    with replacing(path) as file:
        file.write(gzip.compress(content, LEVEL, mtime=0) if is_compressed(path.name) else content)

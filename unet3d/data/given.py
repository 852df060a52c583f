"""Images that Python code holds, as cases, and label maps as it expects them."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import nibabel as nib
import numpy as np

from unet3d.data.cases import Case
from unet3d.data.nifti import LARGEST, SMALLEST, labels_like, open_image, quiet_nibabel, stem
from unet3d.errors import UserError

Given = Any  # an array, an image of nibabel, a path, or a list of paths, one a channel


@contextmanager
def as_case(image: Given, spacing: Sequence[float] | None) -> Iterator[Case]:
    """A case of files: the given ones, or temporary ones of an array or image. Raises UserError, in its own words."""
    if isinstance(image, str | PathLike | list | tuple):
        if spacing is not None:
            raise UserError("segment: a file has a spacing of its own; leave out spacing")
        given = [image] if isinstance(image, str | PathLike) else image
        if not given or not all(isinstance(path, str | PathLike) for path in given):
            raise UserError("segment: a list holds the paths of files, one a channel; stack arrays as C X Y Z")
        paths = [Path(path) for path in given]
        yield Case(stem(paths[0]), tuple(paths), None)
        return
    with TemporaryDirectory() as folder:
        path = Path(folder, "image.nii")
        with quiet_nibabel():
            nib.save(_as_nifti(image, spacing), path)
        try:
            yield Case("image", (path,), None)
        except UserError as error:
            raise UserError(str(error).replace(str(path), "as it was given")) from error


@quiet_nibabel()
def _as_nifti(image: Given, spacing: Sequence[float] | None) -> nib.Nifti1Image:
    if isinstance(image, np.ndarray):
        if image.ndim not in (3, 4) or image.dtype.kind not in "buif":
            raise UserError(f"segment: give numbers X Y Z, or C X Y Z, not {image.dtype} of shape {image.shape}")
        _refuse_masked(image)
        voxels = image if image.ndim == 3 else np.moveaxis(image, 0, -1)
        return _nifti(voxels, np.diag([*_lengths(spacing), 1.0]))
    if not isinstance(image, nib.spatialimages.SpatialImage):
        raise UserError(
            f"segment: give an array, an image of nibabel or the paths of files, not {type(image).__name__}"
        )
    if image.get_data_dtype().kind not in "buif":
        raise UserError(f"segment: give an image of numbers, not of {image.get_data_dtype()}")
    if spacing is not None:
        raise UserError("segment: an image of nibabel has a spacing of its own; leave out spacing")
    _refuse_masked(image.dataobj)
    return image if isinstance(image, nib.Nifti1Image) else _nifti(np.asanyarray(image.dataobj), image.affine)


def _lengths(spacing: object) -> list[float]:
    """Return the spacing (mm) as numbers. Raises UserError."""
    found = list[float]()
    if isinstance(spacing, Iterable) and not isinstance(spacing, str | bytes):
        with suppress(TypeError, ValueError, OverflowError):
            found = [float(length) for length in spacing if not isinstance(length, str | bytes)]
    if len(found) != 3 or not all(SMALLEST <= length <= LARGEST for length in found):
        what = f"three numbers from {SMALLEST:g} to {LARGEST:g}, such as (1, 1, 2.5)"
        raise UserError(f"segment: an array needs its spacing in mm, {what}, not {spacing}")
    return found


def _refuse_masked(voxels: object) -> None:
    """Raise UserError for voxels that a mask hides: a file of them would show what is below it."""
    if np.ma.is_masked(voxels):
        raise UserError("segment: some voxels are masked, and would count as what is below; give image.filled(VALUE)")


def _nifti(voxels: np.ndarray, affine: np.ndarray) -> nib.Nifti1Image:
    """An image of these voxels; where NIfTI has no such type, in one that holds their values."""
    other: dict[Any, Any] = {np.dtype(np.bool_): np.uint8, np.dtype(np.float16): np.float32}
    own = voxels.dtype.newbyteorder("=")
    kind = np.dtype(other.get(own, np.float64 if own.itemsize > 8 else own))
    return nib.Nifti1Image(voxels.astype(kind), affine, dtype=kind)  # named, nibabel takes 64-bit integers, too


@quiet_nibabel()
def returned(image: Given, labels: np.ndarray, case: Case) -> np.ndarray | nib.Nifti1Image:
    """Labels (X, Y, Z) of a case as an array where an array was given, else on the grid of its first file."""
    if isinstance(image, np.ndarray):
        return labels
    source = open_image(case.id, case.images[0])
    found = labels_like(labels, source)
    return type(found)(found.dataobj, source.affine, found.header)

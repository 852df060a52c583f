"""Images that Python code holds, as cases, and label maps as it expects them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import nibabel as nib
import numpy as np

from unet3d.base.errors import UserError
from unet3d.data.cases import Case
from unet3d.data.nifti import LARGEST, SMALLEST, affine_if_sound, open_image, quiet_nibabel, stem
from unet3d.data.restore import image_like

ImageLike = Any  # an array, an image of nibabel, a path, or a list of images or paths, one a channel


@contextmanager
def temporary_case(
    image: ImageLike, spacing: Sequence[float] | None, affine: Any = None, channels: int = 1
) -> Iterator[Case]:
    """Yield a case of files: the given ones, or temporary ones of an array or images, for a network of `channels`.

    Raises UserError, in its own words.
    """
    if affine is not None and not isinstance(image, np.ndarray):
        raise UserError("segment: only a NumPy array needs an affine, images and files have their own; leave it out")
    is_list = isinstance(image, list | tuple)
    images = [*image] if is_list else [image]
    if are_paths(image):
        if spacing is not None:
            raise UserError("segment: a file has a spacing of its own; leave out spacing")
        files = tuple(map(Path, images))
        yield Case(stem(files[0]), files, None)
        return
    if is_list and not all(isinstance(one, nib.spatialimages.SpatialImage) for one in images or [None]):
        what = "the paths of files, or images of nibabel, one a channel"
        raise UserError(f"segment: a list holds {what}; stack arrays as C X Y Z")
    with TemporaryDirectory() as folder:
        paths = [Path(folder, f"image_{number:04d}.nii" if is_list else "image.nii") for number in range(len(images))]
        with quiet_nibabel():
            for one, path in zip(images, paths, strict=True):
                nib.save(_as_nifti(one, spacing, affine, channels), path)
        try:
            yield Case("image", tuple(paths), None)
        except UserError as error:
            text = str(error)
            for number, path in enumerate(paths):
                text = text.replace(str(path), f"number {number}, as it was given" if is_list else "as it was given")
            raise UserError(text) from error


def are_paths(image: ImageLike) -> bool:
    """Return whether an image is given by the path of its file, or by those of its channels."""
    paths = image if isinstance(image, list | tuple) else [image]
    return bool(paths) and all(isinstance(path, str | PathLike) for path in paths)


def _as_nifti(image: ImageLike, spacing: Sequence[float] | None, affine: Any, channels: int) -> nib.Nifti1Image:
    """Return an array or an image of nibabel as an image to save. Raises UserError."""
    if isinstance(image, np.ndarray):
        if image.ndim not in (3, 4) or image.dtype.kind not in "buif":
            raise UserError(f"segment: give numbers X Y Z, or C X Y Z, not {image.dtype} of shape {image.shape}")
        _refuse_masked(image)
        if image.ndim == 4 and image.shape[0] != channels and image.shape[-1] == 1:
            image = image[..., 0]  # as a file's is read
        elif image.ndim == 4 and image.shape[0] != channels and image.shape[-1] == channels:
            what = f"an array of shape {image.shape} has its channels last"
            raise UserError(f"segment: {what}; give C X Y Z: numpy.moveaxis(image, -1, 0)")
        voxels = image if image.ndim == 3 else np.moveaxis(image, 0, -1)
        return _nifti(voxels, _affine_of_array(spacing, affine))
    if not isinstance(image, nib.spatialimages.SpatialImage):
        what = f"not {type(image).__name__}: give a NumPy array, an image of nibabel or the paths of files"
        raise UserError(f"segment: {what}")
    stored_type = image.get_data_dtype()
    if stored_type.kind not in "buif":
        raise UserError(f"segment: give an image of numbers, not of {stored_type}")
    if spacing is not None:
        raise UserError("segment: an image of nibabel has a spacing of its own; leave out spacing")
    _refuse_masked(image.dataobj)
    is_of_file = nib.is_proxy(image.dataobj)
    if isinstance(image, nib.Nifti1Image) and (is_of_file or image.dataobj.dtype == stored_type):
        return image
    # Saved as it is, an array in memory would be rounded to the type of the header.
    return _nifti(np.asanyarray(image.dataobj), image.affine)


def _affine_of_array(spacing: Sequence[float] | None, affine: Any) -> np.ndarray:
    """Return where an array lies, 4 x 4: as its affine says, or with its spacing (mm) and RAS+ axes.

    Raises UserError.
    """
    if affine is None:
        return np.diag([*_lengths(spacing), 1.0])
    if spacing is not None:
        raise UserError("segment: an affine holds the spacing; leave out spacing")
    try:
        if np.iscomplexobj(affine):
            raise TypeError("its numbers are complex")
        matrix = np.asarray(affine, float)
    except (TypeError, ValueError) as error:
        raise UserError(f"segment: affine: {error}; give 4 x 4 numbers, as of nibabel") from error
    is_affine = matrix.shape == (4, 4) and np.isfinite(matrix).all() and np.array_equal(matrix[3], [0, 0, 0, 1])
    if not is_affine or np.linalg.matrix_rank(matrix) < 4:
        what = "4 x 4 finite numbers that can be inverted, the last row 0 0 0 1"
        raise UserError(f"segment: an affine is {what}, not {matrix.tolist()}")
    return matrix


def _lengths(spacing: object) -> list[float]:
    """Return the spacing (mm) as numbers. Raises UserError."""
    try:
        lengths = [float(length) for length in spacing if not isinstance(length, str)]  # type: ignore[attr-defined]
    except (TypeError, ValueError, OverflowError):
        lengths = []
    if len(lengths) != 3 or not all(SMALLEST <= length <= LARGEST for length in lengths):
        what = f"three numbers from {SMALLEST:g} to {LARGEST:g}, such as (1, 1, 2.5)"
        raise UserError(f"segment: an array needs its affine, or its spacing in mm, {what}, not {spacing}")
    return lengths


def _refuse_masked(voxels: object) -> None:
    """Raise UserError for voxels that a mask hides: a file of them would show what is below it."""
    if np.ma.is_masked(voxels):
        raise UserError("segment: some voxels are masked, and would count as what is below; give image.filled(VALUE)")


def _nifti(voxels: np.ndarray, affine: np.ndarray) -> nib.Nifti1Image:
    """Return an image of these voxels; where NIfTI has no such type, in one that holds their values."""
    kind = voxels.dtype.newbyteorder("=")
    kind = np.dtype({"?": "u1", "e": "f4", "g": "f8"}.get(kind.char, kind))
    return nib.Nifti1Image(voxels.astype(kind), affine, dtype=kind)  # named, nibabel takes 64-bit integers, too


@quiet_nibabel()
def returned(image: ImageLike, voxels: np.ndarray, case: Case) -> np.ndarray | nib.Nifti1Image:
    """Return labels (X, Y, Z) or probabilities (K, X, Y, Z) of a case as an array where an array was given.

    Else as an image X Y Z, or X Y Z K, on the grid of its first file.
    """
    if isinstance(image, np.ndarray):
        return voxels
    source = open_image(case.id, case.images[0], case.affine)
    made = image_like(voxels if voxels.ndim == 3 else np.moveaxis(voxels, 0, -1), source)
    # Its header's affine may be rounded otherwise. Of a named form, the header keeps what the file's says.
    kept = None if case.affine == "auto" else affine_if_sound(source.header, "auto")
    return type(made)(made.dataobj, source.affine if kept is None else kept, made.header)


class Probabilities:
    """Probabilities (K, X, Y, Z) of a case, float32, in memory: `open_scores` of `unet3d.data.restore.to_original`."""

    def __init__(self, case: Case) -> None:
        self._shape = open_image(case.id, case.images[0], case.affine).shape[:3]
        self.scores = np.empty(0, np.float32)

    def __call__(self, label: int, classes: int) -> np.ndarray:
        """Return the part of a class, to write to."""
        if not self.scores.size:
            self.scores = np.zeros((classes, *self._shape), np.float32)
        part: np.ndarray = self.scores[label]
        return part

"""NIfTI files: headers are checked before memory is taken, voxels are checked as they are read, writing is atomic."""

import gzip
import io
import logging
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path

import nibabel as nib
import numpy as np
from nibabel import imageglobals
from nibabel.arrayproxy import ArrayProxy
from nibabel.filebasedimages import ImageFileError
from nibabel.spatialimages import HeaderDataError

from unet3d.config import Data
from unet3d.errors import UserError
from unet3d.files import replacing

SUFFIXES = (".nii.gz", ".nii")


# A case is held in memory: 2^31 voxels are 8 GiB as float32, four times the largest whole-body CT.
MAX_VOXELS = 2**31


# Deflate cannot shrink further than this: a file that claims more voxels than it can hold lies.
MAX_DEFLATE = 1032


CHUNK = 2**20


SMALLEST, LARGEST = 1e-7, 1e7  # mm, below a nanometre and above a kilometre: squares of less vanish, of more overflow


READ_ERRORS = (OSError, EOFError, ValueError, OverflowError, zlib.error, ImageFileError, HeaderDataError)


# By the header's own length, which also tells the byte order.
KINDS = {348: (nib.Nifti1Image, slice(344, 348), b"n+1\0"), 540: (nib.Nifti2Image, slice(4, 8), b"n+2\0")}


# nibabel logs what it mends in a header, at every copy of it, without the file's name.
imageglobals.logger = logging.Logger("silent", level=logging.CRITICAL + 1)


def problem(case: str, path: Path, what: str) -> UserError:
    """The error for a file: which case, which file, what is wrong and what to do."""
    return UserError(f"{case}: {path}: {what}")


def stem(path: Path) -> str:
    """The file's name without .nii or .nii.gz."""
    return next((path.name.removesuffix(suffix) for suffix in SUFFIXES if path.name.endswith(suffix)), path.name)


def open_image(case: str, path: Path) -> nib.Nifti1Image:
    """The file with its header checked, its voxels unread. Raises UserError.

    Extensions are not read: nobody asks for them, and nibabel would hand some to parsers of other formats.
    """
    _check_file(case, path)
    try:
        kind, stored = _stored_header(path)
        zooms = stored["pixdim"][1:4].copy()  # as stored: the check turns a 0 into 1
        header = stored.copy()
        header.check_fix()
        shape, number, offset = header.get_data_shape(), header.get_data_dtype(), header.get_data_offset()
        header.get_slope_inter()
        affine = header.get_best_affine()
    except READ_ERRORS as error:
        raise problem(case, path, f"not readable as NIfTI ({error}); replace the file") from error
    _check_size(case, path, shape, number, offset)
    _check_geometry(case, path, affine, zooms)
    return kind(ArrayProxy(path, header, mmap=False), affine, header)


def _stored_header(path: Path) -> tuple[type[nib.Nifti1Image], nib.Nifti1Header]:
    """The kind of image and its header as it is in the file. Reads no more than the header."""
    with _opener(path)() as stream:
        block = stream.read(max(KINDS))
    for order, name in (("<", "little"), (">", "big")):
        length = int.from_bytes(block[:4], name)  # type: ignore[arg-type]
        if length in KINDS and len(block) >= length:
            kind, where, magic = KINDS[length]
            if block[where] == magic:
                return kind, kind.header_class(block[:length], order, check=False)
    raise ImageFileError("no NIfTI-1 or NIfTI-2 header")


def _opener(path: Path) -> Callable[[], io.BufferedIOBase]:
    return (lambda: gzip.open(path)) if path.name.endswith(".gz") else (lambda: path.open("rb"))


def size(image: nib.Nifti1Image) -> tuple[int, int, int]:
    """Voxels along the three axes of space, as in the file."""
    x, y, z = image.shape[:3]
    return x, y, z


def channels(image: nib.Nifti1Image) -> int:
    """Length of the fourth axis, 1 where there is none."""
    return prod(image.shape[3:])


def read_array(case: str, path: Path, image: nib.Nifti1Image) -> np.ndarray:
    """All voxels (X, Y, Z) or (X, Y, Z, C), scaled by the header's slope and intercept. Raises UserError if damaged."""
    try:
        array: np.ndarray = np.asanyarray(_inflated(path, image) if path.name.endswith(".gz") else image.dataobj)
    except READ_ERRORS as error:
        raise problem(case, path, f"damaged ({error}); replace the file") from error
    return array.reshape(*image.shape[:3], -1) if channels(image) > 1 else array.reshape(image.shape[:3])


def _check_file(case: str, path: Path) -> None:
    if not path.name.endswith(SUFFIXES):
        raise problem(case, path, f"is no {' or '.join(SUFFIXES)} file; convert it")
    try:
        start = _first_two(path)
    except OSError as error:
        raise problem(case, path, f"cannot be opened ({error.strerror}); mend that or take the case out") from error
    if start is None:
        raise problem(case, path, "no such file; restore it or take the case out")
    if not start:
        raise problem(case, path, "is empty; replace the file")
    if path.name.endswith(".gz") and start != b"\x1f\x8b":
        raise problem(case, path, "is not gzip-compressed, whatever its name says; rename or replace it")


def _first_two(path: Path) -> bytes | None:
    """The file's first bytes; None where there is no file, also for a pipe, which would be waited for."""
    if not path.is_file():
        return None
    with path.open("rb") as stream:
        return stream.read(2)


def _check_size(case: str, path: Path, shape: tuple[int, ...], kind: np.dtype, offset: int) -> None:
    if len(shape) < 3 or min(shape) < 1 or sum(n > 1 for n in shape[3:]) > 1:
        raise problem(case, path, f"has shape {shape}; a volume is X,Y,Z or, with channels, X,Y,Z,C")
    if kind.kind not in "iuf":
        raise problem(case, path, f"stores {kind}; convert the voxels to integers or floats")
    if prod(shape) > MAX_VOXELS:
        raise problem(
            case, path, f"claims {prod(shape):,} voxels, more than {MAX_VOXELS:,}; replace, crop or resample it"
        )
    claimed = offset + prod(shape) * kind.itemsize
    held = path.stat().st_size * (MAX_DEFLATE if path.name.endswith(".gz") else 1)
    if claimed > held:
        raise problem(case, path, f"claims {claimed:,} bytes but holds {held:,} at most: truncated; replace the file")


def _check_geometry(case: str, path: Path, affine: np.ndarray, zooms: np.ndarray) -> None:
    if not np.isfinite(zooms).all() or not zooms.all():
        raise problem(case, path, f"has voxel sizes {zooms.tolist()} mm; write the true ones into its header")
    with np.errstate(all="ignore"):  # what overflows is refused
        sizes = np.linalg.norm(affine[:3, :3], axis=0)
        is_regular = abs(np.linalg.det(affine[:3, :3])) > 1e-6 * sizes.prod()
    if not is_regular or not np.isfinite(affine).all():
        raise problem(case, path, f"has the affine {affine.tolist()}, which maps no volume; mend its sform")
    if sizes.min() < SMALLEST or np.abs(affine).max() > LARGEST:
        raise problem(case, path, f"has the affine {affine.tolist()} (mm), too small or large; mend its sform")


def _inflated(path: Path, image: nib.Nifti1Image) -> ArrayProxy:
    """The voxels in memory. Reads to the end of the stream, where the CRC stands: nibabel stops before it."""
    voxels = image.dataobj
    with gzip.open(path) as stream:
        stream.seek(voxels.offset)  # inflates what lies before, piece by piece
        content = stream.read(prod(voxels.shape) * voxels.dtype.itemsize)
        while stream.read(CHUNK):
            pass
    return ArrayProxy(io.BytesIO(content), (voxels.shape, voxels.dtype, 0, voxels.slope, voxels.inter))


def save_labels(path: Path, labels: np.ndarray, like: Path) -> None:
    """Write integer labels (X, Y, Z), which lie on the grid of the image `like`, with its header.

    uint8, or uint16 where a label needs it; what spoke of the intensities, scaling and display range, is reset.
    Extensions stay behind. Atomic: `path` is absent, or as it was, or complete.
    """
    source = open_image(stem(path), like)
    assert labels.shape == size(source), f"{labels.shape} labels for a grid of {size(source)}"
    header = source.header.copy()
    header.set_slope_inter(1, 0)
    header.extensions.clear()  # DICOM fields in there may name the patient
    header["cal_min"] = header["cal_max"] = 0
    kind = np.uint8 if labels.max() < 256 else np.uint16
    header.set_data_dtype(kind)
    replace(path, type(source)(labels.astype(kind), None, header))


def replace(path: Path, image: nib.Nifti1Image) -> None:
    """Write `image` to `path` (.nii or .nii.gz) through a temporary file beside it. Same image, same bytes."""
    content = image.to_bytes()
    if path.name.endswith(".gz"):
        content = gzip.compress(content, mtime=0)
    with replacing(path) as file:
        file.write(content)


ROUNDING = 1e-3  # how far a label may lie from a whole number


@dataclass(frozen=True)
class ValidationRules:
    """What is wrong with a case but taken all the same: data.nonfinite=zero, data.affine_check=warn."""

    nonfinite: bool = False
    affine: bool = False

    @classmethod
    def of(cls, data: Data) -> "ValidationRules":
        """As the options say."""
        return cls(data.nonfinite == "zero", data.affine_check == "warn")


STRICT = ValidationRules()


def read_image(
    case: str, path: Path, image: nib.Nifti1Image, leniency: ValidationRules = STRICT
) -> tuple[np.ndarray, int]:
    """Voxels as float32 (C, X, Y, Z), and how many of them were not finite and became 0."""
    with np.errstate(over="ignore"):  # becomes infinite, which is refused below
        array = read_array(case, path, image).astype(np.float32, copy=False)
    bad = int(array.size - np.count_nonzero(np.isfinite(array)))
    if bad and not leniency.nonfinite:
        raise problem(case, path, f"{bad} voxels are NaN or infinite; give them a value, e.g. the background's")
    if bad:
        array = np.where(np.isfinite(array), array, np.float32(0))
    return array[np.newaxis] if array.ndim == 3 else np.moveaxis(array, -1, 0), bad


def replacement(count: int) -> str:
    """What is said of voxels that data.nonfinite=zero has replaced."""
    return f"{count} voxels are NaN or infinite and count as 0 (data.nonfinite=zero)"


def read_label(case: str, path: Path, image: nib.Nifti1Image, classes: int, ignore: int | None) -> np.ndarray:
    """Voxels as uint8 or uint16 (X, Y, Z), every one a class or `ignore`."""
    array = read_array(case, path, image)
    if not np.issubdtype(array.dtype, np.integer):
        whole = np.rint(array)  # 255 scaled by 1/255 is not quite 1
        array = np.where(np.isclose(array, whole, rtol=0, atol=ROUNDING), whole, array)
    bad = ~((array >= 0) & (array < classes) & (array == np.rint(array)))
    if ignore is not None:
        bad &= array != ignore
    if bad.any():
        values = ", ".join(f"{value:g}" for value in np.unique(array[bad])[:5].tolist())
        allowed = f"0 to {classes - 1}" + ("" if ignore is None else f" and {ignore} (ignored)")
        raise problem(case, path, f"{bad.sum()} voxels have the label {values}; allowed are {allowed}; relabel them")
    return array.astype(label_kind(max(classes - 1, ignore or 0)), copy=False)


def label_kind(highest: int) -> type[np.uint8] | type[np.uint16]:
    """The smallest type that holds the labels 0 .. highest."""
    return np.uint8 if highest < 256 else np.uint16

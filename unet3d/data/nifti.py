"""NIfTI files: headers are checked before memory is taken, voxels as they are read; files are written whole or not."""

import gzip
import io
import logging
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import NamedTuple

import nibabel as nib
import numpy as np
from nibabel import imageglobals
from nibabel.arrayproxy import ArrayProxy
from nibabel.filebasedimages import ImageFileError
from nibabel.spatialimages import HeaderDataError

from unet3d.base.errors import UserError
from unet3d.base.files import replacing
from unet3d.config.schema import Data
from unet3d.data.labels import Relabel, proposal

SUFFIXES = (".nii.gz", ".nii")
MAX_VOXELS = 2**31  # a case is held in memory: 8 GiB as float32, four times the largest whole-body CT
MAX_DEFLATE = 1032  # the highest compression ratio of deflate: a file that claims more voxels than that is truncated
MAX_OFFSET, MAX_TRAILING = 2**26, 2**20  # bytes before and behind the voxels: a small gzip file may hold gigabytes
SMALLEST, LARGEST = 1e-7, 1e7  # mm, below a nanometre and above a kilometre: squares of less vanish, of more overflow
ROUNDING, QUANTUM = 1e-6, 1e-3  # of a label: float32's, for scaled ones; the largest rounding to a file's integers
GREYS = 256  # steps that float32 must leave in an image's range
READ_ERRORS = (OSError, EOFError, ValueError, OverflowError, zlib.error, ImageFileError, HeaderDataError)
# By the header's own length, which also gives the byte order: class, place of the magic, magic.
FORMATS = {348: (nib.Nifti1Image, slice(344, 348), b"n+1\0"), 540: (nib.Nifti2Image, slice(4, 8), b"n+2\0")}


@contextmanager
def quiet_nibabel() -> Iterator[None]:
    """Within, nibabel does not log: it would what it corrects in a header, at every copy, without the file's name."""

    def drop(_: logging.LogRecord) -> bool:
        return False

    logger = imageglobals.logger  # of the whole process: others use it, too
    logger.addFilter(drop)
    try:
        yield
    finally:
        logger.removeFilter(drop)


class ValidationRules(NamedTuple):
    """Which faults of a case are accepted: voxels that are not finite (as 0), files that lie apart in space."""

    nonfinite: bool = False
    affine: bool = False

    @classmethod
    def of(cls, data: Data) -> "ValidationRules":
        """The rules of data.nonfinite and data.affine_check."""
        return cls(data.nonfinite == "zero", data.affine_check == "warn")


STRICT = ValidationRules()


class UnknownLabels(UserError):
    """A label map holds values that are no class. `found` are its labels but 0, where they are whole numbers.

    `alone` is the message without the `option` that would suit this file.
    """

    def __init__(self, message: str, found: frozenset[int] = frozenset(), option: str = "") -> None:
        super().__init__(message + f", or add {option}" * bool(option))
        self.found, self.alone = found, message


def problem(case: str, path: Path, what: str) -> UserError:
    """The error for a file: which case, which file, what is wrong and what to do."""
    return UserError(f"{case}: {path}: {what}")


def stem(path: Path) -> str:
    """The file's name without .nii or .nii.gz."""
    return path.name.removesuffix(".gz").removesuffix(".nii") if path.name.endswith(SUFFIXES) else path.name


@quiet_nibabel()
def open_image(case: str, path: Path) -> nib.Nifti1Image:
    """The file with its header checked, its voxels unread. Raises UserError."""
    _check_file(case, path)
    try:
        kind, stored = _stored_header(path)  # without extensions: nibabel would pass some to parsers of other formats
        zooms = stored["pixdim"][1:4].copy()  # as stored: the check turns a 0 into 1
        header = stored.copy()
        header.check_fix()
        shape, dtype, offset = header.get_data_shape(), header.get_data_dtype(), header.get_data_offset()
        header.get_slope_inter()
        affine = header.get_best_affine()
    except READ_ERRORS as error:
        raise problem(case, path, f"not readable as NIfTI ({error}); replace the file") from error
    for fault in _header_faults(path, shape, dtype, offset, affine, zooms):
        raise problem(case, path, fault)
    return kind(ArrayProxy(path, header, mmap=False), affine, header)


def _check_file(case: str, path: Path) -> None:
    if not path.name.endswith(SUFFIXES):
        raise problem(case, path, f"is not a {' or '.join(SUFFIXES)} file; convert it")
    try:
        if not path.is_file():  # also a pipe: reading would wait for it
            what = f"{stem(path)} is missing" if stem(path)[:-5] == case else "no such file"  # the first: a channel
            raise problem(case, path, f"{what}; restore it or remove the case")
        with path.open("rb") as stream:
            start = stream.read(2)
    except OSError as error:
        raise problem(case, path, f"cannot be opened ({error.strerror}); fix that or remove the case") from error
    if not start:
        raise problem(case, path, "is empty; replace the file")
    if path.name.endswith(".gz") and start != b"\x1f\x8b":
        raise problem(case, path, "is not gzip-compressed despite its name; rename or replace it")


def _stored_header(path: Path) -> tuple[type[nib.Nifti1Image], nib.Nifti1Header]:
    """The kind of image and its header as stored. Reads no more than the header."""
    with gzip.open(path) if path.name.endswith(".gz") else path.open("rb") as stream:
        block = stream.read(max(FORMATS))
    for order, name in (("<", "little"), (">", "big")):
        length = int.from_bytes(block[:4], name)  # type: ignore[arg-type]
        if length in FORMATS and len(block) >= length:
            kind, where, magic = FORMATS[length]
            if block[where] == magic:
                return kind, kind.header_class(block[:length], order, check=False)
    raise ImageFileError("no NIfTI-1 or NIfTI-2 header")


def _header_faults(
    path: Path, shape: tuple[int, ...], dtype: np.dtype, offset: int, affine: np.ndarray, zooms: np.ndarray
) -> Iterator[str]:
    voxels = prod(shape)
    if len(shape) < 3 or min(shape) < 1 or sum(n > 1 for n in shape[3:]) > 1:
        yield f"has shape {shape}; a volume is X,Y,Z or, with channels, X,Y,Z,C"
    if dtype.kind not in "iuf":
        yield f"stores {dtype}; convert the voxels to integers or floats"
    if voxels > MAX_VOXELS:
        yield f"claims {voxels:,} voxels, more than {MAX_VOXELS:,}; replace, crop or resample it"
    if offset > MAX_OFFSET:
        yield f"claims that its voxels begin at byte {offset:,}, behind {MAX_OFFSET:,}; replace the file"
    claimed = offset + voxels * dtype.itemsize
    held = path.stat().st_size * (MAX_DEFLATE if path.name.endswith(".gz") else 1)
    if claimed > held:
        yield f"claims {claimed:,} bytes but holds {held:,} at most: truncated; replace the file"
    if not np.isfinite(zooms).all() or not zooms.all():
        yield f"has voxel sizes {zooms.tolist()} mm; write the true ones into its header"
    with np.errstate(all="ignore"):  # an overflow is refused below
        sizes = np.linalg.norm(affine[:3, :3], axis=0)
        is_regular = abs(np.linalg.det(affine[:3, :3])) > 1e-6 * sizes.prod()
    if not is_regular or not np.isfinite(affine).all():
        yield f"has the affine {affine.tolist()}, which maps no volume; correct its sform"
    if sizes.min() < SMALLEST or np.abs(affine).max() > LARGEST:
        yield f"has the affine {affine.tolist()} (mm), too small or large; correct its sform"


def channels(image: nib.Nifti1Image) -> int:
    """Length of the fourth axis, 1 where there is none."""
    return prod(image.shape[3:])


def read_array(case: str, path: Path, image: nib.Nifti1Image) -> np.ndarray:
    """All voxels (X, Y, Z) or (X, Y, Z, C), scaled by the header's slope and intercept. Raises UserError if damaged."""
    try:
        with np.errstate(all="ignore"):  # what is then not finite is refused, or counted and replaced
            array: np.ndarray = np.asanyarray(_inflated(path, image) if path.name.endswith(".gz") else image.dataobj)
    except READ_ERRORS as error:
        raise problem(case, path, f"damaged ({error}); replace the file") from error
    return array.reshape(*image.shape[:3], -1) if channels(image) > 1 else array.reshape(image.shape[:3])


def _inflated(path: Path, image: nib.Nifti1Image) -> ArrayProxy:
    """The voxels in memory. Reads to the end of the stream, where the checksum is: nibabel stops before it."""
    voxels = image.dataobj
    with gzip.open(path) as stream:
        stream.seek(voxels.offset)  # inflates what lies before, piece by piece
        content = stream.read(prod(voxels.shape) * voxels.dtype.itemsize)
        if len(stream.read(MAX_TRAILING + 1)) > MAX_TRAILING:
            raise ValueError(f"more than {MAX_TRAILING:,} bytes follow the voxels")
    return ArrayProxy(io.BytesIO(content), (voxels.shape, voxels.dtype, 0, voxels.slope, voxels.inter))


def read_image(case: str, path: Path, image: nib.Nifti1Image, rules: ValidationRules) -> tuple[np.ndarray, int]:
    """Voxels as float32 (C, X, Y, Z), and how many of them were not finite and became 0. Raises UserError."""
    stored = read_array(case, path, image)
    with np.errstate(over="ignore"):  # becomes infinite, which is refused below
        array = stored.astype(np.float32, copy=False)
    is_finite = np.isfinite(array)
    bad = int(array.size - np.count_nonzero(is_finite))
    if bad and not rules.nonfinite:
        raise problem(case, path, f"{bad} voxels are NaN or infinite; give them a value, e.g. the background's")
    if bad < array.size and not np.can_cast(stored.dtype, np.float32):  # else nothing was rounded
        _refuse_rounded(case, path, stored[is_finite] if bad else stored)
    if bad:
        array = np.where(is_finite, array, np.float32(0))
    return array[np.newaxis] if array.ndim == 3 else np.moveaxis(array, -1, 0), bad


def _refuse_rounded(case: str, path: Path, stored: np.ndarray) -> None:
    """Raise UserError where float32 has too few numbers for these voxels: their contrast would be lost."""
    low, high = stored.min().item(), stored.max().item()
    if high > low and (step := np.spacing(np.float32(max(-low, high)))) * GREYS > high - low:
        what = f"has values from {low:.12g} to {high:.12g}, of which float32 keeps steps of {step:g}"
        raise problem(case, path, f"{what}; subtract the offset")


def replacement(count: int) -> str:
    """The warning about voxels that data.nonfinite=zero replaced."""
    return f"{count} voxels are NaN or infinite and count as 0 (data.nonfinite=zero)"


def read_label(
    case: str, path: Path, image: nib.Nifti1Image, classes: int, ignore: int | None, relabel: Relabel = None
) -> np.ndarray:
    """Voxels as uint8 or uint16 (X, Y, Z), every one a class or `ignore`. Raises UnknownLabels, UserError."""
    array = read_array(case, path, image)
    if not np.issubdtype(array.dtype, np.integer):
        # 255 scaled by 1/255 is not quite 1; nor are floats that nibabel scales to fit the 2^16 values of an integer.
        half, whole = abs(image.dataobj.slope) / 2, np.rint(array)
        is_rounded = image.dataobj.dtype.kind in "iu" and half < QUANTUM
        is_near = np.isclose(array, whole, rtol=ROUNDING, atol=ROUNDING + half * is_rounded)
        array = np.where(is_near, whole, array)
    kind = np.min_scalar_type(max(classes - 1, ignore or 0))
    if relabel is None:
        found, bad = array, ~((array >= 0) & (array < classes) & (array == np.rint(array)))
    else:
        found, bad = np.zeros(array.shape, kind), np.ones(array.shape, bool)
        for old, new in relabel.items():
            voxels = array == old
            found[voxels], bad[voxels] = new, False
    if ignore is not None:
        found = found if relabel is None else np.where(array == ignore, kind.type(ignore), found)
        bad &= array != ignore
    if bad.any():
        raise _unknown_labels(case, path, array, bad, classes, ignore, relabel)
    return found.astype(kind, copy=False)


def _unknown_labels(
    case: str, path: Path, array: np.ndarray, bad: np.ndarray, classes: int, ignore: int | None, relabel: Relabel
) -> UnknownLabels:
    """The error for the labels of a file that are neither a class nor `ignore`."""
    values, wrong = np.unique(array), np.unique(array[bad])
    known = f"0 to {classes - 1}" if relabel is None else ", ".join(map(str, sorted(relabel)))
    allowed = known + ("" if ignore is None else f" and {ignore} (ignored)")
    listed = ", ".join(f"{value:g}" for value in wrong[:5].tolist())
    are_whole = bool(np.isfinite(wrong).all() and (wrong == np.rint(wrong)).all())
    found = frozenset(int(value) for value in values if are_whole and value not in (0, ignore))
    what = f"{bad.sum()} voxels have the label {listed}; allowed are {allowed}; relabel them"
    return UnknownLabels(f"{case}: {path}: {what}", found, proposal(found, classes, relabel))


def save_labels(path: Path, labels: np.ndarray, like: Path) -> None:
    """Write integer labels (X, Y, Z) on the grid of the image `like`, as uint8 or uint16. Raises UserError, OSError."""
    save_image(path, labels_like(labels, open_image(stem(path), like)))


@quiet_nibabel()
def labels_like(labels: np.ndarray, source: nib.Nifti1Image) -> nib.Nifti1Image:
    """Integer labels (X, Y, Z) as an image on the grid of `source`, uint8 or uint16."""
    assert labels.shape == source.shape[:3], f"{labels.shape} labels for an image of {source.shape}"
    kind = np.min_scalar_type(int(labels.max()))
    return type(source)(labels.astype(kind), None, _header_like(source, kind))


@quiet_nibabel()
def scores_like(scores: np.ndarray, source: nib.Nifti1Image) -> nib.Nifti1Image:
    """Scores (X, Y, Z, K) as an image on the grid of `source`, float32."""
    return type(source)(scores, None, _header_like(source, np.float32))


@quiet_nibabel()
def _header_like(source: nib.Nifti1Image, kind: np.dtype | type) -> nib.Nifti1Header:
    """The header of `source` for other values of this type."""
    header = source.header.copy()
    header.extensions.clear()  # their DICOM fields may name the patient
    header.set_slope_inter(1, 0)
    header["cal_min"] = header["cal_max"] = 0  # the display range of intensities
    header.set_data_dtype(kind)
    return header


@contextmanager
def saving_scores(path: Path, like: Path) -> Iterator[Callable[[int, int], np.ndarray]]:
    """Write float32 scores (X, Y, Z, K) on the grid of the image `like` to `path` (.nii). Raises UserError, OSError.

    Gives a function of a class and of K, which maps the class's voxels into memory; they leave it with the array.
    """
    source = open_image(stem(path), like)
    header, shape = _header_like(source, np.float32), source.shape[:3]
    header["vox_offset"] = offset = header.single_vox_offset
    with replacing(path) as file:

        def open_scores(label: int, classes: int) -> np.ndarray:
            if not file.tell():
                header.set_data_shape((*shape, classes))
                header.write_to(file)
                file.flush()
                # on a disk that fills later, a write to mapped memory would kill the process
                os.posix_fallocate(file.fileno(), 0, offset + 4 * prod(shape) * classes)
            return np.memmap(file, header.get_data_dtype(), "r+", offset + 4 * prod(shape) * label, shape, "F")

        yield open_scores


@quiet_nibabel()
def save_image(path: Path, image: nib.Nifti1Image) -> None:
    """Write `image` to `path` (.nii or .nii.gz), whole or not at all. Same image, same bytes. Raises OSError."""
    content = image.to_bytes()
    with replacing(path) as file:
        file.write(gzip.compress(content, mtime=0) if path.name.endswith(".gz") else content)

"""NIfTI files: a header is checked before memory is taken for its voxels, and voxels are checked as they are read."""

import gzip
import io
import logging
import os
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from math import prod
from pathlib import Path
from typing import BinaryIO, NamedTuple

import nibabel as nib
import numpy as np
from nibabel import imageglobals
from nibabel.arrayproxy import ArrayProxy
from nibabel.filebasedimages import ImageFileError
from nibabel.spatialimages import HeaderDataError

from unet3d.base.errors import UserError
from unet3d.base.files import NIFTI_ENDINGS, open_regular
from unet3d.config.schema import Data
from unet3d.data.forms import affine_of, form_faults

ENDING = re.compile(r"\.nii(\.gz)?\Z", re.IGNORECASE | re.ASCII)
GZIP_MAGIC = b"\x1f\x8b"
MAX_VOXELS = 2**31  # a case is held in memory: 8 GiB as float32, four times the largest whole-body CT
MAX_DEFLATE = 1032  # the highest compression ratio of deflate: a file that claims more voxels than that is truncated
MAX_OFFSET = 2**26  # bytes before the voxels: a small gzip file may hold gigabytes
MAX_TRAILING = 2**20  # bytes behind the voxels
GREYS = 256  # steps that float32 must leave in an image's range
READ_ERRORS = (OSError, EOFError, ValueError, OverflowError, zlib.error, ImageFileError, HeaderDataError)
# By the header's own length, which also gives the byte order: class, place of the magic, magic.
FORMATS = {348: (nib.Nifti1Image, slice(344, 348), b"n+1\0"), 540: (nib.Nifti2Image, slice(4, 8), b"n+2\0")}


@contextmanager
def quiet_nibabel() -> Iterator[None]:
    """Silence nibabel's log within: it reports what it corrects in a header at every copy, without the file's name."""

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
        """Return the rules of data.nonfinite and data.affine_check."""
        return cls(data.nonfinite == "zero", data.affine_check == "warn")


STRICT = ValidationRules()


def problem(case_id: str, path: Path, what: str) -> UserError:
    """Return the error for a file: which case, which file, what is wrong and what to do."""
    return UserError(f"{case_id}: {path}: {what}")


def ending(path: Path) -> str:
    """Return .nii or .nii.gz as the file's name has it, also in upper case; "" for a name without them."""
    found = ENDING.search(path.name)
    return "" if found is None else found.group()


def stem(path: Path) -> str:
    """Return the file's name without .nii or .nii.gz."""
    return path.name.removesuffix(ending(path))


def is_compressed(name: str) -> bool:
    """Return whether a file of this name is compressed by gzip."""
    return name.lower().endswith(".gz")


def open_file(case_id: str, path: Path) -> BinaryIO:
    """Open a file that has the name and the first bytes of a NIfTI file. Raises UserError."""
    if not ending(path):
        raise problem(case_id, path, f"is not a {' or '.join(NIFTI_ENDINGS)} file; convert it")
    try:
        stream = open_regular(path) if path.is_file() else None  # not of a pipe: reading would wait for it
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise problem(case_id, path, f"cannot be opened ({reason}); fix that or remove the case") from error
    if stream is None:
        raise problem(case_id, path, _absence(case_id, path))
    try:
        _refuse_first_bytes(case_id, path, stream)
    except BaseException:
        stream.close()
        raise
    return stream


def _absence(case_id: str, path: Path) -> str:
    """Return that a file is missing, and what helps: its name may be written otherwise."""
    is_channel = stem(path)[:-5] == case_id
    what = f"{stem(path)} is missing" if is_channel else "no such file"
    if "\\" in str(path):
        return f"{what}: its backslashes are letters of a name here; write / between folders"
    with suppress(OSError):
        for other in sorted(path.parent.iterdir()):
            if ending(other) and stem(other) == stem(path):
                return f"{what}, but {other.name} is there; name that one, or rename it"
    return f"{what}; restore it or remove the case"


def _refuse_first_bytes(case_id: str, path: Path, stream: BinaryIO) -> None:
    """Raise UserError for an empty file, and for one that is not compressed as its name says."""
    try:
        start = stream.read(len(GZIP_MAGIC))
    except OSError as error:
        what = f"cannot be opened ({error.strerror}); fix that or remove the case"
        raise problem(case_id, path, what) from error
    if not start:
        raise problem(case_id, path, "is empty; replace the file")
    if is_compressed(path.name) and start != GZIP_MAGIC:
        raise problem(case_id, path, "is not gzip-compressed despite its name; rename or replace it")


def open_image(case_id: str, path: Path, form: str = "auto") -> nib.Nifti1Image:
    """Return the file with its header checked, its voxels unread. Raises UserError."""
    with open_file(case_id, path) as stream:
        return read_header(case_id, path, stream, form)


@quiet_nibabel()
def read_header(case_id: str, path: Path, stream: BinaryIO, form: str = "auto") -> nib.Nifti1Image:
    """Return an open file as an image, its header checked, its voxels unread. Raises UserError.

    Its affine is that of the `form` (data.affine); its header keeps all that the file's says.
    """
    try:
        kind, stored = _stored_header(path, stream)  # without extensions: nibabel would parse some as other formats
        zooms = stored["pixdim"][1:4].copy()  # as stored: the check turns a 0 into 1
        header = stored.copy()
        header.check_fix()
        voxels = ArrayProxy(path, header, mmap=False)
        held_bytes = os.fstat(stream.fileno()).st_size
    except READ_ERRORS as error:
        raise problem(case_id, path, f"not readable as NIfTI ({error}); replace the file") from error
    if is_compressed(path.name):
        held_bytes *= MAX_DEFLATE
    for fault in (*_voxel_faults(voxels, held_bytes), *form_faults(header, form, zooms)):
        raise problem(case_id, path, fault)
    image = kind(voxels, affine_of(header, form), header)
    image.header.structarr[...] = header.structarr  # nibabel has written an affine that is not its first over others
    return image


def _stored_header(path: Path, stream: BinaryIO) -> tuple[type[nib.Nifti1Image], nib.Nifti1Header]:
    """Return the kind of image and its header as stored. Reads no more than the header."""
    with _content(path, stream) as content:
        block = content.read(max(FORMATS))
    for order, name in (("<", "little"), (">", "big")):
        length = int.from_bytes(block[:4], name)  # type: ignore[arg-type]
        if length not in FORMATS or len(block) < length:
            continue
        kind, place, magic = FORMATS[length]
        if block[place] == magic:
            return kind, kind.header_class(block[:length], order, check=False)
    raise ImageFileError("no NIfTI-1 or NIfTI-2 header")


@contextmanager
def _content(path: Path, stream: BinaryIO) -> Iterator[BinaryIO]:
    """Yield the content of an open file from its beginning, inflated if it is compressed; the file stays open."""
    stream.seek(0)
    if not is_compressed(path.name):
        yield stream
        return
    with gzip.GzipFile(fileobj=stream) as inflated:
        yield inflated  # type: ignore[misc]


def _voxel_faults(voxels: ArrayProxy, held_bytes: int) -> Iterator[str]:
    """Yield what is wrong with the shape, type and place of voxels in a file of at most `held_bytes`, inflated."""
    shape = voxels.shape
    count = prod(shape)
    if len(shape) < 3 or min(shape) < 1 or sum(n > 1 for n in shape[3:]) > 1:
        yield f"has shape {shape}; a volume is X,Y,Z or, with channels, X,Y,Z,C"
    if voxels.dtype.kind not in "iuf":
        yield f"stores {voxels.dtype}; convert the voxels to integers or floats"
    if count > MAX_VOXELS:
        yield f"claims {count:,} voxels, more than {MAX_VOXELS:,}; replace, crop or resample it"
    if voxels.offset > MAX_OFFSET:
        yield f"claims that its voxels begin at byte {voxels.offset:,}, behind {MAX_OFFSET:,}; replace the file"
    claimed_bytes = voxels.offset + count * voxels.dtype.itemsize
    if claimed_bytes > held_bytes:
        yield f"claims {claimed_bytes:,} bytes but holds {held_bytes:,} at most: truncated; replace the file"


def channels(image: nib.Nifti1Image) -> int:
    """Return the length of the fourth axis, 1 for a single channel."""
    return prod(image.shape[3:])


def read_array(case_id: str, path: Path, image: nib.Nifti1Image, stream: BinaryIO | None = None) -> np.ndarray:
    """Return all voxels (X, Y, Z) or (X, Y, Z, C), scaled by the header's slope and intercept.

    Reads from the open `stream`; None: opens the file. Raises UserError if it is damaged.
    """
    opened = open_file(case_id, path) if stream is None else nullcontext(stream)
    with opened as source:
        try:
            with np.errstate(all="ignore"):  # what is then not finite is refused, or counted and replaced
                array: np.ndarray = np.asanyarray(_voxels(path, image.dataobj, source))
        except READ_ERRORS as error:
            raise problem(case_id, path, f"damaged ({error}); replace the file") from error
    if channels(image) > 1:
        return array.reshape(*image.shape[:3], -1)
    return array.reshape(image.shape[:3])


def _voxels(path: Path, voxels: ArrayProxy, stream: BinaryIO) -> ArrayProxy:
    """Return the voxels of an open file; compressed ones are inflated into memory.

    Reads a compressed file to the end of the stream, where the checksum is: nibabel stops before it.
    """
    scale = (voxels.slope, voxels.inter)
    if not is_compressed(path.name):
        return ArrayProxy(stream, (voxels.shape, voxels.dtype, voxels.offset, *scale), mmap=False)
    with _content(path, stream) as inflated:
        inflated.seek(voxels.offset)  # inflates what lies before, piece by piece
        content = inflated.read(prod(voxels.shape) * voxels.dtype.itemsize)
        if len(inflated.read(MAX_TRAILING + 1)) > MAX_TRAILING:
            raise ValueError(f"more than {MAX_TRAILING:,} bytes follow the voxels")
    return ArrayProxy(io.BytesIO(content), (voxels.shape, voxels.dtype, 0, *scale))


def read_image(
    case_id: str, path: Path, image: nib.Nifti1Image, rules: ValidationRules, stream: BinaryIO | None = None
) -> tuple[np.ndarray, int]:
    """Return voxels as float32 (C, X, Y, Z), and how many of them were not finite and became 0. Raises UserError."""
    stored = read_array(case_id, path, image, stream)
    with np.errstate(over="ignore"):  # becomes infinite, which is refused below
        array = stored.astype(np.float32, copy=False)
    is_finite = np.isfinite(array)
    nonfinite = int(array.size - np.count_nonzero(is_finite))
    if nonfinite and not rules.nonfinite:
        what = f"{nonfinite} voxels are NaN or infinite; give them a value, e.g. the background's"
        raise problem(case_id, path, what)
    if nonfinite < array.size and not np.can_cast(stored.dtype, np.float32):  # else nothing was rounded
        _refuse_rounded(case_id, path, stored[is_finite] if nonfinite else stored)
    if nonfinite:
        array = np.where(is_finite, array, np.float32(0))
    if array.ndim == 3:
        return array[np.newaxis], nonfinite
    return np.moveaxis(array, -1, 0), nonfinite


def _refuse_rounded(case_id: str, path: Path, stored: np.ndarray) -> None:
    """Raise UserError where float32 has too few numbers for these voxels: their contrast would be lost."""
    low = stored.min().item()
    high = stored.max().item()
    step = np.spacing(np.float32(max(-low, high)))
    if high > low and step * GREYS > high - low:
        what = f"has values from {low:.12g} to {high:.12g}, of which float32 keeps steps of {step:g}"
        raise problem(case_id, path, f"{what}; subtract the offset")


def replacement(count: int) -> str:
    """Return the warning about voxels that data.nonfinite=zero replaced."""
    return f"{count} voxels are NaN or infinite and count as 0 (data.nonfinite=zero)"

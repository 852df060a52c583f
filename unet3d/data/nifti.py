"""NIfTI files: a header is checked before memory is taken for its voxels, and voxels are checked as they are read.

A header says where voxels lie by its sform, its qform, or by pixdim, the voxel sizes alone.
"""

import gzip
import io
import logging
import os
import re
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import product
from math import prod
from pathlib import Path
from typing import BinaryIO, NamedTuple

import nibabel as nib
import numpy as np
from nibabel import imageglobals
from nibabel.affines import apply_affine, voxel_sizes
from nibabel.arrayproxy import ArrayProxy
from nibabel.filebasedimages import ImageFileError
from nibabel.spatialimages import HeaderDataError

from unet3d.base.errors import UserError
from unet3d.base.files import NIFTI_ENDINGS, open_regular

ENDING = re.compile(r"\.nii(\.gz)?\Z", re.IGNORECASE | re.ASCII)
GZIP_MAGIC = b"\x1f\x8b"
MAX_VOXELS = 2**31  # a case is held in memory: 8 GiB as float32, four times the largest whole-body CT
MAX_DEFLATE = 1032  # the highest compression ratio of deflate: a file that claims more voxels than that is truncated
MAX_OFFSET = 2**26  # bytes before the voxels: a small gzip file may hold gigabytes
MAX_TRAILING = 2**20  # bytes behind the voxels
GREYS = 256  # steps that float32 must leave in an image's range
READ_ERRORS = (OSError, EOFError, ValueError, OverflowError, zlib.error, ImageFileError, HeaderDataError)
FORMS = ("sform", "qform", "pixdim")  # The first form that a header has counts, as in nibabel.
DECIDES = "data.affine=sform, qform or pixdim decides"
MM = (0, 2)  # codes of a header's unit of length that mean mm: 0 is unset, and mm by custom
UNITS = {1: "meter", 3: "micron"}
SHEAR = 1e-3  # cosine of the angle between two axes that still counts as a right one
SMALLEST = 1e-7  # mm, below a nanometre: squares of less vanish
LARGEST = 1e7  # mm, above a kilometre: squares of more overflow
SAME_PLACE = 0.01  # mm: largest difference between sform and qform that counts as none
SAME_SIZE = 0.01  # relative difference of voxel sizes that is rounding
Affines = Mapping[str, np.ndarray]  # Keys are forms.
Remark = tuple[str, str]  # what is odd, and what counts or helps


@contextmanager
def quiet_nibabel() -> Iterator[None]:
    """Silence nibabel's log within: it reports what it corrects in a header at every copy, without the file's name."""
    drop = logging.Filter("nobody")  # No logger has this name, so the filter drops every record.
    logger = imageglobals.logger  # nibabel's logger serves the whole process.
    logger.addFilter(drop)
    try:
        yield
    finally:
        logger.removeFilter(drop)


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


def volumes_in(folder: Path) -> list[Path]:
    """Return the NIfTI files of a folder by name. Raises UserError where there is no folder."""
    if not folder.is_dir():
        what = f"no such folder{backslashes(folder)}"
        raise UserError(f"{folder}: {what}; check data.root, data/README.md shows the layouts")
    return [path for path in visible(folder) if ending(path)]


def backslashes(name: object) -> str:
    """Return what is wrong with a path as Windows writes it, where no file has that name; "" for another path."""
    return ": backslashes are letters of a name, write / between folders" if "\\" in str(name) else ""


def by_stem(files: Iterable[Path]) -> dict[str, Path]:
    """Return files by their names without .nii and .nii.gz. Raises UserError where two share one."""
    by_name = dict[str, Path]()
    for path in files:
        name = stem(path)
        if name in by_name:
            names = f"{by_name[name].name} and {path.name}"
            raise UserError(f"{path.parent}: {names} are two files of one name, {name}; remove or rename one")
        by_name[name] = path
    return by_name


def without_channel(stem: str) -> str:
    """Return a case's name from its channel's: `case_0001` is `case`."""
    return re.sub(r"_\d{4}$", "", stem)


def visible(folder: Path) -> list[Path]:
    """Return what a folder holds by name, but hidden files: a Mac's archives hold a `._name.nii.gz` for each volume."""
    return sorted(path for path in folder.iterdir() if not path.name.startswith("."))


def _open_file(case_id: str, path: Path) -> BinaryIO:
    """Open a file that has the name and the first bytes of a NIfTI file. Raises UserError."""
    if not ending(path):
        raise problem(case_id, path, f"is not a {' or '.join(NIFTI_ENDINGS)} file; convert it")
    start = b""
    try:
        stream = open_regular(path) if path.is_file() else None  # not of a pipe: reading would wait for it
        if stream is not None:
            start = stream.read(len(GZIP_MAGIC))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise problem(case_id, path, f"cannot be opened ({reason}); fix that or remove the case") from error
    if stream is None:
        raise problem(case_id, path, _absence(case_id, path))
    if start and (start == GZIP_MAGIC or not is_compressed(path.name)):
        return stream
    stream.close()
    fault = "is not gzip-compressed despite its name; rename or replace it" if start else "is empty; replace the file"
    raise problem(case_id, path, fault)


def _absence(case_id: str, path: Path) -> str:
    """Return that a file is missing, and what helps: its name may be written otherwise."""
    is_channel = stem(path)[:-5] == case_id
    what = f"{stem(path)} is missing" if is_channel else "no such file"
    if backslashes(path):
        return f"{what}{backslashes(path)}"
    with suppress(OSError):
        for other in sorted(path.parent.iterdir()):
            if ending(other) and stem(other) == stem(path):
                return f"{what}, but {other.name} is there; name that one, or rename it"
    return f"{what}; restore it or remove the case"


class OpenFile(NamedTuple):
    """An open NIfTI file: its checked header as an image, and the stream that its voxels are read from."""

    case_id: str
    path: Path
    image: nib.Nifti1Image
    stream: BinaryIO


@contextmanager
def opened(case_id: str, path: Path, form: str) -> Iterator[OpenFile]:
    """Open a file within, its header checked. Raises UserError."""
    with _open_file(case_id, path) as stream:
        yield OpenFile(case_id, path, _read_header(case_id, path, stream, form), stream)


def open_image(case_id: str, path: Path, form: str = "auto") -> nib.Nifti1Image:
    """Return the file with its header checked, its voxels unread. Raises UserError."""
    with opened(case_id, path, form) as file:
        return file.image


@quiet_nibabel()
def _read_header(case_id: str, path: Path, stream: BinaryIO, form: str) -> nib.Nifti1Image:
    """Return an open file as an image, its header checked, its voxels unread. Raises UserError.

    Its affine is that of the `form` (data.affine); its header keeps all that the file's says.
    """
    try:
        kind, stored = _stored_header(path, stream)  # without extensions: nibabel would parse some as other formats
        zooms = stored["pixdim"][1:4].copy()  # Copied before the check turns a 0 into 1.
        header = stored.copy()
        header.check_fix()
        voxels = ArrayProxy(path, header, mmap=False)
        held_bytes = os.fstat(stream.fileno()).st_size
    except READ_ERRORS as error:
        raise problem(case_id, path, f"not readable as NIfTI ({error}); replace the file") from error
    if is_compressed(path.name):
        held_bytes *= MAX_DEFLATE
    affines, taken = affines_of(header, form)
    for fault in (*_voxel_faults(voxels, held_bytes), *_place_faults(affines, taken, zooms)):
        raise problem(case_id, path, fault)
    image = kind(voxels, affines[taken], header)
    image.header.structarr[...] = header.structarr  # nibabel has written an affine that is not its first over others
    return image


def _stored_header(path: Path, stream: BinaryIO) -> tuple[type[nib.Nifti1Image], nib.Nifti1Header]:
    """Return the kind of image and its header as stored. Reads no more than the header."""
    with _content(path, stream) as content:
        block = content.read(nib.Nifti2Header.sizeof_hdr)  # the longer one
    for kind in (nib.Nifti1Image, nib.Nifti2Image):
        header_class = kind.header_class
        if header_class.may_contain_header(block):
            header = header_class(block[: header_class.sizeof_hdr], check=False)
            if header["magic"] == header_class.single_magic and header["sizeof_hdr"] == header_class.sizeof_hdr:
                return kind, header
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


def read_array(file: OpenFile) -> np.ndarray:
    """Return all voxels (X, Y, Z) or (X, Y, Z, C), scaled by the header's slope and intercept.

    Raises UserError if the file is damaged.
    """
    image = file.image
    try:
        with np.errstate(all="ignore"):  # what is then not finite is refused, or counted and replaced
            array: np.ndarray = np.asanyarray(_voxels(file.path, image.dataobj, file.stream))
    except READ_ERRORS as error:
        raise problem(file.case_id, file.path, f"damaged ({error}); replace the file") from error
    return array.reshape(*image.shape[:3], *([-1] if channels(image) > 1 else []))


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


def read_image(file: OpenFile, replaces_nonfinite: bool) -> tuple[np.ndarray, int]:
    """Return voxels as float32 (C, X, Y, Z), and how many of them were not finite and became 0.

    Raises UserError, also where float32 has too few numbers for these voxels: their contrast would be lost.
    """
    stored = read_array(file)
    with np.errstate(over="ignore"):  # becomes infinite, which is refused below
        array = stored.astype(np.float32, copy=False)
    is_finite = np.isfinite(array)
    nonfinite = int(array.size - np.count_nonzero(is_finite))
    if nonfinite and not replaces_nonfinite:
        what = f"{nonfinite} voxels are NaN or infinite; give them a value, e.g. the background's"
        raise problem(file.case_id, file.path, what)
    # Nothing is rounded where float32 holds the stored type, or no voxel is finite.
    if nonfinite < array.size and not np.can_cast(stored.dtype, np.float32):
        finite = stored[is_finite] if nonfinite else stored
        low, high = finite.min().item(), finite.max().item()
        step = np.spacing(np.float32(max(-low, high)))
        if high > low and step * GREYS > high - low:
            what = f"has values from {low:.12g} to {high:.12g}, of which float32 keeps steps of {step:g}"
            raise problem(file.case_id, file.path, f"{what}; subtract the offset")
    if nonfinite:
        array = np.where(is_finite, array, np.float32(0))
    return (array[np.newaxis] if array.ndim == 3 else np.moveaxis(array, -1, 0)), nonfinite


def replacement(count: int) -> str:
    """Return the warning about voxels that data.nonfinite=zero replaced."""
    return f"{count} voxels are NaN or infinite and count as 0 (data.nonfinite=zero)"


def affines_of(header: nib.Nifti1Header, form: str) -> tuple[Affines, str]:
    """Return the affine (4, 4), to mm, by each of FORMS that a header has; NaN for a qform that is no rotation.

    And the form that is taken: the one that is asked for, if the header has it, else the first. pixdim states lengths
    alone: axes then run as the sform, or the qform, says.
    """
    affines = dict[str, np.ndarray]()
    if header["sform_code"] > 0:
        affines["sform"] = header.get_sform()
    if header["qform_code"] > 0:
        affines["qform"] = np.full((4, 4), np.nan)
        with suppress(ValueError, HeaderDataError):
            affines["qform"] = header.get_qform()
    lengths = next(iter(affines.values()), header.get_base_affine()).copy()
    with np.errstate(all="ignore"):  # an axis of no length is refused later
        lengths[:3, :3] *= header["pixdim"][1:4] / np.linalg.norm(lengths[:3, :3], axis=0)
    affines["pixdim"] = lengths
    return affines, form if form in affines else next(iter(affines))


def affine_fault(affine: np.ndarray) -> str:
    """Return why an affine maps no volume; "" where it does."""
    if np.isnan(affine).all():
        return "has a qform that is no rotation"
    with np.errstate(all="ignore"):  # an overflow is refused below
        sizes = np.linalg.norm(affine[:3, :3], axis=0)
        is_regular = abs(np.linalg.det(affine[:3, :3])) > 1e-6 * sizes.prod()
    if not is_regular or not np.isfinite(affine).all():
        return f"has the affine {affine.tolist()}, which maps no volume"
    if sizes.min() < SMALLEST or np.abs(affine).max() > LARGEST:
        return f"has the affine {affine.tolist()} (mm), too small or large"
    return ""


def _place_faults(affines: Affines, taken: str, zooms: np.ndarray) -> Iterator[str]:
    """Yield what is wrong with the affine that is taken, and with the voxel sizes (mm) that the header states."""
    if not np.isfinite(zooms).all() or not zooms.all():
        yield f"has voxel sizes {zooms.tolist()} mm; write the true ones into its header"
    fault = affine_fault(affines[taken])
    if fault:
        wrong = next(iter(affines)) if taken == "pixdim" else taken  # This form says how axes run.
        sound = [name for name, affine in affines.items() if not affine_fault(affine)]
        remedy = f", or take data.affine={sound[0]}" if sound else ""
        yield f"{fault}; correct its {wrong}{remedy}"


def doubts(image: nib.Nifti1Image, form: str) -> Iterator[Remark]:
    """Yield that a header states two voxel sizes, no place or another unit than mm, and what counts."""
    header = image.header
    affines, taken = affines_of(header, form)
    if form == "auto" and taken == "pixdim":
        yield "has neither sform nor qform: which side is left is a guess", "set one"
    elif taken != form and _states_two_sizes(affines):
        sizes = {name: " x ".join(f"{size:.5g}" for size in voxel_sizes(affine)) for name, affine in affines.items()}
        has = "has" if form == "auto" else f"has no {form}, but"
        others = " and ".join(list(affines)[1:])
        what = f"{has} voxels of {sizes['sform']} mm by its sform, of {sizes['pixdim']} mm by its {others}"
        yield f"{what}; the {taken} is taken", DECIDES
    code = int(header["xyzt_units"]) % 8
    if code not in MM:
        unit = UNITS.get(code, f"a unit of code {code}")
        yield f"lengths are in {unit}", f"{unit} is taken for mm, in data.spacing and in distances"


def _states_two_sizes(affines: Affines) -> bool:
    """Return whether voxels have two sizes. A qform has those of pixdim, so that only a sform can differ."""
    sizes = [voxel_sizes(affines[form]) for form in ("sform", "pixdim") if form in affines]
    return not np.allclose(sizes[0], sizes[-1], rtol=SAME_SIZE, atol=0)


def oddities(image: nib.Nifti1Image, form: str) -> Iterator[Remark]:
    """Yield what may be right in a header but often is not, and what counts."""
    axes = image.affine[:3, :3] / voxel_sizes(image.affine)
    if np.abs(axes.T @ axes - np.eye(3)).max() > SHEAR:
        yield "its grid is sheared", "it is used as if its axes were at right angles"
    affines, taken = affines_of(image.header, form)
    if "qform" not in affines or taken == form:
        return
    first, other = affines[taken], affines["qform"]
    if affine_fault(other):
        yield "its qform is no rotation", f"the {taken} is taken"
    elif not _states_two_sizes(affines) and not np.allclose(first, other, rtol=1e-5, atol=SAME_PLACE):
        corners = np.array(list(product(*((0, length - 1) for length in image.shape[:3]))))
        distances = np.linalg.norm(apply_affine(first, corners) - apply_affine(other, corners), axis=1)
        codes = ["".join(nib.aff2axcodes(affine)) for affine in (first, other)]
        turned = "" if codes[0] == codes[1] else f", with the axes {codes[0]} and {codes[1]}"
        what = f"sform and qform place voxels up to {distances.max():.3g} mm apart{turned}"
        yield f"{what}; the {taken} is taken", DECIDES


def in_few_lines(remarks: Iterable[Remark]) -> list[str]:
    """Return a line for all remarks of one kind, which have one remedy: the first, and how many there are."""
    by_remedy = defaultdict[str, list[str]](list)
    for words, remedy in remarks:
        by_remedy[remedy].append(words)
    lines = list[str]()
    for remedy, found in by_remedy.items():
        count = f" ({len(found):,} such files)" if len(found) > 1 else ""
        lines.append(f"{found[0]}{count}; {remedy}")
    return lines

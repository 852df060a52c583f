"""One scan of a data set: each file is opened once for its header and its hash, and no voxel is read."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import shorten
from typing import BinaryIO, NamedTuple

import nibabel as nib
import numpy as np
from nibabel.affines import voxel_sizes

from unet3d.base.errors import UserError
from unet3d.config.schema import Data
from unet3d.data import nifti
from unet3d.data.cases import Case, DatasetInfo
from unet3d.data.forms import affine_if_sound, form_taken, two_places, two_sizes
from unet3d.data.grids import (
    Grid,
    Headers,
    canonical_grid,
    contradictions,
    foreign_units,
    target_grid,
)
from unet3d.data.hashes import FileHasher, Hashes
from unet3d.data.image_files import ImageFiles
from unet3d.data.nifti import ValidationRules, problem

WARNING = "warning: "  # a run starts despite lines that begin so
MAX_LINES_OF_CASE = 10  # about the files of one case
SHEAR = 1e-3  # cosine of the angle between two axes that still counts as a right one
MAX_NAMES = 2_000  # characters of names in a line


class CaseHeader(NamedTuple):
    """The headers of a case, before a voxel is read, as plain values that ranks can exchange."""

    stored: Grid | None  # of the first image, with RAS+ axes; None where it cannot be read
    target: Grid | None  # that the network sees
    orientation: str  # of the first image's axes, such as LPS; "" where it cannot be read
    channels: int  # of all images that could be read
    lines: tuple[str, ...]  # what is wrong, and warnings of what the options accept
    sizes: tuple[str, ...]  # of files that state two voxel sizes, or no place
    hashes: dict[str, Hashes]  # of "images" and "labels", if asked for and all could be read

    @property
    def is_resampled(self) -> bool:
        """True if the network sees the case on another grid than its file's, regardless of their axes."""
        return self.stored is not None and self.target is not None and not self.stored.is_same(self.target)


def scan_case(
    dataset: DatasetInfo,
    case: Case,
    data: Data,
    files: ImageFiles,
    fingerprint: str | None = None,
) -> CaseHeader:
    """Return what the headers of a case's files say; `fingerprint`: with hashes, as data.fingerprint."""
    hashers = {kind: FileHasher(fingerprint == "full") for kind in ("images", "labels")}
    headers = dict[Path, nib.Nifti1Image]()
    problems = list[str]()
    target = None
    for path in case.files:
        kind = "labels" if path == case.label else "images"
        try:
            with files.scanned(case, path) as file:
                headers[path] = file.image
                if fingerprint is not None:
                    _hash(hashers[kind], case, path, file.stream)
            if path == case.images[0]:
                target = target_grid(case, headers[path], data.spacing)
        except UserError as error:
            problems.append(str(error))
    problems += map(str, contradictions(case, headers, ValidationRules.of(data)))
    channels = sum(nifti.channels(headers[path]) for path in case.images if path in headers)
    if not problems and channels != len(dataset.channels):
        problems.append(str(_wrong_channels(dataset, case, channels)))
    hashes = dict[str, Hashes]()
    if fingerprint is not None and not problems:
        hashes = {kind: hasher.hashes() for kind, hasher in hashers.items()}
    first = headers.get(case.images[0])
    return CaseHeader(
        stored=None if first is None else canonical_grid(first),
        target=target,
        orientation="" if first is None else "".join(nib.aff2axcodes(first.affine)),
        channels=channels,
        lines=(*_bounded(case, problems), *_bounded(case, _warnings(case, headers, problems), WARNING)),
        sizes=tuple(doubtful_places(case, headers)),
        hashes=hashes,
    )


def doubtful_places(case: Case, headers: Headers) -> Iterator[str]:
    """Yield a line for each file that states two voxel sizes, or no place."""
    for path, image in headers.items():
        words = two_sizes(image.header, case.affine)
        if words:
            yield f"{case.id}: {path}: {words}"


def oddities(image: nib.Nifti1Image, form: str) -> Iterator[str]:
    """Yield what may be right in a header but often is not."""
    header = image.header
    axes = image.affine[:3, :3] / voxel_sizes(image.affine)
    if np.abs(axes.T @ axes - np.eye(3)).max() > SHEAR:
        yield "its grid is sheared; it is used as if its axes were at right angles"
    taken = form_taken(header, form)
    if taken != form and header["qform_code"] > 0 and affine_if_sound(header, "qform") is None:
        yield f"its qform is no rotation; the {taken} is taken"


def placed_apart(case: Case, files: ImageFiles) -> Iterator[str]:
    """Yield a line for each file of a case whose sform and qform place its voxels apart."""
    for path, image in files.headers.items():
        places = two_places(image.header, case.affine)
        if places:
            yield f"{WARNING}{case.id}: {path}: {places}"


def _warnings(case: Case, headers: Headers, problems: Sequence[str]) -> list[str]:
    """Return what the options accept in these headers, and is not among the problems."""
    strict = [str(error) for error in (*contradictions(case, headers), *foreign_units(case, headers))]
    return [f"{WARNING}{line}" for line in strict if line not in problems]


def _hash(hasher: FileHasher, case: Case, path: Path, stream: BinaryIO) -> None:
    """Take in the bytes of an open file. Raises UserError."""
    try:
        hasher.add(stream, path.name)
    except OSError as error:
        raise problem(case.id, path, f"cannot be read ({error})") from error


def _wrong_channels(dataset: DatasetInfo, case: Case, channels: int) -> UserError:
    """Return the error for a case that has another number of channels than the data set."""
    is_short = channels < len(dataset.channels)
    is_by_channel = nifti.stem(case.images[-1]) == f"{case.id}_{channels - 1:04d}"
    absent = f": {case.id}_{channels:04d} is missing" if is_short and is_by_channel else ""
    wanted = f"{len(dataset.channels)} ({shown_names(dataset.channels)})"
    what = f"has {channels} channels, the data set {wanted}{absent}; make them agree"
    return problem(case.id, case.images[0], what)


def _bounded(case: Case, lines: Sequence[str], start: str = "") -> Iterator[str]:
    """Yield the first lines about a case, and how many more there are: it may have thousands of channels."""
    yield from lines[:MAX_LINES_OF_CASE]
    if len(lines) > MAX_LINES_OF_CASE:
        yield f"{start}{case.id}: and {len(lines) - MAX_LINES_OF_CASE:,} more of this case"


def shown_names(names: Sequence[str]) -> str:
    """Return names in one line of a bounded length."""
    return shorten(", ".join(names), MAX_NAMES, placeholder=" ...")


def read_grid(case: Case, spacing: Sequence[float] | None) -> Grid:
    """Return the grid that the network sees of a case, from the header of its first image. Raises UserError."""
    return target_grid(case, nifti.open_image(case.id, case.images[0], case.affine), spacing)

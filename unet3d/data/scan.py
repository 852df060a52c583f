"""One scan of a data set: each file is opened once for its header and its hash, and no voxel is read.

Up to 256 files then stay open for the reading of their voxels: header, hash and voxels come from the same bytes.
Held-out cases that training sees, too, are found by their voxels, one volume in memory at a time.
"""

import hashlib
import os
import resource
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain, islice, permutations, product
from pathlib import Path
from typing import IO, Any, BinaryIO, NamedTuple

import nibabel as nib
import numpy as np
from nibabel.affines import voxel_sizes

from unet3d.base import progress, ranks
from unet3d.base.errors import UserError
from unet3d.base.files import open_regular
from unet3d.config.schema import Data
from unet3d.data import nifti
from unet3d.data.cases import WARNING, Case, DatasetInfo, raise_listed
from unet3d.data.grids import Grid, Headers, canonical_grid, contradictions, foreign_units, target_grid
from unet3d.data.nifti import OpenFile, affine_if_sound, form_taken, problem, two_sizes
from unet3d.data.texts import shown_names

MAX_LINES_OF_CASE = 10  # about the files of one case
SHEAR = 1e-3  # cosine of the angle between two axes that still counts as a right one
MAX_KEPT_OPEN = 256  # files between their scan and the reading of their voxels; others are opened again
SHARE_OF_LIMIT = 4  # and at most a quarter of the files that the process may have open
BLOCK = 2**12  # bytes of a block that is sampled
BLOCKS = 16  # blocks that are sampled of a file: all of its bytes up to 64 KiB
Hashes = dict[str, Any]  # `sample`, `full` or None, and `times`
Size = tuple[int, ...]  # channels, and voxels along the axes in ascending order


class ImageFiles:
    """The NIfTI files that this process has opened: their headers, and streams of those whose voxels are yet unread.

    The options say which of their faults are accepted: voxels that are not finite (as 0), files that lie apart in
    space. A copy in another process is empty, and opens the files again.
    """

    def __init__(self, options: Data | None = None) -> None:
        self.options = options or Data()
        self.replaces_nonfinite = self.options.nonfinite == "zero"
        self.accepts_apart = self.options.affine_check == "warn"
        self.headers = dict[Path, nib.Nifti1Image]()  # as images without voxels
        self._streams = dict[Path, BinaryIO]()
        self._limit = 0

    def __reduce__(self) -> tuple[type["ImageFiles"], tuple[Data]]:
        return ImageFiles, (self.options,)

    @contextmanager
    def kept_open(self) -> Iterator[None]:
        """Keep files that are opened within open until their voxels are read, or until the end."""
        soft_limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._limit = MAX_KEPT_OPEN
        if soft_limit != resource.RLIM_INFINITY:
            self._limit = min(MAX_KEPT_OPEN, soft_limit // SHARE_OF_LIMIT)
        try:
            yield
        finally:
            self._limit = 0
            while self._streams:
                self._streams.popitem()[1].close()

    @contextmanager
    def opened(self, case: Case, path: Path, keep: bool = False) -> Iterator[OpenFile]:
        """Open a file within, unless it is still open; `keep`: it may stay open for its voxels. Raises UserError."""
        stream = self._streams.pop(path, None)
        with ExitStack() as stack:
            if stream is None:
                stream = stack.enter_context(nifti.open_file(case.id, path))
                self.headers[path] = nifti.read_header(case.id, path, stream, case.affine)
            else:
                stack.enter_context(stream)
            yield OpenFile(case.id, path, self.headers[path], stream)
            if keep and len(self._streams) < self._limit:
                self._streams[path] = stream
                stack.pop_all()

    def header(self, case: Case, path: Path) -> nib.Nifti1Image:
        """Return the header of a file as an image, as it was when the file was opened last. Raises UserError."""
        if path not in self.headers:
            self.headers[path] = nifti.open_image(case.id, path, case.affine)
        return self.headers[path]


def sampled_blocks(stream: IO[bytes], size: int, start: int = 0) -> Iterator[bytes]:
    """Yield BLOCKS blocks, evenly spread over an open file of this size, from byte `start` on."""
    for place in np.linspace(start, max(size - BLOCK, start), BLOCKS, dtype=int):
        stream.seek(place)
        yield stream.read(BLOCK)


class FileHasher:
    """Hashes several open files as if they were one: a sample of their bytes and, if `full`, all of them."""

    def __init__(self, full: bool) -> None:
        self._sample = hashlib.sha256()
        self._whole = hashlib.sha256() if full else None
        self._times = list[int]()

    def add(self, stream: BinaryIO, name: str) -> None:
        """Take in the next file, open at any place, of this name. Raises OSError."""
        status = os.fstat(stream.fileno())
        size = status.st_size
        self._sample.update(b"%d" % size)
        for block in sampled_blocks(stream, size):
            self._sample.update(block)
        if self._whole is not None:
            stream.seek(0)
            self._whole.update(hashlib.file_digest(stream, "sha256").digest())  # type: ignore[arg-type]
        # A gzip file ends with the checksum of its whole content, so its last block settles it.
        if size > BLOCK * BLOCKS and not nifti.is_compressed(name):
            self._times.append(status.st_mtime_ns)

    def hashes(self) -> Hashes:
        """Return `sample`, `full` or None, and `times` (ns since 1970) of files that their sample does not settle."""
        whole = None if self._whole is None else self._whole.hexdigest()
        return {"sample": self._sample.hexdigest(), "full": whole, "times": self._times}


def file_hashes(paths: Sequence[Path], full: bool) -> Hashes:
    """Return the hashes of several files as if they were one. Raises OSError, and ValueError for what is no file."""
    hasher = FileHasher(full)
    for path in paths:
        with open_regular(path) as stream:
            hasher.add(stream, path.name)
    return hasher.hashes()


def sampled_hashes(case: Case) -> dict[str, Hashes]:
    """Return the hashes of samples of the case's images, and of its label map. Raises UserError."""
    labels = () if case.label is None else (case.label,)
    try:
        return {"images": file_hashes(case.images, full=False), "labels": file_hashes(labels, full=False)}
    except (OSError, ValueError) as error:
        raise nifti.problem(case.id, case.images[0], f"cannot be read, or its label map ({error})") from error


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


def scan_case(dataset: DatasetInfo, case: Case, files: ImageFiles, hashes: bool = False) -> CaseHeader:
    """Return what the headers of a case's files say, with `hashes` as data.fingerprint has them."""
    hashers = {kind: FileHasher(files.options.fingerprint == "full") for kind in ("images", "labels")}
    headers = dict[Path, nib.Nifti1Image]()
    problems = list[str]()
    target = None
    for path in case.files:
        kind = "labels" if path == case.label else "images"
        try:
            with files.opened(case, path, keep=True) as file:
                headers[path] = file.image
                if hashes:
                    hashers[kind].add(file.stream, path.name)
            if path == case.images[0]:
                target = target_grid(case, headers[path], files.options.spacing)
        except UserError as error:
            problems.append(str(error))
        except OSError as error:
            problems.append(str(problem(case.id, path, f"cannot be read ({error})")))
    accepted = list[str]()
    for misfit, is_accepted in contradictions(case, headers, files.accepts_apart):
        (accepted if is_accepted else problems).append(str(misfit))
    channels = sum(nifti.channels(headers[path]) for path in case.images if path in headers)
    if not problems and channels != len(dataset.channels):
        problems.append(str(_wrong_channels(dataset, case, channels)))
    warnings = [f"{WARNING}{line}" for line in (*accepted, *foreign_units(case, headers))]
    first = headers.get(case.images[0])
    return CaseHeader(
        stored=None if first is None else canonical_grid(first),
        target=target,
        orientation="" if first is None else "".join(nib.aff2axcodes(first.affine)),
        channels=channels,
        lines=(*_bounded(case, problems), *_bounded(case, warnings, WARNING)),
        sizes=tuple(doubtful_places(case, headers)),
        hashes={kind: hasher.hashes() for kind, hasher in hashers.items()} if hashes and not problems else {},
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


def read_grid(case: Case, spacing: Sequence[float] | None) -> Grid:
    """Return the grid that the network sees of a case, from the header of its first image. Raises UserError."""
    return target_grid(case, nifti.open_image(case.id, case.images[0], case.affine), spacing)


def image_digest(channels: Iterable[bytes]) -> bytes:
    """Return the digest of all images of a case, of those of its channels: equal for equal voxels.

    Whatever their files say of them, however they are compressed, of whatever type, wherever they lie, in whatever
    order the channels come, and along whatever axes each is stored. Voxels are compared to 12 bits: normalising the
    same ones in another order rounds otherwise.
    """
    return hashlib.blake2b(b"".join(sorted(channels))).digest()


def channel_digest(channel: np.ndarray) -> bytes:
    """Return a digest of a channel (X, Y, Z) that is the same for each way to turn and mirror its axes."""
    x, y, z = (np.zeros(size, np.uint64) for size in channel.shape)  # sums of the hashes of voxels in each plane
    for index, plane in enumerate(channel):
        hashes = _voxel_hashes(plane)
        x[index] = hashes.sum()
        y += hashes.sum(1)
        z += hashes.sum(0)
    axes = sorted(min(sums.tobytes(), sums[::-1].tobytes()) for sums in (x, y, z))
    digests = [hashlib.blake2b(axis).digest() for axis in axes]
    return hashlib.blake2b(b"".join(digests)).digest()


def _voxel_hashes(plane: np.ndarray) -> np.ndarray:
    """Return a hash of 64 bits per voxel (splitmix64), of its value as float32 rounded to 12 significant bits."""
    values = plane.astype(np.float32) + np.float32(0)  # -0 becomes 0
    bits = values.view(np.uint32).astype(np.uint64)
    rounded = (bits + np.uint64(1 << 11)) >> np.uint64(12)
    mixed = rounded + np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed ^= mixed >> np.uint64(shift)
        mixed *= np.uint64(factor)  # modulo 2^64
    hashes: np.ndarray = mixed ^ (mixed >> np.uint64(31))
    return hashes


def voxel_digests(
    train: Sequence[Case], val: Sequence[Case], headers: Mapping[str, CaseHeader], files: ImageFiles
) -> dict[str, bytes]:
    """Return digests, by id, of cases that may be the same since their size occurs in both parts.

    Each of them is read once, by one of the ranks, and none is kept. Raises UserError that lists what cannot be read.
    """
    sizes = {case.id: _size(headers[case.id]) for case in (*train, *val)}
    shared = {sizes[case.id] for case in train} & {sizes[case.id] for case in val}
    cases = [case for case in (*train, *val) if sizes[case.id] in shared]
    if ranks.count() > 1:
        cases = cases[ranks.RANK :: ranks.SIZE]
    by_id = dict[str, bytes]()
    problems = list[str]()
    for case in progress.track(cases, "comparing images", len(cases)):
        try:
            by_id[case.id] = image_digest(map(channel_digest, _channels(case, files)))
        except UserError as error:
            problems.append(str(error))
    shares = ranks.gather((by_id, problems))
    raise_listed([line for _, lines in shares for line in lines])
    return {case_id: digest for found, _ in shares for case_id, digest in found.items()}


def _size(header: CaseHeader) -> Size:
    """Return the size of a case, whatever its axes."""
    assert header.stored is not None
    return header.channels, *sorted(header.stored.shape)


def leaks(train: Sequence[Case], val: Sequence[Case], digests: Mapping[str, bytes], files: ImageFiles) -> Iterator[str]:
    """Yield held-out cases that training sees under another name.

    The same file, also by a link; or a digest in common, and the same voxels in the files: a digest may be of what a
    rule has made of these. Raises UserError for files that cannot be read again.
    """
    same_file = dict[object, Case]()
    alike = defaultdict[object, list[Case]](list)
    for case in train:
        same_file |= dict.fromkeys(_file_marks(case), case)
        if case.id in digests:
            alike[digests[case.id]].append(case)
    for case in val:
        linked = (same_file[mark] for mark in _file_marks(case) if mark in same_file)
        suspects = alike.get(digests.get(case.id), [])
        copied = (other for other in suspects if _are_same(case, other, files))
        for twin in islice(chain(linked, copied), 1):
            what = f"is held out, but training sees the same image as {twin.id}; remove one"
            yield f"{case.id}: {case.images[0]}: {what}"


def _file_marks(case: Case) -> Iterator[object]:
    """Yield whatever tells the files of a case's images from others."""
    for path in case.images:
        with suppress(OSError):  # one that is missing is an error of its header
            status = path.stat()  # of the file that it leads to, through any links
            yield status.st_dev, status.st_ino


def _are_same(case: Case, other: Case, files: ImageFiles) -> bool:
    """Return whether the files of two cases hold the same voxels, as `image_digest` takes them. Raises UserError."""
    waiting = list(_channels(other, files))
    for channel in _channels(case, files):
        found = next((place for place, twin in enumerate(waiting) if _is_turned(channel, twin)), None)
        if found is None:
            return False
        del waiting[found]
    return not waiting


def _channels(case: Case, files: ImageFiles) -> Iterator[np.ndarray]:
    """Yield the channels (X, Y, Z) of a case as its files hold them. Raises UserError."""
    for path in case.images:
        with files.opened(case, path) as file:
            yield from nifti.read_image(file, files.replaces_nonfinite)[0]


def _is_turned(channel: np.ndarray, other: np.ndarray) -> bool:
    """Return whether two channels (X, Y, Z) are equal once the axes of one are exchanged and mirrored in some way."""
    turns = product(permutations(range(3)), product((slice(None), slice(None, None, -1)), repeat=3))
    return any(np.array_equal(channel, other.transpose(axes)[mirror]) for axes, mirror in turns)

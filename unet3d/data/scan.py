"""One scan of a data set: headers and hashes of its files, and no voxel is read.

Files whose hashes are others once their voxels were read are refused. Held-out cases that training sees, too, are
found by their voxels, one volume in memory at a time.
"""

import hashlib
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, permutations, product
from pathlib import Path
from typing import IO, Any, NamedTuple

import nibabel as nib
import numpy as np

from unet3d.base import progress, ranks
from unet3d.base.errors import UserError
from unet3d.base.files import open_regular
from unet3d.data import nifti
from unet3d.data.cases import Case, DatasetInfo, raise_listed
from unet3d.data.nifti import Remark, problem
from unet3d.data.texts import shown_names
from unet3d.data.volume import Grid, Headers, ImageFiles, canonical_grid, contradictions, target_grid

MAX_LINES_OF_CASE = 10  # about the files of one case
BLOCK = 2**12  # bytes of a block that is sampled
BLOCKS = 16  # blocks that are sampled of a file: all of its bytes up to 64 KiB
DIGEST = hashlib.blake2b().digest_size  # bytes of the digest of an image
# Of some files: `sample`, hashes of a part of their bytes; `full`, of all, if asked for; and `times` (ns since 1970) of
# those that their sample does not settle.
Hashes = dict[str, list[Any]]
Size = tuple[int, ...]  # channels, and voxels along the axes in ascending order


def sample_digest(stream: IO[bytes], start: int = 0) -> bytes:
    """Return the digest of an open file's size, and of BLOCKS blocks evenly spread over it from byte `start` on."""
    size = stream.seek(0, os.SEEK_END)
    digest = hashlib.sha256(b"%d" % size)
    for place in np.linspace(start, max(size - BLOCK, start), BLOCKS, dtype=int):
        stream.seek(place)
        digest.update(stream.read(BLOCK))
    return digest.digest()


def file_hashes(paths: Iterable[Path], full: bool = False) -> Hashes:
    """Return the hashes of several files. Raises OSError, and ValueError for what is no file."""
    found: Hashes = {"sample": [], "full": [], "times": []}
    for path in paths:
        with open_regular(path) as stream:
            found["sample"].append(sample_digest(stream).hex())
            if full:
                stream.seek(0)
                found["full"].append(hashlib.file_digest(stream, "sha256").hexdigest())
            status = os.fstat(stream.fileno())
            # A gzip file ends with the checksum of its whole content, so its last block settles it.
            if status.st_size > BLOCK * BLOCKS and not nifti.is_compressed(path.name):
                found["times"].append(status.st_mtime_ns)
    return found


def have_changed(case: Case, before: Mapping[str, Hashes]) -> bool:
    """Return whether the files of a case are others than those with these hashes. Raises UserError."""
    try:
        now = file_hashes(case.files)
    except (OSError, ValueError) as error:
        raise problem(case.id, case.images[0], f"cannot be read, or its label map ({error})") from error
    return any(now[kind] != [*chain(*(part[kind] for part in before.values()))] for kind in ("sample", "times"))


class CaseHeader(NamedTuple):
    """The headers of a case, before a voxel is read, as plain values that ranks can exchange."""

    stored: Grid | None  # of the first image, with RAS+ axes; None where it cannot be read
    target: Grid | None  # that the network sees
    orientation: str  # of the first image's axes, such as LPS; "" where it cannot be read
    channels: int  # of all images that could be read
    problems: list[str]
    warnings: list[str]  # of what the options accept
    doubts: list[Remark]  # about its files
    hashes: dict[str, Hashes]  # of "images" and "labels", if asked for and all could be read

    @property
    def is_resampled(self) -> bool:
        """True if the network sees the case on another grid than its file's, regardless of their axes."""
        return self.stored is not None and self.target is not None and not self.stored.is_same(self.target)


def scan_case(dataset: DatasetInfo, case: Case, files: ImageFiles, hashes: bool = False) -> CaseHeader:
    """Return what the headers of a case's files say, with `hashes` as data.fingerprint has them."""
    headers = dict[Path, nib.Nifti1Image]()
    problems = list[str]()
    target = None
    for path in case.files:
        try:
            with files.opened(case, path) as file:
                headers[path] = file.image
            if path == case.images[0]:
                target = target_grid(case, headers[path], files.options.spacing)
        except UserError as error:
            problems.append(str(error))
    warnings = list[str]()
    for misfit, is_accepted in contradictions(case, headers, files.accepts_apart):
        (warnings if is_accepted else problems).append(str(misfit))
    channels = sum(nifti.channels(headers[path]) for path in case.images if path in headers)
    if not problems and channels != len(dataset.channels):
        problems.append(str(_wrong_channels(dataset, case, channels)))
    found = dict[str, Hashes]()
    if hashes and not problems:
        try:
            for part, paths in (("images", case.images), ("labels", case.files[len(case.images) :])):
                found[part] = file_hashes(paths, files.options.fingerprint == "full")
        except (OSError, ValueError) as error:
            problems.append(f"{case.named}: cannot be read, or another file of the case ({error})")
    first = headers.get(case.images[0])
    return CaseHeader(
        stored=None if first is None else canonical_grid(first),
        target=target,
        orientation="" if first is None else "".join(nib.aff2axcodes(first.affine)),
        channels=channels,
        problems=_bounded(case, problems),
        warnings=_bounded(case, warnings),
        doubts=remarks(case, headers, nifti.doubts),
        hashes=found,
    )


def remarks(case: Case, headers: Headers, find: Callable[[nib.Nifti1Image, str], Iterator[Remark]]) -> list[Remark]:
    """Return what is found in the headers of a case, with its name and the files'."""
    found = ((path, words, remedy) for path, image in headers.items() for words, remedy in find(image, case.affine))
    return [(f"{case.id}: {path}: {words}", remedy) for path, words, remedy in found]


def _wrong_channels(dataset: DatasetInfo, case: Case, channels: int) -> UserError:
    """Return the error for a case that has another number of channels than the data set."""
    is_short = channels < len(dataset.channels)
    is_by_channel = nifti.stem(case.images[-1]) == f"{case.id}_{channels - 1:04d}"
    absent = f": {case.id}_{channels:04d} is missing" if is_short and is_by_channel else ""
    wanted = f"{len(dataset.channels)} ({shown_names(dataset.channels)})"
    what = f"has {channels} channels, the data set {wanted}{absent}; make them agree"
    return problem(case.id, case.images[0], what)


def _bounded(case: Case, lines: Sequence[str]) -> list[str]:
    """Return the first lines about a case, and how many more there are: it may have thousands of channels."""
    more = len(lines) - MAX_LINES_OF_CASE
    return [*lines[:MAX_LINES_OF_CASE], *([f"{case.id}: and {more:,} more of this case"] if more > 0 else [])]


def image_digest(channels: Iterable[bytes]) -> bytes:
    """Return the digest of all images of a case, of those of its channels: equal for equal voxels.

    Whatever their files say of them, however they are compressed, of whatever type, wherever they lie, in whatever
    order the channels come, and along whatever axes each is stored. Voxels are compared to 12 bits: normalising the
    same ones in another order rounds otherwise.
    """
    return hashlib.blake2b(b"".join(sorted(channels))).digest()


def channel_digest(channel: np.ndarray) -> bytes:
    """Return a digest of the sums of voxels in each plane of a channel (X, Y, Z), the same however it is turned."""
    bits = (channel.astype(np.float32) + np.float32(0)).view(np.uint32)  # -0 becomes 0
    rounded = (bits + np.uint32(1 << 11)) >> np.uint32(12)  # to 12 significant bits; such numbers have exact sums
    profiles = list[bytes]()
    for others in ((1, 2), (0, 2), (0, 1)):
        sums = rounded.sum(others, np.uint64)
        profiles.append(min(sums.tobytes(), sums[::-1].tobytes()))
    return b"".join(hashlib.blake2b(profile).digest() for profile in sorted(profiles))


def voxel_digests(
    train: Sequence[Case], val: Sequence[Case], headers: Mapping[str, CaseHeader], files: ImageFiles
) -> dict[str, bytes]:
    """Return digests, by id, of cases that may be the same since their size occurs in both parts.

    Each of them is read once, by one of the ranks, and none is kept. Raises UserError that lists what cannot be read.
    """
    sizes = dict[str, Size]()
    for case in (*train, *val):
        grid = headers[case.id].stored
        assert grid is not None, case.id
        sizes[case.id] = (headers[case.id].channels, *sorted(grid.shape))
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


def leaks(train: Sequence[Case], val: Sequence[Case], digests: Mapping[str, bytes], files: ImageFiles) -> Iterator[str]:
    """Yield held-out cases that training sees under another name.

    They have a digest in common, and the same voxels in the files: a digest may be of what a rule has made of these.
    Raises UserError for files that cannot be read again.
    """
    alike = defaultdict[bytes, list[Case]](list)
    for case in train:
        if case.id in digests:
            alike[digests[case.id]].append(case)
    for case in val:
        suspects = alike.get(digests.get(case.id, b""), [])
        twin = next((other for other in suspects if _are_same(case, other, files)), None)
        if twin is not None:
            what = f"is held out, but training sees the same image as {twin.id}; remove one"
            yield f"{case.id}: {case.images[0]}: {what}"


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

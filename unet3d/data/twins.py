"""Held-out cases that training sees, too: found by their voxels, one volume in memory at a time."""

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice, permutations, product

import numpy as np

from unet3d.base import progress, ranks
from unet3d.base.errors import UserError, listed
from unet3d.data import nifti
from unet3d.data.cases import Case
from unet3d.data.nifti import ValidationRules
from unet3d.data.scan import CaseHeader, ImageFiles

Size = tuple[int, ...]  # channels, and voxels along the axes in ascending order


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
    train: Sequence[Case],
    val: Sequence[Case],
    rules: ValidationRules,
    headers: Mapping[str, CaseHeader],
    files: ImageFiles,
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
            by_id[case.id] = image_digest(map(channel_digest, _channels(case, rules, files)))
        except UserError as error:
            problems.append(str(error))
    shares = ranks.gather((by_id, problems))
    problems = [line for _, lines in shares for line in lines]
    if problems:
        raise UserError("\n".join(listed(problems)))
    return {case_id: digest for found, _ in shares for case_id, digest in found.items()}


def _size(header: CaseHeader) -> Size:
    """Return the size of a case, whatever its axes."""
    assert header.stored is not None
    return header.channels, *sorted(header.stored.shape)


def leaks(
    train: Sequence[Case],
    val: Sequence[Case],
    digests: Mapping[str, bytes],
    rules: ValidationRules,
    files: ImageFiles,
) -> Iterator[str]:
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
        twins = [same_file[mark] for mark in _file_marks(case) if mark in same_file]
        suspects = alike[digests[case.id]] if case.id in digests else []
        if not twins:
            twins = [*islice((other for other in suspects if _are_same(case, other, rules, files)), 1)]
        if twins:
            what = f"is held out, but training sees the same image as {twins[0].id}; remove one"
            yield f"{case.id}: {case.images[0]}: {what}"


def _file_marks(case: Case) -> Iterator[object]:
    """Yield whatever tells the files of a case's images from others."""
    for path in case.images:
        try:
            status = path.stat()  # of the file that it leads to, through any links
        except OSError:
            yield path  # it is missing, which `check_cases` reports
        else:
            yield status.st_dev, status.st_ino


def _are_same(case: Case, other: Case, rules: ValidationRules, files: ImageFiles) -> bool:
    """Return whether the files of two cases hold the same voxels, as `image_digest` takes them. Raises UserError."""
    waiting = list(_channels(other, rules, files))
    for channel in _channels(case, rules, files):
        found = next((place for place, twin in enumerate(waiting) if _is_turned(channel, twin)), None)
        if found is None:
            return False
        del waiting[found]
    return not waiting


def _channels(case: Case, rules: ValidationRules, files: ImageFiles) -> Iterator[np.ndarray]:
    """Yield the channels (X, Y, Z) of a case as its files hold them. Raises UserError."""
    for path in case.images:
        with files.opened(case, path) as file:
            yield from nifti.read_image(case.id, path, file.image, rules, file.stream)[0]


def _is_turned(channel: np.ndarray, other: np.ndarray) -> bool:
    """Return whether two channels (X, Y, Z) are equal once the axes of one are exchanged and mirrored in some way."""
    for axes in permutations(range(3)):
        turned = other.transpose(axes)
        if turned.shape != channel.shape:
            continue
        for steps in product((1, -1), repeat=3):
            if np.array_equal(channel, turned[tuple(slice(None, None, step) for step in steps)]):
                return True
    return False

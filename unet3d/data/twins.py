"""Held-out cases that training sees, too: found by their voxels, one volume in memory at a time."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from unet3d.base import progress, ranks
from unet3d.base.errors import UserError, listed
from unet3d.data import nifti
from unet3d.data.cases import Case
from unet3d.data.nifti import ValidationRules

Digests = frozenset[bytes]
Size = tuple[int, ...]


class VoxelDigest:
    """A digest of all images of a case, equal for equal voxels, whatever their files say of them.

    However they are compressed, of whatever type, wherever they lie, in whatever order the channels come, and along
    whatever axes each is stored, whether or not a header says so. Voxels are compared to 12 bits: normalising the same
    ones in another order rounds otherwise.
    """

    def __init__(self) -> None:
        self._channels: list[bytes] = []

    def update(self, voxels: np.ndarray) -> None:
        """Take in voxels (C, X, Y, Z)."""
        self._channels += map(_channel_digest, voxels)

    def digests(self) -> Digests:
        """Return the digest of what was taken in, as a set of one."""
        return frozenset([hashlib.blake2b(b"".join(sorted(self._channels))).digest()])


def _channel_digest(channel: np.ndarray) -> bytes:
    """Return a digest of a channel (X, Y, Z) that is the same for each way to turn and mirror its axes."""
    x, y, z = (np.zeros(size, np.uint64) for size in channel.shape)  # sums of the hashes of voxels in each plane
    for index, plane in enumerate(channel):
        hashes = _voxel_hashes(plane)
        x[index] = hashes.sum()
        y += hashes.sum(1)
        z += hashes.sum(0)
    axes = sorted(min(sums.tobytes(), sums[::-1].tobytes()) for sums in (x, y, z))
    return hashlib.blake2b(b"".join(hashlib.blake2b(axis).digest() for axis in axes)).digest()


def _voxel_hashes(plane: np.ndarray) -> np.ndarray:
    """Return a hash of 64 bits per voxel (splitmix64), of its value as float32 rounded to 12 significant bits."""
    bits = (plane.astype(np.float32) + np.float32(0)).view(np.uint32).astype(np.uint64)  # -0 becomes 0
    mixed = ((bits + np.uint64(1 << 11)) >> np.uint64(12)) + np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)  # modulo 2^64
    hashes: np.ndarray = mixed ^ (mixed >> np.uint64(31))
    return hashes


def voxel_digests(train: Sequence[Case], val: Sequence[Case], rules: ValidationRules) -> dict[str, Digests]:
    """Digests, by id, of the cases that may be the same: those of a size that occurs in both parts.

    Each of them is read once, by one of the ranks, and none is kept. Raises UserError that lists what cannot be read.
    """
    sizes = {case.id: _size(case) for case in (*train, *val)}
    shared = {sizes[case.id] for case in train} & {sizes[case.id] for case in val}
    read = [case for case in (*train, *val) if sizes[case.id] in shared]
    shares = ranks.gather(_share(read[ranks.RANK :: ranks.SIZE] if ranks.count() > 1 else read, rules))
    if problems := [line for _, lines in shares for line in lines]:
        raise UserError("\n".join(listed(problems)))
    return {name: digests for found, _ in shares for name, digests in found.items()}


def _share(cases: Sequence[Case], rules: ValidationRules) -> tuple[dict[str, Digests], list[str]]:
    """The digests of cases by id, and what is wrong with those that cannot be read."""
    found, problems = dict[str, Digests](), list[str]()
    for case in progress.track(cases, "comparing images", len(cases)):
        try:
            found[case.id] = _digests(case, rules)
        except UserError as error:
            problems.append(str(error))
    return found, problems


def _size(case: Case) -> Size:
    """Channels, and voxels along the axes in ascending order. Reads headers alone."""
    opened = [nifti.open_image(case.id, path) for path in case.images]
    return sum(map(nifti.channels, opened)), *sorted(opened[0].shape[:3])


def _digests(case: Case, rules: ValidationRules) -> Digests:
    digest = VoxelDigest()
    for path in case.images:
        digest.update(nifti.read_image(case.id, path, nifti.open_image(case.id, path), rules)[0])
    return digest.digests()


def leaks(train: Sequence[Case], val: Sequence[Case], digests: Mapping[str, frozenset]) -> Iterator[str]:
    """Held-out cases that training sees under another name: the same file, also by a link, or a digest in common."""
    seen = {found: case.id for case in train for found in _known(case, digests)}
    for case in val:
        if twin := next((seen[found] for found in _known(case, digests) if found in seen), None):
            yield f"{case.id}: {case.images[0]}: is held out, but training sees the same image as {twin}; remove one"


def _known(case: Case, digests: Mapping[str, frozenset]) -> Iterator[object]:
    """Whatever tells the images of a case from others."""
    for path in case.images:
        try:
            found = path.stat()  # of the file that it leads to, through any links
        except OSError:
            yield path  # it is missing, which `check_cases` reports
        else:
            yield found.st_dev, found.st_ino
    yield from digests.get(case.id, ())

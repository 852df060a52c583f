"""Held-out cases that training sees, too: found by their voxels, one volume in memory at a time."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence

import nibabel as nib
import numpy as np
from nibabel.orientations import apply_orientation

from unet3d.base import progress, ranks
from unet3d.base.errors import UserError, listed
from unet3d.data import nifti
from unet3d.data.cases import Case
from unet3d.data.nifti import ValidationRules

Digests = frozenset[bytes]
Size = tuple[int, ...]


class VoxelDigest:
    """Digests of all images of a case, file by file, as float32: in the order of the file, and with axes to RAS.

    Cases with a common digest have the same voxels, however they are compressed, of whatever type, along whatever
    axes they are stored, and wherever they lie.
    """

    def __init__(self) -> None:
        self._stored, self._turned = hashlib.blake2b(), hashlib.blake2b()

    def update(self, voxels: np.ndarray, affine: np.ndarray) -> None:
        """Take in the next file's voxels (C, X, Y, Z)."""
        axes = nib.io_orientation(affine)
        for channel in voxels:
            for digest, array in ((self._stored, channel), (self._turned, apply_orientation(channel, axes))):
                digest.update(b"%d %d %d" % array.shape)
                digest.update(np.ascontiguousarray(array + np.float32(0)).data)  # -0 becomes 0

    def digests(self) -> Digests:
        """Return the digests of what was taken in."""
        return frozenset((self._stored.digest(), self._turned.digest()))


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
        image = nifti.open_image(case.id, path)
        digest.update(nifti.read_image(case.id, path, image, rules)[0], image.affine)
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

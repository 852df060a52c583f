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
from unet3d.data.headers import CaseHeader
from unet3d.data.image_files import ImageFiles
from unet3d.data.nifti import ValidationRules

Digests = frozenset[bytes]
Size = tuple[int, ...]  # channels, and voxels along the axes in ascending order


class VoxelDigest:
    """Digests of all images of a case, file by file, as float32: in the order of the file, and with axes to RAS.

    Cases with a common digest have the same voxels, however they are compressed, of whatever type, along whatever
    axes they are stored, and wherever they lie.
    """

    def __init__(self) -> None:
        self._stored = hashlib.blake2b()
        self._turned = hashlib.blake2b()

    def update(self, voxels: np.ndarray, affine: np.ndarray) -> None:
        """Take in the next file's voxels (C, X, Y, Z)."""
        axes = nib.io_orientation(affine)
        for channel in voxels:
            _add(self._stored, channel)
            _add(self._turned, apply_orientation(channel, axes))

    def digests(self) -> Digests:
        """Return the digests of what was taken in."""
        return frozenset((self._stored.digest(), self._turned.digest()))


def _add(digest: hashlib.blake2b, voxels: np.ndarray) -> None:
    digest.update(b"%d %d %d" % voxels.shape)
    digest.update(np.ascontiguousarray(voxels + np.float32(0)).data)  # -0 becomes 0


def voxel_digests(
    train: Sequence[Case],
    val: Sequence[Case],
    rules: ValidationRules,
    headers: Mapping[str, CaseHeader],
    files: ImageFiles,
) -> dict[str, Digests]:
    """Return digests, by id, of cases that may be the same since their size occurs in both parts.

    Each of them is read once, by one of the ranks, and none is kept. Raises UserError that lists what cannot be read.
    """
    sizes = {case.id: _size(headers[case.id]) for case in (*train, *val)}
    shared = {sizes[case.id] for case in train} & {sizes[case.id] for case in val}
    cases = [case for case in (*train, *val) if sizes[case.id] in shared]
    if ranks.count() > 1:
        cases = cases[ranks.RANK :: ranks.SIZE]
    shares = ranks.gather(_read_digests(cases, rules, files))
    problems = [line for _, lines in shares for line in lines]
    if problems:
        raise UserError("\n".join(listed(problems)))
    return {case_id: digests for by_id, _ in shares for case_id, digests in by_id.items()}


def _size(header: CaseHeader) -> Size:
    """Return the size of a case, whatever its axes."""
    assert header.stored is not None
    return header.channels, *sorted(header.stored.shape)


def _read_digests(
    cases: Sequence[Case], rules: ValidationRules, files: ImageFiles
) -> tuple[dict[str, Digests], list[str]]:
    """Return the digests of cases by id, and what is wrong with those that cannot be read."""
    by_id = dict[str, Digests]()
    problems = list[str]()
    for case in progress.track(cases, "comparing images", len(cases)):
        try:
            by_id[case.id] = _digests(case, rules, files)
        except UserError as error:
            problems.append(str(error))
    return by_id, problems


def _digests(case: Case, rules: ValidationRules, files: ImageFiles) -> Digests:
    """Return the digests of the images of a case. Raises UserError."""
    digest = VoxelDigest()
    for path in case.images:
        with files.reopened(case.id, path) as file:
            voxels, _ = nifti.read_image(case.id, path, file.image, rules, file.stream)
            digest.update(voxels, file.image.affine)
    return digest.digests()


def leaks(
    train: Sequence[Case],
    val: Sequence[Case],
    digests: Mapping[str, frozenset],
) -> Iterator[str]:
    """Yield held-out cases that training sees under another name.

    The same file, also by a link, or a digest in common.
    """
    seen = {mark: case.id for case in train for mark in _marks(case, digests)}
    for case in val:
        twins = [seen[mark] for mark in _marks(case, digests) if mark in seen]
        if twins:
            what = f"is held out, but training sees the same image as {twins[0]}; remove one"
            yield f"{case.id}: {case.images[0]}: {what}"


def _marks(case: Case, digests: Mapping[str, frozenset]) -> Iterator[object]:
    """Yield whatever tells the images of a case from others."""
    for path in case.images:
        try:
            status = path.stat()  # of the file that it leads to, through any links
        except OSError:
            yield path  # it is missing, which `check_cases` reports
        else:
            yield status.st_dev, status.st_ino
    yield from digests.get(case.id, ())

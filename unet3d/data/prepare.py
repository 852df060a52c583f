"""A data set made ready for a run: scanned once, split, read, and searched for twins.

If memory keeps the volumes, each is read once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from unet3d.base import progress, ranks
from unet3d.base.errors import UserError, listed
from unet3d.config.schema import Data
from unet3d.data import disk_cache
from unet3d.data.cases import Case, DatasetInfo, read_dataset
from unet3d.data.disk_cache import DiskCache, can_stay_mapped
from unet3d.data.grids import Grid
from unet3d.data.headers import CaseHeader
from unet3d.data.image_files import ImageFiles
from unet3d.data.nifti import ValidationRules
from unet3d.data.patches import PreparedCase
from unet3d.data.preprocess import CaseReader
from unet3d.data.sparse import SparseReader
from unet3d.data.splits import split
from unet3d.data.twins import VoxelDigest, leaks, voxel_digests
from unet3d.data.validate import sound_headers

Read = Callable[[Case], PreparedCase]


@dataclass(frozen=True)
class PreparedData:
    """The data set, its split, and how to prepare a case for the network."""

    dataset: DatasetInfo
    train: tuple[Case, ...]
    val: tuple[Case, ...]
    read: CaseReader
    read_train: Read  # with the labels that training sees
    read_val: Read  # with those that validation sees
    headers: dict[str, CaseHeader]  # by case id

    @property
    def files(self) -> dict[str, Any]:
        """Hashes of what the files of each case hold, by its id."""
        return {case_id: header.hashes for case_id, header in self.headers.items()}

    @property
    def train_grids(self) -> list[Grid]:
        """The grids of the training cases that the network sees."""
        targets = [self.headers[case.id].target for case in self.train]
        return [grid for grid in targets if grid is not None]

    @property
    def spacing(self) -> tuple[float, float, float]:
        """Voxel size (mm) of the first training case as the network sees it."""
        return self.train_grids[0].spacing


def prepare_data(options: Data) -> PreparedData:
    """Scan, check, split and read the cases. Raises UserError that lists every problem of every case."""
    dataset = ranks.on_rank0(lambda: read_dataset(options))
    train, val = split(dataset, options)
    cases = list(dict.fromkeys([*train, *val]))
    files = ImageFiles()
    with files.kept_open():
        headers = ranks.on_rank0(lambda: sound_headers(dataset, cases, options, files, options.fingerprint))
        reader = CaseReader(
            dataset,
            options.spacing,
            cache=_cache(options, len(cases)),
            rules=ValidationRules.of(options),
            headers=headers,
            files=files,
        )
        _load(reader, options, train, val)
        if not options.semi:
            twins = list(leaks(train, val, _digests(train, val, reader)))
            if twins:
                raise UserError("\n".join(listed(twins)))
    read_train, read_val = _readers(options, reader, train)
    return PreparedData(dataset, train, val, reader, read_train, read_val, headers)


def _cache(options: Data, cases: int) -> dict[str, PreparedCase] | None:
    """Return where a reader keeps what it has prepared or mapped; None if it keeps nothing."""
    keeps = options.cache == "memory" or (options.cache == "disk" and can_stay_mapped(cases))
    return {} if keeps else None


def _load(reader: CaseReader, options: Data, train: Sequence[Case], val: Sequence[Case]) -> None:
    """Choose the normalisation, and read the cases that are kept. Raises UserError."""
    training_maps = 1 + (options.sparse is not None) + options.semi  # label maps of a training case, see `_readers`
    maps = dict.fromkeys(val, 1) | dict.fromkeys(train, training_maps)
    cases = list(dict.fromkeys([*train, *val]))
    if options.cache == "memory":
        reader.refuse_more_than_memory(maps)
        reader.fit_and_preload(options.intensity, train, cases)
    elif options.cache == "disk":
        reader.disk = DiskCache(disk_cache.folder(options.cache_root), options.fingerprint == "full")
        reader.fit_intensity(options.intensity, train)
        reader.refuse_more_than_disk(maps)
        reader.preload(cases)
    else:
        reader.fit_intensity(options.intensity, train)


def _digests(train: Sequence[Case], val: Sequence[Case], read: CaseReader) -> dict[str, frozenset]:
    """Return digests of the prepared images by case id.

    If they are not kept, of the voxels of those images that may be the same.
    """
    cases = [*train, *val]
    if read.disk is not None:
        return {case.id: frozenset([read.disk.digest(read.key(case), "image")]) for case in cases}
    if read.cache is None:
        return voxel_digests(train, val, read.rules, read.headers, read.files)
    digests = dict[str, frozenset]()
    for case in cases:
        digest = VoxelDigest()
        digest.update(read(case).image.numpy())
        digests[case.id] = digest.digests()
    return digests


def _readers(options: Data, read: CaseReader, train: Sequence[Case]) -> tuple[Read, Read]:
    """Return how to read a case for training, and for validation."""
    if options.sparse is None:
        return read, read
    read_learned, read_scored = (
        SparseReader(read, options, scored, None if read.cache is None else {}) for scored in (False, True)
    )
    if options.cache != "off":  # before workers copy it
        for case in progress.track(train, "choosing slices", len(train)):
            read_learned(case)
            if options.semi:
                read_scored(case)
    return read_learned, read_scored if options.semi else read

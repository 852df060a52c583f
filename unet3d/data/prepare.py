"""A data set made ready for a run: scanned once, split, read, and searched for twins.

If memory keeps the volumes, each is read once.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from unet3d.base import progress, ranks
from unet3d.base.errors import UserError, escaped, listed
from unet3d.base.types import IGNORE
from unet3d.config.schema import Data
from unet3d.data import disk_cache
from unet3d.data.cases import Case, DatasetInfo, read_dataset
from unet3d.data.disk_cache import DiskCache, can_stay_mapped
from unet3d.data.grids import Grid
from unet3d.data.headers import WARNING, CaseHeader
from unet3d.data.image_files import ImageFiles
from unet3d.data.nifti import ValidationRules
from unet3d.data.patches import PreparedCase
from unet3d.data.preprocess import CaseReader
from unet3d.data.sparse import SparseReader
from unet3d.data.splits import absences, split
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
        reader.measure(train)
        if not options.semi:
            twins = list(leaks(train, val, _digests(train, val, reader), reader.rules, files))
            if twins:
                raise UserError("\n".join(listed(twins)))
    read_train, read_val = _readers(options, reader, train)
    data = PreparedData(dataset, train, val, reader, read_train, read_val, headers)
    if options.cache != "off":  # which reads nothing before the first step
        _refuse_nothing_to_learn(data, options)
    return data


def _refuse_nothing_to_learn(data: PreparedData, options: Data) -> None:
    """Print a line for classes that no training case shows, and for held-out cases without a voxel to score.

    Raises UserError where training cases show no class.
    """
    learned = _labels(data.train, data.read_train)
    scored = _labels(data.val, data.read_val)
    lines = list(absences(data.dataset, options, learned, scored))
    if not all(line.startswith(WARNING) for line in lines):
        raise UserError("\n".join(lines))
    if not scored:
        is_ignored = all(bool((data.read_val(case).label == IGNORE).all()) for case in data.val)
        problem = "every held-out voxel is ignored" if is_ignored else "no foreground in any held-out case"
        effect = "there will be no score, and no best.pt; use last.pt" if is_ignored else "scores are 0, or n/a"
        lines.append(f"{WARNING}{data.dataset.name}: {problem}: {effect}, or hold out others (data.split, data.fold)")
    if not ranks.RANK:
        for line in lines:
            print(escaped(line), file=sys.stderr)


def _labels(cases: Sequence[Case], read: Read) -> frozenset[int]:
    """Return the foreground labels of cases, one case at a time: their files may be too many to be open at once."""
    return frozenset[int]().union(*(read(case).labels for case in cases))


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

"""A data set made ready for a run: scanned once, split, read, and searched for twins.

If memory keeps the volumes, each is read once.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from unet3d.base import progress, ranks
from unet3d.base.errors import UserError, escaped
from unet3d.base.types import IGNORE, host_bytes, mib
from unet3d.config.schema import Data
from unet3d.data import cache
from unet3d.data.cases import Case, DatasetInfo, raise_listed, read_dataset, warn_once
from unet3d.data.check import check_cases
from unet3d.data.intensity import Seen, intensity_rules, kinds_of, normalise, sampled
from unet3d.data.nifti import problem
from unet3d.data.patches import PreparedCase
from unet3d.data.preprocess import CaseReader, SparseReader, usable
from unet3d.data.scan import CaseHeader, leaks, voxel_digests
from unet3d.data.splits import absences, split
from unet3d.data.texts import shown_names
from unet3d.data.volume import Grid, ImageFiles

IMAGE_BYTES = 4  # of a voxel of a channel, float32
LABEL_BYTES = 2  # of a voxel of a label map, int16
MEASURED_CASES = 20  # whose images are measured, where memory does not hold all
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
    def train_grids(self) -> list[Grid]:
        """The grids of the training cases that the network sees."""
        return [self.read.grid(case) for case in self.train]

    @property
    def spacing(self) -> tuple[float, float, float]:
        """Voxel size (mm) of the first training case as the network sees it."""
        return self.train_grids[0].spacing


def prepare_data(options: Data) -> PreparedData:
    """Scan, check, split and read the cases. Raises UserError that lists every problem of every case."""
    dataset = ranks.on_rank0(lambda: read_dataset(options))
    train, val = split(dataset, options)
    cases = list(dict.fromkeys([*train, *val]))
    files = ImageFiles(options)
    keeps = options.cache == "memory" or (options.cache == "disk" and cache.can_stay_mapped(len(cases)))
    disk = None
    if options.cache == "disk":
        disk = cache.DiskCache(cache.folder(options.cache_root), options.fingerprint == "full")
    headers = ranks.on_rank0(lambda: check_cases(dataset, cases, options, files, hashes=True).sound_headers())
    in_memory: dict[str, PreparedCase] | None = {} if keeps else None
    reader = CaseReader(dataset, options.spacing, cache=in_memory, disk=disk, headers=headers, files=files)
    _load(reader, options, train, val)
    _measure(reader, train)
    if not options.semi:
        if options.cache == "off":  # then of the voxels of those images that may be the same
            digests = voxel_digests(train, val, headers, files)
        else:
            digests = {case.id: reader.digest(case) for case in cases}
        raise_listed([*leaks(train, val, digests, files)])
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
    lines = absences(data.dataset, options, learned, scored)
    if not scored:
        is_ignored = all(bool((data.read_val(case).label == IGNORE).all()) for case in data.val)
        problem = "every held-out voxel is ignored" if is_ignored else "no foreground in any held-out case"
        effect = "there will be no score, and no best.pt; use last.pt" if is_ignored else "scores are 0, or n/a"
        lines.append(f"{data.dataset.name}: {problem}: {effect}, or hold out others (data.split, data.fold)")
    warn_once(lines)


def _labels(cases: Sequence[Case], read: Read) -> frozenset[int]:
    """Return the foreground labels of cases, one case at a time: their files may be too many to be open at once."""
    return frozenset[int]().union(*(read(case).labels for case in cases))


def _load(reader: CaseReader, options: Data, train: Sequence[Case], val: Sequence[Case]) -> None:
    """Choose the normalisation, for CT by the training cases, and read the cases that are kept.

    What memory keeps is read once, and normalised in place. Raises UserError that lists all cases that cannot be used.
    """
    training_maps = 1 + (options.sparse is not None) + options.semi  # label maps of a training case, see `_readers`
    maps = dict.fromkeys(val, 1) | dict.fromkeys(train, training_maps)
    cases = list(dict.fromkeys([*train, *val]))
    channels = reader.dataset.channels
    measured = {*train} if "ct" in kinds_of(options.intensity, channels) else set[Case]()
    samples = dict[Case, np.ndarray]()
    if options.cache == "memory":
        _refuse_more_than_fits(reader, maps)
        assert reader.cache is not None
        for case, volume in usable(cases, "reading cases", reader.read_volume):
            reader.cache[case.id] = reader.as_case(volume)
            if case in measured:
                samples[case] = reader.foreground_of(volume)
    elif measured:
        samples.update(usable(train, "measuring intensities", reader.foreground, at_random=reader.disk is not None))
    reader.intensity = intensity_rules(options.intensity, channels, [samples[case] for case in train if samples])
    if options.cache == "memory":
        for prepared in (reader.cache or {}).values():
            normalise(prepared.image.numpy(), reader.intensity)
    elif reader.disk is not None:
        _refuse_more_than_fits(reader, maps)
        for _ in usable(cases, "reading cases", reader, at_random=True):
            pass


def _refuse_more_than_fits(reader: CaseReader, maps: Mapping[Case, int]) -> None:
    """Print the predicted size of the cases in `maps`, which counts label maps. Raises UserError if too large.

    On disk some may be already.
    """
    sizes = dict[Case, int]()
    for case, count in maps.items():
        sizes[case] = prod(reader.grid(case).shape) * (IMAGE_BYTES * len(reader.dataset.channels) + LABEL_BYTES * count)
    disk = reader.disk
    if disk is None:
        needed = sum(sizes.values()) * ranks.LOCAL_SIZE
        each = f" by each of {ranks.LOCAL_SIZE} ranks" if ranks.LOCAL_SIZE > 1 else ""
        size = f"{len(maps)} cases kept in memory{each}: {mib(needed)} MiB (predicted)"
        if needed >= host_bytes():
            raise UserError(f"{size}, of {mib(host_bytes())} MiB; add data.cache=disk to keep them in files")
        print(size, flush=True)
        return
    missing = [case for case in maps if not disk.holds(reader.key(case))]
    needed = sum(sizes[case] for case in missing)
    free = disk.room()
    where = f"{len(maps)} cases kept in {escaped(disk.root)}: {mib(sum(sizes.values()))} MiB (predicted)"
    print(f"{where}, {len(missing)} of them to prepare", flush=True)
    if needed >= free:
        what = f"{mib(needed)} MiB to write, but {mib(free)} MiB free; make room, or give another data.cache_root"
        raise UserError(f"data.cache=disk: {disk.root}: {what}")


def _measure(reader: CaseReader, train: Sequence[Case]) -> None:
    """Note what the images of the training cases are like; warn of those without contrast.

    Without a cache none is read for z-scores, which follow any unit. Raises UserError for an image that CT's rule
    makes constant, and where no image has any contrast.
    """
    most = MEASURED_CASES
    if reader.disk is None and reader.cache is not None:
        most = len(train)
    elif reader.disk is None and all(rule.kind == "zscore" for rule in reader.intensity):
        most = 0
    places = np.linspace(0, len(train) - 1, min(most, len(train)), dtype=int)
    cases = [train[place] for place in places]  # spread over all: names often follow their origin
    channels = reader.dataset.channels
    samples = list[np.ndarray]()
    flat = dict[str, list[str]]()  # by channel, the ids of cases in which it has one value
    for case in progress.track(cases, "measuring images", len(cases)):
        image = reader(case).image.numpy()
        samples.append(sampled(image))
        for number, channel in enumerate(image):
            if np.ptp(samples[-1][number]) == 0 and channel.min() == channel.max():
                _refuse_clipped(reader, case, number)
                flat.setdefault(channels[number], []).append(case.id)
    if cases and sum(map(len, flat.values())) == len(cases) * len(channels):
        raise UserError(f"{cases[0].id}: its image has one value, as those of all {len(cases)} training cases have")
    for name, ids in flat.items():
        what = f"channel {name} has one value in {len(ids)} of {len(cases)} training cases ({shown_names(ids)})"
        warn_once([f"{what}: nothing can be learned from it there"])
    stored = [reader.headers[case.id].stored for case in train]
    reader.seen = Seen.of([grid for grid in stored if grid is not None], samples, reader.intensity)


def _refuse_clipped(reader: CaseReader, case: Case, number: int) -> None:
    """Raise UserError where CT's rule has made a channel constant that is not so in its file."""
    rule = reader.intensity[number]
    if rule.kind != "ct":
        return
    channel = reader.read_volume(case).image[number]
    low, high = channel.min().item(), channel.max().item()
    if low < high:
        clips = f"which data.intensity=ct clips to {rule.low:g} to {rule.high:g}: the image would become constant"
        what = f"has values from {low:g} to {high:g}, {clips}"
        raise problem(case.id, case.images[0], f"{what}; correct its unit, remove the case, or use zscore")


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

"""A data set made ready for a run: scanned once, split, read as tensors for the network, and searched for twins.

Prepared cases are kept in memory, where each volume is read once, on disk or not at all. Of sparse annotation, labels
of some slices are learned, of others scored (Cicek et al. 2016).
"""

import secrets
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import prod
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from unet3d.base import progress, ranks
from unet3d.base.errors import UserError, escaped
from unet3d.base.types import IGNORE, host_bytes, mib
from unet3d.config.schema import Data
from unet3d.data import cache
from unet3d.data.cache import Arrays, DiskCache, Shapes, have_changed, key_of
from unet3d.data.cases import Case, DatasetInfo, raise_listed, read_dataset, warn_once
from unet3d.data.check import DIGEST, CaseHeader, channel_digest, check_cases, image_digest, leaks, voxel_digests
from unet3d.data.intensity import Intensity, Seen, foreground_sample, intensity_rules, kinds_of, normalise, sampled
from unet3d.data.labels import WrongLabels
from unet3d.data.nifti import problem, replacement
from unet3d.data.patches import PreparedCase, patch_centres, prepare
from unet3d.data.splits import absences, split
from unet3d.data.texts import shown_names
from unet3d.data.volume import Grid, ImageFiles, LabelValues, Volume, read_volume

IMAGE_BYTES = 4  # A voxel of one channel is float32.
LABEL_BYTES = 2  # A voxel of a label map is int16.
MEASURED_CASES = 20  # Images that are measured where memory does not hold all.
T = TypeVar("T")
Slices = list[list[int]]  # indices along each axis
Read = Callable[[Case], PreparedCase]


@dataclass
class CaseReader:
    """Prepares a case when called with it, or maps what `disk` holds of it. `cache` None: each time."""

    dataset: DatasetInfo
    spacing: list[float] | None
    intensity: tuple[Intensity, ...] = ()
    cache: dict[str, PreparedCase] | None = field(default_factory=dict, repr=False)
    replaced: dict[str, int] = field(default_factory=dict, repr=False)  # Voxels that were not finite, by case id.
    disk: DiskCache | None = None
    # Headers by case id, for `disk` with hashes.
    headers: Mapping[str, CaseHeader] = field(default_factory=dict, repr=False)
    files: ImageFiles = field(default_factory=ImageFiles, repr=False)
    seen: Seen | None = field(default=None, repr=False)  # what the training cases are like, once they were measured

    def __call__(self, case: Case) -> PreparedCase:
        return _cached(self.cache, case, self._prepare if self.disk is None else self._map)

    def read_volume(self, case: Case) -> Volume:
        """Read the volume on the network's grid, not yet normalised. Raises UserError, also if files have changed.

        Labels are classes already, and with data.nonfinite=zero NaN and infinite voxels are 0.
        """
        volume = read_volume(case, LabelValues.of_files(self.dataset), self.spacing, self.files)
        if case.id in self.headers and have_changed(case, self.headers[case.id].hashes):
            raise problem(case.id, case.images[0], "changed since its header was read, or its label map; start again")
        self._note(case, volume.nonfinite_voxels)
        return volume

    def digest(self, case: Case) -> bytes:
        """Return the digest of the prepared image, by which twins are found."""
        return (
            image_digest(map(channel_digest, self(case).image.numpy()))
            if self.disk is None
            else self._arrays(case)["digest"].tobytes()
        )

    def foreground(self, case: Case) -> np.ndarray:
        """Return foreground voxels (C, n) of a case, not normalised; from `disk` where there is one."""

        def make() -> Arrays:
            volume = self.read_volume(case)
            assert volume.label is not None, case.id
            return {"voxels": foreground_sample(volume.image, volume.label, self.dataset.ignore)}

        if self.disk is None:
            return make()["voxels"]
        return self.disk.read(self.key(case, "foreground"), {"voxels": (len(self.dataset.channels), None)}, make)[
            "voxels"
        ]

    def key(self, case: Case, *about: object) -> str:
        """Return the name on disk of what is prepared from this case by the reader's options, and `about`."""
        parts = self.headers[case.id].hashes.values()
        hashes = [part["full"] or [part["sample"], part["times"]] for part in parts]
        relabel = sorted((self.dataset.relabel or {}).items())
        labels = (self.dataset.label_count, self.dataset.ignore, relabel)
        accepted = (self.files.replaces_nonfinite, self.files.accepts_apart)
        return key_of(hashes, labels, self.spacing, accepted, case.affine, [*map(asdict, self.intensity)], about)

    def _note(self, case: Case, nonfinite_voxels: int) -> None:
        """Print a warning about a case's voxels that were not finite, once."""
        if nonfinite_voxels and case.id not in self.replaced:
            print(f"warning: {case.id}: {replacement(nonfinite_voxels)}", file=sys.stderr)
        self.replaced[case.id] = nonfinite_voxels

    def _prepare(self, case: Case) -> PreparedCase:
        volume = self.read_volume(case)
        assert volume.label is not None, case.id
        if self.intensity:  # Without rules yet: they may follow from these voxels.
            normalise(volume.image, self.intensity)
        return prepare(case.id, volume.image, volume.label, volume.grid.spacing, self.dataset.ignore)

    def _map(self, case: Case) -> PreparedCase:
        """Return the case with an image and a label map that are read from `disk` where they are used."""
        arrays = self._arrays(case)
        self._note(case, int(arrays["replaced"]))
        image, label = (torch.from_dlpack(arrays[name]) for name in ("image", "label"))
        return PreparedCase(case.id, image, label, self.grid(case).spacing, arrays["centres"])

    def grid(self, case: Case) -> Grid:
        """Return the grid that the network sees, by the case's header."""
        grid = self.headers[case.id].target
        assert grid is not None, case.id
        return grid

    def _arrays(self, case: Case) -> Arrays:
        """Return the prepared case as arrays on disk. Raises UserError."""

        def make() -> Arrays:
            prepared = self._prepare(case)
            image = prepared.image.numpy()
            replaced = np.array(self.replaced[case.id])
            digest = np.frombuffer(image_digest(map(channel_digest, image)), np.uint8)
            return {"image": image, **prepared.label_arrays(), "replaced": replaced, "digest": digest}

        shape = self.grid(case).shape
        image = (len(self.dataset.channels), *shape)
        shapes: Shapes = {"image": image, **_label_shapes(shape), "replaced": (), "digest": (DIGEST,)}
        assert self.disk is not None
        return self.disk.read(self.key(case), shapes, make)


def _cached(cache: dict[str, PreparedCase] | None, case: Case, make: Read) -> PreparedCase:
    """Return `make(case)`, called once for each case if there is a cache."""
    if cache is None:
        return make(case)
    if case.id not in cache:
        cache[case.id] = make(case)
    return cache[case.id]


def _label_shapes(shape: tuple[int, ...]) -> Shapes:
    """Return the shapes of `PreparedCase.label_arrays` of a case of this shape."""
    return {"label": shape, "centres": (None, 4)}


def usable(
    cases: Sequence[Case], what: str, read: Callable[[Case], T], at_random: bool = False
) -> Iterator[tuple[Case, T]]:
    """Yield each case, and what is read of it. Raises UserError at the end that lists all that cannot be used.

    `at_random`: in another order than other processes, which may read and write them on disk, too.
    """
    problems = list[UserError]()
    ordered = secrets.SystemRandom().sample(cases, len(cases)) if at_random else cases
    for case in progress.track(ordered, what, len(cases)):
        try:
            result = read(case)
        except UserError as error:
            problems.append(error)
        else:
            yield case, result
    lines = [*map(str, problems)]
    unknown = sum(isinstance(error, WrongLabels) for error in problems)
    if unknown > 1:  # what suits one map may not suit another
        what = "python -m unet3d check-data looks at all maps, and says what suits them"
        lines.insert(0, f"{unknown} label maps hold other labels: {what}")
    raise_listed(lines)


@dataclass(frozen=True)
class SparseReader:
    """Reads a case with the labels of some slices only: the learned or the scored ones. The image is `read`'s."""

    read: CaseReader
    options: Data
    scored: bool
    cache: dict[str, PreparedCase] | None

    def __call__(self, case: Case) -> PreparedCase:
        return _cached(self.cache, case, self._make)

    def _make(self, case: Case) -> PreparedCase:
        dense = self.read(case)
        disk = self.read.disk
        if disk is None:
            return self._masked(dense)
        options = self.options
        slices = (options.sparse, options.sparse_folds, options.sparse_fold, options.scored, self.scored)
        shapes = _label_shapes(tuple(dense.label.shape))
        arrays = disk.read(self.read.key(case, *slices), shapes, lambda: self._masked(dense).label_arrays())
        return replace(dense, label=torch.from_dlpack(arrays["label"]), centres=arrays["centres"])

    def _masked(self, dense: PreparedCase) -> PreparedCase:
        """Return the case without the labels of other slices. Raises UserError if none is left."""
        options = self.options
        label = dense.label.masked_fill(~chosen_mask(dense.label, options, self.scored), IGNORE)
        if (label == IGNORE).all():
            purpose = "scored" if self.scored else "learned"
            remedy = "choose other numbers in data.sparse"
            if options.semi and options.sparse_fold is None:
                remedy += " and data.scored"
            raise UserError(f"{dense.case_id}: no label is left to be {purpose}; {remedy}")
        return replace(dense, label=label, centres=patch_centres(label.numpy()))


def chosen_mask(label: Tensor, options: Data, scored: bool) -> Tensor:
    """Return the voxels of a label map X Y Z that are scored or learned, bool; where both cross, they are learned."""
    mask = planes(label.shape, chosen_slices(label, options, scored))
    return mask & ~chosen_mask(label, options, False) if scored else mask


def chosen_slices(label: Tensor, options: Data, scored: bool) -> Slices:
    """Return the slices of data.sparse that are scored, the part data.sparse_fold, or learned, the other parts.

    Without parts those of data.scored and of data.sparse. Neighbours belong to different parts.
    """
    assert options.sparse is not None
    fold = options.sparse_fold
    counts, first, more = (options.scored, 1.0, 1) if scored and fold is None else (options.sparse, 0.5, 0)
    slices = Slices()
    for (low, high), count in zip(extent(label), counts, strict=True):
        axis = [round(low + (k + first) / (count + more) * (high - low)) for k in range(count)]
        slices.append([n for k, n in enumerate(axis) if fold is None or (k % options.sparse_folds == fold) == scored])
    return slices


def extent(label: Tensor) -> list[tuple[int, int]]:
    """Return the first and last voxel of the foreground along each axis; of the volume if it has none."""
    from scipy.ndimage import find_objects  # takes a third of a second to load

    boxes = find_objects((label.numpy() > 0).astype(np.uint8))
    if not boxes:
        return [(0, n - 1) for n in label.shape]
    return [(axis.start, axis.stop - 1) for axis in boxes[0]]


def planes(shape: torch.Size, slices: Slices) -> Tensor:
    """Return a mask of the slices, bool X Y Z."""
    x, y, z = slices
    mask = torch.zeros(shape, dtype=torch.bool)
    mask[x] = True
    mask[:, y] = True
    mask[:, :, z] = True
    return mask


@dataclass(frozen=True)
class PreparedData:
    """The data set, its split, and how to prepare a case for the network."""

    dataset: DatasetInfo
    train: tuple[Case, ...]
    val: tuple[Case, ...]
    read: CaseReader
    read_train: Read  # Reads the labels that training sees.
    read_val: Read  # Reads those that validation sees.
    headers: dict[str, CaseHeader]  # Headers by case id.

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
    if options.cache != "off":  # Without a cache nothing is read before the first step.
        _refuse_nothing_to_learn(data, options)
    return data


def _refuse_nothing_to_learn(data: PreparedData, options: Data) -> None:
    """Print a line for classes that no training case shows, and for held-out cases without a voxel to score.

    Raises UserError where training cases show no class.
    """
    # One case at a time: their files may be too many to be open at once.
    learned, scored = (
        frozenset[int]().union(*(read(case).labels for case in cases))
        for cases, read in ((data.train, data.read_train), (data.val, data.read_val))
    )
    lines = absences(data.dataset, options, learned, scored)
    if not scored:
        is_ignored = all(bool((data.read_val(case).label == IGNORE).all()) for case in data.val)
        problem = "every held-out voxel is ignored" if is_ignored else "no foreground in any held-out case"
        effect = "there will be no score, and no best.pt; use last.pt" if is_ignored else "scores are 0, or n/a"
        lines.append(f"{data.dataset.name}: {problem}: {effect}, or hold out others (data.split, data.fold)")
    warn_once(lines)


def _load(reader: CaseReader, options: Data, train: Sequence[Case], val: Sequence[Case]) -> None:
    """Choose the normalisation, for CT by the training cases, and read the cases that are kept.

    What memory keeps is read once, and normalised in place. Raises UserError that lists all cases that cannot be used.
    """
    training_maps = 1 + (options.sparse is not None) + options.semi  # label maps of a training case, see `_readers`
    maps = dict.fromkeys(val, 1) | dict.fromkeys(train, training_maps)
    cases = list(dict.fromkeys([*train, *val]))
    channels = reader.dataset.channels
    is_measured = "ct" in kinds_of(options.intensity, channels)
    samples = list[np.ndarray]()
    if options.cache == "memory":
        _refuse_more_than_fits(reader, maps)
        for _ in usable(cases, "reading cases", reader):
            pass
        if is_measured:
            as_stored = [reader(case) for case in train]
            samples = [foreground_sample(case.image.numpy(), case.label.numpy(), None) for case in as_stored]
    elif is_measured:
        found = dict(usable(train, "measuring intensities", reader.foreground, at_random=reader.disk is not None))
        samples = [found[case] for case in train]
    reader.intensity = intensity_rules(options.intensity, channels, samples)
    if options.cache == "memory":
        for case in cases:
            normalise(reader(case).image.numpy(), reader.intensity)
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
    flat = dict[str, list[str]]()  # Ids of cases whose channel has one value, by channel.
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

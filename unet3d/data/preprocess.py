"""Read the files of a case as tensors ready for the network, kept in memory, on disk or not at all."""

import secrets
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import prod
from typing import TypeVar

import numpy as np
import torch

from unet3d.base import progress, ranks
from unet3d.base.errors import UserError, escaped, listed
from unet3d.base.types import host_bytes, mib
from unet3d.data.case_arrays import CASE, fit_case, fit_kinds, label_arrays, labels_of
from unet3d.data.cases import Case, DatasetInfo
from unet3d.data.disk_cache import Arrays, DiskCache, key_of
from unet3d.data.hashes import sampled_hashes
from unet3d.data.headers import CaseHeader, read_grid, shown_names
from unet3d.data.image_files import ImageFiles
from unet3d.data.intensity import (
    Intensity,
    foreground_sample,
    intensity_rules,
    needs_foreground,
    normalise_in_place,
)
from unet3d.data.nifti import STRICT, ValidationRules, problem, replacement
from unet3d.data.nifti_labels import messages
from unet3d.data.patches import PreparedCase, cached, prepare
from unet3d.data.seen import Seen, sampled
from unet3d.data.volume import Volume, read_volume

T = TypeVar("T")
IMAGE_BYTES = 4  # of a voxel of a channel, float32
LABEL_BYTES = 2  # of a voxel of a label map, int16
MEASURED_CASES = 20  # whose images are measured, where memory does not hold all


@dataclass
class CaseReader:
    """Prepares a case when called with it, or maps what `disk` holds of it. `cache` None: each time."""

    dataset: DatasetInfo
    spacing: list[float] | None
    intensity: tuple[Intensity, ...] = ()
    cache: dict[str, PreparedCase] | None = field(default_factory=dict, repr=False)
    rules: ValidationRules = STRICT
    warned_cases: set[str] = field(default_factory=set, repr=False)  # of voxels that were not finite
    disk: DiskCache | None = None
    headers: Mapping[str, CaseHeader] = field(default_factory=dict, repr=False)  # by case id, for `disk` with hashes
    files: ImageFiles = field(default_factory=ImageFiles, repr=False)
    seen: Seen | None = field(default=None, repr=False)  # what the training cases are like, once `measure` was called

    def __call__(self, case: Case) -> PreparedCase:
        return cached(self.cache, case, self._prepare if self.disk is None else self._map)

    def read_volume(self, case: Case) -> Volume:
        """Read the volume on the network's grid, not yet normalised. Raises UserError.

        Labels are classes already, and with data.nonfinite=zero NaN and infinite voxels are 0.
        """
        dataset = self.dataset
        volume = read_volume(
            case,
            dataset.label_count,
            dataset.ignore,
            self.spacing,
            self.rules,
            dataset.relabel,
            self.files,
        )
        self._warn(case, volume.nonfinite_voxels)
        return volume

    def refuse_more_than_memory(self, maps: Mapping[Case, int]) -> None:
        """Print the predicted size of the cases in `maps`, which counts label maps. Raises UserError if too large."""
        needed = sum(self._bytes(case, count) for case, count in maps.items()) * ranks.LOCAL_SIZE
        available = host_bytes()
        each = f" by each of {ranks.LOCAL_SIZE} ranks" if ranks.LOCAL_SIZE > 1 else ""
        size = f"{len(maps)} cases kept in memory{each}: {mib(needed)} MiB (predicted)"
        if needed >= available:
            raise UserError(f"{size}, of {mib(available)} MiB; add data.cache=disk to keep them in files")
        print(size, flush=True)

    def refuse_more_than_disk(self, maps: Mapping[Case, int]) -> None:
        """Print the predicted size of these cases on disk, where some may be already. Raises UserError if too large."""
        assert self.disk is not None
        sizes = {case: self._bytes(case, count) for case, count in maps.items()}
        missing = [case for case in maps if not self.disk.holds(self.key(case))]
        if missing:
            self.disk.sweep()
        needed = sum(sizes[case] for case in missing)
        free = self.disk.room()
        where = f"{len(maps)} cases kept in {escaped(self.disk.root)}: {mib(sum(sizes.values()))} MiB (predicted)"
        print(f"{where}, {len(missing)} of them to prepare", flush=True)
        if needed >= free:
            what = f"{mib(needed)} MiB to write, but {mib(free)} MiB free; make room, or give another data.cache_root"
            raise UserError(f"data.cache=disk: {self.disk.root}: {what}")

    def fit_intensity(self, choice: str, train: Sequence[Case]) -> None:
        """Choose the normalisation, for CT by the training cases, which are read for it."""
        self.intensity = intensity_rules(choice, self.dataset.channels, self._samples(train))

    def fit_and_preload(self, choice: str, train: Sequence[Case], cases: Sequence[Case]) -> None:
        """Read each of `cases` once into memory, choose the normalisation, for CT by `train`, and apply it in place.

        Raises UserError that lists all cases that cannot be used.
        """
        assert self.cache is not None and self.disk is None
        channels = self.dataset.channels
        measured = {case.id for case in train} if needs_foreground(choice, channels) else set[str]()
        samples = dict[str, np.ndarray]()
        if not measured:
            self.intensity = intensity_rules(choice, channels, ())
        for volume in _usable(cases, "reading cases", self.read_volume):
            if volume.case_id in measured:
                samples[volume.case_id] = self._foreground(volume)
            if self.intensity:
                normalise_in_place(volume.image, self.intensity)
            self.cache[volume.case_id] = self._as_case(volume)
        if measured:
            self.intensity = intensity_rules(choice, channels, (samples[case.id] for case in train))
            for case in cases:
                normalise_in_place(self.cache[case.id].image.numpy(), self.intensity)

    def measure(self, train: Sequence[Case]) -> None:
        """Note what the images of the training cases are like; warn of those without contrast.

        Without a cache none is read for z-scores, which follow any unit. Raises UserError for an image that CT's rule
        makes constant, and where no image has any contrast.
        """
        cases = train if self.disk is None and self.cache is not None else _spread(train, MEASURED_CASES)
        if self.disk is None and self.cache is None and all(rule.kind == "zscore" for rule in self.intensity):
            cases = []
        samples = list[np.ndarray]()
        flat = dict[str, list[str]]()  # by channel, the ids of cases in which it has one value
        for case in progress.track(cases, "measuring images", len(cases)):
            image = self(case).image.numpy()
            samples.append(sampled(image))
            for number, channel in enumerate(image):
                if np.ptp(samples[-1][number]) == 0 and channel.min() == channel.max():
                    self._refuse_clipped(case, number)
                    flat.setdefault(self.dataset.channels[number], []).append(case.id)
        if cases and sum(map(len, flat.values())) == len(cases) * len(self.dataset.channels):
            raise UserError(f"{cases[0].id}: its image has one value, as those of all {len(cases)} training cases have")
        for name, ids in flat.items() if ranks.RANK == 0 else ():
            what = f"channel {name} has one value in {len(ids)} of {len(cases)} training cases ({shown_names(ids)})"
            print(f"warning: {escaped(what)}: nothing can be learned from it there", file=sys.stderr)
        stored = [self.headers[case.id].stored for case in train]
        self.seen = Seen.of([grid for grid in stored if grid is not None], samples, self.intensity)

    def _refuse_clipped(self, case: Case, number: int) -> None:
        """Raise UserError where CT's rule has made a channel constant that is not so in its file."""
        rule = self.intensity[number]
        if rule.kind != "ct":
            return
        channel = self.read_volume(case).image[number]
        low, high = channel.min().item(), channel.max().item()
        if low < high:
            clips = f"which data.intensity=ct clips to {rule.low:g} to {rule.high:g}: the image would become constant"
            what = f"has values from {low:g} to {high:g}, {clips}"
            raise problem(case.id, case.images[0], f"{what}; correct its unit, remove the case, or use zscore")

    def preload(self, cases: Sequence[Case]) -> None:
        """Prepare every case now. Raises UserError that lists all that cannot be used."""
        for _ in _usable(self._ordered(cases), "reading cases", self):
            pass

    def key(self, case: Case, *about: object) -> str:
        """Return the name on disk of what is prepared from this case by the reader's options, and `about`."""
        hashes = list[object]()
        for kind in ("images", "labels"):
            of_files = self.headers[case.id].hashes[kind]
            hashes.append(of_files["full"] or [of_files["sample"], of_files["times"]])
        options: tuple = (
            self.dataset.label_count,
            self.dataset.ignore,
            self.spacing,
            self.rules,
        )
        if self.dataset.relabel is not None:
            options += (sorted(self.dataset.relabel.items()),)
        if case.affine in ("qform", "pixdim"):  # others read what is first
            options += (case.affine,)
        return key_of(hashes, options, [asdict(rule) for rule in self.intensity], about)

    def _bytes(self, case: Case, maps: int) -> int:
        """Return the bytes of a prepared case with this number of label maps."""
        header = self.headers.get(case.id)
        grid = header.target if header is not None else None
        if grid is None:
            grid = read_grid(case, self.spacing)
        return prod(grid.shape) * (IMAGE_BYTES * len(self.dataset.channels) + LABEL_BYTES * maps)

    def _ordered(self, cases: Sequence[Case]) -> Sequence[Case]:
        """Return the cases at random where other processes may prepare them, too: they wait for each other less."""
        return cases if self.disk is None else secrets.SystemRandom().sample(cases, len(cases))

    def _warn(self, case: Case, nonfinite_voxels: int) -> None:
        if nonfinite_voxels and case.id not in self.warned_cases:
            self.warned_cases.add(case.id)
            print(f"warning: {case.id}: {replacement(nonfinite_voxels)}", file=sys.stderr)

    def _prepare(self, case: Case) -> PreparedCase:
        return self._prepared(self.read_volume(case))

    def _prepared(self, volume: Volume) -> PreparedCase:
        """Return a volume as a training case, its image normalised in place."""
        normalise_in_place(volume.image, self.intensity)
        return self._as_case(volume)

    def _as_case(self, volume: Volume) -> PreparedCase:
        """Return a volume as a training case, its image as it is."""
        assert volume.label is not None, volume.case_id
        return prepare(
            volume.case_id,
            volume.image,
            volume.label,
            volume.spacing,
            self.dataset.ignore,
        )

    def _map(self, case: Case) -> PreparedCase:
        """Return the case with an image and a label map that are read from `disk` where they are used."""
        assert self.disk is not None
        channels = len(self.dataset.channels)

        def fits(arrays: Arrays) -> bool:
            return fit_case(arrays, channels)

        arrays = self.disk.read(self.key(case), CASE, lambda: self._arrays(case), fits)
        self._warn(case, int(arrays["replaced"]))
        label, voxels = labels_of(arrays)
        x, y, z = arrays["spacing"].tolist()
        return PreparedCase(case.id, torch.from_dlpack(arrays["image"]), label, (x, y, z), voxels)

    def _arrays(self, case: Case) -> Arrays:
        """Return the prepared case as arrays for the disk. Raises UserError."""
        volume = self.read_volume(case)
        prepared = self._prepared(volume)
        self._refuse_changed(case)
        return {
            "image": prepared.image.numpy(),
            **label_arrays(prepared),
            "spacing": np.array(prepared.spacing),
            "replaced": np.array(volume.nonfinite_voxels),
        }

    def _refuse_changed(self, case: Case) -> None:
        """Raise UserError where the files are not those any more whose hashes name what is written."""
        now = sampled_hashes(case)
        before = self.headers[case.id].hashes
        if any(now[kind][of] != before[kind][of] for kind in now for of in ("sample", "times")):
            raise problem(
                case.id,
                case.images[0],
                "changed while it was prepared, or its label map; start again",
            )

    def _samples(self, train: Sequence[Case]) -> Iterator[np.ndarray]:
        """Yield foreground voxels (C, n) of each case, in this order."""
        if self.disk is None:
            yield from map(
                self._foreground,
                _usable(train, "measuring intensities", self.read_volume),
            )
            return
        for _ in _usable(self._ordered(train), "measuring intensities", self._mapped_sample):
            pass
        yield from map(self._mapped_sample, train)

    def _mapped_sample(self, case: Case) -> np.ndarray:
        """Return foreground voxels (C, n) of a case from `disk`."""
        assert self.disk is not None
        channels = len(self.dataset.channels)

        def make() -> Arrays:
            voxels = self._foreground(self.read_volume(case))
            self._refuse_changed(case)
            return {"voxels": voxels}

        def fits(arrays: Arrays) -> bool:
            return fit_kinds(arrays) and len(arrays["voxels"]) == channels

        return self.disk.read(self.key(case, "foreground"), ("voxels",), make, fits)["voxels"]

    def _foreground(self, volume: Volume) -> np.ndarray:
        assert volume.label is not None, volume.case_id
        return foreground_sample(volume.image, volume.label, self.dataset.ignore)


def _spread(cases: Sequence[Case], most: int) -> list[Case]:
    """Return at most so many of the cases, spread over all of them: names often follow their origin."""
    places = np.linspace(0, len(cases) - 1, min(most, len(cases)), dtype=int)
    return [cases[place] for place in places]


def _usable(cases: Sequence[Case], what: str, read: Callable[[Case], T]) -> Iterator[T]:
    """Yield each case read. Raises UserError at the end that lists all cases that cannot be used."""
    problems = list[UserError]()
    for case in progress.track(cases, what, len(cases)):
        try:
            result = read(case)
        except UserError as error:
            problems.append(error)
        else:
            yield result
    if problems:
        raise UserError("\n".join(listed(messages(problems))))

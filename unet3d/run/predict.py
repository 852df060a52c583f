"""A trained network applied to files: NIfTI in, label maps out on each input's own grid."""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from unet3d import build
from unet3d.base.errors import UserError, warn
from unet3d.base.types import ProbabilityBlock, Regions
from unet3d.config import rules
from unet3d.config.schema import Config
from unet3d.data.cases import Case
from unet3d.data.components import largest_components
from unet3d.data.file_names import backslashes, in_order, other_volumes, refuse_long, volumes_in, without_channel
from unet3d.data.forms import in_one_line
from unet3d.data.grids import Grid, contradictions, foreign_units
from unet3d.data.headers import doubtful_places
from unet3d.data.image_files import ImageFiles
from unet3d.data.intensity import Intensity, normalise
from unet3d.data.labels import region_words, written_values, written_words
from unet3d.data.nifti import STRICT, ValidationRules, channels, open_image, stem
from unet3d.data.nifti_write import save_labels, saving_scores
from unet3d.data.restore import ProbabilityMaps, to_original
from unet3d.data.seen import Seen
from unet3d.data.volume import Volume, read_volume, with_values
from unet3d.memory.simulate import fitted, largest_map
from unet3d.run.checkpoint import TrainedNetworks, read_networks
from unet3d.training import switches
from unet3d.training.inference import Predictor
from unet3d.training.windows import free_bytes


@dataclass(frozen=True)
class Segmenter:
    """A network and everything between a file and it."""

    predictor: Predictor
    intensity: tuple[Intensity, ...]
    spacing: list[float] | None  # mm, of the grid it was trained on; None: the file's own
    rules: ValidationRules = STRICT
    affine: str = "auto"  # data.affine of training: how headers are read
    by_channel: bool = False  # files are of one channel each, and named so, even a single one
    values: tuple[int, ...] | None = None  # of the classes, or regions' labels, in label maps; None: their numbers
    written: str = ""  # these values and the classes' names, in words
    largest: tuple[int, ...] = ()  # classes of which label maps have the largest component alone
    kept: str = ""  # their names
    seen: Seen | None = None  # what the training cases were like
    origin: dict[str, Any] = dataclasses.field(default_factory=dict)  # a digest, and options that change label maps

    def to_file(self, case: Case, path: Path, scores: Path | None = None) -> Volume:
        """Segment one case; write class probabilities to `scores`. Return the case on the network's grid.

        Raises UserError.
        """
        volume = self._read(case)
        save_prediction(
            path,
            self._strips(volume, case),
            case,
            self.spacing,
            scores,
            self.values,
            regions=self.regions,
            largest=self.largest,
        )
        return volume

    @property
    def regions(self) -> Regions | None:
        """Return the regions that the networks predict; None where their classes exclude each other."""
        return self.predictor.options.output_regions

    def labels(self, case: Case, open_scores: ProbabilityMaps | None = None) -> np.ndarray:
        """Return the labels (X, Y, Z) of a case in the axes of its first file; `to_original` writes probabilities.

        Raises UserError.
        """
        strips = self._strips(self._read(case), case)
        labels = to_original(strips, case, self.spacing, open_scores, regions=self.regions)
        return with_values(largest_components(labels, self.largest), self.values)

    def _read(self, case: Case) -> Volume:
        volume = read_volume(case._replace(label=None), 0, None, self.spacing, self.rules)
        count = len(volume.image)
        expected = len(self.intensity)
        if count != expected:
            raise UserError(f"{case.id}: {case.images[0]} has {count} channels; this network takes {expected}")
        return volume

    def _strips(self, volume: Volume, case: Case) -> Iterator[ProbabilityBlock]:
        image = normalise(volume.image, self.intensity)
        if self.seen is not None:
            x, y, z = image.shape[1:]
            grid = Grid((x, y, z), volume.affine)
            differences = list(self.seen.differences(image, self.intensity, grid, self.spacing is not None))
            if differences:
                warn(f"{case.id}: {'; '.join(differences)}")
        return self.predictor.strips(torch.from_numpy(image), case.named)


def save_prediction(
    path: Path,
    strips: Iterable[ProbabilityBlock],
    case: Case,
    spacing: Sequence[float] | None,
    scores: Path | None = None,
    values: Sequence[int] | None = None,
    files: ImageFiles | None = None,
    regions: Regions | None = None,
    largest: Sequence[int] = (),
) -> None:
    """Write the label map of a case, and its probabilities to `scores`, on its file's grid.

    `values`: the label map's value for each class; None: the classes' numbers. `largest`: classes of which the label
    map has the largest component alone; probabilities stay as they are. Probabilities are float32 (X, Y, Z, K),
    in a NIfTI file that is not compressed: programs can read it in parts. Of `regions` the label map is the drawing,
    and `values` are of its labels. The headers of `files`, which have been opened, are not read again. Raises
    UserError, OSError.
    """
    like = (files or ImageFiles()).header(case, case.images[0])
    with saving_scores(scores, like) if scores else nullcontext() as open_scores:
        labels = to_original(strips, case, spacing, open_scores, like, regions)
    labels = largest_components(labels, largest)
    save_labels(path, with_values(labels, values), like)  # last: where a label map is, all of the case is


def open_segmenter(
    path: Path,
    device: str,
    mirror: bool | None = None,
    model_path: str | None = None,
    batch: int | str | None = None,
    overlap: float | str | None = None,
) -> Segmenter:
    """Return the segmenter of a run's or a published checkpoint, with its origin.

    Raises CheckpointError, or UserError (device).
    """
    trained = read_networks(path, model_path)
    opened = segmenter(trained, device, mirror, batch, overlap)
    origin = {
        "network": trained.digest(),
        "overlap": opened.predictor.overlap,
        "mirror": bool(opened.predictor.mirror),
        "components": list(trained.largest),
    }
    return dataclasses.replace(opened, origin=origin)


def segmenter(
    trained: TrainedNetworks,
    device: str,
    mirror: bool | None,
    batch: int | str | None = None,
    overlap: float | str | None = None,
) -> Segmenter:
    """Return the segmenter of these networks; `mirror`, `batch`, `overlap` None: as validated.

    `batch` is of windows. Where it is auto and a GPU has not enough free, there are fewer at once. Raises as
    `open_segmenter`, and UserError for a value out of the range that the option has.
    """
    arguments = {"mirror": mirror, "batch": batch, "overlap": overlap}
    given = {name: value for name, value in arguments.items() if value is not None}
    if overlap is not None and (isinstance(overlap, bool) or not isinstance(overlap, (int, float))):
        raise UserError(f"overlap={overlap}: give a number from 0 to 0.9, a share of the window")
    with _named_as(given):
        config = _inference_config(trained.config, device, given)
    _warn_of_idle_arguments(config, given)
    return Segmenter(
        predictor=_predictor(trained, config, given),
        intensity=trained.intensity,
        spacing=config.data.spacing,
        rules=ValidationRules.of(config.data),
        affine=config.data.affine,
        by_channel=config.data.format == "nnunet",
        values=written_values(config.data, trained.label_count),
        written=_written(config, trained),
        largest=trained.largest,
        kept=", ".join(trained.classes[number] for number in trained.largest),
        seen=trained.seen,
    )


def _written(config: Config, trained: TrainedNetworks) -> str:
    """Return what the values in label maps are, in words."""
    if trained.regions is None:
        return written_words(config.data, trained.classes)
    return region_words(config.data, trained.classes, trained.regions)


def _inference_config(trained: Config, device: str, given: dict[str, Any]) -> Config:
    """Return the config of a run with the options of inference that are given. Raises UserError."""
    # A prediction has no backward pass, which alone is not deterministic on a GPU, and is not compiled.
    config = dataclasses.replace(trained, device=device, deterministic=False, compile=False)
    config.inference = dataclasses.replace(config.inference, **given)
    rules.check(config, here=False)  # the device's name; and not every network can be mirrored
    return config


def _warn_of_idle_arguments(config: Config, given: dict[str, Any]) -> None:
    if given.get("mirror") and not config.data.augment.mirror:
        warn("mirroring does nothing: this network has data.augment.mirror=[]")
    if "overlap" in given and config.model.padding == "valid":
        warn("overlap does nothing: this network has model.padding=valid, whose tiles do not overlap")


def _predictor(trained: TrainedNetworks, config: Config, given: Iterable[str]) -> Predictor:
    """Build the networks on the device of `config`. Raises CheckpointError, UserError."""
    device = build.device(config)
    policy = build.policy(config, device.type)
    networks = [policy.formatted(network) for network in trained.instantiate(device)]
    with _named_as(given):
        predictor = build.predictor(config, networks, config.model, policy)
    if device.type == "cuda":
        free = free_bytes(device) if config.inference.batch == "auto" else math.inf
        predictor = fitted(predictor, free)
        warning = switches.cudnn_warning(policy.dtype, partial(largest_map, predictor))
        if warning is not None:
            warn(warning)
    return predictor


@contextmanager
def _named_as(given: Iterable[str]) -> Iterator[None]:
    """Name arguments in errors (`overlap`) where they replaced the checkpoint's options (`inference.overlap`)."""
    try:
        yield
    except UserError as error:
        option, sign, rest = str(error).partition("=")
        name = option.removeprefix("inference.")
        if name in given and name != option:
            raise UserError(f"{name}{sign}{rest}") from error
        raise


def accepted_contradictions(case: Case) -> list[str]:
    """Return what is odd in a case and accepted by the checkpoint's options, as in training: one line each.

    These are contradictions between its files, and lengths that are not in mm.
    """
    opened = {path: open_image(case.id, path, case.affine) for path in case.images}
    errors = (*contradictions(case, opened), *foreign_units(case, opened))
    return [str(error) for error in errors]


def doubtful_places_in(cases: Iterable[Case]) -> list[str]:
    """Return a line for all files that state two voxel sizes, if there are any; unreadable ones are reported later."""
    lines = list[str]()
    for case in cases:
        with suppress(UserError):
            lines += doubtful_places(case, {path: open_image(case.id, path, case.affine) for path in case.images})
    return in_one_line(lines, "data.affine of training decides; write the true size into the headers")


def files_in(inputs: Sequence[Path]) -> tuple[list[Path], list[str]]:
    """Return the files, also the NIfTI files of folders; and a line for each input that is neither.

    Raises UserError where there is no file.
    """
    files: list[Path] = []
    problems: list[str] = []
    for path in inputs:
        try:
            if path.is_file():
                files.append(path)
            elif path.is_dir():
                files += volumes_in(path)
            elif path.exists():
                problems.append(f"{path}: neither file nor folder")
            else:
                problems.append(f"{path}: no such file or folder{backslashes(path)}")
        except OSError as error:
            problems.append(f"{path}: cannot be read ({error.strerror})")
    if not files and not problems:
        unread = other_volumes(inputs)
        remedy = f"; {unread}" if unread else ""
        raise UserError(f"no .nii or .nii.gz file in {', '.join(map(str, inputs))}{remedy}")
    return files, problems


def find_cases(
    inputs: Sequence[Path],
    count: int,
    by_channel: bool = False,
    shard: tuple[int, int] = (0, 1),
    affine: str = "auto",
) -> tuple[list[Case], list[str]]:
    """Return the files, also the NIfTI files of folders, as cases of `count` channels, and a line for each problem.

    A case has one file with all channels, or one for each, named `_0000`, `_0001` .. Of a `shard` (i, n) every n-th
    case by name, from the i-th on: the n shards are disjoint and hold all cases. `affine` is data.affine of training.
    """
    files_of: dict[str, list[Path]] = {}
    files, problems = files_in(inputs)
    unread = other_volumes([path for path in inputs if path.is_dir()])
    if unread:
        warn(unread)
    for file in files:
        files_of.setdefault(_case_name(file, count, by_channel, affine), []).append(file)
    index, shards = shard
    cases = []
    for name in sorted(files_of)[index::shards]:
        try:
            cases.append(_case(name, files_of[name], count)._replace(affine=affine))
        except UserError as error:
            problems.append(str(error))
    return cases, problems


def _case_name(file: Path, count: int, by_channel: bool, affine: str) -> str:
    """Return the name of the case that a file belongs to, for a network of `count` channels."""
    name = stem(file)
    if count == 1:
        return name.removesuffix("_0000") if by_channel else name
    return name if _is_whole(file, count, affine) else without_channel(name)


def _case(name: str, files: Sequence[Path], count: int) -> Case:
    """Return the files of one name as a case. Raises UserError."""
    listed = ", ".join(map(str, files))
    refuse_long(files[0].parent, name)
    stems = {stem(file) for file in files}
    if len(files) > count > 1 and len(stems) == len(files):
        raise UserError(f"{name}: has {len(files)} files ({listed}); this network takes {count} channels")
    if len(files) > count:
        raise UserError(f"{name}: {len(files)} files of one name ({listed}); their label maps would be one file")
    return Case(name, in_order(name, _with_channels(name, files, count), count), None)


def _with_channels(name: str, files: Sequence[Path], count: int) -> list[Path]:
    """Return one channel's files with those of the others that lie there, but were not given. Raises UserError."""
    given = {stem(file) for file in files}
    wanted = {f"{name}_{channel:04d}" for channel in range(count)}
    found = list(files)
    if count > 1 and given < wanted:
        with suppress(OSError):
            found += [file for file in volumes_in(files[0].parent) if stem(file) in wanted - given]
    if len(found) > count:
        raise UserError(f"{name}: {', '.join(map(str, found))}: two files of one channel; give those to segment")
    return found


def _is_whole(file: Path, count: int, affine: str) -> bool:
    """Return whether a file holds all channels of a case; a file that cannot be read is reported later."""
    try:
        return channels(open_image(stem(file), file, affine)) == count
    except UserError:
        return False

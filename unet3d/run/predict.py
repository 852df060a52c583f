"""A trained network applied to files: NIfTI in, label maps out on each input's own grid."""

import dataclasses
import itertools
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from unet3d import build
from unet3d.base.errors import CheckpointError, UserError
from unet3d.base.types import ProbabilityBlock
from unet3d.config import compose, rules
from unet3d.config.schema import Config, Data
from unet3d.data.cases import Case, in_order, refuse_long, volumes_in, without_channel
from unet3d.data.grids import contradictions, foreign_units
from unet3d.data.image_files import ImageFiles
from unet3d.data.intensity import Intensity, checked_intensity, normalise
from unet3d.data.labels import written_values, written_words
from unet3d.data.nifti import STRICT, ValidationRules, channels, open_image, stem
from unet3d.data.nifti_write import save_labels, saving_scores
from unet3d.data.restore import Scores, to_original
from unet3d.data.volume import Volume, read_volume, with_values
from unet3d.memory.simulate import fitted
from unet3d.training import checkpoint, known_bad
from unet3d.training.inference import Predictor, free_bytes

Split = dict[str, Any]


@dataclass(frozen=True)
class TrainedNetworks:
    """Networks of one kind, and how an image is prepared for them."""

    path: Path
    config: Config  # the model's options leave nothing open
    classes: tuple[str, ...]  # background first
    channels: tuple[str, ...]
    intensity: tuple[Intensity, ...]  # a rule for each channel
    weights: list[dict[str, Tensor]]  # of each network: a run's checkpoint holds one, a published one may hold several
    splits: list[Split]  # what was held out from each


def parse(state: Mapping[str, Any], path: Path, model_path: str | None = None) -> TrainedNetworks:
    """What the checkpoint at `path` holds. `model_path`: the import path of the user's network, from the command line.

    Raises CheckpointError for anything but plain values of the right types, UserError where it is not its network.
    """
    try:
        config = compose.from_plain(state["config"] | {"resume": None, "model": state["model_options"]})
        classes, channels = tuple(state["classes"]), tuple(state["channels"])
        rules = tuple(checked_intensity(rule) for rule in state["intensity"])
        others = list(map(dict, state.get("others", [])))  # only what is published has these two
        weights = [dict(state["model"]) | dict(state["average"]), *others]
        splits = list(map(dict, state.get("splits", [split_of(config.data)])))
        sizes = len(classes), len(channels), len(rules), len(splits)
        if sizes != (config.model.classes, config.model.in_channels, config.model.in_channels, len(weights)):
            raise ValueError("its parts contradict each other")
        if not all(isinstance(name, str) for name in itertools.chain(classes, channels, *weights)):
            raise ValueError("its classes, channels or weights are not named")
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: not a checkpoint of a run ({error})") from error
    if config.model.path != model_path:
        if config.model.path is None:
            raise UserError(f"{path}: holds the package's own network; remove --model")
        raise UserError(f"{path}: code is never taken from a checkpoint; name its network: --model {config.model.path}")
    if model_path is not None:
        build.import_object("--model", model_path)  # here, not under torch.device("meta"), where its tensors would stay
    return TrainedNetworks(path, config, classes, channels, rules, weights, splits)


def split_of(options: Data) -> Split:
    """What a run with these options held out; of a list in a file, which."""
    if options.split is not None:
        return {"split": options.split, "semi": options.semi}
    if options.fold is not None:
        return {"fold": options.fold, "folds": options.folds, "semi": options.semi}
    return {"val_fraction": options.val_fraction, "semi": options.semi}


def networks(trained: TrainedNetworks, device: torch.device) -> list[nn.Module]:
    """The networks with their weights. Raises CheckpointError where these do not fit, before memory is taken."""
    options, path = trained.config.model, trained.path
    try:
        with torch.device("meta"):
            outline = build.model(options, seed=0)
    except (RuntimeError, TypeError, OverflowError) as error:
        raise CheckpointError(f"{path}: no network has these options ({error})") from error
    for weights in trained.weights:
        checkpoint.refuse_misfit(outline, weights, path)
    # One storage may stand for many weights, or for many networks; each would take memory of its own.
    if sum(value.nbytes for weights in trained.weights for value in weights.values()) > path.stat().st_size:
        raise CheckpointError(f"{path}: its weights are not all there: they are larger than the file")
    found = [build.model(options, seed=0) for _ in trained.weights]
    for network, weights in zip(found, trained.weights, strict=True):
        network.load_state_dict(weights)
    return [network.to(device).eval() for network in found]


@dataclass(frozen=True)
class Segmenter:
    """A network and everything between a file and it."""

    predictor: Predictor
    intensity: tuple[Intensity, ...]
    spacing: list[float] | None  # mm, of the grid it was trained on; None: the file's own
    rules: ValidationRules = STRICT
    by_channel: bool = False  # files are of one channel each, and named so, even a single one
    values: tuple[int, ...] | None = None  # of the classes in label maps; None: their numbers
    written: str = ""  # these values and the classes' names, in words

    def to_file(self, case: Case, path: Path, scores: Path | None = None) -> Volume:
        """Segment one case; class probabilities go to `scores`. Returns it on the network's grid. Raises UserError."""
        volume = self._read(case)
        save_prediction(path, self._strips(volume, case), case, self.spacing, scores, self.values)
        return volume

    def labels(self, case: Case, open_scores: Scores | None = None) -> np.ndarray:
        """Labels (X, Y, Z) of a case in the axes of its first file; its probabilities as `to_original` gives them.

        Raises UserError.
        """
        return with_values(
            to_original(self._strips(self._read(case), case), case, self.spacing, open_scores), self.values
        )

    def _read(self, case: Case) -> Volume:
        volume = read_volume(case._replace(label=None), 0, None, self.spacing, self.rules)
        found, wanted = len(volume.image), len(self.intensity)
        if found != wanted:
            raise UserError(f"{case.id}: {case.images[0]} has {found} channels; this network takes {wanted}")
        return volume

    def _strips(self, volume: Volume, case: Case) -> Iterator[ProbabilityBlock]:
        return self.predictor.strips(torch.from_numpy(normalise(volume.image, self.intensity)), case.named)


def save_prediction(
    path: Path,
    strips: Iterable[ProbabilityBlock],
    case: Case,
    spacing: Sequence[float] | None,
    scores: Path | None = None,
    values: Sequence[int] | None = None,
    files: ImageFiles | None = None,
) -> None:
    """Write the label map of a case, and its probabilities to `scores`, on its file's grid. Raises UserError, OSError.

    `values` are those of the classes; None: their numbers. Probabilities are float32 (X, Y, Z, K), in a NIfTI file that
    is not compressed: programs can read it in parts. `files`: those that have been opened, whose headers are not read
    again.
    """
    like = (files or ImageFiles()).header(case.id, case.images[0])
    with saving_scores(scores, like) if scores else nullcontext() as open_scores:
        labels = to_original(strips, case, spacing, open_scores, like)
    save_labels(path, with_values(labels, values), like)  # last: where a label map is, all of the case is


def open_segmenter(
    path: Path,
    device: str,
    mirror: bool | None = None,
    model_path: str | None = None,
    batch: int | str | None = None,
    overlap: float | str | None = None,
) -> Segmenter:
    """Return the segmenter of a run's or a published checkpoint. Raises CheckpointError, or UserError (device)."""
    return segmenter(parse(checkpoint.load_checkpoint(path), path, model_path), device, mirror, batch, overlap)


def segmenter(
    found: TrainedNetworks,
    device: str,
    mirror: bool | None,
    batch: int | str | None = None,
    overlap: float | str | None = None,
) -> Segmenter:
    """Return the segmenter of these networks; `mirror`, `batch`, `overlap` None: as validated.

    `batch` is of windows. Where it is auto and a GPU has not enough free, there are fewer at once. Raises as
    `open_segmenter`, and UserError for a value out of the range that the option has.
    """
    # A prediction has no backward pass, which alone is not deterministic on a GPU, and is not compiled.
    config = dataclasses.replace(found.config, device=device, deterministic=False, compile=False)
    if mirror is not None:
        config.inference = dataclasses.replace(config.inference, mirror=mirror)
    if batch is not None:
        config.inference = dataclasses.replace(config.inference, batch=batch)
    if overlap is not None:
        if isinstance(overlap, bool) or not isinstance(overlap, (int, float)):
            raise UserError(f"inference.overlap={overlap}: give a number from 0 to 0.9, a share of the window")
        config.inference = dataclasses.replace(config.inference, overlap=overlap)
    rules.check(config, here=False)  # the device's name; and not every network can be mirrored
    if mirror and not config.data.augment.mirror:
        print("warning: mirroring does nothing: this network has data.augment.mirror=[]", file=sys.stderr)
    if overlap is not None and config.model.padding == "valid":
        what = "this network has model.padding=valid, whose tiles do not overlap"
        print(f"warning: overlap does nothing: {what}", file=sys.stderr)
    where = build.device(config)
    policy = build.policy(config, where.type, ())
    warning = known_bad.warning(policy.dtype) if where.type == "cuda" else None
    if warning is not None:
        print(f"warning: {warning}", file=sys.stderr)
    loaded = [policy.formatted(network) for network in networks(found, where)]
    predictor = build.predictor(config, loaded, config.model, policy)
    if where.type == "cuda":
        free = free_bytes(where) if config.inference.batch == "auto" else math.inf
        predictor = fitted(predictor, free)
    by_channel = config.data.format == "nnunet"
    return Segmenter(
        predictor,
        found.intensity,
        config.data.spacing,
        ValidationRules.of(config.data),
        by_channel,
        written_values(config.data, len(found.classes)),
        written_words(config.data, found.classes),
    )


def accepted_contradictions(case: Case) -> list[str]:
    """Contradictions in a case that a checkpoint's options accept, as they did in training, and lengths not in mm."""
    opened = {path: open_image(case.id, path) for path in case.images}
    return [str(error) for error in (*contradictions(case, opened), *foreign_units(case, opened))]


def files_in(inputs: Sequence[Path]) -> tuple[list[Path], list[str]]:
    """Files, and the NIfTI files of folders; and a line for each input that is neither. UserError if none is."""
    found, problems = list[Path](), list[str]()
    for path in inputs:
        try:
            if path.is_file():
                found.append(path)
            elif path.is_dir():
                found += volumes_in(path)
            else:
                problems.append(f"{path}: {'neither file nor folder' if path.exists() else 'no such file or folder'}")
        except OSError as error:
            problems.append(f"{path}: cannot be read ({error.strerror})")
    if not found and not problems:
        raise UserError(f"no .nii or .nii.gz file in {', '.join(map(str, inputs))}")
    return found, problems


def find_cases(
    inputs: Sequence[Path], count: int, by_channel: bool = False, shard: tuple[int, int] = (0, 1)
) -> tuple[list[Case], list[str]]:
    """Files, and the NIfTI files of folders, as cases of `count` channels (`_0000`, `_0001` ..), and all problems.

    Of a `shard` (i, n) every n-th case by name, from the i-th on: the n shards are disjoint and hold all cases.
    """
    grouped: dict[str, list[Path]] = {}
    found, problems = files_in(inputs)
    for file in found:
        name = stem(file)
        if count == 1:
            name = name.removesuffix("_0000") if by_channel else name
        elif not _is_whole(file, count):
            name = without_channel(name)
        grouped.setdefault(name, []).append(file)
    index, shards = shard
    cases = []
    for name in sorted(grouped)[index::shards]:
        try:
            cases.append(_case(name, grouped[name], count))
        except UserError as error:
            problems.append(str(error))
    return cases, problems


def _case(name: str, files: Sequence[Path], count: int) -> Case:
    """Files of one name as a case. Raises UserError."""
    listed = ", ".join(map(str, files))
    refuse_long(files[0].parent, name)
    if len(files) > count > 1 and len({file.name for file in files}) == len(files):
        raise UserError(f"{name}: has {len(files)} files ({listed}); this network takes {count} channels")
    if len(files) > count:
        raise UserError(f"{name}: {len(files)} files of one name ({listed}); their label maps would be one file")
    return Case(name, in_order(name, files, count), None)


def _is_whole(file: Path, count: int) -> bool:
    """Whether a file holds all the channels of a case; one that cannot be read is reported later."""
    try:
        return channels(open_image(stem(file), file)) == count
    except UserError:
        return False

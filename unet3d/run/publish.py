"""Checkpoints for others: published without paths, scored on labelled cases."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import shorten
from typing import Any

from unet3d.base.errors import CheckpointError, UserError, not_saved
from unet3d.base.files import write_text
from unet3d.config import compose
from unet3d.config.rules import label_sources
from unet3d.config.schema import Config, Data
from unet3d.data.cases import Case, DatasetInfo, read_dataset, split
from unet3d.data.image_files import ImageFiles
from unet3d.data.labels import as_option
from unet3d.data.nifti import ValidationRules
from unet3d.data.preprocess import CaseReader
from unet3d.data.restore import ArgmaxCollector, to_original
from unet3d.data.validate import sound_headers
from unet3d.data.volume import is_resampled
from unet3d.memory.simulate import refuse_large_window
from unet3d.report.loggers import warn
from unet3d.report.report import OWN_GRIDS, SCORES_TITLE
from unet3d.run import predict
from unet3d.run.predict import TrainedNetworks, split_of
from unet3d.run.validation import evaluate, score_on_own_grid
from unet3d.training import checkpoint, metrics

KEPT = ("model_options", "classes", "channels", "intensity", "step")  # of a checkpoint, besides weights and config
# How a network sees images.
SAME = ("model.", "inference.overlap", "inference.mirror", "amp", "data.patch", "data.spacing", "data.augment.mirror")
PATHS = ("root", "split", "images", "labels", "cache_root")  # of this machine's data
SCORES = "scores.csv"
Opened = tuple[TrainedNetworks, dict[str, Any]]


def publish(paths: Sequence[Path], out: Path, model_path: str | None = None) -> None:
    """Write the networks of these checkpoints to one file without any path; several predict their mean logits."""
    if out.exists():
        raise UserError(f"{out}: is there already; give another file")
    opened = [_open(path, model_path) for path in paths]
    _, kept = opened[0]
    for one in opened:
        _refuse_different(one, opened[0])
        predict.segmenter(one[0], "cpu", None)  # so that what is published can be used
    own, *others = [weights for found, _ in opened for weights in found.weights]
    splits = [part | {"split": "a file"} if "split" in part else part for found, _ in opened for part in found.splits]
    checkpoint.save_checkpoint(out, kept | {"model": own, "average": {}, "others": others, "splits": splits})


def _open(path: Path, model_path: str | None) -> Opened:
    """The networks of a checkpoint, and what else of it is published."""
    state = checkpoint.load_checkpoint(path)
    found = predict.parse(state, path, model_path)
    if missing := [name for name in KEPT if name not in state]:
        raise CheckpointError(f"{path}: not a checkpoint of a run (no {', '.join(missing)})")
    config = {
        name: value for name, value in state["config"].items() if name not in ("wandb", "init", "resume", "sweep")
    }
    config["data"] = {name: value for name, value in config.get("data", {}).items() if name not in PATHS}
    return found, {name: state[name] for name in KEPT} | {"config": config}


def _refuse_different(one: Opened, first: Opened) -> None:
    """Raise UserError where a network would see an image in another way than the first."""
    wrong = [name for name in ("classes", "channels", "intensity") if one[1][name] != first[1][name]]
    mine, theirs = (compose.flat(compose.to_plain(found.config), ".") for found, _ in (one, first))
    wrong += [name for name in mine if name.startswith(SAME) and mine[name] != theirs[name]]
    if wrong:
        raise UserError(f"{one[0].path}: differs from {first[0].path} in {', '.join(wrong)}; publish it alone")


def score(path: Path, config: Config, out: Path, model_path: str | None = None) -> str:
    """Score the cases that `config` holds out, predicted as the checkpoint says, in out/scores.csv. Returns its title.

    On the files' own grids, and where that is another, on the network's grid too.
    """
    if config.data.semi:
        raise UserError("data.semi holds out slices of the training cases; the run's own scores.csv has their scores")
    if (out / SCORES).exists():
        raise UserError(f"{out / SCORES}: is there already; give another folder")
    dataset = read_dataset(config.data)
    _, held_out = split(dataset, config.data)
    state = checkpoint.load_checkpoint(path)
    found = predict.parse(state, path, model_path)
    _refuse_misfit(found, dataset)
    sound_headers(dataset, held_out, config.data, ImageFiles())
    _warn_of_seen_cases(found, state.get("fingerprint"), held_out, config.data)
    segmenter = predict.segmenter(found, config.device, mirror=None)
    refuse_large_window(segmenter.predictor, path)
    rules = ValidationRules.of(config.data)
    reader = CaseReader(dataset, segmenter.spacing, segmenter.intensity, cache=None, rules=rules)
    own = list[metrics.CaseScore]()

    def keep(case: Case, strips: ArgmaxCollector) -> None:
        own.append(score_on_own_grid(case, to_original(strips, case, segmenter.spacing), dataset))

    has_own_grids = any(is_resampled(case, segmenter.spacing) for case in held_out)
    also = keep if has_own_grids else None
    try:
        out.mkdir(parents=True, exist_ok=True)
        scores = evaluate(segmenter.predictor, held_out, reader, len(dataset.classes), True, "scoring", also)
        text = metrics.csv_text([*scores], dataset.classes)
        write_text(out / SCORES, metrics.both_csv_text(own, dataset.classes, text) if has_own_grids else text)
    except OSError as error:
        raise not_saved(out / SCORES, error) from error
    grid = f", {OWN_GRIDS}" if has_own_grids else ""
    if len(found.weights) > 1:
        return f"{SCORES_TITLE}, {path} (mean of {len(found.weights)} networks){grid}"
    average = ", average of the weights" if state["average"] else ""
    return f"{SCORES_TITLE}, {path} (step {state.get('step', 'unknown')}{average}){grid}"


def _refuse_misfit(found: TrainedNetworks, dataset: DatasetInfo) -> None:
    if (len(found.channels), found.classes) != (len(dataset.channels), dataset.classes):
        own = f"{len(found.channels)} channels and the classes {', '.join(found.classes)}"
        given = f"{len(dataset.channels)} and {', '.join(dataset.classes)}"
        learned = found.config.data.label_map
        hint = f"; it learned with {as_option(label_sources(learned))}" if learned is not None else ""
        raise UserError(f"{found.path}: a network of {own}; the data has {given}{hint}")
    if len(dataset.channels) > 1 and found.channels != dataset.channels:  # each layout has its own names for channels
        own, given = (", ".join(one.channels) for one in (found, dataset))
        warn(f"{found.path}: its channels are {own}, those of the data {given}; they are taken in this order")


def _warn_of_seen_cases(found: TrainedNetworks, fingerprint: Any, held_out: Sequence[Case], options: Data) -> None:
    """Warn where a scored case was trained on, by each network's split and by the cases of a run's own checkpoint."""
    if others := sum(split != split_of(options) for split in found.splits):
        trained = f"{others} of {len(found.splits)} networks were trained with another split, or with an unknown one"
        warn(f"{found.path}: {trained}; they may have seen the cases that are scored")
    learned = fingerprint.get("training cases") if isinstance(fingerprint, Mapping) else None
    if seen := [case.id for case in held_out if isinstance(learned, list) and case.id in learned]:
        names = shorten(", ".join(seen), 200, placeholder=" ...")
        warn(f"{found.path}: learned from {len(seen)} of the {len(held_out)} cases that are scored: {names}")

"""A snapshot scored on labelled cases that its training did not see."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unet3d import apply, metrics, snapshot
from unet3d.config import Config, Data
from unet3d.data.cases import Task, read_task, split
from unet3d.data.reader import Reader
from unet3d.data.voxels import Leniency
from unet3d.errors import UserError
from unet3d.evaluation import evaluate
from unet3d.memory.validation import refuse_large_window

SPLIT = ("val_fraction", "folds", "fold")  # what a published snapshot tells of its split


def score(path: Path, config: Config, out: Path) -> None:
    """Write out/scores.csv: the cases that `config` holds out, predicted by the snapshot at `path`.

    Of the config, the data and the device count; how an image is prepared is the snapshot's. Warns where that was
    trained with another split. Raises SnapshotError, UserError.
    """
    if config.data.semi:
        raise UserError("data.semi holds out slices of the cases learned from; a run's own scores.csv tells of them")
    task = read_task(config.data)
    state = snapshot.load(path)
    segmenter = apply.segmenter(state, path, config.device, mirror=None)
    _refuse_misfit(segmenter, task, path)
    _warn_of_another_split(state, config.data, path)
    refuse_large_window(segmenter.predictor, path)
    _, held_out = split(task, config.data)
    reader = Reader(task, segmenter.spacing, segmenter.intensity, cache=None, leniency=Leniency.of(config.data))
    scores = evaluate(segmenter.predictor, map(reader, held_out), len(task.classes), hd95=True)
    out.mkdir(parents=True, exist_ok=True)
    metrics.write_csv(out / "scores.csv", scores, task.classes)


def _refuse_misfit(segmenter: apply.Segmenter, task: Task, path: Path) -> None:
    channels, classes = len(segmenter.intensity), segmenter.predictor.options.classes
    if (channels, classes) != (len(task.channels), len(task.classes)):
        raise UserError(
            f"{path}: a network of {channels} channels and {classes} classes; the data has {len(task.channels)} and "
            f"{len(task.classes)}"
        )


def _warn_of_another_split(state: Mapping[str, Any], options: Data, path: Path) -> None:
    trained = state["config"]["data"]
    if wrong := [f"data.{name}={trained[name]}" for name in SPLIT if trained[name] != getattr(options, name)]:
        print(f"warning: {path} was trained with {', '.join(wrong)}: it may have seen these cases", file=sys.stderr)

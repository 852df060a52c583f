"""Snapshots for others: published without paths, scored on labelled cases."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import shorten
from typing import Any

from unet3d import build, compose
from unet3d.config import Config, Data
from unet3d.data.cases import Case, DatasetInfo, read_dataset, split
from unet3d.data.nifti import ValidationRules
from unet3d.data.preprocess import CaseReader
from unet3d.errors import NotSaved, SnapshotError, UserError
from unet3d.files import write_text
from unet3d.memory.simulate import refuse_large_window
from unet3d.report.report import SCORES_TITLE
from unet3d.run import predict
from unet3d.run.predict import Split, TrainedNetworks, Weights, split_of
from unet3d.run.validate import evaluate
from unet3d.train import checkpoint, metrics

TOLD = ("model_options", "classes", "channels", "intensity", "step")


SAME = ("model", "inference", "amp", "amp_dtype", "data.patch", "data.spacing", "data.augment.mirror")


HERE = ("root", "split", "images", "labels")  # of this machine's data


def publish(paths: Sequence[Path], out: Path, model_path: str | None = None) -> None:
    """Write the networks of these snapshots to one file: no optimizer, no random state, no path of this machine.

    Several networks, of runs that differ in their seed, say, predict as one: their logits are averaged. Raises
    SnapshotError, and UserError where `out` is there already or the networks would see an image in different ways.
    """
    if out.exists():
        raise UserError(f"{out}: is there already; give another file")
    first: TrainedNetworks | None = None
    told: dict[str, Any] = {}
    weights: list[Weights] = []
    splits: list[Split] = []
    for path in paths:
        state = checkpoint.load_snapshot(path)
        found = predict.parse(state, path, model_path)
        if first is None:
            first, told = found, _told(state, path)
        else:
            _refuse_different(found, _told(state, path), first, told)
        predict.segmenter(found, "cpu", None)  # so that what is published can be used
        weights += found.weights
        splits += map(_without_path, found.splits)
    own, *others = weights
    checkpoint.save_snapshot(out, told | {"model": own, "average": {}, "others": others, "splits": splits})


def _told(state: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """What is kept of a snapshot besides its weights."""
    missing = [name for name in TOLD if name not in state]
    if missing:
        raise SnapshotError(f"{path}: not a snapshot of a run (no {', '.join(missing)})")
    config = _without(state["config"], "wandb", "resume", "sweep")
    data = _without(config.get("data", {}), *HERE)
    return {name: state[name] for name in TOLD} | {"config": config | {"data": data}}


def _refuse_different(
    found: TrainedNetworks, told: dict[str, Any], first: TrainedNetworks, first_told: dict[str, Any]
) -> None:
    """Raise UserError where a network would see an image in another way than the first."""
    wrong = [name for name in ("classes", "channels", "intensity") if told[name] != first_told[name]]
    mine, theirs = compose.to_plain(found.config), compose.to_plain(first.config)
    wrong += [name for name in SAME if _at(mine, name) != _at(theirs, name)]
    if wrong:
        raise UserError(f"{found.path}: differs from {first.path} in {', '.join(wrong)}; publish it alone")


def _at(values: Any, name: str) -> Any:
    for key in name.split("."):
        values = values[key]
    return values


def _without_path(split: Split) -> Split:
    """The same, but that of a file only remains that there was one."""
    return split | {"split": "a file"} if "split" in split else split


def _without(options: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in names}


SCORES = "scores.csv"


def score(path: Path, config: Config, out: Path, model_path: str | None = None) -> str:
    """Write out/scores.csv: the cases that `config` holds out, predicted by the snapshot at `path`. Returns its title.

    Of the config, the data and the device count; how an image is prepared is the snapshot's. Warns where a network was
    trained with another split. Raises SnapshotError, UserError.
    """
    if config.data.semi:
        raise UserError("data.semi holds out slices of the cases learned from; a run's own scores.csv tells of them")
    if (out / SCORES).exists():
        raise UserError(f"{out / SCORES}: is there already; give another folder")
    task = read_dataset(config.data)
    _, held_out = split(task, config.data)
    state = checkpoint.load_snapshot(path)
    found = predict.parse(state, path, model_path)
    _refuse_misfit(found, task)
    build.refuse_problems(task, held_out, config.data)
    _warn_of_another_split(found, config.data)
    _warn_of_learned(path, state, held_out)
    segmenter = predict.segmenter(found, config.device, mirror=None)
    refuse_large_window(segmenter.predictor, path)
    reader = CaseReader(
        task, segmenter.spacing, segmenter.intensity, cache=None, leniency=ValidationRules.of(config.data)
    )
    try:
        out.mkdir(parents=True, exist_ok=True)
        scores = evaluate(segmenter.predictor, held_out, reader, len(task.classes), hd95=True, what="scoring")
        write_text(out / SCORES, metrics.csv_text(scores, task.classes))
    except OSError as error:
        raise NotSaved(f"{out / SCORES}: not saved ({error.strerror})") from error
    return f"{SCORES_TITLE}, {_named(found, state)}"


def _named(found: TrainedNetworks, state: Mapping[str, Any]) -> str:
    """The snapshot, and which weights are in it."""
    if len(found.weights) > 1:
        return f"{found.path} (mean of {len(found.weights)} networks)"
    return f"{found.path} (step {state.get('step', 'unknown')}{', average of the weights' * bool(state['average'])})"


def _refuse_misfit(found: TrainedNetworks, task: DatasetInfo) -> None:
    if (len(found.channels), found.classes) != (len(task.channels), task.classes):
        raise UserError(
            f"{found.path}: a network of {len(found.channels)} channels and the classes {', '.join(found.classes)}; "
            f"the data has {len(task.channels)} and {', '.join(task.classes)}"
        )
    if len(task.channels) > 1 and found.channels != task.channels:  # layouts name channels in ways of their own
        print(
            f"warning: {found.path}: its channels are {', '.join(found.channels)}, those of the data "
            f"{', '.join(task.channels)}; they are taken in this order",
            file=sys.stderr,
        )


def _warn_of_learned(path: Path, state: Mapping[str, Any], held_out: Sequence[Case]) -> None:
    """A run's own snapshot says what it learned from: of fewer or more cases, the same rule keeps others aside."""
    grounds = state.get("grounds")
    learned = grounds.get("training cases") if isinstance(grounds, Mapping) else None
    if seen := [case.id for case in held_out if isinstance(learned, list) and case.id in learned]:
        print(
            f"warning: {path}: learned from {len(seen)} of the {len(held_out)} cases that are scored: "
            f"{shorten(', '.join(seen), 200, placeholder=' ...')}",
            file=sys.stderr,
        )


def _warn_of_another_split(found: TrainedNetworks, options: Data) -> None:
    others = sum(split != split_of(options) for split in found.splits)
    if others:
        print(
            f"warning: {found.path}: {others} of {len(found.splits)} networks were trained with another split, "
            "or with one that is not told; they may have seen the cases that are scored",
            file=sys.stderr,
        )

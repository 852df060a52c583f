"""A snapshot scored on labelled cases, best on such as its training did not see."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import shorten
from typing import Any

from unet3d import apply, build, metrics, record, snapshot, trained
from unet3d.config import Config, Data
from unet3d.data.cases import Case, Task, read_task, split
from unet3d.data.reader import Reader
from unet3d.data.voxels import Leniency
from unet3d.errors import NotSaved, UserError
from unet3d.evaluation import evaluate
from unet3d.memory.validation import refuse_large_window
from unet3d.scored import TITLE
from unet3d.trained import Trained, split_of

SCORES = "scores.csv"


def score(path: Path, config: Config, out: Path) -> str:
    """Write out/scores.csv: the cases that `config` holds out, predicted by the snapshot at `path`. Returns its title.

    Of the config, the data and the device count; how an image is prepared is the snapshot's. Warns where a network was
    trained with another split. Raises SnapshotError, UserError.
    """
    if config.data.semi:
        raise UserError("data.semi holds out slices of the cases learned from; a run's own scores.csv tells of them")
    if (out / SCORES).exists():
        raise UserError(f"{out / SCORES}: is there already; give another folder")
    task = read_task(config.data)
    _, held_out = split(task, config.data)
    state = snapshot.load(path)
    found = trained.parse(state, path)
    _refuse_misfit(found, task)
    build.refuse_problems(task, held_out, config.data)
    _warn_of_another_split(found, config.data)
    _warn_of_learned(path, state, held_out)
    segmenter = apply.segmenter(found, config.device, mirror=None)
    refuse_large_window(segmenter.predictor, path)
    reader = Reader(task, segmenter.spacing, segmenter.intensity, cache=None, leniency=Leniency.of(config.data))
    try:
        out.mkdir(parents=True, exist_ok=True)
        scores = evaluate(segmenter.predictor, held_out, reader, len(task.classes), hd95=True, what="scoring")
        record.write_text(out / SCORES, metrics.csv_text(scores, task.classes))
    except OSError as error:
        raise NotSaved(f"{out / SCORES}: not saved ({error.strerror})") from error
    return f"{TITLE}, {_named(found, state)}"


def _named(found: Trained, state: Mapping[str, Any]) -> str:
    """The snapshot, and which weights are in it."""
    if len(found.weights) > 1:
        return f"{found.path} (mean of {len(found.weights)} networks)"
    return f"{found.path} (step {state.get('step', 'unknown')}{', average of the weights' * bool(state['average'])})"


def _refuse_misfit(found: Trained, task: Task) -> None:
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


def _warn_of_another_split(found: Trained, options: Data) -> None:
    others = sum(split != split_of(options) for split in found.splits)
    if others:
        print(
            f"warning: {found.path}: {others} of {len(found.splits)} networks were trained with another split, "
            "or with one that is not told; they may have seen the cases that are scored",
            file=sys.stderr,
        )

"""Networks to give away: what prediction takes from snapshots, and no more."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from unet3d import apply, compose, snapshot, trained
from unet3d.errors import SnapshotError, UserError
from unet3d.trained import Split, Trained, Weights

TOLD = ("model_options", "classes", "channels", "intensity", "step")
SAME = ("model", "inference", "amp", "amp_dtype", "data.patch", "data.spacing", "data.augment.mirror")
HERE = ("root", "split", "images", "labels")  # of this machine's data


def publish(paths: Sequence[Path], out: Path) -> None:
    """Write the networks of these snapshots to one file: no optimizer, no random state, no path of this machine.

    Several networks, of runs that differ in their seed, say, predict as one: their logits are averaged. Raises
    SnapshotError, and UserError where `out` is there already or the networks would see an image in different ways.
    """
    if out.exists():
        raise UserError(f"{out}: is there already; give another file")
    first: Trained | None = None
    told: dict[str, Any] = {}
    weights: list[Weights] = []
    splits: list[Split] = []
    for path in paths:
        state = snapshot.load(path)
        found = trained.parse(state, path)
        if first is None:
            first, told = found, _told(state, path)
        else:
            _refuse_different(found, _told(state, path), first, told)
        apply.segmenter(found, "cpu", None)  # so that what is published can be used
        weights += found.weights
        splits += map(_without_path, found.splits)
    own, *others = weights
    snapshot.save(out, told | {"model": own, "average": {}, "others": others, "splits": splits})


def _told(state: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """What is kept of a snapshot besides its weights."""
    missing = [name for name in TOLD if name not in state]
    if missing:
        raise SnapshotError(f"{path}: not a snapshot of a run (no {', '.join(missing)})")
    config = _without(state["config"], "wandb", "resume", "sweep")
    data = _without(config.get("data", {}), *HERE)
    return {name: state[name] for name in TOLD} | {"config": config | {"data": data}}


def _refuse_different(found: Trained, told: dict[str, Any], first: Trained, first_told: dict[str, Any]) -> None:
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

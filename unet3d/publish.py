"""Networks to give away: what prediction takes from snapshots, and no more."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from unet3d import apply, snapshot
from unet3d.errors import UserError

DESCRIBED = ("model_options", "classes", "channels", "intensity")
HERE = ("root", "split", "images", "labels")  # of this machine's data


def publish(paths: Sequence[Path], out: Path) -> None:
    """Write the networks of these snapshots to one file: no optimizer, no random state, no path of this machine.

    Several networks, of runs that differ in their seed or fold, predict as one: their logits are averaged. Raises
    SnapshotError, and UserError where `out` is there already or the networks do not take the same images.
    """
    if out.exists():
        raise UserError(f"{out}: is there already; give another file")
    states = [snapshot.load(path) for path in paths]
    for path, state in zip(paths, states, strict=True):
        apply.segmenter(state, path, "cpu", None)  # so that what is published can be used
        _refuse_different(state, path, states[0], paths[0])
    first, *others = (weights for state in states for weights in apply.weights_in(state))
    if len(others) >= apply.MOST_NETWORKS:
        raise UserError(f"one file holds at most {apply.MOST_NETWORKS} networks, here are {len(others) + 1}")
    told = _told(states[0]) | {"config": _config(states[0]), "step": states[0]["step"]}
    snapshot.save(out, told | {"model": first, "average": {}, "others": others})


def _told(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: state[name] for name in DESCRIBED}


def _config(state: Mapping[str, Any]) -> dict[str, Any]:
    data = _without(state["config"]["data"], *HERE)
    return _without(state["config"], "wandb", "resume", "sweep") | {"data": data}


def _refuse_different(state: Mapping[str, Any], path: Path, first: Mapping[str, Any], first_path: Path) -> None:
    """Raise UserError where a network would see an image in another way than the first."""
    described, other = _told(first), _told(state)
    for key in ("patch", "spacing"):
        described[f"data.{key}"], other[f"data.{key}"] = (one["config"]["data"][key] for one in (first, state))
    if wrong := [name for name, value in described.items() if other[name] != value]:
        raise UserError(f"{path}: differs from {first_path} in {', '.join(wrong)}; publish it alone")


def _without(options: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in names}

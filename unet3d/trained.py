"""What prediction takes from a snapshot, checked: it may come from a stranger."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from unet3d import build, compose, snapshot
from unet3d.config import Config, Data, Model
from unet3d.data import intensity
from unet3d.data.intensity import Intensity
from unet3d.errors import SnapshotError

Weights = dict[str, torch.Tensor]
Split = dict[str, Any]


@dataclass(frozen=True)
class Trained:
    """Networks of one kind, and how an image is prepared for them."""

    path: Path
    config: Config  # the model's options leave nothing open
    classes: tuple[str, ...]  # background first
    channels: tuple[str, ...]
    intensity: tuple[Intensity, ...]  # a rule for each channel
    weights: list[Weights]  # of each network: a run's snapshot holds one, a published one may hold several
    splits: list[Split]  # what was held out from each


def parse(state: Mapping[str, Any], path: Path) -> Trained:
    """What the snapshot at `path` holds. Raises SnapshotError for anything but plain values of the right types."""
    try:
        config = compose.from_plain(state["config"] | {"resume": None, "model": state["model_options"]})
        classes, channels = (tuple(map(_name, state[key])) for key in ("classes", "channels"))
        rules = tuple(intensity.checked(rule) for rule in state["intensity"])
        others = list(map(dict, state.get("others", [])))  # only what is published has these two
        weights = [dict(state["model"]) | dict(state["average"]), *others]
        splits = list(map(dict, state.get("splits", [split_of(config.data)])))
        sizes = len(classes), len(channels), len(rules), len(splits)
        if sizes != (config.model.classes, config.model.in_channels, config.model.in_channels, len(weights)):
            raise ValueError("its parts contradict each other")
        if not all(isinstance(name, str) for values in weights for name in values):
            raise ValueError("its weights are not named")
    except (KeyError, TypeError, ValueError) as error:
        raise SnapshotError(f"{path}: not a snapshot of a run ({error})") from error
    return Trained(path, config, classes, channels, rules, weights, splits)


def _name(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a name")
    return value


def split_of(options: Data) -> Split:
    """What a run with these options held out; of a list in a file, which."""
    if options.split is not None:
        found: Split = {"split": options.split}
    elif options.fold is not None:
        found = {"fold": options.fold, "folds": options.folds}
    else:
        found = {"val_fraction": options.val_fraction}
    return found | {"semi": options.semi}


def networks(trained: Trained, device: torch.device) -> list[build.UNet3D]:
    """The networks with their weights. Raises SnapshotError where these do not fit, before memory is taken."""
    _refuse_misfit(trained.config.model, trained.weights, trained.path)
    return [_network(trained.config.model, values, device) for values in trained.weights]


def _network(options: Model, weights: Weights, device: torch.device) -> build.UNet3D:
    network = build.model(options, seed=0)
    network.load_state_dict(weights)
    return network.to(device).eval()


def _refuse_misfit(options: Model, weights: Sequence[Weights], path: Path) -> None:
    try:
        with torch.device("meta"):
            network = build.model(options, seed=0)
    except (RuntimeError, TypeError, OverflowError) as error:
        raise SnapshotError(f"{path}: no network has these options ({error})") from error
    for values in weights:
        snapshot.refuse_misfit(network, values, path)
    # One storage may stand for many weights, or for many networks; each would take memory of its own.
    if sum(value.nbytes for values in weights for value in values.values()) > path.stat().st_size:
        raise SnapshotError(f"{path}: its weights are not all there: they are larger than the file")

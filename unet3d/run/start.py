"""init=net.pt: a run begins with the weights of another network, where names and shapes fit."""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from unet3d import build, compose
from unet3d.build import Data
from unet3d.config import Config, Model
from unet3d.data.cases import DatasetInfo, read_dataset
from unet3d.data.preprocess import Intensity
from unet3d.errors import UserError, escaped
from unet3d.report.loggers import warn
from unet3d.run import predict
from unet3d.run.predict import TrainedNetworks
from unet3d.train import checkpoint, optim

SHOWN = 6  # names of new tensors on a line; init.json has them all


class Start(NamedTuple):
    """What a network begins with. `config` names what `optim.init_lr` is for."""

    config: Config
    weights: dict[str, Tensor]  # that are loaded
    new: list[str]  # the network's other tensors

    def record(self) -> dict[str, Any]:
        """For init.json."""
        return {"init": self.config.init, "loaded": list(self.weights), "new": self.new}


def open_start(config: Config, options: Model, data: Data | None) -> Start:
    """Read the snapshot `config.init` for a network of these options, and print what of it is loaded and what is new.

    `data` None: nothing of it is read but names. Raises SnapshotError, UserError where nothing fits.
    """
    assert config.init is not None
    dataset = data.dataset if data is not None else read_dataset(config.data)
    found, outline = _read(Path(config.init), config.model.path), _outline(options)
    weights = checkpoint.fitting(outline, found.weights[0], found.path)
    is_other = found.classes != dataset.classes
    for name in heads(options) if is_other else ():
        weights.pop(name, None)
    _refuse_nothing(found, options, outline, weights)
    new = [name for name in outline.state_dict() if name not in weights]
    named = _with_names(config, [name for name, _ in outline.named_parameters()], weights)
    for line in _differences(found, config, options, dataset, data.read.intensity if data is not None else ()):
        warn(line)
    print(*map(escaped, _lines(found, named, weights, new, dataset.classes if is_other else ())), sep="\n", flush=True)
    return Start(named, weights, new)


def with_names(overrides: list[str]) -> list[str]:
    """A command line for `unet3d memory`, with the names that `optim.init_lr` is for. Raises UserError."""
    config = compose.compose(overrides)
    if config.init is None or config.optim.init_lr == 1 or config.optim.init_names is not None:
        return overrides
    names = open_start(config, build.outlined_options(config), None).config.optim.init_names
    return [*overrides, f"optim.init_names=[{','.join(names or [])}]"]


def heads(options: Model) -> list[str]:
    """The tensors that have a size for the number of classes: those of all heads."""
    assert options.classes is not None
    wider = _outline(dataclasses.replace(options, classes=options.classes + 1)).state_dict()
    return [name for name, value in _outline(options).state_dict().items() if value.shape != wider[name].shape]


def _read(path: Path, model_path: str | None) -> TrainedNetworks:
    """What the snapshot holds. Raises SnapshotError, UserError where it is of a network of another kind."""
    state = checkpoint.load_snapshot(path)
    options = state.get("model_options")
    theirs = options.get("path") if isinstance(options, dict) else model_path
    if theirs != model_path:
        kinds = [f"model.path={one}" if one else "the package's own U-Net" for one in (theirs, model_path)]
        raise UserError(f"init={path}: its network is {kinds[0]}, this run's {kinds[1]}; nothing of it can be used")
    return predict.parse(state, path, model_path)


def _outline(options: Model) -> nn.Module:
    with torch.device("meta"):
        return build.model(options, seed=0)


def _refuse_nothing(found: TrainedNetworks, options: Model, outline: nn.Module, weights: dict[str, Tensor]) -> None:
    """Raise UserError where no convolution fits: norms and biases alone are no start."""
    if not any(value.dim() > 1 for value in weights.values()):
        differences = "; ".join(_options(found.config.model, options)) or "other channels, classes or layers"
        raise UserError(f"init={found.path}: none of its weights fits this network ({differences})")


def _options(theirs: Model, own: Model) -> Iterator[str]:
    """The options in which two networks differ, besides channels and classes, which are those of the data."""
    for item in dataclasses.fields(Model):
        before, now = getattr(theirs, item.name), getattr(own, item.name)
        if before != now and item.name not in ("in_channels", "classes", "inplace"):
            yield f"model.{item.name} {before} there, {now} here"


def _with_names(config: Config, parameters: Sequence[str], weights: dict[str, Tensor]) -> Config:
    """The config with the names of what `optim.init_lr` is for. Raises UserError for names that do not suit."""
    factor, asked = config.optim.init_lr, config.optim.init_names
    if factor == 1:
        return config
    loaded = [name for name in parameters if name in weights]
    for start in asked or ():
        if not any(optim.is_named(name, [start]) for name in loaded):
            raise UserError(f"optim.init_names: init has loaded no {start}; name parts of what it has, as {loaded[0]}")
        if new := [n for n in parameters if n not in weights and optim.is_named(n, [start])]:
            raise UserError(f"optim.init_names: {new[0]} of {start} is new; name the parts that init has loaded")
    if factor == 0 and all(optim.is_named(name, asked or loaded) for name in parameters):
        raise UserError("optim.init_lr=0: all that the network has is loaded and frozen; give a factor above 0")
    return dataclasses.replace(config, optim=dataclasses.replace(config.optim, init_names=asked or loaded))


def _differences(
    found: TrainedNetworks, config: Config, options: Model, dataset: DatasetInfo, rules: Sequence[Intensity]
) -> Iterator[str]:
    """A line for each way in which the network has seen other images than it will."""
    if differing := list(_options(found.config.model, options)):
        yield f"init={found.path}: its network differs: {'; '.join(differing)}"
    words = []
    if rules and not _are_alike(found.intensity, rules):
        words.append(f"intensity {_kinds(found.intensity)} there, {_kinds(rules)} here")
    if (there := found.config.data.spacing) != config.data.spacing:
        words.append(f"data.spacing {there} mm there, {config.data.spacing} here")
    if len(found.channels) == len(dataset.channels) > 1 and found.channels != dataset.channels:
        words.append(f"channels {', '.join(found.channels)} there, {', '.join(dataset.channels)} here")
    if words:
        yield f"init={found.path}: it has learned from other images: {'; '.join(words)}"


def _are_alike(theirs: Sequence[Intensity], own: Sequence[Intensity]) -> bool:
    """Whether two data sets' intensities are scaled alike: two scales of CT at most half a standard deviation apart."""
    if [rule.kind for rule in theirs] != [rule.kind for rule in own]:
        return False
    return all(abs(a.mean - b.mean) <= min(a.std, b.std) / 2 for a, b in zip(theirs, own, strict=True))


def _kinds(rules: Sequence[Intensity]) -> str:
    return ", ".join(f"ct {rule.low:g} to {rule.high:g}" if rule.kind == "ct" else rule.kind for rule in rules)


def _lines(
    found: TrainedNetworks, config: Config, weights: dict[str, Tensor], new: list[str], classes: Sequence[str]
) -> Iterator[str]:
    """What is loaded and what is new; `classes` are the network's, where they are not those of the snapshot."""
    which = " (the first of its networks)" if len(found.weights) > 1 else ""
    more = f" and {len(new) - SHOWN} more" if len(new) > SHOWN else ""
    factor, names = config.optim.init_lr, config.optim.init_names
    rate = "" if factor == 1 else ", frozen" if factor == 0 else f", at {factor:g} times the rate"
    slow = sum(optim.is_named(name, names or ()) for name in weights)
    rate = rate if slow == len(weights) or not rate else f", {slow} of them{rate[1:]}"
    new_ones = f"new: {', '.join(new[:SHOWN])}{more}" if new else "nothing is new"
    total = len(weights) + len(new)
    yield f"init={found.path}{which}: {len(weights)} of {total} tensors loaded{rate}; {new_ones}"
    if classes:
        yield f"the classes are {', '.join(classes)}, there {', '.join(found.classes)}: heads are new"

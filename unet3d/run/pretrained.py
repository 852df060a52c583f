"""init=net.pt: a run begins with the weights of another network, where names and shapes fit."""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from unet3d import build
from unet3d.base.errors import UserError, escaped
from unet3d.config import compose
from unet3d.config.schema import Config, Model
from unet3d.data.cases import DatasetInfo, read_dataset
from unet3d.data.intensity import Intensity
from unet3d.data.prepare import PreparedData
from unet3d.model import geometry
from unet3d.report.loggers import warn
from unet3d.run import predict
from unet3d.run.predict import TrainedNetworks
from unet3d.training import checkpoint, optim

SHOWN = 6  # names of new tensors on a line; init.json has them all


class Start(NamedTuple):
    """What a network begins with. `config` names what `optim.init_lr` is for."""

    config: Config
    weights: dict[str, Tensor]  # that are loaded
    new: list[str]  # the network's other tensors, but those of `rows`
    rows: dict[str, dict[int, Tensor]]  # of heads, by class, where the checkpoint has other classes

    def load(self, model: nn.Module) -> None:
        """Put the weights into a network; what is new stays as it is."""
        model.load_state_dict(self.weights, strict=False)
        own = model.state_dict()
        for name, rows in self.rows.items():
            for label, row in rows.items():
                own[name][label].copy_(row)

    def record(self) -> dict[str, Any]:
        """For init.json."""
        by_class = {name: sorted(rows) for name, rows in self.rows.items()}
        return {"init": self.config.init, "loaded": list(self.weights), "by class": by_class, "new": self.new}


def load_pretrained(config: Config, options: Model, data: PreparedData | None) -> Start:
    """Read the checkpoint `config.init` for a network of these options, and print what of it is loaded and what is new.

    `data` None: nothing of it is read but names. Raises CheckpointError, UserError where nothing fits.
    """
    assert config.init is not None
    dataset = data.dataset if data is not None else read_dataset(config.data)
    found, outline = _read(Path(config.init), config.model.path), _outline(options)
    weights = checkpoint.fitting(outline, found.weights[0], found.path)
    rows, sources = dict[str, dict[int, Tensor]](), {}
    if found.classes != dataset.classes:
        sources = class_sources(found.classes, dataset.classes)
        rows = _rows(found, outline.state_dict(), heads(options), sources)
        weights = {name: value for name, value in weights.items() if name not in heads(options)}
    _require_any_match(found, options, outline, weights)
    new = [name for name in outline.state_dict() if name not in weights.keys() | rows.keys()]
    named = _with_names(config, [name for name, _ in outline.named_parameters()], weights)
    for line in _differences(found, config, options, dataset, data.read.intensity if data is not None else ()):
        warn(line)
    start = Start(named, weights, new, rows)
    print(*map(escaped, _lines(start, found, dataset.classes, sources)), sep="\n", flush=True)
    return start


def with_names(overrides: Sequence[str]) -> Sequence[str]:
    """A command line for `unet3d memory`, with the names that `optim.init_lr` is for. Raises UserError."""
    config = compose.compose(overrides)
    if config.init is None or config.optim.init_lr == 1 or config.optim.init_names is not None:
        return overrides
    names = load_pretrained(config, build.model_config_from_headers(config), None).config.optim.init_names
    return [*overrides, f"optim.init_names=[{','.join(names or [])}]"]


def heads(options: Model) -> list[str]:
    """The tensors that have a size for the number of classes: those of all heads."""
    assert options.classes is not None
    wider = _outline(dataclasses.replace(options, classes=options.classes + 1)).state_dict()
    return [name for name, value in _outline(options).state_dict().items() if value.shape != wider[name].shape]


def class_sources(theirs: Sequence[str], own: Sequence[str]) -> dict[int, list[int]]:
    """The checkpoint's classes that a class begins with: that of the same name, or the parts of a merged one.

    {} where no class but the background has any.
    """
    labels, found = {name: label for label, name in enumerate(theirs) if label}, {0: [0]}
    for label, name in enumerate(own[1:], start=1):
        parts = [name] if name in labels else name.split("+")
        if all(part in labels for part in parts):
            found[label] = [labels[part] for part in parts]
    return found if len(found) > 1 else {}


def _rows(
    found: TrainedNetworks, own: dict[str, Tensor], names: Sequence[str], sources: dict[int, list[int]]
) -> dict[str, dict[int, Tensor]]:
    """Of the heads of these names, the row of each class that has a source: of a merged class the mean of its parts'.

    Raises CheckpointError for numbers that are not finite.
    """
    fits = {}
    for name in names if sources else ():
        theirs = found.weights[0].get(name)
        shape = (len(found.classes), *own[name].shape[1:])
        if theirs is not None and (theirs.shape, theirs.dtype) == (shape, own[name].dtype):
            fits[name] = theirs
    checkpoint.refuse_non_finite(fits, found.path)
    return {name: {new: value[olds].mean(0) for new, olds in sources.items()} for name, value in fits.items()}


def _read(path: Path, model_path: str | None) -> TrainedNetworks:
    """What the checkpoint holds. Raises CheckpointError, UserError where it is of a network of another kind."""
    state = checkpoint.load_checkpoint(path)
    options = state.get("model_options")
    theirs = options.get("path") if isinstance(options, dict) else model_path
    if theirs != model_path:
        kinds = [f"model.path={one}" if one else "the package's own U-Net" for one in (theirs, model_path)]
        raise UserError(f"init={path}: its network is {kinds[0]}, this run's {kinds[1]}; nothing of it can be used")
    return predict.parse(state, path, model_path)


def _outline(options: Model) -> nn.Module:
    with torch.device("meta"):
        return build.model(options, seed=0)


def _require_any_match(found: TrainedNetworks, options: Model, outline: nn.Module, weights: dict[str, Tensor]) -> None:
    """Raise UserError where no convolution fits: norms and biases alone are no start."""
    if not any(value.dim() > 1 for value in weights.values()):
        differences = "; ".join(_options(found.config.model, options)) or "other channels, classes or layers"
        raise UserError(f"init={found.path}: none of its weights fits this network ({differences})")


def _options(theirs: Model, own: Model) -> Iterator[str]:
    """The options in which two networks differ, besides channels and classes, which are those of the data."""
    sizes = {"kernels": geometry.kernels, "strides": geometry.strides}  # may be written in several ways
    for item in dataclasses.fields(Model):
        before, now = getattr(theirs, item.name), getattr(own, item.name)
        if item.name in sizes and "auto" not in (before, now) and len(theirs.features) == len(own.features):
            before, now = sizes[item.name](theirs), sizes[item.name](own)
        if before != now and item.name not in ("in_channels", "classes", "inplace"):
            yield f"model.{item.name} {getattr(theirs, item.name)} there, {getattr(own, item.name)} here"


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
    start: Start, found: TrainedNetworks, classes: Sequence[str], sources: dict[int, list[int]]
) -> Iterator[str]:
    """What is loaded, what is new, and what the heads begin with where the classes differ."""
    weights, new = start.weights, start.new
    which = " (the first of its networks)" if len(found.weights) > 1 else ""
    more = f" and {len(new) - SHOWN} more" if len(new) > SHOWN else ""
    by_class = f", {len(start.rows)} by class" if start.rows else ""
    new_ones = f"new: {', '.join(new[:SHOWN])}{more}" if new else "nothing is new"
    total = len(weights) + len(start.rows) + len(new)
    yield f"init={found.path}{which}: {len(weights)} of {total} tensors loaded{_rate(start)}{by_class}; {new_ones}"
    if found.classes != tuple(classes):
        words = [
            f"{classes[label]} from {' and '.join(found.classes[old] for old in olds)}"
            for label, olds in sources.items()
        ]
        absent = [name for label, name in enumerate(classes) if label not in sources]
        words += [f"{', '.join(absent)} new"] * bool(absent and sources)
        heads_ = "; ".join(words) if start.rows else f"new, of {', '.join(classes)}, there {', '.join(found.classes)}"
        yield f"heads, as the classes differ: {heads_}"


def _rate(start: Start) -> str:
    """In words, the rate of what is loaded, and of how much of it."""
    factor, names = start.config.optim.init_lr, start.config.optim.init_names or ()
    if factor == 1:
        return ""
    word = "frozen" if factor == 0 else f"at {factor:g} times the rate"
    slow = sum(optim.is_named(name, names) for name in start.weights)
    return f", {word}" if slow == len(start.weights) else f", {slow} of them {word}"

"""init=net.pt: a run begins with the weights of another network, where names and shapes fit."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from unet3d import build
from unet3d.base.errors import UserError, escaped, warn
from unet3d.config import compose
from unet3d.config.schema import Config, Model, options_with
from unet3d.data.cases import DatasetInfo, read_dataset
from unet3d.data.intensity import Intensity
from unet3d.data.prepare import PreparedData
from unet3d.model import geometry
from unet3d.run.checkpoint import TrainedNetworks, fitting, load_checkpoint, networks_of, refuse_non_finite
from unet3d.training import optim

NAMES_SHOWN = 6  # New tensors on a line; init.json has them all.
HeadRows = dict[str, dict[int, Tensor]]  # Weights of one class by a head's name and the class's number.
ClassSources = dict[int, list[int]]  # A class begins with the mean of these classes of the checkpoint.


class PretrainedWeights(NamedTuple):
    """The tensors that a network gets from a checkpoint; `config` names the parameters that `optim.init_lr` is for."""

    config: Config
    weights: dict[str, Tensor]
    head_rows: HeadRows  # Rows of heads, where the checkpoint has other classes.
    new: list[str]  # the network's other tensors

    def load(self, model: nn.Module) -> None:
        """Put the weights into a network; what is new is left alone."""
        model.load_state_dict(self.weights, strict=False)
        state = model.state_dict()
        for name, rows in self.head_rows.items():
            for label, row in rows.items():
                state[name][label].copy_(row)

    def record(self) -> dict[str, Any]:
        """Return the content of init.json."""
        by_class = {name: sorted(rows) for name, rows in self.head_rows.items()}
        return {"init": self.config.init, "loaded": list(self.weights), "by class": by_class, "new": self.new}


def load_pretrained(config: Config, model_config: Model, data: PreparedData | None) -> PretrainedWeights:
    """Read the checkpoint `config.init` for such a network, and print what of it is loaded and what is new.

    `data` None: only the names of classes and channels are read of it. Raises CheckpointError, UserError where nothing
    fits.
    """
    assert config.init is not None
    path = Path(config.init)
    dataset = data.dataset if data is not None else read_dataset(config.data)
    trained = networks_of(path, load_checkpoint(path))
    paths = (trained.config.model.path, config.model.path)
    if paths[0] != paths[1]:
        its, own = [f"model.path={of}" if of else "the package's own U-Net" for of in paths]
        raise UserError(f"init={path}: its network is {its}, this run's {own}; nothing of it can be used")
    outline = _outline(model_config)
    weights = fitting(outline, trained.weights[0], path)
    head_rows: HeadRows = {}
    origins = ""
    if trained.classes != dataset.classes or (trained.regions is None) != (dataset.regions is None):
        head_names = heads(model_config)
        weights = {name: value for name, value in weights.items() if name not in head_names}
        head_rows, origins = _head_rows(trained, dataset, outline.state_dict(), head_names)
    if not any(value.dim() > 1 for value in weights.values()):  # norms and biases alone are not worth beginning with
        problem = _model_differences(trained.config.model, model_config) or "other channels, classes or layers"
        raise UserError(f"init={path}: none of its weights fits this network ({problem})")
    new = [name for name in outline.state_dict() if name not in weights and name not in head_rows]
    parameters = [name for name, _ in outline.named_parameters()]
    pretrained = PretrainedWeights(_with_init_names(config, parameters, weights), weights, head_rows, new)
    intensity = data.read.intensity if data is not None else ()
    for line in _differences(trained, config, model_config, dataset, intensity):
        warn(line)
    which = " (the first of its networks)" if len(trained.weights) > 1 else ""
    print(escaped(f"init={path}{which}: {_loaded(pretrained, model_config.classes)}"), flush=True)
    if origins:
        print(escaped(f"heads, as the classes differ: {origins}"), flush=True)
    return pretrained


def with_init_names(overrides: Sequence[str]) -> Sequence[str]:
    """Return a command line for `unet3d memory` that also sets `optim.init_names`. Raises UserError."""
    config = compose.compose(overrides)
    if config.init is None or config.optim.init_lr == 1 or config.optim.init_names is not None:
        return overrides
    pretrained = load_pretrained(config, build.model_config_from_headers(config), None)
    names = pretrained.config.optim.init_names or []
    return [*overrides, f"optim.init_names=[{','.join(names)}]"]


def heads(model_config: Model) -> list[str]:
    """Return the names of the tensors whose size depends on the number of classes, in all heads."""
    assert model_config.classes is not None
    wider = dataclasses.replace(model_config, classes=model_config.classes + 1)
    wider_state = _outline(wider).state_dict()
    state = _outline(model_config).state_dict()
    return [name for name, value in state.items() if value.shape != wider_state[name].shape]


def class_sources(there: Sequence[str], here: Sequence[str]) -> ClassSources:
    """Return the checkpoint's classes that each class begins with: its namesake, or the parts of a merged class.

    {} where no class but the background has any.
    """
    labels = {name: label for label, name in enumerate(there) if label}
    sources = {0: [0]}
    for label, name in enumerate(here[1:], start=1):
        parts = [name] if name in labels else name.split("+")
        if all(part in labels for part in parts):
            sources[label] = [labels[part] for part in parts]
    return sources if len(sources) > 1 else {}


def _head_rows(
    trained: TrainedNetworks,
    dataset: DatasetInfo,
    state: Mapping[str, Tensor],
    head_names: Sequence[str],
) -> tuple[HeadRows, str]:
    """Return, for each head, the weights of every output with a source, and in words which these are.

    Merged classes get the mean of their parts. Raises CheckpointError for numbers that are not finite.
    """
    there, here = trained.classes, dataset.classes
    sources = class_sources(there, here)
    if trained.regions is not None:
        there = there[1:]  # regions have no output for the background
    if dataset.regions is not None:
        here = here[1:]
        sources = {label - 1: [part - 1 for part in parts] for label, parts in sources.items() if label}
    if (trained.regions is None) != (dataset.regions is None):  # Their logits differ.
        sources = {}
    rows: HeadRows = {}
    for name in head_names if sources else ():
        value = trained.weights[0].get(name)
        shape = (trained.config.model.classes, *state[name].shape[1:])
        if value is not None and value.shape == shape and value.dtype == state[name].dtype:
            refuse_non_finite({name: value}, trained.path)
            rows[name] = {output: value[parts].mean(0) for output, parts in sources.items()}
    if not rows:
        return {}, f"new, of {', '.join(here)}, there {', '.join(there)}"
    origins = [f"{here[output]} from {' and '.join(there[part] for part in sources[output])}" for output in sources]
    new = ", ".join(name for output, name in enumerate(here) if output not in sources)
    return rows, "; ".join([*origins, f"{new} new"] if new else origins)


def _outline(model_config: Model) -> nn.Module:
    with torch.device("meta"):
        return build.model(model_config, seed=0)


def _with_init_names(config: Config, parameters: Sequence[str], weights: Mapping[str, Tensor]) -> Config:
    """Return the config with `optim.init_names` set. Raises UserError for names that do not suit."""
    if config.optim.init_lr == 1:
        return config
    loaded = [name for name in parameters if name in weights]
    for start in config.optim.init_names or ():
        named = [name for name in parameters if optim.is_named(name, [start])]
        new = [name for name in named if name not in weights]
        if new == named:
            raise UserError(f"optim.init_names: init has loaded no {start}; name parts of what it has, as {loaded[0]}")
        if new:
            raise UserError(f"optim.init_names: {new[0]} of {start} is new; name the parts that init has loaded")
    names = config.optim.init_names or loaded
    if config.optim.init_lr == 0 and all(optim.is_named(name, names) for name in parameters):
        raise UserError("optim.init_lr=0: all that the network has is loaded and frozen; give a factor above 0")
    return dataclasses.replace(config, optim=dataclasses.replace(config.optim, init_names=names))


def _model_differences(there: Model, here: Model) -> str:
    """Return the options in which two networks differ, but for those that the data decide."""
    skipped = {"model.inplace", *options_with("any_network")} - {"model.path"}
    sizes = {"kernels": geometry.kernels, "strides": geometry.strides}  # may be written in several ways
    changes = []
    for name, now in vars(here).items():
        before = getattr(there, name)
        is_same = before == now or f"model.{name}" in skipped
        if name in sizes and "auto" not in (before, now) and len(there.features) == len(here.features):
            is_same = sizes[name](there) == sizes[name](here)
        if not is_same:
            changes.append(f"model.{name} {before} there, {now} here")
    return "; ".join(changes)


def _differences(
    trained: TrainedNetworks,
    config: Config,
    model_config: Model,
    dataset: DatasetInfo,
    rules: Sequence[Intensity],
) -> Iterator[str]:
    """Yield a line on the network's options, and one on how the images that it has seen differ from the run's."""
    options = _model_differences(trained.config.model, model_config)
    if options:
        yield f"init={trained.path}: its network differs: {options}"
    images = []
    pairs = list(zip(trained.intensity, rules, strict=False))
    # Two scales of CT are alike where they are at most half a standard deviation apart.
    are_alike = all(a.kind == b.kind and abs(a.mean - b.mean) <= min(a.std, b.std) / 2 for a, b in pairs)
    if rules and not (are_alike and len(trained.intensity) == len(rules)):
        images.append(f"intensity {_kinds(trained.intensity)} there, {_kinds(rules)} here")
    spacing = trained.config.data.spacing
    if spacing != config.data.spacing:
        images.append(f"data.spacing {spacing} mm there, {config.data.spacing} here")
    if len(trained.channels) == len(dataset.channels) > 1 and trained.channels != dataset.channels:
        images.append(f"channels {', '.join(trained.channels)} there, {', '.join(dataset.channels)} here")
    if images:
        yield f"init={trained.path}: it has learned from other images: {'; '.join(images)}"


def _kinds(rules: Sequence[Intensity]) -> str:
    return ", ".join(f"ct {rule.low:g} to {rule.high:g}" if rule.kind == "ct" else rule.kind for rule in rules)


def _loaded(pretrained: PretrainedWeights, outputs: int | None) -> str:
    """Return in words what is loaded, at which learning rate, and what is new; heads have that many `outputs`."""
    count = len(pretrained.weights)
    total = count + len(pretrained.head_rows) + len(pretrained.new)
    loaded = f"{count} of {total} tensors loaded"
    options = pretrained.config.optim
    if options.init_lr != 1:
        word = "frozen" if options.init_lr == 0 else f"at {options.init_lr:g} times the rate"
        slow = sum(optim.is_named(name, options.init_names or ()) for name in pretrained.weights)
        loaded += f", {word}" if slow == count else f", {slow} of them {word}"
    new_rows = 0
    if pretrained.head_rows:
        assert outputs is not None
        new_rows = outputs - len(next(iter(pretrained.head_rows.values())))
        rows = f"{new_rows} of {outputs} rows new" if new_rows else f"all {outputs} rows"
        loaded += f", {len(pretrained.head_rows)} of output layers matched by class name ({rows})"
    if pretrained.new:
        rest = len(pretrained.new) - NAMES_SHOWN
        more = f" and {rest} more" if rest > 0 else ""
        loaded += f"; new: {', '.join(pretrained.new[:NAMES_SHOWN])}{more}"
    elif not new_rows:
        loaded += "; nothing is new"
    return loaded

"""Builds objects from a config: names become classes, the package's own or a user's by import path."""

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from unet3d.base import ranks
from unet3d.base.errors import UserError
from unet3d.base.types import Regions
from unet3d.config import rules
from unet3d.config.schema import Config, Model, options, options_with
from unet3d.data.cases import DatasetInfo, read_dataset
from unet3d.data.layouts.generated import phantom_header, phantom_outline
from unet3d.data.splits import split
from unet3d.data.volume import read_grid, target_grid
from unet3d.model.architecture import levels_of
from unet3d.model.unet import UNet3D
from unet3d.recomputing.program import PLAIN, Technique
from unet3d.training.inference import Predictor
from unet3d.training.losses import CUDA_CHUNK, LOSSES, LossOptions, SegmentationLoss
from unet3d.training.policy import MemoryPolicy, amp_dtype


def import_object(name: str, path: str) -> Callable[..., Any]:
    """Return the callable `package.module:attribute` of the option `name`.

    Raises UserError, also where it does not take what it will be called with.

    Searched as for a program that is started in the current folder.
    """
    module_name, _, attribute = path.partition(":")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)  # `python -m` does the same.
    try:
        part = getattr(importlib.import_module(module_name), attribute)
    except ImportError as error:
        raise UserError(f"{name}={path}: {error}; searched from {here}") from error
    except AttributeError as error:
        raise UserError(f"{name}={path}: {module_name} has no {attribute}") from error
    if not callable(part):
        raise UserError(f"{name}={path}: {attribute} cannot be called")
    arguments = options_with("imports").get({"--model": "model.path"}.get(name, name))
    signature = None
    with suppress(TypeError, ValueError):  # What is not written in Python may have none.
        signature = inspect.signature(part)
    if arguments is not None and signature is not None:
        try:
            signature.bind(*arguments)
        except TypeError as error:
            called = f"{attribute}({', '.join(arguments)})"
            raise UserError(f"{name}={path}: is called as {called}, which it does not accept ({error})") from error
    return part  # type: ignore[no-any-return]


def import_all(config: Config) -> dict[str, list[Callable[..., Any]]]:
    """Return the user's own parts, by the option that names them. Raises UserError for one that cannot be imported."""
    parts = dict[str, list[Callable[..., Any]]]()
    for name, value, facts in options(config):
        if "imports" in facts:
            paths = value if isinstance(value, list) else [value] if value else []
            parts[name] = [import_object(name, path) for path in paths]
    return parts


def device(config: Config) -> torch.device:
    """Return the device of `device=`. Raises UserError for cuda without a GPU for each rank."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise UserError("device=cuda: this torch sees no CUDA device; use device=cpu, or install torch with CUDA")
    if device_type(config) != "cuda":
        return torch.device("cpu")
    gpus = torch.cuda.device_count()
    if gpus < ranks.LOCAL_SIZE:
        counts = f"{ranks.LOCAL_SIZE} ranks, {gpus} GPU{'s' if gpus != 1 else ''}"
        raise UserError(f"{counts}: each rank needs one; use torchrun --nproc-per-node {gpus}, or device=cpu")
    return torch.device("cuda", ranks.LOCAL_RANK)


def device_type(config: Config) -> str:
    """Return the type of device that a run of this config is for, cpu or cuda, even if unavailable."""
    is_cuda = config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())
    return "cuda" if is_cuda else "cpu"


def model_config_from_headers(config: Config) -> Model:
    """Return the model's options for a prediction: unset ones come from the data set's names and one header.

    The phantom is not generated for it.
    """
    import_all(config)
    model_config = rules.effective_model(config.model)
    has_channels = model_config.in_channels is not None and model_config.classes is not None
    data = config.data
    may_have_regions = data.regions is not None or (data.format == "nnunet" and data.root is not None)
    # Without regions here, the data set may have some, and only it can say so.
    has_outputs = model_config.regions is not None or not may_have_regions
    if has_channels and has_outputs and "auto" not in (model_config.kernels, model_config.strides):
        return model_config
    is_phantom = data.format == "phantom"
    dataset = phantom_outline(data) if is_phantom else read_dataset(data)
    case = split(dataset, data)[0][0]
    if is_phantom:
        grid = target_grid(case, phantom_header(data.phantom), data.spacing)
    else:
        grid = read_grid(case, data.spacing)
    return model_options(config, dataset, grid.spacing)


def options_of_data(dataset: DatasetInfo) -> dict[str, Any]:
    """Return the model's options that follow from a data set alone: its channels, and its classes or regions."""
    options: dict[str, Any] = {"in_channels": len(dataset.channels), "classes": len(dataset.classes)}
    regions = dataset.regions
    if regions is not None:
        options["classes"] = len(regions.labels)
        options["regions"] = [list(labels) for labels in regions.labels]
        options["regions_class_order"] = list(regions.drawn)
    return options


def model_options(config: Config, dataset: DatasetInfo, spacing: Sequence[float]) -> Model:
    """Return the model's options, all set, for voxels of this spacing (mm).

    Raises UserError where model and data disagree.
    """
    model_config = replace(rules.effective_model(config.model))
    if dataset.regions is None and model_config.regions is not None:
        problem = "the data's classes do not overlap"
        raise UserError(f"model.regions={model_config.regions}, but {problem}; use data.regions, or null")
    for name, given in options_of_data(dataset).items():
        value = getattr(model_config, name)
        if value not in (None, given):
            remedy = f"set it to {given}, or null for the data's"
            raise UserError(f"model.{name}={value}, but the data has {given}; {remedy}")
        setattr(model_config, name, given)
    automatic = levels_of(spacing, config.data.patch, len(model_config.features))
    for name, sizes in automatic._asdict().items():
        if getattr(model_config, name) == "auto":
            setattr(model_config, name, [list(size) for size in sizes])
    rules.check(replace(config, model=model_config))
    return model_config


def model(model_config: Model, seed: int) -> nn.Module:
    """Return the network with weights drawn from `seed`: the package's, or the user's own. Raises UserError."""
    torch.manual_seed(seed)
    if model_config.path is None:
        return UNet3D(model_config)
    place = f"model.path={model_config.path}"
    make = import_object("model.path", model_config.path)
    lazy = UserError(f"{place}: has lazy layers, whose sizes are not known; give them sizes")
    try:
        network = make(model_config.in_channels, model_config.classes)
    except RuntimeError as error:
        if "UninitializedParameter" in str(error):  # There are no fake tensors of lazy parameters.
            raise lazy from error
        raise
    except SystemExit as end:
        raise UserError(f"{place}: asked to exit the program ({end}); raise an error instead") from end
    if not isinstance(network, nn.Module):
        raise UserError(f"{place}: returned {type(network).__name__}, not a torch.nn.Module")
    if any(nn.parameter.is_lazy(tensor) for tensor in (*network.parameters(), *network.buffers())):
        raise lazy
    if next(network.parameters(), None) is None:
        raise UserError(f"{place}: has no parameters, so that it can learn nothing")
    return network


def prepare_for_ranks(model: nn.Module) -> nn.Module:
    """Return the network for ranks that work together: equal weights, and a batch normalisation over all.

    Raises UserError.
    """
    if ranks.count() == 1:
        return model
    if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()):
        if next(model.parameters()).device.type == "cpu":
            raise UserError("batch normalisation over several ranks needs GPUs; use model.norm=instance, or group")
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    if any(isinstance(module, nn.InstanceNorm3d) and module.track_running_stats for module in model.modules()):
        raise UserError("running statistics of instance normalisation are not shared by ranks; do not track them")
    ranks.broadcast_from_rank0(model.state_dict().values())
    return model


def loss(
    config: Config,
    classes: int,
    device: torch.device | str = "cpu",
    regions: Regions | None = None,
) -> SegmentationLoss:
    """Return the loss for a number of classes, or for `regions`, with its weights on the device.

    Raises UserError where the weights do not match the classes.
    """
    path = config.loss.path
    weights = config.loss.weights
    if weights is not None and len(weights) != classes:
        raise UserError(f"loss.weights={weights}: {classes} classes need {classes} weights")
    function = LOSSES[config.loss.name] if path is None else import_object("loss.path", path)
    tensor = None if weights is None else torch.tensor(weights, device=device)
    chunk = CUDA_CHUNK if device_type(config) == "cuda" else None
    network = None if config.model.path is None else (config.model.path, classes)
    table = None if regions is None else torch.tensor(regions.table(), dtype=torch.float32, device=device)
    options = LossOptions(tensor, config.loss.batch_dice, chunk, table)
    return SegmentationLoss(function, options, path, network)


def patches_per_rank(config: Config) -> int:
    """Return the number of patches in this rank's micro-batch."""
    return config.batch // ranks.count()


def policy(config: Config, device_type: str, technique: Technique = PLAIN) -> MemoryPolicy:
    """Return mixed precision, and what backward computes a second time."""
    dtype = amp_dtype(config.amp_dtype, device_type) if config.amp else None
    return MemoryPolicy(device_type, dtype, technique, config.channels_last)


def windows(config: Config, networks: Sequence[nn.Module]) -> int:
    """Return how many windows one forward pass of a prediction sees. Raises UserError where it must be one.

    `auto` is as many as a micro-batch has patches on CUDA, since a pass without gradients usually needs less than a
    step. It is 1 with recompute, whose step may need less than whole maps.
    """
    asked = config.inference.batch
    norms = nn.modules.batchnorm._BatchNorm
    modules = [module for network in networks for module in network.modules()]
    # A layer that has no running statistics normalises by the current batch in evaluation, too.
    mixes = any(isinstance(module, norms) and module.running_mean is None for module in modules)
    if asked != "auto":
        if asked > 1 and mixes:
            raise rules.mixed_windows(asked, "a batch normalisation without running statistics")
        return int(asked)
    if mixes or device_type(config) == "cpu" or config.recompute != "none":
        return 1
    return patches_per_rank(config)


def predictor(config: Config, networks: Sequence[nn.Module], model_config: Model, memory: MemoryPolicy) -> Predictor:
    """Return the sliding window, of the training patch's size."""
    x, y, z = config.data.patch
    mirror = tuple(config.data.augment.mirror) if config.inference.mirror else ()
    overlap = config.inference.overlap
    return Predictor(tuple(networks), model_config, memory, (x, y, z), overlap, mirror, windows(config, networks))

"""From config to objects: where names become classes, the package's own or a user's by import path."""

import importlib
import inspect
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from unet3d.base import progress, ranks
from unet3d.base.errors import UserError, listed
from unet3d.config import rules
from unet3d.config.schema import Config, Model
from unet3d.config.schema import Data as DataOptions
from unet3d.data import disk_cache
from unet3d.data.cases import Case, DatasetInfo, phantom_outline, read_dataset, split
from unet3d.data.disk_cache import DiskCache, can_stay_mapped
from unet3d.data.nifti import ValidationRules, open_image
from unet3d.data.patches import PreparedCase
from unet3d.data.preprocess import CaseReader, SparseReader
from unet3d.data.synthetic import phantom_header
from unet3d.data.twins import VoxelDigest, leaks, voxel_digests
from unet3d.data.validate import WARNING, check_cases, content_hashes
from unet3d.data.volume import Grid, target_grid
from unet3d.model import geometry
from unet3d.model.unet import UNet3D
from unet3d.training.inference import Predictor
from unet3d.training.losses import CUDA_SLAB, LOSSES, LossOptions, SegmentationLoss
from unet3d.training.policy import MemoryPolicy, amp_dtype
from unet3d.training.slab_run import SlabOptions

Read = Callable[[Case], PreparedCase]
ROWS = 8  # of a slab at least, unless asked for
SLABS, LEAN_SLABS = 12, 8  # along the longest axis at most, of slab=auto and lean=true
ARGUMENTS = {  # of the user's own parts
    "model.path": ("in_channels", "classes"),
    "--model": ("in_channels", "classes"),
    "loss.path": ("logits", "label", "options"),
    "data.transforms": ("image", "label", "rng"),
    "loggers": ("config", "folder"),
}
CUDA_VOXELS = 5 * 2**15  # of a slab on a GPU, at least: a step of smaller ones waits for the launches of its kernels


def import_object(name: str, path: str) -> Callable[..., Any]:
    """The callable `package.module:attribute` of the option `name`, for paths of a command line. Raises UserError."""
    module_name, _, attribute = path.partition(":")
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)  # as `python -m` does
    try:
        found = getattr(importlib.import_module(module_name), attribute)
    except ImportError as error:
        raise UserError(f"{name}={path}: {error}; searched from {here}") from error
    except AttributeError as error:
        raise UserError(f"{name}={path}: {module_name} has no {attribute}") from error
    if not callable(found):
        raise UserError(f"{name}={path}: {attribute} cannot be called")
    _refuse_signature(name, path, found)
    return found  # type: ignore[no-any-return]


def _refuse_signature(name: str, path: str, part: Callable[..., Any]) -> None:
    """Raise UserError for a part that does not take what it will be called with."""
    arguments = ARGUMENTS.get(name)
    try:
        signature = inspect.signature(part)
    except (TypeError, ValueError):  # of what is not written in Python
        return
    if arguments is None:
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        called = f"{path.partition(':')[2]}({', '.join(arguments)})"
        raise UserError(f"{name}={path}: is called as {called}, which it does not accept ({error})") from error


def import_all(config: Config) -> dict[str, list[Callable[..., Any]]]:
    """The user's own parts, by the option that names them. Raises UserError for the first that cannot be imported."""
    named = {name: value for name, value, _ in rules.options(config) if name in rules.IMPORTS}
    lists = {name: value if isinstance(value, list) else [value] * bool(value) for name, value in named.items()}
    return {name: [import_object(name, path) for path in paths] for name, paths in lists.items()}


@dataclass(frozen=True)
class Data:
    """The data set, its split, and how to prepare a case for the network."""

    dataset: DatasetInfo
    train: tuple[Case, ...]
    val: tuple[Case, ...]
    read: CaseReader
    read_train: Read  # with the labels that training sees
    read_val: Read  # with those that validation sees
    files: dict[str, Any]  # by a case's id, hashes of what its files hold


def device(config: Config) -> torch.device:
    """The device of `device=`. Raises UserError for cuda where there is none, or not one for each rank."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise UserError("device=cuda: this torch sees no CUDA device; use device=cpu, or install torch with CUDA")
    if device_type(config) != "cuda":
        return torch.device("cpu")
    gpus = torch.cuda.device_count()
    if gpus < ranks.LOCAL_SIZE:
        many = f"{ranks.LOCAL_SIZE} ranks, {gpus} GPU{'s' if gpus != 1 else ''}"
        raise UserError(f"{many}: each rank needs one; use torchrun --nproc-per-node {gpus}, or device=cpu")
    return torch.device("cuda", ranks.LOCAL_RANK)


def device_type(config: Config) -> str:
    """The type of device that a run of this config is for, cpu or cuda, even if unavailable."""
    is_cuda = config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())
    return "cuda" if is_cuda else "cpu"


def data(config: Config) -> Data:
    """Read, check and split the cases. Raises UserError that lists every problem of every case."""
    import_all(config)  # a wrong path is answered now; tensors of an imported module are real, not fake ones
    options = config.data
    dataset = ranks.on_rank0(lambda: read_dataset(options))
    train, val = split(dataset, options)
    cases = [*dict.fromkeys([*train, *val])]
    files = ranks.on_rank0(lambda: checked_files(dataset, cases, options))
    reader = CaseReader(dataset, options.spacing, (), _cache(options, len(cases)), ValidationRules.of(options))
    maps = 1 + (options.sparse is not None) + options.semi  # label maps of a training case, see `_readers`
    kept = dict.fromkeys(val, 1) | dict.fromkeys(train, maps)
    if options.cache == "memory":
        reader.refuse_more_than_memory(kept)
    elif options.cache == "disk":
        reader.disk = DiskCache(disk_cache.folder(options.cache_root), options.fingerprint == "full")
        reader.files = files
    reader.fit_intensity(options.intensity, train)
    if options.cache == "disk":
        reader.refuse_more_than_disk(kept)
    if options.cache != "off":
        reader.fill(cases)
    if not options.semi and (twins := [*leaks(train, val, _digests(train, val, reader))]):
        raise UserError("\n".join(listed(twins)))
    return Data(dataset, train, val, reader, *_readers(options, reader, train), files)


def checked_files(dataset: DatasetInfo, cases: Sequence[Case], options: DataOptions) -> dict[str, Any]:
    """By a case's id, hashes of what its files hold. Raises UserError that lists every problem of every case."""
    refuse_problems(dataset, cases, options)
    hashed = progress.track(cases, "hashing files", len(cases))
    return {case.id: content_hashes(case, options.fingerprint == "full") for case in hashed}


def _cache(options: DataOptions, cases: int) -> dict[str, PreparedCase] | None:
    """Where a reader keeps what it has prepared or mapped, if it does."""
    return {} if options.cache == "memory" or (options.cache == "disk" and can_stay_mapped(cases)) else None


def _digests(train: Sequence[Case], val: Sequence[Case], read: CaseReader) -> dict[str, frozenset]:
    """Of the prepared images; if they are not kept, of the voxels of those images that may be the same."""
    cases = [*train, *val]
    if read.disk is not None:
        return {case.id: frozenset([read.disk.digest(read.key(case), "image")]) for case in cases}
    if read.cache is None:
        return voxel_digests(train, val, read.rules)
    found = {case.id: VoxelDigest() for case in cases}
    for case in cases:
        found[case.id].update(read(case).image.numpy())
    return {name: digest.digests() for name, digest in found.items()}


def refuse_problems(dataset: DatasetInfo, cases: Sequence[Case], options: DataOptions) -> None:
    """Check every file's header and print warnings. Raises UserError that lists every problem of every case."""
    found = check_cases(dataset, cases, options, full=False)
    if problems := [line for line in found if not line.startswith(WARNING)]:
        raise UserError("\n".join(listed(problems)))
    for line in listed(found):
        print(line, file=sys.stderr)


def _readers(options: DataOptions, read: CaseReader, train: Sequence[Case]) -> tuple[Read, Read]:
    """How to read a case for training, and for validation."""
    if options.sparse is None:
        return read, read
    read_train, read_val = (
        SparseReader(read, options, scored, None if read.cache is None else {}) for scored in (False, True)
    )
    if options.cache != "off":  # before workers copy it
        for case in progress.track(train, "choosing slices", len(train)):
            read_train(case)
            if options.semi:
                read_val(case)
    return read_train, read_val if options.semi else read


def model_config_from_headers(config: Config) -> Model:
    """The model's options for a prediction: unset ones come from the data set's names and one header.

    The phantom is not generated for it.
    """
    import_all(config)
    options = rules.network(config.model)
    if None not in (options.in_channels, options.classes) and "auto" not in (options.kernels, options.strides):
        return options
    is_generated = config.data.format == "phantom"
    dataset = phantom_outline(config.data) if is_generated else read_dataset(config.data)
    train, _ = split(dataset, config.data)
    if is_generated:
        header = phantom_header(config.data.phantom)
        return _options_on(config, dataset, target_grid(train[0], header, config.data.spacing))
    return model_options(config, dataset, train[0])


def model_options(config: Config, dataset: DatasetInfo, case: Case) -> Model:
    """The model's options, all set, for the spacing of this case. Raises UserError where model and data disagree."""
    return _options_on(config, dataset, target_grid(case, open_image(case.id, case.images[0]), config.data.spacing))


def _options_on(config: Config, dataset: DatasetInfo, grid: Grid) -> Model:
    options = replace(rules.network(config.model))
    for name, found in (("in_channels", len(dataset.channels)), ("classes", len(dataset.classes))):
        own = getattr(options, name)
        if own not in (None, found):
            raise UserError(f"model.{name}={own}, but the data has {found}; set it to {found}, or null for the data's")
        setattr(options, name, found)
    automatic = geometry.from_spacing(grid.spacing, config.data.patch, len(options.features))
    for name, sizes in zip(("kernels", "strides"), automatic, strict=True):
        if getattr(options, name) == "auto":
            setattr(options, name, [list(size) for size in sizes])
    rules.check(replace(config, model=options))
    return options


def model(options: Model, seed: int) -> nn.Module:
    """The network with weights drawn from `seed`: the package's, or the user's own. Raises UserError."""
    torch.manual_seed(seed)
    if options.path is None:
        return UNet3D(options)
    make = import_object("model.path", options.path)
    lazy = UserError(f"model.path={options.path}: has lazy layers, whose sizes are not known; give them sizes")
    try:
        found = make(options.in_channels, options.classes)
    except RuntimeError as error:
        if "UninitializedParameter" in str(error):  # of fake tensors there are none
            raise lazy from error
        raise
    except SystemExit as end:
        raise UserError(
            f"model.path={options.path}: asked to exit the program ({end}); raise an error instead"
        ) from end
    if not isinstance(found, nn.Module):
        raise UserError(f"model.path={options.path}: returned {type(found).__name__}, not a torch.nn.Module")
    if any(nn.parameter.is_lazy(tensor) for tensor in (*found.parameters(), *found.buffers())):
        raise lazy
    if next(found.parameters(), None) is None:
        raise UserError(f"model.path={options.path}: has no parameters, so that it can learn nothing")
    return found


def prepare_for_ranks(model: nn.Module) -> nn.Module:
    """The network for ranks that work together: equal weights, and a batch normalisation over all. Raises UserError."""
    if ranks.count() == 1:
        return model
    if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()):
        if next(model.parameters()).device.type == "cpu":
            raise UserError("batch normalisation over several ranks needs GPUs; use model.norm=instance, or group")
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    if any(isinstance(m, nn.InstanceNorm3d) and m.track_running_stats for m in model.modules()):
        raise UserError("running statistics of instance normalisation are not shared by ranks; do not track them")
    ranks.broadcast_from_rank0(model.state_dict().values())
    return model


def loss(config: Config, classes: int, device: torch.device | str = "cpu") -> SegmentationLoss:
    """Return the loss, with its weights on the device. Raises UserError where they do not match the classes."""
    path, weights = config.loss.path, config.loss.weights
    if weights is not None and len(weights) != classes:
        raise UserError(f"loss.weights={weights}: {classes} classes need {classes} weights")
    function = LOSSES[config.loss.name] if path is None else import_object("loss.path", path)
    tensor = None if weights is None else torch.tensor(weights, device=device)
    slab = CUDA_SLAB if device_type(config) == "cuda" else None
    network = None if config.model.path is None else (config.model.path, classes)
    return SegmentationLoss(function, LossOptions(tensor, config.loss.batch_dice, slab), path, network)


def patches_per_rank(config: Config) -> int:
    """Of a micro-batch, in one process."""
    return config.batch // ranks.count()


def policy(config: Config, device_type: str, segment_starts: tuple[int, ...]) -> MemoryPolicy:
    """Mixed precision, slabs, and checkpointing in segments that begin at these stages."""
    dtype = amp_dtype(config.amp_dtype, device_type) if config.amp else None
    return MemoryPolicy(device_type, dtype, segment_starts, slabs(config), config.channels_last)


def slabs(config: Config) -> SlabOptions | None:
    """The slabs of `lean` and `slab`, along the patch's longest axis."""
    if not config.lean and not config.slab:
        return None
    patch = config.data.patch
    most = LEAN_SLABS if config.lean else SLABS
    if device_type(config) == "cuda":
        most = max(1, min(most, patches_per_rank(config) * math.prod(patch) // CUDA_VOXELS))
    automatic = max(ROWS, -(-max(patch) // most))
    rows = automatic if config.lean or config.slab == "auto" else config.slab
    return SlabOptions(rows, config.lean, 2 + patch.index(max(patch)), device_type(config) == "cpu")


def windows(config: Config, networks: Sequence[nn.Module]) -> int:
    """Return how many windows one forward pass of a prediction sees. Raises UserError where it must be one.

    `auto` is as many as a micro-batch has patches on CUDA, since a pass without gradients usually needs less than a
    step. It is 1 with slabs, whose step may need less than whole maps.
    """
    asked = config.inference.batch
    mixes = any(_takes_statistics(module) for network in networks for module in network.modules())
    if asked != "auto":
        if asked > 1 and mixes:
            raise rules.mixed_windows(asked, "a batch normalisation without running statistics")
        return int(asked)
    if mixes or device_type(config) == "cpu" or slabs(config) is not None:
        return 1
    return patches_per_rank(config)


def _takes_statistics(module: nn.Module) -> bool:
    """Return whether the layer normalises by the current batch in evaluation, too."""
    return isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is None


def predictor(config: Config, networks: Sequence[nn.Module], options: Model, memory: MemoryPolicy) -> Predictor:
    """The sliding window, of the training patch's size."""
    window = (config.data.patch[0], config.data.patch[1], config.data.patch[2])
    mirror = tuple(config.data.augment.mirror) if config.inference.mirror else ()
    batch = windows(config, networks)
    return Predictor(tuple(networks), options, memory, window, config.inference.overlap, mirror, batch)

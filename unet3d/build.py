"""From config to objects: the only place where a name becomes a class, but for the layers of the model."""

import dataclasses
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from unet3d import checks, progress
from unet3d.config import Config, Model
from unet3d.config import Data as DataOptions
from unet3d.data import preprocess
from unet3d.data.cases import Case, DatasetInfo, read_dataset, split
from unet3d.data.check import WARNING, check_cases
from unet3d.data.nifti import ValidationRules, open_image
from unet3d.data.patches import PreparedCase
from unet3d.data.preprocess import CaseReader
from unet3d.data.volume import target_grid
from unet3d.errors import UserError
from unet3d.model import geometry
from unet3d.model.unet import UNet3D
from unet3d.train.inference import Predictor
from unet3d.train.losses import LOSSES, LossOptions, SegmentationLoss
from unet3d.train.policy import MemoryPolicy, amp_dtype

Read = Callable[[Case], PreparedCase]


@dataclass(frozen=True)
class Data:
    """The task, its split, and how to get a case ready for the network."""

    dataset: DatasetInfo
    train: tuple[Case, ...]
    val: tuple[Case, ...]
    read: CaseReader
    read_train: Read  # with the labels that training sees
    read_val: Read  # with those that validation sees


def device(config: Config) -> torch.device:
    """The device of `device=`. Raises UserError for cuda where there is none."""
    available = torch.cuda.is_available()
    if config.device == "cuda" and not available:
        raise UserError("device=cuda: this torch sees no CUDA device; use device=cpu, or install torch with CUDA")
    return torch.device("cuda" if config.device != "cpu" and available else "cpu")


def target(config: Config) -> str:
    """The type of device that a run of this config is for, whether or not it is here: cpu or cuda."""
    is_cuda = config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())
    return "cuda" if is_cuda else "cpu"


def data(config: Config) -> Data:
    """Read, check and split the cases. Raises UserError that lists every problem of every case."""
    options = config.data
    task = read_dataset(options)
    train, val = split(task, options)
    refuse_problems(task, [*train, *val], options)
    reader = CaseReader(task, options.spacing, cache={} if options.cache else None, rules=ValidationRules.of(options))
    if options.cache:
        maps = 1 + (options.sparse is not None) + options.semi  # label maps of a training case, see `_annotations`
        reader.refuse_more_than_memory(dict.fromkeys(val, 1) | dict.fromkeys(train, maps))
    reader.fit_intensity(options.intensity, train)
    if options.cache:
        reader.fill([*train, *val])
    return Data(task, train, val, reader, *_annotations(options, reader, train))


def refuse_problems(task: DatasetInfo, cases: Sequence[Case], options: DataOptions) -> None:
    """Look at every file's header, and print warnings. Raises UserError that lists every problem of every case."""
    found = check_cases(task, cases, options, full=False)
    problems = [line for line in found if not line.startswith(WARNING)]
    if problems:
        raise UserError("\n".join(problems))
    for line in found:
        print(line, file=sys.stderr)


def _annotations(options: DataOptions, read: CaseReader, train: Sequence[Case]) -> tuple[Read, Read]:
    """How to read what is learned, and what is scored."""
    if options.sparse is None:
        return read, read
    learn, score = (
        preprocess.SparseReader(read, options, scored, {} if options.cache else None) for scored in (False, True)
    )
    if options.cache:  # before workers copy it
        for case in progress.track(train, "choosing slices", len(train)):
            learn(case)
            if options.semi:
                score(case)
    return learn, score if options.semi else read


def is_complete(options: Model) -> bool:
    """Whether the model's options leave nothing to be taken from the data."""
    return None not in (options.in_channels, options.classes) and "auto" not in (options.kernels, options.strides)


def outlined_options(config: Config) -> Model:
    """The model's options for a prediction: what they leave open is told by the data set's names and one header."""
    if is_complete(config.model):
        return config.model
    task = read_dataset(config.data)
    train, _ = split(task, config.data)
    return model_options(config, task, train[0])


def model_options(config: Config, task: DatasetInfo, case: Case) -> Model:
    """The model's options with nothing left open, for the spacing of this case.

    Raises UserError where model and data disagree.
    """
    options = dataclasses.replace(config.model)
    spacing = target_grid(case, open_image(case.id, case.images[0]), config.data.spacing).spacing
    for name, found in (("in_channels", len(task.channels)), ("classes", len(task.classes))):
        if getattr(options, name) is None:
            setattr(options, name, found)
        elif getattr(options, name) != found:
            raise UserError(
                f"model.{name}={getattr(options, name)}, but the data has {found}; set model.{name}={found}, "
                f"or model.{name}=null to take the data's"
            )
    kernels, strides = geometry.from_spacing(spacing, config.data.patch, len(options.features))
    if options.kernels == "auto":
        options.kernels = [list(kernel) for kernel in kernels]
    if options.strides == "auto":
        options.strides = [list(stride) for stride in strides]
    checks.check(dataclasses.replace(config, model=options))
    return options


def model(options: Model, seed: int) -> UNet3D:
    """The network with weights drawn from `seed`."""
    torch.manual_seed(seed)
    return UNet3D(options)


def loss(config: Config, classes: int) -> SegmentationLoss:
    """The loss. Raises UserError where the weights do not match the classes."""
    weights = config.loss.weights
    if weights is not None and len(weights) != classes:
        raise UserError(f"loss.weights={weights}: {classes} classes need {classes} weights")
    tensor = None if weights is None else torch.tensor(weights)
    return SegmentationLoss(LOSSES[config.loss.name], LossOptions(tensor, config.loss.batch_dice))


def policy(config: Config, device_type: str, segment_starts: tuple[int, ...]) -> MemoryPolicy:
    """Mixed precision, and checkpointing in segments that begin with these stages."""
    return MemoryPolicy(device_type, amp_dtype(config.amp_dtype, device_type) if config.amp else None, segment_starts)


def predictor(config: Config, networks: Sequence[nn.Sequential], options: Model, memory: MemoryPolicy) -> Predictor:
    """The sliding window with the training patch as window."""
    window = (config.data.patch[0], config.data.patch[1], config.data.patch[2])
    mirror = tuple(config.data.augment.mirror) if config.inference.mirror else ()
    return Predictor(tuple(networks), options, memory, window, config.inference.overlap, mirror)

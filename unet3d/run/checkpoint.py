"""The one reader of checkpoints: a file is read, then checked for what it is used for.

Resuming needs a training state, prediction (also scoring, publishing and `init=`) needs trained networks. Either is
refused with CheckpointError, exit code 3, where no run of this package has written it.
"""

import hashlib
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from unet3d import build
from unet3d.base.errors import CheckpointError, UserError
from unet3d.base.types import Regions
from unet3d.config import compose
from unet3d.config.schema import Config, Data, Model, Optim
from unet3d.data.intensity import Intensity, Seen, checked_intensity
from unet3d.training import checkpoint, optim

Split = dict[str, Any]


@dataclass(frozen=True)
class TrainedNetworks:
    """Networks of one kind, and how an image is prepared for them."""

    path: Path
    config: Config  # the model's options leave nothing open
    classes: tuple[str, ...]  # background first
    channels: tuple[str, ...]
    intensity: tuple[Intensity, ...]  # a rule for each channel
    step: int  # of the run that wrote them
    weights: list[dict[str, Tensor]]  # of each network: a run's checkpoint holds one, a published one may hold several
    splits: list[Split]  # what was held out from each
    largest: tuple[int, ...] = ()  # classes of which label maps have the largest component alone
    seen: Seen | None = None  # what their training cases are like; None where nobody has looked
    is_average: bool = False  # whether a run's checkpoint holds averages of the weights
    trained_on: tuple[Any, ...] = ()  # names of the cases, which a published file does not have

    @property
    def regions(self) -> Regions | None:
        """Return the regions that the networks predict; None where their classes exclude each other."""
        return self.config.model.output_regions

    def digest(self) -> str:
        """Return a digest of all that a label map follows from, but for options of inference."""
        data = self.config.data
        defaults = vars(Model())
        # Options that later versions add leave the digests of earlier networks as they are.
        model = {name: value for name, value in vars(self.config.model).items() if value != defaults[name]}
        about = (sorted(model.items()), self.intensity, self.classes, self.config.amp, self.config.amp_dtype)
        options = (data.patch, data.spacing, data.affine, data.label_map, data.nonfinite, data.augment.mirror)
        digest = hashlib.blake2b(repr((about, options)).encode(), digest_size=16)
        for weights in self.weights:
            for name, value in sorted(weights.items()):
                digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode(errors="backslashreplace"))
                digest.update(value.detach().reshape(-1).contiguous().view(torch.uint8).numpy().data)
        return digest.hexdigest()

    def instantiate(self, device: torch.device) -> list[nn.Module]:
        """Return the networks with their weights, for evaluation.

        Raises CheckpointError where the weights do not fit, before memory is taken.
        """
        model_config = self.config.model
        try:
            with torch.device("meta"):
                outline = build.model(model_config, seed=0)
        except (RuntimeError, TypeError, OverflowError) as error:
            raise CheckpointError(f"{self.path}: no network has these options ({error})") from error
        for weights in self.weights:
            checkpoint.refuse_misfit(outline, weights, self.path)
        # One storage may stand for many weights, or for many networks; each would take its own memory.
        total_bytes = sum(value.nbytes for weights in self.weights for value in weights.values())
        if total_bytes > self.path.stat().st_size:
            raise CheckpointError(f"{self.path}: its weights are not all there: they are larger than the file")
        networks = [build.model(model_config, seed=0) for _ in self.weights]
        for network, weights in zip(networks, self.weights, strict=True):
            network.load_state_dict(weights)
        return [network.to(device).eval() for network in networks]


def networks_of(path: Path, state: dict[str, Any]) -> TrainedNetworks:
    """Return the checked networks of a checkpoint's state.

    Raises CheckpointError for anything but plain values of the right types.
    """
    try:
        config = compose.from_plain(state["config"] | {"resume": None, "model": state["model_options"]})
        first = dict(state["model"]) | dict(state["average"])
        facts = state.get("fingerprint")
        trained_on = facts.get("training cases") if isinstance(facts, Mapping) else None
        # The others, their splits and the largest components are only in published files.
        trained = TrainedNetworks(
            path=path,
            config=config,
            classes=tuple(state["classes"]),
            channels=tuple(state["channels"]),
            intensity=tuple(checked_intensity(rule) for rule in state["intensity"]),
            step=state["step"],
            weights=[first, *(dict(weights) for weights in state.get("others", []))],
            splits=[dict(split) for split in state.get("splits", [split_of(config.data)])],
            largest=tuple(state.get("largest", ())),
            seen=None if state["seen"] is None else Seen.read(state["seen"], len(state["channels"])),
            is_average=len(state["average"]) > 0,
            trained_on=tuple(trained_on) if isinstance(trained_on, list) else (),
        )
        _refuse_contradictions(trained)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: not a checkpoint of a run ({error})") from error
    return trained


def refuse_unsound_training(
    path: Path,
    state: Mapping[str, Any],
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    options: Optim,
) -> None:
    """Raise CheckpointError for a training state that no run of this optimizer has written."""
    step = state["step"]
    counts = [step, state["last_validation"]]
    counts += [group[optim.COUNT] for group in state["optimizer"]["param_groups"] if optim.COUNT in group]
    best = state["best"]
    random_states = [(state["rng"], state["cuda_rng"]), *state["ranks"]]
    device = optimizer.param_groups[0]["params"][0].device
    is_sound = {
        "step": all(type(count) is int and 0 <= count <= step for count in counts),
        "best": best is None or (isinstance(best, float) and 0 <= best <= 1),
        "rng": all(_is_like(on_cpu, torch.get_rng_state()) for on_cpu, _ in random_states),
        "cuda_rng": device.type != "cuda"  # else it is not used
        or all(_is_like(one, torch.cuda.get_rng_state(device)) for _, on_gpu in random_states for one in on_gpu),
        "scaler": state["scaler"].keys() == scaler.state_dict().keys()
        and 0 < state["scaler"].get("scale", 1) < math.inf,
        "optimizer": _is_optimizer_state(state["optimizer"]["state"], step, optimizer, options),
        "threads": type(state["threads"]) is int,
    }
    wrong = [name for name in is_sound if not is_sound[name]]
    if wrong:
        problem = f"its training state does not belong to this run ({', '.join(wrong)})"
        raise CheckpointError(f"{path}: {problem}; take an earlier checkpoint")


def read_networks(path: Path, model_path: str | None = None) -> TrainedNetworks:
    """Return the networks of a run's or a published checkpoint.

    `model_path`: import path of the user's own network, from the command line. Raises CheckpointError, or UserError
    where the file is of another network: no code is taken from it.
    """
    networks = networks_of(path, checkpoint.load_checkpoint(path))
    named = networks.config.model.path
    if named != model_path:
        if named is None:
            raise UserError(f"{path}: holds the package's own network; remove --model")
        raise UserError(f"{path}: code is never taken from a checkpoint; name its network: --model {named}")
    if model_path is not None:
        build.import_object("--model", model_path)  # here, not under torch.device("meta"), where its tensors would stay
    return networks


def split_of(options: Data) -> Split:
    """Return what a run with these options held out: a fold, a share, or the file that lists the cases.

    Folds and shares of groups are others than those of cases.
    """
    if options.split is not None:
        return {"split": options.split, "semi": options.semi}
    groups = {} if options.groups is None else {"groups": options.groups}
    names = ["val_fraction"] if options.fold is None else ["fold", "folds"]
    return {**{name: getattr(options, name) for name in names}, "semi": options.semi, **groups}


def _refuse_contradictions(trained: TrainedNetworks) -> None:
    """Raise ValueError for parts of a checkpoint that do not belong together, or have the wrong type."""
    model_config = trained.config.model
    pairs = (
        (len(trained.classes) - (trained.regions is not None), model_config.classes),
        (len(trained.channels), model_config.in_channels),
        (len(trained.intensity), model_config.in_channels),
        (len(trained.splits), len(trained.weights)),
    )
    if any(size != expected for size, expected in pairs):
        raise ValueError("its parts contradict each other")
    names = itertools.chain(trained.classes, trained.channels, *trained.weights)
    if not all(isinstance(name, str) for name in names):
        raise ValueError("its classes, channels or weights are not named")
    is_class = [type(number) is int and 0 < number < len(trained.classes) for number in trained.largest]
    if not all(is_class) or len(set(trained.largest)) < len(trained.largest):
        raise ValueError("its post-processing is not of its classes")
    if type(trained.step) is not int or trained.step < 0:
        raise ValueError("its step is not a number of steps")


def _is_optimizer_state(
    states: Mapping[int, Mapping[str, Any]],
    steps: Any,
    optimizer: torch.optim.Optimizer,
    options: Optim,
) -> bool:
    """Return whether each tensor is one that `steps` steps of the optimizer leave, and shares no memory."""
    if type(steps) is not int:
        return False
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    names = optim.state_names(options)
    step_counter = torch.zeros(())
    addresses = []
    for index, state in states.items():
        if state.keys() != names:
            return False
        for name, value in state.items():
            expected = step_counter if name == "step" else parameters[index]
            if not _is_like(value, expected):
                return False
            if name == "step" and value.item() not in range(1, steps + 1):
                return False
            if name == "exp_avg_sq" and not value.ge(0).all():
                return False
            if value.numel():
                addresses.append(value.untyped_storage().data_ptr())
    return len(addresses) == len(set(addresses))


def _is_like(value: Any, expected: Tensor) -> bool:
    """Return whether a value of a file is a dense tensor of the same shape and type, of finite numbers."""
    if not checkpoint.is_plain(value) or (value.shape, value.dtype) != (expected.shape, expected.dtype):
        return False
    order = sorted(range(value.dim()), key=value.stride, reverse=True)
    is_dense = value.permute(order).is_contiguous()  # else an index may share its number with another
    return is_dense and checkpoint.is_finite(value)

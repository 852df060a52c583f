"""Optimizers, learning-rate schedules and the running average of the weights.

The average is not torch.optim.swa_utils.AveragedModel, for three reasons measured with torch 2.13 on `unet_tiny`
(342,284 bytes of weights). Its deep copy of fake tensors raises "Mixing fake modes" at the first update, so memory
could not be predicted. It copies the network before the first step, which then holds 342,292 bytes more; here the first
update makes the average. Its state is not in the optimizer's, which a checkpoint saves and a resumed run loads.
"""

import math
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from unet3d.config.schema import Optim

AVERAGE = "average"  # A parameter's, in the optimizer's state.
COUNT = "averaged"  # updates so far, in the parameter group
FACTOR = "factor"  # on the learning rate, in the parameter group


def optimizer(options: Optim, network: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of all parameters of the network, with their running average where the options ask for it.

    Parameters of `init_names` have `init_lr` times the rate of the others; where that is 0 they are frozen: they
    require no gradient from here on, and the optimizer has no state for them.
    It updates all parameters at once on CUDA, one by one on the CPU, as torch chooses; with `fused` in one kernel,
    which keeps Adam's counts of steps on the device. The fp16 scaler skips an update that overflows before that kernel,
    and not within: else the running average would change.
    """
    beta1, beta2 = options.betas
    kinds: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "sgd": partial(torch.optim.SGD, momentum=options.momentum, nesterov=options.momentum > 0),
        "adam": partial(torch.optim.Adam, betas=(beta1, beta2)),
        "adamw": partial(torch.optim.AdamW, betas=(beta1, beta2)),
    }
    new_optimizer = kinds[options.name](
        _groups(options, network),
        lr=options.lr,
        weight_decay=options.weight_decay,
        fused=options.fused or None,  # None: torch chooses another way
    )
    new_optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]
    if options.average is not None:
        update = partial(_update_average, options.average)
        new_optimizer.register_step_post_hook(update)
    return new_optimizer


def _groups(options: Optim, network: nn.Module) -> list[Any]:
    """Return the parameters to learn, or groups of them with their own rate."""
    if options.init_lr == 1 or not options.init_names:
        return list(network.parameters())
    named = list(network.named_parameters())
    loaded = [parameter for name, parameter in named if is_named(name, options.init_names)]
    others = [parameter for name, parameter in named if not is_named(name, options.init_names)]
    if options.init_lr == 0:
        for parameter in loaded:
            parameter.requires_grad_(False)
        return others
    groups: list[dict[str, Any]] = [{"params": others}, {"params": loaded, FACTOR: options.init_lr}]
    return [group for group in groups if group["params"]]


def is_named(name: str, starts: Collection[str]) -> bool:
    """Return whether a parameter is one of these or part of one, as `down1.block.0.weight` is of `down1`."""
    return any(name == start or name.startswith(f"{start}.") for start in starts)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate, each group's times its factor."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get(FACTOR, 1.0)


def state_names(options: Optim) -> set[str]:
    """Return the names of what the optimizer keeps of each parameter once it has taken a step."""
    names: set[str] = set()
    if options.name in ("adam", "adamw"):
        names = {"step", "exp_avg", "exp_avg_sq"}
    elif options.momentum > 0:
        names = {"momentum_buffer"}
    if options.average is not None:
        names.add(AVERAGE)
    return names


def learning_rate(options: Optim, steps: int, step: int) -> float:
    """Return the learning rate of optimizer step `step` of `steps`, counted from 0."""
    progress = min(1.0, step / steps)
    schedules: dict[str, Callable[[], float]] = {
        "constant": lambda: 1.0,
        "poly": lambda: (1 - progress) ** 0.9,
        "cosine": lambda: (1 + math.cos(math.pi * progress)) / 2,
        "one_cycle": lambda: _one_cycle(progress, options.warmup),
    }
    return options.lr * schedules[options.schedule]()


def _one_cycle(progress: float, warmup: float) -> float:
    """Return a factor that follows a cosine from 1/25 up to 1, then down to 0 (Smith and Topin, arXiv:1708.07120)."""
    if progress < warmup:
        rise = 1 - math.cos(math.pi * progress / warmup)
        return 1 / 25 + (1 - 1 / 25) * rise / 2
    angle = math.pi * (progress - warmup) / (1 - warmup)
    return (1 + math.cos(angle)) / 2


def _update_average(decay: float, optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Set average to decay * average + (1 - decay) * weight after an update, which the fp16 scaler may skip."""
    for group in optimizer.param_groups:
        count = group.get(COUNT, 0) + 1
        group[COUNT] = count
        share = 1 - min(decay, (1 + count) / (10 + count))  # rises from 2/11: the first, random weights do not linger
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            state = optimizer.state[parameter]
            if AVERAGE in state:
                state[AVERAGE].lerp_(parameter.detach(), share)
            else:
                state[AVERAGE] = parameter.detach().clone()


def averages(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the average of each parameter by its name; {} where none is kept."""
    states = {name: optimizer.state.get(parameter, {}) for name, parameter in model.named_parameters()}
    return {name: state[AVERAGE] for name, state in states.items() if AVERAGE in state}


@contextmanager
def averaged(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Let the model compute with its averages, where any are kept. Nothing is copied."""
    parameters = dict(model.named_parameters())
    swapped = [(parameters[name], parameters[name].data, mean) for name, mean in averages(model, optimizer).items()]
    try:
        for parameter, _, average in swapped:
            parameter.data = average
        yield
    finally:
        for parameter, weight, _ in swapped:
            parameter.data = weight

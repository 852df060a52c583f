"""Optimizers, learning-rate schedules and the running average of the weights."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from unet3d.config import Optim


def optimizer(options: Optim, network: nn.Module, foreach: bool | None = None) -> torch.optim.Optimizer:
    """The optimizer over all of the network's parameters, with their running average where the options ask for it.

    `foreach` None: all parameters at once on CUDA, one by one on the CPU, as torch does.
    """
    found = _optimizer(options, network.parameters(), foreach)
    if options.average is not None:
        follow(found, options.average)
    return found


def _optimizer(options: Optim, parameters: Iterator[nn.Parameter], foreach: bool | None) -> torch.optim.Optimizer:
    betas = (options.betas[0], options.betas[1])
    match options.name:
        case "sgd":
            return torch.optim.SGD(
                parameters,
                options.lr,
                momentum=options.momentum,
                nesterov=options.momentum > 0,
                weight_decay=options.weight_decay,
                foreach=foreach,
            )
        case "adam":
            return torch.optim.Adam(parameters, options.lr, betas, weight_decay=options.weight_decay, foreach=foreach)
        case "adamw":
            return torch.optim.AdamW(parameters, options.lr, betas, weight_decay=options.weight_decay, foreach=foreach)
    raise AssertionError(options.name)


def learning_rate(options: Optim, steps: int, step: int) -> float:
    """The learning rate of optimizer step `step` of `steps`, counted from 0."""
    return options.lr * factor(options, steps, step)


def factor(options: Optim, steps: int, step: int) -> float:
    """Its share of the peak."""
    progress = min(1.0, step / steps)
    match options.schedule:
        case "constant":
            return 1.0
        case "poly":
            return float((1 - progress) ** 0.9)
        case "cosine":
            return (1 + math.cos(math.pi * progress)) / 2
        case "one_cycle":
            return _one_cycle(progress, options.warmup)
    raise AssertionError(options.schedule)


def _one_cycle(progress: float, warmup: float) -> float:
    """Cosine from 1/25 up to 1, then cosine down to 0 (Smith and Topin, arXiv:1708.07120)."""
    if progress < warmup:
        return 1 / 25 + (1 - 1 / 25) * (1 - math.cos(math.pi * progress / warmup)) / 2
    return (1 + math.cos(math.pi * (progress - warmup) / (1 - warmup))) / 2


AVERAGE = "average"  # of a parameter, in the optimizer's state


COUNT = "averaged"  # updates so far, in the parameter group


def follow(optimizer: torch.optim.Optimizer, decay: float) -> None:
    """After each update (none that the fp16 scaler skips), average <- decay * average + (1 - decay) * weight.

    The decay rises from 2/11 as (1 + t) / (10 + t), so that the first weights, which are random, do not linger.
    """

    def update(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            group[COUNT] = count = group.get(COUNT, 0) + 1
            share = 1 - min(decay, (1 + count) / (10 + count))
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = optimizer.state[parameter]
                if AVERAGE in state:
                    state[AVERAGE].lerp_(parameter.detach(), share)
                else:
                    state[AVERAGE] = parameter.detach().clone()

    optimizer.register_step_post_hook(update)


def averages(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The average of each parameter by its name; {} where none is kept."""
    states = {name: optimizer.state.get(parameter, {}) for name, parameter in model.named_parameters()}
    return {name: state[AVERAGE] for name, state in states.items() if AVERAGE in state}


@contextmanager
def averaged(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """The model has its averages for weights, where any are kept; nothing is copied."""
    parameters = dict(model.named_parameters())
    pairs = [(parameters[name], average) for name, average in averages(model, optimizer).items()]
    own = [parameter.data for parameter, _ in pairs]
    try:
        for parameter, average in pairs:
            parameter.data = average
        yield
    finally:
        for (parameter, _), data in zip(pairs, own, strict=True):
            parameter.data = data

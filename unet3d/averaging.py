"""A running average of the weights, kept in the optimizer's state: saved, restored and counted as such.

Validation and prediction use it in place of the weights, which training goes on with.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

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

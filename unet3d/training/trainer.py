"""The training loop. It takes built objects and a function to log with; it knows no config, logger or file."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from unet3d.base.types import Batch
from unet3d.training import optim
from unet3d.training.policy import MemoryPolicy
from unet3d.training.step import LossFunction, Mark, train_step

Action = Callable[[], None]


class Learner(NamedTuple):
    """A network and what updates it."""

    model: nn.Module
    loss: LossFunction
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    policy: MemoryPolicy


@dataclass
class Trainer:
    """A learner, how it is driven, and the step it is at."""

    learner: Learner
    learning_rate: Callable[[int], float]  # of an optimizer step, counted from 0
    clip: float | None
    mark: Mark
    log: Callable[[Mapping[str, float | int | str | None], int], None]
    step: int = 0
    last_validation: int = 0  # its step; a run that was stopped between a step and its validation makes up for it

    def fit(
        self,
        stream: Iterator[Sequence[Batch]],
        steps: int,
        every: int,
        validate: Action,
        between: Action,
        stop: Callable[[], bool],
    ) -> None:
        """Train up to optimizer step `steps`; validate every `every` steps (0: never) and at the end.

        Call `between` after each step without a validation. Return before the next of these once asked to `stop`.
        """

        def is_due() -> bool:
            return self.step > self.last_validation and (self.step == steps or (every > 0 and self.step % every == 0))

        while not stop() and (is_due() or self.step < steps):
            if is_due():
                validate()
                self.last_validation = self.step
                continue
            self.learner.model.train()
            started = time.perf_counter()
            batches = next(stream)
            wait, rate = time.perf_counter() - started, self.learning_rate(self.step)
            optim.set_rate(self.learner.optimizer, rate)
            result = train_step(*self.learner, batches, self.mark, self.clip)
            del batches  # they would be in memory beside the next ones
            self.step += 1
            values = {"train/loss": result.loss, "train/lr": rate, "train/grad_norm": result.grad_norm}
            values |= {"time/step_s": time.perf_counter() - started, "time/data_wait_s": wait}
            if self.learner.scaler.is_enabled():
                values["train/scale"] = result.scale
            self.log(values, self.step)
            if not is_due():
                between()

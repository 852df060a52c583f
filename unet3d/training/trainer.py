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
from unet3d.training.step import LossFunction, Mark, StepResult, train_step

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
    """The training loop of a learner, and the step it is at."""

    learner: Learner
    learning_rate: Callable[[int], float]  # Maps an optimizer step, counted from 0, to its rate.
    clip: float | None
    mark: Mark
    log: Callable[[Mapping[str, float | int | str | None], int], None]
    step: int = 0
    last_validation: int = 0  # its step; a run that stopped between a step and its validation validates first

    def fit(
        self,
        stream: Iterator[Sequence[Batch]],
        steps: int,
        validate_every: int,
        validate: Action,
        after_step: Action,
        stop: Callable[[], bool],
    ) -> None:
        """Train up to optimizer step `steps`; validate every `validate_every` steps (0: never) and at the end.

        Call `after_step` after each step without a validation. Once `stop()` is true, return before the next step or
        validation begins.
        """

        def must_validate() -> bool:
            is_multiple = validate_every > 0 and self.step % validate_every == 0
            return self.step > self.last_validation and (is_multiple or self.step == steps)

        while not stop() and (must_validate() or self.step < steps):
            if must_validate():
                validate()
                self.last_validation = self.step
                continue
            self.learner.model.train()
            started = time.perf_counter()
            batches = next(stream)
            data_wait = time.perf_counter() - started
            rate = self.learning_rate(self.step)
            optim.set_rate(self.learner.optimizer, rate)
            result = train_step(*self.learner, batches, self.mark, self.clip)
            del batches  # They would be in memory together with the next ones.
            self.step += 1
            self._log(result, rate, time.perf_counter() - started, data_wait)
            if not must_validate():
                after_step()

    def _log(self, result: StepResult, rate: float, seconds: float, data_wait: float) -> None:
        """Log the numbers of the step that has just ended."""
        values = {
            "train/loss": result.loss,
            "train/lr": rate,
            "train/grad_norm": result.grad_norm,
            "time/step_s": seconds,
            "time/data_wait_s": data_wait,
        }
        if self.learner.scaler.is_enabled():
            values["train/scale"] = result.scale
        self.log(values, self.step)

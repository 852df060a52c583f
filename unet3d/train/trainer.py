"""The training loop. It is given built objects and a log to write to; it knows no config, no tracker and no file."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from unet3d.train.policy import MemoryPolicy
from unet3d.train.step import LossFunction, Mark, StepResult, train_step
from unet3d.types import Batch

Values = Mapping[str, float | int | str | None]


@dataclass
class Trainer:
    """Everything one step needs, and the step the run is at."""

    model: nn.Module
    loss: LossFunction
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    policy: MemoryPolicy
    learning_rate: Callable[[int], float]  # of the optimizer step, counted from 0
    clip: float | None
    mark: Mark
    log: Callable[[Values, int], None]
    step: int = 0
    paused: int = 0  # the step of the last pause; a run that was stopped between a step and its pause makes up for it

    def fit(
        self,
        stream: Iterator[Sequence[Batch]],
        steps: int,
        every: int,
        at_pause: Callable[[], None],
        should_stop: Callable[[], bool] = lambda: False,
        between: Callable[[], None] = lambda: None,
    ) -> None:
        """Train up to optimizer step `steps`; call `at_pause` every `every` steps (0: never) and at the end.

        `between` is called after each step that no pause follows.

        Ends between two steps, or between a step and its pause, once `should_stop`.
        """

        def is_due() -> bool:
            return self.step > self.paused and (self.step == steps or (every > 0 and self.step % every == 0))

        self.model.train()
        while not should_stop():
            if is_due():
                at_pause()
                self.paused = self.step
                self.model.train()
            elif self.step < steps:
                self._train(stream)
                if not is_due():
                    between()
            else:
                return

    def _train(self, stream: Iterator[Sequence[Batch]]) -> None:
        started = time.perf_counter()
        batches = next(stream)
        fetched = time.perf_counter()
        rate, result = self._update(batches)
        self._log(result, rate, fetched - started, time.perf_counter() - started)

    def _update(self, batches: Sequence[Batch]) -> tuple[float, StepResult]:
        rate = self.learning_rate(self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        result = train_step(
            self.model, self.loss, self.optimizer, self.scaler, self.policy, batches, self.mark, self.clip
        )
        self.step += 1
        return rate, result

    def _log(self, result: StepResult, rate: float, wait: float, total: float) -> None:
        values: dict[str, float | int | str | None] = {
            "train/loss": result.loss,
            "train/lr": rate,
            "train/grad_norm": result.grad_norm,
            "time/step_s": total,
            "time/data_wait_s": wait,
        }
        if self.scaler.is_enabled():
            values["train/scale"] = self.scaler.get_scale()
        self.log(values, self.step)

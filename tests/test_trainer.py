"""The order of steps, validations and saves."""

import torch
from torch import Tensor, nn

from unet3d.base.signals import Stop
from unet3d.base.types import Batch
from unet3d.training.policy import MemoryPolicy
from unet3d.training.step import ignore_mark
from unet3d.training.trainer import Learner, Trainer


def loss(logits: Tensor, label: Tensor) -> Tensor:
    return logits.square().mean()


def test_a_validation_follows_every_second_step_and_the_last_and_saves_are_between_the_others() -> None:
    """One that was left out as the run stopped is made up for."""
    log, stop = [], Stop()
    model, policy = nn.Sequential(nn.Conv3d(1, 1, 1)), MemoryPolicy()
    learner = Learner(model, loss, torch.optim.SGD(model.parameters()), policy.scaler(), policy)

    def log_step(values: object, step: int) -> None:
        log.append(f"step {step}")
        stop.asked = 15 if step == 2 else None

    trainer = Trainer(learner, lambda step: 0.5**step, None, ignore_mark, log_step)
    stream = iter([[Batch(torch.ones(1, 1, 2, 2, 2), torch.zeros(1, 2, 2, 2))]] * 9)

    def fit() -> None:
        trainer.fit(stream, 5, 2, lambda: log.append("validate"), lambda: log.append("between"), stop)

    fit()
    assert log == ["step 1", "between", "step 2"] and (trainer.step, trainer.last_validation) == (2, 0)
    stop.asked = None
    fit()
    assert log[3:] == ["validate", "step 3", "between", "step 4", "validate", "step 5", "validate"]
    assert (trainer.step, trainer.last_validation) == (5, 5)
    assert learner.optimizer.param_groups[0]["lr"] == 0.5**4

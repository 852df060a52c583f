"""The way from the command line to a step, and the order of steps, validations and saves."""

import json
import traceback
from pathlib import Path

import torch
from torch import Tensor, nn
from training import ROOT, TINY, call, train

from unet3d.base.signals import Stop
from unet3d.base.types import Batch
from unet3d.training.policy import MemoryPolicy
from unet3d.training.step import ignore_mark
from unet3d.training.trainer import Learner, Trainer


def test_twelve_frames_in_seven_files_lead_from_the_command_line_to_a_step(tmp_path: Path) -> None:
    done = train(tmp_path, *TINY, "steps=1", "hydra.run.dir=run", hook=write_stack)
    assert done.code == 0, done.err
    stack = json.loads((tmp_path / "stack").read_text())
    assert [name for _, name in stack][:: len(stack) - 1] == ["<module>", "train_step"]
    assert len(stack) <= 12 and len({file for file, _ in stack}) <= 7, stack


def write_stack() -> None:
    def write() -> None:
        stack = [(frame.filename, frame.name) for frame in traceback.extract_stack()]
        ours = [(file, name) for file, name in stack if file.startswith((f"{ROOT}/unet3d/", f"{ROOT}/train.py"))]
        Path("stack").write_text(json.dumps(ours))

    call(MemoryPolicy, "forward", 1, write)


def made(log: list[str]) -> Trainer:
    """Of one convolution; logs its steps."""
    model = nn.Sequential(nn.Conv3d(1, 1, 1))
    policy = MemoryPolicy()

    def loss(logits: Tensor, label: Tensor) -> Tensor:
        return logits.square().mean()

    learner = Learner(model, loss, torch.optim.SGD(model.parameters()), policy.scaler(), policy)
    return Trainer(learner, lambda step: 0.5**step, None, ignore_mark, lambda values, step: log.append(f"step {step}"))


def fit(trainer: Trainer, log: list[str], steps: int, every: int, stop: Stop) -> None:
    stream = iter([[Batch(torch.ones(1, 1, 2, 2, 2), torch.zeros(1, 2, 2, 2))]] * 9)
    trainer.fit(stream, steps, every, lambda: log.append("validate"), lambda: log.append("between"), stop)


def test_a_validation_follows_every_second_step_and_the_last_and_saves_are_between_the_others() -> None:
    log: list[str] = []
    trainer = made(log)
    fit(trainer, log, 5, 2, Stop())
    first, second = ["step 1", "between", "step 2", "validate"], ["step 3", "between", "step 4", "validate"]
    assert log == [*first, *second, "step 5", "validate"]
    assert (trainer.step, trainer.last_validation) == (5, 5)
    assert trainer.learner.optimizer.param_groups[0]["lr"] == 0.5**4


def test_a_run_that_stopped_before_a_validation_makes_up_for_it() -> None:
    log: list[str] = []
    trainer, stop = made(log), Stop()
    trainer.log = lambda values, step: setattr(stop, "asked", step)  # within step 1
    fit(trainer, log, 1, 0, stop)
    assert log == [] and (trainer.step, trainer.last_validation) == (1, 0)
    fit(trainer, log, 1, 0, Stop())
    assert log == ["validate"]

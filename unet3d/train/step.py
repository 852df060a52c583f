"""One training step. Training, measuring and predicting memory all call this function; there is no second one."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from unet3d.errors import NonFiniteLoss
from unet3d.train.policy import MemoryPolicy
from unet3d.types import Batch

PHASES = ("data", "forward", "loss", "backward", "step")


LOWEST_SCALE = 1.0  # of fp16 losses; below it the gradients overflow whatever the scale


Mark = Callable[[str], None]


class StepResult(NamedTuple):
    loss: float  # mean over the micro-batches
    grad_norm: float  # before clipping


class LossFunction(Protocol):
    def __call__(self, logits: Any, label: Tensor) -> Tensor: ...


def ignore_mark(phase: str) -> None:
    """The meter that measures nothing."""


def train_step(
    model: nn.Module,
    loss: LossFunction,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    policy: MemoryPolicy,
    batches: Sequence[Batch],
    mark: Mark = ignore_mark,
    clip: float | None = None,
) -> StepResult:
    """Accumulate gradients over the micro-batches, then update once.

    `mark` is called with each phase's name as it begins and with "end". Raises NonFiniteLoss before the update.
    """
    device = next(model.parameters()).device
    total = 0.0
    for batch in batches:
        mark("data")
        # detach is an operation even where `to` has nothing to do: a ledger sees the batch arrive.
        image = batch.image.to(device, non_blocking=True).detach()
        label = batch.label.to(device, non_blocking=True).detach()
        mark("forward")
        logits = policy.forward(model, image)
        mark("loss")
        value = loss(logits, label) / len(batches)
        del logits, image, label
        mark("backward")
        with policy.convolutions():
            scaler.scale(value).backward()
        total += value.item()
        del value
    mark("step")
    scaler.unscale_(optimizer)
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    grad_norm = norm.item()
    _refuse_non_finite(total, grad_norm, model, scaler, batches)
    if clip is not None:
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), clip, norm)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    mark("end")
    return StepResult(total, grad_norm)


def _refuse_non_finite(
    loss: float, norm: float, model: nn.Module, scaler: torch.amp.GradScaler, batches: Sequence[Batch]
) -> None:
    """fp16 may overflow now and then: the scaler skips the update and halves its scale, but not for ever.

    Nor where running statistics have overflowed: no later step makes those finite again.
    """
    if math.isfinite(loss) and math.isfinite(norm):
        return
    statistics_hold = all(buffer.isfinite().all() for buffer in model.buffers())
    if scaler.is_enabled() and scaler.get_scale() >= LOWEST_SCALE and statistics_hold:
        return
    cases = ", ".join(sorted({case for batch in batches for case in batch.cases}))
    told = f"loss {loss}, gradient norm {norm} on {cases}; the weights are those before the step"
    if not statistics_hold:
        told += ", the running statistics of batch norm are not: go on from a snapshot"
        told += ", with amp_dtype=bf16" if scaler.is_enabled() else ""  # fp16 overflows where bf16 does not
    raise NonFiniteLoss(told, batches)

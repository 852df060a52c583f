"""One training step. Training, measuring memory and predicting it all call this function; there is no second one."""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from unet3d.base import ranks
from unet3d.base.errors import NonFiniteLoss
from unet3d.base.types import Batch
from unet3d.training.policy import MemoryPolicy

PHASES = ("data", "forward", "loss", "backward", "step")
LOWEST_SCALE = 1.0  # Gradients of fp16 that overflow below this scale overflow at any.
Mark = Callable[[str], None]  # called with each phase's name as it begins, and with "end"
LossFunction = Callable[[Any, Tensor], Tensor]  # Arguments: the model's output, the label map N D H W.


class StepResult(NamedTuple):
    """Numbers of one step."""

    loss: float  # mean over the micro-batches
    grad_norm: float  # before clipping
    scale: float = 1.0  # Factor of fp16 losses.


def ignore_mark(phase: str) -> None:
    """Measure nothing."""


def train_step(
    model: nn.Module,
    loss: LossFunction,
    optimizer: torch.optim.Optimizer,
    scaler: GradScaler,
    policy: MemoryPolicy,
    batches: Sequence[Batch],
    mark: Mark = ignore_mark,
    clip: float | None = None,
) -> StepResult:
    """Accumulate gradients over the micro-batches, then update once. Raises NonFiniteLoss before the update."""
    device = next(model.parameters()).device
    losses: list[Tensor] = []
    for batch in batches:
        mark("data")
        image, label = _to_device(batch, device)
        mark("forward")
        logits = policy.forward(model, image)
        mark("loss")
        value = loss(logits, label) / len(batches)
        del logits, image, label
        mark("backward")
        with policy.cpu_half_precision():
            scaler.scale(value).backward()
        losses.append(value.detach())
        del value
    mark("step")
    ranks.all_reduce_sum(_gradients(model))
    scaler.unscale_(optimizer)
    # `foreach`: as torch chooses by itself, but for fake tensors.
    norm = torch.nn.utils.get_total_norm(_gradients(model), foreach=True)
    result = _read(losses, norm, scaler)
    _refuse_non_finite(result, model, scaler, batches)
    if clip is not None:
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), clip, norm, foreach=True)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    mark("end")
    return result


def _to_device(batch: Batch, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the batch's image and label on the device."""
    # Where the batch is on the device already, `detach` is the operation that shows it to a ledger.
    image = batch.image.to(device, non_blocking=True).detach()
    label = batch.label.to(device, non_blocking=True).detach()
    return image, label


def _gradients(model: nn.Module) -> list[Tensor]:
    """Return the gradients of the parameters that have one."""
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def _read(losses: Sequence[Tensor], norm: Tensor, scaler: GradScaler) -> StepResult:
    """Return the step's numbers. On CUDA this is the step's one wait for the device: they are read together."""
    numbers = [norm, *losses]
    if scaler.is_enabled():
        numbers.append(scaler.scale(torch.ones_like(norm)))
    exact = torch.promote_types(norm.dtype, losses[0].dtype)  # The norm of half-precision weights is half precision.
    together = torch.stack([number.to(exact) for number in numbers])
    if together.is_cuda and ranks.count() > 1:
        done = torch.cuda.Event()
        done.record()
        ranks.wait_until(done.query)
    grad_norm, *others = together.tolist()
    mean_loss = sum(others[: len(losses)])  # each is divided by their number
    return StepResult(mean_loss, grad_norm, *others[len(losses) :])


def _refuse_non_finite(
    result: StepResult,
    model: nn.Module,
    scaler: GradScaler,
    batches: Sequence[Batch],
) -> None:
    """Raise NonFiniteLoss, unless fp16 overflowed at a scale that can fall: then the scaler skips the update.

    Running statistics that overflowed always raise: no later step makes them finite.
    """
    if all(map(math.isfinite, result)):
        return
    has_overflow = not all(buffer.isfinite().all() for buffer in model.buffers())
    statistics_hold = not ranks.all_reduce_max(has_overflow)
    if scaler.is_enabled() and result.scale >= LOWEST_SCALE and statistics_hold:
        return
    cases_of_rank = [case for batch in batches for case in batch.cases]
    cases = sorted(set(itertools.chain(*ranks.gather(cases_of_rank))))
    message = f"loss {result.loss}, gradient norm {result.grad_norm} on {', '.join(cases)}"
    message += "; the weights are those before the step"
    if not statistics_hold:
        message += ", the running statistics of batch norm are not: go on from a checkpoint"
        if scaler.is_enabled():
            message += ", with amp_dtype=bf16"  # fp16 overflows where bf16 does not
    raise NonFiniteLoss(message, batches)

"""A step of a user's own network: its parts made or refused, its failures explained, the network put back after it."""

import copy
import inspect
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves
from torch.utils.weak import TensorWeakRef

from unet3d.base.errors import UserError, is_out_of_memory, reason
from unet3d.base.types import Batch
from unet3d.memory import tables
from unet3d.memory.fake_tensors import asked_in, unknown
from unet3d.recomputing.module import Recomputed, schedules_of
from unet3d.recomputing.trace import cannot_take
from unet3d.training.losses import SegmentationLoss, dice_ce
from unet3d.training.policy import MemoryPolicy, amp_dtype
from unet3d.training.step import LossFunction
from unet3d.training.trainer import Learner

Example = Tensor | Sequence[int]  # an image N C D H W, or its shape
MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]
NUMPY = ".numpy() is not supported"  # Torch refuses it for tensors without data.
NO_GRADIENT = "does not require grad and does not have a grad_fn"  # Torch refuses a backward pass of nothing.


@contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """Put a model's weights, buffers, gradients and modes back afterwards; copies wait in host memory."""
    weights = [(weight, weight.detach().to("cpu", copy=True), weight.grad) for weight in model.parameters()]
    modules = []
    for module in model.modules():
        buffers = {name: None if buffer is None else _kept(buffer) for name, buffer in module._buffers.items()}
        modules.append((module, module.training, dict(module._parameters), buffers))
    for weight, _, _ in weights:
        weight.grad = None
    try:
        yield
    finally:
        for module, mode, parameters, buffers in modules:  # a step may have put other tensors there
            module.training = mode
            module._parameters.clear()
            module._parameters.update(parameters)
            module._buffers.clear()
            module._buffers.update({name: kept and _put_back(*kept) for name, kept in buffers.items()})
        for weight, value, gradient in weights:
            weight.grad = gradient
            _write_over(weight, value)


def _kept(buffer: Tensor) -> tuple[TensorWeakRef, Tensor, torch.device]:
    """Return a copy of a buffer, which is not held: a step that puts another in its place frees it."""
    return TensorWeakRef(buffer), buffer.detach().to("cpu", copy=True), buffer.device


def _put_back(reference: TensorWeakRef, value: Tensor, device: torch.device) -> Tensor:
    """Return the buffer as it was, or a copy of one that is gone."""
    buffer: Tensor | None = reference()
    if buffer is None:
        return value.to(device)
    _write_over(buffer, value)
    return buffer


@torch.no_grad()
def _write_over(tensor: Tensor, value: Tensor) -> None:
    """Give a tensor these values, unless it has them: what is expanded cannot be written to, and is not."""
    if not torch.equal(tensor.to("cpu"), value):
        tensor.copy_(value)


def on_fake_tensors(model: nn.Module, target: str) -> nn.Module:
    """Return a copy whose weights and buffers have shapes and no data, within `fake_mode`; other tensors are shared.

    What recomputes in it does so as on the `target`, "cpu" or "cuda", and is silent.
    """
    copies: dict[int, Any] = {}
    modules = list(model.modules())
    for module in modules:
        for attribute in tree_leaves(list(vars(module).values())):
            if isinstance(attribute, Tensor):
                copies[id(attribute)] = attribute
            elif isinstance(attribute, nn.Module) and attribute not in modules:
                modules.append(attribute)
    for tensor in (*model.parameters(), *model.buffers()):
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        if isinstance(tensor, nn.Parameter):
            fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
        copies[id(tensor)] = fake
    fake_model: nn.Module = copy.deepcopy(model, copies)
    for module in fake_model.modules():
        if isinstance(module, Recomputed):
            schedules_of(module).device_type = target
            schedules_of(module).is_silent = True
    return fake_model


def network_of(model: nn.Module) -> nn.Module:
    """Return the network itself, of one that recomputes."""
    return schedules_of(model).network if isinstance(model, Recomputed) else model


def find_schedule(model: nn.Module, image: Tensor, policy: MemoryPolicy) -> None:
    """Let a network that recomputes find its schedule for an image N C D H W, while it has no observer's hooks."""
    if not isinstance(model, Recomputed):
        return
    autocast = torch.autocast(policy.device_type, policy.dtype, enabled=policy.dtype is not None)
    with autocast, policy.cpu_half_precision():
        schedules_of(model).program(image.detach())  # The step gives it like this.


@contextmanager
def failures_explained(guesses: list[str]) -> Iterator[None]:
    """Raise UserError for a failure of a step on fake tensors that comes of values that they do not have."""
    try:
        yield
    except Exception as error:
        if NUMPY in str(error):
            raise unknown(asked_in(error.__traceback__), error) from error
        places = tables.places_read(guesses)
        if not places or isinstance(error, UserError):
            raise
        where = f"with values taken as 0 at {', '.join(places)}"
        raise UserError(f"{where}, a step fails: {reason(error)}; use unet3d.memory.explain") from error


@contextmanager
def image_explained(model: nn.Module, example: Example, policy: MemoryPolicy) -> Iterator[None]:
    """Raise UserError for a failure of a step whose image the network cannot take, or that trains nothing."""
    try:
        yield
    except Exception as error:
        if isinstance(error, UserError | ImportError) or is_out_of_memory(error):
            raise
        if NO_GRADIENT in str(error):
            problem = "the loss has no gradient: forward detaches its output, or computes it without gradients"
            raise UserError(f"{type(network_of(model)).__name__}: {problem}") from error
        weight = next(model.parameters())
        size, dtype = _size_and_type(example, weight.dtype)
        with torch.autocast(policy.device_type, policy.dtype, policy.dtype is not None):
            line = cannot_take(network_of(model), size, dtype, weight.device)
        if line is None:
            raise
        raise UserError(line) from error


def refuse_network(model: nn.Module, depth: int | None) -> None:
    """Raise UserError for what is no network, or none whose steps can be followed, and for a depth that is none."""
    name = type(model).__name__
    if not isinstance(model, nn.Module):
        raise UserError(f"model: give a network, a torch.nn.Module, not {name}")
    if isinstance(model, torch.jit.ScriptModule):
        raise UserError(f"{name}: is compiled by torch.jit; give the network before that")
    if any(is_lazy(tensor) for tensor in (*model.parameters(), *model.buffers())):
        raise UserError(f"{name}: its lazy layers have no weights yet; call it once with an image")
    weights = list(model.parameters())
    if not any(weight.requires_grad for weight in weights):
        why = ": requires_grad is false for all" if weights else ""
        raise UserError(f"{name}: has no weights to train{why}")
    if depth is not None and (isinstance(depth, bool) or not isinstance(depth, int) or depth < 1):
        raise UserError(f"depth={depth}: give the number of parts of layers' names, from 1 on")


@contextmanager
def draws_noted(guesses: list[str]) -> Iterator[None]:
    """Note among the guesses that Python's or NumPy's random numbers were drawn, and put these back as they were."""
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    try:
        yield
    finally:
        if random.getstate() != python_state:
            guesses.append("a draw of Python's random")
        if repr(np.random.get_state()) != repr(numpy_state):
            guesses.append("a draw of numpy.random")
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def learner_of(model: nn.Module, loss: LossFunction | None, optimizer: MakeOptimizer, policy: MemoryPolicy) -> Learner:
    if not callable(optimizer):
        raise UserError(f"optimizer: give a function of the weights, such as torch.optim.Adam, not {optimizer!r}")
    if loss is not None and not callable(loss):
        raise UserError(f"loss: give a function of the network's output and the label, not {loss!r}")
    weights = model.train().parameters()
    made = optimizer(weights)
    closure = inspect.signature(type(made).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        name = type(made).__name__
        raise UserError(
            f"optimizer: {name} calls the loss itself, in step(closure), as no step here does; give another"
        )
    return Learner(model, loss or segmentation_loss, made, policy.scaler(), policy)


def segmentation_loss(output: Any, label: Tensor) -> Tensor:
    """Return Dice and cross-entropy of logits N K D H W, or of several, finest first, as with deep supervision."""
    if isinstance(output, dict):
        raise UserError("the network returns a dict; give a loss that is called with it and the label")
    if isinstance(output, list):
        output = tuple(output)
    return SegmentationLoss(dice_ce)(output, label)


def policy_of(amp: bool | str, device_type: str, target: str) -> MemoryPolicy:
    if not isinstance(amp, bool) and amp not in ("bf16", "fp16"):
        raise UserError(f"amp={amp}: give true, false, bf16 or fp16")
    dtype = amp_dtype("auto" if amp is True else str(amp), target) if amp else None
    return MemoryPolicy(device_type, dtype)


def batch_of(
    model: nn.Module, example: Example, label: Tensor | None, device: torch.device | None, is_volume: bool
) -> Batch:
    """Return the example and its labels on a device; without a device, tensors like them, within `fake_mode`.

    An image of a shape is noise of the weights' type; `is_volume`: the loss is for volumes.
    """
    shape, dtype = _size_and_type(example, next(model.parameters()).dtype)
    if len(shape) < 3 or (is_volume and len(shape) != 5) or not all(isinstance(n, int) and n > 0 for n in shape):
        raise UserError(f"example: give an image N C D H W, or its shape, such as (1, 1, 96, 96, 96), not {shape}")
    if not isinstance(example, Tensor):
        example = torch.randn(shape, dtype=dtype, device=device)
    if label is None:
        label = torch.zeros(shape[0], *shape[2:], dtype=torch.int64)
    if device is None:
        empty = torch.empty(shape, dtype=dtype, device="cpu")
        return Batch(empty, torch.zeros(label.shape, dtype=label.dtype, device="cpu"))
    return Batch(example.to(device), label.to(device))


def _size_and_type(example: Example, dtype: torch.dtype) -> tuple[tuple[int, ...], torch.dtype]:
    """Return the shape of an image, in Python's integers, and its type, which is `dtype` where a shape is given."""
    if isinstance(example, Tensor):
        return tuple(example.shape), example.dtype
    try:  # What is no integer stays, to be refused.
        return tuple(int(size) if hasattr(size, "__index__") else size for size in example), dtype
    except TypeError:
        raise UserError(f"example: give an image N C D H W, or its shape, not {example!r}") from None

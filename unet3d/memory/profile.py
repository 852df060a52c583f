"""Memory of a training step of any network, measured (`unet3d.memory.explain`) or predicted (`.predict`).

Both run the package's one training step, on the user's own module. A prediction runs it on fake tensors, which have
shapes and no data: it makes nothing as large as a map.
"""

import inspect
import os
import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import AdamW, Optimizer

from unet3d.base.errors import UserError, is_out_of_memory, reason
from unet3d.base.terminal import NARROW, plain_text
from unet3d.base.types import Batch, Table, mib
from unet3d.memory import tables
from unet3d.memory.allocator import read_settings
from unet3d.memory.copies import GpuLedger
from unet3d.memory.fake_tensors import asked_in, fake_mode, unknown
from unet3d.memory.levels import layer_names
from unet3d.memory.meter import MEASURED_STEPS, LedgerMeter, open_meter
from unet3d.memory.peak import peak_of
from unet3d.memory.simulate import fake_steps
from unet3d.memory.user_module import on_fake_tensors, restored
from unet3d.recomputing.module import Recomputed, schedules_of
from unet3d.recomputing.program import Program
from unet3d.recomputing.trace import cannot_take
from unet3d.training.losses import SegmentationLoss, dice_ce
from unet3d.training.policy import MemoryPolicy, amp_dtype
from unet3d.training.step import LossFunction, train_step
from unet3d.training.trainer import Learner

Example = Tensor | Sequence[int]  # an image N C D H W, or its shape
MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]
NUMPY = ".numpy() is not supported"  # as torch refuses it of tensors without data
NO_GRADIENT = "does not require grad and does not have a grad_fn"  # as it refuses a backward pass of nothing
LAYERS_SHOWN = 8  # layers printed
UNOBSERVED = 2  # steps on a GPU after those of the ledger: the allocator's peaks are theirs


@dataclass(frozen=True)
class Explanation:
    """An account of a training step's memory. `print` shows it; sizes are bytes, of all tensors of the step."""

    name: str  # of the network's class
    kind: str  # "measured" or "predicted"
    about: str  # the step in a line
    meter: LedgerMeter

    @property
    def is_for_cuda(self) -> bool:
        """Whether this is a prediction for CUDA."""
        return self.kind == "predicted" and isinstance(self.meter.ledger, GpuLedger)

    @cached_property
    def entry(self) -> dict[str, Any]:
        """Return all figures, as memory.json of a run has them; a prediction for CUDA has those of its allocator."""
        summary = self.meter.summary()
        if self.is_for_cuda:
            step = peak_of(self.meter.ledger)
            summary |= {"allocated_bytes": step.allocated, "reserved_bytes": step.reserved}
        return summary

    @property
    def ledger(self) -> dict[str, Any]:
        """Return the ledger's figures, which know layers; on a GPU `entry` is the allocator's."""
        entry: dict[str, Any] = self.entry.get("ledger", self.entry)
        return entry

    @property
    def peak_bytes(self) -> int:
        """Return the most bytes at once."""
        return int(self.entry["peak_bytes"])

    @property
    def phases(self) -> dict[str, dict[str, int]]:
        """Return the peaks of data, forward, loss, backward and step: in the "first" step, where known, and later."""
        return dict(self.entry["phases"])

    @property
    def categories(self) -> dict[str, int]:
        """Return the bytes at the peak: params, grads, optimizer, activations, temporaries, inputs."""
        return dict(self.ledger["categories"])

    @property
    def layers(self) -> list[dict[str, Any]]:
        """Return the bytes at the peak by layer, in the order of work."""
        return list(self.ledger["layers"])

    @property
    def guesses(self) -> list[str]:
        """Return FILE:LINE of code that read values, taken as 0, and what a prediction leaves out; empty: exact."""
        return list(self.meter.guesses)

    @property
    def program(self) -> Program | None:
        """Return what the steps of a network that recomputes follow; None for other networks."""
        model = self.meter.model
        return list(schedules_of(model).programs.values())[-1] if isinstance(model, Recomputed) else None

    @property
    def parameters(self) -> int:
        """Return the number of weights."""
        return sum(p.numel() for p in self.meter.model.parameters())

    def __str__(self) -> str:
        return plain_text(self._parts(), NARROW).rstrip()

    def _parts(self) -> Iterator[str | tuple[str, Table]]:
        yield f"{self.name}: {self.parameters:,} parameters; {self.about}"
        kind = tables.predicted_kind(self.entry) if self.kind == "predicted" else self.entry["kind"]
        yield f"{self.kind} peak of a step: {mib(self.peak_bytes)} MiB ({kind})"
        yield f"peak reached in {tables.moment(self.ledger)}"
        lines = (tables.guessed, tables.replayed, tables.with_workspaces, tables.largest_workspaces, tables.cuda_sizes)
        for line_on in lines:
            line = line_on(self.entry)
            if line:
                yield line
        if self.is_for_cuda:
            _, left_out = read_settings(os.environ)
            yield from left_out
        yield "Memory of a step, by phase", tables.phases(self.entry | {"phase_ends": {}})
        yield "At the peak, by category", tables.categories(self.ledger)
        largest = sorted(self.layers, key=lambda row: -row["bytes"])[:LAYERS_SHOWN]
        rows = []
        for layer in self.layers:
            if layer in largest:
                share = layer["bytes"] / self.ledger["peak_bytes"]
                rows.append([layer["module"], mib(layer["bytes"]), f"{share:.1%}"])
        yield f"At the peak, the {len(rows)} largest layers in order", Table(["layer", "MiB", "share"], rows)


def explain(
    model: nn.Module,
    example: Example,
    loss: LossFunction | None = None,
    optimizer: MakeOptimizer = AdamW,
    amp: bool | str = False,
    label: Tensor | None = None,
    depth: int | None = None,
) -> Explanation:
    """Measure training steps of `model` where its weights are, and leave it as it was.

    `example`: an image N C D H W, or its shape. `loss`: called with the model's output and `label`; None: Dice and
    cross-entropy. `optimizer`: called with the weights, such as `torch.optim.SGD`, or a partial. `amp`: mixed
    precision; true, "bf16" or "fp16". `label`: integers N D H W; None: background. `depth`: parts of layers' names, as
    1 for `encoder` of `encoder.block.0`; None: all of them, or the short names of the package's own network. On the
    CPU all tensors are counted, without scratch memory within kernels; on a GPU the allocator's peaks come from steps
    that nothing observes. Raises UserError, and what the model raises.
    """
    _refuse_network(model)
    device = _device(model)
    if device.type == "meta":
        raise UserError(f"{type(model).__name__}: weights on meta have no data to measure; use unet3d.memory.predict")
    _refuse_depth(depth)
    on_gpu = device.type == "cuda"
    policy = _policy(amp, device.type, device.type)
    steps = MEASURED_STEPS + UNOBSERVED if on_gpu else MEASURED_STEPS
    draws = torch.random.fork_rng([device] if on_gpu else [])
    with _image_explained(model, example, policy), draws, restored(model):
        batch = _batch(model, example, label, device, loss is None)
        learner = _learner(model, loss, optimizer, policy)
        _find_schedule(model, batch.image, policy)
        meter = open_meter(model, learner.optimizer)
        meter.ledger.layer = layer_names(model, depth)
        with closing(meter):
            for _ in range(steps):
                train_step(*learner, [batch], meter.mark)
        explanation = Explanation(_network_name(model), "measured", _about(batch, policy, device.type), meter)
        _ = explanation.entry  # reads the allocator's counters now
    return explanation


def predict(
    model: nn.Module,
    example: Example,
    loss: LossFunction | None = None,
    optimizer: MakeOptimizer = AdamW,
    amp: bool | str = False,
    label: Tensor | None = None,
    device: str | None = None,
    depth: int | None = None,
) -> Explanation:
    """Predict what `explain` would measure, without data; arguments are its own. Allocates no map.

    `device`: "cpu" or "cuda", also where there is no GPU; None: where the weights are, "cpu" for weights on meta. On
    CUDA the peak is of tensors; `entry` also has by how much workspaces of convolutions raise it, and, with them, what
    the allocator gives out and reserves.

    Where the network or the loss reads a value, as in `if x.mean() > 0`, it is taken as 0: a guess, which is a warning
    and in `guesses`. So is the workspace of an LSTM, whose size is not known. Raises UserError where sizes depend on
    values.
    """
    _refuse_network(model)
    if "_orig_mod" in model._modules:
        raise UserError(f"{type(model).__name__}: is compiled; give the network before torch.compile")
    _refuse_depth(depth)
    model_device = _device(model).type
    target = device or ("cpu" if model_device == "meta" else model_device)
    if target not in ("cpu", "cuda"):
        raise UserError(f"device={device}: give cpu or cuda")
    policy = _policy(amp, "cpu", target)
    no_draws = torch.random.fork_rng([])
    explained = _image_explained(model, example, policy)
    with explained, no_draws, fake_mode(target) as guesses, _draws_noted(guesses):
        batch = _batch(model, example, label, None, loss is None)
        fake = on_fake_tensors(model)
        for module in fake.modules():
            if isinstance(module, Recomputed):
                schedules_of(module).device_type = target
                schedules_of(module).is_silent = True
        learner = _learner(fake, loss, optimizer, policy)
        with _failures_explained(guesses):
            _find_schedule(fake, batch.image, policy)
            meter = fake_steps(learner, lambda: [batch], target)
    meter.guesses = guesses
    meter.ledger.layer = layer_names(model, depth)
    explanation = Explanation(_network_name(model), "predicted", _about(batch, policy, target), meter)
    if guesses:
        warnings.warn(tables.guessed(explanation.entry), stacklevel=2)
    return explanation


def _network_name(model: nn.Module) -> str:
    """Return the class of a network, also of one that recomputes."""
    network = schedules_of(model).network if isinstance(model, Recomputed) else model
    return type(network).__name__


def _find_schedule(model: nn.Module, image: Tensor, policy: MemoryPolicy) -> None:
    """Let a network that recomputes find its schedule for an image N C D H W, while it has no observer's hooks."""
    if not isinstance(model, Recomputed):
        return
    autocast = torch.autocast(policy.device_type, policy.dtype, enabled=policy.dtype is not None)
    with autocast, policy.cpu_half_precision():
        schedules_of(model).program(image.detach())  # as the step gives it


@contextmanager
def _failures_explained(guesses: list[str]) -> Iterator[None]:
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
def _image_explained(model: nn.Module, example: Example, policy: MemoryPolicy) -> Iterator[None]:
    """Raise UserError for a failure of a step whose image the network cannot take, or that trains nothing."""
    try:
        yield
    except Exception as error:
        if isinstance(error, UserError | ImportError) or is_out_of_memory(error):
            raise
        if NO_GRADIENT in str(error):
            problem = "the loss has no gradient: forward detaches its output, or computes it without gradients"
            raise UserError(f"{_network_name(model)}: {problem}") from error
        network = schedules_of(model).network if isinstance(model, Recomputed) else model
        weight = next(model.parameters())
        size, dtype = _size_and_type(example, weight.dtype)
        with torch.autocast(policy.device_type, policy.dtype, policy.dtype is not None):
            line = cannot_take(network, size, dtype, weight.device)
        if line is None:
            raise
        raise UserError(line) from error


def _refuse_network(model: nn.Module) -> None:
    """Raise UserError for what is no network, or none whose steps can be followed."""
    name = type(model).__name__
    if not isinstance(model, nn.Module):
        raise UserError(f"model: give a network, a torch.nn.Module, not {name}")
    if isinstance(model, torch.jit.ScriptModule):
        raise UserError(f"{name}: is compiled by torch.jit; give the network before that")
    if any(is_lazy(tensor) for tensor in (*model.parameters(), *model.buffers())):
        raise UserError(f"{name}: its lazy layers have no weights yet; call it once with an image")
    weights = list(model.parameters())
    if weights and not any(weight.requires_grad for weight in weights):
        raise UserError(f"{name}: has no weights to train: requires_grad is false for all")


def _refuse_depth(depth: int | None) -> None:
    if depth is not None and (isinstance(depth, bool) or not isinstance(depth, int) or depth < 1):
        raise UserError(f"depth={depth}: give the number of parts of layers' names, from 1 on")


@contextmanager
def _draws_noted(guesses: list[str]) -> Iterator[None]:
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


def _learner(model: nn.Module, loss: LossFunction | None, optimizer: MakeOptimizer, policy: MemoryPolicy) -> Learner:
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


def _policy(amp: bool | str, device_type: str, target: str) -> MemoryPolicy:
    if not isinstance(amp, bool) and amp not in ("bf16", "fp16"):
        raise UserError(f"amp={amp}: give true, false, bf16 or fp16")
    if not amp:
        return MemoryPolicy(device_type, None)
    name = "auto" if amp is True else str(amp)
    return MemoryPolicy(device_type, amp_dtype(name, target))


def _device(model: nn.Module) -> torch.device:
    weight = next(model.parameters(), None)
    if weight is None:
        raise UserError(f"{type(model).__name__}: has no weights to train")
    return weight.device


def _batch(
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
    elif device is None:
        example = torch.empty(shape, dtype=example.dtype)
    if label is None:
        label = torch.zeros(shape[0], *shape[2:], dtype=torch.int64)
    elif device is None:
        label = torch.zeros(label.shape, dtype=label.dtype)
    return Batch(example.to(device or "cpu"), label.to(device or "cpu"))


def _size_and_type(example: Example, dtype: torch.dtype) -> tuple[tuple[int, ...], torch.dtype]:
    """Return the shape of an image, in Python's integers, and its type, which is `dtype` where a shape is given."""
    if isinstance(example, Tensor):
        return tuple(example.shape), example.dtype
    try:  # What is no integer stays, to be refused.
        return tuple(int(size) if hasattr(size, "__index__") else size for size in example), dtype
    except TypeError:
        raise UserError(f"example: give an image N C D H W, or its shape, not {example!r}") from None


def _about(batch: Batch, policy: MemoryPolicy, device_type: str) -> str:
    precision = f"amp {str(policy.dtype).removeprefix('torch.')}" if policy.dtype else "float32"
    return f"input {'x'.join(map(str, batch.image.shape))}, {precision}, on {device_type}"

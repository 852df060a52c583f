"""The memory of a training step of any network, measured (`unet3d.memory.explain`) or predicted (`.predict`).

Both run the package's one training step, on the user's own module. A prediction runs it on fake tensors, which have
shapes and no data: it makes nothing as large as a map.
"""

import copy
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
from torch.optim import AdamW, Optimizer
from torch.utils._pytree import tree_leaves
from torch.utils.weak import TensorWeakRef

from unet3d.base.errors import UserError, reason
from unet3d.base.terminal import NARROW, plain_text
from unet3d.base.types import Batch, Table, mib
from unet3d.memory import tables
from unet3d.memory.analysis import layer_names
from unet3d.memory.meter import MEASURED_STEPS, LedgerMeter, open_meter
from unet3d.memory.simulate import asked_in, fake_mode, fake_steps, unknown
from unet3d.training.losses import SegmentationLoss, dice_ce
from unet3d.training.policy import MemoryPolicy, amp_dtype
from unet3d.training.step import LossFunction, train_step
from unet3d.training.trainer import Learner

Example = Tensor | Sequence[int]  # an image N C D H W, or its shape
MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]
NUMPY = ".numpy() is not supported"  # as torch refuses it of tensors without data
LARGEST = 8  # layers printed
UNOBSERVED = 2  # steps on a GPU after those of the ledger: the allocator's peaks are theirs


@dataclass(frozen=True)
class Explanation:
    """Where the memory of a training step goes. `print` shows it; sizes are bytes, of all tensors of the step."""

    name: str  # of the network's class
    kind: str  # "measured" or "predicted"
    about: str  # the step in a line
    meter: LedgerMeter

    @cached_property
    def entry(self) -> dict[str, Any]:
        """All figures, as memory.json of a run has them."""
        return self.meter.summary()

    @property
    def ledger(self) -> dict[str, Any]:
        """Those of the ledger, which knows layers; on a GPU `entry` is the allocator's."""
        found: dict[str, Any] = self.entry.get("ledger", self.entry)
        return found

    @property
    def peak_bytes(self) -> int:
        """Most bytes at once."""
        return int(self.entry["peak_bytes"])

    @property
    def phases(self) -> dict[str, dict[str, int]]:
        """Of data, forward, loss, backward and step: the peak of the "first" step, where known, and of later ones."""
        return dict(self.entry["phases"])

    @property
    def categories(self) -> dict[str, int]:
        """Bytes at the peak: params, grads, optimizer, activations, temporaries, inputs."""
        return dict(self.ledger["categories"])

    @property
    def layers(self) -> list[dict[str, Any]]:
        """Bytes at the peak by layer, in the order of work."""
        return list(self.ledger["layers"])

    @property
    def guesses(self) -> list[str]:
        """FILE:LINE of code that read values, which a prediction takes as 0, and what it leaves out; empty: exact."""
        return list(self.meter.guesses)

    @property
    def parameters(self) -> int:
        """Number of weights."""
        return sum(p.numel() for p in self.meter.model.parameters())

    def __str__(self) -> str:
        return plain_text(self._parts(), NARROW).rstrip()

    def _parts(self) -> Iterator[str | tuple[str, Table]]:
        yield f"{self.name}: {self.parameters:,} parameters; {self.about}"
        yield f"{self.kind} peak of a step: {mib(self.peak_bytes)} MiB ({self.entry['kind']})"
        yield f"at its highest in {tables.moment(self.ledger)}"
        about = (tables.guessed, tables.workspace_bound, tables.largest_workspaces, tables.cuda_sizes)
        yield from filter(None, (words(self.entry) for words in about))
        yield "Memory of a step, by phase", tables.phases(self.entry | {"phase_ends": {}})
        yield "At the peak, by category", tables.categories(self.ledger)
        largest = sorted(self.layers, key=lambda row: -row["bytes"])[:LARGEST]
        kept = [row for row in self.layers if row in largest]
        rows = [[row["module"], mib(row["bytes"]), f"{row['bytes'] / self.ledger['peak_bytes']:.1%}"] for row in kept]
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
    CPU all tensors are counted, without scratch memory within kernels; on a GPU the allocator's peaks are those of
    steps that nothing observes. Raises UserError, and what the model raises.
    """
    device = _device(model)
    _refuse_depth(depth)
    devices, policy = [device] if device.type == "cuda" else [], _policy(amp, device.type, device.type)
    with torch.random.fork_rng(devices), _restored(model):
        batch = _batch(model, example, label, device, loss is None)
        learner = _learner(model, loss, optimizer, policy)
        meter = open_meter(model, learner.optimizer)
        meter.ledger.layer = layer_names(model, depth)
        with closing(meter):
            for _ in range(MEASURED_STEPS + UNOBSERVED * (device.type == "cuda")):
                train_step(*learner, [batch], meter.mark)
        found = Explanation(type(model).__name__, "measured", _about(batch, policy, device.type), meter)
        _ = found.entry  # reads the allocator's counters now
    return found


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

    `device`: "cpu" or "cuda", also where there is no GPU; None: where the weights are. On CUDA the prediction is of
    tensors, without workspaces of convolutions, for which `entry` has a bound.

    Where the network or the loss reads a value, as in `if x.mean() > 0`, it is taken as 0: a guess, which is a warning
    and in `guesses`. So is the workspace of an LSTM, whose size is not known. Raises UserError where sizes depend on
    values.
    """
    _refuse_depth(depth)
    own = _device(model).type
    target = device or own
    if target not in ("cpu", "cuda"):
        raise UserError(f"device={device}: give cpu or cuda")
    policy = _policy(amp, "cpu", target)
    with torch.random.fork_rng([]), fake_mode(target) as guesses, _draws_noted(guesses):
        batch = _batch(model, example, label, None, loss is None)
        learner = _learner(_on_fake_tensors(model), loss, optimizer, policy)
        try:
            meter = fake_steps(learner, lambda: [batch], target)
        except Exception as error:
            if NUMPY in str(error):
                raise unknown(asked_in(error.__traceback__), error) from error
            places = tables.places_read(guesses)
            if not places or isinstance(error, UserError):
                raise
            where = f"with values taken as 0 at {', '.join(places)}"
            raise UserError(f"{where}, a step fails: {reason(error)}; use unet3d.memory.explain") from error
    meter.guesses, meter.ledger.layer = guesses, layer_names(model, depth)
    found = Explanation(type(model).__name__, "predicted", _about(batch, policy, target), meter)
    if guesses:
        warnings.warn(tables.guessed(found.entry), stacklevel=2)
    return found


def _refuse_depth(depth: int | None) -> None:
    if depth is not None and (isinstance(depth, bool) or not isinstance(depth, int) or depth < 1):
        raise UserError(f"depth={depth}: give the number of parts of layers' names, from 1 on")


@contextmanager
def _draws_noted(guesses: list[str]) -> Iterator[None]:
    """Note among the guesses that Python's or NumPy's random numbers were drawn, and put these back as they were."""
    python, numbers = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        drawn = [] if random.getstate() == python else ["a draw of Python's random"]
        if repr(np.random.get_state()) != repr(numbers):
            drawn.append("a draw of numpy.random")
        guesses += drawn
        random.setstate(python)
        np.random.set_state(numbers)


def _learner(model: nn.Module, loss: LossFunction | None, optimizer: MakeOptimizer, policy: MemoryPolicy) -> Learner:
    if not callable(optimizer):
        raise UserError(f"optimizer: give a function of the weights, such as torch.optim.Adam, not {optimizer!r}")
    if loss is not None and not callable(loss):
        raise UserError(f"loss: give a function of the network's output and the label, not {loss!r}")
    made = optimizer(model.train().parameters())
    return Learner(model, loss or segmentation_loss, made, policy.scaler(), policy)


def segmentation_loss(output: Any, label: Tensor) -> Tensor:
    """Dice and cross-entropy of logits N K D H W, or of several, finest first, as with deep supervision."""
    if isinstance(output, dict):
        raise UserError("the network returns a dict; give a loss that is called with it and the label")
    return SegmentationLoss(dice_ce)(tuple(output) if isinstance(output, list) else output, label)


def _policy(amp: bool | str, device_type: str, target: str) -> MemoryPolicy:
    if not isinstance(amp, bool) and amp not in ("bf16", "fp16"):
        raise UserError(f"amp={amp}: give true, false, bf16 or fp16")
    return MemoryPolicy(device_type, amp_dtype("auto" if amp is True else str(amp), target) if amp else None)


def _device(model: nn.Module) -> torch.device:
    found = next(model.parameters(), None)
    if found is None:
        raise UserError(f"{type(model).__name__}: has no weights to train")
    return found.device


def _batch(
    model: nn.Module, example: Example, label: Tensor | None, device: torch.device | None, is_volume: bool
) -> Batch:
    """The example and its labels on a device; None: tensors of their shapes and types, within `fake_mode`.

    An image of a shape is noise of the weights' type; `is_volume`: the loss is that of volumes.
    """
    shape = tuple(example.shape) if isinstance(example, Tensor) else tuple(example)
    if len(shape) < 3 or (is_volume and len(shape) != 5) or not all(isinstance(n, int) and n > 0 for n in shape):
        raise UserError(f"example: give an image N C D H W, or its shape, such as (1, 1, 96, 96, 96), not {shape}")
    if not isinstance(example, Tensor):
        example = torch.randn(shape, dtype=next(model.parameters()).dtype, device=device)
    elif device is None:
        example = torch.empty(shape, dtype=example.dtype)
    if label is None:
        label = torch.zeros(shape[0], *shape[2:], dtype=torch.int64)
    elif device is None:
        label = torch.zeros(label.shape, dtype=label.dtype)
    return Batch(example.to(device or "cpu"), label.to(device or "cpu"))


def _about(batch: Batch, policy: MemoryPolicy, device_type: str) -> str:
    precision = f"amp {str(policy.dtype).removeprefix('torch.')}" if policy.dtype else "float32"
    return f"input {'x'.join(map(str, batch.image.shape))}, {precision}, on {device_type}"


@contextmanager
def _restored(model: nn.Module) -> Iterator[None]:
    """Afterwards the model has its weights, buffers, gradients and modes of before; copies wait in host memory."""
    tensors = list(model.parameters())
    kept = [tensor.detach().to("cpu", copy=True) for tensor in tensors]
    gradients = [parameter.grad for parameter in model.parameters()]
    modes = {module: module.training for module in model.modules()}
    registered: list[Any] = [(module._parameters, dict(module._parameters)) for module in modes]
    buffers = [_KeptBuffers(module._buffers) for module in modes]
    for parameter in model.parameters():
        parameter.grad = None
    try:
        yield
    finally:
        for place, before in registered:  # a step may have put another tensor there
            place.clear()
            place.update(before)
        for kept_buffers in buffers:
            kept_buffers.put_back()
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        for module, mode in modes.items():
            module.training = mode
        for tensor, value in zip(tensors, kept, strict=True):
            _write_over(tensor, value)


class _KeptBuffers:
    """A module's buffers as they were. They are not held: a step that puts others in their place frees them."""

    def __init__(self, place: dict[str, Any]) -> None:
        self.place = place
        self.kept = {
            name: b if b is None else (TensorWeakRef(b), b.detach().to("cpu", copy=True), b.device)
            for name, b in place.items()
        }

    def put_back(self) -> None:
        """Put each buffer, or a copy of one that is gone, back into its place."""
        self.place.clear()
        for name, entry in self.kept.items():
            if entry is None:
                self.place[name] = None
                continue
            reference, value, device = entry
            buffer = reference()
            if buffer is None:
                buffer = value.to(device)
            else:
                _write_over(buffer, value)
            self.place[name] = buffer


@torch.no_grad()
def _write_over(tensor: Tensor, value: Tensor) -> None:
    """Give a tensor these values, unless it has them: what is expanded cannot be written to, and is not."""
    if not torch.equal(tensor.to("cpu"), value):
        tensor.copy_(value)


def _on_fake_tensors(model: nn.Module) -> nn.Module:
    """A copy whose weights and buffers have shapes and no data, within `fake_mode`; other tensors are shared."""
    attributes = tree_leaves([list(vars(module).values()) for module in model.modules()])
    copies: dict[int, Any] = {id(tensor): tensor for tensor in attributes if isinstance(tensor, Tensor)}
    for tensor in (*model.parameters(), *model.buffers()):
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        is_weight = isinstance(tensor, nn.Parameter)
        copies[id(tensor)] = nn.Parameter(fake, requires_grad=tensor.requires_grad) if is_weight else fake
    return copy.deepcopy(model, copies)

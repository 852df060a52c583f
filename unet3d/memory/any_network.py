"""The memory of a training step of any network: measured, predicted, or compared with a limit.

All run the package's one training step, on the user's own module. A prediction runs it on fake tensors, which have
shapes and no data: it makes nothing as large as a map.
"""

import json
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from unet3d import build
from unet3d.base.errors import ForeseenError, UserError, escaped, is_out_of_memory, reason
from unet3d.base.terminal import NARROW, plain_text
from unet3d.base.types import MIB, Batch, Table, budget_bytes, mib, percent
from unet3d.config.schema import Config
from unet3d.memory import tables, user_step
from unet3d.memory.breakdown import by_layer, cut_name, describe, dtype_name, layer_names, peak_moment
from unet3d.memory.fake_tensors import fake_mode
from unet3d.memory.meter import MEASURED_STEPS, LedgerMeter, open_meter, peak_of
from unet3d.memory.simulate import fake_steps
from unet3d.memory.user_step import Example, MakeOptimizer
from unet3d.recomputing.module import Recomputed, schedules_of
from unet3d.recomputing.program import Program
from unet3d.training.policy import MemoryPolicy
from unet3d.training.step import LossFunction, train_step

LAYERS_SHOWN = 8  # layers printed
UNOBSERVED = 2  # steps on a GPU after those of the ledger: the allocator's peaks are theirs
VERSION = 2  # The version of `compare`'s object.


@dataclass(frozen=True)
class Explanation:
    """An account of a training step's memory. `print` shows it; sizes are bytes, of all tensors of the step."""

    name: str  # The network's class.
    kind: str  # "measured" or "predicted"
    about: str  # the step in a line
    meter: LedgerMeter

    @cached_property
    def entry(self) -> dict[str, Any]:
        """Return all figures, as memory.json of a run has them; a prediction for CUDA has those of its allocator."""
        return self.meter.summary() | (peak_of(self.meter.ledger).of_allocator if self.meter.for_gpu else {})

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
        return self.meter.parameters

    def __str__(self) -> str:
        return plain_text(self._parts(), NARROW).rstrip()

    def _parts(self) -> Iterator[str | tuple[str, Table]]:
        yield f"{self.name}: {self.parameters:,} parameters; {self.about}"
        kind = tables.predicted_kind(self.entry) if self.kind == "predicted" else self.entry["kind"]
        yield f"{self.kind} peak of a step: {mib(self.peak_bytes)} MiB ({kind})"
        yield f"peak reached in {tables.moment(self.ledger)}"
        yield from (*tables.guessed(self.guesses), *tables.on_cuda(self.entry), *self.meter.notes)
        yield "Memory of a step, by phase", tables.phases(self.entry | {"phase_ends": {}})
        yield "At the peak, by category", tables.categories(self.ledger)
        largest = sorted(self.layers, key=lambda row: -row["bytes"])[:LAYERS_SHOWN]
        peak = self.ledger["peak_bytes"]
        sizes = [(layer["module"], layer["bytes"]) for layer in self.layers if layer in largest]
        rows = [[name, mib(size), percent(size, peak)] for name, size in sizes]
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
    user_step.refuse_network(model, depth)
    device = next(model.parameters()).device
    if device.type == "meta":
        raise UserError(f"{type(model).__name__}: weights on meta have no data to measure; use unet3d.memory.predict")
    on_gpu = device.type == "cuda"
    policy = user_step.policy_of(amp, device.type, device.type)
    steps = MEASURED_STEPS + UNOBSERVED if on_gpu else MEASURED_STEPS
    draws = torch.random.fork_rng([device] if on_gpu else [])
    with user_step.image_explained(model, example, policy), draws, user_step.restored(model):
        batch = user_step.batch_of(model, example, label, device, loss is None)
        learner = user_step.learner_of(model, loss, optimizer, policy)
        user_step.find_schedule(model, batch.image, policy)
        meter = open_meter(model, learner.optimizer)
        meter.ledger.layer = layer_names(model, depth)  # Workspaces on a GPU are noted by layer in the steps.
        with closing(meter):
            for _ in range(steps):
                train_step(*learner, [batch], meter.mark)
        explanation = _explanation(model, "measured", batch, policy, meter)
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
    user_step.refuse_network(model, depth)
    if "_orig_mod" in model._modules:
        raise UserError(f"{type(model).__name__}: is compiled; give the network before torch.compile")
    model_device = next(model.parameters()).device.type
    target = device or ("cpu" if model_device == "meta" else model_device)
    if target not in ("cpu", "cuda"):
        raise UserError(f"device={device}: give cpu or cuda")
    policy = user_step.policy_of(amp, "cpu", target)
    no_draws = torch.random.fork_rng([])
    explained = user_step.image_explained(model, example, policy)
    with explained, no_draws, fake_mode(target) as guesses, user_step.draws_noted(guesses):
        batch = user_step.batch_of(model, example, label, None, loss is None)
        fake = user_step.on_fake_tensors(model, target)
        learner = user_step.learner_of(fake, loss, optimizer, policy)
        with user_step.failures_explained(guesses):
            user_step.find_schedule(fake, batch.image, policy)
            meter = fake_steps(learner, lambda: [batch], target)
    meter.guesses = guesses
    meter.ledger.layer = layer_names(model, depth)
    explanation = _explanation(model, "predicted", batch, policy, meter)
    for line in tables.guessed(guesses):
        warnings.warn(line, stacklevel=2)
    return explanation


def _explanation(model: nn.Module, kind: str, batch: Batch, policy: MemoryPolicy, meter: LedgerMeter) -> Explanation:
    """Return the account of steps that a meter has seen."""
    precision = f"amp {dtype_name(policy.dtype)}" if policy.dtype else "float32"
    about = f"input {'x'.join(map(str, batch.image.shape))}, {precision}, on {meter.device_type}"
    return Explanation(type(user_step.network_of(model)).__name__, kind, about, meter)


def compare(meter: LedgerMeter, name: str, limit: int, depth: int | None = None) -> tuple[dict[str, Any], str]:
    """Compare predicted steps of a network with a limit (bytes). Return the object of `--json`, and its line.

    The object's names stay as long as its version. The limit is for the last kind of peak, as with `budget=`. Layers
    have their full names; the object's `layers` are summed up by the first `depth` parts of these, None: by all.
    """
    meter.ledger.layer = str
    kinds = ("tensors", "allocated", "reserved") if meter.for_gpu else ("tensors",)
    step = peak_of(meter.ledger)
    moment = peak_moment(meter.ledger)
    layers = Counter({row["module"]: row["bytes"] for row in by_layer(meter.ledger, moment)})
    [(largest, most)] = layers.most_common(1)
    totals = Counter[str]()
    for layer, size in layers.most_common():
        totals[layer if depth is None else cut_name(depth, layer)] += size
    reached_in = describe(meter.ledger, moment)
    margin = limit - step.limited
    distance = f"{_size(abs(margin))} {'below' if margin > 0 else 'above'}" if margin else "at"
    guessed = ", GUESSED" if meter.guesses else ""
    line = (
        f"{name}: predicted peak of a step {mib(step.limited)} MiB ({kinds[-1]}{guessed}, {meter.device_type}), "
        f"{distance} the limit of {mib(limit)} MiB; most at the peak: {largest}, {_size(most)}"
    )
    answer = {
        "version": VERSION,
        "kind": "predicted",
        "network": name,
        "parameters": meter.parameters,
        "device": meter.device_type,
        "fits": margin >= 0,
        "compared": kinds[-1],
        "limit_bytes": limit,
        "peak_bytes": {kind: getattr(step, kind) for kind in kinds},
        "margin_bytes": margin,
        "workspace_bytes": step.requested - step.tensors if meter.for_gpu else None,
        "reached_in": {part: reached_in[part] for part in ("phase", "module", "operation", "is_recomputed")},
        "layer": {"name": largest, "bytes": most},
        "layers": [{"name": layer, "bytes": size} for layer, size in totals.most_common()],
        "guesses": list(meter.guesses),
    }
    return answer, line


def assert_below(
    model: nn.Module,
    example: Example,
    limit: str | int,
    *,
    loss: LossFunction | None = None,
    optimizer: MakeOptimizer = AdamW,
    amp: bool | str = False,
    label: Tensor | None = None,
    device: str | None = None,
) -> None:
    """Raise AssertionError where the predicted peak of a training step of `model` is more than `limit`, as "8GiB".

    The limit may be a number of bytes, too. The other arguments are those of `unet3d.memory.predict`: `example` is an
    image N C D H W, or its shape. The limit is for tensors on the CPU, and with device="cuda" for what the allocator
    reserves. `model` may be on meta. Its error is the line of `unet3d memory --below`. Raises UserError.
    """
    __tracebackhide__ = True  # pytest then shows the line of the test
    if isinstance(limit, str):
        limit = budget_bytes(limit, "limit=")
    elif isinstance(limit, bool) or not isinstance(limit, int) or limit <= 0:
        raise UserError(f"limit={limit!r}: give an amount and a unit, as limit='8GiB', or a number of bytes")
    explanation = predict(model, example, loss, optimizer, amp, label, device)
    answer, line = compare(explanation.meter, explanation.name, limit)
    for note in explanation.meter.notes:
        warnings.warn(note, stacklevel=2)
    if not answer["fits"]:
        raise AssertionError(line)


def _size(size: int) -> str:
    """Return bytes as MiB, or as bytes where that would be 0.0."""
    return f"{mib(size)} MiB" if size >= MIB / 10 else f"{size} bytes"


class OwnNetwork:
    """A network that a name such as package.module:name makes. Whatever it raises becomes a UserError of one line."""

    def __init__(self, path: str, keywords: Mapping[str, Any]) -> None:
        self.path = path
        make = build.import_object("--module", path)
        with self._failures_refused(f"cannot be made with --args {json.dumps(keywords)}"):
            network = make(**keywords)
        if not isinstance(network, nn.Module):
            raise UserError(f"--module {path}: made {type(network).__name__}, not a torch.nn.Module")
        self.network = network
        self._prepared: dict[Any, Program] = {}  # what the plans of recompute share

    def explain(
        self, shape: Sequence[int], config: Config, depth: int | None = None, is_measured: bool = False
    ) -> Explanation:
        """Return the account of a step with an input of N C D H W: predicted, or measured on the config's device.

        The `guesses` of a prediction are no warnings. With recompute the network shares its weights with this one.
        """
        plan: Any = config.recompute
        amp = config.amp_dtype if config.amp and config.amp_dtype != "auto" else config.amp
        size = "x".join(map(str, shape))
        with self._failures_refused(f"a step with --input {size} fails"), warnings.catch_warnings():
            if is_measured:
                self.network.to(build.device(config))
            else:
                warnings.simplefilter("ignore")
            network = self.network
            if plan != "none":
                network = Recomputed(self.network, plan)
                schedules_of(network).prepared = self._prepared
            if is_measured:
                return explain(network, shape, amp=amp, depth=depth)
            return predict(network, shape, amp=amp, device=build.device_type(config), depth=depth)

    @contextmanager
    def _failures_refused(self, problem: str) -> Iterator[None]:
        """Raise UserError for whatever a stranger's network raises within, unless memory ran out."""
        try:
            yield
        except Exception as error:
            if isinstance(error, ForeseenError) or is_out_of_memory(error):
                raise
            text = f"{problem}: {reason(error)}"
            if isinstance(error, ImportError):  # MONAI adds advice and a trace.
                text = f"needs a package that is not installed: {escaped(str(error).partition(chr(10))[0])}"
            raise UserError(f"--module {self.path}: {text}") from error

"""Peak memory of each phase of a step, for the first step and for later ones, read through the step's `mark` alone.

What convolutions take on a GPU in addition to their results is predicted for fake tensors, and measured by torch's
counters. `peak_of` replays CUDA's allocator.
"""

import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, default_generator, nn
from torch._prims_common import suggest_memory_format

from unet3d.memory.allocator import EMPTY_CACHE, Settings, read_settings, replay
from unet3d.memory.breakdown import first_and_steady, layer_names, summarise_ledger
from unet3d.memory.ledger import Ledger, ModuleScope, ModuleTracker, most_held
from unet3d.recomputing import workspaces
from unet3d.recomputing.workspaces import CONVOLUTION, CONVOLUTION_BACKWARD
from unet3d.training.step import PHASES


class GpuLedger(Ledger):
    """A ledger of fake tensors that stand for tensors on a GPU: copies within convolutions count while they are there.

    See `_convolution` and `convolution_backward` in torch's Convolution.cpp, and its cuDNN stubs. `workspaces` holds
    (events before it, bytes) of each convolution, an estimate: see `workspaces.py`. They are in `requests` alone.
    """

    def __init__(self, scope: Callable[[], ModuleScope] = lambda: ModuleScope(""), device_type: str = "cpu") -> None:
        super().__init__(scope, device_type)
        self.empties_cache = False  # before the last step, as a run does: see `CudaMeter`

    def requests(self) -> list[tuple[int, int]]:
        """Return the events, with workspaces, each of which is released at once, and with the emptied cache."""
        scratch = []  # Each request, with the number of events that come before it.
        for index, (moment, size) in enumerate(self.workspaces, len(self.storages)):
            if size:
                scratch += [(moment, (index, size)), (moment, (index, -size))]
        ends = [moment for moment, name in self.marks if name == "end"]
        if self.empties_cache and len(ends) > 1:
            scratch.append((ends[-2], (EMPTY_CACHE, 0)))
        in_order = sorted([*scratch, *enumerate(self.events)], key=lambda request: request[0])
        return [request for _, request in in_order]

    def compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is CONVOLUTION:
            image, weight, *others = args
            image = self._laid_out(image, _format(image, weight))
            result = func(image, weight, *others, **kwargs)
            self._take_workspaces(func, (image, weight, *others), result)
            return result
        if func is CONVOLUTION_BACKWARD:
            gradient, image, weight, *others = args
            wanted = _format(image, weight)
            if others[-1][1]:  # the weight's gradient is wanted, for which the image is read
                image = self._laid_out(image, wanted)
            gradient = self._laid_out(gradient, wanted)
            result = func(gradient, image, weight, *others, **kwargs)
            self._take_workspaces(func, (gradient, image, weight, *others), result)
            del gradient  # before the image
            return result
        return func(*args, **kwargs)

    def _take_workspaces(self, func: Any, arguments: Sequence[Any], result: Any) -> None:
        """Count results, before copies go, in the order in which they are made, each with its workspace."""
        results = result if func is CONVOLUTION_BACKWARD else [result]
        sizes = workspaces.bytes_of_call(func, arguments, result)
        for tensor, size in zip(results, sizes, strict=True):
            self.count(tensor, str(func))
            self.workspaces.append((len(self.events), size))

    def _laid_out(self, tensor: Tensor, wanted: torch.memory_format) -> Tensor:
        """Return the tensor in a memory format, counted if it is a copy."""
        tensor = tensor.contiguous(memory_format=wanted)
        self.count(tensor, "aten.clone.default")
        return tensor


def _format(image: Tensor, weight: Tensor) -> torch.memory_format:
    """Return how cuDNN's maps lie: with channels last where the image or the weight does."""
    formats = {suggest_memory_format(image), suggest_memory_format(weight)}
    return torch.channels_last_3d if torch.channels_last_3d in formats else torch.contiguous_format


class Peak(NamedTuple):
    """The most bytes that a step holds. Those of CUDA's allocator are 0 for a step on the CPU."""

    tensors: int
    requested: int = 0  # Tensors and workspaces of convolutions.
    allocated: int = 0  # Blocks given out.
    reserved: int = 0  # Taken from the driver, by this environment's settings.
    expandable: int = 0  # The same by expandable_segments.

    @property
    def limited(self) -> int:
        """Return the bytes that a budget limits: tensors on the CPU, what the allocator reserves on CUDA."""
        return max(self.tensors, self.reserved)

    @property
    def of_allocator(self) -> dict[str, int]:
        """Return the allocator's bytes as memory.json has them; {} on the CPU."""
        return {"allocated_bytes": self.allocated, "reserved_bytes": self.reserved} if self.reserved else {}


def peak_of(ledger: Ledger, settings: Settings | None = None) -> Peak:
    """Return the peak of the steps of a ledger; for CUDA by a replay of its allocator.

    `settings`: of the allocator; None: those of this environment.
    """
    tensors = most_held(ledger.events)
    if not isinstance(ledger, GpuLedger):
        return Peak(tensors)
    requests = ledger.requests()
    allocated, reserved = replay(requests, settings or read_settings(os.environ)[0])
    _, expandable = replay(requests, Settings(expandable=True))
    return Peak(tensors, most_held(requests), allocated, reserved, expandable)


REQUESTED = "requested_bytes.all.current"
REQUESTED_PEAK = "requested_bytes.all.peak"
PEAKS = ("allocated_bytes.all.peak", REQUESTED_PEAK, "reserved_bytes.all.peak")
MOST_ROWS = 100  # Most rows of `workspaces`.
R = TypeVar("R")


class CudaLedger(Ledger):
    """A ledger that also reads torch's CUDA allocator, and what convolutions request of it in addition to tensors.

    That is cuDNN's workspace, and copies of maps that are not contiguous. `excesses` holds the most bytes of one call,
    by layer and phase. The allocator's peaks last from one `restart` to the next. torch keeps one peak for everybody:
    what somebody else counts in the process is restarted as well.
    """

    def __init__(self, scope: Callable[[], ModuleScope], device: torch.device) -> None:
        super().__init__(scope, device.type)
        self.excesses: dict[tuple[str, str], int] = defaultdict(int)
        self._device = device
        self._highest: dict[str, int] = {}  # peaks before the last operation that was measured

    def counters(self) -> dict[str, Any]:
        """Return the allocator's counters by torch's names, such as `requested_bytes.all.peak`."""
        stats = torch.cuda.memory_stats(self._device)
        for name, highest in self._highest.items():
            stats[name] = max(highest, stats[name])
        return stats

    def restart(self) -> None:
        """Let new peaks begin at what is held now."""
        self._highest = {}
        torch.cuda.reset_peak_memory_stats(self._device)

    def excess(self, compute: Callable[[], R]) -> tuple[R, int]:
        """Return the result of `compute`, and its peak of requested bytes minus the larger of those before and after.

        A result made after the workspace is freed, such as a bias's gradient, is counted in what is held after: the
        excess is too small by its bytes.
        """
        before = self.counters()
        self._highest = {name: before[name] for name in PEAKS}
        torch.cuda.reset_peak_memory_stats(self._device)
        result = compute()
        after = torch.cuda.memory_stats(self._device)
        return result, after[REQUESTED_PEAK] - max(before[REQUESTED], after[REQUESTED])

    def compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func not in (CONVOLUTION, CONVOLUTION_BACKWARD):
            return func(*args, **kwargs)
        result, excess = self.excess(lambda: func(*args, **kwargs))
        place = self.layer(self._scope().module), self.marks[-1][1]
        self.excesses[place] = max(self.excesses[place], excess)
        return result


MEASURED_STEPS = 3  # gradients and optimizer state appear in the first, the third repeats the second
STEPS_FOR_PEAK = 2  # simulated steps for a peak
COUNTED = "exact count of tensor bytes"


def open_meter(model: nn.Module, optimizer: torch.optim.Optimizer) -> "LedgerMeter":
    """Return a meter with a ledger of storages; for a model on a GPU, with the CUDA allocator's own counters too."""
    on_gpu = next(model.parameters()).device.type == "cuda"
    return CudaMeter(model, optimizer) if on_gpu else LedgerMeter(model, optimizer)


class LedgerMeter:
    """Counts storages during the first steps only: later steps have the same shapes and the same peaks."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, for_gpu: bool = False) -> None:
        """`for_gpu`: the model stands for one on a GPU, so what only the host would hold does not count."""
        self.model = model
        self.optimizer = optimizer
        self.for_gpu = for_gpu
        self._hooks = ExitStack()
        self.tracker = ModuleTracker(model)
        self.device = next(model.parameters()).device
        self.ledger = self._new_ledger()
        self.ledger.layer = layer_names(model)
        self.guesses: list[str] = []  # Places where fake tensors were asked for values.
        self.steps = 0
        self.is_open = False
        for path, module in self.tracker.modules.items():
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                self.ledger.claim(tensor, "params", path)

    @property
    def device_type(self) -> str:
        """Return the type of device that the steps are on, or are predicted for."""
        return "cuda" if self.for_gpu else self.device.type

    @property
    def notes(self) -> list[str]:
        """Return what a prediction leaves out of the allocator's settings, in a line."""
        return read_settings(os.environ)[1] if self.for_gpu else []

    @property
    def parameters(self) -> int:
        """Return the number of weights."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def mark(self, phase: str) -> None:
        """Begin a phase of `train_step`, or "end" the step."""
        if self.steps >= MEASURED_STEPS:  # later steps repeat what was seen
            return
        if not self.is_open:
            self._open()
        self._claim_grads_and_states()
        self.tracker.mark(phase)
        self.ledger.mark(phase)
        if phase == "end":
            self.close()
            # A step that fp16 skipped before the first update does not count: later steps keep the optimizer's state.
            keeps_state = any("betas" in group or group.get("momentum") for group in self.optimizer.param_groups)
            if self.optimizer.state or not keeps_state:
                self.steps += 1

    def close(self) -> None:
        """Stop measuring, also within a step that failed."""
        if self.is_open:
            self._hooks.close()
            self.tracker.close()
            self.is_open = False

    def summary(self) -> dict[str, Any]:
        """Return `kind`, and the ledger's figures by `summarise_ledger`.

        For a GPU also `workspace_bytes`, an estimate: by how much workspaces of convolutions raise the peak. They are
        not in `peak_bytes`. `guesses`, if there are any, say where a prediction took 0 for values that it does not
        have.
        """
        figures = summarise_ledger(self.ledger)
        summary: dict[str, Any] = {"peak_bytes": figures["peak_bytes"], "kind": COUNTED, "phases": figures["phases"]}
        if self.guesses:
            summary["kind"] = "count of tensor bytes, GUESSED"
            summary["guesses"] = list(self.guesses)
        if self.for_gpu:
            summary["workspace_bytes"] = most_held(self.ledger.requests()) - figures["peak_bytes"]
        return summary | figures

    def _new_ledger(self) -> Ledger:
        ledger = GpuLedger if self.for_gpu else Ledger
        return ledger(self.tracker.scope, self.device.type)

    def _open(self) -> None:
        self.tracker.open()
        self._hooks.enter_context(self.ledger)
        if not self.for_gpu:
            self._hooks.callback(setattr, torch, "get_rng_state", torch.get_rng_state)
            torch.get_rng_state = self._random_state
        self.is_open = True

    def _random_state(self) -> Tensor:
        """Return torch's random state, which checkpointing keeps and no dispatch mode sees, and count it."""
        state = default_generator.get_state()
        self.ledger.claim(state, "activations", self.tracker.scope().module)
        return state

    def _claim_grads_and_states(self) -> None:
        is_fused = any(group.get("fused") for group in self.optimizer.param_groups)
        for path, module in self.tracker.modules.items():
            for parameter in module.parameters(recurse=False):
                if parameter.grad is not None:
                    self.ledger.claim(parameter.grad, "grads", path)
                for name, state in self.optimizer.state.get(parameter, {}).items():
                    if isinstance(state, Tensor):
                        self.ledger.claim(state, "optimizer", path)
                        if self.for_gpu and name == "step" and not is_fused:
                            self.ledger.uncount(state)  # Adam counts on the host, unless one kernel updates all weights


class CudaMeter(LedgerMeter):
    """Peak bytes that torch's CUDA allocator gave out between two marks: host counters, so nothing is synchronised.

    The ledger of the first steps adds categories and modules, but sees no workspaces of kernels and no rounding. While
    it observes, autograd adds no gradients in place, so the allocator's peaks come from the steps after it.
    Workspaces of convolutions are measured only then, one by one.
    """

    ledger: CudaLedger

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(model, optimizer)
        self.highest = {"requested_bytes": 0, "reserved_bytes": 0}
        self.retries = 0
        self._earlier_retries = 0
        self.is_observed = True  # the peaks are of steps under the ledger
        self._phase = "before"
        self._peaks: dict[str, int] = {}  # phase -> peak in the current step
        self._steps: list[dict[str, int]] = []  # peaks of the first step, and the highest of the later ones

    def mark(self, phase: str) -> None:
        stats = self.ledger.counters()
        if self.is_observed and self.steps >= MEASURED_STEPS:
            # The first step without the ledger forgets the peaks of those with it, and frees what they cached.
            torch.cuda.empty_cache()
            self.is_observed = False
            self._steps = [{}]
            self._earlier_retries = stats["num_alloc_retries"]
            self.highest = dict.fromkeys(self.highest, 0)
        self.retries = stats["num_alloc_retries"] - self._earlier_retries
        if self._phase in PHASES:  # validation and whatever else runs between steps is not in the step's peak
            earlier = self._peaks.get(self._phase, 0)
            self._peaks[self._phase] = max(stats["allocated_bytes.all.peak"], earlier)
            for name in self.highest:
                self.highest[name] = max(self.highest[name], stats[f"{name}.all.peak"])
        self.ledger.restart()
        self._phase = phase
        super().mark(phase)
        if phase == "end":
            later = self._steps[1] if len(self._steps) > 1 else {}
            self._steps[1:] = [{name: max(peak, later.get(name, 0)) for name, peak in self._peaks.items()}]
            self._peaks = {}

    def summary(self) -> dict[str, Any]:
        """Return the allocator's figures under the keys of `LedgerMeter.summary`, which is under "ledger".

        No phase has a "first", unless all steps were observed: see `kind`. `workspaces`: of convolutions, requested
        bytes minus bytes of tensors, by layer and phase of the observed steps.
        """
        free, total = torch.cuda.mem_get_info(self.device)
        if self.is_observed:
            phases = first_and_steady(self._steps)
        else:
            phases = {name: {"steady": peak} for name, peak in self._steps[-1].items()}
        peaks = [peak for phase in phases.values() for peak in phase.values()]
        summary: dict[str, Any] = {
            "peak_bytes": max(peaks, default=0),
            "kind": "cuda allocated, observed steps" if self.is_observed else "cuda allocated",
            "phases": phases,
            **self.highest,
            "retries": self.retries,
            "device_used_bytes": total - free,  # All processes on it, with their CUDA contexts.
        }
        largest = sorted(self.ledger.excesses.items(), key=lambda item: -item[1])[:MOST_ROWS]
        if largest:
            rows = [{"module": layer, "phase": phase, "bytes": size} for (layer, phase), size in largest]
            summary["workspaces"] = rows
        summary["ledger"] = super().summary()
        return summary

    def _new_ledger(self) -> CudaLedger:
        return CudaLedger(self.tracker.scope, self.device)

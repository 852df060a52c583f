"""Peak memory of each phase of a step, for the first step and for later ones, read through the step's `mark` alone."""

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, default_generator, nn

from unet3d.memory.breakdown import PhaseBytes, by_phase, first_and_steady, layer_names, summarise_ledger
from unet3d.memory.gpu_ledgers import Counters, CudaLedger, GpuLedger
from unet3d.memory.ledger import Ledger, ModuleTracker
from unet3d.training.step import PHASES

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
        self.guesses: list[str] = []  # where fake tensors were asked for values
        self.steps = 0
        self.is_open = False
        for path, module in self.tracker.modules.items():
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                self.ledger.claim(tensor, "params", path)

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
        """Return `peak_bytes`, `kind`, `phases` {phase: {first, steady}} in bytes, and more by `summarise_ledger`.

        For a GPU also `workspace_bytes`, an estimate: by how much workspaces of convolutions raise the peak. They are
        not in `peak_bytes`. `guesses`, if there are any, say where a prediction took 0 for values that it does not
        have.
        """
        peaks = self.ledger.phase_peaks()
        summary: dict[str, Any] = {
            "peak_bytes": max(peak for _, peak in peaks),
            "kind": COUNTED,
            "phases": by_phase(peaks),
        }
        if self.guesses:
            summary["kind"] = "count of tensor bytes, GUESSED"
            summary["guesses"] = list(self.guesses)
        if self.for_gpu:
            summary["workspace_bytes"] = self.ledger.peak_requested() - summary["peak_bytes"]
        return summary | summarise_ledger(self.ledger)

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
        for path, module in self.tracker.modules.items():
            for parameter in module.parameters(recurse=False):
                if parameter.grad is not None:
                    self.ledger.claim(parameter.grad, "grads", path)
                for name, state in self.optimizer.state.get(parameter, {}).items():
                    if isinstance(state, Tensor):
                        self._claim_state(state, name, path)

    def _claim_state(self, state: Tensor, name: str, path: str) -> None:
        self.ledger.claim(state, "optimizer", path)
        is_fused = any(group.get("fused") for group in self.optimizer.param_groups)
        if self.for_gpu and name == "step" and not is_fused:
            self.ledger.uncount(state)  # Adam counts its steps on the host, unless one kernel updates all weights


class CudaMeter(LedgerMeter):
    """Peak bytes that torch's CUDA allocator gave out between two marks: host counters, so nothing is synchronised.

    The ledger of the first steps adds categories and modules, but sees no workspaces of kernels and no rounding. While
    it observes, autograd adds no gradients in place, so the allocator's peaks come from the steps after it.
    Workspaces of convolutions are measured only then, one by one.
    """

    ledger: CudaLedger

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._counters = Counters(next(model.parameters()).device)
        super().__init__(model, optimizer)
        self.highest = {"requested_bytes": 0, "reserved_bytes": 0}
        self.retries = 0
        self._earlier_retries = 0
        self.is_observed = True  # the peaks are of steps under the ledger
        self._phase = "before"
        self._peaks: dict[str, int] = {}  # phase -> peak in the current step
        self._steps: list[dict[str, int]] = []  # peaks of the first step, and the highest of the later ones

    def mark(self, phase: str) -> None:
        stats = self._counters.read()
        if self.is_observed and self.steps >= MEASURED_STEPS:
            self._begin_unobserved(stats)
        self.retries = stats["num_alloc_retries"] - self._earlier_retries
        if self._phase in PHASES:  # validation and whatever else runs between steps is not in the step's peak
            earlier = self._peaks.get(self._phase, 0)
            self._peaks[self._phase] = max(stats["allocated_bytes.all.peak"], earlier)
            for name in self.highest:
                self.highest[name] = max(self.highest[name], stats[f"{name}.all.peak"])
        self._counters.restart()
        self._phase = phase
        super().mark(phase)
        if phase == "end":
            self._end_step()

    def summary(self) -> dict[str, Any]:
        """Return the allocator's figures under the keys of `LedgerMeter.summary`, which is under "ledger".

        No phase has a "first", unless all steps were observed: see `kind`. `workspaces`: of convolutions, requested
        bytes minus bytes of tensors, by layer and phase of the observed steps.
        """
        free, total = torch.cuda.mem_get_info(self.device)
        phases = self._phases()
        peaks = [peak for phase in phases.values() for peak in phase.values()]
        summary: dict[str, Any] = {
            "peak_bytes": max(peaks, default=0),
            "kind": "cuda allocated, observed steps" if self.is_observed else "cuda allocated",
            "phases": phases,
            **self.highest,
            "retries": self.retries,
            "device_used_bytes": total - free,  # by all processes on it, the CUDA context included
        }
        workspaces = self.ledger.largest_excesses()
        if workspaces:
            summary["workspaces"] = workspaces
        summary["ledger"] = super().summary()
        return summary

    def _new_ledger(self) -> CudaLedger:
        return CudaLedger(self.tracker.scope, self.device.type, self._counters)

    def _begin_unobserved(self, stats: dict[str, Any]) -> None:
        """Begin the first step without the ledger: forget the peaks of those with it, and free what they cached."""
        torch.cuda.empty_cache()
        self.is_observed = False
        self._steps = [{}]
        self._earlier_retries = stats["num_alloc_retries"]
        self.highest = dict.fromkeys(self.highest, 0)

    def _end_step(self) -> None:
        later = self._steps[1] if len(self._steps) > 1 else {}
        highest = {name: max(peak, later.get(name, 0)) for name, peak in self._peaks.items()}
        self._steps[1:] = [highest]
        self._peaks = {}

    def _phases(self) -> PhaseBytes:
        if self.is_observed:
            return first_and_steady(self._steps)
        return {name: {"steady": peak} for name, peak in self._steps[-1].items()}

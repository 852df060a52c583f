"""Peak memory of each phase of a step, first step and steady state apart, read through the step's `mark` alone."""

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from unet3d.memory import analysis
from unet3d.memory.ledger import Ledger, ModuleScope, ModuleTracker, phase_peaks
from unet3d.train.step import PHASES

STEADY = 3  # measured steps; gradients and optimizer state appear in the first, the third repeats the second


ENOUGH = 2  # simulated steps for a peak


class Meter(Protocol):
    @property
    def ledger(self) -> Ledger:
        """Every storage of the first steps."""

    @property
    def is_steady(self) -> bool:
        """Whether later steps repeat what was seen."""

    def mark(self, phase: str) -> None:
        """A phase of `train_step` begins, or the step "end"s."""

    def close(self) -> None:
        """Stop measuring, also within a step that failed."""

    def summary(self) -> dict[str, Any]:
        """`peak_bytes`, `kind`, `phases` {phase: {first, steady}} in bytes, and what `explain.summary` tells."""


def open_meter(model: nn.Module, optimizer: torch.optim.Optimizer) -> Meter:
    """A ledger of storages; where the model is on a GPU, beside the CUDA allocator's own counters."""
    ledger = LedgerMeter(model, optimizer)
    device = next(model.parameters()).device
    return CudaMeter(device, ledger) if device.type == "cuda" else ledger


class LedgerMeter:
    """Counts storages during the first steps, then steps aside: the same shapes have the same peaks."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self.ledger = Ledger(self._here, next(model.parameters()).device.type)
        self.tracker = ModuleTracker(model, self.ledger.cross)
        self._claim(weights=True)
        self.steps = 0
        self.is_open = False

    @property
    def is_steady(self) -> bool:
        return self.steps >= STEADY

    def mark(self, phase: str) -> None:
        if self.is_steady:
            return
        if not self.is_open:
            self.tracker.open()
            self.ledger.__enter__()
            self.is_open = True
        self._claim(weights=False)
        self.tracker.mark(phase)
        self.ledger.mark(phase)
        if phase == "end":
            self.close()
            self.steps += not self._was_skipped()

    def _was_skipped(self) -> bool:
        """Whether fp16 overflowed before the first update: later steps keep more, the optimizer's state."""
        keeps = any("betas" in group or group.get("momentum") for group in self.optimizer.param_groups)
        return keeps and not self.optimizer.state

    def close(self) -> None:
        if self.is_open:
            self.ledger.__exit__(None, None, None)
            self.tracker.close()
            self.is_open = False

    def summary(self) -> dict[str, Any]:
        peaks = phase_peaks(self.ledger)
        return {
            "peak_bytes": max(peak for _, peak in peaks),
            "kind": "ledger",
            "phases": first_and_steady(peaks),
            **analysis.summarise_ledger(self.ledger),
        }

    def _here(self) -> ModuleScope:
        return self.tracker.here()

    def _claim(self, weights: bool) -> None:
        """Tell the ledger whose the long-lived tensors are."""
        for path, module in self.model.named_modules():
            for parameter in module.parameters(recurse=False):
                if weights:
                    self.ledger.claim(parameter, "params", path)
                if parameter.grad is not None:
                    self.ledger.claim(parameter.grad, "grads", path)
                for state in self.optimizer.state.get(parameter, {}).values():
                    if isinstance(state, Tensor):
                        self.ledger.claim(state, "optimizer", path)
            for buffer in module.buffers(recurse=False) if weights else ():
                self.ledger.claim(buffer, "params", path)


class CudaMeter:
    """Peak bytes that torch's CUDA allocator gave out between two marks: host counters, nothing is synchronised.

    The counters know no categories and no modules: who holds the bytes is told by the ledger of the first steps, which
    sees every tensor, but neither the kernels' workspaces nor the allocator's rounding.
    """

    def __init__(self, device: torch.device, ledger: LedgerMeter) -> None:
        self.device, self._meter = device, ledger
        self.peaks: list[tuple[str, int]] = [("before", 0)]
        self.highest = {"requested_bytes": 0, "reserved_bytes": 0}
        self.retries = 0

    @property
    def ledger(self) -> Ledger:
        return self._meter.ledger

    @property
    def is_steady(self) -> bool:
        return self._meter.is_steady

    def mark(self, phase: str) -> None:
        stats = torch.cuda.memory_stats(self.device)
        last = self.peaks[-1][0]
        self.peaks[-1] = (last, stats["allocated_bytes.all.peak"])
        self.retries = stats["num_alloc_retries"]
        if last in PHASES:  # what lies between steps, validation above all, is not the step's
            for name in self.highest:
                self.highest[name] = max(self.highest[name], stats[f"{name}.all.peak"])
        torch.cuda.reset_peak_memory_stats(self.device)
        self.peaks.append((phase, 0))
        self._meter.mark(phase)
        if phase == "end":
            self.peaks = _folded(self.peaks)

    def close(self) -> None:
        self._meter.close()

    def summary(self) -> dict[str, Any]:
        phases = first_and_steady(self.peaks)  # of steps alone: validation is not in the peak
        peak = max((peak for phase in phases.values() for peak in phase.values()), default=0)
        free, total = torch.cuda.mem_get_info(self.device)
        return {
            "peak_bytes": peak,
            "kind": "cuda allocated",
            "phases": phases,
            **self.highest,
            "retries": self.retries,
            "device_used_bytes": total - free,  # by all processes on it, the CUDA context included
            "ledger": self._meter.summary(),
        }


def first_and_steady(peaks: list[tuple[str, int]]) -> dict[str, dict[str, int]]:
    """Highest peak of each phase in the first step and in the later ones (equal if there was one step)."""
    steps: list[dict[str, int]] = [{}]
    for name, peak in peaks:
        if name == "end":
            steps.append({})
        elif name in PHASES:
            steps[-1][name] = max(peak, steps[-1].get(name, 0))
    steps = [step for step in steps if len(step) == len(PHASES)]
    later = steps[1:] or steps
    return {
        phase: {"first": steps[0][phase], "steady": max(step[phase] for step in later)} for phase in PHASES if steps
    }


def _folded(peaks: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """The same with steps after the second merged into it, so that a long run's list stays short."""
    ends = [i for i, (name, _) in enumerate(peaks) if name == "end"]
    if len(ends) < 3:
        return peaks
    older, newer = peaks[: ends[1] + 1], peaks[ends[1] + 1 :]
    highest = dict[str, int]()
    for name, peak in newer:
        highest[name] = max(peak, highest.get(name, 0))
    start = ends[0] + 1
    merged = [(name, max(peak, highest.get(name, 0))) for name, peak in older[start:]]
    return older[:start] + merged

"""Peaks per phase, of the first step and of later ones, from marks alone."""

from collections.abc import Callable

import pytest
import torch

from unet3d.memory.analysis import by_phase
from unet3d.memory.meter import STEADY, CudaMeter, LedgerMeter, open_meter
from unet3d.model.unet import UNet3D
from unet3d.train.losses import SegmentationLoss
from unet3d.train.policy import MemoryPolicy
from unet3d.train.step import PHASES, train_step
from unet3d.types import Batch

Network = Callable[..., UNet3D]


def test_first_and_later_steps_differ_by_what_adam_keeps(network: Network) -> None:
    model = network("model=unet_tiny")
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    meter = LedgerMeter(model, optimizer)
    memory = MemoryPolicy()
    batch = Batch(torch.randn(1, 1, 16, 16, 16), torch.zeros(1, 16, 16, 16, dtype=torch.int16))
    for _ in range(STEADY + 2):
        train_step(model, SegmentationLoss("ce"), optimizer, memory.scaler(), memory, [batch], meter.mark)
    summary = meter.summary()
    states = sum(v.nbytes for state in optimizer.state.values() for v in state.values())
    assert tuple(summary["phases"]) == PHASES
    for phase in ("forward", "loss", "backward"):
        peaks = summary["phases"][phase]
        assert peaks["steady"] - peaks["first"] == states, phase
    assert summary["peak_bytes"] == max(max(p.values()) for p in summary["phases"].values())
    assert sum(name == "end" for _, name in meter.ledger.marks) == STEADY, "later steps run unmeasured"


def test_on_the_cpu_the_ledger_alone_measures(network: Network) -> None:
    model = network("model=unet_tiny")
    assert type(open_meter(model, torch.optim.Adam(model.parameters()))) is LedgerMeter


def test_a_step_with_a_skipped_update_does_not_count_as_one_that_repeats(network: Network) -> None:
    """fp16 overflows in a run's first steps: the optimizer's state does not exist yet."""
    model = network("model=unet_tiny")
    skipped, taken = torch.optim.Adam(model.parameters()), torch.optim.SGD(model.parameters(), 0.1)
    for optimizer, steps in ((skipped, 0), (taken, 1)):  # plain SGD keeps nothing, ever
        meter = LedgerMeter(model, optimizer)
        for phase in (*PHASES, "end"):
            meter.mark(phase)
        assert meter.steps == steps


def test_accumulation_counts_as_one_step() -> None:
    micro = [("data", 1), ("forward", 5), ("loss", 2), ("backward", 6)]
    peaks = [("before", 0), *micro, *micro, ("step", 3), ("end", 1), *micro, ("step", 4), ("end", 1)]
    found = by_phase(peaks)
    assert found["step"] == {"first": 3, "steady": 4}
    assert found["forward"] == {"first": 5, "steady": 5}


def test_after_one_step_later_steps_are_taken_to_be_like_it() -> None:
    assert by_phase((phase, i) for i, phase in enumerate(PHASES))["backward"] == {"first": 3, "steady": 3}


def test_cuda_meter_keeps_the_highest_of_later_steps(monkeypatch: pytest.MonkeyPatch, network: Network) -> None:
    """The allocator's counters are replaced by a script: what is read at a mark belongs to the phase before it."""
    readings = iter([0, *(10 * s + i for s in range(1, 6) for i in range(6))])

    def stats(device: torch.device) -> dict[str, int]:
        n = next(readings)
        return {
            "allocated_bytes.all.peak": n,
            "requested_bytes.all.peak": n - 1,
            "reserved_bytes.all.peak": 10**6 if n % 10 == 5 else 2 * n,  # between steps, validation reserves a lot
            "num_alloc_retries": 1,
        }

    monkeypatch.setattr(torch.cuda, "memory_stats", stats)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (300, 1000))
    model = network("model=unet_tiny")
    meter = CudaMeter(model, torch.optim.Adam(model.parameters()))
    for _ in range(5):
        for phase in (*PHASES, "end"):
            meter.mark(phase)
    found = meter.summary()
    assert found["phases"]["data"] == {"first": 10, "steady": 50}
    assert found["phases"]["step"] == {"first": 14, "steady": 54}
    assert (found["peak_bytes"], found["kind"]) == (54, "cuda allocated")
    assert (found["requested_bytes"], found["reserved_bytes"]) == (53, 108)
    assert (found["retries"], found["device_used_bytes"]) == (1, 700)
    seen = found["ledger"]
    assert seen["categories"]["params"] == seen["peak_bytes"] == sum(p.nbytes for p in model.parameters())
    assert not meter.is_open

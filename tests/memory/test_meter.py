"""Peaks per phase, of the first step and of later ones, from marks alone."""

from collections.abc import Callable

import pytest
import torch

from unet3d.memory.breakdown import by_phase
from unet3d.memory.meter import MEASURED_STEPS, CudaMeter, LedgerMeter
from unet3d.model.unet import UNet3D
from unet3d.training.step import PHASES

Network = Callable[..., UNet3D]


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


@pytest.fixture
def counters(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The allocator's counters follow a script: phase i of step s, from 1 on, peaks at 10 s + i bytes.

    Under the ledger 1000 bytes more. Returns the calls that change the allocator.
    """
    readings = iter([0, *(10 * s + i for s in range(1, 9) for i in range(6))])  # i = 5: between two steps
    calls: list[str] = []

    def stats(device: torch.device) -> dict[str, int]:
        n = next(readings)
        peak = n + (1000 if n < 10 * (MEASURED_STEPS + 1) else 400 if n == 10 * (MEASURED_STEPS + 1) + 1 else 0)
        return {
            "allocated_bytes.all.peak": peak,
            "requested_bytes.all.peak": peak - 1,
            "reserved_bytes.all.peak": 10**6 if n % 10 == 5 else 2 * peak,  # between steps, validation reserves a lot
            "num_alloc_retries": 3 + (n > 50),
        }

    monkeypatch.setattr(torch.cuda, "memory_stats", stats)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: calls.append("reset"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("empty"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (300, 1000))
    return calls


def measured(model: UNet3D, steps: int) -> CudaMeter:
    meter = CudaMeter(model, torch.optim.SGD(model.parameters(), 0.1))
    for _ in range(steps):
        for phase in (*PHASES, "end"):
            meter.mark(phase)
    return meter


def test_cuda_peaks_are_the_highest_of_the_steps_after_the_ledgers(counters: list[str], network: Network) -> None:
    model = network("model=unet_tiny")
    meter = measured(model, MEASURED_STEPS + 2)
    found = meter.summary()
    assert found["phases"]["data"] == {"steady": 50}, "the first step was the ledger's"
    assert found["phases"]["forward"] == {"steady": 441}, "of the first step without it"
    assert tuple(found["phases"]) == PHASES
    assert (found["peak_bytes"], found["kind"]) == (441, "cuda allocated")
    assert (found["requested_bytes"], found["reserved_bytes"]) == (440, 882)
    assert (found["retries"], found["device_used_bytes"]) == (1, 700)
    seen = found["ledger"]
    assert seen["categories"]["params"] == seen["peak_bytes"] == sum(p.nbytes for p in model.parameters())
    assert not meter.is_open


def test_the_cache_is_emptied_once_before_the_first_step_without_the_ledger(
    counters: list[str], network: Network
) -> None:
    measured(network("model=unet_tiny"), MEASURED_STEPS + 3)
    marks = len(PHASES) + 1
    assert counters == ["reset"] * marks * MEASURED_STEPS + ["empty"] + ["reset"] * marks * 3


def test_a_run_of_the_ledgers_steps_alone_says_so(counters: list[str], network: Network) -> None:
    found = measured(network("model=unet_tiny"), MEASURED_STEPS).summary()
    assert found["kind"] == "cuda allocated, observed steps"
    assert found["phases"]["step"] == {"first": 1014, "steady": 1034}
    assert (found["peak_bytes"], found["requested_bytes"]) == (1034, 1033)
    assert "empty" not in counters and found["retries"] == 3

"""The ledger against hand-made programs and against torch's own tracker and allocator."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.distributed._tools.mem_tracker import MemTracker
from torch.profiler import ProfilerActivity, profile

from unet3d.losses import SegmentationLoss
from unet3d.memory.ledger import Ledger, categories_at, levels, peak_moment, phase_peaks
from unet3d.model.unet import UNet3D
from unet3d.policy import MemoryPolicy
from unet3d.step import Batch, train_step

Network = Callable[..., UNet3D]
KIB = 1024


def test_counts_births_and_deaths_by_phase() -> None:
    ledger = Ledger()
    with ledger:
        ledger.mark("one")
        a = torch.zeros(256)
        b = a + 1
        del a
        ledger.mark("two")
        c = b * 2
    assert phase_peaks(ledger) == [("before", 0), ("one", 2 * KIB), ("two", 2 * KIB)]
    del b, c
    assert levels(ledger)[-1] == 0


def test_views_and_in_place_operations_cost_nothing() -> None:
    ledger = Ledger()
    with ledger:
        a = torch.zeros(256)
        views = [a[:10], a.view(16, 16), a.add_(1), a.t()]
    assert max(levels(ledger)) == KIB
    assert len(views) == 4


def test_what_was_there_before_counts_once_used() -> None:
    a = torch.zeros(256)
    ledger = Ledger()
    with ledger:
        b = a + 1
    assert max(levels(ledger)) == 2 * KIB
    assert categories_at(ledger, peak_moment(ledger))["inputs"] == KIB
    assert b.numel()


def run(model: UNet3D, ckpt: int, steps: int, ledger: Ledger | None) -> None:
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    memory = MemoryPolicy(ckpt=ckpt)
    batch = Batch(torch.randn(2, 1, 16, 16, 16), torch.zeros(2, 16, 16, 16, dtype=torch.int16))
    mark = ledger.mark if ledger else lambda phase: None
    for _ in range(steps):
        train_step(model, SegmentationLoss("dice_ce"), optimizer, memory.scaler(), memory, [batch], mark)


def test_peak_equals_torchs_mem_tracker(network: Network) -> None:
    model = network("model=unet_tiny")
    ledger = Ledger()
    for parameter in model.parameters():
        ledger.claim(parameter, "params", "")
    with ledger:
        run(model, 0, 1, ledger)
    again = network("model=unet_tiny")
    tracker = MemTracker()
    tracker.track_external(again)
    with tracker:
        run(again, 0, 1, None)
    truth = next(iter(tracker.get_tracker_snapshot("peak").values()))["Total"]
    assert max(levels(ledger)) == truth


RNG_STATE = 5056  # bytes; checkpointing keeps one a segment, on the CPU, made where no dispatch mode sees it


@pytest.mark.parametrize(("ckpt", "unseen"), [(0, 0), (3, 2 * RNG_STATE)])
def test_peak_equals_the_allocators_truth(tmp_path: Path, network: Network, ckpt: int, unseen: int) -> None:
    """In-place after instance norm: the peak lies in no convolution, so kernel scratch does not hide it."""
    overrides = ("model=unet_tiny", "model.inplace=true")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        model = network(*overrides)
        run(model, ckpt, 2, None)
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    steps = [e["args"]["Bytes"] for e in sorted(events, key=lambda e: e.get("ts", 0)) if e.get("name") == "[memory]"]
    truth = peak = 0
    for change in steps:
        peak += change
        truth = max(truth, peak)
    ledger = Ledger()
    with ledger:
        model = network(*overrides)
        run(model, ckpt, 2, ledger)
    assert max(levels(ledger)) == truth - unseen


def test_categories_at_the_peak_add_up(network: Network) -> None:
    model = network("model=unet_tiny")
    ledger = Ledger()
    for parameter in model.parameters():
        ledger.claim(parameter, "params", "")
    with ledger:
        run(model, 0, 2, ledger)
    categories = categories_at(ledger, peak_moment(ledger))
    parameters = sum(p.numel() for p in model.parameters())
    assert sum(categories.values()) == max(levels(ledger))
    assert categories["params"] == 4 * parameters
    assert categories["optimizer"] == pytest.approx(8 * parameters, rel=1e-2)
    assert categories["activations"] > categories["temporaries"] > 0

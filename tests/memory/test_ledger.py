"""The ledger against hand-made programs and against torch's own tracker; `test_truth.py` has the allocator."""

from collections.abc import Callable

import torch

from unet3d.memory.ledger import Ledger, categories_at, levels, peak_moment, phase_peaks
from unet3d.memory.meter import LedgerMeter
from unet3d.model.unet import UNet3D
from unet3d.train.losses import SegmentationLoss, dice_ce
from unet3d.train.policy import MemoryPolicy
from unet3d.train.step import Mark, ignore_mark, train_step
from unet3d.types import Batch

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


def test_what_lies_on_another_device_takes_none_of_this_ones_memory() -> None:
    ledger = Ledger(device_type="meta")
    with ledger:
        host = torch.zeros(256)
        here = host.to("meta")
        both = here + 1
    assert max(levels(ledger)) == 2 * KIB and categories_at(ledger, peak_moment(ledger))["inputs"] == 0
    assert both.numel()


def run(model: UNet3D, steps: int, mark: Mark, optimizer: torch.optim.Optimizer) -> None:
    memory = MemoryPolicy()
    batch = Batch(torch.randn(2, 1, 16, 16, 16), torch.zeros(2, 16, 16, 16, dtype=torch.int16))
    for _ in range(steps):
        train_step(model, SegmentationLoss(dice_ce), optimizer, memory.scaler(), memory, [batch], mark)


def test_peak_equals_torchs_mem_tracker(network: Network) -> None:
    from torch.distributed._tools.mem_tracker import MemTracker  # seconds to load

    model = network("model=unet_tiny")
    ledger = Ledger()
    for parameter in model.parameters():
        ledger.claim(parameter, "params", "")
    with ledger:
        run(model, 1, ledger.mark, torch.optim.Adam(model.parameters(), foreach=False))
    again = network("model=unet_tiny")
    tracker = MemTracker()
    tracker.track_external(again)
    with tracker:
        run(again, 1, ignore_mark, torch.optim.Adam(again.parameters(), foreach=False))
    truth = next(iter(tracker.get_tracker_snapshot("peak").values()))["Total"]
    assert max(levels(ledger)) == truth


def test_categories_at_the_peak_add_up(network: Network) -> None:
    model = network("model=unet_tiny")
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    meter = LedgerMeter(model, optimizer)
    run(model, 2, meter.mark, optimizer)
    categories = categories_at(meter.ledger, peak_moment(meter.ledger))
    parameters = sum(p.numel() for p in model.parameters())
    tensors = len(list(model.parameters()))
    assert sum(categories.values()) == max(levels(meter.ledger))
    assert categories["params"] == 4 * parameters
    assert categories["optimizer"] == 8 * parameters + 4 * tensors, "moments, and a step count a tensor"
    assert categories["activations"] > categories["temporaries"] > 0

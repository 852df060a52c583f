"""The ledger against hand-made programs and torch's own trackers; `test_truth.py` has the CPU allocator."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from unet3d.base.types import Batch
from unet3d.memory.breakdown import peak_moment
from unet3d.memory.fake_tensors import fake_mode
from unet3d.memory.ledger import Ledger, most_held
from unet3d.memory.meter import LedgerMeter
from unet3d.model.unet import UNet3D
from unet3d.training.losses import SegmentationLoss, dice_ce
from unet3d.training.policy import MemoryPolicy
from unet3d.training.step import Mark, ignore_mark, train_step

Network = Callable[..., UNet3D]
KIB = 1024


def test_births_and_deaths_are_counted_by_phase() -> None:
    ledger = Ledger()
    with ledger:
        ledger.mark("one")
        a = torch.zeros(256)
        b = a + 1
        del a
        ledger.mark("two")
        c = b * 2
    alive = ledger.alive_bytes()
    peaks = [(name, max(alive[start : end + 1])) for name, start, end in ledger.phase_spans()]
    assert peaks == [("before", 0), ("one", 2 * KIB), ("two", 2 * KIB)]
    del b, c
    assert ledger.alive_bytes()[-1] == 0


def test_views_and_in_place_operations_cost_nothing() -> None:
    ledger = Ledger()
    with ledger:
        a = torch.zeros(256)
        views = [a[:10], a.view(16, 16), a.add_(1), a.t()]
    assert most_held(ledger.events) == KIB
    assert len(views) == 4


def test_a_tensor_from_before_counts_once_it_is_used() -> None:
    a = torch.zeros(256)
    ledger = Ledger()
    with ledger:
        b = a + 1
    assert most_held(ledger.events) == 2 * KIB
    assert ledger.categories_at(peak_moment(ledger))["inputs"] == KIB
    assert b.numel()


def test_a_tensor_on_another_device_does_not_count() -> None:
    ledger = Ledger(device_type="meta")
    with ledger:
        host = torch.zeros(256)
        here = host.to("meta")
        both = here + 1
    assert most_held(ledger.events) == 2 * KIB and ledger.categories_at(peak_moment(ledger))["inputs"] == 0
    assert both.numel()


@pytest.mark.parametrize(
    "layer", [nn.Conv3d(4, 6, 3, 2, 1, groups=2), nn.Conv3d(4, 6, 3, dilation=2), nn.ConvTranspose3d(4, 6, 2, 2)]
)
def test_flops_of_a_convolution_are_those_of_torchs_counter(layer: nn.Module) -> None:
    ledger, image = Ledger(), torch.zeros(2, 4, 9, 9, 9)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        layer(image)
    with ledger, torch.no_grad():
        layer(image)
    assert [flops for _, _, flops in ledger.convolutions] == [counter.get_total_flops()]


def run(model: UNet3D, steps: int, mark: Mark, optimizer: torch.optim.Optimizer) -> None:
    memory = MemoryPolicy()
    batch = Batch(torch.randn(2, 1, 16, 16, 16), torch.zeros(2, 16, 16, 16, dtype=torch.int16))
    for _ in range(steps):
        train_step(model, SegmentationLoss(dice_ce), optimizer, memory.scaler(), memory, [batch], mark)


def test_the_peak_is_that_of_torchs_mem_tracker(network: Network) -> None:
    from torch.distributed._tools.mem_tracker import MemTracker  # seconds to load

    model = network("model=unet_tiny")
    ledger = Ledger()
    for parameter in model.parameters():
        ledger.claim(parameter, "params", "")
    with ledger:
        run(model, 1, ledger.mark, torch.optim.Adam(model.parameters(), foreach=False))
    twin = network("model=unet_tiny")
    tracker = MemTracker()
    tracker.track_external(twin)
    with tracker:
        run(twin, 1, ignore_mark, torch.optim.Adam(twin.parameters(), foreach=False))
    truth = next(iter(tracker.get_tracker_snapshot("peak").values()))["Total"]
    assert most_held(ledger.events) == truth


def test_categories_at_the_peak_add_up(network: Network) -> None:
    model = network("model=unet_tiny")
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    meter = LedgerMeter(model, optimizer)
    run(model, 2, meter.mark, optimizer)
    categories = meter.ledger.categories_at(peak_moment(meter.ledger))
    parameters = sum(p.numel() for p in model.parameters())
    tensors = len(list(model.parameters()))
    assert sum(categories.values()) == most_held(meter.ledger.events)
    assert categories["params"] == 4 * parameters
    assert categories["optimizer"] == 8 * parameters + 4 * tensors, "moments, and a step count a tensor"
    assert categories["activations"] > categories["temporaries"] > 0


def test_views_of_fake_tensors_share_a_storage_and_new_tensors_do_not() -> None:
    with fake_mode(), Ledger() as ledger:
        base = torch.zeros(4, 6)
        turned, row, copy = base.t(), base[1], base + 1
        assert turned.untyped_storage()._cdata == row.untyped_storage()._cdata == base.untyped_storage()._cdata
        assert copy.untyped_storage()._cdata != base.untyped_storage()._cdata
        assert turned.shape == (6, 4) and turned.stride() == (1, 6) and copy.nbytes == 96
        whole, real = base * 2, base * 2.5
        assert (torch.zeros(2, dtype=torch.int64) * 2).dtype == torch.int64
        assert (torch.zeros(2, dtype=torch.int64) * 2.5).dtype == torch.float32, "2 and 2.5 make other types"
    assert whole.device.type == real.device.type == "cpu"
    assert max(storage.bytes for storage in ledger.storages) == 96

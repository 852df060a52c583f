"""The ledger against hand-made programs and torch's own trackers; `test_truth.py` has the CPU allocator."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from unet3d.memory.breakdown import peak_moment
from unet3d.memory.ledger import Ledger, most_held

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

"""The table of the field's networks, `benchmarks/field.py`, with a tiny network."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from unet3d.recomputing.module import Recomputed, schedules_of

SHAPE = (1, 1, 64, 64, 64)


@pytest.fixture(params=["field", "field_page"])
def script(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module of `benchmarks`."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    return importlib.import_module(request.param)


def network() -> nn.Module:
    layers = [nn.Conv3d(1, 8, 3, padding=1), nn.InstanceNorm3d(8), nn.ReLU(), nn.Conv3d(8, 8, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.Conv3d(8, 2, 1)).train()


@pytest.mark.parametrize("script", ["field"], indirect=True)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_each_plan_is_that_of_a_network_of_its_own(device: str, precision: str, script: Any) -> None:
    names = []
    for plan, planned, work in script.planned_networks(network(), SHAPE, device, precision):
        names.append(plan)
        if plan == "plain":
            continue
        recomputed = Recomputed(network(), plan, device_type=device)
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            alone = schedules_of(recomputed).program(torch.empty(SHAPE))
            planned_program = schedules_of(planned).program(torch.empty(SHAPE))
        assert (planned_program.peak_bytes, work) == (alone.peak_bytes, alone.schedule.work)
    assert names == ["plain", "lean", "tiles"]


@pytest.mark.parametrize("script", ["field_page"], indirect=True)
def test_what_is_not_predicted_is_a_dash_and_no_number(script: Any) -> None:
    entries = importlib.import_module("field_networks").ENTRIES[:2]
    results = {entries[0].title: {"cpu bf16": {"parameters": 5, "seconds": 12.4}}}
    rows = list(script.sources(entries, results))[-2:]
    assert [row.strip("| ").split(" | ")[-1] for row in rows] == ["12", script.DASH]

"""`recompute=` of a config: which schedule a run takes, what it needs, and that a resumed run takes the same."""

import json
from pathlib import Path

import pytest
import torch
from monai.networks.nets import DynUNet
from torch import nn
from training import PLAIN, TINY, pixels_alone, train

from unet3d import build
from unet3d.base.types import MIB
from unet3d.config import compose
from unet3d.config.schema import Config
from unet3d.memory.ledger import Ledger, most_held
from unet3d.memory.prediction import preflight
from unet3d.memory.simulate import validation_peak
from unet3d.memory.technique import (
    by_program,
    choose_technique,
    prepared,
    saved,
    step_peak,
)
from unet3d.recomputing.prepare import bound
from unet3d.recomputing.program import PLAIN as NOTHING
from unet3d.recomputing.program import Technique
from unet3d.training.policy import MemoryPolicy

SMALL = ("model=unet_tiny", "model.features=[4,8]", "model.groups=4", "data.patch=[16,16,24]", "batch=1")


def config(*overrides: str) -> Config:
    composed = compose.compose([*SMALL, "model.in_channels=1", "model.classes=3", "dry_run=true", *PLAIN, *overrides])
    composed.model.in_channels = 1
    composed.model.classes = 3
    return composed


def peak_of(*overrides: str) -> int:
    asked = config(*overrides)
    return step_peak(asked, asked.model).tensors


@pytest.mark.slow
def test_a_budget_gets_the_least_work_with_which_the_simulated_step_fits() -> None:
    plain = peak_of()
    least = peak_of("recompute=tiles")
    works = []
    for share in (1.0, 0.5, 0.0):
        budget = least + share * (plain - least)
        asked = config("recompute=auto", f"budget={(budget + 1) / MIB:.6f}MiB")
        chosen = choose_technique(asked, asked.model)
        assert step_peak(asked, asked.model, chosen).tensors <= budget + 2
        works.append(chosen.forward_recompute_fraction)
        if share == 1.0:
            assert chosen == NOTHING
            continue
        assert chosen.program is not None
        schedules = chosen.program.schedules
        number = schedules.index(chosen.program.schedule)
        if number:
            before = chosen.program.by(schedules[number - 1])
            assert step_peak(asked, asked.model, by_program(before)).tensors > budget, "less work"
    assert works == sorted(works)
    assert works[0] < works[-1]


def test_a_saved_schedule_is_taken_again_and_one_of_other_options_is_not() -> None:
    asked = config("recompute=tiles")
    program = choose_technique(asked, asked.model).program
    assert program is not None
    every_map_stays = prepared(asked, asked.model).by(program.schedules[0])
    before = saved(asked, every_map_stays)
    again = choose_technique(asked, asked.model, before=json.loads(json.dumps(before))).program
    assert again is not None
    assert again.schedule == every_map_stays.schedule != program.schedule
    for other in (before | {"recompute": "lean"}, before | {"keep": ["7"]}, before | {"keep": ["x"] * 99}):
        chosen = choose_technique(asked, asked.model, before=other).program
        assert chosen is not None
        assert chosen.schedule == program.schedule


def dyn_unet(in_channels: int, classes: int) -> nn.Module:
    """A network of another library."""
    sizes = ([3, 3, 3], [1, 2, 2], [2, 2])
    network: nn.Module = DynUNet(3, in_channels, classes, *sizes, filters=[4, 6, 8])
    return network


@pytest.mark.slow
def test_another_librarys_network_needs_what_was_predicted(tmp_path: Path) -> None:
    words = (*TINY, *PLAIN, f"model.path={__name__}:dyn_unet", "recompute=lean", "amp=true", "accumulate=2", "steps=1")
    done = train(tmp_path, *words, "eval_every=0", "hydra.run.dir=run", hook=importable, frills=True)
    assert done.code == 0, done.err
    memory = json.loads((tmp_path / "run" / "memory.json").read_text())
    assert memory["error_bytes"] == 0
    assert memory["without"]["recompute=lean"] > memory["predicted"]["peak_bytes"]


@pytest.mark.slow
def test_a_resumed_run_takes_the_schedule_that_memory_json_has(tmp_path: Path) -> None:
    """Another one than a search finds now, as after an update of this package."""
    words = (*TINY, *PLAIN, "recompute=tiles", "steps=1", "eval_every=0", "hydra.run.dir=run")
    assert train(tmp_path, *words, hook=pixels_alone, frills=True).code == 0
    path = tmp_path / "run" / "memory.json"
    memory = json.loads(path.read_text())
    found = memory["schedule"]["keep"]
    every_map_stays = ["f" * len(mask) for mask in found]
    path.write_text(json.dumps(memory | {"schedule": memory["schedule"] | {"keep": every_map_stays}}))
    assert train(tmp_path, "resume=run", "steps=2", hook=pixels_alone, frills=True).code == 0
    assert json.loads(path.read_text())["schedule"]["keep"] != found


def importable() -> None:
    """Let the run find this file's networks, and draw no pictures."""
    import sys

    pixels_alone()
    sys.path.insert(0, str(Path(__file__).parent))


@pytest.mark.slow
def test_windows_follow_a_program_where_they_would_need_more_than_a_step() -> None:
    asked = config("recompute=tiles", "model.features=[16,32]", "data.patch=[32,32,48]", "model.norm=batch")
    found = preflight(asked, asked.model)
    plain = validation_peak(asked, asked.model, found.memory["predicted"]["state"]["optimizer"])
    assert found.memory["predicted_validation_bytes"] < plain
    technique = found.technique(asked, asked.model)
    policy = build.policy(asked, "cpu", technique)
    model = build.model(asked.model, 0)
    image = torch.randn(1, 1, *asked.data.patch)
    policy.forward(model.train(), image).mean().backward()  # there are statistics now
    model.eval()
    ledger = Ledger()
    with torch.no_grad():
        expected = model(image)
        with ledger:
            ledger.count([*model.parameters(), *model.buffers(), image])
            logits = policy.forward(model, image)
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
    optimizer = found.memory["predicted"]["state"]["optimizer"]
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    assert most_held(ledger.events) + optimizer <= found.memory["predicted_validation_bytes"] + buffers + 2**14


def with_frozen_parts(in_channels: int, classes: int) -> nn.Module:
    """A network that has a frozen layer, and numbers that cannot be trained."""
    network = nn.Sequential(nn.Conv3d(in_channels, 4, 3, padding=1), nn.ReLU(), nn.Conv3d(4, classes, 1))
    network[0].requires_grad_(False)
    network.register_parameter("seen", nn.Parameter(torch.zeros(1, dtype=torch.int64), requires_grad=False))
    return network


def test_what_a_users_network_froze_stays_so() -> None:
    asked = config("recompute=tiles", f"model.path={__name__}:with_frozen_parts")
    asked.model.features = []
    program = prepared(asked, asked.model)
    network = with_frozen_parts(1, 3).train()
    assert program.sizes is not None
    trained = sum(parameter.nbytes for parameter in network.parameters() if parameter.requires_grad)
    assert sum(program.sizes.of_weights) == trained
    chosen = choose_technique(asked, asked.model).program
    assert chosen is not None
    image = torch.randn(1, 1, *asked.data.patch)
    policy = MemoryPolicy(technique=Technique(program=bound(chosen, network, image)))
    policy.forward(network, image).square().mean().backward()
    assert [name for name, parameter in network.named_parameters() if parameter.grad is not None] == [
        "2.weight",
        "2.bias",
    ]

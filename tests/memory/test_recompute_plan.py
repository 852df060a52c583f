"""`recompute=` of a config: which schedule a run takes, what it needs, and that a resumed run takes the same."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from monai.networks.nets import DynUNet
from torch import Tensor, nn
from training import PLAIN, TINY, pixels_alone, train

from unet3d import build
from unet3d.base.errors import UserError
from unet3d.base.types import MIB
from unet3d.config import compose
from unet3d.config.schema import Config
from unet3d.memory import remedies as search_of_ways
from unet3d.memory import technique
from unet3d.memory.ledger import Ledger, most_held
from unet3d.memory.prediction import preflight
from unet3d.memory.remedies import Candidate, find_fit
from unet3d.memory.simulate import validation_peak
from unet3d.memory.technique import (
    by_program,
    choose_segments,
    choose_technique,
    prepared,
    saved,
    some_schedules,
    step_peak,
)
from unet3d.recomputing.prepare import bound
from unet3d.recomputing.program import PLAIN as NOTHING
from unet3d.recomputing.program import Technique, by_plan, least_memory
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


def test_auto_goes_below_tiles_where_a_schedule_needs_less_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    # So that tiles of this small network stops before.
    monkeypatch.setattr("unet3d.recomputing.program.WORTH_FOR_TILES", 5.0)
    asked = config()
    program = prepared(asked, asked.model)
    least = least_memory(program.schedules)
    assert least.peak_bytes < by_plan(program, "tiles").schedule.peak_bytes, "else there is nothing to test"
    budget = step_peak(asked, asked.model, by_program(program.by(least))).tensors
    asked = config("recompute=auto", f"budget={(budget + 1) / MIB:.6f}MiB")
    assert step_peak(asked, asked.model).tensors <= budget + 2


@pytest.mark.slow
def test_a_budget_gets_the_least_work_with_which_the_simulated_step_fits() -> None:
    plain = peak_of()
    least = peak_of("recompute=tiles")
    works = []
    for share in (1.0, 0.7, 0.4, 0.1, 0.0):
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


def test_a_budget_below_the_least_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WITH_BUDGET", "PLANS"):  # what would fit by recompute: test_plan.py
        monkeypatch.setattr(search_of_ways, name, ())
    asked = config("recompute=auto", "budget=0.1MiB", "amp=true", "model.features=[4]")
    with pytest.raises(UserError, match=r"budget=0\.1MiB"):
        preflight(asked, asked.model)


def test_auto_without_a_budget_is_one_line() -> None:
    with pytest.raises(UserError, match=r"^recompute=auto: .*budget="):
        compose.compose(["recompute=auto"])


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


def test_equal_configs_share_a_program_and_what_changes_the_step_does_not() -> None:
    asked = config("recompute=lean")
    program = prepared(asked, asked.model)
    assert prepared(replace(asked, accumulate=3, ckpt=0), asked.model) is program
    assert prepared(replace(asked, amp=True), asked.model) is not program
    assert prepared(replace(asked, batch=2), asked.model) is not program


class Two(nn.Module):
    """Two convolutions, or three: another network at each call."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Conv3d(1, 1, 3, padding=1) for _ in range(layers)))

    def forward(self, image: Tensor) -> Tensor:
        result: Tensor = self.layers(image)
        return result


def test_a_network_that_is_another_at_each_call_is_refused() -> None:
    asked = config("recompute=lean", f"model.path={__name__}:varying")
    asked.model.features = []
    program = choose_technique(asked, asked.model).program
    assert program is not None
    image = torch.zeros(1, 1, *asked.data.patch)
    assert bound(program, Two(2), image).schedule == program.schedule
    with pytest.raises(UserError, match="not the network that its schedule was found for"):
        bound(program, Two(3), image)


def varying(in_channels: int, classes: int) -> nn.Module:
    return Two(2)


def dyn_unet(in_channels: int, classes: int) -> nn.Module:
    """A network of another library."""
    sizes = ([3, 3, 3], [1, 2, 2], [2, 2])
    network: nn.Module = DynUNet(3, in_channels, classes, *sizes, filters=[4, 6, 8])
    return network


def depends(in_channels: int, classes: int) -> nn.Module:
    """A network that looks at numbers."""

    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Conv3d(in_channels, classes, 1)

        def forward(self, image: Tensor) -> Any:
            return self.layer(image) if image.mean() > 0 else -self.layer(image)

    return Looks()


@pytest.mark.slow
@pytest.mark.parametrize("words", ["recompute=lean amp=true accumulate=2"])
def test_a_run_of_another_librarys_network_needs_what_was_predicted(tmp_path: Path, words: str) -> None:
    path = f"model.path={__name__}:dyn_unet"
    given = (*TINY, *PLAIN, path, "steps=2", "hydra.run.dir=run", *words.split())
    done = train(tmp_path, *given, hook=importable, frills=True)
    assert done.code == 0, done.err
    memory = json.loads((tmp_path / "run" / "memory.json").read_text())
    assert memory["error_bytes"] == 0
    assert memory["without"][words.split()[0]] > memory["predicted"]["peak_bytes"]
    assert memory["schedule"]["recompute"] == words.split()[0].partition("=")[2]


def test_a_network_that_cannot_be_traced_is_named_with_the_place() -> None:
    asked = config("recompute=lean", f"model.path={__name__}:depends")
    asked.model.features = []
    with pytest.raises(UserError, match=r"^recompute=lean: Looks cannot be traced at .*test_recompute_plan\.py:\d+: "):
        choose_technique(asked, asked.model)


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


def test_segments_and_recompute_are_chosen_by_their_options() -> None:
    asked = config("ckpt=2")
    assert choose_technique(asked, asked.model) == choose_segments(asked, asked.model)
    asked = config("recompute=lean")
    assert choose_technique(asked, asked.model).program is not None


@pytest.mark.slow
def test_the_curve_falls_in_memory_as_it_rises_in_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(technique, "CURVE_SCHEDULES", 5)
    asked = config("recompute=tiles", "data.patch=[24,24,32]")
    steps = some_schedules(asked, asked.model)
    assert len(steps) > 3
    work = [step.forward_recompute_fraction for step in steps]
    assert work == sorted(set(work))
    sizes = [step_peak(asked, asked.model, step).tensors for step in steps]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] < step_peak(replace(asked, recompute="none"), asked.model).tensors
    assert sizes[-1] <= 1.01 * step_peak(asked, asked.model).tensors


@pytest.mark.slow
def test_what_fits_a_budget_may_be_a_schedule_for_it() -> None:
    lean = peak_of("recompute=lean")
    tiles = peak_of("recompute=tiles")
    budget = (lean + tiles) // 2
    asked = config(f"budget={budget / MIB:.6f}MiB", "amp_dtype=bf16")
    front, _ = find_fit(Candidate(asked, asked.model), budget)
    ways = {row.overrides: row for row in front}
    assert any("recompute=auto" in words for words in ways)
    for words, row in ways.items():
        if "recompute=auto" in words:
            assert row.step.limited <= budget


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

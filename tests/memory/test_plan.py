"""Levers with their price, and the search for what fits; a dry run confirms either."""

import json
import shlex
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from training import PLAIN, train

from unet3d import compose
from unet3d.config import Config
from unet3d.errors import UserError
from unet3d.memory import budget
from unet3d.memory.budget import (
    Option,
    command_line,
    halved,
    knows_the_batch,
    lean_options,
    levers,
    oom_suggestions,
    pareto_front,
    plan,
    price,
)
from unet3d.memory.preflight import MemoryEstimate, preflight
from unet3d.memory.segments import predict
from unet3d.types import budget_bytes

NET = ("model=unet_tiny", "model.features=[8,16]", "data.patch=[8,16,8]", "batch=2", "model.norm=group")


def config(*overrides: str) -> Config:
    found = compose.compose([*NET, *PLAIN, *overrides])
    found.model.in_channels, found.model.classes = 1, 3
    return found


def look(options: Config) -> MemoryEstimate:
    return MemoryEstimate("unet_tiny", options, options.model)


def with_budget(options: Config, share: float) -> tuple[Config, int]:
    whole = predict(options, options.model)["peak_bytes"]
    budget = f"{share * whole / 2**20:.3f}MiB"
    return replace(options, budget=budget), budget_bytes(budget)


def test_a_budget_that_does_not_fit_names_what_would_and_a_dry_run_confirms_it() -> None:
    options, budget = with_budget(config("optim=adamw"), 0.4)
    _, _, asked, *steps = plan(options, options.model, budget, price(options, options.model)).splitlines()
    assert asked.endswith("as asked") and steps[-1].endswith("(fits)")
    words = [word for line in steps for word in line.removesuffix("(fits)").split(":")[1].split()]
    again = config("optim=adamw", f"budget={options.budget}", *words)
    peak = predict(again, again.model)["peak_bytes"]
    assert peak <= budget
    assert f"{peak / 2**20:,.1f}" == steps[-1].split()[0]


def test_a_budget_that_nothing_meets_is_told_so_with_the_smallest_peak() -> None:
    options = config("budget=0.001MiB")
    last = plan(options, options.model, 1000, price(options, options.model)).splitlines()[-1]
    assert last.startswith("nothing of this fits; the smallest peak among these is ")


def test_fit_gives_a_command_that_a_dry_run_confirms(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    options, budget = with_budget(config(), 0.6)
    words = [*NET, *PLAIN, "model.in_channels=1", "model.classes=3", f"budget={options.budget}"]
    said = budget.find_fit(options, options.model, words, print)
    assert "estimated" in capsys.readouterr().out
    assert "batch=1" not in said, "Dice over the batch would be another loss"
    done = train(tmp_path, *shlex.split(said)[2:], "dry_run=true", f"hydra.run.dir={tmp_path}", frills=True)
    assert done.code == 0, done.err
    assert json.loads((tmp_path / "memory.json").read_text())["predicted"]["peak_bytes"] <= budget


def test_fit_says_when_nothing_does() -> None:
    options = config("budget=0.01MiB")
    with pytest.raises(UserError, match="nothing tried fits; the smallest peak among it is"):
        budget.find_fit(options, options.model, NET, print)
    with pytest.raises(UserError, match="needs a budget"):
        budget.find_fit(config(), config().model, NET, print)


def test_the_front_holds_what_nothing_beats() -> None:
    points = [
        Option(("a",), 1, 100, 0.0, True),
        Option(("b",), 2, 60, 0.1, True),
        Option(("c",), 2, 80, 0.2, True),
        Option(("d",), 3, 50, 0.3, True),
        Option(("e",), 3, 60, 0.1, True),
    ]
    assert [point.overrides for point in pareto_front(points)] == [("a",), ("b",), ("d",)]


def test_a_command_replaces_what_it_changes() -> None:
    words = ["model=unet", "batch=4", "amp=false", "data.patch=[8,8,8]", "ckpt=3", "budget=2 MiB"]
    given = command_line(words, ["amp=true", "batch=1", "accumulate=4", "ckpt=0"])
    assert (
        given == "python train.py model=unet 'data.patch=[8,8,8]' 'budget=2 MiB' amp=true batch=1 accumulate=4 ckpt=0"
    )


@pytest.mark.parametrize(
    ("norm", "widen", "features", "decoder"),
    [("group", "second", [16, 32], None), ("instance", "first", [32, 32], [4])],
)
def test_levers_stop_at_networks_that_do_not_exist(
    norm: str, widen: str, features: list[int], decoder: list[int] | None
) -> None:
    """Groups of 8 on 4 channels; a decoder of no channels."""
    options = config()
    shape = replace(options.model, norm=norm, widen=widen, features=features, decoder=decoder)
    found = list(levers(options, shape, price(options, shape)))
    assert found[-1][0].changes == "the patch"
    assert predict(found[-1][0].config, found[-1][0].options)["peak_bytes"] == found[-1][1].peak


@pytest.mark.parametrize("norm", ["instance", "group"])
def test_a_lever_is_pulled_where_it_saves(norm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mixed precision makes group norm need more on CUDA: no later price rests on it, and each line is a command."""
    options = config("device=cuda", f"model.norm={norm}", "model.features=[8,8]", "data.patch=[16,16,16]", "batch=1")
    found = list(levers(options, options.model, before := price(options, options.model)))
    assert ("amp=true" in [lever.override for lever, _ in found]) == (norm == "instance")
    peaks = [before.peak, *(now.peak for _, now in found)]
    assert all(later < earlier for earlier, later in pairwise(peaks))
    assert all(lever.config.amp == (norm == "instance") for lever, _ in found[-2:])


def test_lean_operations_are_the_same_function() -> None:
    swish = config("model.activation=swish").model
    assert [name for name, _ in lean_options(swish)] == ["model.activation=swish_lean"]
    view = config("model.norm=instance", "model.inplace=true").model
    assert [name for name, _ in lean_options(view)] == ["model.inplace=false"]
    leaky = config("model.activation=leaky_relu").model
    assert [name for name, _ in lean_options(leaky)] == ["model.inplace=true"]
    for options in (swish, view, leaky):
        for _, lean in lean_options(options):
            assert predict(config(), lean)["peak_bytes"] < predict(config(), options)["peak_bytes"]


def test_what_looks_at_the_batch_is_another_step_in_parts() -> None:
    assert knows_the_batch(config(), config().model), "Dice over the batch"
    plain = config("loss=dice", "loss.batch_dice=false")
    assert not knows_the_batch(plain, plain.model)
    entropy = config("loss=ce", "loss.batch_dice=false")
    assert knows_the_batch(entropy, entropy.model), "a mean over the labelled voxels of the batch"
    batch_norm = config("loss=dice", "loss.batch_dice=false", "model.norm=batch")
    assert knows_the_batch(batch_norm, batch_norm.model)


def test_what_would_need_less_does_need_less_whatever_the_budget() -> None:
    """The budget was too high, or memory would not have run out."""
    asked = config("budget=8GiB")
    _, before, resumed, told, *lines = oom_suggestions(asked, asked.model)
    assert resumed.endswith("  ckpt=auto budget=null") and told.startswith("and in a new run, ")
    peaks = [float(line.split()[0].replace(",", "")) for line in (before, resumed, *lines)]
    assert lines and all(later < earlier for earlier, later in pairwise(peaks))


def test_a_budget_that_was_too_high_is_the_first_thing_to_go() -> None:
    """All of a network that `ckpt=auto` left uncut for it may be kept."""
    asked = config("ckpt=auto", "budget=8GiB", "amp=true", "batch=1")
    _, before, first, *_ = oom_suggestions(asked, asked.model)
    assert first.endswith(" MiB  budget=null")
    free = predict(config("ckpt=auto", "amp=true", "batch=1"), asked.model)["peak_bytes"]
    assert first.split()[0] == f"{free / 2**20:,.1f}" != before.split()[0]


def test_half_the_width_is_predicted_with_cuts_of_its_own() -> None:
    asked = config("ckpt=2", "model.norm=instance", "optim=adamw")
    advice = preflight(asked, asked.model).memory["advice"]
    narrower = halved(asked, asked.model, advice["level"])
    assert narrower and advice["halved_peak_bytes"] == price(asked, narrower).peak

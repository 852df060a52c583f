"""What fits a memory budget: the options, their cost, and that a run of them needs what was promised."""

import shlex
from dataclasses import replace
from itertools import pairwise

import pytest
from training import PLAIN, face

from unet3d import build, compose
from unet3d.config import Config, Model
from unet3d.errors import UserError
from unet3d.memory.budget import (
    Option,
    find_fit,
    front,
    lean_operation,
    levers,
    oom_suggestions,
    replaced,
    search,
    sees_the_batch,
    simulated,
    smaller,
)
from unet3d.memory.preflight import preflight
from unet3d.memory.segments import estimated_in_slabs, in_slabs, predict, profile_stages
from unet3d.types import MIB, mib

WORDS = (
    *("model=unet_tiny", "model.features=[8,16]", "data.patch=[8,16,8]", "batch=2", "model.norm=group"),
    *("model.in_channels=1", "model.classes=3", *PLAIN),
)


def config(*overrides: str) -> Config:
    return compose.compose([*WORDS, *overrides])


def option(*overrides: str) -> Option:
    asked = config(*overrides)
    return Option((), "nothing", asked, asked.model)


def peak_of(*overrides: str) -> int:
    asked = config(*overrides)
    return predict(asked, asked.model)["peak_bytes"]


def refusal(*overrides: str) -> list[str]:
    """The lines of the error with which a run over its budget stops."""
    asked = config(*overrides)
    with pytest.raises(UserError) as caught:
        preflight(asked, asked.model)
    return str(caught.value).splitlines()


@pytest.fixture(scope="module")
def whole() -> int:
    """The peak of a step as asked; bytes."""
    return peak_of()


def test_a_budget_that_does_not_fit_names_what_would_and_a_run_of_it_does(whole: int) -> None:
    budget = f"budget={0.4 * whole / MIB:.3f}MiB"
    title, _, asked, *rows = refusal(budget)
    assert title.startswith(f"{budget}: the step does not fit") and asked.endswith("as asked")
    assert asked.split()[0] == mib(whole)
    peaks = [float(row.split()[0].lstrip("~").replace(",", "")) for row in (asked, *rows)]
    assert peaks[-1] <= min(peaks[:-1]) and max(peaks[1:]) < peaks[0]  # printed to .1 MiB
    assert rows[-1].endswith("  (fits)") and not any("(fits)" in row for row in rows[:-1])
    last = rows[-1].removesuffix("  (fits)")
    saves, words = last.split()[1], last.partition(":")[2].split()
    found = peak_of(budget, *words)
    assert found <= 0.4 * whole and (last.split()[0], saves) == (mib(found), mib(whole - found))


def test_a_budget_that_nothing_meets_is_answered_with_the_smallest_peak() -> None:
    *_, smallest, end = refusal("budget=0.001MiB")
    assert "the patch:" in smallest and "model.features=[4,8]" not in smallest
    assert end == f"none of these fits; the smallest peak is {smallest.split()[0]} MiB"


def test_fit_prints_a_command_that_fits(whole: int, capsys: pytest.CaptureFixture[str]) -> None:
    budget = f"budget={0.6 * whole / MIB:.3f}MiB"
    assert face("memory", "fit", *WORDS, budget) == 0
    said = capsys.readouterr().out
    assert "estimated" in said and "batch=1" not in said.splitlines()[-1], "Dice over the batch would be another loss"
    python, script, *words = shlex.split(said.splitlines()[-1].removeprefix("fits: "))
    assert (python, script) == ("python", "train.py")
    asked = compose.compose([*words, "dry_run=true"])
    assert preflight(asked, asked.model).memory["predicted"]["peak_bytes"] <= 0.6 * whole


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["budget=0.01MiB"], "budget=0.01MiB: nothing tried fits; the smallest peak is "),
        ([], "memory fit needs a budget"),
    ],
)
def test_fit_says_when_nothing_does(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert face("memory", "fit", *WORDS, *words) == 2
    assert f"error: {message}" in capsys.readouterr().err


def test_the_cheapest_that_fits_is_found() -> None:
    """Among all options that fit, the same result and the least recomputation."""
    asked = option("ckpt=3")
    found = search(asked)
    assert [row.cost() for row in found] == sorted(row.cost() for row in found)
    for row in found[:: len(found) // 3]:
        _, best = find_fit(asked, row.peak_bytes)
        assert best.peak_bytes <= row.peak_bytes and best.cost()[:2] <= row.cost()[:2]


@pytest.mark.parametrize("words", [["ckpt=3"], ["model.features=[16]", "slab=4"]], ids=" ".join)
def test_a_refusal_is_the_one_of_a_search_of_all_ways(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one level, a pass in slabs computes nothing twice."""
    asked = simulated(option(*words))
    budgets = [f"budget={share * asked.peak_bytes / MIB:.4f}MiB" for share in (0.001, 0.4, 0.6, 0.8)]
    found = [refusal(*words, budget) for budget in budgets]
    monkeypatch.setattr("unet3d.memory.budget.find_fit", lambda asked, limit, thorough: find_fit(asked, limit))
    assert [refusal(*words, budget) for budget in budgets] == found


def test_the_front_holds_what_nothing_cheaper_beats() -> None:
    bare = config()
    rows = [
        Option(("a",), "nothing", bare, bare.model, 100, 0.0),
        Option(("b",), "rounding", bare, bare.model, 60, 0.1),
        Option(("c", "d"), "nothing", bare, bare.model, 60, 0.1),
        Option(("c",), "nothing", bare, bare.model, 80, 0.2),
        Option(("e",), "statistics", bare, bare.model, 70, 0.1),
        Option(("f",), "statistics", bare, bare.model, 50, 0.3),
    ]
    assert [row.overrides for row in front(sorted(rows, key=Option.cost))] == [("a",), ("b",), ("e",), ("f",)]


def test_overrides_replace_those_of_the_same_option() -> None:
    words = ["model=unet", "batch=4", "amp=false", "data.patch=[8,8,8]", "ckpt=3", "budget=2 MiB"]
    added = ["amp=true", "batch=1", "accumulate=4", "ckpt=0"]
    assert replaced(words, added) == ("model=unet", "data.patch=[8,8,8]", "budget=2 MiB", *added)


@pytest.mark.parametrize(
    ("overrides", "changes"),
    [
        (["model.features=[16,32]", "model.widen=second"], ["nothing", "the patch"]),  # 8 groups, 4 channels
        (["model.features=[16,16]", "model.decoder=[1]", "model.norm=none"], ["nothing", "the network", "the patch"]),
        (["model.kernels=auto"], ["nothing"]),  # another patch would be another network
    ],
)
def test_smaller_networks_and_patches_stop_where_there_is_none(overrides: list[str], changes: list[str]) -> None:
    asked = option("data.patch=[8,16,8]", *overrides)
    model = replace(asked.model, kernels=3)
    found = list(smaller([asked._replace(model=model)]))
    assert [row.changes for row in found] == changes
    assert all(later.peak_bytes < earlier.peak_bytes for earlier, later in pairwise(found))
    assert predict(found[-1].config, found[-1].model)["peak_bytes"] == found[-1].peak_bytes


@pytest.mark.parametrize("lever", ["lean=true", "slab=auto"])
@pytest.mark.parametrize("words", [["optim=sgd"], ["amp=true", "accumulate=2"]], ids=" ".join)
def test_the_peak_of_slabs_is_estimated_from_one_micro_batch(lever: str, words: list[str]) -> None:
    """Too high by the gradients at most, and its price is exact."""
    asked = option(lever, "data.patch=[24,16,16]", *words)
    (peak, price), (truth, again) = (way(asked.config, asked.model) for way in (estimated_in_slabs, in_slabs))
    gradients = 4 * sum(p.numel() for p in build.model(asked.model, 0).parameters())
    assert truth <= peak <= truth + gradients
    assert price == pytest.approx(again) and again >= 0


def test_slabs_cost_convolutions_and_lean_none() -> None:
    prices = [simulated(option(lever, "data.patch=[40,24,24]")) for lever in ("lean=true", "slab=auto")]
    assert prices[0].recompute_fraction < 0.03 < prices[1].recompute_fraction < 0.5
    assert prices[1].peak_bytes < prices[0].peak_bytes < peak_of("data.patch=[40,24,24]")


@pytest.mark.parametrize(
    ("words", "used"),
    [
        (["slab=auto", "amp=true"], {"amp=true": ["slab=auto"], "slab=auto": ["amp=true"]}),
        (["lean=true", "accumulate=2"], {"accumulate=2": ["lean=true", "batch=4"], "lean=true": ["accumulate=2"]}),
        (["ckpt=2"], {"ckpt=2": []}),
        ([], {}),
    ],
)
def test_what_each_way_to_save_memory_takes_away(words: list[str], used: dict[str, list[str]]) -> None:
    asked = config(*words)
    found = preflight(asked, asked.model).memory["without"]
    assert found == {word: peak_of(*others) for word, others in used.items()}


def test_further_ways_are_simulated_one_by_one() -> None:
    found = levers(option("amp=true"))
    assert [row.overrides for row in found] == [("ckpt=2",), ("lean=true",), ("slab=auto",)]
    assert [row.peak_bytes for row in found] == [peak_of("amp=true", *row.overrides) for row in found]
    assert [row.overrides for row in levers(option("slab=auto"))] == [("amp=true",)]


@pytest.mark.parametrize("norm", ["instance", "group"])
def test_what_saves_nothing_is_not_suggested(norm: str) -> None:
    """Mixed precision makes group norm need more on CUDA."""
    asked = option("device=cuda", f"model.norm={norm}", "model.features=[8,8]", "data.patch=[16,16,16]", "batch=1")
    found = [row for row in search(asked) if not (row.config.lean or row.config.slab)]  # they save by themselves
    assert any("amp=true" in row.overrides for row in front(found)) == (norm == "instance")


@pytest.mark.parametrize(
    ("overrides", "word"),
    [
        (["model.activation=swish"], "model.activation=swish_lean"),
        (["model.norm=instance", "model.inplace=true"], "model.inplace=false"),
        (["model.activation=leaky_relu"], "model.inplace=true"),
    ],
)
def test_a_lean_operation_keeps_less(overrides: list[str], word: str) -> None:
    asked = config(*overrides)
    ((found, lean),) = lean_operation(asked.model)
    assert found == word and not lean_operation(lean)
    assert profile_stages(asked, lean).peak < profile_stages(asked, asked.model).peak
    assert any(word in row.overrides for row in search(option(*overrides, "batch=1")))


@pytest.mark.parametrize(
    ("overrides", "sees"),
    [
        ([], True),  # Dice over the batch
        (["loss=dice", "loss.batch_dice=false"], False),
        (["loss=ce", "loss.batch_dice=false"], True),  # a mean over the labelled voxels of the batch
        (["loss=dice", "loss.batch_dice=false", "model.norm=batch"], True),
    ],
)
def test_what_sees_the_batch_is_another_step_in_parts(overrides: list[str], sees: bool) -> None:
    asked = option(*overrides)
    assert sees_the_batch(asked.config, asked.model) is sees
    assert sees_the_batch(asked.config, Model(features=[])), "a network of the user's own may"


def test_after_out_of_memory_what_needs_less_is_named_whatever_the_budget() -> None:
    """The budget was too high, or memory would not have run out. First what a resumed run may change."""
    asked = config("budget=8GiB")
    _, _, before, *lines = oom_suggestions(asked, asked.model)
    at = next(index for index, line in enumerate(lines) if line.startswith("in a new run, "))
    resumed, rows = lines[:at], lines[at + 1 :]
    assert before.split()[0] == mib(peak_of())
    for line in resumed:
        words = line.partition(":")[2].split()
        assert words[0] == "budget=null" and {*words[1:]} <= {"ckpt=auto", "lean=true", "slab=auto"}
        assert line.split()[0] == mib(peak_of(*words))
    assert resumed[-1].endswith(" budget=null slab=auto")
    peaks = [float(line.split()[0].lstrip("~").replace(",", "")) for line in (before, *resumed, *rows)]
    assert rows and peaks[: at + 1] == sorted(peaks[: at + 1], reverse=True) and max(peaks[at + 1 :]) <= peaks[at]
    assert all("budget=null" in row for row in rows)


def test_a_budget_that_was_too_high_is_the_first_thing_to_go() -> None:
    """For it, `ckpt=auto` may have kept all of a network."""
    words = ("ckpt=auto", "amp=true", "batch=1")
    asked = config(*words, "budget=8GiB")
    _, _, before, first, *_ = oom_suggestions(asked, asked.model)
    assert first.endswith("  budget=null")
    assert first.split()[0] == mib(peak_of(*words)) != before.split()[0]


def test_an_option_is_simulated_with_the_segments_that_a_run_chooses() -> None:
    asked = option("ckpt=2", "optim=adamw")
    found = simulated(asked)
    assert found.segments == 2 and found.recompute_fraction > 0
    assert found.peak_bytes == preflight(asked.config, asked.model).memory["predicted"]["peak_bytes"]

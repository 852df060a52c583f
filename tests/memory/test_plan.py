"""What fits a memory budget: the options, their cost, and that a run of them needs what was promised."""

import re
import shlex
from dataclasses import replace
from functools import cache
from itertools import islice, pairwise

import pytest
import torch
from guards import nothing, without
from promises import promise
from training import PLAIN, face

from unet3d import build
from unet3d.base import process, ranks
from unet3d.base.errors import UserError
from unet3d.base.types import MIB, mib
from unet3d.config import compose
from unet3d.config.schema import Config, Model
from unet3d.memory import remedies as search_of_ways
from unet3d.memory.meter import Peak
from unet3d.memory.prediction import MemoryEstimate, preflight
from unet3d.memory.remedies import (
    Candidate,
    cheaper_activation,
    depends_on_batch,
    find_fit,
    halves,
    oom_in_validation,
    oom_suggestions,
    pareto_front,
    replaced,
    single_techniques,
    ways,
)
from unet3d.memory.simulate import validation_peak
from unet3d.memory.technique import step_peak
from unet3d.recomputing.program import Technique

WORDS = (
    *("model=unet_tiny", "model.features=[8,16]", "data.patch=[4,16,16]", "batch=2", "model.norm=none"),
    *("model.in_channels=1", "model.classes=3", "dry_run=true", *PLAIN),
)
ONE_PATCH = ("batch=1", "data.patch=[8,16,16]")
ROW = re.compile(r" +(?P<peak>[\d,.]+) +(?P<saves>[\d,.]*) +(?P<again>-?\d+)%  .*")


def config(*overrides: str) -> Config:
    return compose.compose([*WORDS, *overrides])


def option(*overrides: str) -> Candidate:
    asked = config(*overrides)
    return Candidate(asked, asked.model)


@cache
def peak_of(*overrides: str) -> int:
    asked = config(*overrides)
    return step_peak(asked, asked.model).tensors


def refusal(*overrides: str) -> list[str]:
    """Return the lines of the error with which a run over its budget stops."""
    asked = config(*overrides)
    with pytest.raises(UserError) as caught:
        preflight(asked, asked.model)
    return str(caught.value).splitlines()


def peak_in(row: str) -> str:
    found = ROW.fullmatch(row)
    assert found, row
    return found["peak"]


def number(text: str) -> float:
    return float(text.replace(",", ""))


def words_in(row: str) -> list[str]:
    return [word for word in row.split() if "=" in word]


@pytest.fixture
def without_recompute(monkeypatch: pytest.MonkeyPatch) -> None:
    """Search without it: it takes most of the time."""
    monkeypatch.setattr(search_of_ways, "WITH_BUDGET", ())
    monkeypatch.setattr(search_of_ways, "PLANS", ())


@pytest.mark.slow
def test_a_budget_that_does_not_fit_names_what_would_and_a_run_of_it_does() -> None:
    whole = peak_of(*ONE_PATCH)
    budget = f"budget={0.4 * whole / MIB:.3f}MiB"
    title, _, asked, *rows = refusal(*ONE_PATCH, budget)
    assert budget in title
    assert peak_in(asked) == mib(whole) and not words_in(asked)
    peaks = [number(peak_in(row)) for row in (asked, *rows)]
    assert peaks[-1] <= min(peaks[:-1]) and max(peaks[1:]) < peaks[0]  # printed to .1 MiB
    assert all(words_in(row) for row in rows)
    ends_in_words = ["=" in row.split()[-1] for row in rows]
    assert ends_in_words == [True] * (len(rows) - 1) + [False], "what fits is marked"
    found = peak_of(*ONE_PATCH, budget, *words_in(rows[-1]))
    last = ROW.fullmatch(rows[-1])
    assert found <= 0.4 * whole
    assert last and (last["peak"], last["saves"]) == (mib(found), mib(whole - found))


@pytest.mark.slow
def test_a_budget_that_nothing_meets_is_answered_with_the_smallest_peak() -> None:
    *_, smallest, end = refusal(*ONE_PATCH, "budget=0.001MiB")
    assert "data.patch=" in smallest and "model.features=[4,8]" not in smallest
    assert "=" in smallest.split()[-1], "not marked as what fits"
    assert f"{peak_in(smallest)} MiB" in end


@pytest.mark.slow
def test_fit_prints_a_command_that_fits(without_recompute: None, capsys: pytest.CaptureFixture[str]) -> None:
    budget = f"budget={0.8 * peak_of() / MIB:.3f}MiB"
    assert face("memory", "fit", *WORDS, budget) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert "batch=1" not in last, "Dice over the batch would be another loss"
    words = shlex.split(last)
    program = shlex.split(process.training_command([]))
    assert words[1 : 1 + len(program)] == program
    asked = compose.compose(words[1 + len(program) :])
    assert preflight(asked, asked.model).memory["predicted"]["peak_bytes"] <= 0.8 * peak_of()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["budget=0.01MiB"], r"budget=0.01MiB\b.*\d MiB$"),
        ([], r"budget=8GiB$"),
    ],
)
def test_fit_says_when_nothing_does(
    words: list[str], said: str, without_recompute: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert face("memory", "fit", *WORDS, "model.features=[8]", "batch=1", *words) == 2
    assert re.search(said, capsys.readouterr().err.splitlines()[-1])


@pytest.mark.slow
def test_the_cheapest_that_fits_is_found(without_recompute: None) -> None:
    """Among all options that fit, the same result and the least recomputation."""
    asked = option("ckpt=3")
    every = sorted(ways(asked), key=Candidate.cost)
    for row in every[:: len(every) // 4]:
        _, best = find_fit(asked, row.step.tensors)
        assert best.step.tensors <= row.step.tensors
        assert best.cost()[:2] == min(other.cost()[:2] for other in every if other.step.limited <= row.step.limited)


@pytest.mark.slow
def test_a_network_that_needs_less_than_known_ones_is_not_made_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, share in [*search_of_ways.SHARES.items()]:
        monkeypatch.setitem(search_of_ways.SHARES, name, 8 * share)
    asked = option("ckpt=0")
    tiles = replace(asked, config=replace(asked.config, recompute="tiles"))
    _, best = find_fit(asked, tiles.step.tensors)
    assert best.step.tensors <= tiles.step.tensors
    assert best.model == asked.model and best.config.data == asked.config.data


def test_the_front_holds_what_nothing_cheaper_beats() -> None:
    known = {
        ("a",): ("nothing", 100, 0.0),
        ("b",): ("rounding", 60, 0.1),
        ("c", "d"): ("nothing", 60, 0.1),
        ("c",): ("nothing", 80, 0.2),
        ("e",): ("statistics", 70, 0.1),
        ("f",): ("statistics", 50, 0.3),
    }
    rows = []
    for words, (changes, peak, repeated) in known.items():
        rows.append(Candidate(config(), config().model, words, changes))
        vars(rows[-1]).update(step=Peak(peak), technique=Technique(forward_recompute_fraction=repeated))
    assert [row.overrides for row in pareto_front(rows)] == [("a",), ("b",), ("e",), ("f",)]


def test_overrides_replace_those_of_the_same_option() -> None:
    words = ["model=unet", "batch=4", "amp=false", "data.patch=[8,8,8]", "ckpt=3", "budget=2 MiB"]
    added = ["amp=true", "batch=1", "accumulate=4", "ckpt=0"]
    assert replaced(words, added) == ("model=unet", "data.patch=[8,8,8]", "budget=2 MiB", *added)


@pytest.mark.parametrize(
    ("overrides", "changed"),
    [
        (
            ["model.features=[16,32]", "model.widen=second", "model.norm=group"],
            [[], ["data.patch"]],
        ),  # 8 groups, 4 channels
        (
            ["model.features=[16,16]", "model.decoder=[1]"],
            [[], ["model.features", "model.decoder"], ["model.features", "model.decoder", "data.patch"]],
        ),
        (["model.kernels=auto"], [[]]),  # another patch would be another network
    ],
)
def test_smaller_networks_and_patches_stop_where_there_is_none(overrides: list[str], changed: list[list[str]]) -> None:
    asked = option("data.patch=[8,16,8]", *overrides)
    model = replace(asked.model, kernels=3)
    first = replace(asked, model=model)
    found = [first, *halves(first)]
    assert [[word.partition("=")[0] for word in row.overrides] for row in found] == changed
    assert all(later.step.tensors < earlier.step.tensors for earlier, later in pairwise(found))


@pytest.mark.slow
def test_tiles_cost_convolutions_and_lean_few() -> None:
    large = ("batch=1", "data.patch=[4,24,40]")
    prices = [option(lever, *large) for lever in ("recompute=lean", "recompute=tiles")]
    assert prices[0].repeated < 0.05 < prices[1].repeated < 0.5
    assert prices[1].step.tensors < prices[0].step.tensors < peak_of(*large)


@pytest.mark.parametrize(
    ("words", "used"),
    [
        (["recompute=tiles", "amp=true"], {"amp=true": ["recompute=tiles"], "recompute=tiles": ["amp=true"]}),
        (
            ["recompute=lean", "accumulate=2"],
            {"accumulate=2": ["recompute=lean", "batch=4"], "recompute=lean": ["accumulate=2"]},
        ),
        (["ckpt=2"], {"ckpt=2": []}),
        ([], {}),
    ],
    ids=" ".join,
)
def test_what_each_way_to_save_memory_takes_away(words: list[str], used: dict[str, list[str]]) -> None:
    asked = config(*words)
    assert MemoryEstimate(asked, asked.model).without() == {word: peak_of(*others) for word, others in used.items()}


@pytest.mark.slow
def test_further_ways_are_simulated_one_by_one() -> None:
    found = single_techniques(option())
    ways = [("amp=true",), ("ckpt=2",), ("recompute=lean",), ("recompute=tiles",)]
    assert [row.overrides for row in found] == ways
    assert [row.step.tensors for row in found] == [peak_of(*row.overrides) for row in found]
    assert [row.overrides for row in single_techniques(option("amp=true", "recompute=tiles"))] == []
    assert [row.overrides for row in single_techniques(option("ckpt=2"))] == [("amp=true",)]


@pytest.mark.parametrize("norm", ["instance", "group"])
def test_what_saves_nothing_is_not_suggested(norm: str, without_recompute: None) -> None:
    """Mixed precision makes group norm need more on CUDA. Recompute saves by itself."""
    asked = option("device=cuda", f"model.norm={norm}", "model.features=[8,8]", "data.patch=[16,16,16]", "batch=1")
    rows = [row for row in ways(asked) if not row.config.ckpt]
    assert any("amp=true" in row.overrides for row in pareto_front(rows)) == (norm == "instance")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "word"),
    [
        (["model.activation=swish"], "model.activation=swish_lean"),
        (["model.norm=instance", "model.inplace=true"], "model.inplace=false"),
        (["model.activation=leaky_relu"], "model.inplace=true"),
    ],
)
def test_a_lean_operation_keeps_less(overrides: list[str], word: str, without_recompute: None) -> None:
    asked = config(*overrides)
    ((found, lean),) = cheaper_activation(asked.model)
    assert found == word and not cheaper_activation(lean)
    assert step_peak(asked, lean).tensors < step_peak(asked, asked.model).tensors
    assert any(word in row.overrides for row in ways(option(*overrides, "batch=1")))


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
    assert depends_on_batch(asked.config, asked.model) is sees
    assert depends_on_batch(asked.config, Model(features=[])), "a network of the user's own may"


@pytest.mark.slow
def test_after_out_of_memory_what_needs_less_is_named_whatever_the_budget() -> None:
    """The budget was too high, or memory would not have run out. First what a resumed run may change."""
    asked = config("batch=1", "budget=8GiB")
    _, _, before, *lines = oom_suggestions(asked, asked.model, seconds=1e6)
    (at,) = (index for index, line in enumerate(lines) if not ROW.fullmatch(line))  # the heading of a new run's
    resumed, rows = lines[:at], lines[at + 1 :]
    assert peak_in(before) == mib(peak_of("batch=1"))
    for line in resumed:
        words = words_in(line)
        assert words[0] == "budget=null" and {*words[1:]} <= {
            "ckpt=2",
            "ckpt=3",
            "ckpt=4",
            "recompute=lean",
            "recompute=tiles",
        }
        assert peak_in(line) == mib(peak_of("batch=1", *words[1:]))
    assert re.search(r" budget=null recompute=(lean|tiles)$", resumed[-1])
    peaks = [number(peak_in(line)) for line in (before, *resumed, *rows)]
    assert rows and peaks[: at + 1] == sorted(peaks[: at + 1], reverse=True) and max(peaks[at + 1 :]) <= peaks[at]
    assert all("budget=null" in row for row in rows)


def test_a_search_after_out_of_memory_that_takes_long_ends_with_what_it_has() -> None:
    asked = config("batch=1")
    _, _, before, *lines = oom_suggestions(asked, asked.model, seconds=0)
    assert peak_in(before) == mib(peak_of("batch=1"))
    assert not any(ROW.fullmatch(line) for line in lines)
    assert "memory fit" in lines[-1]


def test_on_cuda_a_budget_is_of_what_the_allocator_reserves(without_recompute: None) -> None:
    """A small network's tensors lie in a segment of 2 MiB for each of the allocator's pools."""
    words = ("device=cuda", *ONE_PATCH)
    asked = option(*words)
    assert asked.step.tensors < 2 * MIB <= asked.step.reserved
    title, *_, end = refusal(*words, f"budget={asked.step.reserved / MIB - 1}MiB")
    assert "budget=" in title and mib(asked.step.reserved) in end
    fits = config(*words, f"budget={asked.step.reserved / MIB}MiB")
    assert preflight(fits, fits.model).memory["predicted"]["reserved_bytes"] == asked.step.reserved


@promise(
    "Training",
    "a GPU has less memory free than a step would reserve, or a validation hold",
    "exit 2 before the run, with what would fit",
)
@without("unet3d.memory.prediction.refuse_over_card", nothing)
def test_a_step_that_a_gpu_has_no_room_for_is_refused_with_what_fits(
    gpu: list[int], capsys: pytest.CaptureFixture
) -> None:
    words = ("device=cuda", "dry_run=false", "model.features=[16,32]", "data.patch=[16,32,32]")
    asked = option(*words)
    gpu[:] = [asked.step.reserved - 1, 2 * asked.step.reserved]
    title, *rows = refusal(*words)
    assert mib(asked.step.reserved) in title and mib(2 * asked.step.reserved) in title
    assert words_in(rows[-1]) and "reserves" in rows[-1]
    changed = option(*words, *words_in(rows[-1]))
    assert changed.step.reserved < asked.step.reserved
    gpu[0] = asked.step.reserved
    capsys.readouterr()
    preflight(asked.config, asked.model)
    assert not capsys.readouterr().err


def test_a_validation_that_a_gpu_has_no_room_for_is_refused_with_fewer_windows(
    gpu: list[int], capsys: pytest.CaptureFixture
) -> None:
    words = ("device=cuda", "dry_run=false", "model.features=[4,8]", "data.patch=[8,8,8]", "batch=1")
    many = config(*words, "inference.batch=100")
    needed = validation_peak(many, many.model, 0)
    gpu[:] = [needed - 1, 2 * needed]
    (line,) = refusal(*words, "inference.batch=100")
    assert "inference.batch=1," in line and "100 windows" in line and "data.patch" in line
    one = config(*words)
    preflight(one, one.model)
    assert "windows" not in capsys.readouterr().out
    gpu[0] = 2 * needed
    preflight(many, many.model)
    shown = capsys.readouterr().out
    assert "100 windows at once" in shown and "only where they fit" in shown


def test_auto_sees_one_window_at_a_time_where_a_gpu_has_no_room_for_more(
    gpu: list[int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Networks whose validation of a micro-batch needs more than a step are large: their bytes are made up."""
    words = ("device=cuda", "dry_run=false", "model.features=[4,8]", "data.patch=[8,8,8]", "batch=2")
    asked = config(*words)
    gpu[:] = [2**30, 2**30]
    needed = {1: 2**29, 2: 2**31}
    monkeypatch.setattr(
        "unet3d.memory.prediction.validation_peak",
        lambda config, *_: needed[2 if config.inference.batch == "auto" else config.inference.batch],
    )
    preflight(asked, asked.model)
    assert mib(2**29) in capsys.readouterr().out
    (line,) = refusal(*words, "inference.batch=2")
    assert "inference.batch=1," in line


def test_fewer_windows_are_a_remedy_for_a_validation_of_several() -> None:
    said = {windows: " ".join(oom_in_validation(config("device=cuda"), 2, windows)) for windows in (1, 5)}
    assert "inference.batch=1" in said[5] and "5 at once" in said[5]
    assert "inference.batch" not in said[1]


@promise("Ranks", "more ranks than GPUs", "one line, before the run")
def test_more_ranks_than_gpus_are_one_line(gpu: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "LOCAL_SIZE", 2)
    with pytest.raises(UserError, match=r"^2 ranks, 1 GPU\b.*--nproc-per-node 1\b"):
        build.device(config("device=cuda"))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A GPU as torch would name it; the list holds the free bytes of its memory, and all."""
    memory = [2**40, 2**40]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: tuple(memory))
    return memory


def test_a_budget_that_was_too_high_is_the_first_thing_to_go(without_recompute: None) -> None:
    """For it, `recompute=auto` may have kept all of a network."""
    words = ("amp=true", "batch=1", "data.patch=[4,32,32]")
    asked = config(*words, "recompute=auto", "budget=8GiB")
    _, _, before, first = islice(oom_suggestions(asked, asked.model), 4)
    assert words_in(first) == ["budget=null", "recompute=tiles"]
    assert peak_in(first) == mib(peak_of(*words, "recompute=tiles")) != peak_in(before)


def test_an_option_is_simulated_with_the_segments_that_a_run_chooses() -> None:
    asked = option("ckpt=2", "optim=adamw")
    assert len(asked.technique.segment_starts) == 2 and asked.repeated > 0
    memory = preflight(asked.config, asked.model).memory
    assert memory["predicted"]["peak_bytes"] == asked.step.tensors
    assert memory["without"] == {"ckpt=2": peak_of("optim=adamw")}

"""What needs less memory: for a budget, for a GPU's free memory, after out of memory; a run of it needs that much."""

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import islice, pairwise

import pytest
import torch
from guards import nothing, without
from promises import promise
from training import PLAIN

from unet3d import build
from unet3d.base import ranks
from unet3d.base.errors import UserError
from unet3d.base.types import MIB, mib
from unet3d.config import compose
from unet3d.config.schema import Model
from unet3d.memory import remedies
from unet3d.memory.meter import Peak
from unet3d.memory.prediction import MemoryEstimate, preflight
from unet3d.memory.remedies import Candidate, find_fit, oom_suggestions
from unet3d.memory.simulate import validation_peak
from unet3d.memory.technique import step_peak
from unet3d.recomputing.program import Technique

WORDS = (
    *("model=unet_tiny", "model.features=[8,16]", "data.patch=[4,16,16]", "batch=2", "model.norm=none"),
    *("model.in_channels=1", "model.classes=3", "dry_run=true", *PLAIN),
)
ONE_PATCH = ("batch=1", "data.patch=[8,16,16]")
WITHOUT_RECOMPUTE = "channels_last=true"  # it takes most of the time of a search
ROW = re.compile(r" +(?P<peak>[\d,.]+) +(?P<saves>[\d,.]*) +(?P<again>-?\d+)%  .*")


def option(*overrides: str) -> Candidate:
    asked = compose.compose([*WORDS, *overrides])
    return Candidate(asked, asked.model)


@cache
def peak_of(*overrides: str) -> int:
    return option(*overrides).step.tensors


def run(*overrides: str) -> dict:
    """Return what memory.json has of a run before its first step."""
    asked = option(*overrides)
    return preflight(asked.config, asked.model).memory


def refusal(*overrides: str) -> list[str]:
    """Return the lines of the error with which a run stops."""
    with pytest.raises(UserError) as caught:
        run(*overrides)
    return str(caught.value).splitlines()


def peak_in(row: str) -> str:
    found = ROW.fullmatch(row)
    assert found, row
    return found["peak"]


def peaks_in(rows: Sequence[str]) -> list[float]:
    return [float(peak_in(row).replace(",", "")) for row in rows]


def words_in(row: str) -> list[str]:
    return [word for word in row.split() if "=" in word]


@pytest.mark.slow
def test_a_budget_that_does_not_fit_names_what_would_and_a_run_of_it_does() -> None:
    whole = peak_of(*ONE_PATCH)
    budget = f"budget={0.4 * whole / MIB:.3f}MiB"
    title, _, asked, *rows = refusal(*ONE_PATCH, budget)
    assert budget in title
    assert peak_in(asked) == mib(whole) and not words_in(asked)
    peaks = peaks_in([asked, *rows])
    assert peaks[-1] <= min(peaks[:-1]) and max(peaks[1:]) < peaks[0]  # printed to .1 MiB
    assert ["=" in row.split()[-1] for row in rows] == [True] * (len(rows) - 1) + [False], "what fits is marked"
    found = peak_of(*ONE_PATCH, budget, *words_in(rows[-1]))
    last = ROW.fullmatch(rows[-1])
    assert found <= 0.4 * whole
    assert last and (last["peak"], last["saves"]) == (mib(found), mib(whole - found))


@pytest.mark.slow
def test_a_budget_that_nothing_meets_is_answered_with_the_smallest_peak() -> None:
    *_, smallest, end = refusal(*ONE_PATCH, WITHOUT_RECOMPUTE, "budget=0.001MiB")
    assert "data.patch=" in smallest and "model.features=[4,8]" not in smallest
    assert "=" in smallest.split()[-1], "not marked as what fits"
    assert f"{peak_in(smallest)} MiB" in end


def test_a_budget_that_the_step_just_meets_changes_nothing() -> None:
    assert run(f"budget={peak_of() / MIB}MiB")["predicted"]["peak_bytes"] == peak_of()


@pytest.mark.slow
def test_the_cheapest_that_fits_is_found() -> None:
    """Among all options that fit, the same result and the least recomputation."""
    asked = option("ckpt=3", WITHOUT_RECOMPUTE)
    every = sorted(remedies.ways(asked), key=Candidate.cost)
    for row in every[:: len(every) // 4]:
        _, best = find_fit(asked, row.step.tensors)
        assert best.step.tensors <= row.step.tensors
        assert best.cost()[:2] == min(other.cost()[:2] for other in every if other.step.limited <= row.step.limited)


@pytest.mark.slow
def test_a_network_that_needs_less_than_known_ones_is_not_made_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, share in [*remedies.SHARES.items()]:
        monkeypatch.setitem(remedies.SHARES, name, 8 * share)
    asked = option()
    tiles = option("recompute=tiles")
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
        rows.append(replace(option(), overrides=words, changes=changes))
        vars(rows[-1]).update(step=Peak(peak), technique=Technique(forward_recompute_fraction=repeated))
    assert [row.overrides for row in remedies.pareto_front(rows)] == [("a",), ("b",), ("e",), ("f",)]


def test_overrides_replace_those_of_the_same_option() -> None:
    words = ["model=unet", "batch=4", "data.patch=[8,8,8]", "budget=2 MiB"]
    assert remedies.replaced(words, ["batch=1"]) == ("model=unet", "data.patch=[8,8,8]", "budget=2 MiB", "batch=1")


@pytest.mark.parametrize(
    ("overrides", "changed"),
    [
        (
            ["model.features=[16,32]", "model.widen=second", "model.norm=group"],
            ["", "data.patch"],
        ),  # 8 groups, 4 channels
        (
            ["model.features=[16,16]", "model.decoder=[1]"],
            ["", "model.features model.decoder", "model.features model.decoder data.patch"],
        ),
        (["model.kernels=auto"], [""]),  # another patch would be another network
    ],
)
def test_smaller_networks_and_patches_stop_where_there_is_none(overrides: list[str], changed: list[str]) -> None:
    asked = option("data.patch=[8,16,8]", *overrides)
    first = replace(asked, model=replace(asked.model, kernels=3))
    found = [first, *remedies.halves(first)]
    assert [" ".join(word.partition("=")[0] for word in row.overrides) for row in found] == changed
    assert all(later.step.tensors < earlier.step.tensors for earlier, later in pairwise(found))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "used"),
    [
        (["recompute=tiles", "amp=true"], {"amp=true": ["recompute=tiles"], "recompute=tiles": ["amp=true"]}),
        (["ckpt=2", "accumulate=2"], {"accumulate=2": ["ckpt=2", "batch=4"], "ckpt=2": ["accumulate=2"]}),
    ],
    ids=" ".join,
)
def test_what_each_way_to_save_memory_takes_away(words: list[str], used: dict[str, list[str]]) -> None:
    asked = option(*words)
    found = MemoryEstimate(asked.config, asked.model).without()
    assert found == {word: peak_of(*others) for word, others in used.items()}


@pytest.mark.slow
def test_further_ways_are_those_that_a_step_does_not_use() -> None:
    found = remedies.single_techniques(option())
    ways = [("amp=true",), ("ckpt=2",), ("recompute=lean",), ("recompute=tiles",)]
    assert [row.overrides for row in found] == ways
    assert [row.step.tensors for row in found] == [peak_of(*words) for words in ways]
    assert not remedies.single_techniques(option("amp=true", "recompute=tiles"))
    assert [row.overrides for row in remedies.single_techniques(option("ckpt=2"))] == [("amp=true",)]


@pytest.mark.parametrize(
    ("overrides", "word"),
    [
        (["model.activation=swish"], "model.activation=swish_lean"),
        (["model.norm=instance", "model.inplace=true"], "model.inplace=false"),
        (["model.activation=leaky_relu"], "model.inplace=true"),
    ],
)
def test_a_lean_operation_keeps_less(overrides: list[str], word: str) -> None:
    asked = option(*overrides)
    ((found, lean),) = remedies.cheaper_activation(asked.model)
    assert found == word and not remedies.cheaper_activation(lean)
    assert step_peak(asked.config, lean).tensors < asked.step.tensors


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
    assert remedies.depends_on_batch(asked.config, asked.model) is sees
    assert remedies.depends_on_batch(asked.config, Model(features=[])), "a network of the user's own may"


@pytest.mark.slow
def test_after_out_of_memory_what_needs_less_is_named_whatever_the_budget() -> None:
    """The budget was too high, or memory would not have run out. First what a resumed run may change."""
    asked = option("batch=1", "budget=8GiB")
    _, _, before, *lines = oom_suggestions(asked.config, asked.model, seconds=1e6)
    (at,) = (index for index, line in enumerate(lines) if not ROW.fullmatch(line))  # the heading of a new run's
    resumed, rows = lines[:at], lines[at + 1 :]
    assert peak_in(before) == mib(peak_of("batch=1"))
    for line in resumed:
        first, *words = words_in(line)
        assert first == "budget=null" and {word.partition("=")[0] for word in words} <= {"ckpt", "recompute"}
        assert peak_in(line) == mib(peak_of("batch=1", *words))
    assert re.search(r" budget=null recompute=(lean|tiles)$", resumed[-1])
    peaks = peaks_in([before, *resumed])
    assert peaks == sorted(peaks, reverse=True)
    assert rows and max(peaks_in(rows)) <= peaks[-1]
    assert all("budget=null" in row for row in rows)


def test_a_search_after_out_of_memory_that_takes_long_ends_with_what_it_has() -> None:
    asked = option("batch=1")
    _, _, before, *lines = oom_suggestions(asked.config, asked.model, seconds=0)
    assert peak_in(before) == mib(peak_of("batch=1"))
    assert not any(ROW.fullmatch(line) for line in lines)
    assert "memory fit" in lines[-1]


@pytest.mark.slow
def test_a_budget_that_was_too_high_is_the_first_thing_to_go() -> None:
    """For it, `recompute=auto` may have kept all of a network."""
    words = ("amp=true", "batch=1", "data.patch=[4,32,32]")
    asked = option(*words, "recompute=auto", "budget=8GiB")
    _, _, before, first = islice(oom_suggestions(asked.config, asked.model), 4)
    assert words_in(first) == ["budget=null", "recompute=tiles"]
    assert peak_in(first) == mib(peak_of(*words, "recompute=tiles")) != peak_in(before)


def test_fewer_windows_are_a_remedy_for_a_validation_of_several() -> None:
    config = option("device=cuda").config
    one, five = (" ".join(remedies.oom_in_validation(config, 2, windows)) for windows in (1, 5))
    assert "inference.batch=1" in five and "5 at once" in five
    assert "inference.batch" not in one


@pytest.mark.slow
def test_on_cuda_a_budget_is_of_what_the_allocator_reserves() -> None:
    """A small network's tensors lie in a segment of 2 MiB for each of the allocator's pools."""
    words = ("device=cuda", *ONE_PATCH, WITHOUT_RECOMPUTE)
    step = option(*words).step
    assert step.tensors < 2 * MIB <= step.reserved
    title, *_, end = refusal(*words, f"budget={step.reserved / MIB - 1}MiB")
    assert "budget=" in title and mib(step.reserved) in end
    assert run(*words, f"budget={step.reserved / MIB}MiB")["predicted"]["reserved_bytes"] == step.reserved


def test_a_step_that_the_machine_cannot_hold_is_said_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = []
    for size in (2**40, 2**17):
        monkeypatch.setattr("unet3d.memory.prediction.host_bytes", lambda size=size: size)
        run()
        said.append(capsys.readouterr().out.splitlines())
    plenty, little = said
    (lacks,) = (line for line in little if line not in plenty)
    assert "0.1 MiB" in lacks


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A GPU as torch would name it; the list holds the free bytes of its memory, and all."""
    memory = [2**40, 2**40]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: tuple(memory))
    return memory


ON_GPU = ("device=cuda", "dry_run=false")


@promise(
    "Training",
    "a GPU has less memory free than a step would reserve, or a validation hold",
    "exit 2 before the run, with what would fit",
)
@without("unet3d.memory.prediction.refuse_over_card", nothing)
def test_a_step_that_a_gpu_has_no_room_for_is_refused_with_what_fits(
    gpu: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    words = (*ON_GPU, "model.features=[16,32]", "data.patch=[16,32,32]")
    reserved = option(*words).step.reserved
    gpu[:] = [reserved - 1, 2 * reserved]
    title, *rows = refusal(*words)
    assert mib(reserved) in title and mib(2 * reserved) in title
    assert words_in(rows[-1]) and "reserves" in rows[-1]
    assert option(*words, *words_in(rows[-1])).step.reserved < reserved
    gpu[0] = reserved
    capsys.readouterr()
    run(*words)
    assert not capsys.readouterr().err


SMALL = (*ON_GPU, "model.features=[4,8]", "data.patch=[8,8,8]")


@promise("Training", "a GPU has less memory free ...")
def test_a_validation_that_a_gpu_has_no_room_for_is_refused_with_fewer_windows(
    gpu: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    words = (*SMALL, "batch=1", "inference.batch=100")
    many = option(*words)
    needed = validation_peak(many.config, many.model, 0)
    gpu[:] = [needed - 1, 2 * needed]
    (line,) = refusal(*words)
    assert "inference.batch=1," in line and "100 windows" in line and "data.patch" in line
    run(*SMALL, "batch=1")
    assert "windows" not in capsys.readouterr().out
    gpu[0] = 2 * needed
    run(*words)
    shown = capsys.readouterr().out
    assert "100 windows at once" in shown and "only where they fit" in shown


def test_auto_sees_one_window_at_a_time_where_a_gpu_has_no_room_for_more(
    gpu: list[int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Networks whose validation of a micro-batch needs more than a step are large: their bytes are made up."""
    gpu[:] = [2**30, 2**30]
    needed = {1: 2**29, 2: 2**31, "auto": 2**31}
    monkeypatch.setattr("unet3d.memory.prediction.validation_peak", lambda config, *_: needed[config.inference.batch])
    run(*SMALL)
    assert mib(2**29) in capsys.readouterr().out
    (line,) = refusal(*SMALL, "inference.batch=2")
    assert "inference.batch=1," in line


@promise("Ranks", "more ranks than GPUs", "one line, before the run")
def test_more_ranks_than_gpus_are_one_line(gpu: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "LOCAL_SIZE", 2)
    with pytest.raises(UserError, match=r"^2 ranks, 1 GPU\b.*--nproc-per-node 1\b"):
        build.device(option("device=cuda").config)

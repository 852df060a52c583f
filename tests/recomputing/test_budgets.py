"""The front of schedules, and what a budget chooses of it."""

import copy
import itertools
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from equality import drawn_table
from promises import promise
from soundness import is_sound
from torch import Tensor, nn

from unet3d.base.errors import UserError
from unet3d.recomputing import search
from unet3d.recomputing.compiler import NOTHING, Compiler, Instruction, Sizes, Stage, indices_of, mask_of
from unet3d.recomputing.module import Recomputed, recompute, schedules_of
from unet3d.recomputing.prepare import prepare
from unet3d.recomputing.program import Program, by_plan, leanest, least_memory, smallest
from unet3d.recomputing.scratch import plain_bytes
from unet3d.recomputing.search import Schedule, StageCache, compile_schedule

MIB = 2**20


def network() -> nn.Module:
    torch.manual_seed(0)
    widths = [1, 8, 16, 32, 16, 8]
    blocks: list[nn.Module] = []
    for channels, width in itertools.pairwise(widths):
        blocks += [nn.Conv3d(channels, width, 3, padding=1), nn.InstanceNorm3d(width, affine=True), nn.LeakyReLU()]
    return nn.Sequential(*blocks, nn.Conv3d(8, 3, 1)).train()


IMAGE = torch.randn(1, 1, 48, 32, 32)


class Searched:
    """A network's schedules, and the sizes from which they were found; the search runs once for all tests."""

    def __init__(self) -> None:
        self.sizes: list[Sizes] = []
        front = search.front

        def noted(sizes: Sizes) -> Any:
            self.sizes.append(sizes)
            return front(sizes)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(search, "front", noted)
            self.prediction = prediction(Recomputed(network()))


def prediction(recomputed: Recomputed, image: Tensor = IMAGE) -> Program:
    return schedules_of(recomputed).program(image)


@pytest.fixture(scope="module")
def searched() -> Searched:
    return Searched()


def test_the_front_falls_in_bytes_as_it_rises_in_work(searched: Searched) -> None:
    schedules = searched.prediction.schedules
    assert len(schedules) > 3
    for before, after in itertools.pairwise(schedules):
        assert after.peak_bytes < before.peak_bytes
        assert after.work > before.work


def test_the_search_is_deterministic(searched: Searched) -> None:
    assert search.front(searched.sizes[0]) == list(searched.prediction.schedules)


def test_schedules_are_sound_and_measured_as_compiled(searched: Searched) -> None:
    sizes = searched.sizes[0]
    assert all(is_sound(sizes, schedule) for schedule in searched.prediction.schedules)
    for seed in range(50):
        table = drawn_table(sizes.count, seed)
        schedule = compile_schedule(sizes, table)
        assert is_sound(sizes, schedule)
        peak = StageCache(sizes).cost(table)
        assert (schedule.peak_bytes, schedule.work) == (peak.bytes, peak.work)


def compiled_alone(sizes: Sizes, table: list[int]) -> Iterator[Stage]:
    """Yield the stages of a pass, each compiled from all that there is before it."""
    state = NOTHING
    for index in range(sizes.count):
        stage = Compiler(sizes, state, table[-1]).made(index)
        yield stage
        state = stage.after
    stage = Compiler(sizes, state, table[-1]).turned()
    yield stage
    for index in reversed(range(sizes.count)):
        stage = Compiler(sizes, stage.after, table[index]).sent(index)
        yield stage


class Skips(nn.Module):
    """Three convolutions whose results are read again later."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv3d(1, 4, 3, padding=1)
        self.second = nn.Sequential(nn.Conv3d(4, 4, 3, padding=1), nn.InstanceNorm3d(4, affine=True), nn.ReLU())
        self.third = nn.Conv3d(8, 4, 3, padding=1)
        self.last = nn.Conv3d(4, 3, 1)

    def forward(self, image: Tensor) -> Tensor:
        x = self.first(image)
        y = self.second(torch.relu(x))
        z = self.third(torch.cat([x, y], dim=1))
        return self.last(torch.relu(z) + x)


def test_stages_that_passes_share_are_those_of_each_pass_alone() -> None:
    sizes = prepare(Skips().train(), torch.empty(1, 1, 16, 8, 8), None, on_cpu=True).sizes
    assert sizes is not None
    stages = StageCache(sizes)
    for seed in range(50):
        table = drawn_table(sizes.count, seed)
        instructions: list[Instruction] = []
        alive = 0
        most = 0
        maps: list[int] = []
        for stage in compiled_alone(sizes, table):
            instructions += stage.instructions
            if stage.most is not None and alive + stage.most > most:
                most = alive + stage.most
                maps = indices_of(stage.maps)
            alive += stage.growth
        peak = stages.cost(table)
        assert stages.schedule(table).instructions == tuple(instructions)
        assert (peak.bytes, indices_of(peak.maps)) == (most, maps)


def test_no_schedule_needs_more_than_that_in_which_all_stays(searched: Searched) -> None:
    sizes = searched.sizes[0]
    every_map = mask_of(range(sizes.count))
    all_stay = StageCache(sizes).cost([every_map] * (sizes.count + 1))
    assert all(schedule.peak_bytes <= all_stay.bytes for schedule in searched.prediction.schedules)
    assert all(schedule.work >= all_stay.work for schedule in searched.prediction.schedules)


@pytest.fixture
def known_front(searched: Searched, monkeypatch: pytest.MonkeyPatch) -> Program:
    """The front without a search."""
    monkeypatch.setattr(search, "front", lambda _: list(searched.prediction.schedules))
    return searched.prediction


def test_a_budget_is_kept_and_less_of_it_is_more_work(known_front: Program) -> None:
    fixed = known_front.fixed_bytes
    peaks = [fixed + schedule.peak_bytes for schedule in known_front.schedules]
    most, least = max(peaks), min(peaks)
    works = []
    for share in range(8):
        budget = most - (most - least) * share // 7
        chosen = prediction(Recomputed(network(), "auto", f"{(budget + 1) / MIB:.9f}MiB"))
        assert chosen.peak_bytes <= budget + 1
        works.append(chosen.schedule.work)
    assert works == sorted(works)
    assert works[0] < works[-1]


def test_what_is_held_counts(known_front: Program) -> None:
    held = prediction(Recomputed(network(), "tiles", held="2MiB"))
    assert held.peak_bytes == prediction(Recomputed(network(), "tiles")).peak_bytes + 2 * MIB


def test_plans_order(known_front: Program) -> None:
    lean = prediction(Recomputed(network(), "lean"))
    tiles = prediction(Recomputed(network(), "tiles"))
    assert tiles.peak_bytes < lean.peak_bytes
    assert tiles.schedule.work > lean.schedule.work
    assert lean.schedule.work < 1.2


def test_a_larger_image_needs_more(known_front: Program) -> None:
    small = prediction(Recomputed(network()))
    larger = prediction(Recomputed(network()), torch.randn(1, 1, 32, 32, 64))
    assert larger.fixed_bytes > small.fixed_bytes


def test_a_budget_that_is_too_small_says_what_would_do(known_front: Program) -> None:
    with pytest.raises(UserError, match="at least"):
        recompute(network(), IMAGE, "auto", "1MiB")


@pytest.mark.parametrize("options", [("auto",), ("lean", "3GiB"), ("smallest",)])
def test_plans_and_budgets_that_do_not_go_together(options: tuple[Any, ...]) -> None:
    with pytest.raises(UserError, match="plan="):
        Recomputed(network(), *options)


def test_the_line_says_peak_and_work(known_front: Program, capsys: pytest.CaptureFixture[str]) -> None:
    recompute(copy.deepcopy(network()), IMAGE, "tiles")
    line = capsys.readouterr().out
    least = known_front.fixed_bytes + smallest(known_front.schedules).peak_bytes
    plain = plain_bytes(network(), IMAGE, None, on_cpu=True)
    assert plain is not None
    assert f"recompute=tiles: {least / MIB:,.1f} MiB instead of {plain / MIB:,.1f} MiB (predicted) for " in line
    assert re.search(r" activations, \d+ % more forward work$", line.strip())


def test_what_is_held_is_in_both_sizes(known_front: Program, capsys: pytest.CaptureFixture[str]) -> None:
    for held in (0, 2 * MIB):
        recompute(network(), IMAGE, "lean", held=held)
    less, more = (
        [float(size) for size in re.findall(r"(\S+) MiB (?:instead|\(predicted)", line)]
        for line in capsys.readouterr().out.splitlines()
    )
    assert [round(size - 2, 1) for size in more] == less


class Outputs(nn.Module):
    """Four large outputs of one small map: autograd keeps no more than that, and all gradients arrive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv3d(1, 1, 3, padding=1)
        self.heads = nn.ModuleList(nn.Conv3d(1, 16, 3, padding=1) for _ in range(4))

    def forward(self, image: Tensor) -> list[Tensor]:
        x = torch.relu(self.first(image))
        return [head(x) for head in self.heads]


@promise(
    "What is seen, what is refused, what runs plain",
    "a network whose schedule would need no less than it does plain",
    "a line says so, and the network itself runs",
)
@pytest.mark.parametrize("options", [("lean",), ("tiles",), ("auto", "16MiB")])
def test_a_network_whose_schedules_save_nothing_runs_plain(
    options: tuple[Any, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    image = torch.randn(1, 1, 16, 16, 16)
    model = Outputs().train()
    recomputed = recompute(model, image, *options)
    line = capsys.readouterr().out.strip()
    assert re.search(r": would need \S+ MiB instead of \S+ MiB \(predicted\) .*, so the network runs plain$", line)
    assert {output.grad_fn.name() for output in recomputed(image)} == {"ConvolutionBackward0"}


def test_a_budget_that_only_the_plain_pass_keeps_is_kept() -> None:
    image = torch.randn(1, 1, 16, 16, 16)
    model = Outputs().train()
    program = prepare(model, image, None, on_cpu=True)
    program.plain_bytes = plain_bytes(model, image, None, on_cpu=True)
    assert program.plain_bytes is not None
    assert program.plain_bytes < program.by(least_memory(program.schedules)).peak_bytes
    assert not by_plan(program, "auto", program.plain_bytes).saves_memory
    with pytest.raises(UserError, match="at least"):
        by_plan(program, "auto", program.plain_bytes - 1)


def test_lean_takes_more_work_where_less_saves_nothing() -> None:
    first, *others, last = (Schedule((), peak, work) for peak, work in ((100, 1.0), (95, 1.1), (60, 1.25), (20, 1.9)))
    schedules = [first, *others, last]
    assert leanest(schedules) == first
    assert leanest(schedules, plain=101) == first
    assert leanest(schedules, plain=100) == others[1]
    assert leanest(schedules, plain=60) == first

"""The front of schedules, and what a budget chooses of it."""

import itertools
import math
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from equality import drawn_table
from promises import promise
from soundness import is_sound
from test_passing import Branches
from torch import Tensor, nn

from unet3d.base.errors import UserError
from unet3d.recomputing import search
from unet3d.recomputing.compiler import NOTHING, Compiler, Instruction, Sizes, Stage, indices_of, mask_of
from unet3d.recomputing.module import recompute
from unet3d.recomputing.prepare import prepare
from unet3d.recomputing.program import Program, by_plan, leanest, least_memory, smallest
from unet3d.recomputing.scratch import plain_bytes
from unet3d.recomputing.search import Schedule, StageCache

MIB = 2**20


def network() -> nn.Module:
    torch.manual_seed(0)
    widths = [1, 8, 16, 32, 16, 8]
    blocks: list[nn.Module] = []
    for channels, width in itertools.pairwise(widths):
        blocks += [nn.Conv3d(channels, width, 3, padding=1), nn.InstanceNorm3d(width, affine=True), nn.LeakyReLU()]
    return nn.Sequential(*blocks, nn.Conv3d(8, 3, 1)).train()


IMAGE = torch.randn(1, 1, 48, 32, 32)


@pytest.fixture(scope="module")
def searched() -> tuple[Sizes, Program]:
    """A network's sizes, and the program that was found; the search runs once for all tests."""
    program = prepare(network(), IMAGE, None, on_cpu=True)
    assert program.sizes is not None
    return program.sizes, program


@pytest.fixture
def known_front(searched: tuple[Sizes, Program], monkeypatch: pytest.MonkeyPatch) -> Program:
    """The front without a search."""
    _, program = searched
    schedules = list(program.schedules)
    monkeypatch.setattr(search, "front", lambda _: schedules)
    return program


def test_the_front_falls_in_bytes_as_it_rises_in_work(searched: tuple[Sizes, Program]) -> None:
    """No schedule needs more than that in which all stays; the search finds the same again."""
    sizes, program = searched
    every_map = mask_of(range(sizes.count))
    all_stay = StageCache(sizes).cost([every_map] * (sizes.count + 1))
    assert len(program.schedules) > 3
    assert all(is_sound(sizes, schedule) for schedule in program.schedules)
    for before, after in itertools.pairwise(program.schedules):
        assert after.peak_bytes < before.peak_bytes <= all_stay.bytes
        assert after.work > before.work >= all_stay.work
    assert search.front(sizes) == list(program.schedules)


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


def test_stages_that_passes_share_are_those_of_each_pass_alone() -> None:
    """And their bytes are those at which the schedule's instructions arrive."""
    sizes = prepare(Branches().train(), torch.empty(1, 1, 16, 8, 8), None, on_cpu=True).sizes
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
        schedule = stages.schedule(table)
        assert is_sound(sizes, schedule)
        assert (schedule.instructions, schedule.peak_bytes) == (tuple(instructions), most)
        assert schedule.work == peak.work
        assert (peak.bytes, indices_of(peak.maps)) == (most, maps)


def test_a_budget_is_kept_and_less_of_it_is_more_work(searched: tuple[Sizes, Program]) -> None:
    _, program = searched
    peaks = [program.by(schedule).peak_bytes for schedule in program.schedules]
    most, least = max(peaks), min(peaks)
    works = []
    for share in range(8):
        budget = most - (most - least) * share // 7
        chosen = by_plan(program, "auto", budget)
        assert chosen.peak_bytes <= budget
        works.append(chosen.schedule.work)
    assert works == sorted(works)
    assert works[0] < works[-1]
    with pytest.raises(UserError, match="at least"):
        by_plan(program, "auto", least - 1)


def test_plans_order(searched: tuple[Sizes, Program]) -> None:
    lean, tiles = (by_plan(searched[1], plan) for plan in ("lean", "tiles"))
    assert tiles.peak_bytes < lean.peak_bytes
    assert tiles.schedule.work > lean.schedule.work
    assert lean.schedule.work < 1.2


@pytest.mark.parametrize("held", [0, 2])
def test_the_line_says_peak_and_work(held: int, known_front: Program, capsys: pytest.CaptureFixture[str]) -> None:
    recompute(network(), IMAGE, "tiles", held=held * MIB)
    line = capsys.readouterr().out
    least = known_front.fixed_bytes + smallest(known_front.schedules).peak_bytes
    plain = plain_bytes(network(), IMAGE, None, on_cpu=True)
    assert plain is not None
    sizes = f"{least / MIB + held:,.1f} MiB instead of {plain / MIB + held:,.1f} MiB"
    assert f"recompute=tiles: {sizes} (predicted) for " in line
    assert re.search(r" \d+ % more forward work$", line.strip())


class Outputs(nn.Module):
    """Four large outputs of one small map: autograd keeps no more than that, and all gradients arrive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv3d(1, 1, 3, padding=1)
        self.heads = nn.ModuleList(nn.Conv3d(1, 16, 3, padding=1) for _ in range(4))

    def forward(self, image: Tensor) -> list[Tensor]:
        x = torch.relu(self.first(image))
        return [head(x) for head in self.heads]


SMALL = torch.randn(1, 1, 16, 16, 16)


@promise(
    "What is seen, what is refused, what runs plain",
    "a network whose schedule would need no less than it does plain",
    "a line says so, and the network itself runs",
)
@pytest.mark.parametrize("options", [("lean",), ("tiles",), ("auto", "16MiB")])
def test_a_network_whose_schedules_save_nothing_runs_plain(
    options: tuple[Any, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    recomputed = recompute(Outputs().train(), SMALL, *options)
    line = capsys.readouterr().out.strip()
    assert re.search(r": would need \S+ MiB instead of \S+ MiB \(predicted\) .*, so the network runs plain$", line)
    assert {output.grad_fn.name() for output in recomputed(SMALL)} == {"ConvolutionBackward0"}


def test_a_budget_that_only_the_plain_pass_keeps_is_kept() -> None:
    model = Outputs().train()
    program = prepare(model, SMALL, None, on_cpu=True)
    program.plain_bytes = plain_bytes(model, SMALL, None, on_cpu=True)
    assert program.plain_bytes is not None
    assert program.plain_bytes < program.by(least_memory(program.schedules)).peak_bytes
    assert not by_plan(program, "auto", program.plain_bytes).saves_memory
    with pytest.raises(UserError, match="at least"):
        by_plan(program, "auto", program.plain_bytes - 1)


def test_lean_takes_more_work_where_less_saves_nothing() -> None:
    schedules = [Schedule((), peak, work) for peak, work in ((100, 1.0), (95, 1.1), (60, 1.25), (20, 1.9))]
    for plain, place in ((math.inf, 0), (101, 0), (100, 2), (60, 0)):
        assert leanest(schedules, plain) is schedules[place]

"""How much is simulated for an answer, and the bar that shows how far it is."""

import copy
import io
import re
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console as Terminal
from training import PLAIN

from unet3d.base import progress
from unet3d.base.errors import UserError
from unet3d.base.types import Batch
from unet3d.cli import memory_of_config, memory_of_several
from unet3d.config import compose
from unet3d.config.schema import Config
from unet3d.memory import budget as search_of_ways
from unet3d.memory import simulate
from unet3d.memory.budget import Candidate, simulated
from unet3d.memory.out_of_memory import oom_suggestions
from unet3d.memory.preflight import preflight

WORDS = [
    *("model=unet_tiny", "model.features=[8]", "data.patch=[4,16,16]", "batch=2", "dry_run=true"),
    "model.norm=none",
    *("model.in_channels=1", "model.classes=3", *PLAIN),
]
COLOUR = re.compile(r"\x1b\[[\d;?]*[a-zA-Z]")
BAR = re.compile(r"(\S[^\r\n]*?) +━+ +0/\d+")  # what is counted, as a bar begins


def config(*overrides: str) -> Config:
    return compose.compose([*WORDS, *overrides])


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[int]]:
    """For each simulated network, policy and batch: the number of steps, each time that it is simulated.

    What other tests of this process simulated is simulated once more.
    """
    monkeypatch.setattr(simulate, "memo", {})
    found: dict[str, list[int]] = defaultdict(list)
    models, step = [], simulate.train_step

    def count(model: Any, loss: Any, optimizer: Any, scaler: Any, policy: Any, batches: Any, *rest: Any) -> Any:
        size = batches[0].label.shape if isinstance(batches[0], Batch) else None  # on its way to a GPU: read once
        times = found[repr((model.options, policy, len(batches), size))]
        if not models or models[-1] is not model:
            models.append(model)
            times.append(0)
        times[-1] += 1
        return step(model, loss, optimizer, scaler, policy, batches, *rest)

    monkeypatch.setattr(simulate, "train_step", count)
    return found


def refused(*overrides: str) -> None:
    asked = config(*overrides)
    with pytest.raises(UserError, match="budget="):
        preflight(asked, asked.model)


@pytest.mark.parametrize(("overrides", "most"), [([], 3), (["ckpt=2"], 5)])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_run_simulates_few_steps_before_its_first(
    steps: dict[str, list[int]], device: str, overrides: list[str], most: int
) -> None:
    asked = config(*overrides, f"device={device}")
    preflight(asked, asked.model)
    assert 2 <= sum(map(sum, steps.values())) <= most


@pytest.mark.slow
def test_a_budget_simulates_nothing_more_than_twice(steps: dict[str, list[int]]) -> None:
    refused("budget=0.02MiB")
    assert len(steps) > 5
    assert all(sorted(times) in ([1], [2], [1, 2], [2, 2]) for times in steps.values()), "[1]: to choose segments"
    assert sum(times == [2, 2] for times in steps.values()) <= 1, "the network as asked"


@pytest.mark.slow
def test_a_budget_tries_no_way_that_can_only_cost_more_than_one_that_fits(steps: dict[str, list[int]]) -> None:
    """Mixed precision fits: no batch in parts. `memory fit` shows the price of all."""
    refused("budget=0.2MiB")
    assert not any("Size([1," in way for way in steps)
    memory_of_several.print_fit([*WORDS, "budget=0.2MiB"])
    assert any("Size([1," in way for way in steps)


def test_an_option_is_simulated_once(steps: dict[str, list[int]]) -> None:
    asked = config("ckpt=auto", "optim.lr=0.007")
    found, before = simulated(Candidate((), "nothing", asked, asked.model)), copy.deepcopy(steps)
    assert simulated(Candidate((), "nothing", asked, asked.model)) == found and steps == before


@pytest.mark.slow
def test_fit_simulates_each_way_once(steps: dict[str, list[int]]) -> None:
    memory_of_several.print_fit([*WORDS, "optim.lr=0.003", "budget=0.2MiB"])
    assert steps and all(sorted(times) in ([1], [2], [1, 2]) for times in steps.values())


def test_the_memory_command_simulates_each_network_and_way_once(steps: dict[str, list[int]]) -> None:
    memory_of_config.print_explanation(WORDS, half=False, out=None)
    assert sorted(steps.values()) == [*[[2]] * 4, [3, 2]], "of half the width, three ways; for prices, what is asked"


def out_of_memory() -> None:
    list(oom_suggestions(config(), config().model))


def choose_segments() -> None:
    asked = config("ckpt=auto")
    preflight(asked, asked.model)


LONG: dict[str, tuple[Callable[[], object], int]] = {  # and how many bars, at least
    "memory": (lambda: memory_of_config.print_explanation([*WORDS, "seed=1"], half=False, out=None), 1),
    "peaks": (lambda: memory_of_several.print_peaks([[*WORDS, "batch=1"], [*WORDS, "batch=2"]], False, None), 1),
    "fit": (lambda: memory_of_several.print_fit([*WORDS, "budget=0.2MiB"]), 2),
    "segments": (choose_segments, 2),
    "out of memory": (out_of_memory, 1),
    "budget": (lambda: refused("budget=0.04MiB"), 2),
}


@pytest.mark.parametrize("name", LONG)
def test_what_may_last_shows_a_bar_and_prints_the_same(
    name: str, terminal: io.StringIO, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search_of_ways, "WITH_BUDGET", ())
    monkeypatch.setattr(search_of_ways, "PLANS", ())  # which take most of the time
    work, bars = LONG[name]
    work()
    printed, shown = capsys.readouterr().out, terminal.getvalue()
    assert len({*BAR.findall(COLOUR.sub("", shown))}) >= bars
    assert not any(line and line in shown for line in printed.splitlines()), "results are no part of the display"
    assert shown.endswith("\x1b[?25h"), "the cursor is back, also where a refusal ends the work"
    monkeypatch.setattr(progress, "Terminal", lambda stderr: Terminal(file=io.StringIO()))
    work()
    assert capsys.readouterr().out == printed

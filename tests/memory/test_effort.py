"""How much is simulated for an answer, and the bar that shows how far it is."""

import io
from collections import defaultdict
from collections.abc import Callable

import pytest
from rich.console import Console as Terminal

from unet3d import compose, progress
from unet3d.cli import memory
from unet3d.config import Config
from unet3d.errors import UserError
from unet3d.memory import budget, simulate
from unet3d.memory.budget import oom_suggestions, price
from unet3d.memory.preflight import preflight
from unet3d.memory.simulate import clear_memo

NET = ["model=unet_tiny", "model.features=[8,16]", "data.patch=[8,16,8]", "batch=2", "dry_run=true"]


def config(*overrides: str) -> Config:
    return compose.compose([*NET, "model.in_channels=1", "model.classes=3", *overrides])


@pytest.fixture(autouse=True)
def from_the_start() -> None:
    """What other tests of this process simulated is simulated again."""
    clear_memo()


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[int]]:
    """For each config that is simulated, the steps of each time."""
    found: dict[str, dict[int, int]] = defaultdict(dict)
    models, step = [], simulate.train_step

    def spy(model, loss, optimizer, scaler, policy, batches, *rest):
        models.append(model)  # so that no two have the same id
        key = repr((model.options, policy, len(batches), batches[0].label.shape if batches else None))
        found[key][id(model)] = found[key].get(id(model), 0) + 1
        return step(model, loss, optimizer, scaler, policy, batches, *rest)

    monkeypatch.setattr(simulate, "train_step", spy)
    return found  # type: ignore[return-value]


def times(simulated: dict[str, dict[int, int]]) -> list[list[int]]:
    return [sorted(steps.values()) for steps in simulated.values()]


def test_a_dry_run_simulates_the_network_and_the_advice_once(simulated: dict) -> None:
    asked = config()
    preflight(asked, asked.model)
    assert times(simulated) == [[2], [2]]


def test_a_budget_simulates_no_config_more_than_twice_but_for_first_steps(simulated: dict) -> None:
    asked = config("budget=0.02MiB")
    with pytest.raises(UserError, match="budget="):
        preflight(asked, asked.model)
    assert len(simulated) > 5
    assert all(steps in ([2], [1], [1, 2], [2, 2]) for steps in times(simulated)), "[1]: to choose a cut"
    assert sum(steps == [2, 2] for steps in times(simulated)) <= 1, "the network as asked"


def test_a_price_is_asked_for_once(simulated: dict) -> None:
    asked = config("ckpt=auto", "optim.lr=0.007")
    found, before = price(asked, asked.model), times(simulated)
    assert price(config("ckpt=auto", "optim.lr=0.007", "device=cpu"), asked.model) == found
    assert times(simulated) == before


def test_fit_simulates_each_way_once(simulated: dict, capsys: pytest.CaptureFixture) -> None:
    asked = [*NET, "model.in_channels=1", "model.classes=3", "optim.lr=0.003", "budget=0.9MiB"]
    budget.find_fit(compose.compose(asked), compose.compose(asked).model, asked, print)
    assert simulated and all(steps in ([2], [1], [1, 2]) for steps in times(simulated))


def test_the_memory_command_simulates_each_network_once(simulated: dict, capsys: pytest.CaptureFixture) -> None:
    memory.explain([*NET, "model.in_channels=1", "model.classes=3"], half=False, out=None)
    assert sorted(times(simulated)) == [[2], [2], [3]]


def refused(asked: Config) -> None:
    with pytest.raises(UserError):
        preflight(asked, asked.model)


WORDS = [*NET, "model.in_channels=1", "model.classes=3", "budget=0.9MiB"]
LONG: dict[str, tuple[Callable[[], object], list[str]]] = {
    "memory": (lambda: memory.explain(WORDS, half=False, out=None), ["networks"]),
    "sweep": (
        lambda: memory.print_peaks([[*WORDS, "batch=1"], [*WORDS, "batch=2"]], half=False, out=None),
        ["networks"],
    ),
    "fit": (
        lambda: budget.find_fit(compose.compose(WORDS), compose.compose(WORDS).model, WORDS, print),
        ["ways to take the step", "commands that may fit"],
    ),
    "cut": (lambda: price(config("ckpt=auto", "seed=5"), config().model), ["cuts into segments"]),
    "out of memory": (lambda: list(oom_suggestions(config("seed=6"), config().model)), ["levers, at most"]),
    "budget": (lambda: refused(config("budget=0.3MiB")), ["levers, at most", "cuts that may fit the budget"]),
}


@pytest.mark.parametrize("name", LONG)
def test_what_may_last_shows_a_bar_and_prints_the_same(
    name: str, terminal: io.StringIO, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    work, bars = LONG[name]
    work()
    printed, shown = capsys.readouterr().out, terminal.getvalue()
    assert all(bar in shown for bar in bars)
    assert not any(line and line in shown for line in printed.splitlines()), "results are no part of the display"
    monkeypatch.setattr(progress, "Terminal", lambda stderr: Terminal(file=io.StringIO()))
    work()
    assert capsys.readouterr().out == printed


def test_bars_that_end_early_leave_no_display(terminal: io.StringIO) -> None:
    refused(config("budget=0.3MiB"))
    assert terminal.getvalue().endswith("\x1b[?25h")

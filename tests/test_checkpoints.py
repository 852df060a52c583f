"""Which checkpoints of a run are kept."""

from pathlib import Path
from typing import Any

import pytest
import torch
from guards import nothing, without, yes
from promises import promise

from unet3d import build
from unet3d.base.errors import CheckpointError, NotSaved
from unet3d.config import compose
from unet3d.run import checkpoint
from unet3d.run.training_state import CheckpointManager, rate_change
from unet3d.training import optim
from unet3d.training.losses import SegmentationLoss, ce
from unet3d.training.policy import MemoryPolicy
from unet3d.training.trainer import Learner


class Nothing(CheckpointManager):
    """Of a run without a network."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.best, self.saved = folder, None, None
        self.changes: list[str] = []

    def state_dict(self, step: int, last_validation: int, best: float | None) -> dict[str, Any]:
        return {"step": step, "last_validation": last_validation, "best": best}

    def load_state_dict(self, path: Path, state: dict[str, Any]) -> list[str]:
        return self.changes


@pytest.fixture
def checkpoints(tmp_path: Path) -> Nothing:
    (tmp_path / "checkpoints").mkdir()
    return Nothing(tmp_path)


def kept(checkpoints: Nothing) -> dict[str, int]:
    """The step of each checkpoint."""
    folder = checkpoints.folder / "checkpoints"
    return {path.stem: checkpoint.load_checkpoint(path)["step"] for path in folder.iterdir()}


def test_the_best_is_that_of_the_highest_dice(checkpoints: Nothing) -> None:
    """Of equal ones the first; a validation without any foreground, whose Dice is n/a, does not count."""
    best = []
    for step, dice in enumerate((None, 0.5, 0.3, None, 0.5, 0.6), start=1):
        checkpoints.save_best_and_last(step, dice)
        best.append(kept(checkpoints).get("best"))
    assert best == [None, 2, 2, 2, 2, 6] and checkpoints.best == 0.6
    assert kept(checkpoints) == {"best": 6, "last": 6, "previous": 5}


def test_options_that_changed_cannot_command_a_terminal(checkpoints: Nothing, capsys: pytest.CaptureFixture) -> None:
    checkpoints.save_last(0, 0)
    checkpoints.changes = ["wandb.project: a\x1b[2J -> \udcff"]
    checkpoints.restore()
    printed = capsys.readouterr().out
    assert "wandb.project: a\\x1b[2J -> \\udcff" in printed and printed.removesuffix("\n").isprintable()


def test_a_best_that_could_not_be_saved_is_no_best(checkpoints: Nothing) -> None:
    best = checkpoints.folder / "checkpoints" / "best.pt"
    checkpoints.save_best_and_last(0, 0.5)
    aside = best.rename(checkpoints.folder / "aside.pt")
    best.mkdir()  # no file can take its place
    with pytest.raises(NotSaved):
        checkpoints.save_best_and_last(1, 0.8)
    best.rmdir()
    aside.rename(best)
    assert kept(checkpoints) == {"best": 0, "last": 0}
    checkpoints.save_best_and_last(2, 0.7)
    assert kept(checkpoints)["best"] == 2


def test_a_resumed_run_knows_its_best(checkpoints: Nothing, tmp_path: Path) -> None:
    checkpoint.save_checkpoint(tmp_path / "checkpoints" / "last.pt", {"step": 4, "last_validation": 4, "best": 0.5})
    (tmp_path / "metrics.jsonl").touch()
    assert checkpoints.restore() == (4, 4) and checkpoints.best == 0.5


@pytest.mark.parametrize(
    ("words", "kind", "options"),
    [
        (["optim=adamw", "optim.betas=[0.8,0.95]"], torch.optim.AdamW, {"betas": (0.8, 0.95)}),
        (["optim=adam", "optim.betas=[0.8,0.95]"], torch.optim.Adam, {"betas": (0.8, 0.95)}),
        (["optim=sgd", "optim.momentum=0.9"], torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
        (["optim=sgd", "optim.momentum=0"], torch.optim.SGD, {"momentum": 0, "nesterov": False}),
    ],
)
def test_the_optimizer_is_the_one_asked_for(words: list[str], kind: type, options: dict[str, Any]) -> None:
    asked = compose.compose([*words, "optim.lr=0.125", "optim.weight_decay=0.25"]).optim
    found = optim.optimizer(asked, torch.nn.Linear(2, 2))
    assert type(found) is kind
    assert {name: found.defaults[name] for name in options} == options
    assert (found.defaults["lr"], found.defaults["weight_decay"]) == (0.125, 0.25)


WORDS = ["model.features=[4,8]", "model.in_channels=1", "model.classes=3", "data.patch=[16,16,16]", "optim.average=0.9"]
MOMENTS = ("exp_avg", "exp_avg_sq", "average")
MOMENT = ("optimizer", "state", 0, "exp_avg")


@pytest.fixture
def state(tmp_path: Path) -> CheckpointManager:
    """Of a run that has taken a step."""
    config = compose.compose(WORDS)
    model = build.model(config.model, seed=0)
    optimizer = optim.optimizer(config.optim, model)
    model(torch.ones(1, 1, 16, 16, 16)).sum().backward()
    optimizer.step()
    facts = {"classes": ["a", "b", "c"], "channels": ["x"], "intensity": [], "files": {}}
    learner = Learner(model, SegmentationLoss(ce), optimizer, torch.amp.GradScaler("cpu"), MemoryPolicy())
    return CheckpointManager(tmp_path, config, config.model, facts, learner)


@without("torch.set_rng_state", nothing)
@without("torch.amp.GradScaler.load_state_dict", nothing)
def test_a_state_that_is_put_back_is_the_same(state: CheckpointManager, tmp_path: Path) -> None:
    saved = state.state_dict(1, 0, 0.5)
    saved["scaler"]["scale"] *= 2
    torch.rand(1)
    assert state.load_state_dict(tmp_path, saved) == []
    again = state.state_dict(1, 0, 0.5)
    assert torch.equal(saved["rng"], again["rng"]) and saved["scaler"] == again["scaler"]
    moments = [found["optimizer"]["state"] for found in (saved, again)]
    assert all(torch.equal(moments[0][i][name], moments[1][i][name]) for i in moments[0] for name in moments[0][i])
    assert saved["optimizer"]["param_groups"] == again["optimizer"]["param_groups"]


@promise(
    "Resume",
    "a finished run goes on for more steps, or at another rate",
    "a line with the rate of its last step and of the next",
)
@pytest.mark.parametrize(
    ("words", "step", "said"),
    [
        (["optim.schedule=one_cycle"], 100, "rises to"),
        (["optim.schedule=poly"], 100, "rises to"),
        (["optim.schedule=cosine"], 50, "rises to"),
        (["optim.schedule=constant"], 100, ""),
    ],
)
def test_a_run_that_goes_on_for_more_steps_says_what_its_rate_does(words: list[str], step: int, said: str) -> None:
    before, now = (compose.compose([*WORDS, *words, f"steps={steps}"]) for steps in (100, 200))
    line = rate_change(before, now, step)
    if not said:
        assert line == ""
        return
    last = optim.learning_rate(before.optim, 100, step - 1)
    first = optim.learning_rate(now.optim, 200, step)
    assert f"{last:.3g} in step {step}, {said} {first:.3g} in step {step + 1}" in line and "200 steps" in line
    assert rate_change(now, now, step) == ""


@promise("Resume", "a finished run goes ...")
def test_a_changed_rate_is_said_as_the_state_is_put_back(state: CheckpointManager, tmp_path: Path) -> None:
    saved = state.state_dict(1, 0, 0.5)
    saved["config"]["optim"]["lr"] = 4e-4
    changed, rate = state.load_state_dict(tmp_path, saved)
    assert changed.startswith("optim.lr: 0.0004 -> ") and "1.6e-05 in step 1, rises to 0.000151 in step 2" in rate


@promise("Resume", "another number of threads on the CPU", "a line with both numbers; identical up to rounding")
def test_another_number_of_threads_is_told(
    state: CheckpointManager, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the CPU they change rounding."""
    saved = state.state_dict(1, 0, 0.5)
    state.load_state_dict(tmp_path, saved)
    assert not capsys.readouterr().err
    threads = saved["threads"]
    state.load_state_dict(tmp_path, saved | {"threads": threads + 2})
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{threads + 2} -> {threads}" in line and f"OMP_NUM_THREADS={threads + 2}" in line


@promise("Checkpoints", "values of wrong types ...")
@without("unet3d.run.checkpoint.is_finite", yes, only="nan moment")
@pytest.mark.parametrize(
    ("keys", "value", "wrong"),
    [
        *((("step",), value, "step") for value in (-5, 2.5, "x", True)),
        *((("last_validation",), value, "step") for value in (7, -1, None)),
        *((("best",), value, "best") for value in ("x", float("nan"), 7.0)),
        *((("rng",), value, "rng") for value in (torch.zeros(9, dtype=torch.uint8), torch.zeros(5056), "x")),
        *((("scaler", "scale"), value, "scaler") for value in (0.0, float("inf"))),
        (("scaler",), {}, "scaler"),
        *((MOMENT, value, "optimizer") for value in (torch.zeros(2), torch.zeros(4, 1, 3, 3, 3).double(), None, [])),
        pytest.param(MOMENT, torch.full((4, 1, 3, 3, 3), float("nan")), "optimizer", id="nan moment"),
        (MOMENT[:3], {}, "optimizer"),
        *(((*MOMENT[:3], "step"), torch.tensor(value), "optimizer") for value in (-1.0, 0.0, 0.5, 2.0)),
        ((*MOMENT[:3], "exp_avg_sq"), torch.full((4, 1, 3, 3, 3), -1.0), "optimizer"),
        *(
            (MOMENT, torch.zeros(99).as_strided((4, 1, 3, 3, 3), strides), "optimizer")
            for strides in ([0] * 5, [1] * 5)
        ),
        (MOMENT[:3], {"step": torch.ones(()), **dict.fromkeys(MOMENTS, torch.zeros(4, 1, 3, 3, 3))}, "optimizer"),
        (("optimizer", "param_groups", 0, optim.COUNT), -3, "step"),
        (("threads",), "x", "threads"),
    ],
)
def test_a_state_that_no_run_has_written_is_refused(
    state: CheckpointManager, tmp_path: Path, keys: tuple[Any, ...], value: Any, wrong: str
) -> None:
    saved = state.state_dict(1, 0, 0.5)
    node: Any = saved
    for key in keys[:-1]:
        node = node[key]
    node[keys[-1]] = value
    with pytest.raises(CheckpointError, match=rf"last\.pt: .*\b{wrong}\b"):
        state.load_state_dict(tmp_path / "last.pt", saved)


@promise("Checkpoints", "values of wrong types ...")
@pytest.mark.parametrize("value", [torch.zeros(5056, dtype=torch.uint8), torch.full((5056,), 255, dtype=torch.uint8)])
def test_a_random_state_that_torch_refuses_is_one_line(
    state: CheckpointManager, tmp_path: Path, value: torch.Tensor
) -> None:
    (tmp_path / "checkpoints").mkdir()
    checkpoint.save_checkpoint(tmp_path / "checkpoints" / "last.pt", state.state_dict(1, 0, None) | {"rng": value})
    with pytest.raises(CheckpointError, match=r"last\.pt: .*RuntimeError"):
        state.restore()


@pytest.mark.parametrize("part", ["scaler", "fingerprint", "last_validation", "best", "ranks", "threads"])
def test_a_state_without_a_part_is_one_line_and_no_other_is_taken(
    state: CheckpointManager, tmp_path: Path, part: str
) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    whole = state.state_dict(1, 0, None)
    checkpoint.save_checkpoint(folder / "previous.pt", whole)
    checkpoint.save_checkpoint(folder / "last.pt", {name: value for name, value in whole.items() if name != part})
    with pytest.raises(CheckpointError, match=rf"last\.pt: .*KeyError\('{part}'\)"):
        state.restore()


@promise("Checkpoints", "values of wrong types ...")
def test_options_of_the_optimizer_come_from_the_config(state: CheckpointManager, tmp_path: Path) -> None:
    saved = state.state_dict(1, 0, None)
    (group,) = saved["optimizer"]["param_groups"]
    saved["optimizer"]["param_groups"] = [group | {"betas": (5, 7), "eps": -1, "maximize": True, "params": [99]}]
    state.load_state_dict(tmp_path, saved)
    found = state.learner.optimizer.param_groups[0]
    assert (found["betas"], found["eps"], found["maximize"], found[optim.COUNT]) == ((0.9, 0.999), 1e-8, False, 1)

"""Which checkpoints of a run are kept, and which training states are put back."""

from pathlib import Path
from typing import Any

import pytest
import torch
from guards import without, yes
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

Capture = pytest.CaptureFixture[str]


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


def test_a_resumed_run_knows_its_best_and_its_changes_cannot_command_a_terminal(
    checkpoints: Nothing, capsys: Capture
) -> None:
    checkpoints.save_best_and_last(4, 0.5)
    checkpoints.best, checkpoints.changes = None, ["wandb.project: a\x1b[2J -> \udcff"]
    assert checkpoints.restore() == (4, 4) and checkpoints.best == 0.5
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


@pytest.mark.parametrize(
    ("words", "kind", "options"),
    [
        ("optim=adamw optim.betas=[0.8,0.95]", torch.optim.AdamW, {"betas": (0.8, 0.95)}),
        ("optim=sgd optim.momentum=0.9", torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
        ("optim=sgd optim.momentum=0", torch.optim.SGD, {"momentum": 0, "nesterov": False}),
    ],
)
def test_the_optimizer_is_the_one_asked_for(words: str, kind: type, options: dict[str, Any]) -> None:
    asked = compose.compose([*words.split(), "optim.lr=0.125", "optim.weight_decay=0.25"]).optim
    found = optim.optimizer(asked, torch.nn.Linear(2, 2))
    assert type(found) is kind
    assert found.defaults.items() >= {**options, "lr": 0.125, "weight_decay": 0.25}.items()


WORDS = ["model.features=[4,8]", "model.in_channels=1", "model.classes=3", "data.patch=[16,16,16]", "optim.average=0.9"]
NAMES = ("exp_avg", "exp_avg_sq", "average")
SHAPE = (4, 1, 3, 3, 3)  # of the first weight, whose moments are damaged
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


@promise(
    "Resume",
    "a finished run goes on for more steps, or at another rate",
    "a line with the rate of its last step and of the next",
)
@pytest.mark.parametrize(
    ("schedule", "steps", "step", "said"),
    [("cosine", (100, 200), 100, "rises to"), ("poly", (200, 100), 50, "falls to")],
)
def test_a_run_that_goes_on_for_other_steps_says_what_its_rate_does(
    schedule: str, steps: tuple[int, int], step: int, said: str
) -> None:
    before, now = (compose.compose([*WORDS, f"optim.schedule={schedule}", f"steps={count}"]) for count in steps)
    line = rate_change(before, now, step)
    last = optim.learning_rate(before.optim, before.steps, step - 1)
    first = optim.learning_rate(now.optim, now.steps, step)
    wanted = f"{last:.3g} in step {step}, {said} {first:.3g} in step {step + 1}"
    assert wanted in line and f"{now.steps} steps" in line
    assert rate_change(now, now, step) == ""


@promise("Resume", "a finished run goes ...")
def test_a_changed_rate_is_said_as_the_state_is_put_back(state: CheckpointManager, tmp_path: Path) -> None:
    saved = state.state_dict(1, 0, 0.5)
    saved["config"]["optim"]["lr"] = 4e-4
    changed, rate = state.load_state_dict(tmp_path, saved)
    assert changed.startswith("optim.lr: 0.0004 -> ") and "1.6e-05 in step 1, rises to 0.000151 in step 2" in rate


@promise("Resume", "another number of threads on the CPU", "a line with both numbers; identical up to rounding")
def test_another_number_of_threads_is_told(state: CheckpointManager, tmp_path: Path, capsys: Capture) -> None:
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
    ("keys", "value"),
    [
        *((("step",), value) for value in (-5, 2.5, True)),
        (("last_validation",), 7),
        *((("best",), value) for value in ("x", 7.0, float("nan"))),
        *((("rng",), value) for value in (torch.zeros(9, dtype=torch.uint8), "x")),
        (("scaler",), {}),
        *((("scaler", "scale"), value) for value in (0.0, float("inf"))),
        (("threads",), "x"),
        (MOMENT, torch.zeros(SHAPE).double()),
        pytest.param(MOMENT, torch.full(SHAPE, float("nan")), id="nan moment"),
        (MOMENT, torch.zeros(99).as_strided(SHAPE, [1] * 5)),
        ((*MOMENT[:3], "exp_avg_sq"), torch.full(SHAPE, -1.0)),
        *(((*MOMENT[:3], "step"), torch.tensor(value)) for value in (0.0, 2.0)),
        (MOMENT[:3], {}),
        (MOMENT[:2], {0: {"step": torch.ones(())} | dict.fromkeys(NAMES, torch.zeros(SHAPE))}),
        (("optimizer", "param_groups", 0, optim.COUNT), -3),
    ],
    ids=lambda value: ".".join(map(str, value)) if isinstance(value, tuple) else "",
)
def test_a_state_that_no_run_has_written_is_refused(
    state: CheckpointManager, tmp_path: Path, keys: tuple[Any, ...], value: Any
) -> None:
    saved = state.state_dict(1, 0, 0.5)
    node: Any = saved
    for key in keys[:-1]:
        node = node[key]
    node[keys[-1]] = value
    wrong = "step" if keys[-1] in ("last_validation", optim.COUNT) else keys[0]
    with pytest.raises(CheckpointError, match=rf"last\.pt: .*\b{wrong}\b"):
        state.load_state_dict(tmp_path / "last.pt", saved)


@promise("Checkpoints", "values of wrong types ...")
@pytest.mark.parametrize(
    ("change", "said"),
    [({"rng": torch.zeros(5056, dtype=torch.uint8)}, "RuntimeError"), (None, r"KeyError\('threads'\)")],
    ids=["random state that torch refuses", "lacks a part"],
)
def test_a_damaged_state_is_one_line_and_no_other_is_taken(
    change: dict | None, said: str, state: CheckpointManager, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    saved = state.state_dict(1, 0, None)
    checkpoint.save_checkpoint(folder / "previous.pt", saved)
    saved |= change or {}
    if change is None:
        del saved["threads"]
    checkpoint.save_checkpoint(folder / "last.pt", saved)
    with pytest.raises(CheckpointError, match=rf"last\.pt: .*{said}"):
        state.restore()


@promise("Checkpoints", "values of wrong types ...")
def test_options_of_the_optimizer_come_from_the_config(state: CheckpointManager, tmp_path: Path) -> None:
    saved = state.state_dict(1, 0, None)
    (group,) = saved["optimizer"]["param_groups"]
    saved["optimizer"]["param_groups"] = [group | {"betas": (5, 7), "eps": -1, "maximize": True, "params": [99]}]
    state.load_state_dict(tmp_path, saved)
    found = state.learner.optimizer.param_groups[0]
    assert (found["betas"], found["eps"], found["maximize"], found[optim.COUNT]) == ((0.9, 0.999), 1e-8, False, 1)

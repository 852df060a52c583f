"""A user's own network, loss, transform and logger, named by import path: used everywhere, taken from no run folder."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from guards import none, without
from promises import promise
from tables import cases
from training import PLAIN, ROOT, TINY, face, planned, records, status
from training import train as fork

from unet3d import build
from unet3d.base.errors import UserError
from unet3d.cli import lifecycle
from unet3d.config import compose
from unet3d.config.schema import Model
from unet3d.memory.prediction import preflight
from unet3d.memory.technique import choose_segments
from unet3d.training.inference import Predictor
from unet3d.training.policy import MemoryPolicy

PARTS = """
import torch
import torch.nn.functional as F
from torch import nn


ONE = torch.ones(1)  # made as the module is imported: a real tensor, wherever that is


class Network(nn.Module):
    def __init__(self, in_channels, classes):
        super().__init__()
        self.first, self.last = nn.Conv3d(in_channels, 4, 3, padding=1), nn.Conv3d(4, classes, 1)

    def forward(self, image):
        return self.last(self.first(image).relu()) * ONE


def stages(in_channels, classes):
    return nn.Sequential(*Network(in_channels, 4).children(), nn.ReLU(), nn.Conv3d(4, classes, 1))


def number(in_channels, classes):
    return 7


def convolution(in_channels, classes):
    return nn.Conv3d(in_channels, classes, 1)


def half(in_channels, classes):
    return nn.Conv3d(in_channels, classes, 2, stride=2)


def more(in_channels, classes):
    return nn.Conv3d(in_channels, classes + 1, 1)


def several(in_channels, classes):
    class Several(nn.Conv3d):
        def forward(self, image):
            return [super().forward(image)]

    return Several(in_channels, classes, 1)


def flat(in_channels, classes):
    return nn.Sequential(nn.Conv3d(in_channels, classes, 1), nn.Flatten())


def frozen(in_channels, classes):
    return convolution(in_channels, classes).requires_grad_(False)


def lazy(in_channels, classes):
    return nn.LazyConv3d(classes, 1)


def empty(in_channels, classes):
    return nn.Identity()


def exits(in_channels, classes):
    raise SystemExit(7)


def needs(in_channels, classes, width):
    return convolution(in_channels, classes)


def vector(logits, label, options):
    return logits.mean((1, 2, 3, 4))


def text(logits, label, options):
    return "x"


def detached(logits, label, options):
    return logits.detach().mean()


def focal(logits, label, options):
    entropy = F.cross_entropy(logits, label, reduction="none")
    return ((1 - (-entropy).exp()) ** 2 * entropy).mean()


def bright(image, label, rng):
    return image + rng.random(), label


def shrink(image, label, rng):
    return image[:, 1:], label


class Logger:
    def __init__(self, config, folder):
        self.file = (folder / "mine.txt").open("a")

    def scalars(self, values, step):
        print(step, *values, file=self.file)

    def image(self, key, path, step): ...
    def table(self, key, columns, rows): ...
    def summary(self, values): ...

    def close(self, exit_code):
        print("closed with", exit_code, file=self.file, flush=True)


constant = 7
"""
NETWORK, LOSS = "model.path=own_parts:Network", "loss.path=own_parts:focal"
OWN = (NETWORK, LOSS, "data.transforms=[own_parts:bright]", "loggers=[own_parts:Logger]")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder outside of the package with parts of one's own and a run that used them."""
    place = tmp_path_factory.mktemp("own")
    (place / "own_parts.py").write_text(PARTS)
    (place / "conf" / "loss").mkdir(parents=True)
    (place / "conf" / "loss" / "mine.yaml").write_text("path: own_parts:focal\n")
    done = fork(place, *TINY, *OWN, "steps=5", "hydra.run.dir=run")
    assert done.code == 0, done.err
    return place


@pytest.fixture
def here(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder, as the current one."""
    monkeypatch.chdir(place)
    monkeypatch.syspath_prepend(place)
    return place


def test_a_run_uses_the_parts(place: Path) -> None:
    assert [r["step"] for r in records(place / "run") if "train/loss" in r] == [1, 2, 3, 4, 5]
    lines = (place / "run" / "mine.txt").read_text().splitlines()  # of the test's own logger
    assert lines[0].startswith("1 ") and "train/loss" in lines[0] and lines[-1] == "closed with 0"
    state = torch.load(place / "run" / "checkpoints" / "last.pt", weights_only=True)
    assert {*state["model"]} == {f"{layer}.{kind}" for layer in ("first", "last") for kind in ("weight", "bias")}


@promise("checkpoints and run folders", "code is imported only ...")
@pytest.mark.slow
@without("unet3d.config.compose.options_with", none)
def test_a_run_resumes_only_with_code_that_the_command_line_names(place: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(place / "run", copy)
    refused = fork(place, f"resume={copy}", "steps=6", NETWORK)
    assert refused.code == 2 and status(copy).startswith("done")
    assert all(f" {word}" in refused.err for word in OWN[1:]), "what to write again"
    done = fork(place, f"resume={copy}", "steps=6", *OWN)
    assert done.code == 0, done.err
    assert [r["step"] for r in records(copy) if "train/loss" in r] == [1, 2, 3, 4, 5, 6]


@promise("checkpoints and run folders", "code is imported only ...")
def test_a_planted_path_is_not_imported(here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "planted.py").write_text("raise SystemExit('it ran')")
    monkeypatch.syspath_prepend(tmp_path)
    planted = tmp_path / "run"
    shutil.copytree(here / "run", planted)
    for name in ("overrides.yaml", "config.yaml"):
        (planted / name).write_text((planted / name).read_text().replace(NETWORK[11:], "planted:Network"))
    for words, said in ((OWN[1:], "=planted:Network"), (OWN, ": planted:Network -> own_parts:Network")):
        with pytest.raises(UserError, match=rf"\bmodel\.path{said}"):
            planned([f"resume={planted}", *words])
    assert face("report", planted) == 0


def test_predict_and_publish_take_the_network_that_the_command_line_names(
    here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint, image = here / "run" / "checkpoints" / "best.pt", next(here.rglob("imagesTr/*.nii.gz"))
    assert face("predict", checkpoint, image, "-o", tmp_path) == 2
    assert "--model own_parts:Network" in capsys.readouterr().err
    assert face("publish", checkpoint, "-o", tmp_path / "net.pt", "--model", "own_parts:Network") == 0
    for path in (checkpoint, tmp_path / "net.pt"):
        assert face("predict", path, image, "-o", tmp_path / path.stem, "--model", "own_parts:Network") == 0
    assert (tmp_path / "net" / image.name).read_bytes() == (tmp_path / "best" / image.name).read_bytes()
    words = ["score", checkpoint, *TINY, "--model", "own_parts:Network", "-o", tmp_path / "scores"]
    assert face(*words) == 0, capsys.readouterr().err


@pytest.mark.slow
def test_its_memory_is_explained_and_what_fits_it_and_its_curves_are_found(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("BATCHES", "SIZES"):
        monkeypatch.setattr(f"unet3d.cli.memory_answers.{name}", (1, 2))
    words = [NETWORK, "model.norm=batch", "loss=mine", "--config-dir", "conf"]
    assert face("memory", *TINY, *PLAIN, *words, "-o", tmp_path) == 0
    shown = capsys.readouterr()
    assert "own_parts:Network" in shown.out and "first" in shown.out and "activations" in shown.out
    assert not re.search(r"\blevel \d", shown.out), "it has none"
    assert all(name in shown.err for name in ("model.features", "model.norm", "model.path"))
    assert face("memory", *TINY, *PLAIN, NETWORK, "--curves", "-o", tmp_path) == 0
    assert (tmp_path / "curves.csv").read_text().count("\n") == 5
    assert face("memory", "fit", *TINY, *PLAIN, NETWORK, "budget=1GiB") == 0
    assert f"{NETWORK} budget=1GiB" in capsys.readouterr().out


def test_a_sequence_of_stages_can_be_checkpointed(here: Path) -> None:
    config = compose.compose([*TINY, "model.path=own_parts:stages", "model.in_channels=1", "model.classes=3", "ckpt=2"])
    options = build.model_config_from_headers(config)
    assert len(choose_segments(config, options)[0]) == 2
    config.ckpt = 9
    with pytest.raises(UserError, match=r"^ckpt=9\b.*nn\.Sequential.*\b4\b"):
        choose_segments(config, options)
    config.ckpt = 2
    options.path = "own_parts:Network"
    with pytest.raises(UserError, match=r"^ckpt=2\b.*nn\.Sequential.*\b0\b"):
        choose_segments(config, options)


PARTS_THAT_DO_NOT_SUIT = """
model.path=no_such_package:name | No module named 'no_such_package'
model.path=own_parts:nothing | own_parts
model.path=own_parts:constant | constant
model.path=own_parts:number | int,
model.path=own_parts:half | (1, 4, 8, 8, 8)
model.path=own_parts:more | (1, 5, 16, 16, 16)
model.path=own_parts:several | list
model.path=own_parts:flat | (1, 16384)
model.path=own_parts:frozen | gradient
model.path=own_parts:lazy | lazy
model.path=own_parts:empty | no parameters
model.path=own_parts:exits | (7)
model.path=own_parts:needs | needs(in_channels, classes)
loss.path=own_parts:vector | shape (1,)
loss.path=own_parts:text | str
loss.path=own_parts:detached | gradient
loss.path=own_parts:empty | empty(logits, label, options)
loggers=[own_parts:vector] | vector(config, folder)
data.transforms=[own_parts:empty] | empty(image, label, rng)
"""


@promise(
    "Training",
    "a network of one's own without logits of the image's size, without weights, or lazy; a loss that is "
    "no number or has no gradient; a part that cannot be called",
    "exit 2 before the run with option, part and what it is to return",
)
@pytest.mark.parametrize(("words", "parts"), cases(PARTS_THAT_DO_NOT_SUIT))
def test_a_part_that_does_not_suit_is_one_line_before_a_run(here: Path, words: list[str], parts: list[str]) -> None:
    config = compose.compose([*TINY, *PLAIN, "model.path=own_parts:convolution", *words, "dry_run=true"])
    with pytest.raises(UserError) as refused:
        preflight(config, build.model_config_from_headers(config))
    line = str(refused.value)
    assert line.startswith(words[0].replace("[", "").replace("]", "")) and parts[0] in line and "\n" not in line, line


@promise("Training", "a network of one's ...")
@pytest.mark.parametrize("name", ["half", "more", "several"])
def test_a_network_that_does_not_suit_predicts_nothing(here: Path, name: str) -> None:
    """In evaluation it may return something else than in training."""
    options = Model(path=f"own_parts:{name}", in_channels=1, classes=3)
    found = Predictor((build.model(options, 0),), options, MemoryPolicy(), (8, 8, 8))
    with pytest.raises(UserError, match=rf"^model\.path=own_parts:{name}: .*\(1, 3, 8, 8, 8\)"):
        next(found.strips(torch.zeros(1, 9, 9, 9)))


@promise("Training", "a transform of one's ...")
def test_a_transform_that_changes_sizes_is_refused(place: Path) -> None:
    done = fork(place, *TINY, "data.transforms=[own_parts:shrink]", "hydra.run.dir=shrunk")
    assert done.code == 2 and "data.transforms" in done.err and "shrink" in done.err


def keep_words() -> None:
    """Keep what a sweep would start a process for each job with, and let the job be done."""

    def keep(command: list[str], log: object) -> tuple[int, bool]:
        Path("words.json").write_text(json.dumps(command))
        lifecycle.write_end(Path("sweep/0"), "done", 0)
        return 0, False

    lifecycle.run_process = keep


def test_a_yaml_in_a_folder_of_ones_own_names_a_loss(here: Path) -> None:
    """Also to the job of a sweep, and to the command that a report shows."""
    mine = ["--config-dir=conf", "loss=mine"]
    done = fork(here, *TINY, *mine, "-m", "hydra.sweep.dir=sweep", hook=keep_words)
    assert done.code == 0, done.err
    command = json.loads((here / "words.json").read_text())
    assert command[:3] == [sys.executable, "-m", "unet3d.cli.train"]
    assert planned(command[3:]).config.loss.path == "own_parts:focal"
    done = fork(here, *TINY, *mine, "dry_run=true", "hydra.run.dir=dry")
    assert done.code == 0, done.err
    words = yaml.safe_load((here / "dry" / "overrides.yaml").read_text())
    assert compose.compose(words).loss.path == "own_parts:focal"


ALL_ANSWERS = """
import sys
from unet3d.cli import main

for words in (["loss=squared"], ["--help"], sys.argv[1:]):
    sys.argv = ["unet3d", "train", *words]
    print(main.main())
"""


@pytest.mark.slow
def test_a_loss_added_to_the_package_is_known_to_an_installed_one(tmp_path: Path) -> None:
    """As a wheel lies in site-packages: configs inside the package, run from an empty folder."""
    site, empty = tmp_path / "site", tmp_path / "empty"
    shutil.copytree(ROOT / "unet3d", site / "unet3d", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "configs", site / "unet3d" / "configs")
    with (site / "unet3d" / "training" / "losses.py").open("a") as file:
        file.write("\n\n@loss(about='squares')\ndef squared(logits, label, options):\n    return (logits**2).mean()\n")
    empty.mkdir()
    command = [sys.executable, "-c", ALL_ANSWERS, *TINY, *PLAIN, "model.features=[4]", "loss.name=squared"]
    environment = os.environ | {"PYTHONPATH": str(site)}
    done = subprocess.run(
        [*command, "dry_run=true"], cwd=empty, env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    codes = [line for line in done.stdout.splitlines() if line.isdecimal()]
    assert codes == ["2", "0", "0"], done.stderr
    assert "loss.name=squared" in done.stderr, "what to write for loss=squared"
    (line,) = (line for line in done.stdout.splitlines() if line.strip().startswith("loss.name="))
    assert "squared" in line, "in --help"
    assert {path.name for path in empty.iterdir()} == {"outputs"}
    (memory_json,) = empty.glob("outputs/*/*/memory.json")
    assert json.loads(memory_json.read_text())["predicted"]["peak_bytes"] > 0

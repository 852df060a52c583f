"""README and docs: commands that are shown run, answers that are shown are given, links lead somewhere."""

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pytest
from bench import docs_outputs
from pages import check_named_tests, named_tests
from training import TINY

from unet3d import compose
from unet3d.cli.main import command_parser

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    *("README.md", "CONTRIBUTING.md", "SECURITY.md", "data/README.md"),
    *sorted(f"docs/{p.name}" for p in ROOT.glob("docs/*.md")),
]
TEXTS = {page: (ROOT / page).read_text() for page in PAGES}
USER_PATHS = ("init=", "loss.path=", "model.path=", "--config-dir", "--model", "loggers=", "data.transforms=")


def commands() -> list[list[str]]:
    """Every train.py and unet3d command in an indented block, split into words."""
    lines = [line.strip() for text in TEXTS.values() for line in text.splitlines() if line.startswith("    ")]
    parts = [part.strip().removeprefix("$ ") for line in lines for part in line.split("&&")]
    found = [shlex.split(part) for part in parts if "train.py" in part or "-m unet3d" in part]
    return [words for words in found if words[0].endswith("python")]


def overrides(words: list[str], folder: Path) -> list[str]:
    """The options in a command; PATH becomes a folder that is there."""
    (folder / "Task04_Hippocampus").mkdir(exist_ok=True)
    return [word.replace("PATH", str(folder)) for word in words if "=" in word]


def is_of_user(words: list[str]) -> bool:
    return any(word.startswith(USER_PATHS) for word in words)


def test_training_commands_compose(tmp_path: Path) -> None:
    found = [words for words in commands() if "train.py" in words[1] and "chkpt=2" not in words]
    assert len(found) >= 8
    for words in found:
        if not is_of_user(words) and not any(word.startswith("resume=") for word in words):
            for job in compose.sweep(overrides(words, tmp_path)):
                compose.compose(job)


def test_other_commands_parse(tmp_path: Path) -> None:
    found = [words for words in commands() if words[2:3] == ["unet3d"]]
    assert {words[3] for words in found} >= {"predict", "check-data", "memory", "compare"}
    for words in found:
        arguments = command_parser().parse_args(words[3:])
        for job in compose.sweep(overrides(getattr(arguments, "overrides", []), tmp_path)):
            compose.compose(job)


def test_every_named_choice_exists() -> None:
    rows = re.findall(r"`(model|loss|optim)=` ((?:`\w+` ?)+)", TEXTS["docs/running.md"])
    assert {group for group, _ in rows} == {"model", "loss", "optim"}
    for group, names in rows:
        found = {path.stem for path in (ROOT / "configs" / group).glob("*.yaml")}
        assert set(re.findall(r"`(\w+)`", names)) == found


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "experiment").glob("*.yaml")), ids=lambda path: path.stem)
def test_an_experiment_begins_with_its_command_and_is_listed(path: Path, tmp_path: Path) -> None:
    package, command, *about = [line for line in path.read_text().splitlines() if line.startswith("#")]
    words = shlex.split(command.removeprefix("# "))
    assert package == "# @package _global_" and words[:3] == ["python", "train.py", f"experiment={path.stem}"]
    given = overrides(words, tmp_path)
    for job in compose.sweep([*given, *compose.added_sweep(given)]):
        compose.compose(job)
    assert re.search(r"\d (minutes|hours|days)", " ".join(about)), "how long it takes"
    assert f"](../configs/experiment/{path.name})" in TEXTS["docs/experiments.md"]


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_somewhere(page: str) -> None:
    targets = re.findall(r"\]\(([^)#]+)\)", TEXTS[page])
    assert not [t for t in targets if "://" not in t and not ((ROOT / page).parent / t).exists()]


def test_every_fault_names_tests_that_exist() -> None:
    assert len(named_tests("docs/faults.md")) >= 150
    check_named_tests("docs/faults.md")


def test_the_python_of_the_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Block by block, as a reader would; what is trained is tiny, and then takes the place of net.pt."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    segment, train_it, explain, step, config = re.findall(r"```python\n(.*?)```", TEXTS["docs/python.md"], re.DOTALL)
    names: dict[str, Any] = {"array": np.random.default_rng(0).random((20, 20, 16), np.float32)}
    small = train_it.replace('"steps=20", "eval_every=10"', ", ".join(f'"{word}"' for word in TINY[1:]))
    assert small != train_it
    exec(f"import unet3d\n{small}", names)
    assert capsys.readouterr().out.splitlines()[-1].endswith("best.pt")
    shutil.copy(names["run"].snapshot, "net.pt")
    shutil.copy(next(tmp_path.glob("data/phantom/*/imagesTr/*.nii.gz")), "case.nii.gz")
    exec(segment, names)
    assert names["labels"].shape == names["image"].shape == (20, 20, 16)
    exec(explain, names)
    assert capsys.readouterr().out.startswith("SegResNet: ")
    for block in (step, config):  # each prints a number: a loss, or bytes
        exec(block, {})
        assert float(capsys.readouterr().out) > 0


@pytest.mark.parametrize("output", docs_outputs.OUTPUTS, ids=lambda output: f"{output.page} {output.block}")
def test_an_output_that_a_script_compares_is_that_of_a_command_in_the_pages(output: docs_outputs.Output) -> None:
    """`python tests/bench/docs_outputs.py` runs the commands and compares what they print, by hand."""
    assert docs_outputs.block_of(TEXTS[output.page], output.block)
    assert " ".join(output.command) in " ".join(TEXTS.values()).replace('"', "")


@pytest.mark.slow
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Its cells in order, on fewer and smaller volumes; it is kept with its outputs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    cells = json.loads((ROOT / "docs" / "tour.ipynb").read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    small = '"data.phantom.cases=4", "data.phantom.shape=[32,32,16]", "steps=4", "eval_every=2"'
    assert code[0].count('"steps=60", "eval_every=30"') == 1
    code[0] = code[0].replace('"steps=60", "eval_every=30"', small)
    names: dict[str, Any] = {}
    for cell in code:
        exec(compile(cell, "docs/tour.ipynb", "exec"), names)
    assert names["labels"].shape == (32, 32, 16) and (tmp_path / "layers.png").stat().st_size > 5000
    assert "SegResNet: " in capsys.readouterr().out and names["predicted"] == names["measured"]
    assert all(cell["outputs"] for cell in cells if cell["cell_type"] == "code")
    plt.close("all")

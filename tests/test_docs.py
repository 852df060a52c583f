"""README and docs: commands and code that are shown run, links lead somewhere, rows are those of tests."""

import json
import re
import shlex
import shutil
import sys
import tomllib
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pytest
import yaml
from bench import docs_outputs
from promises import outdated, promise
from training import PLAIN, ROOT, TINY, face, planned, train

import unet3d
from unet3d.cli.main import command_parser
from unet3d.config import compose
from unet3d.memory import remedies as search_of_ways
from unet3d.planning import steps

PAGES = [
    *("README.md", "CONTRIBUTING.md", "SECURITY.md", "data/README.md"),
    *sorted(f"docs/{p.name}" for p in ROOT.glob("docs/*.md")),
]
TEXTS = {page: (ROOT / page).read_text() for page in PAGES}
OF_PROGRAM = r"    \S.*(train\.py|-m unet3d)"
WITH_COMMANDS = [page for page, text in TEXTS.items() if re.search(f"^{OF_PROGRAM}", text, re.MULTILINE)]
EXPERIMENTS = sorted((ROOT / "configs" / "experiment").glob("*.yaml"))
SMALL = {  # takes the place of what a page shows
    word.partition("=")[0]: word
    for word in (*TINY[1:], *PLAIN, "model.features=[4]", "model.decoder=null", "model.classes=null")
}
FREE = ("model.features", "model.decoder")  # not of a network that brings its own
ELSEWHERE = {  # what part of a command says that another test runs it: which
    "chkpt=2": "test_options.py",
    "-m pytest": "CI",
    "pip install": "CI",
    "torchrun": "test_ranks.py",
    "data.fold=0,1,2,3,4": "report/test_compare.py",
    "hydra/launcher=": "test_sweep.py",
    "plan=plan.yaml": "planning/test_plan_of_data.py",
    "plan --network": "planning/test_network_table.py, of small patches",
    "recompute=none,lean,tiles": "memory/test_command.py",
    "plan --module": "planning/test_network_table.py, of small patches",
    "experiment=five_folds": "test_cross_validation.py",
    "-m unet3d folds": "test_cross_validation.py",
    "field_networks:": "by hand: its prediction takes a while",
    "experiment=cicek2016": "composed here, docs/experiments.md has its results",
    "benchmarks/": "by hand",
    "tensorboard --logdir": "test_loggers.py reads what is written",
}
MODULES = (  # that pages show, by name
    (("docs/extending.md", "docs/recompute.md"), "mine.py"),
    (("docs/coming-from-monai.md",), "monai_parts.py"),
)


def shown(page: str) -> list[str]:
    """The commands of a page, one a line, without the set-up before `&&`."""
    lines = [line.strip() for line in TEXTS[page].splitlines() if re.match(OF_PROGRAM, line)]
    return [line.split(" && ")[-1].removeprefix("$ ") for line in lines]


def is_run(line: str) -> bool:
    return not any(part in line for part in ELSEWHERE)


def age(folder: Path) -> tuple[bool, int]:
    """Puts runs that trained last; of two in one second, the name does not say which began first."""
    return any(folder.glob("**/*.pt")), folder.stat().st_mtime_ns


def words_of(line: str, place: Path) -> list[str]:
    """The words behind the program, with this machine's paths."""
    words = shlex.split(line.partition("python ")[2])
    newest = {name: str(max(place.glob(f"{name}/*/*"), default="", key=age)) for name in ("outputs", "multirun")}
    for name, path in newest.items():
        words = [word.replace(f"{name}/DATE/TIME-ID", path) for word in words]
    words = ["data=decathlon" if word == "data=nnunet" else word for word in words]
    if "data.fold=0" in words:
        words.append("data.folds=4")  # there are four cases
    return [word.replace("PATH/Task04_Hippocampus", "PATH").replace("PATH", str(place / "data")) for word in words]


def small(words: list[str]) -> list[str]:
    kept = [word for word in words if word.partition("=")[0] not in SMALL]
    own = any(word.startswith(("model.path=", "resume=")) for word in words)
    added = [] if any(word.startswith("resume=outputs") for word in words) else SMALL.items()
    return kept + [word for name, word in added if not (own and name in FREE)]


@pytest.fixture
def place(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Data in the layouts that pages name, the files that they show, and a finished run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    shutil.copytree(finished, tmp_path / "outputs" / "2020-01-01" / "00-00-00-000000")
    shutil.copytree(finished.parent / "data" / "phantom", tmp_path / "phantom")
    (made,) = (tmp_path / "phantom").iterdir()
    shutil.copytree(made, tmp_path / "data")
    shutil.copytree(made / "imagesTr", tmp_path / "data" / "imagesTs")
    shutil.copy(finished / "checkpoints" / "best.pt", "net.pt")
    for pages, name in MODULES:
        texts = "".join(TEXTS[page] for page in pages)
        blocks = re.findall(rf"```py(?:thon)?\n# {name}\n(.*?)```", texts, re.DOTALL)
        (tmp_path / name).write_text("\n".join(blocks))
    (tmp_path / "my_configs" / "loss").mkdir(parents=True)
    (tmp_path / "my_configs" / "loss" / "mine.yaml").write_text("path: mine:focal\n")
    (tmp_path / "plan.yaml").write_text("options: {batch: 2}")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("WITH_BUDGET", "PLANS"):  # ways with recompute, whose search takes most of the time
        monkeypatch.setattr(search_of_ways, name, ())
    monkeypatch.setattr(steps, "measured_step", lambda _: 0.5)  # planning's tests measure
    return tmp_path


@promise(
    "What scripts rely on",
    "commands of README.md and docs/",
    "each runs, or is composed and parsed where it would take long",
)
@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[pytest.mark.slow] * (page != "data/README.md")) for page in WITH_COMMANDS]
)
def test_the_commands_of_a_page_run(page: str, place: Path) -> None:
    """In its order, on volumes of a few voxels. Sweeps only predict here; test_sweep.py trains some."""
    for line in filter(is_run, shown(page)):
        program, *words = words_of(line, place)
        if program == "-m":
            arguments = small(words[1:]) if words[1] == "memory" and "--module" not in words else words[1:]
            assert face(*arguments) == 0, line
            continue
        if not words[0].startswith("resume="):
            words = small(words)
            if "data.root=" not in line and "init=" not in line:
                words.append(f"data.root={place / 'phantom'}")
        done = train(place, *words, *["dry_run=true"] * ("-m" in words))
        assert done.code == 0, (line, done.err)


@promise("What scripts rely on", "commands of README.md and ...")
@promise("Config", "a YAML file or ...")
@pytest.mark.slow
def test_commands_that_would_take_long_compose_and_parse(place: Path) -> None:
    left = [line for page in WITH_COMMANDS for line in shown(page) if not is_run(line) and line.startswith("python ")]
    assert {part for part in ELSEWHERE if any(part in line for line in left)} >= {"hydra/launcher=", "plan=plan.yaml"}
    for line in left:
        program, *words = words_of(line, place)
        if program == "-m" and words[0] == "unet3d":
            options = getattr(command_parser().parse_args(words[1:]), "overrides", [])
            compose.compose(compose.sweep([word for word in options if not word.startswith("time=")])[0])
        elif program == "train.py" and "chkpt=2" not in words:
            assert planned(words), line


@pytest.mark.slow
@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_an_experiment_begins_with_its_command_and_is_listed(path: Path, place: Path) -> None:
    command = re.search(r"^# (python .*)$", path.read_text(), re.MULTILINE)
    assert command is not None
    program, *words = words_of(command[1], place)
    assert [program, words[0]] == ["train.py", f"experiment={path.stem}"]
    assert planned(words)
    assert f"](../configs/experiment/{path.name})" in TEXTS["docs/experiments.md"]


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_somewhere(page: str) -> None:
    targets = re.findall(r"\]\(([^)#]+)\)", TEXTS[page])
    assert not [t for t in targets if "://" not in t and not ((ROOT / page).parent / t).exists()]


def test_the_index_lists_every_page_and_a_page_every_choice() -> None:
    listed_pages = set(re.findall(r"\]\(([\w/.-]+)\)", TEXTS["docs/README.md"]))
    pages = {path.name for path in (ROOT / "docs").iterdir() if path.suffix in (".md", ".ipynb")}
    assert pages - {"README.md"} <= listed_pages
    named = re.findall(r"`(?:model=|optim=)?([\w=]+)`", TEXTS["docs/running.md"])
    assert {*compose.choices("model"), *compose.choices("optim")} <= {*named}


def test_a_citation_has_what_its_format_needs_and_names_this_version() -> None:
    """Keys that version 1.2.0 of the Citation File Format requires, and those that pyproject.toml has too."""
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert citation["cff-version"] == "1.2.0" and citation["type"] == "software" and citation["message"]
    assert citation["authors"] and all("name" in author or "family-names" in author for author in citation["authors"])
    assert (str(citation["version"]), citation["license"]) == (project["version"], project["license"])


def test_what_contributing_names_is_in_its_room() -> None:
    """A row of "where is ..." has rooms, and after each the names of functions and classes that are defined there."""
    rows = [line for line in TEXTS["CONTRIBUTING.md"].splitlines() if "](unet3d/" in line and line.startswith("| ")]
    assert len(rows) >= 13
    for row in rows:
        _, _, room, names, _ = row.split("|")
        linked = re.findall(r"\((unet3d/\w+)\)", room + names)
        code = "\n".join(path.read_text() for folder in linked for path in sorted((ROOT / folder).rglob("*.py")))
        for name in re.findall(r"`(\w+)`", names):
            assert re.search(rf"^(def|class) {name}\b", code, re.MULTILINE), (name, row)


def test_the_pages_have_the_promises_that_tests_are_marked_with() -> None:
    assert outdated() == [], "run: python tests/promises.py --write"


@pytest.mark.parametrize("output", docs_outputs.OUTPUTS, ids=lambda output: f"{output.page} {output.command}")
def test_an_output_that_a_script_compares_is_of_a_command_in_the_pages(output: docs_outputs.Output) -> None:
    """`python tests/bench/docs_outputs.py` runs the commands and compares what they print, by hand."""
    assert output.page in TEXTS
    assert " ".join(output.command) in " ".join(" ".join(TEXTS.values()).split()).replace('"', "")


# --- Python


def python_of(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", TEXTS[page], re.DOTALL)


TRAINING = ", ".join(f'"{word}"' for word in (*TINY[1:], *PLAIN))
SMALLER = {  # than what pages show
    '"steps=20", "eval_every=10"': TRAINING,
    '"steps=60", "eval_every=30"': TRAINING,
    "(1, 1, 32, 32, 32)": "(1, 1, 8, 8, 8)",
    "2, 1, 32, 32, 32": "2, 1, 32, 16, 16",
    "init_filters=8, ": "init_filters=8, blocks_down=(1, 1), blocks_up=(1,), ",
    "(2, 1, 64, 64, 32)": "(1, 1, 16, 16, 16)",
}


def executed(code: str, names: dict[str, Any]) -> dict[str, Any]:
    """Run code that a page shows, on less; return all names."""
    for large, less in SMALLER.items():
        code = code.replace(large, less)
    exec(code, names)
    return names


@promise("What scripts rely on", "the Python that the pages show, the notebook", "runs")
@pytest.mark.slow
def test_the_python_of_the_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Block by block; the training comes first, is tiny, and what it trains takes the place of net.pt."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    blocks = python_of("docs/python.md")
    (training,) = (block for block in blocks if "unet3d.train(" in block)
    names = {"array": np.random.default_rng(0).random((20, 20, 16), np.float32), "affine": np.eye(4), "unet3d": unet3d}
    executed(training, names)
    assert str(names["run"].checkpoint) in capsys.readouterr().out
    shutil.copy(names["run"].checkpoint, "net.pt")
    shutil.copy(next(tmp_path.glob("data/phantom/*/imagesTr/*.nii.gz")), "case.nii.gz")
    for block in blocks:
        if block != training:
            executed(block, names)
            assert capsys.readouterr().out or "print(" not in block
    assert names["labels"].shape == names["image"].shape == names["probabilities"].shape[1:] == (20, 20, 16)
    assert names["found"].peak_bytes > 0 and names["result"].loss > 0


@promise("What scripts rely on", "the Python that the ...")
def test_the_python_of_recompute_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = python_of("docs/recompute.md")
    names = executed(block.replace("32, 32, 32", "16, 8, 8"), {})
    assert all(parameter.grad is not None for parameter in names["model"].parameters())
    assert "MiB" in capsys.readouterr().out


MINE = """from torch import nn


def network() -> nn.Module:
    return nn.Sequential(nn.Conv3d(1, WIDTH, 3, padding=1), nn.Conv3d(WIDTH, 3, 1))
"""


@promise("What scripts rely on", "the Python that the ...")
@pytest.mark.slow
@pytest.mark.parametrize(("width", "code"), [("64", 0), ("1280", 1)])
def test_the_memory_check_of_the_page_runs(
    width: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The workflow's last line, and the test for pytest, of a wide network or not."""
    mine = ModuleType("mine")
    exec(MINE.replace("WIDTH", width), mine.__dict__)
    monkeypatch.setitem(sys.modules, "mine", mine)
    (workflow,) = re.findall(r"```yaml\n(.*?)```", TEXTS["docs/memory.md"], re.DOTALL)
    *_, last = yaml.safe_load(workflow)["jobs"]["memory"]["steps"]
    assert face(*shlex.split(last["run"])[3:]) == code and capsys.readouterr().out.count("\n") == 1
    (block,) = python_of("docs/memory.md")
    with pytest.raises(AssertionError, match="Sequential") if code else nullcontext():
        executed(block, {})["test_the_network_fits_its_card"]()


@promise("What scripts rely on", "the Python that the ...")
@pytest.mark.slow
def test_the_figure_of_the_tutorial_is_drawn(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    for name in ("tiny", "lean"):
        shutil.copytree(finished, tmp_path / "runs" / name)
    (block,) = python_of("docs/tutorial.md")
    executed(block, {})
    assert (tmp_path / "figure.pdf").read_bytes().startswith(b"%PDF")
    plt.close("all")


@promise("What scripts rely on", "the Python that the ...")
@pytest.mark.slow
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Its cells in order, on fewer and smaller volumes; it is kept with its outputs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    cells = json.loads((ROOT / "docs" / "tour.ipynb").read_text())["cells"]
    cells = [cell for cell in cells if cell["cell_type"] == "code"]
    code = ["".join(cell["source"]) for cell in cells]
    pages = "".join(code) + "".join(TEXTS.values())
    assert not [large for large in SMALLER if large not in pages]
    names: dict[str, Any] = {}
    for cell in code:
        executed(cell, names)
    assert names["labels"].shape == (20, 20, 16) and (tmp_path / "layers.png").stat().st_size > 5000
    assert "SegResNet" in capsys.readouterr().out and names["predicted"] == names["measured"]
    assert all(cell["outputs"] for cell in cells)
    plt.close("all")

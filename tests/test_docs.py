"""README and docs: commands and code that are shown run, links lead somewhere, rows are those of tests."""

import json
import os
import re
import shlex
import shutil
import subprocess
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
from guards import no, without
from promises import outdated, promise
from training import PLAIN, TINY, face

import unet3d
from unet3d.base.errors import UserError
from unet3d.cli.main import command_parser
from unet3d.config import compose

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    *("README.md", "CONTRIBUTING.md", "SECURITY.md", "data/README.md"),
    *sorted(f"docs/{p.name}" for p in ROOT.glob("docs/*.md")),
]
TEXTS = {page: (ROOT / page).read_text() for page in PAGES}
SMALL = (*TINY[1:], *PLAIN)  # takes the place of a page's own options
USER_PATHS = ("init=", "loss.path=", "model.path=", "--config-dir", "--model", "loggers=", "data.transforms=")


def commands() -> list[list[str]]:
    """Every train.py and unet3d command in an indented block, split into words."""
    lines = [line.strip() for text in TEXTS.values() for line in text.splitlines() if line.startswith("    ")]
    parts = [part.strip().removeprefix("$ ") for line in lines for part in line.split("&&")]
    found = [shlex.split(part) for part in parts if "train.py" in part or "-m unet3d" in part]
    return [words for words in found if words[0].endswith("python")]


def overrides(words: list[str], folder: Path) -> list[str]:
    """The options in a command; PATH and plan.yaml become what is there."""
    (folder / "Task04_Hippocampus").mkdir(exist_ok=True)
    (folder / "plan.yaml").write_text("options: {batch: 2}")
    options = [word for word in words if "=" in word and not word.startswith("time=")]
    in_folder = [word.replace("plan=plan.yaml", f"plan={folder / 'plan.yaml'}") for word in options]
    return [word.replace("PATH", str(folder)) for word in in_folder]


def is_of_user(words: list[str]) -> bool:
    return any(word.startswith(USER_PATHS) for word in words)


def compose_jobs(words: list[str], folder: Path, skips: bool = False) -> None:
    """Compose each job of a command; one that `skips` goes on without those that make no sense, if one does."""
    given = overrides(words, folder)
    jobs = compose.sweep(given)
    refusals = []
    for job in jobs:
        try:
            compose.compose(job)
        except UserError as error:
            refusals.append(error)
    if refusals and not (skips and len(refusals) < len(jobs)):
        raise refusals[0]


@promise("What scripts rely on", "commands of README.md and ...")
@promise("Config", "a YAML file or ...")
@pytest.mark.slow
@without("unet3d.config.rules.stages", no)
def test_training_commands_compose(tmp_path: Path) -> None:
    found = [words for words in commands() if "train.py" in words[1] and "chkpt=2" not in words]
    assert found
    for words in found:
        if not is_of_user(words) and not any(word.startswith("resume=") for word in words):
            compose_jobs(words, tmp_path)


@promise("What scripts rely on", "commands of README.md and ...")
@promise("Config", "a YAML file or ...")
@pytest.mark.slow
def test_other_commands_parse(tmp_path: Path) -> None:
    found = [words for words in commands() if words[2:3] == ["unet3d"]]
    assert {words[3] for words in found} >= {"predict", "check-data", "memory", "compare"}
    for words in found:
        arguments = command_parser().parse_args(words[3:])
        compose_jobs(getattr(arguments, "overrides", []), tmp_path, skips=words[3] == "memory")


@pytest.mark.parametrize("group", ["model", "optim"])
def test_every_choice_is_named(group: str) -> None:
    named = {name.removeprefix(f"{group}=") for name in re.findall(r"`([\w=]+)`", TEXTS["docs/running.md"])}
    assert named >= {*compose.choices(group)}


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "experiment").glob("*.yaml")), ids=lambda path: path.stem)
def test_an_experiment_begins_with_its_command_and_is_listed(path: Path, tmp_path: Path) -> None:
    comments = [line.removeprefix("# ") for line in path.read_text().splitlines() if line.startswith("#")]
    words = shlex.split(next(line for line in comments if line.startswith("python ")))
    assert words[:3] == ["python", "train.py", f"experiment={path.stem}"]
    given = overrides(words, tmp_path)
    composed: set[str] = set()
    added = compose.added_sweep(given, [compose.compose_tree(job) for job in compose.sweep(given)])
    for job in compose.sweep([*given, *added]):
        if not composed.issuperset(job):  # each value of a sweep, not each combination
            compose.compose(job)
            composed.update(job)
    assert f"](../configs/experiment/{path.name})" in TEXTS["docs/experiments.md"]


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_somewhere(page: str) -> None:
    targets = re.findall(r"\]\(([^)#]+)\)", TEXTS[page])
    assert not [t for t in targets if "://" not in t and not ((ROOT / page).parent / t).exists()]


def test_the_index_lists_every_page() -> None:
    listed_pages = set(re.findall(r"\]\(([\w/.-]+)\)", TEXTS["docs/README.md"]))
    pages = {path.name for path in (ROOT / "docs").iterdir() if path.suffix in (".md", ".ipynb")}
    assert pages - {"README.md"} <= listed_pages


def test_a_citation_has_what_its_format_needs_and_names_this_version() -> None:
    """Keys that version 1.2.0 of the Citation File Format requires, and those that pyproject.toml has too."""
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert citation["cff-version"] == "1.2.0" and citation["type"] == "software" and citation["message"]
    assert citation["authors"] and all("name" in author or "family-names" in author for author in citation["authors"])
    assert (str(citation["version"]), citation["license"]) == (project["version"], project["license"])
    assert citation["title"].startswith(project["name"])


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


@promise(
    "What scripts rely on",
    "files of a run folder",
    "their names, the columns of scores.csv, and the keys of metrics.jsonl, memory.json, split.json and env.json",
)
@promise("What scripts rely on", "exit code 0", "done")
def test_a_run_folder_has_the_files_and_names_that_scripts_read(finished: Path) -> None:
    """All that docs/running.md lists, but for what a sweep, `init=` and TensorBoard add."""
    folders = {"checkpoints", "figures", "memory", "predictions", "wandb"}
    texts = {"STATUS", "config.yaml", "env.json", "memory.json", "metrics.csv", "metrics.jsonl", "overrides.yaml"}
    texts |= {"report.html", "scores.csv", "split.json"}
    assert {path.name for path in finished.iterdir()} == folders | texts | {".lock"}
    (table,) = re.findall(r"\| file \| content \|\n(.*?)\n\n", TEXTS["docs/running.md"], re.DOTALL)
    assert not [name for name in folders | texts if name not in table]
    assert {path.name for path in (finished / "checkpoints").iterdir()} == {"best.pt", "last.pt", "previous.pt"}
    assert (finished / "STATUS").read_text() == "done\nexit code 0\n"
    classes = ("organ", "vessel", "lesion")
    scores = [f"{score}/{name}" for score in ("dice", "iou", "hd95_mm") for name in classes]
    assert (finished / "scores.csv").read_text().splitlines()[0] == ",".join(["case", *scores])
    records = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    assert {"step", "train/loss", "train/lr", "time/step_s", "val/dice_mean", "val/dice/organ"} <= set().union(*records)
    read = {name: json.loads((finished / f"{name}.json").read_text()) for name in ("memory", "split", "env")}
    assert {"parameters", "predicted", "measured", "error_bytes"} <= {*read["memory"]}
    assert {"peak_bytes", "phases", "categories", "levels", "layers", "moment"} <= {*read["memory"]["measured"]}
    assert {*read["split"]} == {"train", "val", "data"} and {"unet3d", "torch", "commit", "device"} <= {*read["env"]}


def make_small(code: str, *changes: tuple[str, str]) -> str:
    """Replace what a page shows by something smaller. Each must be there."""
    for shown, smaller in changes:
        assert shown in code, shown
        code = code.replace(shown, smaller)
    return code


def listed(words: tuple[str, ...]) -> str:
    return ", ".join(f'"{word}"' for word in words)


@promise("What scripts rely on", "the Python that the pages show, the notebook", "runs")
@pytest.mark.slow
def test_the_python_of_the_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Block by block; the training comes first, is tiny, and what it trains takes the place of net.pt."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    blocks = re.findall(r"```python\n(.*?)```", TEXTS["docs/python.md"], re.DOTALL)
    (training,) = (block for block in blocks if "unet3d.train(" in block)
    names: dict[str, Any] = {"array": np.random.default_rng(0).random((20, 20, 16), np.float32), "unet3d": unet3d}
    names["affine"] = np.eye(4)
    exec(make_small(training, ('"steps=20", "eval_every=10"', listed(SMALL))), names)
    smaller = {
        "(1, 1, 32, 32, 32)": "(1, 1, 8, 8, 8)",
        "2, 1, 32, 32, 32": "2, 1, 32, 16, 16",
        "init_filters=8, ": "init_filters=8, blocks_down=(1, 1), blocks_up=(1,), ",
    }
    pages_code = "".join(blocks)
    assert all(shown in pages_code for shown in smaller)
    assert str(names["run"].checkpoint) in capsys.readouterr().out
    shutil.copy(names["run"].checkpoint, "net.pt")
    shutil.copy(next(tmp_path.glob("data/phantom/*/imagesTr/*.nii.gz")), "case.nii.gz")
    for block in blocks:
        if block != training:
            for shown, less in smaller.items():
                block = block.replace(shown, less)
            exec(block, names)
            assert capsys.readouterr().out or "print(" not in block
    assert names["labels"].shape == names["image"].shape == names["probabilities"].shape[1:] == (20, 20, 16)
    assert names["found"].peak_bytes > 0 and names["result"].loss > 0


@promise("What scripts rely on", "the Python that the ...")
def test_the_python_of_recompute_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", TEXTS["docs/recompute.md"], re.DOTALL)
    names: dict[str, Any] = {}
    exec(block.replace("32, 32, 32", "16, 8, 8"), names)
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
    width: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The workflow's last line (the one that fails in a shell), and the test for pytest, of a wide network or not."""
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(MINE.replace("WIDTH", width))
    mine = ModuleType("mine")
    exec(MINE.replace("WIDTH", width), mine.__dict__)
    monkeypatch.setitem(sys.modules, "mine", mine)
    (workflow,) = re.findall(r"```yaml\n(.*?)```", TEXTS["docs/memory.md"], re.DOTALL)
    steps = yaml.safe_load(workflow)["jobs"]["memory"]["steps"]
    line = steps[-1]["run"]
    if code:
        line = line.replace("python", shlex.quote(sys.executable), 1)
        paths = os.environ | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(line, shell=True, env=paths, capture_output=True, text=True)
        assert done.returncode == code and done.stdout.count("\n") == 1, done.stderr
    else:
        _, _, _, *words = shlex.split(line)
        assert face(*words) == 0 and capsys.readouterr().out.count("\n") == 1
    (block,) = re.findall(r"```python\n(.*?)```", TEXTS["docs/memory.md"], re.DOTALL)
    names: dict[str, Any] = {}
    exec(block, names)
    with pytest.raises(AssertionError, match="Sequential") if code else nullcontext():
        names["test_the_network_fits_its_card"]()


@promise("What scripts rely on", "the Python that the ...")
@pytest.mark.slow
def test_the_figure_of_the_tutorial_is_drawn(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    for name in ("tiny", "lean"):
        shutil.copytree(finished, tmp_path / "runs" / name)
    (block,) = re.findall(r"```python\n(.*?)```", TEXTS["docs/tutorial.md"], re.DOTALL)
    exec(block, {})
    assert (tmp_path / "figure.pdf").read_bytes().startswith(b"%PDF")
    plt.close("all")


@pytest.mark.parametrize("output", docs_outputs.OUTPUTS, ids=lambda output: f"{output.page} {output.command}")
def test_an_output_that_a_script_compares_is_of_a_command_in_the_pages(output: docs_outputs.Output) -> None:
    """`python tests/bench/docs_outputs.py` runs the commands and compares what they print, by hand."""
    assert output.page in TEXTS
    assert " ".join(output.command) in " ".join(" ".join(TEXTS.values()).split()).replace('"', "")


@promise("What scripts rely on", "the Python that the ...")
@pytest.mark.slow
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Its cells in order, on fewer and smaller volumes; it is kept with its outputs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    cells = json.loads((ROOT / "docs" / "tour.ipynb").read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    code[0] = make_small(code[0], ('"steps=60", "eval_every=30"', listed(SMALL)))
    names: dict[str, Any] = {}
    for cell in code:
        smaller = cell.replace("(2, 1, 64, 64, 32)", "(1, 1, 16, 16, 16)")
        exec(compile(smaller, "docs/tour.ipynb", "exec"), names)
    assert names["labels"].shape == (20, 20, 16) and (tmp_path / "layers.png").stat().st_size > 5000
    assert "SegResNet" in capsys.readouterr().out and names["predicted"] == names["measured"]
    assert all(cell["outputs"] for cell in cells if cell["cell_type"] == "code")
    plt.close("all")

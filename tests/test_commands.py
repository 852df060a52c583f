"""Every command of the pages is run, in the order in which a page shows them, on volumes of a few voxels."""

import re
import shlex
import shutil
from pathlib import Path

import pytest
from promises import promise
from test_docs import TEXTS
from training import PLAIN, TINY, face, train

from unet3d.memory import remedies as search_of_ways
from unet3d.planning import steps

SMALL = {  # takes the place of what a page shows
    word.partition("=")[0]: word
    for word in (*TINY[1:], *PLAIN, "model.features=[4]", "model.decoder=null", "model.classes=null")
}
FREE = ("model.features", "model.decoder")  # not of a network that brings its own
ELSEWHERE = {  # what part of a command says that another test runs it: which
    "chkpt=2": "test_docs.py",
    "-m pytest": "CI",
    "pip install": "CI",
    "torchrun": "test_ranks.py",
    "data.fold=0,1,2,3,4": "test_folds.py",
    "hydra/launcher=": "test_launchers.py",
    "plan=plan.yaml": "planning/test_plan_of_data.py",
    "plan --network": "planning/test_network_table.py, of small patches",
    "recompute=none,lean,tiles": "memory/test_command.py",
    "plan --module": "planning/test_network_table.py, of small patches",
    "experiment=five_folds": "test_cross_validation.py",
    "-m unet3d folds": "test_cross_validation.py",
    "field_networks:": "by hand: its prediction takes a while",
    "experiment=cicek2016": "test_docs.py composes it, docs/experiments.md has its results",
    "benchmarks/": "by hand",
    "tensorboard --logdir": "test_loggers.py reads what is written",
}
PAGES = [page for page, text in TEXTS.items() if re.search(r"^    .*(train\.py|-m unet3d)", text, re.MULTILINE)]


def shown(page: str) -> list[str]:
    """The commands of a page, one a line, without the set-up before `&&`."""
    lines = [line.strip() for line in TEXTS[page].splitlines() if re.match(r"    \S.*(train\.py|-m unet3d)", line)]
    return [line.split(" && ")[-1].removeprefix("$ ") for line in lines]


def to_run(page: str) -> list[str]:
    return [line for line in shown(page) if not any(part in line for part in ELSEWHERE)]


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


MODULES = (  # that pages show, by name
    (("docs/extending.md", "docs/recompute.md"), "mine.py"),
    (("docs/coming-from-monai.md",), "monai_parts.py"),
)


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
    "page", [pytest.param(page, marks=[pytest.mark.slow] * (page != "data/README.md")) for page in PAGES]
)
def test_the_commands_of_a_page_run(page: str, place: Path) -> None:
    """Sweeps only predict here; test_sweep.py and test_launchers.py train some."""
    for line in to_run(page):
        program, *words = words_of(line, place)
        if program == "-m":
            arguments = small(words[1:]) if words[1] == "memory" and "--module" not in words else words[1:]
            assert face(*arguments) == 0, line
            continue
        folder = "" if "data.root=" in line or "init=" in line else f"data.root={place / 'phantom'}"
        extra = ["dry_run=true"] if "-m" in words else []
        given = small(words) if not words[0].startswith("resume=") else words
        added = [folder] * bool(folder and not words[0].startswith("resume="))
        done = train(place, *given, *added, *extra)
        assert done.code == 0, (line, done.err)


@promise("What scripts rely on", "commands of README.md and ...")
def test_each_command_that_is_not_run_here_is_run_elsewhere() -> None:
    left = [line for page in PAGES for line in shown(page) if line not in to_run(page)]
    assert {part for part in ELSEWHERE if any(part in line for line in left)} >= {"torchrun", "hydra/launcher="}
    assert sum(len(to_run(page)) for page in PAGES) >= 15

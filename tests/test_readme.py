"""What the README says can be run, runs; what it points to, exists."""

import re
import shlex
from pathlib import Path

import pytest
from training import face, train

from unet3d import compose
from unet3d.cli.main import command_parser

ROOT = Path(__file__).resolve().parent.parent
PAGES = ["README.md", "CONTRIBUTING.md", "SECURITY.md", "data/README.md"]
TEXT = (ROOT / "README.md").read_text()


def commands() -> list[list[str]]:
    """Every train.py and unet3d command in an indented block, split into words."""
    lines = [line.strip() for line in TEXT.splitlines() if line.startswith("    ")]
    parts = [part.strip().removeprefix("$ ") for line in lines for part in line.split("&&")]
    return [shlex.split(part) for part in parts if "train.py" in part or "-m unet3d" in part]


def overrides(words: list[str], folder: Path) -> list[str]:
    return [word.replace("PATH", str(folder)) for word in words if "=" in word]


def test_k3_training_commands_compose(tmp_path: Path) -> None:
    (tmp_path / "Task04_Hippocampus").mkdir()
    found = [words for words in commands() if "train.py" in words[1] and "chkpt=2" not in words]
    assert len(found) >= 3
    for words in found:
        for job in compose.sweep(overrides(words, tmp_path)):
            compose.compose(job)


def test_other_commands_parse(tmp_path: Path) -> None:
    found = [words for words in commands() if "unet3d" in words]
    assert {words[words.index("unet3d") + 1] for words in found} >= {"predict", "check-data"}
    for words in found:
        asked = command_parser().parse_args(words[words.index("unet3d") + 1 :])
        if "overrides" in asked:
            (tmp_path / "Task04_Hippocampus").mkdir(exist_ok=True)
            given = [word for word in asked.overrides if "=" in word]
            for job in compose.sweep(overrides(given, tmp_path)):
                compose.compose(job)


def test_the_mistake_shown_is_the_mistake_made() -> None:
    with pytest.raises(compose.UserError) as caught:
        compose.compose(["chkpt=2"])
    assert f"    error: {caught.value}\n" in TEXT


def test_every_choice_named_exists() -> None:
    rows = re.findall(r"`(model|loss|optim)=` ((?:`\w+` ?)+)", TEXT)
    assert {group for group, _ in rows} == {"model", "loss", "optim"}
    for group, names in rows:
        found = {path.stem for path in (ROOT / "configs" / group).glob("*.yaml")}
        assert set(re.findall(r"`(\w+)`", names)) == found


EXPERIMENTS = sorted((ROOT / "configs" / "experiment").glob("*.yaml"))


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_an_experiment_opens_with_its_command_and_is_in_the_readmes_table(path: Path, tmp_path: Path) -> None:
    (tmp_path / "Task04_Hippocampus").mkdir()
    package, command, *about = [line for line in path.read_text().splitlines() if line.startswith("#")]
    words = shlex.split(command.removeprefix("# "))
    assert package == "# @package _global_" and words[:3] == ["python", "train.py", f"experiment={path.stem}"]
    said = overrides(words, tmp_path)
    for job in compose.sweep([*said, *compose.added_sweep(said)]):
        compose.compose(job)
    assert re.search(r"\d (minutes|hours|days)", " ".join(about)), "how long it takes"
    assert f"](configs/experiment/{path.name})" in TEXT


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_somewhere(page: str) -> None:
    targets = re.findall(r"\]\(([^)#]+)\)", (ROOT / page).read_text())
    missing = [t for t in targets if "://" not in t and not ((ROOT / page).parent / t).exists()]
    assert not missing


@pytest.mark.slow
def test_the_forum_answer_shown_is_the_answer_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Line by line: the README leaves some out."""
    (command,) = [words for words in commands() if "where" in words]
    monkeypatch.chdir(tmp_path)
    assert face(*command[3:]) == 0
    shown = re.search(r"among more:\n\n```\n(.*?)\n```", TEXT, re.DOTALL)
    given = iter([line.rstrip() for line in capsys.readouterr().out.splitlines()])
    assert shown and all(line in given for line in shown[1].splitlines())
    assert (tmp_path / "where" / "report.html").exists()


@pytest.mark.slow
def test_the_budget_answer_shown_is_the_answer_given(tmp_path: Path) -> None:
    (command,) = [words for words in commands() if "dry_run=true" in words]
    done = train(tmp_path, *command[2:], frills=True)
    assert done.code == 2
    shown = re.search(r"and answers\n\n```\n(.*?)\n```", TEXT, re.DOTALL)
    assert shown and (done.out + done.err).strip() == shown[1].strip()


@pytest.mark.slow
def test_the_prediction_shown_of_the_main_job_is_the_one_made(tmp_path: Path) -> None:
    command = next(words for words in commands() if "model=unet_small" in words and "ckpt=2" in words)
    done = train(tmp_path, *command[2:], "dry_run=true", frills=True)
    shown = re.search(r"machine's, the rest is repeatable\):\n\n```\n(.*?)\n   ", TEXT, re.DOTALL)
    assert shown and done.code == 0, done.err
    cases, *predicted = shown[1].splitlines()
    assert "cases kept in memory" in cases and len(predicted) == 3
    assert done.out.splitlines()[-3:] == predicted

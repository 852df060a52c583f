"""What a run leaves in its folder, and in wandb: the files that scripts read, and one story in all of them."""

import csv
import dataclasses
import json
import re
import resource
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml
from promises import promise
from training import PLAIN, ROOT, TINY, face, fail, records, run, status, train, weights, when
from wandb_records import read_run as read_wandb

from unet3d.config import compose
from unet3d.data.cases import read_dataset
from unet3d.data.splits import split
from unet3d.run.record import read_run
from unet3d.training.policy import MemoryPolicy


def lines_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@promise(
    "What scripts rely on",
    "files of a run folder",
    "their names, the columns of scores.csv, and the keys of metrics.jsonl, memory.json, split.json and env.json",
)
@promise("What scripts rely on", "exit code 0", "done")
def test_a_run_folder_has_the_files_and_names_that_scripts_read(
    finished: Path, golden: Callable[[str, str], None]
) -> None:
    """All but what a sweep, `init=` and TensorBoard add; docs/running.md lists the files."""
    history = read_wandb(finished).history
    paths = sorted(path.relative_to(finished) for path in finished.rglob("*"))
    names = {
        "files": [str(path) for path in paths if path.parts[0] != "wandb"],
        "columns of scores.csv": (finished / "scores.csv").read_text().splitlines()[0].split(","),
        "metrics.jsonl": sorted({f"{key}" for line in lines_of(finished) for key in line}),
        "wandb's history": sorted({name.partition(".")[0] for line in history for name in line if name[0] != "_"}),
        "wandb's summary": sorted(name for name in read_wandb(finished).summary if name[0] != "_"),
    }
    for file in ("memory", "split", "env"):
        names[f"{file}.json"] = sorted(json.loads((finished / f"{file}.json").read_text()))
    names["memory.json, measured"] = sorted(json.loads((finished / "memory.json").read_text())["measured"])
    golden("run_folder.txt", yaml.safe_dump(names, sort_keys=False))
    page = (ROOT / "docs" / "running.md").read_text()
    (table,) = re.findall(r"\| file \| content \|\n(.*?)\n\n", page, re.DOTALL)
    assert not [path for path in paths if len(path.parts) == 1 and path.name != ".lock" and path.name not in table]
    assert status(finished) == "done\nexit code 0\n"
    assert [line["step"] for line in lines_of(finished) if "train/loss" in line] == [1, 2, 3, 4]
    assert [line["step"] for line in lines_of(finished) if "val/dice_mean" in line] == [2, 4]


def test_what_was_predicted_is_what_was_measured_and_is_shown(finished: Path) -> None:
    memory = json.loads((finished / "memory.json").read_text())
    assert memory["error_bytes"] == 0 and memory["predicted"] == memory["measured"]
    assert memory["parameters"] == sum(v.numel() for v in weights(finished).values())
    page = (finished / "report.html").read_text()
    for part in (f"{memory['measured']['peak_bytes'] / 2**20:,.1f}", "activations", "gradients", "down1.conv1"):
        assert part in page, part
    assert len(page) < 5 * 2**20
    assert page.count("<img") >= 6, "prediction, scores, curves, and memory per phase, over a step, by layer"


@promise("What scripts rely on", "split.json", "`data.split=` reads it")
def test_the_split_of_a_run_is_that_of_another(finished: Path) -> None:
    (root,) = (finished.parent / "data" / "phantom").iterdir()
    data = compose.compose([*TINY, "data=decathlon", f"data.root={root}"]).data
    dataset = read_dataset(data)
    again = dataclasses.replace(data, split=str(finished / "split.json"))
    assert split(dataset, again) == split(dataset, data)


def test_the_wandb_run_says_what_the_folder_says(finished: Path) -> None:
    """Its name, config, losses, tables and pictures; a short summary, complete before the first step and after it."""
    found, memory = read_wandb(finished), json.loads((finished / "memory.json").read_text())
    assert (found.run.display_name, found.run.run_group, found.run.project) == ("run", "", "unet3d")
    assert found.config["model"]["features"] == [4, 8] and found.config["ckpt"] == 2 and found.exit_code == 0
    losses = [record["train/loss"].hex() for record in found.history if "train/loss" in record]
    assert losses == [record["train/loss"] for record in records(finished) if "train/loss" in record]
    assert [r["trainer/step"] for r in found.history if "val/prediction._type" in r] == [2, 4]
    tables = {}
    for path in finished.glob("wandb/*run-*/files/media/table/*/*.table.json"):
        tables[path.name.partition("_")[0]] = json.loads(path.read_text())
    assert sum(row[2] for row in tables["layers"]["data"]) == memory["measured"]["peak_bytes"]
    assert dict(tables["all"]["data"])["measured.moment.words"] == memory["measured"]["moment"]["words"]
    with (finished / "scores.csv").open() as file:
        head, row = csv.reader(file)
    assert tables["cases"]["columns"] == head and tables["cases"]["data"] == [[row[0], *map(float, row[1:])]]
    assert found.unsummarised == {"trainer/step", "*"}
    early = {name: step for step, values in reversed(found.summaries) for name in values}
    assert early["memory/peak_predicted_bytes"] == early["parameters"] == 0, "before the first step"
    assert early["memory/peak_measured_bytes"] == 1, "after it"
    assert found.summary["memory/peak_measured_bytes"] == memory["measured"]["peak_bytes"]
    dice = {line["step"]: line["val/dice_mean"] for line in lines_of(finished) if "val/dice_mean" in line}
    assert found.summary["val/dice_mean"] == dice[4]
    assert found.summary["val/dice_mean_best"] == dice[found.summary["val/best_step"]] == max(dice.values())


@pytest.mark.slow
def test_a_run_of_a_process_of_its_own_leaves_the_same_files_and_prints_its_score(
    finished: Path, tmp_path: Path
) -> None:
    """Nothing is left out or stubbed, and nothing is loaded before."""
    small = ["data.phantom.cases=2", "data.val_fraction=0.5", "model.features=[4]", "steps=1", "eval_every=1"]
    done = run(*TINY, *PLAIN, *small, "hydra.run.dir=run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in (tmp_path / "run").iterdir()} == {path.name for path in finished.iterdir()}
    peak = json.loads((tmp_path / "run" / "memory.json").read_text())["measured"]["peak_bytes"]
    for part in (f"{peak / 2**20:,.1f}", "organ", "report.html"):
        assert part in done.stdout, part


@promise("What scripts rely on", "exit code 5", "out of memory")
@promise(
    "Training",
    "memory runs out in a step, a validation or elsewhere",
    "exit 5, in a step with what would need less; STATUS is written, the last checkpoint kept",
)
@pytest.mark.slow
def test_memory_that_runs_out_is_one_message_with_remedies_and_the_checkpoint_is_kept(tmp_path: Path) -> None:
    """The address space is limited for real, after the first checkpoint."""
    folder = tmp_path / "run"
    done = train(tmp_path, *TINY, *PLAIN, "model.features=[4]", "amp=true", "hydra.run.dir=run", hook=limit_memory)
    assert done.code == 5, done.err
    for part in ("can't allocate memory", r"\bforward\b.*\b3\b", r"\bMiB\b", "recompute=tiles", "resume="):
        assert re.search(part, done.err), part
    assert status(folder).endswith("\nexit code 5\n")
    assert torch.load(folder / "checkpoints" / "last.pt", weights_only=True)["step"] == 2


def limit_memory() -> None:
    forward = MemoryPolicy.forward

    def limited(policy: MemoryPolicy, model: torch.nn.Module, image: torch.Tensor) -> torch.Tensor:
        is_fake = type(image) is not torch.Tensor  # in a prediction of what would fit
        if model.training and not is_fake and Path("run/checkpoints/last.pt").exists():
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + 2**29, resource.RLIM_INFINITY))
            torch.empty(2**28)
        return forward(policy, model, image)

    MemoryPolicy.forward = limited  # type: ignore[method-assign]


def test_a_picture_that_memory_has_no_room_for_ends_no_training(tmp_path: Path) -> None:
    hook = when("unet3d.report.held_out.segmentation", 1, partial(fail, MemoryError("no room")))
    done = train(tmp_path, *TINY, "tensorboard=true", "hydra.run.dir=run", hook=hook)
    assert done.code == 0, done.err
    assert re.search(r"run/figures/validation\.png: .*MemoryError: no room", done.err)


def test_a_resumed_run_keeps_its_first_step_and_the_page_is_what_the_command_writes(
    finished: Path, tmp_path: Path
) -> None:
    shutil.copytree(finished, tmp_path / "run")
    shutil.copytree(finished.parent / "data", tmp_path / "data")
    assert face("report", tmp_path / "run") == 0
    assert (tmp_path / "run" / "report.html").read_bytes() == (finished / "report.html").read_bytes()
    done = train(tmp_path, "resume=run", "optim=adamw", "steps=6")
    assert done.code == 0 and status(tmp_path / "run").startswith("done"), done.err
    before, after = (read_run(folder).memory["measured"] for folder in (finished, tmp_path / "run"))
    first, again = ([peaks["first"] for peaks in entry["phases"].values()] for entry in (before, after))
    assert first == again

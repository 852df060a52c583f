"""The command face: exit codes, one line, no torch for a typo, no litter. Some in processes of their own."""

import csv
import dataclasses
import errno
import json
import os
import re
import resource
import shutil
import signal
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import torch
from guards import nothing, unchanged, without
from promises import promise
from training import PLAIN, TINY, face, planned, records, run, status, weights
from training import train as fork
from wandb_records import read_run

from unet3d import __main__
from unet3d.base import errors, progress
from unet3d.base.errors import UserError
from unet3d.cli import lifecycle
from unet3d.config import compose
from unet3d.config.schema import Config
from unet3d.data import restore
from unet3d.data.cases import read_dataset
from unet3d.data.prepare import prepare_data
from unet3d.data.splits import split
from unet3d.report import report
from unet3d.run import checkpoint
from unet3d.training.policy import MemoryPolicy

CODES = "\x1b[2J\x07\x9b\u202e"  # they clear a terminal, ring, begin another command, reverse what follows
FOREIGN = os.fsdecode(b"\xff")  # of a file's name that is not UTF-8
WRITE_PAGE = report.write_page


def refuse_codes(printed: str) -> None:
    """Nothing of what is printed may command a terminal."""
    assert printed.replace("\n", "").isprintable(), ascii(printed)


def code_of(*words: str) -> int | str | None:
    """Return the exit code of `python train.py WORDS`, in this process."""
    try:
        return face("train", *words)
    except SystemExit as end:
        return end.code


def ctrl_c(*_: object, **named: object) -> None:
    signal.raise_signal(signal.SIGINT)


def ctrl_c_in_an_import(*_: object, **named: object) -> None:
    try:
        ctrl_c()
    except KeyboardInterrupt as error:
        raise ImportError("a library cannot be loaded") from error


# By the function that a signal interrupts. A training that has begun answers by itself.
INTERRUPTED: dict[str, tuple[str, ...]] = {
    "unet3d.run.predict.load": ("predict", "net.pt", "images", "-o", "out"),
    "unet3d.run.publish.publish": ("publish", "net.pt", "-o", "out.pt"),
    "unet3d.run.publish.score": ("score", "net.pt", "seed=1", "-o", "out"),
    "unet3d.cli.memory_answers.print_explanation": ("memory",),
    "unet3d.cli.memory_answers.print_fit": ("memory", "fit", "budget=1GiB"),
    "unet3d.report.report.write_report": ("report", "."),
    "unet3d.report.compare.compare_runs": ("compare", "."),
    "unet3d.data.cases.dataset_to_check": ("check-data",),
    "unet3d.cli.commands.tables_of_options": ("options",),
    "unet3d.cli.train.parse": ("train",),
}


@promise("What scripts rely on", "exit code 130 ...")
@promise(
    "Resume",
    "Ctrl-C in any other command, also while libraries load; in `train` before the run",
    "one line; exit 130, of `train` 75",
)
@pytest.mark.parametrize(
    ("interrupted", "act"),
    [*((name, ctrl_c) for name in INTERRUPTED), ("unet3d.cli.commands.tables_of_options", ctrl_c_in_an_import)],
)
def test_ctrl_c_ends_each_command_in_one_line(
    interrupted: str,
    act: Callable[..., None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "config.yaml").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(interrupted, act)
    monkeypatch.setattr(sys, "argv", ["unet3d", *INTERRUPTED[interrupted]])
    try:
        with pytest.raises(SystemExit) as ended:
            __main__.main()
        assert ended.value.code == (75 if INTERRUPTED[interrupted] == ("train",) else 130)
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN, "a second one ends nothing"
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    assert capsys.readouterr().err == "interrupted\n"


def fails() -> None:
    raise ImportError("cannot load module more than once per process")


@promise("Resume", "a signal whose error ...")
@pytest.mark.parametrize("then", [fails, progress.beat], ids=["an error", "the next border"])
def test_a_ctrl_c_that_is_swallowed_ends_a_command_all_the_same(
    then: Callable[[], None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By a library, or by Python in a callback."""

    def lost(*_: object) -> str:
        with suppress(KeyboardInterrupt):
            ctrl_c()
        then()
        return "the command went on"

    monkeypatch.setattr("unet3d.cli.commands.tables_of_options", lost)
    monkeypatch.setattr(sys, "argv", ["unet3d", "options"])
    try:
        with pytest.raises(SystemExit) as ended:
            __main__.main()
        assert ended.value.code == 130
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    assert capsys.readouterr().err == "interrupted\n"
    progress.beat()


WHILE_LOADING = """
import sys

class Finder:
    def find_spec(name, path, target=None):
        if name == "hydra":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Finder)
from unet3d.__main__ import main

sys.argv = ["unet3d", "check-data"]
sys.exit(main())
"""


@promise("Resume", "Ctrl-C in any other ...")
def test_ctrl_c_while_libraries_load_is_one_line(tmp_path: Path) -> None:
    done = run(cwd=tmp_path, code=WHILE_LOADING)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


@promise("What scripts rely on", "exit code 2", "what a user can correct, in one line")
@promise(
    "Config",
    "a wrong key, group, value, type or range",
    "exit 2 before torch loads: one line with the key and the nearest name; no folder",
)
@pytest.mark.parametrize("wrong", ["chkpt=2", "data=decathlon", "amp", "--lr=0.1"])
@without("unet3d.config.words.describe", unchanged, only="chkpt=2")
def test_a_mistake_is_one_line_and_exit_2_without_a_trace(
    wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert code_of(wrong) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    assert wrong.split("=")[0].replace("data", "data.root") in printed.err
    assert list(tmp_path.iterdir()) == []


@promise("what is printed and written", "names and values from ...")
@promise("Run folders and checkpoints of strangers", "what is not printable ...")
@pytest.mark.parametrize("project", [f"a{CODES}b", f"'a{CODES}{FOREIGN}b'"], ids=("bare", "quoted"))
@without("unet3d.base.errors.escaped", unchanged, only="bare")
def test_a_value_of_an_option_cannot_command_a_terminal(
    project: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert code_of(f"wandb.project={project}", "seed=x") == 2
    printed = capsys.readouterr()
    assert printed.err.count("\n") == 1
    refuse_codes(printed.out + printed.err)


@pytest.mark.slow
def test_a_sweep_over_values_with_control_codes_shows_none(tmp_path: Path) -> None:
    words = [f"wandb.project='a{CODES}','b{FOREIGN}'", "dry_run=true", "-m", f"hydra.sweep.dir='c{CODES}'"]
    done = fork(tmp_path, *TINY, *PLAIN, *words)
    assert done.code == 0, done.err
    assert done.out.count(r"a\x1b[2J\x07\x9b\u202e") == 2, "of the job, and in the table"
    assert r"c\x1b[2J\x07\x9b\u202e/compare.html" in done.out
    refuse_codes(done.out + done.err)


@promise("Config", "a wrong key, group ...")
def test_a_mistake_loads_neither_torch_nor_monai(tmp_path: Path) -> None:
    code = "import sys; from unet3d.cli import train; c = train.main(); print(c, {'torch', 'monai'} & {*sys.modules})"
    done = run("ckpt=-1", cwd=tmp_path, code=code)
    assert done.stdout == "2 set()\n" and done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("flags", [["--cfg", "job"], ["--info", "config"]], ids=" ".join)
def test_a_mistake_beside_a_flag_is_one_line_too(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of(*flags, "chkpt=2") == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_composed_config_can_be_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of("--cfg", "job", "model=forum_mid", "wandb.name=1_2") == 0
    shown = capsys.readouterr().out
    assert "upsampling: trilinear" in shown and "name: '1_2'" in shown


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


def test_a_run_leaves_the_folder_of_the_design(finished: Path) -> None:
    folder = finished
    there = {path.name for path in folder.iterdir()}
    assert there >= {
        *("config.yaml", "env.json", "metrics.jsonl", "metrics.csv", "scores.csv", "memory.json", "report.html"),
        "split.json",
        *("STATUS", "checkpoints", "figures", "memory", "predictions", "wandb"),
    }
    assert {p.name for p in (folder / "checkpoints").iterdir()} == {"best.pt", "last.pt", "previous.pt"}
    assert (folder / "STATUS").read_text().startswith("done")
    memory = json.loads((folder / "memory.json").read_text())
    assert memory["parameters"] == sum(v.numel() for v in weights(folder).values())
    assert set(memory["measured"]["phases"]) == {"data", "forward", "loss", "backward", "step"}
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records if "train/loss" in r] == [1, 2, 3, 4]
    assert [r["step"] for r in records if "val/dice_mean" in r] == [2, 4]


@promise("What scripts rely on", "split.json", "`data.split=` reads it")
def test_the_split_of_a_run_is_that_of_another(finished: Path) -> None:
    (root,) = (finished.parent / "data" / "phantom").iterdir()
    data = compose.compose([*TINY, "data=decathlon", f"data.root={root}"]).data
    dataset = read_dataset(data)
    again = dataclasses.replace(data, split=str(finished / "split.json"))
    assert split(dataset, again) == split(dataset, data)


def with_report() -> None:
    """Write the page, which `training.train` leaves out else."""
    report.write_page = WRITE_PAGE


@pytest.mark.slow
def test_a_folder_holds_one_run(finished: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    shutil.copytree(finished.parent / "data", tmp_path / "data")
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    again = fork(tmp_path, *TINY, "hydra.run.dir=run")
    assert again.code == 2 and again.err.count("\n") == 1 and str(folder) in again.err
    (folder / "report.html").unlink()  # as where it was killed in writing it
    over = fork(tmp_path, "resume=run", hook=with_report)
    assert over.code == 0 and "steps=N" in over.out
    after = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    assert b"<img" in after["report.html"]
    assert json.loads(after["memory.json"]) == json.loads(before["memory.json"])
    assert after["metrics.jsonl"] == before["metrics.jsonl"] and after["STATUS"] == before["STATUS"]


def test_what_was_predicted_is_what_was_measured(finished: Path) -> None:
    memory = json.loads((finished / "memory.json").read_text())
    assert memory["error_bytes"] == 0 and memory["predicted"] == memory["measured"]


def test_a_run_shows_where_its_memory_went(finished: Path) -> None:
    page = (finished / "report.html").read_text()
    memory = json.loads((finished / "memory.json").read_text())
    peak = memory["measured"]["peak_bytes"]
    for part in (f"{peak / 2**20:,.1f}", "activations", "gradients", "down1.conv1"):
        assert part in page, part
    assert len(page) < 5 * 2**20
    assert page.count("<img") >= 6, "prediction, scores, curves, and memory per phase, over a step, by layer"
    assert [path.name for path in (finished / "memory").iterdir()] == ["snapshot.pickle"]


def test_wandb_has_the_tables_and_pictures_of_memory(finished: Path) -> None:
    found = read_run(finished)
    memory = json.loads((finished / "memory.json").read_text())
    kinds = {key: value for record in found.history for key, value in record.items() if key.endswith("_type")}
    for name in ("phases", "levels", "layers"):
        assert kinds[f"memory/{name}._type"] == "table-file"
    for name in ("phases", "timeline", "layers"):
        assert kinds[f"memory/{name}_picture._type"] == "image-file"
    (path,) = finished.glob("wandb/*run-*/files/media/table/memory/layers_*.table.json")
    table = json.loads(path.read_text())
    assert table["columns"][:3] == ["module", "level", "bytes"]
    assert sum(row[2] for row in table["data"]) == memory["measured"]["peak_bytes"]
    (path,) = finished.glob("wandb/*run-*/files/media/table/memory/all_*.table.json")
    rest = dict(json.loads(path.read_text())["data"])
    assert rest["advice.level"] == memory["advice"]["level"]
    assert rest["measured.moment.words"] == memory["measured"]["moment"]["words"]
    assert rest["predicted.phases.backward.steady"] > 0


def test_the_offline_wandb_run_holds_config_scalars_memory_and_the_picture(finished: Path) -> None:
    found = read_run(finished)
    assert found.config["model"]["features"] == [4, 8] and found.config["ckpt"] == 2
    losses = [record["train/loss"].hex() for record in found.history if "train/loss" in record]
    assert losses == [record["train/loss"] for record in records(finished) if "train/loss" in record]
    assert any("val/prediction._type" in record for record in found.history)
    assert any("prediction" in name and name.endswith(".png") for name in found.files)
    assert found.exit_code == 0


def test_the_wandb_run_has_a_name_a_short_summary_the_cases_and_a_picture_a_validation(finished: Path) -> None:
    found, memory = read_run(finished), json.loads((finished / "memory.json").read_text())
    assert (found.run.display_name, found.run.run_group, found.run.project) == ("run", "", "unet3d")
    assert len(found.summary) <= 25 and found.unsummarised == {"trainer/step", "*"}
    peaks = [found.summary[f"memory/peak_{kind}_bytes"] for kind in ("predicted", "measured")]
    assert peaks == [memory[kind]["peak_bytes"] for kind in ("predicted", "measured")]
    early = {name: step for step, values in reversed(found.summaries) for name in values}
    assert early["memory/peak_predicted_bytes"] == early["parameters"] == 0, "before the first step"
    assert early["memory/peak_measured_bytes"] == 1, "after it"
    lines = (finished / "metrics.jsonl").read_text().splitlines()
    validated = [record for record in map(json.loads, lines) if "val/dice_mean" in record]
    dice = {record["step"]: record["val/dice_mean"] for record in validated}
    assert found.summary["val/dice_mean"] == dice[4] and found.summary["val/dice_mean_best"] == max(dice.values())
    assert dice[found.summary["val/best_step"]] == max(dice.values()) and found.summary["time/step_s_median"] > 0
    assert [r["trainer/step"] for r in found.history if "val/prediction._type" in r] == [2, 4]
    (path,) = finished.glob("wandb/*run-*/files/media/table/val/cases_*.table.json")
    with (finished / "scores.csv").open() as file:
        rows = list(csv.DictReader(file))
    table = json.loads(path.read_text())
    assert table["columns"] == list(rows[0]) and [row[0] for row in table["data"]] == [row["case"] for row in rows]
    assert table["data"][0][1] == float(rows[0][table["columns"][1]])


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
    done = fork(tmp_path, *TINY, *PLAIN, "model.features=[4]", "amp=true", "hydra.run.dir=run", hook=limit_memory)
    assert done.code == 5, done.err
    for part in ("can't allocate memory", r"\bforward\b.*\b3\b", r"\bMiB\b", "recompute=tiles", "resume="):
        assert re.search(part, done.err), part
    assert (folder / "STATUS").read_text().endswith("\nexit code 5\n")
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


@promise(
    "Resume",
    "`resume=` with another width, patch, seed or data",
    "exit 2 with each option that differs; another learning rate is taken, with a line",
)
@without("unet3d.config.compose.refuse_changes", nothing)
def test_resume_refuses_another_network(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*")}
    with pytest.raises(UserError, match=r"\bmodel\.features: \[4, 8\] -> \[8, 8\]"):
        planned([f"resume={finished}", "model.features=[8,8]"])
    for words, part in (([f"resume={finished}", "dry_run=true"], "dry_run"), (["resume=nowhere"], "resume=nowhere")):
        assert code_of(*words) == 2
        printed = capsys.readouterr().err
        assert part in printed and printed.count("\n") == 1
    assert {path: path.stat().st_mtime_ns for path in finished.rglob("*")} == before, "the run is as it was"


def test_a_published_checkpoint_predicts_the_same_and_names_no_path(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, slim = tmp_path / "whole.pt", tmp_path / "net.pt"
    state = checkpoint.load_checkpoint(finished / "checkpoints" / "best.pt")
    state["config"] |= {"resume": "/home/someone/run", "wandb": state["config"]["wandb"] | {"project": "a-secret"}}
    state["config"]["data"] |= {"images": "/home/someone/scans"}
    checkpoint.save_checkpoint(whole, state)
    assert face("publish", whole, "-o", slim) == 0
    assert slim.stat().st_size < whole.stat().st_size / 2
    for secret in (str(finished), "imagesTr", "phantom/", "a-secret", "/home/someone"):
        assert secret.encode() not in slim.read_bytes()
    image = next((finished.parent).rglob("imagesTr/*.nii.gz"))
    for name, path in (("whole", whole), ("slim", slim)):
        assert face("predict", path, image, "-o", tmp_path / name) == 0
    assert (tmp_path / "whole" / image.name).read_bytes() == (tmp_path / "slim" / image.name).read_bytes()
    assert capsys.readouterr().err == ""
    assert face("publish", whole, "-o", slim) == 2 and str(slim) in capsys.readouterr().err


@promise(
    "Prediction",
    "images turned, anisotropic, in any orientation or resampled",
    "label maps in each file's shape, affine and header, as uint8, of classes alone",
)
@promise(
    "Prediction",
    "a file among others that is broken, no case, or too large; a link to itself, a pipe",
    "the others are done; exit 2",
)
def test_predict_writes_label_maps_on_the_inputs_grid(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = np.random.default_rng(0)
    affine = np.array([[0, -1.5, 0, 10], [0.9, 0, 0, -20], [0, 0, 3, 5], [0, 0, 0, 1]])
    image = nib.Nifti1Image(rng.normal(size=(17, 23, 9)).astype(np.float32), affine)
    image.header.set_xyzt_units("mm", "sec")
    nib.save(image, tmp_path / "scan one.nii.gz")
    (tmp_path / "broken.nii.gz").write_bytes(b"<html>")
    inputs = (tmp_path / "broken.nii.gz", tmp_path / "scan one.nii.gz")
    assert face("predict", finished / "checkpoints" / "last.pt", *inputs, "-o", tmp_path / "out") == 2
    printed = capsys.readouterr().err
    assert "broken.nii.gz" in printed and printed.count("\n") == 1
    image, found = nib.load(tmp_path / "scan one.nii.gz"), nib.load(tmp_path / "out" / "scan one.nii.gz")
    assert found.shape == image.shape and found.get_data_dtype() == np.uint8
    assert np.array_equal(found.affine, image.affine)
    for field in ("pixdim", "qform_code", "sform_code", "xyzt_units", "srow_x", "quatern_b"):
        assert np.array_equal(found.header[field], image.header[field]), field
    assert set(np.unique(found.dataobj)) <= {0, 1, 2, 3}


@promise(
    "Prediction",
    "a label map that is there already",
    "skipped if `predictions.jsonl` says that this network wrote it, with these options, from this "
    "image; else one line with `--overwrite`",
)
def test_predict_replaces_a_file_only_when_asked(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nib.save(nib.Nifti1Image(np.zeros((9, 9, 9), np.float32), np.eye(4)), tmp_path / "a.nii.gz")
    made = tmp_path / "out" / "a.nii.gz"
    made.parent.mkdir()
    made.write_bytes(b"of yesterday")
    words = ["predict", finished / "checkpoints" / "last.pt", tmp_path / "a.nii.gz", "-o", made.parent]
    assert face(*words) == 2
    assert "--overwrite" in capsys.readouterr().err and made.read_bytes() == b"of yesterday"
    assert face(*words, "--overwrite") == 0 and nib.load(made).shape == (9, 9, 9)
    assert {path.name for path in made.parent.iterdir()} == {"a.nii.gz", "predictions.jsonl"}


@promise("What scripts rely on", "exit code 3", "no usable checkpoint")
def test_a_foreign_checkpoint_is_exit_3(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"model": {}}, tmp_path / "x.pt")
    assert face("predict", tmp_path / "x.pt", ".", "-o", tmp_path) == 3
    assert capsys.readouterr().err.count("\n") == 1


def save_image(path: Path, bright: int = 0, depth: float = 1) -> None:
    """Zeros, but for one slice."""
    path.parent.mkdir(parents=True, exist_ok=True)
    voxels = np.zeros((9, 9, 9), np.uint8)
    voxels[bright] = 1
    restore.save_image(path, nib.Nifti1Image(voxels, np.diag([1, 1, depth, 1])))


def errors_in(printed: str) -> list[str]:
    """The lines but those on images that are unlike the phantom's."""
    return [line for line in printed.splitlines() if " in training " not in line]


@promise(
    "what is printed and written",
    "names and values from data sets, checkpoints, run folders and command lines cannot command a terminal or "
    "reorder a line: what is not printable is shown as `\\x1b`",
)
@promise("Run folders and checkpoints of strangers", "what is not printable ...")
@without("unet3d.cli.commands.escaped", unchanged)
def test_names_of_files_neither_command_a_terminal_nor_end_the_work(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = (f"a{CODES}\nerror: b.nii", f"c{FOREIGN}.nii")
    for name in names:
        save_image(tmp_path / "in" / name)
        (tmp_path / "in" / f"broken {name}").write_bytes(b"<html>")
    out = tmp_path / f"out{CODES}"
    words = ["predict", str(finished / "checkpoints" / "last.pt"), str(tmp_path / "in"), "-o", str(out)]
    assert face(*words) == 2
    first = capsys.readouterr()
    assert face(*words) == 2
    again = capsys.readouterr()
    assert errors_in(again.err) == errors_in(first.err) and again.out.count("--overwrite") == 2
    assert ["broken" in line for line in errors_in(first.err)] == [True, True]
    assert first.out.count("\n") == again.out.count("\n") == 3
    written, left = (re.findall(r"\b\d+\b", shown.out.splitlines()[-1]) for shown in (first, again))
    assert written[:2] == ["2", "2"], "written, not segmented"
    assert left == ["2", "2"], "left alone, not segmented"
    refuse_codes(first.out + first.err + again.out)
    assert {path.name for path in out.glob("*.nii*")} == {f"{name}.gz" for name in names}


@promise(
    "what is printed and written",
    "a link that leads to itself, a pipe, or a folder that cannot be listed stops the prediction of no other file",
)
@promise("Prediction", "a file among others ...")
def test_an_input_that_cannot_be_read_stops_no_other(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save_image(tmp_path / "in" / "good.nii.gz")
    for folder in (tmp_path, tmp_path / "in"):
        (folder / "loop.nii.gz").symlink_to("loop.nii.gz")
        (folder / "lost.nii.gz").symlink_to("nowhere")
        os.mkfifo(folder / "pipe.nii.gz")
    (tmp_path / "locked").mkdir()
    names = Path.iterdir

    def listed(folder: Path) -> Iterator[Path]:
        if folder.name == "locked":  # to root, no folder is
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
        return names(folder)

    monkeypatch.setattr(Path, "iterdir", listed)
    wrong = [tmp_path / name for name in ("loop.nii.gz", "lost.nii.gz", "pipe.nii.gz", "locked")]
    assert face("predict", finished / "checkpoints" / "last.pt", *wrong, tmp_path / "in", "-o", tmp_path / "out") == 2
    found = errors_in(capsys.readouterr().err)
    assert len(found) == 7
    for path, line in zip(wrong, found, strict=False):
        assert f" {path}: " in line, line
    assert [path.name for path in (tmp_path / "out").glob("*.nii*")] == ["good.nii.gz"]


@promise("what is printed and written", "names and values from ...")
@promise("Run folders and checkpoints of strangers", "what is not printable ...")
@without("unet3d.run.checkpoint.escaped", unchanged)
def test_names_in_a_checkpoint_cannot_command_a_terminal(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = checkpoint.load_checkpoint(finished / "checkpoints" / "last.pt")
    state["model"][f"w{CODES}\nerror: all is lost"] = torch.zeros(1)
    checkpoint.save_checkpoint(tmp_path / "tensor.pt", state)
    with zipfile.ZipFile(tmp_path / "entry.pt", "w") as archive:
        archive.writestr(f"{CODES}\nerror: all is lost/data.pkl", "content")
    damaged = (tmp_path / "entry.pt").read_bytes().replace(b"content", b"CONTENT")
    (tmp_path / "entry.pt").write_bytes(damaged)
    for name, lines in (("tensor.pt", 3), ("entry.pt", 1)):
        assert face("predict", tmp_path / name, tmp_path, "-o", tmp_path / "out") == 3
        printed = capsys.readouterr().err
        assert printed.count("\n") == lines and r"\x1b[2J\x07\x9b" in printed
        refuse_codes(printed)


@promise("what is printed and written", "names and values from ...")
@without("unet3d.cli.commands.escaped", unchanged)
def test_names_in_a_data_set_cannot_command_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in (f"a{CODES}\nb", f"c{FOREIGN}"):
        root = tmp_path / f"root {name}"
        for part in ("images", "labels"):
            save_image(root / part / f"{name}.nii.gz")
            save_image(root / part / "d.nii.gz")
        words = ["data=folders", f"data.root='{root}'", "data.classes=[background,organ]"]
        assert face("check-data", *words) == 2
        refused = capsys.readouterr()
        assert errors.escaped(name) in refused.err and refused.out == "", "it cannot name a case"
        for part in ("images", "labels"):
            (root / part / f"{name}.nii.gz").rename(root / part / "e.nii.gz")
        assert face("check-data", *words) == 2
        listed = capsys.readouterr()
        assert "e.nii.gz" in listed.out and errors.escaped(root) in listed.out
        refuse_codes(refused.err + listed.out + listed.err)


def test_warnings_about_a_data_set_cannot_command_a_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / f"root{CODES}{FOREIGN}"
    for slice_, name in enumerate("ab"):  # one image twice would be refused
        save_image(root / "images" / f"{name}.nii.gz", slice_)
        save_image(root / "labels" / f"{name}.nii.gz", slice_, depth=1.1)
    words = ["data=folders", f"data.root='{root}'", "data.classes=[background,organ]", "data.affine_check=warn"]
    prepare_data(compose.compose(words).data)
    printed = capsys.readouterr().err
    assert printed.count("\n") == 2 and r"root\x1b[2J\x07\x9b\u202e\udcff/labels/a.nii.gz" in printed
    refuse_codes(printed)


@pytest.mark.slow
def test_what_memory_prints_cannot_command_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor do the legends of its pictures: a letter without a shape is a warning, which names it."""
    for name in ("BATCHES", "SCALES", "SIZES"):
        monkeypatch.setattr(f"unet3d.cli.memory_answers.{name}", (1,))
    project, out = f"wandb.project='a{CODES}'", tmp_path / f"out{CODES}{FOREIGN}"
    for words in (
        [f"{project},'b{FOREIGN}'", "-o", out],
        [project, "--curves", "-o", out],
        ["fit", project, "recompute=lean"],
    ):
        assert face("memory", *words, *TINY, *PLAIN, "model.features=[4]", "budget=1GiB") == 0
        printed = "".join(capsys.readouterr())
        assert r"\x1b[2J\x07\x9b\u202e" in printed
        refuse_codes(printed)


def test_a_trace_cannot_command_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def divide(*_: object) -> None:
        raise ZeroDivisionError(f"{CODES}{FOREIGN}")

    assert lifecycle.run(divide, Config(dry_run=True), tmp_path, [])[0] == 1
    printed = capsys.readouterr().err
    assert printed.startswith("Traceback") and printed.count(r"\x1b[2J\x07\x9b\u202e\udcff") == 2
    refuse_codes(printed)


def test_check_data_lists_every_problem(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for part in ("images", "labels"):
        (tmp_path / part).mkdir()
    for name in "abc":
        for part in ("images", "labels"):
            data = np.zeros((4, 4, 4), np.uint8)
            nib.save(nib.Nifti1Image(data, np.eye(4)), tmp_path / part / f"{name}.nii.gz")
    nib.save(nib.Nifti1Image(np.full((4, 4, 4), 7, np.uint8), np.eye(4)), tmp_path / "labels" / "b.nii.gz")
    (tmp_path / "images" / "c.nii.gz").write_bytes(b"")
    arguments = ["data=folders", f"data.root={tmp_path}", "data.classes=[background,organ]"]
    assert face("check-data", *arguments) == 2
    said = capsys.readouterr().out
    assert "b" in said and "7" in said and "c.nii.gz" in said


def test_how_a_run_ended_is_written_over_the_file_that_is_there_where_there_is_no_room_for_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill_disk(folder: Path, line: str, code: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    lifecycle.write_end(tmp_path, "a much longer line than the next", 0)
    monkeypatch.setattr("unet3d.run.run_folder.write_status", fill_disk)
    lifecycle.write_end(tmp_path, "failed", 1)
    assert status(tmp_path).splitlines() == ["failed", "exit code 1"]

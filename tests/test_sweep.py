"""Sweeps in real processes: a job's process, what ends one job and what ends all, the comparison at the end."""

import csv
import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from jobs import sweep_of
from promises import promise
from training import ROOT, TINY, face, planned, run, train
from wandb_records import read_run

from unet3d.base.errors import UserError
from unet3d.cli import lifecycle, sweep
from unet3d.config.schema import Config, Model
from unet3d.memory import prediction

PREDICTED = [*TINY, "model.in_channels=1", "model.classes=3", "dry_run=true"]


def test_one_wrong_job_stops_a_sweep_before_it_begins(tmp_path: Path) -> None:
    done = run("-m", "ckpt=0,999", cwd=tmp_path)
    assert done.returncode == 2 and "ckpt=999" in done.stderr and done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@promise(
    "Training",
    "a job of a sweep fails or is killed; a sweep is interrupted",
    "the others finish and the comparison shows it; the job ends in order and no other begins",
)
@pytest.mark.slow
def test_a_flag_may_stand_between_overrides_and_a_failed_job_stops_no_other(tmp_path: Path, finished: Path) -> None:
    """Job 0 breaks its budget; job 1 is predicted all the same; their comparison cannot be saved."""
    (tmp_path / "sweep" / "compare.csv").mkdir(parents=True)
    words = [*PREDICTED, "-m", "budget=1MiB,1GiB", "hydra.sweep.dir=sweep"]
    done = train(tmp_path, *words, hook=functools.partial(predict_as_before, memory_of(finished)))
    assert done.code == 2 and done.err.count("error: budget=1MiB: ") == 1
    assert "Traceback" not in done.err and f"{tmp_path / 'sweep'}: " in done.err and "Is a directory" in done.err
    assert not (tmp_path / "sweep" / "0" / "memory.json").exists()
    assert json.loads((tmp_path / "sweep" / "1" / "memory.json").read_text()) == memory_of(finished)


def memory_of(folder: Path) -> dict:
    """What was predicted of a run."""
    memory = json.loads((folder / "memory.json").read_text())
    return {name: memory[name] for name in ("parameters", "predicted")}


def predict_as_before(memory: dict) -> None:
    """In the place of a simulation: this memory, less a byte for each segment. Too much for 1 MiB; lost with ckpt=2."""

    def predict(config: Config, _: Model, before: Any = None) -> prediction.Preflight:
        if config.budget == "1MiB":
            raise UserError("budget=1MiB: too little")
        if config.ckpt == 2:
            raise RuntimeError("lost")
        return prediction.Preflight((), smaller(memory, config.ckpt))

    prediction.preflight = predict


def smaller(memory: dict, size: int) -> dict:
    """The same with a peak that is this many bytes lower."""
    return memory | {"predicted": memory["predicted"] | {"peak_bytes": memory["predicted"]["peak_bytes"] - size}}


SITE = f"""
import os, signal, sys
print(os.getpid(), os.getppid(), *sys.orig_argv, sep="|", file=open({{processes!r}}, "a"))
if sys.orig_argv[-1].endswith("sweep/0"):
    os.kill(os.getpid(), signal.SIGKILL)
if sys.orig_argv[-1].endswith("sweep/1"):
    sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}]
    import ranked
    ranked.predict_without_pictures()
"""


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path, list[list[str]]]:
    """A sweep whose first job is killed as it starts, and whose second is the run of `finished`, without pictures.

    Also its folder, and pid, parent's pid and arguments of each process.
    """
    place = tmp_path_factory.mktemp("swept")
    (place / "sitecustomize.py").write_text(SITE.format(processes=str(place / "processes")))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(place))
        done = run("-m", *TINY, "amp=true", "ckpt=0,2", f"hydra.sweep.dir={place / 'sweep'}", cwd=place)
    processes = [line.split("|") for line in (place / "processes").read_text().splitlines()]
    ours = [line for line in processes if any(word.endswith(("train.py", "unet3d.cli.train")) for word in line)]
    return done, place / "sweep", ours


@promise("What scripts rely on", "exit code 128 + n ...")
@promise("Training", "a job of a ...")
@pytest.mark.slow
def test_a_sweep_ends_with_its_comparison_and_a_failed_job_is_a_row(swept: tuple) -> None:
    done, folder, _ = swept
    assert done.returncode == 128 + 9, done.stderr
    with (folder / "compare.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [f"{row['run']}: {row['ckpt']}" for row in rows] == ["0: 0", "1: 2"]
    assert [row["status"].partition(":")[0] for row in rows] == ["failed", "done"]
    assert "SIGKILL" in rows[0]["status"]
    assert [row["error_bytes"] for row in rows] == ["", "0"] and rows[0]["peak_measured_bytes"] == ""
    peak = json.loads((folder / "1" / "memory.json").read_text())["measured"]["peak_bytes"]
    assert int(rows[1]["peak_measured_bytes"]) == peak
    assert "SIGKILL" in done.stdout and f" {peak / 2**20:.1f} " in done.stdout
    log = folder / "1" / "log.txt"
    assert "For a methods section" in log.read_text() and "For a methods section" not in done.stdout
    ends = rf"job 1: done; Dice.*; peak memory, measured {peak / 2**20:.1f} MiB; all of it: .*1/log.txt"
    assert re.search(ends, done.stdout) and re.search(r"job 0: failed; all of it: .*sweep/0$", done.stdout, re.M)
    assert {path.name for path in folder.iterdir()} == {
        *("0", "1", "compare.csv", "compare.html", "multirun.yaml", "wandb"),
        *(f"{name}.{kind}" for name in ("compare", "curves") for kind in ("png", "svg")),
    }


@pytest.mark.slow
def test_each_job_of_a_sweep_has_a_process_of_its_own(swept: tuple) -> None:
    _, folder, processes = swept
    (sweep, *_), *jobs = processes
    assert len({sweep, *(pid for pid, *_ in jobs)}) == 3 and {parent for _, parent, *_ in jobs} == {sweep}
    assert [arguments[-1] for arguments in jobs] == [f"hydra.run.dir={folder / str(job)}" for job in range(2)]


@pytest.mark.slow
def test_a_job_of_a_sweep_needs_what_it_needs_alone(swept: tuple, finished: Path) -> None:
    _, folder, _ = swept
    words = yaml.safe_load((folder / "1" / "overrides.yaml").read_text())
    assert [word.lower() for word in words] == [*TINY, "amp=true", "ckpt=2"]
    assert (folder / "1" / "memory.json").read_text() == (finished / "memory.json").read_text()


@pytest.mark.slow
def test_the_sweeps_wandb_run_holds_the_table(swept: tuple) -> None:
    _, folder, _ = swept
    found = read_run(folder)
    assert [record["compare._type"] for record in found.history if "compare._type" in record] == ["table-file"]
    (path,) = folder.glob("wandb/*run-*/files/media/table/compare_*.table.json")
    table = json.loads(path.read_text())
    with (folder / "compare.csv").open() as file:
        assert table["columns"] == next(csv.reader(file))
    assert [row[0] for row in table["data"]] == ["0", "1"] and found.exit_code == 0
    assert str(folder.parent) not in path.read_text()
    named = [(run.display_name, run.run_group) for run in (found.run, read_run(folder / "1").run)]
    assert named == [("sweep", "sweep"), ("sweep-1", "sweep")], "one group for a sweep's jobs and its table"


@pytest.mark.slow
def test_the_runs_of_a_sweep_can_be_compared_later(
    swept: tuple, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, folder, _ = swept
    assert face("compare", folder, "-o", tmp_path / "later") == 0 and "SIGKILL" in capsys.readouterr().out
    for name in ("compare.csv", "compare.html"):
        assert (tmp_path / "later" / name).read_bytes() == (folder / name).read_bytes()
    assert face("compare", ROOT / "unet3d") == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and f"{ROOT / 'unet3d'}: " in error


@pytest.mark.slow
def test_a_sweep_that_predicts_stays_in_one_process(tmp_path: Path, finished: Path) -> None:
    """Its jobs are compared all the same; the one that fails in an unforeseen way ends no other."""
    words = [*PREDICTED, "-m", "ckpt=0,2,3", f"hydra.sweep.dir={tmp_path}"]
    memory = memory_of(finished)
    done = train(tmp_path, *words, hook=functools.partial(start_nothing, memory))
    assert done.code == 1 and "RuntimeError('lost')" in done.out, done.err
    with (tmp_path / "compare.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["status"].partition(":")[0] for row in rows] == ["predicted", "failed", "predicted"]
    peaks = [str(smaller(memory, ckpt)["predicted"]["peak_bytes"]) for ckpt in (0, 3)]
    assert [row["peak_predicted_bytes"] for row in rows] == [peaks[0], "", peaks[1]]
    assert not (tmp_path / "wandb").exists()


def start_nothing(memory: dict) -> None:
    predict_as_before(memory)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a process")

    subprocess.Popen = refuse  # type: ignore[assignment,misc]


@promise("Training", "a job of a ...")
@pytest.mark.slow
def test_an_interrupted_job_ends_the_sweep_in_good_order(tmp_path: Path) -> None:
    """Only the sweep's process gets the signal; the job, asked by it, still writes its STATUS, and no job follows."""
    done = sweep_of(tmp_path, *TINY, "seed=0,1", job="interrupts_the_sweep")
    assert done.returncode == 75, done.stderr
    text = (tmp_path / "sweep" / "0" / "STATUS").read_text()
    assert re.fullmatch(r"stopped.*SIGTERM.*\nexit code 75\n", text) and "resume=" not in text
    assert not (tmp_path / "sweep" / "1").exists()
    assert f"python -m unet3d compare {tmp_path / 'sweep'}" in done.stderr


def test_the_folder_that_is_checked_is_the_one_that_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("multirun").touch()
    planned(["seed=0"])
    with pytest.raises(UserError, match=r"^multirun/.*hydra.sweep.dir=FOLDER"):
        planned(["seed=0,1", "-m"])
    planned(["seed=0,1", "hydra.sweep.dir=elsewhere", "-m"])


@promise("What scripts rely on", "exit code 128 + n", "a job of a sweep was killed by signal n")
@promise("Training", "a job of a ...")
def test_a_process_that_was_killed_is_named_by_its_signal() -> None:
    code, _ = lifecycle.run_process([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"])
    assert code == 137 and "SIGKILL" in lifecycle.describe_exit(code)
    assert lifecycle.run_process([sys.executable, "-c", "raise SystemExit(4)"]) == (4, False)


@pytest.mark.slow
def test_a_job_that_was_stopped_alone_does_not_end_the_sweep(tmp_path: Path) -> None:
    done = sweep_of(tmp_path, *TINY, "seed=0,1", job="stops_itself")
    assert done.returncode == 75 and "resume=auto" not in done.stderr, done.stderr
    for job in "01":
        assert re.match(r"stopped.*SIGTERM", (tmp_path / "sweep" / job / "STATUS").read_text())
    assert (tmp_path / "sweep" / "compare.csv").exists()


def test_a_job_of_a_sweep_that_was_refused_leaves_the_run_there_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be running, or be resumed; one that was killed is recorded."""
    status, overrides = tmp_path / "STATUS", tmp_path / "overrides.yaml"
    status.write_text("running\n")
    os.utime(status, ns=(1, 1))
    overrides.write_text("- ckpt=2\n")
    for code, text, words in (
        (2, "running\n", "- ckpt=2\n"),
        (137, f"failed: {lifecycle.describe_exit(137)}\nexit code 137\n", "- ckpt=3\n"),
    ):
        monkeypatch.setattr(lifecycle, "run_process", lambda *_, code=code: (code, False))
        assert sweep.run_job(tmp_path, ["ckpt=3"], []) == code
        assert (status.read_text(), overrides.read_text()) == (text, words)

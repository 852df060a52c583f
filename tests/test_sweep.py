"""Sweeps in real processes: a job's process, what ends one job and what ends all, the comparison at the end."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from training import ROOT, TINY, face, run, train
from wandb_records import read_run

from unet3d.cli import lifecycle, sweep
from unet3d.cli import train as train_command
from unet3d.config import Config, Model
from unet3d.errors import UserError
from unet3d.memory import preflight


def test_one_wrong_job_stops_a_sweep_before_it_begins(tmp_path: Path) -> None:
    done = run("-m", "ckpt=0,999", cwd=tmp_path)
    assert done.returncode == 2 and "ckpt=999" in done.stderr
    queued = run("-m", "ckpt=0,2", "requeue=true", cwd=tmp_path)
    assert queued.returncode == 2 and "requeue=true" in queued.stderr and queued.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_flag_may_stand_between_overrides_and_a_failed_job_stops_no_other(tmp_path: Path) -> None:
    """Job 0 breaks its budget; job 1 is predicted all the same; their comparison cannot be saved."""
    (tmp_path / "sweep" / "compare.csv").mkdir(parents=True)
    closed = ["model.in_channels=1", "model.classes=3", "dry_run=true", "batch=2"]
    done = train(tmp_path, *TINY, *closed, "-m", "budget=1MiB,1GiB", "hydra.sweep.dir=sweep", frills=True)
    assert done.code == 2 and done.err.count("does not fit") == 1
    assert "Traceback" not in done.err and "the comparison is not saved (Is a directory)" in done.err
    assert not (tmp_path / "sweep" / "0" / "memory.json").exists()
    assert json.loads((tmp_path / "sweep" / "1" / "memory.json").read_text())["predicted"]["peak_bytes"] > 0


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path, list[list[str]]]:
    """A sweep of which the first job breaks its budget; its folder; pid, parent's pid and arguments of each process."""
    place = tmp_path_factory.mktemp("swept")
    code = "import os, sys; print(os.getpid(), os.getppid(), *sys.orig_argv, sep='|', file=open({!r}, 'a'))"
    (place / "sitecustomize.py").write_text(code.format(str(place / "processes")))
    words = ["ckpt=0,2", "batch=2", "budget=1.5MiB", "steps=2", f"data.root={place / 'phantom'}"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(place))
        done = run("-m", *TINY, *words, f"hydra.sweep.dir={place / 'sweep'}", cwd=place)
    processes = [line.split("|") for line in (place / "processes").read_text().splitlines()]
    ours = [line for line in processes if any(word.endswith(("train.py", "unet3d.cli.train")) for word in line)]
    return done, place / "sweep", ours


def test_a_sweep_ends_with_its_comparison_and_a_failed_job_is_a_row(swept: tuple) -> None:
    done, folder, _ = swept
    assert done.returncode == 2 and "Comparison of 2 runs" in done.stdout, done.stderr
    assert "run 0 failed: budget=1.5MiB: the step does not fit" in done.stdout
    with (folder / "compare.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [f"{row['run']}: {row['ckpt']}" for row in rows] == ["0: 0", "1: 2"]
    assert [row["status"].partition(":")[0] for row in rows] == ["failed", "done"]
    assert [row["error_bytes"] for row in rows] == ["", "0"] and rows[0]["peak_measured_bytes"] == ""
    peak = json.loads((folder / "1" / "memory.json").read_text())["measured"]["peak_bytes"]
    assert int(rows[1]["peak_measured_bytes"]) == peak
    assert {path.name for path in folder.iterdir()} == {
        *("0", "1", "compare.csv", "compare.html", "multirun.yaml", "wandb"),
        *(f"{name}.{kind}" for name in ("compare", "curves") for kind in ("png", "svg")),
    }


def test_each_job_of_a_sweep_has_a_process_of_its_own(swept: tuple) -> None:
    _, folder, processes = swept
    (sweep, *_), *jobs = processes
    assert len({sweep, *(pid for pid, *_ in jobs)}) == 3 and {parent for _, parent, *_ in jobs} == {sweep}
    assert [arguments[-1] for arguments in jobs] == [f"hydra.run.dir={folder / str(job)}" for job in range(2)]


def test_a_job_of_a_sweep_needs_what_it_needs_alone(swept: tuple, tmp_path: Path) -> None:
    _, folder, _ = swept
    words = [str(word) for word in yaml.safe_load((folder / "1" / "overrides.yaml").read_text())]
    alone = train(tmp_path, *words, "hydra.run.dir=alone", frills=True)
    assert alone.code == 0, alone.err
    assert (tmp_path / "alone" / "memory.json").read_text() == (folder / "1" / "memory.json").read_text()


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


def test_the_runs_of_a_sweep_can_be_compared_later(
    swept: tuple, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, folder, _ = swept
    assert face("compare", folder, "-o", tmp_path / "later") == 0 and "Comparison of 2 runs" in capsys.readouterr().out
    for name in ("compare.csv", "compare.html"):
        assert (tmp_path / "later" / name).read_bytes() == (folder / name).read_bytes()
    assert face("compare", ROOT / "unet3d") == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "unet3d: not a run folder" in error


def test_a_sweep_that_predicts_stays_in_one_process(tmp_path: Path) -> None:
    """Its jobs are compared all the same; the one that fails in an unforeseen way ends no other."""
    closed = ["model.in_channels=1", "model.classes=3", "dry_run=true"]
    words = [*TINY, *closed, "-m", "ckpt=0,2,3", f"hydra.sweep.dir={tmp_path}"]
    done = train(tmp_path, *words, hook=start_nothing_and_lose_one, frills=True)
    assert done.code == 1 and "run 1 failed: RuntimeError('lost')" in done.out, done.err
    with (tmp_path / "compare.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["status"].partition(":")[0] for row in rows] == ["predicted", "failed", "predicted"]
    assert int(rows[2]["peak_predicted_bytes"]) < int(rows[0]["peak_predicted_bytes"])
    assert not (tmp_path / "wandb").exists()


def start_nothing_and_lose_one() -> None:
    predict = preflight.preflight

    def lose(config: Config, options: Model) -> preflight.Preflight:
        if config.ckpt == 2:
            raise RuntimeError("lost")
        return predict(config, options)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a process")

    preflight.preflight, subprocess.Popen = lose, refuse


def sweep_of(place: Path, act: str) -> subprocess.CompletedProcess[str]:
    """Two jobs that do this as they begin, and then wait; the sweep does not."""
    (place / "sitecustomize.py").write_text(
        "import contextlib, os, signal, sys\n"
        "if any('hydra.run.dir' in word for word in sys.orig_argv):\n"
        f"    sys.path.insert(0, {str(ROOT)!r})\n"
        "    from unet3d import signals\n"
        "    stopping = signals.stopping\n"
        "    @contextlib.contextmanager\n"
        "    def waiting():\n"
        "        with stopping() as stop:\n"
        f"            {act}; signal.pause()\n"
        "            yield stop\n"
        "    signals.stopping = waiting\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(place))
        return run("-m", *TINY, "seed=0,1", f"hydra.sweep.dir={place / 'sweep'}", cwd=place)


def test_an_interrupted_job_ends_the_sweep_in_good_order(tmp_path: Path) -> None:
    """Only the sweep's process gets the signal; the job, asked by it, still writes its STATUS, and no job follows."""
    done = sweep_of(tmp_path, "os.kill(os.getppid(), signal.SIGINT)")
    assert done.returncode == 75, done.stderr
    assert (tmp_path / "sweep" / "0" / "STATUS").read_text() == (
        "stopped by SIGTERM; there is no snapshot yet to go on from\nexit code 75\n"
    )
    assert not (tmp_path / "sweep" / "1").exists()
    assert f"python -m unet3d compare {tmp_path / 'sweep'}" in done.stderr


def test_the_folder_that_is_checked_is_the_one_that_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("multirun").touch()
    train_command.refuse_unwritable(["seed=0"])
    with pytest.raises(UserError, match=r"^multirun: .* give hydra.sweep.dir=FOLDER"):
        train_command.refuse_unwritable(["seed=0,1", "-m"])
    train_command.refuse_unwritable(["seed=0,1", "hydra.sweep.dir=elsewhere", "-m"])


def test_a_process_that_was_killed_is_named_by_its_signal() -> None:
    code, _ = lifecycle.run_process([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"])
    assert code == 137 and lifecycle.fate(code) == "killed by SIGKILL"
    assert lifecycle.run_process([sys.executable, "-c", "raise SystemExit(4)"]) == (4, False)


def test_a_job_that_was_stopped_alone_does_not_end_the_sweep(tmp_path: Path) -> None:
    done = sweep_of(tmp_path, "os.kill(os.getpid(), signal.SIGTERM)")
    assert done.returncode == 75 and "sweep interrupted" not in done.stderr, done.stderr
    for job in "01":
        assert (tmp_path / "sweep" / job / "STATUS").read_text().startswith("stopped by SIGTERM")
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
        (137, "failed: killed by SIGKILL\nexit code 137\n", "- ckpt=3\n"),
    ):
        monkeypatch.setattr(lifecycle, "run_process", lambda *_, code=code: (code, False))
        assert sweep.run_job(tmp_path, ["ckpt=3"], []) == code
        assert (status.read_text(), overrides.read_text()) == (text, words)

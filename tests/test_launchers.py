"""Sweeps that joblib, submitit and Slurm run: real processes, real signals, one table from the jobs' folders."""

import csv
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from guards import nothing, without
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.core.singleton import Singleton
from jobs import SITE, sweep_of
from promises import promise
from slurm import one_node
from training import ROOT, TINY, planned, records, status, train

from unet3d.base.errors import UserError
from unet3d.cli import lifecycle, sweep

THREE = [*TINY, "data.root=../a,../file,../b"]  # job 1 fails


def installed(launcher: str) -> pytest.MarkDecorator:
    package = f"hydra_plugins.hydra_{launcher}_launcher"
    is_here = find_spec("hydra_plugins") is not None and find_spec(package) is not None
    return pytest.mark.skipif(not is_here, reason=f"hydra-{launcher}-launcher is not installed: pip install -e .[test]")


def swept(place: Path, *words: str, job: str, environment: dict[str, str] | None = None) -> CompletedProcess[str]:
    """A sweep to `place`/sweep, beside whose folder are two files."""
    place.mkdir(exist_ok=True)
    (place.parent / "file").touch()
    (place.parent / "other_file").touch()
    return sweep_of(place, *words, job=job, environment=environment)


def check_jobs(done: CompletedProcess[str], folder: Path, codes: tuple[int, ...] = (0, 2, 0)) -> None:
    """One table, each job's STATUS, the exit code of those that failed."""
    assert done.returncode == max(codes), done.stderr
    with (folder / "compare.csv").open() as file:
        rows = list(csv.DictReader(file))
    ends = ["failed" if code else "done" for code in codes]
    assert [(row["run"], row["status"].partition(":")[0]) for row in rows] == [*zip("012", ends, strict=True)]
    lines = [status(folder / str(job)).splitlines()[-1] for job in range(3)]
    assert lines == [f"exit code {code}" for code in codes]
    assert done.stdout.count("run 1 failed") == 1, "one table"


def check_requeued(done: CompletedProcess[str], folder: Path, name: str) -> None:
    """As `check_jobs`; job 2 was stopped once, and took each step once."""
    check_jobs(done, folder)
    assert [record["step"] for record in records(folder / "2") if "train/loss" in record] == [1, 2, 3, 4]
    logs = "".join(path.read_text() for path in folder.glob(".submitit/*/*_log.*"))
    assert logs.count(f"resume={folder / '2'}") == logs.count("Requeued job") == 1
    (said,) = [line for line in logs.splitlines() if f"resume={folder / '2'}" in line]
    assert name in said


@promise(
    "Training",
    "the same of a sweep by joblib or submitit; a scheduler's SIGTERM, SIGUSR1 or SIGUSR2 to a job",
    "STATUS says how each job ended; table and exit code follow it; a requeued job resumes in its folder",
)
@pytest.mark.slow
@installed("joblib")
def test_joblib_runs_every_job_whatever_becomes_of_one(tmp_path: Path) -> None:
    """Of two processes each has a job that fails, and then one of them another."""
    place = tmp_path / "place"
    place.mkdir()
    os.mkfifo(place / "meeting")
    words = [*TINY, "data.root=../file,../other_file,../b", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]
    check_jobs(swept(place, *words, job="meets_another"), place / "sweep", codes=(2, 2, 0))


@promise("Training", "the same of a ...")
@installed("submitit")
@pytest.mark.slow
def test_submitit_runs_every_job_and_one_that_it_requeues_goes_on_in_its_folder(tmp_path: Path) -> None:
    """Job 2 and the process that started it get SIGUSR2 in its second step; it is saved, requeued and completed."""
    place = tmp_path / "place"
    done = swept(place, *THREE, "hydra/launcher=submitit_local", job="signalled_by(jobs.signal_with_parent, '2')")
    check_requeued(done, place / "sweep", "SIGUSR2")


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A Slurm of one node."""
    if "SLURM_FOLDER" not in os.environ:
        pytest.skip("no Slurm: SLURM_FOLDER does not name its programs; tests/slurm.py says how to get them")
    (tmp_path / "slurm").mkdir()
    with one_node(tmp_path / "slurm") as environment:
        yield environment


@installed("submitit")
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_slurm_runs_every_job_and_one_that_it_requeues_goes_on_in_its_folder(
    slurm: dict[str, str], tmp_path: Path
) -> None:
    """Job 2 asks Slurm for the signal that comes before a time limit; Slurm requeues it after two minutes."""
    words = ["hydra/launcher=slurm", "hydra.launcher.gpus_per_node=null", "hydra.launcher.cpus_per_task=1"]
    job = "signalled_by(jobs.scancel('USR2'), '2')"
    done = swept(tmp_path / "place", *THREE, *words, job=job, environment=slurm)
    check_requeued(done, tmp_path / "place" / "sweep", "SIGUSR2")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_job_script_that_slurm_signals_and_requeues_is_completed_in_its_folder(
    slurm: dict[str, str], tmp_path: Path
) -> None:
    """The script of docs/running.md; it ends twice: by SIGUSR1 in its second step, and once it is done."""
    (tmp_path / "sitecustomize.py").write_text(SITE.format("signalled_by(jobs.scancel('USR1'))"))
    words = " ".join([*TINY, "wandb.mode=disabled", "hydra.run.dir=run", "resume=auto", "requeue=true"])
    (tmp_path / "job.sh").write_text(
        f"#!/bin/bash\n#SBATCH --requeue --open-mode=append\nsrun {sys.executable} {ROOT / 'train.py'} {words}\n"
    )
    slurm["PYTHONPATH"] = str(tmp_path)
    sbatch = ["sbatch", "--parsable", "--output=log", "job.sh"]
    number = subprocess.run(sbatch, cwd=tmp_path, env=slurm, check=True, capture_output=True, text=True).stdout.strip()
    wait = ["srun", f"--dependency=afterany:{number}", "true"]  # a requeued job has not ended
    subprocess.run(wait, cwd=tmp_path, env=slurm, check=True, capture_output=True, timeout=500)
    assert status(tmp_path / "run") == "done\nexit code 0\n", (tmp_path / "log").read_text()
    (said,) = [line for line in (tmp_path / "log").read_text().splitlines() if "SIGUSR1" in line]
    assert f"resume={tmp_path / 'run'}" in said
    assert [record["step"] for record in records(tmp_path / "run") if "train/loss" in record] == [1, 2, 3, 4]


@promise("Training", "the same of a ...")
@pytest.mark.slow
@installed("joblib")
@pytest.mark.parametrize("jobs", ["seed=0", "seed=0,1,2"], ids=["an idle process", "more jobs than processes"])
def test_a_sweep_that_is_stopped_ends_its_jobs_in_good_order_and_begins_no_other(jobs: str, tmp_path: Path) -> None:
    """Of two processes. The last job to begin signals the sweep's own process alone, and all jobs wait."""
    begun = min(2, jobs.count(",") + 1)
    words = [*TINY, jobs, "hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]
    done = swept(tmp_path, *words, job=f"stops_all({begun})")
    assert done.returncode == 75, done.stderr
    assert f"resume=auto hydra.sweep.dir={tmp_path / 'sweep'}" in done.stderr
    assert "error: hydra/launcher=joblib" not in done.stderr, "one of its processes was ended"
    assert sorted(path.name for path in (tmp_path / "sweep").iterdir() if path.name.isdecimal()) == [*"01"][:begun]
    for job in range(begun):
        text = status(tmp_path / "sweep" / str(job))
        assert text.startswith("stopped") and "SIGTERM" in text and "resume=" not in text


@promise("Training", "a launcher that is ...")
@without("unet3d.cli.lifecycle.refuse_used", nothing)
def test_a_sweep_goes_on_only_when_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = [*TINY, "seed=0,1", "hydra.sweep.dir=sweep"]
    (tmp_path / "sweep" / "1" / "checkpoints").mkdir(parents=True)
    (tmp_path / "sweep" / "1" / "checkpoints" / "last.pt").touch()
    with pytest.raises(UserError, match=r"^\S*sweep/1: .*\bresume\b"):
        sweep.plan(words)
    jobs = sweep.plan([*words, "resume=auto"])
    assert [(job.config.seed, job.folder) for job in jobs] == [(n, tmp_path / "sweep" / str(n)) for n in range(2)]
    assert [job.composed.task_overrides for job in jobs] == [[*TINY, f"seed={number}"] for number in range(2)]


@promise("Training", "the same of a ...")
@pytest.mark.slow
@pytest.mark.parametrize("flags", [[], ["-m"]], ids=["as it was begun", "-m"])
def test_the_sweep_of_an_experiment_goes_on_with_all_its_jobs(flags: list[str], tmp_path: Path) -> None:
    jobs = planned(["experiment=cicek2016_semi", "resume=auto", f"hydra.sweep.dir={tmp_path}", *flags])
    assert [job.folder for job in jobs] == [tmp_path / str(number) for number in range(9)]
    asked = {(job.config.model.norm, str(job.config.model.kernels), job.config.data.sparse_fold) for job in jobs}
    assert len(asked) == 9


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["resume=auto"], ["resume=auto: ", "hydra.sweep.dir=runs/a"]),
        (["resume=runs/a"], ["resume=FOLDER", "resume=auto hydra.sweep.dir=FOLDER"]),
        (["requeue=true"], ["requeue=true", "hydra/launcher=slurm"]),
        (["hydra.sweep.subdir=a"], ["/a: ", "hydra.sweep.subdir"]),
    ],
)
def test_a_sweep_that_cannot_be_is_one_line(
    words: list[str], parts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as caught:
        sweep.plan(["seed=0,1", *words])
    text = str(caught.value)
    assert all(part in text for part in parts) and "\n" not in text, text
    assert list(tmp_path.iterdir()) == []


@promise(
    "Training",
    "a launcher that is missing or refuses the jobs; a job that is lost or never begins; a sweep's "
    "folder that holds runs",
    "one line; a row and exit 1; refused without `resume=auto`",
)
@pytest.mark.parametrize(
    ("launcher", "package"),
    [("joblib", "joblib"), ("submitit_local", "submitit"), ("submitit_slurm", "submitit"), ("slurm", "submitit")],
)
@without("unet3d.config.words.LAUNCHERS", {}, only="joblib-joblib")
def test_a_launcher_that_is_not_installed_is_one_line(launcher: str, package: str, tmp_path: Path) -> None:
    done = train(tmp_path / "place", "-m", "seed=0,1", f"hydra/launcher={launcher}", hook=without_plugins)
    assert done.code == 2 and done.err.count("\n") == 1
    assert f"pip install hydra-{package}-launcher" in done.err
    assert {path.name for path in (tmp_path / "place").iterdir()} == {"out", "err"}


def without_plugins() -> None:
    """Undo that Hydra has found plugins, and let it find none."""
    sys.modules["hydra_plugins"] = None  # type: ignore[assignment]
    Singleton._instances.pop(Plugins, None)
    launchers = ConfigStore.instance().repo["hydra"]["launcher"]
    for name in ("joblib", "submitit_local", "submitit_slurm"):
        launchers.pop(f"{name}.yaml", None)


@promise("Training", "a launcher that is ...")
@pytest.mark.slow
def test_a_job_that_never_began_is_a_row_that_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Job 0 ran; job 1 was lost with its process; job 2 was never started; job 3's folder belongs to another run."""
    monkeypatch.chdir(tmp_path)
    jobs = sweep.plan([*TINY, "seed=0,1,2,3", "hydra.sweep.dir=sweep"])
    for job in jobs[3:]:
        job.folder.mkdir(parents=True)
        lifecycle.write_end(job.folder, "done", 0)

    def launch() -> None:
        for job, end in zip(jobs, (("done", 0), None), strict=False):
            job.folder.mkdir(parents=True)
            (job.folder / "STATUS").write_text("running\n")
            if end:
                lifecycle.write_end(job.folder, *end)

    assert sweep.run(jobs, launch) == 2
    text = status(jobs[2].folder)
    assert text.startswith("failed: ") and text.endswith("\nexit code 1\n")
    with (tmp_path / "sweep" / "compare.csv").open() as file:
        rows = [row["status"].partition(":")[0] for row in csv.DictReader(file)]
    assert rows == ["done", "running", "failed", "done"]
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(": ")[0] for line in lines] == [str(job.folder) for job in jobs[1:3]]


@promise("Training", "a launcher that is ...")
def test_a_launcher_that_fails_is_one_line_and_leaves_no_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    jobs = sweep.plan([*TINY, "seed=0,1", "hydra.sweep.dir=sweep"])

    def launch() -> None:
        raise RuntimeError("sbatch: error: invalid\npartition")

    assert sweep.run(jobs, launch) == 1 and list(tmp_path.iterdir()) == []
    line = "error: hydra/launcher=basic: RuntimeError: sbatch: error: invalid partition\n"  # the queue's own words
    assert capsys.readouterr() == ("", line)

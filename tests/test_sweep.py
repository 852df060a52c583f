"""Sweeps, here and by joblib, submitit and Slurm: real processes, real signals, one table from the jobs' folders."""

import csv
import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import yaml
from guards import nothing, without
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.core.singleton import Singleton
from jobs import sweep_of
from promises import promise
from slurm import one_node
from training import ROOT, TINY, face, planned, records, run, status, train
from wandb_records import read_run

from unet3d.base.errors import UserError
from unet3d.cli import lifecycle, sweep
from unet3d.config.schema import Config, Model
from unet3d.memory import prediction

CODES = "\x1b[2J\x07\x9b\u202e"
THREE = [*TINY, "data.root=../a,../file,../b"]  # job 1 fails


def table(folder: Path) -> list[dict[str, str]]:
    with (folder / "compare.csv").open() as file:
        return list(csv.DictReader(file))


def ends(folder: Path) -> list[str]:
    """How each job ended, as the table has it."""
    return [row["status"].partition(":")[0] for row in table(folder)]


# --- planned


@promise("Training", "a launcher that is ...")
@without("unet3d.cli.lifecycle.refuse_used", nothing)
def test_a_sweep_goes_on_only_when_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = [*TINY, "seed=0,1", "hydra.sweep.dir=sweep", "-m"]
    (tmp_path / "sweep" / "1" / "checkpoints").mkdir(parents=True)
    (tmp_path / "sweep" / "1" / "checkpoints" / "last.pt").touch()
    with pytest.raises(UserError, match=r"^\S*sweep/1: .*\bresume\b"):
        planned(words)
    jobs = planned([*words, "resume=auto"])
    assert [(job.config.seed, job.folder) for job in jobs] == [(n, tmp_path / "sweep" / str(n)) for n in range(2)]
    assert [job.composed.task_overrides for job in jobs] == [[*TINY, f"seed={number}"] for number in range(2)]


@promise("Training", "the same of a ...")
@pytest.mark.slow
def test_the_sweep_of_an_experiment_goes_on_with_all_its_jobs(tmp_path: Path) -> None:
    jobs = planned(["experiment=cicek2016_semi", "resume=auto", f"hydra.sweep.dir={tmp_path}"])
    assert [job.folder for job in jobs] == [tmp_path / str(number) for number in range(9)]
    asked = {(job.config.model.norm, str(job.config.model.kernels), job.config.data.sparse_fold) for job in jobs}
    assert len(asked) == 9


def test_the_folders_that_are_checked_are_those_that_are_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("multirun").touch()
    with pytest.raises(UserError, match=r"^multirun/.*hydra.sweep.dir=FOLDER"):
        planned(["seed=0,1", "-m"])
    jobs = planned(["seed=0,1", "hydra.sweep.subdir=${hydra.job.override_dirname}", "hydra.sweep.dir=a", "-m"])
    assert [job.folder for job in jobs] == [tmp_path / "a" / "seed=0", tmp_path / "a" / "seed=1"]


@promise(
    "Training",
    "a launcher that is missing or refuses the jobs; a job that is lost or never begins; a sweep's "
    "folder that holds runs",
    "one line; a row and exit 1; refused without `resume=auto`",
)
@pytest.mark.parametrize(("launcher", "package"), [("joblib", "joblib"), ("slurm", "submitit")])
@without("unet3d.config.words.LAUNCHERS", {}, only="joblib")
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


# --- launched in this process


@pytest.fixture
def four(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[sweep.Job]:
    """Jobs of a sweep to `sweep` that have not begun."""
    monkeypatch.chdir(tmp_path)
    return planned([*TINY, "seed=0,1,2,3", "hydra.sweep.dir=sweep", "-m"])


@promise("Training", "a launcher that is ...")
@pytest.mark.slow
def test_a_job_that_never_began_is_a_row_that_says_so(
    four: list[sweep.Job], capsys: pytest.CaptureFixture[str]
) -> None:
    """Job 0 ran; job 1 was lost with its process; job 2 was never started; job 3's folder belongs to another run."""
    for job in four[3:]:
        job.folder.mkdir(parents=True)
        lifecycle.write_end(job.folder, "done", 0)

    def launch() -> None:
        for job in four[:2]:
            job.folder.mkdir(parents=True)
            (job.folder / "STATUS").write_text("running\n")
        lifecycle.write_end(four[0].folder, "done", 0)

    assert sweep.run(four, launch) == 2
    text = status(four[2].folder)
    assert text.startswith("failed: ") and text.endswith("\nexit code 1\n")
    assert ends(Path("sweep")) == ["done", "running", "failed", "done"]
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(": ")[0] for line in lines] == [str(job.folder) for job in four[1:3]]


def test_a_comparison_that_cannot_be_saved_is_one_line(
    four: list[sweep.Job], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("sweep/compare.csv").mkdir(parents=True)

    def launch() -> None:
        for job in four:
            job.folder.mkdir()
            lifecycle.write_end(job.folder, "done", 0)

    assert sweep.run(four, launch) == 2
    assert re.fullmatch(r"error: \S*sweep: .*Is a directory.*\n", capsys.readouterr().err)


@promise("Training", "a launcher that is ...")
def test_a_launcher_that_fails_is_one_line_and_leaves_no_table(
    four: list[sweep.Job], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def launch() -> None:
        raise RuntimeError("sbatch: error: invalid\npartition")

    assert sweep.run(four, launch) == 1 and list(tmp_path.iterdir()) == []
    line = "error: hydra/launcher=basic: RuntimeError: sbatch: error: invalid partition\n"  # the queue's own words
    assert capsys.readouterr() == ("", line)


@pytest.mark.parametrize(
    ("code", "text", "words"),
    [(2, "running\n", "- ckpt=2\n"), (137, "failed: killed by SIGKILL\nexit code 137\n", "- ckpt=3\n")],
)
def test_a_job_that_was_refused_leaves_the_run_there_as_it_is(
    code: int, text: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be running, or be resumed; one that was killed is recorded."""
    (tmp_path / "STATUS").write_text("running\n")
    os.utime(tmp_path / "STATUS", ns=(1, 1))
    (tmp_path / "overrides.yaml").write_text("- ckpt=2\n")
    monkeypatch.setattr(lifecycle, "run_process", lambda *_: (code, False))
    assert sweep.run_job(tmp_path, ["ckpt=3"], []) == code
    assert (status(tmp_path), (tmp_path / "overrides.yaml").read_text()) == (text, words)


# --- predicted


@promise(
    "Training",
    "a job of a sweep fails or is killed; a sweep is interrupted",
    "the others finish and the comparison shows it; the job ends in order and no other begins",
)
@pytest.mark.slow
def test_a_sweep_that_predicts_stays_in_one_process_and_a_failed_job_stops_no_other(
    tmp_path: Path, finished: Path
) -> None:
    """One breaks its budget, one fails in an unforeseen way. A flag may stand between words."""
    found = json.loads((finished / "memory.json").read_text())
    memory = {name: found[name] for name in ("parameters", "predicted")}
    words = [*TINY, "model.in_channels=1", "model.classes=3", f"wandb.project='a{CODES}'", "dry_run=true"]
    words += ["-m", "ckpt=0,2,3", f"hydra.sweep.dir='{tmp_path}/a{CODES}'"]
    done = train(tmp_path, *words, hook=functools.partial(start_nothing, memory))
    assert done.code == 2 and "RuntimeError('lost')" in done.out and done.err.count("error: budget=1MiB: ") == 1
    assert (done.out + done.err).replace("\n", "").isprintable() and r"a\x1b[2J\x07\x9b\u202e/compare.html" in done.out
    folder = tmp_path / f"a{CODES}"
    assert ends(folder) == ["predicted", "failed", "failed"]
    assert table(folder)[0]["peak_predicted_bytes"] == str(memory["predicted"]["peak_bytes"])
    assert json.loads((folder / "0" / "memory.json").read_text()) == memory
    assert not (folder / "wandb").exists() and not (folder / "2" / "memory.json").exists()


def start_nothing(memory: dict) -> None:
    """In the place of a simulation: this memory, or an error for segments; no process."""

    def predict(config: Config, _: Model, before: Any = None) -> prediction.Preflight:
        if config.ckpt == 3:
            raise UserError("budget=1MiB: too little")
        if config.ckpt == 2:
            raise RuntimeError("lost")
        return prediction.Preflight((), memory)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a process")

    prediction.preflight = predict
    subprocess.Popen = refuse  # type: ignore[assignment,misc]


# --- in processes


FIRST_IS_KILLED = f"""
import os, signal, sys
print(os.getpid(), os.getppid(), *sys.orig_argv, sep="|", file=open({{processes!r}}, "a"))
if sys.orig_argv[-1].endswith("sweep/0"):
    os.kill(os.getpid(), signal.SIGKILL)
if sys.orig_argv[-1].endswith("sweep/1"):
    sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}]
    import training
    training.pixels_alone()
"""
Swept = tuple[CompletedProcess[str], Path, list[list[str]]]


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Swept:
    """A sweep whose first job is killed as it starts, and whose second is the run of `finished`, without pictures.

    Also its folder, and pid, parent's pid and arguments of each process.
    """
    place = tmp_path_factory.mktemp("swept")
    (place / "sitecustomize.py").write_text(FIRST_IS_KILLED.format(processes=str(place / "processes")))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(place))
        done = run("-m", *TINY, "amp=true", "ckpt=0,2", f"hydra.sweep.dir={place / 'sweep'}", cwd=place)
    processes = [line.split("|") for line in (place / "processes").read_text().splitlines()]
    ours = [line for line in processes if any(word.endswith(("train.py", "unet3d.cli.train")) for word in line)]
    return done, place / "sweep", ours


@promise("What scripts rely on", "exit code 128 + n", "a job of a sweep was killed by signal n")
@promise("Training", "a job of a ...")
@pytest.mark.slow
def test_a_sweep_ends_with_its_comparison_and_a_failed_job_is_a_row(swept: Swept, tmp_path: Path) -> None:
    """The table is the one that `compare` makes of the folder later."""
    done, folder, _ = swept
    assert done.returncode == 128 + 9, done.stderr
    killed, trained = table(folder)
    assert (killed["run"], killed["ckpt"], trained["run"], trained["ckpt"]) == ("0", "0", "1", "2")
    assert killed["status"].startswith("failed") and "SIGKILL" in killed["status"] and trained["status"] == "done"
    assert killed["peak_measured_bytes"] == killed["error_bytes"] == "" and trained["error_bytes"] == "0"
    peak = json.loads((folder / "1" / "memory.json").read_text())["measured"]["peak_bytes"]
    assert trained["peak_measured_bytes"] == str(peak)
    assert "SIGKILL" in done.stdout and f" {peak / 2**20:.1f} " in done.stdout
    log = folder / "1" / "log.txt"
    assert "For a methods section" in log.read_text() and "For a methods section" not in done.stdout
    ending = rf"job 1: done; Dice.*; peak memory, measured {peak / 2**20:.1f} MiB; all of it: .*1/log.txt"
    assert re.search(ending, done.stdout) and re.search(r"job 0: failed; all of it: .*sweep/0$", done.stdout, re.M)
    assert {path.name for path in folder.iterdir()} == {
        *("0", "1", "compare.csv", "compare.html", "multirun.yaml", "wandb"),
        *(f"{name}.{kind}" for name in ("compare", "curves") for kind in ("png", "svg")),
    }
    assert face("compare", folder, "-o", tmp_path / "later") == 0 and table(tmp_path / "later") == table(folder)


@pytest.mark.slow
def test_each_job_of_a_sweep_has_a_process_of_its_own_and_needs_what_it_needs_alone(
    swept: Swept, finished: Path
) -> None:
    _, folder, processes = swept
    (parent, *_), *jobs = processes
    assert len({parent, *(pid for pid, *_ in jobs)}) == 3 and {process for _, process, *_ in jobs} == {parent}
    assert [arguments[-1] for arguments in jobs] == [f"hydra.run.dir={folder / str(job)}" for job in range(2)]
    words = yaml.safe_load((folder / "1" / "overrides.yaml").read_text())
    assert [word.lower() for word in words] == [*TINY, "amp=true", "ckpt=2"]
    assert (folder / "1" / "memory.json").read_text() == (finished / "memory.json").read_text()


@pytest.mark.slow
def test_the_sweeps_wandb_run_holds_the_table(swept: Swept) -> None:
    _, folder, _ = swept
    found = read_run(folder)
    (path,) = folder.glob("wandb/*run-*/files/media/table/compare_*.table.json")
    written = json.loads(path.read_text())
    assert written["columns"] == [*table(folder)[0]] and [row[0] for row in written["data"]] == ["0", "1"]
    assert found.exit_code == 0 and str(folder.parent) not in path.read_text()
    named = [(run.display_name, run.run_group) for run in (found.run, read_run(folder / "1").run)]
    assert named == [("sweep", "sweep"), ("sweep-1", "sweep")], "one group for a sweep's jobs and its table"


@promise("Training", "a job of a ...")
@pytest.mark.slow
def test_an_interrupted_job_ends_the_sweep_in_good_order(tmp_path: Path) -> None:
    """Only the sweep's process gets the signal; the job, asked by it, still writes its STATUS, and no job follows."""
    done = sweep_of(tmp_path, *TINY, "seed=0,1", job="interrupts_the_sweep")
    assert done.returncode == 75, done.stderr
    assert re.fullmatch(r"stopped(?!.*resume=).*SIGTERM.*\nexit code 75\n", status(tmp_path / "sweep" / "0"))
    assert not (tmp_path / "sweep" / "1").exists()
    assert f"python -m unet3d compare {tmp_path / 'sweep'}" in done.stderr


@pytest.mark.slow
def test_a_job_that_was_stopped_alone_does_not_end_the_sweep(tmp_path: Path) -> None:
    done = sweep_of(tmp_path, *TINY, "seed=0,1", job="stops_itself")
    assert done.returncode == 75 and "resume=auto" not in done.stderr, done.stderr
    for job in "01":
        assert re.match(r"stopped.*SIGTERM", status(tmp_path / "sweep" / job))
    assert (tmp_path / "sweep" / "compare.csv").exists()


# --- by joblib, submitit and Slurm


def installed(launcher: str) -> pytest.MarkDecorator:
    package = f"hydra_plugins.hydra_{launcher}_launcher"
    is_here = find_spec("hydra_plugins") is not None and find_spec(package) is not None
    return pytest.mark.skipif(not is_here, reason=f"hydra-{launcher}-launcher is not installed: pip install -e .[test]")


@pytest.fixture
def launched(tmp_path: Path) -> Callable[..., CompletedProcess[str]]:
    """A sweep to tmp_path/place/sweep, beside whose folder are two files."""
    place = tmp_path / "place"
    place.mkdir()
    os.mkfifo(place / "meeting")
    (tmp_path / "file").touch()
    (tmp_path / "other_file").touch()
    return functools.partial(sweep_of, place)


def check_jobs(done: CompletedProcess[str], folder: Path, codes: tuple[int, ...] = (0, 2, 0)) -> None:
    """One table, each job's STATUS, the exit code of those that failed."""
    assert done.returncode == max(codes), done.stderr
    assert ends(folder) == ["failed" if code else "done" for code in codes]
    lines = [status(folder / str(job)).splitlines()[-1] for job in range(3)]
    assert lines == [f"exit code {code}" for code in codes]
    assert done.stdout.count("run 1 failed") == 1, "one table"


def check_requeued(done: CompletedProcess[str], folder: Path) -> None:
    """As `check_jobs`; job 2 was stopped once, and took each step once."""
    check_jobs(done, folder)
    assert [record["step"] for record in records(folder / "2") if "train/loss" in record] == [1, 2, 3, 4]
    logs = "".join(path.read_text() for path in folder.glob(".submitit/*/*_log.*"))
    assert logs.count("Requeued job") == 1
    (said,) = [line for line in logs.splitlines() if f"resume={folder / '2'}" in line]
    assert "SIGUSR2" in said


@promise(
    "Training",
    "the same of a sweep by joblib or submitit; a scheduler's SIGTERM, SIGUSR1 or SIGUSR2 to a job",
    "STATUS says how each job ended; table and exit code follow it; a requeued job resumes in its folder",
)
@pytest.mark.slow
@installed("joblib")
def test_joblib_runs_every_job_whatever_becomes_of_one(launched: Callable, tmp_path: Path) -> None:
    """Of two processes each has a job that fails, and then one of them another."""
    words = [*TINY, "data.root=../file,../other_file,../b", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]
    check_jobs(launched(*words, job="meets_another"), tmp_path / "place" / "sweep", codes=(2, 2, 0))


@promise("Training", "the same of a ...")
@pytest.mark.slow
@installed("submitit")
def test_submitit_runs_every_job_and_one_that_it_requeues_goes_on_in_its_folder(
    launched: Callable, tmp_path: Path
) -> None:
    """Job 2 and the process that started it get SIGUSR2 in its second step; it is saved, requeued and completed."""
    done = launched(*THREE, "hydra/launcher=submitit_local", job="signalled_by(jobs.signal_with_parent, '2')")
    check_requeued(done, tmp_path / "place" / "sweep")


@promise("Training", "the same of a ...")
@pytest.mark.slow
@installed("joblib")
@pytest.mark.parametrize(("seeds", "begun"), [("0", 1), ("0,1,2", 2)], ids=["idle process", "more jobs than processes"])
def test_a_sweep_that_is_stopped_ends_its_jobs_in_good_order_and_begins_no_other(
    seeds: str, begun: int, tmp_path: Path
) -> None:
    """Of two processes. The last job to begin signals the sweep's own process alone, and all jobs wait."""
    words = [*TINY, f"seed={seeds}", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]
    done = sweep_of(tmp_path, *words, job=f"stops_all({begun})")
    assert done.returncode == 75, done.stderr
    assert f"resume=auto hydra.sweep.dir={tmp_path / 'sweep'}" in done.stderr
    assert "error: hydra/launcher=joblib" not in done.stderr, "one of its processes was ended"
    assert sorted(path.name for path in (tmp_path / "sweep").iterdir() if path.name.isdecimal()) == [*"01"][:begun]
    for job in range(begun):
        assert re.match(r"stopped(?!.*resume=).*SIGTERM", status(tmp_path / "sweep" / str(job)))


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
    launched: Callable, slurm: dict[str, str], tmp_path: Path
) -> None:
    """Job 2 asks Slurm for the signal that comes before a time limit; Slurm requeues it after two minutes."""
    words = ["hydra/launcher=slurm", "hydra.launcher.gpus_per_node=null", "hydra.launcher.cpus_per_task=1"]
    done = launched(*THREE, *words, job="signalled_by(jobs.scancel('USR2'), '2')", environment=slurm)
    check_requeued(done, tmp_path / "place" / "sweep")

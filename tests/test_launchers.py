"""Sweeps that joblib, submitit and Slurm run: real processes, real signals, one table from the jobs' folders."""

import csv
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from slurm import one_node
from training import ROOT, TINY, records, run, status

from unet3d.cli import lifecycle, sweep
from unet3d.cli import train as cli_train
from unet3d.errors import UserError

THREE = [*TINY, "data.root=../a,../file,../b"]  # job 1 cannot make its phantoms
QUICK = f"""
import os, signal, sys
if any("hydra.run.dir" in word for word in sys.orig_argv):
    sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}]
    import training
    training.without_frills()
    {{}}
"""
WAITING = """
    import contextlib
    from pathlib import Path
    from unet3d import signals
    stopping = signals.stopping
    def stop_all():
        parent = int(Path(f"/proc/{{os.getppid()}}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(parent, signal.SIGTERM)
    @contextlib.contextmanager
    def waiting():
        with stopping() as stop:
            {}; signal.pause()
            yield stop
    signals.stopping = waiting
"""
ONCE = """
    def once():
        if not os.path.exists("signalled"):
            open("signalled", "w").close()
            arrived, wakeup = os.pipe()
            os.set_blocking(wakeup, False)
            signal.set_wakeup_fd(wakeup)
            {}
            os.read(arrived, 1)  # waits for the signal
    if {}:
        training.call(training.Loggers, "scalars", 2, once)
"""
JOB_2 = "'data.root=../b' in sys.orig_argv"
SLURM = "os.system('scancel --signal={} $SLURM_JOB_ID')"  # to all processes of the step


def installed(launcher: str) -> pytest.MarkDecorator:
    package = f"hydra_plugins.hydra_{launcher}_launcher"
    is_here = find_spec("hydra_plugins") is not None and find_spec(package) is not None
    return pytest.mark.skipif(not is_here, reason=f"hydra-{launcher}-launcher is not installed: pip install -e .[test]")


def swept(place: Path, *words: str, hook: str = "") -> subprocess.CompletedProcess[str]:
    """A sweep to `place`/sweep, of jobs that predict and report nothing."""
    place.mkdir(exist_ok=True)
    (place.parent / "file").touch()
    (place / "sitecustomize.py").write_text(QUICK.format(hook.strip()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(place))
        patch.setenv("WANDB_MODE", "disabled")
        return run("-m", *words, "hydra.sweep.dir=sweep", cwd=place, patience=500)


def check_three(done: subprocess.CompletedProcess[str], folder: Path) -> None:
    """One table, three STATUS, the exit code of the job that failed."""
    assert done.returncode == 2, done.stderr
    assert done.stdout.count("Comparison of 3 runs") == 1
    with (folder / "compare.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["run"], row["status"].partition(":")[0]) for row in rows] == [
        *(("0", "done"), ("1", "failed"), ("2", "done"))
    ]
    ends = [status(folder / str(job)).splitlines()[-1] for job in range(3)]
    assert ends == ["exit code 0", "exit code 2", "exit code 0"]


def check_requeued(done: subprocess.CompletedProcess[str], folder: Path, name: str) -> None:
    """As `check_three`; job 2 was stopped once, and took each step once."""
    check_three(done, folder)
    assert [record["step"] for record in records(folder / "2") if "train/loss" in record] == [1, 2, 3, 4]
    logs = "".join(path.read_text() for path in folder.glob(".submitit/*/*_log.*"))
    assert logs.count(f"stopped by {name} after step 2 of 4; to go on") == logs.count("Requeued job") == 1


@installed("joblib")
def test_joblib_runs_every_job_whatever_becomes_of_one(tmp_path: Path) -> None:
    done = swept(tmp_path / "place", *THREE, "steps=2", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2")
    check_three(done, tmp_path / "place" / "sweep")


@installed("submitit")
def test_submitit_runs_every_job_and_one_that_it_requeues_goes_on_in_its_folder(tmp_path: Path) -> None:
    """Job 2 and the process that started it get SIGUSR2 in its second step; it is saved, requeued and completed."""
    act = "for process in (os.getpid(), os.getppid()): os.kill(process, signal.SIGUSR2)"
    hook = ONCE.format(act, JOB_2)
    done = swept(tmp_path / "place", *THREE, "hydra/launcher=submitit_local", hook=hook)
    check_requeued(done, tmp_path / "place" / "sweep", "SIGUSR2")


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
    with pytest.MonkeyPatch.context() as patch:
        for name, value in slurm.items():
            patch.setenv(name, value)
        done = swept(tmp_path / "place", *THREE, *words, hook=ONCE.format(SLURM.format("USR2"), JOB_2))
    check_requeued(done, tmp_path / "place" / "sweep", "SIGUSR2")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_job_script_that_slurm_signals_and_requeues_is_completed_in_its_folder(
    slurm: dict[str, str], tmp_path: Path
) -> None:
    """The script of docs/running.md; it ends twice: by SIGUSR1 in its second step, and once it is done."""
    code = QUICK.format(ONCE.format(SLURM.format("USR1"), "True").strip())
    (tmp_path / "sitecustomize.py").write_text(code)
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
    assert "stopped by SIGUSR1 after step 2 of 4; to go on" in (tmp_path / "log").read_text()
    assert [record["step"] for record in records(tmp_path / "run") if "train/loss" in record] == [1, 2, 3, 4]


@installed("joblib")
@pytest.mark.parametrize("jobs", ["seed=0", "seed=0,1,2"], ids=["an idle process", "more jobs than processes"])
def test_a_sweep_that_is_stopped_ends_its_jobs_in_good_order_and_begins_no_other(jobs: str, tmp_path: Path) -> None:
    """Of two processes. The last job to begin signals the sweep's own process alone, and all jobs wait."""
    begun = min(2, jobs.count(",") + 1)
    hook = WAITING.format(f"os.mkdir(f'begun{{os.getpid()}}'); len([*Path().glob('begun*')]) == {begun} and stop_all()")
    done = swept(tmp_path, *TINY, jobs, "hydra/launcher=joblib", "hydra.launcher.n_jobs=2", hook=hook)
    assert done.returncode == 75, done.stderr
    assert "sweep interrupted; to go on: the same command with resume=auto hydra.sweep.dir=" in done.stderr
    assert "error: hydra/launcher=joblib" not in done.stderr, "one of its processes was ended"
    assert sorted(path.name for path in (tmp_path / "sweep").iterdir() if path.name.isdecimal()) == [*"01"][:begun]
    for job in range(begun):
        assert status(tmp_path / "sweep" / str(job)).startswith("stopped by SIGTERM; there is no snapshot yet")


def test_a_sweep_goes_on_only_when_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = [*TINY, "seed=0,1", "hydra.sweep.dir=sweep", "-m"]
    (tmp_path / "sweep" / "1" / "checkpoints").mkdir(parents=True)
    (tmp_path / "sweep" / "1" / "checkpoints" / "last.pt").touch()
    with pytest.raises(UserError, match=r"sweep/1: holds a run already; choose another folder, or resume it$"):
        sweep.plan(words)
    jobs = sweep.plan([*words, "resume=auto"])
    assert [(job.config.seed, job.folder) for job in jobs] == [(n, tmp_path / "sweep" / str(n)) for n in range(2)]
    assert sweep.arguments([*words, "resume=auto"], jobs) == [*words[:-1], f"hydra.sweep.dir={tmp_path}/sweep", "-m"]


@pytest.mark.parametrize("flags", [[], ["-m"]], ids=["as it was begun", "-m"])
def test_the_sweep_of_an_experiment_goes_on_with_all_its_jobs(flags: list[str], tmp_path: Path) -> None:
    words = cli_train.checked_arguments(
        ["experiment=cicek2016_semi", "resume=auto", f"hydra.sweep.dir={tmp_path}", *flags]
    )
    jobs = sweep.plan(words)
    assert [job.folder for job in jobs] == [tmp_path / str(number) for number in range(9)]
    asked = {(job.config.model.norm, str(job.config.model.kernels), job.config.data.sparse_fold) for job in jobs}
    assert len(asked) == 9


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["resume=auto"], r"resume=auto: goes on in the folder of a sweep; name it: hydra.sweep.dir=runs/a"),
        (["resume=runs/a"], r"resume=FOLDER and requeue=true are for one run; a sweep goes on with resume=auto .*"),
        (["requeue=true"], r"resume=FOLDER and requeue=true are for one run; .* hydra/launcher=slurm requeues .*"),
        (["hydra.sweep.subdir=a"], r"/.*/a: would be the folder of two jobs; leave out hydra.sweep.subdir"),
    ],
)
def test_a_sweep_that_cannot_be_is_one_line(
    words: list[str], line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as caught:
        sweep.plan(["seed=0,1", *words])
    assert re.fullmatch(line, str(caught.value)) and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("launcher", "package"),
    [("joblib", "joblib"), ("submitit_local", "submitit"), ("submitit_slurm", "submitit"), ("slurm", "submitit")],
)
def test_a_launcher_that_is_not_installed_is_one_line(launcher: str, package: str, tmp_path: Path) -> None:
    code = "import sys; sys.modules['hydra_plugins'] = None; from unet3d.cli import train; sys.exit(train.main())"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        done = run("-m", "seed=0,1", f"hydra/launcher={launcher}", cwd=tmp_path, code=code)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert done.stderr.endswith(f": is not installed; pip install hydra-{package}-launcher\n")
    assert list(tmp_path.iterdir()) == []


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
    captured = capsys.readouterr()
    assert (
        captured.out.count("Comparison of 4 runs") == 1
        and status(jobs[2].folder) == "failed: did not begin\nexit code 1\n"
    )
    assert captured.err.splitlines() == [
        f"{jobs[1].folder}: the job was lost, or still runs",
        f"{jobs[2].folder}: the job did not begin",
    ]


def test_a_launcher_that_fails_is_one_line_and_leaves_no_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    jobs = sweep.plan([*TINY, "seed=0,1", "hydra.sweep.dir=sweep"])

    def launch() -> None:
        raise RuntimeError("sbatch: error: invalid\npartition")

    assert sweep.run(jobs, launch) == 1 and list(tmp_path.iterdir()) == []
    line = "error: hydra/launcher=basic: RuntimeError: sbatch: error: invalid partition\n"
    assert capsys.readouterr() == ("", line)

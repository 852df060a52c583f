"""A sweep: Hydra's launcher starts its jobs, here or on a cluster; their run folders say how they ended. No torch."""

import os
import re
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from unet3d.base import signals
from unet3d.base.errors import Preempted, UserError, reason
from unet3d.cli import lifecycle
from unet3d.config import compose
from unet3d.config.compose import Job

QUEUES = ("slurm", "submitit_slurm")  # launchers whose jobs do not need this process
GOES_ON = "resume=auto"
stopped = threading.Event()  # set once this process may begin no more jobs


def plan(words: Sequence[str]) -> list[Job]:
    """The jobs of a command line. Raises UserError before any begins."""
    overrides = [word for word in words if not word.startswith("-") and word != GOES_ON]
    if GOES_ON in words and not any(word.startswith("hydra.sweep.dir=") and "${" not in word for word in words):
        raise UserError(f"{GOES_ON}: goes on in the folder of a sweep; name it: hydra.sweep.dir=runs/a")
    jobs: list[Job] = []
    for number, job in enumerate(compose.sweep(overrides)):
        jobs.append(compose.job([*job, *map(_in_folder, jobs[:1])], number))
        _refuse(jobs, GOES_ON in words)
    return jobs


def _in_folder(job: Job) -> str:
    return lifecycle.path_option("hydra.sweep.dir", job.sweep_folder)


def _refuse(jobs: Sequence[Job], goes_on: bool) -> None:
    """Raise UserError where the last of these jobs cannot begin."""
    *others, (_, config, folder, _, _) = jobs
    if config.resume is not None or config.requeue:
        what = f"a sweep goes on with {GOES_ON} hydra.sweep.dir=FOLDER, and hydra/launcher=slurm requeues its jobs"
        raise UserError(f"resume=FOLDER and requeue=true are for one run; {what}")
    if folder in {other.folder for other in others}:
        raise UserError(f"{folder}: would be the folder of two jobs; leave out hydra.sweep.subdir")
    if folder.is_dir() and not goes_on:
        with lifecycle.hold_folder(folder) as is_locked:
            lifecycle.refuse_used(folder, config.dry_run, is_locked)


def arguments(words: Sequence[str], jobs: Sequence[Job]) -> list[str]:
    """The command line for Hydra: it names the folder, which would else depend on the time in each process."""
    overrides = [word for word in words if not word.startswith("-") and word != GOES_ON]
    return [*overrides, _in_folder(jobs[0]), *(word for word in words if word.startswith("-"))]


def run(jobs: Sequence[Job], launch: Callable[[], None]) -> int:
    """Launch the jobs, wait for them, compare them. Returns the highest exit code that their folders name."""
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [sys.path[0], os.environ.get("PYTHONPATH")]))
    os.environ["HYDRA_FULL_ERROR"] = "1"  # else Hydra prints a trace and exits
    launcher, before, codes = jobs[0].launcher, [lifecycle.status(job.folder)[0] for job in jobs], [0]
    try:
        with signals.handled(lambda number, _: _stop(number, launcher)):
            launch()
    except KeyboardInterrupt:
        stopped.set()
    except Exception as error:  # of the launcher: a queue that refuses the jobs, a worker that was killed
        codes.append(lifecycle.print_error(f"error: hydra/launcher={launcher}: {reason(error)}", 1))
    if stopped.is_set():
        return _interrupted(jobs)
    if max(codes) and before == [lifecycle.status(job.folder)[0] for job in jobs]:
        return max(codes)  # none has begun
    from unet3d.report import compare

    try:
        codes += map(_exit_code, jobs, before)
        compare.finish_sweep({job.folder: job.config for job in jobs}, jobs[0].sweep_folder)
    except OSError as error:
        line = f"error: {jobs[0].sweep_folder}: the comparison is not saved ({error.strerror})"
        codes.append(lifecycle.print_error(line, UserError.exit_code))
    return max(codes)


def _stop(number: int, launcher: str) -> None:
    """Ask the processes that run jobs to end in good order. Jobs in Slurm's queue go on: only this process ends."""
    if launcher in QUEUES or (number == signal.SIGINT and stopped.is_set()):
        raise KeyboardInterrupt
    stopped.set()
    for worker in _children(os.getpid()):
        if _children(worker):  # it has a job; one that waits for the next would die, and joblib would kill the others
            with suppress(ProcessLookupError):
                os.kill(worker, signal.SIGTERM)


def _children(process: int) -> list[int]:
    """Return the processes that a process has started and that have not ended.

    From each process's own entry in /proc: `children` there may leave some out while others end (proc(5)).
    """
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, parent = entry.read_bytes().rpartition(b")")[2].split()[:2]  # a name before it may be any bytes
            if int(parent) == process and state != b"Z":
                found.append(int(entry.parent.name))
    return found


def _interrupted(jobs: Sequence[Job]) -> int:
    what = f"to go on: the same command with {GOES_ON} {_in_folder(jobs[0])}"
    if jobs[0].launcher in QUEUES:
        what = "its jobs go on"
    command = f"python -m unet3d compare {shlex.quote(str(jobs[0].sweep_folder))}"
    code = max(Preempted.exit_code, *(_code(job.folder) or 0 for job in jobs))
    return lifecycle.print_error(f"sweep interrupted; {what}; to compare its finished jobs: {command}", code)


def _code(folder: Path) -> int | None:
    """The exit code in STATUS; None while the job runs."""
    found = re.search(r"exit code (\d+)\n\Z", lifecycle.status(folder)[1])
    return int(found[1]) if found else None


def _exit_code(job: Job, before: int) -> int:
    """The exit code of a job that wrote its STATUS last at `before` (ns), 0: never."""
    after, code = lifecycle.status(job.folder)[0], _code(job.folder)
    if after != before:
        return lifecycle.print_error(f"{job.folder}: the job was lost, or still runs", 1) if code is None else code
    if before:  # the run that is there stays as it is; the job said why
        return UserError.exit_code
    job.folder.mkdir(parents=True, exist_ok=True)
    lifecycle.save_overrides(job.folder, job.words)
    lifecycle.write_end(job.folder, "failed: did not begin", 1)
    return lifecycle.print_error(f"{job.folder}: the job did not begin", 1)


def run_job(folder: Path, overrides: list[str], searched: list[str]) -> int:
    """Run a job in a process of its own, which goes on where its folder has a checkpoint. Returns its exit code."""
    before, _ = lifecycle.status(folder)
    words = [*overrides, *searched, GOES_ON, lifecycle.path_option("hydra.run.dir", folder.resolve())]
    code, is_asked = lifecycle.run_process([sys.executable, "-m", "unet3d.cli.train", *words])
    if is_asked:
        stopped.set()
    after, text = lifecycle.status(folder)
    is_refused = code == UserError.exit_code and before == after != 0  # the run that is there stays as it is
    if code and not is_refused and (before == after or text == lifecycle.RUNNING):
        lifecycle.save_overrides(folder, overrides)
        line = f"failed: {lifecycle.describe_exit(code)}"
        lifecycle.write_end(folder, line, lifecycle.print_error(line, code))
    return code

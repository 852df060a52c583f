"""A sweep: Hydra's launcher starts its jobs, here or on a cluster; their run folders say how they ended. No torch."""

import os
import re
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from hydra._internal.callbacks import Callbacks
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, OmegaConf, open_dict

from unet3d.base import signals
from unet3d.base.errors import Preempted, UserError, escaped, reason
from unet3d.base.files import from_here
from unet3d.cli import lifecycle
from unet3d.config import compose
from unet3d.config.compose import Composed
from unet3d.config.schema import Config
from unet3d.config.words import in_one_line, path_option

QUEUES = ("slurm", "submitit_slurm")  # launchers whose jobs do not need this process
GOES_ON = "resume=auto"
FOLDER = "hydra.sweep.dir"
LOG = "log.txt"  # What a job printed, in its run folder.
stopped = threading.Event()  # set once this process may begin no more jobs


@dataclass(frozen=True)
class Job:
    """A run that is to begin, alone or as a job of a sweep."""

    composed: Composed
    config: Config  # checked
    folder: Path
    number: int | None = None  # among a sweep's jobs, from 0


def plan(overrides: Sequence[str]) -> list[Job]:
    """Return the jobs of a sweep, each composed once. Raises UserError before any begins."""
    goes_on = GOES_ON in overrides
    words = [word for word in overrides if word != GOES_ON]
    if goes_on and not any(word.startswith(f"{FOLDER}=") and "${" not in word for word in words):
        raise UserError(f"{GOES_ON}: goes on in the folder of a sweep; name it: {FOLDER}=runs/a")
    composed = _compose_each(words)
    added = compose.added_sweep(words, composed)
    if added:
        composed = _compose_each([*words, *added])
    jobs: list[Job] = []
    for number, one in enumerate(composed):
        with open_dict(one.tree), in_one_line():
            one.tree.hydra.job.num = number
            folder = one.sweep_folder / str(one.tree.hydra.sweep.subdir)
        job = Job(one, compose.load(one.options), folder, number)
        if job.config.resume is not None or job.config.requeue:
            advice = f"a sweep goes on with {GOES_ON} {FOLDER}=FOLDER, and hydra/launcher=slurm requeues its jobs"
            raise UserError(f"resume=FOLDER and requeue=true are for one run; {advice}")
        if folder in {other.folder for other in jobs}:
            raise UserError(f"{folder}: would be the folder of two jobs; leave out hydra.sweep.subdir")
        if folder.is_dir() and not goes_on:
            with lifecycle.hold_folder(folder) as is_locked:
                lifecycle.refuse_used(folder, job.config.dry_run, is_locked)
        jobs.append(job)
    return jobs


def _compose_each(words: Sequence[str]) -> list[Composed]:
    """Compose the overrides of each job; all name the folder of the first, which may depend on the time."""
    composed: list[Composed] = []
    for job in compose.sweep(words):
        named = [path_option(FOLDER, composed[0].sweep_folder)] if composed else []
        composed.append(compose.compose_tree([*job, *named]))
    return composed


def run(jobs: Sequence[Job], launch: Callable[[], None]) -> int:
    """Launch the jobs, wait for them, compare them. Return the highest exit code that their folders name."""
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [sys.path[0], os.environ.get("PYTHONPATH")]))
    os.environ["HYDRA_FULL_ERROR"] = "1"  # By default Hydra prints a trace and exits.
    launcher = jobs[0].composed.choice("hydra/launcher")
    before = [lifecycle.status(job.folder)[0] for job in jobs]
    codes = [0]
    try:
        with signals.handled(lambda number, _: _stop(number, launcher)):
            launch()
    except KeyboardInterrupt:
        stopped.set()
    except Exception as error:  # A queue may refuse jobs, a worker may be killed.
        codes.append(lifecycle.print_error(f"error: hydra/launcher={launcher}: {reason(error)}", 1))
    if stopped.is_set():
        return _interrupted(jobs)
    if max(codes) and before == [lifecycle.status(job.folder)[0] for job in jobs]:
        return max(codes)  # none has begun
    from unet3d.report import compare

    try:
        for job, written in zip(jobs, before, strict=True):
            codes.append(_exit_code(job, written))
        compare.finish_sweep(({job.folder: job.config for job in jobs}), jobs[0].composed.sweep_folder)
    except OSError as error:
        line = f"error: {jobs[0].composed.sweep_folder}: the comparison is not saved ({error.strerror})"
        codes.append(lifecycle.print_error(line, UserError.exit_code))
    return max(codes)


def launch(jobs: Sequence[Job], command_line: Sequence[str], task: Callable[[DictConfig], None]) -> None:
    """Let Hydra's launcher call the task for each job, here or on a cluster; return once all have ended.

    `command_line`: the overrides of the sweep, for multirun.yaml.
    """
    first = jobs[0].composed
    tree = deepcopy(first.tree)  # The tree has the launcher and its options.
    with open_dict(tree):
        tree.hydra.mode = RunMode.MULTIRUN
        # Without it the name would be of the time in each process.
        tree.hydra.overrides.hydra.append(path_option(FOLDER, first.sweep_folder))
        tree.hydra.overrides.task = [word for word in command_line if not word.startswith("hydra")]
    first.sweep_folder.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(tree, first.sweep_folder / "multirun.yaml")
    overrides = [job.composed.task_overrides for job in jobs]
    size = tree.hydra.sweeper.get("max_batch_size") or len(jobs)
    with compose.hydra_initialized():
        callbacks = Callbacks(tree)
        context = HydraContext(GlobalHydra.instance().config_loader(), callbacks)
        callbacks.on_multirun_start(config=tree, config_name=compose.CONFIG_NAME)
        launcher = Plugins.instance().instantiate_launcher(context, task, tree)
        for number in range(0, len(jobs), size):
            for end in launcher.launch(overrides[number : number + size], initial_job_idx=number):
                _ = end.return_value  # raises the error of a job
        callbacks.on_multirun_end(config=tree, config_name=compose.CONFIG_NAME)


def _stop(number: int, launcher: str) -> None:
    """Ask the processes that run jobs to end in good order. Jobs in Slurm's queue continue: only this process ends."""
    is_again = number == signal.SIGINT and stopped.is_set()
    stopped.set()
    if launcher in QUEUES or is_again:
        raise KeyboardInterrupt
    for worker in _children(os.getpid()):
        if _children(worker):  # it has a job; one that waits for the next would die, and joblib would kill the others
            with suppress(ProcessLookupError):
                os.kill(worker, signal.SIGTERM)


def _children(process: int) -> list[int]:
    """Return the processes that a process has started and that have not ended.

    From each process's own entry in /proc: `children` there may leave some out while others end (proc(5)).
    """
    children = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            after_name = entry.read_bytes().rpartition(b")")[2]  # a name before it may be any bytes
            state, parent = after_name.split()[:2]
            if int(parent) == process and state != b"Z":
                children.append(int(entry.parent.name))
    return children


def _interrupted(jobs: Sequence[Job]) -> int:
    """Print how to continue a sweep that was stopped. Return its exit code."""
    folder = jobs[0].composed.sweep_folder
    remedy = f"to go on: the same command with {GOES_ON} {path_option(FOLDER, folder)}"
    if jobs[0].composed.choice("hydra/launcher") in QUEUES:
        remedy = "its jobs go on"
    command = f"python -m unet3d compare {shlex.quote(str(folder))}"
    code = max(Preempted.exit_code, *(_code(job.folder) or 0 for job in jobs))
    return lifecycle.print_error(f"sweep interrupted; {remedy}; to compare its finished jobs: {command}", code)


def _code(folder: Path) -> int | None:
    """Return the exit code in STATUS; None while the job runs."""
    match = re.search(r"exit code (\d+)\n\Z", lifecycle.status(folder)[1])
    return int(match[1]) if match else None


def _exit_code(job: Job, before: int) -> int:
    """Return the exit code of a job that wrote its STATUS last at `before` (ns), 0: never."""
    if lifecycle.status(job.folder)[0] != before:
        code = _code(job.folder)
        return lifecycle.print_error(f"{job.folder}: the job was lost, or still runs", 1) if code is None else code
    if before:  # the run that is there is not changed; the job said why
        return UserError.exit_code
    job.folder.mkdir(parents=True, exist_ok=True)
    lifecycle.save_overrides(job.folder, job.composed.task_overrides)
    lifecycle.write_end(job.folder, "failed: did not begin", 1)
    return lifecycle.print_error(f"{job.folder}: the job did not begin", 1)


@contextmanager
def log_of(folder: Path) -> Iterator[IO[str] | None]:
    """Yield the file that gets what a job prints; None where it cannot be written. One that stays empty is removed."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK  # a pipe would be waited for
    try:
        file = open(os.open(folder / LOG, flags, 0o666), "a")  # noqa: SIM115
    except OSError:
        yield None
        return
    with file:
        is_ours = lifecycle.is_of_one_name(file)
        yield file if is_ours else None
        if is_ours and not os.fstat(file.fileno()).st_size:
            (folder / LOG).unlink(missing_ok=True)


def print_result(number: int, folder: Path) -> None:
    """Print a line on how a job ended: its score, its peak, and where the rest is."""
    from unet3d.report.compared_runs import compared, ending
    from unet3d.report.report import highlights
    from unet3d.run.record import read_run

    try:
        run = read_run(folder)
    except UserError as error:
        lifecycle.print_error(f"job {number}: {error}")
        return
    parts = [ending(compared("", run).numbers["status"])]
    parts += [f"{name} {value}" for name, value in highlights(run).items() if name.startswith(("Dice", "peak"))]
    where = folder / LOG if (folder / LOG).is_file() else folder
    print(escaped(f"job {number}: {'; '.join(parts)}; all of it: {from_here(where)}"), flush=True)


def run_job(folder: Path, overrides: list[str], searchpath_overrides: list[str]) -> int:
    """Run a job in its own process, which resumes where its folder has a checkpoint. Return its exit code.

    `searchpath_overrides` add the folders of YAML files that `overrides` may name.
    """
    before, _ = lifecycle.status(folder)
    words = [*overrides, *searchpath_overrides, GOES_ON, path_option("hydra.run.dir", folder.resolve())]
    with log_of(folder) as log:
        code, is_asked = lifecycle.run_process([sys.executable, "-m", "unet3d.cli.train", *words], log)
    if is_asked:
        stopped.set()
    after, text = lifecycle.status(folder)
    is_refused = code == UserError.exit_code and before == after != 0  # the run that is there is not changed
    if code and not is_refused and (before == after or text == lifecycle.RUNNING):
        lifecycle.save_overrides(folder, overrides)
        line = f"failed: {lifecycle.describe_exit(code)}"
        lifecycle.write_end(folder, line, lifecycle.print_error(line, code))
    return code

"""A job alone in its run folder: lock, child processes, exit code and STATUS. Free of torch."""

import errno
import fcntl
import os
import signal
import stat
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from types import FrameType
from typing import IO

from omegaconf import OmegaConf

from unet3d.base import errors, process, ranks, signals
from unet3d.base.errors import LoaderError, NotSaved, OutOfMemory, Preempted, RankLost, UserError, escaped, warn
from unet3d.base.files import read_text, read_yaml, refuse_links_out, write_text
from unet3d.base.signals import INTERRUPTED
from unet3d.config import compose
from unet3d.config.schema import Config, options_with
from unet3d.config.words import path_option, plain
from unet3d.run import run_folder

LOCK = ".lock"
OVERRIDES = "overrides.yaml"  # the command line's options
RUNNING = "running\n"  # STATUS as a run begins
CUT_SHORT = tuple(f"exit code {code}\n" for code in (UserError.exit_code, Preempted.exit_code, INTERRUPTED))
# How STATUS begins where another process of the run was lost: what `LoaderError` and `RankLost` say.
LOST = tuple(f"failed: {how}" for how in ("rank ", "no batch of ", "DataLoader ", "no room in shared", "too many open"))
TrainingJob = Callable[[Config, Path, signals.Stop], None]  # ends early, by Preempted, once it is asked to stop
GRACE = 10  # seconds in which a process that was interrupted twice may end by itself


def print_error(line: str, code: int = 0) -> int:
    """Print lines on stderr, whatever they quote. Return the exit code."""
    print(errors.escaped(line, keep="\n"), file=sys.stderr)
    return code


def run(job: TrainingJob, config: Config, folder: Path, overrides: list[str]) -> tuple[int, BaseException | None]:
    """Run a job alone in its folder. Return its exit code, and the error that ended it, which stderr says in a line."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        refuse_links_out(folder)
        with hold_folder(folder) as is_locked:
            if config.resume is None:
                refuse_used(folder, config.dry_run, is_locked)
            return _run_in(folder, job, config, overrides)
    except (UserError, OSError) as error:  # before the job began
        _, line, code = _ended(error, folder)
        return print_error(line, code), error


def _run_in(folder: Path, job: TrainingJob, config: Config, overrides: list[str]) -> tuple[int, BaseException | None]:
    """Run a job in the folder that it holds, and write STATUS once it has ended, whatever ended it."""
    before, _ = status(folder)
    earlier = earlier_overrides(folder) if config.resume is not None else []
    asked = [override for override in overrides if not override.startswith("resume=")]
    if config.resume is not None:
        asked.insert(0, "resume=auto")  # The report shows a run's commands.
    save_overrides(folder, [*earlier, *asked])
    if config.resume is None:
        write_text(folder / "config.yaml", compose.to_yaml(config))  # `compare` reads it however the run ends.
    # A dry run has nothing to save: SIGINT interrupts it, and other signals end it at once, as Python does by default.
    ends_at_once = config.dry_run and ranks.SIZE == 1
    with nullcontext() if ends_at_once else signals.handled(lambda *_: None, is_last=True):
        try:
            with signals.interrupted() if ends_at_once else signals.stopping() as stop:
                job(config, folder, stop)
        except (Exception, KeyboardInterrupt, Preempted, SystemExit) as caught:
            error, line, code = _ended(caught, folder)
            if config.resume is not None and status(folder)[0] == before:
                with suppress(OSError):  # the disk is full
                    save_overrides(folder, earlier)  # the run in the folder is as it was
            else:
                write_end(folder, line, code)
            if isinstance(error, Preempted) and config.requeue:
                requeue()
            print_error(line)
            ranks.end_if_stuck(code)
            return code, error
    write_end(folder, "done", 0)
    return 0, None


def run_as_follower_rank(job: TrainingJob) -> int:
    """Run this rank's part of a run, and return the exit code. The first rank alone reads options and writes."""
    folder = Path()
    with open(os.devnull, "w") as nowhere, signals.handled(lambda *_: None, is_last=True):
        try:
            with redirect_stdout(nowhere), redirect_stderr(nowhere), signals.stopping() as stop:
                message = ranks.wait_for_job(stop)
                if message is not None:
                    values, name = message
                    folder = Path(name)
                    job(compose.from_plain(values), folder, stop)
            return 0
        except (Exception, KeyboardInterrupt, Preempted, SystemExit) as caught:
            error, line, code = _ended(caught, folder)
            ranks.publish_failure(error)
        print_error(f"rank {ranks.RANK}: {line}")
        ranks.end_if_stuck(code)
        return code


def _ended(error: BaseException, folder: Path) -> tuple[BaseException, str, int]:
    """Return the error that ended a job, its last line, and the exit code; print a traceback of a surprise.

    A SystemExit, which code of the user's own has raised, is an error that says so.
    """
    if isinstance(error, SystemExit):
        problem = f"code of your own asked to exit the program ({errors.reason(error)}); it may only raise errors"
        error = RuntimeError(problem).with_traceback(error.__traceback__)
    ending = foreseen(error, folder, how_to_go_on(folder))
    if ending is None:
        print_error("".join(traceback.format_exception(error)).rstrip())
        return error, f"failed: {error!r}", 1
    return error, *ending


def foreseen(error: BaseException, place: object, go_on: str = "") -> tuple[str, int] | None:
    """Return the last line and the exit code of an error that was foreseen; None for another.

    `place` stands for the file that no room was for, where the error names none.
    """
    code = getattr(error, "exit_code", UserError.exit_code)
    match error:
        case Preempted():
            parts = [str(error), go_on]
        case KeyboardInterrupt():
            parts, code = ["interrupted", go_on], INTERRUPTED
        case NotSaved():
            parts = [f"error: {error}", go_on]
        case LoaderError() | RankLost():
            parts = [f"failed: {error}\n{go_on}".rstrip()]
        case OutOfMemory():
            parts = [f"out of memory: {error}\n{go_on}".rstrip()]
        case errors.ForeseenError():
            parts = [f"error: {error}"]
        case OSError() if errors.is_disk_full(error):
            parts = [f"error: {error.filename or place}: {error.strerror}", errors.make_room(error), go_on]
        case _ if errors.is_out_of_memory(error):
            parts, code = [f"out of memory: {errors.reason(error)}", go_on], OutOfMemory.exit_code
        case _ if errors.is_out_of_files(error):
            parts = ["error: too many open files", errors.file_limit(), go_on]
        case _:
            return None
    return "; ".join(filter(None, parts)), code


def how_to_go_on(folder: Path) -> str:
    """Return the command that resumes the run, to be pasted into a shell.

    It names the run's own code again, which resuming takes from the command line alone.
    """
    if not checkpoints(folder):
        return "there is no checkpoint yet to go on from"
    words = [path_option("resume", folder)]
    with suppress(UserError, OSError, ValueError, AttributeError):  # resuming will say what is wrong with its config
        named = compose.flat(read_yaml(folder / "config.yaml"))
        words += [f"{name}={plain(named[name])}" for name in options_with("imports") if named.get(name)]
    return f"to go on: {process.training_command(words)}"


@contextmanager
def hold_folder(folder: Path) -> Iterator[bool]:
    """Hold the folder; yields False, after a warning, if it cannot be locked. Raises UserError if another holds it."""
    try:
        file = open(os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666), "r+")  # noqa: SIM115
    except OSError as error:
        raise UserError(f"{folder}: cannot be written to ({error.strerror}); choose another folder") from error
    with file:
        if not is_of_one_name(file):
            raise UserError(f"{folder / LOCK}: is not a file of this folder alone; remove it")
        is_locked = True
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # flock's would live on in a killed run's data workers
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                number = file.read(20).strip()  # the holder's process
                holder = f"process {number}" if number else "another process"
                raise UserError(f"{folder}: {holder} uses it; wait, or choose another folder") from None
            warn(f"{folder}: cannot be locked ({error.strerror}); use it once at a time")
            is_locked = False
        else:
            file.truncate(0)
            print(os.getpid(), file=file, flush=True)
        yield is_locked


def is_of_one_name(file: IO[str]) -> bool:
    """Return whether an open file is one, and no other name of a file that is elsewhere."""
    opened = os.fstat(file.fileno())
    return stat.S_ISREG(opened.st_mode) and opened.st_nlink == 1


def refuse_used(folder: Path, is_dry: bool, is_locked: bool) -> None:
    """Raise UserError where a run is, unless it was killed, stopped or refused before its first checkpoint."""
    has_checkpoint = bool(checkpoints(folder))
    has_records = (folder / "metrics.jsonl").exists()
    _, text = status(folder)
    was_lost = text.startswith(("failed: killed by ", *LOST))
    left_nothing = text == RUNNING or was_lost or text.endswith(CUT_SHORT)
    if has_checkpoint or (has_records and (is_dry or not is_locked or not left_nothing)):
        remedy = "choose another folder, or resume it" if has_checkpoint else "choose another folder"
        raise UserError(f"{folder}: holds a run already; {remedy}")
    if has_records:
        print_error(f"{folder}: the run here ended before its first checkpoint; it starts over")


def checkpoints(folder: Path) -> list[Path]:
    """Return the files that a run can resume from."""
    return [path for path in [folder / "checkpoints" / name for name in compose.CHECKPOINTS] if path.is_file()]


def status(folder: Path) -> tuple[int, str]:
    """Return when STATUS was last written, in ns (a run does so first), and its text; 0 and "" without one."""
    path = folder / "STATUS"
    if not path.is_file():
        return 0, ""
    return path.stat().st_mtime_ns, read_text(path)


def write_end(folder: Path, line: str, code: int) -> None:
    """Write STATUS of a run that has ended."""
    try:
        run_folder.write_status(folder, line, code)
    except OSError:  # the disk is full, which may be why: the file that is there has its own block
        with suppress(OSError), open(os.open(folder / "STATUS", os.O_WRONLY | os.O_NOFOLLOW), "w") as file:
            file.write(escaped(f"{line}\nexit code {code}\n", keep="\n"))
            file.truncate()


def save_overrides(folder: Path, overrides: list[str]) -> None:
    """Keep the command line's options, for `compare` and people."""
    write_text(folder / OVERRIDES, OmegaConf.to_yaml(OmegaConf.create(overrides)))


def earlier_overrides(folder: Path) -> list[str]:
    """Return what `save_overrides` kept, to be shown; an empty list if it is damaged."""
    with suppress(UserError):
        words = read_yaml(folder / OVERRIDES)
        return [str(word) for word in words] if isinstance(words, list) else []
    return []


def run_process(command: list[str], log: IO[str] | None = None) -> tuple[int, bool]:
    """Run the command to its end. Return its exit code, 128 + n by signal n, and whether this process got a signal.

    `log` gets its stdout; None: this process's.

    A signal is passed on as SIGTERM. Once the command has ended, the earlier handler is called: submitit's requeues.
    """
    child: subprocess.Popen[bytes] | None = None
    asked: list[int] = []

    def pass_on(number: int, _: FrameType | None) -> None:
        if number == signal.SIGINT and number in asked:
            raise KeyboardInterrupt
        asked.append(number)
        if child:
            child.terminate()

    with signals.handled(pass_on) as earlier:
        child = subprocess.Popen(command, stdout=log)
        if asked:  # while it started
            child.terminate()
        try:
            code = child.wait()
        except KeyboardInterrupt:
            with suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
                child.wait(GRACE)  # a terminal has interrupted it as well
            child.kill()  # A child that ignores the signal is still at work.
            child.wait()
            return INTERRUPTED, True
    for number in asked:
        if callable(earlier[number]) and earlier[number] is not signal.default_int_handler:
            earlier[number](number, None)
    if asked:  # the command got SIGTERM, whoever else has signalled it
        return (INTERRUPTED if code == INTERRUPTED else Preempted.exit_code), True
    return (code if code >= 0 else 128 - code), False


def describe_exit(code: int) -> str:
    """Return what ended a process that could not write it."""
    if code == Preempted.exit_code:
        return "stopped before it began"
    killers = {128 + number: number.name for number in signal.Signals}
    return f"killed by {killers[code]}" if code in killers else f"ended with exit code {code}"


def requeue() -> None:
    """Under Slurm, put this job back in the queue; a failure costs one line."""
    job = os.environ.get("SLURM_JOB_ID")
    if not job:
        warn("scontrol requeue: not a job of Slurm (no SLURM_JOB_ID); the job is not requeued")
        return
    try:
        done = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True)
        problem = (done.stderr.strip() or f"exit code {done.returncode}") if done.returncode else ""
    except OSError as error:
        problem = str(error)
    if problem:
        warn(f"scontrol requeue {job}: {problem}; the job is not requeued")

"""A job alone in its run folder: lock, streams, child processes, exit code and STATUS. Free of torch."""

import errno
import fcntl
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import FrameType
from typing import IO, Any, NamedTuple, TextIO, TypeVar

import yaml  # type: ignore[import-untyped]
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from unet3d import signals
from unet3d.compose import SNAPSHOTS
from unet3d.config import Config
from unet3d.errors import (
    LoaderError,
    NonFiniteLoss,
    NotSaved,
    OutOfMemory,
    Preempted,
    SnapshotError,
    UserError,
    is_disk_full,
    is_out_of_memory,
    reason,
)
from unet3d.files import write_text
from unet3d.report import run_folder
from unet3d.signals import Stop

NAME = ".lock"


@contextmanager
def hold_folder(folder: Path) -> Iterator[bool]:
    """Hold the folder, as long as the process lives at most; False where it cannot be locked, which is told.

    Raises UserError where another process holds it.

    A record lock (`lockf`), since `flock` would live on in the data workers of a run that was killed.
    """
    with _open(folder / NAME) as file:
        is_locked = True
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise UserError(f"{folder}: {_holder(folder)} uses it; wait, or choose another folder") from None
            print(f"warning: {folder}: cannot be locked ({error.strerror}); use it once at a time", file=sys.stderr)
            is_locked = False
        else:
            file.truncate(0)
            file.write(f"{os.getpid()}\n")
            file.flush()
        yield is_locked


def _open(path: Path) -> IO[str]:
    try:
        return path.open("a+")
    except OSError as error:
        raise UserError(f"{path.parent}: cannot be written to ({error.strerror}); choose another folder") from error


def _holder(folder: Path) -> str:
    """Told by what the holder wrote; a second descriptor, but no lock of ours is lost when it closes."""
    number = (folder / NAME).read_text().strip()
    return f"process {number}" if number else "another process"


INTERRUPTED = 130


GRACE = 10  # seconds in which a process that was interrupted twice ends by itself


class ProcessEnd(NamedTuple):
    code: int  # of the process, or 128 + n where signal n ended it
    is_asked: bool  # whether whoever waited for it was asked to stop


def run_process(command: Sequence[str]) -> ProcessEnd:
    """Run it to its end.

    Asked to stop, it asks the process and waits for it: SIGTERM, which does no harm to one that a terminal or a
    scheduler has told already. The code is 75 then, or 130 after a second SIGINT.
    """
    children: list[subprocess.Popen[bytes]] = []
    asked: list[int] = []

    def pass_on(number: int, _: FrameType | None) -> None:
        if number == signal.SIGINT and number in asked:
            raise KeyboardInterrupt
        asked.append(number)
        for child in children:
            child.terminate()

    with signals.handled(pass_on):
        children.append(child := subprocess.Popen(command))
        if asked:  # while it started
            child.terminate()
        try:
            code = child.wait()
        except KeyboardInterrupt:
            _end(child)
            return ProcessEnd(INTERRUPTED, is_asked=True)
    if asked:
        return ProcessEnd(INTERRUPTED if code == INTERRUPTED else Preempted.exit_code, is_asked=True)
    return ProcessEnd(code if code >= 0 else 128 - code, is_asked=False)


def _end(child: subprocess.Popen[bytes]) -> None:
    """A terminal has told the process as well; one that was not told, or does not listen, is killed."""
    try:
        child.wait(GRACE)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        child.kill()
        child.wait()


def fate(code: int) -> str:
    """What ended a process that could not say it itself."""
    if code == Preempted.exit_code:
        return "stopped before it began"
    killers = {number + 128: number.name for number in signal.Signals}
    return f"killed by {killers[code]}" if code in killers else f"ended with exit code {code}"


def requeue() -> None:
    """Under Slurm, put this job back in the queue. That it fails costs one line."""
    job = os.environ.get("SLURM_JOB_ID")
    if not job:
        print("warning: requeue=true: not a job of Slurm (no SLURM_JOB_ID); not requeued", file=sys.stderr)
        return
    try:
        done = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True)
        reason = done.stderr.strip() or f"exit code {done.returncode}" if done.returncode else ""
    except OSError as error:
        reason = str(error)
    if reason:
        print(f"warning: scontrol requeue {job}: {reason}; the job is not requeued", file=sys.stderr)


class SafeStream:
    """A text stream; once nobody reads it any more, what is written goes nowhere.

    A file on a full disk misses what is written meanwhile, but goes on once there is room.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            self._stream.write(text)
        except OSError as error:
            self._failed(error)
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._failed(error)

    def _failed(self, error: OSError) -> None:
        """What the stream still holds, and what Python flushes as it ends, goes nowhere, too."""
        if is_disk_full(error):
            return
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def install_safe_streams() -> None:
    """Make sys.stdout and sys.stderr such outlets, also where the process began without them."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number: else the first file opened would be stdout
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name) or open(descriptor, "w", closefd=False)  # noqa: SIM115 (for good)
        setattr(sys, name, SafeStream(stream))


Job = Callable[[Config, Path, Stop], None]


UNFORESEEN = 1


RUNNING = "running\n"  # STATUS as a run begins


CUT_SHORT = tuple(f"exit code {code}\n" for code in (UserError.exit_code, Preempted.exit_code, INTERRUPTED))


KILLED = "failed: killed by "  # said of a sweep's job


PLAIN = re.compile(r"[A-Za-z0-9_/.+%@:-]+")


Kind = TypeVar("Kind", list, dict)


OVERRIDES = "overrides.yaml"  # what the command line said, for `resume`


def has_ended(folder: Path) -> bool:
    """Whether the run could still say how it ended."""
    status = folder / "STATUS"
    return status.is_file() and status.read_text() != RUNNING


def guarded(job: Job, config: Config, folder: Path, overrides: list[str]) -> int:
    """Run the job in its folder, where nothing else may run."""
    try:
        with hold_folder(folder) as is_locked:
            if config.resume is None:
                _refuse_used(folder, config.dry_run, is_locked)
            return _told(job, config, folder, overrides)
    except UserError as error:
        return say(f"error: {error}", error.exit_code)
    except OSError as error:
        if not is_disk_full(error):
            raise
        return say(f"error: {error}; make room", UserError.exit_code)


def _told(job: Job, config: Config, folder: Path, overrides: list[str]) -> int:
    """Run the job; turn what can be foreseen into a last line, STATUS and an exit code."""
    before, earlier = started(folder), load_overrides(folder) if config.resume is not None else []
    save_overrides(folder, [override for override in overrides if not override.startswith("resume=")])
    try:
        with nullcontext(Stop()) if config.dry_run else signals.stopping() as stop:
            job(config, folder, stop)
    except (Exception, KeyboardInterrupt, Preempted) as error:
        line, code = _outcome(error, folder)
        if config.resume is not None and started(folder) == before:
            with suppress(OSError):  # the disk is full
                save_overrides(folder, earlier)  # the run in the folder is as it was
        else:
            write_end(folder, line, code)
        if isinstance(error, Preempted) and config.requeue:
            requeue()
        say(line, code)
        if code == UNFORESEEN and not isinstance(error, LoaderError):
            raise
        return code
    write_end(folder, "done", 0)
    return 0


def _outcome(error: BaseException, folder: Path) -> tuple[str, int]:
    """The last line of a job that ended so, and its exit code."""
    match error:
        case Preempted():
            return f"{error}; {how_to_go_on(folder)}", error.exit_code
        case NotSaved():
            return f"error: {error}; {how_to_go_on(folder)}", error.exit_code
        case UserError() | SnapshotError() | NonFiniteLoss():
            return f"error: {error}", error.exit_code
        case LoaderError():
            return f"failed: {error}\n{how_to_go_on(folder)}", error.exit_code
        case OutOfMemory():
            return f"out of memory: {error}\n{how_to_go_on(folder)}", error.exit_code
        case KeyboardInterrupt():
            return f"interrupted; {how_to_go_on(folder)}", INTERRUPTED
    if is_disk_full(error):
        return f"error: {error}; make room; {how_to_go_on(folder)}", UserError.exit_code
    if is_out_of_memory(error):
        told = (str(error) or repr(error)).splitlines()[0]  # a MemoryError may say nothing
        return f"out of memory: {told}; {how_to_go_on(folder)}", OutOfMemory.exit_code
    return f"failed: {error!r}", UNFORESEEN


def _refuse_used(folder: Path, is_dry: bool, is_locked: bool) -> None:
    """Raise UserError where a run is, but for one that was killed, stopped or refused before its first snapshot."""
    found, records = snapshots(folder), (folder / "metrics.jsonl").exists()
    if not found and not records:
        return
    status = folder / "STATUS"
    began = status.read_text() if status.is_file() else ""
    came_to_something = not (began == RUNNING or began.startswith(KILLED) or began.endswith(CUT_SHORT))
    if found or is_dry or not is_locked or came_to_something:
        advice = "choose another folder, or resume it" if found else "choose another folder"
        raise UserError(f"{folder}: holds a run already; {advice}")
    print(f"{folder}: the run here ended before its first snapshot; it begins anew", file=sys.stderr)


def save_overrides(folder: Path, overrides: list[str]) -> None:
    """What the command line said, for `resume`; whole or not at all."""
    write_text(folder / OVERRIDES, OmegaConf.to_yaml(OmegaConf.create(overrides)))


def load_overrides(folder: Path) -> list[str]:
    """The same, read back; unresolved, for it may ask for the environment."""
    return [*map(str, read_yaml(folder / OVERRIDES, list))]


def read_yaml(path: Path, kind: type[Kind]) -> Kind:
    """A list or a dictionary that a run has written. Raises UserError for anything else."""
    try:
        found = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except (OSError, UnicodeDecodeError, yaml.YAMLError, OmegaConfBaseException) as error:
        raise UserError(f"{path}: cannot be read ({reason(error)})") from error
    if not isinstance(found, kind):
        raise UserError(f"{path}: is damaged; it is not as a run has written it")
    return found


def how_to_go_on(folder: Path) -> str:
    if snapshots(folder):
        return f"to go on: python train.py {shlex.quote(f'resume={quoted(folder)}')}"
    return "there is no snapshot yet to go on from"


def quoted(path: Path) -> str:
    """A path as Hydra's command line takes it, which without quotes knows few letters."""
    if PLAIN.fullmatch(str(path)):
        return str(path)
    escaped = re.sub(r"(\\*)'", r"\1\1\'", str(path))  # a backslash is doubled only before a quote
    return "'" + re.sub(r"(\\+)$", r"\1\1", escaped) + "'"


def started(folder: Path) -> int | None:
    """When STATUS was last written, which a run does first."""
    status = folder / "STATUS"
    return status.stat().st_mtime_ns if status.is_file() else None


def write_end(folder: Path, line: str, code: int) -> None:
    """STATUS of a run that has ended."""

    with suppress(OSError):  # the disk is full, which may be why
        run_folder.write_status(folder, line, code)


def say(line: str, code: int) -> int:
    """The last line. Returns the exit code."""
    print(line, file=sys.stderr)
    return code


def snapshots(folder: Path) -> list[Path]:
    """What a run can go on from."""
    return [path for name in SNAPSHOTS if (path := folder / "checkpoints" / name).is_file()]

"""A job alone in its run folder; however it ends, a last line, STATUS and an exit code say so. Free of torch."""

import os
import re
import shlex
import sys
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TypeVar

import yaml  # type: ignore[import-untyped]
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from unet3d import lock, process, signals
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
from unet3d.process import INTERRUPTED
from unet3d.resuming import SNAPSHOTS
from unet3d.signals import Stop

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
        with lock.held(folder) as is_locked:
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
    before, earlier = started(folder), remembered(folder) if config.resume is not None else []
    remember(folder, [override for override in overrides if not override.startswith("resume=")])
    try:
        with nullcontext(Stop()) if config.dry_run else signals.stopping() as stop:
            job(config, folder, stop)
    except (Exception, KeyboardInterrupt, Preempted) as error:
        line, code = _outcome(error, folder)
        if config.resume is not None and started(folder) == before:
            with suppress(OSError):  # the disk is full
                remember(folder, earlier)  # the run in the folder is as it was
        else:
            end(folder, line, code)
        if isinstance(error, Preempted) and config.requeue:
            process.requeue()
        say(line, code)
        if code == UNFORESEEN and not isinstance(error, LoaderError):
            raise
        return code
    end(folder, "done", 0)
    return 0


def _outcome(error: BaseException, folder: Path) -> tuple[str, int]:
    """The last line of a job that ended so, and its exit code."""
    match error:
        case Preempted():
            return f"{error}; {_how_to_go_on(folder)}", error.exit_code
        case NotSaved():
            return f"error: {error}; {_how_to_go_on(folder)}", error.exit_code
        case UserError() | SnapshotError() | NonFiniteLoss():
            return f"error: {error}", error.exit_code
        case LoaderError():
            return f"failed: {error}\n{_how_to_go_on(folder)}", error.exit_code
        case OutOfMemory():
            return f"out of memory: {error}\n{_how_to_go_on(folder)}", error.exit_code
        case KeyboardInterrupt():
            return f"interrupted; {_how_to_go_on(folder)}", INTERRUPTED
    if is_disk_full(error):
        return f"error: {error}; make room; {_how_to_go_on(folder)}", UserError.exit_code
    if is_out_of_memory(error):
        told = (str(error) or repr(error)).splitlines()[0]  # a MemoryError may say nothing
        return f"out of memory: {told}; {_how_to_go_on(folder)}", OutOfMemory.exit_code
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


def remember(folder: Path, overrides: list[str]) -> None:
    """What the command line said, for `resume`; whole or not at all."""
    temporary = folder / f".{OVERRIDES}.tmp"
    OmegaConf.save(OmegaConf.create(overrides), temporary)
    os.replace(temporary, folder / OVERRIDES)


def remembered(folder: Path) -> list[str]:
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


def _how_to_go_on(folder: Path) -> str:
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


def end(folder: Path, line: str, code: int) -> None:
    """STATUS of a run that has ended."""
    from unet3d import record

    with suppress(OSError):  # the disk is full, which may be why
        record.end(folder, line, code)


def say(line: str, code: int) -> int:
    """The last line. Returns the exit code."""
    print(line, file=sys.stderr)
    return code


def snapshots(folder: Path) -> list[Path]:
    """What a run can go on from."""
    return [path for name in SNAPSHOTS if (path := folder / "checkpoints" / name).is_file()]

"""Sweeps of jobs that train nothing: each has a process of its own, which loads no torch and writes what a run writes.

Tests call `sweep_of`; all else runs in a job's process, where one of these functions takes the training's place.
"""

import functools
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from unet3d.base.errors import UserError
from unet3d.base.signals import Stop
from unet3d.cli import train
from unet3d.config.schema import Config

ROOT = Path(__file__).resolve().parent.parent
Job = Callable[[Config, Path, Stop], None]
SITE = f"""
import sys
if any(word.startswith("hydra.run.dir=") for word in sys.orig_argv):
    sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}]
    import jobs
    jobs.run(jobs.{{}})
"""


def sweep_of(
    place: Path, *words: str, job: str, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """`python train.py -m WORDS` to `place`/sweep; each job is what `jobs.JOB` does in the place of a training."""
    place.mkdir(exist_ok=True)
    (place / "sitecustomize.py").write_text(SITE.format(job))
    command = [sys.executable, str(ROOT / "train.py"), "-m", *words, "hydra.sweep.dir=sweep"]
    variables = os.environ | {"PYTHONPATH": str(place), "WANDB_MODE": "disabled"} | dict(environment or {})
    return subprocess.run(command, cwd=place, env=variables, capture_output=True, text=True, timeout=500)


def run(job: Job) -> NoReturn:
    """The command line of this process with this training, to the end of the process."""
    program = 2 if sys.orig_argv[1] == "-m" else 1
    sys.argv = sys.orig_argv[program:]
    train.job = job
    try:
        code = train.main()
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def steps(config: Config, folder: Path, stop: Stop, act: Callable[[], object] | None = None) -> None:
    """Write a record and a checkpoint of each step; fail where the data's folder is a file.

    `act` once, in the second step; then wait for the signal that it has asked for.
    """
    if Path(config.data.root).is_file():
        raise UserError(f"{config.data.root}: a file")
    checkpoint, asked = folder / "checkpoints" / "last.pt", folder / "asked"
    checkpoint.parent.mkdir(exist_ok=True)
    first = int(checkpoint.read_text()) + 1 if config.resume else 1
    with stop.deferred():
        for step in range(first, config.steps + 1):
            with (folder / "metrics.jsonl").open("a") as file:
                print(json.dumps({"step": step, "train/loss": 1.0}), file=file)
            checkpoint.write_text(str(step))
            if act and step == 2 and not asked.exists():
                asked.touch()
                act()
                with stop.interruptible():
                    signal.pause()


def meets_another(config: Config, folder: Path, stop: Stop) -> None:
    """As `steps`, but jobs 0 and 1 begin only together: two processes run them."""
    if folder.name in ("0", "1"):
        with open("meeting", "r" if folder.name == "0" else "w"):  # a pipe: waits for the other end
            pass
    steps(config, folder, stop)


def signalled_by(signals_of: Callable[[], object], job: str | None = None) -> Job:
    """As `steps`; this job of the sweep, or each, asks for a signal."""

    def signalled(config: Config, folder: Path, stop: Stop) -> None:
        steps(config, folder, stop, signals_of if job in (None, folder.name) else None)

    return signalled


def signal_with_parent() -> None:
    """SIGUSR2 to this process and to the one that started it, as a scheduler sends it."""
    for process in (os.getpid(), os.getppid()):
        os.kill(process, signal.SIGUSR2)


def scancel(name: str) -> Callable[[], object]:
    """This signal from Slurm to all processes of the step."""
    return functools.partial(os.system, f"scancel --signal={name} $SLURM_JOB_ID")


def interrupts_the_sweep(*_: object) -> None:
    """SIGINT to the sweep's process alone, and wait."""
    os.kill(os.getppid(), signal.SIGINT)
    signal.pause()


def stops_itself(*_: object) -> None:
    """SIGTERM to this process alone."""
    os.kill(os.getpid(), signal.SIGTERM)
    signal.pause()


def stops_all(number: int) -> Job:
    """Once this many jobs have begun, SIGTERM to the sweep, whose child has started this process; and wait."""

    def stopping(*_: object) -> None:
        os.mkdir(f"begun{os.getpid()}")
        if len([*Path().glob("begun*")]) == number:
            with suppress(FileExistsError):  # two that begin at once may both be the last
                os.mkdir("asked")
                parent = int(Path(f"/proc/{os.getppid()}/stat").read_bytes().rpartition(b")")[2].split()[1])
                os.kill(parent, signal.SIGTERM)
        signal.pause()

    return stopping

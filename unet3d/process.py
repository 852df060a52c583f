"""Other processes: a command run and waited for, and what its exit code means; a job put back in its queue.

Free of torch.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from types import FrameType
from typing import NamedTuple

from unet3d import signals
from unet3d.errors import Preempted

INTERRUPTED = 130
GRACE = 10  # seconds in which a process that was interrupted twice ends by itself


class Ended(NamedTuple):
    code: int  # of the process, or 128 + n where signal n ended it
    is_asked: bool  # whether whoever waited for it was asked to stop


def run(command: Sequence[str]) -> Ended:
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
            return Ended(INTERRUPTED, is_asked=True)
    if asked:
        return Ended(INTERRUPTED if code == INTERRUPTED else Preempted.exit_code, is_asked=True)
    return Ended(code if code >= 0 else 128 - code, is_asked=False)


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

"""Whole runs of train.py on the desk: how they end, and what they say."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from cuda_desk.environment import ROOT, Environment

TINY = (
    *("model=unet_tiny", "device=cuda", "data.patch=[16,16,16]", "data.phantom.shape=[32,32,16]"),
    *("data.phantom.cases=4", "batch=2", "steps=6", "eval_every=3", "workers=0", "hydra.run.dir=run"),
)
ENDLESS = ("steps=100000", "eval_every=0")
LIMIT = 400  # seconds, for one process; the search after memory ran out takes most
SMALL_GPU = 8  # MiB
WORKSPACE = 2**24  # bytes that each convolution asks for
LATER = 1024  # bytes; more than the gradient of a bias, which is made after the workspace is gone
LARGE = ("batch=16",)  # whose step reserves more


class Place(NamedTuple):
    """Where one run is made: the environment, and a new folder."""

    desk: Environment
    folder: Path


class Ended(NamedTuple):
    """A process that has ended: its exit code, -n by signal n, and what it printed."""

    code: int
    text: str

    @property
    def last_line(self) -> str:
        return (self.text.strip().splitlines() or [""])[-1]


class Verdict(NamedTuple):
    """What should happen in a run, what did, and whether that is the same."""

    expected: str
    found: str
    is_right: bool


class Started:
    """train.py in a process of its own, in the place's folder; torchrun's, for several ranks."""

    def __init__(self, place: Place, *words: str, ranks: int = 1, **variables: str) -> None:
        python = [str(place.desk.python)]
        if ranks > 1:
            python += ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
            variables["DESK_GPUS"] = str(ranks)
        self._printed = place.folder / "printed"
        with self._printed.open("w") as output:
            self.process = subprocess.Popen(
                [*python, str(ROOT / "train.py"), *TINY, *words],
                cwd=place.folder,
                env=place.desk.variables(**variables),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_for(self, path: Path) -> None:
        """Wait until a file has content. TimeoutError if it has none in time, or the process has ended."""
        end = time.monotonic() + LIMIT
        while not (path.exists() and path.stat().st_size):
            if self.process.poll() is not None or time.monotonic() > end:
                raise TimeoutError(f"{path.name} was not written: {self._printed.read_text()[-300:]}")
            time.sleep(0.1)

    def ended(self, limit: float = LIMIT) -> Ended:
        """Wait for the end; what is left of the processes is then killed. TimeoutError past the limit."""
        try:
            code = self.process.wait(limit)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"it had not ended after {limit:g} s") from None
        finally:
            self.kill()
        return Ended(code, self._printed.read_text())

    def kill(self) -> None:
        """Kill this process and the ranks that it started, unless it has ended."""
        if self.process.poll() is not None:
            return
        for process in [*self.ranks(), self.process.pid]:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self.process.wait()

    def ranks(self) -> list[int]:
        """Return the processes of the ranks, in order. torchrun has not ended."""
        found = {}
        for process in Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split():
            variables = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
            for variable in variables:
                if variable.startswith(b"LOCAL_RANK="):
                    found[int(variable.partition(b"=")[2])] = int(process)
        return [found[rank] for rank in sorted(found)]


def status(place: Place) -> str:
    """Return what the run's STATUS says."""
    path = place.folder / "run" / "STATUS"
    return " ".join(path.read_text().split()) if path.exists() else "no STATUS"


def ends_well(*words: str, ranks: int = 1) -> Callable[[Place], Verdict]:
    """Return a run that should end by itself, with a report and a measured peak as predicted."""

    def run(place: Place) -> Verdict:
        done = Started(place, *words, ranks=ranks).ended()
        folder = place.folder / "run"
        found = f"exit {done.code}, {status(place)}"
        if done.code:
            return Verdict("exit 0", f"{found}: {done.last_line}", False)
        memory = json.loads((folder / "memory.json").read_text())
        predicted = memory["predicted"]["peak_bytes"]
        seen = memory["measured"]["ledger"]["peak_bytes"]
        found += f", ledger predicted less measured {predicted - seen:+,} bytes"
        is_right = (folder / "report.html").exists() and abs(predicted - seen) <= 1e-4 * seen
        return Verdict("exit 0, a report, the ledger's peak as predicted", found, is_right)

    return run


def names_workspaces(place: Place) -> Verdict:
    """A run whose convolutions ask for scratch memory."""
    done = Started(place, DESK_WORKSPACE=str(WORKSPACE)).ended()
    expected = f"exit 0, at least {WORKSPACE:,} bytes, less a bias, for each convolution in memory.json"
    if done.code:
        return Verdict(expected, f"exit {done.code}, {status(place)}: {done.last_line}", False)
    rows = json.loads((place.folder / "run" / "memory.json").read_text())["measured"].get("workspaces", [])
    sizes = [row["bytes"] for row in rows]
    found = f"exit 0, {len(rows)} rows of {min(sizes, default=0):,} to {max(sizes, default=0):,} bytes"
    return Verdict(expected, found, bool(sizes) and min(sizes) > WORKSPACE - LATER)


def stops_and_resumes(place: Place) -> Verdict:
    """A run that SIGTERM stops, and that goes on to its end."""
    started = Started(place, *ENDLESS)
    started.wait_for(place.folder / "run" / "metrics.jsonl")
    started.process.send_signal(signal.SIGTERM)
    stopped = started.ended()
    said = status(place)
    steps = len((place.folder / "run" / "metrics.jsonl").read_text().splitlines())
    resumed = Started(place, "resume=auto", "eval_every=0", f"steps={steps + 5}").ended()
    found = f"exit {stopped.code} ({said}), then exit {resumed.code} ({status(place)})"
    return Verdict("exit 75, then exit 0", found, (stopped.code, resumed.code) == (75, 0))


def runs_out_of_memory(**variables: str) -> Callable[[Place], Verdict]:
    """Return a run whose device gives less memory than it says."""

    def run(place: Place) -> Verdict:
        done = Started(place, *LARGE, DESK_GIVES_MIB=str(SMALL_GPU), **variables).ended()
        has_trace = "Traceback" in done.text
        found = f"exit {done.code}, {status(place)}" + (", with a traceback" if has_trace else "")
        return Verdict("exit 5 and what would need less", found, done.code == 5 and not has_trace)

    return run


def is_told_that_it_cannot_fit(place: Place) -> Verdict:
    """A run on a device with less memory than predicted. It is given more, so that only words can tell."""
    done = Started(place, *LARGE, DESK_GPU_MIB=str(SMALL_GPU), DESK_GIVES_MIB=str(2**17)).ended()
    told = [line for line in done.text.splitlines() if f"{SMALL_GPU}.0 MiB" in line or f"{SMALL_GPU} MiB" in line]
    found = f"exit {done.code}: {told[0]}" if told else f"exit {done.code}, and no word of it"
    return Verdict(f"exit 2, a line that the GPU has {SMALL_GPU} MiB", found, bool(told) and done.code == 2)


def names_a_killed_rank(place: Place) -> Verdict:
    """Two ranks, one of which is killed while the other waits for its device, as NCCL's kernels then wait."""
    hang = place.folder / "hang"
    started = Started(place, *ENDLESS, ranks=2, DESK_HANG=str(hang))
    try:
        started.wait_for(place.folder / "run" / "metrics.jsonl")
        ranks = started.ranks()
        hang.touch()
        time.sleep(2)  # rank 0 comes to its next wait
        os.kill(ranks[1], signal.SIGKILL)
        killed = time.monotonic()
        done = started.ended(120)
        seconds = time.monotonic() - killed
    finally:
        hang.unlink(missing_ok=True)
        started.kill()
    said = status(place)
    found = f"exit {done.code} after {seconds:.0f} s, STATUS: {said}"
    return Verdict("all end, STATUS names rank 1", found, "rank 1" in said)


RUNS: dict[str, Callable[[Place], Verdict]] = {
    "float32": ends_well(),
    "fp16, two data workers": ends_well("amp=true", "amp_dtype=fp16", "workers=2"),
    "bf16, ckpt=2": ends_well("amp=true", "amp_dtype=bf16", "ckpt=2"),
    "bf16, lean": ends_well("amp=true", "amp_dtype=bf16", "recompute=lean"),
    "tiles": ends_well("recompute=tiles"),
    "workspaces of 16 MiB": names_workspaces,
    "SIGTERM, then resume": stops_and_resumes,
    "memory runs out": runs_out_of_memory(),
    "memory runs out, NVML tells no processes": runs_out_of_memory(DESK_NVML="refuse"),
    "a GPU smaller than the prediction": is_told_that_it_cannot_fit,
    "two ranks": ends_well(ranks=2),
    "two ranks, batch norm": ends_well("model.norm=batch", ranks=2),
    "a killed rank, while the other waits for the device": names_a_killed_rank,
}

"""Runs on the desk: takes rows from standard input, and prints what each one measured.

    python -m cuda_desk.measure compare SECONDS     peaks, predicted and of the allocator
    python -m cuda_desk.measure count SECONDS       launches and others of one step

Each row is a process, forked from this one, with a limit of seconds: none inherits another's cache. A line of input is
JSON, [words of a configuration, patch]; a line of output is JSON as well, with "failed" where there is no result.
"""

import ctypes
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import launches
import torch
from cuda_rows import Training

from unet3d.memory.allocator import Allocator, read_settings
from unet3d.memory.ledger import Ledger
from unet3d.memory.meter import MEASURED_STEPS
from unet3d.memory.simulate import simulate

KINDS = ("requested", "allocated", "reserved")
COUNTERS = {  # of the stubs, by the beginning of a library's name
    "launches": ("libcudart", "desk_launches"),
    "small launches": ("libcudart", "desk_small_launches"),
    "convolutions": ("libcudnn", "desk_convolutions"),
    "normalisations": ("libcudnn", "desk_normalisations"),
    "synchronisations": ("libcudart", "desk_synchronisations"),
    "copies": ("libcudart", "desk_copies"),
}
Peaks = list[int]  # bytes, of KINDS


def compare(training: Training) -> dict[str, Any]:
    """Return the peaks of the first step and of the later ones, predicted and counted by torch's allocator.

    More steps are taken than are predicted: what is cached can lie otherwise from one step to the next.
    """
    ledger = simulate(training.config, training.config.model, training.technique).ledger
    predicted = predicted_peaks(ledger)
    measured: list[Peaks] = []
    for step in range(MEASURED_STEPS + 2):
        if step:
            torch.cuda.reset_peak_memory_stats()
        training.step()
        counted = torch.cuda.memory_stats()
        measured.append([counted[f"{kind}_bytes.all.peak"] for kind in KINDS])
    return {
        "predicted": [predicted[0], highest(predicted[1:])],
        "measured": [measured[0], highest(measured[1:])],
    }


def highest(steps: Sequence[Peaks]) -> Peaks:
    """Return the highest peak of each kind."""
    return [max(peaks) for peaks in zip(*steps, strict=True)]


def predicted_peaks(ledger: Ledger) -> list[Peaks]:
    """Return the peaks within each simulated step; the first one begins with the weights."""
    allocator = Allocator(read_settings(os.environ)[0])
    requested = 0
    steps: list[Peaks] = []
    peaks = [0, 0, 0]
    last = 0
    ends = [start for start, name in ledger.marks if name == "end"]
    for end in ends:
        for index, change in ledger.events[last:end]:
            allocator.apply(index, change)
            requested += change
            now = (requested, *allocator.sizes())
            peaks = [max(pair) for pair in zip(peaks, now, strict=True)]
        steps.append(peaks)
        peaks = [requested, *allocator.sizes()]
        last = end
    return steps


def count(training: Training) -> dict[str, Any]:
    """Return how often the third step launched a kernel, and so on, counted by the stubs and by `launches.py`."""
    for _ in range(2):
        training.step()
    before = counters()
    training.step()
    found = {name: after - before[name] for name, after in counters().items()}
    found["synchronisations"] -= 1  # `Training.step` waits for the device, `train_step` does not
    return {"measured": found, "predicted": asdict(launches.counted(training.config))}


def counters() -> dict[str, int]:
    """Return what the stubs have counted so far."""
    place = Path(os.environ["LD_LIBRARY_PATH"])
    found = {}
    for name, (library, variable) in COUNTERS.items():
        (path,) = place.glob(f"{library}.so.*[0-9]")
        found[name] = ctypes.c_ulonglong.in_dll(ctypes.CDLL(str(path)), variable).value
    return found


def answer(measure: Callable[[Training], dict[str, Any]], words: list[str], patch: str) -> dict[str, Any]:
    """Return what a row measured, or why it failed."""
    try:
        return measure(Training(words, "cuda", patch))
    except Exception as error:
        traceback.print_exc()
        return {"failed": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}


def in_own_process(measure: Callable[[Training], dict[str, Any]], words: list[str], patch: str, limit: int) -> None:
    """Print a row's result. This process asks CUDA for nothing, so that its children can."""
    child = os.fork()
    if child == 0:
        signal.alarm(limit)
        print(json.dumps(answer(measure, words, patch)), flush=True)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if code == -signal.SIGALRM:
        print(json.dumps({"failed": f"ran past its limit of {limit} s"}), flush=True)
    elif code:
        print(json.dumps({"failed": f"the process ended with code {code}"}), flush=True)


def main() -> None:
    measure = {"compare": compare, "count": count}[sys.argv[1]]
    limit = int(sys.argv[2])
    for line in sys.stdin:
        words, patch = json.loads(line)
        in_own_process(measure, words, patch, limit)


if __name__ == "__main__":
    main()

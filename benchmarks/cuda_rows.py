"""One row of `on_cuda.py`, in a process of its own: a configuration of unet3d, trained on random data.

    python benchmarks/cuda_rows.py timed "amp=true amp_dtype=bf16 recompute=lean" --patch 96,96,96

Prints one JSON line. Kinds: `memory` compares predicted and measured bytes, `timed` takes seconds, `shares` asks
torch's profiler, `fits` adds what is reserved, `windows` predicts a volume. With `--turn FILE`, rows that share the
file prepare beside each other and measure one at a time.
"""

import argparse
import fcntl
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from unet3d import build
from unet3d.base.errors import UserError
from unet3d.base.types import Batch
from unet3d.config import compose
from unet3d.data.restore import ArgmaxCollector
from unet3d.memory.allocator import read_settings, replay
from unet3d.memory.ledger import most_held
from unet3d.memory.meter import MEASURED_STEPS, open_meter
from unet3d.memory.simulate import fitted, simulate
from unet3d.memory.technique import choose_technique
from unet3d.training import optim
from unet3d.training.inference import Predictor
from unet3d.training.step import Mark, ignore_mark, train_step
from unet3d.training.switches import switched

TIMED = 9  # steps, after the first ones
LARGEST = 8  # operations or kernels that are named


class Training:
    """One configuration with a random batch, as a run trains it; to be used within `switched`."""

    def __init__(self, words: list[str], device: str, patch: str) -> None:
        model = [] if any(word.startswith("model=") for word in words) else ["model=unet"]
        self.config = compose.compose([*model, f"data.patch=[{patch}]", f"device={device}", *words])
        self.config.model.in_channels = 1
        self.config.model.classes = self.config.model.classes or 3
        self.device = device
        self.technique = choose_technique(self.config, self.config.model)
        self.policy = build.policy(self.config, device, self.technique)
        self.model = self.policy.formatted(build.model(self.config.model, 0).to(device))
        self.optimizer = optim.optimizer(self.config.optim, self.model)
        self.loss = build.loss(self.config, self.config.model.classes, device)
        self.scaler = self.policy.scaler()
        if self.config.compile:
            self.model.compile()
        size = (self.config.batch, *self.config.data.patch)
        image = torch.randn(size[0], 1, *size[1:])
        label = torch.zeros(size, dtype=torch.int16)
        if device == "cuda":  # as the loader of a run does
            image = image.pin_memory()
            label = label.pin_memory()
        self.batch = Batch(image, label)

    def step(self, mark: Mark = ignore_mark) -> float:
        """Take a step and return its seconds, to its end on the device."""
        started = time.perf_counter()
        train_step(
            self.model,
            self.loss,
            self.optimizer,
            self.scaler,
            self.policy,
            [self.batch] * self.config.accumulate,
            mark,
            self.config.optim.clip,
        )
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started


class Turn:
    """A place among the processes that name the same file: all prepare beside each other, then one measures at a time.

    Without a file, nothing waits.
    """

    def __init__(self, path: Path | None) -> None:
        self._file = None if path is None else path.open("a")
        self._lock(fcntl.LOCK_SH)

    def __enter__(self) -> None:
        self._lock(fcntl.LOCK_EX)  # once nobody prepares or measures

    def __exit__(self, *_: object) -> None:
        self._lock(fcntl.LOCK_UN)

    def leave(self) -> None:
        """Measure beside others."""
        self._lock(fcntl.LOCK_UN)

    def _lock(self, kind: int) -> None:
        if self._file is not None:
            fcntl.flock(self._file, kind)


def memory(training: Training, turn: Turn) -> dict[str, int]:
    """Return bytes, predicted and measured; on the CPU, for want of an allocator's counters, only by the ledger."""
    ledger = simulate(training.config, training.config.model, training.technique).ledger
    allocated, reserved = replay(ledger.requests(), read_settings(os.environ)[0])
    turn.leave()
    for _step in range(MEASURED_STEPS):
        training.step()
    if training.device == "cuda":  # as a run does after as many steps
        torch.cuda.empty_cache()
    for _step in range(2):
        training.step()
    stats = torch.cuda.memory_stats() if training.device == "cuda" else {}
    meter = open_meter(training.model, training.optimizer)
    for _step in range(MEASURED_STEPS + 2):
        training.step(meter.mark)
    measured = meter.summary()["peak_bytes"]
    return {
        "tensors": most_held(ledger.events),
        "predicted": most_held(ledger.requests()),
        "replayed": allocated,
        "replay": reserved,
        "requested": stats.get("requested_bytes.all.peak", measured),
        "allocated": stats.get("allocated_bytes.all.peak", measured),
        "reserved": stats.get("reserved_bytes.all.peak", measured),
        "run": measured,
    }


def timed(training: Training, turn: Turn) -> dict[str, float]:
    """Return the median seconds of the steps after the first ones, and the allocator's peak, without a ledger."""
    if training.config.compile:
        training.step()  # the compiler takes far longer than the steps
    with turn:
        for _ in range(MEASURED_STEPS):
            training.step()
        seconds = [training.step() for _ in range(TIMED)]
    peak = torch.cuda.max_memory_allocated() if training.device == "cuda" else 0
    return {"s": statistics.median(seconds), "peak": peak}


def fits(training: Training, turn: Turn) -> dict[str, float]:
    """Return what `timed` does, and what the allocator reserves, in the steps after the cache was emptied once."""
    ledger = simulate(training.config, training.config.model, training.technique).ledger
    allocated, reserved = replay(ledger.requests(), read_settings(os.environ)[0])
    with turn:
        for _ in range(MEASURED_STEPS):
            training.step()
        if training.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        seconds = [training.step() for _ in range(TIMED)]
    stats = torch.cuda.memory_stats() if training.device == "cuda" else {}
    return {
        "s": statistics.median(seconds),
        "replayed": allocated,
        "replay": reserved,
        "allocated": stats.get("allocated_bytes.all.peak", 0),
        "reserved": stats.get("reserved_bytes.all.peak", 0),
    }


def shares(training: Training, turn: Turn) -> dict[str, Any]:
    """Return what the time of all operations consists of: on the GPU where there is one.

    `kernel seconds` and `seconds` are of a step: with and without what the device waits for.
    """
    on_gpu = training.device == "cuda"
    with turn:
        for _ in range(MEASURED_STEPS):
            training.step()
        seconds = statistics.median(training.step() for _ in range(TIMED))
        with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as profiler:
            for _ in range(TIMED):
                training.step()
    averages = profiler.key_averages()
    spent: dict[str, float] = {}
    kernels: dict[str, float] = {}
    for event in averages:
        if event.device_type == torch.profiler.DeviceType.CPU:
            spent[event.key] = float(event.self_device_time_total if on_gpu else event.self_cpu_time_total)
        else:
            kernels[event.key] = float(event.self_device_time_total)
    total = sum(spent.values())
    if not total:
        raise UserError("the profiler saw no time on the device: CUPTI is missing, or may not be used")
    others = {name: time for name, time in spent.items() if "conv" not in name}
    largest = sorted(others, key=others.__getitem__, reverse=True)[:LARGEST]
    slowest = sorted(kernels, key=kernels.__getitem__, reverse=True)[: 4 * LARGEST]
    return {
        "convolutions": 1 - sum(others.values()) / total,
        "others": {name: others[name] / total for name in largest},
        "seconds": seconds,
        "kernel seconds": total / TIMED / 1e6,
        "kernels": {name[:160]: kernels[name] / TIMED / 1e6 for name in slowest},
    }


def windows(training: Training, turn: Turn) -> dict[str, float]:
    """Return seconds and peak bytes of a volume's prediction, and those with one window at a time and sums on the host.

    `differing` is the share of voxels that the two label differently.
    """
    config = training.config
    predictor = fitted(build.predictor(config, [training.model], config.model, training.policy))
    image = torch.randn(1, *(2 * side for side in config.data.patch))
    plain = replace(predictor, batch=1, sums_on_device=False)
    with turn:
        labels, seconds, peak = labelled(predictor, image)
        others, base, base_peak = labelled(plain, image)
    differing = (labels != others).double().mean().item()
    return {"s": seconds, "base": base, "peak": peak, "base peak": base_peak, "differing": differing}


def labelled(predictor: Predictor, image: Tensor) -> tuple[Tensor, float, int]:
    """Return a volume's labels, the seconds of the second pass over it, and the allocator's peak (bytes)."""
    on_gpu = next(predictor.models[0].parameters()).device.type == "cuda"
    labels = torch.from_numpy(ArgmaxCollector(predictor.strips(image)).whole())
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    for _ in predictor.strips(image):
        pass
    seconds = time.perf_counter() - started
    return labels, seconds, torch.cuda.max_memory_allocated() if on_gpu else 0


MEASURES: dict[str, Callable[[Training, Turn], Mapping[str, Any]]] = {
    "memory": memory,
    "timed": timed,
    "fits": fits,
    "shares": shares,
    "windows": windows,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=MEASURES)
    parser.add_argument("words", help="of a configuration, with spaces between them")
    parser.add_argument("--patch", default="64,64,64", help="voxels")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--turn", type=Path, help="file whose lock says whose turn it is")
    options = parser.parse_args()
    turn = Turn(options.turn)
    try:
        training = Training(options.words.split(), options.device, options.patch)
        with switched(training.config.cuda, training.config.deterministic):
            print(json.dumps(MEASURES[options.kind](training, turn)))
    except UserError as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

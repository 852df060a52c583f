"""Mixed precision on this CPU beside float32: seconds a step, predicted and measured bytes, and resident memory.

    python benchmarks/half_precision.py
    ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 python benchmarks/half_precision.py model=unet_small ckpt=2

The second line restricts torch and oneDNN to AVX2, as a CPU without AVX512 has them. Steps of both precisions alternate
in one process, so that both meet the same machine; peaks are taken in a process each, without an observer.
"""

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from allocator import recorded

from unet3d import build
from unet3d.base.terminal import WIDE, paper, terminal_table
from unet3d.base.types import Batch, Table, mib
from unet3d.config import compose
from unet3d.config.schema import Config
from unet3d.memory.meter import MEASURED_STEPS, LedgerMeter
from unet3d.memory.technique import choose_technique, step_peak
from unet3d.model import half_precision
from unet3d.training import optim
from unet3d.training.step import Mark, ignore_mark, train_step

ROUNDS = 12
DEFAULT = ["model=unet_small", "ckpt=2"]


def job(*overrides: str) -> Config:
    config = compose.compose(overrides)
    config.model.in_channels, config.model.classes = config.model.in_channels or 1, config.model.classes or 4
    return config


class Training:
    """A config's network and what trains it, on new random patches at every step."""

    def __init__(self, overrides: Sequence[str]) -> None:
        self.config = config = job(*overrides)
        self.model, self.loss = build.model(config.model, config.seed), build.loss(config, config.model.classes)
        self.policy = build.policy(config, "cpu", choose_technique(config, config.model))
        self.optimizer, self.scaler = optim.optimizer(config.optim, self.model), self.policy.scaler()

    def step(self, mark: Mark = ignore_mark) -> None:
        config, size = self.config, (self.config.batch, *self.config.data.patch)
        batches = [
            Batch(
                torch.randn(size[0], config.model.in_channels, *size[1:]),
                torch.randint(0, config.model.classes, size, dtype=torch.int16),
            )
            for _ in range(config.accumulate)
        ]
        train_step(self.model, self.loss, self.optimizer, self.scaler, self.policy, batches, mark, config.optim.clip)


def resident(kind: str) -> int:
    """Bytes of this process: VmRSS now, VmHWM at most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(kind))


def resident_peak(overrides: Sequence[str]) -> int:
    """Most resident bytes of a process's steps, above what it held before the first."""
    training, before = Training(overrides), resident("VmRSS")
    for _ in range(MEASURED_STEPS):
        training.step()
    return resident("VmHWM") - before


def allocator_peak(overrides: Sequence[str]) -> int:
    """Most bytes that torch's CPU allocator had given out, from its own events, no dispatch mode on."""

    def steps() -> None:
        training = Training(overrides)
        training.step()
        training.step()

    alive = most = 0
    for event in sorted((e for e in recorded(steps) if e["name"] == "[memory]"), key=lambda e: e["ts"]):
        alive += event["args"]["Bytes"]
        most = max(most, alive)
    return most


def ledger_peaks(overrides: Sequence[str]) -> tuple[int, int]:
    """Predicted, and measured by the ledger."""
    training = Training(overrides)
    meter = LedgerMeter(training.model, training.optimizer)
    for _ in range(MEASURED_STEPS):
        training.step(meter.mark)
    return step_peak(training.config, training.config.model).tensors, meter.summary()["peak_bytes"]


def seconds(settings: list[list[str]]) -> list[float]:
    """Median seconds a step of each, taken in turns."""
    trainings = [Training(overrides) for overrides in settings]
    taken: list[list[float]] = [[] for _ in settings]
    for _ in range(ROUNDS):
        for training, times in zip(trainings, taken, strict=True):
            started = time.perf_counter()
            training.step()
            times.append(time.perf_counter() - started)
    return [median(times[1:]) for times in taken]


def apart(what: str, overrides: Sequence[str]) -> int:
    """A measurement in a process of its own."""
    command = [sys.executable, __file__, f"--{what}", *overrides]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def main() -> None:
    given = sys.argv[1:] or DEFAULT
    if given[0].startswith("--"):
        print({"--resident": resident_peak, "--allocator": allocator_peak}[given[0]](given[1:]))
        return
    settings = [[*given, f"amp={on}"] for on in ("false", "true")]
    rows = []
    for overrides, each in zip(settings, seconds(settings), strict=True):
        predicted, measured = ledger_peaks(overrides)
        held, grown = apart("allocator", overrides), apart("resident", overrides)
        rows.append([each, predicted, measured, predicted - measured, held, grown])
    columns = [
        "",
        "s/step",
        "ledger, predicted",
        "measured",
        "error (bytes)",
        "allocator, measured",
        "resident, measured",
    ]
    lines = [
        [overrides[-1], f"{row[0]:.3f}", *map(mib, row[1:3]), str(row[3]), *map(mib, row[4:])]
        for overrides, row in zip(settings, rows, strict=True)
    ]
    ratios = [f"{b / a:.2f} x" if a else "" for a, b in zip(*rows, strict=True)]
    here = half_precision.has_kernels(torch.bfloat16)
    print(
        " ".join(given),
        "|",
        torch.backends.cpu.get_cpu_capability(),
        "|",
        f"{torch.get_num_threads()} threads |",
        end="",
    )
    print(" bf16 by", "oneDNN" if here else "float32 slabs", "| peaks of a step in MiB")
    paper(WIDE).print(terminal_table("Mixed precision beside float32", Table(columns, [*lines, ["ratio", *ratios]])))


if __name__ == "__main__":
    main()

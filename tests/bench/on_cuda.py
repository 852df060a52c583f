"""What unet3d claims, on CUDA: run by hand on a machine with a GPU.

    pip install -c constraints.txt -e ".[bench]"
    python tests/bench/on_cuda.py

Writes one Markdown file (`--out`) after every row, so that a kill loses nothing. A row is a process: no row inherits
another's cache, and one that fails is a line in its table. Memory rows run beside each other, since the allocator's
counters are per process; then timed rows, one at a time, the most important first. Rows that the deadline cuts off are
listed as not run. Exit code 1: a row failed; 2: no GPU. `--device cpu` rehearses with a few tiny rows.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from networks import MAX_POOLING, OURS, PLAIN_CONV_UNET, WAYS
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from unet3d import build
from unet3d.base.errors import UserError
from unet3d.base.types import MIB, Batch
from unet3d.config import compose
from unet3d.memory.allocator import read_settings, replay
from unet3d.memory.meter import MEASURED_STEPS, open_meter
from unet3d.memory.simulate import fitted, simulate
from unet3d.memory.technique import choose_technique
from unet3d.training import optim
from unet3d.training.inference import Predictor
from unet3d.training.step import Mark, ignore_mark, train_step
from unet3d.training.switches import switched

TIMED = 5  # steps, after MEASURED_STEPS others
TF32 = ("cuda.tf32=true", "cuda.tf32=false")
AMP = ("amp=false", "amp=true amp_dtype=fp16", "amp=true amp_dtype=bf16")
NORM = ("model.norm=instance", "model.norm=batch", "model.norm=group")
CKPT = ("ckpt=0", "ckpt=2", "ckpt=4", "ckpt=auto")
WIDTHS = ("model.features=[16,32,64,128]", "model.features=[32,64,128,256]")
BF16 = "amp=true amp_dtype=bf16"
LEVERS = ("", "recompute=lean", "recompute=tiles", "ckpt=auto")
NNUNET = f"model=nnunet_hippocampus {BF16}"
SWITCHES = ("", "channels_last=true", "compile=true", "channels_last=true compile=true")
SWITCHES += ("cuda.benchmark=true", "optim.fused=true", "deterministic=true")
WINDOWS = ("", "inference.batch=1", "inference.batch=4", "model.classes=40", "model.classes=40 inference.batch=1")
NETWORKS = (PLAIN_CONV_UNET, OURS, *WAYS, MAX_POOLING)
NETWORKS += ("MONAI DynUNet", "MONAI BasicUNet", "pytorch-3dunet UNet3D")
TINY = "model=unet_tiny model.features=[4,8]"
HEADS = {
    "memory": (
        "config | tensors | requested | error | replayed | allocated | error | replay | reserved | error | run | bound"
    ),
    "timed": "config | s/step | ratio | allocated MiB | ratio",
    "shares": "config | convolutions | the five largest other operations",
    "windows": "config | s/volume | ratio | labels that differ | allocated MiB | ratio",
}
NOTES = """
MiB are 2^20 bytes. Predicted: tensors (ledger), replayed (blocks) and replay (segments) of the allocator, and by how
much workspaces of convolutions may exceed tensors (bound). Measured without a ledger: requested, allocated, reserved.
`run` is what a run reports as `cuda allocated`. Timed rows are bf16 but for those of float32, one at a time. Ratios of
a volume's prediction are to one window at a time, with sums on the host.

Not seen here: several GPUs, MIG, other drivers, and whether what is learned is right: train on a data set for that.
""".strip().splitlines()


class Row(NamedTuple):
    """One process. Ratios are to the first finished row of the section."""

    section: str
    kind: str  # of HEADS, or "peer": timed as well
    name: str  # words of a configuration, or a network of networks.py
    patch: str  # 64,64,64

    def command(self, device: str) -> list[str]:
        if self.kind != "peer":
            return [sys.executable, __file__, "--device", device, "--patch", self.patch, "--row", self.kind, self.name]
        peers = [sys.executable, str(Path(__file__).with_name("peers.py")), "--only", self.name, "--device", device]
        return [*peers, "--amp", "bf16", "--batch", "2", "--steps", str(TIMED), "--patch", *self.patch.split(",")]


Found = Mapping[str, Any] | str  # what a row measured, or why it did not


def rows_on_cuda(patch: str, also: Iterable[str]) -> list[Row]:
    """The memory rows, then the timed ones in order of importance."""
    grid = [" ".join(choice) for choice in itertools.product(AMP, NORM, CKPT, WIDTHS)]
    single_techniques = [f"{amp} {lever}" for amp in ("amp=false", BF16) for lever in LEVERS[1:3]]
    found = [
        Row("Predicted against the allocator", "memory", words, patch) for words in (*also, *grid, *single_techniques)
    ]
    at_96, at_128 = "96,96,96", "128,128,128"
    found += [Row(f"Networks at {at_96}", "peer", name, at_96) for name in NETWORKS]
    found += [Row(f"Levers at {at_96}", "timed", f"{BF16} {lever}".strip(), at_96) for lever in LEVERS]
    found += [Row("Shares of a step", "shares", NNUNET, at_96)]
    found += [Row("Switches", "timed", f"{NNUNET} {word}".strip(), at_96) for word in SWITCHES]
    found += [Row("Prediction of a volume", "windows", f"{NNUNET} {words}", at_96) for words in WINDOWS]
    found += [Row("Float32", "timed", f"model=nnunet_hippocampus {word}", at_96) for word in TF32]
    found += [Row(f"Networks at {at_128}", "peer", name, at_128) for name in NETWORKS]
    return found + [Row(f"Levers at {at_128}", "timed", f"{BF16} {lever}".strip(), at_128) for lever in LEVERS]


def rows_of_a_rehearsal(also: Iterable[str]) -> list[Row]:
    """A row of each kind, and those asked for."""
    found = [Row("Predicted against the allocator", "memory", words, "16,16,16") for words in (*also, TINY)]
    found += [Row("Networks", "peer", "unet3d model=unet", "16,16,16"), Row("Levers", "timed", TINY, "16,16,16")]
    found += [Row("Shares of a step", "shares", TINY, "16,16,16")]
    return [*found, Row("Prediction of a volume", "windows", f"{TINY} inference.batch=2", "16,16,16")]


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
        self.batch = Batch(torch.randn(size[0], 1, *size[1:]), torch.zeros(size, dtype=torch.int16))

    def step(self, mark: Mark = ignore_mark) -> float:
        """Seconds of a step, to its end on the device."""
        started, clip = time.perf_counter(), self.config.optim.clip
        batches = [self.batch] * self.config.accumulate
        train_step(self.model, self.loss, self.optimizer, self.scaler, self.policy, batches, mark, clip)
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started


def memory(training: Training) -> dict[str, int]:
    """Bytes, predicted and measured; on the CPU, for want of an allocator's counters, only by the ledger."""
    ledger = simulate(training.config, training.config.model, training.technique).ledger
    held = replay(ledger.events, read_settings(os.environ)[0])
    for _ in range(MEASURED_STEPS + 2):
        training.step()
    stats = torch.cuda.memory_stats() if training.device == "cuda" else {}
    meter = open_meter(training.model, training.optimizer)
    for _ in range(MEASURED_STEPS + 2):
        training.step(meter.mark)
    measured = meter.summary()["peak_bytes"]
    return {
        "tensors": max(itertools.accumulate(change for _, change in ledger.events)),
        "replayed": held.allocated_bytes,
        "replay": held.reserved_bytes,
        "requested": stats.get("requested_bytes.all.peak", measured),
        "allocated": stats.get("allocated_bytes.all.peak", measured),
        "reserved": stats.get("reserved_bytes.all.peak", measured),
        "run": measured,
        "bound": ledger.workspace_bound(),
    }


def timed(training: Training) -> dict[str, float]:
    """Median seconds of the steps after the first ones, and the allocator's peak; no ledger observes them."""
    seconds = [training.step() for _ in range(MEASURED_STEPS + TIMED)][MEASURED_STEPS:]
    peak = torch.cuda.max_memory_allocated() if training.device == "cuda" else 0
    return {"s": statistics.median(seconds), "peak": peak}


def shares(training: Training) -> dict[str, Any]:
    """Of the time of all operations, on the GPU where there is one: convolutions, and the five largest others."""
    for _ in range(MEASURED_STEPS):
        training.step()
    on_gpu = training.device == "cuda"
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as profiler:
        for _ in range(TIMED):
            training.step()
    events = [event for event in profiler.key_averages() if event.device_type == torch.profiler.DeviceType.CPU]
    spent = {e.key: float(e.self_device_time_total if on_gpu else e.self_cpu_time_total) for e in events}
    total = sum(spent.values())
    if not total:
        raise UserError("the profiler saw no time on the device: CUPTI is missing, or may not be used")
    others = {name: time for name, time in spent.items() if "conv" not in name}
    largest = sorted(others, key=others.__getitem__, reverse=True)[:5]
    return {
        "convolutions": 1 - sum(others.values()) / total,
        "others": {name: others[name] / total for name in largest},
    }


def windows(training: Training) -> dict[str, float]:
    """Return seconds and peak bytes of a volume's prediction, and those with one window at a time and sums on the host.

    `differing` is the share of voxels that the two label differently.
    """
    config = training.config
    predictor = fitted(build.predictor(config, [training.model], config.model, training.policy))
    image = torch.randn(1, *(2 * side for side in config.data.patch))
    plain = replace(predictor, batch=1, sums_on_device=False)
    labels, seconds, peak = labelled(predictor, image)
    others, base, base_peak = labelled(plain, image)
    differing = (labels != others).double().mean().item()
    return {"s": seconds, "base": base, "peak": peak, "base peak": base_peak, "differing": differing}


def labelled(predictor: Predictor, image: Tensor) -> tuple[Tensor, float, int]:
    """Return a volume's labels, the seconds of the second pass over it, and the allocator's peak (bytes)."""
    on_gpu = next(predictor.models[0].parameters()).device.type == "cuda"
    labels = predictor.probabilities(image).argmax(0)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    for _ in predictor.strips(image):
        pass
    seconds = time.perf_counter() - started
    return labels, seconds, torch.cuda.max_memory_allocated() if on_gpu else 0


MEASURES: dict[str, Callable[[Training], Mapping[str, Any]]] = {
    "memory": memory,
    "timed": timed,
    "shares": shares,
    "windows": windows,
}


def run(row: Row, device: str, limit: float, end: float) -> Found:
    """In a process of its own, for at most `limit` seconds; not at all once the clock is at `end`."""
    left = end - time.monotonic()
    if left <= 0:
        return "not run: the deadline was reached"
    few = {"OMP_NUM_THREADS": "2"} if row.kind == "memory" else {}  # many at once
    try:
        done = subprocess.run(
            row.command(device), capture_output=True, text=True, timeout=min(limit, left), env=os.environ | few
        )
    except subprocess.TimeoutExpired:
        return f"failed: ran past its limit of {limit:g} s" if limit <= left else "not run: cut off by the deadline"
    with suppress(IndexError, ValueError):
        if not done.returncode and isinstance(found := json.loads(done.stdout.splitlines()[-1]), dict):
            return found
    lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}, without a result"]
    return f"failed: {lines[-1][:300].replace('|', '/')}"


def line(row: Row, found: Found, base: Mapping[str, Any] | None) -> str:
    """A row of its section's table; ratios are to `base`."""
    if isinstance(found, str):
        return f"| {row.name} | {found} |"
    if row.kind == "memory":
        pairs = (("tensors", "requested"), ("replayed", "allocated"), ("replay", "reserved"))
        cells = [f"{found[a] / MIB:,.1f} | {found[b] / MIB:,.1f} | {found[a] / found[b] - 1:+.2%}" for a, b in pairs]
        cells += [f"{found['run'] / MIB:,.1f}", f"{found['bound'] / MIB:,.1f}"]
    elif row.kind == "windows":
        cells = [f"{found['s']:.4f} | {found['s'] / found['base']:.3f} | {found['differing']:.2e}"]
        cells.append(f"{found['peak'] / MIB:,.1f}")
        cells.append(f"{found['peak'] / found['base peak']:.3f}" if found["base peak"] else "")
    elif row.kind == "shares":
        cells = [f"{found['convolutions']:.1%}", ", ".join(f"{k} {v:.1%}" for k, v in found["others"].items())]
    else:
        base = base or found
        cells = [f"{found['s']:.4f} | {found['s'] / base['s']:.3f}", f"{found['peak'] / MIB:,.1f}"]
        cells.append(f"{found['peak'] / base['peak']:.3f}" if base["peak"] else "")
    return f"| {row.name} | {' | '.join(cells)} |"


def markdown(rows: list[Row], results: Mapping[Row, Found], about: str) -> str:
    """Everything so far; rows that have no result yet are not run."""
    lines = [about]
    for section, group in itertools.groupby(rows, lambda row: row.section):
        members = list(group)
        head = HEADS.get(members[0].kind, HEADS["timed"])
        size = members[0].patch.replace(",", "x")
        lines += ["", f"## {section}", "", f"Patch {size}, batch 2.", "", f"| {head} |"]
        lines.append("|---|" + "---:|" * head.count("|"))
        finished = [found for row in members if isinstance(found := results.get(row), Mapping)]
        lines += [line(row, results.get(row, "not run"), finished[0] if finished else None) for row in members]
    return "\n".join(lines) + "\n"


def about(device: str) -> str:
    """The machine and the versions, and what the numbers are."""
    versions = f"torch {torch.__version__}, CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"
    lines = ["# Rehearsal on the CPU: no number here is a GPU's", "", versions, ""]
    if device == "cuda":
        lines = ["# Measured on CUDA", "", f"{torch.cuda.get_device_name()}, driver {driver()}, {versions}", ""]
    return "\n".join([*lines, *NOTES, *read_settings(os.environ)[1]])


def driver() -> str:
    """The driver's version; empty where nvidia-smi is not there."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    with suppress(OSError):
        return subprocess.run(query, capture_output=True, text=True).stdout.split("\n")[0]
    return ""


def save(path: Path, text: str) -> None:
    """Whole or not at all."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(text)
    part.replace(path)


def run_all(rows: list[Row], options: argparse.Namespace) -> dict[Row, Found]:
    """Memory rows beside each other, then the others in turn; the file is written after each."""
    end, results, title = time.monotonic() + options.deadline, dict[Row, Found](), about(options.device)

    def keep(row: Row, found: Found) -> None:
        results[row] = found
        save(options.out, markdown(rows, results, title))
        print(f"{row.section}: {row.name}: {found if isinstance(found, str) else 'done'}", flush=True)

    save(options.out, markdown(rows, results, title))
    with ThreadPoolExecutor(options.at_once) as pool:
        beside = {
            pool.submit(run, row, options.device, options.limit, end): row for row in rows if row.kind == "memory"
        }
        for future in as_completed(beside):
            keep(beside[future], future.result())
    for row in rows:
        if row.kind != "memory":
            keep(row, run(row, options.device, options.limit, end))
    return results


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("on_cuda.md"))
    parser.add_argument("--deadline", type=float, default=480, help="seconds, for all rows")
    parser.add_argument("--limit", type=float, default=120, help="seconds, for one row")
    parser.add_argument("--at-once", type=int, default=8, help="memory rows beside each other")
    parser.add_argument("--patch", default="64,64,64", help="voxels, of the memory rows")
    parser.add_argument("--also", action="append", default=[], metavar="WORDS", help="one more memory row, the first")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--row", nargs=2, help=argparse.SUPPRESS)  # kind and words: in this process
    return parser.parse_args()


def main() -> int:
    options = parsed()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("this torch sees no CUDA device: nothing is verified here", file=sys.stderr)
        return 2
    if options.row:
        kind, words = options.row
        try:
            training = Training(words.split(), options.device, options.patch)
            with switched(training.config):
                print(json.dumps(MEASURES[kind](training)))
        except UserError as error:
            print(" ".join(str(error).split()), file=sys.stderr)
            return 1
        return 0
    on_cuda = options.device == "cuda"
    rows = rows_on_cuda(options.patch, options.also) if on_cuda else rows_of_a_rehearsal(options.also)
    results = run_all(rows, options)
    return int(any(isinstance(found, str) and found.startswith("failed") for found in results.values()))


if __name__ == "__main__":
    sys.exit(main())

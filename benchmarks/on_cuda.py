"""What unet3d claims, on CUDA: run by hand on a machine with a GPU.

    pip install -c constraints.txt -e ".[bench]"
    python benchmarks/on_cuda.py

Writes one Markdown file (`--out`) after every row, so that a kill loses nothing. A row is a process: no row inherits
another's cache, and one that fails is a line in its table. Memory rows run beside each other, since the allocator's
counters are per process. Then as many others as `--at-once` prepare beside each other and measure one at a time, the
most important first. Rows that the deadline cuts off are listed as not run. Exit code 1: a row failed; 2: no GPU.
`--device cpu` rehearses with a few tiny rows.
"""

import argparse
import itertools
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from cuda_rows import TIMED
from networks import MAX_POOLING, OURS, PLAIN_CONV_UNET, WAYS

from unet3d.base.types import MIB
from unet3d.memory.allocator import read_settings

PLANS = ("plain", "lean", "tiles")
TF32 = ("cuda.tf32=true", "cuda.tf32=false")
AMP = ("amp=false", "amp=true amp_dtype=fp16", "amp=true amp_dtype=bf16")
NORM = ("model.norm=instance", "model.norm=batch", "model.norm=group")
CKPT = ("ckpt=0", "ckpt=2", "ckpt=4")
WIDTHS = ("model.features=[16,32,64,128]", "model.features=[32,64,128,256]")
BF16 = "amp=true amp_dtype=bf16"
LEVERS = ("", "recompute=lean", "recompute=tiles", "ckpt=2", "ckpt=4")
NNUNET = f"model=nnunet_hippocampus {BF16}"
SWITCHES = ("", "channels_last=true", "cuda.benchmark=true", "optim.fused=true", "deterministic=true")
SWITCHES += ("cuda.benchmark=true channels_last=true", "compile=true", "channels_last=true compile=true")
SIX_LEVELS = f"{NNUNET} model.features=[32,64,128,256,320,320] optim=sgd"  # nnU-Net's network for 128x128x128
VOXELS = 128**3
IN_ITS_MEMORY = (("", "128,128,128"), ("recompute=lean", "192,192,192"), ("recompute=tiles", "224,224,224"))
WINDOWS = ("", "inference.batch=1", "inference.batch=4", "model.classes=40", "model.classes=40 inference.batch=1")
NETWORKS = (PLAIN_CONV_UNET, OURS, MAX_POOLING, "MONAI DynUNet", "MONAI BasicUNet", "MONAI SegResNet")
NETWORKS += ("nnU-Net ResidualEncoderUNet", "pytorch-3dunet UNet3D")
TINY = "model=unet_tiny model.features=[4,8]"
HEADS = {
    "memory": (
        "config | tensors | predicted | requested | error | "
        "replayed | allocated | error | replay | reserved | error | run"
    ),
    "peer": "network | s/step | ratio | allocated MiB | ratio | predicted requested MiB",
    "timed": "config | s/step | ratio | allocated MiB | ratio",
    "fits": ("config and patch | voxels | s/step | replayed MiB | allocated | error | replay MiB | reserved | error"),
    "shares": "config | s/step | kernels, s | convolutions | the largest other operations",
    "windows": "config | s/volume | ratio | labels that differ | allocated MiB | ratio",
}
NOTES = """
MiB are 2^20 bytes. Predicted: tensors (ledger), those with workspaces of convolutions (predicted), replayed (blocks)
and replay (segments) of the allocator. Measured without a ledger: requested, allocated, reserved.
`run` is what a run reports as `cuda allocated`. Timed rows are bf16 but for those of float32, one at a time. Ratios are
to the first row of a table, of networks to the same network plain, of a volume's prediction to one window at a time
with sums on the host.

Not seen here: several GPUs, MIG, other drivers, and whether what is learned is right: train on a data set for that.
""".strip().splitlines()


class Row(NamedTuple):
    """One process."""

    section: str
    kind: str  # of HEADS
    name: str  # words of a configuration; of a peer, a network of networks.py
    patch: str  # 64,64,64
    plan: str = "plain"  # of a peer

    @property
    def title(self) -> str:
        """Return the row's name in its table."""
        if self.kind == "fits":
            return f"{self.name}, {self.patch.replace(',', 'x')}"
        return self.name if self.plan == "plain" else f"{self.name}, recompute {self.plan}"

    def command(self, device: str, turn: Path) -> list[str]:
        """Return the process that measures this row when it is its turn."""
        folder = Path(__file__).parent
        common = ["--device", device, "--turn", str(turn), "--patch"]
        if self.kind != "peer":
            return [sys.executable, str(folder / "cuda_rows.py"), self.kind, self.name, *common, self.patch]
        peers = [sys.executable, str(folder / "peers.py"), "--only", self.name, "--plans", self.plan]
        peers += ["--amp", "bf16", "--batch", "2", "--steps", str(TIMED)]
        return [*peers, *common, *self.patch.split(",")]


Result = Mapping[str, Any] | str  # what a row measured, or why it did not


def rows_on_cuda(patch: str, also: Iterable[str]) -> list[Row]:
    """Return the memory rows, then the timed ones in order of importance."""
    grid = [" ".join(choice) for choice in itertools.product(AMP, NORM, CKPT, WIDTHS)]
    single_techniques = [f"{amp} {lever}" for amp in ("amp=false", BF16) for lever in LEVERS[1:3]]
    section = "Predicted against the allocator"
    rows = [Row(section, "memory", words, patch) for words in (*also, *single_techniques, *grid)]
    for side in (128, 96):
        size = f"{side},{side},{side}"
        section = f"Networks at {side}x{side}x{side}"
        rows += [Row(section, "peer", name, size, plan) for name in NETWORKS for plan in PLANS]
        rows += [Row(section, "peer", name, size) for name in WAYS]
        rows += [Row(f"Levers at {side}x{side}x{side}", "timed", f"{BF16} {lever}".strip(), size) for lever in LEVERS]
    section = "In the memory of nnU-Net's network"
    rows += [Row(section, "fits", f"{SIX_LEVELS} {words}".strip(), size) for words, size in IN_ITS_MEMORY]
    at_128 = "128,128,128"
    profiled = (*(f"{BF16} {lever}".strip() for lever in LEVERS[:3]), NNUNET)
    rows += [Row("Shares of a step", "shares", words, at_128) for words in profiled]
    rows += [Row("Switches", "timed", f"{NNUNET} {word}".strip(), at_128) for word in SWITCHES]
    rows += [Row("Prediction of a volume", "windows", f"{NNUNET} {words}".strip(), "96,96,96") for words in WINDOWS]
    return rows + [Row("Float32", "timed", f"model=nnunet_hippocampus {word}", "96,96,96") for word in TF32]


def rows_of_a_rehearsal(also: Iterable[str]) -> list[Row]:
    """Return a row of each kind, and those asked for."""
    patch = "16,16,16"
    rows = [Row("Predicted against the allocator", "memory", words, patch) for words in (*also, TINY)]
    rows += [Row("Networks", "peer", MAX_POOLING, patch), Row("Levers", "timed", TINY, patch)]
    rows += [Row("Shares of a step", "shares", TINY, patch)]
    return [*rows, Row("Prediction of a volume", "windows", f"{TINY} inference.batch=2", patch)]


def run(row: Row, options: argparse.Namespace, turn: Path, end: float) -> Result:
    """Return a row's result, of a process with a limit of seconds; nothing runs once the clock is at `end`."""
    left = end - time.monotonic()
    if left <= 0:
        return "not run: the deadline was reached"
    limit: float = options.limit
    try:
        process = subprocess.run(
            row.command(options.device, turn),
            capture_output=True,
            text=True,
            timeout=min(limit, left),
            env=os.environ | {"OMP_NUM_THREADS": "1"},  # many processes at once
        )
    except subprocess.TimeoutExpired:
        return f"failed: ran past its limit of {limit:g} s" if limit <= left else "not run: cut off by the deadline"
    with suppress(IndexError, ValueError):
        if not process.returncode:
            result = json.loads(process.stdout.splitlines()[-1])
            if isinstance(result, dict):
                return result
    lines = process.stderr.strip().splitlines() or [f"exit code {process.returncode}, without a result"]
    return f"failed: {lines[-1][:300].replace('|', '/')}"


def reference(row: Row, members: Sequence[Row], results: Mapping[Row, Result]) -> Mapping[str, Any] | None:
    """Return the result that a row's ratios are to; None where that has none."""
    if row.kind == "peer":
        result = results.get(row._replace(plan="plain"))
        return result if isinstance(result, Mapping) else None
    return next((result for member in members if isinstance(result := results.get(member), Mapping)), None)


def line(row: Row, result: Result, base: Mapping[str, Any] | None) -> str:
    """Return a row of its section's table; ratios are to `base`."""
    if isinstance(result, str):
        return f"| {row.title} | {result} |"
    if row.kind == "memory":
        pairs = (("predicted", "requested"), ("replayed", "allocated"), ("replay", "reserved"))
        cells = [
            f"{result[predicted] / MIB:,.1f} | {result[seen] / MIB:,.1f} | {result[predicted] / result[seen] - 1:+.2%}"
            for predicted, seen in pairs
        ]
        cells = [f"{result['tensors'] / MIB:,.1f}", *cells, f"{result['run'] / MIB:,.1f}"]
    elif row.kind == "windows":
        cells = [f"{result['s']:.4f}", f"{result['s'] / result['base']:.3f}", f"{result['differing']:.2e}"]
        cells += [f"{result['peak'] / MIB:,.1f}", _ratio(result["peak"], result["base peak"])]
    elif row.kind == "fits":
        voxels = math.prod(map(int, row.patch.split(",")))
        cells = [f"{voxels / VOXELS:.2f}x", f"{result['s']:.4f}"]
        for predicted, seen in (("replayed", "allocated"), ("replay", "reserved")):
            error = f"{result[predicted] / result[seen] - 1:+.2%}" if result[seen] else ""
            cells += [f"{result[predicted] / MIB:,.1f}", f"{result[seen] / MIB:,.1f}", error]
    elif row.kind == "shares":
        others = ", ".join(f"{name} {share:.1%}" for name, share in result["others"].items())
        cells = [f"{result['seconds']:.4f}", f"{result['kernel seconds']:.4f}"]
        cells += [f"{result['convolutions']:.1%}", others]
    else:
        base = base or {"s": 0, "peak": 0}
        cells = [f"{result['s']:.4f}", _ratio(result["s"], base["s"])]
        cells += [f"{result['peak'] / MIB:,.1f}", _ratio(result["peak"], base["peak"])]
        if row.kind == "peer":
            cells.append(f"{result['predicted'] / MIB:,.1f}")
    return f"| {row.title} | {' | '.join(cells)} |"


def _ratio(value: float, base: float) -> str:
    return f"{value / base:.3f}" if base else ""


def markdown(rows: list[Row], results: Mapping[Row, Result], about: str) -> str:
    """Return the page of everything so far; rows that have no result yet are not run."""
    lines = [about]
    for section, group in itertools.groupby(rows, lambda row: row.section):
        members = list(group)
        head = HEADS[members[0].kind]
        size = members[0].patch.replace(",", "x")
        lines += ["", f"## {section}", "", f"Patch {size}, batch 2.", "", f"| {head} |"]
        lines.append("|---|" + "---:|" * head.count("|"))
        lines += [line(row, results.get(row, "not run"), reference(row, members, results)) for row in members]
    return "\n".join(lines) + "\n"


def about(device: str) -> str:
    """Return the machine and the versions, and what the numbers are."""
    versions = f"torch {torch.__version__}, CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"
    lines = ["# Rehearsal on the CPU: no number here is a GPU's", "", versions, ""]
    if device == "cuda":
        lines = ["# Measured on CUDA", "", f"{torch.cuda.get_device_name()}, driver {driver()}, {versions}", ""]
    return "\n".join([*lines, *NOTES, *read_settings(os.environ)[1]])


def driver() -> str:
    """Return the driver's version; empty where nvidia-smi is not there."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    with suppress(OSError):
        return subprocess.run(query, capture_output=True, text=True).stdout.split("\n")[0]
    return ""


def save(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(text)
    part.replace(path)


def run_all(rows: list[Row], options: argparse.Namespace) -> dict[Row, Result]:
    """Return all results: of memory rows, then of the others in turn. The files are written after each."""
    end = time.monotonic() + options.deadline
    results: dict[Row, Result] = {}
    title = about(options.device)
    save(options.out, markdown(rows, results, title))
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.at_once) as pool:
        turn = Path(folder) / "turn"
        of_memory = [row for row in rows if row.kind == "memory"]
        others = [row for row in rows if row.kind != "memory"]
        together = [others[start : start + options.at_once] for start in range(0, len(others), options.at_once)]
        for group in (of_memory, *together):
            pending = {pool.submit(run, row, options, turn, end): row for row in group}
            for future in as_completed(pending):
                row = pending[future]
                results[row] = future.result()
                save(options.out, markdown(rows, results, title))
                if options.json is not None:
                    save(options.json, json.dumps([[*row, result] for row, result in results.items()]))
                said = results[row] if isinstance(results[row], str) else "done"
                print(f"{row.section}: {row.title}: {said}", flush=True)
    return results


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("on_cuda.md"))
    parser.add_argument("--json", type=Path, help="file for all that was measured, kernels' names among it")
    parser.add_argument("--deadline", type=float, default=480, help="seconds, for all rows")
    parser.add_argument("--limit", type=float, default=200, help="seconds, for one row")
    parser.add_argument("--at-once", type=int, default=8, help="processes beside each other")
    parser.add_argument("--patch", default="64,64,64", help="voxels, of the memory rows")
    parser.add_argument("--also", action="append", default=[], metavar="WORDS", help="one more memory row, the first")
    parser.add_argument("--match", default="", metavar="REGEX", help="take only rows whose section and name match")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    return parser.parse_args()


def main() -> int:
    options = parsed()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("this torch sees no CUDA device: nothing is verified here", file=sys.stderr)
        return 2
    on_cuda = options.device == "cuda"
    rows = rows_on_cuda(options.patch, options.also) if on_cuda else rows_of_a_rehearsal(options.also)
    rows = [row for row in rows if re.search(options.match, f"{row.section}: {row.title}")]
    results = run_all(rows, options)
    return int(any(isinstance(result, str) and result.startswith("failed") for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())

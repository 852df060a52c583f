"""Predictions against the CUDA allocator: run by hand on a machine with a GPU, `python tests/bench/on_cuda.py`.

Prints a Markdown table over amp x norm x checkpointing x widths, with GPU, driver, torch and cuDNN; one process a row,
so that no row inherits another's cache. Predicted: tensors (ledger) and the allocator's replay; measured: requested,
allocated, reserved. The difference between predicted and requested is what convolutions take inside themselves.
"""

import argparse
import itertools
import json
import subprocess
import sys
from contextlib import suppress

import torch

from unet3d import build, compose
from unet3d.memory.allocator import replay
from unet3d.memory.meter import STEADY, CudaMeter, open_meter
from unet3d.memory.segments import choose_segments
from unet3d.memory.simulate import simulate
from unet3d.train import optim
from unet3d.train.step import train_step
from unet3d.types import Batch

MIB = 2**20
AMP = (["amp=false"], ["amp=true", "amp_dtype=fp16"], ["amp=true", "amp_dtype=bf16"])
NORM = (["model.norm=instance"], ["model.norm=batch"], ["model.norm=group"])
CKPT = (["ckpt=0"], ["ckpt=2"], ["ckpt=4"], ["ckpt=auto"])
WIDTHS = (["model.features=[16,32,64,128]"], ["model.features=[32,64,128,256]"])


def row(words: list[str], patch: str) -> dict[str, int]:
    """One configuration, predicted and measured; bytes."""
    config = compose.compose(["model=unet", f"data.patch={patch}", "device=cuda", *words])
    config.model.in_channels, config.model.classes = 1, 3
    starts = choose_segments(config, config.model).segment_starts
    ledger = simulate(config, config.model, starts).ledger
    model = build.model(config.model, 0).to("cuda")
    policy, optimizer = build.policy(config, "cuda", starts), optim.optimizer(config.optim, model)
    loss, scaler, meter = build.loss(config, 3), policy.scaler(), open_meter(model, optimizer)
    assert isinstance(meter, CudaMeter)
    size = (config.batch, *config.data.patch)
    for _ in range(STEADY + 2):
        batch = Batch(torch.randn(config.batch, 1, *size[1:]), torch.zeros(size, dtype=torch.int16))
        train_step(model, loss, optimizer, scaler, policy, [batch], meter.mark, config.optim.clip)
    found, held = meter.summary(), replay(ledger.events)
    return {
        "tensors": max(itertools.accumulate(change for _, change in ledger.events)),
        "seen": found["ledger"]["peak_bytes"],
        "requested": found["requested_bytes"],
        "replayed": held.allocated_bytes,
        "allocated": found["peak_bytes"],
        "replay_reserved": held.reserved_bytes,
        "reserved": found["reserved_bytes"],
    }


def main() -> int:
    """Print the table; exit code 2 where there is no GPU, 1 where a row failed."""
    parser = argparse.ArgumentParser(description="Predicted memory against the CUDA allocator.")
    parser.add_argument("--patch", default="[64,64,64]")
    parser.add_argument("--row", nargs="*", help="one configuration, in this process")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("this torch sees no CUDA device: nothing is verified here", file=sys.stderr)
        return 2
    if arguments.row is not None:
        print(json.dumps(row(arguments.row, arguments.patch)))
        return 0
    print(f"{torch.cuda.get_device_name()}, driver {driver()}, torch {torch.__version__}, cuDNN", end=" ")
    print(f"{torch.backends.cudnn.version()}, patch {arguments.patch}, batch 2; MiB\n")
    print("| config | tensors | requested | error | replayed | allocated | error | reserved: replay | real | error |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|")
    failed = 0
    for choice in itertools.product(AMP, NORM, CKPT, WIDTHS):
        words = [word for part in choice for word in part]
        command = [sys.executable, __file__, "--patch", arguments.patch, "--row", *words]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            failed += 1
            said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            print(f"| {' '.join(words)} | failed: {said[-1]} |", flush=True)
            continue
        found = json.loads(done.stdout.splitlines()[-1])
        pairs = (("tensors", "requested"), ("replayed", "allocated"), ("replay_reserved", "reserved"))
        cells = [f"{found[a] / MIB:,.1f} | {found[b] / MIB:,.1f} | {found[a] / found[b] - 1:+.2%}" for a, b in pairs]
        print(f"| {' '.join(words)} | {' | '.join(cells)} |", flush=True)
    return 1 if failed else 0


def driver() -> str:
    """The driver's version; empty where nvidia-smi is not there."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    with suppress(OSError):
        return subprocess.run(query, capture_output=True, text=True).stdout.split("\n")[0]
    return ""


if __name__ == "__main__":
    sys.exit(main())

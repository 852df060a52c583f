"""Transfer measured by hand: from a hippocampus snapshot to merged and to swapped classes, against from scratch.

    python tests/bench/transfer.py DATA OUT SEED   DATA: Task04_Hippocampus; what is in OUT is not trained again

A base network learns 400 steps on both classes. From it, 100 steps learn one class of both ("merged") and the classes
with their labels swapped; from scratch, 100, 200 and 400 steps do, each with a schedule of its own length. All hold out
fold 0. Prints the mean Dice of the held-out cases. The widths and the patch are small: it takes minutes on one core.
"""

import csv
import os
import subprocess
import sys
from pathlib import Path

BASE = ("data=decathlon", "data.fold=0", "data.patch=[32,48,32]", "model.features=[8,16,32]", "eval_every=0")
BASE += ("batch=2", "workers=0", "device=cpu", "wandb.mode=disabled", "data.augment.spatial_p=0")
TASKS = {"merged": "data.label_map={1:[1,2]}", "swapped": "data.label_map={1:2,2:1}"}
STEPS = (100, 200, 400)


def trained(data: Path, folder: Path, steps: int, *words: str) -> float:
    """Mean Dice of the held-out cases after a run of these steps in `folder`."""
    if not (folder / "STATUS").exists() or not (folder / "STATUS").read_text().startswith("done"):
        command = [sys.executable, "-m", "unet3d", "train", *BASE, f"data.root={data}", f"steps={steps}"]
        subprocess.run([*command, f"hydra.run.dir={folder}", *words], check=True, stdout=subprocess.DEVNULL)
    with (folder / "metrics.csv").open() as file:
        return float(next(row["val/dice_mean"] for row in reversed(list(csv.DictReader(file))) if row["val/dice_mean"]))


def main(data: Path, out: Path, seed: str) -> None:
    """Train what is missing, and print the table."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    base = out / "base"
    print(f"base, both classes, 400 steps: {trained(data, base, 400, seed):.4f}", flush=True)
    start = f"init={base / 'checkpoints' / 'last.pt'}"
    for name, label_map in TASKS.items():
        for steps in STEPS:
            found = trained(data, out / f"{name}-{steps}", steps, label_map, seed)
            print(f"{name}, from scratch, {steps} steps: {found:.4f}", flush=True)
        for factor in (1, 0.1):
            words = label_map, start, f"optim.init_lr={factor}", seed
            found = trained(data, out / f"{name}-init-{factor}", 100, *words)
            print(f"{name}, from the base at {factor} times the rate, 100 steps: {found:.4f}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve(), f"seed={int(sys.argv[3])}")

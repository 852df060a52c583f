"""Transfer measured by hand: from a hippocampus checkpoint to merged and to swapped classes, against from scratch.

    python benchmarks/transfer.py DATA OUT SEED   DATA: Task04_Hippocampus; runs in OUT are gone on with

The checkpoint is of `experiment=hippocampus`, 1,200 steps on both classes. From it, 100 steps learn one class of both
("merged") and the classes with their labels swapped; from scratch, 100, 200 and 400 steps do, each with a schedule of
its own length. All are that experiment otherwise, and hold out the same cases. Prints the mean Dice of these cases.
Takes as long as 3,000 steps of the experiment.
"""

import csv
import subprocess
import sys
from pathlib import Path

TASKS = {"merged": "data.label_map={1:[1,2]}", "swapped": "data.label_map={1:2,2:1}"}
STEPS, FEW = (100, 200, 400), 100
FACTORS = (1, 0.1)  # on the learning rate of what is loaded


def trained(data: Path, folder: Path, steps: int, *words: str) -> float:
    """Mean Dice of the held-out cases after a run of these steps in `folder`."""
    if not (folder / "STATUS").exists() or not (folder / "STATUS").read_text().startswith("done"):
        command = [sys.executable, "-m", "unet3d", "train", "experiment=hippocampus", f"data.root={data}"]
        command += [f"steps={steps}", "eval_every=0", "wandb.mode=disabled", "resume=auto", f"hydra.run.dir={folder}"]
        subprocess.run([*command, *words], check=True, stdout=subprocess.DEVNULL)
    with (folder / "metrics.csv").open() as file:
        return float(next(row["val/dice_mean"] for row in reversed(list(csv.DictReader(file))) if row["val/dice_mean"]))


def main(data: Path, out: Path, seed: str) -> None:
    """Train what is missing, and print the scores."""
    print(f"both classes, 1,200 steps: {trained(data, out / 'base', 1200, seed):.4f}", flush=True)
    start = f"init={out / 'base' / 'checkpoints' / 'last.pt'}"
    for name, label_map in TASKS.items():
        for factor in FACTORS:
            words = label_map, start, f"optim.init_lr={factor}", seed
            found = trained(data, out / f"{name}-init-{factor}", FEW, *words)
            print(f"{name}, from the checkpoint at {factor} times the rate, {FEW} steps: {found:.4f}", flush=True)
        for steps in STEPS:
            found = trained(data, out / f"{name}-{steps}", steps, label_map, seed)
            print(f"{name}, from scratch, {steps} steps: {found:.4f}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve(), f"seed={int(sys.argv[3])}")

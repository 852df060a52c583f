"""Seconds a step where two programs share the cores, and alone: as unet3d lets threads wait, and as OpenMP would.

python benchmarks/busy_cores.py FOLDER   takes five minutes; nothing else should run
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median

from unet3d.base.process import SPINS

COMMAND = ["-m", "unet3d", "train", "model=unet_small", "amp=true", "ckpt=2", "eval_every=0", "wandb.mode=disabled"]
WAYS = {"as unet3d sets it": SPINS, "as OpenMP would have it": "300000"}  # its own number of turns
STEPS, FIRST, ROUNDS = 15, 3, 3  # steps of a run, those that are not counted, runs


def run(folder: Path, spins: str, steps: int) -> subprocess.Popen:
    """A training in this folder, not waited for."""
    words = [f"steps={steps}", f"hydra.run.dir={folder}", f"data.root={folder.parent / 'phantom'}"]
    environment = os.environ | {"GOMP_SPINCOUNT": spins}
    nowhere = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen([sys.executable, *COMMAND, *words], env=environment, **nowhere)


def seconds(folder: Path) -> float:
    """The median of a run's steps but the first."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return median([record["time/step_s"] for record in records if "train/loss" in record][FIRST:])


def main(place: Path) -> None:
    """Measure both ways in turns, and print the table."""
    found: dict[tuple[str, str], list[float]] = {}
    for number in range(ROUNDS):
        for way, spins in WAYS.items():
            for beside in ("alone", "beside another run"):
                folder = place / f"{number}-{spins}-{beside[:5]}"
                other = run(folder.with_name(f"{folder.name}-other"), spins, 10**6) if beside != "alone" else None
                assert run(folder, spins, STEPS).wait() == 0
                found.setdefault((way, beside), []).append(seconds(folder))
                if other is not None:
                    other.kill()
                    other.wait()
    for (way, beside), values in found.items():
        print(f"{way}, {beside}: {median(values):.2f} s a step ({', '.join(f'{value:.2f}' for value in values)})")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())

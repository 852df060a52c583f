"""How long prediction takes: seconds a volume, measured on one core, and computed for many volumes and n jobs.

By hand: python benchmarks/many_volumes.py RUN/checkpoints/best.pt [X Y Z of a volume, in voxels: 128 128 64]

Each round predicts one volume in a process, then three in another: two volumes are the difference. CPU seconds, of
user and system, which programs beside it disturb less than a clock; on a free core the clock shows the same.
"""

import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

import nibabel as nib
import numpy as np

ROOT = Path(__file__).resolve().parents[1]
ROUNDS, MANY = 3, 100_000
ONE_CORE = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}


def seconds(checkpoint: Path, volumes: list[Path]) -> float:
    """CPU seconds of a process that segments these volumes."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory() as out:
        words = ["predict", checkpoint, *volumes, "-o", out, "--device", "cpu"]
        subprocess.run(
            [sys.executable, "-m", "unet3d", *words], check=True, capture_output=True, env=os.environ | ONE_CORE
        )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Prints a line a round, and the table."""
    checkpoint, shape = Path(sys.argv[1]), tuple(map(int, sys.argv[2:5])) or (128, 128, 64)
    with tempfile.TemporaryDirectory() as folder:
        volumes = [Path(folder, f"{name}.nii.gz") for name in "abc"]
        for seed, path in enumerate(volumes):
            voxels = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
            nib.save(nib.Nifti1Image(voxels, np.eye(4)), path)
        rounds = []
        for number in range(ROUNDS):
            one, three = seconds(checkpoint, volumes[:1]), seconds(checkpoint, volumes)
            rounds.append(((three - one) / 2, one - (three - one) / 2))
            print(f"round {number}: {rounds[-1][0]:.1f} s a volume, {rounds[-1][1]:.1f} s to start", flush=True)
    each, start = (median(column) for column in zip(*rounds, strict=True))
    print(f"median, measured: {each:.1f} s a volume of {'x'.join(map(str, shape))} voxels, {start:.1f} s to start")
    for jobs in (1, 10, 100, 1000):
        hours = (start + each * -(-MANY // jobs)) / 3600
        print(f"computed: {MANY:,} volumes by {jobs:,} jobs of one core: {hours:,.1f} hours")


if __name__ == "__main__":
    main()

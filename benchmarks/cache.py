"""Patches a second of data.cache=memory and data.cache=disk, side by side, as Markdown.

    python benchmarks/cache.py [--room 300] [--rounds 7] [--place FOLDER]

The data set takes ten times what the process of data.cache=disk may: RLIMIT_DATA allows it what it has once libraries
are loaded, and `room` MiB more. That limits all that a process allocates, of which read-only maps are no part: their
pages belong to the system's page cache, which keeps as much of the files as there is room for. The process of
data.cache=memory has no limit, since it could not hold the data. Both serve the same patches, in turns, with one
thread and no data workers; a ratio is the median of those of the rounds. All files have been read before the first
round, which warms up, so that the page cache holds what it has room for. `cold` is after they have been dropped from
it: patches come from the disk itself. It takes ten minutes, ten times the limit of memory, and twice as much of disk.
"""

import argparse
import gc
import hashlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path
from statistics import median

import nibabel as nib
import numpy as np
import torch

from unet3d.base.types import MIB, mib
from unet3d.config.schema import Augment, Config, Data
from unet3d.data.loader import batches
from unet3d.data.patches import Patches, intensities
from unet3d.data.prepare import PreparedData, prepare_data

SIDE, BYTES = 160, 6  # voxels of a case along each axis; of a voxel once prepared
TIMES = 10  # how much larger the data set is than the limit
PLAIN = Augment(spatial_p=0, mirror=[], noise_p=0, blur_p=0, contrast_p=0, gamma_p=0)
COUNTS = {"cropped": 2000, "augmented": 300, "cropped, cold": 100}  # patches a round


def allocated() -> int:
    """Bytes that RLIMIT_DATA counts."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData:")]
    return int(line.split()[1]) * 2**10


def write_set(root: Path, cases: int) -> None:
    """Volumes of noise, no two alike, in files that are not compressed."""
    rng = np.random.default_rng(0)
    voxels = rng.integers(0, 1000, (SIDE,) * 3, np.int16)
    for folder in ("images", "labels"):
        (root / folder).mkdir(parents=True)
    for number in range(cases):
        voxels[0, 0, :] = rng.integers(0, 1000, SIDE)
        nib.save(nib.Nifti1Image(voxels, np.eye(4)), root / "images" / f"case{number:04}.nii")
        nib.save(nib.Nifti1Image((voxels > 900).astype(np.uint8), np.eye(4)), root / "labels" / f"case{number:04}.nii")


def options(root: Path, way: str, changes: Augment) -> Data:
    """Patches of the default size."""
    own = {"format": "folders", "root": str(root), "classes": ["background", "organ"], "val_fraction": 0.01}
    return Data(**own, cache=way, cache_root=str(root / "cache"), intensity="zscore", augment=changes)


def drop(data: PreparedData, root: Path) -> None:
    """The files of the cache leave the page cache, and memory."""
    assert data.read.cache is not None
    data.read.cache.clear()
    gc.collect()
    for path in root.glob("cache/*.arrays"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def serve(way: str, root: Path, room: int) -> None:
    """Answer each line of stdin, a row of the table and a round, by seconds and a digest of the patches."""
    torch.set_num_threads(1)
    intensities(Augment())  # what is loaded late
    if way == "disk":
        most = allocated() + room * MIB
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    config = Config(data=options(root, way, PLAIN), workers=0, seed=1)
    data = prepare_data(config.data)
    names = [case.id for case in data.train]
    print("ready", flush=True)
    for line in sys.stdin:
        row, number = json.loads(line)
        if row == "cropped, cold" and way == "disk":
            drop(data, root)
        changes = Augment() if row == "augmented" else PLAIN
        patches = Patches(lambda i: data.read_train(data.train[i]), options(root, way, changes), 1, config.data.patch)
        stream, digest = batches(patches, names, config, COUNTS[row] * number), hashlib.sha256()
        started = time.perf_counter()
        found = [*islice(stream, 1)]
        for (batch,) in islice(stream, COUNTS[row] // config.batch - 1):
            found = [[batch]]
        seconds = time.perf_counter() - started
        digest.update(found[0][0].image.numpy().tobytes())
        print(json.dumps([seconds, digest.hexdigest()]), flush=True)


def warm(root: Path) -> None:
    """The files of the cache enter the page cache."""
    for path in root.glob("cache/*.arrays"):
        with path.open("rb") as file:
            while file.read(MIB):
                pass


def ask(child: subprocess.Popen, row: str, number: int) -> tuple[float, str]:
    assert child.stdin and child.stdout
    print(json.dumps([row, number]), file=child.stdin, flush=True)
    seconds, digest = json.loads(child.stdout.readline())
    return seconds, digest


def begin(way: str, root: Path, room: int) -> subprocess.Popen:
    """A process that has prepared all cases."""
    command = [sys.executable, __file__, "--serve", way, "--place", str(root), "--room", str(room)]
    started = time.perf_counter()
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout
    for line in child.stdout:
        if line == "ready\n":
            break
    print(f"data.cache={way}: ready after {time.perf_counter() - started:.0f} s", flush=True)
    return child


def limit_of(room: int) -> int:
    """What the process of data.cache=disk will be allowed."""
    program = "import cache as c; c.torch.set_num_threads(1); c.intensities(c.Augment()); print(c.allocated())"
    found = subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parent, capture_output=True, check=True)
    return int(found.stdout) + room * MIB


def compare(root: Path, room: int, rounds: int) -> None:
    limit = limit_of(room)
    cases = -(-TIMES * limit // (BYTES * SIDE**3))
    size = mib(cases * BYTES * SIDE**3)
    print(f"{cases} cases of {SIDE}^3 voxels, {size} MiB once prepared; RLIMIT_DATA {mib(limit)} MiB", flush=True)
    write_set(root, cases)
    children = {way: begin(way, root, room) for way in ("disk", "memory")}
    warm(root)
    print("\n| patches of 64x64x32 | memory, a second | disk, a second | disk / memory | rounds |")
    print("|---|---:|---:|---:|---|", flush=True)
    for row, count in COUNTS.items():
        seconds: dict[str, list[float]] = {"memory": [], "disk": []}
        for number in range(rounds + 1):  # the first warms up
            ways = [*children] if number % 2 else [*reversed(children)]
            answers = {way: ask(children[way], row, number) for way in ways}
            assert answers["memory"][1] == answers["disk"][1], "other patches"
            for way in ways if number else ():
                seconds[way].append(answers[way][0])
        ratios = [a / b for a, b in zip(seconds["memory"], seconds["disk"], strict=True)]
        speeds = [f"{count / median(seconds[way]):.1f}" for way in ("memory", "disk")]
        each = " ".join(f"{ratio:.3f}" for ratio in ratios)
        print(f"| {row} | {' | '.join(speeds)} | {median(ratios):.3f} | {each} |", flush=True)
    for child in children.values():
        child.communicate()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--room", type=int, default=300, help="MiB")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--place", type=Path, help="an empty folder for the data set and its cache")
    parser.add_argument("--serve", choices=["memory", "disk"], help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve(given.serve, given.place, given.room)
        return
    with tempfile.TemporaryDirectory(dir=given.place) as folder:
        compare(Path(folder), given.room, given.rounds)


if __name__ == "__main__":
    main()

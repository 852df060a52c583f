"""Damage real files at random and read them as a run would: `python tests/bench/fuzz.py --files 2000 --seed 0`.

Each trial damages one file of a small data set, a NIfTI file or dataset.json, and takes the set through the quick
check, the full check and the reader. It must end in a problem that is printed, or in a data set that can be read. What
counts as a failure: any exception but UserError, a message that is not printable text, a run that is refused what the
check has passed, a file opened outside of the data set, more memory than the limit on the address space leaves, and
more seconds than the bound.
"""

import argparse
import os
import random
import resource
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from damage import LAYOUTS, NIFTI, damage_json, data_set

from unet3d.config import Data
from unet3d.data.cases import read_dataset, split
from unet3d.data.check import WARNING, check_cases, summary
from unet3d.data.preprocess import CaseReader
from unet3d.errors import UserError

HEADROOM = 2**30  # bytes of address space beyond what the process has when it begins
SLOW = 5.0  # seconds a trial, on a busy machine; most take milliseconds
CODE = tuple({os.path.realpath(path) + "/" for path in (sys.prefix, sys.base_prefix, *sys.path) if path})


@contextmanager
def limited() -> Iterator[None]:
    """At most HEADROOM more address space than now."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + HEADROOM, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


class Watch:
    """Every file that is opened for reading between `start` and `stop` must lie in `root`, its links followed."""

    def __init__(self) -> None:
        self.root: Path | None = None
        self.strays: list[str] = []
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple) -> None:
        if event != "open" or self.root is None or not isinstance(arguments[0], str | bytes | os.PathLike):
            return
        root, self.root = self.root, None  # what follows opens nothing, but may be heard
        path = os.path.realpath(os.fsdecode(arguments[0]))
        if not path.startswith((f"{os.path.realpath(root)}/", *CODE)):
            self.strays.append(path)
        self.root = root


def read_all(data: Data) -> str:
    """Take the data set through the check and the reader. Returns whether it was refused or read."""
    try:
        task = read_dataset(data)
    except UserError as error:
        return _refused([str(error)])
    quick = check_cases(task, task.cases, data, full=False)
    lines = check_cases(task, task.cases, data, full=True)
    assert {*quick} <= {*lines}, f"only the quick check says {quick}"
    problems = [line for line in lines if not line.startswith(WARNING)]
    try:
        train, val = split(task, data)
        lines += summary(task, train, val)
        reader = CaseReader(task, data.spacing)
        reader.fit_intensity("auto", train)
        reader.fill([*train, *val])
    except UserError as error:
        assert problems, f"the check passed what a run refuses: {error}"
        lines.append(str(error))
    return _refused(lines) if problems else "read"


def _refused(lines: list[str]) -> str:
    said = "\n".join(lines)
    assert said.replace("\n", "").isprintable() and len(said) < 20_000, f"unfit to print: {said[:500]!r}"
    return "refused"


def prepare(rng: random.Random, folder: Path) -> tuple[Data, str]:
    """A data set below `folder` with one file of it damaged, and the name of the damage."""
    shutil.rmtree(folder, ignore_errors=True)
    layout, ending, root = rng.choice(LAYOUTS), rng.choice((".nii", ".nii.gz")), folder / "set"
    data = data_set(root, layout, ending)
    volumes = sorted(root.glob(f"*/?*{ending}"))
    (folder / "outside.nii").write_bytes(volumes[0].read_bytes())
    if layout == "decathlon":  # a link that only a changed dataset.json names
        (root / "imagesTr" / "out.nii").symlink_to(folder / "outside.nii")
    if layout != "folders" and rng.random() < 0.4:
        return data, "json " + damage_json(rng, root / "dataset.json")
    name = rng.choice([*NIFTI])
    NIFTI[name](rng, rng.choice(volumes))
    return data, name


def trial(number: int, seed: int, folder: Path, watch: Watch) -> tuple[str, str, float]:
    """Damage and read. Returns what was done, what came of it, and how long it took (s)."""
    data, done = prepare(random.Random(f"{seed} {number}"), folder)
    watch.strays.clear()
    started = time.perf_counter()
    try:
        with warnings.catch_warnings(), limited():
            warnings.simplefilter("error")
            watch.root = folder / "set"
            found = read_all(data)
    except BaseException as error:
        watch.root = None
        found = "FAILED: " + "".join(traceback.format_exception(error))[-1500:]
        if isinstance(error, KeyboardInterrupt):
            raise
    finally:
        watch.root = None
    seconds = time.perf_counter() - started
    if watch.strays:
        found = f"FAILED: opened {watch.strays}"
    return done, found if seconds < SLOW else f"FAILED: {seconds:.1f} s, {found}", seconds


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--files", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="this trial alone")
    arguments = parser.parse_args()
    watch, outcomes, failed, slowest = Watch(), Counter[str](), 0, 0.0
    with tempfile.TemporaryDirectory() as folder:
        for number in range(arguments.files) if arguments.only is None else [arguments.only]:
            done, found, seconds = trial(number, arguments.seed, Path(folder) / "trial", watch)
            outcomes[f"{done}: {found if not found.startswith('FAILED') else 'FAILED'}"] += 1
            slowest = max(slowest, seconds)
            if found.startswith("FAILED"):
                failed += 1
                print(f"trial {number}: {done}: {found}", flush=True)
    for name, count in sorted(outcomes.items()):
        print(f"{count:6d}  {name}")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{sum(outcomes.values())} trials, {failed} failures; slowest {slowest:.2f} s; peak memory {peak:.0f} MiB")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

"""Damage real files at random and read them as unet3d does: `python tests/bench/fuzz.py --files 2000 --seed 0`.

Half of the trials damage one file of a small data set, a NIfTI file or dataset.json, and take the set through the quick
check, the full check and the reader. The others damage one file of a run folder, and take it through `resume`,
`predict`, `report` and `compare`. Each must end in a line that is printed, or in something sound. What counts as a
failure: any exception but those that become a line, text that is not printable, a run that is refused what the check
has passed, a file opened outside of the folder, more memory than the limit on the address space leaves, and more
seconds than the bound. `--seconds` bounds the whole.
"""

import argparse
import contextlib
import functools
import io
import math
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest import mock

from damage import LAYOUTS, NIFTI, damage_json, data_set
from damage_run import damage_run

from unet3d import build
from unet3d.base.errors import CheckpointError, UserError
from unet3d.base.files import read_yaml
from unet3d.cli.train import parse, plan
from unet3d.config import compose
from unet3d.config.schema import Data
from unet3d.data.cases import read_dataset
from unet3d.data.check import check_cases, summary
from unet3d.data.intensity import intensity_rules
from unet3d.data.prepare import CaseReader, usable
from unet3d.data.splits import split
from unet3d.report import compare, compared_runs, memory_plots, plots, report
from unet3d.report.report import print_summary
from unet3d.run import checkpoint, predict
from unet3d.run.record import read_run
from unet3d.run.training_state import CheckpointManager
from unet3d.training import optim
from unet3d.training.trainer import Learner

RUN = ["model=unet_tiny", "model.features=[4,8]", "data.patch=[16,16,16]", "data.phantom.shape=[20,20,16]"]
RUN += ["data.phantom.cases=2", "batch=1", "steps=2", "eval_every=1", "workers=0", "hydra.run.dir=run"]
DRAWN = 20  # one of so many reports has its pictures drawn, which take a second
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
        if not f"{path}/".startswith((f"{os.path.realpath(root)}/", *CODE)):
            self.strays.append(path)
        self.root = root


def read_all(data: Data) -> str:
    """Take the data set through the check and the reader. Returns whether it was refused or read."""
    try:
        task = read_dataset(data)
    except UserError as error:
        return _refused([str(error)])
    quick = check_cases(task, task.cases, data)
    found = check_cases(task, task.cases, data, voxels=True)
    problems, lines = found.problems, [*found.problems, *found.warnings]
    assert {*quick.problems, *quick.warnings} <= {*lines}, f"only the quick check says {quick}"
    try:
        train, val = split(task, data)
        lines += summary(task, train, val, found.headers)
        reader = CaseReader(task, data.spacing)
        reader.intensity = intensity_rules("auto", task.channels, map(reader.foreground, train))
        for _ in usable([*train, *val], "reading cases", reader):
            pass
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


class SoundRun:
    """A run folder that is sound, the state of its training, and what is done with copies of it."""

    def __init__(self, place: Path) -> None:
        words = [sys.executable, str(Path(build.__file__).parents[1] / "train.py"), *RUN]
        subprocess.run(words, cwd=place, check=True, capture_output=True, env=os.environ | {"WANDB_MODE": "disabled"})
        self.folder = place / "run"
        for path in (self.folder / "report.html", self.folder / "metrics.csv"):
            path.unlink()  # large, and not read
        shutil.rmtree(self.folder / "memory")
        state = checkpoint.load_checkpoint(self.folder / "checkpoints" / "last.pt")
        config = compose.from_plain(read_yaml(self.folder / "config.yaml"))
        options = compose.from_plain(state["config"] | {"model": state["model_options"]}).model
        model = build.model(options, seed=0)
        optimizer, policy = optim.optimizer(config.optim, model), build.policy(config, "cpu")
        learner = Learner(model, build.loss(config, options.classes or 0), optimizer, policy.scaler(), policy)
        self.state = CheckpointManager(self.folder, config, options, state["fingerprint"], learner)
        report.write_report(read_run(shutil.copytree(self.folder, place / "warm")))  # loads what draws

    def read_all(self, folder: Path, is_drawn: bool) -> str:
        """Take a copy through all that reads a run folder. Returns whether something was refused."""
        drawn = (
            () if is_drawn else ((plots, "training_curves"), (memory_plots, "phase_plot"), (memory_plots, "layer_plot"))
        )
        said = io.StringIO()
        with contextlib.ExitStack() as stack:
            stack.enter_context(contextlib.redirect_stdout(said))
            stack.enter_context(contextlib.redirect_stderr(said))
            for module, name in drawn:
                stack.enter_context(mock.patch.object(module, name))
            ends = [_ends(act, folder) for act in (_report, _summary, _compare, _predict)]
            ends.append(_ends(self._resume, folder))
        _refused([said.getvalue(), *ends])
        return "refused" if any(ends) else "read"

    def _resume(self, folder: Path) -> None:
        plan(parse([f"resume={folder}"]))
        replace(self.state, folder=folder).restore()


def _ends(act: Callable[[Path], object], folder: Path) -> str:
    """The line that a user would see; "" without an error."""
    try:
        act(folder)
    except (UserError, CheckpointError) as error:
        return str(error)
    except OSError as error:  # becomes a line in `main`
        return f"{error.filename}: {error.strerror}".encode("unicode_escape").decode()
    return ""


def _report(folder: Path) -> None:
    report.write_report(read_run(folder))


def _summary(folder: Path) -> None:
    print_summary(read_run(folder))


def _compare(folder: Path) -> None:
    rows = compared_runs.read_runs(compared_runs.find_runs([folder]))
    compare.print_comparison(rows)
    compare.numbers_table(rows)


def _predict(folder: Path) -> None:
    for name in ("best.pt", "last.pt"):
        if not (path := folder / "checkpoints" / name).is_symlink():  # who names one asks for what it leads to
            predict.load(path, "cpu")


def trial(number: int, seed: int, folder: Path, watch: Watch, sound: SoundRun | None = None) -> tuple[str, str, float]:
    """Damage and read a data set, or a copy of a run. Returns what was done, what came of it, the seconds it took."""
    rng, root = random.Random(f"{seed} {number}"), folder / "set"
    if sound is None:
        data, done = prepare(rng, folder)
        act = functools.partial(read_all, data)
    else:
        shutil.rmtree(folder, ignore_errors=True)
        done = damage_run(rng, shutil.copytree(sound.folder, root))
        act = functools.partial(sound.read_all, root, number % DRAWN < 2)
    watch.strays.clear()
    started = time.perf_counter()
    try:
        with warnings.catch_warnings(), limited():
            warnings.simplefilter("error")
            watch.root = root
            found = act()
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
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no trial after so many")
    arguments = parser.parse_args()
    watch, outcomes, failed, slowest = Watch(), Counter[str](), 0, 0.0
    end = time.monotonic() + arguments.seconds
    with tempfile.TemporaryDirectory() as folder:
        sound = SoundRun(Path(folder))
        for number in range(arguments.files) if arguments.only is None else [arguments.only]:
            if time.monotonic() > end:
                break
            of = sound if number % 2 else None
            done, found, seconds = trial(number, arguments.seed, Path(folder) / "trial", watch, of)
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

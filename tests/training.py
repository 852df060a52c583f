"""Tiny trainings in processes of their own, forked from a server that has torch loaded: real pids, real signals."""

import itertools
import json
import math
import multiprocessing
import os
import pkgutil
import re
import runpy
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, partial
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from guards import Guard, are_out
from PIL import Image

from unet3d.base import progress
from unet3d.cli import main
from unet3d.cli.train import parse, plan
from unet3d.config import compose
from unet3d.config.schema import Config, Model
from unet3d.memory import prediction
from unet3d.memory.technique import choose_technique, saved
from unet3d.recomputing import prepare, search
from unet3d.report import held_out, memory_plots, plots, report
from unet3d.report.loggers import Loggers
from unet3d.run.checkpoint import load_checkpoint
from unet3d.training.inference import Predictor

ROOT = Path(__file__).resolve().parent.parent
TINY = [
    *("model=unet_tiny", "model.features=[4,8]", "data.patch=[16,16,16]", "data.phantom.shape=[20,20,16]"),
    *("data.phantom.cases=4", "batch=1", "steps=4", "eval_every=2", "device=cpu", "workers=0"),
]
# A run whose state is all that a checkpoint may hold. Three cases are learned, so that steps 2, 4 and 5 end no epoch.
RUN = [
    *TINY,
    *("data.phantom.cases=5", "data.val_fraction=0.4", "data.phantom.shape=[18,16,16]", "steps=6"),
    *("amp=true", "amp_dtype=fp16", "model.dropout=0.2", "ckpt=2", "optim=adam", "optim.average=0.9"),
    "hydra.run.dir=run",
]
PLAIN = ("optim=sgd", "optim.momentum=0", "optim.weight_decay=0", "optim.clip=null")  # quick to simulate
# What most tests assert holds for any schedule and any tiles: with few of both, programs take half of the time.
FEW = ((search, "TRIES", 150), (prepare, "TILES", 6), (prepare, "FEWEST_TILES", 4))
AS_IN_RUNS = [(module, name, getattr(module, name)) for module, name, _ in FEW]
for module, name, number in FEW:
    setattr(module, name, number)
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["served"])
FIGURES = [
    *((held_out, "segmentation"), (plots, "training_curves"), (held_out, "score_plot")),
    *((memory_plots, "phase_plot"), (memory_plots, "timeline_plot"), (memory_plots, "layer_plot")),
]
Hook = Callable[[], None]


@cache
def yaml_of(*overrides: str) -> str:
    """The config.yaml that a run of these writes."""
    return compose.to_yaml(compose.compose(overrides))


class Ended:
    """A training that has ended, and what it printed."""

    def __init__(self, process: BaseProcess, folder: Path) -> None:
        self._process, self._folder = process, folder

    @property
    def out(self) -> str:
        return (self._folder / "out").read_text()

    @property
    def err(self) -> str:
        return (self._folder / "err").read_text()

    @property
    def code(self) -> int | None:
        """Its exit code, -n by signal n; waits until its data workers have ended, too."""
        self._process.join()
        return self._process.exitcode


def probabilities(predictor: Predictor, image: torch.Tensor) -> torch.Tensor:
    """Class probabilities K X Y Z of a whole image C X Y Z."""
    whole = torch.empty(0)
    for strip in predictor.strips(image):
        if not len(whole):
            whole = torch.empty(len(strip.probabilities), *strip.sizes)
        whole[(slice(None), *strip.box)] = strip.probabilities
    return whole


def run(*arguments: str, cwd: Path, code: str | None = None, patience: int = 200) -> subprocess.CompletedProcess[str]:
    """`python train.py ARGUMENTS`, or `python -c CODE ARGUMENTS`, in an interpreter of its own, nothing left out."""
    command = [sys.executable, *(["-c", code] if code else [str(ROOT / "train.py")]), *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=patience)


def face(*arguments: object) -> int:
    """`python -m unet3d ARGUMENTS` in this process; its exit code."""
    before, sys.argv = sys.argv, ["unet3d", *map(str, arguments)]
    try:
        return main.main()
    finally:
        sys.argv = before


def planned(words: Sequence[str]) -> Any:
    """Return what `python train.py WORDS` would begin: a job alone, or the jobs of a sweep."""
    jobs = plan(parse(words))
    return jobs[0] if jobs[0].number is None else jobs


def train(place: Path, *arguments: str, **options: Any) -> Ended:
    """`python train.py ARGUMENTS` in the folder `place`, with the options of `start`, once it has ended."""
    child, _ = start(place, *arguments, **options)
    assert child.pid
    descriptor = os.pidfd_open(child.pid)
    select.select([descriptor], [], [])
    os.close(descriptor)
    return Ended(child, place)


def resume(run: Path, *options: str, hook: Hook | None = None) -> Ended:
    """Resume the run in this folder, from the folder above."""
    return train(run.parent, f"resume={run.name}", *options, hook=hook)


def forked(target: Callable[..., object], *arguments: object) -> BaseProcess:
    """Return a process, not started yet, that the server will fork to call `target`.

    The server starts with the first, with the folders of the tests where it looks for modules.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        forkserver.ensure_running()
    return SERVER.Process(target=target, args=arguments)


def start(
    place: Path, *arguments: str, hook: Hook | None = None, wandb: str = "disabled", frills: bool = False
) -> tuple[BaseProcess, Path]:
    """`python train.py ARGUMENTS` in the folder `place`, after `hook`, as the leader of a process group.

    Without `frills` it predicts, draws and reports nothing. It is not waited for.
    """
    place.mkdir(exist_ok=True)
    child = forked(train_here, place, arguments, hook, wandb, frills, are_out())
    child.start()
    return child, place


def train_here(
    place: Path, arguments: tuple[str, ...], hook: Hook | None, wandb: str, frills: bool, guards_out: Sequence[Guard]
) -> None:
    """Become the process of `train`: everything of it is this training's from here on."""
    multiprocessing.set_start_method("fork", force=True)  # of data workers, as in a program of its own
    os.setpgid(0, 0)
    os.chdir(place)
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(place / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666), number)
    os.environ["WANDB_MODE"] = wandb
    make_media_folder()
    torch.set_num_threads(1)
    progress.FIRST_LINE = math.inf  # a slow machine prints no more than a fast one
    sys.argv = [str(ROOT / "train.py"), *arguments]
    if not frills:
        without_frills()
    for guard in guards_out:
        guard.take_out(pytest.MonkeyPatch())
    if hook:
        hook()
    runpy.run_path(str(ROOT / "train.py"), run_name="__main__")


def make_media_folder() -> None:
    """Make the folder of wandb's tables, which the server had made, again: a child that ended may have removed it."""
    private: Any = sys.modules.get("wandb.sdk.data_types._private")
    if private is not None:
        os.makedirs(private.MEDIA_TMP.name, exist_ok=True)


def _unpredicted(config: Config, options: Model, before: Any = None) -> prediction.Preflight:
    """Choose what backward computes a second time, and predict nothing."""
    if config.recompute != "none":
        program = choose_technique(config, options).program
        return prediction.Preflight((), {} if program is None else {"schedule": saved(config, program)})
    return prediction.Preflight((0, 2) if config.ckpt else (), {})


def without_frills() -> None:
    """No preflight, no report, pictures of one pixel: they take longer than the training, and no fault is in them."""
    prediction.preflight = _unpredicted
    pixels_alone()


def pixels_alone() -> None:
    """No report, pictures of one pixel."""
    report.write_page = lambda run: run.path
    for module, name in FIGURES:
        setattr(module, name, _one_pixel)


def _one_pixel(*drawn: object) -> None:
    (target,) = (value for value in drawn if isinstance(value, Path) or hasattr(value, "write"))
    Image.new("RGB", (1, 1)).save(target, "PNG")


def call(owner: object, name: str, count: int, act: Hook, lasting: bool = False) -> None:
    """`act` at the beginning of the `count`-th call of this public function; with `lasting`, of each from then on."""
    function, calls = getattr(owner, name), itertools.count(1)

    def wrapped(*of: object, **named: object) -> object:
        number = next(calls)
        if number == count or (lasting and number > count):
            act()
        return function(*of, **named)

    setattr(owner, name, wrapped)


def when(target: str, count: int, act: Hook, lasting: bool = False) -> Hook:
    """Return a hook that does so in a training's process, for a target such as "unet3d.run.validation.evaluate"."""
    return partial(_call_named, target, count, act, lasting)


def _call_named(target: str, count: int, act: Hook, lasting: bool) -> None:
    owner, _, name = target.rpartition(".")
    call(pkgutil.resolve_name(owner), name, count, act, lasting)


def fail(error: BaseException, *_: object) -> None:
    raise error


def send(number: int, to_group: bool = False) -> None:
    """A signal to this process, or to its process group."""
    (os.killpg if to_group else os.kill)(0 if to_group else os.getpid(), number)


kill = partial(send, signal.SIGKILL)


def at_step(step: int, number: int = signal.SIGKILL) -> None:
    """The process gets a signal once it has logged this step."""
    log = Loggers.scalars

    def then_signal(loggers: Loggers, values: dict, at: int) -> None:
        log(loggers, values, at)
        if at == step and "train/loss" in values:
            send(number)

    Loggers.scalars = then_signal  # type: ignore[method-assign,assignment]


def fill(folder: Path, room: int = 0) -> None:
    """Leave this many bytes of the disk."""
    with (folder / "filler").open("wb", buffering=0) as file:
        with suppress(OSError):
            while True:
                file.write(b"x" * 4096)
        file.truncate(max(0, file.tell() - room))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = load_checkpoint(folder / "checkpoints" / "last.pt")["model"]
    return found


def records(folder: Path) -> list[dict]:
    """metrics.jsonl, floats as hexadecimals, without what depends on the clock."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    bare = [
        {k: v.hex() if isinstance(v, float) else v for k, v in line.items() if not k.startswith(("time/", "memory/"))}
        for line in lines
    ]
    return [record for record in bare if len(record) > 1]


def steps_with(folder: Path, key: str) -> list[int]:
    """Return the steps of the records that have this key."""
    return [record["step"] for record in records(folder) if key in record]


def saved_step(folder: Path, name: str = "last.pt") -> int:
    """Return the step of a run's checkpoint."""
    return load_checkpoint(folder / "checkpoints" / name)["step"]  # type: ignore[no-any-return]


def same(a: Path, b: Path) -> bool:
    """Whether two runs have the same weights and records, to the bit."""
    equal = [torch.equal(x, y) for x, y in zip(weights(a).values(), weights(b).values(), strict=True)]
    return all(equal) and records(a) == records(b)


def status(folder: Path) -> str:
    return (folder / "STATUS").read_text()


def exit_code(folder: Path) -> int:
    """Return the exit code in the last line of STATUS."""
    return int(status(folder).splitlines()[-1].split()[-1])


def numbers(text: str) -> list[int]:
    """Return the whole numbers that a text names; those within words and paths are none."""
    return [int(number) for number in re.findall(r"(?<![\w./=-])\d+(?![\w./=-])", text)]

"""Signals, two processes for one folder, poisoned batches, lost loggers and closed terminals: what a run survives."""

import functools
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager, suppress
from datetime import datetime
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType, SimpleNamespace

import hydra.core.utils
import numpy as np
import pytest
import torch
from guards import no, nothing, without
from promises import promise
from torch.utils.data import _utils as loader_parts
from training import (
    ROOT,
    SERVER,
    TINY,
    Ended,
    call,
    exit_code,
    numbers,
    records,
    same,
    send,
    start,
    status,
    train,
    weights,
)

from unet3d.base import progress, signals
from unet3d.base.errors import Preempted
from unet3d.cli import lifecycle
from unet3d.config.schema import Config, Data
from unet3d.data.loader import batches
from unet3d.data.patches import Patches, PreparedCase, prepare
from unet3d.memory import prediction
from unet3d.report import plots
from unet3d.run import checkpoint, validation
from unet3d.run import run as job
from unet3d.training import trainer

RUN = [*TINY, "model.dropout=0.2", "data.root=../phantom", "hydra.run.dir=run"]
Patch = pytest.MonkeyPatch
MARK = "UNET3D_TEST"
PLACES = {
    "step": (trainer, "train_step"),
    "validation": (validation, "evaluate"),
    "save": (torch, "save"),
    "data": (job, "prepare_data"),
}


def signalled(where: str, count: int, number: int, to_group: bool = False) -> None:
    """The process, or its group, gets a signal in the `count`-th step, validation or save."""
    call(*PLACES[where], count, functools.partial(send, number, to_group))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def whole(place: Path) -> Path:
    """A run that nothing interrupted."""
    done = train(place / "whole", *RUN)
    assert done.code == 0, done.err
    return place / "whole" / "run"


@promise("What scripts rely on", "exit code 75", "stopped by a signal, to be resumed")
@promise(
    "Resume",
    "SIGTERM, SIGUSR1, SIGINT or SIGHUP, to the process or its group, in a step, validation or save",
    "exit 75; the step is finished and saved; resume is exact",
)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "count", "number", "to_group", "step"),
    [
        ("step", 2, signal.SIGINT, True, 2),  # after which a validation is due
        pytest.param("validation", 1, signal.SIGHUP, True, 2, marks=pytest.mark.slow),
        pytest.param("save", 3, signal.SIGTERM, False, 2, marks=pytest.mark.slow),  # the one after a validation
    ],
)
def test_a_signal_ends_the_run_where_it_is_and_the_run_goes_on_from_there(
    where: str, count: int, number: signal.Signals, to_group: bool, step: int, place: Path, whole: Path
) -> None:
    shutil.rmtree(place / "stopped", ignore_errors=True)
    hook = functools.partial(signalled, where, count, number, to_group)
    done = train(place / "stopped", *RUN, f"workers={int(to_group)}", hook=hook)
    folder = place / "stopped" / "run"
    assert done.code == exit_code(folder) == 75 and "Traceback" not in done.err, done.err
    assert done.err.count("\n") == 1 and status(folder).startswith(done.err)
    said, _, command = done.err.partition("; to go on: ")
    assert number.name in said and numbers(said) == [step, 4] and command.endswith(f"train.py resume={folder}\n")
    assert checkpoint.load_checkpoint(folder / "checkpoints" / "last.pt")["step"] == step
    assert [record["step"] for record in records(folder) if "train/loss" in record] == [*range(1, step + 1)]
    validated = [record["step"] for record in records(folder) if "val/dice_mean" in record]
    assert validated == [at for at in (2, 4) if at < step or (at == step and where == "save")]
    resumed = train(place / "stopped", "resume=run")
    assert resumed.code == 0 and same(folder, whole), resumed.err


@promise("What scripts rely on", "exit code 5 ...")
@promise("Training", "memory runs out in ...")
def test_memory_that_runs_out_in_a_validation_is_not_reported_as_a_steps(tmp_path: Path) -> None:
    """Neither ckpt nor batch would change anything there."""
    done = train(tmp_path, *RUN, f"data.root={tmp_path / 'phantom'}", hook=out_of_memory_in_validation)
    assert done.code == 5, done.err
    assert all(part in done.err for part in ("allocate 7 bytes", "16x16x16", "data.patch"))
    assert numbers(done.err.splitlines()[1])[0] == 2, "the step before the validation"
    assert "ckpt" not in done.err and "batch" not in done.err
    assert done.err.endswith(f"train.py resume={tmp_path / 'run'}\n")


def out_of_memory_in_validation() -> None:
    def refuse() -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 7 bytes")

    call(validation, "evaluate", 1, refuse)


def ask_once(stop: signals.Stop, number: int, _: FrameType | None) -> None:
    """Keep a signal, however often it comes."""
    stop.asked = signal.Signals(number)


@promise("What scripts rely on", "exit code 130", "Ctrl-C twice; of other commands once")
@promise("Resume", "a second SIGINT", "exit 130 at once; the last checkpoint is whole")
@without("unet3d.base.signals.Stop.handle", ask_once)
def test_a_second_interrupt_ends_the_run_at_once(place: Path, tmp_path: Path) -> None:
    done = train(tmp_path, *RUN, f"data.root={place / 'phantom'}", hook=interrupted_twice)
    folder = tmp_path / "run"
    assert done.code == exit_code(folder) == 130
    assert done.err.count("\n") == 1 and done.err.endswith(f"train.py resume={folder}\n")
    assert checkpoint.load_checkpoint(folder / "checkpoints" / "last.pt")["step"] == 2


def interrupted_twice() -> None:
    def interrupt() -> None:
        for _ in range(2):
            send(signal.SIGINT)

    call(trainer, "train_step", 3, interrupt)


stopping = signals.stopping


@contextmanager
def always_deferred() -> Iterator[signals.Stop]:
    """A Stop for which a signal only sets the flag."""
    with stopping() as stop, stop.deferred():
        yield stop


@promise("Resume", "SIGTERM, SIGUSR1, SIGINT or ...")
@without("unet3d.base.signals.stopping", always_deferred)
def test_before_the_first_step_there_is_nothing_to_wait_for(place: Path) -> None:
    done = train(place / "early", *RUN, hook=functools.partial(signalled, "data", 1, signal.SIGTERM))
    assert done.code == 75
    assert "SIGTERM" in done.err and "resume=" not in done.err and done.err.count("\n") == 1
    assert not (place / "early" / "run" / "checkpoints").exists()


def marked(mark: str) -> None:
    os.environ[MARK] = mark
    signalled("step", 3, signal.SIGTERM, to_group=True)


def alive(mark: str) -> list[int]:
    """Processes that carry the mark in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"{MARK}={mark}".encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
        except OSError:  # ended meanwhile, or another user's
            continue
    return found


@promise(
    "Resume",
    "a signal while data workers and wandb's process run, or while a worker hangs",
    "none of them outlives the run",
)
@pytest.mark.slow
def test_neither_data_workers_nor_wandbs_process_outlive_the_run(tmp_path: Path) -> None:
    hook = functools.partial(marked, str(tmp_path))
    done = train(tmp_path, *TINY, "steps=9", "workers=2", "hydra.run.dir=run", hook=hook, wandb="offline")
    assert done.code == 75, done.err
    assert list((tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb"))
    assert alive(str(tmp_path)) == []


def hung_worker() -> None:
    """A data worker never comes back from its third patch; torch waits for it, here not for 5 seconds."""
    loader_parts.MP_STATUS_CHECK_INTERVAL = 0.1
    get = Patches.__getitem__

    def hang(self: Patches, place: tuple[int, int, int]) -> object:
        while place[0] >= 2:
            signal.pause()
        return get(self, place)  # type: ignore[arg-type]

    Patches.__getitem__ = hang  # type: ignore[method-assign,assignment]
    signalled("step", 2, signal.SIGTERM)


@promise("Resume", "a signal while data ...")
def test_a_worker_that_hangs_ends_with_the_run(tmp_path: Path) -> None:
    done = train(tmp_path, *TINY, "workers=1", "hydra.run.dir=run", hook=hung_worker)
    assert done.code == 75, done.err


@promise("Resume", "a signal while data ...")
@without("unet3d.base.signals.ignore", nothing)
def test_workers_leave_signals_to_the_run() -> None:
    config = Config(data=Data(patch=[8, 8, 8]), batch=1, workers=1)
    with closing(batches(Patches(phantom_case, config.data, 0, [8, 8, 8]), ["a"], config)) as stream:
        next(stream)
        (worker,) = multiprocessing.active_children()
        assert worker.pid
        for number in signals.ASKING:
            os.kill(worker.pid, number)
        for _ in range(9):
            next(stream)
    assert not worker.is_alive()


def phantom_case(_: int) -> PreparedCase:
    image = np.ones((1, 8, 8, 8), np.float32)
    return prepare("a", image, image[0].astype(np.uint8), (1.0, 1.0, 1.0), None)


def test_handlers_of_signals_are_restored() -> None:
    before = [signal.getsignal(number) for number in signals.ASKING]
    with pytest.raises(KeyError), signals.stopping():
        assert signal.getsignal(signal.SIGTERM) != before[0]
        raise KeyError
    assert [signal.getsignal(number) for number in signals.ASKING] == before


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals.stopping() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
        assert not stop()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_deferred_signals_wait_and_interruptible_work_stops() -> None:
    with signals.stopping() as stop:
        with stop.deferred():
            send(signal.SIGUSR1)
            assert stop() and stop.asked is signal.SIGUSR1
            with pytest.raises(Preempted, match="SIGUSR1"), stop.interruptible():
                pytest.fail("work that need not begin")
        with pytest.raises(Preempted, match="SIGUSR1"):
            send(signal.SIGTERM)  # asked already
        with stop.deferred():
            send(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)


class Released:
    """Sends a signal as it is collected: what the handler raises then, Python swallows."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        send(self.number)


def generator_that_is_released(number: int) -> Iterator[None]:
    """Send a signal in the `finally` of a generator that nobody refers to any more."""
    try:
        yield
    finally:
        send(number)


def lose(number: int, way: str) -> None:
    """Send a signal whose exception nobody gets."""
    if way == "weakref":
        thing = Thing()
        reference = weakref.ref(thing, lambda _: send(number))
        del thing
        assert reference() is None
    elif way == "generator":
        next(generator_that_is_released(number))
    elif way == "library":
        with suppress(BaseException):
            send(number)
    else:
        Released(number)


class Thing:
    """Something that can be referred to weakly."""


def one_window() -> None:
    list(progress.parts([0]))


def one_case() -> None:
    with progress.counting("scoring", 2) as counter:
        counter.advance()


def one_picture() -> None:
    plots.save_picture(plots.blank(1, 1), Path("unused.png"))


@promise(
    "Resume",
    "a signal whose error Python or a library swallows (a weakref's callback, `__del__`, a released generator)",
    "exit 75 (other commands: Ctrl-C 130) at the next case, picture or phase; a further signal raises again",
)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("way", ["weakref", "del", "generator", "library"])
@pytest.mark.parametrize("border", [one_window, one_case, one_picture, progress.beat])
def test_a_signal_that_python_swallows_ends_the_work_at_the_next_border(way: str, border: Callable[[], None]) -> None:
    with pytest.raises(Preempted, match="SIGUSR1"), signals.stopping() as stop:
        lose(signal.SIGUSR1, way)
        assert stop()
        with stop.deferred():
            signals.raise_again()  # a step is finished first
        border()
    one_window()  # nobody waits for a signal any more


@promise("Resume", "a signal whose error ...")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("way", ["weakref", "del", "generator", "library"])
def test_a_further_signal_raises_again_but_not_while_the_first_is_under_way(way: str) -> None:
    with pytest.raises(Preempted), signals.stopping():
        lose(signal.SIGTERM, way)
        send(signal.SIGTERM)
    cleaned_up = []
    with pytest.raises(Preempted, match="SIGTERM"), signals.stopping(), closing(cleaning_up(cleaned_up)) as work:
        next(work)
        try:
            send(signal.SIGTERM)
        finally:
            send(signal.SIGHUP)
            one_case()
            cleaned_up.append("finally")
    assert cleaned_up == ["finally", "generator"]


def cleaning_up(cleaned_up: list[str]) -> Generator[None]:
    try:
        yield
    finally:
        send(signal.SIGUSR2)
        signals.raise_again()
        cleaned_up.append("generator")


def lost_in_prediction() -> None:
    """The memory prediction swallows a signal, as torch's weak dictionaries of fake tensors have."""

    def swallow() -> None:
        with suppress(BaseException):
            send(signal.SIGTERM)

    call(prediction, "preflight", 1, swallow)


@promise("Resume", "a signal whose error ...")
def test_a_signal_that_the_memory_prediction_swallows_ends_the_run_before_its_first_step(tmp_path: Path) -> None:
    done = train(tmp_path, *TINY, "hydra.run.dir=run", hook=lost_in_prediction)
    assert done.code == exit_code(tmp_path / "run") == 75 and "SIGTERM" in done.err, done.err
    assert not (tmp_path / "run" / "checkpoints").exists()


def failing_scontrol(place: Path) -> dict[str, str]:
    """Return the environment of a job of Slurm whose `scontrol` notes what it is asked for, and refuses it."""
    tool = place / "scontrol"
    tool.write_text("#!/bin/sh\ncat run/STATUS > asked\necho $@ >> asked\necho no such job >&2\nexit 1\n")
    tool.chmod(0o755)
    return {"PATH": f"{place}:{os.environ['PATH']}", "SLURM_JOB_ID": "41"}


def stopped_in_slurm() -> None:
    os.environ.update(failing_scontrol(Path.cwd()))
    signalled("step", 2, signal.SIGUSR1)


@pytest.mark.parametrize("option", [["requeue=true"], []])
def test_slurm_is_asked_for_another_turn_with_the_option_alone(option: list[str], tmp_path: Path) -> None:
    done = train(tmp_path, *TINY, *option, "hydra.run.dir=run", hook=stopped_in_slurm)
    *warnings, last = done.err.splitlines()
    assert done.code == 75 and "SIGUSR1" in last and last.endswith(f"resume={tmp_path / 'run'}")
    assert (tmp_path / "asked").exists() is bool(option)
    assert len(warnings) == len(option)
    if option:
        assert (tmp_path / "asked").read_text() == f"{status(tmp_path / 'run')}requeue 41\n"
        assert "scontrol requeue 41" in warnings[0] and "no such job" in warnings[0]


def test_a_job_that_slurm_takes_back_says_nothing_more(
    tmp_path: Path, monkeypatch: Patch, capsys: pytest.CaptureFixture
) -> None:
    for name, value in failing_scontrol(tmp_path).items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    tool = tmp_path / "scontrol"
    tool.write_text(tool.read_text().replace("exit 1", "exit 0"))
    lifecycle.requeue()
    assert (tmp_path / "asked").read_text() == "requeue 41\n" and capsys.readouterr().err == ""


def test_outside_of_slurm_nothing_is_requeued_and_a_line_says_so(
    monkeypatch: Patch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    lifecycle.requeue()
    assert "SLURM_JOB_ID" in capsys.readouterr().err


WAITING = "import os, signal; os.kill(os.getppid(), {0}); signal.pause()"
DEAF = """
import os, signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGINT])
os.kill(os.getppid(), signal.SIGINT)
signal.sigwait([signal.SIGTERM])
os.kill(os.getppid(), signal.SIGINT)
signal.pause()
"""


def test_a_sweep_asks_its_job_to_end_and_kills_one_that_does_not(monkeypatch: Patch) -> None:
    """The job gets SIGTERM, whatever the sweep got."""
    for number in signals.ASKING:
        command = [sys.executable, "-c", WAITING.format(int(number))]
        assert lifecycle.run_process(command) == (75, True)
    monkeypatch.setattr(lifecycle, "GRACE", 0)
    assert lifecycle.run_process([sys.executable, "-c", DEAF]) == (130, True)


def test_a_job_that_has_just_begun_is_asked_too(monkeypatch: Patch) -> None:
    call_at_begin = functools.partial(send, signal.SIGTERM)
    begin = subprocess.Popen

    def asked(*of: object, **named: object) -> subprocess.Popen:
        call_at_begin()
        return begin(*of, **named)  # type: ignore[call-overload]

    monkeypatch.setattr(subprocess, "Popen", asked)
    assert lifecycle.run_process([sys.executable, "-c", "import signal; signal.pause()"]) == (75, True)


def held(other: Connection) -> None:
    """Wait in step 3 until the test says so."""

    def wait() -> None:
        other.send("in step 3")
        other.recv()

    call(trainer, "train_step", 3, wait)


@promise(
    "Resume",
    "two processes for one folder; two runs started in one second",
    "the second exits 2, the first is unharmed; two folders",
)
@pytest.mark.slow
def test_a_folder_in_use_is_refused_and_its_run_unharmed(place: Path, whole: Path) -> None:
    here, there = SERVER.Pipe()
    first = start(place / "shared", *RUN, hook=functools.partial(held, there))
    there.close()
    here.recv()
    folder = place / "shared" / "run"
    second = train(place / "second", f"resume={folder}")
    assert (second.code, second.out) == (2, "")
    assert str(folder) in second.err and numbers(second.err) == [first[0].pid] and second.err.count("\n") == 1
    here.send("go on")
    assert Ended(*first).code == 0 and same(folder, whole)


@promise("Resume", "two processes for one ...")
def test_two_runs_of_one_second_have_two_folders(tmp_path: Path) -> None:
    words = [*TINY, "dry_run=true", "hydra.sweep.dir=x"]
    running = [start(tmp_path / name, *words, hook=stopped_clock) for name in "ab"]
    assert [Ended(*one).code for one in running] == [0, 0]
    found = [path for name in "ab" for path in (tmp_path / name).glob("outputs/*/*")]
    assert len({path.name for path in found}) == 2 and {path.name[:9] for path in found} == {"12-00-00-"}


def stopped_clock() -> None:
    noon = datetime(2026, 1, 2, 12)
    hydra.core.utils.datetime = SimpleNamespace(now=lambda: noon)  # type: ignore[attr-defined]


def poisoned(step: int, amp: bool) -> None:
    """A NaN in the batch of this step; with `amp`, in fp16 and at its lowest scale."""
    take, steps = trainer.train_step, iter(range(1, 99))

    def poison(model: torch.nn.Module, *of: object) -> object:
        _, _, scaler, _, step_batches, *_ = of
        if next(steps) == step:
            step_batches[0].image[0, 0, 0, 0, 0] = float("nan")  # type: ignore[index]
            if amp:
                scaler.load_state_dict(scaler.state_dict() | {"scale": 0.5})  # type: ignore[attr-defined]
            torch.save(model.state_dict(), "before.pt")
            call(checkpoint, "save_checkpoint", 1, lambda: torch.save(model.state_dict(), "after.pt"))
        return take(model, *of)  # type: ignore[arg-type]

    trainer.train_step = poison  # type: ignore[assignment]


@promise("What scripts rely on", "exit code 4", "the loss or the outputs are not finite")
@promise(
    "Training",
    "a loss or gradient that is NaN or infinite, in float32, bf16 or fp16",
    "exit 4 before the update; no weight changed, the batch is kept",
)
@pytest.mark.parametrize(
    "precision",
    [
        [],
        pytest.param(["amp=true", "amp_dtype=bf16"], marks=pytest.mark.slow),
        ["amp=true", "amp_dtype=fp16"],
    ],
)
def test_a_poisoned_batch_is_kept_and_changes_no_weight(precision: list[str], tmp_path: Path) -> None:
    hook = functools.partial(poisoned, 3, "amp_dtype=fp16" in precision)
    done = train(tmp_path, *TINY, *precision, "hydra.run.dir=run", hook=hook)
    folder = tmp_path / "run"
    assert done.code == 4 and done.err.count("\n") == 1, done.err
    assert f"{folder}/nan_batch.pt" in done.err and status(folder).startswith(done.err)
    before, after = (torch.load(tmp_path / name, weights_only=True) for name in ("before.pt", "after.pt"))
    assert all(torch.equal(before[name], after[name]) for name in before)
    found = checkpoint.load_checkpoint(folder / "nan_batch.pt")
    (batch,) = found["batches"]
    assert found["step"] == 3 and batch["image"].isnan().sum() == 1 and batch["label"].shape == (1, 16, 16, 16)
    assert batch["cases"] and batch["cases"][0] in done.err
    assert checkpoint.load_checkpoint(folder / "checkpoints" / "last.pt")["step"] == 2
    assert all(value.isfinite().all() for value in weights(folder).values())


@promise("Resume", "a kill beside a ...")
def test_a_run_killed_in_its_last_validation_has_lost_no_step(place: Path) -> None:
    """`test_faults_resume.py` goes on from there."""
    folder = place / "killed" / "run"
    done = train(place / "killed", *RUN, hook=functools.partial(signalled, "validation", 2, signal.SIGKILL))
    assert done.code == -signal.SIGKILL and checkpoint.load_checkpoint(folder / "checkpoints" / "last.pt")["step"] == 4
    assert [record["step"] for record in records(folder) if "train/loss" in record] == [*range(1, 5)]


def without_wandb_core() -> None:
    """wandb's process is killed within step 3."""

    def kill() -> None:
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        assert len(children) == 1
        os.kill(int(children[0]), signal.SIGKILL)
        os.waitid(os.P_PID, int(children[0]), os.WEXITED | os.WNOWAIT)

    call(trainer, "train_step", 3, kill)


def no_room_for_wandb() -> None:
    Path("run").mkdir()
    Path("run", "wandb").touch()


@promise(
    "Training",
    "wandb without network or key, broken, killed, without a folder, or disabled",
    "the run finishes with one warning and every record, after at most 20 seconds of waiting",
)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("hook", "tokens"),
    [(without_wandb_core, ["WandbLogger"]), (no_room_for_wandb, ["wandb", "NotADirectoryError"])],
)
def test_a_lost_logger_costs_one_line(hook: Callable[[], None], tokens: list[str], tmp_path: Path) -> None:
    done = train(tmp_path, *TINY, "eval_every=0", "hydra.run.dir=run", hook=hook, wandb="offline")
    assert done.code == 0, done.err
    assert all(token in done.err for token in tokens) and done.err.count("\n") == 1, done.err
    assert [record["step"] for record in records(tmp_path / "run") if "train/loss" in record] == [*range(1, 5)]


def in_ascii() -> None:
    """On a narrow output that is no terminal."""
    os.environ["COLUMNS"] = "20"
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="ascii", errors="strict")  # type: ignore[union-attr]


def closed() -> None:
    sys.stdout = sys.stderr = None  # type: ignore[assignment]  # as Python has it then
    os.close(1), os.close(2)


@promise(
    "Training",
    "output that is closed, not read, narrow, ASCII alone, or ends in `head`",
    "the run finishes, without control codes",
)
@pytest.mark.parametrize("hook", [closed, in_ascii])
def test_a_run_needs_no_reader(hook: Callable[[], None], tmp_path: Path) -> None:
    done = train(tmp_path, *TINY, "steps=2", "eval_every=0", "hydra.run.dir=run", hook=hook)
    assert done.code == 0, done.err
    assert status(tmp_path / "run").startswith("done") and exit_code(tmp_path / "run") == 0
    assert len(records(tmp_path / "run")) == 3
    if hook is in_ascii:
        assert "run" in done.out.split() and "\x1b" not in done.out and done.err == ""


def to_pipe(writer: Connection) -> None:
    """The test reads what is printed."""
    in_ascii()
    for number in (1, 2):
        os.dup2(writer.fileno(), number)
    writer.close()


@promise("Training", "output that is closed ...")
@without("unet3d.base.process.install_safe_streams", nothing)
def test_the_reader_of_the_first_line_may_leave(tmp_path: Path) -> None:
    """`train.py 2>&1 | head -1`."""
    reader, writer = SERVER.Pipe(duplex=False)
    child, _ = start(tmp_path, *TINY, "eval_every=0", "hydra.run.dir=run", hook=functools.partial(to_pipe, writer))
    writer.close()
    with os.fdopen(reader.fileno(), closefd=False) as lines:
        assert lines.readline()
    reader.close()
    assert Ended(child, tmp_path).code == 0
    assert status(tmp_path / "run").startswith("done") and exit_code(tmp_path / "run") == 0
    assert len(records(tmp_path / "run")) == 5


def test_what_python_writes_as_it_ends_needs_no_reader(tmp_path: Path) -> None:
    """In a program of its own and the locale C, whose reader has left."""
    reader, writer = os.pipe()
    os.close(reader)
    words = [sys.executable, str(ROOT / "train.py"), "--help"]
    done = subprocess.run(
        words, cwd=tmp_path, env=os.environ | {"LC_ALL": "C"}, stdout=writer, stderr=subprocess.PIPE, text=True
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


def odd_clock() -> None:
    """It jumps back by a day, and into another zone."""

    def jump() -> None:
        now = time.time
        time.time = lambda: now() - 86400
        os.environ["TZ"] = "Pacific/Kiritimati"
        time.tzset()

    call(trainer, "train_step", 3, jump)


def wall_clock() -> float:
    """In place of a clock that only goes forward."""
    return time.time()


@promise(
    "Training",
    "the clock jumps, the time zone changes, the current folder is elsewhere",
    "the same run; nothing is written beside the sources",
)
@without("unet3d.training.trainer.time.perf_counter", wall_clock)
def test_the_clock_does_not_matter_and_nothing_is_written_beside_the_sources(
    place: Path, whole: Path, tmp_path: Path
) -> None:
    before = sources()
    done = train(tmp_path, *RUN, f"data.root={place / 'phantom'}", hook=odd_clock)
    assert done.code == 0 and same(tmp_path / "run", whole)
    lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert min(line.get("time/step_s", 0) for line in lines) >= 0
    assert sources() == before


def sources() -> set[tuple[Path, int]]:
    found = [path for part in ("unet3d", "configs") for path in (ROOT / part).rglob("*") if path.suffix != ".pyc"]
    return {(path, path.stat().st_mtime_ns) for path in found if path.is_file()}


@promise("Training", "other code of one's own that exits the program", "exit 1, not its code; STATUS says so")
def test_code_of_ones_own_that_exits_does_not_end_the_run_with_its_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def leave(*_: object) -> None:
        raise SystemExit(0)

    assert lifecycle.run(leave, Config(), tmp_path, [])[0] == 1
    assert status(tmp_path).startswith("failed: ") and "SystemExit" in status(tmp_path) and exit_code(tmp_path) == 1
    assert "SystemExit" in capsys.readouterr().err


@promise("What scripts rely on", "exit code 1", "an unexpected error, with its trace; a lost data worker")
@promise("Training", "memory runs out in ...")
@without("unet3d.base.errors.is_out_of_memory", no, only="MemoryError")
@pytest.mark.parametrize(
    ("error", "code", "cause"),
    [(MemoryError(), 5, "MemoryError"), (KeyError("x"), 1, "KeyError('x')")],
    ids=["MemoryError", "KeyError"],
)
def test_any_error_of_a_job_is_its_last_line(
    error: Exception, code: int, cause: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Python says nothing where memory runs out as a file is read; only what nobody foresaw has a traceback."""

    def fail(*_: object) -> None:
        raise error

    ended = lifecycle.run(fail, Config(), tmp_path, [])
    printed = capsys.readouterr().err
    assert ended == (code, error) and exit_code(tmp_path) == code and ("Traceback" in printed) is (code == 1)
    last = printed.splitlines()[-1]
    assert cause in last and "resume=" not in last and status(tmp_path).startswith(f"{last}\n")

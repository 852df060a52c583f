"""Signals, two processes for one folder, poisoned batches, lost loggers and closed terminals: what a run survives."""

import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import weakref
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager, suppress
from datetime import datetime
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import hydra.core.utils
import numpy as np
import pytest
from guards import no, nothing, without
from promises import promise
from torch.utils.data import _utils as loader_parts
from training import (
    ROOT,
    RUN,
    SERVER,
    TINY,
    Ended,
    Hook,
    call,
    exit_code,
    fail,
    numbers,
    records,
    resume,
    same,
    saved_step,
    send,
    start,
    status,
    steps_with,
    train,
    when,
)

from unet3d.base import progress, signals
from unet3d.base.errors import Preempted
from unet3d.cli import lifecycle
from unet3d.config.schema import Config, Data
from unet3d.data.loader import batches
from unet3d.data.patches import Patches, PreparedCase, prepare
from unet3d.report import plots
from unet3d.run import checkpoint
from unet3d.training import trainer

Patch, Capture = pytest.MonkeyPatch, pytest.CaptureFixture[str]
SHORT = [*TINY, "eval_every=0", "hydra.run.dir=run"]
STEP, SAVE = "unet3d.training.trainer.train_step", "torch.save"
EVALUATION = "unet3d.run.validation.evaluate"
TERMINATE = partial(send, signal.SIGTERM)


@promise("What scripts rely on", "exit code 75", "stopped by a signal, to be resumed")
@promise(
    "Resume",
    "SIGTERM, SIGUSR1, SIGINT or SIGHUP, to the process or its group, in a step, validation or save",
    "exit 75; the step is finished and saved; resume is exact",
)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("hook", "name", "step", "validated"),
    [
        # A validation is due after the step, and none has been after the last.
        (when(STEP, 2, partial(send, signal.SIGINT, to_group=True)), "SIGINT", 2, []),
        (when(EVALUATION, 3, partial(send, signal.SIGHUP, to_group=True)), "SIGHUP", 6, [2, 4]),
        (when(SAVE, 3, partial(send, signal.SIGUSR1)), "SIGUSR1", 2, [2]),
    ],
    ids=["step", "last validation", "save after a validation"],
)
def test_a_signal_ends_the_run_where_it_is_and_the_run_goes_on_from_there(
    hook: Hook, name: str, step: int, validated: list[int], whole: Path, tmp_path: Path
) -> None:
    """What the run has measured is kept, also where it goes on without a step."""
    folder = tmp_path / "run"
    done = train(tmp_path, *RUN, "workers=1", hook=hook)
    assert done.code == exit_code(folder) == 75 and done.err.count("\n") == 1, done.err
    said, _, command = done.err.partition("; to go on: ")
    assert name in said and numbers(said) == [step, 6] and command.endswith(f"train.py resume={folder}\n")
    assert status(folder).startswith(done.err)
    assert saved_step(folder) == step and steps_with(folder, "train/loss") == [*range(1, step + 1)]
    assert steps_with(folder, "val/dice_mean") == validated
    resumed = resume(folder)
    assert resumed.code == 0 and same(folder, whole), resumed.err
    measured = [json.loads((run / "memory.json").read_text())["measured"] for run in (folder, whole)]
    assert measured[0] == measured[1]
    for part in ("memory", "figures"):
        assert {path.name for path in (folder / part).iterdir()} == {path.name for path in (whole / part).iterdir()}


@promise("What scripts rely on", "exit code 5 ...")
@promise("Training", "memory runs out in ...")
def test_memory_that_runs_out_in_a_validation_is_not_reported_as_a_steps(tmp_path: Path) -> None:
    """Neither ckpt nor batch would change anything there."""
    refusal = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 7 bytes")
    done = train(tmp_path, *TINY, "hydra.run.dir=run", hook=when(EVALUATION, 1, partial(fail, refusal)))
    assert done.code == 5, done.err
    assert all(part in done.err for part in ("allocate 7 bytes", "16x16x16", "data.patch"))
    assert numbers(done.err.splitlines()[1])[0] == 2, "the step before the validation"
    assert "ckpt" not in done.err and "batch" not in done.err
    assert done.err.endswith(f"train.py resume={tmp_path / 'run'}\n")


def ask_once(stop: signals.Stop, number: int, _: FrameType | None) -> None:
    """Keep a signal, however often it comes."""
    stop.asked = signal.Signals(number)


@promise("What scripts rely on", "exit code 130", "Ctrl-C twice; of other commands once")
@promise("Resume", "a second SIGINT", "exit 130 at once; the last checkpoint is whole")
@without("unet3d.base.signals.Stop.handle", ask_once)
def test_a_second_interrupt_ends_the_run_at_once(tmp_path: Path) -> None:
    done = train(tmp_path, *TINY, "hydra.run.dir=run", hook=when(STEP, 3, interrupt_twice))
    folder = tmp_path / "run"
    assert done.code == exit_code(folder) == 130
    assert done.err.count("\n") == 1 and done.err.endswith(f"train.py resume={folder}\n")
    assert saved_step(folder) == 2


def interrupt_twice() -> None:
    send(signal.SIGINT)
    send(signal.SIGINT)


def lose_a_signal() -> None:
    """As torch's weak dictionaries of fake tensors have."""
    with suppress(BaseException):
        TERMINATE()


stopping = signals.stopping


@contextmanager
def always_deferred() -> Iterator[signals.Stop]:
    """A Stop for which a signal only sets the flag."""
    with stopping() as stop, stop.deferred():
        yield stop


@promise("Resume", "SIGTERM, SIGUSR1, SIGINT or ...")
@promise("Resume", "a signal whose error ...")
@without("unet3d.base.signals.stopping", always_deferred, only="data")
@pytest.mark.parametrize(
    "hook",
    [
        pytest.param(when("unet3d.run.run.prepare_data", 1, TERMINATE), id="data"),
        pytest.param(when("unet3d.memory.prediction.preflight", 1, lose_a_signal), id="swallowed by the prediction"),
    ],
)
def test_before_the_first_step_there_is_nothing_to_wait_for(hook: Hook, tmp_path: Path) -> None:
    done = train(tmp_path, *SHORT, hook=hook)
    assert done.code == exit_code(tmp_path / "run") == 75
    assert "SIGTERM" in done.err and "resume=" not in done.err and done.err.count("\n") == 1
    assert not (tmp_path / "run" / "checkpoints").exists()


def alive(mark: str) -> list[int]:
    """Processes that carry the mark in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # ended meanwhile, or another user's
            if f"UNET3D_TEST={mark}".encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


def hung_workers(mark: str) -> None:
    """No data worker comes back from its third patch; torch waits for one, here not for 5 seconds."""
    os.environ["UNET3D_TEST"] = mark
    loader_parts.MP_STATUS_CHECK_INTERVAL = 0.1
    get = Patches.__getitem__

    def hang(self: Patches, place: tuple[int, int, int]) -> object:
        while place[0] >= 2:
            signal.pause()
        return get(self, place)  # type: ignore[arg-type]

    Patches.__getitem__ = hang  # type: ignore[method-assign,assignment]
    call(trainer, "train_step", 2, partial(send, signal.SIGTERM, to_group=True))


@promise(
    "Resume",
    "a signal while data workers and wandb's process run, or while a worker hangs",
    "none of them outlives the run",
)
@pytest.mark.slow
def test_neither_data_workers_that_hang_nor_wandbs_process_outlive_the_run(tmp_path: Path) -> None:
    done = train(tmp_path, *SHORT, "workers=2", hook=partial(hung_workers, str(tmp_path)), wandb="offline")
    assert done.code == 75, done.err
    assert list((tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb"))
    assert alive(str(tmp_path)) == []


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


def test_handlers_are_restored_and_a_signal_that_is_ignored_stays_ignored(monkeypatch: Patch) -> None:
    before = {number: signal.getsignal(number) for number in signals.ASKING} | {signal.SIGHUP: signal.SIG_IGN}
    earlier = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with pytest.raises(KeyError), signals.stopping() as stop:
            send(signal.SIGHUP)
            assert not stop() and signal.getsignal(signal.SIGTERM) != before[signal.SIGTERM]
            raise KeyError
        assert {number: signal.getsignal(number) for number in signals.ASKING} == before
    finally:
        signal.signal(signal.SIGHUP, earlier)


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

    def __del__(self) -> None:
        send(signal.SIGUSR1)


def in_a_weakrefs_callback() -> None:
    thing = set()
    reference = weakref.ref(thing, lambda _: send(signal.SIGUSR1))
    del thing
    assert reference() is None


def in_a_generator_that_is_released() -> None:
    def work() -> Iterator[None]:
        try:
            yield
        finally:
            send(signal.SIGUSR1)

    next(work())


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
@pytest.mark.parametrize(
    ("lose", "border"),
    [
        (in_a_weakrefs_callback, one_window),
        (Released, one_case),
        (in_a_generator_that_is_released, one_picture),
        (lose_a_signal, progress.beat),
        (Released, partial(send, signal.SIGUSR2)),
    ],
)
def test_a_signal_that_is_swallowed_ends_the_work_at_the_next_border(lose: Hook, border: Hook) -> None:
    with pytest.raises(Preempted, match=r"SIGUSR1|SIGTERM"), signals.stopping() as stop:
        lose()
        assert stop()
        with stop.deferred():
            signals.raise_again()  # a step is finished first
        border()
    one_window()  # nobody waits for a signal any more


@promise("Resume", "a signal whose error ...")
def test_a_further_signal_does_not_raise_while_the_first_is_under_way() -> None:
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


@pytest.mark.parametrize(
    ("option", "job", "code", "said"),
    [
        (False, "41", 0, None),
        (True, "41", 0, ""),
        (True, "41", 1, "scontrol requeue 41.*no such job"),
        (True, None, 0, "SLURM_JOB_ID"),
    ],
    ids=["without the option", "taken back", "refused", "outside of Slurm"],
)
def test_slurm_is_asked_for_another_turn_with_the_option_alone(
    option: bool, job: str | None, code: int, said: str | None, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    """Once STATUS is written; a line says where Slurm does not take the job."""
    tool, folder = tmp_path / "scontrol", tmp_path / "run"
    tool.write_text(f"#!/bin/sh\n(cat run/STATUS; echo $@) > asked\necho no such job >&2\nexit {code}\n")
    tool.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", job or "")
    if job is None:
        monkeypatch.delenv("SLURM_JOB_ID")
    lifecycle.run(partial(fail, Preempted("stopped by SIGUSR1")), Config(requeue=option), folder, [])
    *warnings, last = capsys.readouterr().err.splitlines()
    assert last.startswith("stopped by SIGUSR1") and len(warnings) == bool(said)
    assert re.search(said or "", "".join(warnings))
    asked = [path.read_text() for path in tmp_path.glob("asked")]
    assert asked == ([f"{status(folder)}requeue 41\n"] if option and job else [])


WAITING = "import os, signal; os.kill(os.getppid(), signal.SIGUSR1); signal.pause()"
DEAF = """
import os, signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGINT])
os.kill(os.getppid(), signal.SIGINT)
signal.sigwait([signal.SIGTERM])
os.kill(os.getppid(), signal.SIGINT)
signal.pause()
"""


def test_a_sweep_asks_its_job_to_end_and_kills_one_that_does_not(monkeypatch: Patch) -> None:
    """The job gets SIGTERM, whatever the sweep got, also one that has just begun."""
    assert lifecycle.run_process([sys.executable, "-c", WAITING]) == (75, True)
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", subprocess.Popen)  # which `call` replaces
        call(subprocess, "Popen", 1, TERMINATE)
        assert lifecycle.run_process([sys.executable, "-c", "import signal; signal.pause()"]) == (75, True)
    monkeypatch.setattr(lifecycle, "GRACE", 0)
    assert lifecycle.run_process([sys.executable, "-c", DEAF]) == (130, True)


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
def test_a_folder_in_use_is_refused_and_its_run_unharmed(tmp_path: Path, whole: Path) -> None:
    here, there = SERVER.Pipe()
    first = start(tmp_path, *RUN, hook=partial(held, there))
    there.close()
    here.recv()
    folder = tmp_path / "run"
    second = train(tmp_path / "second", f"resume={folder}")
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


def poisoned() -> None:
    """A NaN in the batch of step 3, in fp16 and at its lowest scale."""
    take, steps = trainer.train_step, iter(range(1, 99))

    def poison(*of: Any) -> object:
        _, _, _, scaler, _, (batch,), *_ = of
        if next(steps) == 3:
            batch.image[0, 0, 0, 0, 0] = float("nan")
            scaler.load_state_dict(scaler.state_dict() | {"scale": 0.5})
        return take(*of)

    trainer.train_step = poison  # type: ignore[assignment]


@promise("What scripts rely on", "exit code 4", "the loss or the outputs are not finite")
@promise(
    "Training",
    "a loss or gradient that is NaN or infinite, in float32, bf16 or fp16",
    "exit 4 before the update; no weight changed, the batch is kept",
)
@pytest.mark.slow
def test_a_poisoned_batch_is_kept_and_ends_the_run(tmp_path: Path) -> None:
    """`train/test_step.py` shows for other precisions that no weight is changed."""
    done = train(tmp_path, *TINY, "amp=true", "amp_dtype=fp16", "hydra.run.dir=run", hook=poisoned)
    folder = tmp_path / "run"
    assert done.code == 4 and done.err.count("\n") == 1, done.err
    assert f"{folder}/nan_batch.pt" in done.err and status(folder).startswith(done.err)
    found = checkpoint.load_checkpoint(folder / "nan_batch.pt")
    (batch,) = found["batches"]
    assert found["step"] == 3 and batch["image"].isnan().sum() == 1 and batch["label"].shape == (1, 16, 16, 16)
    assert batch["cases"] and batch["cases"][0] in done.err
    assert saved_step(folder) == 2


def without_wandb_core() -> None:
    """wandb's process is killed within step 3."""

    def kill_child() -> None:
        (child,) = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        os.kill(int(child), signal.SIGKILL)
        os.waitid(os.P_PID, int(child), os.WEXITED | os.WNOWAIT)

    call(trainer, "train_step", 3, kill_child)


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
def test_a_lost_logger_costs_one_line(hook: Hook, tokens: list[str], tmp_path: Path) -> None:
    done = train(tmp_path, *SHORT, hook=hook, wandb="offline")
    assert done.code == 0 and done.err.count("\n") == 1, done.err
    assert all(token in done.err for token in tokens), done.err
    assert steps_with(tmp_path / "run", "train/loss") == [1, 2, 3, 4]


def in_ascii() -> None:
    """On a narrow output that is no terminal."""
    os.environ["COLUMNS"] = "20"
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="ascii", errors="strict")  # type: ignore[union-attr]


def closed() -> None:
    sys.stdout = sys.stderr = None  # type: ignore[assignment]  # as Python has it then
    os.close(1), os.close(2)


def unread() -> None:
    """Into a pipe whose reader has left, as `head` does."""
    reader, writer = os.pipe()
    os.close(reader)
    for number in (1, 2):
        os.dup2(writer, number)


@promise(
    "Training",
    "output that is closed, not read, narrow, ASCII alone, or ends in `head`",
    "the run finishes, without control codes",
)
@without("unet3d.base.process.install_safe_streams", nothing, only="unread")
@pytest.mark.slow
@pytest.mark.parametrize("hook", [closed, in_ascii, unread])
def test_a_run_needs_no_reader(hook: Hook, tmp_path: Path) -> None:
    done = train(tmp_path, *SHORT, hook=hook)
    assert done.code == exit_code(tmp_path / "run") == 0, done.err
    assert status(tmp_path / "run").startswith("done") and len(records(tmp_path / "run")) == 5
    if hook is in_ascii:
        assert "run" in done.out.split() and "\x1b" not in done.out and done.err == ""


def test_what_python_writes_as_it_ends_needs_no_reader(tmp_path: Path) -> None:
    """In a program of its own and the locale C, whose reader has left."""
    reader, writer = os.pipe()
    os.close(reader)
    words, environment = [sys.executable, str(ROOT / "train.py"), "--help"], os.environ | {"LC_ALL": "C"}
    done = subprocess.run(words, cwd=tmp_path, env=environment, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


@promise("Training", "other code of one's own that exits the program", "exit 1, not its code; STATUS says so")
@promise("What scripts rely on", "exit code 1", "an unexpected error, with its trace; a lost data worker")
@promise("Training", "memory runs out in ...")
@without("unet3d.base.errors.is_out_of_memory", no, only="MemoryError")
@pytest.mark.parametrize(
    ("error", "code", "cause"),
    [(MemoryError(), 5, "MemoryError"), (KeyError("x"), 1, "KeyError('x')"), (SystemExit(0), 1, "SystemExit")],
    ids=lambda value: type(value).__name__,
)
def test_any_error_of_a_job_is_its_last_line(
    error: BaseException, code: int, cause: str, tmp_path: Path, capsys: Capture
) -> None:
    """Python says nothing where memory runs out as a file is read; only what nobody foresaw has a traceback."""
    ended, _ = lifecycle.run(partial(fail, error), Config(), tmp_path, [])
    printed = capsys.readouterr().err
    assert ended == exit_code(tmp_path) == code and ("Traceback" in printed) is (code == 1)
    last = printed.splitlines()[-1]
    assert cause in last and "resume=" not in last and status(tmp_path).startswith(f"{last}\n")

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
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import hydra.core.utils
import numpy as np
import pytest
import torch
from torch.utils.data import _utils as loader_parts
from training import ROOT, TINY, Ended, call, records, same, send, start, status, train, weights

from unet3d import build, signals
from unet3d.cli import lifecycle
from unet3d.config import Config, Data
from unet3d.data.loader import batches
from unet3d.data.patches import Patches, PreparedCase, prepare
from unet3d.errors import Preempted
from unet3d.run import run
from unet3d.training import checkpoint, trainer

RUN = [*TINY, "steps=6", "eval_every=2", "model.dropout=0.2", "data.root=../phantom", "hydra.run.dir=run"]
Patch = pytest.MonkeyPatch
MARK = "UNET3D_TEST"
PLACES = {
    "step": (trainer, "train_step"),
    "validation": (run, "evaluate"),
    "save": (torch, "save"),
    "data": (build, "data"),
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


@pytest.mark.parametrize(
    ("where", "count", "number", "to_group", "step"),
    [
        ("step", 3, signal.SIGTERM, False, 3),
        ("step", 4, signal.SIGUSR1, True, 4),  # after which a validation is due
        ("step", 1, signal.SIGINT, True, 1),
        ("validation", 2, signal.SIGINT, True, 4),
        ("validation", 3, signal.SIGTERM, False, 6),  # after the last step
        ("save", 3, signal.SIGUSR1, False, 2),  # the first is before the first validation
        ("save", 4, signal.SIGHUP, True, 4),
    ],
)
def test_a_signal_ends_the_run_where_it_is_and_the_run_goes_on_from_there(
    where: str, count: int, number: signal.Signals, to_group: bool, step: int, place: Path, whole: Path
) -> None:
    shutil.rmtree(place / "stopped", ignore_errors=True)
    hook = functools.partial(signalled, where, count, number, to_group)
    done = train(place / "stopped", *RUN, "workers=1", hook=hook)
    folder = place / "stopped" / "run"
    assert done.code == 75 and "Traceback" not in done.err, done.err
    line = f"stopped by {number.name} after step {step} of 6; to go on: python train.py resume={folder}"
    assert done.err == f"{line}\n" and status(folder) == f"{line}\nexit code 75\n"
    assert checkpoint.load_snapshot(folder / "checkpoints" / "last.pt")["step"] == step
    assert [record["step"] for record in records(folder) if "train/loss" in record] == [*range(1, step + 1)]
    validated = [record["step"] for record in records(folder) if "val/dice_mean" in record]
    assert validated == [at for at in (2, 4, 6) if at < step or (at == step and where == "save")]
    resumed = train(place / "stopped", "resume=run")
    assert resumed.code == 0 and same(folder, whole), resumed.err


def test_memory_that_runs_out_in_a_validation_is_not_reported_as_a_steps(tmp_path: Path) -> None:
    """Neither ckpt nor batch would change anything there."""
    done = train(tmp_path, *RUN, f"data.root={tmp_path / 'phantom'}", hook=out_of_memory_in_validation)
    assert done.code == 5 and "you tried to allocate 7 bytes\nin the validation after step 2, " in done.err, done.err
    assert "ckpt" not in done.err and "in the first" not in done.err
    assert done.err.endswith(f"to go on: python train.py resume={tmp_path / 'run'}\n")


def out_of_memory_in_validation() -> None:
    def refuse() -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 7 bytes")

    call(run, "evaluate", 1, refuse)


def test_a_second_interrupt_ends_the_run_at_once(place: Path) -> None:
    done = train(place / "twice", *RUN, hook=interrupted_twice)
    folder = place / "twice" / "run"
    assert done.code == 130 and done.err == f"interrupted; to go on: python train.py resume={folder}\n"
    assert checkpoint.load_snapshot(folder / "checkpoints" / "last.pt")["step"] == 2


def interrupted_twice() -> None:
    call(trainer, "train_step", 3, lambda: [send(signal.SIGINT) for _ in range(2)] and None)


def test_before_the_first_step_there_is_nothing_to_wait_for(place: Path) -> None:
    done = train(place / "early", *RUN, hook=functools.partial(signalled, "data", 1, signal.SIGTERM))
    assert done.code == 75
    assert done.err == "stopped by SIGTERM; there is no snapshot yet to go on from\n"


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


def test_a_worker_that_hangs_ends_with_the_run(tmp_path: Path) -> None:
    done = train(tmp_path, *TINY, "workers=1", "hydra.run.dir=run", hook=hung_worker)
    assert done.code == 75, done.err


def test_workers_leave_signals_to_the_run() -> None:
    config = Config(data=Data(patch=[8, 8, 8]), batch=1, workers=1)
    stream = batches(Patches(phantom_case, config.data, 0, [8, 8, 8]), ["a"], config)
    next(stream)
    (worker,) = multiprocessing.active_children()
    assert worker.pid
    for number in signals.ASKING:
        os.kill(worker.pid, number)
    for _ in range(9):
        next(stream)
    stream.close()
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
        send(signal.SIGTERM)  # asked already
        send(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)


def requeued(code: int) -> None:
    place = Path.cwd()
    tool = place / "scontrol"
    tool.write_text(f"#!/bin/sh\ncat run/STATUS > asked\necho $@ >> asked\necho no such job >&2\nexit {code}\n")
    tool.chmod(0o755)
    os.environ |= {"PATH": f"{place}:{os.environ['PATH']}", "SLURM_JOB_ID": "41"}
    signalled("step", 2, signal.SIGUSR1)


@pytest.mark.parametrize("code", [0, 1, None])
def test_slurm_is_asked_for_another_turn_with_the_option_alone(code: int | None, tmp_path: Path) -> None:
    option = [] if code is None else ["requeue=true"]
    done = train(tmp_path, *TINY, *option, "hydra.run.dir=run", hook=functools.partial(requeued, code or 0))
    assert done.code == 75 and done.err.splitlines()[-1].startswith("stopped by SIGUSR1 after step 2 of 4; to go on")
    assert (tmp_path / "asked").exists() is bool(option)
    if option:
        assert (tmp_path / "asked").read_text() == f"{status(tmp_path / 'run')}requeue 41\n"
    assert done.err.count("\n") == 1 + bool(code)
    assert ("warning: scontrol requeue 41: no such job" in done.err) is bool(code)


def test_outside_of_slurm_nothing_is_requeued_and_a_line_says_so(
    monkeypatch: Patch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    lifecycle.requeue()
    assert "no SLURM_JOB_ID" in capsys.readouterr().err


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


def second() -> None:
    """At step 3, another process asks for the folder of this one."""

    def ask() -> None:
        words = [sys.executable, str(ROOT / "train.py"), "resume=run"]
        done = subprocess.run(words, capture_output=True, text=True)
        Path("second").write_text(json.dumps([done.returncode, done.stdout, done.stderr, os.getpid()]))

    call(trainer, "train_step", 3, ask)


def test_a_folder_in_use_is_refused_and_its_run_unharmed(place: Path, whole: Path) -> None:
    first = train(place / "shared", *RUN, hook=second)
    code, out, err, pid = json.loads((place / "shared" / "second").read_text())
    assert (code, out) == (2, "")
    assert err == f"error: {place}/shared/run: process {pid} uses it; wait, or choose another folder\n"
    assert first.code == 0 and same(place / "shared" / "run", whole)


def test_two_runs_of_one_second_have_two_folders(tmp_path: Path) -> None:
    words = [*TINY, "steps=1", "hydra.sweep.dir=x"]
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
            call(checkpoint, "save_snapshot", 1, lambda: torch.save(model.state_dict(), "after.pt"))
        return take(model, *of)  # type: ignore[arg-type]

    trainer.train_step = poison  # type: ignore[assignment]


@pytest.mark.parametrize("precision", [[], ["amp=true", "amp_dtype=bf16"], ["amp=true", "amp_dtype=fp16"]])
def test_a_poisoned_batch_is_kept_and_changes_no_weight(precision: list[str], tmp_path: Path) -> None:
    hook = functools.partial(poisoned, 3, "amp_dtype=fp16" in precision)
    done = train(tmp_path, *TINY, *precision, "hydra.run.dir=run", hook=hook)
    folder = tmp_path / "run"
    assert done.code == 4 and done.err.count("\n") == 1, done.err
    assert f"the batch is in {folder}/nan_batch.pt" in done.err and status(folder).startswith(done.err)
    before, after = (torch.load(tmp_path / name, weights_only=True) for name in ("before.pt", "after.pt"))
    assert all(torch.equal(before[name], after[name]) for name in before)
    found = checkpoint.load_snapshot(folder / "nan_batch.pt")
    (batch,) = found["batches"]
    assert found["step"] == 3 and batch["image"].isnan().sum() == 1 and batch["label"].shape == (1, 16, 16, 16)
    assert batch["cases"] and batch["cases"][0] in done.err
    assert checkpoint.load_snapshot(folder / "checkpoints" / "last.pt")["step"] == 2
    assert all(value.isfinite().all() for value in weights(folder).values())


def test_a_run_killed_in_its_last_validation_has_lost_no_step(place: Path, whole: Path) -> None:
    folder = place / "killed" / "run"
    done = train(place / "killed", *RUN, hook=functools.partial(signalled, "validation", 3, signal.SIGKILL))
    assert done.code == -signal.SIGKILL and checkpoint.load_snapshot(folder / "checkpoints" / "last.pt")["step"] == 6
    done = train(place / "killed", f"resume={folder}")
    assert done.code == 0 and same(folder, whole), done.err


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


@pytest.mark.parametrize(
    ("hook", "warning"),
    [(without_wandb_core, "warning: Wandb"), (no_room_for_wandb, "warning: wandb does not start (")],
)
def test_a_lost_logger_costs_one_line(hook: Callable[[], None], warning: str, tmp_path: Path) -> None:
    done = train(tmp_path, *TINY, "steps=6", "hydra.run.dir=run", hook=hook, wandb="offline")
    assert done.code == 0, done.err
    assert done.err.startswith(warning) and done.err.count("\n") == 1, done.err
    assert [record["step"] for record in records(tmp_path / "run") if "train/loss" in record] == [*range(1, 7)]


def in_ascii() -> None:
    """On a narrow output that is no terminal."""
    os.environ["COLUMNS"] = "20"
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="ascii", errors="strict")  # type: ignore[union-attr]


def unread() -> None:
    in_ascii()
    for number in (1, 2):
        reader, writer = os.pipe()
        os.dup2(writer, number)
        os.close(reader), os.close(writer)


def closed() -> None:
    sys.stdout = sys.stderr = None  # type: ignore[assignment]  # as Python has it then
    os.close(1), os.close(2)


@pytest.mark.parametrize("hook", [unread, closed, in_ascii])
def test_a_run_needs_no_reader(hook: Callable[[], None], tmp_path: Path) -> None:
    done = train(tmp_path, *TINY, "hydra.run.dir=run", hook=hook)
    assert done.code == 0, done.err
    assert status(tmp_path / "run") == "done\nexit code 0\n"
    assert len(records(tmp_path / "run")) == 6
    if hook is in_ascii:
        assert "run folder: run" in done.out and "\x1b" not in done.out and done.err == ""


def test_the_reader_of_the_first_line_may_leave(tmp_path: Path) -> None:
    """`train.py | head -1`, in a program of its own and the locale C."""
    words = [sys.executable, str(ROOT / "train.py"), *TINY, "steps=1", "hydra.run.dir=run", "wandb.mode=disabled"]
    with subprocess.Popen(
        words, cwd=tmp_path, env=os.environ | {"LC_ALL": "C"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as child:
        assert child.stdout and child.stderr
        assert b"kept in memory" in child.stdout.readline()
        child.stdout.close()
        lines = child.stderr.read().splitlines()
        assert [line for line in lines if not line.endswith(b" left")] == [], "but progress, on a slow machine"
    assert child.returncode == 0 and status(tmp_path / "run") == "done\nexit code 0\n"


def odd_clock() -> None:
    """It jumps back by a day, and into another zone."""

    def jump() -> None:
        now = time.time
        time.time = lambda: now() - 86400
        os.environ["TZ"] = "Pacific/Kiritimati"
        time.tzset()

    call(trainer, "train_step", 3, jump)


def test_the_clock_does_not_matter_and_nothing_is_written_beside_the_sources(place: Path, whole: Path) -> None:
    before = sources()
    done = train(place / "elsewhere", *RUN, hook=odd_clock)
    assert done.code == 0 and same(place / "elsewhere" / "run", whole)
    lines = map(json.loads, (place / "elsewhere" / "run" / "metrics.jsonl").read_text().splitlines())
    assert min(line.get("time/step_s", 0) for line in lines) >= 0
    assert sources() == before


def sources() -> set[tuple[Path, int]]:
    found = [path for part in ("unet3d", "configs") for path in (ROOT / part).rglob("*") if path.suffix != ".pyc"]
    return {(path, path.stat().st_mtime_ns) for path in found if path.is_file()}


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (MemoryError(), 5, "out of memory: MemoryError; there is no snapshot yet to go on from"),
        (KeyError("x"), 1, "failed: KeyError('x')"),
    ],
)
def test_any_error_of_a_job_is_its_last_line(
    error: Exception, code: int, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Python says nothing where memory runs out as a file is read; only what nobody foresaw has a traceback."""
    with pytest.raises(SystemExit) as ended, lifecycle.guarded(Config(), tmp_path, []):
        raise error
    printed = capsys.readouterr().err
    assert ended.value.code == code and printed.endswith(f"{line}\n") and ("Traceback" in printed) is (code == 1)
    assert status(tmp_path) == f"{line}\nexit code {code}\n"

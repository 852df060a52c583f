"""Signals, two processes for one folder, poisoned batches, lost trackers and closed terminals: what a run survives."""

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

import numpy as np
import pytest
import torch
from training import ROOT, TINY, Ended, records, start, status, train, weights

from unet3d import signals
from unet3d.cli import lifecycle
from unet3d.config import Config, Data
from unet3d.data.loader import batches
from unet3d.data.patches import Patches, PreparedCase, prepare
from unet3d.errors import Preempted
from unet3d.train import checkpoint

RUN = [*TINY, "steps=6", "eval_every=2", "model.dropout=0.2", "data.root=../phantom", "hydra.run.dir=run"]
Patch = pytest.MonkeyPatch
MARK = "UNET3D_TEST"


def call(name: str, count: int, act: Callable[[], None]) -> None:
    """`act` within the `count`-th call of this function of a module or class."""
    module, _, attribute = name.rpartition(":")
    owner: object = sys.modules[module.partition(".Run")[0]]
    if module.endswith(".Run"):
        owner = owner.Run  # type: ignore[attr-defined]
    before, calls = getattr(owner, attribute), iter(range(1, 10**6))

    def wrapped(*of: object, **named: object) -> object:
        if next(calls) == count:
            act()
        return before(*of, **named)

    setattr(owner, attribute, wrapped)


def send(number: int, to_group: bool = False) -> None:
    (os.killpg if to_group else os.kill)(0 if to_group else os.getpid(), number)


STEP, EVALUATE, SAVE = "unet3d.train.trainer:train_step", "unet3d.run.run:evaluate", "torch:save"


def signalled(where: str, count: int, number: int, to_group: bool, mark: str = "") -> None:
    import unet3d.run.run  # noqa: F401

    os.environ[MARK] = mark
    call(where, count, functools.partial(send, number, to_group))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def whole(place: Path) -> Path:
    """A run that nothing befell."""
    done = train(place / "whole", *RUN)
    assert done.code == 0, done.err
    return place / "whole" / "run"


def same(a: Path, b: Path) -> bool:
    equal = [torch.equal(x, y) for x, y in zip(weights(a).values(), weights(b).values(), strict=True)]
    return all(equal) and records(a) == records(b)


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


@pytest.mark.parametrize(
    ("where", "count", "number", "to_group", "step"),
    [
        (STEP, 3, signal.SIGTERM, False, 3),
        (STEP, 3, signal.SIGTERM, True, 3),
        (STEP, 4, signal.SIGUSR1, True, 4),  # after which a validation is due
        (STEP, 1, signal.SIGINT, True, 1),
        (EVALUATE, 2, signal.SIGINT, True, 4),
        (EVALUATE, 3, signal.SIGTERM, False, 6),  # after the last step
        (SAVE, 3, signal.SIGUSR1, False, 2),  # the first is before the first validation
        (SAVE, 4, signal.SIGHUP, True, 4),
    ],
)
def test_r5_a_signal_ends_the_run_where_it_is(
    where: str, count: int, number: signal.Signals, to_group: bool, step: int, place: Path, whole: Path
) -> None:
    """And it goes on from there, whatever the signal fell into."""
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
    assert validated == [at for at in (2, 4, 6) if at < step or (at == step and where == SAVE)]
    again = train(place / "stopped", "resume=run")
    assert again.code == 0 and same(folder, whole), again.err


def refused_memory() -> None:
    raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 7 bytes")


def out_of_memory_in_validation() -> None:
    import unet3d.run.run  # noqa: F401

    call(EVALUATE, 1, refused_memory)


def test_memory_that_runs_out_in_a_validation_is_not_told_as_a_steps(tmp_path: Path) -> None:
    """Neither ckpt nor batch would change anything there."""
    done = train(tmp_path, *RUN, f"data.root={tmp_path / 'phantom'}", hook=out_of_memory_in_validation)
    assert done.code == 5 and "you tried to allocate 7 bytes\nin the validation after step 2, " in done.err, done.err
    assert "ckpt" not in done.err and "in the first" not in done.err
    assert done.err.endswith(f"to go on: python train.py resume={tmp_path / 'run'}\n")


def test_r5_a_second_interrupt_ends_the_run_at_once(place: Path) -> None:
    done = train(place / "twice", *RUN, hook=interrupted_twice)
    folder = place / "twice" / "run"
    assert done.code == 130 and done.err == f"interrupted; to go on: python train.py resume={folder}\n"
    assert checkpoint.load_snapshot(folder / "checkpoints" / "last.pt")["step"] == 2


def interrupted_twice() -> None:
    import unet3d.run.run  # noqa: F401

    call(STEP, 3, lambda: [send(signal.SIGINT) for _ in range(2)] and None)


def test_r5_before_the_first_step_there_is_nothing_to_wait_for(place: Path) -> None:
    done = train(
        place / "early", *RUN, hook=functools.partial(signalled, "unet3d.build:data", 1, signal.SIGTERM, False)
    )
    assert done.code == 75
    assert done.err == "stopped by SIGTERM; there is no snapshot yet to go on from\n"


def test_r5_no_process_is_left_behind(tmp_path: Path) -> None:
    """Neither data workers nor wandb's."""
    mark = str(tmp_path)
    hook = functools.partial(signalled, STEP, 3, signal.SIGTERM, True, mark)
    done = train(tmp_path, *TINY, "steps=9", "workers=2", "hydra.run.dir=run", hook=hook, wandb="offline")
    assert done.code == 75, done.err
    assert list((tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb"))
    assert alive(mark) == []


def hung_worker() -> None:
    """A data worker never comes back from its third patch; torch waits for it, here not for 5 seconds."""
    import torch.utils.data._utils as utils

    import unet3d.run.run

    utils.MP_STATUS_CHECK_INTERVAL = 0.1
    get = unet3d.run.Patches.__getitem__

    def hang(self: object, place: tuple[int, int, int]) -> object:
        while place[0] >= 2:
            signal.pause()
        return get(self, place)  # type: ignore[arg-type]

    unet3d.run.Patches.__getitem__ = hang  # type: ignore[method-assign,assignment]
    call(STEP, 2, functools.partial(send, signal.SIGTERM))


def test_r5_a_worker_that_hangs_ends_with_the_run(tmp_path: Path) -> None:
    done = train(tmp_path, *TINY, "workers=1", "hydra.run.dir=run", hook=hung_worker)
    assert done.code == 75, done.err


def test_r5_workers_leave_signals_to_the_run() -> None:
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


def test_r5_a_dry_run_and_what_comes_after_hear_signals_as_ever() -> None:
    before = [signal.getsignal(number) for number in signals.ASKING]
    with pytest.raises(KeyError), signals.stopping():
        assert signal.getsignal(signal.SIGTERM) != before[0]
        raise KeyError
    assert [signal.getsignal(number) for number in signals.ASKING] == before


def test_r5_a_signal_that_is_ignored_stays_so() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals.stopping() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
        assert not stop()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_r5_noted_signals_wait_and_raised_ones_do_not() -> None:
    with signals.stopping() as stop:
        with stop.deferred():
            os.kill(os.getpid(), signal.SIGUSR1)
            assert stop() and stop.asked is signal.SIGUSR1
            with pytest.raises(Preempted, match="SIGUSR1"), stop.interruptible():
                pytest.fail("work that need not begin")
        os.kill(os.getpid(), signal.SIGTERM)  # asked already
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def requeued(code: int) -> None:
    place = Path.cwd()
    tool = place / "scontrol"
    tool.write_text(f"#!/bin/sh\ncat run/STATUS > told\necho $@ >> told\necho no such job >&2\nexit {code}\n")
    tool.chmod(0o755)
    os.environ |= {"PATH": f"{place}:{os.environ['PATH']}", "SLURM_JOB_ID": "41"}
    signalled(STEP, 2, signal.SIGUSR1, False)


@pytest.mark.parametrize("code", [0, 1])
def test_r5_slurm_is_asked_for_another_turn(code: int, tmp_path: Path) -> None:
    done = train(tmp_path, *TINY, "requeue=true", "hydra.run.dir=run", hook=functools.partial(requeued, code))
    assert done.code == 75 and done.err.splitlines()[-1].startswith("stopped by SIGUSR1 after step 2 of 4; to go on")
    assert (tmp_path / "told").read_text() == f"{status(tmp_path / 'run')}requeue 41\n"
    assert done.err.count("\n") == 1 + code
    assert ("warning: scontrol requeue 41: no such job" in done.err) is bool(code)


def test_r5_outside_of_slurm_nothing_is_requeued_and_that_is_said(
    monkeypatch: Patch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    lifecycle.requeue()
    assert "no SLURM_JOB_ID" in capsys.readouterr().err


def test_r5_slurm_is_not_asked_without_the_option(tmp_path: Path) -> None:
    done = train(tmp_path, *TINY, "hydra.run.dir=run", hook=functools.partial(requeued, 0))
    assert done.code == 75 and not (tmp_path / "told").exists()


WAITING = "import os, signal; os.kill(os.getppid(), {0}); signal.pause()"
DEAF = """
import os, signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGINT])
os.kill(os.getppid(), signal.SIGINT)
signal.sigwait([signal.SIGTERM])
os.kill(os.getppid(), signal.SIGINT)
signal.pause()
"""


def test_r5_a_sweep_passes_the_question_on() -> None:
    """The job ends by SIGTERM, whatever the sweep was told."""
    for number in signals.ASKING:
        assert lifecycle.run_process([sys.executable, "-c", WAITING.format(int(number))]) == (75, True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lifecycle, "GRACE", 0)
        assert lifecycle.run_process([sys.executable, "-c", DEAF]) == (130, True)


def test_r5_a_job_that_has_just_begun_is_asked_too(monkeypatch: Patch) -> None:
    begin = subprocess.Popen

    def asked(command: list[str]) -> subprocess.Popen:
        os.kill(os.getpid(), signal.SIGTERM)
        return begin(command)

    monkeypatch.setattr(lifecycle.subprocess, "Popen", asked)
    assert lifecycle.run_process([sys.executable, "-c", "import signal; signal.pause()"]) == (75, True)


# --- R9: one process a folder


def second() -> None:
    """At step 3, another process asks for the folder of this one."""
    import unet3d.run.run  # noqa: F401

    def ask() -> None:
        words = [sys.executable, str(ROOT / "train.py"), "resume=run"]
        done = subprocess.run(words, capture_output=True, text=True)
        Path("second").write_text(json.dumps([done.returncode, done.stdout, done.stderr, os.getpid()]))

    call(STEP, 3, ask)


def test_r9_a_folder_in_use_is_refused_and_its_run_unharmed(place: Path, whole: Path) -> None:
    first = train(place / "shared", *RUN, hook=second)
    code, out, err, pid = json.loads((place / "shared" / "second").read_text())
    assert (code, out, err) == (
        2,
        "",
        f"error: {place}/shared/run: process {pid} uses it; wait, or choose another folder\n",
    )
    assert first.code == 0 and same(place / "shared" / "run", whole)


def test_r9_two_runs_of_one_second_have_two_folders(tmp_path: Path) -> None:
    running = [start(tmp_path / name, *TINY, "hydra.sweep.dir=x", hook=stopped_clock) for name in "ab"]
    assert [Ended(*one).code for one in running] == [0, 0]
    found = [path for name in "ab" for path in (tmp_path / name).glob("outputs/*/*")]
    assert len({path.name for path in found}) == 2 and {path.name[:9] for path in found} == {"12-00-00-"}


def stopped_clock() -> None:
    import hydra.core.utils

    noon = datetime(2026, 1, 2, 12)
    hydra.core.utils.datetime = SimpleNamespace(now=lambda: noon)


# --- T: what befalls a training


def poisoned(step: int, amp: bool) -> None:
    """A NaN in the batch of this step; with `amp`, in fp16 and at its lowest scale."""
    import unet3d.train.trainer

    take, steps = unet3d.train.trainer.train_step, iter(range(1, 10**6))

    def poison(*of: object, **named: object) -> object:
        model, _, _, scaler, _, batches = of[:6]
        if next(steps) == step:
            batches[0].image[0, 0, 0, 0, 0] = float("nan")  # type: ignore[index]
            if amp:
                scaler.load_state_dict(scaler.state_dict() | {"scale": 0.5})  # type: ignore[attr-defined]
            torch.save(model.state_dict(), "before.pt")  # type: ignore[attr-defined]
            call("unet3d.train.checkpoint:save_snapshot", 1, lambda: torch.save(model.state_dict(), "after.pt"))  # type: ignore
        return take(*of, **named)

    unet3d.train.trainer.train_step = poison


@pytest.mark.parametrize("precision", [[], ["amp=true", "amp_dtype=bf16"], ["amp=true", "amp_dtype=fp16"]])
def test_t2_a_poisoned_batch_is_kept_and_changes_no_weight(precision: list[str], tmp_path: Path) -> None:
    hook = functools.partial(poisoned, 3, "amp_dtype=fp16" in precision)
    done = train(tmp_path, *TINY, *precision, "hydra.run.dir=run", hook=hook)
    folder = tmp_path / "run"
    assert done.code == 4 and done.err.count("\n") == 1
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
    done = train(place / "killed", *RUN, hook=functools.partial(signalled, EVALUATE, 3, signal.SIGKILL, False))
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

    signalled("unet3d.build:data", 0, 0, False)
    call(STEP, 3, kill)


def no_room_for_wandb() -> None:
    Path("run").mkdir()
    Path("run", "wandb").touch()


@pytest.mark.parametrize(
    ("mode", "hook", "said"),
    [
        ("offline", without_wandb_core, "warning: Wandb failed ("),
        ("offline", no_room_for_wandb, "warning: wandb does not start ("),
        ("disabled", None, ""),
    ],
)
def test_t6_a_lost_tracker_costs_one_line(
    mode: str, hook: Callable[[], None] | None, said: str, tmp_path: Path
) -> None:
    done = train(tmp_path, *TINY, "steps=6", "hydra.run.dir=run", hook=hook, wandb=mode)
    assert done.code == 0, done.err
    assert done.err.startswith(said) and done.err.count("\n") == bool(said), done.err
    assert [record["step"] for record in records(tmp_path / "run") if "train/loss" in record] == [*range(1, 7)]


def in_ascii() -> None:
    """On a narrow terminal that is none."""
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
def test_t8_a_run_needs_no_reader(hook: Callable[[], None], tmp_path: Path) -> None:
    done = train(tmp_path, *TINY, "hydra.run.dir=run", hook=hook)
    assert done.code == 0, done.err
    assert status(tmp_path / "run") == "done\nexit code 0\n"
    assert len(records(tmp_path / "run")) == 6
    if hook is in_ascii:
        assert "run folder: run" in done.out and "\x1b" not in done.out and done.err == ""


def test_t8_the_reader_of_the_first_line_may_leave(tmp_path: Path) -> None:
    """`train.py | head -1`, in a program of its own and the locale C."""
    words = [sys.executable, str(ROOT / "train.py"), *TINY, "hydra.run.dir=run", "wandb.mode=disabled"]
    with subprocess.Popen(
        words, cwd=tmp_path, env=os.environ | {"LC_ALL": "C"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as child:
        assert child.stdout and child.stderr
        assert b"kept in memory" in child.stdout.readline()
        child.stdout.close()
        assert child.stderr.read() == b""
    assert child.returncode == 0 and status(tmp_path / "run") == "done\nexit code 0\n"


def odd_clock() -> None:
    """It jumps back by a day, and into another zone."""

    def jump() -> None:
        now = time.time
        time.time = lambda: now() - 86400
        os.environ["TZ"] = "Pacific/Kiritimati"
        time.tzset()

    signalled("unet3d.build:data", 0, 0, False)
    call(STEP, 3, jump)


def test_t12_the_clock_and_the_place_do_not_matter(place: Path, whole: Path) -> None:
    """And nothing is written beside the sources."""
    before = sources()
    done = train(place / "elsewhere", *RUN, hook=odd_clock)
    assert done.code == 0 and same(place / "elsewhere" / "run", whole)
    times = [
        json.loads(line).get("time/step_s", 0)
        for line in (place / "elsewhere" / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert min(times) >= 0
    assert sources() == before


def sources() -> set[tuple[Path, int]]:
    found = [path for part in ("unet3d", "configs") for path in (ROOT / part).rglob("*") if path.suffix != ".pyc"]
    return {(path, path.stat().st_mtime_ns) for path in found if path.is_file()}


def test_t1_memory_that_runs_out_without_a_word_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As Python tells it, while a file is read, say."""

    def job(*_: object) -> None:
        raise MemoryError

    assert lifecycle.guarded(job, Config(), tmp_path, []) == 5
    line = "out of memory: MemoryError(); there is no snapshot yet to go on from\n"
    assert capsys.readouterr().err == line and status(tmp_path) == f"{line}exit code 5\n"

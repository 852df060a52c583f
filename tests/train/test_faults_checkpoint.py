"""A whole checkpoint outlives kills at any moment, a full disk and places that cannot be written to."""

import errno
import functools
import itertools
import os
import random
import re
import resource
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO

import pytest
import torch
from guards import Guard, are_out, no, nothing, without
from promises import promise
from torch.optim.optimizer import register_optimizer_step_post_hook
from training import SERVER, TINY, fill, forked, records, same, status, train

from unet3d.base.errors import NotSaved, UserError
from unet3d.cli.lifecycle import hold_folder
from unet3d.config.compose import CHECKPOINTS
from unet3d.report import memory_plots
from unet3d.run import checkpoint

LAST, PREVIOUS = CHECKPOINTS[:2]
FULL = Path("/dev/full")


def save(folder: Path, step: int) -> None:
    weights = torch.full((100_000,), float(step))
    checkpoint.save_checkpoint(folder / LAST, {"step": step, "w": weights}, folder / PREVIOUS)


def save_on_and_on(folder: Path, seed: int, saved: Connection) -> None:
    """Until a timer ends the process, at any moment of one of the next saves: its signal's default is a kill."""
    started = time.perf_counter()
    save(folder, 1)
    signal.setitimer(signal.ITIMER_REAL, random.Random(seed).uniform(0, 9) * (time.perf_counter() - started))
    for step in itertools.count(2):
        save(folder, step)
        saved.send(step)


def check_whole(folder: Path, least: int) -> None:
    found, _ = checkpoint.load_any(folder, CHECKPOINTS)
    assert found["step"] >= least and (found["w"] == found["step"]).all()


@promise(
    "Checkpoints",
    "a kill at any moment of a save; a loss of power after it",
    "a whole checkpoint is there: content and names reach the disk before old ones go",
)
@pytest.mark.parametrize("seed", range(8))
def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(seed: int, tmp_path: Path) -> None:
    here, there = SERVER.Pipe(duplex=False)
    child = forked(save_on_and_on, tmp_path, seed, there)
    child.start()
    there.close()
    child.join()
    assert child.exitcode == -signal.SIGALRM
    saved = 1
    with suppress(EOFError):
        while True:
            saved = here.recv()
    check_whole(tmp_path, saved)


STATIONS = ["write", "fsync", "replace", "second replace", "fsync of the folder"]


@contextmanager
def in_place(path: Path, previous: Path | None = None) -> Iterator[IO[bytes]]:
    """A file that is written where it is."""
    with path.open("w+b") as file:
        yield file


def save_and_die(folder: Path, station: str, guards_out: Sequence[Guard]) -> None:
    """Within the second save, before what `station` names."""
    for guard in guards_out:
        guard.take_out(pytest.MonkeyPatch())
    save(folder, 1)

    def dying(call: object, at: int) -> object:
        count = itertools.count(1)
        return lambda *of: os.kill(os.getpid(), signal.SIGKILL) if next(count) == at else call(*of)  # type: ignore

    if station == "write":
        torch.save = lambda state, file: (file.write(b"PK"), os.kill(os.getpid(), signal.SIGKILL))
    name = "fsync" if "fsync" in station else "replace"
    setattr(os, name, dying(getattr(os, name), 2 if station in STATIONS[3:] else 1))
    save(folder, 2)


@promise("Checkpoints", "a kill at any ...")
@without("unet3d.run.checkpoint.replacing", in_place, only="write")
@pytest.mark.parametrize("station", STATIONS)
def test_a_kill_between_any_two_parts_of_a_save_leaves_a_whole_checkpoint(station: str, tmp_path: Path) -> None:
    child = forked(save_and_die, tmp_path, station, are_out())
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    check_whole(tmp_path, 1)


@promise(
    "Disk and limits",
    "the disk is full as a checkpoint is saved, at any point",
    "one line with the room needed and left; the old checkpoint is whole, nothing is left over",
)
@without("unet3d.run.checkpoint.is_disk_full", no)
def test_a_full_disk_keeps_the_checkpoint_that_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1)
    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(NotSaved, match=r"No space left on device.* 400,000 .* [\d,]+ "):
        save(tmp_path, 2)
    assert {path.name for path in tmp_path.iterdir()} == {LAST}
    check_whole(tmp_path, 1)


def no_space(_: int) -> None:
    """What os.fsync does on a full disk."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


SIXTEENTHS = range(18)  # 17 of them hold a checkpoint with what torch puts around it


def saved_on_a_full_disk(folder: Path) -> None:
    """Save a second checkpoint where there may be no room: it is there whole, or the first is and an error says so."""
    try:
        save(folder, 2)
    except NotSaved as error:
        assert re.search(r"(No space left on device|File too large).* 400,000 ", str(error))
        check_whole(folder, 1)
        assert {path.name for path in folder.iterdir()} <= {LAST, "filler"}
    else:
        check_whole(folder, 2)
        assert {path.name for path in folder.iterdir()} <= {LAST, PREVIOUS, "filler"}


@promise("Disk and limits", "the disk is full ...")
@pytest.mark.parametrize("sixteenths", SIXTEENTHS)
def test_a_file_that_may_not_grow_costs_no_checkpoint(sixteenths: int, tmp_path: Path) -> None:
    """torch raises its own error over that of a write that fails part-way."""
    save(tmp_path, 1)
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (sixteenths * (tmp_path / LAST).stat().st_size // 16, hard))
    try:
        saved_on_a_full_disk(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))


def at_updates(actions: dict[int, Callable[[], None]]) -> None:
    """Call these right after the optimizer's updates of these numbers."""
    count = itertools.count(1)
    register_optimizer_step_post_hook(lambda *_: actions.get(next(count), int)())


def limit_files(size: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def small_files(after: int, until: int) -> None:
    """No file of more than 64 KiB can be written, from step `after` until step `until`."""
    at_updates({after: lambda: limit_files(2**16), until: lambda: limit_files(resource.RLIM_INFINITY)})


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("full")


@promise("Disk and limits", "it is full during training", "training continues with a warning; no record is lost")
@pytest.mark.slow
def test_training_goes_on_while_the_disk_is_full(place: Path) -> None:
    done = train(place / "a", *TINY, "steps=8", "hydra.run.dir=run", hook=functools.partial(small_files, 3, 8))
    assert done.code == 0, done.err
    warnings = done.err.splitlines()
    assert len(warnings) == 2
    for line in warnings:
        assert "File too large" in line and "ulimit -f" in line and "/checkpoints/" in line
        assert re.findall(r" (\d+)", line)[-1] == "2", "the step of the last checkpoint"
    folder = place / "a" / "run"
    assert checkpoint.load_checkpoint(folder / "checkpoints" / LAST)["step"] == 8
    assert checkpoint.load_checkpoint(folder / "checkpoints" / PREVIOUS)["step"] == 2
    assert [record["step"] for record in records(folder) if "train/loss" in record] == [*range(1, 9)]


@promise("Disk and limits", "it is full as ...")
@pytest.mark.slow
def test_a_disk_that_is_full_at_the_end_is_an_error(place: Path) -> None:
    done = train(place / "b", *TINY, "hydra.run.dir=run", hook=functools.partial(small_files, 4, 9))
    assert done.code == 2 and "Traceback" not in done.err
    assert "File too large" in status(place / "b" / "run")
    assert checkpoint.load_checkpoint(place / "b" / "run" / "checkpoints" / LAST)["step"] == 2
    resumed = train(place / "b", "resume=run")
    assert resumed.code == 0 and status(place / "b" / "run").startswith("done")


@promise("Disk and limits", "the disk is full ...")
@pytest.mark.parametrize("sixteenths", SIXTEENTHS)
def test_a_disk_with_little_room_costs_no_checkpoint(sixteenths: int, small_disk: Path) -> None:
    save(small_disk, 1)
    fill(small_disk, sixteenths * (small_disk / LAST).stat().st_size // 16)
    saved_on_a_full_disk(small_disk)


@promise(
    "Disk and limits",
    "a disk with less room than a run needs",
    "it finishes, or exit 2; with room it resumes to the same bits (`tests/bench/full_disk.py` tries every size)",
)
@pytest.mark.slow
@pytest.mark.parametrize("sixteenths", [27, 43])
def test_a_run_on_a_small_disk_finishes_or_goes_on_once_there_is_room(
    sixteenths: int, small_disk: Path, place: Path
) -> None:
    """`tests/bench/full_disk.py` tries every size. A run keeps three checkpoints."""
    words = [*TINY, "data.root=../phantom"]
    if not (place / "whole").exists():
        assert train(place / "whole", *words, "hydra.run.dir=run").code == 0
    run = small_disk / "run"
    words += [f"hydra.run.dir={run}", "resume=auto"]
    fill(small_disk, 2**17 + sixteenths * (place / "whole" / "run" / "checkpoints" / LAST).stat().st_size // 16)
    done = train(place / "small", *words, wandb="offline" if sixteenths == 43 else "disabled")
    assert done.code in (0, 2) and "Traceback" not in done.err, done.err
    assert not [*small_disk.rglob("*.tmp")]
    assert status(run).startswith("done" if done.code == 0 else "error: ")
    (small_disk / "filler").unlink()
    again = train(place / "small", *words)
    assert again.code == 0 and same(run, place / "whole" / "run"), again.err


def full_between(folder: Path, after: int, until: int) -> None:
    """The disk is full to the last byte from step `after` until step `until`."""
    at_updates({after + 1: lambda: fill(folder), until: (folder / "filler").unlink})


@promise("Disk and limits", "it is full during ...")
@pytest.mark.slow
def test_a_disk_full_to_the_last_byte_costs_no_record(small_disk: Path, place: Path) -> None:
    run = f"hydra.run.dir={small_disk / 'run'}"
    steps = ["steps=40", "eval_every=20"]
    done = train(place / "c", *TINY, *steps, run, hook=functools.partial(full_between, small_disk, 3, 39))
    assert done.code == 0, done.err
    warnings = done.err.splitlines()
    for name in ("metrics.jsonl", LAST, "scores.csv"):  # the last two before the first validation, and after it
        assert sum(f"/{name}: " in line for line in warnings) == 1, name
    steps_found = [record["step"] for record in records(small_disk / "run") if "train/loss" in record]
    assert steps_found == [*range(1, 41)]
    assert checkpoint.load_checkpoint(small_disk / "run" / "checkpoints" / LAST)["step"] == 40


def full_drawing() -> None:
    memory_plots.phase_plot = lambda *_: FULL.write_bytes(b"a picture")


@promise("Disk and limits", "it is full as ...")
@pytest.mark.slow
def test_a_disk_that_is_full_as_pictures_are_drawn_is_one_line(place: Path) -> None:
    """What is missing then is made when the run is resumed."""
    done = train(place / "d", *TINY, "steps=2", "eval_every=0", "hydra.run.dir=run", hook=full_drawing)
    folder = place / "d" / "run"
    assert done.code == 2 and done.err.count("\n") == 1
    assert "No space left on device" in done.err and done.err.endswith(f"train.py resume={folder}\n")
    assert train(place / "d", "resume=run").code == 0
    assert status(folder).startswith("done") and len(list((folder / "predictions").iterdir())) == 1


def full_beginning() -> None:
    """No file of a run can be written."""
    os.fsync = no_space


@promise(
    "Disk and limits",
    "it is full as a run begins, as pictures or label maps are written, or at the end",
    "exit 2 with one line; resume makes what is missing",
)
@without("unet3d.base.errors.is_disk_full", no)
def test_a_disk_that_is_full_as_a_run_begins_is_one_line(place: Path) -> None:
    done = train(place / "e", *TINY, "hydra.run.dir=run", hook=full_beginning)
    assert done.code == 2 and done.err.count("\n") == 1
    assert f"{place / 'e' / 'run' / 'overrides.yaml'}: No space left on device" in done.err
    assert "resume=" not in done.err


@promise("Checkpoints", "a missing file, a ...")
def test_a_place_that_cannot_be_written_to_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(NotSaved, match=r"last\.pt: .*\(No such file or directory\)$"):
        save(tmp_path / "missing", 1)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"file: .*Not a directory"), hold_folder(tmp_path / "file"):
        pass
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    save(tmp_path / "link", 1), save(tmp_path / "real" / ".." / "link", 2)
    check_whole(tmp_path / "real", 2)


@promise("Checkpoints", "a missing file, a ...")
@pytest.mark.slow
@without("unet3d.cli.train.refuse_unwritable", nothing)
def test_a_run_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for where in ("file/run", "file"):
        done = train(tmp_path, *TINY, f"hydra.run.dir={where}")
        assert done.code == 2 and f" {where}: " in done.err and done.err.count("\n") == 1
        assert "hydra.run.dir=" in done.err
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    assert train(tmp_path, *TINY, "steps=1", "hydra.run.dir=link/../link/run").code == 0
    assert (tmp_path / "real" / "run" / "STATUS").exists()

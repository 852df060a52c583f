"""A whole checkpoint outlives kills at any moment, a full disk and places that cannot be written to."""

import errno
import itertools
import os
import re
import resource
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any

import pytest
import torch
from guards import Guard, are_out, no, nothing, without
from promises import promise
from torch.optim.optimizer import register_optimizer_step_post_hook
from training import TINY, fill, forked, records, same, status, train

from unet3d.base.errors import NotSaved, UserError
from unet3d.cli.lifecycle import hold_folder
from unet3d.config.compose import CHECKPOINTS
from unet3d.report import memory_plots
from unet3d.run import checkpoint

LAST, PREVIOUS = CHECKPOINTS[:2]
ENDLESS = resource.RLIM_INFINITY


def save(folder: Path, step: int) -> None:
    weights = torch.full((100_000,), float(step))
    checkpoint.save_checkpoint(folder / LAST, {"step": step, "w": weights}, folder / PREVIOUS)


def check_whole(folder: Path, step: int) -> None:
    found, _ = checkpoint.load_any(folder, CHECKPOINTS)
    assert found["step"] == step and (found["w"] == step).all()


@contextmanager
def in_place(path: Path, previous: Path | None = None) -> Iterator[IO[bytes]]:
    """A file that is written where it is."""
    with path.open("w+b") as file:
        yield file


def write_and_die(state: object, file: IO[bytes]) -> None:
    file.write(b"PK")
    os.kill(os.getpid(), signal.SIGKILL)


def save_and_die(folder: Path, name: str, at: int, guards_out: Sequence[Guard]) -> None:
    """Within the second save, before this call of a function of `os`, or in torch's writing."""
    for guard in guards_out:
        guard.take_out(pytest.MonkeyPatch())
    save(folder, 1)
    call, count = getattr(os, name, None), itertools.count(1)

    def dying(*of: Any) -> Any:
        return os.kill(os.getpid(), signal.SIGKILL) if next(count) == at else call(*of)

    if call is None:
        torch.save = write_and_die
    else:
        setattr(os, name, dying)
    save(folder, 2)


@promise(
    "Checkpoints",
    "a kill at any moment of a save; a loss of power after it",
    "a whole checkpoint is there: content and names reach the disk before old ones go",
)
@without("unet3d.run.checkpoint.replacing", in_place, only="writing")
@pytest.mark.parametrize(
    ("name", "at"),
    [("writing", 1), ("fsync", 1), ("replace", 1), ("replace", 2), ("fsync", 2)],  # the last one of the folder
)
def test_a_kill_between_any_two_parts_of_a_save_leaves_a_whole_checkpoint(name: str, at: int, tmp_path: Path) -> None:
    child = forked(save_and_die, tmp_path, name, at, are_out())
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    check_whole(tmp_path, 1 + (name == "fsync" and at == 2))


def limit_files(size: int = ENDLESS) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, ENDLESS))


@promise(
    "Disk and limits",
    "the disk is full as a checkpoint is saved, at any point",
    "one line with the room needed and left; the old checkpoint is whole, nothing is left over",
)
@without("unet3d.run.checkpoint.is_disk_full", no)
@pytest.mark.parametrize("sixteenths", [0, 1, 8, 15, 16])
def test_a_file_that_may_not_grow_costs_no_checkpoint(sixteenths: int, tmp_path: Path) -> None:
    """torch raises its own error over that of a write that fails part-way."""
    save(tmp_path, 1)
    limit_files(sixteenths * ((tmp_path / LAST).stat().st_size - 1) // 16)
    try:
        with pytest.raises(NotSaved, match=r"File too large.* 400,000 .* [\d,]+ "):
            save(tmp_path, 2)
    finally:
        limit_files()
    check_whole(tmp_path, 1)
    assert [path.name for path in tmp_path.iterdir()] == [LAST]


def at_updates(actions: dict[int, Callable[[], object]]) -> None:
    """Call these right after the optimizer's updates of these numbers."""
    count = itertools.count(1)
    register_optimizer_step_post_hook(lambda *_: actions.get(next(count), int)())


@promise("Disk and limits", "it is full during ...")
@promise("Disk and limits", "it is full as ...")
@promise(
    "Disk and limits",
    "a disk with less room than a run needs",
    "it finishes, or exit 2; with room it resumes to the same bits (`tests/bench/full_disk.py` tries every size)",
)
@pytest.mark.slow
def test_training_goes_on_while_no_checkpoint_can_be_saved_and_ends_in_an_error(tmp_path: Path) -> None:
    """From step 3 on, no file of more than 64 KiB can be written."""
    words, run = [*TINY, "steps=6", "data.root=phantom"], tmp_path / "run"
    small_files = partial(at_updates, {3: partial(limit_files, 2**16)})
    done = train(tmp_path, *words, "hydra.run.dir=run", hook=small_files)
    assert done.code == 2 and "File too large" in status(run)
    *warnings, _ = done.err.splitlines()
    assert warnings, "the first save that fails ends no run"
    for line in warnings:
        assert re.search(r"/checkpoints/.*File too large.*ulimit -f.* 2$", line), "the step of the last checkpoint"
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    assert train(tmp_path, *words, "hydra.run.dir=link/../link/whole").code == 0, "a folder behind a link"
    assert train(tmp_path, "resume=run").code == 0
    assert same(run, tmp_path / "real" / "whole") and status(run).startswith("done")


def full_between(folder: Path, after: int, until: int) -> None:
    """The disk is full to the last byte from step `after` until step `until`."""
    at_updates({after + 1: lambda: fill(folder), until: (folder / "filler").unlink})


@promise("Disk and limits", "it is full during training", "training continues with a warning; no record is lost")
@promise("Disk and limits", "a disk with less ...")
@pytest.mark.slow
@pytest.mark.parametrize(("until", "code"), [(39, 0), (99, 2)])
def test_a_disk_full_to_the_last_byte_costs_no_record(until: int, code: int, small_disk: Path, tmp_path: Path) -> None:
    words = (*TINY, "steps=40", "eval_every=20", f"hydra.run.dir={small_disk / 'run'}", "resume=auto")
    done = train(tmp_path / "run", *words, hook=partial(full_between, small_disk, 3, until))
    assert done.code == code and not [*small_disk.rglob("*.tmp")], done.err
    if code:
        assert status(small_disk / "run").startswith("error: ")
        (small_disk / "filler").unlink()
        again = train(tmp_path / "run", *words)
        assert again.code == 0, again.err
        return
    for name in ("metrics.jsonl", LAST, "scores.csv"):  # the last two before the first validation, and after it
        assert done.err.count(f"/{name}: ") == 1, done.err
    steps = [record["step"] for record in records(small_disk / "run") if "train/loss" in record]
    assert steps == [*range(1, 41)]


def full_drawing() -> None:
    memory_plots.phase_plot = lambda *_: Path("/dev/full").write_bytes(b"a picture")


def full_beginning() -> None:
    """No file of a run can be written."""

    def no_space(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    os.fsync = no_space


@promise(
    "Disk and limits",
    "it is full as a run begins, as pictures or label maps are written, or at the end",
    "exit 2 with one line; resume makes what is missing",
)
@without("unet3d.base.errors.is_disk_full", no, only="begins")
@pytest.mark.parametrize(
    ("hook", "line"),
    [
        pytest.param(full_drawing, r".*No space left on device.*train\.py resume=\S*run\n", marks=pytest.mark.slow),
        (full_beginning, r".*/run/overrides\.yaml: No space left on device((?!resume=).)*\n"),
    ],
    ids=["as pictures are drawn", "as a run begins"],
)
def test_a_disk_that_is_full_is_one_line(tmp_path: Path, hook: Callable[[], None], line: str) -> None:
    """What is missing then is made when the run is resumed."""
    done = train(tmp_path, *TINY, "steps=2", "eval_every=0", "hydra.run.dir=run", hook=hook)
    assert done.code == 2 and re.fullmatch(line, done.err), done.err
    if hook is full_drawing:
        assert train(tmp_path, "resume=run").code == 0 and status(tmp_path / "run").startswith("done")
        assert len([*(tmp_path / "run" / "predictions").iterdir()]) == 1


@promise("Checkpoints", "a missing file, a ...")
def test_a_place_that_cannot_be_written_to_is_one_line_and_one_behind_a_link_can(tmp_path: Path) -> None:
    with pytest.raises(NotSaved, match=r"last\.pt: .*\(No such file or directory\)$"):
        save(tmp_path / "missing", 1)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"file: .*Not a directory"), hold_folder(tmp_path / "file"):
        pass
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    save(tmp_path / "real" / ".." / "link", 2)
    check_whole(tmp_path / "real", 2)


@promise("Checkpoints", "a missing file, a ...")
@without("unet3d.cli.train.refuse_unwritable", nothing)
@pytest.mark.parametrize("where", ["file/run", "file"])
def test_a_run_folder_that_cannot_be_made_is_one_line(where: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = train(tmp_path, *TINY, f"hydra.run.dir={where}")
    assert done.code == 2 and re.fullmatch(rf".* {where}: .*hydra\.run\.dir=.*\n", done.err), done.err

"""Temporary files: the dead leave none for long, and those of the living stay."""

import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path

from guards import no, nothing, without
from promises import promise

from unet3d.base import files


def write_half(folder: Path, reached: "multiprocessing.SimpleQueue[str]") -> None:
    """Write a file in `folder`, without an end."""
    with files.replacing(folder / "scores.nii") as file:
        file.write(b"half")
        reached.put("half")
        signal.pause()


@contextmanager
def writer(folder: Path) -> Iterator[BaseProcess]:
    """A process that is half-way through a file."""
    context = multiprocessing.get_context("fork")
    reached = context.SimpleQueue()
    child = context.Process(target=write_half, args=(folder, reached))
    child.start()
    assert reached.get() == "half"
    try:
        yield child
    finally:
        child.kill()
        child.join()


def temporary(folder: Path) -> list[Path]:
    return [*folder.glob(".*.tmp")]


@promise(
    "Prediction",
    "SIGKILL while a command writes a file",
    "the next command that writes there removes its `.HEX.tmp`, and leaves a living process's alone (by "
    "a lock: where a disk has none, it stays)",
)
@without("unet3d.base.files.fcntl.flock", nothing)
@without("unet3d.base.files.stat.S_ISREG", no)
def test_what_a_killed_command_was_writing_is_removed_by_the_next_that_writes_there(
    tmp_path: Path,
) -> None:
    mine = (".mine.tmp", f".{'0' * 16}.tmp", f".backup.{'0' * 16}.tmp")
    for name in mine:
        (tmp_path / name).touch()
    with writer(tmp_path):
        files.write_text(tmp_path / "a", "x")
        assert len(temporary(tmp_path)) == 4, "a living process goes on writing"
    files.remove_abandoned.cache_clear()
    files.write_text(tmp_path / "a", "x")
    assert {path.name for path in temporary(tmp_path)} == {*mine}, "names that this package does not draw"


@promise("Prediction", "SIGKILL while a command ...")
def test_a_link_under_a_temporary_name_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "precious").touch()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / f".unet3d-{'0' * 16}.tmp").symlink_to(tmp_path / "mine")
    os.mkfifo(tmp_path / "out" / f".unet3d-{'1' * 16}.tmp")
    files.write_text(tmp_path / "out" / "a", "x")
    assert (tmp_path / "mine" / "precious").exists() and len(temporary(tmp_path / "out")) == 2

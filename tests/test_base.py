"""What all rooms stand on: the search for what fits, the garbage collector at rest, temporary files."""

import gc
import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from guards import no, nothing, without
from hypothesis import given
from hypothesis import strategies as st
from promises import promise

from unet3d.base import files, process
from unet3d.base.fit import fit

SIZES = st.lists(st.integers(1, 10**6), max_size=200)


def found_and_measured(sizes: list[int], limit: int, guesses: list[float] | None = None) -> tuple[int | None, list]:
    """Return which of the candidates fits, and those that were measured."""
    measured: list[int] = []

    def measure(number: int) -> int:
        measured.append(number)
        return sizes[number]

    return fit(range(len(sizes)), measure, limit, guesses.__getitem__ if guesses is not None else None), measured


@given(sizes=SIZES, limit=st.integers(0, 10**6), is_falling=st.booleans())
def test_the_first_that_fits_is_found_by_few_measurements_where_sizes_fall(
    sizes: list[int], limit: int, is_falling: bool
) -> None:
    """Guesses are off by a line."""
    sizes = sorted(sizes, reverse=True) if is_falling else sizes
    wanted = next((number for number, size in enumerate(sizes) if size <= limit), None)
    found, measured = found_and_measured(sizes, limit, [0.7 * size + 5 for size in sizes] if is_falling else None)
    assert found == wanted and len(measured) == len({*measured})
    assert not is_falling or len(measured) <= 5
    if found:
        assert {found, found - 1} <= {*measured}, "the answer and the one before are measured"


@pytest.mark.parametrize(("last", "wanted"), [(5, 299), (50, None)])
def test_what_a_plateau_hides_from_guesses_is_found_by_halving(last: int, wanted: int | None) -> None:
    found, measured = found_and_measured([*[50] * 299, last], 10, [400.0 - number for number in range(300)])
    assert found == wanted and len(measured) <= 20


@pytest.fixture
def unfrozen() -> Iterator[None]:
    yield
    gc.unfreeze()
    gc.enable()


@pytest.mark.usefixtures("unfrozen")
def test_the_collector_passes_over_what_a_library_leaves_and_is_back_after_it() -> None:
    frozen = gc.get_freeze_count()
    with process.loading("pytest"):
        assert gc.isenabled(), "of a program that has the library, garbage is still collected"
    assert gc.get_freeze_count() == frozen
    with process.loading("no_such_library"):
        assert not gc.isenabled()
        objects = [[] for _ in range(100)]
    assert gc.isenabled()
    assert gc.get_freeze_count() >= frozen + len(objects)
    with pytest.raises(ModuleNotFoundError), process.loading("no_such_library"):
        raise ModuleNotFoundError
    assert gc.isenabled()
    gc.disable()
    with process.loading("no_such_library"):
        pass
    assert not gc.isenabled(), "who has switched it off finds it off"


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


@promise(
    "Prediction",
    "SIGKILL while a command writes a file",
    "the next command that writes there removes its `.HEX.tmp`, and leaves a living process's alone (by "
    "a lock: where a disk has none, it stays)",
)
@without("unet3d.base.files.fcntl.flock", nothing)
@without("unet3d.base.files.stat.S_ISREG", no)
def test_what_a_killed_command_was_writing_is_removed_by_the_next_that_writes_there(tmp_path: Path) -> None:
    """Names that this package does not draw, links and pipes stay."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "precious").touch()
    mine = (".mine.tmp", f".{'0' * 16}.tmp", f".unet3d-{'0' * 16}.tmp", f".unet3d-{'1' * 16}.tmp")
    for name in mine[:2]:
        (tmp_path / name).touch()
    (tmp_path / mine[2]).symlink_to(tmp_path / "mine")
    os.mkfifo(tmp_path / mine[3])
    with writer(tmp_path):
        files.write_text(tmp_path / "a", "x")
        assert len([*tmp_path.glob(".*.tmp")]) == 5, "a living process goes on writing"
    files.remove_abandoned.cache_clear()
    files.write_text(tmp_path / "a", "x")
    assert {path.name for path in tmp_path.glob(".*.tmp")} == {*mine}
    assert (tmp_path / "mine" / "precious").exists()

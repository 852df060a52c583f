"""A little of `tests/bench/fuzz.py`, and that it would notice."""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from guards import no, nothing, without, yes
from promises import promise

sys.path.insert(0, str(Path(__file__).resolve().parent / "bench"))

import fuzz

from unet3d.data import nifti
from unet3d.report import held_out

READ = nifti.read_array
Trials = Callable[..., list[str]]


@pytest.fixture(scope="module")
def watch() -> fuzz.Watch:
    return fuzz.Watch()


@pytest.fixture
def trials(tmp_path: Path, watch: fuzz.Watch, monkeypatch: pytest.MonkeyPatch) -> Trials:
    """A function of trials' numbers, and a sound run: what came of each."""
    monkeypatch.setattr(fuzz, "SLOW", float("inf"))  # seconds are for the bench
    monkeypatch.setattr(held_out, "score_plot", nothing)
    return lambda numbers, *sound: [fuzz.trial(n, 0, tmp_path / "trial", watch, *sound)[1] for n in numbers]


@pytest.fixture(scope="module")
def sound(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> fuzz.SoundRun:
    """The finished run of all tests, with few pictures, in place of one that the bench would train."""
    left_out = shutil.ignore_patterns("wandb", "*.svg", "memory_*.png", "prediction*.png")

    def copied(*_: object, cwd: Path, **__: object) -> None:
        shutil.copytree(finished, cwd / "run", ignore=left_out)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fuzz.subprocess, "run", copied)
        return fuzz.SoundRun(tmp_path_factory.mktemp("sound"))


NO_END_OF_FILE = tuple(kind for kind in nifti.READ_ERRORS if kind is not EOFError)
WITHOUT_PICTURES = range(3, 12_000 * fuzz.DRAWN, 1000 * fuzz.DRAWN)  # which take a second


@promise(
    "data sets",
    "files damaged at random give an error line or are harmless, open nothing outside and take no memory",
)
@without("unet3d.data.nifti.READ_ERRORS", NO_END_OF_FILE)
def test_damage_is_refused_or_harmless(trials: Trials) -> None:
    assert {*trials(range(45))} == {"refused", "read"}


@promise(
    "Run folders and checkpoints of strangers",
    "any file of a run folder damaged at random",
    "refused or harmless",
)
@pytest.mark.slow
def test_a_damaged_run_folder_is_refused_or_harmless(trials: Trials, sound: fuzz.SoundRun) -> None:
    assert {*trials(WITHOUT_PICTURES, sound)} == {"refused", "read"}


def divide(*_: object) -> float:
    return 1 / 0


def read_with_much(*of: object) -> object:
    much = bytearray(2 * fuzz.HEADROOM)
    return READ(*of), much


@pytest.mark.parametrize(
    ("target", "by", "noticed"),
    [
        ("unet3d.data.texts.leaves", no, "FAILED: opened"),
        ("unet3d.data.nifti.read_array", divide, "FAILED: Traceb"),
        ("unet3d.data.nifti.read_array", read_with_much, "MemoryError\n"),
    ],
)
def test_a_fault_of_the_reader_is_noticed(
    target: str, by: object, noticed: str, trials: Trials, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target, by)
    monkeypatch.setattr(fuzz, "NIFTI", {"link": fuzz.NIFTI["link"]})
    assert any(line.startswith("FAILED") and noticed in line for line in trials(range(40)))


def linked(_: object, folder: Path) -> str:
    (folder / "STATUS").unlink()
    (folder / "STATUS").symlink_to("/etc/passwd")
    return "link"


def emptied(_: object, folder: Path) -> str:
    (folder / "memory.json").write_text('{"parameters": 1, "measured": {}}')
    return "emptied"


@pytest.mark.parametrize(
    ("target", "by", "damage", "noticed"),
    [
        ("unet3d.run.record.refuse_links_out", nothing, linked, "opened ['/etc/passwd'"),
        ("unet3d.run.run_folder.fits", yes, emptied, "Error: "),
    ],
)
def test_a_fault_of_a_run_folders_reader_is_noticed(
    target: str,
    by: object,
    damage: object,
    noticed: str,
    trials: Trials,
    sound: fuzz.SoundRun,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(target, by)
    monkeypatch.setattr(fuzz, "damage_run", damage)
    (found,) = trials([3], sound)
    assert found.startswith("FAILED: ") and noticed in found

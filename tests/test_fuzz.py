"""A little of `tests/bench/fuzz.py`, and that it would notice."""

import shutil
import sys
from pathlib import Path

import pytest
from guards import nothing, without
from promises import promise

sys.path.insert(0, str(Path(__file__).resolve().parent / "bench"))

import fuzz

from unet3d.data import nifti, texts
from unet3d.report import held_out
from unet3d.run import record, run_folder


@pytest.fixture(scope="module")
def watch() -> fuzz.Watch:
    return fuzz.Watch()


@pytest.fixture(scope="module")
def sound(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> fuzz.SoundRun:
    """The finished run of all tests, with few pictures, in place of one that the bench would train."""
    left_out = shutil.ignore_patterns("wandb", "*.svg", "memory_*.png", "prediction*.png")

    def copied(*_: object, cwd: Path, **__: object) -> None:
        shutil.copytree(finished, cwd / "run", ignore=left_out)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fuzz.subprocess, "run", copied)
        return fuzz.SoundRun(tmp_path_factory.mktemp("sound"))


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds are for the bench."""
    monkeypatch.setattr(fuzz, "SLOW", float("inf"))


NO_END_OF_FILE = tuple(kind for kind in nifti.READ_ERRORS if kind is not EOFError)


@promise(
    "data sets",
    "files damaged at random give an error line or are harmless, open nothing outside and take no memory",
)
@without("unet3d.data.nifti.READ_ERRORS", NO_END_OF_FILE)
def test_damage_is_refused_or_harmless(tmp_path: Path, watch: fuzz.Watch) -> None:
    found = [fuzz.trial(number, 0, tmp_path / "trial", watch)[:2] for number in range(45)]
    assert not [line for line in found if line[1].startswith("FAILED")]
    assert {outcome for _, outcome in found} == {"refused", "read"}


def outcome(tmp_path: Path, watch: fuzz.Watch) -> set[str]:
    return {fuzz.trial(number, 0, tmp_path / "trial", watch)[1].partition("\n")[0][:14] for number in range(40)}


def test_a_file_opened_outside_is_noticed(tmp_path: Path, watch: fuzz.Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "leaves", lambda root, path: False)
    monkeypatch.setattr(fuzz, "NIFTI", {"link": fuzz.NIFTI["link"]})
    assert "FAILED: opened" in outcome(tmp_path, watch)


def test_a_crash_and_memory_that_is_taken_are_noticed(
    tmp_path: Path, watch: fuzz.Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = nifti.read_array
    monkeypatch.setattr(nifti, "read_array", lambda *of: (bytearray(2 * fuzz.HEADROOM), read(*of))[1])
    found = [fuzz.trial(number, 0, tmp_path / "trial", watch)[1] for number in range(20)]
    assert any(line.startswith("FAILED") and line.endswith("MemoryError\n") for line in found)
    monkeypatch.setattr(nifti, "read_array", lambda *_: 1 / 0)
    assert "FAILED: Traceb" in {found[:14] for found in outcome(tmp_path, watch)}


def run_trials(place: Path, watch: fuzz.Watch, sound: fuzz.SoundRun, count: int) -> list[tuple[str, str]]:
    """None with pictures, which take a second."""
    return [fuzz.trial(1000 * fuzz.DRAWN * n + 3, 0, place / "trial", watch, sound)[:2] for n in range(count)]


@promise(
    "Run folders and checkpoints of strangers",
    "any file of a run folder damaged at random",
    "refused or harmless",
)
@pytest.mark.slow
def test_a_damaged_run_folder_is_refused_or_harmless(
    tmp_path: Path, watch: fuzz.Watch, sound: fuzz.SoundRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held_out, "score_plot", nothing)
    found = run_trials(tmp_path, watch, sound, 12)
    assert not [line for line in found if line[1].startswith("FAILED")]
    assert {outcome for _, outcome in found} == {"refused", "read"}


def test_a_link_that_is_followed_and_a_shape_that_is_not_checked_are_noticed(
    tmp_path: Path, watch: fuzz.Watch, sound: fuzz.SoundRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    def linked(_: object, folder: Path) -> str:
        (folder / "STATUS").unlink()
        (folder / "STATUS").symlink_to("/etc/passwd")
        return "link"

    def emptied(_: object, folder: Path) -> str:
        (folder / "memory.json").write_text('{"parameters": 1, "measured": {}}')
        return "emptied"

    monkeypatch.setattr(record, "refuse_links_out", lambda folder: None)
    monkeypatch.setattr(run_folder, "fits", lambda value, shape: True)
    for damage, noticed in ((linked, "FAILED: opened ['/etc/passwd'"), (emptied, "FAILED: ")):
        monkeypatch.setattr(fuzz, "damage_run", damage)
        ((_, found),) = run_trials(tmp_path, watch, sound, 1)
        assert found.startswith(noticed) and (damage is linked or "Error: " in found)

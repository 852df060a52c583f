"""Snapshots outlive kills at any moment, damage, and a disk that is full; what does not fit is told in full."""

import errno
import functools
import itertools
import os
import random
import resource
import signal
import subprocess
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from training import SERVER, TINY, records, status, train

from unet3d.cli import lifecycle
from unet3d.cli.lifecycle import hold_folder
from unet3d.compose import SNAPSHOTS
from unet3d.config import Config
from unet3d.errors import DamagedSnapshot, NotSaved, SnapshotError, UserError
from unet3d.report import memory_plots
from unet3d.train import checkpoint

LAST, PREVIOUS = SNAPSHOTS[:2]
Capture = pytest.CaptureFixture[str]


def save(folder: Path, step: int) -> None:
    weights = torch.full((100_000,), float(step))
    checkpoint.save_snapshot(folder / LAST, {"step": step, "w": weights}, folder / PREVIOUS)


def save_on_and_on(folder: Path, told: Connection) -> None:
    for step in itertools.count(1):
        save(folder, step)
        told.send(step)


def check_whole(folder: Path, least: int) -> None:
    found, _ = checkpoint.load_any(folder, SNAPSHOTS)
    assert found["step"] >= least and (found["w"] == found["step"]).all()


@pytest.mark.parametrize("seed", range(8))
def test_r4_a_kill_at_any_moment_leaves_a_whole_snapshot(seed: int, tmp_path: Path) -> None:
    here, there = SERVER.Pipe(duplex=False)
    child = SERVER.Process(target=save_on_and_on, args=(tmp_path, there))
    child.start()
    for _ in range(random.Random(seed).randint(2, 20)):
        here.recv()
    child.kill()
    child.join()
    told = 2
    while here.poll():
        told = here.recv()
    check_whole(tmp_path, told)


STATIONS = ["write", "fsync", "replace", "second replace", "fsync of the folder"]


def save_and_die(folder: Path, station: str) -> None:
    """Within the second save, before what `station` names."""
    save(folder, 1)

    def dying(call: object, at: int) -> object:
        count = itertools.count(1)
        return lambda *of: os.kill(os.getpid(), signal.SIGKILL) if next(count) == at else call(*of)  # type: ignore

    if station == "write":
        torch.save = lambda state, file: (file.write(b"PK"), os.kill(os.getpid(), signal.SIGKILL))
    name = "fsync" if "fsync" in station else "replace"
    setattr(os, name, dying(getattr(os, name), 2 if station in STATIONS[3:] else 1))
    save(folder, 2)


@pytest.mark.parametrize("station", STATIONS)
def test_r4_a_kill_between_any_two_parts_of_a_save(station: str, tmp_path: Path) -> None:
    child = SERVER.Process(target=save_and_die, args=(tmp_path, station))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    check_whole(tmp_path, 1)


def test_the_snapshot_before_is_kept(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    assert [checkpoint.load_snapshot(tmp_path / name)["step"] for name in (LAST, PREVIOUS)] == [3, 2]
    assert {path.name for path in tmp_path.iterdir()} == {LAST, PREVIOUS}


@pytest.mark.parametrize("damage", ["cut", "bit", "packed", "empty", "gone"])
def test_c1_c2_damage_gives_way_to_the_snapshot_before(damage: str, tmp_path: Path) -> None:
    save(tmp_path, 1), save(tmp_path, 2)
    path = tmp_path / LAST
    content = bytearray(path.read_bytes())
    directory = content.index(b"PK\x01\x02")
    content[directory + 10 if damage == "packed" else len(content) // 2] ^= 8  # a compression method, a weight
    path.write_bytes({"cut": content[:-9], "bit": content, "packed": content}.get(damage, b""))
    if damage == "gone":
        path.unlink()
    found, (wrong,) = checkpoint.load_any(tmp_path, SNAPSHOTS)
    assert found["step"] == 1 and str(path) in wrong
    (tmp_path / PREVIOUS).write_bytes(b"")
    with pytest.raises(SnapshotError, match=r"no usable snapshot: .*last\.pt.*previous\.pt.*best\.pt"):
        checkpoint.load_any(tmp_path, SNAPSHOTS)


def test_c4_a_full_disk_keeps_the_snapshot_that_was_there(tmp_path: Path) -> None:
    save(tmp_path, 1)
    (tmp_path / "last.tmp").symlink_to("/dev/full")
    with pytest.raises(NotSaved, match=r"No space left on device\); it needs 0\.4 MiB, [\d,.]+ MiB is free there"):
        save(tmp_path, 2)
    assert {path.name for path in tmp_path.iterdir()} == {LAST}
    check_whole(tmp_path, 1)


def small_files(after: int, until: int) -> None:
    """No file of more than 64 KiB can be written, from step `after` until step `until`."""
    from unet3d.train.trainer import Trainer

    log = Trainer._log

    def limit(self: Trainer, *of: object) -> None:
        if self.step in (after, until):
            size = 2**16 if self.step == after else resource.RLIM_INFINITY
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
        log(self, *of)

    Trainer._log = limit


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("full")


def test_c4_training_goes_on_while_the_disk_is_full(place: Path) -> None:
    done = train(place / "a", *TINY, "steps=8", "hydra.run.dir=run", hook=functools.partial(small_files, 3, 8))
    assert done.code == 0, done.err
    warnings = done.err.splitlines()
    assert len(warnings) == 2
    for line in warnings:
        assert "not saved (File too large); it needs 0.1 MiB" in line
        assert line.endswith("training goes on, the last snapshot is of step 2")
    folder = place / "a" / "run"
    assert checkpoint.load_snapshot(folder / "checkpoints" / LAST)["step"] == 8
    assert checkpoint.load_snapshot(folder / "checkpoints" / PREVIOUS)["step"] == 2
    assert [record["step"] for record in records(folder) if "train/loss" in record] == [*range(1, 9)]


def test_c4_a_disk_that_is_full_at_the_end_is_an_error(place: Path) -> None:
    done = train(place / "b", *TINY, "hydra.run.dir=run", hook=functools.partial(small_files, 4, 9))
    assert done.code == 2 and "Traceback" not in done.err
    assert "not saved (File too large)" in status(place / "b" / "run")
    assert checkpoint.load_snapshot(place / "b" / "run" / "checkpoints" / LAST)["step"] == 2
    again = train(place / "b", "resume=run")
    assert again.code == 0 and status(place / "b" / "run").startswith("done")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Of 4 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("only root can mount a disk")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def fill(folder: Path, after: int, until: int) -> None:
    """The disk is full to the last byte from step `after` until step `until`."""
    from unet3d.train.trainer import Trainer

    log = Trainer._log

    def limit(self: Trainer, *of: object) -> None:
        if self.step == until:
            (folder / "filler").unlink()
        log(self, *of)
        if self.step == after:
            with (folder / "filler").open("wb", buffering=0) as file:
                try:
                    while True:
                        file.write(b"x")
                except OSError:
                    return

    Trainer._log = limit


def test_c4_a_disk_full_to_the_last_byte_costs_no_record(small_disk: Path, place: Path) -> None:
    run = f"hydra.run.dir={small_disk / 'run'}"
    steps = ["steps=40", "eval_every=20"]
    done = train(place / "c", *TINY, *steps, run, hook=functools.partial(fill, small_disk, 3, 39))
    assert done.code == 0, done.err
    warnings = done.err.splitlines()
    assert sum("metrics.jsonl" in line for line in warnings) == 1
    told = sum("training goes on, there is no snapshot yet" in line for line in warnings)
    assert told == 2, "before the first validation, and after it"
    told = [record["step"] for record in records(small_disk / "run") if "train/loss" in record]
    assert told == [*range(1, 41)]
    assert checkpoint.load_snapshot(small_disk / "run" / "checkpoints" / LAST)["step"] == 40


def test_c4_a_disk_that_is_full_as_the_report_is_written_is_one_line(place: Path) -> None:
    """What is missing then is made up for."""
    done = train(place / "d", *TINY, "hydra.run.dir=run", hook=full_finishing)
    assert done.code == 2 and done.err.count("\n") == 1
    assert "No space left on device; make room; to go on: python train.py resume=" in done.err
    folder = place / "d" / "run"
    assert train(place / "d", "resume=run").code == 0
    assert status(folder).startswith("done") and len(list((folder / "predictions").iterdir())) == 1


def full_finishing() -> None:

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    memory_plots.phase_plot = full


def test_c5_a_place_that_cannot_be_written_to_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(NotSaved, match=r"last\.pt: not saved \(No such file or directory\)$"):
        save(tmp_path / "missing", 1)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be written to"), hold_folder(tmp_path / "file"):
        pass
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    save(tmp_path / "link", 1), save(tmp_path / "real" / ".." / "link", 2)
    check_whole(tmp_path / "real", 2)


def test_c5_a_run_folder_that_cannot_be_made_is_one_line(place: Path) -> None:
    (place / "e").mkdir()
    (place / "e" / "file").touch()
    for where in ("file/run", "file"):
        done = train(place / "e", *TINY, f"hydra.run.dir={where}")
        assert done.code == 2 and done.err.startswith(f"error: {where}: ") and done.err.count("\n") == 1
    (place / "e" / "real").mkdir()
    (place / "e" / "link").symlink_to("real")
    assert train(place / "e", *TINY, "steps=1", "hydra.run.dir=link/../link/run").code == 0
    assert (place / "e" / "real" / "run" / "STATUS").exists()


def test_c6_another_format_is_told_from_damage(tmp_path: Path) -> None:
    for number, age in ((checkpoint.FORMAT + 1, "a newer unet3d"), (checkpoint.FORMAT - 1, "an older unet3d")):
        torch.save({"format": number}, tmp_path / "x.pt")
        with pytest.raises(SnapshotError, match=rf"x\.pt: of {age} \(format {number}; this one reads format") as caught:
            checkpoint.load_snapshot(tmp_path / "x.pt")
        assert not isinstance(caught.value, DamagedSnapshot)


def test_c6_all_differences_are_counted_and_ten_are_shown() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(7)))
    weights = {f"{name}": value for name, value in model.state_dict().items() if not name.startswith("0")}
    weights |= {"1.weight": torch.zeros(3, 2), "extra": torch.zeros(())}
    with pytest.raises(SnapshotError) as caught:
        checkpoint.load_weights(model, weights, Path("a.pt"))
    head, columns, *rows = str(caught.value).splitlines()
    assert head == "a.pt: 4 tensors do not fit the model"
    assert [line.split() for line in [columns, *rows]] == [
        ["tensor", "snapshot", "model"],
        ["0.bias", "-", "2"],
        ["0.weight", "-", "2x2"],
        ["1.weight", "3x2", "2x2"],
        ["extra", "scalar", "-"],
    ]
    with pytest.raises(SnapshotError, match=r"14 tensors(.*\n){11}.*\n  and 4 more$"):
        checkpoint.load_weights(model, {}, Path("a.pt"))


def test_c4_a_disk_that_is_full_as_a_run_begins_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(lifecycle, "save_overrides", full)
    with pytest.raises(SystemExit) as ended, lifecycle.guarded(Config(), tmp_path, []):
        pass
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("error: [Errno 28] No space left on device; make room; there is no ")

"""Checkpoints keep what was saved, notice damage, run nothing, and say in full what does not fit."""

import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from guards import nothing, without, yes
from promises import promise

import unet3d
from unet3d.base.errors import CheckpointError, DamagedCheckpoint, MissingCheckpoint
from unet3d.config.compose import CHECKPOINTS
from unet3d.memory.ledger import Ledger
from unet3d.run import checkpoint

STATE = {"model": {"w": torch.arange(1000.0)}, "step": 3}
LAST, PREVIOUS = CHECKPOINTS[:2]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A saved checkpoint of step 3, and of step 2 the previous one."""
    for step in (1, 2, 3):
        checkpoint.save_checkpoint(tmp_path / LAST, STATE | {"step": step}, tmp_path / PREVIOUS)
    return tmp_path / LAST


def test_what_is_loaded_is_what_was_saved_and_the_previous_one_is_kept(path: Path) -> None:
    found = checkpoint.load_checkpoint(path)
    assert found["step"] == 3 and torch.equal(found["model"]["w"], STATE["model"]["w"])
    assert checkpoint.load_checkpoint(path.with_name(PREVIOUS))["step"] == 2
    assert {file.name for file in path.parent.iterdir()} == {LAST, PREVIOUS}


def test_saving_copies_no_tensor(tmp_path: Path) -> None:
    """So a run that fits does not run out of memory as it saves."""
    model, ledger = torch.nn.Conv3d(4, 4, 3), Ledger()
    ledger.count([*model.parameters()])
    before = len(ledger.storages)
    with ledger:
        checkpoint.save_checkpoint(tmp_path / LAST, {"model": model.state_dict()})
    assert len(ledger.storages) == before


@promise("checkpoints and run folders", "damage is noticed ...")
@promise(
    "Checkpoints",
    "a file cut to 0, 10, 50 or 99 %",
    "the previous checkpoint is taken with a warning, and survives the next save; exit 3 if none is whole",
)
@without("unet3d.run.checkpoint.DamagedCheckpoint", CheckpointError, only="0.5")
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.99])
def test_a_truncated_checkpoint_is_replaced_by_the_previous_one(path: Path, share: float) -> None:
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    with pytest.raises(DamagedCheckpoint, match=r"last\.pt"):
        checkpoint.load_checkpoint(path)
    found, (wrong,) = checkpoint.load_any(path.parent, CHECKPOINTS)
    assert found["step"] == 2 and str(path) in wrong
    path.unlink()
    path.with_name(PREVIOUS).write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"last\.pt.*previous\.pt.*best\.pt"):
        checkpoint.load_any(path.parent, CHECKPOINTS)


@promise("checkpoints and run folders", "damage is noticed")
@promise("Checkpoints", "one bit flipped", "noticed by its checksum; torch alone would load it")
@without("zipfile.ZipFile.testzip", nothing)
def test_one_flipped_bit_is_refused_though_torch_would_load_it(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[content.find(torch.tensor(500.0).numpy().tobytes())] ^= 1
    path.write_bytes(content)
    assert not torch.equal(torch.load(path, weights_only=True)["model"]["w"], STATE["model"]["w"])
    with zipfile.ZipFile(path) as archive:
        (entry,) = (entry.filename for entry in archive.infolist() if entry.file_size == 4000)
    with pytest.raises(DamagedCheckpoint, match=rf"last\.pt: .*{re.escape(entry)}"):
        checkpoint.load_checkpoint(path)


class Payload:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return Path.touch, (self.path,)


load = torch.load


def load_all(path: Path, **options: Any) -> Any:
    """Load a file and run what it says."""
    return load(path, **(options | {"weights_only": False}))


@promise("checkpoints and run folders", "a pickled command is refused and does not run")
@promise("Checkpoints", "a pickled command; a damaged pickle", "refused and not run; one line")
@promise(
    "Checkpoints",
    "another format; parts missing, added or of another shape",
    "exit 3 with a table of differences; no older checkpoint is taken",
)
@without("torch.load", load_all, only="command")
@without("unet3d.run.checkpoint.FORMAT", checkpoint.FORMAT + 1, only="another")
@pytest.mark.parametrize(
    ("content", "said"),
    [
        (lambda folder: {"format": checkpoint.FORMAT, "model": Payload(folder / "ran")}, "not loaded"),
        (lambda folder: {"format": checkpoint.FORMAT + 1}, rf"{checkpoint.FORMAT + 1}\b.*\b{checkpoint.FORMAT}\b"),
        (lambda folder: [1, 2], "format"),
        (lambda folder: {"model": {}}, "format"),
    ],
    ids=["command", "another format", "list", "no format"],
)
def test_a_strangers_file_is_refused_and_not_run_but_not_called_damaged(
    tmp_path: Path, content: Callable[[Path], object], said: str
) -> None:
    torch.save(content(tmp_path), tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match=rf"x\.pt: .*{said}") as caught:
        checkpoint.load_checkpoint(tmp_path / "x.pt")
    assert not isinstance(caught.value, DamagedCheckpoint), "no older one is taken instead"
    assert not (tmp_path / "ran").exists()


@promise("Checkpoints", "a missing file, a folder; a place that is a file, a link or not writable", "one line")
@without("pathlib.Path.is_file", yes)
def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    for load_it in (checkpoint.load_checkpoint, unet3d.load):
        with pytest.raises(MissingCheckpoint, match=r"missing\.pt: no such file; "):
            load_it(tmp_path / "missing.pt")
    with pytest.raises(CheckpointError, match=rf"{re.escape(str(tmp_path))}: .*best\.pt"):
        checkpoint.load_checkpoint(tmp_path)


DIFFERENCES = """\
a.pt: 4 tensors do not fit the model
  tensor    checkpoint  model
  0.bias    -           2
  0.weight  -           2x2
  1.weight  3x2         2x2
  extra     scalar      -"""


@promise("Checkpoints", "another format; parts missing ...")
@without("unet3d.run.checkpoint.refuse_misfit", nothing)
def test_all_differences_are_counted_and_ten_are_shown() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(7)))
    weights = {name: value for name, value in model.state_dict().items() if not name.startswith("0")}
    weights |= {"1.weight": torch.zeros(3, 2), "extra": torch.zeros(())}
    with pytest.raises(CheckpointError) as caught:
        checkpoint.refuse_misfit(model, weights, Path("a.pt"))
    assert str(caught.value) == DIFFERENCES
    with pytest.raises(CheckpointError, match=r"a\.pt: 14 (.*\n){12} *and 4 more$"):
        checkpoint.refuse_misfit(model, {}, Path("a.pt"))

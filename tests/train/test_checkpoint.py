"""Checkpoints keep what was saved, notice damage, run nothing, and say in full what does not fit."""

import re
import zipfile
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
    """A saved checkpoint."""
    checkpoint.save_checkpoint(tmp_path / LAST, STATE)
    return tmp_path / LAST


def test_what_is_loaded_is_what_was_saved(path: Path) -> None:
    found = checkpoint.load_checkpoint(path)
    assert found["step"] == 3 and torch.equal(found["model"]["w"], STATE["model"]["w"])
    assert [p.name for p in path.parent.iterdir()] == [LAST]


def test_the_previous_checkpoint_is_kept(path: Path) -> None:
    for step in (4, 5):
        checkpoint.save_checkpoint(path, {"step": step}, path.with_name(PREVIOUS))
    assert [checkpoint.load_checkpoint(path.with_name(name))["step"] for name in (LAST, PREVIOUS)] == [5, 4]
    assert {found.name for found in path.parent.iterdir()} == {LAST, PREVIOUS}


def test_saving_copies_no_tensor(tmp_path: Path) -> None:
    """So a run that fits does not run out of memory as it saves."""
    model = torch.nn.Conv3d(4, 4, 3)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 4, 4, 4, 4)).sum().backward()
    optimizer.step()
    ledger = Ledger()
    ledger.count([*model.parameters(), *(p.grad for p in model.parameters() if p.grad is not None)])
    ledger.count([list(state.values()) for state in optimizer.state.values()])
    before = len(ledger.storages)
    with ledger:
        checkpoint.save_checkpoint(tmp_path / LAST, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    assert len(ledger.storages) == before


@promise("checkpoints and run folders", "damage is noticed ...")
@promise(
    "Checkpoints",
    "a file cut to 0, 10, 50 or 99 %",
    "the previous checkpoint is taken with a warning, and survives the next save; exit 3 if none is whole",
)
@without("unet3d.run.checkpoint.DamagedCheckpoint", CheckpointError, only="0.5")
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.99])
def test_a_truncated_file_is_refused(path: Path, share: float) -> None:
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    with pytest.raises(DamagedCheckpoint, match=r"last\.pt"):
        checkpoint.load_checkpoint(path)


def entry_of_weights(path: Path) -> str:
    """Return the name of the archive's entry that holds the weights."""
    with zipfile.ZipFile(path) as archive:
        (entry,) = (entry for entry in archive.infolist() if entry.file_size == STATE["model"]["w"].nbytes)
    return entry.filename


@promise("checkpoints and run folders", "damage is noticed")
@promise("Checkpoints", "one bit flipped", "noticed by its checksum; torch alone would load it")
@without("zipfile.ZipFile.testzip", nothing)
def test_one_flipped_bit_is_refused_though_torch_would_load_it(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[content.find(torch.tensor(500.0).numpy().tobytes())] ^= 1
    path.write_bytes(content)
    assert not torch.equal(torch.load(path, weights_only=True)["model"]["w"], STATE["model"]["w"])
    entry = entry_of_weights(path)
    with pytest.raises(DamagedCheckpoint, match=rf"last\.pt: .*{re.escape(entry)}"):
        checkpoint.load_checkpoint(path)


@promise("Checkpoints", "a file cut to ...")
@pytest.mark.parametrize("damage", ["cut", "bit", "packed", "empty", "gone"])
def test_a_damaged_checkpoint_is_replaced_by_the_previous_one(damage: str, path: Path) -> None:
    checkpoint.save_checkpoint(path, STATE | {"step": 4}, path.with_name(PREVIOUS))
    content = bytearray(path.read_bytes())
    method = content.index(b"PK\x01\x02") + 10  # of compression
    content[method if damage == "packed" else len(content) // 2] ^= 8
    path.write_bytes({"cut": content[:-9], "bit": content, "packed": content}.get(damage, b""))
    if damage == "gone":
        path.unlink()
    found, (wrong,) = checkpoint.load_any(path.parent, CHECKPOINTS)
    assert found["step"] == 3 and str(path) in wrong
    path.with_name(PREVIOUS).write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"last\.pt.*previous\.pt.*best\.pt"):
        checkpoint.load_any(path.parent, CHECKPOINTS)


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
@without("torch.load", load_all)
def test_a_pickled_command_is_refused_and_not_run(tmp_path: Path) -> None:
    torch.save({"format": 1, "model": Payload(tmp_path / "ran")}, tmp_path / "evil.pt")
    with pytest.raises(CheckpointError, match=r"evil\.pt") as caught:
        checkpoint.load_checkpoint(tmp_path / "evil.pt")
    assert not isinstance(caught.value, DamagedCheckpoint), "no older one is taken instead"
    assert not (tmp_path / "ran").exists()


@promise(
    "Checkpoints",
    "another format; parts missing, added or of another shape",
    "exit 3 with a table of differences; no older checkpoint is taken",
)
@without("unet3d.run.checkpoint.FORMAT", checkpoint.FORMAT + 1, only="another")
@pytest.mark.parametrize(
    ("content", "tokens"),
    [
        pytest.param(
            {"format": checkpoint.FORMAT + 1},
            rf"\bformat {checkpoint.FORMAT + 1}\b.*\bformat {checkpoint.FORMAT}\b",
            id="another",
        ),
        pytest.param([1, 2], "format", id="list"),
        pytest.param({"model": {}}, "format", id="no format"),
    ],
)
def test_another_format_or_a_strangers_file_is_refused_but_not_called_damaged(
    tmp_path: Path, content: object, tokens: str
) -> None:
    torch.save(content, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match=rf"x\.pt: .*{tokens}") as caught:
        checkpoint.load_checkpoint(tmp_path / "x.pt")
    assert not isinstance(caught.value, DamagedCheckpoint)


@promise("Checkpoints", "a missing file, a folder; a place that is a file, a link or not writable", "one line")
@without("pathlib.Path.is_file", yes)
def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(MissingCheckpoint, match=r"missing\.pt: no such file; "):
        checkpoint.load_checkpoint(tmp_path / "missing.pt")
    with pytest.raises(MissingCheckpoint, match=r"missing\.pt: no such file; "):
        unet3d.load(tmp_path / "missing.pt")
    with pytest.raises(CheckpointError, match=rf"{re.escape(str(tmp_path))}: .*best\.pt"):
        checkpoint.load_checkpoint(tmp_path)


@promise("Checkpoints", "another format; parts missing ...")
@without("unet3d.run.checkpoint.refuse_misfit", nothing)
def test_all_differences_are_counted_and_ten_are_shown() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(7)))
    weights = {name: value for name, value in model.state_dict().items() if not name.startswith("0")}
    weights |= {"1.weight": torch.zeros(3, 2), "extra": torch.zeros(())}
    with pytest.raises(CheckpointError) as caught:
        checkpoint.refuse_misfit(model, weights, Path("a.pt"))
    head, _, *rows = str(caught.value).splitlines()
    assert head.startswith("a.pt: 4 ")
    assert [line.split() for line in rows] == [
        ["0.bias", "-", "2"],
        ["0.weight", "-", "2x2"],
        ["1.weight", "3x2", "2x2"],
        ["extra", "scalar", "-"],
    ]
    with pytest.raises(CheckpointError) as caught:
        checkpoint.refuse_misfit(model, {}, Path("a.pt"))
    head, _, *rows, rest = str(caught.value).splitlines()
    assert head.startswith("a.pt: 14 ") and len(rows) == 10 and " 4 " in rest

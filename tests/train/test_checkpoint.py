"""Snapshots survive kills, notice damage, and run nothing."""

from pathlib import Path

import pytest
import torch

from unet3d.errors import DamagedSnapshot, SnapshotError
from unet3d.memory.ledger import Ledger
from unet3d.train import checkpoint

STATE = {"model": {"w": torch.arange(1000.0)}, "step": 3}


def test_round_trip(tmp_path: Path) -> None:
    checkpoint.save_snapshot(tmp_path / "last.pt", STATE)
    found = checkpoint.load_snapshot(tmp_path / "last.pt")
    assert found["step"] == 3 and torch.equal(found["model"]["w"], STATE["model"]["w"])
    assert [p.name for p in tmp_path.iterdir()] == ["last.pt"]


def test_saving_copies_no_tensor(tmp_path: Path) -> None:
    """So a run that fits does not run out of memory as it saves."""
    model = torch.nn.Conv3d(4, 4, 3)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 4, 4, 4, 4)).sum().backward()
    optimizer.step()
    ledger = Ledger()
    ledger.adopt([*model.parameters(), *(p.grad for p in model.parameters() if p.grad is not None)])
    ledger.adopt(value for state in optimizer.state.values() for value in state.values())
    before = len(ledger.storages)
    with ledger:
        checkpoint.save_snapshot(
            tmp_path / "last.pt", {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        )
    assert len(ledger.storages) == before


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.99])
def test_c1_a_truncated_file_is_refused(tmp_path: Path, share: float) -> None:
    path = tmp_path / "last.pt"
    checkpoint.save_snapshot(path, STATE)
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    with pytest.raises(SnapshotError, match=r"last\.pt"):
        checkpoint.load_snapshot(path)


def test_c2_one_flipped_bit_is_refused_though_torch_would_load_it(tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    checkpoint.save_snapshot(path, STATE)
    content = bytearray(path.read_bytes())
    at = content.find(torch.tensor(500.0).numpy().tobytes())
    content[at] ^= 1
    path.write_bytes(content)
    assert not torch.equal(torch.load(path, weights_only=True)["model"]["w"], STATE["model"]["w"])
    with pytest.raises(SnapshotError, match="checksum"):
        checkpoint.load_snapshot(path)


class Payload:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return Path.touch, (self.path,)


def test_c3_a_pickled_command_is_refused_and_not_run(tmp_path: Path) -> None:
    torch.save({"format": 1, "model": Payload(tmp_path / "ran")}, tmp_path / "evil.pt")
    with pytest.raises(SnapshotError, match="not loaded") as caught:
        checkpoint.load_snapshot(tmp_path / "evil.pt")
    assert not isinstance(caught.value, DamagedSnapshot), "no older one is taken instead"
    assert not (tmp_path / "ran").exists()


def test_another_format_or_a_stranger_is_refused(tmp_path: Path) -> None:
    for content in ({"format": 99}, [1, 2]):
        torch.save(content, tmp_path / "x.pt")
        with pytest.raises(SnapshotError, match="format"):
            checkpoint.load_snapshot(tmp_path / "x.pt")
    with pytest.raises(SnapshotError, match=r"missing\.pt"):
        checkpoint.load_snapshot(tmp_path / "missing.pt")


@pytest.mark.parametrize(
    "weights", [{}, {"weight": torch.zeros(3)}, {"weight": torch.zeros(2, 2), "extra": torch.zeros(1)}]
)
def test_weights_that_do_not_fit_are_named(weights: dict) -> None:
    model = torch.nn.Linear(2, 2, bias=False)
    with pytest.raises(SnapshotError, match=r"weight|extra"):
        checkpoint.load_weights(model, weights, Path("a.pt"))

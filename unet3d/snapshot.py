"""Snapshots: all of a run's state as tensors and plain values, written so that a kill leaves the old file or the new.

Read with `weights_only=True`, always: a snapshot may come from a stranger.
"""

import os
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from unet3d.errors import SnapshotError

FORMAT = 2


def save(path: Path, state: dict[str, Any]) -> None:
    """Write `state` beside `path`, flush it to the disk, then put it in place in one move."""
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        torch.save({"format": FORMAT, **state}, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def load(path: Path) -> dict[str, Any]:
    """A snapshot's state. Raises SnapshotError where it is damaged, foreign, or of another format."""
    if path.is_dir():
        raise SnapshotError(f"{path}: is a folder; give a snapshot, RUN/checkpoints/best.pt or last.pt")
    try:
        # torch does not check the archive's checksums: one flipped bit would load in silence.
        with zipfile.ZipFile(path) as archive:
            _refuse_bombs(archive, path)
            damaged = archive.testzip()
        if damaged:
            raise SnapshotError(f"{path}: damaged ({damaged} fails its checksum); use another snapshot")
        state: Any = torch.load(path, map_location="cpu", weights_only=True)
    except SnapshotError:
        raise
    except Exception as error:  # a pickle that is no pickle may raise anything
        reason = (str(error) or repr(error)).splitlines()[0]
        raise SnapshotError(f"{path}: not a readable snapshot ({reason}); use another snapshot") from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise SnapshotError(f"{path}: not a unet3d snapshot of format {FORMAT}")
    return state


def _refuse_bombs(archive: zipfile.ZipFile, path: Path) -> None:
    """Raise SnapshotError for contents that are larger than the file: torch stores them as they are, one by one."""
    entries = archive.infolist()
    packed = any(entry.compress_type != zipfile.ZIP_STORED for entry in entries)
    if packed or sum(entry.file_size for entry in entries) > path.stat().st_size:
        raise SnapshotError(f"{path}: holds more than its size; torch.save writes no such file, use another snapshot")


def load_weights(model: nn.Module, weights: dict[str, torch.Tensor], path: Path) -> None:
    """Put weights into the model. Raises SnapshotError with the first difference in names or shapes."""
    refuse_misfit(model, weights, path)
    model.load_state_dict(weights)


def refuse_misfit(model: nn.Module, weights: dict[str, torch.Tensor], path: Path) -> None:
    """Raise SnapshotError with the first difference between the model's names and shapes and the weights'."""
    if not all(isinstance(value, torch.Tensor) for value in weights.values()):
        raise SnapshotError(f"{path}: its weights are not all tensors")
    mine = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    theirs = {name: tuple(value.shape) for name, value in weights.items()}
    for name in sorted(mine.keys() | theirs.keys()):
        if mine.get(name) != theirs.get(name):
            raise SnapshotError(f"{path}: does not fit the model: {name} is {theirs.get(name)}, not {mine.get(name)}")

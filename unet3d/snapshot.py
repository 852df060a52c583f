"""Snapshots: all of a run's state as tensors and plain values, written so that a kill leaves the old file or the new.

Read with `weights_only=True`, always: a snapshot may come from a stranger.
"""

import os
import pickle
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
            damaged = archive.testzip()
        if damaged:
            raise SnapshotError(f"{path}: damaged ({damaged} fails its checksum); use another snapshot")
        state: Any = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, zipfile.BadZipFile, pickle.UnpicklingError, RuntimeError, EOFError) as error:
        reason = str(error).splitlines()[0]
        raise SnapshotError(f"{path}: not a readable snapshot ({reason}); use another snapshot") from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise SnapshotError(f"{path}: not a unet3d snapshot of format {FORMAT}")
    return state


def load_weights(model: nn.Module, weights: dict[str, torch.Tensor], path: Path) -> None:
    """Put weights into the model. Raises SnapshotError with the first difference in names or shapes."""
    if not all(isinstance(value, torch.Tensor) for value in weights.values()):
        raise SnapshotError(f"{path}: its weights are not all tensors")
    mine = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    theirs = {name: tuple(value.shape) for name, value in weights.items()}
    for name in sorted(mine.keys() | theirs.keys()):
        if mine.get(name) != theirs.get(name):
            raise SnapshotError(f"{path}: does not fit the model: {name} is {theirs.get(name)}, not {mine.get(name)}")
    model.load_state_dict(weights)

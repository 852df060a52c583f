"""Snapshots on disk: a run's state as tensors and plain values. Read with `weights_only`: some are a stranger's."""

import pickle
import shutil
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from unet3d.errors import DamagedSnapshot, NotSaved, SnapshotError, escaped, is_disk_full
from unet3d.files import replacing
from unet3d.types import mib

FORMAT = 2
SHOWN = 10  # differences in an error


def save_snapshot(path: Path, state: dict[str, Any], previous: Path | None = None) -> None:
    """Write `state` to `path`, whole or not at all; what was there moves to `previous`. Raises NotSaved."""
    try:
        with replacing(path, previous) as file:
            torch.save({"format": FORMAT, **state}, file)
    except OSError as error:
        advice = f"; {_space(path.parent, state)}" if is_disk_full(error) else ""
        raise NotSaved(f"{path}: not saved ({error.strerror}){advice}") from error


def _space(folder: Path, state: dict[str, Any]) -> str:
    """The space that a snapshot needs, nearly all of it for its tensors' storages, and the space there is."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in _tensors(state)}
    try:
        free = f"{mib(shutil.disk_usage(folder).free)} MiB"
    except OSError:
        free = "nothing"
    return f"it needs {mib(sum(storages.values()))} MiB, {free} is free there: make room"


def _tensors(state: object) -> Iterator[Tensor]:
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, Mapping | list | tuple):
        for item in state.values() if isinstance(state, Mapping) else state:
            yield from _tensors(item)


def load_snapshot(path: Path) -> dict[str, Any]:
    """A snapshot's state. Raises DamagedSnapshot, or SnapshotError where it is foreign or of another format."""
    if path.is_dir():
        raise SnapshotError(f"{path}: is a folder; give a snapshot, RUN/checkpoints/best.pt or last.pt")
    try:
        _refuse_damage(path)
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except SnapshotError:
        raise
    except pickle.UnpicklingError as error:
        raise SnapshotError(f"{path}: holds more than tensors and plain values; it is not loaded") from error
    except Exception as error:  # bytes that are not a pickle may raise anything
        is_damage = isinstance(error, OSError | zipfile.BadZipFile | RuntimeError | EOFError)
        reason = getattr(error, "strerror", None) or (str(error) or repr(error)).splitlines()[0]
        kind = DamagedSnapshot if is_damage else SnapshotError
        raise kind(f"{path}: not a readable snapshot ({reason})") from error
    found = state.get("format") if isinstance(state, dict) else None
    if not isinstance(found, int):
        raise SnapshotError(f"{path}: not a unet3d snapshot: it names no format")
    if found != FORMAT:
        age, remedy = ("a newer", "update unet3d") if found > FORMAT else ("an older", "use that version, or retrain")
        raise SnapshotError(f"{path}: of {age} unet3d (format {found}; this one reads format {FORMAT}); {remedy}")
    return state


def _refuse_damage(path: Path) -> None:
    """Raise DamagedSnapshot for contents that fail their checksums, or that are larger than the file."""
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
        is_packed = any(entry.compress_type != zipfile.ZIP_STORED for entry in entries)
        if is_packed or sum(entry.file_size for entry in entries) > path.stat().st_size:  # torch packs nothing
            raise DamagedSnapshot(f"{path}: holds more than its size, unlike torch.save's files; use another snapshot")
        if damaged := archive.testzip():  # torch would load a flipped bit without an error
            raise DamagedSnapshot(f"{path}: damaged ({escaped(damaged)} fails its checksum)")


def load_any(folder: Path, names: tuple[str, ...]) -> tuple[dict[str, Any], list[str]]:
    """The first of these snapshots that is whole, and the errors of those before it. Raises SnapshotError."""
    wrong: list[str] = []
    for name in names:
        try:
            return load_snapshot(folder / name), wrong
        except DamagedSnapshot as error:
            wrong.append(str(error))
    raise SnapshotError("no usable snapshot: " + "; ".join(wrong))


def load_weights(model: nn.Module, weights: dict[str, Tensor], path: Path) -> None:
    """Put weights into the model. Raises SnapshotError with the differences in names and shapes."""
    refuse_misfit(model, weights, path)
    model.load_state_dict(weights)


def refuse_misfit(model: nn.Module, weights: dict[str, Tensor], path: Path) -> None:
    """Raise SnapshotError with the differences between the model's names and shapes and the weights'."""
    if not all(isinstance(v, Tensor) and v.layout is torch.strided and not v.is_meta for v in weights.values()):
        raise SnapshotError(f"{path}: its weights are not all tensors with their numbers")
    mine, theirs = _shapes(model.state_dict()), _shapes(weights)
    rows = [(escaped(name), theirs.get(name, "-"), mine.get(name, "-")) for name in sorted(mine.keys() | theirs.keys())]
    rows = [row for row in rows if row[1] != row[2]]
    if rows:
        shown = [("tensor", "snapshot", "model"), *rows[:SHOWN]]
        widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in shown]
        lines += [f"and {len(rows) - SHOWN} more"] * (len(rows) > SHOWN)
        raise SnapshotError("\n  ".join([f"{path}: {len(rows)} tensors do not fit the model", *lines]))


def _shapes(weights: Mapping[str, Tensor]) -> dict[str, str]:
    return {name: "x".join(map(str, value.shape)) or "scalar" for name, value in weights.items()}

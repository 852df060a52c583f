"""Checkpoint files: tensors and plain values, written whole or not at all, and read with distrust.

A file may be a stranger's: it is loaded with `weights_only`, its checksums are compared first (torch loads a flipped
bit without an error), and it may describe no more than its own size.
"""

import pickle
import shutil
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from unet3d.base.errors import (
    CheckpointError,
    DamagedCheckpoint,
    MissingCheckpoint,
    NotSaved,
    escaped,
    is_disk_full,
    make_room,
)
from unet3d.base.files import replacing

FORMAT = 2
DIFFERENCES_SHOWN = 10  # tensors in an error
DEEPEST = 20  # levels of lists and dictionaries
# How an entry of a zip file begins, and the records at the file's end, the first two for large files.
LOCAL_HEADER = b"PK\3\4"
ZIP64_END = struct.Struct("<4sQHHIIQQQQ")
ZIP64_LOCATOR = struct.Struct("<4sIQI")
ZIP_END = struct.Struct("<4sHHHHIIH")


def save_checkpoint(path: Path, state: dict[str, Any], previous: Path | None = None) -> None:
    """Write `state` to `path`, whole or not at all; what was there moves to `previous`. Raises NotSaved."""
    try:
        with replacing(path, previous) as file:
            torch.save({"format": FORMAT, **state}, file)
    except (OSError, RuntimeError) as error:
        # torch closes its archive even when a write has failed, and then raises its own error over that of the disk
        cause = error if isinstance(error, OSError) else error.__context__
        if not isinstance(cause, OSError):
            raise
        advice = ""
        if is_disk_full(cause):
            advice = f"; it needs {_storage_bytes(state):,} bytes, {_free_space(path.parent)} there: {make_room(cause)}"
        raise NotSaved(f"{path}: not saved ({cause.strerror}){advice}") from error


def _storage_bytes(state: dict[str, Any]) -> int:
    """Return the bytes of the tensors' storages, which are nearly all of a checkpoint."""
    storages = [leaf.untyped_storage() for leaf in tree_leaves(state) if isinstance(leaf, Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _free_space(folder: Path) -> str:
    try:
        return f"{shutil.disk_usage(folder).free:,} bytes are free"
    except OSError:
        return "nothing is free"


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Return a checkpoint's state, on the CPU.

    Raises MissingCheckpoint, DamagedCheckpoint, or CheckpointError where the file is foreign or of another format.
    """
    if not path.exists():
        raise MissingCheckpoint(f"{path}: no such file; give a checkpoint, RUN/checkpoints/best.pt or last.pt")
    if not path.is_file():  # a folder; a pipe, which would be waited for
        raise CheckpointError(f"{path}: is not a file; give a checkpoint, RUN/checkpoints/best.pt or last.pt")
    try:
        _refuse_damage(path)
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except CheckpointError:
        raise
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"{path}: holds more than tensors and plain values; it is not loaded") from error
    except Exception as error:  # bytes that are not a pickle may raise anything
        is_damage = isinstance(error, OSError | zipfile.BadZipFile | RuntimeError | EOFError)
        kind = DamagedCheckpoint if is_damage else CheckpointError
        raise kind(f"{path}: not a readable checkpoint ({_first_line(error)})") from error
    _refuse_other_format(state, path)
    _refuse_odd_values(state, path)
    return state


def _first_line(error: Exception) -> str:
    system_message = getattr(error, "strerror", None)
    text = system_message or str(error) or repr(error)
    return str(text.splitlines()[0])


def _refuse_other_format(state: object, path: Path) -> None:
    number = state.get("format") if isinstance(state, dict) else None
    if not isinstance(number, int):
        raise CheckpointError(f"{path}: not a unet3d checkpoint: it names no format")
    if number != FORMAT:
        raise CheckpointError(f"{path}: of another version of unet3d (format {number}; this one reads format {FORMAT})")


def _refuse_odd_values(state: dict[str, Any], path: Path) -> None:
    """Raise CheckpointError for values that are not plain, or that are more than the file has bytes.

    A pickle can refer to one value from many places, so that walking through all of them would never end.
    """
    size = path.stat().st_size
    budget = size
    waiting: list[tuple[Any, int]] = [(state, 0)]
    while waiting:
        value, depth = waiting.pop()
        budget -= 1
        if isinstance(value, str):
            budget -= len(value)
        if budget < 0 or depth > DEEPEST:
            raise CheckpointError(f"{path}: describes more than it holds; it is not loaded")
        if isinstance(value, dict):
            waiting += [(item, depth + 1) for item in (*value, *value.values())]
        elif isinstance(value, list | tuple):
            waiting += [(item, depth + 1) for item in value]
        elif isinstance(value, Tensor):
            if value.numel() * value.element_size() > size:  # also of a sparse tensor
                raise CheckpointError(f"{path}: its tensors are not all there: they are larger than the file")
        elif not _is_scalar(value):
            raise CheckpointError(f"{path}: holds more than tensors and plain values; it is not loaded")


def _is_scalar(value: object) -> bool:
    if isinstance(value, int):
        return abs(value) < 2**63
    return isinstance(value, str | float | None)


def _refuse_damage(path: Path) -> None:
    """Raise DamagedCheckpoint for contents that fail their checksums, or that are larger than the file."""
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
        is_packed = any(entry.compress_type != zipfile.ZIP_STORED for entry in entries)  # torch packs nothing
        unpacked_bytes = sum(entry.file_size for entry in entries)
        if is_packed or unpacked_bytes > path.stat().st_size:
            problem = "holds more than its size, unlike torch.save's files"
            raise DamagedCheckpoint(f"{path}: {problem}; use another checkpoint")
        if not has_one_directory(path):
            problem = "its zip has another layout than torch.save's, which torch may read as other contents"
            raise DamagedCheckpoint(f"{path}: {problem}; use another checkpoint")
        damaged = archive.testzip()  # torch would load a flipped bit without an error
        if damaged:
            raise DamagedCheckpoint(f"{path}: damaged ({escaped(damaged)} fails its checksum)")


def has_one_directory(path: Path) -> bool:
    """Return whether torch and `zipfile` find the same list of contents in a zip file that is not empty.

    Where its end does not say exactly where that list lies, `zipfile` looks for it and torch does not. A file that does
    not begin with its first entry is no zip file for torch, which then reads the format of its old versions.
    """
    tail_size = ZIP64_END.size + ZIP64_LOCATOR.size + ZIP_END.size
    with path.open("rb") as file:
        begins_with_entry = file.read(len(LOCAL_HEADER)) == LOCAL_HEADER
        size = file.seek(0, 2)
        file.seek(max(0, size - tail_size))
        tail = file.read().rjust(tail_size, b"\0")
    mark, _, _, _, _, length, offset, comment = ZIP_END.unpack(tail[-ZIP_END.size :])
    if not begins_with_entry or mark != b"PK\5\6" or comment != 0:
        return False
    list_end = size - ZIP_END.size
    locator = tail[ZIP64_END.size : -ZIP_END.size]
    if locator.startswith(b"PK\6\7"):
        list_end -= ZIP64_LOCATOR.size + ZIP64_END.size
        _, _, zip64_place, _ = ZIP64_LOCATOR.unpack(locator)
        mark, _, _, _, _, _, _, _, length, offset = ZIP64_END.unpack(tail[: ZIP64_END.size])
        if mark != b"PK\6\6" or zip64_place != list_end:
            return False
    return bool(length + offset == list_end)


def load_any(folder: Path, names: tuple[str, ...]) -> tuple[dict[str, Any], list[str]]:
    """Return the state of the first of these checkpoints that is whole, and the errors of those before it.

    Raises CheckpointError where none is whole.
    """
    problems: list[str] = []
    for name in names:
        try:
            return load_checkpoint(folder / name), problems
        except (DamagedCheckpoint, MissingCheckpoint) as error:
            problems.append(str(error))
    raise CheckpointError("no usable checkpoint: " + "; ".join(problems))


def load_weights(model: nn.Module, weights: dict[str, Tensor], path: Path) -> None:
    """Put weights into the model. Raises CheckpointError with the differences in names and shapes."""
    refuse_misfit(model, weights, path)
    model.load_state_dict(weights)


def refuse_misfit(model: nn.Module, weights: dict[str, Tensor], path: Path) -> None:
    """Raise CheckpointError with the differences between the model's names and shapes and the weights'."""
    _refuse_no_numbers(weights, path)
    model_shapes = _shapes(model.state_dict())
    file_shapes = _shapes(weights)
    rows = []
    for name in sorted(model_shapes.keys() | file_shapes.keys()):
        in_file = file_shapes.get(name, "-")
        in_model = model_shapes.get(name, "-")
        if in_file != in_model:
            rows.append((escaped(name), in_file, in_model))
    if rows:
        lines = [f"{path}: {len(rows)} tensors do not fit the model"]
        lines += _table([("tensor", "checkpoint", "model"), *rows[:DIFFERENCES_SHOWN]])
        if len(rows) > DIFFERENCES_SHOWN:
            lines.append(f"and {len(rows) - DIFFERENCES_SHOWN} more")
        raise CheckpointError("\n  ".join(lines))
    refuse_non_finite(weights, path)


def _table(rows: list[tuple[str, str, str]]) -> list[str]:
    """Return a line for each row, with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return lines


def fitting(model: nn.Module, weights: dict[str, Tensor], path: Path) -> dict[str, Tensor]:
    """Return the weights whose name, shape and type a tensor of the model has. Raises CheckpointError for odd ones."""
    _refuse_no_numbers(weights, path)
    model_shapes = _shapes(model.state_dict())
    file_shapes = _shapes(weights)
    loadable = {name: value for name, value in weights.items() if model_shapes.get(name) == file_shapes[name]}
    refuse_non_finite(loadable, path)
    return loadable


def _refuse_no_numbers(weights: Mapping[str, Tensor], path: Path) -> None:
    if not all(is_plain(value) for value in weights.values()):
        raise CheckpointError(f"{path}: its weights are not all tensors with their numbers")


def is_plain(value: object) -> bool:
    """Return whether a value of a file is a tensor with a number of its own at each index, as weights are."""
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return False
    return not (value.is_meta or value.is_nested or value.is_quantized)


def refuse_non_finite(weights: Mapping[str, Tensor], path: Path) -> None:
    """Raise CheckpointError for numbers that no training can begin or go on with."""
    for name, value in weights.items():
        if not is_finite(value):
            raise CheckpointError(f"{path}: {name} holds NaN or infinite numbers; take an earlier checkpoint")


def is_finite(values: Tensor) -> bool:
    """Return whether all numbers of a tensor are finite."""
    return bool(torch.isfinite(values).all())


def _shapes(weights: Mapping[str, Tensor]) -> dict[str, str]:
    """Return each tensor's shape as `8x4x3x3x3`, followed by its type where that is not float32."""
    shapes = {}
    for name, value in weights.items():
        size = "x".join(map(str, value.shape)) or "scalar"
        dtype = str(value.dtype).removeprefix("torch.")
        shapes[name] = size if dtype == "float32" else f"{size} {dtype}"
    return shapes

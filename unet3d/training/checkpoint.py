"""Checkpoints on disk: a run's state as tensors and plain values. Read with `weights_only`: some are a stranger's."""

import pickle
import shutil
import struct
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

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
SHOWN = 10  # differences in an error
DEEPEST = 20  # levels of lists and dictionaries
# Of a zip file: how an entry begins, and the records at its end, the first two for large files.
LOCAL = b"PK\3\4"
END64 = struct.Struct("<4sQHHIIQQQQ")
LOCATOR = struct.Struct("<4sIQI")
END = struct.Struct("<4sHHHHIIH")


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
        advice = f"; it needs {_bytes(state):,} bytes, {_free(path.parent)} there: {make_room(cause)}"
        advice = advice if is_disk_full(cause) else ""
        raise NotSaved(f"{path}: not saved ({cause.strerror}){advice}") from error


def _bytes(state: dict[str, Any]) -> int:
    """Of the tensors' storages, nearly all of what a checkpoint needs."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in _tensors(state)}.values())


def _free(folder: Path) -> str:
    try:
        return f"{shutil.disk_usage(folder).free:,} bytes are free"
    except OSError:
        return "nothing is free"


def _tensors(state: object) -> Iterator[Tensor]:
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, Mapping | list | tuple):
        for item in state.values() if isinstance(state, Mapping) else state:
            yield from _tensors(item)


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Return a checkpoint's state.

    Raises MissingCheckpoint, DamagedCheckpoint, or CheckpointError where it is foreign or of another format.
    """
    if not path.exists():
        raise MissingCheckpoint(f"{path}: no such file; give a checkpoint, RUN/checkpoints/best.pt or last.pt")
    if path.exists() and not path.is_file():  # a folder; a pipe, which would be waited for
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
        reason = getattr(error, "strerror", None) or (str(error) or repr(error)).splitlines()[0]
        kind = DamagedCheckpoint if is_damage else CheckpointError
        raise kind(f"{path}: not a readable checkpoint ({reason})") from error
    found = state.get("format") if isinstance(state, dict) else None
    if not isinstance(found, int):
        raise CheckpointError(f"{path}: not a unet3d checkpoint: it names no format")
    if found != FORMAT:
        age, remedy = ("a newer", "update unet3d") if found > FORMAT else ("an older", "use that version, or retrain")
        raise CheckpointError(f"{path}: of {age} unet3d (format {found}; this one reads format {FORMAT}); {remedy}")
    _refuse_odd_values(state, path)
    return state


def _refuse_odd_values(state: dict[str, Any], path: Path) -> None:
    """Raise CheckpointError for values that are not plain, and for more of them than the file has bytes.

    What a pickle holds once may stand in many places: whoever walks through all of them would not come to an end.
    """
    size = left = path.stat().st_size
    waiting: list[tuple[Any, int]] = [(state, 0)]
    while waiting:
        value, depth = waiting.pop()
        left -= 1 + len(value) if isinstance(value, str) else 1
        if left < 0 or depth > DEEPEST:
            raise CheckpointError(f"{path}: describes more than it holds; it is not loaded")
        if isinstance(value, dict | list | tuple):
            items = [*value, *value.values()] if isinstance(value, dict) else value
            waiting += [(item, depth + 1) for item in items]
        elif isinstance(value, Tensor):
            if value.numel() * value.element_size() > size:  # of one that is sparse as well
                raise CheckpointError(f"{path}: its tensors are not all there: they are larger than the file")
        elif not isinstance(value, str | float | None) and not (isinstance(value, int) and abs(value) < 2**63):
            raise CheckpointError(f"{path}: holds more than tensors and plain values; it is not loaded")


def _refuse_damage(path: Path) -> None:
    """Raise DamagedCheckpoint for contents that fail their checksums, or that are larger than the file."""
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
        is_packed = any(entry.compress_type != zipfile.ZIP_STORED for entry in entries)
        if is_packed or sum(entry.file_size for entry in entries) > path.stat().st_size:  # torch packs nothing
            raise DamagedCheckpoint(
                f"{path}: holds more than its size, unlike torch.save's files; use another checkpoint"
            )
        if not has_one_directory(path):
            what = "its zip has another layout than torch.save's, which torch may read as other contents"
            raise DamagedCheckpoint(f"{path}: {what}; use another checkpoint")
        if damaged := archive.testzip():  # torch would load a flipped bit without an error
            raise DamagedCheckpoint(f"{path}: damaged ({escaped(damaged)} fails its checksum)")


def has_one_directory(path: Path) -> bool:
    """Return whether torch and `zipfile` find the same list of contents in a zip file that is not empty.

    Where its end does not say exactly where that list lies, `zipfile` looks for it and torch does not. A file that does
    not begin with its first entry is no zip file for torch, which then reads the format of its old versions.
    """
    with path.open("rb") as file:
        begins = file.read(len(LOCAL)) == LOCAL
        size = file.seek(0, 2)
        file.seek(max(0, size - END.size - LOCATOR.size - END64.size))
        tail = file.read().rjust(END.size + LOCATOR.size + END64.size, b"\0")
    end64, locator, end = (tail[: END64.size], tail[END64.size : -END.size], tail[-END.size :])
    mark, _, _, _, _, length, offset, comment = END.unpack(end)
    if (begins, mark, comment) != (True, b"PK\5\6", 0):
        return False
    behind = size - END.size  # where the list ends
    if locator.startswith(b"PK\6\7"):
        behind -= LOCATOR.size + END64.size
        _, _, place, _ = LOCATOR.unpack(locator)
        mark, _, _, _, _, _, _, _, length, offset = END64.unpack(end64)
        if (mark, place) != (b"PK\6\6", behind):
            return False
    return bool(length + offset == behind)


def load_any(folder: Path, names: tuple[str, ...]) -> tuple[dict[str, Any], list[str]]:
    """The first of these checkpoints that is whole, and the errors of those before it. Raises CheckpointError."""
    wrong: list[str] = []
    for name in names:
        try:
            return load_checkpoint(folder / name), wrong
        except (DamagedCheckpoint, MissingCheckpoint) as error:
            wrong.append(str(error))
    raise CheckpointError("no usable checkpoint: " + "; ".join(wrong))


def load_weights(model: nn.Module, weights: dict[str, Tensor], path: Path) -> None:
    """Put weights into the model. Raises CheckpointError with the differences in names and shapes."""
    refuse_misfit(model, weights, path)
    model.load_state_dict(weights)


def refuse_misfit(model: nn.Module, weights: dict[str, Tensor], path: Path) -> None:
    """Raise CheckpointError with the differences between the model's names and shapes and the weights'."""
    _refuse_no_numbers(weights, path)
    mine, theirs = _shapes(model.state_dict()), _shapes(weights)
    rows = [(escaped(name), theirs.get(name, "-"), mine.get(name, "-")) for name in sorted(mine.keys() | theirs.keys())]
    rows = [row for row in rows if row[1] != row[2]]
    if rows:
        shown = [("tensor", "checkpoint", "model"), *rows[:SHOWN]]
        widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in shown]
        lines += [f"and {len(rows) - SHOWN} more"] * (len(rows) > SHOWN)
        raise CheckpointError("\n  ".join([f"{path}: {len(rows)} tensors do not fit the model", *lines]))
    refuse_non_finite(weights, path)


def fitting(model: nn.Module, weights: dict[str, Tensor], path: Path) -> dict[str, Tensor]:
    """The weights whose name, shape and type a tensor of the model has. Raises CheckpointError for odd ones."""
    _refuse_no_numbers(weights, path)
    mine, theirs = _shapes(model.state_dict()), _shapes(weights)
    found = {name: value for name, value in weights.items() if mine.get(name) == theirs[name]}
    refuse_non_finite(found, path)
    return found


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
    if broken := next((name for name, value in weights.items() if not is_finite(value)), None):
        raise CheckpointError(f"{path}: {broken} holds NaN or infinite numbers; take an earlier checkpoint")


def is_finite(values: Tensor) -> bool:
    """Whether all numbers of a tensor are finite."""
    return bool(torch.isfinite(values).all())


def _shapes(weights: Mapping[str, Tensor]) -> dict[str, str]:
    """`8x4x3x3x3`, and the type where it is not float32."""
    kinds = {name: str(value.dtype).removeprefix("torch.") for name, value in weights.items()}
    sizes = {name: "x".join(map(str, value.shape)) or "scalar" for name, value in weights.items()}
    return {name: size + f" {kinds[name]}" * (kinds[name] != "float32") for name, size in sizes.items()}

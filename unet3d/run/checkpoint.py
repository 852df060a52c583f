"""Checkpoints: files of tensors and plain values, written whole or not at all, read with distrust; networks in them.

A file may be a stranger's: it is loaded with `weights_only`, its checksums are compared first (torch loads a flipped
bit without an error), and it may describe no more than its own size. Then it is checked for what it is used for:
resuming needs a training state (`training_state`), prediction, scoring, publishing and `init=` need trained networks.
Either is refused with CheckpointError, exit code 3, where no run of this package has written it.
"""

import hashlib
import itertools
import pickle
import shutil
import struct
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from unet3d import build
from unet3d.base.errors import (
    CheckpointError,
    DamagedCheckpoint,
    MissingCheckpoint,
    NotSaved,
    UserError,
    escaped,
    is_disk_full,
    make_room,
)
from unet3d.base.files import replacing
from unet3d.base.types import Regions
from unet3d.config import compose
from unet3d.config.schema import Config, Data, Model
from unet3d.data.intensity import Intensity, Seen, checked_intensity

FORMAT = 3
DIFFERENCES_SHOWN = 10  # tensors in an error
DEEPEST = 20  # levels of lists and dictionaries
Split = dict[str, Any]
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
            storages = [leaf.untyped_storage() for leaf in tree_leaves(state) if isinstance(leaf, Tensor)]
            size = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())  # nearly all of it
            free = 0
            with suppress(OSError):
                free = shutil.disk_usage(path.parent).free
            advice = f"; it needs {size:,} bytes, {free:,} bytes are free there: {make_room(cause)}"
        raise NotSaved(f"{path}: not saved ({cause.strerror}){advice}") from error


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
        text = str(getattr(error, "strerror", None) or str(error) or repr(error))
        raise kind(f"{path}: not a readable checkpoint ({text.splitlines()[0]})") from error
    number = state.get("format") if isinstance(state, dict) else None
    if not isinstance(number, int):
        raise CheckpointError(f"{path}: not a unet3d checkpoint: it names no format")
    if number != FORMAT:
        raise CheckpointError(f"{path}: of another version of unet3d (format {number}; this one reads format {FORMAT})")
    _refuse_odd_values(state, path)
    return state


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
        elif not (isinstance(value, str | float | None) or (isinstance(value, int) and abs(value) < 2**63)):
            raise CheckpointError(f"{path}: holds more than tensors and plain values; it is not loaded")


def _refuse_damage(path: Path) -> None:
    """Raise DamagedCheckpoint for contents that fail their checksums, or that are larger than the file."""
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
        is_packed = any(entry.compress_type != zipfile.ZIP_STORED for entry in entries)  # torch packs nothing
        unpacked_bytes = sum(entry.file_size for entry in entries)
        problem = ""
        if is_packed or unpacked_bytes > path.stat().st_size:
            problem = "holds more than its size, unlike torch.save's files; use another checkpoint"
        elif not has_one_directory(path):
            problem = "its zip has another layout than torch.save's, which torch may read as other contents"
            problem += "; use another checkpoint"
        elif damaged := archive.testzip():  # torch would load a flipped bit without an error
            problem = f"damaged ({escaped(damaged)} fails its checksum)"
    if problem:
        raise DamagedCheckpoint(f"{path}: {problem}")


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
    mark, *_, length, offset, comment = ZIP_END.unpack(tail[-ZIP_END.size :])
    if not begins_with_entry or mark != b"PK\5\6" or comment != 0:
        return False
    list_end = size - ZIP_END.size
    locator = tail[ZIP64_END.size : -ZIP_END.size]
    if locator.startswith(b"PK\6\7"):
        list_end -= ZIP64_LOCATOR.size + ZIP64_END.size
        _, _, zip64_place, _ = ZIP64_LOCATOR.unpack(locator)
        mark, *_, length, offset = ZIP64_END.unpack(tail[: ZIP64_END.size])
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


def refuse_misfit(model: nn.Module, weights: dict[str, Tensor], path: Path) -> None:
    """Raise CheckpointError with the differences between the model's names and shapes and the weights'."""
    fits = fitting(model, weights, path).keys()
    state = model.state_dict()
    rows = []
    for name in sorted((state.keys() | weights.keys()) - fits):
        rows.append((escaped(name), _shape(weights.get(name)), _shape(state.get(name))))
    if rows:
        lines = [f"{path}: {len(rows)} tensors do not fit the model"]
        shown = [("tensor", "checkpoint", "model"), *rows[:DIFFERENCES_SHOWN]]
        first, second, _ = (max(map(len, column)) for column in zip(*shown, strict=True))
        lines += [f"{name:{first}}  {in_file:{second}}  {in_model}" for name, in_file, in_model in shown]
        if len(rows) > DIFFERENCES_SHOWN:
            lines.append(f"and {len(rows) - DIFFERENCES_SHOWN} more")
        raise CheckpointError("\n  ".join(lines))


def fitting(model: nn.Module, weights: dict[str, Tensor], path: Path) -> dict[str, Tensor]:
    """Return the weights whose name, shape and type a tensor of the model has. Raises CheckpointError for odd ones."""
    if not all(is_plain(value) for value in weights.values()):
        raise CheckpointError(f"{path}: its weights are not all tensors with their numbers")
    state = model.state_dict()
    loadable = {name: value for name, value in weights.items() if _shape(state.get(name)) == _shape(value)}
    refuse_non_finite(loadable, path)
    return loadable


def is_plain(value: object) -> bool:
    """Return whether a value of a file is a tensor with a different number at each index, as weights are."""
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return False
    return not (value.is_meta or value.is_nested or value.is_quantized)


def refuse_non_finite(weights: Mapping[str, Tensor], path: Path) -> None:
    """Raise CheckpointError for numbers that no training can begin or continue with."""
    for name, value in weights.items():
        if not is_finite(value):
            raise CheckpointError(f"{path}: {name} holds NaN or infinite numbers; take an earlier checkpoint")


def is_finite(values: Tensor) -> bool:
    """Return whether all numbers of a tensor are finite."""
    return bool(torch.isfinite(values).all())


def _shape(value: Tensor | None) -> str:
    """Return a tensor's shape as `8x4x3x3x3`, followed by its type where that is not float32; `-` without a tensor."""
    if value is None:
        return "-"
    size = "x".join(map(str, value.shape)) or "scalar"
    dtype = str(value.dtype).removeprefix("torch.")
    return size if dtype == "float32" else f"{size} {dtype}"


@dataclass(frozen=True)
class TrainedNetworks:
    """Networks of one kind, and how an image is prepared for them."""

    path: Path
    config: Config  # the model's options leave nothing open
    classes: tuple[str, ...]  # background first
    channels: tuple[str, ...]
    intensity: tuple[Intensity, ...]  # a rule for each channel
    step: int  # Step of the run that wrote them.
    # One for each network: a run's checkpoint holds one, a published one may hold several.
    weights: list[dict[str, Tensor]]
    splits: list[Split]  # what was held out from each
    largest: tuple[int, ...] = ()  # classes of which label maps have the largest component alone
    seen: Seen | None = None  # what their training cases are like; None where nobody has looked
    is_average: bool = False  # whether a run's checkpoint holds averages of the weights
    trained_on: tuple[Any, ...] = ()  # names of the cases, which a published file does not have

    @property
    def regions(self) -> Regions | None:
        """Return the regions that the networks predict; None where their classes exclude each other."""
        return self.config.model.output_regions

    def digest(self) -> str:
        """Return a digest of all that a label map follows from, but for options of inference."""
        data = self.config.data
        defaults = vars(Model())
        # Options that later versions add leave the digests of earlier networks as they are.
        model = {name: value for name, value in vars(self.config.model).items() if value != defaults[name]}
        about = (sorted(model.items()), self.intensity, self.classes, self.config.amp, self.config.amp_dtype)
        options = (data.patch, data.spacing, data.affine, data.label_map, data.nonfinite, data.augment.mirror)
        digest = hashlib.blake2b(repr((about, options)).encode(), digest_size=16)
        for weights in self.weights:
            for name, value in sorted(weights.items()):
                digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode(errors="backslashreplace"))
                digest.update(value.detach().reshape(-1).contiguous().view(torch.uint8).numpy().data)
        return digest.hexdigest()

    def instantiate(self, device: torch.device) -> list[nn.Module]:
        """Return the networks with their weights, for evaluation.

        Raises CheckpointError where the weights do not fit, before memory is taken.
        """
        model_config = self.config.model
        try:
            with torch.device("meta"):
                outline = build.model(model_config, seed=0)
        except (RuntimeError, TypeError, OverflowError) as error:
            raise CheckpointError(f"{self.path}: no network has these options ({error})") from error
        for weights in self.weights:
            refuse_misfit(outline, weights, self.path)
        # One storage may stand for many weights, or for many networks; each would take its own memory.
        total_bytes = sum(value.nbytes for weights in self.weights for value in weights.values())
        if total_bytes > self.path.stat().st_size:
            raise CheckpointError(f"{self.path}: its weights are not all there: they are larger than the file")
        networks = [build.model(model_config, seed=0) for _ in self.weights]
        for network, weights in zip(networks, self.weights, strict=True):
            network.load_state_dict(weights)
        return [network.to(device).eval() for network in networks]


def networks_of(path: Path, state: dict[str, Any]) -> TrainedNetworks:
    """Return the checked networks of a checkpoint's state.

    Raises CheckpointError for anything but plain values of the right types.
    """
    try:
        config = compose.from_plain(state["config"] | {"resume": None, "model": state["model_options"]})
        first = dict(state["model"]) | dict(state["average"])
        facts = state.get("fingerprint")
        trained_on = facts.get("training cases") if isinstance(facts, Mapping) else None
        # The others, their splits and the largest components are only in published files.
        trained = TrainedNetworks(
            path=path,
            config=config,
            classes=tuple(state["classes"]),
            channels=tuple(state["channels"]),
            intensity=tuple(checked_intensity(rule) for rule in state["intensity"]),
            step=state["step"],
            weights=[first, *(dict(weights) for weights in state.get("others", []))],
            splits=[dict(split) for split in state.get("splits", [split_of(config.data)])],
            largest=tuple(state.get("largest", ())),
            seen=None if state["seen"] is None else Seen.read(state["seen"], len(state["channels"])),
            is_average=len(state["average"]) > 0,
            trained_on=tuple(trained_on) if isinstance(trained_on, list) else (),
        )
        _refuse_contradictions(trained)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: not a checkpoint of a run ({error})") from error
    return trained


def read_networks(path: Path, model_path: str | None = None) -> TrainedNetworks:
    """Return the networks of a run's or a published checkpoint.

    `model_path`: import path of the user's own network, from the command line. Raises CheckpointError, or UserError
    where the file is of another network: no code is taken from it.
    """
    networks = networks_of(path, load_checkpoint(path))
    named = networks.config.model.path
    if named != model_path:
        if named is None:
            raise UserError(f"{path}: holds the package's own network; remove --model")
        raise UserError(f"{path}: code is never taken from a checkpoint; name its network: --model {named}")
    if model_path is not None:
        build.import_object("--model", model_path)  # here, not under torch.device("meta"), where its tensors would stay
    return networks


def split_of(options: Data) -> Split:
    """Return what a run with these options held out: a fold, a share, or the file that lists the cases.

    Folds and shares of groups are others than those of cases.
    """
    names = ["val_fraction", "groups"] if options.fold is None else ["fold", "folds", "groups"]
    if options.split is not None:
        names = ["split"]
    return {name: getattr(options, name) for name in ("semi", *names) if getattr(options, name) is not None}


def _refuse_contradictions(trained: TrainedNetworks) -> None:
    """Raise ValueError for parts of a checkpoint that do not belong together, or have the wrong type."""
    model_config = trained.config.model
    pairs = (
        (len(trained.classes) - (trained.regions is not None), model_config.classes),
        (len(trained.channels), model_config.in_channels),
        (len(trained.intensity), model_config.in_channels),
        (len(trained.splits), len(trained.weights)),
    )
    if any(size != expected for size, expected in pairs):
        raise ValueError("its parts contradict each other")
    names = itertools.chain(trained.classes, trained.channels, *trained.weights)
    if not all(isinstance(name, str) for name in names):
        raise ValueError("its classes, channels or weights are not named")
    is_class = [type(number) is int and 0 < number < len(trained.classes) for number in trained.largest]
    if not all(is_class) or len(set(trained.largest)) < len(trained.largest):
        raise ValueError("its post-processing is not of its classes")
    if type(trained.step) is not int or trained.step < 0:
        raise ValueError("its step is not a number of steps")

"""The files of a run folder: written during a run, read back for reports and comparisons."""

import csv
import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml  # type: ignore[import-untyped]

from unet3d import compose
from unet3d.config import Config
from unet3d.files import write_json, write_text

if TYPE_CHECKING:
    import torch

PACKAGES = ("unet3d", "torch", "monai", "hydra-core", "nibabel", "numpy", "scipy", "wandb")
KINDS = ("measured", "predicted")  # entries of memory.json; a measured one is preferred
Record = Mapping[str, Any]


def start_folder(folder: Path, config: Config, device: "torch.device") -> None:
    """Make the subfolders and write what is known before the first step."""
    for part in ("checkpoints", "figures", "predictions"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    if config.resume is None:
        (folder / "metrics.jsonl").unlink(missing_ok=True)  # of a run that ended before its first snapshot
    write_text(folder / "config.yaml", compose.to_yaml(config))
    write_json(folder / "env.json", environment(device))
    write_text(folder / "STATUS", "running\n")


def environment(device: "torch.device") -> dict[str, Any]:
    """Versions and the device; nothing that names the machine or its user."""
    import torch

    from unet3d.train.half_precision import emulates_bf16

    found: dict[str, Any] = {"python": platform.python_version(), "system": platform.system()}
    found |= {name: _version(name) for name in PACKAGES}
    found |= {"device": device.type, "threads": torch.get_num_threads()}
    if device.type == "cpu":
        found["cpu"] = torch.backends.cpu.get_cpu_capability() + ", bf16 emulated" * emulates_bf16()
    if device.type == "cuda":
        found |= {"gpu": torch.cuda.get_device_name(device), "cuda": torch.version.cuda}
        found["cudnn"] = torch.backends.cudnn.version()
    return found


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:  # unet3d run from a checkout that was never installed
        return None


def write_status(folder: Path, line: str, code: int) -> None:
    """Write the STATUS of a run that has ended: what happened, and the exit code."""
    write_text(folder / "STATUS", f"{line}\nexit code {code}\n")


def is_done(folder: Path) -> bool:
    """Whether the folder's run finished and wrote all its files."""
    return _text(folder / "STATUS").startswith("done\n")


def sweep_orphans(folder: Path) -> None:
    """Delete the unfinished files of a run that was killed."""
    for pattern in ("**/.*.tmp", "checkpoints/*.tmp"):
        for orphan in folder.glob(pattern):
            orphan.unlink(missing_ok=True)


def forget_after(metrics: Path, step: int, validated: int) -> int:
    """Drop the records of steps and validations that a run resumed at `step` repeats. Returns the last step recorded.

    `validated` is the last validation step.
    """
    if not metrics.exists():
        return step
    kept, last = [], step
    for line in metrics.read_text(encoding="utf-8").splitlines():
        record = _object(line)
        at = record.get("step", -1)  # -1: a kill cut it short
        last = max(last, at)
        if 0 <= at < step or (at == step and (step == validated or "train/loss" in record)):
            kept.append(f"{line}\n")
    write_text(metrics, "".join(kept))
    return last


def read_memory(folder: Path) -> dict[str, Any]:
    """memory.json; empty if there is none."""
    path = folder / "memory.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def update_memory(folder: Path, values: dict[str, Any]) -> dict[str, Any]:
    """Add or replace these entries of memory.json. Returns all of it."""
    found = read_memory(folder) | values
    write_json(folder / "memory.json", found)
    return found


def add_measured(folder: Path, parameters: int, measured: dict[str, Any], before: dict[str, Any]) -> None:
    """Add the measured step to memory.json; `before` is memory.json from when the run was resumed.

    The first step stays that of the run's beginning, unless the step has changed: another device, other segments.
    """
    known, segments = before.get("measured", {}), read_memory(folder).get("segments")
    if known.get("kind") == measured["kind"] and before.get("measured_segments") == segments:
        measured = _with_first_of(known, measured)
    found = update_memory(folder, {"parameters": parameters, "measured": measured, "measured_segments": segments})
    if "predicted" in found:  # tensors against tensors: on CUDA the ledger's, without workspaces and rounding
        peak = measured.get("ledger", measured)["peak_bytes"]
        update_memory(folder, {"error_bytes": found["predicted"]["peak_bytes"] - peak})


def _with_first_of(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """`now`, but each "first", at any depth, as it was `before` if it was there."""
    merged = dict(now)
    for key, value in now.items():
        if key == "first":
            merged[key] = before.get(key, value)
        elif isinstance(value, dict):
            merged[key] = _with_first_of(before.get(key, {}), value)
    return merged


@dataclass(frozen=True)
class RunFolder:
    """What the files of a run folder say; empty where a file is missing or damaged."""

    path: Path
    status: str
    config: str
    settings: Record
    """`config` as plain values."""
    overrides: list[str] | None
    """The command line; None if it is not known."""
    environment: Record
    records: list[Record]
    scores: list[dict[str, str]]
    memory: Record

    @property
    def memory_kind(self) -> str:
        """Whether `memory_entry` was measured or predicted."""
        return next(kind for kind in KINDS if kind in self.memory)

    @property
    def memory_entry(self) -> Record:
        """The step in memory.json; only if `memory` is not empty."""
        entry: Record = self.memory[self.memory_kind]
        return entry

    @property
    def last_validation(self) -> Record:
        """Its record; empty if there was none."""
        return next((record for record in reversed(self.records) if "val/dice_mean" in record), {})

    def values(self, key: str) -> list[float]:
        """A number's values in the records, in their order; NaN and infinity included."""
        return [number for record in self.records if (number := as_number(record.get(key))) is not None]


def read_run(path: Path) -> RunFolder:
    """Read a run folder, whatever of it is missing or damaged."""
    config, overrides = (_text(path / name) for name in ("config.yaml", "overrides.yaml"))
    settings, words = _plain(config), _plain(overrides)
    return RunFolder(
        path=path,
        status=", ".join(_text(path / "STATUS").split("\n")).strip(", "),
        config=config,
        settings=settings if isinstance(settings, dict) else {},
        overrides=[str(word) for word in words] if isinstance(words, list) else None,
        environment={key: value for key, value in _object(_text(path / "env.json")).items() if value is not None},
        records=[record for line in _text(path / "metrics.jsonl").splitlines() if "step" in (record := _object(line))],
        scores=list(csv.DictReader(_text(path / "scores.csv").splitlines())),
        memory=_sound(_object(_text(path / "memory.json"))),
    )


def as_number(cell: Any) -> float | None:
    """The number in a cell or record; None if there is none."""
    try:
        return float(cell)
    except (TypeError, ValueError):
        return None


def _sound(memory: Record) -> Record:
    """memory.json without damaged entries; empty if it has neither a measured nor a predicted step."""
    found = {key: value for key, value in memory.items() if key not in KINDS or _is_entry(value)}
    return found if any(kind in found for kind in KINDS) else {}


def _is_entry(value: Any) -> bool:
    is_object = isinstance(value, dict) and isinstance(value.get("phases"), dict) and bool(value["phases"])
    return is_object and isinstance(value.get("peak_bytes"), int)


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _plain(text: str) -> Any:
    """YAML as plain values; None if it is damaged."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return None


def _object(text: str) -> Record:
    """A JSON object; empty if a kill cut it short."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}

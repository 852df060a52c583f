"""The files of a run folder: written during a run, read back for reports and comparisons."""

import json
import platform
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml  # type: ignore[import-untyped]

from unet3d import compose
from unet3d.config import Config
from unet3d.errors import escaped
from unet3d.files import from_csv, write_json, write_text

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
    found |= dict.fromkeys(PACKAGES)
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):  # unet3d run from a checkout that was never installed
            found[name] = metadata.version(name)
    found |= {"device": device.type, "threads": torch.get_num_threads()}
    if device.type == "cpu":
        return found | {"cpu": torch.backends.cpu.get_cpu_capability() + ", bf16 emulated" * emulates_bf16()}
    gpu = {"gpu": torch.cuda.get_device_name(device), "cuda": torch.version.cuda}
    return found | gpu | {"cudnn": torch.backends.cudnn.version()}


def write_status(folder: Path, line: str, code: int) -> None:
    """Write the STATUS of a run that has ended: what happened, and the exit code."""
    write_text(folder / "STATUS", escaped(f"{line}\nexit code {code}\n", keep="\n"))


def is_done(folder: Path) -> bool:
    """Whether the folder's run finished and wrote all its files."""
    return _text(folder / "STATUS").startswith("done\n")


def forget_after(metrics: Path, step: int, validated: int) -> int:
    """Drop the records that a run resumed at `step`, last validated at `validated`, repeats; returns the last step."""
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
    return dict(json.loads(path.read_text())) if path.exists() else {}


def update_memory(folder: Path, values: dict[str, Any]) -> None:
    """Add or replace these entries of memory.json."""
    write_json(folder / "memory.json", read_memory(folder) | values)


def add_measured(folder: Path, parameters: int, measured: dict[str, Any], before: dict[str, Any]) -> None:
    """Add the measured step to memory.json; a resumed run keeps the first step that was there `before`, if it fits."""
    found, known = read_memory(folder), before.get("measured", {})
    segments = found.get("segments")
    if known.get("kind") == measured["kind"] and before.get("measured_segments") == segments:  # the same step
        measured = _with_first_of(known, measured)
    found |= {"parameters": parameters, "measured": measured, "measured_segments": segments}
    if "predicted" in found:  # tensors against tensors: on CUDA the ledger's, without workspaces and rounding
        found["error_bytes"] = found["predicted"]["peak_bytes"] - measured.get("ledger", measured)["peak_bytes"]
    write_json(folder / "memory.json", found)


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
    settings: Record  # `config` as plain values
    overrides: list[str] | None  # the command line; None if it is not known
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
    settings, words = (_parsed(yaml.safe_load, _text(path / name)) for name in ("config.yaml", "overrides.yaml"))
    return RunFolder(
        path=path,
        status=", ".join(_text(path / "STATUS").split("\n")).strip(", "),
        config=_text(path / "config.yaml"),
        settings=settings if isinstance(settings, dict) else {},
        overrides=[str(word) for word in words] if isinstance(words, list) else None,
        environment={key: value for key, value in _object(_text(path / "env.json")).items() if value is not None},
        records=[record for line in _text(path / "metrics.jsonl").splitlines() if "step" in (record := _object(line))],
        scores=from_csv(_text(path / "scores.csv")),
        memory=_sound(_object(_text(path / "memory.json"))),
    )


def as_number(cell: Any) -> float | None:
    """The number in a cell or record; None if there is none."""
    try:
        return float(cell)
    except (TypeError, ValueError):
        return None


def _sound(memory: Record) -> Record:
    """memory.json without damaged entries; empty if no measured or predicted step is left."""

    def is_step(entry: Any) -> bool:
        phases = entry.get("phases") if isinstance(entry, dict) else None
        return isinstance(phases, dict) and bool(phases) and isinstance(entry.get("peak_bytes"), int)

    found = {key: value for key, value in memory.items() if key not in KINDS or is_step(value)}
    return found if found.keys() & KINDS else {}


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _object(text: str) -> Record:
    """A JSON object; empty if it is damaged."""
    value = _parsed(json.loads, text)
    return value if isinstance(value, dict) else {}


def _parsed(parse: Callable[[str], Any], text: str) -> Any:
    """Plain values of JSON or YAML; None if a kill cut the text short."""
    try:
        return parse(text)
    except (ValueError, yaml.YAMLError):
        return None

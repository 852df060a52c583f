"""The files of a run folder that are not streams: config.yaml, env.json, memory.json, STATUS.

STATUS is written also where a signal ends the process while torch loads: torch is not loaded here.
"""

import json
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unet3d import compose
from unet3d.config import Config

if TYPE_CHECKING:
    import torch

PACKAGES = ("unet3d", "torch", "monai", "hydra-core", "nibabel", "numpy", "scipy", "wandb")


def start(folder: Path, config: Config, device: "torch.device") -> None:
    """Make the folder's parts and write what is known before the first step."""
    for part in ("checkpoints", "figures", "predictions"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    if config.resume is None:
        (folder / "metrics.jsonl").unlink(missing_ok=True)  # of a run that ended before its first snapshot
    write_text(folder / "config.yaml", compose.to_yaml(config))
    write_json(folder / "env.json", environment(device))
    write_text(folder / "STATUS", "running\n")


def end(folder: Path, line: str, code: int) -> None:
    """STATUS of a run that has ended: what happened, and the exit code."""
    write_text(folder / "STATUS", f"{line}\nexit code {code}\n")


def is_done(folder: Path) -> bool:
    """Whether the folder's run went to its end, with all that it leaves behind."""
    status = folder / "STATUS"
    return status.is_file() and status.read_text(encoding="utf-8").startswith("done\n")


def sweep_orphans(folder: Path) -> None:
    """Delete what was being written when a run was killed."""
    for pattern in (".*.tmp", "checkpoints/*.tmp", "predictions/.*.tmp", "figures/.*.tmp.png"):
        for orphan in folder.glob(pattern):
            orphan.unlink(missing_ok=True)


def add_measured(folder: Path, parameters: int, measured: dict[str, Any], before: dict[str, Any]) -> None:
    """memory.json with what was measured beside what was predicted; `before`: what it was as the run was resumed.

    The first step is then the run's own, unless the step is another now: on another device, or cut elsewhere.
    """
    known, segments = before.get("measured", {}), memory(folder).get("segments")
    if known.get("kind") == measured["kind"] and before.get("measured_segments") == segments:
        measured = _with_first_of(known, measured)
    found = add(folder, {"parameters": parameters, "measured": measured, "measured_segments": segments})
    if "predicted" in found:  # tensors against tensors: on CUDA the ledger's, without workspaces and rounding
        peak = measured.get("ledger", measured)["peak_bytes"]
        add(folder, {"error_bytes": found["predicted"]["peak_bytes"] - peak})


def _with_first_of(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """The values of now, but each "first" at whatever depth as it was before, if it was."""
    return {
        key: before.get(key, value)
        if key == "first"
        else _with_first_of(before.get(key, {}), value)
        if isinstance(value, dict)
        else value
        for key, value in now.items()
    }


def add(folder: Path, values: dict[str, Any]) -> dict[str, Any]:
    """memory.json with these entries added or replaced. Returns it."""
    found = memory(folder) | values
    write_json(folder / "memory.json", found)
    return found


def memory(folder: Path) -> dict[str, Any]:
    """memory.json; empty where there is none."""
    path = folder / "memory.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def environment(device: "torch.device") -> dict[str, Any]:
    """Versions and the device, nothing that names the machine or its user."""
    import torch

    from unet3d.half_precision import emulates_bf16

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


def forget_after(metrics: Path, step: int, paused: int) -> int:
    """Drop the records of steps, and of pauses, that a resumed run will take again. Returns the last step of all."""
    if not metrics.exists():
        return step
    kept, last = [], step
    for line in metrics.read_text(encoding="utf-8").splitlines():
        record = _record(line)
        last = max(last, record["step"])
        if 0 <= record["step"] < step or (record["step"] == step and (step == paused or "train/loss" in record)):
            kept.append(f"{line}\n")
    write_text(metrics, "".join(kept))
    return last


def _record(line: str) -> dict[str, Any]:
    """A record; of step -1 where a kill cut it short."""
    try:
        record: dict[str, Any] = json.loads(line)
    except json.JSONDecodeError:
        return {"step": -1}
    return record


def write_json(path: Path, values: Any) -> None:
    """Readable JSON, whole or not at all."""
    write_text(path, json.dumps(values, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Text, whole or not at all."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)

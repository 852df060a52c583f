"""The files of a run folder: written as a run goes on, read back for reports and comparisons."""

import csv
import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from unet3d import compose
from unet3d.config import Config
from unet3d.files import write_json, write_text
from unet3d.memory.tables import sentence
from unet3d.train.metrics import mean_of
from unet3d.types import Table, mib

if TYPE_CHECKING:
    import torch


PACKAGES = ("unet3d", "torch", "monai", "hydra-core", "nibabel", "numpy", "scipy", "wandb")


def start_folder(folder: Path, config: Config, device: "torch.device") -> None:
    """Make the folder's parts and write what is known before the first step."""
    for part in ("checkpoints", "figures", "predictions"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    if config.resume is None:
        (folder / "metrics.jsonl").unlink(missing_ok=True)  # of a run that ended before its first snapshot
    write_text(folder / "config.yaml", compose.to_yaml(config))
    write_json(folder / "env.json", environment(device))
    write_text(folder / "STATUS", "running\n")


def write_status(folder: Path, line: str, code: int) -> None:
    """STATUS of a run that has ended: what happened, and the exit code."""
    write_text(folder / "STATUS", f"{line}\nexit code {code}\n")


def is_done(folder: Path) -> bool:
    """Whether the folder's run went to its end, with all that it leaves behind."""
    status = folder / "STATUS"
    return status.is_file() and status.read_text(encoding="utf-8").startswith("done\n")


def sweep_orphans(folder: Path) -> None:
    """Delete what was being written when a run was killed."""
    for pattern in ("**/.*.tmp", "checkpoints/*.tmp"):
        for orphan in folder.glob(pattern):
            orphan.unlink(missing_ok=True)


def add_measured(folder: Path, parameters: int, measured: dict[str, Any], before: dict[str, Any]) -> None:
    """memory.json with what was measured beside what was predicted; `before`: what it was as the run was resumed.

    The first step is then the run's own, unless the step is another now: on another device, or cut elsewhere.
    """
    known, segments = before.get("measured", {}), read_memory(folder).get("segments")
    if known.get("kind") == measured["kind"] and before.get("measured_segments") == segments:
        measured = _with_first_of(known, measured)
    found = update_memory(folder, {"parameters": parameters, "measured": measured, "measured_segments": segments})
    if "predicted" in found:  # tensors against tensors: on CUDA the ledger's, without workspaces and rounding
        peak = measured.get("ledger", measured)["peak_bytes"]
        update_memory(folder, {"error_bytes": found["predicted"]["peak_bytes"] - peak})


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


def update_memory(folder: Path, values: dict[str, Any]) -> dict[str, Any]:
    """memory.json with these entries added or replaced. Returns it."""
    found = read_memory(folder) | values
    write_json(folder / "memory.json", found)
    return found


def read_memory(folder: Path) -> dict[str, Any]:
    """memory.json; empty where there is none."""
    path = folder / "memory.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def environment(device: "torch.device") -> dict[str, Any]:
    """Versions and the device, nothing that names the machine or its user."""
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


Record = Mapping[str, Any]


NOTHING_RAN = "Predicted on tensors without data; nothing was run."


KINDS = ("measured", "predicted")  # of memory; what was measured goes before what was predicted


METRICS = {"dice": ("Dice", 3), "iou": ("IoU", 3), "hd95_mm": ("HD95 (mm)", 2)}  # heading, digits


@dataclass(frozen=True)
class RunFolder:
    """What the files of a run folder say; empty where a file is missing."""

    path: Path
    status: str
    config: str
    environment: Record
    records: list[Record]
    scores: list[dict[str, str]]
    memory: Record

    @property
    def memory_kind(self) -> str:
        """Whether `memory_entry` was measured or predicted."""
        return next(kind for kind in KINDS if self.memory.get(kind, {}).get("phases"))

    @property
    def memory_entry(self) -> Record:
        """What memory.json says of the step; only where `memory` is not empty."""
        entry: Record = self.memory[self.memory_kind]
        return entry

    def values(self, key: str) -> list[float]:
        """A number's values in the records, in their order; NaN and infinity included."""
        return [number for record in self.records if (number := as_number(record.get(key))) is not None]


def read_run(path: Path) -> RunFolder:
    """Read a run folder."""
    lines = (_object(line) for line in _text(path / "metrics.jsonl").splitlines())
    memory = _object(_text(path / "memory.json"))
    return RunFolder(
        path=path,
        status=", ".join(_text(path / "STATUS").split("\n")).strip(", "),
        config=_text(path / "config.yaml"),
        environment={key: value for key, value in _object(_text(path / "env.json")).items() if value is not None},
        records=[record for record in lines if "step" in record],
        scores=list(csv.DictReader(_text(path / "scores.csv").splitlines())),
        memory=_sound(memory),
    )


def _sound(memory: Record) -> Record:
    """Without entries that are not what a meter writes; empty where no step was measured or predicted."""
    found = {key: value for key, value in memory.items() if key not in KINDS or _is_entry(value)}
    return found if any(kind in found for kind in KINDS) else {}


def _is_entry(value: Any) -> bool:
    is_object = isinstance(value, dict) and isinstance(value.get("phases"), dict) and bool(value["phases"])
    return is_object and isinstance(value.get("peak_bytes"), int)


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _object(text: str) -> Record:
    """A JSON object; empty for what a kill left of one."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}


def as_number(cell: Any) -> float | None:
    """The number in a cell or record; None where there is none."""
    try:
        return float(cell)
    except (TypeError, ValueError):
        return None


def score_table(run: RunFolder) -> Table:
    """A row a class with its means over the cases, and their mean over the classes.

    From scores.csv, or without it from the last validation in metrics.jsonl, which does not know how many cases. HD95
    is a column if it was measured; where it does not exist in some of the cases, in brackets in how many it does.
    """
    if not run.scores:
        return validation_table(last_validation(run))
    scores = _present({key: [row.get(key) for row in run.scores] for key in run.scores[0]})
    classes, (columns, rows) = _classes(scores), _means(scores)
    for row, name in zip(rows, classes, strict=False):
        known = len(scores.get(f"hd95_mm/{name}", ()))
        if 0 < known != len(scores[f"dice/{name}"]):
            row[-1] += f" ({known})"
    counts = [str(len(scores[f"dice/{name}"])) for name in classes] + [""]
    return Table([*columns, "cases"], [[*row, count] for row, count in zip(rows, counts, strict=False)])


def validation_table(record: Record) -> Table:
    """The same of a validation's record, whose values are means over the cases."""
    return _means(_present({key.removeprefix("val/"): [value] for key, value in record.items()}))


def _means(scores: Mapping[str, list[float]]) -> Table:
    """A row a class with its means, and the means of these."""
    classes = _classes(scores)
    metrics = [metric for metric in METRICS if any(key.startswith(f"{metric}/") for key in scores)]
    means = [[mean_of(scores.get(f"{metric}/{name}", ())) for metric in metrics] for name in classes]
    rows = [[name, *_shown(metrics, row)] for name, row in zip(classes, means, strict=True)]
    if len(classes) > 1:
        rows.append(["mean of classes", *_shown(metrics, [mean_of(column) for column in zip(*means, strict=True)])])
    return Table(["class", *(METRICS[metric][0] for metric in metrics)], rows)


def _classes(scores: Mapping[str, list[float]]) -> list[str]:
    return [key.removeprefix("dice/") for key in scores if key.startswith("dice/")]


def case_iou(run: RunFolder) -> dict[str, float]:
    """Mean IoU over the foreground classes that each scored case has."""
    found: dict[str, float] = {}
    for row in run.scores:
        values = [n for key, cell in row.items() if str(key).startswith("iou/") and (n := as_number(cell)) is not None]
        if values:
            found[str(row.get("case", ""))] = sum(values) / len(values)
    return found


def last_validation(run: RunFolder) -> Record:
    """Its record; empty where there was none."""
    return next((record for record in reversed(run.records) if "val/dice_mean" in record), {})


def _present(cells: Mapping[str, list[Any]]) -> dict[str, list[float]]:
    """metric/class -> the values that there are."""
    return {key: [n for cell in column if (n := as_number(cell)) is not None] for key, column in cells.items()}


def _shown(metrics: list[str], values: list[float | None]) -> list[str]:
    return [shown(value, METRICS[metric][1]) for metric, value in zip(metrics, values, strict=True)]


def shown(value: float | None, digits: int) -> str:
    return "n/a" if value is None else f"{value:,.{digits}f}"


def about(run: RunFolder) -> list[str]:
    """What ran and how it ended; of a rehearsal, what was rehearsed."""
    if "rehearsed" in run.memory:
        return [run.memory["rehearsed"]]
    return [what_ran(run), f"Status: {run.status or 'unknown, there is no STATUS file'}"]


def prediction(run: RunFolder) -> str:
    """The peak that was predicted before the run, and how far the measured one is from it."""
    if run.memory_kind == "predicted":
        return "Predicted before the run, which ended before its memory was kept." if run.records else NOTHING_RAN
    if "error_bytes" not in run.memory:
        return "The peak was not predicted."
    peak, error = run.memory["predicted"]["peak_bytes"], run.memory["error_bytes"]
    return f"Peak predicted before the run: {mib(peak)} MiB; predicted less measured: {error:,} bytes."


def advice(run: RunFolder) -> str:
    """What dominates the peak and what would lower it, in a sentence; "" where it is not known."""
    found = run.memory.get("advice")
    return sentence(found, run.memory["predicted"]["peak_bytes"]) if found else ""


def timing(run: RunFolder) -> dict[str, str]:
    """Step time, the share of it that was waiting for data, validation time; each with its unit."""
    steps, waits, validations = (run.values(f"time/{name}") for name in ("step_s", "data_wait_s", "val_s"))
    found = {}
    if sum(steps):
        found["step, median"] = f"{median(steps):.3g} s"
        found["waiting for data"] = f"{sum(waits) / sum(steps):.1%} of step time"
    if validations:
        found["validation, median"] = f"{median(validations):.3g} s"
    return found


def highlights(run: RunFolder) -> dict[str, str]:
    """The few numbers of a run that matter most."""
    found = {}
    scores = score_table(run)
    if scores.rows:
        found["Dice, " + scores.rows[-1][0]] = scores.rows[-1][1]
    if run.memory:
        found[f"peak memory, {run.memory_kind}"] = f"{mib(run.memory_entry['peak_bytes'])} MiB"
        found["parameters"] = f"{run.memory['parameters']:,}"
    if run.records:
        found["steps done"] = f"{max(record['step'] for record in run.records):,}"
    return found


def read_config(run: RunFolder) -> dict[Any, Any]:
    """The config as plain values; empty without a whole one."""
    import yaml  # type: ignore[import-untyped]

    try:
        found = yaml.safe_load(run.config)
    except yaml.YAMLError:
        return {}
    return found if isinstance(found, dict) else {}


def what_ran(run: RunFolder) -> str:
    """The config in a line; "" without one."""
    found = read_config(run)
    try:
        widths = "-".join(map(str, found["model"]["features"]))
        patch = "x".join(map(str, found["data"]["patch"]))
        return (
            f"U-Net {widths} on {found['data']['format']}, {found['steps']} steps of "
            f"{found['batch'] * found['accumulate']} patches of {patch} voxels, "
            f"AMP {'on' if found['amp'] else 'off'}, checkpointing {found['ckpt'] or 'off'}, seed {found['seed']}"
        )
    except (KeyError, TypeError):  # not a whole config
        return ""

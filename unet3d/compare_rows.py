"""Run folders read for a comparison: a row each, what differs between them, and what forbids to compare them."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import yaml  # type: ignore[import-untyped]

from unet3d import compose, readback
from unet3d.errors import UserError
from unet3d.readback import Record, RunFolder
from unet3d.resuming import flat

MARKS = ("STATUS", "config.yaml", "memory.json", "overrides.yaml")  # a run folder has one of them
SAME_CONFIG = (  # where these differ, runs are not comparable: other data, or another length or course of training
    *("data.format", "data.root", "data.images", "data.labels", "data.classes", "data.ignore", "data.patch"),
    *("data.spacing", "data.val_fraction", "data.folds", "data.fold", "data.split", "data.sparse", "data.semi"),
    *("data.scored", "data.sparse_folds", "data.sparse_fold"),
    *("data.phantom.cases", "data.phantom.shape", "data.phantom.seed", "model.classes", "steps", "seed"),
)
SAME_MACHINE = ("device", "gpu", "cpu", "torch", "threads")  # of env.json


class Numbers(NamedTuple):
    """What a run came to, with the units of compare.csv; None where there is no such number."""

    status: str
    parameters: int | None
    peak_predicted_bytes: int | None
    peak_measured_bytes: int | None
    measured_kind: str | None
    error_bytes: int | None
    steps_done: int | None
    step_median_s: float | None
    dice_mean: float | None
    labelled_share: float | None


@dataclass(frozen=True)
class Row:
    """One run. `settings`: the config, flattened, as text, and the names chosen in config groups, e.g. model: unet."""

    name: str
    settings: Mapping[str, str]
    is_whole: bool
    """Whether `settings` is the whole config; else only what the command line said."""
    environment: Record
    numbers: Numbers
    iou: Mapping[str, float]
    """Mean over the foreground classes of each case scored last, where there are any."""

    @property
    def basis(self) -> str | None:
        """Whether its peak was measured or predicted; None without one."""
        numbers = self.numbers
        is_predicted = numbers.peak_predicted_bytes is not None
        return "measured" if numbers.peak_measured_bytes is not None else "predicted" if is_predicted else None


def find(paths: Sequence[Path]) -> list[Path]:
    """The run folders that are meant: each itself, or the numbered children of a sweep's. Raises UserError."""
    found: list[Path] = []
    for path in paths:
        children = [child for child in path.glob("*") if child.name.isdecimal() and _is_run(child)]
        if not _is_run(path) and not children:
            raise UserError(f"{path}: not a run folder; give outputs/DATE/TIME-ID, or a sweep's multirun/DATE/TIME-ID")
        found += [path] if _is_run(path) else sorted(children, key=lambda child: int(child.name))
    return list(dict.fromkeys(path.resolve() for path in found))


def _is_run(path: Path) -> bool:
    return any((path / mark).is_file() for mark in MARKS)


def read(folders: Sequence[Path]) -> list[Row]:
    """A row a run folder, called after it, and after what lies above it where two are called the same."""
    names = [folder.name for folder in folders]
    if len(set(names)) < len(names):
        top = os.path.commonpath(folders)
        names = [os.path.relpath(folder, top) for folder in folders]
    return [_row(name, readback.read(folder)) for name, folder in zip(names, folders, strict=True)]


def _row(name: str, run: RunFolder) -> Row:
    words = _words(run.path / "overrides.yaml")
    config = _config(run.config, words)
    said = {key.lstrip("+"): value for key, _, value in (word.partition("=") for word in words or ())}
    groups = {path.name for path in compose.config_folder().iterdir() if path.is_dir()}
    chosen = {key: value for key, value in said.items() if key in groups or not config}
    settings = {key: value for key, value in (chosen | config).items() if key != "resume"}
    return Row(name, settings, bool(config), run.environment, _numbers(run), readback.case_iou(run))


def _words(path: Path) -> list[str] | None:
    """What the command line said; None without the file, or with half of it."""
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else None
    except (yaml.YAMLError, UnicodeDecodeError):
        found = None
    return [str(word) for word in found] if isinstance(found, list) else None


def _config(text: str, words: Sequence[str] | None) -> dict[str, str]:
    """The config as text, flattened: what config.yaml says, else what the command line composes to; empty if neither.

    A run that predicts, or fails early, writes no config.yaml; one whose data have moved no longer composes.
    """
    try:
        tree = yaml.safe_load(text)
        if tree is None and words is not None:
            tree = compose.to_plain(compose.compose(words))
    except (yaml.YAMLError, UserError):
        tree = None
    return {key: _text(key, value) for key, value in flat(tree, ".").items()} if isinstance(tree, dict) else {}


def _text(key: str, value: Any) -> str:
    if key in ("data.root", "data.split") and value:
        return Path(value).name  # the same data may lie elsewhere
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return "[" + ",".join(_text("", item) for item in value) + "]" if isinstance(value, list) else str(value)


def _numbers(run: RunFolder) -> Numbers:
    measured, predicted = (run.memory.get(kind) or {} for kind in readback.KINDS)
    steps = run.values("time/step_s")
    last = next((record for record in reversed(run.records) if "val/dice_mean" in record), {})
    return Numbers(
        _status(run.status, is_predicted=bool(predicted) and not measured and not run.records),
        run.memory.get("parameters"),
        predicted.get("peak_bytes"),
        measured.get("peak_bytes"),
        measured.get("kind"),
        run.memory.get("error_bytes"),
        max((record["step"] for record in run.records), default=None),
        median(steps) if steps else None,
        last.get("val/dice_mean"),
        next(iter(run.values("data/labelled_share")), None),
    )


def _status(said: str, is_predicted: bool) -> str:
    line = re.sub(r"(, )?exit code \d+$", "", said).strip()
    if line in ("done", "running", ""):
        return {"done": "predicted" if is_predicted else "done", "": "unknown"}.get(line, line)
    bare = re.sub(r"^(error|failed): ", "", line)
    kind = "stopped" if bare.startswith(("stopped ", "interrupted")) else "failed"
    return f"{kind}: {bare.removeprefix('stopped ')}"


def differing(rows: Sequence[Row]) -> list[str]:
    """The settings that differ. What a run does not tell is no difference, unless no run tells its whole config."""
    partial = not any(row.is_whole for row in rows)
    told = {key: [row.settings[key] for row in rows if key in row.settings] for row in rows for key in row.settings}
    return [key for key, values in told.items() if len(set(values)) > 1 or (partial and len(values) < len(rows))]


def columns(rows: Sequence[Row]) -> list[str]:
    """What differs, without the options that the name of a config group tells: model=unet tells model.features."""
    keys = differing(rows)
    groups = [key for key in keys if "." not in key and all(key in row.settings for row in rows)]
    return [key for key in keys if not any(_tells(group, key, rows) for group in groups)]


def _tells(group: str, key: str, rows: Sequence[Row]) -> bool:
    """Whether `key` belongs to the group and has one value for each of its names."""
    pairs = {(row.settings[group], row.settings.get(key)) for row in rows}
    return key.startswith(f"{group}.") and len(pairs) == len({name for name, _ in pairs})


def short(keys: Sequence[str]) -> list[str]:
    """Their last words where these are not shared: data.patch -> patch."""
    last = [key.rpartition(".")[2] for key in keys]
    return [word if last.count(word) == 1 else key for key, word in zip(keys, last, strict=True)]


def mismatches(rows: Sequence[Row], meant: Sequence[str] = ()) -> list[str]:
    """A line for each thing that makes the runs, or their peaks, no like for like: its key, and the values.

    `meant`: keys that an experiment varies.
    """
    pairs: dict[str, dict[str, Any]]
    pairs = {key: {row.name: row.settings.get(key) for row in rows} for key in SAME_CONFIG if key not in meant}
    pairs |= {key: {row.name: row.environment.get(key) for row in rows} for key in SAME_MACHINE}
    if len({row.settings.get("steps") for row in rows}) == 1:
        pairs["steps done"] = {row.name: row.numbers.steps_done for row in rows}
    pairs["peak"] = {row.name: row.basis for row in rows}
    pairs["kind of measured peak"] = {row.name: row.numbers.measured_kind for row in rows}
    return [f"{key}: {sides(found)}" for key, found in pairs.items() if len(set(found.values()) - {None}) > 1]


def sides(values: Mapping[str, Any]) -> str:
    """Which runs have which value; those that have None are left out: `4 (runs 0, 1), 8 (run 2)`."""
    runs: dict[Any, list[str]] = {}
    for name, value in values.items():
        runs.setdefault(value, []).append(name)
    return ", ".join(f"{value} ({_named(names)})" for value, names in runs.items() if value is not None)


def _named(names: Sequence[str]) -> str:
    if len(names) > 6:
        return f"{len(names)} runs"
    return f"run{'s' if len(names) > 1 else ''} {', '.join(names)}"

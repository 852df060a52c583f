"""memory.json: the predicted and the measured step of a run, read once and then written whole by the run.

`unet3d memory -o` and `explained.write_page` write one of their own, without a run.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unet3d.base.files import read_text, write_json
from unet3d.memory.tables import NAMES, folded
from unet3d.recomputing.instructions import SavedSchedule
from unet3d.run.shapes import MOST_ITEMS, fits, is_shallow

NAME = "memory.json"
MAX_MEMORY_BYTES = 2**23  # of the file
KINDS = ("measured", "predicted")  # entries of memory.json; a measured one is preferred
DEEPEST = 10  # levels of nested JSON
MOST_PHASES = 20  # of a step
# The shape of memory.json, as `fits` reads it. An entry has all of STEP, and of DETAILS any.
BYTES = dict.fromkeys(NAMES, int)
PEAKS = {"first": int, "steady": int}
STEP = {"peak_bytes": int, "kind": str, "phases": {...: {"steady": int}}}  # and a "first", where it is known
DETAILS = {
    "moment": {"words": str, "operation": str},
    "categories": {...: int},
    "phase_categories": {...: BYTES},
    "phase_ends": {...: PEAKS},
    "levels": [{"level": int | str | None, "bytes": int, **BYTES}],
    "layers": [{"module": str, "level": int | str | None, "bytes": int, **BYTES}],
    "guesses": [str],
    "workspace_bytes": int,
    "workspaces": [{"module": str, "phase": str, "bytes": int}],
    "rank_peak_bytes": [int],
    "state": dict.fromkeys(("params", "grads", "optimizer"), int),
}
ADVICE = {"level": int | str | None, "bytes": int, "mostly": str}
HALVED = {"halved_peak_bytes": int, "override": str}  # of advice, where half the width was tried
# A run's file also has "segments" and "measured_segments", which are compared with each other and shown nowhere: what
# `preflight` lists of the step that was predicted, and the same of the step that was measured.
OTHERS = {
    "parameters": int,
    "regions": int,
    "predicted_validation_bytes": int,
    "error_bytes": int,
    "about": str,
    "advice": ADVICE,
    "without": {...: int},
    "plan": {"device": str, "peak_bytes": int},
    "schedule": {"recompute": str, "budget": str | None, "keep": [str], "windows": bool},
}


class MemoryFile:
    """The memory.json of a run folder: read once when this is made, and written whole at each change."""

    def __init__(self, folder: Path, is_resumed: bool = False) -> None:
        """Read what is there. A resumed run keeps the first step that an earlier process measured."""
        self._path = folder / NAME
        self._values = read_memory(folder)
        self._before: Mapping[str, Any] = self._values if is_resumed else {}

    def update(self, values: Mapping[str, Any]) -> None:
        """Add or replace these entries. Raises OSError."""
        changed = dict(self._values)
        for name, value in values.items():
            changed[name] = folded(value, MOST_ITEMS) if name in KINDS else value
        self._values = changed
        write_json(self._path, changed)

    def add_measured(self, parameters: int, measured: Mapping[str, Any]) -> None:
        """Add the measured step, and how far the predicted peak is from its peak. Raises OSError."""
        segments = self._values.get("segments")
        before = self._before.get("measured", {})
        is_same_step = before.get("kind") == measured["kind"] and self._before.get("measured_segments") == segments
        if is_same_step:
            measured = _with_first_of(before, measured)
        changes: dict[str, Any] = {"parameters": parameters, "measured": measured, "measured_segments": segments}
        if "predicted" in self._values:
            # tensors against tensors: on CUDA the ledger's, without workspaces and rounding
            of_tensors = measured.get("ledger", measured)
            changes["error_bytes"] = self._values["predicted"]["peak_bytes"] - of_tensors["peak_bytes"]
        self.update(changes)

    def contents(self) -> dict[str, Any]:
        """Return what `read_memory` would read from the file as it is now."""
        return without_damaged(self._values)


def _with_first_of(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Return `now` with each "first", at any depth, as it was `before` if it was there."""
    merged = dict(now)
    for key, value in now.items():
        if key == "first":
            merged[key] = before.get(key, value)
        elif isinstance(value, dict):
            merged[key] = _with_first_of(before.get(key, {}), value)
    return merged


def saved_schedule(folder: Path) -> SavedSchedule | None:
    """Return the schedule that the run in a folder took; None without one."""
    schedule = read_memory(folder).get("schedule")
    return None if schedule is None else SavedSchedule(**schedule)


def read_memory(folder: Path) -> dict[str, Any]:
    """Return memory.json without its damaged entries; {} without a file. Raises UserError for one that is too large."""
    return without_damaged(json_object(read_text(folder / NAME, MAX_MEMORY_BYTES)))


def peaks(memory: Mapping[str, Any]) -> dict[str, Any]:
    """Return the few numbers of memory.json that dashboards show; bytes of a step's tensors, unless its kind says more.

    Before the first step these are the predicted ones.
    """
    values = {"parameters": memory.get("parameters"), "memory/error_bytes": memory.get("error_bytes")}
    values["memory/validation_predicted_bytes"] = memory.get("predicted_validation_bytes")
    for kind in reversed(KINDS):
        if kind in memory:
            values[f"memory/peak_{kind}_bytes"] = memory[kind]["peak_bytes"]
            values["memory/peak_kind"] = memory[kind]["kind"]
    return {name: value for name, value in values.items() if value is not None}


def json_object(text: str) -> dict[str, Any]:
    """Return a JSON object; {} for text that is empty, damaged, or nested without end."""
    if not text:
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(value, dict) or not is_shallow(value, DEEPEST):
        return {}
    return value


def without_damaged(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of memory.json that have the shapes which tables and pictures read; unknown entries stay."""
    is_sound = {key: fits(values.get(key), shape) for key, shape in OTHERS.items()}
    for kind in KINDS:
        is_sound[kind] = _is_step(values.get(kind))
    if is_sound["advice"]:
        is_sound["advice"] = is_sound["predicted"] and _is_advice(values["advice"])
    if not all(is_sound[kind] for kind in KINDS):
        is_sound["error_bytes"] = False
    return {key: value for key, value in values.items() if is_sound.get(key, True)}


def _is_advice(advice: Mapping[str, Any]) -> bool:
    if advice["mostly"] not in NAMES or not fits(advice.get("mostly_bytes", 0), int):
        return False
    return advice.get("halved_peak_bytes") is None or fits(advice, HALVED)


def _is_step(entry: Any) -> bool:
    """Return whether an entry of memory.json has what tables and pictures read."""
    if not fits(entry, STEP):
        return False
    if not all(fits(entry[key], DETAILS[key]) for key in DETAILS if key in entry):
        return False
    names = [entry[key].keys() for key in ("phases", "phase_ends", "phase_categories") if key in entry]
    if len(names[0]) > MOST_PHASES or any(keys != names[0] for keys in names):
        return False
    if entry["peak_bytes"] <= 0:
        return False
    if "layers" in entry and "moment" not in entry:
        return False
    if not all(fits(peaks.get("first", 0), int) for peaks in entry["phases"].values()):
        return False
    return "ledger" not in entry or _is_step(entry["ledger"])

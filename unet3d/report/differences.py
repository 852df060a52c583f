"""Differences between runs: which options tell them apart, and which forbid to compare them."""

from collections.abc import Mapping, Sequence
from typing import Any

from unet3d.config.schema import options_with
from unet3d.report.compared_runs import ComparedRun

MOST_NAMES = 6  # of runs with one value: of more, their number
SAME_MACHINE = ("device", "gpu", "cpu", "torch", "threads")  # of env.json


def differing(rows: Sequence[ComparedRun]) -> list[str]:
    """Return the settings that differ. Missing settings are ignored, unless no run has its whole config."""
    some_are_whole = any(row.is_whole for row in rows)
    keys = dict.fromkeys(key for row in rows for key in row.settings)
    names = []
    for key in keys:
        values = [row.settings[key] for row in rows if key in row.settings]
        is_missing = len(values) < len(rows) and not some_are_whole
        if len(set(values)) > 1 or is_missing:
            names.append(key)
    return names


def setting_columns(rows: Sequence[ComparedRun]) -> list[str]:
    """Return the settings that differ, without options that follow from a name.

    From model=unet follows model.features, from an experiment any option that no command line sets.
    """
    keys = differing(rows)
    groups = []
    for key in keys:
        if "." not in key and all(key in row.settings for row in rows):
            groups.append(key)
    return [key for key in keys if not any(_follows(key, group, rows) for group in groups)]


def _follows(key: str, group: str, rows: Sequence[ComparedRun]) -> bool:
    """Return whether the name chosen in a group determines an option in all runs."""
    names = {row.settings[group] for row in rows}
    is_of_group = key.startswith(f"{group}.")
    if group == "experiment" and key != group:
        is_set = any(key in row.named for row in rows)
        is_of_group = is_of_group or not (is_set or names & {"null", "None"})
    if not is_of_group:
        return False
    pairs = {(row.settings[group], row.settings.get(key)) for row in rows}
    return len(pairs) == len(names)


def method_columns(rows: Sequence[ComparedRun]) -> list[str]:
    """Return the settings that differ without those of no method, where the others tell as many runs apart."""
    keys = setting_columns(rows)
    untold = options_with("untold")
    kept = [key for key in keys if untold.get(key) in (None, "speed")]

    def kinds(of: Sequence[str]) -> int:
        return len({tuple(row.settings.get(key) for key in of) for row in rows})

    return kept if kinds(kept) == kinds(keys) else keys


def short(keys: Sequence[str]) -> list[str]:
    """Return the last word of each key, data.patch -> patch; the whole key if another one ends in the same word."""
    last = [key.rpartition(".")[2] for key in keys]
    return [word if last.count(word) == 1 else key for key, word in zip(keys, last, strict=True)]


def label(row: ComparedRun, keys: Sequence[str]) -> str:
    """Return a run's name and its settings among `keys`: `0: model=unet amp=true`."""
    settings = []
    for key, word in zip(keys, short(keys), strict=True):
        if key in row.settings:
            settings.append(f"{word}={row.settings[key]}")
    return f"{row.name}: {' '.join(settings)}" if settings else row.name


def mismatches(rows: Sequence[ComparedRun], varied: Sequence[str] = ()) -> list[str]:
    """Return one line per difference that makes the runs not comparable; an experiment varies `varied` on purpose."""
    by_key: dict[str, dict[str, Any]] = {}
    for key in options_with("same"):
        if key not in varied:
            by_key[key] = {row.name: row.settings.get(key) for row in rows}
    for key in SAME_MACHINE:
        by_key[key] = {row.name: row.environment.get(key) for row in rows}
    if len({row.settings.get("steps") for row in rows}) == 1:
        by_key["steps done"] = {row.name: row.numbers["steps_done"] for row in rows}
    by_key["grid of the Dice"] = {row.name: row.numbers.get("dice_grid") for row in rows}
    by_key["peak"] = {row.name: row.basis for row in rows}
    by_key["kind of measured peak"] = {row.name: row.numbers["measured_kind"] for row in rows}
    return unlike(by_key)


def unlike(by_key: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return one line per key whose values, {run: value}, differ between runs."""
    lines = []
    for key, values in by_key.items():
        if len(set(values.values()) - {None}) > 1:
            lines.append(f"{key}: {sides(values)}")
    return lines


def sides(values: Mapping[str, Any]) -> str:
    """Return which runs have which value, `4 (runs 0, 1), 8 (run 2)`, without the value None."""
    runs: dict[Any, list[str]] = {}
    for name, value in values.items():
        if value is not None:
            runs.setdefault(value, []).append(name)
    return ", ".join(f"{value} ({_run_names(names)})" for value, names in runs.items())


def _run_names(names: Sequence[str]) -> str:
    if len(names) == 1:
        return f"run {names[0]}"
    if len(names) > MOST_NAMES:
        return f"{len(names)} runs"
    return f"runs {', '.join(names)}"

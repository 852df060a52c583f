"""Runs as the rows of a comparison: read from folders; which options tell them apart, and which forbid to compare."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from unet3d.base.errors import UserError
from unet3d.config import compose
from unet3d.config.schema import options_with
from unet3d.report.comparison_plots import OVERLAID, basis
from unet3d.report.plots import Curve, curve
from unet3d.report.summary import compared_numbers
from unet3d.run.record import RunRecord, numbers_of, read_run
from unet3d.training.metrics import mean_of

RUN_FILES = ("STATUS", "config.yaml", "memory.json", "overrides.yaml")  # a run folder has at least one of them
FOLD = "data.fold"
MOST_NAMES = 6  # of runs with one value: of more, their number
SAME_MACHINE = ("device", "gpu", "cpu", "torch", "threads")  # of env.json


@dataclass(frozen=True)
class ComparedRun:
    """A row of a comparison: one run, or the runs of one method, `folds`, by the fold that each holds out.

    `settings` are the config, flattened, as text, and the names chosen in config groups, e.g. model: unet.
    """

    name: str
    settings: Mapping[str, str]
    is_whole: bool  # whether `settings` is the whole config; else only the command line is known
    environment: Mapping[str, str]
    numbers: Mapping[str, Any]  # with the names, order and units of compare.csv; None for a number that it has not
    curves: Mapping[str, Curve]  # by their keys in metrics.jsonl
    named: frozenset[str] = frozenset()  # options on its command line
    scores: Sequence[Mapping[str, str]] = ()  # scores.csv
    folds: "tuple[ComparedRun, ...]" = ()
    folder: Path = Path()  # of a run; of a method, the first fold's

    @property
    def scored(self) -> str | None:
        """Return the folds with scores, `0,1,2`; None for a single run."""
        if not self.folds:
            return None
        return ",".join(run.settings[FOLD] for run in self.folds if run.scores)


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """Return the run folders among the paths, and the numbered run folders in those that are sweeps.

    Raises UserError for a path that is neither.
    """
    folders: list[Path] = []
    for path in paths:
        if _is_run(path):
            folders.append(path)
            continue
        jobs = [folder for folder in path.glob("*") if folder.name.isdecimal() and _is_run(folder)]
        if not jobs:
            raise UserError(f"{path}: not a run folder; give outputs/DATE/TIME-ID, or a sweep's multirun/DATE/TIME-ID")
        folders += sorted(jobs, key=lambda folder: int(folder.name))
    return list(dict.fromkeys(folder.resolve() for folder in folders))


def _is_run(folder: Path) -> bool:
    return any((folder / name).is_file() for name in RUN_FILES)


def read_runs(folders: Sequence[Path]) -> list[ComparedRun]:
    """Read run folders; each is named by its folder, or, if two share a name, by its path below the common folder."""
    names = [folder.name for folder in folders]
    if len(set(names)) < len(names):
        top = os.path.commonpath(folders)
        names = [os.path.relpath(folder, top) for folder in folders]
    return [compared(name, read_run(folder)) for name, folder in zip(names, folders, strict=True)]


def compared(name: str, run: RunRecord) -> ComparedRun:
    """Return a run as a row of a comparison."""
    curves = {key: curve(run.records, key) for key in OVERLAID}
    return ComparedRun(
        name=name,
        settings=_settings(run),
        is_whole=bool(run.settings),
        environment=run.environment,
        numbers=_numbers(run),
        curves={key: points for key, points in curves.items() if points is not None},
        named=frozenset(word.partition("=")[0].lstrip("+~") for word in run.overrides or []),
        scores=run.scores,
        folder=run.path,
    )


def _settings(run: RunRecord) -> dict[str, str]:
    """Return the names chosen in config groups, and the config; of a run without one, its command line."""
    groups = {path.name for path in compose.config_folder().iterdir() if path.is_dir()}
    settings = {}
    for word in run.overrides or []:
        key, _, value = word.partition("=")
        key = key.lstrip("+")
        if key in groups or not run.settings:
            settings[key] = _as_text(key, value)
    for key, value in compose.flat(run.settings).items():
        settings[key] = _as_text(key, value)
    settings.pop("resume", None)
    return settings


def _as_text(key: str, value: Any) -> str:
    """Return a value as a command line has it; of a path to data, the last part."""
    if key in ("data.root", "data.split", "data.groups") and value:
        return Path(value).name  # the same data may be in another folder
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return "null"
    if isinstance(value, list):
        return f"[{','.join(_as_text('', item) for item in value)}]"
    return str(value)


def _numbers(run: RunRecord) -> dict[str, Any]:
    """Return a run's numbers in the order of compare.csv."""
    measured = run.memory.get("measured", {})
    predicted = run.memory.get("predicted", {})
    steps = numbers_of(run.records, "time/step_s")
    labelled = numbers_of(run.records, "data/labelled_share")
    only_predicts = bool(predicted) and not measured and not run.records
    network_grid = "network" if run.spacing else None  # else both are one grid
    return {
        "status": _status(run.status, only_predicts),
        "parameters": run.memory.get("parameters"),
        "peak_predicted_bytes": predicted.get("peak_bytes"),
        "peak_measured_bytes": measured.get("peak_bytes"),
        "measured_kind": measured.get("kind"),
        "error_bytes": run.memory.get("error_bytes"),
        "steps_done": run.last_step,
        "step_median_s": median(steps) if steps else None,
        "dice_mean": run.dice_mean,
        "dice_grid": None if run.dice_mean is None else "files" if run.has_own_grids else network_grid,
        **_distances(run),
        "labelled_share": labelled[0] if labelled else None,
        **compared_numbers(run.memory, run.records),
    }


def _distances(run: RunRecord) -> dict[str, Any]:
    """Return the mean HD95 of each class, and of how many cases: one that misses a class has none."""
    numbers: dict[str, Any] = {}
    for key in run.scores[0] if run.scores else ():
        if str(key).startswith("hd95_mm/"):
            known = numbers_of(run.scores, key)
            numbers[key] = mean_of(known)
            numbers[key.replace("hd95_mm", "hd95_mm_cases", 1)] = len(known)
    return numbers


def _status(text: str, only_predicts: bool) -> str:
    """Return how a run ended: a word that `ending` finds again, and why it ended early."""
    line = re.sub(r"(, )?exit code \d+$", "", text).strip()
    if line == "done":
        return "predicted" if only_predicts else "done"
    if line in ("running", ""):
        return line or "unknown"
    reason = re.sub(r"^(error|failed): ", "", line)
    if reason.startswith("stopped "):
        return reason
    return f"{'stopped' if reason.startswith('interrupted') else 'failed'}: {reason}"


def ending(status: str) -> str:
    """Return how a run ended in a word, `stopped` of `stopped by SIGTERM`; how the folds of a method did as it is."""
    if status[:1].isdecimal():
        return status
    return status.partition(" ")[0].rstrip(":")


def differing(rows: Sequence[ComparedRun]) -> list[str]:
    """Return the settings that differ. Missing settings are ignored, unless no run has its whole config."""
    some_are_whole = any(row.is_whole for row in rows)
    keys = dict.fromkeys(key for row in rows for key in row.settings)
    values = {key: [row.settings[key] for row in rows if key in row.settings] for key in keys}
    return [key for key in keys if len({*values[key]}) > 1 or (len(values[key]) < len(rows) and not some_are_whole)]


def setting_columns(rows: Sequence[ComparedRun]) -> list[str]:
    """Return the settings that differ, without options that follow from a name.

    From model=unet follows model.features, from an experiment any option that no command line sets.
    """
    keys = differing(rows)
    groups = [key for key in keys if "." not in key and all(key in row.settings for row in rows)]
    return [key for key in keys if not any(_follows(key, group, rows) for group in groups)]


def _follows(key: str, group: str, rows: Sequence[ComparedRun]) -> bool:
    """Return whether the name chosen in a group determines an option in all runs."""
    names = {row.settings[group] for row in rows}
    is_of_group = key.startswith(f"{group}.")
    if group == "experiment" and key != group and not names & {"null", "None"}:
        is_of_group = not any(key in row.named for row in rows)
    pairs = {(row.settings[group], row.settings.get(key)) for row in rows}
    return is_of_group and len(pairs) == len(names)


def method_columns(rows: Sequence[ComparedRun]) -> list[str]:
    """Return the settings that differ without those of no method, where the others tell as many runs apart."""
    keys = setting_columns(rows)
    untold = options_with("untold")
    kept = [key for key in keys if untold.get(key) in (None, "speed")]
    all_kinds, kinds = ({tuple(row.settings.get(key) for key in of) for row in rows} for of in (keys, kept))
    return kept if len(kinds) == len(all_kinds) else keys


def short(keys: Sequence[str]) -> list[str]:
    """Return the last word of each key, data.patch -> patch; the whole key if another one ends in the same word."""
    last = [key.rpartition(".")[2] for key in keys]
    return [word if last.count(word) == 1 else key for key, word in zip(keys, last, strict=True)]


def label(row: ComparedRun, keys: Sequence[str]) -> str:
    """Return a run's name and its settings among `keys`: `0: model=unet amp=true`."""
    pairs = zip(keys, short(keys), strict=True)
    settings = [f"{word}={row.settings[key]}" for key, word in pairs if key in row.settings]
    return f"{row.name}: {' '.join(settings)}" if settings else row.name


def mismatches(rows: Sequence[ComparedRun], varied: Sequence[str] = ()) -> list[str]:
    """Return one line per difference that makes the runs not comparable; an experiment varies `varied` on purpose."""
    options = [key for key in options_with("same") if key not in varied]
    values = {key: [row.settings.get(key) for row in rows] for key in options}
    values |= {key: [row.environment.get(key) for row in rows] for key in SAME_MACHINE}
    if len({row.settings.get("steps") for row in rows}) == 1:
        values["steps done"] = [row.numbers["steps_done"] for row in rows]
    values["grid of the Dice"] = [row.numbers.get("dice_grid") for row in rows]
    values["peak"] = [basis(row.numbers) for row in rows]
    values["kind of measured peak"] = [row.numbers["measured_kind"] for row in rows]
    return [line for key in values for line in unlike(key, rows, values[key])]


def unlike(key: str, rows: Sequence[ComparedRun], values: Sequence[Any]) -> list[str]:
    """Return a line on a key whose values differ between runs; [] where they do not."""
    return [f"{key}: {sides(rows, values)}"] if len({*values} - {None}) > 1 else []


def sides(rows: Sequence[ComparedRun], values: Sequence[Any]) -> str:
    """Return which runs have which value, `4 (runs 0, 1), 8 (run 2)`, without the value None."""
    runs: dict[Any, list[str]] = {}
    for row, value in zip(rows, values, strict=True):
        if value is not None:
            runs.setdefault(value, []).append(row.name)
    parts = []
    for value, names in runs.items():
        some = f"run{'s' if len(names) > 1 else ''} {', '.join(names)}"
        parts.append(f"{value} ({some if len(names) <= MOST_NAMES else f'{len(names)} runs'})")
    return ", ".join(parts)

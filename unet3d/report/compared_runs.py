"""Runs as the rows of a comparison: read from folders; which options tell them apart, and which forbid to compare.

Cross-validation: runs that differ in the fold that they hold out are one row, with mean and SD over the folds.
"""

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from unet3d.base.errors import UserError
from unet3d.config import compose
from unet3d.config.schema import FACTS, options_with
from unet3d.config.words import plain
from unet3d.report.held_out import METRICS, Score, by_class
from unet3d.report.plots import OVERLAID, Curve, basis, curve
from unet3d.report.report import compared_numbers
from unet3d.run.record import RunRecord, numbers_of, read_run
from unet3d.training.metrics import mean_of

RUN_FILES = ("STATUS", "config.yaml", "memory.json", "overrides.yaml")  # a run folder has at least one of them
FOLD = "data.fold"
MOST_NAMES = 6  # Runs with one value are named up to this number, then counted.
SAME_MACHINE = ("device", "gpu", "cpu", "torch", "threads")  # Keys of env.json.
MEAN = ""  # among the classes: the mean of all
NO_SCORE = Score((), {}, None, None, None, None)


@dataclass(frozen=True)
class ComparedRun:
    """A row of a comparison: one run, or the runs of one method, `folds`, by the fold that each holds out.

    `settings` are the config, flattened, as text, and the names chosen in config groups, e.g. model: unet.
    """

    name: str
    settings: Mapping[str, str]
    is_whole: bool  # whether `settings` is the whole config; else only the command line is known
    environment: Mapping[str, str]
    numbers: Mapping[str, Any]  # Keys, order and units of compare.csv; None for a number that it has not.
    curves: Mapping[str, Curve]  # Keys are those of metrics.jsonl.
    named: frozenset[str] = frozenset()  # options on its command line
    scores: Sequence[Mapping[str, str]] = ()  # scores.csv
    folds: "tuple[ComparedRun, ...]" = ()
    folder: Path = Path()  # A method has its first fold's.

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
        names = [os.path.relpath(folder, os.path.commonpath(folders)) for folder in folders]
    return [compared(name, read_run(folder)) for name, folder in zip(names, folders, strict=True)]


def compared(name: str, run: RunRecord) -> ComparedRun:
    """Return a run as a row of a comparison."""
    groups = {path.name for path in compose.config_folder().iterdir() if path.is_dir()}
    settings = {}  # names chosen in config groups, and the config; of a run without one, its command line
    for word in run.overrides or []:
        key, _, value = word.lstrip("+").partition("=")
        if key in groups or not run.settings:
            settings[key] = value
    settings |= {key: plain(value) for key, value in compose.flat(run.settings).items()}
    for key in {"data.root", "data.split", "data.groups"} & settings.keys():
        settings[key] = Path(settings[key]).name  # the same data may be in another folder
    settings.pop("resume", None)
    curves = {key: curve(run.records, key) for key in OVERLAID}
    return ComparedRun(
        name=name,
        settings=settings,
        is_whole=bool(run.settings),
        environment=run.environment,
        numbers=_numbers(run),
        curves={key: points for key, points in curves.items() if len(points[0])},
        named=frozenset(word.partition("=")[0].lstrip("+~") for word in run.overrides or []),
        scores=run.scores,
        folder=run.path,
    )


def _numbers(run: RunRecord) -> dict[str, Any]:
    """Return a run's numbers in the order of compare.csv."""
    measured = run.memory.get("measured", {})
    predicted = run.memory.get("predicted", {})
    steps = numbers_of(run.records, "time/step_s")
    labelled = numbers_of(run.records, "data/labelled_share")
    only_predicts = bool(predicted) and not measured and not run.records
    network_grid = "network" if run.spacing else None  # Without resampling both are one grid.
    distances: dict[str, Any] = {}
    for key in run.scores[0] if run.scores else ():
        if key.startswith("hd95_mm/"):
            known = numbers_of(run.scores, key)
            distances[key] = mean_of(known)
            distances[key.replace("hd95_mm", "hd95_mm_cases", 1)] = len(known)  # a case that misses a class has none
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
        **distances,
        "labelled_share": labelled[0] if labelled else None,
        **compared_numbers(run.memory, run.records),
    }


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
    kept = [key for key in keys if options_with("untold").get(key) in (None, "speed")]
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


def not_comparable(runs: Sequence[ComparedRun]) -> list[str]:
    """Return one line per difference that makes the runs not comparable."""
    rows = methods(runs)  # one has several folds, all the same as another's
    lines = _unlike(FOLD, rows, [row.settings.get(FOLD) for row in rows])
    lines = lines or _unlike("folds scored", rows, [row.scored for row in rows])
    values = {key: [run.settings.get(key) for run in runs] for key in options_with("same") if key != FOLD}
    values |= {key: [run.environment.get(key) for run in runs] for key in SAME_MACHINE}
    if len({run.settings.get("steps") for run in runs}) == 1:
        values["steps done"] = [run.numbers["steps_done"] for run in runs]
    values["grid of the Dice"] = [run.numbers.get("dice_grid") for run in runs]
    values["peak"] = [basis(run.numbers) for run in runs]
    values["kind of measured peak"] = [run.numbers["measured_kind"] for run in runs]
    return lines + [line for key in values for line in _unlike(key, runs, values[key])]


def _unlike(key: str, rows: Sequence[ComparedRun], values: Sequence[Any]) -> list[str]:
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


def methods(runs: Sequence[ComparedRun]) -> list[ComparedRun]:
    """Return one row per method, in order: runs that differ in their fold alone are one; others stay as they are.

    Of several runs that are one each holds out another fold, and each case is held out once.
    """
    groups: dict[frozenset[tuple[str, str]], list[ComparedRun]] = {}
    for run in runs:
        groups.setdefault(_method(run, runs), []).append(run)
    rows: dict[str, ComparedRun] = {run.name: run for run in runs}
    for same in groups.values():
        held_out = [run.settings.get(FOLD, "") for run in same]
        cases = [case.get("case") for run in same for case in run.scores]
        is_once = len({*held_out}) == len(same) and len({*cases}) == len(cases)
        if len(same) > 1 and is_once and all(fold.isdecimal() for fold in held_out):
            first, *others = same
            rows[first.name] = _merged(same)
            for run in others:
                del rows[run.name]
    return list(rows.values())


def repeats(runs: Sequence[ComparedRun]) -> list[ComparedRun]:
    """Return the first runs of one method that hold out the same fold; [] without any."""
    folds: dict[Any, list[ComparedRun]] = {}
    for run in runs:
        fold = run.settings.get(FOLD, "")
        if fold.isdecimal():
            folds.setdefault((_method(run, runs), fold), []).append(run)
    return next((same for same in folds.values() if len(same) > 1), [])


def _method(run: ComparedRun, runs: Sequence[ComparedRun]) -> frozenset[tuple[str, str]]:
    """Return the settings that a run shares with the other folds of its method.

    Of a run of which only the command line is known, it returns the settings of the method that this suits.
    """
    shared = _shared(run)
    if run.is_whole:
        return frozenset((key, value) for key, value in shared.items() if key in FACTS)
    suited = set()
    for other in runs:  # a command line may write `True` for true
        is_suited = all(other.settings.get(key, "").lower() == value.lower() for key, value in shared.items())
        if other.is_whole and is_suited:
            suited.add(_method(other, ()))
    return suited.pop() if len(suited) == 1 else frozenset(shared.items())


def _shared(run: ComparedRun) -> dict[str, str]:
    """Return the settings in which the folds of one method may not differ."""
    untold = options_with("untold")
    return {key: value for key, value in run.settings.items() if key != FOLD and untold.get(key) != "course"}


def _merged(runs: Sequence[ComparedRun]) -> ComparedRun:
    """Return the runs of one method as one row."""
    runs = sorted(runs, key=lambda run: int(run.settings[FOLD]))
    first = next((run for run in runs if run.is_whole), runs[0])
    row = replace(
        first,
        name=",".join(run.name for run in runs),
        settings={**_shared(first), FOLD: ",".join(run.settings[FOLD] for run in runs)},
        environment=dict(set.intersection(*(set(run.environment.items()) for run in runs))),
        curves={},
        named=frozenset().union(*(run.named for run in runs)),
        scores=[case for run in runs for case in run.scores],
        folds=tuple(runs),
    )
    return replace(row, numbers=_numbers_of_folds(row))


def _numbers_of_folds(row: ComparedRun) -> dict[str, Any]:
    """Return the numbers of a method: of peaks and errors the largest, the median of times, mean and SD of scores."""
    names = dict.fromkeys(key for run in row.folds for key in run.numbers)
    known = {key: [run.numbers[key] for run in row.folds if run.numbers.get(key) is not None] for key in names}
    common = {key: values[0] if len({*values}) == 1 else None for key, values in known.items()}
    endings = Counter(ending(status) for status in known["status"])
    counts = [f"{count} {kind}" for kind, count in endings.items()]
    every = scores(row, "dice").get(MEAN, NO_SCORE)
    numbers = {
        "status": ", ".join(counts) if len(counts) > 1 else next(iter(endings)),
        "parameters": common["parameters"],
        "peak_predicted_bytes": max(known["peak_predicted_bytes"], default=None),
        "peak_measured_bytes": max(known["peak_measured_bytes"], default=None),
        "measured_kind": common["measured_kind"],
        "error_bytes": max(known["error_bytes"], key=abs, default=None),
        "steps_done": min(known["steps_done"], default=None),
        "step_median_s": median(known["step_median_s"]) if known["step_median_s"] else None,
        "dice_mean": every.mean,
        "dice_grid": common["dice_grid"],
        "labelled_share": mean_of(known["labelled_share"]),
        "dice_sd": every.sd,
        "dice_pooled": every.pooled,
        "dice_pooled_sd": every.pooled_sd,
        "folds": row.scored,
        "cases": len(row.scores),
    }
    numbers |= {key: max(known[key], key=abs) for key in names if key.startswith("plan_") and known[key]}
    for metric in METRICS:
        for name, score in scores(row, metric).items():
            if name == MEAN:
                continue
            statistics = zip(("", "_sd", "_pooled", "_pooled_sd"), score[2:], strict=True)
            numbers |= {f"{metric}{what}/{name}": value for what, value in statistics}
            if metric == "hd95_mm":  # a case that misses a class has none
                numbers[f"{metric}_cases/{name}"] = len(score.cases)
    return numbers


def scores(row: ComparedRun, metric: str) -> dict[str, Score]:
    """Return a method's scores by class, the score of MEAN first; {} without any.

    The SD of MEAN is of the folds' means, the pooled one of the cases' means.
    """
    folds = [{case.get("case", ""): by_class(case, metric) for case in run.scores} for run in row.folds]
    cases = {case: classes for fold in folds for case, classes in fold.items()}
    found = {}
    for name in dict.fromkeys(name for classes in cases.values() for name in classes):
        means = [mean_of(classes.get(name) for classes in fold.values()) for fold in folds]
        found[name] = _score(means, {case: classes[name] for case, classes in cases.items() if name in classes})
    if not found:
        return {}
    of_folds = [mean_of(score.folds[place] for score in found.values()) for place in range(len(folds))]
    mean = _score(of_folds, {case: fmean(classes.values()) for case, classes in cases.items() if classes})
    return {MEAN: mean._replace(pooled=mean_of(score.pooled for score in found.values())), **found}


def _score(folds: Sequence[float | None], cases: Mapping[str, float]) -> Score:
    statistics: list[float | None] = []
    for values in (folds, cases.values()):
        known = [value for value in values if value is not None]
        statistics += [mean_of(known), stdev(known) if len(known) > 1 else None]
    ordered = sorted(cases.items(), key=lambda case: (case[1], case[0]))
    return Score(tuple(folds), dict(ordered), *statistics)

"""Cross-validation: runs that differ in the fold that they hold out are one row, with mean and SD over the folds."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean, median, stdev
from typing import Any

from unet3d.base.types import Table
from unet3d.config.schema import FACTS, options_with
from unet3d.report.compared_runs import FOLD, ComparedRun, ending, short
from unet3d.report.scores import MEAN_OF_CLASSES, METRICS, MOST_COLUMNS, Score, by_class, shown
from unet3d.training.metrics import mean_of

TITLE = "Cross-validation: Dice of the held-out cases, mean ± SD over the folds"
NOTE = (
    "SD: of the folds' means, with n - 1. Pooled: mean ± SD over all cases, each of which was held out once. Mean of "
    "classes: mean of the classes' means; its pooled SD is that of the cases' means."
)
MEAN = ""  # among the classes: the mean of all
NO_SCORE = Score((), {}, None, None, None, None)


def methods(runs: Sequence[ComparedRun]) -> list[ComparedRun]:
    """Return one row per method, in order: runs that differ in their fold alone are one; others stay as they are."""
    rows: dict[str, ComparedRun] = {run.name: run for run in runs}
    for same in _groups(runs):
        if _are_folds(same):
            first, *others = same
            rows[first.name] = _merged(same)
            for run in others:
                del rows[run.name]
    return list(rows.values())


def repeats(runs: Sequence[ComparedRun]) -> list[ComparedRun]:
    """Return the first runs of one method that hold out the same fold; [] without any."""
    for group in _groups(runs):
        by_fold: dict[str, list[ComparedRun]] = {}
        for run in group:
            by_fold.setdefault(run.settings.get(FOLD, ""), []).append(run)
        for fold, same in by_fold.items():
            if len(same) > 1 and fold.isdecimal():
                return same
    return []


def _groups(runs: Sequence[ComparedRun]) -> list[list[ComparedRun]]:
    """Return the runs of each method, in order."""
    groups: dict[frozenset[tuple[str, str]], list[ComparedRun]] = {}
    for run in runs:
        groups.setdefault(_method(run, runs), []).append(run)
    return list(groups.values())


def _are_folds(runs: Sequence[ComparedRun]) -> bool:
    """Return whether several runs each hold out another fold, and each case is held out once."""
    if len(runs) < 2:
        return False
    held_out = [run.settings.get(FOLD, "") for run in runs]
    cases = [case.get("case") for run in runs for case in run.scores]
    if len(set(held_out)) < len(runs) or len(set(cases)) < len(cases):
        return False
    return all(fold.isdecimal() for fold in held_out)


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
    environments = [set(run.environment.items()) for run in runs]
    row = replace(
        first,
        name=",".join(run.name for run in runs),
        settings={**_shared(first), FOLD: ",".join(run.settings[FOLD] for run in runs)},
        environment=dict(set.intersection(*environments)),
        curves={},
        named=frozenset().union(*(run.named for run in runs)),
        scores=[case for run in runs for case in run.scores],
        folds=tuple(runs),
    )
    return replace(row, numbers=_numbers(row))


def _numbers(row: ComparedRun) -> dict[str, Any]:
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
            numbers[f"{metric}/{name}"] = score.mean
            numbers[f"{metric}_sd/{name}"] = score.sd
            numbers[f"{metric}_pooled/{name}"] = score.pooled
            numbers[f"{metric}_pooled_sd/{name}"] = score.pooled_sd
            if metric == "hd95_mm":  # a case that misses a class has none
                numbers[f"{metric}_cases/{name}"] = len(score.cases)
    return numbers


def scores(row: ComparedRun, metric: str) -> dict[str, Score]:
    """Return a method's scores by class, the score of MEAN first; {} without any.

    The SD of MEAN is of the folds' means, the pooled one of the cases' means.
    """
    folds = [{case.get("case", ""): by_class(case, metric) for case in run.scores} for run in row.folds]
    cases = {case: classes for fold in folds for case, classes in fold.items()}
    names = dict.fromkeys(name for classes in cases.values() for name in classes)
    if not names:
        return {}
    found = {}
    for name in names:
        means = [mean_of(classes.get(name) for classes in fold.values()) for fold in folds]
        found[name] = _score(means, {case: classes[name] for case, classes in cases.items() if name in classes})
    of_folds = [mean_of(score.folds[place] for score in found.values()) for place in range(len(folds))]
    mean = _score(of_folds, {case: fmean(classes.values()) for case, classes in cases.items() if classes})
    return {MEAN: mean._replace(pooled=mean_of(score.pooled for score in found.values())), **found}


def _score(folds: Sequence[float | None], cases: Mapping[str, float]) -> Score:
    known = [value for value in folds if value is not None]
    pooled = list(cases.values())
    return Score(tuple(folds), cases, mean_of(known), _sd(known), mean_of(pooled), _sd(pooled))


def _sd(values: Sequence[float]) -> float | None:
    return stdev(values) if len(values) > 1 else None


def spread(metric: str, mean: float | None, sd: float | None) -> str:
    """Return `0.623±0.041`; without SD the mean, "" without any."""
    if mean is None:
        return ""
    if sd is None:
        return shown(metric, mean)
    return f"{shown(metric, mean)}±{shown(metric, sd)}"


def table(rows: Sequence[ComparedRun], keys: Sequence[str]) -> Table:
    """Return the Dice of each cross-validated method, by class; `keys` are the options in which methods differ.

    It has no rows where no method has scores, as where runs only predict.
    """
    by_method = [(row, scores(row, "dice")) for row in rows if row.folds]
    names = list(dict.fromkeys(name for _, of_classes in by_method for name in of_classes))[:MOST_COLUMNS]
    body = []
    for row, of_classes in by_method if names else ():
        every = of_classes.get(MEAN, NO_SCORE)
        known = [of_classes.get(name, NO_SCORE) for name in names]
        settings = [row.settings.get(key, "") for key in keys]
        count = len(row.folds)
        scored = sum(bool(run.scores) for run in row.folds)
        folds = str(count) if count == scored else f"{scored}/{count}"
        pooled = spread("dice", every.pooled, every.pooled_sd)
        means = [spread("dice", score.mean, score.sd) for score in known]
        body.append([row.name, *settings, folds, str(len(row.scores)), pooled, *means])
    classes = [name or MEAN_OF_CLASSES for name in names]
    return Table(["run", *short(keys), "folds", "cases", "pooled", *classes], body)

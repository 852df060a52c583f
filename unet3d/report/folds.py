"""Cross-validation: runs that differ in the fold that they hold out are one row, with mean and SD over the folds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from math import isfinite
from pathlib import Path
from statistics import median, stdev
from textwrap import shorten
from typing import Any, NamedTuple

from unet3d.base.types import Table
from unet3d.config.compose import ABOUT
from unet3d.report.case_scores import METRICS, MOST_COLUMNS, shown
from unet3d.report.plots import LETTER, LETTERS, LINE, MARKERS, PALE, Curve, blank, plain, save_picture, short_name
from unet3d.report.run_folder import KINDS, as_number
from unet3d.training.metrics import mean_of

FOLD = "data.fold"
ASIDE = (FOLD, "tensorboard", "loggers", "requeue", "resume")  # in which the folds of one method may differ
ASIDE_GROUP = "wandb."  # so they may in all of this
TITLE = "Cross-validation: Dice of the held-out cases, mean ± SD over the folds"
NOTE = (
    "SD: of the folds' means, with n - 1. Pooled: mean ± SD over all cases, each of which was held out once. Mean of "
    "classes: that of the classes' means; its pooled SD is of the cases' means."
)
MEAN = ""  # among the classes: the mean of all
MOST_CLASSES = 20  # of the picture


@dataclass(frozen=True)
class Row:
    """One run. `settings`: the config, flattened, as text, and the names chosen in config groups, e.g. model: unet.

    Or the runs of one method, `folds`, by the fold that each holds out.
    """

    name: str
    settings: Mapping[str, str]
    is_whole: bool  # whether `settings` is the whole config; else only the command line is known
    environment: Mapping[str, str]
    numbers: Mapping[str, Any]  # with the names, order and units of compare.csv; None if there is no such number
    iou: Mapping[str, float]  # of each scored case, the mean over its foreground classes
    curves: Mapping[str, Curve]  # by their keys in metrics.jsonl
    named: frozenset[str] = frozenset()  # options on its command line
    scores: Sequence[Mapping[str, str]] = ()  # scores.csv
    folds: "tuple[Row, ...]" = ()

    @property
    def basis(self) -> str | None:
        """Whether its peak was measured or predicted; None without one."""
        return next((kind for kind in KINDS if self.numbers[f"peak_{kind}_bytes"] is not None), None)

    @property
    def scored(self) -> str | None:
        """The folds with scores, `0,1,2`; None for a run."""
        return ",".join(run.settings[FOLD] for run in self.folds if run.scores) if self.folds else None


class Score(NamedTuple):
    """A class's score of one method; None where there is none."""

    folds: tuple[float | None, ...]  # the mean of the cases of each fold
    cases: tuple[float, ...]  # of all folds, pooled
    mean: float | None  # of the folds
    sd: float | None
    pooled: float | None
    pooled_sd: float | None


def methods(runs: Sequence[Row]) -> list[Row]:
    """Return a row for each method, in order: runs that differ in their fold alone are one; others stay as they are."""
    groups: dict[frozenset[tuple[str, str]], list[int]] = {}
    for place, run in enumerate(runs):
        groups.setdefault(_method(run, runs), []).append(place)
    rows: list[tuple[int, Row]] = []
    for places in groups.values():
        same = [runs[place] for place in places]
        held_out = [run.settings.get(FOLD, "") for run in same]
        are_folds = len(set(held_out)) == len(same) and all(map(str.isdecimal, held_out))
        cases = [case.get("case") for run in same for case in run.scores]
        is_cross_validation = len(same) > 1 and are_folds and len(set(cases)) == len(cases)  # each is held out once
        if is_cross_validation:
            rows.append((places[0], _merged(same)))
        else:
            rows += zip(places, same, strict=True)
    return [row for _, row in sorted(rows, key=lambda pair: pair[0])]


def _method(run: Row, runs: Sequence[Row]) -> frozenset[tuple[str, str]]:
    """What a run has in common with the other folds; where only its command line is known, what that suits."""
    if run.is_whole:
        return frozenset((key, value) for key, value in _shared(run).items() if key in ABOUT)
    asked = _shared(run)
    suited = {_method(other, ()) for other in runs if other.is_whole and _suits(asked, other)}
    return suited.pop() if len(suited) == 1 else frozenset(asked.items())


def _shared(run: Row) -> dict[str, str]:
    return {key: value for key, value in run.settings.items() if key not in ASIDE and not key.startswith(ASIDE_GROUP)}


def _suits(asked: Mapping[str, str], run: Row) -> bool:
    """Whether a run is what a command line asks for; that may write `True` for true."""
    return all(run.settings.get(key, "").lower() == value.lower() for key, value in asked.items())


def _merged(runs: Sequence[Row]) -> Row:
    """The runs of one method as one row."""
    runs = sorted(runs, key=lambda run: int(run.settings[FOLD]))
    first = next((run for run in runs if run.is_whole), runs[0])
    row = replace(
        first,
        name=",".join(run.name for run in runs),
        settings={**_shared(first), FOLD: ",".join(run.settings[FOLD] for run in runs)},
        environment=dict(set.intersection(*(set(run.environment.items()) for run in runs))),
        iou={},
        curves={},
        named=frozenset().union(*(run.named for run in runs)),
        scores=[case for run in runs for case in run.scores],
        folds=tuple(runs),
    )
    return replace(row, numbers=_numbers(row))


def _numbers(row: Row) -> dict[str, Any]:
    """The numbers of a method: of peaks and errors the largest, the median of times, means and SD of scores."""

    def known(key: str) -> list[Any]:
        return [run.numbers[key] for run in row.folds if run.numbers[key] is not None]

    def common(key: str) -> Any:
        return known(key)[0] if len(set(known(key))) == 1 else None

    found = scores(row, "dice")
    every = found.get(MEAN)
    numbers = {
        "status": _status(row),
        "parameters": common("parameters"),
        "peak_predicted_bytes": max(known("peak_predicted_bytes"), default=None),
        "peak_measured_bytes": max(known("peak_measured_bytes"), default=None),
        "measured_kind": common("measured_kind"),
        "error_bytes": max(known("error_bytes"), key=abs, default=None),
        "steps_done": min(known("steps_done"), default=None),
        "step_median_s": median(known("step_median_s")) if known("step_median_s") else None,
        "dice_mean": every.mean if every else None,
        "labelled_share": mean_of(known("labelled_share")),
        "dice_sd": every.sd if every else None,
        "dice_pooled": every.pooled if every else None,
        "dice_pooled_sd": every.pooled_sd if every else None,
        "folds": row.scored,
        "cases": len(row.scores),
    }
    for metric in METRICS:
        for name, score in scores(row, metric).items():
            if name != MEAN:
                numbers |= {f"{metric}/{name}": score.mean, f"{metric}_sd/{name}": score.sd}
                numbers |= {f"{metric}_pooled/{name}": score.pooled, f"{metric}_pooled_sd/{name}": score.pooled_sd}
    return numbers


def ending(status: str) -> str:
    """Return how a run ended in a word, `stopped` of `stopped by SIGTERM`; how the folds of one method did as it is."""
    return status if status[:1].isdecimal() else status.partition(" ")[0].rstrip(":")


def _status(row: Row) -> str:
    """`done`, or how many ended how, `2 done, 1 failed`."""
    kinds = [ending(run.numbers["status"]) for run in row.folds]
    counts = {kind: kinds.count(kind) for kind in kinds}
    return kinds[0] if len(counts) == 1 else ", ".join(f"{count} {kind}" for kind, count in counts.items())


def scores(row: Row, metric: str) -> dict[str, Score]:
    """A method's scores by class, that of MEAN first; {} without any."""
    by_fold = [_cells(run.scores, metric) for run in row.folds]
    names = list(dict.fromkeys(name for cells in by_fold for case in cells for name in case))
    if not names:
        return {}
    means = [{name: mean_of(case.get(name) for case in cells) for name in names} for cells in by_fold]
    pooled = {name: [case[name] for cells in by_fold for case in cells if name in case] for name in names}
    found = {name: _score([fold[name] for fold in means], pooled[name]) for name in names}
    cases = [mean for cells in by_fold for case in cells if (mean := mean_of(case.values())) is not None]
    every = _score([mean_of(fold.values()) for fold in means], cases)
    return {MEAN: every._replace(pooled=mean_of(score.pooled for score in found.values())), **found}


def _score(folds: Sequence[float | None], cases: Sequence[float]) -> Score:
    known = [value for value in folds if value is not None]
    return Score(tuple(folds), tuple(cases), mean_of(known), _sd(known), mean_of(cases), _sd(cases))


def _sd(values: Sequence[float]) -> float | None:
    return stdev(values) if len(values) > 1 else None


def _cells(cases: Sequence[Mapping[str, str]], metric: str) -> list[dict[str, float]]:
    """The scores of each case by class, without those that it has not."""
    found = []
    for case in cases:
        cells = {str(key).partition("/"): as_number(cell) for key, cell in case.items()}
        found.append({n: x for (kind, _, n), x in cells.items() if kind == metric and x is not None and isfinite(x)})
    return found


def spread(metric: str, mean: float | None, sd: float | None) -> str:
    """`0.623±0.041`; without SD the mean, "" without any."""
    if mean is None:
        return ""
    return shown(metric, mean) if sd is None else f"{shown(metric, mean)}±{shown(metric, sd)}"


def table(rows: Sequence[Row], keys: Sequence[str], heads: Sequence[str]) -> Table:
    """Dice of each method, by class; `keys` are the options in which they differ, `heads` what to call these."""
    found = [(row, scores(row, "dice")) for row in rows if row.folds]
    names = list(dict.fromkeys(name for _, by_class in found for name in by_class))[:MOST_COLUMNS]
    body = []
    for row, by_class in found:
        count, scored = len(row.folds), sum(bool(run.scores) for run in row.folds)
        folds = str(count) if count == scored else f"{scored}/{count}"
        cells = [row.name, *(row.settings.get(key, "") for key in keys), folds, str(len(row.scores))]
        every = by_class.get(MEAN)
        cells.append(spread("dice", every.pooled, every.pooled_sd) if every else "")
        cells += [spread("dice", by_class[name].mean, by_class[name].sd) if name in by_class else "" for name in names]
        body.append(cells)
    classes = [name or "mean of classes" for name in names]
    return Table(["run", *heads, "folds", "cases", "pooled", *classes], body)


def folds_plot(rows: Sequence[tuple[str, Row]], path: Path) -> None:
    """Dice by class, of each method (label, row) a point a fold, and their mean with its SD."""
    found = [(plain(shorten(label, LETTERS, placeholder=" ...")), scores(row, "dice")) for label, row in rows]
    names = list(dict.fromkeys(name for _, by_class in found for name in by_class))[:MOST_CLASSES]
    apart = 0.8 / len(found)
    width = max(4.0, (0.25 * len(found) + 0.6) * len(names)) + LETTER * max(len(label) for label, _ in found) + 1.6
    figure = blank(width, max(4.0, LINE * len(found) + 1.4))
    axes = figure.subplots()
    for number, ((label, by_class), (marker, colour)) in enumerate(zip(found, cycle(MARKERS), strict=False)):
        for at, name in enumerate(names):
            score = by_class.get(name)
            if score is None or score.mean is None:
                continue
            x = at + apart * (number - (len(found) - 1) / 2)
            points = [value for value in score.folds if value is not None]
            axes.plot([x] * len(points), points, marker, color=colour, alpha=0.45, ms=4, mew=0)
            axes.errorbar(x, score.mean, yerr=score.sd, fmt=marker, color=colour, mec="black", mew=0.5, ms=7, capsize=3)
        axes.plot([], [], marker, color=colour, mec="black", mew=0.5, ms=7, label=label)
    axes.set_xticks(range(len(names)), [short_name(name) if name else "mean of\nclasses" for name in names])
    if len(names) > 4:
        axes.tick_params("x", rotation=90)
    axes.set_xlim(-0.6, len(names) - 0.4)
    axes.set_ylabel("Dice: folds, their mean ± SD")
    axes.grid(color=PALE, axis="y")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper left", bbox_to_anchor=(1.02, 1.02), frameon=False, fontsize=9)
    save_picture(figure, path)

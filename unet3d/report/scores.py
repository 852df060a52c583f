"""Scores of a run: the best, the median and the worst case, and tables by case and by class with their titles."""

from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from typing import Any, NamedTuple

from unet3d.base.types import Table
from unet3d.run.record import RunRecord, numbers_of
from unet3d.training.metrics import NETWORK, NOTE_KEY, mean_of

METRICS = {  # heading, digits
    "dice": ("Dice", 3),
    "iou": ("IoU", 3),
    "hd95_mm": ("HD95 (mm)", 2),
}
ROLES = ("best", "median", "worst")
MOST_COLUMNS = 200  # of the table of a page, which so stays under 2 MB
MOST_CELLS = 20_000
SCORES_TITLE = "Scores on the held-out cases"
OWN_GRIDS = "on the files' own grids"
MEAN_OF_CLASSES = "mean of classes"
CaseRow = Mapping[str, Any]  # of `RunRecord.scores`


class CaseDice(NamedTuple):
    """A case's Dice by class, without the classes that it has not, and their mean; None without any class."""

    name: str
    mean: float | None
    classes: Mapping[str, float]
    note: str = ""  # why a Dice is 0

    @property
    def title(self) -> str:
        """Its name, and the note in brackets, if there is one."""
        return f"{self.name} ({self.note})" if self.note else self.name


class Score(NamedTuple):
    """A class's score of one cross-validated method; None where it has no score."""

    folds: tuple[float | None, ...]  # the mean of the cases of each fold
    cases: Mapping[str, float]  # of all folds, pooled; from the lowest to the highest, equals by name
    mean: float | None  # of the folds
    sd: float | None
    pooled: float | None
    pooled_sd: float | None


def by_class(row: CaseRow, metric: str) -> dict[str, float]:
    """Return a case's scores by class, without the classes that it has not."""
    start = f"{metric}/"
    known = {key: cell for key, cell in row.items() if key.startswith(start) and cell is not None}
    return {key.removeprefix(start): cell for key, cell in known.items()}


def ranked(rows: Iterable[CaseRow]) -> list[CaseDice]:
    """Return the cases from the worst to the best; equals by name; cases without any class last."""
    cases = []
    for row in rows:
        dice = by_class(row, "dice")
        cases.append(CaseDice(row.get("case", ""), mean_of(dice.values()), dice, row.get(NOTE_KEY) or ""))
    return sorted(cases, key=lambda case: (case.mean is None, case.mean, case.name))


def chosen(rows: Iterable[CaseRow]) -> dict[str, CaseDice]:
    """Return the best, the median and the worst case by these words; of two cases no median, of one the word "".

    Of an even number the worse of the middle two is the median. Without any Dice, the first case by name.
    """
    cases = ranked(rows)
    scored = [case for case in cases if case.mean is not None]
    if len(scored) < 2:
        return {"": cases[0]} if cases else {}
    roles = {"best": scored[-1]}
    if len(scored) > 2:
        roles["median"] = scored[(len(scored) - 1) // 2]
    roles["worst"] = scored[0]
    return roles


def dice_by_class(rows: Sequence[CaseRow]) -> dict[str, list[float]]:
    """Return the Dice of all cases that have one, by class."""
    keys = [key for key in (rows[0] if rows else ()) if key.startswith("dice/")]
    return {key.removeprefix("dice/"): numbers_of(rows, key) for key in keys}


def case_table(rows: Sequence[CaseRow]) -> Table:
    """Return one row per case, the worst first: mean Dice, then Dice, IoU and HD95 by class.

    Of many cases these are the worst.
    """
    columns = [key.partition("/") for key in (rows[0] if rows else ())]
    keys = [key for metric in METRICS for key in columns if key[0] == metric][:MOST_COLUMNS]
    rows_of = {row.get("case", ""): row for row in rows}
    cells = []
    for case in ranked(rows)[: MOST_CELLS // max(1, len(keys))]:
        scores = [shown(key[0], rows_of[case.name].get("".join(key))) for key in keys]
        cells.append([case.title, shown("dice", case.mean), *scores])
    heads = [f"{METRICS[metric][0]} {name}" for metric, _, name in keys]
    return Table(["case", "Dice, mean of classes", *heads], cells)


def shown(metric: str, value: Any) -> str:
    """Return a score as text; "n/a" for None."""
    return "n/a" if value is None else f"{value:,.{METRICS[metric][1]}f}"


def spread(metric: str, mean: float | None, sd: float | None) -> str:
    """Return `0.623±0.041`; without SD the mean, "" without any."""
    if mean is None:
        return ""
    return shown(metric, mean) if sd is None else f"{shown(metric, mean)}±{shown(metric, sd)}"


def score_title(run: RunRecord, what: str = SCORES_TITLE) -> str:
    """Return the title of a table of scores: which weights, whether they are also the best, and on which grid."""
    if not run.last_validation:
        return what
    step = run.last_validation["step"]
    weights = "last checkpoint" if step == run.last_step else "checkpoint"
    if run.settings.get("optim", {}).get("average") is not None:
        weights = "average of the weights"
    also = "; also the best" if run.best_validation.get("step") == step else ""
    grid = f", {OWN_GRIDS}" if run.has_own_grids else f", at {run.spacing}" if run.spacing else ""
    return f"{what}, {weights} (step {step}{also}){grid}"


def score_table(run: RunRecord) -> Table:
    """Return one row per class, means over the cases of scores.csv, else of the last validation; and their mean."""
    if run.scores:
        return _means(run.scores, counts_cases=True)
    return _means([run.last_validation], "val/")


def other_scores(run: RunRecord) -> list[tuple[str, Table]]:
    """Return titles and scores on the network's grid, where the files have others, and of the best weights.

    The best weights are scored by their validation, and left out where they are the last.
    """
    tables = []
    if run.has_own_grids:
        grid = f", {run.spacing}" if run.spacing else ""
        tables.append((f"The same on the network's grid{grid}", _means(run.scores, NETWORK, counts_cases=True)))
    best = run.best_validation
    if best and best["step"] != run.last_validation["step"]:
        where = ", checkpoints/best.pt" if (run.path / "checkpoints" / "best.pt").is_file() else ""
        grid = f", at {run.spacing}" if run.spacing else ""
        tables.append((f"Best checkpoint (step {best['step']}{where}){grid}", _means([best], "val/")))
    return tables


def _means(rows: Sequence[Mapping[str, Any]], prefix: str = "", counts_cases: bool = False) -> Table:
    """Return the means of columns `prefix + metric/class`, one row per class.

    In brackets stands how many cases have an HD95, unless all have one.
    """
    keys = [key.removeprefix(prefix) for key in rows[0] if key.startswith(prefix)]
    scores = {key: [number for number in numbers_of(rows, prefix + key) if isfinite(number)] for key in keys}
    classes = [key.removeprefix("dice/") for key in keys if key.startswith("dice/")]
    metrics = [metric for metric in METRICS if any(key.startswith(f"{metric}/") for key in keys)]
    means = []
    table = []
    for name in classes:
        means.append([mean_of(scores.get(f"{metric}/{name}", ())) for metric in metrics])
        row = [name, *map(shown, metrics, means[-1])]
        if counts_cases:
            cases = len(scores[f"dice/{name}"])
            distances = len(scores.get(f"hd95_mm/{name}", ()))
            if 0 < distances != cases:
                row[-1] += f" ({distances})"
            row.append(str(cases))
        table.append(row)
    if len(classes) > 1:
        of_classes = map(mean_of, zip(*means, strict=True))
        table.append([MEAN_OF_CLASSES, *map(shown, metrics, of_classes), *([""] if counts_cases else [])])
    heads = ["class", *(METRICS[metric][0] for metric in metrics), *(["cases"] if counts_cases else [])]
    return Table(heads, table)

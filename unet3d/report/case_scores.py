"""Rows of scores.csv: the best, the median and the worst case, a table of all, and Dice by class."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from unet3d.base.types import Table
from unet3d.run.shapes import as_number
from unet3d.training.metrics import NOTE_KEY, mean_of

METRICS = {  # heading, digits
    "dice": ("Dice", 3),
    "iou": ("IoU", 3),
    "hd95_mm": ("HD95 (mm)", 2),
}
ROLES = ("best", "median", "worst")
MOST_COLUMNS = 200  # of the table of a page, which so stays under 2 MB
MOST_CELLS = 20_000
CaseRow = Mapping[str, str]


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


def ranked(rows: Iterable[CaseRow]) -> list[CaseDice]:
    """Return the cases from the worst to the best; equals by name; cases without any class last."""
    cases = []
    for row in rows:
        dice = {}
        for key, cell in row.items():
            value = as_number(cell)
            if str(key).startswith("dice/") and value is not None:
                dice[str(key).removeprefix("dice/")] = value
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
    columns = list(rows[0]) if rows else []
    dice = {}
    for key in columns:
        if str(key).startswith("dice/"):
            numbers = (as_number(row.get(key)) for row in rows)
            dice[str(key).removeprefix("dice/")] = [number for number in numbers if number is not None]
    return dice


def case_table(rows: Sequence[CaseRow]) -> Table:
    """Return one row per case, the worst first: mean Dice, then Dice, IoU and HD95 by class.

    Of many cases these are the worst.
    """
    keys = [str(key) for key in (rows[0] if rows else ())]
    keys = [key for key in keys if _metric(key) in METRICS]
    keys.sort(key=lambda key: list(METRICS).index(_metric(key)))
    keys = keys[:MOST_COLUMNS]
    heads = [f"{METRICS[_metric(key)][0]} {key.partition('/')[2]}" for key in keys]
    by_name = {row.get("case", ""): row for row in rows}
    cells = []
    for case in ranked(rows)[: MOST_CELLS // max(1, len(keys))]:
        row = by_name[case.name]
        scores = [shown(_metric(key), as_number(row.get(key))) for key in keys]
        cells.append([case.title, shown("dice", case.mean), *scores])
    return Table(["case", "Dice, mean of classes", *heads], cells)


def _metric(key: str) -> str:
    return key.partition("/")[0]


def shown(metric: str, value: Any) -> str:
    """Return a score as text; "n/a" for None."""
    if value is None:
        return "n/a"
    digits = METRICS[metric][1]
    return f"{value:,.{digits}f}"

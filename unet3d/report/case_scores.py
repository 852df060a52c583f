"""Rows of scores.csv: the best, the median and the worst case, a table of all, and Dice by class."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from unet3d.base.types import Table
from unet3d.report.run_folder import as_number
from unet3d.training.metrics import mean_of

METRICS = {"dice": ("Dice", 3), "iou": ("IoU", 3), "hd95_mm": ("HD95 (mm)", 2)}  # heading, digits
ROLES = ("best", "median", "worst")
MOST_COLUMNS, MOST_CELLS = 200, 20_000  # of the table of a page: it stays under 2 MB
Row = Mapping[str, str]


class CaseDice(NamedTuple):
    """A case's Dice by class, without the classes that it has not, and their mean; None without any class."""

    name: str
    mean: float | None
    classes: Mapping[str, float]


def ranked(rows: Iterable[Row]) -> list[CaseDice]:
    """The cases from the worst to the best; equals by name; those without any class last."""
    found = []
    for row in rows:
        cells = {str(key): as_number(cell) for key, cell in row.items() if str(key).startswith("dice/")}
        dice = {key.removeprefix("dice/"): value for key, value in cells.items() if value is not None}
        found.append(CaseDice(row.get("case", ""), mean_of(dice.values()), dice))
    return sorted(found, key=lambda case: (case.mean is None, case.mean, case.name))


def chosen(rows: Iterable[Row]) -> dict[str, CaseDice]:
    """The best, the median and the worst case by these words; of two cases no median, of one the word "".

    Of an even number the worse of the middle two is the median. Without any Dice, the first case by name.
    """
    cases = ranked(rows)
    scored = [case for case in cases if case.mean is not None]
    if len(scored) < 2:
        return dict(zip([""], cases, strict=False))
    middle = {"median": scored[(len(scored) - 1) // 2]} if len(scored) > 2 else {}
    return {"best": scored[-1]} | middle | {"worst": scored[0]}


def dice_by_class(rows: Sequence[Row]) -> dict[str, list[float]]:
    """The Dice of all cases that have one, by class."""
    columns = {str(key): [row.get(key) for row in rows] for key in (rows[0] if rows else ())}
    return {
        key.removeprefix("dice/"): [n for cell in cells if (n := as_number(cell)) is not None]
        for key, cells in columns.items()
        if key.startswith("dice/")
    }


def case_table(rows: Sequence[Row]) -> Table:
    """A row a case, the worst first: mean Dice, then Dice, IoU and HD95 by class; of many cases the worst."""
    keys = [str(key) for key in (rows[0] if rows else ()) if str(key).partition("/")[0] in METRICS]
    keys = sorted(keys, key=lambda key: list(METRICS).index(key.partition("/")[0]))[:MOST_COLUMNS]
    heads = [f"{METRICS[metric][0]} {name}" for metric, _, name in (key.partition("/") for key in keys)]
    cells, body = {row.get("case", ""): row for row in rows}, []
    for case in ranked(rows)[: MOST_CELLS // max(1, len(keys))]:
        found = [shown(key.partition("/")[0], as_number(cells[case.name].get(key))) for key in keys]
        body.append([case.name, shown("dice", case.mean), *found])
    return Table(["case", "Dice, mean of classes", *heads], body)


def shown(metric: str, value: float | None) -> str:
    """A score for people."""
    return "n/a" if value is None else f"{value:,.{METRICS[metric][1]}f}"

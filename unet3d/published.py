"""The 3D U-Net paper's experiments, and a sweep's scores beside them (Cicek et al. 2016, Tables 1 to 3).

The paper's kidneys are not public: its numbers are of other volumes, so what compares is the order of the rows.
"""

from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

from unet3d import compare_rows
from unet3d.compare_rows import Row
from unet3d.table import Table

LEARNING = ("model", "data.", "loss", "optim", "amp", "batch", "accumulate", "inference")  # settings of what is learned


class Published(NamedTuple):
    """A table of IoU. `by`: the setting that tells a row; `across`: the one that tells a column, or "case"."""

    title: str
    by: str
    across: str
    rows: dict[str, tuple[str, tuple[float, float, float]]]  # value of `by` -> its name, the paper's three IoU


class Line(NamedTuple):
    """A row of ours beside the paper's."""

    name: str
    ours: list[float | None]  # by column
    paper: tuple[float, float, float]


TABLES = {  # by the name in configs/experiment
    "cicek2016_semi": Published(
        "IoU, semi-automated: on slices held out of each volume, 3-fold; beside Table 1",
        "model",
        "data.sparse_fold",
        {
            "cicek2016_no_bn": ("3D without BN", (0.822, 0.857, 0.846)),
            "cicek2016": ("3D with BN", (0.855, 0.871, 0.863)),
            "cicek2016_2d": ("2D with BN", (0.785, 0.820, 0.782)),
        },
    ),
    "cicek2016_slices": Published(
        "IoU on held-out slices, by the number of annotated ones (yz,xz,xy); beside Table 2",
        "data.sparse",
        "case",
        {
            "[1,1,1]": ("1,1,1", (0.331, 0.483, 0.475)),
            "[2,2,1]": ("2,2,1", (0.676, 0.579, 0.738)),
            "[3,3,2]": ("3,3,2", (0.761, 0.808, 0.835)),
            "[5,5,3]": ("5,5,3", (0.856, 0.849, 0.872)),
        },
    ),
    "cicek2016_full": Published(
        "IoU, fully automated: on the volume left out; beside Table 3",
        "model",
        "data.fold",
        {
            "cicek2016_no_bn": ("3D without BN", (0.655, 0.734, 0.779)),
            "cicek2016": ("3D with BN", (0.761, 0.798, 0.554)),
            "cicek2016_2d": ("2D with BN", (0.619, 0.698, 0.325)),
        },
    ),
}


def experiment(rows: Sequence[Row]) -> Published | None:
    """The published experiment that all of these runs belong to, if there is one."""
    names = {row.settings.get("experiment", "") for row in rows}
    return TABLES.get(names.pop()) if len(names) == 1 else None


def columns(published: Published, rows: Sequence[Row]) -> list[str]:
    """What our columns stand for: cases, or values of the setting."""
    if published.across == "case":
        return sorted({case for row in rows for case in row.iou})
    values = {row.settings.get(published.across, "") for row in rows}
    return sorted(values, key=lambda value: (int(value) if value.isdecimal() else -1, value))


def lines(published: Published, rows: Sequence[Row]) -> list[Line]:
    """Ours beside the paper's, in the paper's order, as far as there are runs."""
    heads = columns(published, rows)
    found: list[Line] = []
    for value, (name, paper) in published.rows.items():
        runs = [row for row in rows if _chosen(row, published) == value]
        if runs:
            found.append(Line(name, [_score(published, runs, head) for head in heads], paper))
    return found


def table(published: Published, rows: Sequence[Row]) -> Table:
    """The same as text; "" where a run failed."""
    heads = columns(published, rows)
    word = "" if published.across == "case" else "fold "
    ours = [f"{word}{head}" for head in heads]
    body = [
        [
            line.name,
            *map(_shown, line.ours),
            _shown(mean(line.ours)),
            *map(_shown, line.paper),
            _shown(mean(line.paper)),
        ]
        for line in lines(published, rows)
    ]
    return Table(["", *ours, "mean", "paper: 1", "2", "3", "mean"], body)


def unlike(published: Published, rows: Sequence[Row]) -> list[str]:
    """A line for each setting in which runs of one cell differ; a cell is the mean over seeds, not over that."""
    cells: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row.iou:
            cells.setdefault((_chosen(row, published), row.settings.get(published.across, "")), []).append(row)
    found = {(key, cell) for (cell, _), runs in cells.items() for key in compare_rows.columns(runs)}
    return [
        f"{key}: differs between runs of one cell, {published.rows[cell][0]}"
        for key, cell in sorted(found)
        if key.startswith(LEARNING) and key not in compare_rows.SAME_CONFIG and cell in published.rows
    ]


def mean(values: Sequence[float | None]) -> float | None:
    """None where a value is missing: it would be the mean of something else."""
    return fmean(v for v in values if v is not None) if values and None not in values else None


def _chosen(row: Row, published: Published) -> str:
    """The row's value of the setting; the paper's network where no other was named."""
    return row.settings.get(published.by, "cicek2016" if published.by == "model" else "")


def _score(published: Published, runs: Sequence[Row], head: str) -> float | None:
    """Of runs that differ in nothing of the table, such as in their seed, the mean."""
    if published.across == "case":
        found = [row.iou[head] for row in runs if head in row.iou]
    else:
        found = [fmean(row.iou.values()) for row in runs if row.iou and row.settings.get(published.across) == head]
    return fmean(found) if found else None


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"

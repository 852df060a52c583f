"""Set the runs of an experiment of the 3D U-Net paper (Çiçek et al., MICCAI 2016) beside its tables 1 to 3.

    python train.py experiment=cicek2016_slices data=mni152
    python examples/cicek2016.py multirun/DATE/TIME-ID --picture cicek2016_slices.png

The paper's volumes are not public, so its IoU is of other ones.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from unet3d.report.compared_runs import ComparedRun, find_runs, read_runs

BY_NETWORK = {"cicek2016_no_bn": "3D without BN", "cicek2016": "3D with BN", "cicek2016_2d": "2D with BN"}
BY_SLICES = {value: value.strip("[]") for value in ("[1,1,1]", "[2,2,1]", "[3,3,2]", "[5,5,3]")}
Scores = list[float | None]  # None where a run is missing or failed


class PaperTable(NamedTuple):
    """A table of the paper: `by` names the option of a row, `across` that of a column, "case" for one a case."""

    title: str
    by: str
    across: str
    names: dict[str, str]  # of the rows, by the value of `by`
    iou: list[list[float]]  # of each row, of the paper's three volumes


class Row(NamedTuple):
    """A row of the paper's table, and the same of these runs."""

    name: str
    ours: Scores
    paper: Scores


TABLES = {
    "cicek2016_semi": PaperTable(
        "IoU, semi-automated: on slices held out of each volume, 3-fold; beside Table 1",
        *("model", "data.sparse_fold", BY_NETWORK),
        [[0.822, 0.857, 0.846], [0.855, 0.871, 0.863], [0.785, 0.820, 0.782]],
    ),
    "cicek2016_slices": PaperTable(
        "IoU on held-out slices, by the number of annotated ones (yz,xz,xy); beside Table 2",
        *("data.sparse", "case", BY_SLICES),
        [[0.331, 0.483, 0.475], [0.676, 0.579, 0.738], [0.761, 0.808, 0.835], [0.856, 0.849, 0.872]],
    ),
    "cicek2016_full": PaperTable(
        "IoU, fully automated: on the volume left out; beside Table 3",
        *("model", "data.fold", BY_NETWORK),
        [[0.655, 0.734, 0.779], [0.761, 0.798, 0.554], [0.619, 0.698, 0.325]],
    ),
}


def table_of(runs: Sequence[ComparedRun]) -> PaperTable:
    """Return the paper's table that all of these runs repeat."""
    names = {run.settings.get("experiment", "") for run in runs}
    if len(names) != 1 or not names <= TABLES.keys():
        raise SystemExit(f"give the runs of one experiment among {', '.join(TABLES)}")
    return TABLES[names.pop()]


def mean(scores: Sequence[float | None]) -> float | None:
    """Return the mean of the scores that are there."""
    known = [score for score in scores if score is not None]
    return fmean(known) if known else None


def cells(run: ComparedRun, across: str) -> dict[str, float | None]:
    """Return the IoU of a run by column: a case is the mean of its classes, and another column that of its cases."""
    cases = {}
    for line in run.scores:
        cases[line["case"]] = mean([float(cell) for key, cell in line.items() if key.startswith("iou/") and cell])
    return cases if across == "case" else {run.settings[across]: mean(list(cases.values()))}


def beside(table: PaperTable, runs: Sequence[ComparedRun]) -> tuple[list[str], list[Row]]:
    """Return our columns, and the rows that have runs; a cell is the mean over runs with other seeds."""
    columns = sorted({name for run in runs for name in cells(run, table.across)})
    rows = []
    for (value, name), paper in zip(table.names.items(), table.iou, strict=True):
        of_row = [cells(run, table.across) for run in runs if run.settings.get(table.by, "cicek2016") == value]
        if of_row:
            ours = [mean([scores.get(column) for scores in of_row]) for column in columns]
            rows.append(Row(name, ours, list(paper)))
    return columns, rows


def text(scores: Scores) -> list[str]:
    """Return scores and their mean as text; "" for a missing one, and for a mean that would miss one."""
    whole = None if None in scores else mean(scores)
    return ["" if score is None else f"{score:.3f}" for score in [*scores, whole]]


def draw(rows: Sequence[Row], title: str, path: Path) -> None:
    """Draw a column for each row of the table, with lines through the means."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 4.2), layout="constrained")
    of_paper = ("the paper's, on its own volumes", [row.paper for row in rows], 0.06, "grey")
    for label, columns, shift, colour in (("these runs", [row.ours for row in rows], -0.06, "C0"), of_paper):
        for index, scores in enumerate(columns):
            known = [score for score in scores if score is not None]
            axes.plot([index + shift] * len(known), known, "o", color=colour)
        means = [(index + shift, mean(scores)) for index, scores in enumerate(columns)]
        axes.plot(*zip(*[point for point in means if point[1] is not None], strict=True), color=colour, label=label)
    axes.set(xlim=(-0.5, len(rows) - 0.5), ylim=(0, 1), ylabel="IoU")
    axes.set_xticks(range(len(rows)), [row.name for row in rows])
    axes.set_title(title.replace("; ", ";\n"), fontsize=10)
    axes.legend(loc="lower right")
    figure.savefig(path)


def main() -> None:
    """Print the table, and draw it if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path, nargs="+", help="the folder of a sweep, or run folders")
    parser.add_argument("--picture", type=Path, help="the picture to write")
    arguments = parser.parse_args()
    runs = read_runs(find_runs(arguments.runs))
    table = table_of(runs)
    columns, rows = beside(table, runs)
    heads = columns if table.across == "case" else [f"fold {name}" for name in columns]
    lines = [["", *heads, "mean", "paper: 1", "2", "3", "mean"]]
    lines += [[row.name, *text(row.ours), *text(row.paper)] for row in rows]
    print(table.title)
    for name, *numbers in lines:
        print(f"{name:<13}", *(f"{number:>10}" for number in numbers))
    if arguments.picture:
        draw(rows, table.title, arguments.picture)


if __name__ == "__main__":
    main()

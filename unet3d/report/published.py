"""Tables of the paper, IoU on its own volumes, beside the runs of the experiment that repeats them."""

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml  # type: ignore[import-untyped]

from unet3d.base.types import Table
from unet3d.config.schema import options_with
from unet3d.report.compared_runs import ComparedRun
from unet3d.report.comparison_plots import PublishedRow
from unet3d.report.differences import setting_columns
from unet3d.training.metrics import mean_of

AFFECTS_SCORES = (  # beginnings of options
    "model",
    "data.",
    "loss",
    "optim",
    "amp",
    "batch",
    "accumulate",
    "init",
    "inference.overlap",
    "inference.mirror",
)


class Published(NamedTuple):
    """A published table of IoU. `by`: the option that names a row; `across`: the one that names a column, or "case"."""

    title: str
    by: str
    across: str
    rows: Mapping[str, Mapping[str, Any]]  # value of `by` -> the row's name, the IoU of the paper's volumes

    def row_of(self, run: ComparedRun) -> str:
        """Return the run's value of `by`; the paper's network if no other was named."""
        default = "cicek2016" if self.by == "model" else ""
        return run.settings.get(self.by, default)

    def scores(self, run: ComparedRun) -> Mapping[str, float | None]:
        """Return the run's IoU in its columns; None if it failed."""
        if self.across == "case":
            return run.iou
        return {run.settings.get(self.across, ""): mean_of(run.iou.values())}

    def columns(self, runs: Sequence[ComparedRun]) -> list[str]:
        """Return the names of our columns: cases, or values of the option `across`."""
        names = {name for run in runs for name in self.scores(run)}
        return sorted(names, key=lambda name: (int(name) if name.isdecimal() else -1, name))

    def beside(self, runs: Sequence[ComparedRun]) -> list[PublishedRow]:
        """Return the rows that have runs, ours and the paper's; a cell is the mean over runs with other seeds."""
        columns = self.columns(runs)
        rows = []
        for value, row in self.rows.items():
            of_row = [self.scores(run) for run in runs if self.row_of(run) == value]
            if of_row:
                ours = [mean_of(scores.get(name) for scores in of_row) for name in columns]
                rows.append(PublishedRow(row["name"], ours, row["iou"]))
        return rows

    def table(self, runs: Sequence[ComparedRun]) -> Table:
        """Return `beside` as text; "" where a run failed, and for a mean that would miss one."""
        heads = self.columns(runs)
        if self.across != "case":
            heads = [f"fold {name}" for name in heads]
        rows = [[row.name, *_with_mean(row.ours), *_with_mean(row.paper)] for row in self.beside(runs)]
        return Table(["", *heads, "mean", "paper: 1", "2", "3", "mean"], rows)

    def unlike(self, runs: Sequence[ComparedRun]) -> list[str]:
        """Return one line per setting in which runs of one cell differ: a cell is the mean over seeds alone."""
        cells: dict[tuple[str, str], list[ComparedRun]] = {}
        for run in runs:
            row = self.row_of(run)
            if run.iou and row in self.rows:
                column = run.settings.get(self.across, "")
                cells.setdefault((row, column), []).append(run)
        differences = set()
        for (row, _), same in cells.items():
            for key in setting_columns(same):
                if key.startswith(AFFECTS_SCORES) and key not in options_with("same"):
                    differences.add((key, row))
        return [
            f"{key}: differs between runs of one cell, {self.rows[row]['name']}" for key, row in sorted(differences)
        ]


def _with_mean(values: Sequence[float | None]) -> list[str]:
    mean = None if None in values else mean_of(values)
    return ["" if value is None else f"{value:.3f}" for value in [*values, mean]]


@cache
def published_tables() -> dict[str, Published]:
    """Return the paper's tables, by the name in configs/experiment."""
    text = Path(__file__).with_name("published.yaml").read_text(encoding="utf-8")
    return {name: Published(**table) for name, table in yaml.safe_load(text).items()}


def published_experiment(rows: Sequence[ComparedRun]) -> Published | None:
    """Return the published experiment that all of these runs belong to; None without one."""
    names = {row.settings.get("experiment", "") for row in rows}
    return published_tables().get(names.pop()) if len(names) == 1 else None

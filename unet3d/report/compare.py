"""Runs side by side: a table, compare.csv, figures and a page."""

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from textwrap import shorten
from typing import Any

from unet3d.base.errors import escaped
from unet3d.base.files import from_here, write_csv, write_text
from unet3d.base.terminal import NARROW, narrow_tables, paper
from unet3d.base.types import Table, mib, tabulated
from unet3d.config.schema import Config, options_with
from unet3d.report import compared_runs
from unet3d.report.compared_runs import NO_SCORE, ComparedRun, label, method_columns, methods, short
from unet3d.report.held_out import MEAN_OF_CLASSES, MOST_COLUMNS, folds_plot, spread
from unet3d.report.loggers import Loggers, wandb_loggers
from unet3d.report.plots import basis, comparison_plot, curves_plot, dice_title, remove_picture
from unet3d.report.report import read_picture, render

STATUS_LETTERS = 110
FOLDS_TITLE = "Cross-validation: Dice of the held-out cases, mean ± SD over the folds"
FOLDS_NOTE = (
    "SD: of the folds' means, with n - 1. Pooled: mean ± SD over all cases, each of which was held out once. Mean of "
    "classes: mean of the classes' means; its pooled SD is that of the cases' means."
)
COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {  # of tables for people: the heading of a number, its format
    "status": ("status", compared_runs.ending),  # why a run failed is below the table
    "peak_predicted_bytes": ("peak, predicted (MiB)", mib),
    "peak_measured_bytes": ("peak, measured (MiB)", mib),
    "error_bytes": ("error (bytes)", "{:,}".format),
    "step_median_s": ("step (s)", "{:.3g}".format),
    "plan_tensors": ("peak, planned (MiB)", mib),
    "plan_tensors_error": ("error of the plan", "{:+.1%}".format),
    "plan_reserved": ("reserved, planned (MiB)", mib),
    "plan_reserved_error": ("error of the plan", "{:+.1%}".format),
    "plan_step": ("step, planned (s)", "{:.3g}".format),
    "plan_step_error": ("error of the plan", "{:+.1%}".format),
    "labelled_share": ("labelled voxels", "{:.1%}".format),
    "dice_mean": ("Dice", "{:.3f}".format),  # `dice_title` says on which grid
    "parameters": ("parameters", "{:,}".format),
}
ABOUT = (
    "Peak: the most bytes held at once in a step, in MiB (2^20 bytes). Error: predicted minus measured, of tensors, on "
    "a GPU without workspaces and the allocator's rounding. Step: the median time of one. Dice: the mean of classes, "
    "of the last weights or their average: on the files' own grids where the network's is another one, else of the "
    "last validation. best.pt may hold the weights of an earlier step."
)


def compare_runs(paths: Sequence[Path], out: Path | None) -> None:
    """Print the runs, or the children of sweeps, side by side; with `out`, write the files there. Raises UserError."""
    rows = compared_runs.read_runs(compared_runs.find_runs(paths))
    print_comparison(rows)
    if out is not None:
        print(escaped(write_comparison(rows, out)))


def finish_sweep(jobs: Mapping[Path, Config], folder: Path) -> None:
    """Compare a sweep's jobs (run folder: config): on the terminal, in its folder, in wandb under the first config."""
    rows = compared_runs.read_runs([job.resolve() for job in jobs])
    print_comparison(rows)
    path = write_comparison(rows, folder)
    config = next(iter(jobs.values()))
    # the last part of a path is no path any more, but often a patient's name
    hidden = options_with("private") if config.wandb.private else ()
    loggers = Loggers(wandb_loggers(config, folder))
    loggers.table("compare", *numbers_table(methods(rows), hidden))
    loggers.close(0)
    print(f"compared: {escaped(from_here(path))}")


def comparison_table(rows: Sequence[ComparedRun], left_out: Collection[str] = (), labelled: bool = False) -> Table:
    """Return the settings that differ and the results, in units for people; "" if a run has no such number.

    Numbers that no run has have no column, nor have those that are `left_out`. `labelled`: with all settings in the
    first cell, which is wrapped, so that no numbers of a page are cut off.
    """
    keys = method_columns(rows)
    known = {field for row in rows for field, value in row.numbers.items() if value is not None}
    headings = {field: heading for field, (heading, _) in COLUMNS.items() if field in known and field not in left_out}
    if "dice_mean" in headings:
        headings["dice_mean"] = dice_title(row.numbers.get("dice_grid") for row in rows)
    cells = []
    for row in rows:
        of_row = [label(row, keys)] if labelled else [row.name, *(row.settings.get(key, "") for key in keys)]
        for field in headings:
            value = row.numbers.get(field)
            text = "" if value is None else COLUMNS[field][1](value)
            of_row.append(spread("dice", value, row.numbers.get("dice_sd")) if field == "dice_mean" else text)
        cells.append(of_row)
    return Table(["run", *([] if labelled else short(keys)), *headings.values()], cells)


def folds_table(rows: Sequence[ComparedRun], keys: Sequence[str]) -> Table:
    """Return the Dice of each cross-validated method, by class; `keys` are the options in which methods differ.

    It has no rows where no method has scores, as where runs only predict.
    """
    by_method = [(row, compared_runs.scores(row, "dice")) for row in rows if row.folds]
    names = list(dict.fromkeys(name for _, of_classes in by_method for name in of_classes))[:MOST_COLUMNS]
    body = []
    for row, of_classes in by_method if names else ():
        settings = [row.settings.get(key, "") for key in keys]
        count = len(row.folds)
        scored = sum(bool(run.scores) for run in row.folds)
        folds = str(count) if count == scored else f"{scored}/{count}"
        means = [of_classes.get(name, NO_SCORE) for name in names]  # the first is that of all classes
        spreads = [(means[0].pooled, means[0].pooled_sd), *((score.mean, score.sd) for score in means)]
        body.append([row.name, *settings, folds, str(len(row.scores)), *(spread("dice", *pair) for pair in spreads)])
    classes = [name or MEAN_OF_CLASSES for name in names]
    return Table(["run", *short(keys), "folds", "cases", "pooled", *classes], body)


def _not_telling(rows: Sequence[ComparedRun]) -> set[str]:
    """Return the numbers that a terminal does without: plans, and what is the same for all runs."""
    values = {field: {row.numbers.get(field) for row in rows} for field in COLUMNS}
    left_out = {field for field in COLUMNS if field.startswith("plan_")}
    if values["status"] == {"done"}:
        left_out.add("status")
    if values["error_bytes"] == {0}:
        left_out |= {"error_bytes", "peak_predicted_bytes"}
    if len(rows) > 1 and len(values["parameters"]) == 1:
        left_out.add("parameters")
    return left_out


def numbers_table(rows: Sequence[ComparedRun], hidden: Collection[str] = ()) -> tuple[list[str], list[list[Any]]]:
    """Return the comparison for programs: headings with their units, and plain values; None for a missing number.

    The settings that are `hidden` have no column.
    """
    keys = [key for key in compared_runs.setting_columns(rows) if key not in hidden]
    return tabulated([{"run": row.name, **{key: row.settings.get(key) for key in keys}, **row.numbers} for row in rows])


def print_comparison(runs: Sequence[ComparedRun]) -> None:
    """Print the table, then a line for each run that failed and for each reason not to compare."""
    rows = methods(runs)
    left_out = _not_telling(rows)
    titled = [(_title(runs), comparison_table(rows, left_out))]
    by_folds = folds_table(rows, method_columns(rows))
    if by_folds.rows:
        titled.append((FOLDS_TITLE, by_folds))
    lines = [*_failures(runs), *(f"not comparable: {line}" for line in compared_runs.not_comparable(runs))]
    if "error_bytes" in left_out:
        lines.insert(0, "predicted minus measured: 0 bytes in each")
    print_tables(titled, lines)


def print_tables(titled: Sequence[tuple[str, Table]], lines: Sequence[str]) -> None:
    """Print tables, then lines."""
    console = paper(NARROW)
    for title, table in titled:
        console.print(narrow_tables(title, table, console.width))
    for line in lines:
        console.print(escaped(line), soft_wrap=True)


def _title(runs: Sequence[ComparedRun]) -> str:
    count = len(methods(runs))
    if len(runs) == 1:
        return "One run"
    if count == len(runs):
        return f"Comparison of {len(runs)} runs"
    if count == 1:
        return f"Cross-validation, {len(runs)} runs"
    return f"Comparison of {count} methods, {len(runs)} runs"


def _failures(rows: Sequence[ComparedRun]) -> list[str]:
    """Return how each run that failed or was stopped ended, in short; compare.csv and its STATUS have all of it."""
    lines = []
    for row in rows:
        status = row.numbers["status"].partition("; to go on: ")[0]
        if status.startswith(("failed", "stopped")):
            lines.append(f"run {row.name} {shorten(status, STATUS_LETTERS, placeholder=' ...')}")
    return lines


def write_comparison(runs: Sequence[ComparedRun], folder: Path) -> Path:
    """Write compare.csv, .png, .html and curves.png, of cross-validations folds.csv, .png; return the page's path.

    The rows of compare.csv are of methods, those of folds.csv of their runs.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "folds.csv").unlink(missing_ok=True)  # of an earlier comparison, as the pictures
    for name in ("compare", "curves", "folds"):
        remove_picture(folder / f"{name}.png")
    rows = methods(runs)
    keys = method_columns(rows)
    write_csv(folder / "compare.csv", *numbers_table(rows))
    if any(row.folds for row in rows):
        write_csv(folder / "folds.csv", *numbers_table(runs))
    _draw_peaks(runs, keys, folder / "compare.png")
    keys_of_runs = method_columns(runs)
    curves = {label(run, keys_of_runs): run.curves for run in runs if run.curves}
    if curves:
        curves_plot(curves, folder / "curves.png")
    scored = [row for row in rows if row.folds and row.numbers["dice_mean"] is not None]
    if scored:
        folds_plot([(label(row, keys), compared_runs.scores(row, "dice")) for row in scored], folder / "folds.png")
    values = {key: [row.settings.get(key) for row in rows] for key in compared_runs.differing(rows)}
    differences = [[key, compared_runs.sides(rows, values[key])] for key in values]
    page = render(
        "compare.html",
        title=_title(runs),
        about=ABOUT,
        runs=comparison_table(rows, labelled=True),
        failures=_failures(runs),
        folds=folds_table(rows, keys),
        folds_title=FOLDS_TITLE,
        folds_note=FOLDS_NOTE,
        each_run=comparison_table(runs),
        not_comparable=compared_runs.not_comparable(runs),
        figure=lambda name, about: read_picture(folder / name, about),
        differences=Table(["option", "values"], differences),
    )
    write_text(folder / "compare.html", page)
    return folder / "compare.html"


def _draw_peaks(runs: Sequence[ComparedRun], keys: Sequence[str], path: Path) -> None:
    """Draw the runs with a measured peak; with fewer than two, all with a peak; without any, nothing."""
    drawn = [run for run in runs if basis(run.numbers) == "measured"]
    if len(drawn) < 2:
        drawn = [run for run in runs if basis(run.numbers) is not None]
    if drawn:
        names = [line.partition(":")[0] for line in compared_runs.not_comparable(drawn)]
        remark = f"Not comparable: the runs differ in {', '.join(names)}" if names else ""
        comparison_plot({label(row, keys): row.numbers for row in methods(drawn)}, remark, path)

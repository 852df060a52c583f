"""Runs side by side: a table, compare.csv, figures and a page. And all out-of-fold cases of cross-validations.

These are for papers: on the terminal, and as Markdown, CSV and LaTeX, with a paired test between two methods on the
same cases: Wilcoxon's signed-rank test, by SciPy.
"""

import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import isfinite
from pathlib import Path
from statistics import fmean, median
from textwrap import shorten
from typing import Any

from unet3d.base.errors import UserError, escaped
from unet3d.base.files import from_here, write_csv, write_text
from unet3d.base.terminal import NARROW, narrow_tables, paper
from unet3d.base.types import Table, mib, tabulated
from unet3d.config.schema import Config, options_with
from unet3d.report import compared_runs
from unet3d.report.compared_runs import FOLD, NO_SCORE, ComparedRun, label, method_columns, short
from unet3d.report.held_out import MEAN_OF_CLASSES, METRICS, MOST_COLUMNS, folds_plot, ranked, shown, spread
from unet3d.report.loggers import Loggers, wandb_loggers
from unet3d.report.plots import basis, comparison_plot, curves_plot, dice_title, remove_picture
from unet3d.report.report import read_picture, render

STATUS_LETTERS = 110
FOLDS_TITLE = "Cross-validation: Dice of the held-out cases, mean ± SD over the folds"
FOLDS_NOTE = (
    "SD: of the folds' means, with n - 1. Pooled: mean ± SD over all cases, each of which was held out once. Mean of "
    "classes: mean of the classes' means; its pooled SD is that of the cases' means."
)
COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {  # Headings and formats of numbers in tables for people.
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
WORST = 5  # cases by name
NOTE = (
    "Mean ± SD over all out-of-fold cases, each scored once, by the network that did not learn from it, on the grid of "
    "its file. Mean of classes: the mean of the classes' means; its SD is that of the cases' means. In brackets: how "
    "many cases have the score, where not all have."
)
TESTED = ("dice", "hd95_mm")  # IoU ranks the cases as Dice does
TEST_NOTE = (
    "Wilcoxon signed-rank test of second minus first, two-sided (scipy.stats.wilcoxon): pairs are out-of-fold cases "
    "that both methods have scored; pairs without a difference are left out of ranks. W+: the sum of ranks in favour "
    "of higher values of the second. Effect: matched-pairs rank-biserial correlation, 1 where the second is higher in "
    "each pair that differs, -1 where it is lower. p is not corrected for the number of rows. Cases of one fold share "
    "a network, so that the test is of these trainings, not of others."
)
IN_LATEX = str.maketrans(
    {
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "<": r"\textless{}",
        ">": r"\textgreater{}",
        "±": r" $\pm$ ",
        **{letter: f"\\{letter}" for letter in "&%$#_{}"},
    }
)
IN_MARKDOWN = re.compile(r"([\\`*_\[\]<>|&])")
Titled = Sequence[tuple[str, Table]]


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
    # The last part of a path is no path any more, but often a patient's name.
    hidden = options_with("private") if config.wandb.private else ()
    loggers = Loggers(wandb_loggers(config, folder))
    loggers.table("compare", *numbers_table(compared_runs.methods(rows), hidden))
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


def numbers_table(rows: Sequence[ComparedRun], hidden: Collection[str] = ()) -> tuple[list[str], list[list[Any]]]:
    """Return the comparison for programs: headings with their units, and plain values; None for a missing number.

    The settings that are `hidden` have no column.
    """
    keys = [key for key in compared_runs.setting_columns(rows) if key not in hidden]
    return tabulated([{"run": row.name, **{key: row.settings.get(key) for key in keys}, **row.numbers} for row in rows])


def print_comparison(runs: Sequence[ComparedRun]) -> None:
    """Print the table, then a line for each run that failed and for each reason not to compare.

    A terminal does without plans, and without what is the same for all runs.
    """
    rows = compared_runs.methods(runs)
    values = {field: {row.numbers.get(field) for row in rows} for field in COLUMNS}
    left_out = {field for field in COLUMNS if field.startswith("plan_")}
    lines = [*_failures(runs), *(f"not comparable: {line}" for line in compared_runs.not_comparable(runs))]
    if values["status"] == {"done"}:
        left_out.add("status")
    if values["error_bytes"] == {0}:
        left_out |= {"error_bytes", "peak_predicted_bytes"}
        lines.insert(0, "predicted minus measured: 0 bytes in each")
    if len(rows) > 1 and len(values["parameters"]) == 1:
        left_out.add("parameters")
    titled = [(_title(runs), comparison_table(rows, left_out))]
    by_folds = folds_table(rows, method_columns(rows))
    if by_folds.rows:
        titled.append((FOLDS_TITLE, by_folds))
    print_tables(titled, lines)


def print_tables(titled: Sequence[tuple[str, Table]], lines: Sequence[str]) -> None:
    """Print tables, then lines."""
    console = paper(NARROW)
    for title, table in titled:
        console.print(narrow_tables(title, table, console.width))
    for line in lines:
        console.print(escaped(line), soft_wrap=True)


def _title(runs: Sequence[ComparedRun]) -> str:
    count = len(compared_runs.methods(runs))
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

    The rows of compare.csv are of methods, those of folds.csv of their runs. compare.png has the runs with a measured
    peak; with fewer than two, all with a peak.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "folds.csv").unlink(missing_ok=True)  # An earlier comparison may have left it.
    for name in ("compare", "curves", "folds"):
        remove_picture(folder / f"{name}.png")
    rows = compared_runs.methods(runs)
    keys = method_columns(rows)
    write_csv(folder / "compare.csv", *numbers_table(rows))
    if any(row.folds for row in rows):
        write_csv(folder / "folds.csv", *numbers_table(runs))
    drawn = [run for run in runs if basis(run.numbers) == "measured"]
    if len(drawn) < 2:
        drawn = [run for run in runs if basis(run.numbers) is not None]
    if drawn:
        names = [line.partition(":")[0] for line in compared_runs.not_comparable(drawn)]
        remark = f"Not comparable: the runs differ in {', '.join(names)}" if names else ""
        numbers_of = {label(row, keys): row.numbers for row in compared_runs.methods(drawn)}
        comparison_plot(numbers_of, remark, folder / "compare.png")
    curves = {label(run, method_columns(runs)): run.curves for run in runs if run.curves}
    if curves:
        curves_plot(curves, folder / "curves.png")
    scored = [row for row in rows if row.folds and row.numbers["dice_mean"] is not None]
    if scored:
        folds_plot([(label(row, keys), compared_runs.scores(row, "dice")) for row in scored], folder / "folds.png")
    values = {key: [row.settings.get(key) for row in rows] for key in compared_runs.differing(rows)}
    page = render(
        "compare.html",
        title=_title(runs),
        runs=runs,
        rows=rows,
        failures=_failures(runs),
        folds=folds_table(rows, keys),
        compare=sys.modules[__name__],
        figure=lambda name, about: read_picture(folder / name, about),
        differences=Table(["option", "values"], [[key, compared_runs.sides(rows, values[key])] for key in values]),
    )
    write_text(folder / "compare.html", page)
    return folder / "compare.html"


def read_methods(paths: Sequence[Path]) -> list[ComparedRun]:
    """Return the cross-validations among these runs and sweeps, named by the settings in which they differ.

    Raises UserError without any.
    """
    runs = compared_runs.read_runs(compared_runs.find_runs(paths))
    same = compared_runs.repeats(runs)
    if same:
        where = " and ".join(str(run.folder) for run in same)
        problem = f"are the same method and fold, data.fold={same[0].settings[FOLD]}"
        raise UserError(f"{where} {problem}; leave one sweep out, or repeat it with another option, such as seed=1")
    rows = [row for row in compared_runs.methods(runs) if row.folds and row.scores]
    if not rows:
        where = ", ".join(map(str, paths))
        what = "no cross-validation: its runs differ in data.fold alone, and have scores"
        raise UserError(f"{where}: {what}; make one: python train.py experiment=five_folds")
    keys = compared_runs.setting_columns(rows)
    methods = []
    for number, row in enumerate(rows, start=1):
        settings = [f"{word}={row.settings.get(key, '')}" for key, word in zip(keys, short(keys), strict=True)]
        methods.append(replace(row, name=" ".join(settings) or f"method {number}"))
    return methods


def problems(method: ComparedRun) -> list[str]:
    """Return a line for each fold without scores, and for each that is not finished."""
    lines = []
    present = {run.settings[FOLD]: run for run in method.folds}
    count = method.settings.get("data.folds", "")
    for fold in range(int(count) if count.isdecimal() else len(present)):
        run = present.get(str(fold))
        if run is None or not run.scores:
            lines.append(f"{method.name}: fold {fold} has no scores; its cases are missing")
        elif not run.numbers["status"].startswith("done"):
            lines.append(f"{method.name}: fold {fold} is not finished; its scores are of an earlier validation")
    return lines


def class_table(method: ComparedRun) -> Table:
    """Return one row per class: mean and SD of each score over all out-of-fold cases, and the worst case by Dice."""
    by_metric = {metric: compared_runs.scores(method, metric) for metric in METRICS}
    metrics = [metric for metric in METRICS if by_metric[metric]]
    mean, *names = by_metric["dice"]
    if len(names) > 1:
        names.append(mean)
    rows = []
    for name in names:
        of_cases = by_metric["dice"][name].cases
        row = [name or MEAN_OF_CLASSES, str(len(of_cases))]
        for metric in metrics:
            score = by_metric[metric].get(name, compared_runs.NO_SCORE)
            cases = f" ({len(score.cases)})" if 0 < len(score.cases) != len(of_cases) else ""
            row.append(spread(metric, score.pooled, score.pooled_sd) + cases)
        worst = next(iter(of_cases))
        rows.append([*row, f"{worst} ({shown('dice', of_cases[worst])})"])
    return Table(["class", "cases", *(METRICS[metric][0] for metric in metrics), "worst Dice"], rows)


def worst_table(method: ComparedRun) -> Table:
    """Return the cases with the lowest mean Dice, and their Dice by class."""
    fold_of = {row.get("case", ""): run.settings[FOLD] for run in method.folds for row in run.scores}
    _, *names = compared_runs.scores(method, "dice")
    rows = []
    for case in ranked(method.scores)[:WORST]:
        of_classes = [shown("dice", case.classes.get(name)) for name in names]
        rows.append([case.title, fold_of[case.name], shown("dice", case.mean), *of_classes])
    return Table(["case", "fold", MEAN_OF_CLASSES, *names], rows)


def class_numbers(methods: Sequence[ComparedRun]) -> list[dict[str, Any]]:
    """Return the classes of all methods for programs, one row per method, class and score."""
    rows = []
    for method, metric in product(methods, METRICS):
        for name, score in compared_runs.scores(method, metric).items():
            row = {"method": method.name, "class": name or MEAN_OF_CLASSES, "score": metric, "cases": len(score.cases)}
            row |= {"mean": score.pooled, "sd": score.pooled_sd}
            cases = list(score.cases)
            for word, case in (("lowest", cases[0]), ("highest", cases[-1])):
                row |= {word: score.cases[case], f"{word}_case": case}
            rows.append(row)
    return rows


def paired_tests(first: ComparedRun, second: ComparedRun) -> list[dict[str, Any]]:
    """Return a test of each score and class that both methods have, of cases that both have scored.

    Its names are the columns of paired.csv; None: no pair differs.
    """
    tests = []
    for metric in TESTED:
        of_second = compared_runs.scores(second, metric)
        for name, score in compared_runs.scores(first, metric).items():
            after = of_second.get(name, compared_runs.NO_SCORE).cases
            cases = sorted(score.cases.keys() & after.keys())
            if not cases:
                continue
            differences = [after[case] - score.cases[case] for case in cases]
            test = {
                "score": metric,
                "class": name or MEAN_OF_CLASSES,
                "pairs": len(cases),
                "that differ": len(cases) - differences.count(0),
                "first": fmean(score.cases[case] for case in cases),
                "second": fmean(after[case] for case in cases),
                "mean difference": fmean(differences),
                "median difference": median(differences),
            }
            tests.append(test | _signed_rank([difference for difference in differences if difference]))
    return tests


def _signed_rank(differing: Sequence[float]) -> dict[str, float | None]:
    """Return the sum of ranks, p and the effect of pairs that differ."""
    if not differing:
        return {"W+": None, "p": None, "effect": None}
    from scipy.stats import wilcoxon

    rank_sum = float(wilcoxon(differing, alternative="greater").statistic)
    p = float(wilcoxon(differing).pvalue)
    effect = 4 * rank_sum / (len(differing) * (len(differing) + 1)) - 1
    return {"W+": rank_sum, "p": p if isfinite(p) else None, "effect": effect}


def paired_table(tests: Sequence[Mapping[str, Any]]) -> Table:
    """Return the tests as text."""
    forms = {"W+": "g", "p": ".2g", "effect": ".2f"}
    columns, cells = tabulated(tests)
    for test, row in zip(tests, cells, strict=True):
        for place, (column, value) in enumerate(test.items()):
            if isinstance(value, float):
                row[place] = format(value, forms[column]) if column in forms else shown(test["score"], value)
        row[0] = METRICS[test["score"]][0]
    return Table(columns, [["" if cell is None else str(cell) for cell in row] for row in cells])


def titled_tests(methods: Sequence[ComparedRun]) -> list[tuple[str, list[dict[str, Any]]]]:
    """Return the tests of each other method that shares cases with the first against it, with their titles."""
    first, *others = methods
    title = "Paired test: {} (second) against {} (first)"
    titled = [(title.format(second.name, first.name), paired_tests(first, second)) for second in others]
    return [(title, tests) for title, tests in titled if tests]


def titled_tables(methods: Sequence[ComparedRun]) -> list[tuple[str, Table]]:
    """Return all tables with their titles, in the order of the page."""
    tables = []
    for method in methods:
        count = len(method.scores)
        of_method = f", {method.name}" if len(methods) > 1 else ""
        tables.append((f"Cross-validation: {count} out-of-fold cases{of_method}", class_table(method)))
        tables.append((f"Worst cases by mean Dice{of_method}", worst_table(method)))
    tables += [(title, paired_table(of_pair)) for title, of_pair in titled_tests(methods)]
    return tables


def write_tables(methods: Sequence[ComparedRun], titled: Titled, lines: Sequence[str], out: Path) -> Path:
    """Write cross_validation.md, .csv, .tex, cases.csv, and of several methods paired.csv; return the first's path."""
    out.mkdir(parents=True, exist_ok=True)
    notes = [NOTE, *([TEST_NOTE] if len(methods) > 1 else []), *lines]
    for ending, text in (("md", markdown), ("tex", latex)):
        name = f"cross_validation.{ending}"
        write_text(out / name, render(name, titled=titled, notes=notes, text=text))
    write_csv(out / "cross_validation.csv", *tabulated(class_numbers(methods)))
    cases = []
    for method in methods:
        for run in method.folds:
            cases += [{"method": method.name, "fold": run.settings[FOLD], "case": None, **case} for case in run.scores]
    write_csv(out / "cases.csv", *tabulated(cases))
    if len(methods) > 1:
        tests = [{"comparison": title, **test} for title, of_pair in titled_tests(methods) for test in of_pair]
        write_csv(out / "paired.csv", *tabulated(tests))
    return out / "cross_validation.md"


def markdown(text: str) -> str:
    """Return text that Markdown shows literally."""
    return IN_MARKDOWN.sub(r"\\\1", escaped(text))


def latex(text: str) -> str:
    """Return text that LaTeX sets literally."""
    return escaped(text).translate(IN_LATEX)

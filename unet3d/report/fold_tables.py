"""All out-of-fold cases of cross-validations in one table: for the terminal, and as Markdown, CSV and LaTeX.

With a paired test between two cross-validations of the same cases: Wilcoxon's signed-rank test, by SciPy.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import isfinite
from pathlib import Path
from statistics import fmean, median
from typing import Any

from unet3d.base.errors import UserError, escaped
from unet3d.base.files import write_csv, write_text
from unet3d.base.types import Table, tabulated
from unet3d.report import compared_runs
from unet3d.report.compared_runs import FOLD, ComparedRun, short
from unet3d.report.held_out import MEAN_OF_CLASSES, METRICS, ranked, shown, spread
from unet3d.report.report import render

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


def numbers_table(methods: Sequence[ComparedRun]) -> list[dict[str, Any]]:
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
            if cases:
                test = {"score": metric, "class": name or MEAN_OF_CLASSES}
                tests.append(test | _test([score.cases[case] for case in cases], [after[case] for case in cases]))
    return tests


def _test(first: Sequence[float], second: Sequence[float]) -> dict[str, Any]:
    """Return the numbers of a test between scores of the same cases."""
    differences = [after - before for before, after in zip(first, second, strict=True)]
    differing = [difference for difference in differences if difference]
    rank_sum = p = effect = None
    if differing:
        from scipy.stats import wilcoxon

        rank_sum = float(wilcoxon(differing, alternative="greater").statistic)
        p = float(wilcoxon(differing).pvalue)
        p = p if isfinite(p) else None
        effect = 4 * rank_sum / (len(differing) * (len(differing) + 1)) - 1
    return {
        "pairs": len(differences),
        "that differ": len(differing),
        "first": fmean(first),
        "second": fmean(second),
        "mean difference": fmean(differences),
        "median difference": median(differences),
        "W+": rank_sum,
        "p": p,
        "effect": effect,
    }


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
    for ending in ("md", "tex"):
        write_text(out / f"cross_validation.{ending}", typeset(titled, notes, ending))
    write_csv(out / "cross_validation.csv", *tabulated(numbers_table(methods)))
    cases = []
    for method in methods:
        for run in method.folds:
            cases += [{"method": method.name, "fold": run.settings[FOLD], "case": None, **case} for case in run.scores]
    write_csv(out / "cases.csv", *tabulated(cases))
    if len(methods) > 1:
        tests = [{"comparison": title, **test} for title, of_pair in titled_tests(methods) for test in of_pair]
        write_csv(out / "paired.csv", *tabulated(tests))
    return out / "cross_validation.md"


def typeset(titled: Titled, notes: Sequence[str], ending: str) -> str:
    """Return titled tables, and notes below them, as Markdown ("md") or as LaTeX with booktabs ("tex")."""
    text = {"md": markdown, "tex": latex}[ending]
    return render(f"cross_validation.{ending}", titled=titled, notes=notes, text=text)


def markdown(text: str) -> str:
    """Return text that Markdown shows as it is."""
    return IN_MARKDOWN.sub(r"\\\1", escaped(text))


def latex(text: str) -> str:
    """Return text that LaTeX sets as it is."""
    return escaped(text).translate(IN_LATEX)

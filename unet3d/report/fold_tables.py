"""All out-of-fold cases of cross-validations in one table: for the terminal, and as Markdown, CSV and LaTeX."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from unet3d.base.errors import UserError, escaped
from unet3d.base.files import write_csv, write_text
from unet3d.base.terminal import NARROW, narrow_tables, paper
from unet3d.base.types import Table
from unet3d.report import folds, paired
from unet3d.report.case_scores import METRICS, ranked, shown
from unet3d.report.compared_runs import FOLD, ComparedRun, find_runs, read_runs
from unet3d.report.differences import setting_columns, short
from unet3d.report.folds import MEAN, MEAN_OF_CLASSES, Score, scores_by_case, spread
from unet3d.report.markup import as_latex, as_markdown
from unet3d.report.paired import PairedTest
from unet3d.run.shapes import as_number
from unet3d.training.metrics import NOTE_KEY

WORST = 5  # cases by name
NOTE = (
    "Mean ± SD over all out-of-fold cases, each scored once, by the network that did not learn from it, on the grid of "
    "its file. Mean of classes: the mean of the classes' means; its SD is that of the cases' means. In brackets: how "
    "many cases have the score, where not all have."
)


class Method(NamedTuple):
    """A cross-validation, and the settings in which it differs from the others."""

    name: str
    row: ComparedRun


def read_methods(paths: Sequence[Path]) -> list[Method]:
    """Return the cross-validations among these runs and sweeps. Raises UserError without any."""
    runs = read_runs(find_runs(paths))
    same = folds.repeats(runs)
    if same:
        where = " and ".join(str(run.folder) for run in same)
        problem = f"are the same method and fold, data.fold={same[0].settings[FOLD]}"
        raise UserError(f"{where} {problem}; leave one sweep out, or repeat it with another option, such as seed=1")
    rows = [row for row in folds.methods(runs) if row.folds and row.scores]
    if not rows:
        where = ", ".join(map(str, paths))
        what = "no cross-validation: its runs differ in data.fold alone, and have scores"
        raise UserError(f"{where}: {what}; make one: python train.py experiment=five_folds")
    keys = setting_columns(rows)
    methods = []
    for number, row in enumerate(rows, start=1):
        settings = []
        for key, word in zip(keys, short(keys), strict=True):
            settings.append(f"{word}={row.settings.get(key, '')}")
        name = " ".join(settings) or f"method {number}"
        methods.append(Method(name, row))
    return methods


def problems(method: Method) -> list[str]:
    """Return a line for each fold without scores, and for each that is not finished."""
    lines = []
    present = {int(run.settings[FOLD]): run for run in method.row.folds}
    count = method.row.settings.get("data.folds", "")
    folds_planned = int(count) if count.isdecimal() else len(present)
    for fold in range(folds_planned):
        run = present.get(fold)
        if run is None or not run.scores:
            lines.append(f"{method.name}: fold {fold} has no scores; its cases are missing")
        elif not run.numbers["status"].startswith("done"):
            lines.append(f"{method.name}: fold {fold} is not finished; its scores are of an earlier validation")
    return lines


def class_table(method: Method) -> Table:
    """Return one row per class: mean and SD of each score over all out-of-fold cases, and the worst case by Dice."""
    by_metric = {metric: folds.scores(method.row, metric) for metric in METRICS}
    metrics = [metric for metric in METRICS if by_metric[metric]]
    dice = scores_by_case(method.row, "dice")
    names = _classes(method)
    if len(names) > 1:
        names.append(MEAN)
    rows = []
    for name in names:
        of_cases = dice[name]
        row = [name or MEAN_OF_CLASSES, str(len(of_cases))]
        for metric in metrics:
            row.append(_pooled(metric, by_metric[metric].get(name), len(of_cases)))
        worst, *_ = _by_value(of_cases)
        row.append(f"{worst} ({shown('dice', of_cases[worst])})")
        rows.append(row)
    heads = [METRICS[metric][0] for metric in metrics]
    return Table(["class", "cases", *heads, "worst Dice"], rows)


def _classes(method: Method) -> list[str]:
    """Return the names of the foreground classes that have a Dice."""
    return [name for name in folds.scores(method.row, "dice") if name != MEAN]


def _by_value(of_cases: Mapping[str, float]) -> list[str]:
    """Return the cases from the lowest score to the highest; equals by name."""
    return sorted(of_cases, key=lambda case: (of_cases[case], case))


def _pooled(metric: str, score: Score | None, cases: int) -> str:
    """Return `0.881±0.031`, and how many of the cases have the score where not all have."""
    if score is None or score.pooled is None:
        return ""
    text = spread(metric, score.pooled, score.pooled_sd)
    return text if len(score.cases) == cases else f"{text} ({len(score.cases)})"


def worst_table(method: Method) -> Table:
    """Return the cases with the lowest mean Dice, and their Dice by class."""
    fold_of = {}
    for run in method.row.folds:
        for row in run.scores:
            fold_of[row.get("case", "")] = run.settings[FOLD]
    names = _classes(method)
    rows = []
    for case in ranked(method.row.scores)[:WORST]:
        of_classes = [shown("dice", case.classes.get(name)) for name in names]
        rows.append([case.title, fold_of[case.name], shown("dice", case.mean), *of_classes])
    return Table(["case", "fold", MEAN_OF_CLASSES, *names], rows)


def numbers_table(methods: Sequence[Method]) -> tuple[list[str], list[list[object]]]:
    """Return the classes of all methods for programs, one row per method, class and score."""
    head = ["method", "class", "score", "cases", "mean", "sd", "lowest", "lowest_case", "highest", "highest_case"]
    rows: list[list[object]] = []
    for method in methods:
        for metric in METRICS:
            of_cases = scores_by_case(method.row, metric)
            for name, score in folds.scores(method.row, metric).items():
                values = of_cases[name]
                lowest, *_ = _by_value(values)
                *_, highest = _by_value(values)
                row: list[object] = [method.name, name or MEAN_OF_CLASSES, metric, len(values)]
                row += [score.pooled, score.pooled_sd]
                row += [values[lowest], lowest, values[highest], highest]
                rows.append(row)
    return head, rows


def cases_table(methods: Sequence[Method]) -> tuple[list[str], list[list[object]]]:
    """Return the scores of all out-of-fold cases, one row per method and case, as their runs' scores.csv has them."""
    all_cases = [case for method in methods for case in method.row.scores]
    keys = dict.fromkeys(key for case in all_cases for key in case)
    keys.pop("case", None)
    rows: list[list[object]] = []
    for method in methods:
        for run in method.row.folds:
            for case in run.scores:
                row: list[object] = [method.name, run.settings[FOLD], case.get("case")]
                row += [case.get(key) if key == NOTE_KEY else as_number(case.get(key)) for key in keys]
                rows.append(row)
    return ["method", "fold", "case", *keys], rows


def paired_tests(methods: Sequence[Method]) -> list[tuple[str, list[PairedTest]]]:
    """Return the tests of each other method against the first, with their titles."""
    first, *others = methods
    titled = list[tuple[str, list[PairedTest]]]()
    for second in others:
        title = f"Paired test: {second.name} (second) against {first.name} (first)"
        titled.append((title, paired.paired_tests(first.row, second.row)))
    return titled


def titled_tables(methods: Sequence[Method]) -> list[tuple[str, Table]]:
    """Return all tables with their titles, in the order of the page."""
    tables = []
    for method in methods:
        count = len(method.row.scores)
        of_method = f", {method.name}" if len(methods) > 1 else ""
        tables.append((f"Cross-validation: {count} out-of-fold cases{of_method}", class_table(method)))
        tables.append((f"Worst cases by mean Dice{of_method}", worst_table(method)))
    for title, of_pair in paired_tests(methods):
        tables.append((title, paired.table(of_pair)))
    return tables


def print_tables(titled: Sequence[tuple[str, Table]], lines: Sequence[str]) -> None:
    """Print tables, then lines."""
    console = paper(NARROW)
    for title, table in titled:
        console.print(narrow_tables(title, table, console.width))
    for line in lines:
        console.print(escaped(line), soft_wrap=True)


def write_tables(
    methods: Sequence[Method],
    titled: Sequence[tuple[str, Table]],
    lines: Sequence[str],
    out: Path,
) -> Path:
    """Write cross_validation.md, .csv, .tex, cases.csv, and of several methods paired.csv; return the first's path."""
    out.mkdir(parents=True, exist_ok=True)
    notes = [NOTE, *lines]
    if len(methods) > 1:
        notes.insert(1, paired.NOTE)
    write_text(out / "cross_validation.md", as_markdown(titled, notes))
    write_text(out / "cross_validation.tex", as_latex(titled, notes))
    write_csv(out / "cross_validation.csv", *numbers_table(methods))
    write_csv(out / "cases.csv", *cases_table(methods))
    if len(methods) > 1:
        head = ["comparison", *paired.HEADS]
        rows: list[list[object]] = []
        for title, of_pair in paired_tests(methods):
            rows += [[title, *row] for row in paired.numbers(of_pair)]
        write_csv(out / "paired.csv", head, rows)
    return out / "cross_validation.md"

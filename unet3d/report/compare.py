"""Runs side by side: a table, compare.csv, a picture and a page; runs of a published experiment beside the paper's."""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import median
from textwrap import shorten
from typing import Any, NamedTuple

import yaml  # type: ignore[import-untyped]

from unet3d.base.errors import UserError, escaped
from unet3d.base.files import write_csv, write_text
from unet3d.base.terminal import NARROW, narrow_tables, paper
from unet3d.base.types import Table, mib
from unet3d.config import compose
from unet3d.config.schema import Config
from unet3d.report import folds
from unet3d.report.folds import Row
from unet3d.report.html import element, html_page, html_table, picture, section
from unet3d.report.loggers import Loggers, wandb_loggers
from unet3d.report.plots import (
    OVERLAID,
    PlottedRun,
    PublishedRow,
    comparison_plot,
    curve,
    curves_plot,
    plain,
    published_plot,
    remove_picture,
)
from unet3d.report.run_folder import KINDS, RunFolder, as_number, read_run
from unet3d.report.wandb_logger import PATHS
from unet3d.training.metrics import mean_of

RUN_FILES = ("STATUS", "config.yaml", "memory.json", "overrides.yaml")  # a run folder has at least one of them
SAME_CONFIG = (  # runs that differ in these are not comparable: other data, or another length or course of training
    *(
        "data.format",
        "data.root",
        "data.images",
        "data.labels",
        "data.classes",
        "data.label_map",
        "data.ignore",
        "data.patch",
    ),
    *("data.spacing", "data.val_fraction", "data.folds", "data.fold", "data.split", "data.sparse", "data.semi"),
    *("data.scored", "data.sparse_folds", "data.sparse_fold", "data.phantom.cases", "data.phantom.shape"),
    *("data.phantom.seed", "model.classes", "steps", "seed"),
)
SAME_MACHINE = ("device", "gpu", "cpu", "torch", "threads")  # of env.json
AFFECTS_SCORES: tuple[str, ...] = (
    "model",
    "data.",
    "loss",
    "optim",
    "amp",
    "batch",
    "accumulate",
    "init",
)  # change scores
AFFECTS_SCORES += ("inference.overlap", "inference.mirror")
FACE: dict[str, tuple[str, Callable[[Any], str]]] = {  # of a row's numbers: heading and format in tables for people
    "status": ("status", folds.ending),  # why a run failed is below the table
    "peak_predicted_bytes": ("peak, predicted (MiB)", mib),
    "peak_measured_bytes": ("peak, measured (MiB)", mib),
    "error_bytes": ("error (bytes)", "{:,}".format),
    "step_median_s": ("step (s)", "{:.3g}".format),
    "labelled_share": ("labelled voxels", "{:.1%}".format),
    "dice_mean": ("Dice, last weights", "{:.3f}".format),
    "parameters": ("parameters", "{:,}".format),
}
ABOUT = (
    "Peak: the most bytes held at once in a step, in MiB (2^20 bytes). Error: predicted less measured, of tensors, on "
    "a GPU without workspaces and the allocator's rounding. Step: the median time of one. Dice: the mean of classes at "
    "the last validation, of the last weights or their average; best.pt may hold those of an earlier step."
)


def compare_runs(paths: Sequence[Path], out: Path | None) -> None:
    """Print the runs, or the children of sweeps, side by side; with `out`, write the files there. Raises UserError."""
    rows = read_rows(find_runs(paths))
    print_comparison(rows)
    if out is not None:
        print(escaped(write_comparison(rows, out)))


def finish_sweep(jobs: Mapping[Path, Config], folder: Path) -> None:
    """Compare a sweep's jobs (run folder: config): on the terminal, in its folder, in wandb under the first config."""
    rows = read_rows([job.resolve() for job in jobs])
    print_comparison(rows)
    path = write_comparison(rows, folder)
    config = next(iter(jobs.values()))
    rows = methods(rows)
    if config.wandb.private:  # the last part of a path is no path any more, but often a patient's name
        rows = [replace(row, settings={k: v for k, v in row.settings.items() if k not in PATHS}) for row in rows]
    loggers = Loggers(wandb_loggers(config, folder))
    loggers.table("compare", *cells(rows))
    loggers.close(0)
    print(f"compared: {escaped(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)}")


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """The run folders among the paths, and the numbered run folders in those that are sweeps. Raises UserError."""
    found: list[Path] = []
    for path in paths:
        runs = [run for run in (path, *path.glob("*")) if any((run / mark).is_file() for mark in RUN_FILES)]
        jobs = [run for run in runs if run != path and run.name.isdecimal()]
        if path not in runs and not jobs:
            raise UserError(f"{path}: not a run folder; give outputs/DATE/TIME-ID, or a sweep's multirun/DATE/TIME-ID")
        found += [path] if path in runs else sorted(jobs, key=lambda run: int(run.name))
    return list(dict.fromkeys(path.resolve() for path in found))


def read_rows(folders: Sequence[Path]) -> list[Row]:
    """A row per run folder: its name, or, if two share one, its path below the folder that they share."""
    names = [folder.name for folder in folders]
    if len(set(names)) < len(names):
        top = os.path.commonpath(folders)
        names = [os.path.relpath(folder, top) for folder in folders]
    return [_row(name, read_run(folder)) for name, folder in zip(names, folders, strict=True)]


def _row(name: str, run: RunFolder) -> Row:
    config = run.settings
    said = {key.lstrip("+"): value for key, _, value in (word.partition("=") for word in run.overrides or ())}
    groups = {path.name for path in compose.config_folder().iterdir() if path.is_dir()}
    settings = {key: _as_text(key, value) for key, value in said.items() if key in groups or not config}
    settings |= {key: _as_text(key, value) for key, value in compose.flat(config, ".").items()}
    settings.pop("resume", None)
    iou: dict[str, float] = {}
    for case in run.scores:
        mean = mean_of(as_number(cell) for key, cell in case.items() if str(key).startswith("iou/"))
        iou |= {} if mean is None else {case.get("case", ""): mean}
    curves = {key: found for key in OVERLAID if (found := curve(run.records, key)) is not None}
    named = frozenset(word.partition("=")[0].lstrip("+~") for word in run.overrides or ())
    return Row(name, settings, bool(config), run.environment, _numbers(run), iou, curves, named, run.scores)


def methods(runs: Sequence[Row]) -> list[Row]:
    """A row for each method, whose folds are one; a published experiment has a table of its own for these."""
    return list(runs) if published_experiment(runs) else folds.methods(runs)


def _as_text(key: str, value: Any) -> str:
    if key in ("data.root", "data.split") and value:
        return Path(value).name  # the same data may be in another folder
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return "[" + ",".join(_as_text("", item) for item in value) + "]" if isinstance(value, list) else str(value)


def _numbers(run: RunFolder) -> dict[str, Any]:
    measured, predicted = (run.memory.get(kind, {}) for kind in KINDS)
    steps = run.values("time/step_s")
    return {
        "status": _status(run.status, is_predicted=bool(predicted) and not measured and not run.records),
        "parameters": run.memory.get("parameters"),
        "peak_predicted_bytes": predicted.get("peak_bytes"),
        "peak_measured_bytes": measured.get("peak_bytes"),
        "measured_kind": measured.get("kind"),
        "error_bytes": run.memory.get("error_bytes"),
        "steps_done": max((record["step"] for record in run.records), default=None),
        "step_median_s": median(steps) if steps else None,
        "dice_mean": run.dice_mean,
        "labelled_share": next(iter(run.values("data/labelled_share")), None),
    }


def _status(said: str, is_predicted: bool) -> str:
    """Return how a run ended: a word that `folds.ending` finds again, and why it ended early."""
    line = re.sub(r"(, )?exit code \d+$", "", said).strip()
    if line in ("done", "running", ""):
        return {"done": "predicted" if is_predicted else "done", "": "unknown"}.get(line, line)
    bare = re.sub(r"^(error|failed): ", "", line)
    if bare.startswith("stopped "):
        return bare
    return f"stopped: {bare}" if bare.startswith("interrupted") else f"failed: {bare}"


def differing(rows: Sequence[Row]) -> list[str]:
    """The settings that differ. Missing settings are ignored, unless no run has its whole config."""
    partial = not any(row.is_whole for row in rows)
    values = {key: [row.settings[key] for row in rows if key in row.settings] for row in rows for key in row.settings}
    return [key for key, found in values.items() if len(set(found)) > 1 or (partial and len(found) < len(rows))]


def setting_columns(rows: Sequence[Row]) -> list[str]:
    """What differs, without options that follow from a name: model.features from model=unet, any from an experiment."""

    def follows(key: str, group: str) -> bool:
        pairs = {(row.settings[group], row.settings.get(key)) for row in rows}
        is_set = any(key in row.named for row in rows) or any(row.settings[group] in ("null", "None") for row in rows)
        is_of = key.startswith(f"{group}.") or (group == "experiment" != key and not is_set)
        return is_of and len(pairs) == len({name for name, _ in pairs})

    keys = differing(rows)
    groups = [key for key in keys if "." not in key and all(key in row.settings for row in rows)]
    return [key for key in keys if not any(follows(key, group) for group in groups)]


def short(keys: Sequence[str]) -> list[str]:
    """The last word of each key, data.patch -> patch; the whole key if another one ends in the same word."""
    last = [key.rpartition(".")[2] for key in keys]
    return [word if last.count(word) == 1 else key for key, word in zip(keys, last, strict=True)]


def mismatches(rows: Sequence[Row], varied: Sequence[str] = ()) -> list[str]:
    """A line for each difference that makes the runs not comparable; an experiment varies `varied` on purpose."""
    pairs = {key: {row.name: row.settings.get(key) for row in rows} for key in SAME_CONFIG if key not in varied}
    pairs |= {key: {row.name: row.environment.get(key) for row in rows} for key in SAME_MACHINE}
    if len({row.settings.get("steps") for row in rows}) == 1:
        pairs["steps done"] = {row.name: row.numbers["steps_done"] for row in rows}
    pairs["peak"] = {row.name: row.basis for row in rows}
    pairs["kind of measured peak"] = {row.name: row.numbers["measured_kind"] for row in rows}
    return _unlike(pairs)


def _unlike(pairs: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A line for each key whose values differ between runs."""
    return [f"{key}: {sides(found)}" for key, found in pairs.items() if len(set(found.values()) - {None}) > 1]


def sides(values: Mapping[str, Any]) -> str:
    """Which runs have which value, `4 (runs 0, 1), 8 (run 2)`, without the value None."""
    runs: dict[Any, list[str]] = {}
    for name, value in values.items():
        runs.setdefault(value, []).append(name)
    named = {value: f"run{'s' * (len(names) > 1)} {', '.join(names)}" for value, names in runs.items()}
    named |= {value: f"{len(names)} runs" for value, names in runs.items() if len(names) > 6}
    return ", ".join(f"{value} ({names})" for value, names in named.items() if value is not None)


def comparison_table(rows: Sequence[Row]) -> Table:
    """What differs and the results, in units for people; "" if a run has no such number."""
    keys = setting_columns(rows)
    fields = [field for field in FACE if any(row.numbers[field] is not None for row in rows)]
    body = []
    for row in rows:
        shown = ["" if row.numbers[field] is None else FACE[field][1](row.numbers[field]) for field in fields]
        if row.folds and "dice_mean" in fields:
            mean, sd = row.numbers["dice_mean"], row.numbers["dice_sd"]
            shown[fields.index("dice_mean")] = folds.spread("dice", mean, sd)
        body.append([row.name, *(row.settings.get(key, "") for key in keys), *shown])
    return Table(["run", *short(keys), *(FACE[field][0] for field in fields)], body)


def cells(rows: Sequence[Row]) -> tuple[list[str], list[list[Any]]]:
    """The same for programs: headings with their units, and plain values; None if a run has no such number."""
    keys = setting_columns(rows)
    names = dict.fromkeys(name for row in rows for name in row.numbers)  # of a cross-validation more
    body = [
        [row.name, *(row.settings.get(key) for key in keys), *(row.numbers.get(name) for name in names)] for row in rows
    ]
    return ["run", *keys, *names], body


def folds_table(rows: Sequence[Row]) -> Table | None:
    """Scores of the methods that were cross-validated; None without any, as where runs only predict."""
    keys = setting_columns(rows)
    return folds.table(rows, keys, short(keys)) if any(row.folds and row.scores for row in rows) else None


def print_comparison(runs: Sequence[Row]) -> None:
    """Print the table, then a line for each run that failed and for each reason not to compare."""
    console, rows = paper(NARROW), methods(runs)
    console.print(narrow_tables(_title(runs), comparison_table(rows), console.width))
    if (found := folds_table(rows)) is not None:
        console.print(narrow_tables(folds.TITLE, found, console.width))
    if published := published_experiment(runs):
        console.print(narrow_tables(published.title, published.table(runs), console.width))
    for line in [*_failures(runs), *(f"not comparable: {line}" for line in _not_comparable(runs))]:
        console.print(escaped(line), soft_wrap=True)


def _title(runs: Sequence[Row]) -> str:
    rows = methods(runs)
    if len(rows) < len(runs):
        what = f"Comparison of {len(rows)} methods" if len(rows) > 1 else "Cross-validation"
        return f"{what}, {len(runs)} runs"
    return f"Comparison of {len(runs)} runs" if len(runs) > 1 else "One run"


def _failures(rows: Sequence[Row]) -> list[str]:
    """How each run that failed or was stopped ended, in short; compare.csv and the run's STATUS have all of it."""
    reasons = {row.name: row.numbers["status"].partition("; to go on: ")[0] for row in rows}
    failed = {name: reason for name, reason in reasons.items() if reason.startswith(("failed", "stopped"))}
    return [f"run {name} {shorten(reason, 110, placeholder=' ...')}" for name, reason in failed.items()]


def _not_comparable(runs: Sequence[Row]) -> list[str]:
    if found := published_experiment(runs):
        return [*mismatches(runs, (found.by, found.across)), *found.unlike(runs)]
    rows = methods(runs)  # one has several folds, all the same as another's
    held_out = {row.name: row.settings.get(folds.FOLD) for row in rows}
    scored = {row.name: row.scored for row in rows}
    others = _unlike({folds.FOLD: held_out}) or _unlike({"folds scored": scored})
    return [*others, *mismatches(runs, [folds.FOLD])]


def write_comparison(runs: Sequence[Row], folder: Path) -> Path:
    """Write compare.csv, .png, .html and curves.png; returns the page.

    Also folds.csv, .png of cross-validations, and published.csv, .png of such an experiment.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_csv(folder / "compare.csv", *cells(methods(runs)))
    _draw(runs, folder / "compare.png")
    _draw_curves(runs, folder / "curves.png")
    _write_folds(runs, folder)
    if found := published_experiment(runs):
        write_csv(folder / "published.csv", *found.table(runs))
        published_plot(found.beside(runs), found.title, folder / "published.png")
    write_text(folder / "compare.html", _html(runs, folder))
    return folder / "compare.html"


def _write_folds(runs: Sequence[Row], folder: Path) -> None:
    """A row a run of cross-validations, whose rows in compare.csv are of several, and the picture of their scores."""
    rows = methods(runs)
    keys = setting_columns(rows)
    (folder / "folds.csv").unlink(missing_ok=True)  # of an earlier comparison
    remove_picture(folder / "folds.png")
    if any(row.folds for row in rows):
        write_csv(folder / "folds.csv", *cells(runs))
    if labelled := [(_label(row, keys), row) for row in rows if row.folds and row.numbers["dice_mean"] is not None]:
        folds.folds_plot(labelled, folder / "folds.png")


def _draw(runs: Sequence[Row], path: Path) -> None:
    """The picture of the runs with a measured peak; with fewer than two, of all with a peak; without any, none."""
    measured = [run for run in runs if run.basis == "measured"]
    shown = measured if len(measured) > 1 else [run for run in runs if run.basis is not None]
    differences = ", ".join(line.partition(":")[0] for line in _not_comparable(shown))
    keys, plotted = setting_columns(methods(runs)), []
    for row in methods(shown):
        seconds, dice, sd = (row.numbers.get(name) for name in ("step_median_s", "dice_mean", "dice_sd"))
        if row.basis == "predicted":
            seconds = dice = sd = None
        kind = ", ".join(filter(None, (row.basis, row.numbers["measured_kind"])))
        peak = row.numbers[f"peak_{row.basis}_bytes"]
        plotted.append(PlottedRun(_label(row, keys), plain(kind), peak, seconds, dice, sd))
    remove_picture(path)  # of an earlier comparison
    if plotted:
        comparison_plot(plotted, differences and f"Not comparable: the runs differ in {differences}", path)


def _draw_curves(rows: Sequence[Row], path: Path) -> None:
    """Loss and Dice by step of the runs that have any, one over the other."""
    remove_picture(path)
    keys = setting_columns(rows)
    if curves := {_label(row, keys): row.curves for row in rows if row.curves}:
        curves_plot(curves, path)


def _label(row: Row, keys: Sequence[str]) -> str:
    """A run's name and what differs: `0: model=unet amp=true`."""
    said = [f"{word}={row.settings[key]}" for key, word in zip(keys, short(keys), strict=True) if key in row.settings]
    return f"{row.name}: {' '.join(said)}" if said else row.name


def _html(runs: Sequence[Row], folder: Path) -> str:
    rows = methods(runs)
    title, keys, table, published = _title(runs), setting_columns(rows), comparison_table(rows), ""
    if found := published_experiment(runs):
        beside = picture(folder / "published.png", "IoU of these runs beside the paper's")
        published = section(found.title, html_table(*found.table(runs)), beside)
    first = 1 + len(keys)  # the settings go into the first cell, which is wrapped: else numbers are cut off
    body = [[_label(row, keys), *line[first:]] for row, line in zip(rows, table.rows, strict=True)]
    what = [[key, sides({row.name: row.settings.get(key) for row in rows})] for key in differing(rows)]
    peaks = picture(folder / "compare.png", "peak memory, against seconds a step and Dice if measured")
    parts = [
        element("h1", title),
        element("p", ABOUT),
        html_table(["run", *table.columns[first:]], body),
        *(element("p", line) for line in _failures(runs)),
        _html_folds(runs, rows, folder),
        published,
        section("Not comparable", *(element("p", line) for line in _not_comparable(runs))),
        section("Peak memory", peaks),
        section("Curves", picture(folder / "curves.png", "training loss and validation Dice by step, a line a run")),
        section("What differs", html_table(["option", "values"], what)),
    ]
    return html_page(title, parts)


def _html_folds(runs: Sequence[Row], rows: Sequence[Row], folder: Path) -> str:
    """The scores of cross-validations, and a row a run; "" without any."""
    if (found := folds_table(rows)) is None:
        return ""
    scores = picture(folder / "folds.png", "Dice by class: of each method a point a fold, and their mean")
    return section(folds.TITLE, html_table(*found), element("p", folds.NOTE), scores) + section(
        "Each run", html_table(*comparison_table(runs))
    )


class Published(NamedTuple):
    """A published table of IoU. `by`: the option that names a row; `across`: the one that names a column, or "case"."""

    title: str
    by: str
    across: str
    rows: Mapping[str, Mapping[str, Any]]  # value of `by` -> the row's name, the IoU of the paper's volumes

    def row_of(self, run: Row) -> str:
        """The run's value of `by`; the paper's network if no other was named."""
        return run.settings.get(self.by, "cicek2016" if self.by == "model" else "")

    def scores(self, run: Row) -> Mapping[str, float | None]:
        """The run's IoU in its columns; None if it failed."""
        return run.iou if self.across == "case" else {run.settings.get(self.across, ""): mean_of(run.iou.values())}

    def columns(self, runs: Sequence[Row]) -> list[str]:
        """Names of our columns: cases, or values of the option `across`."""
        names = {name for run in runs for name in self.scores(run)}
        return sorted(names, key=lambda name: (int(name) if name.isdecimal() else -1, name))

    def beside(self, runs: Sequence[Row]) -> list[PublishedRow]:
        """The rows that there are runs for, ours and the paper's; a cell is the mean over runs with other seeds."""
        found = []
        for value, row in self.rows.items():
            if same := [run for run in runs if self.row_of(run) == value]:
                ours = [mean_of(self.scores(run).get(name) for run in same) for name in self.columns(runs)]
                found.append(PublishedRow(row["name"], ours, row["iou"]))
        return found

    def table(self, runs: Sequence[Row]) -> Table:
        """The same as text; "" where a run failed, and for a mean that would miss one."""

        def shown(values: Sequence[float | None]) -> list[str]:
            mean = None if None in values else mean_of(values)
            return ["" if value is None else f"{value:.3f}" for value in [*values, mean]]

        heads = [name if self.across == "case" else f"fold {name}" for name in self.columns(runs)]
        body = [[row.name, *shown(row.ours), *shown(row.paper)] for row in self.beside(runs)]
        return Table(["", *heads, "mean", "paper: 1", "2", "3", "mean"], body)

    def unlike(self, runs: Sequence[Row]) -> list[str]:
        """A line for each setting in which runs of one cell differ; a cell is the mean over seeds, not over that."""
        groups: dict[tuple[str, str], list[Row]] = {}
        for run in runs:
            if run.iou and self.row_of(run) in self.rows:
                groups.setdefault((self.row_of(run), run.settings.get(self.across, "")), []).append(run)
        found = {(key, row) for (row, _), same in groups.items() for key in setting_columns(same)}
        wrong = sorted((key, row) for key, row in found if key.startswith(AFFECTS_SCORES) and key not in SAME_CONFIG)
        return [f"{key}: differs between runs of one cell, {self.rows[row]['name']}" for key, row in wrong]


@cache
def published_tables() -> dict[str, Published]:
    """The paper's tables, by the name in configs/experiment."""
    text = Path(__file__).with_name("published.yaml").read_text(encoding="utf-8")
    return {name: Published(**table) for name, table in yaml.safe_load(text).items()}


def published_experiment(rows: Sequence[Row]) -> Published | None:
    """The published experiment that all of these runs belong to, if there is one."""
    names = {row.settings.get("experiment", "") for row in rows}
    return published_tables().get(names.pop()) if len(names) == 1 else None

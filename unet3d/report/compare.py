"""Runs side by side: a table, compare.csv, a picture and a page."""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from textwrap import shorten
from typing import Any, NamedTuple

import yaml  # type: ignore[import-untyped]

from unet3d import compose
from unet3d.compose import flat
from unet3d.config import Config
from unet3d.errors import UserError
from unet3d.files import write_csv, write_text
from unet3d.report import compare_plots, report, run_folder
from unet3d.report.compare_plots import PlottedRun
from unet3d.report.loggers import WIDE, Loggers, Scalar, paper, terminal_table
from unet3d.report.run_folder import Record, RunFolder
from unet3d.report.wandb_logger import PATHS, WandbLogger, wandb_mode
from unet3d.types import Table, mib

MARKS = ("STATUS", "config.yaml", "memory.json", "overrides.yaml")  # a run folder has one of them


SAME_CONFIG = (  # where these differ, runs are not comparable: other data, or another length or course of training
    *("data.format", "data.root", "data.images", "data.labels", "data.classes", "data.ignore", "data.patch"),
    *("data.spacing", "data.val_fraction", "data.folds", "data.fold", "data.split", "data.sparse", "data.semi"),
    *("data.scored", "data.sparse_folds", "data.sparse_fold"),
    *("data.phantom.cases", "data.phantom.shape", "data.phantom.seed", "model.classes", "steps", "seed"),
)


SAME_MACHINE = ("device", "gpu", "cpu", "torch", "threads")  # of env.json


class Numbers(NamedTuple):
    """What a run came to, with the units of compare.csv; None where there is no such number."""

    status: str
    parameters: int | None
    peak_predicted_bytes: int | None
    peak_measured_bytes: int | None
    measured_kind: str | None
    error_bytes: int | None
    steps_done: int | None
    step_median_s: float | None
    dice_mean: float | None
    labelled_share: float | None


@dataclass(frozen=True)
class Row:
    """One run. `settings`: the config, flattened, as text, and the names chosen in config groups, e.g. model: unet."""

    name: str
    settings: Mapping[str, str]
    is_whole: bool
    """Whether `settings` is the whole config; else only what the command line said."""
    environment: Record
    numbers: Numbers
    iou: Mapping[str, float]
    """Mean over the foreground classes of each case scored last, where there are any."""

    @property
    def basis(self) -> str | None:
        """Whether its peak was measured or predicted; None without one."""
        numbers = self.numbers
        is_predicted = numbers.peak_predicted_bytes is not None
        return "measured" if numbers.peak_measured_bytes is not None else "predicted" if is_predicted else None


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """The run folders that are meant: each itself, or the numbered children of a sweep's. Raises UserError."""
    found: list[Path] = []
    for path in paths:
        children = [child for child in path.glob("*") if child.name.isdecimal() and _is_run(child)]
        if not _is_run(path) and not children:
            raise UserError(f"{path}: not a run folder; give outputs/DATE/TIME-ID, or a sweep's multirun/DATE/TIME-ID")
        found += [path] if _is_run(path) else sorted(children, key=lambda child: int(child.name))
    return list(dict.fromkeys(path.resolve() for path in found))


def _is_run(path: Path) -> bool:
    return any((path / mark).is_file() for mark in MARKS)


def read_rows(folders: Sequence[Path]) -> list[Row]:
    """A row a run folder, called after it, and after what lies above it where two are called the same."""
    names = [folder.name for folder in folders]
    if len(set(names)) < len(names):
        top = os.path.commonpath(folders)
        names = [os.path.relpath(folder, top) for folder in folders]
    return [_row(name, run_folder.read_run(folder)) for name, folder in zip(names, folders, strict=True)]


def _row(name: str, run: RunFolder) -> Row:
    words = _words(run.path / "overrides.yaml")
    config = _config(run.config, words)
    said = {key.lstrip("+"): value for key, _, value in (word.partition("=") for word in words or ())}
    groups = {path.name for path in compose.config_folder().iterdir() if path.is_dir()}
    chosen = {key: value for key, value in said.items() if key in groups or not config}
    settings = {key: value for key, value in (chosen | config).items() if key != "resume"}
    return Row(name, settings, bool(config), run.environment, _numbers(run), run_folder.case_iou(run))


def _words(path: Path) -> list[str] | None:
    """What the command line said; None without the file, or with half of it."""
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else None
    except (yaml.YAMLError, UnicodeDecodeError):
        found = None
    return [str(word) for word in found] if isinstance(found, list) else None


def _config(text: str, words: Sequence[str] | None) -> dict[str, str]:
    """The config as text, flattened: what config.yaml says, else what the command line composes to; empty if neither.

    A run that predicts, or fails early, writes no config.yaml; one whose data have moved no longer composes.
    """
    try:
        tree = yaml.safe_load(text)
        if tree is None and words is not None:
            tree = compose.to_plain(compose.compose(words))
    except (yaml.YAMLError, UserError):
        tree = None
    return {key: _text(key, value) for key, value in flat(tree, ".").items()} if isinstance(tree, dict) else {}


def _text(key: str, value: Any) -> str:
    if key in ("data.root", "data.split") and value:
        return Path(value).name  # the same data may lie elsewhere
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return "[" + ",".join(_text("", item) for item in value) + "]" if isinstance(value, list) else str(value)


def _numbers(run: RunFolder) -> Numbers:
    measured, predicted = (run.memory.get(kind) or {} for kind in run_folder.KINDS)
    steps = run.values("time/step_s")
    last = next((record for record in reversed(run.records) if "val/dice_mean" in record), {})
    return Numbers(
        _status(run.status, is_predicted=bool(predicted) and not measured and not run.records),
        run.memory.get("parameters"),
        predicted.get("peak_bytes"),
        measured.get("peak_bytes"),
        measured.get("kind"),
        run.memory.get("error_bytes"),
        max((record["step"] for record in run.records), default=None),
        median(steps) if steps else None,
        last.get("val/dice_mean"),
        next(iter(run.values("data/labelled_share")), None),
    )


def _status(said: str, is_predicted: bool) -> str:
    line = re.sub(r"(, )?exit code \d+$", "", said).strip()
    if line in ("done", "running", ""):
        return {"done": "predicted" if is_predicted else "done", "": "unknown"}.get(line, line)
    bare = re.sub(r"^(error|failed): ", "", line)
    kind = "stopped" if bare.startswith(("stopped ", "interrupted")) else "failed"
    return f"{kind}: {bare.removeprefix('stopped ')}"


def differing(rows: Sequence[Row]) -> list[str]:
    """The settings that differ. What a run does not tell is no difference, unless no run tells its whole config."""
    partial = not any(row.is_whole for row in rows)
    told = {key: [row.settings[key] for row in rows if key in row.settings] for row in rows for key in row.settings}
    return [key for key, values in told.items() if len(set(values)) > 1 or (partial and len(values) < len(rows))]


def setting_columns(rows: Sequence[Row]) -> list[str]:
    """What differs, without the options that the name of a config group tells: model=unet tells model.features."""
    keys = differing(rows)
    groups = [key for key in keys if "." not in key and all(key in row.settings for row in rows)]
    return [key for key in keys if not any(_tells(group, key, rows) for group in groups)]


def _tells(group: str, key: str, rows: Sequence[Row]) -> bool:
    """Whether `key` belongs to the group and has one value for each of its names."""
    pairs = {(row.settings[group], row.settings.get(key)) for row in rows}
    return key.startswith(f"{group}.") and len(pairs) == len({name for name, _ in pairs})


def short(keys: Sequence[str]) -> list[str]:
    """Their last words where these are not shared: data.patch -> patch."""
    last = [key.rpartition(".")[2] for key in keys]
    return [word if last.count(word) == 1 else key for key, word in zip(keys, last, strict=True)]


def mismatches(rows: Sequence[Row], meant: Sequence[str] = ()) -> list[str]:
    """A line for each thing that makes the runs, or their peaks, no like for like: its key, and the values.

    `meant`: keys that an experiment varies.
    """
    pairs: dict[str, dict[str, Any]]
    pairs = {key: {row.name: row.settings.get(key) for row in rows} for key in SAME_CONFIG if key not in meant}
    pairs |= {key: {row.name: row.environment.get(key) for row in rows} for key in SAME_MACHINE}
    if len({row.settings.get("steps") for row in rows}) == 1:
        pairs["steps done"] = {row.name: row.numbers.steps_done for row in rows}
    pairs["peak"] = {row.name: row.basis for row in rows}
    pairs["kind of measured peak"] = {row.name: row.numbers.measured_kind for row in rows}
    return [f"{key}: {sides(found)}" for key, found in pairs.items() if len(set(found.values()) - {None}) > 1]


def sides(values: Mapping[str, Any]) -> str:
    """Which runs have which value; those that have None are left out: `4 (runs 0, 1), 8 (run 2)`."""
    runs: dict[Any, list[str]] = {}
    for name, value in values.items():
        runs.setdefault(value, []).append(name)
    return ", ".join(f"{value} ({_named(names)})" for value, names in runs.items() if value is not None)


def _named(names: Sequence[str]) -> str:
    if len(names) > 6:
        return f"{len(names)} runs"
    return f"run{'s' if len(names) > 1 else ''} {', '.join(names)}"


FACE: dict[str, tuple[str, Callable[[Any], str]]] = {  # field of Numbers: heading, and how it is shown
    "status": ("status", lambda text: text.partition(":")[0]),  # why it failed is told below
    "peak_predicted_bytes": ("peak, predicted (MiB)", mib),
    "peak_measured_bytes": ("peak, measured (MiB)", mib),
    "error_bytes": ("error (bytes)", "{:,}".format),
    "step_median_s": ("step (s)", "{:.3g}".format),
    "labelled_share": ("labelled voxels", "{:.1%}".format),
    "dice_mean": ("Dice, last weights", "{:.3f}".format),
    "parameters": ("parameters", "{:,}".format),
}


ABOUT = (
    "Peak: the most bytes held at once in a training step, in MiB (2^20 bytes); error: predicted less measured, of "
    "tensors: on a GPU by the ledger, which sees neither workspaces nor what the allocator rounds to. Step: the median "
    "time of one. Dice: mean over the classes at the last validation, of the last weights or their average; best.pt "
    "may hold those of an earlier step."
)


def compare_runs(paths: Sequence[Path], out: Path | None) -> None:
    """Print the runs, or the children of sweeps, side by side; with `out`, write the files there. Raises UserError."""
    rows = read_rows(find_runs(paths))
    print_comparison(rows)
    if out is not None:
        print(write_comparison(rows, out))


def finish_sweep(jobs: Mapping[Path, Config], folder: Path) -> None:
    """Compare a sweep's jobs, each a run folder and its config: on the terminal, in the sweep's folder, in wandb."""
    rows = read_rows([job.resolve() for job in jobs])
    print_comparison(rows)
    path = write_comparison(rows, folder)
    config = next(iter(jobs.values()))
    if wandb_mode(config) != "disabled":
        sinks = Loggers([_Tracked(config, folder)])
        sinks.table("compare", *cells(_without_paths(rows) if config.wandb.private else rows))
        sinks.close(0)
    print(f"compared: {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}")


def _without_paths(rows: Sequence[Row]) -> list[Row]:
    """Without the options that are paths: their last part is no path any more, but often a patient's name."""
    return [replace(row, settings={k: v for k, v in row.settings.items() if k not in PATHS}) for row in rows]


@dataclass(frozen=True)
class _Tracked:
    """A wandb run of one table, which begins and ends with it, so that `Sinks` minds that too.

    wandb's settings, and the config that it shows, are those of the sweep's first job.
    """

    config: Config
    folder: Path

    def table(self, key: str, columns: Sequence[str], rows: Sequence[Sequence]) -> None:
        run = WandbLogger(self.config, self.folder)
        try:
            run.table(key, columns, rows)
        finally:
            run.close(0)

    def scalars(self, values: Mapping[str, Scalar], step: int) -> None: ...
    def image(self, key: str, path: Path, step: int) -> None: ...
    def summary(self, values: Mapping[str, object]) -> None: ...
    def close(self, exit_code: int) -> None: ...


def comparison_table(rows: Sequence[Row]) -> Table:
    """What differs and what it came to, in the units of people; "" where a run has no such number."""
    keys = setting_columns(rows)
    fields = [field for field in FACE if any(getattr(row.numbers, field) is not None for row in rows)]
    return Table(
        ["run", *short(keys), *(FACE[field][0] for field in fields)],
        [
            [row.name, *(row.settings.get(key, "") for key in keys), *(_shown(row.numbers, field) for field in fields)]
            for row in rows
        ],
    )


def _shown(numbers: Numbers, field: str) -> str:
    value = getattr(numbers, field)
    return "" if value is None else FACE[field][1](value)


def cells(rows: Sequence[Row]) -> tuple[list[str], list[list[Any]]]:
    """The same for programs: headings with their units, and plain values; None where a run has no such number."""
    keys = setting_columns(rows)
    head = ["run", *keys, *Numbers._fields]
    return head, [[row.name, *(row.settings.get(key) for key in keys), *row.numbers] for row in rows]


def print_comparison(rows: Sequence[Row]) -> None:
    """Print the table and, a line each, what failed and what forbids to compare."""
    console = paper(WIDE)
    console.print(terminal_table(_title(rows), comparison_table(rows)))
    found = published_experiment(rows)
    if found:
        console.print(terminal_table(found.title, published_table(found, rows)))
    for line in [*_failures(rows), *(f"not comparable: {line}" for line in _odds(rows))]:
        console.print(line, soft_wrap=True)


def _odds(rows: Sequence[Row]) -> list[str]:
    found = published_experiment(rows)
    if found is None:
        return mismatches(rows)
    return [*mismatches(rows, (found.by, found.across)), *unlike(found, rows)]


def _failures(rows: Sequence[Row]) -> list[str]:
    """How each run that failed or was stopped ended, in short; the whole is in compare.csv and in its STATUS."""
    said = [(row.name, row.numbers.status) for row in rows if row.numbers.status.startswith(("failed", "stopped"))]
    return [f"run {name} {shorten(status, 110, placeholder=' ...')}" for name, status in said]


def write_comparison(rows: Sequence[Row], folder: Path) -> Path:
    """Write compare.csv, compare.png and compare.html into the folder, which is made; returns the page's path.

    Of a published experiment also published.csv and published.png.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_csv(folder / "compare.csv", *cells(rows))
    picture = folder / "compare.png"
    _draw(rows, picture)
    if found := published_experiment(rows):
        write_csv(folder / "published.csv", *published_table(found, rows))
        compare_plots.published_plot(published_lines(found, rows), found.title, folder / "published.png")
    path = folder / "compare.html"
    write_text(path, _html(rows, folder))
    return path


def _draw(rows: Sequence[Row], path: Path) -> None:
    """The picture of the runs with a measured peak; where these are not two, of all with a peak, none without any."""
    measured = [row for row in rows if row.basis == "measured"]
    shown = measured if len(measured) > 1 else [row for row in rows if row.basis is not None]
    odds = [line.partition(":")[0] for line in _odds(shown)]
    remark = f"Not comparable: the runs differ in {', '.join(odds)}" if odds else ""
    keys = setting_columns(rows)
    path.unlink(missing_ok=True)  # of an earlier comparison
    if shown:
        compare_plots.comparison_plot([_point(row, _label(row, keys)) for row in shown], remark, path)


def _label(row: Row, keys: Sequence[str]) -> str:
    """A run's name and what sets it apart: `0: model=unet amp=true`."""
    told = [f"{word}={row.settings[key]}" for key, word in zip(keys, short(keys), strict=True) if key in row.settings]
    return f"{row.name}: {' '.join(told)}" if told else row.name


def _point(row: Row, name: str) -> PlottedRun:
    numbers = row.numbers
    if numbers.peak_measured_bytes is not None:
        kind = f"measured, {numbers.measured_kind}"
        return PlottedRun(name, kind, numbers.peak_measured_bytes, numbers.step_median_s, numbers.dice_mean)
    assert numbers.peak_predicted_bytes is not None
    return PlottedRun(name, "predicted", numbers.peak_predicted_bytes, None, None)


def _title(rows: Sequence[Row]) -> str:
    return f"Comparison of {len(rows)} runs" if len(rows) > 1 else "One run"


def _html(rows: Sequence[Row], folder: Path) -> str:
    odds = _odds(rows)
    keys = differing(rows)
    told, full = setting_columns(rows), comparison_table(rows)
    first = 1 + len(told)  # what sets a run apart goes into its first cell, which is wrapped: else numbers are cut off
    body = [[_label(row, told), *line[first:]] for row, line in zip(rows, full.rows, strict=True)]
    what = [[key, sides({row.name: row.settings.get(key) for row in rows})] for key in keys]
    parts = [
        report.headline(_title(rows)),
        report.paragraph(ABOUT),
        report.html_table(["run", *full.columns[first:]], body),
        *map(report.paragraph, _failures(rows)),
        _beside(rows, folder / "published.png"),
        report.section("Not comparable", *(report.paragraph(line) for line in odds)),
        report.section(
            "Peak memory",
            report.picture(folder / "compare.png", "peak memory, against seconds a step and Dice if measured"),
        ),
        report.section("What differs", report.html_table(["option", "values"], what)),
    ]
    return report.html_page(_title(rows), parts)


def _beside(rows: Sequence[Row], picture: Path) -> str:
    found = published_experiment(rows)
    if not found:
        return ""
    told = report.html_table(*published_table(found, rows))
    return report.section(found.title, told, report.picture(picture, "IoU of these runs beside the paper's"))


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


def published_experiment(rows: Sequence[Row]) -> Published | None:
    """The published experiment that all of these runs belong to, if there is one."""
    names = {row.settings.get("experiment", "") for row in rows}
    return TABLES.get(names.pop()) if len(names) == 1 else None


def published_columns(published: Published, rows: Sequence[Row]) -> list[str]:
    """What our columns stand for: cases, or values of the setting."""
    if published.across == "case":
        return sorted({case for row in rows for case in row.iou})
    values = {row.settings.get(published.across, "") for row in rows}
    return sorted(values, key=lambda value: (int(value) if value.isdecimal() else -1, value))


def published_lines(published: Published, rows: Sequence[Row]) -> list[Line]:
    """Ours beside the paper's, in the paper's order, as far as there are runs."""
    heads = published_columns(published, rows)
    found: list[Line] = []
    for value, (name, theirs) in published.rows.items():
        runs = [row for row in rows if _chosen(row, published) == value]
        if runs:
            found.append(Line(name, [_score(published, runs, head) for head in heads], theirs))
    return found


def published_table(published: Published, rows: Sequence[Row]) -> Table:
    """The same as text; "" where a run failed."""
    heads = published_columns(published, rows)
    word = "" if published.across == "case" else "fold "
    ours = [f"{word}{head}" for head in heads]
    body = [
        [
            line.name,
            *map(_published_shown, line.ours),
            _published_shown(mean_if_complete(line.ours)),
            *map(_published_shown, line.paper),
            _published_shown(mean_if_complete(line.paper)),
        ]
        for line in published_lines(published, rows)
    ]
    return Table(["", *ours, "mean", "paper: 1", "2", "3", "mean"], body)


def unlike(published: Published, rows: Sequence[Row]) -> list[str]:
    """A line for each setting in which runs of one cell differ; a cell is the mean over seeds, not over that."""
    cells: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row.iou:
            cells.setdefault((_chosen(row, published), row.settings.get(published.across, "")), []).append(row)
    found = {(key, cell) for (cell, _), runs in cells.items() for key in setting_columns(runs)}
    return [
        f"{key}: differs between runs of one cell, {published.rows[cell][0]}"
        for key, cell in sorted(found)
        if key.startswith(LEARNING) and key not in SAME_CONFIG and cell in published.rows
    ]


def mean_if_complete(values: Sequence[float | None]) -> float | None:
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


def _published_shown(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"

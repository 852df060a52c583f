"""Runs side by side: a table for the terminal, compare.csv, a picture of what is traded for what, and a page with all.

A pure function of the run folders, so that it can be had again at any time, also of runs that failed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import shorten
from typing import Any

from unet3d import compare_figures, page, published
from unet3d.compare_figures import Point
from unet3d.compare_rows import Numbers, Row, columns, differing, find, mismatches, read, short, sides
from unet3d.config import Config
from unet3d.console import WIDE, paper, terminal_table
from unet3d.privacy import PATHS
from unet3d.sinks import Scalar, Sinks
from unet3d.table import Table, mib, write_csv
from unet3d.tracker import Wandb, wandb_mode

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


def compare(paths: Sequence[Path], out: Path | None) -> None:
    """Print the runs, or the children of sweeps, side by side; with `out`, write the files there. Raises UserError."""
    rows = read(find(paths))
    show(rows)
    if out is not None:
        print(write(rows, out))


def finish_sweep(jobs: Mapping[Path, Config], folder: Path) -> None:
    """Compare a sweep's jobs, each a run folder and its config: on the terminal, in the sweep's folder, in wandb."""
    rows = read([job.resolve() for job in jobs])
    show(rows)
    path = write(rows, folder)
    config = next(iter(jobs.values()))
    if wandb_mode(config) != "disabled":
        sinks = Sinks([_Tracked(config, folder)])
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
        run = Wandb(self.config, self.folder)
        try:
            run.table(key, columns, rows)
        finally:
            run.close(0)

    def scalars(self, values: Mapping[str, Scalar], step: int) -> None: ...
    def image(self, key: str, path: Path, step: int) -> None: ...
    def summary(self, values: Mapping[str, object]) -> None: ...
    def close(self, exit_code: int) -> None: ...


def table(rows: Sequence[Row]) -> Table:
    """What differs and what it came to, in the units of people; "" where a run has no such number."""
    keys = columns(rows)
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
    keys = columns(rows)
    head = ["run", *keys, *Numbers._fields]
    return head, [[row.name, *(row.settings.get(key) for key in keys), *row.numbers] for row in rows]


def show(rows: Sequence[Row]) -> None:
    """Print the table and, a line each, what failed and what forbids to compare."""
    console = paper(WIDE)
    console.print(terminal_table(_title(rows), table(rows)))
    experiment = published.experiment(rows)
    if experiment:
        console.print(terminal_table(experiment.title, published.table(experiment, rows)))
    for line in [*_failures(rows), *(f"not comparable: {line}" for line in _odds(rows))]:
        console.print(line, soft_wrap=True)


def _odds(rows: Sequence[Row]) -> list[str]:
    experiment = published.experiment(rows)
    if experiment is None:
        return mismatches(rows)
    return [*mismatches(rows, (experiment.by, experiment.across)), *published.unlike(experiment, rows)]


def _failures(rows: Sequence[Row]) -> list[str]:
    """How each run that failed or was stopped ended, in short; the whole is in compare.csv and in its STATUS."""
    said = [(row.name, row.numbers.status) for row in rows if row.numbers.status.startswith(("failed", "stopped"))]
    return [f"run {name} {shorten(status, 110, placeholder=' ...')}" for name, status in said]


def write(rows: Sequence[Row], folder: Path) -> Path:
    """Write compare.csv, compare.png and compare.html into the folder, which is made; returns the page's path.

    Of a published experiment also published.csv and published.png.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_csv(folder / "compare.csv", *cells(rows))
    picture = folder / "compare.png"
    _draw(rows, picture)
    if experiment := published.experiment(rows):
        write_csv(folder / "published.csv", *published.table(experiment, rows))
        compare_figures.beside(published.lines(experiment, rows), experiment.title, folder / "published.png")
    path = folder / "compare.html"
    path.write_text(_html(rows, folder), encoding="utf-8")
    return path


def _draw(rows: Sequence[Row], path: Path) -> None:
    """The picture of the runs with a measured peak; where these are not two, of all with a peak, none without any."""
    measured = [row for row in rows if row.basis == "measured"]
    shown = measured if len(measured) > 1 else [row for row in rows if row.basis is not None]
    odds = [line.partition(":")[0] for line in _odds(shown)]
    remark = f"Not comparable: the runs differ in {', '.join(odds)}" if odds else ""
    keys = columns(rows)
    path.unlink(missing_ok=True)  # of an earlier comparison
    if shown:
        compare_figures.draw([_point(row, _label(row, keys)) for row in shown], remark, path)


def _label(row: Row, keys: Sequence[str]) -> str:
    """A run's name and what sets it apart: `0: model=unet amp=true`."""
    told = [f"{word}={row.settings[key]}" for key, word in zip(keys, short(keys), strict=True) if key in row.settings]
    return f"{row.name}: {' '.join(told)}" if told else row.name


def _point(row: Row, name: str) -> Point:
    numbers = row.numbers
    if numbers.peak_measured_bytes is not None:
        kind = f"measured, {numbers.measured_kind}"
        return Point(name, kind, numbers.peak_measured_bytes, numbers.step_median_s, numbers.dice_mean)
    assert numbers.peak_predicted_bytes is not None
    return Point(name, "predicted", numbers.peak_predicted_bytes, None, None)


def _title(rows: Sequence[Row]) -> str:
    return f"Comparison of {len(rows)} runs" if len(rows) > 1 else "One run"


def _html(rows: Sequence[Row], folder: Path) -> str:
    odds = _odds(rows)
    keys = differing(rows)
    told, full = columns(rows), table(rows)
    first = 1 + len(told)  # what sets a run apart goes into its first cell, which is wrapped: else numbers are cut off
    body = [[_label(row, told), *line[first:]] for row, line in zip(rows, full.rows, strict=True)]
    what = [[key, sides({row.name: row.settings.get(key) for row in rows})] for key in keys]
    parts = [
        page.headline(_title(rows)),
        page.paragraph(ABOUT),
        page.table(["run", *full.columns[first:]], body),
        *map(page.paragraph, _failures(rows)),
        _beside(rows, folder / "published.png"),
        page.section("Not comparable", *(page.paragraph(line) for line in odds)),
        page.section(
            "Peak memory",
            page.picture(folder / "compare.png", "peak memory, against seconds a step and Dice if measured"),
        ),
        page.section("What differs", page.table(["option", "values"], what)),
    ]
    return page.page(_title(rows), parts)


def _beside(rows: Sequence[Row], picture: Path) -> str:
    experiment = published.experiment(rows)
    if not experiment:
        return ""
    told = page.table(*published.table(experiment, rows))
    return page.section(experiment.title, told, page.picture(picture, "IoU of these runs beside the paper's"))

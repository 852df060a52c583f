"""`python -m unet3d memory` over several configs: peaks side by side, and against batch size, width and patch."""

import csv
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from unet3d.checks import check
from unet3d.console import WIDE, paper, terminal_table
from unet3d.errors import UserError
from unet3d.memory import export, figures, tables
from unet3d.memory.look import Look, look
from unet3d.table import Table, mib

BATCHES = (1, 2, 4, 8)
SCALES = (0.25, 0.5, 1, 1.5, 2)  # of widths
SIZES = (0.5, 0.75, 1, 1.25, 1.5)  # of the patch's sides


class Point(NamedTuple):
    """One predicted peak."""

    varied: str  # what runs along the axis, with its unit
    x: float
    series: str
    config: str  # what differs from the series' own config
    parameters: int
    peak_bytes: int


def compare(jobs: Sequence[Sequence[str]], half: bool, out: Path | None) -> None:
    """Print a row a job; with `out`, write peaks.csv, the layer traces of all in trace.csv, and their picture."""
    looks = dict(zip(names(jobs), [look(job, half) for job in jobs], strict=True))
    first = next(iter(looks.values())).peak
    rows = [
        [name, f"{one.parameters:,}", mib(one.peak), f"{one.peak / first - 1:+.1%}", tables.moment(one.entry)]
        for name, one in looks.items()
    ]
    table = Table(["config", "parameters", "peak (MiB, ledger)", "change", "at its highest"], rows)
    paper(WIDE).print(terminal_table("Predicted peak of a step", table))
    if out is None:
        return
    (out / "figures").mkdir(parents=True, exist_ok=True)
    _write_csv(
        out / "peaks.csv",
        ["config", "parameters", "peak_bytes"],
        [[name, one.parameters, one.peak] for name, one in looks.items()],
    )
    calls = [row for name, one in looks.items() for row in export.trace(one.ledger, name)]
    export.write_trace(calls, out / "trace.csv")
    figures.trace(calls, out / "figures" / "trace.png")
    print(out)


def curves(jobs: Sequence[Sequence[str]], half: bool, out: Path) -> None:
    """Write curves.csv and figures/curves.png: peak against batch size, first width and patch, a line a job."""
    points = [
        point
        for name, job in zip(names(jobs), jobs, strict=True)
        for vary in (batches, widths, patches)
        for point in vary(look(job, half), name)
    ]
    (out / "figures").mkdir(parents=True, exist_ok=True)
    _write_csv(out / "curves.csv", list(Point._fields), points)
    panels = [(varied, _lines(points, varied)) for varied in dict.fromkeys(point.varied for point in points)]
    figures.curves(panels, out / "figures" / "curves.png")
    print(out / "curves.csv", out / "figures" / "curves.png", sep="\n")


def _lines(points: Sequence[Point], varied: str) -> dict[str, list[tuple[float, int]]]:
    lines: dict[str, list[tuple[float, int]]] = {}
    for point in points:
        if point.varied == varied:
            lines.setdefault(point.series, []).append((point.x, point.peak_bytes))
    return lines


def names(jobs: Sequence[Sequence[str]]) -> list[str]:
    """What tells each job from the others: its overrides that are not common to all."""
    common = set(jobs[0]).intersection(*jobs)
    return [" ".join(word for word in job if word not in common) or "config" for job in jobs]


def batches(subject: Look, series: str) -> Iterator[Point]:
    """Peak against patches a step."""
    for batch in BATCHES:
        other = replace(subject, config=replace(subject.config, batch=batch))
        yield from _point("batch size", batch, series, f"batch={batch}", other)


def widths(subject: Look, series: str) -> Iterator[Point]:
    """Peak against the first level's channels, all levels scaled alike."""
    for scale in SCALES:
        options = subject.options
        features = _scaled(options.features, scale)
        decoder = options.decoder and _scaled(options.decoder, scale)
        other = replace(subject, options=replace(options, features=features, decoder=decoder))
        yield from _point("first width (channels)", features[0], series, f"model.features={features}", other)


def patches(subject: Look, series: str) -> Iterator[Point]:
    """Peak against the patch's voxels."""
    for scale in SIZES:
        patch = _scaled(subject.config.data.patch, scale)
        config = replace(subject.config, data=replace(subject.config.data, patch=patch))
        voxels = patch[0] * patch[1] * patch[2]
        yield from _point("patch (voxels)", voxels, series, f"data.patch={patch}", replace(subject, config=config))


def _scaled(numbers: Sequence[int], scale: float) -> list[int]:
    return [max(1, round(number * scale)) for number in numbers]


def _point(varied: str, x: float, series: str, config: str, subject: Look) -> Iterator[Point]:
    """The point, if there is such a network: groups must divide widths, valid convolutions must fit the patch."""
    try:
        check(replace(subject.config, model=subject.options), here=False)
    except UserError:
        return
    yield Point(varied, x, series, config.replace(" ", ""), subject.parameters, subject.peak)


def _write_csv(path: Path, head: Sequence[str], rows: Sequence[Sequence]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([head, *rows])

"""`python -m unet3d memory` over several configs: peaks side by side, and against batch size, width and patch."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from unet3d.checks import check
from unet3d.console import WIDE, paper, terminal_table
from unet3d.errors import UserError
from unet3d.memory import export, figures, tables
from unet3d.memory.advise import overrides, resized
from unet3d.memory.look import Look, look, simulate
from unet3d.memory.meter import ENOUGH, STEADY
from unet3d.progress import track
from unet3d.table import Table, mib, write_csv

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
    steps = ENOUGH if out is None else STEADY
    looks = {name: replace(look(job, half), steps=steps) for name, job in zip(names(jobs), jobs, strict=True)}
    simulate(list(looks.values()))
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
    write_csv(
        out / "peaks.csv",
        ["config", "parameters", "peak_bytes"],
        [[name, one.parameters, one.peak] for name, one in looks.items()],
    )
    calls = [row for name, one in looks.items() for row in export.trace(one.ledger, name, STEADY - 1)]
    export.write_trace(calls, out / "trace.csv")
    figures.trace(calls, out / "figures" / "trace.png")
    print(out)


def curves(jobs: Sequence[Sequence[str]], half: bool, out: Path) -> None:
    """Write curves.csv and figures/curves.png: peak against batch size, first width and patch, a line a job."""
    looks = {name: replace(look(job, half), steps=ENOUGH) for name, job in zip(names(jobs), jobs, strict=True)}
    varied = (point for vary in (batches, widths, patches) for name, one in looks.items() for point in vary(one, name))
    points = list(track(varied, "points, at most", len(jobs) * len(BATCHES + SCALES + SIZES)))
    (out / "figures").mkdir(parents=True, exist_ok=True)
    write_csv(out / "curves.csv", list(Point._fields), points)
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
    """What tells each job from the others: its overrides that are not common to all. UserError if nothing does."""
    common = set(jobs[0]).intersection(*jobs)
    found = [" ".join(word for word in job if word not in common) or "config" for job in jobs]
    if twice := [name for name, count in Counter(found).items() if count > 1]:
        raise UserError(f"{twice[0]} is asked for more than once; name each value once")
    return found


def batches(subject: Look, series: str) -> Iterator[Point]:
    """Peak against patches a step."""
    for batch in BATCHES:
        other = replace(subject, config=replace(subject.config, batch=batch))
        yield from _point("batch size", batch, series, f"batch={batch}", other)


def widths(subject: Look, series: str) -> Iterator[Point]:
    """Peak against the first level's channels, all levels scaled alike."""
    for scale in SCALES:
        options = resized(subject.options, partial(_scaled, scale))
        other = replace(subject, options=options)
        yield from _point("first width (channels)", options.features[0], series, overrides(options), other)


def patches(subject: Look, series: str) -> Iterator[Point]:
    """Peak against the patch's voxels; of the patch alone where `auto` would make another network for each."""
    is_open = "auto" in (subject.config.model.kernels, subject.config.model.strides)
    for scale in (1,) if is_open else SIZES:
        patch = [max(1, round(length * scale)) for length in subject.config.data.patch]
        config = replace(subject.config, data=replace(subject.config.data, patch=patch))
        voxels = patch[0] * patch[1] * patch[2]
        given = f"data.patch={patch}".replace(" ", "")
        yield from _point("patch (voxels)", voxels, series, given, replace(subject, config=config))


def _scaled(scale: float, level: int, width: int) -> int:
    return max(1, round(width * scale))


def _point(varied: str, x: float, series: str, config: str, subject: Look) -> Iterator[Point]:
    """The point, if there is such a network: groups must divide widths, valid convolutions must fit the patch."""
    try:
        check(replace(subject.config, model=subject.options), here=False)
    except UserError:
        return
    yield Point(varied, x, series, config, subject.parameters, subject.peak)

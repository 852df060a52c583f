"""The pictures of a comparison."""

from collections.abc import Sequence
from itertools import cycle, product
from pathlib import Path
from statistics import fmean
from textwrap import shorten, wrap
from typing import TYPE_CHECKING, NamedTuple

from unet3d.report.plots import BLUE, GREY, OKABE_ITO, PALE, blank, plain
from unet3d.types import MIB, mib

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LETTERS = 60  # of a run's label
LETTER, LINE = 0.08, 0.19  # inches; a letter's mean width in 9 points, generously, and a line's height
MARKERS = [(marker, colour) for marker, colour in product("osD^vP*X", OKABE_ITO[:6])]  # yellow is faint on white


class PlottedRun(NamedTuple):
    """One run; None where it has no such number."""

    label: str
    kind: str  # of the peak, e.g. "measured, ledger"
    peak_bytes: int
    step_s: float | None
    dice: float | None


class PublishedRow(NamedTuple):
    """A row of the paper's table: scores of these runs, None where one is missing, and the paper's."""

    name: str
    ours: Sequence[float | None]
    paper: Sequence[float]


PAPER = "the paper's, on its own volumes"
AXES = {"step_s": ("seconds a step, median", 1), "dice": ("Dice, mean of the last validation", -1)}  # 1: less is better


def comparison_plot(runs: Sequence[PlottedRun], remark: str, path: Path) -> None:
    """Peak against seconds and against Dice, each a panel if two runs have it; else bars. `remark` goes above."""
    fields = [field for field in AXES if sum(getattr(run, field) is not None for run in runs) > 1]
    kinds = list(dict.fromkeys(run.kind for run in runs))
    labels = [plain(shorten(run.label, LETTERS, placeholder=" ...")) for run in runs]
    if len(kinds) > 1:
        labels = [f"{label} ({run.kind})" for label, run in zip(labels, runs, strict=True)]
    figure = _scatter(runs, labels, fields) if fields else _bars(runs, labels)
    for axes in figure.axes:
        axes.set_xlabel("peak memory of a step (MiB)" + (f", {kinds[0]}" if len(kinds) == 1 else ""))
        axes.locator_params("both" if fields else "x", nbins=5)
        axes.spines[["top", "right"]].set_visible(False)
    if remark:
        figure.suptitle(plain("\n".join(wrap(remark, int(figure.get_figwidth() / LETTER)))), fontsize=9)
    figure.savefig(path)


def _scatter(runs: Sequence[PlottedRun], labels: list[str], fields: Sequence[str]) -> "Figure":
    """A panel per field over the peak; the best trade-offs of each kind of peak are ringed and joined by a line."""
    best = "no other is better in both"
    width = 4.2 * len(fields) + LETTER * max(map(len, [*labels, best])) + 0.6
    figure = blank(width, max(4.0, LINE * len(runs) + 1.4))
    grid = figure.subplots(1, len(fields), squeeze=False)[0]
    for axes, field in zip(grid, fields, strict=True):
        title, sign = AXES[field]
        found = [run for run in runs if getattr(run, field) is not None]
        for kind in dict.fromkeys(run.kind for run in found):
            points = [(run.peak_bytes / MIB, getattr(run, field)) for run in found if run.kind == kind]
            joined = [points[index] for index in pareto([(x, sign * y) for x, y in points])]
            axes.plot(*zip(*joined, strict=True), "o--", color=GREY, mfc="none", mec="black", ms=12, label=best)
        for run, label, (marker, colour) in zip(runs, labels, cycle(MARKERS), strict=False):
            if (y := getattr(run, field)) is not None:
                axes.plot(run.peak_bytes / MIB, y, marker, color=colour, mec="black", mew=0.5, ms=7, label=label)
        axes.set_ylabel(title)
        axes.margins(0.12)
        axes.grid(color=PALE)
        axes.set_axisbelow(True)
    handles = {text: each for axes in grid for each, text in zip(*axes.get_legend_handles_labels(), strict=True)}
    order = sorted(handles, key=[*labels, best].index)
    shown = [handles[text] for text in order]
    grid[-1].legend(shown, order, loc="upper left", bbox_to_anchor=(1.02, 1.02), frameon=False, fontsize=9)
    return figure


def pareto(points: Sequence[tuple[float, float]]) -> list[int]:
    """Indices of the points that no other beats: less in one, not more in the other; by the first coordinate."""

    def is_beaten(x: float, y: float) -> bool:
        return any(a <= x and b <= y and (a, b) != (x, y) for a, b in points)

    return sorted((i for i, point in enumerate(points) if not is_beaten(*point)), key=lambda i: points[i])


def _bars(runs: Sequence[PlottedRun], labels: Sequence[str]) -> "Figure":
    figure = blank(LETTER * max(map(len, labels), default=0) + 6, max(2.0, 1.3 * LINE * len(runs) + 1.4))
    axes = figure.subplots()
    peaks = [run.peak_bytes / MIB for run in runs]
    axes.barh(range(len(runs)), peaks, 0.7, color=BLUE)
    axes.set_yticks(range(len(runs)), labels, fontsize=9)
    for row, (run, peak) in enumerate(zip(runs, peaks, strict=True)):
        axes.annotate(mib(run.peak_bytes), (peak, row), (4, 0), textcoords="offset points", va="center", fontsize=8)
    axes.set(xlim=(0, 1.15 * max([*peaks, 1e-3])), ylim=(len(runs) - 0.4, -0.6))
    return figure


def published_plot(rows: Sequence[PublishedRow], title: str, path: Path) -> None:
    """IoU of these runs and the paper's, a column per row of its table; lines join the means."""
    figure = blank(6.4, 4.2)
    axes = figure.subplots()
    for field, name, shift, colour in (("ours", "these runs", -0.06, BLUE), ("paper", PAPER, 0.06, GREY)):
        columns = [[value for value in getattr(row, field) if value is not None] for row in rows]
        for index, values in enumerate(columns):
            axes.plot([index + shift] * len(values), values, "o", color=colour, markersize=5)
        if means := [(index + shift, fmean(values)) for index, values in enumerate(columns) if values]:
            axes.plot(*zip(*means, strict=True), color=colour, label=name)
    axes.set(xlim=(-0.5, len(rows) - 0.5), ylim=(0, 1), ylabel="IoU")
    axes.set_xticks(range(len(rows)), [row.name for row in rows])
    axes.set_title("\n".join(wrap(title, LETTERS)), fontsize=11)
    axes.grid(axis="y", color=PALE)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(path)

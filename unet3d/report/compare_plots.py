"""The pictures of a comparison."""

from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean
from textwrap import shorten, wrap
from typing import TYPE_CHECKING, NamedTuple

from unet3d.report.plots import BLUE, GREY, OKABE_ITO, PALE, blank, plain
from unet3d.types import MIB, mib

if TYPE_CHECKING:
    from matplotlib.axes import Axes
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


Axis = tuple[str, Callable[[PlottedRun], float | None], int]  # title, value, 1 where less of it is better, else -1
AXES: tuple[Axis, ...] = (
    ("seconds a step, median", lambda run: run.step_s, 1),
    ("Dice, mean of the last validation", lambda run: run.dice, -1),
)


def comparison_plot(runs: Sequence[PlottedRun], remark: str, path: Path) -> None:
    """Peak against seconds and against Dice, each a panel if two runs have it, the best trade-offs joined; else bars.

    Peaks of different kinds are not joined. `remark` goes above.
    """
    panels = [axis for axis in AXES if sum(axis[1](run) is not None for run in runs) > 1]
    kinds = list(dict.fromkeys(run.kind for run in runs))
    labels = [_label(run, kinds) for run in runs]
    figure = _scatter(runs, labels, kinds, panels) if panels else _bars(runs, labels)
    for axes in figure.axes:
        axes.set_xlabel("peak memory of a step (MiB)" + (f", {kinds[0]}" if len(kinds) == 1 else ""))
        axes.locator_params("both" if panels else "x", nbins=5)
        axes.spines[["top", "right"]].set_visible(False)
    if remark:
        lines = wrap(remark, int(figure.get_figwidth() / LETTER))
        figure.suptitle(plain("\n".join(lines)), fontsize=9)
    figure.savefig(path)


def _label(run: PlottedRun, kinds: Sequence[str]) -> str:
    return plain(shorten(run.label, LETTERS, placeholder=" ...")) + (f" ({run.kind})" if len(kinds) > 1 else "")


def _scatter(runs: Sequence[PlottedRun], labels: list[str], kinds: list[str], panels: Sequence[Axis]) -> "Figure":
    legend = LETTER * max(map(len, [*labels, "no other is better in both"])) + 0.6
    figure = blank(4.2 * len(panels) + legend, max(4.0, LINE * len(runs) + 1.4))
    grid = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, axis in zip(grid, panels, strict=True):
        for kind in kinds:
            _join(axes, [run for run in runs if run.kind == kind], axis)
        for index, (run, label) in enumerate(zip(runs, labels, strict=True)):
            marker, colour = MARKERS[index % len(MARKERS)]
            if (y := axis[1](run)) is not None:
                axes.plot(run.peak_bytes / MIB, y, marker, color=colour, mec="black", mew=0.5, ms=7, label=label)
        axes.set_ylabel(axis[0])
        axes.margins(0.12)
        axes.grid(color=PALE)
        axes.set_axisbelow(True)
    handles = {text: each for axes in grid for each, text in zip(*axes.get_legend_handles_labels(), strict=True)}
    order = sorted(handles, key=[*labels, *handles].index)
    shown = [handles[text] for text in order]
    grid[-1].legend(shown, order, loc="upper left", bbox_to_anchor=(1.02, 1.02), frameon=False, fontsize=9)
    return figure


def _join(axes: "Axes", runs: Sequence[PlottedRun], axis: Axis) -> None:
    """Ring the best trade-offs, and draw a line through them."""
    _, value, sign = axis
    found = [(run.peak_bytes / MIB, y) for run in runs if (y := value(run)) is not None]
    best = [found[index] for index in pareto([(x, sign * y) for x, y in found])]
    if best:
        label = "no other is better in both"
        axes.plot(*zip(*best, strict=True), "o--", color=GREY, mfc="none", mec="black", ms=12, label=label)


def pareto(points: Sequence[tuple[float, float]]) -> list[int]:
    """The points that no other beats: is less in one coordinate and not more in the other; by the first coordinate.

    >>> pareto([(1, 5), (2, 5), (2, 3), (9, 3), (4, 1)])
    [0, 2, 4]
    """
    best = [
        index
        for index, (x, y) in enumerate(points)
        if not any(a <= x and b <= y and (a, b) != (x, y) for a, b in points)
    ]
    return sorted(best, key=lambda index: points[index])


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
    ours = [[value for value in row.ours if value is not None] for row in rows]
    series = (
        ("these runs", ours, -0.06, BLUE),
        ("the paper's, on its own volumes", [r.paper for r in rows], 0.06, GREY),
    )
    for name, columns, shift, colour in series:
        for index, values in enumerate(columns):
            axes.plot([index + shift] * len(values), values, "o", color=colour, markersize=5)
        means = [(index + shift, fmean(values)) for index, values in enumerate(columns) if values]
        if means:
            axes.plot(*zip(*means, strict=True), color=colour, label=name)
    axes.set(xlim=(-0.5, len(rows) - 0.5), ylim=(0, 1), ylabel="IoU")
    axes.set_xticks(range(len(rows)), [row.name for row in rows])
    axes.set_title("\n".join(wrap(title, LETTERS)), fontsize=11)
    axes.grid(axis="y", color=PALE)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(path)

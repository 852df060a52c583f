"""The pictures of a comparison."""

from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean
from textwrap import shorten, wrap
from typing import TYPE_CHECKING, NamedTuple, Protocol

from unet3d.report.plots import BLUE, GREY, OKABE_ITO, blank, plain
from unet3d.types import MIB, mib

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LETTERS = 60  # of a run's label


LETTER, LINE = 0.08, 0.19  # inches; a letter's mean width in 9 points, generously, and a line's height


MARKS = [(mark, colour) for mark, colour in product("osD^vP*X", OKABE_ITO[:6])]  # yellow is faint on white


class Beside(Protocol):
    """A row of scores beside published ones."""

    @property
    def name(self) -> str: ...
    @property
    def ours(self) -> Sequence[float | None]: ...
    @property
    def paper(self) -> Sequence[float]: ...


class PlottedRun(NamedTuple):
    """One run; None where it has no such number."""

    label: str
    kind: str  # of the peak, e.g. "measured, ledger"
    peak_bytes: int
    step_s: float | None
    dice: float | None


Axis = tuple[str, Callable[[PlottedRun], float | None], int]  # title, value, 1 where less of it is better, else -1


AXES: tuple[Axis, ...] = (
    ("seconds a step, median", lambda point: point.step_s, 1),
    ("Dice, mean of the last validation", lambda point: point.dice, -1),
)


def pareto(points: Sequence[tuple[float, float]]) -> list[int]:
    """Those of which no other is less in one coordinate and no more in the other, by the first coordinate; equals all.

    >>> pareto([(1, 5), (2, 5), (2, 3), (9, 3), (4, 1)])
    [0, 2, 4]
    """
    best = [
        index
        for index, (x, y) in enumerate(points)
        if not any(a <= x and b <= y and (a, b) != (x, y) for a, b in points)
    ]
    return sorted(best, key=lambda index: points[index])


def published_plot(lines: Sequence[Beside], title: str, path: Path) -> None:
    """Scores of these runs and the paper's, a column a row of the table; lines join the means."""
    figure = blank(6.4, 4.2)
    axes = figure.subplots()
    for shift, colour, name in ((-0.06, BLUE, "these runs"), (0.06, GREY, "the paper's, on its own volumes")):
        rows = [[v for v in (line.ours if colour == BLUE else line.paper) if v is not None] for line in lines]
        for index, values in enumerate(rows):
            axes.plot([index + shift] * len(values), values, "o", color=colour, markersize=5)
        means = [(index + shift, fmean(values)) for index, values in enumerate(rows) if values]
        axes.plot(*zip(*means, strict=True), color=colour, label=name) if means else None
    axes.set(xlim=(-0.5, len(lines) - 0.5), ylim=(0, 1), ylabel="IoU")
    axes.set_xticks(range(len(lines)), [line.name for line in lines])
    axes.set_title("\n".join(wrap(title, LETTERS)), fontsize=11)
    axes.grid(axis="y", color="#E5E5E5")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(path)


def comparison_plot(points: Sequence[PlottedRun], remark: str, path: Path) -> None:
    """A panel for each of seconds and Dice that two runs or more have, the best trade-offs joined; else bars of peaks.

    Peaks of different kinds are not joined. `remark` goes above.
    """
    panels = [axis for axis in AXES if sum(axis[1](point) is not None for point in points) > 1]
    if not panels:
        return _bars(points, remark, path)
    kinds = list(dict.fromkeys(point.kind for point in points))
    labels = [_label(point, kinds) for point in points]
    legend = LETTER * max(map(len, [*labels, "no other is better in both"])) + 0.6
    figure = blank(4.2 * len(panels) + legend, max(4.0, LINE * len(points) + 1.4))
    grid = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, axis in zip(grid, panels, strict=True):
        for kind in kinds:
            _join(axes, [point for point in points if point.kind == kind], axis)
        _scatter(axes, points, labels, axis)
        axes.set(xlabel="peak memory of a step (MiB)" + (f", {kinds[0]}" if len(kinds) == 1 else ""), ylabel=axis[0])
    handles = {text: each for axes in grid for each, text in zip(*axes.get_legend_handles_labels(), strict=True)}
    order = sorted(handles, key=[*labels, *handles].index)
    shown = [handles[text] for text in order]
    grid[-1].legend(shown, order, loc="upper left", bbox_to_anchor=(1.02, 1.02), frameon=False, fontsize=9)
    return _finish(figure, remark, path)


def _join(axes: "Axes", points: Sequence[PlottedRun], axis: Axis) -> None:
    """A line through the runs that no other one betters in both, which are ringed."""
    _, value, sign = axis
    found = [(point.peak_bytes / MIB, y) for point in points if (y := value(point)) is not None]
    best = [found[index] for index in pareto([(x, sign * y) for x, y in found])]
    if best:
        label = "no other is better in both"
        axes.plot(*zip(*best, strict=True), "o--", color=GREY, mfc="none", mec="black", ms=12, label=label)


def _scatter(axes: "Axes", points: Sequence[PlottedRun], labels: Sequence[str], axis: Axis) -> None:
    for index, (point, label) in enumerate(zip(points, labels, strict=True)):
        mark, colour = MARKS[index % len(MARKS)]
        if (y := axis[1](point)) is not None:
            axes.plot(point.peak_bytes / MIB, y, mark, color=colour, mec="black", mew=0.5, ms=7, label=label)
    axes.margins(0.12)
    axes.locator_params(nbins=5)
    axes.grid(color="#E5E5E5")
    axes.set_axisbelow(True)


def _bars(points: Sequence[PlottedRun], remark: str, path: Path) -> None:
    kinds = list(dict.fromkeys(point.kind for point in points))
    labels = [_label(point, kinds) for point in points]
    figure = blank(LETTER * max(map(len, labels), default=0) + 6, max(2.0, 1.3 * LINE * len(points) + 1.4))
    axes = figure.subplots()
    peaks = [point.peak_bytes / MIB for point in points]
    axes.barh(range(len(points)), peaks, 0.7, color=BLUE)
    axes.set_yticks(range(len(points)), labels, fontsize=9)
    for row, point in enumerate(points):
        where = (point.peak_bytes / MIB, row)
        axes.annotate(mib(point.peak_bytes), where, (4, 0), textcoords="offset points", va="center", fontsize=8)
    axes.set(xlim=(0, 1.15 * max([*peaks, 1e-3])), ylim=(len(points) - 0.4, -0.6))
    axes.set_xlabel("peak memory of a step (MiB)" + (f", {kinds[0]}" if len(kinds) == 1 else ""))
    axes.locator_params("x", nbins=5)
    _finish(figure, remark, path)


def _label(point: PlottedRun, kinds: Sequence[str]) -> str:
    told = f" ({point.kind})" if len(kinds) > 1 else ""
    return plain(shorten(point.label, LETTERS, placeholder=" ...")) + told


def _finish(figure: "Figure", remark: str, path: Path) -> None:
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    if remark:
        lines = wrap(remark, int(figure.get_figwidth() / LETTER))
        figure.suptitle("\n".join(lines).replace("$", r"\$"), fontsize=9)
    figure.savefig(path)

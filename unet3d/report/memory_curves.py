"""Figures of several predictions of memory: peaks against other sizes, and memory after each call of a layer."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unet3d.base.types import MIB
from unet3d.report.memory_plots import WIDTH, finish
from unet3d.report.plots import PALE, blank, colours

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Series = Mapping[str, Sequence[tuple[float, int]]]  # name: x and peak in bytes


def peak_curves(panels: Sequence[tuple[str, Series]], path: Path) -> None:
    """Draw peak memory against other sizes, a panel each: (title of the axis of x, its series)."""
    names = list(dict.fromkeys(name for _, series in panels for name in series))
    palette = dict(zip(names, colours(len(names)), strict=True))
    width = 3.3 * len(panels) + 0.6
    figure = blank(max(width, 5), 4)
    grid = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, (title, series) in zip(grid, panels, strict=True):
        for name, points in series.items():
            x = [size for size, _ in points]
            peaks = [peak / MIB for _, peak in points]
            axes.plot(
                x,
                peaks,
                "o-",
                color=palette[name],
                label=name,
                markersize=5,
            )
        _few_ticks(axes, series)
        axes.set_xlabel(title)
        axes.grid(color=PALE)
    grid[0].set(ylim=(0, None), ylabel="peak memory (MiB)")
    finish(figure, path)


def _few_ticks(axes: "Axes", series: Series) -> None:
    """Set at most four ticks, at whole numbers where all points are whole."""
    from matplotlib.ticker import MaxNLocator

    is_whole = all(float(x).is_integer() for points in series.values() for x, _ in points)
    locator = MaxNLocator(
        4,
        steps=[1, 2, 5, 10],
        integer=is_whole,
        min_n_ticks=1,
    )
    axes.xaxis.set_major_locator(locator)


def trace_plot(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw allocated bytes after each call of a layer, rows of `export.trace`; a mark where backward starts."""
    by_name: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        by_name.setdefault(row["exp"], []).append(row)
    figure = blank(WIDTH, 4)
    axes = figure.subplots()
    for (name, calls), colour in zip(by_name.items(), colours(len(by_name)), strict=True):
        numbers = [call["call_idx"] for call in calls]
        sizes = [call["mem_all"] / MIB for call in calls]
        axes.plot(numbers, sizes, color=colour, label=str(name))
        backward = [call["hook_type"] == "bwd" for call in calls]
        if any(backward):
            start = backward.index(True)
            axes.plot(
                numbers[start],
                sizes[start],
                "D",
                color="black",
                markersize=6,
                zorder=3,
                label="start of backward",
            )
    axes.set(
        xlabel="call",
        ylabel="allocated memory (MiB)",
        ylim=(0, None),
        title="Memory after each layer call",
    )
    axes.grid(color=PALE)
    finish(figure, path)

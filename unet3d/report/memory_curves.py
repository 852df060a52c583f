"""Figures of several predictions of memory: peaks against other sizes."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from unet3d.base.types import MIB
from unet3d.report.memory_plots import finish
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

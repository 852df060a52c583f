"""Figures of the memory of a step or of several networks, and a ledger's file; every axis of bytes is in MiB."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

import numpy as np

from unet3d.base.types import MIB, mib
from unet3d.memory.tables import folded, phase_name
from unet3d.report.plots import GREY, LETTER, Array, blank, colours, finish, panel, plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import ArrayLike

    from unet3d.memory.breakdown import TimelineRow
    from unet3d.memory.ledger import Ledger

Entry = Mapping[str, Any]  # a step in memory.json
Series = Mapping[str, Sequence[tuple[float, int]]]  # name: x and peak in bytes
Part = tuple[str, str, Array, Array]  # A stack's name, colour, MiB in every place and MiB below it.
KINDS = {  # category of bytes: its name and colour, from the bottom of a stack up; what every step keeps lies below
    "params": ("weights", "#0072B2"),
    "optimizer": ("optimizer state", "#CC79A7"),
    "inputs": ("batch", "#009E73"),
    "grads": ("gradients", "#D55E00"),
    "activations": ("activations (saved for backward)", "#56B4E9"),
    "temporaries": ("temporaries", "#E69F00"),
}
MOST_BARS = 60  # layers of a network without levels
MOST_EVENTS = 5000  # Above it, an SVG draws a step's areas as pixels.
WIDTH = 9.6  # inches, of a figure
BAND_COLOURS = ("#F2F2F2", "#FFFFFF")


def write_ledger_files(ledger: "Ledger", folder: Path) -> None:
    """Write memory/snapshot.pickle of all steps for PyTorch's viewer, and a figure of the last."""
    from unet3d.memory import breakdown  # here, since a report is written without torch

    start, rows = breakdown.timeline_rows(ledger)
    if not rows:  # no step was completed
        return
    files = folder / "memory"
    files.mkdir(parents=True, exist_ok=True)
    (folder / "figures").mkdir(exist_ok=True)
    breakdown.write_snapshot(ledger, files / "snapshot.pickle")
    timeline_plot(start, rows, folder / "figures" / "memory_timeline.png")


def phase_plot(entry: Entry, path: Path) -> None:
    """Draw bars of each phase's peak in later steps, by category if a ledger measured it; marks for the first step."""
    phases = entry["phases"]
    shown = [plain(phase_name(name)) for name in phases]
    later = np.array([peaks["steady"] for peaks in phases.values()]) / MIB
    first = np.array([peaks.get("first", peaks["steady"]) for peaks in phases.values()]) / MIB  # a later, if unknown
    figure = blank(WIDTH, 1.6 + 0.42 * len(phases))
    axes = figure.subplots()
    parts: Iterable[Part] = [("later steps", GREY, later, np.zeros(len(phases)))]
    if "phase_categories" in entry:
        parts = _stack([[entry["phase_categories"][name][kind] for name in phases] for kind in KINDS])
    for name, colour, sizes, below in parts:
        axes.barh(shown, sizes, 0.66, left=below, color=colour, label=name)
    if any("first" in peaks for peaks in phases.values()):
        axes.plot(first, shown, "D", color="black", mec="white", markersize=7, label="first step")
    ends = np.maximum(first, later)
    for row, end in enumerate(ends):
        text = f"{later[row]:,.1f}"
        if end > later[row]:
            text += f" (first step {end:,.1f})"
        axes.annotate(text, (end, row), (8, 0), textcoords="offset points", va="center", fontsize=9)
    room = 1.35 if any(first > later) else 1.12
    axes.set(xlim=(0, room * max(1 / MIB, *ends)), xlabel="peak memory (MiB)", ylabel="phase of the step")
    axes.set_title(plain(f"Peak memory per phase, {entry['kind']}"))
    axes.invert_yaxis()
    _finish(figure, path)


def timeline_plot(start: Mapping[str, int], rows: Sequence["TimelineRow"], path: Path) -> None:
    """Draw live bytes by category over one step's events: `breakdown.timeline_rows`; `start` is before the first."""
    changes = np.zeros((len(KINDS), len(rows) + 1), np.int64)
    changes[:, 0] = [start.get(kind, 0) for kind in KINDS]
    kinds = [list(KINDS).index(row.category) for row in rows]
    changes[kinds, range(1, len(rows) + 1)] = [row.change_bytes for row in rows]
    sizes_of = changes.cumsum(axis=1)
    figure = blank(WIDTH, 4.4)
    axes = figure.subplots()
    is_long = len(rows) > MOST_EVENTS
    for name, colour, sizes, below in _stack(sizes_of):
        edges = (range(len(sizes)), below, below + sizes)
        axes.fill_between(*edges, step="post", color=colour, linewidth=0, label=name, rasterized=is_long)
    alive = sizes_of.sum(axis=0)
    event = int(alive.argmax())
    peak = alive[event] / MIB
    text = f"{peak:,.1f} MiB"
    if event:
        text += f", {rows[event - 1].module}"  # the layer that reaches it
    side = "left" if event < 0.25 * len(rows) else "right" if event > 0.75 * len(rows) else "center"
    axes.plot(event, peak, "v", color="black", markersize=5)
    axes.annotate(text, (event, peak), (0, 6), textcoords="offset points", ha=side, fontsize=9)
    axes.set(xlim=(0, len(rows)), ylim=(0, 1.25 * peak), title="Memory over one step")  # phases are named above
    axes.set(xlabel="allocation or release (event)", ylabel="memory (MiB)")
    _bands(axes, [phase_name(row.phase) for row in rows], 0.0, WIDTH)
    _finish(figure, path)


def peak_curves(panels: Sequence[tuple[str, Series]], path: Path) -> None:
    """Draw peak memory against other sizes, a panel each: (title of the axis of x, its series)."""
    from matplotlib.ticker import MaxNLocator

    names = list(dict.fromkeys(name for _, series in panels for name in series))
    palette = dict(zip(names, colours(len(names)), strict=True))
    figure = blank(max(3.3 * len(panels) + 0.6, 5), 4)
    grid = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, (title, series) in zip(grid, panels, strict=True):
        for name, points in series.items():
            peaks = [(size, peak / MIB) for size, peak in points]
            axes.plot(*zip(*peaks, strict=True), "o-", color=palette[name], label=plain(name), markersize=5)
        is_whole = all(float(x).is_integer() for points in series.values() for x, _ in points)
        axes.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10], integer=is_whole, min_n_ticks=1))
        axes.set_xlabel(title)
        panel(axes, "both")
    grid[0].set(ylim=(0, None), ylabel="peak memory (MiB)")
    _finish(figure, path)


def layer_plot(entry: Entry, path: Path) -> None:
    """Draw bytes by category at the peak of `LedgerMeter.summary()`, by layer; layers without level are one bar.

    Of a network without levels each layer is one.
    """
    rows = [row for row in entry["layers"] if row["level"] is not None]
    others = [row for row in entry["layers"] if row["level"] is None]
    if {row["module"] for row in rows} <= {"data", "loss"}:  # a user's own network, which has no levels
        rows = folded(entry, MOST_BARS)["layers"]
    elif others:
        sums = {key: sum(row[key] for row in others) for key in ("bytes", *KINDS)}
        rows.append({"module": "other", "level": None, **sums})
    count = len(rows)
    width = max(WIDTH, 0.26 * count + 1)
    figure = blank(width, 5)
    axes = figure.subplots()
    for name, colour, sizes, below in _stack([[row[kind] for row in rows] for kind in KINDS]):
        axes.bar(range(count), sizes, 0.8, bottom=below, color=colour, label=name)
    axes.set_xticks(range(count), [plain(row["module"]) for row in rows], rotation=90, fontsize=8)
    axes.set(xlim=(-0.5, count - 0.5), ylim=(0, 1.25 * max(row["bytes"] for row in rows) / MIB))
    axes.set(xlabel="layer, in the order of the network", ylabel="memory (MiB)")
    names = {None: "", 0: "level 0\n(full resolution)"}
    _bands(axes, [names.get(row["level"], plain(f"level {row['level']}")) for row in rows], -0.5, width)
    peak = f"{mib(entry['peak_bytes'])} MiB"
    axes.set_title(plain(f"Memory by layer at the peak of {peak} ({entry['moment']['words']})"))
    _finish(figure, path)


def _stack(sizes: "ArrayLike") -> Iterator[Part]:
    """Return the categories that have bytes; `sizes` has a row for each, in bytes."""
    below = np.zeros(np.shape(sizes)[1])
    for (name, colour), row in zip(KINDS.values(), np.divide(sizes, MIB), strict=True):
        if row.any():
            yield name, colour, row, below
            below = below + row


def _bands(axes: "Axes", keys: Sequence[str], start: float, width: float) -> None:
    """Shade stretches of equal keys, one unit of x per key, and name the wide ones; `width` in inches: the figure's."""
    letters_per_key = (width - 1) / (LETTER * 8 / 9) / len(keys)  # an inch is left of the axes
    for index, (key, same) in enumerate(groupby(keys)):
        end = start + len(list(same))
        room = int((end - start) * letters_per_key)
        axes.axvspan(start, end, color=BAND_COLOURS[index % 2], linewidth=0, zorder=0)
        lines = []
        for part in key.splitlines():
            lines += wrap(part, max(room, 1), break_long_words=False)
        if lines and max(map(len, lines)) <= room:
            style: dict[str, Any] = {"ha": "center", "va": "top", "fontsize": 8}
            axes.text((start + end) / 2, 0.985, "\n".join(lines), transform=axes.get_xaxis_transform(), **style)
        start = end


def _finish(figure: "Figure", path: Path) -> None:
    """Write whole numbers at the axes, add a legend below, and save."""
    from matplotlib.ticker import ScalarFormatter

    for axes in figure.axes:
        panel(axes)
        for axis in (axes.xaxis, axes.yaxis):
            if isinstance(axis.get_major_formatter(), ScalarFormatter):  # not of names
                axis.set_major_formatter("{x:,.10g}")
    finish(figure, path, "below")

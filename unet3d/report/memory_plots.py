"""Pictures of memory as PNG files, and a ledger's other files; every axis of bytes is in MiB (2^20 bytes)."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

import numpy as np

from unet3d.base.files import write_csv
from unet3d.base.types import MIB, mib
from unet3d.memory.tables import folded
from unet3d.report.plots import GREY, PALE, Array, blank, colours, plain, save_picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import ArrayLike

    from unet3d.memory.analysis import TimelineRow
    from unet3d.memory.ledger import Ledger

KINDS = {  # category of bytes: its name and colour, from the bottom of a stack up; what every step keeps lies below
    "params": ("weights", "#0072B2"),
    "optimizer": ("optimizer state", "#CC79A7"),
    "inputs": ("batch", "#009E73"),
    "grads": ("gradients", "#D55E00"),
    "activations": ("activations (saved for backward)", "#56B4E9"),
    "temporaries": ("temporaries", "#E69F00"),
}
MOST_BARS = 60  # layers of a network without levels
MOST_EVENTS = 5000  # of a step whose areas an SVG draws as shapes, not as pixels
WIDTH, LETTER = 9.6, 0.075  # inches: of a figure; of a letter in 9 points on average, generously
Part = tuple[str, str, Array, Array]  # of a stack: name, colour, its MiB in every place and the MiB below it


def write_ledger_files(ledger: "Ledger", name: str, folder: Path) -> None:
    """Write memory/ (snapshot.pickle of all steps; timeline.csv, trace.csv, changes.txt of the last), and a picture."""
    from unet3d.memory import analysis, export  # here, since a report is written without torch

    start, rows = analysis.timeline_rows(ledger)
    if not rows:  # no step was completed
        return
    files, last = folder / "memory", sum(mark == "end" for _, mark in ledger.marks) - 1
    files.mkdir(parents=True, exist_ok=True)
    (folder / "figures").mkdir(exist_ok=True)
    export.write_snapshot(ledger, files / "snapshot.pickle")
    write_csv(files / "timeline.csv", analysis.TimelineRow._fields, rows)
    export.write_trace(export.trace(ledger, name, last), files / "trace.csv")
    export.write_changes(ledger, files / "changes.txt")
    timeline_plot(start, rows, folder / "figures" / "memory_timeline.png")


def phase_plot(entry: Mapping[str, Any], path: Path) -> None:
    """Bars of each phase's peak in later steps, by category if a ledger measured it, and a mark for the first step."""
    names = list(entry["phases"])
    peaks = [entry["phases"][name] for name in names]  # where no first step is known, it counts as a later one
    first, later = (np.array([p.get(when, p["steady"]) for p in peaks]) / MIB for when in ("first", "steady"))
    shown = list(map(plain, names))
    figure = blank(WIDTH, 1.6 + 0.42 * len(names))
    axes = figure.subplots()
    stack: Iterable[Part] = [("later steps", GREY, later, np.zeros(len(names)))]
    if kinds := entry.get("phase_categories"):
        stack = _stack([[kinds[name][kind] for name in names] for kind in KINDS])
    for label, colour, sizes, below in stack:
        axes.barh(shown, sizes, 0.66, left=below, color=colour, label=label)
    if any("first" in p for p in peaks):
        axes.plot(first, shown, "D", color="black", mec="white", markersize=7, label="first step")
    for row, (one, other) in enumerate(zip(first, later, strict=True)):
        text = f"{other:,.1f}" + (f" (first step {one:,.1f})" if one > other else "")
        axes.annotate(text, (max(one, other), row), (8, 0), textcoords="offset points", va="center", fontsize=9)
    room = (1.35 if any(first > later) else 1.12) * max(1 / MIB, *first, *later)
    axes.set(xlim=(0, room), xlabel="peak memory (MiB)", ylabel="phase of the step")
    axes.invert_yaxis()
    axes.set_title(plain(f"Peak memory per phase, {entry['kind']}"))
    _finish(figure, path)


def timeline_plot(start: Mapping[str, int], rows: Sequence["TimelineRow"], path: Path) -> None:
    """Live bytes by category over one step's events: `analysis.timeline_rows`; `start` is before the first event."""
    changes, index = np.zeros((len(KINDS), len(rows) + 1), np.int64), {kind: i for i, kind in enumerate(KINDS)}
    changes[:, 0] = [start.get(kind, 0) for kind in KINDS]
    for event, row in enumerate(rows, start=1):
        changes[index[row.category], event] = row.change_bytes
    figure = blank(WIDTH, 4.4)
    axes = figure.subplots()
    for label, colour, sizes, below in _stack(changes.cumsum(axis=1)):
        style: dict[str, Any] = {"color": colour, "linewidth": 0, "label": label}
        style["rasterized"] = len(sizes) > MOST_EVENTS
        axes.fill_between(range(len(sizes)), below, below + sizes, step="post", **style)
    alive = changes.sum(axis=0).cumsum()
    event, peak = int(alive.argmax()), alive.max() / MIB
    text = f"{peak:,.1f} MiB" + (f", {rows[event - 1].module}" if event else "")
    side = "left" if event < 0.25 * len(rows) else "right" if event > 0.75 * len(rows) else "center"
    axes.plot(event, peak, "v", color="black", markersize=5)
    axes.annotate(text, (event, peak), (0, 6), textcoords="offset points", ha=side, fontsize=9)
    axes.set(xlim=(0, len(rows)), xlabel="allocation or release (event)", title="Memory over one step")
    axes.set(ylim=(0, 1.25 * peak), ylabel="memory (MiB)")  # with room above for the names of the phases
    _bands(axes, [row.phase for row in rows], 0.0, WIDTH)
    _finish(figure, path)


def layer_plot(entry: Mapping[str, Any], path: Path) -> None:
    """Bytes by category at the peak of `LedgerMeter.summary()`, by layer; what is in no level is one bar, "other"."""
    rows = [row for row in entry["layers"] if row["level"] is not None]
    rest = [row for row in entry["layers"] if row["level"] is None]
    if {row["module"] for row in rows} <= {"data", "loss"}:  # a user's own network, which has no levels
        rows = folded(entry, MOST_BARS)["layers"]
    elif rest:
        rows.append({"module": "other", "level": None} | {k: sum(row[k] for row in rest) for k in ("bytes", *KINDS)})
    width = max(WIDTH, 0.26 * len(rows) + 1)
    figure = blank(width, 5)
    axes = figure.subplots()
    for label, colour, sizes, below in _stack([[row[kind] for row in rows] for kind in KINDS]):
        axes.bar(range(len(rows)), sizes, 0.8, bottom=below, color=colour, label=label)
    axes.set_xticks(range(len(rows)), [plain(row["module"]) for row in rows], rotation=90, fontsize=8)
    axes.set(xlim=(-0.5, len(rows) - 0.5), ylim=(0, 1.25 * max(row["bytes"] for row in rows) / MIB))
    axes.set(xlabel="layer, in the order of the network", ylabel="memory (MiB)")
    names = {None: "", 0: "level 0\n(full resolution)"}
    _bands(axes, [names.get(row["level"], plain(f"level {row['level']}")) for row in rows], -0.5, width)
    title = f"Memory by layer at the peak of {mib(entry['peak_bytes'])} MiB ({entry['moment']['words']})"
    axes.set_title(plain(title))
    _finish(figure, path)


def peak_curves(panels: Sequence[tuple[str, Mapping[str, Sequence[tuple[float, int]]]]], path: Path) -> None:
    """Peak memory against other sizes, a panel each: (x axis title, {series: [(x, peak in bytes)]})."""
    from matplotlib.ticker import MaxNLocator

    names = list(dict.fromkeys(name for _, series in panels for name in series))
    palette = dict(zip(names, colours(len(names)), strict=True))
    figure = blank(max(3.3 * len(panels) + 0.6, 5), 4)
    grid = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, (title, series) in zip(grid, panels, strict=True):
        for name, points in series.items():
            where, peaks = np.array(points, float).reshape(-1, 2).T
            axes.plot(where, peaks / MIB, "o-", color=palette[name], label=name, markersize=5)
        whole = all(float(x).is_integer() for points in series.values() for x, _ in points)
        axes.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10], integer=whole, min_n_ticks=1))
        axes.set_xlabel(title)
        axes.grid(color=PALE)
    grid[0].set(ylim=(0, None), ylabel="peak memory (MiB)")
    _finish(figure, path)


def trace_plot(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Allocated bytes at each call of a module's hook, rows of `export.trace`; a mark at the first backward hook."""
    names = list(dict.fromkeys(row["exp"] for row in rows))
    figure = blank(WIDTH, 4)
    axes = figure.subplots()
    for name, colour in zip(names, colours(len(names)), strict=True):
        calls = [(row["call_idx"], row["mem_all"] / MIB, row["hook_type"]) for row in rows if row["exp"] == name]
        axes.plot([call for call, _, _ in calls], [size for _, size, _ in calls], color=colour, label=str(name))
        for call, size in [(call, size) for call, size, hook in calls if hook == "bwd"][:1]:
            axes.plot(call, size, "D", color="black", markersize=6, zorder=3, label="backward has left the head")
    axes.set(xlabel="hook call (index)", ylabel="allocated memory (MiB)", ylim=(0, None), title="Memory at each hook")
    axes.grid(color=PALE)
    _finish(figure, path)


def _stack(sizes: "ArrayLike") -> Iterator[Part]:
    """The categories that have bytes; `sizes` has a row for each."""
    below = np.zeros(np.shape(sizes)[1])
    for (name, colour), row in zip(KINDS.values(), np.divide(sizes, MIB), strict=True):
        if row.any():
            yield name, colour, row, below
            below = below + row


def _bands(axes: "Axes", keys: Sequence[str], start: float, width: float) -> None:
    """Shade stretches of equal keys, one unit of x per key, and name the wide ones; `width` in inches: the figure's."""
    letters = (width - 1) / (LETTER * 8 / 9) / max(len(keys), 1)  # per key; 1 inch: left of the axes
    for index, (key, same) in enumerate(groupby(keys)):
        end = start + len(list(same))
        fit = int((end - start) * letters)
        lines = [line for part in key.splitlines() for line in wrap(part, max(fit, 1), break_long_words=False)]
        axes.axvspan(start, end, color=("#F2F2F2", "#FFFFFF")[index % 2], linewidth=0, zorder=0)
        if lines and max(map(len, lines)) <= fit:
            place = ((start + end) / 2, 0.985)
            axes.text(*place, "\n".join(lines), transform=axes.get_xaxis_transform(), ha="center", va="top", fontsize=8)
        start = end


def _finish(figure: "Figure", path: Path) -> None:
    """Add one legend below all axes, in the order of drawing and in as many columns as fit; save."""
    from matplotlib.ticker import ScalarFormatter

    found = [axes.get_legend_handles_labels() for axes in figure.axes]
    entries: dict[str, Any] = {plain(name): handle for each in found for handle, name in zip(*each, strict=True)}
    labels = sorted(entries, key=lambda label: getattr(entries[label], "zorder", 0))
    layouts = [np.array_split(labels, count) for count in range(1, len(labels) + 1)]
    widths = [sum(LETTER * max(map(len, column)) + 0.6 for column in columns) for columns in layouts]
    fit = max((count for count, width in enumerate(widths, 1) if width < figure.get_figwidth()), default=1)
    handles = [entries[label] for label in labels]
    figure.legend(handles, labels, loc="outside lower center", ncols=fit, frameon=False, fontsize=9)
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        for axis in (axes.xaxis, axes.yaxis):
            if isinstance(axis.get_major_formatter(), ScalarFormatter):  # not of names
                axis.set_major_formatter("{x:,.10g}")
    save_picture(figure, path)

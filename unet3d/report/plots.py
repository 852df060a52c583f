"""Pictures as PNG and SVG files: a run's training curves, and runs side by side."""

from collections.abc import Mapping, Sequence
from itertools import cycle, product
from math import ceil
from pathlib import Path
from statistics import fmean
from textwrap import shorten, wrap
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from unet3d.base.errors import escaped
from unet3d.base.files import replacing
from unet3d.base.types import MIB, mib
from unet3d.report.run_folder import as_number, best_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Array = NDArray[Any]
Curve = tuple[Array, Array]  # steps and values
OKABE_ITO = ("#E69F00", "#56B4E9", "#009E73", "#D55E00", "#0072B2", "#CC79A7", "#F0E442")
BLUE, GREY, DARK, PALE, BEST = "#0072B2", "#A0A0A0", "#404040", "#E5E5E5", "#D55E00"
FEW, MANY = 30, 200  # records: so few are marked one by one; from so many on steps fade behind their running mean
LETTERS = 60  # of a run's label
LETTER, LINE = 0.08, 0.19  # inches; a letter's mean width in 9 points, generously, and a line's height
BELOW = {"train/lr": "Learning rate", "train/grad_norm": "Gradient norm", "time/step_s": "Seconds a step"}
OVERLAID = {"train/loss": "Training loss", "val/dice_mean": "Validation Dice, mean of classes"}
LINES = [(style, colour) for style, colour in product(("-", "--", ":"), OKABE_ITO[:6])]
MARKERS = [(marker, colour) for marker, colour in product("osD^vP*X", OKABE_ITO[:6])]  # yellow is faint on white
PAPER = "the paper's, on its own volumes"
AXES = {"step_s": ("seconds a step, median", 1), "dice": ("Dice, mean of the last validation", -1)}  # 1: less is better


def blank(width: float, height: float) -> "Figure":
    """A figure of a size in inches, in which nothing overlaps."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=150, layout="constrained", facecolor="white")


def save_picture(figure: "Figure", path: Path) -> None:
    """Write a PNG file, and beside it the same as SVG; each whole or not at all, and equal for equal figures."""
    import matplotlib

    layout = figure.get_layout_engine()
    assert layout is not None
    layout.execute(figure)
    figure.set_layout_engine(None)  # it is laid out: once for both files, which would else be drawn three times more
    with matplotlib.rc_context({"svg.hashsalt": "unet3d"}):
        for suffix, about in ((".svg", {"Date": None}), (path.suffix, {})):  # where the PNG is, the SVG is, too
            with replacing(path.with_suffix(suffix)) as file:
                figure.savefig(file, format=suffix[1:], metadata=about)


def remove_picture(path: Path) -> None:
    """Remove what `save_picture` has written, if it is there."""
    path.unlink(missing_ok=True)
    path.with_suffix(".svg").unlink(missing_ok=True)


def colours(count: int) -> list[Any]:
    """One colour per foreground class, the same in every picture; beyond seven, shades of viridis."""
    if count > len(OKABE_ITO):
        from matplotlib import colormaps

        return [colormaps["viridis"](share) for share in np.linspace(0, 0.95, count)]
    return list(OKABE_ITO[:count])


def plain(text: str) -> str:
    """Text for matplotlib: it prints control codes, which no font has, in a warning, and takes `$` for a formula."""
    return escaped(text, keep="\n").replace("$", r"\$")


def training_curves(records: Sequence[Mapping[str, Any]], path: Path) -> None:
    """What records of metrics.jsonl hold, over optimizer steps, with the best validation marked.

    Training loss; Dice per class and their mean; below them learning rate, gradient norm, seconds a step.
    """
    names = dict.fromkeys(key for record in records for key in record if key.startswith("val/dice"))
    dice = {name: _series(records, name) for name in names}
    best = best_of(records).get("step")
    below = {key: _series(records, key) for key in BELOW if any(key in record for record in records)}
    columns = len(dice) // 13 + 1  # of the legend
    figure = blank(8.0 + 2.2 * columns if dice else 9.6 if below else 5, 3.6 + 2.4 * bool(below))
    rows = figure.subfigures(1 + bool(below), 1, squeeze=False, height_ratios=[3, 2][: 1 + bool(below)])[:, 0]
    first, *others = rows[0].subplots(1, 2 if dice else 1, squeeze=False, sharex=True)[0]
    _draw_loss(first, *_series(records, "train/loss"), best)
    for axes in others:
        _draw_dice(axes, dice, columns, best)
    small = rows[-1].subplots(1, len(below), squeeze=False)[0] if below else ()
    for axes, (key, series) in zip(small, below.items(), strict=True):
        _draw_below(axes, BELOW[key], *series)
    for axes in (first, *others, *small):
        _over_steps(axes)
    save_picture(figure, path)


def _over_steps(axes: "Axes") -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel("optimizer step")
    axes.xaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 5, 10], integer=True, min_n_ticks=1))
    axes.grid(color=PALE)
    axes.spines[["top", "right"]].set_visible(False)


def _series(records: Sequence[Mapping[str, Any]], key: str) -> tuple[Array, Array]:
    """Steps and values of the records that have the key; the strings "nan" and "inf" become numbers."""
    pairs = ((record["step"], as_number(record.get(key))) for record in records)
    found = [(step, value) for step, value in pairs if value is not None]
    steps, values = zip(*found, strict=True) if found else ((), ())
    return np.array(steps), np.array(values, float)


def _draw_steps(axes: "Axes", steps: Array, values: Array) -> None:
    """A value of each step; of many, their running mean before them."""
    if len(steps) < MANY:
        axes.plot(steps, values, color=BLUE, marker="o" if len(steps) <= FEW else "", ms=4)
    else:
        axes.plot(steps, values, color=GREY, linewidth=0.6, label="each step")
        mean, window = running_mean(values)
        axes.plot(steps[window - 1 :], mean, color=BLUE, label=f"mean of {window} steps")


def running_mean(values: Array) -> tuple[Array, int]:
    """Means of a fiftieth of the values, and of how many."""
    window = max(1, len(values) // 50)
    return np.convolve(values, np.ones(window) / window, "valid"), window


def _scale(axes: "Axes", values: Array) -> None:
    """A logarithmic axis where values differ much."""
    known = values[np.isfinite(values)]
    if known.size and 0 < 20 * known.min() < known.max():
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")


def _draw_loss(axes: "Axes", steps: Array, loss: Array, best: int | None) -> None:
    axes.set_title("Training loss")
    _draw_steps(axes, steps, loss)
    if best is not None:
        axes.axvline(best, color=BEST, linestyle=":", linewidth=1.4, zorder=1, label=f"best Dice, step {best}")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=9)
    if not np.isfinite(loss).any():
        axes.text(0.5, 0.5, "no finite loss", ha="center", transform=axes.transAxes)
        axes.set(yticks=[])
    _scale(axes, loss)


def _draw_below(axes: "Axes", title: str, steps: Array, values: Array) -> None:
    axes.set_title(title, fontsize=10)
    _draw_steps(axes, steps, values)
    axes.tick_params(labelsize=9)
    if np.isfinite(values).any():
        axes.set_ylim(bottom=min(0, values[np.isfinite(values)].min()))


def _draw_dice(axes: "Axes", series: Mapping[str, tuple[Array, Array]], columns: int, best: int | None) -> None:
    axes.set(title="Validation Dice", ylim=(0, 1.02))
    classes = [name for name in series if name != "val/dice_mean"]
    marker = "o" if max(len(steps) for steps, _ in series.values()) <= FEW else ""
    for colour, name in zip(colours(len(classes)), classes, strict=True):
        axes.plot(*series[name], color=colour, marker=marker, ms=4, label=short_name(name.removeprefix("val/dice/")))
    if len(classes) != 1 and "val/dice_mean" in series:
        axes.plot(*series["val/dice_mean"], "--", color="black", marker=marker, ms=3, label="mean of classes")
    if best is not None:
        steps, values = series["val/dice_mean"]
        at = values[list(steps).index(best)]
        axes.plot(best, at, "*", color=BEST, mec="black", mew=0.6, ms=13, zorder=4, label=f"best, step {best}")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize=9, ncols=columns)


def short_name(name: str) -> str:
    """A class's name for a legend."""
    return plain(shorten(name.replace("_", " "), 24, placeholder="...") if len(name) > 24 else name)


def curves_plot(runs: Mapping[str, Mapping[str, Curve]], path: Path) -> None:
    """Running mean of the loss, and Dice, of several runs over optimizer steps: {label: {key of a record: curve}}."""
    keys = [key for key in OVERLAID if any(key in curves for curves in runs.values())]
    labels = {label: plain(shorten(label, LETTERS, placeholder=" ...")) for label in runs}
    width = 4.2 * len(keys) + LETTER * max(map(len, labels.values())) + 0.6
    figure = blank(width, max(3.8, LINE * len(runs) + 1.0))
    grid = figure.subplots(1, len(keys), squeeze=False)[0]
    lines: dict[str, Any] = {}
    for key, axes in zip(keys, grid, strict=True):
        axes.set_title(OVERLAID[key])
        for (label, curves), (style, colour) in zip(runs.items(), cycle(LINES), strict=False):
            if key in curves:
                steps, values = curves[key]
                marker = "o" if len(steps) <= FEW else ""
                lines[label] = axes.plot(steps, values, marker=marker, ms=4, linestyle=style, color=colour)[0]
        _over_steps(axes)
        values = np.concatenate([curves[key][1] for curves in runs.values() if key in curves])
        axes.set(ylim=(0, 1.02)) if key == "val/dice_mean" else _scale(axes, values)
    shown = [(lines[label], labels[label]) for label in runs if label in lines]
    grid[-1].legend(*zip(*shown, strict=True), loc="upper left", bbox_to_anchor=(1.02, 1.02), frameon=False, fontsize=9)
    save_picture(figure, path)


def curve(records: Sequence[Mapping[str, Any]], key: str) -> Curve | None:
    """A number's steps and values for `curves_plot`: of many, running means, a thousand at most; None without any."""
    steps, values = _series(records, key)
    if len(steps) >= MANY:
        values, window = running_mean(values)
        steps = steps[window - 1 :]
    every = ceil(len(steps) / 1000)
    return (steps[::-1][::every][::-1], values[::-1][::every][::-1]) if len(steps) else None


class PlottedRun(NamedTuple):
    """One run; None where it has no such number."""

    label: str
    kind: str  # of the peak, e.g. "measured, ledger"
    peak_bytes: int
    step_s: float | None
    dice: float | None
    dice_sd: float | None = None  # over the folds


class PublishedRow(NamedTuple):
    """A row of the paper's table: scores of these runs, None where one is missing, and the paper's."""

    name: str
    ours: Sequence[float | None]
    paper: Sequence[float]


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
    save_picture(figure, path)


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
                if field == "dice" and run.dice_sd is not None:
                    axes.errorbar(run.peak_bytes / MIB, y, run.dice_sd, fmt="none", color=colour, capsize=3, zorder=1)
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
    best = [i for i, (x, y) in enumerate(points) if not any(a <= x and b <= y and (a, b) != (x, y) for a, b in points)]
    return sorted(best, key=lambda i: points[i])


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
    save_picture(figure, path)

"""Figures of several runs: their curves, their peaks against time and Dice, and the Dice of the folds of methods."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from unet3d.base.types import MIB, mib
from unet3d.report import plots
from unet3d.report.scores import Score

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OVERLAID = {"train/loss": "Training loss", "val/dice_mean": "Validation Dice, mean of classes"}
PARETO = "Pareto-optimal"


class PlottedRun(NamedTuple):
    """One run; None where it has no such number."""

    label: str
    kind: str  # of the peak, e.g. "measured, ledger"
    peak_bytes: int
    step_s: float | None
    dice: float | None
    dice_sd: float | None = None  # over the folds
    dice_grid: str | None = None  # "files" or "network"


PANELS = {"step_s": "seconds per step, median", "dice": "Dice"}  # numbers of PlottedRun that are drawn over the peak
MOST_CLASSES = 20  # of the folds' figure
POINT: dict[str, Any] = {"mec": "black", "mew": 0.5, "ms": 7}
LEAST_DICE = 0.05  # that an axis shows: less is noise, and would look like a trade-off


def curves_plot(runs: Mapping[str, Mapping[str, plots.Curve]], path: Path) -> None:
    """Draw the running mean of the loss, and Dice, of several runs over optimizer steps.

    `runs` are {label: {key of a record: curve}}.
    """
    keys = [key for key in OVERLAID if any(key in curves for curves in runs.values())]
    labels = {label: plots.short_label(label) for label in runs}
    width = 4.2 * len(keys) + plots.LETTER * max(len(label) for label in labels.values()) + 0.6
    figure = plots.blank(width, max(3.8, plots.LINE * len(runs) + 1.0))
    grid = figure.subplots(1, len(keys), squeeze=False)[0]
    lines: dict[str, Any] = {}
    for key, axes in zip(keys, grid, strict=True):
        axes.set_title(OVERLAID[key])
        lines |= _draw_curves(axes, runs, key)
        plots.over_steps(axes)
        if key == "val/dice_mean":
            axes.set(ylim=(0, 1.02))
        else:
            plots.scale_axis(axes, np.concatenate([curves[key][1] for curves in runs.values() if key in curves]))
    plots.beside(grid[-1], {labels[label]: lines[label] for label in runs if label in lines})
    plots.save_picture(figure, path)


def _draw_curves(axes: "Axes", runs: Mapping[str, Mapping[str, plots.Curve]], key: str) -> dict[str, Any]:
    """Draw the curves of one number; return the line of each run that has it."""
    lines = {}
    for (label, curves), (style, colour) in zip(runs.items(), cycle(plots.LINES), strict=False):
        if key in curves:
            marker = plots.marker_of(curves[key][0])
            (lines[label],) = axes.plot(*curves[key], marker=marker, ms=4, linestyle=style, color=colour)
    return lines


def comparison_plot(runs: Sequence[PlottedRun], remark: str, path: Path) -> None:
    """Draw peak against seconds and against Dice, each a panel if two runs have it; else bars. `remark` goes above."""
    fields = [field for field in PANELS if sum(getattr(run, field) is not None for run in runs) > 1]
    kinds = list(dict.fromkeys(run.kind for run in runs))
    labels = [plots.short_label(run.label) for run in runs]
    if len(kinds) > 1:
        labels = [f"{label} ({run.kind})" for label, run in zip(labels, runs, strict=True)]
    figure = _scatter(runs, labels, fields) if fields else _bars(runs, labels)
    for axes in figure.axes:
        axes.set_xlabel("peak memory of a step (MiB)")
        axes.locator_params("both" if fields else "x", nbins=5)
        plots.panel(axes)
    about = [f"Peak: {kinds[0]}"] if len(kinds) == 1 else []
    if remark:
        about.append(remark)
    if about:
        width = int(figure.get_figwidth() / plots.LETTER)
        lines = [line for text in about for line in wrap(text, width)]
        figure.suptitle(plots.plain("\n".join(lines)), fontsize=9)
    plots.save_picture(figure, path)


def _scatter(runs: Sequence[PlottedRun], labels: list[str], fields: Sequence[str]) -> "Figure":
    """Draw panels over the peak; the Pareto-optimal runs of each kind of peak are ringed and joined by a line."""
    longest = max(len(label) for label in [*labels, PARETO])
    figure = plots.blank(4.2 * len(fields) + plots.LETTER * longest + 0.6, max(4.0, plots.LINE * len(runs) + 1.4))
    grid = figure.subplots(1, len(fields), squeeze=False)[0]
    for axes, field in zip(grid, fields, strict=True):
        _draw_front(axes, field, runs)
        _draw_runs(axes, field, runs, labels)
        axes.set_ylabel(PANELS[field])
        axes.margins(0.12)
        if field == "dice":
            axes.set_ylabel(dice_title([run.dice_grid for run in runs]))
            _widen_dice(axes)
        plots.panel(axes, "both")
    handles = plots.handles_of(grid)
    plots.beside(grid[-1], {label: handles[label] for label in dict.fromkeys([*labels, PARETO]) if label in handles})
    return figure


def dice_title(grids: Iterable[str | None]) -> str:
    """Return the heading of Dice of runs that were scored on these grids."""
    known = {*grids} - {None}
    if "files" in known:
        return "Dice (files' grids)" if known == {"files"} else "Dice"
    return "Dice, last validation"


def _widen_dice(axes: "Axes") -> None:
    """Let the axis of Dice show a difference of LEAST_DICE at least, within 0 to 1."""
    low, high = axes.get_ylim()
    more = (LEAST_DICE - (high - low)) / 2
    if more > 0:
        low = min(max(low - more, 0), 1 - LEAST_DICE)
        axes.set_ylim(low, low + LEAST_DICE)


def _draw_front(axes: "Axes", field: str, runs: Sequence[PlottedRun]) -> None:
    """Ring and join the Pareto-optimal runs of each kind of peak: more Dice is better, and less of all else."""
    by_kind: dict[str, list[tuple[float, float]]] = {}
    for run in runs:
        value = getattr(run, field)
        if value is not None:
            by_kind.setdefault(run.kind, []).append((run.peak_bytes / MIB, value))
    sign = -1 if field == "dice" else 1
    for points in by_kind.values():
        best = [points[index] for index in pareto([(x, sign * y) for x, y in points])]
        axes.plot(*zip(*best, strict=True), "o--", color=plots.GREY, mfc="none", mec="black", ms=12, label=PARETO)


def _draw_runs(axes: "Axes", field: str, runs: Sequence[PlottedRun], labels: list[str]) -> None:
    """Draw a marker for each run, with its SD over the folds where it has one."""
    for run, label, (marker, colour) in zip(runs, labels, cycle(plots.MARKERS), strict=False):
        x = run.peak_bytes / MIB
        y = getattr(run, field)
        if y is None:
            continue
        axes.plot(x, y, marker, color=colour, label=label, **POINT)
        if field == "dice" and run.dice_sd is not None:
            axes.errorbar(x, y, run.dice_sd, fmt="none", color=colour, capsize=3, zorder=1)


def pareto(points: Sequence[tuple[float, float]]) -> list[int]:
    """Return indices of the points that no other beats: less in one, not more in the other; by the first coordinate."""

    def is_beaten(point: tuple[float, float]) -> bool:
        x, y = point
        return any(a <= x and b <= y and (a, b) != point for a, b in points)

    best = [index for index, point in enumerate(points) if not is_beaten(point)]
    return sorted(best, key=lambda index: points[index])


def _bars(runs: Sequence[PlottedRun], labels: Sequence[str]) -> "Figure":
    longest = max((len(label) for label in labels), default=0)
    figure = plots.blank(plots.LETTER * longest + 6, max(2.0, 1.3 * plots.LINE * len(runs) + 1.4))
    axes = figure.subplots()
    peaks = [run.peak_bytes / MIB for run in runs]
    axes.barh(range(len(runs)), peaks, 0.7, color=plots.BLUE)
    axes.set_yticks(range(len(runs)), labels, fontsize=9)
    for row, run in enumerate(runs):
        where = (peaks[row], row)
        axes.annotate(mib(run.peak_bytes), where, (4, 0), textcoords="offset points", va="center", fontsize=8)
    highest = max([*peaks, 1e-3])
    axes.set(xlim=(0, 1.15 * highest), ylim=(len(runs) - 0.4, -0.6))
    return figure


def folds_plot(methods: Sequence[tuple[str, Mapping[str, Score]]], path: Path) -> None:
    """Draw the Dice of each method (label, its scores by class): one point per fold, and their mean with its SD."""
    labels = [plots.short_label(label) for label, _ in methods]
    names = list(dict.fromkeys(name for _, scores in methods for name in scores))[:MOST_CLASSES]
    of_classes = (0.25 * len(methods) + 0.6) * len(names)
    longest = max(len(label) for label in labels)
    figure = plots.blank(max(4.0, of_classes) + plots.LETTER * longest + 1.6, max(4.0, plots.LINE * len(methods) + 1.4))
    axes = figure.subplots()
    apart = 0.8 / len(methods)
    drawn = zip(methods, labels, cycle(plots.MARKERS), strict=False)
    for number, ((_, scores), label, (marker, colour)) in enumerate(drawn):
        shift = apart * (number - (len(methods) - 1) / 2)
        for place, name in enumerate(names):
            score = scores.get(name)
            if score is None or score.mean is None:
                continue
            x = place + shift
            points = [value for value in score.folds if value is not None]
            axes.plot([x] * len(points), points, marker, color=colour, alpha=0.45, ms=4, mew=0)
            axes.errorbar(x, score.mean, yerr=score.sd, fmt=marker, color=colour, capsize=3, **POINT)
        axes.plot([], [], marker, color=colour, label=label, **POINT)
    axes.set_xticks(range(len(names)), [plots.short_name(name) if name else "mean of\nclasses" for name in names])
    if len(names) > 4:
        axes.tick_params("x", rotation=90)
    axes.set_xlim(-0.6, len(names) - 0.4)
    axes.set_ylabel("Dice: folds, their mean ± SD")
    plots.panel(axes, "y")
    plots.beside(axes, plots.handles_of([axes]))
    plots.save_picture(figure, path)

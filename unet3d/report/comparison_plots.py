"""Figures of several runs: their curves, their peaks against time and Dice, and the Dice of the folds of methods."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

import numpy as np

from unet3d.base.types import MIB
from unet3d.report import plots
from unet3d.report.scores import Score
from unet3d.run.run_folder import KINDS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OVERLAID = {"train/loss": "Training loss", "val/dice_mean": "Validation Dice, mean of classes"}
PARETO = "Pareto-optimal"
PANELS = {"step_median_s": "seconds per step, median", "dice_mean": "Dice"}  # numbers that are drawn over the peak
MOST_CLASSES = 20  # of the folds' figure
POINT: dict[str, Any] = {"mec": "black", "mew": 0.5, "ms": 7, "capsize": 3}
LEAST_DICE = 0.05  # that an axis shows: less is noise, and would look like a trade-off
Numbers = Mapping[str, Any]  # of a run, with the names of compare.csv


def basis(numbers: Numbers) -> str | None:
    """Return whether the peak among these numbers was "measured" or "predicted"; None without a peak."""
    return next((kind for kind in KINDS if numbers.get(f"peak_{kind}_bytes") is not None), None)


def curves_plot(runs: Mapping[str, Mapping[str, plots.Curve]], path: Path) -> None:
    """Draw the running mean of the loss, and Dice, of several runs over optimizer steps.

    `runs` are {label: {key of a record: curve}}.
    """
    keys = [key for key in OVERLAID if any(key in curves for curves in runs.values())]
    labels = [plots.short_label(label) for label in runs]
    figure = plots.legended(4.2 * len(keys), 3.8, labels)
    grid = figure.subplots(1, len(keys), squeeze=False)[0]
    for key, axes in zip(keys, grid, strict=True):
        axes.set_title(OVERLAID[key])
        for curves, label, (style, colour) in zip(runs.values(), labels, cycle(plots.LINES), strict=False):
            if key in curves:
                marker = plots.marker_of(curves[key][0])
                axes.plot(*curves[key], marker=marker, ms=4, linestyle=style, color=colour, label=label)
        plots.over_steps(axes)
        if key == "val/dice_mean":
            axes.set(ylim=(0, 1.02))
        else:
            plots.scale_axis(axes, np.concatenate([curves[key][1] for curves in runs.values() if key in curves]))
    plots.finish(figure, path, "right")


def comparison_plot(runs: Mapping[str, Numbers], remark: str, path: Path) -> None:
    """Draw peak against seconds and against Dice, each a panel if two runs have it; else bars. `remark` goes above.

    `runs` are {label: numbers}, each with a peak.
    """
    kinds = [_kind(numbers) for numbers in runs.values()]
    labels = [plots.short_label(label) for label in runs]
    if len(set(kinds)) > 1:
        labels = [f"{label} ({kind})" for label, kind in zip(labels, kinds, strict=True)]
    else:
        remark = f"Peak: {kinds[0]}\n{remark}"
    points = [_point(numbers) for numbers in runs.values()]
    fields = [field for field in PANELS if sum(field in point for point in points) > 1]
    figure = plots.legended(4.2 * len(fields) or 6, 4 if fields else 2, [*labels, PARETO])
    grid = figure.subplots(1, len(fields) or 1, squeeze=False)[0]
    if not fields:
        _draw_bars(grid[0], labels, [point["peak"] for point in points])
    for axes, field in zip(grid, fields, strict=False):
        axes.set_ylabel(PANELS[field])
        for point, label, (marker, colour) in zip(points, labels, cycle(plots.MARKERS), strict=False):
            if field in point:
                sd = point.get("dice_sd") if field == "dice_mean" else None
                axes.errorbar(point["peak"], point[field], sd, fmt=marker, color=colour, label=label, **POINT)
        _draw_fronts(axes, field, zip(kinds, points, strict=True))
        axes.margins(0.12)
        if field == "dice_mean":
            axes.set_ylabel(dice_title(numbers.get("dice_grid") for numbers in runs.values()))
            _widen_dice(axes)
    for axes in grid:
        axes.set_xlabel("peak memory of a step (MiB)")
        axes.locator_params("both" if fields else "x", nbins=5)
        plots.panel(axes, "both" if fields else "")
    width = int(figure.get_figwidth() / plots.LETTER)
    lines = [line for text in remark.splitlines() for line in wrap(text, width)]
    figure.suptitle(plots.plain("\n".join(lines)), fontsize=9)
    plots.finish(figure, path, "right")


def _kind(numbers: Numbers) -> str:
    """Return of which kind a run's peak is, e.g. `measured, ledger`."""
    parts = (basis(numbers), numbers.get("measured_kind"))
    return plots.plain(", ".join(part for part in parts if part))


def _point(numbers: Numbers) -> dict[str, float]:
    """Return a run's peak in MiB, and its seconds and Dice, which a run that was only predicted has not."""
    kind = basis(numbers)
    point = {"peak": numbers[f"peak_{kind}_bytes"] / MIB}
    for name in (*PANELS, "dice_sd"):
        if kind == "measured" and numbers.get(name) is not None:
            point[name] = numbers[name]
    return point


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


def _draw_fronts(axes: "Axes", field: str, points: Iterable[tuple[str, dict[str, float]]]) -> None:
    """Ring and join the Pareto-optimal runs of each kind of peak: more Dice is better, and less of all else."""
    by_kind: dict[str, list[tuple[float, float]]] = {}
    for kind, point in points:
        if field in point:
            by_kind.setdefault(kind, []).append((point["peak"], point[field]))
    sign = -1 if field == "dice_mean" else 1
    for pairs in by_kind.values():
        best = [pairs[index] for index in pareto([(x, sign * y) for x, y in pairs])]
        ring: dict[str, Any] = {"color": plots.GREY, "mfc": "none", "mec": "black", "ms": 12, "zorder": 1}
        peaks, values = zip(*best, strict=True)
        axes.errorbar(peaks, values, fmt="o--", label=PARETO, **ring)


def pareto(points: Sequence[tuple[float, float]]) -> list[int]:
    """Return indices of the points that no other beats: less in one, not more in the other; by the first coordinate."""

    def is_beaten(point: tuple[float, float]) -> bool:
        x, y = point
        return any(a <= x and b <= y and (a, b) != point for a, b in points)

    best = [index for index, point in enumerate(points) if not is_beaten(point)]
    return sorted(best, key=lambda index: points[index])


def _draw_bars(axes: "Axes", labels: Sequence[str], peaks: Sequence[float]) -> None:
    """Draw a bar for each run, with its MiB at the end."""
    bars = axes.barh(range(len(peaks)), peaks, 0.7, color=plots.BLUE)
    axes.bar_label(bars, fmt="{:,.1f}", padding=4, fontsize=8)
    axes.set_yticks(range(len(peaks)), labels, fontsize=9)
    axes.set(xlim=(0, 1.15 * max([*peaks, 1e-3])), ylim=(len(peaks) - 0.4, -0.6))


def folds_plot(methods: Sequence[tuple[str, Mapping[str, Score]]], path: Path) -> None:
    """Draw the Dice of each method (label, its scores by class): one point per fold, and their mean with its SD."""
    labels = [plots.short_label(label) for label, _ in methods]
    names = list(dict.fromkeys(name for _, scores in methods for name in scores))[:MOST_CLASSES]
    figure = plots.legended(max(4.0, (0.25 * len(methods) + 0.6) * len(names)) + 1.0, 4, labels)
    axes = figure.subplots()
    apart = 0.8 / len(methods)
    shift = -apart * (len(methods) - 1) / 2
    for (_, scores), label, (marker, colour) in zip(methods, labels, cycle(plots.MARKERS), strict=False):
        for place, name in enumerate(names):
            score = scores.get(name)
            if score is not None and score.mean is not None:
                points = [value for value in score.folds if value is not None]
                x = place + shift
                axes.plot([x] * len(points), points, marker, color=colour, alpha=0.45, ms=4, mew=0)
                axes.errorbar(x, score.mean, yerr=score.sd, fmt=marker, color=colour, label=label, **POINT)
        shift += apart
    plots.name_classes(axes, [plots.short_name(name) if name else "mean of\nclasses" for name in names])
    axes.set_ylabel("Dice: folds, their mean ± SD")
    plots.finish(figure, path, "right")

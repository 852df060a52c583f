"""Figures of several runs: their curves, and their peaks against time and Dice."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from unet3d.base.types import MIB, mib
from unet3d.report.plots import (
    BESIDE,
    BLUE,
    FEW_RECORDS,
    GREY,
    LETTER,
    LINE,
    LINES,
    MARKERS,
    Curve,
    blank,
    grid_below,
    open_frame,
    over_steps,
    plain,
    save_picture,
    scale_axis,
    short_label,
)

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


class Panel(NamedTuple):
    """A number that is drawn over the peak."""

    title: str
    field: str  # of PlottedRun
    sign: int  # 1: less is better; -1: more is better

    def value(self, run: PlottedRun) -> float | None:
        """Return the run's number; None without one."""
        value: float | None = getattr(run, self.field)
        return value


PANELS = (
    Panel("seconds per step, median", "step_s", 1),
    Panel("Dice", "dice", -1),
)
LEAST_DICE = 0.05  # that an axis shows: less is noise, and would look like a trade-off


def curves_plot(runs: Mapping[str, Mapping[str, Curve]], path: Path) -> None:
    """Draw the running mean of the loss, and Dice, of several runs over optimizer steps.

    `runs` are {label: {key of a record: curve}}.
    """
    keys = [key for key in OVERLAID if any(key in curves for curves in runs.values())]
    labels = {label: short_label(label) for label in runs}
    width = 4.2 * len(keys) + LETTER * max(len(label) for label in labels.values()) + 0.6
    figure = blank(width, max(3.8, LINE * len(runs) + 1.0))
    grid = figure.subplots(1, len(keys), squeeze=False)[0]
    lines: dict[str, Any] = {}
    for key, axes in zip(keys, grid, strict=True):
        axes.set_title(OVERLAID[key])
        lines |= _draw_curves(axes, runs, key)
        over_steps(axes)
        if key == "val/dice_mean":
            axes.set(ylim=(0, 1.02))
        else:
            scale_axis(axes, np.concatenate([curves[key][1] for curves in runs.values() if key in curves]))
    drawn = [label for label in runs if label in lines]
    handles = [lines[label] for label in drawn]
    grid[-1].legend(handles, [labels[label] for label in drawn], **BESIDE)
    save_picture(figure, path)


def _draw_curves(axes: "Axes", runs: Mapping[str, Mapping[str, Curve]], key: str) -> dict[str, Any]:
    """Draw the curves of one number; return the line of each run that has it."""
    lines = {}
    for (label, curves), (style, colour) in zip(runs.items(), cycle(LINES), strict=False):
        if key not in curves:
            continue
        steps, values = curves[key]
        marker = "o" if len(steps) <= FEW_RECORDS else ""
        (lines[label],) = axes.plot(
            steps,
            values,
            marker=marker,
            ms=4,
            linestyle=style,
            color=colour,
        )
    return lines


def comparison_plot(runs: Sequence[PlottedRun], remark: str, path: Path) -> None:
    """Draw peak against seconds and against Dice, each a panel if two runs have it; else bars. `remark` goes above."""
    panels = []
    for panel in PANELS:
        known = [run for run in runs if panel.value(run) is not None]
        if len(known) > 1:
            panels.append(panel)
    kinds = list(dict.fromkeys(run.kind for run in runs))
    labels = [short_label(run.label) for run in runs]
    if len(kinds) > 1:
        labels = [f"{label} ({run.kind})" for label, run in zip(labels, runs, strict=True)]
    figure = _scatter(runs, labels, panels) if panels else _bars(runs, labels)
    for axes in figure.axes:
        axes.set_xlabel("peak memory of a step (MiB)")
        axes.locator_params("both" if panels else "x", nbins=5)
        open_frame(axes)
    about = [f"Peak: {kinds[0]}"] if len(kinds) == 1 else []
    if remark:
        about.append(remark)
    if about:
        width = int(figure.get_figwidth() / LETTER)
        lines = [line for text in about for line in wrap(text, width)]
        figure.suptitle(plain("\n".join(lines)), fontsize=9)
    save_picture(figure, path)


def _scatter(runs: Sequence[PlottedRun], labels: list[str], panels: Sequence[Panel]) -> "Figure":
    """Draw panels over the peak; the Pareto-optimal runs of each kind of peak are ringed and joined by a line."""
    longest = max(len(label) for label in [*labels, PARETO])
    width = 4.2 * len(panels) + LETTER * longest + 0.6
    figure = blank(width, max(4.0, LINE * len(runs) + 1.4))
    grid = figure.subplots(1, len(panels), squeeze=False)[0]
    handles: dict[str, Any] = {}
    for axes, panel in zip(grid, panels, strict=True):
        _draw_front(axes, panel, runs)
        _draw_runs(axes, panel, runs, labels)
        axes.set_ylabel(panel.title)
        axes.margins(0.12)
        if panel.field == "dice":
            axes.set_ylabel(dice_title([run.dice_grid for run in runs]))
            _widen_dice(axes)
        grid_below(axes)
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles[label] = handle
    order = [label for label in dict.fromkeys([*labels, PARETO]) if label in handles]
    grid[-1].legend([handles[label] for label in order], order, **BESIDE)
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


def _draw_front(axes: "Axes", panel: Panel, runs: Sequence[PlottedRun]) -> None:
    """Ring and join the Pareto-optimal runs of each kind of peak."""
    by_kind: dict[str, list[tuple[float, float]]] = {}
    for run in runs:
        value = panel.value(run)
        if value is not None:
            by_kind.setdefault(run.kind, []).append((run.peak_bytes / MIB, value))
    for points in by_kind.values():
        best = pareto([(x, panel.sign * y) for x, y in points])
        axes.plot(
            [points[index][0] for index in best],
            [points[index][1] for index in best],
            "o--",
            color=GREY,
            mfc="none",
            mec="black",
            ms=12,
            label=PARETO,
        )


def _draw_runs(axes: "Axes", panel: Panel, runs: Sequence[PlottedRun], labels: list[str]) -> None:
    """Draw a marker for each run, with its SD over the folds where it has one."""
    for run, label, (marker, colour) in zip(runs, labels, cycle(MARKERS), strict=False):
        x = run.peak_bytes / MIB
        y = panel.value(run)
        if y is None:
            continue
        axes.plot(
            x,
            y,
            marker,
            color=colour,
            mec="black",
            mew=0.5,
            ms=7,
            label=label,
        )
        if panel.field == "dice" and run.dice_sd is not None:
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
    figure = blank(LETTER * longest + 6, max(2.0, 1.3 * LINE * len(runs) + 1.4))
    axes = figure.subplots()
    peaks = [run.peak_bytes / MIB for run in runs]
    axes.barh(range(len(runs)), peaks, 0.7, color=BLUE)
    axes.set_yticks(range(len(runs)), labels, fontsize=9)
    for row, run in enumerate(runs):
        axes.annotate(
            mib(run.peak_bytes),
            (peaks[row], row),
            (4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
    highest = max([*peaks, 1e-3])
    axes.set(xlim=(0, 1.15 * highest), ylim=(len(runs) - 0.4, -0.6))
    return figure

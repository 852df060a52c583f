"""What all figures share, PNG and SVG files with nothing that overlaps; and those of training, of one run or several.

Of several runs these are their curves, and their peaks against time and Dice.
"""

import zlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle, product
from math import ceil
from pathlib import Path
from textwrap import shorten, wrap
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from unet3d.base import signals
from unet3d.base.errors import escaped
from unet3d.base.files import replacing
from unet3d.base.types import MIB
from unet3d.run.record import best_of, numbers_of
from unet3d.run.run_folder import KINDS, Values, as_number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Array = NDArray[Any]
Curve = tuple[Array, Array]  # steps and values
OKABE_ITO = ("#E69F00", "#56B4E9", "#009E73", "#D55E00", "#0072B2", "#CC79A7", "#F0E442")
BLUE = "#0072B2"
GREY = "#A0A0A0"
DARK = "#404040"
PALE = "#E5E5E5"
BEST = "#D55E00"
VALIDATION = "#009E73"  # Its loss; that of training is blue.
FEW_RECORDS = 30  # are marked one by one
MANY_RECORDS = 200  # fade behind their running mean
MOST_POINTS = 1000  # Points of one curve among several.
LABEL_LETTERS = 60  # Bound of a run's label.
NAME_LETTERS = 24  # Bound of a class's name in a legend.
LETTER = 0.075  # inches; a letter's mean width in 9 points, generously
LINE = 0.19  # inches; a line's height in 9 points
LEGEND_ROWS = 13
LETTERS_ABREAST = 50  # Bound of all classes' names below an axis.
SLOW = 4  # times the median: seconds per step beyond are cut off, if at least the share RARE is below
RARE = 0.8
SMALL_PANELS = {  # below the loss
    "train/lr": "Learning rate",
    "train/grad_norm": "Gradient norm",
    "time/step_s": "Seconds per step",
}
LINES = list(product(("-", "--", ":"), OKABE_ITO[:6]))
MARKERS = list(product("osD^vP*X", OKABE_ITO[:6]))  # yellow is faint on white
OVERLAID = {"train/loss": "Training loss", "val/dice_mean": "Validation Dice, mean of classes"}
PARETO = "Pareto-optimal"
PANELS = {"step_median_s": "seconds per step, median", "dice_mean": "Dice"}  # numbers that are drawn over the peak
POINT: dict[str, Any] = {"mec": "black", "mew": 0.5, "ms": 7, "capsize": 3}
LEAST_DICE = 0.05  # An axis shows no smaller difference: it is noise, and would look like a trade-off.
Numbers = Mapping[str, Any]  # A run's numbers by the names of compare.csv.


def blank(width: float, height: float) -> "Figure":
    """Return an empty figure of a size in inches, laid out so that nothing overlaps."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=150, layout="constrained", facecolor="white")


def save_picture(figure: "Figure", path: Path, strategy: int = zlib.Z_DEFAULT_STRATEGY) -> None:
    """Write a PNG file, and next to it the same as SVG; each whole or not at all, and equal for equal figures.

    `strategy` is zlib's, of the PNG file.
    """
    import matplotlib

    signals.raise_again()
    layout = figure.get_layout_engine()
    assert layout is not None
    layout.execute(figure)
    figure.set_layout_engine(None)  # it is laid out: once for both files, which would else be drawn three times more
    with matplotlib.rc_context({"svg.hashsalt": "unet3d"}):
        with replacing(path.with_suffix(".svg")) as file:
            figure.savefig(file, format="svg", metadata={"Date": None})
        with replacing(path) as file:  # last: where the PNG is, the SVG is, too
            figure.savefig(file, format=path.suffix[1:], pil_kwargs={"compress_type": strategy})


def remove_picture(path: Path) -> None:
    """Remove the files that `save_picture` has written, if they are there."""
    path.unlink(missing_ok=True)
    path.with_suffix(".svg").unlink(missing_ok=True)


def panel(axes: "Axes", grid: Literal["", "x", "y", "both"] = "") -> None:
    """Leave out the frame's upper and right side, and draw a pale grid along these axes below all else."""
    axes.spines[["top", "right"]].set_visible(False)
    if grid:
        axes.grid(color=PALE, axis=grid)
        axes.set_axisbelow(True)


def name_classes(axes: "Axes", names: Sequence[str]) -> None:
    """Make the axis of x one of classes, whose names are turned where they are long together."""
    longest = max(len(line) for name in names for line in name.split("\n"))
    axes.set_xticks(range(len(names)), names, rotation=90 if longest * len(names) > LETTERS_ABREAST else 0)
    axes.set_xlim(-0.6, len(names) - 0.4)
    panel(axes, "y")


def legended(width: float, height: float, labels: Sequence[str]) -> "Figure":
    """Return an empty figure for panels of these inches, with room for a legend of these labels to their right."""
    return blank(width + LETTER * max(map(len, labels)) + 0.6, max(height, LINE * len(labels) + 1.4))


def finish(figure: "Figure", path: Path, legend: Literal["right", "below"]) -> None:
    """Draw one legend of all axes, right of the last one or below in as many columns as fit; save."""
    pairs = [pair for axes in figure.axes for pair in zip(*axes.get_legend_handles_labels(), strict=True)]
    handles = {label: handle for handle, label in pairs}
    shown = (list(handles.values()), list(handles))
    style: dict[str, Any] = {"frameon": False, "fontsize": 9}
    if legend == "right":
        figure.axes[-1].legend(*shown, loc="upper left", bbox_to_anchor=(1.02, 1.02), **style)
    else:
        columns = int(figure.get_figwidth() / (LETTER * max(map(len, handles), default=1) + 0.6))
        figure.legend(*shown, loc="outside lower center", ncols=max(1, columns), **style)
    save_picture(figure, path)


def colours(count: int) -> list[Any]:
    """Return one colour per foreground class, the same in every picture; beyond seven, shades of viridis."""
    if count <= len(OKABE_ITO):
        return list(OKABE_ITO[:count])
    from matplotlib import colormaps

    return list(map(colormaps["viridis"], np.linspace(0, 0.95, count)))


def plain(text: str) -> str:
    """Return text for matplotlib, which warns of control codes, as no font has them, and takes `$` for a formula."""
    return escaped(text, keep="\n").replace("$", r"\$")


def short_name(name: str) -> str:
    """Return a class's name for a legend."""
    if len(name) > NAME_LETTERS:
        name = shorten(name.replace("_", " "), NAME_LETTERS, placeholder="...")
    return plain(name)


def short_label(label: str) -> str:
    """Return a run's label for a legend."""
    return plain(shorten(label, LABEL_LETTERS, placeholder=" ..."))


def training_curves(records: Sequence[Values], path: Path) -> None:
    """Draw the records of metrics.jsonl over optimizer steps, with the best validation marked.

    Loss of training and of validations; Dice per class and their mean; below them learning rate, gradient norm, seconds
    per step.
    """
    keys = dict.fromkeys(key for record in records for key in record)
    dice = {key: series(records, key) for key in keys if key.startswith("val/dice")}
    below = {key: series(records, key) for key in SMALL_PANELS if key in keys}
    best = best_of(records).get("step")
    legend_columns = len(dice) // LEGEND_ROWS + 1
    width = 8.0 + 2.2 * legend_columns if dice else 9.6 if below else 5.0
    figure = blank(width, 6.0 if below else 3.6)
    ratios = [3, 2] if below else [3]
    rows = figure.subfigures(len(ratios), 1, squeeze=False, height_ratios=ratios)[:, 0]
    panels = list(rows[0].subplots(1, 2 if dice else 1, squeeze=False, sharex=True)[0])
    _draw_loss(panels[0], series(records, "train/loss"), series(records, "val/loss"), best)
    if dice:
        _draw_dice(panels[1], dice, legend_columns, best)
    for place, (key, (steps, values)) in enumerate(below.items(), start=1):
        panels.append(rows[-1].add_subplot(1, len(below), place))
        _draw_small(panels[-1], SMALL_PANELS[key], steps, values)
    for axes in panels:
        over_steps(axes)
    save_picture(figure, path)


def over_steps(axes: "Axes") -> None:
    """Make the axis of x one of optimizer steps, with ticks at whole numbers."""
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel("optimizer step")
    axes.xaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 5, 10], integer=True, min_n_ticks=1))
    panel(axes, "both")


def marker_of(steps: Array, shape: str = "o") -> str:
    """Return the marker of a curve's points; "" for many."""
    return shape if len(steps) <= FEW_RECORDS else ""


def series(records: Sequence[Values], key: str) -> Curve:
    """Return steps and values of the records that have the key; the strings "nan" and "inf" become numbers."""
    steps = [record["step"] for record in records if as_number(record.get(key)) is not None]
    return np.array(steps), np.array(numbers_of(records, key))


def running_mean(values: Array) -> tuple[Array, int]:
    """Return the means of windows that hold a fiftieth of the values, and the window's length."""
    window = max(1, len(values) // 50)
    return np.convolve(values, np.ones(window) / window, "valid"), window


def curve(records: Sequence[Values], key: str) -> Curve:
    """Return a number's steps and values, of many their running means, at most a thousand."""
    steps, values = series(records, key)
    if len(steps) >= MANY_RECORDS:
        values, window = running_mean(values)
        steps = steps[window - 1 :]
    every = ceil(len(steps) / MOST_POINTS) or 1
    return steps[::-1][::every][::-1], values[::-1][::every][::-1]


def scale_axis(axes: "Axes", values: Array) -> None:
    """Make the axis of y logarithmic where the values differ much."""
    known = values[np.isfinite(values)]
    if known.size and 0 < 20 * known.min() < known.max():
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")


def _draw_steps(axes: "Axes", steps: Array, values: Array, name: str = "") -> None:
    """Draw a value of each step; of many, their running mean before them. Its `name` is for a legend."""
    if len(steps) < MANY_RECORDS:
        axes.plot(steps, values, color=BLUE, marker=marker_of(steps), ms=4, label=name or None)
        return
    prefix = f"{name}, " if name else ""
    axes.plot(steps, values, color=GREY, linewidth=0.6, label=f"{prefix}each step")
    mean, window = running_mean(values)
    axes.plot(steps[window - 1 :], mean, color=BLUE, label=f"{prefix}mean of {window} steps")


def _draw_loss(axes: "Axes", training: Curve, validation: Curve, best: int | None) -> None:
    """Draw the loss of each step, and over it that of each validation, if there is any."""
    steps, loss = training
    val_steps, val_loss = validation
    axes.set_title("Loss" if len(val_steps) else "Training loss")
    _draw_steps(axes, steps, loss, "training" if len(val_steps) else "")
    if len(val_steps):
        axes.plot(val_steps, val_loss, color=VALIDATION, marker=marker_of(val_steps, "s"), ms=4, label="validation")
    if best is not None:
        axes.axvline(best, color=BEST, linestyle=":", linewidth=1.4, zorder=1, label=f"best Dice, step {best}")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=9)
    shown = np.concatenate([loss, val_loss])
    if not np.isfinite(shown).any():
        axes.text(0.5, 0.5, "no finite loss", ha="center", transform=axes.transAxes)
        axes.set(yticks=[])
    scale_axis(axes, shown)


def _draw_small(axes: "Axes", title: str, steps: Array, values: Array) -> None:
    _draw_steps(axes, steps, values)
    known = values[np.isfinite(values)]
    if known.size:
        axes.set_ylim(bottom=min(0, known.min()))
        usual = known[known <= SLOW * np.median(known)]  # the first steps of a process are observed, and take longer
        if title == SMALL_PANELS["time/step_s"] and RARE * len(known) <= len(usual) < len(known):
            axes.set_ylim(top=1.1 * usual.max())
            title += f" (some up to {known.max():.3g})"
    axes.set_title(title, fontsize=10)
    axes.tick_params(labelsize=9)


def _draw_dice(axes: "Axes", dice: Mapping[str, Curve], columns: int, best: int | None) -> None:
    """Draw the Dice of each class, and their mean where there are several; `columns` of the legend."""
    axes.set(title="Validation Dice", ylim=(0, 1.02))
    classes = [name for name in dice if name != "val/dice_mean"]
    marker = marker_of(max((steps for steps, _ in dice.values()), key=len))
    for colour, name in zip(colours(len(classes)), classes, strict=True):
        axes.plot(*dice[name], color=colour, marker=marker, ms=4, label=short_name(name.removeprefix("val/dice/")))
    if len(classes) != 1 and "val/dice_mean" in dice:
        axes.plot(*dice["val/dice_mean"], "--", color="black", marker=marker, ms=3, label="mean of classes")
    if best is not None:
        steps, means = dice["val/dice_mean"]
        star: dict[str, Any] = {"color": BEST, "mec": "black", "mew": 0.6, "ms": 13, "zorder": 4}
        axes.plot(best, means[list(steps).index(best)], "*", label=f"best, step {best}", **star)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize=9, ncols=columns)


def basis(numbers: Numbers) -> str | None:
    """Return whether the peak among these numbers was "measured" or "predicted"; None without a peak."""
    return next((kind for kind in KINDS if numbers.get(f"peak_{kind}_bytes") is not None), None)


def curves_plot(runs: Mapping[str, Mapping[str, Curve]], path: Path) -> None:
    """Draw the running mean of the loss, and Dice, of several runs over optimizer steps.

    `runs` are {label: {key of a record: curve}}.
    """
    keys = [key for key in OVERLAID if any(key in curves for curves in runs.values())]
    labels = [short_label(label) for label in runs]
    figure = legended(4.2 * len(keys), 3.8, labels)
    for key, axes in zip(keys, figure.subplots(1, len(keys), squeeze=False)[0], strict=True):
        axes.set_title(OVERLAID[key])
        for curves, label, (style, colour) in zip(runs.values(), labels, cycle(LINES), strict=False):
            if key in curves:
                marker = marker_of(curves[key][0])
                axes.plot(*curves[key], marker=marker, ms=4, linestyle=style, color=colour, label=label)
        over_steps(axes)
        if key == "val/dice_mean":
            axes.set(ylim=(0, 1.02))
        else:
            scale_axis(axes, np.concatenate([curves[key][1] for curves in runs.values() if key in curves]))
    finish(figure, path, "right")


def comparison_plot(runs: Mapping[str, Numbers], remark: str, path: Path) -> None:
    """Draw peak against seconds and against Dice, each a panel if two runs have it; else bars. `remark` goes above.

    `runs` are {label: numbers}, each with a peak.
    """
    points = [_point(numbers) for numbers in runs.values()]
    labels = [short_label(label) for label in runs]
    if len({point["kind"] for point in points}) > 1:
        labels = [f"{label} ({point['kind']})" for label, point in zip(labels, points, strict=True)]
    else:
        remark = f"Peak: {points[0]['kind']}\n{remark}"
    fields = [field for field in PANELS if sum(field in point for point in points) > 1]
    figure = legended(4.2 * len(fields) or 6, 4 if fields else 2, [*labels, PARETO])
    grid = figure.subplots(1, len(fields) or 1, squeeze=False)[0]
    if not fields:
        peaks = [point["peak"] for point in points]
        bars = grid[0].barh(range(len(peaks)), peaks, 0.7, color=BLUE)
        grid[0].bar_label(bars, fmt="{:,.1f}", padding=4, fontsize=8)
        grid[0].set_yticks(range(len(peaks)), labels, fontsize=9)
        grid[0].set(xlim=(0, 1.15 * max([*peaks, 1e-3])), ylim=(len(peaks) - 0.4, -0.6))
    for axes, field in zip(grid, fields, strict=False):
        axes.set_ylabel(PANELS[field])
        for point, label, (marker, colour) in zip(points, labels, cycle(MARKERS), strict=False):
            if field in point:
                sd = point.get("dice_sd") if field == "dice_mean" else None
                axes.errorbar(point["peak"], point[field], sd, fmt=marker, color=colour, label=label, **POINT)
        _draw_fronts(axes, field, [point for point in points if field in point])
        axes.margins(0.12)
        if field == "dice_mean":
            axes.set_ylabel(dice_title(numbers.get("dice_grid") for numbers in runs.values()))
            _widen_dice(axes)
    for axes in grid:
        axes.set_xlabel("peak memory of a step (MiB)")
        axes.locator_params("both" if fields else "x", nbins=5)
        panel(axes, "both" if fields else "")
    width = int(figure.get_figwidth() / LETTER)
    lines = [line for text in remark.splitlines() for line in wrap(text, width)]
    figure.suptitle(plain("\n".join(lines)), fontsize=9)
    finish(figure, path, "right")


def _point(numbers: Numbers) -> dict[str, Any]:
    """Return a run's peak in MiB and of which kind it is; and if it was measured, seconds and Dice of the run."""
    kind = basis(numbers)
    kinds = (kind, numbers.get("measured_kind"))
    point: dict[str, Any] = {"kind": plain(", ".join(filter(None, kinds))), "peak": numbers[f"peak_{kind}_bytes"] / MIB}
    names = (*PANELS, "dice_sd") if kind == "measured" else ()
    return point | {name: numbers[name] for name in names if numbers.get(name) is not None}


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


def _draw_fronts(axes: "Axes", field: str, points: Iterable[Mapping[str, Any]]) -> None:
    """Ring and join the Pareto-optimal runs of each kind of peak: more Dice is better, and less of all else."""
    by_kind: dict[str, list[tuple[float, float]]] = {}
    for point in points:
        by_kind.setdefault(point["kind"], []).append((point["peak"], point[field]))
    sign = -1 if field == "dice_mean" else 1
    ring: dict[str, Any] = {"color": GREY, "mfc": "none", "mec": "black", "ms": 12, "zorder": 1}
    for pairs in by_kind.values():
        best = [pairs[index] for index in pareto([(x, sign * y) for x, y in pairs])]
        peaks, values = zip(*best, strict=True)
        axes.errorbar(peaks, values, fmt="o--", label=PARETO, **ring)


def pareto(points: Sequence[tuple[float, float]]) -> list[int]:
    """Return indices of the points that no other beats: less in one, not more in the other; by the first coordinate."""
    best: list[int] = []
    for index in sorted(range(len(points)), key=points.__getitem__):
        if not best or points[index][1] < points[best[-1]][1] or points[index] == points[best[-1]]:
            best.append(index)
    return best

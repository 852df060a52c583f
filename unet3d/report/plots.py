"""Pictures as PNG files: a run's training curves and slices with their classes, and runs side by side."""

from collections.abc import Mapping, Sequence
from itertools import cycle, product
from math import ceil
from pathlib import Path
from statistics import fmean
from textwrap import shorten, wrap
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from unet3d.errors import escaped
from unet3d.files import replacing
from unet3d.report.run_folder import as_number
from unet3d.types import IGNORE, MIB, mib

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Array = NDArray[Any]
Palette = dict[int, tuple[float, float, float, float]]  # label value: RGBA
OKABE_ITO = ("#E69F00", "#56B4E9", "#009E73", "#D55E00", "#0072B2", "#CC79A7", "#F0E442")
BLUE, GREY, DARK, PALE = "#0072B2", "#A0A0A0", "#404040", "#E5E5E5"
FEW, MANY = 30, 200  # records: so few are marked one by one; from so many on steps fade behind their running mean
PLANES = ("sagittal", "coronal", "axial")  # across the axes X, Y, Z
DIRECTIONS = "RAS"  # where the axes of a canonical volume point: right, anterior, superior
LETTERS = 60  # of a run's label
LETTER, LINE = 0.08, 0.19  # inches; a letter's mean width in 9 points, generously, and a line's height
MARKERS = [(marker, colour) for marker, colour in product("osD^vP*X", OKABE_ITO[:6])]  # yellow is faint on white
PAPER = "the paper's, on its own volumes"
AXES = {"step_s": ("seconds a step, median", 1), "dice": ("Dice, mean of the last validation", -1)}  # 1: less is better


def blank(width: float, height: float) -> "Figure":
    """A figure of a size in inches, in which nothing overlaps."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=150, layout="constrained", facecolor="white")


def save_picture(figure: "Figure", path: Path) -> None:
    """Write a PNG file, whole or not at all."""
    with replacing(path) as file:
        figure.savefig(file)


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
    """Training loss, and validation Dice per class and their mean, over optimizer steps: records of metrics.jsonl."""
    from matplotlib.ticker import MaxNLocator

    names = dict.fromkeys(key for record in records for key in record if key.startswith("val/dice"))
    dice = {name: _series(records, name) for name in names}
    columns = len(dice) // 13 + 1  # of the legend
    figure = blank(8.0 + 2.2 * columns if dice else 5, 3.6)
    panels = figure.subplots(1, 2 if dice else 1, squeeze=False)[0]
    _draw_loss(panels[0], *_series(records, "train/loss"))
    if dice:
        _draw_dice(panels[1], dice, columns)
    for axes in panels:
        axes.set_xlabel("optimizer step")
        axes.xaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 5, 10], integer=True, min_n_ticks=1))
        axes.grid(color=PALE)
        axes.spines[["top", "right"]].set_visible(False)
    save_picture(figure, path)


def _series(records: Sequence[Mapping[str, Any]], key: str) -> tuple[Array, Array]:
    """Steps and values of the records that have the key; the strings "nan" and "inf" become numbers."""
    pairs = ((record["step"], as_number(record.get(key))) for record in records)
    found = [(step, value) for step, value in pairs if value is not None]
    steps, values = zip(*found, strict=True) if found else ((), ())
    return np.array(steps), np.array(values, float)


def _draw_loss(axes: "Axes", steps: Array, loss: Array) -> None:
    axes.set_title("Training loss")
    if len(steps) < MANY:
        axes.plot(steps, loss, color=BLUE, marker="o" if len(steps) <= FEW else "")
    else:
        axes.plot(steps, loss, color=GREY, linewidth=0.6, label="each step")
        window = len(steps) // 50
        mean = np.convolve(loss, np.ones(window) / window, "valid")
        axes.plot(steps[window - 1 :], mean, color=BLUE, label=f"mean of {window} steps")
        axes.legend(frameon=False)
    known = loss[np.isfinite(loss)]
    if not known.size:
        axes.text(0.5, 0.5, "no finite loss", ha="center", transform=axes.transAxes)
        axes.set(yticks=[])
    elif 0 < 20 * known.min() < known.max():
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")


def _draw_dice(axes: "Axes", series: Mapping[str, tuple[Array, Array]], columns: int) -> None:
    axes.set(title="Validation Dice", ylim=(0, 1.02))
    classes = [name for name in series if name != "val/dice_mean"]
    marker = "o" if max(len(steps) for steps, _ in series.values()) <= FEW else ""
    for colour, name in zip(colours(len(classes)), classes, strict=True):
        axes.plot(*series[name], color=colour, marker=marker, label=_short(name.removeprefix("val/dice/")))
    if len(classes) != 1 and "val/dice_mean" in series:
        axes.plot(*series["val/dice_mean"], "--", color="black", marker=marker, ms=3, label="mean of classes")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize=9, ncols=columns)


def _short(name: str) -> str:
    return plain(shorten(name.replace("_", " "), 24, placeholder="...") if len(name) > 24 else name)


def segmentation(
    image: Array,
    layers: Mapping[str, Array],
    spacing: Sequence[float],
    class_names: Sequence[str],
    file: IO[bytes],
    title: str,
    where: Sequence[int] | None = None,
) -> None:
    """An image and its label maps, by name, on three planes; all are (X, Y, Z) on canonical axes.

    The planes meet in the voxel `where`; None: in the middle of the foreground. `spacing` is the voxel's size in mm;
    `class_names` begins with background. Unlabelled voxels are dark; other values beyond the classes are not drawn.
    """
    from matplotlib.colors import to_rgba
    from matplotlib.patches import Patch

    if where is None:
        masks = [(labels > 0) & (labels < len(class_names)) for labels in layers.values()]
        where = centre(next((mask for mask in masks if mask.any()), masks[0]))
    size = [count * mm for count, mm in zip(image.shape, spacing, strict=True)]
    heights = [min(max(2.7 * size[up] / max(size[:2]), 0.45), 4.0) for up in (2, 2, 1)]
    columns, legend = 1 + len(layers), 0.25 * ceil(len(class_names) / (1 + len(layers)))
    figure = blank(2.8 * columns + 0.3, sum(heights) + legend + 0.9)
    grid = figure.subplots(len(PLANES), columns, height_ratios=heights)
    colour_of = dict(enumerate(colours(len(class_names) - 1), start=1))
    names = {index: _short(class_names[index]) for index in colour_of}
    if any((labels == IGNORE).any() for labels in layers.values()):
        colour_of[IGNORE], names[IGNORE] = DARK, "unlabelled"
    palette = {index: to_rgba(colour, 0.6) for index, colour in colour_of.items()}
    for axis, row in enumerate(grid):
        _draw_plane(row, axis, [image, *layers.values()], where, size, palette)
    for axes, name in zip(grid[0], ("image", *layers), strict=True):
        axes.set_title(name)
    figure.suptitle(plain(title))
    patches = [Patch(color=colour, label=names[index]) for index, colour in colour_of.items()]
    figure.legend(handles=patches, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)
    figure.savefig(file)


def _draw_plane(
    row: "Sequence[Axes]", axis: int, volumes: list[Array], where: Sequence[int], size: list[float], palette: Palette
) -> None:
    """The first volume, an image, in each cell, the others, label maps, see-through on it; `size` in mm."""
    right, up = sorted({0, 1, 2} - {axis})
    cuts = [np.take(volume, where[axis], axis).T for volume in volumes]  # rows from the bottom up
    low, high = np.percentile(volumes[0], (0.5, 99.5))
    for column, (axes, cut) in enumerate(zip(row, cuts, strict=True)):
        axes.imshow(cuts[0], cmap="gray", vmin=low, vmax=high, origin="lower", extent=(0, size[right], 0, size[up]))
        axes.set(xticks=[], yticks=[])
        if column:
            overlay = np.zeros((*cut.shape, 4))
            for index, colour in palette.items():
                overlay[cut == index] = colour
            axes.imshow(overlay, origin="lower", extent=(0, size[right], 0, size[up]), interpolation="nearest")
    row[0].set_ylabel(f"{PLANES[axis]}\n{'xyz'[axis]} = {where[axis]}", rotation=0, ha="right", va="center")
    shade = {"facecolor": "black", "alpha": 0.5, "linewidth": 0, "pad": 1.5}  # legible on any grey
    style: dict[str, Any] = {"color": "white", "fontsize": 9, "ha": "center", "va": "center", "bbox": shade}
    for letter, at, inwards in ((DIRECTIONS[right], (1, 0.5), (-10, 0)), (DIRECTIONS[up], (0.5, 1), (0, -10))):
        row[0].annotate(letter, at, inwards, "axes fraction", "offset points", **style)


def centre(mask: NDArray[np.bool_]) -> list[int]:
    """The voxel that halves the mask along each axis, so that its planes hold some of it; of no mask, the middle."""
    if not mask.any():
        return [length // 2 for length in mask.shape]
    below = [mask.sum(axis=tuple({0, 1, 2} - {axis})).cumsum() for axis in range(3)]
    return [int(np.searchsorted(counts, counts[-1] / 2)) for counts in below]


class PlottedRun(NamedTuple):
    """One run; None where it has no such number."""

    label: str
    kind: str  # of the peak, e.g. "measured, ledger"
    peak_bytes: int
    step_s: float | None
    dice: float | None


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

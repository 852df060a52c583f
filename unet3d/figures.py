"""Pictures of a run, as PNG files: training curves, slices with classes on them.

Always on white, in colours that colour-blind eyes tell apart (Okabe and Ito, 2008). matplotlib is loaded by the first
picture and used without windows and global state.
"""

from collections.abc import Mapping, Sequence
from math import ceil
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from unet3d.slices import PLANES, centre

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OKABE_ITO = ("#E69F00", "#56B4E9", "#009E73", "#D55E00", "#0072B2", "#CC79A7", "#F0E442")
BLUE, GREY = "#0072B2", "#A0A0A0"
UNLABELLED = -100  # in label maps: neither learned nor scored
MANY = 200  # records; from here on single steps fade behind their running mean

Array = NDArray[Any]


def colours(count: int) -> list[Any]:
    """One colour a foreground class, the same in every picture; beyond seven, shades of viridis."""
    if count <= len(OKABE_ITO):
        return list(OKABE_ITO[:count])
    import matplotlib

    return [matplotlib.colormaps["viridis"](share) for share in np.linspace(0, 0.95, count)]


def curves(records: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Training loss, and validation Dice per class and their mean, over optimizer steps.

    `records` are those of metrics.jsonl. The loss axis is logarithmic where all losses are positive and span more than
    a factor of 20.
    """
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
        axes.grid(color="#E5E5E5")
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def _series(records: Sequence[Mapping[str, Any]], key: str) -> tuple[Array, Array]:
    """Steps and values where `key` has one; "nan" and "inf" of the records are what they say."""
    found = [(record["step"], float(record[key])) for record in records if record.get(key) is not None]
    steps, values = zip(*found, strict=True) if found else ((), ())
    return np.array(steps), np.array(values, float)


def _draw_loss(axes: "Axes", steps: Array, loss: Array) -> None:
    axes.set_title("Training loss")
    if len(steps) < MANY:
        axes.plot(steps, loss, color=BLUE, marker=_marker(steps))
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
    elif known.min() > 0 and known.max() > 20 * known.min():
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")


def _draw_dice(axes: "Axes", series: Mapping[str, tuple[Array, Array]], columns: int) -> None:
    axes.set_title("Validation Dice")
    axes.set_ylim(0, 1.02)
    classes = [name for name in series if name != "val/dice_mean"]
    for colour, name in zip(colours(len(classes)), classes, strict=True):
        label = _short(name.removeprefix("val/dice/"))
        axes.plot(*series[name], color=colour, marker=_marker(series[name][0]), label=label)
    if len(classes) != 1 and "val/dice_mean" in series:
        marker = _marker(series["val/dice_mean"][0])
        axes.plot(*series["val/dice_mean"], "--", color="black", marker=marker, markersize=3, label="mean of classes")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize=9, ncols=columns)


def _marker(steps: Array) -> str:
    return "o" if len(steps) <= 30 else ""


def _short(name: str) -> str:
    return plain(shorten(name.replace("_", " "), 24, placeholder="...") if len(name) > 24 else name)


def plain(text: str) -> str:
    """For matplotlib: `$` is a dollar, no formula."""
    return text.replace("$", r"\$")


def segmentation(
    image: Array,
    layers: Mapping[str, Array],
    spacing: Sequence[float],
    class_names: Sequence[str],
    path: Path,
    title: str,
    where: Sequence[int] | None = None,
) -> None:
    """An image and its label maps, by name, all (X, Y, Z) of a canonical volume, on three planes.

    The planes go through the voxel `where`; None: through the middle of the foreground. `spacing` is the voxel's size
    in mm; `class_names` begins with background. Unlabelled voxels are dark; other values beyond the classes are
    not drawn.
    """
    from matplotlib.patches import Patch

    if where is None:
        masks = [(labels > 0) & (labels < len(class_names)) for labels in layers.values()]
        where = centre(next((mask for mask in masks if mask.any()), masks[0]))
    size = [count * mm for count, mm in zip(image.shape, spacing, strict=True)]
    heights = [min(max(2.7 * size[plane.up] / max(size[:2]), 0.45), 4.0) for plane in PLANES]
    columns, legend = 1 + len(layers), 0.25 * ceil(len(class_names) / (1 + len(layers)))
    figure = blank(2.8 * columns + 0.3, sum(heights) + legend + 0.9)
    grid = figure.subplots(len(PLANES), columns, height_ratios=heights)
    palette = dict(enumerate(colours(len(class_names) - 1), start=1))
    names = {index: _short(class_names[index]) for index in palette}
    if any((labels == UNLABELLED).any() for labels in layers.values()):
        palette[UNLABELLED], names[UNLABELLED] = "#404040", "unlabelled"
    for row, plane in zip(grid, PLANES, strict=True):
        plane.draw_image(row, image, where, size)
        for axes, labels in zip(row[1:], layers.values(), strict=True):
            plane.draw_classes(axes, labels, where, size, palette)
    for axes, name in zip(grid[0], ("image", *layers), strict=True):
        axes.set_title(name)
    figure.suptitle(plain(title))
    patches = [Patch(color=colour, label=names[index]) for index, colour in palette.items()]
    figure.legend(handles=patches, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)
    figure.savefig(path)


def blank(width: float, height: float) -> "Figure":
    """A figure of a size in inches, which sees to it that nothing overlaps."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=150, layout="constrained", facecolor="white")

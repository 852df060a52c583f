"""Figures of held-out cases: image, truth, prediction and errors on three planes; and the Dice of all by class."""

import zlib
from collections.abc import Iterator, Mapping, Sequence
from math import ceil
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from unet3d.base.types import IGNORE
from unet3d.report.plots import DARK, Array, blank, colours, name_classes, plain, save_picture, short_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PLANES = ("sagittal", "coronal", "axial")  # across the axes X, Y, Z
AXES = ((1, 2), (0, 2), (0, 1))  # that a plane shows to the right and upwards
DIRECTIONS = "RAS"  # where the axes of a canonical volume point: right, anterior, superior
FALSE_NEGATIVE = "false negative"
FALSE_POSITIVE = "false positive"
WRONG_CLASS = "wrong class"
ERRORS = {  # apart for every kind of colour vision, on grey
    FALSE_NEGATIVE: "#FF2D95",
    FALSE_POSITIVE: "#00D5FF",
    WRONG_CLASS: "#FFE000",
}
OUTLINES = "truth and prediction"  # a column
STYLES: dict[str, Any] = {"truth": "-", "prediction": (0, (2, 1.2))}  # of outlines: solid; dashes and gaps
NEUROLOGICAL = "right is right"  # radiologists expect the mirror image
MAP_WIDTH = 2.5  # inches, of the widest map
LEAST_HEIGHT = 0.8  # inches, of one plane
MOST_HEIGHT = 3.4
TITLE_LETTERS = 100  # in a line
CASES_OF_A_BOX = 8  # at least: of fewer, a box from quartile to quartile says little


def segmentation(
    image: Array,
    layers: Mapping[str, Array],
    spacing: Sequence[float],
    class_names: Sequence[str],
    path: Path,
    title: str,
    where: Sequence[int] | None = None,
    labels_of: Sequence[Sequence[int]] | None = None,
) -> None:
    """Draw an image, the outlines of its "truth" and its "prediction", and where they differ, on three planes.

    All are (X, Y, Z) on canonical axes. A layer "learned" has a column of its own. The planes meet in the voxel
    `where`; None: in the middle of the truth, or of the prediction where the truth is empty. `spacing` is the voxel's
    size in mm; `class_names` begins with background. `labels_of` has the labels of each class but this; None: its
    number. Unlabelled voxels are dark.
    """
    labels_of = labels_of or [(number,) for number in range(1, len(class_names))]
    if where is None:
        found = [np.isin(layers[name], np.concatenate(labels_of)) for name in ("truth", "prediction")]
        where = centre(found[0] if found[0].any() else found[1])
    heads = ["image", *(["learned"] if "learned" in layers else []), OUTLINES, "errors"]
    sizes = np.multiply(image.shape, spacing)  # mm
    scale = MAP_WIDTH / max(sizes[:2])
    heights = [min(max(scale * sizes[up], LEAST_HEIGHT), MOST_HEIGHT) for _, up in AXES]
    handles = _legend(layers, class_names)
    lines = wrap(title, TITLE_LETTERS)
    below = 0.22 * (ceil(len(handles) / len(heads)) + len(lines))
    figure = blank((MAP_WIDTH + 0.1) * len(heads) + 0.9, sum(heights) + below + 0.6)
    grid = figure.subplots(len(PLANES), len(heads), height_ratios=heights)
    darkest, brightest = np.percentile(image, (0.5, 99.5))
    for axis, (row, (right, up)) in enumerate(zip(grid, AXES, strict=True)):
        plane = np.take(image, where[axis], axis).T
        maps = {name: np.take(layer, where[axis], axis).T for name, layer in layers.items()}
        extent = (0, plane.shape[1] * spacing[right], 0, plane.shape[0] * spacing[up])
        for name, axes in zip(heads, row, strict=True):
            axes.imshow(plane, "gray", origin="lower", extent=extent, vmin=darkest, vmax=brightest)
            axes.set(xticks=[], yticks=[])
            overlay = _overlay(name, maps, labels_of)
            if overlay.any():
                axes.imshow(overlay, origin="lower", extent=extent, interpolation="nearest")
            if name == OUTLINES:
                _draw_outlines(axes, maps, labels_of, (spacing[right], spacing[up]))
                axes.set(xlim=extent[:2], ylim=extent[2:])
        _name_plane(row[0], axis, where[axis])
    for axes, name in zip(grid[0], heads, strict=True):
        axes.set_title(f"{name}, {NEUROLOGICAL}" if name == "image" else name, fontsize=10)
    figure.suptitle("\n".join(map(plain, lines)), fontsize=11)
    figure.legend(handles=handles, loc="outside lower center", ncols=len(heads), frameon=False, fontsize=9)
    save_picture(figure, path, zlib.Z_RLE)  # noise is packed in half the time, and no worse


def _legend(layers: Mapping[str, Array], class_names: Sequence[str]) -> list[Any]:
    """Return handles of the classes, the two kinds of line, and the kinds of error that the case has."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    named = zip(colours(len(class_names) - 1), class_names[1:], strict=True)
    handles: list[Any] = [Patch(color=colour, label=short_name(name)) for colour, name in named]
    handles += [Line2D([], [], color=DARK, linestyle=style, label=name) for name, style in STYLES.items()]
    for name, colour in ERRORS.items():
        if name != WRONG_CLASS or len(class_names) > 2:
            handles.append(Patch(color=colour, label=name))
    if any((labels == IGNORE).any() for labels in layers.values()):
        handles.append(Patch(color=DARK, label="unlabelled"))
    return handles


def _overlay(column: str, maps: Mapping[str, Array], labels_of: Sequence[Sequence[int]]) -> Array:
    """Return the colours (rows, columns, RGBA) that a column shows over the image of a plane."""
    from matplotlib.colors import to_rgba

    truth = maps["truth"]
    prediction = maps["prediction"]
    overlay = np.zeros((*truth.shape, 4))
    if column == "learned":
        for colour, mask in _masks(maps["learned"], labels_of):
            overlay[mask] = to_rgba(colour, 0.6)
    if column == "errors":
        is_wrong = truth != prediction
        overlay[is_wrong] = to_rgba(ERRORS[WRONG_CLASS], 0.9)
        overlay[is_wrong & (prediction == 0)] = to_rgba(ERRORS[FALSE_NEGATIVE], 0.9)
        overlay[is_wrong & (truth == 0)] = to_rgba(ERRORS[FALSE_POSITIVE], 0.9)
    if column != "image":
        overlay[maps.get(column, truth) == IGNORE] = to_rgba(DARK, 0.6)
    return overlay


def _draw_outlines(
    axes: "Axes", maps: Mapping[str, Array], labels_of: Sequence[Sequence[int]], spacing: tuple[float, float]
) -> None:
    """Draw the border of each class, halfway between voxels inside and outside."""
    rows, columns = maps["truth"].shape
    x = (np.arange(-1, columns + 1) + 0.5) * spacing[0]
    y = (np.arange(-1, rows + 1) + 0.5) * spacing[1]
    for name, style in STYLES.items():
        for colour, mask in _masks(maps[name], labels_of):
            if mask.any():
                axes.contour(x, y, np.pad(mask, 1), [0.5], colors=[colour], linewidths=1.3, linestyles=[style])


def _masks(plane: Array, labels_of: Sequence[Sequence[int]]) -> Iterator[tuple[Any, NDArray[np.bool_]]]:
    """Yield the colour of each class but the background, and where in a plane it is; regions may overlap."""
    for colour, labels in zip(colours(len(labels_of)), labels_of, strict=True):
        yield colour, np.isin(plane, labels)


def _name_plane(axes: "Axes", axis: int, index: int) -> None:
    """Write beside a plane which it is, and on it which way its axes point."""
    axes.set_ylabel(f"{PLANES[axis]}\n{'xyz'[axis]} = {index}", rotation=0, ha="right", va="center")
    shade = {"facecolor": "black", "alpha": 0.5, "linewidth": 0, "pad": 1.5}  # legible on any grey
    text: dict[str, Any] = {"color": "white", "fontsize": 9, "ha": "center", "va": "center", "bbox": shade}
    right, up = AXES[axis]
    for letter, edge, inwards in ((DIRECTIONS[right], (1, 0.5), (-10, 0)), (DIRECTIONS[up], (0.5, 1), (0, -10))):
        axes.annotate(letter, edge, inwards, "axes fraction", "offset points", **text)


def centre(mask: NDArray[np.bool_]) -> list[int]:
    """Return the voxel that halves the mask along each axis, so that its planes hold some of it.

    Of an empty mask it is the middle of the volume.
    """
    if not mask.any():
        return [length // 2 for length in mask.shape]
    middle = []
    for axes in AXES:
        counts = mask.sum(axis=axes).cumsum()
        middle.append(int(np.searchsorted(counts, counts[-1] / 2)))
    return middle


def score_plot(dice: Mapping[str, Sequence[float]], path: Path) -> None:
    """Draw the Dice of the cases, a point each, by class; of eight cases and more with a box between the quartiles.

    The axis begins at a tenth below the lowest.
    """
    figure = blank(max(4.8, 0.55 * len(dice) + 2.0), 3.6)
    axes = figure.subplots()
    thin: dict[str, Any] = {"color": DARK, "linewidth": 1.1}
    box: dict[str, Any] = {"boxprops": thin, "whiskerprops": thin, "capprops": thin, "showfliers": False, "widths": 0.5}
    point: dict[str, Any] = {"mec": "black", "mew": 0.4, "ms": 4, "alpha": 0.8, "zorder": 3}
    for place, (values, colour) in enumerate(zip(dice.values(), colours(len(dice)), strict=True)):
        aside = 0.16 * (np.arange(len(values)) * 0.618 % 1 - 0.5)  # equal values lie beside each other
        axes.plot(place + aside, sorted(values), "o", color=colour, **point)
        if len(values) >= CASES_OF_A_BOX:
            axes.boxplot([values], positions=[place], medianprops=thin | {"linewidth": 2.2}, **box)
    name_classes(axes, [short_name(name) for name in dice])
    lowest = min((min(values) for values in dice.values() if values), default=0.0)
    bottom = max(0.0, np.floor(10 * lowest - 0.5) / 10)
    axes.set(ylim=(bottom - 0.02, 1.02), ylabel="Dice", title="Dice of each held-out case")
    save_picture(figure, path)

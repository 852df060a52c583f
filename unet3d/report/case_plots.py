"""Pictures of held-out cases: image, truth, prediction and errors on three planes; and the scores of all cases."""

from collections.abc import Mapping, Sequence
from math import ceil
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from unet3d.base.types import IGNORE
from unet3d.report.plots import DARK, PALE, Array, blank, colours, plain, save_picture, short_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PLANES = ("sagittal", "coronal", "axial")  # across the axes X, Y, Z
DIRECTIONS = "RAS"  # where the axes of a canonical volume point: right, anterior, superior
MISSED, ADDED, CONFUSED = "missed", "added", "another class"
ERRORS = {MISSED: "#FF2D95", ADDED: "#00D5FF", CONFUSED: "#FFE000"}  # apart for every kind of colour vision, on grey
STYLES: dict[str, Any] = {"truth": "-", "prediction": (0, (2, 1.2))}  # of outlines: solid; dashes and gaps
WIDEST_MAP, HEIGHTS = 2.5, (0.8, 3.4)  # inches: of a map; the least and the most of one plane
TITLE = 100  # letters in a line


class Slice(NamedTuple):
    """A plane of a case: arrays (rows from the bottom up, columns), the size of a voxel (mm) along columns and rows."""

    image: Array
    maps: Mapping[str, Array]
    spacing: tuple[float, float]

    @property
    def extent(self) -> tuple[float, float, float, float]:
        rows, columns = self.image.shape
        return 0, columns * self.spacing[0], 0, rows * self.spacing[1]


def segmentation(
    image: Array,
    layers: Mapping[str, Array],
    spacing: Sequence[float],
    class_names: Sequence[str],
    path: Path,
    title: str,
    where: Sequence[int] | None = None,
) -> None:
    """An image, the outlines of its "truth" and its "prediction", and where they differ, on three planes.

    All are (X, Y, Z) on canonical axes. A layer "learned" has a column of its own. The planes meet in the voxel
    `where`; None: in the middle of the truth, or of the prediction if there is none. `spacing` is the voxel's size in
    mm; `class_names` begins with background. Unlabelled voxels are dark.
    """
    classes, size = len(class_names), [count * mm for count, mm in zip(image.shape, spacing, strict=True)]
    if where is None:
        masks = [(layers[name] > 0) & (layers[name] < classes) for name in ("truth", "prediction")]
        where = centre(next((mask for mask in masks if mask.any()), masks[0]))
    heads = ["image", *["learned"] * ("learned" in layers), "truth and prediction", "errors"]
    scale = WIDEST_MAP / max(size[:2])
    heights = [min(max(scale * size[up], HEIGHTS[0]), HEIGHTS[1]) for up in (2, 2, 1)]
    handles = _legend(layers, class_names)
    columns = 4 if len(heads) > 3 else 3
    lines = wrap(title, TITLE)
    below = 0.22 * (ceil(len(handles) / columns) + len(lines))
    figure = blank((WIDEST_MAP + 0.1) * len(heads) + 0.9, sum(heights) + below + 0.6)
    grid = figure.subplots(len(PLANES), len(heads), height_ratios=heights)
    grey = dict(zip(("vmin", "vmax"), np.percentile(image, (0.5, 99.5)), strict=True))
    for axis, row in enumerate(grid):
        right, up = sorted({0, 1, 2} - {axis})
        cuts = {name: np.take(volume, where[axis], axis).T for name, volume in layers.items()}
        plane = Slice(np.take(image, where[axis], axis).T, cuts, (spacing[right], spacing[up]))
        for axes in row:
            axes.imshow(plane.image, cmap="gray", origin="lower", extent=plane.extent, **grey)
            axes.set(xticks=[], yticks=[])
        for name, axes in zip(heads, row, strict=True):
            DRAWN[name](axes, plane, classes)
        _name_plane(row[0], axis, where[axis])
    for axes, name in zip(grid[0], heads, strict=True):
        axes.set_title(name, fontsize=10)
    figure.suptitle("\n".join(map(plain, lines)), fontsize=11)
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)
    save_picture(figure, path)


def _legend(layers: Mapping[str, Array], class_names: Sequence[str]) -> list[Any]:
    """Colours of the classes, the two kinds of line, and the kinds of error that the case has."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    palette = colours(len(class_names) - 1)
    found: list[Any] = [Patch(color=c, label=short_name(n)) for c, n in zip(palette, class_names[1:], strict=True)]
    for name, style in STYLES.items():
        found.append(Line2D([], [], color=DARK, linestyle=style, label=name))
    kinds = {MISSED, ADDED} | {CONFUSED} if len(class_names) > 2 else {MISSED, ADDED}
    found += [Patch(color=colour, label=name) for name, colour in ERRORS.items() if name in kinds]
    if any((labels == IGNORE).any() for labels in layers.values()):
        found.append(Patch(color=DARK, label="unlabelled"))
    return found


def _draw_nothing(axes: "Axes", plane: Slice, classes: int) -> None:
    """The image alone."""


def _draw_learned(axes: "Axes", plane: Slice, classes: int) -> None:
    learned = plane.maps["learned"]
    masks = {colour: learned == value for value, colour in enumerate(colours(classes - 1), start=1)}
    _paint(axes, plane, masks | {DARK: learned == IGNORE}, 0.6)


def _draw_outlines(axes: "Axes", plane: Slice, classes: int) -> None:
    """The border of each class, halfway between voxels inside and outside."""
    _paint(axes, plane, {DARK: plane.maps["truth"] == IGNORE}, 0.6)
    (right, up), (rows, columns) = plane.spacing, plane.image.shape
    x, y = (np.arange(-1, columns + 1) + 0.5) * right, (np.arange(-1, rows + 1) + 0.5) * up
    for name, style in STYLES.items():
        for value, colour in enumerate(colours(classes - 1), start=1):
            if (mask := plane.maps[name] == value).any():
                axes.contour(x, y, np.pad(mask, 1), [0.5], colors=[colour], linewidths=1.3, linestyles=[style])
    axes.set(xlim=plane.extent[:2], ylim=plane.extent[2:])


def _draw_errors(axes: "Axes", plane: Slice, classes: int) -> None:
    truth, found = plane.maps["truth"], plane.maps["prediction"]
    is_known = truth != IGNORE
    wrong = is_known & (truth != found)
    masks = {MISSED: wrong & (found == 0), ADDED: wrong & (truth == 0), CONFUSED: wrong & (found > 0) & (truth > 0)}
    _paint(axes, plane, {ERRORS[name]: mask for name, mask in masks.items()}, 0.9)
    _paint(axes, plane, {DARK: ~is_known}, 0.6)


DRAWN = {
    **{"image": _draw_nothing, "learned": _draw_learned},
    **{"truth and prediction": _draw_outlines, "errors": _draw_errors},
}


def _paint(axes: "Axes", plane: Slice, masks: Mapping[Any, NDArray[np.bool_]], alpha: float) -> None:
    from matplotlib.colors import to_rgba

    overlay = np.zeros((*plane.image.shape, 4))
    for colour, mask in masks.items():
        overlay[mask] = to_rgba(colour, alpha)
    if overlay.any():
        axes.imshow(overlay, origin="lower", extent=plane.extent, interpolation="nearest")


def _name_plane(axes: "Axes", axis: int, index: int) -> None:
    """Which plane it is, and which way its axes point."""
    right, up = sorted({0, 1, 2} - {axis})
    axes.set_ylabel(f"{PLANES[axis]}\n{'xyz'[axis]} = {index}", rotation=0, ha="right", va="center")
    shade = {"facecolor": "black", "alpha": 0.5, "linewidth": 0, "pad": 1.5}  # legible on any grey
    style: dict[str, Any] = {"color": "white", "fontsize": 9, "ha": "center", "va": "center", "bbox": shade}
    for letter, at, inwards in ((DIRECTIONS[right], (1, 0.5), (-10, 0)), (DIRECTIONS[up], (0.5, 1), (0, -10))):
        axes.annotate(letter, at, inwards, "axes fraction", "offset points", **style)


def centre(mask: NDArray[np.bool_]) -> list[int]:
    """The voxel that halves the mask along each axis, so that its planes hold some of it; of no mask, the middle."""
    if not mask.any():
        return [length // 2 for length in mask.shape]
    below = [mask.sum(axis=tuple({0, 1, 2} - {axis})).cumsum() for axis in range(3)]
    return [int(np.searchsorted(counts, counts[-1] / 2)) for counts in below]


def score_plot(dice: Mapping[str, Sequence[float]], path: Path) -> None:
    """Dice of the cases, a point each, by class; of eight cases and more with a box from quartile to quartile.

    The axis begins at a tenth below the lowest.
    """
    figure = blank(max(4.8, 0.55 * len(dice) + 2.0), 3.6)
    axes = figure.subplots()
    for place, (colour, values) in enumerate(zip(colours(len(dice)), dice.values(), strict=True)):
        ordered = np.sort(np.array(values, float))
        aside = 0.16 * (np.arange(len(ordered)) * 0.618 % 1 - 0.5)  # equal values lie beside each other
        axes.plot(place + aside, ordered, "o", color=colour, mec="black", mew=0.4, ms=4, alpha=0.8, zorder=3)
        if len(ordered) > 7:
            thin: dict[str, Any] = {"color": DARK, "linewidth": 1.1}
            box: dict[str, Any] = dict.fromkeys(("boxprops", "whiskerprops", "capprops"), thin)
            box["medianprops"] = thin | {"linewidth": 2.2}
            axes.boxplot([ordered], positions=[place], widths=0.5, showfliers=False, **box)
    names = [short_name(name) for name in dice]
    is_long = max(map(len, names), default=0) * len(names) > 50
    axes.set_xticks(range(len(dice)), names, rotation=90 if is_long else 0)
    lowest = min((value for values in dice.values() for value in values), default=0.0)
    bottom = max(0.0, np.floor(10 * lowest - 0.5) / 10)
    axes.set(
        xlim=(-0.6, len(dice) - 0.4), ylim=(bottom - 0.02, 1.02), ylabel="Dice", title="Dice of each held-out case"
    )
    axes.grid(axis="y", color=PALE)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    save_picture(figure, path)

"""Pictures of a run as PNG files: training curves, and slices with classes on them."""

from collections.abc import Mapping, Sequence
from math import ceil
from pathlib import Path
from textwrap import shorten
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

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


def training_curves(records: Sequence[Mapping[str, Any]], path: Path) -> None:
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
    file: IO[bytes],
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
    figure.savefig(file)


def blank(width: float, height: float) -> "Figure":
    """A figure of a size in inches, which sees to it that nothing overlaps."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=150, layout="constrained", facecolor="white")


ENDS = "RAS"  # where the axes of a canonical volume lead: right, anterior, superior


class Plane(NamedTuple):
    """A cut across one axis of a volume, with the axes that it shows to the right and upwards.

    Volumes are (X, Y, Z) on canonical axes, `where` is the voxel that the plane goes through, `size` the volume's
    lengths in mm: a plane is drawn in its true proportions.
    """

    name: str
    axis: int
    right: int
    up: int

    def cut(self, volume: Array, where: Sequence[int]) -> Array:
        """The plane, rows from bottom to top."""
        cut: Array = np.take(volume, where[self.axis], self.axis).T
        return cut

    def extent(self, size: Sequence[float]) -> tuple[float, float, float, float]:
        return 0, size[self.right], 0, size[self.up]

    def draw_image(self, row: "Sequence[Axes]", image: Array, where: Sequence[int], size: Sequence[float]) -> None:
        """The image in every cell of a row, the first one with the plane's name and directions."""
        low, high = np.percentile(image, (0.5, 99.5))
        for axes in row:
            cut = self.cut(image, where)
            axes.imshow(cut, cmap="gray", vmin=low, vmax=high, origin="lower", extent=self.extent(size))
            axes.set(xticks=[], yticks=[])
        label = f"{self.name}\n{'xyz'[self.axis]} = {where[self.axis]}"
        row[0].set_ylabel(label, rotation=0, ha="right", va="center")
        _mark(row[0], ENDS[self.right], (1, 0.5), (-10, 0))
        _mark(row[0], ENDS[self.up], (0.5, 1), (0, -10))

    def draw_classes(
        self, axes: "Axes", labels: Array, where: Sequence[int], size: Sequence[float], palette: Mapping[int, Any]
    ) -> None:
        """The label values that have a colour, see-through."""
        from matplotlib.colors import to_rgba

        cut = self.cut(labels, where)
        overlay = np.zeros((*cut.shape, 4))
        for index, colour in palette.items():
            overlay[cut == index] = to_rgba(colour, 0.6)
        axes.imshow(overlay, origin="lower", extent=self.extent(size), interpolation="nearest")


PLANES = (Plane("sagittal", 0, 1, 2), Plane("coronal", 1, 0, 2), Plane("axial", 2, 0, 1))


def centre(mask: NDArray[np.bool_]) -> list[int]:
    """The voxel that halves the mask along each axis, so that its planes hold some of it; the middle of no mask."""
    if not mask.any():
        return [length // 2 for length in mask.shape]
    below = [mask.sum(axis=tuple({0, 1, 2} - {axis})).cumsum() for axis in range(3)]
    return [int(np.searchsorted(counts, counts[-1] / 2)) for counts in below]


def _mark(axes: "Axes", letter: str, at: tuple[float, float], inwards: tuple[float, float]) -> None:
    """A letter at the edge of a picture, legible on any grey; `inwards` in points."""
    shade = {"facecolor": "black", "alpha": 0.5, "linewidth": 0, "pad": 1.5}
    style: dict[str, Any] = {"color": "white", "fontsize": 9, "ha": "center", "va": "center", "bbox": shade}
    axes.annotate(letter, at, inwards, "axes fraction", "offset points", **style)

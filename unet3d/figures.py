"""Pictures of a run, as PNG files: training curves, slices with classes on them, peak memory per phase.

Always on white, in colours that colour-blind eyes tell apart (Okabe and Ito, 2008). matplotlib is loaded by the first
picture and used without windows and global state.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OKABE_ITO = ("#E69F00", "#56B4E9", "#009E73", "#D55E00", "#0072B2", "#CC79A7", "#F0E442")
BLUE, GREY = "#0072B2", "#A0A0A0"
MIB = 2**20
ENDS = "RAS"  # where the axes of a canonical volume lead: right, anterior, superior
MANY = 200  # records; from here on single steps fade behind their running mean

Slice = NDArray[Any]
Extent = tuple[float, float, float, float]


class Plane(NamedTuple):
    """A cut across one axis of a volume, with the axes that it shows to the right and upwards."""

    name: str
    axis: int
    across: int
    up: int


PLANES = (Plane("sagittal", 0, 1, 2), Plane("coronal", 1, 0, 2), Plane("axial", 2, 0, 1))


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
    names = dict.fromkeys(key for record in records for key in record if key.startswith("val/dice"))
    dice = {name: found for name in names if (found := _series(records, name))[0].size}
    columns = len(dice) // 13 + 1 if dice else 0  # of the legend
    figure = _figure(8.0 + 2.2 * columns if dice else 5, 3.6)
    panels = figure.subplots(1, 2 if dice else 1, squeeze=False)[0]
    _draw_loss(panels[0], *_series(records, "train/loss"))
    if dice:
        _draw_dice(panels[1], dice, columns)
    for axes in panels:
        axes.set_xlabel("optimizer step")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(color="#E5E5E5")
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def _series(records: Sequence[Mapping[str, Any]], key: str) -> tuple[Slice, Slice]:
    """Steps and values where `key` has one; "nan" and "inf" of the records are what they say."""
    found = [(record["step"], float(record[key])) for record in records if record.get(key) is not None]
    steps, values = zip(*found, strict=True) if found else ((), ())
    return np.array(steps), np.array(values, float)


def _draw_loss(axes: "Axes", steps: Slice, loss: Slice) -> None:
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
    elif known.min() > 0 and known.max() > 20 * known.min():
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")


def _draw_dice(axes: "Axes", series: Mapping[str, tuple[Slice, Slice]], columns: int) -> None:
    axes.set_title("Validation Dice")
    axes.set_ylim(0, 1.02)
    classes = [name for name in series if name != "val/dice_mean"]
    for colour, name in zip(colours(len(classes)), classes, strict=True):
        label = _short(name.removeprefix("val/dice/"))
        axes.plot(*series[name], color=colour, marker=_marker(series[name][0]), label=label)
    if len(classes) != 1 and "val/dice_mean" in series:
        axes.plot(*series["val/dice_mean"], color="black", linestyle="--", label="mean of classes")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize=9, ncols=columns)


def _marker(steps: Slice) -> str:
    return "o" if len(steps) <= 30 else ""


def _short(name: str) -> str:
    return shorten(name.replace("_", " "), 24, placeholder="...") if len(name) > 24 else name


def memory_phases(memory: Mapping[str, Any], path: Path) -> None:
    """Bars of the measured peak per phase in MiB, of the first step and of later ones, from memory.json."""
    measured = memory["measured"]
    phases = list(measured["phases"])
    figure = _figure(7.2, 1.3 + 0.55 * len(phases))
    axes = figure.subplots()
    for offset, when, colour in ((-0.19, "first", "#56B4E9"), (0.19, "steady", BLUE)):
        peaks = [measured["phases"][phase][when] / MIB for phase in phases]
        label = {"first": "first step", "steady": "later steps"}[when]
        bars = axes.barh(np.arange(len(phases)) + offset, peaks, 0.36, color=colour, label=label)
        axes.bar_label(bars, [mib(peak * MIB) for peak in peaks], padding=3, fontsize=9)
    axes.set_yticks(range(len(phases)), phases)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel("peak memory (MiB)")
    axes.xaxis.set_major_formatter("{x:,g}")
    axes.set_title(f"Peak memory per phase, measured ({measured['kind']})")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    figure.savefig(path)


def mib(size: float) -> str:
    """Bytes as MiB (2^20 bytes), to a tenth below 100."""
    return f"{size / MIB:,.1f}" if size < 100 * MIB else f"{size / MIB:,.0f}"


def prediction(
    image: Slice,
    truth: Slice | None,
    prediction: Slice,
    spacing: Sequence[float],
    class_names: Sequence[str],
    path: Path,
    title: str,
) -> None:
    """Image, truth and prediction, all (X, Y, Z) of a canonical volume, on three planes through the foreground.

    `spacing` is the voxel's size in mm; `class_names` begins with background. Label values beyond the classes (ignored
    voxels) are not drawn. Without truth there is no such column.
    """
    layers = {"prediction": prediction} if truth is None else {"truth": truth, "prediction": prediction}
    masks = [(labels > 0) & (labels < len(class_names)) for labels in layers.values()]
    centre = _centre(next((mask for mask in masks if mask.any()), masks[0]))
    size = [count * mm for count, mm in zip(image.shape, spacing, strict=True)]
    heights = [min(max(2.7 * size[plane.up] / max(size[:2]), 0.45), 4.0) for plane in PLANES]
    figure = _figure(2.8 * (1 + len(layers)) + 0.3, sum(heights) + 1.2)
    grid = figure.subplots(len(PLANES), 1 + len(layers), height_ratios=heights)
    palette = dict(enumerate(colours(len(class_names) - 1), start=1))
    for row, plane in zip(grid, PLANES, strict=True):
        _draw_image(row, plane, _cut(image, plane, centre), np.percentile(image, (0.5, 99.5)), _extent(plane, size))
        where = f"{plane.name}\n{'xyz'[plane.axis]} = {centre[plane.axis]}"
        row[0].set_ylabel(where, rotation=0, ha="right", va="center")
        for axes, labels in zip(row[1:], layers.values(), strict=True):
            _draw_classes(axes, _cut(labels, plane, centre), palette, _extent(plane, size))
    for axes, name in zip(grid[0], ("image", *layers), strict=True):
        axes.set_title(name)
    figure.suptitle(title)
    _draw_legend(figure, {colour: class_names[index] for index, colour in palette.items()})
    figure.savefig(path)


def _centre(mask: NDArray[np.bool_]) -> list[int]:
    """The voxel that halves the mask along each axis, so that its planes hold some of it; the middle of no mask."""
    if not mask.any():
        return [length // 2 for length in mask.shape]
    counts = [mask.sum(axis=tuple({0, 1, 2} - {axis})).cumsum() for axis in range(3)]
    return [int(np.searchsorted(count, count[-1] / 2)) for count in counts]


def _cut(volume: Slice, plane: Plane, centre: Sequence[int]) -> Slice:
    """The plane through `centre` as rows from bottom to top."""
    cut: Slice = np.take(volume, centre[plane.axis], plane.axis).T
    return cut


def _extent(plane: Plane, size: Sequence[float]) -> Extent:
    return 0, size[plane.across], 0, size[plane.up]


def _draw_image(row: "Sequence[Axes]", plane: Plane, image: Slice, window: Slice, extent: Extent) -> None:
    low, high = window
    for axes in row:
        axes.imshow(image, cmap="gray", vmin=low, vmax=high, origin="lower", extent=extent)
        axes.set(xticks=[], yticks=[])
    for at, inwards, end in (((1, 0.5), (-10, 0), plane.across), ((0.5, 1), (0, -10), plane.up)):
        shade = {"facecolor": "black", "alpha": 0.5, "linewidth": 0, "pad": 1.5}
        row[0].annotate(
            ENDS[end],
            at,
            inwards,
            "axes fraction",
            "offset points",
            color="white",
            fontsize=9,
            ha="center",
            va="center",
            bbox=shade,
        )


def _draw_classes(axes: "Axes", labels: Slice, palette: Mapping[int, Any], extent: Extent) -> None:
    from matplotlib.colors import to_rgba

    overlay = np.zeros((*labels.shape, 4))
    for index, colour in palette.items():
        overlay[labels == index] = to_rgba(colour, 0.6)
    axes.imshow(overlay, origin="lower", extent=extent, interpolation="nearest")


def _draw_legend(figure: "Figure", names: Mapping[Any, str]) -> None:
    from matplotlib.patches import Patch

    patches = [Patch(color=colour, label=_short(name)) for colour, name in names.items()]
    figure.legend(handles=patches, loc="outside lower center", ncols=4, frameon=False)


def _figure(width: float, height: float) -> "Figure":
    """A figure of a size in inches, which sees to it that nothing overlaps."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=150, layout="constrained", facecolor="white")

"""Held-out cases of a run: the best, the median and the worst; tables by case and by class with their titles; figures.

A figure shows the image of a case, its truth, its prediction and errors on three planes, others the Dice of all,
and of the folds of methods.
"""

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import cycle
from math import ceil, isfinite
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from unet3d.base.types import IGNORE, Table
from unet3d.report import plots
from unet3d.report.plots import DARK, Array, blank, colours, name_classes, plain, save_picture, short_name
from unet3d.run.record import RunRecord, numbers_of
from unet3d.training.metrics import NETWORK, NOTE_KEY, mean_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

METRICS = {  # heading, digits
    "dice": ("Dice", 3),
    "iou": ("IoU", 3),
    "hd95_mm": ("HD95 (mm)", 2),
}
ROLES = ("best", "median", "worst")
MOST_COLUMNS = 200  # Keeps a page's table under 2 MB.
MOST_CELLS = 20_000
SCORES_TITLE = "Scores on the held-out cases"
OWN_GRIDS = "on the files' own grids"
MEAN_OF_CLASSES = "mean of classes"
CaseRow = Mapping[str, Any]  # Rows of `RunRecord.scores`.
PLANES = ("sagittal", "coronal", "axial")  # across the axes X, Y, Z
AXES = ((1, 2), (0, 2), (0, 1))  # Axes that a plane shows to the right and upwards.
DIRECTIONS = "RAS"  # Axes of a canonical volume point right, anterior and superior.
FALSE_NEGATIVE = "false negative"
FALSE_POSITIVE = "false positive"
WRONG_CLASS = "wrong class"
ERRORS = {  # apart for every kind of colour vision, on grey
    FALSE_NEGATIVE: "#FF2D95",
    FALSE_POSITIVE: "#00D5FF",
    WRONG_CLASS: "#FFE000",
}
OUTLINES = "truth and prediction"  # a column
STYLES: dict[str, Any] = {"truth": "-", "prediction": (0, (2, 1.2))}  # Outlines are solid or dashed.
NEUROLOGICAL = "right is right"  # radiologists expect the mirror image
MAP_WIDTH = 2.5  # inches, of the widest map
LEAST_HEIGHT = 0.8  # inches, of one plane
MOST_HEIGHT = 3.4
MOST_CLASSES = 20  # Bound of the folds' figure.
TITLE_LETTERS = 100  # Bound of a line.
CASES_OF_A_BOX = 8  # at least: of fewer, a box from quartile to quartile says little


class CaseDice(NamedTuple):
    """A case's Dice by class, without the classes that it has not, and their mean; None without any class."""

    name: str
    mean: float | None
    classes: Mapping[str, float]
    row: CaseRow

    @property
    def title(self) -> str:
        """Its name, and in brackets why a Dice is 0, if one is."""
        return f"{self.name} ({self.row[NOTE_KEY]})" if self.row.get(NOTE_KEY) else self.name


class Score(NamedTuple):
    """A class's score of one cross-validated method; None where it has no score."""

    folds: tuple[float | None, ...]  # the mean of the cases of each fold
    cases: Mapping[str, float]  # Dice of all folds' cases, pooled, ascending, equals by name.
    mean: float | None  # Mean of the folds' means.
    sd: float | None
    pooled: float | None
    pooled_sd: float | None


def by_class(row: CaseRow, metric: str) -> dict[str, float]:
    """Return a case's scores by class, without the classes that it has not."""
    start = f"{metric}/"
    known = {key: cell for key, cell in row.items() if key.startswith(start) and cell is not None}
    return {key.removeprefix(start): cell for key, cell in known.items()}


def ranked(rows: Iterable[CaseRow]) -> list[CaseDice]:
    """Return the cases from the worst to the best; equals by name; cases without any class last."""
    cases = []
    for row in rows:
        dice = by_class(row, "dice")
        cases.append(CaseDice(row.get("case", ""), mean_of(dice.values()), dice, row))
    return sorted(cases, key=lambda case: (case.mean is None, case.mean, case.name))


def chosen(rows: Iterable[CaseRow]) -> dict[str, CaseDice]:
    """Return the best, the median and the worst case by these words; of two cases no median, of one the word "".

    Of an even number the worse of the middle two is the median. Without any Dice, the first case by name.
    """
    cases = ranked(rows)
    scored = [case for case in cases if case.mean is not None]
    if len(scored) < 2:
        return {"": cases[0]} if cases else {}
    roles = {"best": scored[-1]}
    if len(scored) > 2:
        roles["median"] = scored[(len(scored) - 1) // 2]
    roles["worst"] = scored[0]
    return roles


def dice_by_class(rows: Sequence[CaseRow]) -> dict[str, list[float]]:
    """Return the Dice of all cases that have one, by class."""
    keys = [key for key in (rows[0] if rows else ()) if key.startswith("dice/")]
    return {key.removeprefix("dice/"): numbers_of(rows, key) for key in keys}


def case_table(rows: Sequence[CaseRow]) -> Table:
    """Return one row per case, the worst first: mean Dice, then Dice, IoU and HD95 by class.

    Of many cases these are the worst.
    """
    columns = [key.partition("/") for key in (rows[0] if rows else ())]
    keys = [key for metric in METRICS for key in columns if key[0] == metric][:MOST_COLUMNS]
    cells = []
    for case in ranked(rows)[: MOST_CELLS // max(1, len(keys))]:
        scores = [shown(key[0], case.row.get("".join(key))) for key in keys]
        cells.append([case.title, shown("dice", case.mean), *scores])
    heads = [f"{METRICS[metric][0]} {name}" for metric, _, name in keys]
    return Table(["case", "Dice, mean of classes", *heads], cells)


def shown(metric: str, value: Any) -> str:
    """Return a score as text; "n/a" for None."""
    return "n/a" if value is None else f"{value:,.{METRICS[metric][1]}f}"


def spread(metric: str, mean: float | None, sd: float | None) -> str:
    """Return `0.623±0.041`; without SD the mean, "" without any."""
    if mean is None:
        return ""
    return shown(metric, mean) if sd is None else f"{shown(metric, mean)}±{shown(metric, sd)}"


def score_title(run: RunRecord, what: str = SCORES_TITLE) -> str:
    """Return the title of a table of scores: which weights, whether they are also the best, and on which grid."""
    if not run.last_validation:
        return what
    step = run.last_validation["step"]
    weights = "last checkpoint" if step == run.last_step else "checkpoint"
    if run.settings.get("optim", {}).get("average") is not None:
        weights = "average of the weights"
    also = "; also the best" if run.best_validation.get("step") == step else ""
    grid = f", {OWN_GRIDS}" if run.has_own_grids else f", at {run.spacing}" if run.spacing else ""
    return f"{what}, {weights} (step {step}{also}){grid}"


def score_table(run: RunRecord) -> Table:
    """Return one row per class, means over the cases of scores.csv, else of the last validation; and their mean."""
    if run.scores:
        return _means(run.scores, counts_cases=True)
    return _means([run.last_validation], "val/")


def other_scores(run: RunRecord) -> list[tuple[str, Table]]:
    """Return titles and scores on the network's grid, where the files have others, and of the best weights.

    The best weights are scored by their validation, and left out where they are the last.
    """
    tables = []
    if run.has_own_grids:
        grid = f", {run.spacing}" if run.spacing else ""
        tables.append((f"The same on the network's grid{grid}", _means(run.scores, NETWORK, counts_cases=True)))
    best = run.best_validation
    if best and best["step"] != run.last_validation["step"]:
        where = ", checkpoints/best.pt" if (run.path / "checkpoints" / "best.pt").is_file() else ""
        grid = f", at {run.spacing}" if run.spacing else ""
        tables.append((f"Best checkpoint (step {best['step']}{where}){grid}", _means([best], "val/")))
    return tables


def _means(rows: Sequence[Mapping[str, Any]], prefix: str = "", counts_cases: bool = False) -> Table:
    """Return the means of columns `prefix + metric/class`, one row per class.

    In brackets stands how many cases have an HD95, unless all have one.
    """
    keys = [key.removeprefix(prefix) for key in rows[0] if key.startswith(prefix)]
    scores = {key: [number for number in numbers_of(rows, prefix + key) if isfinite(number)] for key in keys}
    classes = [key.removeprefix("dice/") for key in keys if key.startswith("dice/")]
    metrics = [metric for metric in METRICS if any(key.startswith(f"{metric}/") for key in keys)]
    means = []
    table = []
    for name in classes:
        means.append([mean_of(scores.get(f"{metric}/{name}", ())) for metric in metrics])
        row = [name, *map(shown, metrics, means[-1])]
        if counts_cases:
            cases = len(scores[f"dice/{name}"])
            distances = len(scores.get(f"hd95_mm/{name}", ()))
            if 0 < distances != cases:
                row[-1] += f" ({distances})"
            row.append(str(cases))
        table.append(row)
    if len(classes) > 1:
        of_classes = map(mean_of, zip(*means, strict=True))
        table.append([MEAN_OF_CLASSES, *map(shown, metrics, of_classes), *([""] if counts_cases else [])])
    heads = ["class", *(METRICS[metric][0] for metric in metrics), *(["cases"] if counts_cases else [])]
    return Table(heads, table)


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

    All are (X, Y, Z) on canonical axes. A layer "learned" has its own column. The planes meet in the voxel
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
    heights = [min(max(MAP_WIDTH / max(sizes[:2]) * sizes[up], LEAST_HEIGHT), MOST_HEIGHT) for _, up in AXES]
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
    """Write left of a plane which it is, and on it which way its axes point."""
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
        aside = 0.16 * (np.arange(len(values)) * 0.618 % 1 - 0.5)  # Equal values lie side by side.
        axes.plot(place + aside, sorted(values), "o", color=colour, **point)
        if len(values) >= CASES_OF_A_BOX:
            axes.boxplot([values], positions=[place], medianprops=thin | {"linewidth": 2.2}, **box)
    name_classes(axes, [short_name(name) for name in dice])
    lowest = min((min(values) for values in dice.values() if values), default=0.0)
    bottom = max(0.0, np.floor(10 * lowest - 0.5) / 10)
    axes.set(ylim=(bottom - 0.02, 1.02), ylabel="Dice", title="Dice of each held-out case")
    save_picture(figure, path)


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
                axes.errorbar(x, score.mean, yerr=score.sd, fmt=marker, color=colour, label=label, **plots.POINT)
        shift += apart
    name_classes(axes, [short_name(name) if name else "mean of\nclasses" for name in names])
    axes.set_ylabel("Dice: folds, their mean ± SD")
    plots.finish(figure, path, "right")

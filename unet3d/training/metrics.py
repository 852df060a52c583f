"""Dice, IoU and HD95 of a labelled volume, per foreground class, and their means over many volumes.

A score that does not exist (a class in neither truth nor prediction; the distance to an empty mask) is None, "n/a":
means leave it out, and it never becomes 0 or 1. Ignored voxels do not count. The first HD95 loads MONAI.
"""

import warnings
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from unet3d.base.files import as_csv, from_csv

NETWORK = "network_"  # before the names of columns on the network's grid, where others are on the files' own
Labels = NDArray[np.integer]
Mask = NDArray[np.bool_]


class CaseScore(NamedTuple):
    """Scores of one volume, one entry a foreground class (label values 1..K-1); None is n/a."""

    case: str
    dice: tuple[float | None, ...]
    iou: tuple[float | None, ...]
    hd95_mm: tuple[float | None, ...] = ()  # () where not asked for


def score_case(
    case: str,
    prediction: Labels,
    truth: Labels,
    classes: int,
    spacing: Sequence[float],
    ignore: int | None = None,
    hd95: bool = False,
) -> CaseScore:
    """Scores of `prediction` against `truth`, label maps X Y Z with `classes` classes; `spacing` is in mm.

    Dice, IoU and surfaces leave out voxels where truth is `ignore`; HD95 does not exist where they touch the class.
    Raises ValueError for shapes or label values that do not fit.
    """
    if prediction.shape != truth.shape:
        raise ValueError(f"case {case}: prediction is {prediction.shape} voxels, truth {truth.shape}")
    counts = _confusion(case, prediction, truth, classes, ignore)
    hit = np.diag(counts)[1:]
    missed, false = counts.sum(1)[1:] - hit, counts.sum(0)[1:] - hit
    dice, iou = _ratios(2 * hit, 2 * hit + false + missed), _ratios(hit, hit + false + missed)
    return CaseScore(case, dice, iou, _distances(prediction, truth, classes, spacing, ignore) if hd95 else ())


def _confusion(case: str, prediction: Labels, truth: Labels, classes: int, ignore: int | None) -> NDArray[np.int64]:
    """Voxels by (truth, prediction), classes x classes. One slab at a time: bincount works in 8 bytes a voxel."""
    counts = np.zeros(classes * classes, np.int64)
    for true, predicted in zip(truth, prediction, strict=True):
        if ignore is not None:
            true, predicted = true[true != ignore], predicted[true != ignore]
        for name, labels in (("truth", true), ("prediction", predicted)):
            # a label out of range would be counted as a hit or miss of another class
            if labels.size and (labels.min() < 0 or labels.max() >= classes):
                raise ValueError(f"case {case}: {name} has labels outside 0 to {classes - 1}")
        counts += np.bincount(true.astype(np.intp).ravel() * classes + predicted.ravel(), minlength=classes * classes)
    return counts.reshape(classes, classes)


def _ratios(part: NDArray[np.int64], whole: NDArray[np.int64]) -> tuple[float | None, ...]:
    return tuple(int(p) / int(w) if w else None for p, w in zip(part, whole, strict=True))


def _distances(
    prediction: Labels, truth: Labels, classes: int, spacing: Sequence[float], ignore: int | None
) -> tuple[float | None, ...]:
    from scipy.ndimage import binary_dilation

    seen = np.ones(truth.shape, bool) if ignore is None else truth != ignore
    # a class that reaches the edge ends there because its labels do, which is no surface
    edge = ~seen if seen.all() else seen & binary_dilation(~seen)
    found: list[float | None] = []
    for k in range(1, classes):
        predicted, true = prediction == k, truth == k
        is_cut = ((predicted | true) & edge).any()
        found.append(None if is_cut else hausdorff95(predicted & seen, true & seen, spacing))
    return tuple(found)


def hausdorff95(prediction: Mask, truth: Mask, spacing: Sequence[float]) -> float | None:
    """95th percentile of the distance between surfaces of two masks X Y Z, both ways, in mm; None if one is empty."""
    if not (prediction.any() and truth.any()):  # MONAI then answers 0, NaN or infinity, and 0 would read as perfect
        return None
    import torch
    from monai.metrics.utils import get_edge_surface_distance
    from scipy.ndimage import find_objects

    if truth.shape.count(1) == 1:  # a slice: in 3D each of its voxels would count as surface
        axis = truth.shape.index(1)
        prediction, truth = prediction.squeeze(axis), truth.squeeze(axis)
        spacing = [*spacing[:axis], *spacing[axis + 1 :]]
    (found,) = find_objects((prediction | truth).view(np.uint8))
    box = tuple(slice(max(side.start - 1, 0), side.stop + 1) for side in found)  # what lies outside only costs time
    pair = [torch.from_numpy(np.ascontiguousarray(mask[box])) for mask in (prediction, truth)]
    with warnings.catch_warnings(action="ignore", category=FutureWarning):  # MONAI 1.6.1 deprecates its own call
        _, distances, _ = get_edge_surface_distance(*pair, spacing=list(map(float, spacing)), symmetric=True)
    return float(max(np.percentile(distance, 95) for distance in distances))  # torch's quantile takes 2^24 values


def summarise(scores: Sequence[CaseScore], class_names: Sequence[str]) -> dict[str, float | None]:
    """Means over the cases by metric key; `class_names` begins with background.

    `val/dice_mean` and `val/iou_mean` are means of the classes' means. HD95 has keys if any case has it.
    """
    means = {key: mean_of(values) for key, values in _columns(scores, class_names).items()}
    summary: dict[str, float | None] = {}
    for metric in ("dice", "iou", "hd95_mm"):
        of_classes = {f"val/{key}": mean for key, mean in means.items() if key.startswith(f"{metric}/")}
        if metric != "hd95_mm":
            summary[f"val/{metric}_mean"] = mean_of(of_classes.values())
        summary |= of_classes
    return summary


def mean_of(values: Iterable[float | None]) -> float | None:
    """Mean of the values that exist; None if none does."""
    existing = [value for value in values if value is not None]
    return fmean(existing) if existing else None


def csv_text(scores: Sequence[CaseScore], class_names: Sequence[str]) -> str:
    """One row a case: case, dice/<class>, iou/<class>, hd95_mm/<class> (if asked for); n/a is an empty cell."""
    columns = _columns(scores, class_names)
    rows = ([score.case, *(values[row] for values in columns.values())] for row, score in enumerate(scores))
    return as_csv(["case", *columns], rows)


def both_csv_text(scores: Sequence[CaseScore], class_names: Sequence[str], on_network_grid: str) -> str:
    """The text of `csv_text` for scores on the files' own grids, followed by those of a text on the network's grid.

    The columns of these begin with `network_`, also where `on_network_grid` has been made by this function.
    """
    rows = from_csv(on_network_grid)
    head = [key for key in (rows[0] if rows else ()) if key != "case"]
    sources = [key for key in head if key.startswith(NETWORK)] or head
    others = {row.get("case"): [row.get(key) for key in sources] for row in rows}
    columns = _columns(scores, class_names)
    found = []
    for row, score in enumerate(scores):
        own = [values[row] for values in columns.values()]
        found.append([score.case, *own, *others.get(score.case, [None] * len(sources))])
    return as_csv(["case", *columns, *(NETWORK + key.removeprefix(NETWORK) for key in sources)], found)


def _columns(scores: Sequence[CaseScore], class_names: Sequence[str]) -> dict[str, list[float | None]]:
    """One value a case for each "metric/class"; HD95 only if any case has it."""
    metrics = ["dice", "iou"] + ["hd95_mm"] * any(score.hd95_mm for score in scores)
    return {
        f"{metric}/{name}": [values[k] if (values := getattr(score, metric)) else None for score in scores]
        for metric in metrics
        for k, name in enumerate(class_names[1:])
    }

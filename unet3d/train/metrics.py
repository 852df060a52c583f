"""Dice, IoU and HD95 of a labelled volume, per foreground class, and what they come to over many volumes.

A score that does not exist (a class in neither truth nor prediction; the distance to an empty mask) is None, "n/a": it
is left out of every mean and never becomes 0 or 1. Ignored voxels count for nothing. The first HD95 loads MONAI.
"""

import csv
import io
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

Labels = NDArray[np.integer]


Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class CaseScore:
    """Scores of one volume, one entry a foreground class (label values 1..K-1); None is n/a."""

    case: str
    dice: tuple[float | None, ...]
    iou: tuple[float | None, ...]
    hd95_mm: tuple[float | None, ...] = ()
    """95th percentile of the distance between the surfaces (mm); () where not asked for."""


def score_case(
    case: str,
    prediction: Labels,
    truth: Labels,
    classes: int,
    spacing: Sequence[float],
    ignore: int | None = None,
    hd95: bool = False,
) -> CaseScore:
    """Scores of `prediction` against `truth`, label maps (X, Y, Z), over `classes` classes with background.

    `spacing` is the voxel's size along X, Y, Z in mm. Voxels where truth is `ignore` are left out of Dice, IoU and
    surfaces; HD95 does not exist where they touch the class. Raises ValueError for shapes or label values that do not
    fit.
    """
    if prediction.shape != truth.shape:
        raise ValueError(f"case {case}: prediction is {prediction.shape} voxels, truth {truth.shape}")
    counts = _confusion(case, prediction, truth, classes, ignore)
    hit = np.diag(counts)[1:]
    missed, false = counts.sum(1)[1:] - hit, counts.sum(0)[1:] - hit
    return CaseScore(
        case,
        dice=_ratios(2 * hit, 2 * hit + false + missed),
        iou=_ratios(hit, hit + false + missed),
        hd95_mm=_distances(prediction, truth, classes, spacing, ignore) if hd95 else (),
    )


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
    pairs = ((prediction == k, truth == k) for k in range(1, classes))
    if ignore is None or (seen := truth != ignore).all():
        return tuple(hausdorff95(*pair, spacing) for pair in pairs)
    from scipy.ndimage import binary_dilation

    edge = seen & binary_dilation(~seen)  # a class that reaches it ends where its labels do, not at its surface

    def distance(predicted: Mask, true: Mask) -> float | None:
        cut = ((predicted | true) & edge).any()
        return None if cut else hausdorff95(predicted & seen, true & seen, spacing)

    return tuple(distance(*pair) for pair in pairs)


def hausdorff95(prediction: Mask, truth: Mask, spacing: Sequence[float]) -> float | None:
    """95th percentile of the distance between the surfaces of two masks (X, Y, Z), both ways, in mm.

    None if a mask is empty: MONAI then answers 0, NaN or infinity, and 0 would read as perfect.
    """
    if not (prediction.any() and truth.any()):
        return None
    import torch
    from monai.metrics.utils import get_edge_surface_distance

    long = [axis for axis, length in enumerate(truth.shape) if length > 1]
    if len(long) == 2:  # a slice: in 3D each of its voxels would count as surface
        flat = tuple(slice(None) if axis in long else 0 for axis in range(3))
        prediction, truth, spacing = prediction[flat], truth[flat], [spacing[axis] for axis in long]
    box = _box(prediction | truth)
    pair = [torch.from_numpy(np.ascontiguousarray(mask[box])) for mask in (prediction, truth)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # MONAI 1.6.1 calls itself with an argument it deprecates
        _, distances, _ = get_edge_surface_distance(*pair, spacing=list(map(float, spacing)), symmetric=True)
    return float(max(np.percentile(distance, 95) for distance in distances))  # torch's quantile takes 2^24 values


def _box(mask: Mask) -> tuple[slice, ...]:
    """Bounding box of a mask with voxels, one voxel wider: what lies outside moves no surface, only costs time."""
    axes = range(mask.ndim)
    found = [np.flatnonzero(mask.any(axis=tuple(a for a in axes if a != axis))) for axis in axes]
    return tuple(slice(max(int(at[0]) - 1, 0), int(at[-1]) + 2) for at in found)


def summarise(scores: Sequence[CaseScore], class_names: Sequence[str]) -> dict[str, float | None]:
    """Means over the cases where a score exists, by metric key; `class_names` begins with background.

    `val/dice_mean` and `val/iou_mean` are means over the classes' means, `val/hd95_mm/<class>` is there if any case
    was asked for it.
    """
    summary: dict[str, float | None] = {}
    for name, columns in _columns(scores, class_names).items():
        means = {key: mean_of(values) for key, values in columns.items()}
        if name != "hd95_mm":
            summary[f"val/{name}_mean"] = mean_of(means.values())
        summary |= {f"val/{key}": mean for key, mean in means.items()}
    return summary


def mean_of(values: Iterable[float | None]) -> float | None:
    """Mean of what is there; None of nothing."""
    there = [value for value in values if value is not None]
    return fmean(there) if there else None


def csv_text(scores: Sequence[CaseScore], class_names: Sequence[str]) -> str:
    """One row a case: case, dice/<class>, iou/<class>, hd95_mm/<class> (if asked for); n/a is an empty cell."""
    columns = {key: values for group in _columns(scores, class_names).values() for key, values in group.items()}
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(["case", *columns])
    for row, score in enumerate(scores):
        writer.writerow([score.case, *(values[row] for values in columns.values())])
    return text.getvalue()


def _columns(scores: Sequence[CaseScore], class_names: Sequence[str]) -> dict[str, dict[str, list[float | None]]]:
    """metric -> "metric/class" -> one value a case."""
    metrics = ["dice", "iou"] + ["hd95_mm"] * any(score.hd95_mm for score in scores)
    columns: dict[str, dict[str, list[float | None]]] = {}
    for metric in metrics:
        rows = [getattr(score, metric) or (None,) * (len(class_names) - 1) for score in scores]
        columns[metric] = {f"{metric}/{name}": [row[k] for row in rows] for k, name in enumerate(class_names[1:])}
    return columns

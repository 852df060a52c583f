"""Dice, IoU and HD95 of a labelled volume, per foreground class, and their means over many volumes.

A score that does not exist (a class in neither truth nor prediction; the distance to an empty mask) is None, "n/a":
means leave it out, and it never becomes 0 or 1. Ignored voxels do not count. The first HD95 loads MONAI.
"""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from unet3d.base.files import as_csv, from_csv
from unet3d.base.types import Regions

NOTE_KEY = "note"  # the name of the column that says why a score is 0
NETWORK = "network_"  # before the names of columns on the network's grid, where others are on the files' own
Labels = NDArray[np.integer]
Mask = NDArray[np.bool_]


class CaseScore(NamedTuple):
    """The scores of one volume, one entry per foreground class (label values 1..K-1); None is n/a."""

    case: str
    dice: tuple[float | None, ...]
    iou: tuple[float | None, ...]
    hd95_mm: tuple[float | None, ...] = ()  # () where not asked for
    loss: float | None = None  # Loss of the case's class probabilities.
    is_absent: tuple[bool, ...] = ()  # Classes that the truth lacks.


def score_case(
    case: str,
    prediction: Labels,
    truth: Labels,
    classes: int,
    spacing: Sequence[float],
    ignore: int | None = None,
    hd95: bool = False,
    regions: Regions | None = None,
) -> CaseScore:
    """Return the scores of `prediction` against `truth`, label maps X Y Z of `classes` labels; `spacing` is in mm.

    Each label but 0 is scored; with `regions`, each of these, whose voxels have any of its labels.
    Dice, IoU and surfaces leave out voxels where truth is `ignore`; HD95 does not exist where they touch the class.
    Raises ValueError for shapes or label values that do not fit.
    """
    if prediction.shape != truth.shape:
        raise ValueError(f"case {case}: prediction is {prediction.shape} voxels, truth {truth.shape}")
    counts = _confusion(case, prediction, truth, classes, ignore)
    labels_of: Sequence[Sequence[int]] = [(label,) for label in range(1, classes)]
    if regions is not None:
        labels_of = regions.labels
    table = np.array([[label in labels for label in range(classes)] for labels in labels_of], np.int64)
    hits = np.einsum("il,lm,im->i", table, counts, table)
    true, predicted = table @ counts.sum(1), table @ counts.sum(0)
    distances: tuple[float | None, ...] = ()
    if hd95:
        distances = _distances(prediction, truth, labels_of, spacing, ignore)
    return CaseScore(
        case,
        dice=_ratios(2 * hits, true + predicted),
        iou=_ratios(hits, true + predicted - hits),
        hd95_mm=distances,
        is_absent=tuple((true == 0).tolist()),
    )


def _confusion(case: str, prediction: Labels, truth: Labels, classes: int, ignore: int | None) -> NDArray[np.int64]:
    """Return the number of voxels by (truth, prediction), classes x classes. Raises ValueError for an odd label.

    It counts one plane at a time, because bincount needs 8 bytes per voxel.
    """
    counts = np.zeros(classes * classes, np.int64)
    for true, predicted in zip(truth, prediction, strict=True):
        if ignore is not None:
            is_labelled = true != ignore
            true = true[is_labelled]
            predicted = predicted[is_labelled]
        # A label outside would count as a hit or miss of another class.
        for name, labels in (("truth", true), ("prediction", predicted)):
            if labels.size and (labels.min() < 0 or labels.max() >= classes):
                raise ValueError(f"case {case}: {name} has labels outside 0 to {classes - 1}")
        pairs = true.astype(np.intp).ravel() * classes + predicted.ravel()
        counts += np.bincount(pairs, minlength=classes * classes)
    return counts.reshape(classes, classes)


def _ratios(parts: NDArray[np.int64], wholes: NDArray[np.int64]) -> tuple[float | None, ...]:
    """Return part / whole of each class, None where whole is 0."""
    pairs = zip(parts.tolist(), wholes.tolist(), strict=True)
    return tuple(part / whole if whole else None for part, whole in pairs)


def _distances(
    prediction: Labels,
    truth: Labels,
    labels_of: Sequence[Sequence[int]],
    spacing: Sequence[float],
    ignore: int | None,
) -> tuple[float | None, ...]:
    """Return the HD95 in mm of each class, which has one label or several; None where it does not exist.

    A class that reaches ignored voxels ends there because its labels do, which is no surface.
    """
    from scipy.ndimage import binary_dilation

    labelled = np.ones(truth.shape, bool) if ignore is None else truth != ignore
    edge = ~labelled
    if not labelled.all():
        edge = labelled & binary_dilation(~labelled)
    distances: list[float | None] = []
    for labels in labels_of:
        predicted = np.isin(prediction, labels)
        true = np.isin(truth, labels)
        if ((predicted | true) & edge).any():
            distances.append(None)
        else:
            distances.append(hausdorff95(predicted & labelled, true & labelled, spacing))
    return tuple(distances)


def hausdorff95(prediction: Mask, truth: Mask, spacing: Sequence[float]) -> float | None:
    """Return the 95th percentile of the distance between surfaces of two masks X Y Z, both ways, in mm.

    It is None where a mask is empty.
    """
    if not (prediction.any() and truth.any()):  # MONAI then answers 0, NaN or infinity, and 0 would read as perfect
        return None
    import torch
    from monai.metrics.utils import get_edge_surface_distance
    from scipy.ndimage import find_objects

    if truth.shape.count(1) == 1:  # a slice: in 3D each of its voxels would count as surface
        axis = truth.shape.index(1)
        prediction = prediction.squeeze(axis)
        truth = truth.squeeze(axis)
        spacing = [*spacing[:axis], *spacing[axis + 1 :]]
    (bounds,) = find_objects((prediction | truth).view(np.uint8))
    box = tuple(slice(max(side.start - 1, 0), side.stop + 1) for side in bounds)  # voxels outside only cost time
    with warnings.catch_warnings(action="ignore", category=FutureWarning):  # MONAI 1.6.1 deprecates its own call
        _, distances, _ = get_edge_surface_distance(
            torch.from_numpy(np.ascontiguousarray(prediction[box])),
            torch.from_numpy(np.ascontiguousarray(truth[box])),
            spacing=list(map(float, spacing)),
            symmetric=True,
        )
    percentiles = [np.percentile(distance, 95) for distance in distances]  # torch's quantile takes 2^24 values
    return float(max(percentiles))


def summarise(scores: Sequence[CaseScore], class_names: Sequence[str]) -> dict[str, float | None]:
    """Return means over the cases by metric key; `class_names` begins with background.

    `val/dice_mean` and `val/iou_mean` are means of the classes' means. Loss and HD95 have keys if any case has them,
    and HD95 one more a class: how many cases have it.
    """
    summary: dict[str, float | None] = {}
    loss = mean_of(score.loss for score in scores)
    if loss is not None:
        summary["val/loss"] = loss
    for metric, values_of in _by_class(scores, class_names).items():
        means = {f"val/{metric}/{name}": mean_of(values) for name, values in values_of.items()}
        if metric == "hd95_mm":  # A case that misses a class has none, so more misses may lower the mean.
            for name, values in values_of.items():
                summary[f"val/hd95_mm_cases/{name}"] = float(len(values) - values.count(None))
        else:
            summary[f"val/{metric}_mean"] = mean_of(means.values())
        summary |= means
    return summary


def mean_of(values: Iterable[float | None]) -> float | None:
    """Return the mean of the values that are not None; None without any."""
    existing = [value for value in values if value is not None]
    return fmean(existing) if existing else None


def csv_text(
    scores: Sequence[CaseScore],
    class_names: Sequence[str],
    more: Mapping[str, Sequence[object]] | None = None,
) -> str:
    """Return one row per case: case, dice/<class>, iou/<class>, hd95_mm/<class> (if asked for), `more`; n/a is empty.

    Where a score is 0 because the truth has no such class, the last column, note, says so.
    """
    columns: dict[str, Sequence[object]] = {"case": [score.case for score in scores]}
    for metric, values_of in _by_class(scores, class_names).items():
        columns |= {f"{metric}/{name}": values for name, values in values_of.items()}
    columns |= more or {}
    notes = [_note(score, class_names[1:]) for score in scores]
    if any(notes):
        columns[NOTE_KEY] = notes
    return as_csv(list(columns), [list(row) for row in zip(*columns.values(), strict=True)])


def _note(score: CaseScore, names: Sequence[str]) -> str:
    """Return which classes are predicted but not in the truth; "" without any."""
    if score.is_absent and all(score.is_absent) and any(value is not None for value in score.dice):
        return "no foreground in the truth"
    cells = zip(names, score.dice, score.is_absent, strict=False)
    missed = [name for name, value, is_absent in cells if is_absent and value is not None]
    return f"no {', '.join(missed)} in the truth" if missed else ""


def both_csv_text(scores: Sequence[CaseScore], class_names: Sequence[str], on_network_grid: str) -> str:
    """Return the text of `csv_text` for scores on the files' grids, with those on the network's grid.

    The columns on the network's grid begin with `network_`, also where this function has made `on_network_grid`.
    """
    network_rows = from_csv(on_network_grid.splitlines())
    head = [key for key in (network_rows[0] if network_rows else ()) if key not in ("case", NOTE_KEY)]
    sources = [key for key in head if key.startswith(NETWORK)] or head
    network_scores = {row.get("case"): row for row in network_rows}
    on_network = {}
    for key in sources:
        cells = [network_scores.get(score.case, {}).get(key) for score in scores]
        on_network[NETWORK + key.removeprefix(NETWORK)] = cells
    return csv_text(scores, class_names, on_network)


def _by_class(scores: Sequence[CaseScore], class_names: Sequence[str]) -> dict[str, dict[str, list[float | None]]]:
    """Return one value per case for each metric and class; HD95 only if any case has it."""
    by_class: dict[str, dict[str, list[float | None]]] = {}
    for metric in ("dice", "iou", "hd95_mm"):
        of_cases = [getattr(score, metric) for score in scores]
        if metric != "hd95_mm" or any(of_cases):
            by_class[metric] = {
                name: [of_case[index] if of_case else None for of_case in of_cases]
                for index, name in enumerate(class_names[1:])
            }
    return by_class

"""A case as arrays on one grid (RAS+ axes, one spacing, exact labels), and predictions back on the file's grid."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import product
from math import prod
from pathlib import Path
from typing import NamedTuple

import nibabel as nib
import numpy as np
from nibabel.affines import apply_affine, voxel_sizes
from nibabel.orientations import apply_orientation, inv_ornt_aff

from unet3d.base.errors import UserError
from unet3d.base.types import ProbabilityBlock
from unet3d.data import nifti
from unet3d.data.cases import Case
from unet3d.data.labels import Relabel
from unet3d.data.nifti import STRICT, ValidationRules, problem, read_image, read_label

SAME_GRID = 0.01  # largest distance (voxels) between corners that count as equal: headers are rounded to float32
SAME_SPACING = 1e-3  # relative
MM, UNITS = (0, 2), {1: "meter", 3: "micron"}  # 0 is unset, and mm by custom
MAX_GROWTH = 32  # times the stored voxels that a resampled grid may hold: work stays in proportion to the file
Headers = Mapping[Path, nib.Nifti1Image]  # opened files, by path
Scores = Callable[[int, int], np.ndarray]  # of a class, and how many there are: an array (X, Y, Z) to write to
CUBIC, LINEAR = 3, 1  # splines: linear ones blur an image, by how much depends on where the new voxels lie


class Grid(NamedTuple):
    """Where voxels lie: `shape` (X, Y, Z) and `affine` (4, 4), from voxel indices to mm."""

    shape: tuple[int, int, int]
    affine: np.ndarray

    @property
    def spacing(self) -> tuple[float, float, float]:
        """Voxel size along the three axes (mm)."""
        x, y, z = voxel_sizes(self.affine).tolist()
        return x, y, z


class Volume(NamedTuple):
    """A case: `image` float32 (C, X, Y, Z), `label` uint8 or uint16 (X, Y, Z), and where both lie (mm)."""

    case: str
    image: np.ndarray
    label: np.ndarray | None
    affine: np.ndarray
    spacing: tuple[float, float, float]
    replaced: int = 0  # voxels that were NaN or infinite and became 0


def read_volume(
    case: Case,
    classes: int,
    ignore: int | None,
    spacing: Sequence[float] | None,
    rules: ValidationRules = STRICT,
    relabel: Relabel = None,
) -> Volume:
    """The case with RAS+ axes and this `spacing` (mm; None: as stored), its labels checked. Raises UserError."""
    paths = (*case.images, case.label) if case.label else case.images
    opened = {path: nifti.open_image(case.id, path) for path in paths}
    for error in contradictions(case, opened, rules):
        raise error
    first = opened[case.images[0]]
    source, target, axes = canonical_grid(first), target_grid(case, first, spacing), nib.io_orientation(first.affine)
    files, replaced = zip(*(read_image(case.id, path, opened[path], rules) for path in case.images), strict=True)
    channels = (apply_orientation(channel, axes) for file in files for channel in file)
    image = np.stack([_resample(channel, source, target, CUBIC) for channel in channels])
    label = None
    if case.label:
        label = read_label(case.id, case.label, opened[case.label], classes, ignore, relabel)
        label = np.ascontiguousarray(_resample_labels(apply_orientation(label, axes), source, target, ignore))
    return Volume(case.id, np.ascontiguousarray(image), label, target.affine, target.spacing, sum(replaced))


def read_label_map(case: Case, path: Path, values: Sequence[int], spacing: Sequence[float] | None) -> np.ndarray:
    """A predicted label map of the case (X, Y, Z) on the grid of `read_volume`. Raises UserError.

    `values` are those of the classes in the file.
    """
    image = nifti.open_image(case.id, path)
    label = apply_orientation(read_written(case, path, values), nib.io_orientation(image.affine))
    target = target_grid(case, image, spacing)
    return np.ascontiguousarray(_resample_labels(label, canonical_grid(image), target, None))


def read_written(case: Case, path: Path, values: Sequence[int]) -> np.ndarray:
    """The classes (X, Y, Z) in a predicted label map, in the file's axes and with these values. Raises UserError."""
    own = None if [*values] == [*range(len(values))] else {value: number for number, value in enumerate(values)}
    return read_label(case.id, path, nifti.open_image(case.id, path), len(values), None, own)


def read_truth(
    case: Case, classes: int, ignore: int | None, relabel: Relabel
) -> tuple[np.ndarray, tuple[float, float, float]]:
    """The labels (X, Y, Z) of a case as they lie in its files, and the spacing along these axes. Raises UserError."""
    assert case.label is not None, case.id
    label = read_label(case.id, case.label, nifti.open_image(case.id, case.label), classes, ignore, relabel)
    x, y, z = voxel_sizes(nifti.open_image(case.id, case.images[0]).affine).tolist()
    return label, (x, y, z)


def with_values(labels: np.ndarray, values: Sequence[int] | None) -> np.ndarray:
    """Classes as the values that are written for them; None: their numbers."""
    if values is None or [*values] == [*range(len(values))]:
        return labels
    found: np.ndarray = np.array(values, np.min_scalar_type(max(values)))[labels]
    return found


def is_resampled(case: Case, spacing: Sequence[float] | None) -> bool:
    """Whether the network sees the case on another grid than its file's, whatever their axes. Raises UserError."""
    if spacing is None:
        return False
    image = nifti.open_image(case.id, case.images[0])
    return not _is_same(target_grid(case, image, spacing), canonical_grid(image))


class ArgmaxCollector:
    """The likeliest class of each voxel, the first in a tie, noted as strips pass on their way to others."""

    def __init__(self, strips: Iterator[ProbabilityBlock]) -> None:
        self._strips, self._labels = strips, np.empty(0)
        self._error: Exception | None = None

    def __iter__(self) -> Iterator[ProbabilityBlock]:
        """The strips that have not passed yet."""
        try:
            for strip in self._strips:
                if not self._labels.size:
                    self._labels = np.zeros(strip.sizes, np.min_scalar_type(len(strip.probabilities) - 1))
                self._labels[strip.box] = _likeliest(enumerate(strip.probabilities.numpy()))
                yield strip
        except Exception as error:
            self._error = error
            raise

    def whole(self) -> np.ndarray:
        """Labels X Y Z, once all strips have passed. Raises what has ended them early, also where others caught it."""
        for _ in self:
            pass
        if self._error is not None:
            raise self._error
        return self._labels


def to_original(
    strips: Iterable[ProbabilityBlock], case: Case, spacing: Sequence[float] | None, open_scores: Scores | None = None
) -> np.ndarray:
    """The likeliest class of each voxel of the case's first image, in that file's axes: uint8 or uint16 (X, Y, Z).

    The strips lie on the grid of `read_volume` at this `spacing`. Probabilities in the file's axes are written to what
    `open_scores` gives, if there is one; it is called for each class of each strip. Raises UserError.
    """
    image = nifti.open_image(case.id, case.images[0])
    source, target = target_grid(case, image, spacing), canonical_grid(image)
    axes, splines = nib.io_orientation(image.affine), None if _is_same(source, target) else _Splines(source, target)
    labels = np.empty(0)
    for strip in strips:
        if strip.sizes != source.shape:
            raise problem(case.id, case.images[0], "has another size than when it was read; restore the file")
        if not labels.size:
            labels = np.zeros(image.shape[:3], np.min_scalar_type(len(strip.probabilities) - 1))
        box, maps = splines.resampled(strip) if splines else (strip.box, iter(strip.probabilities.numpy()))
        if open_scores:
            maps = _written(maps, open_scores, axes, box, len(strip.probabilities))
        apply_orientation(labels, axes)[box] = _likeliest(enumerate(maps))  # a view
    return labels


def _written(
    maps: Iterable[np.ndarray], open_scores: Scores, axes: np.ndarray, box: tuple[slice, ...], classes: int
) -> Iterator[np.ndarray]:
    for label, found in enumerate(maps):
        apply_orientation(open_scores(label, classes), axes)[box] = found
        yield found


class _Splines:
    """Strips on a grid with the same axes, by linear splines; edges continue. Float64, so that ties stay ties.

    A strip completes the new voxels between its own and those before, of which it keeps the last plane and row.
    """

    def __init__(self, source: Grid, target: Grid) -> None:
        matrix = np.linalg.inv(source.affine) @ target.affine
        self._axes = []  # for each: the voxel after each new one, and its share
        for axis, (size, new) in enumerate(zip(source.shape, target.shape, strict=True)):
            at = (matrix[axis, axis] * np.arange(new) + matrix[axis, 3]).clip(0, size - 1)
            after = np.minimum(at.astype(int) + 1, size - 1)
            self._axes.append((after, at - np.maximum(after - 1, 0)))
        self._planes, self._rows = dict[int, np.ndarray](), dict[int, np.ndarray]()  # by class

    def resampled(self, strip: ProbabilityBlock) -> tuple[tuple[slice, ...], Iterator[np.ndarray]]:
        """The box of new voxels that the strip completes, and their maps, all of which are to be taken."""
        ranges = (after.searchsorted((at.start, at.stop)) for (after, _), at in zip(self._axes, strip.box, strict=True))
        box = tuple(slice(first, last) for first, last in ranges)
        return box, (self._at(box, self._joined(label, strip), strip) for label in range(len(strip.probabilities)))

    def _joined(self, label: int, strip: ProbabilityBlock) -> np.ndarray:
        """A class's map of the strip, behind the plane and the row before it."""
        slab, row, _ = strip.axes
        found = strip.probabilities[label].numpy()
        if label not in self._planes:
            self._planes[label] = np.empty([1 if axis == slab else n for axis, n in enumerate(strip.sizes)], np.float32)
        plane = self._planes[label][*(slice(None) if axis == slab else at for axis, at in enumerate(strip.box))]
        joined = np.concatenate([plane, found], slab) if strip.corner[slab] else found
        plane[...] = found.take([-1], slab)
        joined = np.concatenate([self._rows[label], joined], row) if strip.corner[row] else joined
        self._rows[label] = joined.take([-1], row)
        return joined

    def _at(self, box: tuple[slice, ...], found: np.ndarray, strip: ProbabilityBlock) -> np.ndarray:
        for axis, (after, share) in enumerate(self._axes):
            behind = after[box[axis]] - max(strip.corner[axis] - 1, 0)
            part = share[box[axis]].reshape([-1 if other == axis else 1 for other in range(3)])
            found = found.take(np.maximum(behind - 1, 0), axis) * (1 - part) + found.take(behind, axis) * part
        return found.astype(np.float32)


def contradictions(case: Case, opened: Headers, rules: ValidationRules = STRICT) -> Iterator[UserError]:
    """What does not fit among those files of the case that could be opened; all must lie on the first image's grid."""
    first = opened.get(case.images[0])
    for path, image in opened.items():
        if path == case.label and nifti.channels(image) > 1:
            what = f"has shape {image.shape}; a label map is X,Y,Z with one integer a voxel, e.g. the one-hot's argmax"
            yield problem(case.id, path, what)
        elif len(case.images) > 1 and nifti.channels(image) > 1:
            yield problem(case.id, path, f"has shape {image.shape}, but is one channel of several")
        if first is not None and (misfit := _misfit(first, image, rules)):
            yield problem(case.id, path, f"{misfit} {case.images[0]}; resample it onto the image's grid")


def foreign_units(case: Case, opened: Headers) -> list[UserError]:
    """A line for the first file of the case whose lengths are not in mm, if there is one: they are taken for mm."""
    codes = ((path, int(image.header["xyzt_units"]) % 8) for path, image in opened.items())
    found = ((path, UNITS.get(code, f"a unit of code {code}")) for path, code in codes if code not in MM)
    what = "they are taken for mm, in data.spacing and in distances"
    return [problem(case.id, path, f"lengths are in {unit}; {what}") for path, unit in found][:1]


def _misfit(first: nib.Nifti1Image, image: nib.Nifti1Image, rules: ValidationRules) -> str | None:
    size = first.shape[:3]
    if image.shape[:3] != size:
        return f"has {image.shape[:3]} voxels, not the {size} of"
    if rules.affine:
        return None
    corners = np.array(list(product(*((0, n - 1) for n in size))))
    matrix = np.linalg.inv(first.affine) @ image.affine
    distance = np.abs(apply_affine(matrix, corners) - corners).max()
    return f"lies up to {distance:.3g} voxels away from" if distance > SAME_GRID else None


def canonical_grid(image: nib.Nifti1Image) -> Grid:
    """The grid of the file's voxels, axes permuted and flipped to run closest to right, anterior, superior (RAS+)."""
    orientation, size = nib.io_orientation(image.affine), image.shape[:3]
    x, y, z = (size[axis] for axis in np.argsort(orientation[:, 0]))
    return Grid((x, y, z), image.affine @ inv_ornt_aff(orientation, size))


def target_grid(case: Case, image: nib.Nifti1Image, spacing: Sequence[float] | None) -> Grid:
    """The grid that the network sees: as stored, or of this spacing (mm) about the same centre. Raises UserError."""
    grid = canonical_grid(image)
    ratio = np.asarray(spacing or grid.spacing) / grid.spacing
    if np.allclose(ratio, 1, rtol=0, atol=SAME_SPACING):
        return grid
    x, y, z = (max(1, round(n / r)) for n, r in zip(grid.shape, ratio, strict=True))
    voxels, stored = prod((x, y, z)), prod(grid.shape)
    if voxels > min(nifti.MAX_VOXELS, MAX_GROWTH * stored):
        what = f"needs {x}x{y}x{z} voxels at data.spacing={spacing} mm; widen it: {voxels / stored:,.0f} times the"
        limit = f"at most {MAX_GROWTH} times, and {nifti.MAX_VOXELS:,} voxels"
        raise problem(case.id, case.images[0], f"{what} {stored:,} stored, {limit}")
    step = np.diag([*ratio, 1])
    step[:3, 3] = (np.subtract(grid.shape, 1) - ratio * np.subtract((x, y, z), 1)) / 2
    return Grid((x, y, z), grid.affine @ step)


def _resample(array: np.ndarray, source: Grid, target: Grid, order: int) -> np.ndarray:
    """`array` (X, Y, Z) on the target grid by splines of that order, clipped to its range; edges continue."""
    if _is_same(source, target):
        return array
    from scipy import ndimage  # takes a third of a second to load

    matrix = np.linalg.inv(source.affine) @ target.affine
    result: np.ndarray = ndimage.affine_transform(array, matrix, output_shape=target.shape, order=order, mode="nearest")
    return result.clip(array.min(), array.max())


def _resample_labels(label: np.ndarray, source: Grid, target: Grid, ignore: int | None) -> np.ndarray:
    """The label with the largest share of each new voxel's neighbourhood; in a tie the highest, but `ignore` last."""
    if _is_same(source, target):
        return label
    # The nearest voxel's label would lie up to half a voxel beside the image: between two voxels there is no nearest.
    values = sorted(np.unique(label).tolist(), key=lambda value: (value == ignore, -value))
    masks = ((value, (label == value).astype(np.float32)) for value in values)
    shares = ((value, _resample(mask, source, target, LINEAR).round(4)) for value, mask in masks)  # so ties are exact
    return _likeliest(shares).astype(label.dtype)


def _likeliest(scores: Iterable[tuple[int, np.ndarray]]) -> np.ndarray:
    """The label of the highest score, the first in a tie. One label at a time: all scores at once may not fit."""
    ranked = iter(scores)
    label, score = next(ranked)
    labels, best = np.full(score.shape, label, np.uint16), score.copy()
    for label, score in ranked:
        labels[score > best] = label
        np.maximum(best, score, out=best)
    return labels


def _is_same(source: Grid, target: Grid) -> bool:
    return source.shape == target.shape and np.allclose(source.affine, target.affine)

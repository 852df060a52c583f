"""Class probabilities on the network's grid, strip by strip, as label maps on the grid of the case's file."""

from collections.abc import Callable, Iterable, Iterator, Sequence

import nibabel as nib
import numpy as np
from nibabel.orientations import apply_orientation

from unet3d.base.types import ProbabilityBlock, Regions
from unet3d.data import nifti
from unet3d.data.cases import Case
from unet3d.data.grids import Grid, canonical_grid, drawn, likeliest, target_grid
from unet3d.data.nifti import problem

# Called with a class and the number of classes; returns the array (X, Y, Z) for that class's probabilities.
ProbabilityMaps = Callable[[int, int], np.ndarray]
Box = tuple[slice, ...]  # of a volume (X, Y, Z)


class ArgmaxCollector:
    """Iterates over strips unchanged and records the argmax of each voxel (ties: the lowest class).

    With `regions`, it records what these are drawn as.
    """

    def __init__(self, strips: Iterator[ProbabilityBlock], regions: Regions | None = None) -> None:
        self._strips = strips
        self._regions = regions
        self._labels = np.empty(0)
        self._error: Exception | None = None

    def __iter__(self) -> Iterator[ProbabilityBlock]:
        """Yield the strips that have not passed yet."""
        try:
            for strip in self._strips:
                if not self._labels.size:
                    self._labels = _no_labels(strip.sizes, strip, self._regions)
                self._labels[strip.box] = _decided(strip.probabilities.numpy(), self._regions)
                yield strip
        except Exception as error:
            self._error = error
            raise

    def whole(self) -> np.ndarray:
        """Return labels X Y Z, once all strips have passed.

        Raises what has ended them early, also where others caught it.
        """
        for _ in self:
            pass
        if self._error is not None:
            raise self._error
        return self._labels


def _no_labels(shape: tuple[int, ...], strip: ProbabilityBlock, regions: Regions | None) -> np.ndarray:
    """Return zeros of a type that holds the classes of this strip, or the labels of regions."""
    count = len(strip.probabilities) if regions is None else regions.label_count
    return np.zeros(shape, np.min_scalar_type(count - 1))


def _decided(maps: Iterable[np.ndarray], regions: Regions | None) -> np.ndarray:
    """Return the likeliest class of each voxel, or the label that its regions are drawn as."""
    return likeliest(enumerate(maps)) if regions is None else drawn(zip(regions.drawn, maps, strict=True))


def to_original(
    strips: Iterable[ProbabilityBlock],
    case: Case,
    spacing: Sequence[float] | None,
    open_scores: ProbabilityMaps | None = None,
    image: nib.Nifti1Image | None = None,
    regions: Regions | None = None,
) -> np.ndarray:
    """Return the likeliest class of each voxel of the case's first image, in that file's axes; of regions, the drawing.

    The strips lie on the grid of `read_volume` at this `spacing`. Labels are uint8 or uint16 (X, Y, Z). Probabilities
    in the file's axes are written to what `open_scores` returns, if it is given; it is called for each class of each
    strip. `image` is the header of the first image, if it has been read. Raises UserError.
    """
    if image is None:
        image = nifti.open_image(case.id, case.images[0], case.affine)
    source = target_grid(case, image, spacing)
    target = canonical_grid(image)
    axes = nib.io_orientation(image.affine)
    splines = None if source.is_same(target) else _Splines(source, target)
    labels = np.empty(0)
    for strip in strips:
        if strip.sizes != source.shape:
            raise problem(
                case.id,
                case.images[0],
                "has another size than when it was read; restore the file",
            )
        if not labels.size:
            labels = _no_labels(image.shape[:3], strip, regions)
        box = strip.box
        maps = iter(strip.probabilities.numpy())
        if splines is not None:
            box, maps = splines.resampled(strip)
        if open_scores is not None:
            maps = _written(maps, open_scores, axes, box, len(strip.probabilities))
        apply_orientation(labels, axes)[box] = _decided(maps, regions)  # a view
    return labels


def _written(
    maps: Iterable[np.ndarray],
    open_scores: ProbabilityMaps,
    axes: np.ndarray,
    box: Box,
    classes: int,
) -> Iterator[np.ndarray]:
    """Yield maps of the classes in a box, once they are written to the scores, which have these axes."""
    for label, class_map in enumerate(maps):
        apply_orientation(open_scores(label, classes), axes)[box] = class_map
        yield class_map


class _Splines:
    """Strips on a grid with the same axes, by linear splines; edges continue. Float64, so that ties stay ties.

    A strip completes the new voxels between its own and those before, of which it keeps the last plane and row.
    """

    def __init__(self, source: Grid, target: Grid) -> None:
        matrix = np.linalg.inv(source.affine) @ target.affine
        self._axes = list[tuple[np.ndarray, np.ndarray]]()  # for each: the voxel after each new one, and its share
        for axis, (size, new) in enumerate(zip(source.shape, target.shape, strict=True)):
            place = matrix[axis, axis] * np.arange(new) + matrix[axis, 3]
            place = place.clip(0, size - 1)
            after = np.minimum(place.astype(int) + 1, size - 1)
            share = place - np.maximum(after - 1, 0)
            self._axes.append((after, share))
        self._planes = dict[int, np.ndarray]()  # the last plane of each class
        self._rows = dict[int, np.ndarray]()

    def resampled(self, strip: ProbabilityBlock) -> tuple[Box, Iterator[np.ndarray]]:
        """Return the box of new voxels that the strip completes, and their maps, all of which are to be taken."""
        box = tuple(
            slice(*after.searchsorted((part.start, part.stop)))
            for (after, _), part in zip(self._axes, strip.box, strict=True)
        )
        classes = range(len(strip.probabilities))
        return box, (self._interpolated(box, self._joined(label, strip), strip) for label in classes)

    def _joined(self, label: int, strip: ProbabilityBlock) -> np.ndarray:
        """Return a class's map of the strip, behind the plane and the row before it."""
        slab, row, _ = strip.axes
        class_map = strip.probabilities[label].numpy()
        if label not in self._planes:
            shape = list(strip.sizes)
            shape[slab] = 1
            self._planes[label] = np.empty(shape, np.float32)
        index = list(strip.box)
        index[slab] = slice(None)
        plane = self._planes[label][tuple(index)]
        joined = class_map
        if strip.corner[slab]:
            joined = np.concatenate([plane, joined], slab)
        plane[...] = class_map.take([-1], slab)
        if strip.corner[row]:
            joined = np.concatenate([self._rows[label], joined], row)
        self._rows[label] = joined.take([-1], row)
        return joined

    def _interpolated(self, box: Box, values: np.ndarray, strip: ProbabilityBlock) -> np.ndarray:
        """Return the values of the strip's voxels at the new voxels of the box, float32."""
        for axis, (after, share) in enumerate(self._axes):
            behind = after[box[axis]] - max(strip.corner[axis] - 1, 0)
            shape = [1, 1, 1]
            shape[axis] = -1
            part = share[box[axis]].reshape(shape)
            before = values.take(np.maximum(behind - 1, 0), axis)
            values = before * (1 - part) + values.take(behind, axis) * part
        return values.astype(np.float32)

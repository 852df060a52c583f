"""A case as arrays on one grid, with RAS+ axes, one spacing and exact labels; and label maps: each voxel is a class.

Also where voxels lie: the grid of a file, the one that the network sees, and resampling between them.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import product
from math import prod
from pathlib import Path
from typing import NamedTuple

import nibabel as nib
import numpy as np
from nibabel.affines import apply_affine, voxel_sizes
from nibabel.arrayproxy import ArrayProxy
from nibabel.orientations import apply_orientation, inv_ornt_aff

from unet3d.base.errors import UserError
from unet3d.base.types import THRESHOLD
from unet3d.config.schema import Data
from unet3d.data import nifti
from unet3d.data.cases import Case, DatasetInfo
from unet3d.data.labels import Relabel, WrongLabels, options_for, wrong_labels
from unet3d.data.nifti import FORMS, MAX_VOXELS, OpenFile, affine_fault, affines_of, channels, problem, read_image

SAME_GRID = 0.01  # largest distance (voxels) between corners that count as equal: headers are rounded to float32
SAME_SPACING = 1e-3  # relative
MAX_GROWTH = 32  # times the stored voxels that a resampled grid may hold: work stays in proportion to the file
SHARE_DIGITS = 4  # Shares of labels are rounded, so that ties are exact.
CUBIC = 3  # splines of images: linear ones blur, by how much depends on where the new voxels lie
LINEAR = 1
Headers = Mapping[Path, nib.Nifti1Image]  # headers of files, by path
ROUNDING = 1e-6  # float32's relative rounding of a scaled label
QUANTUM = 1e-3  # the largest rounding of a label to a file's integers
LABELS_LISTED = 5  # unknown labels in a message


class Grid(NamedTuple):
    """The place of voxels: `shape` (X, Y, Z) and `affine` (4, 4), from voxel indices to mm."""

    shape: tuple[int, int, int]
    affine: np.ndarray

    @property
    def spacing(self) -> tuple[float, float, float]:
        """Voxel size along the three axes (mm)."""
        x, y, z = voxel_sizes(self.affine).tolist()
        return x, y, z

    def is_same(self, other: "Grid") -> bool:
        """Return whether the voxels of both grids are the same."""
        return self.shape == other.shape and np.allclose(self.affine, other.affine)

    def distance(self, other: "Grid") -> float:
        """Return how far, in voxels of this grid, its corners lie from the other's; infinite for another size."""
        if self.shape != other.shape:
            return np.inf
        corners = np.array(list(product(*((0, n - 1) for n in self.shape))))
        matrix = np.linalg.inv(self.affine) @ other.affine
        return float(np.abs(apply_affine(matrix, corners) - corners).max())


def canonical_grid(image: nib.Nifti1Image) -> Grid:
    """Return the grid of the file's voxels with axes that run closest to right, anterior, superior (RAS+)."""
    orientation = nib.io_orientation(image.affine)
    size = image.shape[:3]
    x, y, z = (size[axis] for axis in np.argsort(orientation[:, 0]))
    return Grid((x, y, z), image.affine @ inv_ornt_aff(orientation, size))


def target_grid(case: Case, image: nib.Nifti1Image, spacing: Sequence[float] | None) -> Grid:
    """Return the grid that the network sees: as stored, or of this spacing (mm) about the same centre.

    Raises UserError where it would hold too many voxels.
    """
    grid = canonical_grid(image)
    ratio = np.asarray(spacing or grid.spacing) / grid.spacing
    if np.allclose(ratio, 1, rtol=0, atol=SAME_SPACING):
        return grid
    x, y, z = (max(1, round(n / r)) for n, r in zip(grid.shape, ratio, strict=True))
    voxels = prod((x, y, z))
    stored = prod(grid.shape)
    if voxels > min(MAX_VOXELS, MAX_GROWTH * stored):
        what = f"needs {x}x{y}x{z} voxels at data.spacing={spacing} mm; widen it: {voxels / stored:,.0f} times the"
        limit = f"at most {MAX_GROWTH} times, and {MAX_VOXELS:,} voxels"
        raise problem(case.id, case.images[0], f"{what} {stored:,} stored, {limit}")
    step = np.diag([*ratio, 1])
    step[:3, 3] = (np.subtract(grid.shape, 1) - ratio * np.subtract((x, y, z), 1)) / 2
    return Grid((x, y, z), grid.affine @ step)


def contradictions(case: Case, headers: Headers, accepts_apart: bool = False) -> Iterator[tuple[UserError, bool]]:
    """Yield what does not fit among those files of the case that could be opened, and whether it is accepted.

    All must lie on the first image's grid; with data.affine_check=warn (`accepts_apart`), one of its size may lie
    elsewhere: it is paired with the others voxel by voxel.
    """
    first = headers.get(case.images[0])
    for path, image in headers.items():
        if channels(image) > 1 and path == case.label:
            what = f"has shape {image.shape}; a label map is X,Y,Z with one integer per voxel, as a one-hot's argmax"
            yield problem(case.id, path, what), False
        elif channels(image) > 1 and len(case.images) > 1:
            yield problem(case.id, path, f"has shape {image.shape}, but is one channel of several"), False
        misfit = "" if first is None else _misfit(case, first, image)
        if first is not None and misfit:
            yield problem(case.id, path, misfit), accepts_apart and image.shape[:3] == first.shape[:3]


def _misfit(case: Case, first: nib.Nifti1Image, image: nib.Nifti1Image) -> str:
    """Return how an image differs from the grid of the first, and what helps; "" if it does not differ."""
    path = case.images[0]
    size = first.shape[:3]
    distance = Grid(size, first.affine).distance(Grid(image.shape[:3], image.affine))
    if distance <= SAME_GRID:
        return ""
    axes, axes_of_first = ("".join(nib.aff2axcodes(one.affine)) for one in (image, first))
    if axes != axes_of_first and canonical_grid(first).distance(canonical_grid(image)) <= SAME_GRID:
        what = f"has the grid of {path} with other axes ({axes}, not {axes_of_first})"
        return f"{what}; reorient it to {axes_of_first}, no voxel has to be resampled"
    if image.shape[:3] != size:
        return f"has {image.shape[:3]} voxels, not the {size} of {path}; resample it onto the image's grid"
    what = f"lies up to {distance:.3g} voxels away from {path}"
    for form in FORMS:
        of_both = [affines_of(one.header, form) for one in (first, image)]
        affine, other = (affines[taken] for affines, taken in of_both)
        are_sound = not affine_fault(affine) and not affine_fault(other)
        if are_sound and Grid(size, affine).distance(Grid(size, other)) <= SAME_GRID:
            both = f"but by their {form} both have one grid: add data.affine={form}"
            return f"{what}, {both}, or resample it onto the image's grid"
    return f"{what}; resample it onto the image's grid"


def resample(array: np.ndarray, source: Grid, target: Grid, order: int) -> np.ndarray:
    """Return `array` (X, Y, Z) on the target grid by splines of that order, clipped to its range; edges continue."""
    if source.is_same(target):
        return array
    from scipy import ndimage  # takes a third of a second to load

    matrix = np.linalg.inv(source.affine) @ target.affine
    result: np.ndarray = ndimage.affine_transform(array, matrix, output_shape=target.shape, order=order, mode="nearest")
    return result.clip(array.min(), array.max())


def resample_labels(label: np.ndarray, source: Grid, target: Grid, ignore: int | None) -> np.ndarray:
    """Return the label with the largest share of each new voxel's neighbourhood.

    In a tie the highest, but `ignore` last.
    """
    if source.is_same(target):
        return label
    # The nearest voxel's label would lie up to half a voxel outside the image: between two voxels there is no nearest.
    values = sorted(np.unique(label).tolist(), key=lambda value: (value == ignore, -value))
    masks = ((value, (label == value).astype(np.float32)) for value in values)
    shares = ((value, resample(mask, source, target, LINEAR).round(SHARE_DIGITS)) for value, mask in masks)
    return likeliest(shares).astype(label.dtype)


def likeliest(scores: Iterable[tuple[int, np.ndarray]]) -> np.ndarray:
    """Return the label of the highest score, the first in a tie, uint16.

    Takes one label at a time: all scores at once may not fit into memory.
    """
    ranked = iter(scores)
    label, score = next(ranked)
    labels = np.full(score.shape, label, np.uint16)
    best = score.copy()
    for label, score in ranked:
        labels[score > best] = label
        np.maximum(best, score, out=best)
    return labels


def drawn(probabilities: Iterable[tuple[int, np.ndarray]]) -> np.ndarray:
    """Return the label of the last region that each voxel belongs to, 0 in none, uint16.

    `probabilities` yields a region's label and its map, one region at a time in memory.
    """
    labels = np.zeros((), np.uint16)
    for label, probability in probabilities:
        labels = np.where(probability > THRESHOLD, np.uint16(label), labels)
    return labels


class ImageFiles:
    """The NIfTI files that this process has opened, by their headers.

    The options say which of their faults are accepted: voxels that are not finite (as 0), files that lie apart in
    space.
    """

    def __init__(self, options: Data | None = None) -> None:
        self.options = options or Data()
        self.replaces_nonfinite = self.options.nonfinite == "zero"
        self.accepts_apart = self.options.affine_check == "warn"
        self.headers = dict[Path, nib.Nifti1Image]()  # Images without voxels.

    @contextmanager
    def opened(self, case: Case, path: Path) -> Iterator[OpenFile]:
        """Open a file within. Raises UserError."""
        with nifti.opened(case.id, path, case.affine) as file:
            self.headers[path] = file.image
            yield file

    def header(self, case: Case, path: Path) -> nib.Nifti1Image:
        """Return the header of a file as an image, as it was when the file was opened last. Raises UserError."""
        if path not in self.headers:
            self.headers[path] = nifti.open_image(case.id, path, case.affine)
        return self.headers[path]


def read_grid(case: Case, spacing: Sequence[float] | None) -> Grid:
    """Return the grid that the network sees of a case, from the header of its first image. Raises UserError."""
    return target_grid(case, nifti.open_image(case.id, case.images[0], case.affine), spacing)


class LabelValues(NamedTuple):
    """What label maps may hold: classes below a number and `ignore`; or the keys of `relabel`, which become these."""

    classes: int
    ignore: int | None = None
    relabel: Relabel = None
    names: tuple[str, ...] = ()  # Classes' names, where none is a region.

    @classmethod
    def of_files(cls, dataset: DatasetInfo) -> "LabelValues":
        """Return those of a data set's files."""
        names = dataset.classes if dataset.regions is None else ()
        return cls(dataset.label_count, dataset.ignore, dataset.relabel, names)

    @classmethod
    def written(cls, values: Sequence[int]) -> "LabelValues":
        """Return those of label maps that were written with these values of the classes."""
        if [*values] == [*range(len(values))]:
            return cls(len(values))
        return cls(len(values), relabel={value: number for number, value in enumerate(values)})


class Volume(NamedTuple):
    """A case: `image` float32 (C, X, Y, Z), `label` uint8 or uint16 (X, Y, Z), and the grid of both."""

    case_id: str
    image: np.ndarray
    label: np.ndarray | None
    grid: Grid
    nonfinite_voxels: int = 0  # NaN or infinite voxels that became 0.


def read_volume(
    case: Case, values: LabelValues, spacing: Sequence[float] | None, files: ImageFiles | None = None
) -> Volume:
    """Return the case with RAS+ axes and this `spacing` (mm; None: as stored), its labels checked. Raises UserError."""
    files = files or ImageFiles()
    with ExitStack() as stack:
        opened = {path: stack.enter_context(files.opened(case, path)) for path in case.files}
        headers = {path: file.image for path, file in opened.items()}
        for error, is_accepted in contradictions(case, headers, files.accepts_apart):
            if not is_accepted:
                raise error
        first = headers[case.images[0]]
        source = canonical_grid(first)
        target = target_grid(case, first, spacing)
        axes = nib.io_orientation(first.affine)
        channels = list[np.ndarray]()
        nonfinite_voxels = 0
        for path in case.images:
            voxels, nonfinite = read_image(opened[path], files.replaces_nonfinite)
            nonfinite_voxels += nonfinite
            channels += [resample(apply_orientation(channel, axes), source, target, CUBIC) for channel in voxels]
        label = None
        if case.label is not None:
            stored = read_classes(opened[case.label], values)
            label = on_network_grid(stored, case, first, spacing, values.ignore)
    return Volume(case.id, np.ascontiguousarray(np.stack(channels)), label, target, nonfinite_voxels)


def read_label_map(case: Case, path: Path, values: LabelValues) -> tuple[np.ndarray, nib.Nifti1Image]:
    """Return the classes of a label map of the case, as `read_classes`, and its header. Raises UserError."""
    with nifti.opened(case.id, path, case.affine) as file:
        return read_classes(file, values), file.image


def on_network_grid(
    label: np.ndarray, case: Case, image: nib.Nifti1Image, spacing: Sequence[float] | None, ignore: int | None
) -> np.ndarray:
    """Return a label map (X, Y, Z) that lies as `image` as the network sees it at this spacing. Raises UserError."""
    turned = apply_orientation(label, nib.io_orientation(image.affine))
    target = target_grid(case, image, spacing)
    return np.ascontiguousarray(resample_labels(turned, canonical_grid(image), target, ignore))


def stored_spacing(case: Case) -> tuple[float, float, float]:
    """Return the voxel size (mm) along the axes of the case's first file. Raises UserError."""
    x, y, z = voxel_sizes(nifti.open_image(case.id, case.images[0], case.affine).affine).tolist()
    return x, y, z


def with_values(labels: np.ndarray, values: Sequence[int] | None) -> np.ndarray:
    """Return classes as the values that are written for them; None: their numbers."""
    if values is None or [*values] == [*range(len(values))]:
        return labels
    written: np.ndarray = np.array(values, np.min_scalar_type(max(values)))[labels]
    return written


def read_classes(file: OpenFile, values: LabelValues) -> np.ndarray:
    """Return the classes, uint8 or uint16 (X, Y, Z), of a label map in its file's axes.

    Each voxel is a class or `values.ignore`. Raises WrongLabels, UserError.
    """
    classes, ignore, relabel, _ = values
    array = nifti.read_array(file)
    if not np.issubdtype(array.dtype, np.integer):
        array = _rounded(array, file.image.dataobj)
    kind = np.min_scalar_type(max(classes - 1, ignore or 0))
    if relabel is None:
        label = array
        is_unknown = ~((array >= 0) & (array < classes) & (array == np.rint(array)))
        if ignore is not None:
            is_unknown &= array != ignore
    else:
        label = np.zeros(array.shape, kind)
        is_unknown = np.ones(array.shape, bool)
        for old, new in {**relabel, **({} if ignore is None else {ignore: ignore})}.items():
            label[array == old] = new
            is_unknown[array == old] = False
    if is_unknown.any():
        raise _unknown_labels(file, array, is_unknown, values)
    return label.astype(kind, copy=False)


def _rounded(array: np.ndarray, voxels: ArrayProxy) -> np.ndarray:
    """Return labels that were read as floats, with those that are nearly whole numbers as these.

    255 scaled by 1/255 is not quite 1; nor are floats that nibabel scales to fit the 2^16 values of an integer.
    """
    half_step = abs(voxels.slope) / 2
    tolerance = ROUNDING
    if voxels.dtype.kind in "iu" and half_step < QUANTUM:
        tolerance += half_step
    whole = np.rint(array)
    is_near = np.isclose(array, whole, rtol=ROUNDING, atol=tolerance)
    return np.where(is_near, whole, array)


def _unknown_labels(file: OpenFile, array: np.ndarray, is_unknown: np.ndarray, values: LabelValues) -> WrongLabels:
    """Return the error for the labels of a file that are neither a class nor `ignore`."""
    classes, ignore, relabel, names = values
    stored = np.unique(array)
    unknown = np.unique(array[is_unknown])
    allowed = f"0 to {classes - 1}" if relabel is None else ", ".join(map(str, sorted(relabel)))
    if ignore is not None:
        allowed += f" and {ignore} (ignored)"
    listed = ", ".join(f"{value:g}" for value in unknown[:LABELS_LISTED].tolist())
    labels = frozenset[int]()
    if np.isfinite(unknown).all() and (unknown == np.rint(unknown)).all():
        labels = frozenset(int(value) for value in stored if value not in (0, ignore))
    what = f"{is_unknown.sum()} voxels have the label {listed}; allowed are {allowed}"
    # Of a map, only all files say which class is in none of them.
    options = options_for(labels, classes, None, names) if relabel is None else ()
    remedy = "correct the file" if options else "map them with data.label_map"
    return wrong_labels(f"{file.case_id}: {file.path}: {what}", remedy, options, labels)

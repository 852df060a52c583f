"""Class probabilities as label maps on the grid of the case's file, and these as files, each written whole or not.

Probabilities come strip by strip on the network's grid. Images that Python code holds are cases of temporary files,
and get label maps as it expects them.
"""

import gzip
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import nibabel as nib
import numpy as np
from nibabel.orientations import apply_orientation

from unet3d.base.errors import UserError
from unet3d.base.files import replacing
from unet3d.base.types import ProbabilityBlock, Regions
from unet3d.data.cases import Case
from unet3d.data.nifti import (
    LARGEST,
    SMALLEST,
    affine_fault,
    affines_of,
    is_compressed,
    open_image,
    problem,
    quiet_nibabel,
    stem,
)
from unet3d.data.volume import Grid, canonical_grid, drawn, likeliest, target_grid

BACKGROUND = 0
LEVEL = 6  # Python's own level 9 takes ten times as long on a noisy label map, for a file 5% smaller.
ProbabilityMaps = Callable[[int], np.ndarray]  # called with a class: the array (X, Y, Z) for its probabilities
Box = tuple[slice, ...]  # Part of a volume X Y Z.
ImageLike = Any  # an array, an image of nibabel, a path, or a list of images or paths, one a channel


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
        image = open_image(case.id, case.images[0], case.affine)
    source = target_grid(case, image, spacing)
    target = canonical_grid(image)
    axes = nib.io_orientation(image.affine)
    splines = None if source.is_same(target) else _Splines(source, target)
    labels = np.empty(0)
    for strip in strips:
        if strip.sizes != source.shape:
            raise problem(case.id, case.images[0], "has another size than when it was read; restore the file")
        if not labels.size:
            labels = _no_labels(image.shape[:3], strip, regions)
        box = strip.box
        maps = iter(strip.probabilities.numpy())
        if splines is not None:
            box, maps = splines.resampled(strip)
        if open_scores is not None:
            maps = _written(maps, open_scores, axes, box)
        apply_orientation(labels, axes)[box] = _decided(maps, regions)  # a view
    return labels


def _written(
    maps: Iterable[np.ndarray], open_scores: ProbabilityMaps, axes: np.ndarray, box: Box
) -> Iterator[np.ndarray]:
    """Yield maps of the classes in a box, once they are written to the scores, which have these axes."""
    for label, class_map in enumerate(maps):
        apply_orientation(open_scores(label), axes)[box] = class_map
        yield class_map


class _Splines:
    """Strips on a grid with the same axes, by linear splines; edges continue. Float64, so that ties stay ties.

    A strip completes the new voxels between its own and those before, of which it keeps the last plane and row.
    """

    def __init__(self, source: Grid, target: Grid) -> None:
        matrix = np.linalg.inv(source.affine) @ target.affine
        # For each axis: the voxel after each new one, and its share.
        self._axes = list[tuple[np.ndarray, np.ndarray]]()
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
        joined = class_map = strip.probabilities[label].numpy()
        sizes = [1 if axis == slab else size for axis, size in enumerate(strip.sizes)]
        index = tuple(slice(None) if axis == slab else part for axis, part in enumerate(strip.box))
        plane = self._planes.setdefault(label, np.empty(sizes, np.float32))[index]
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
            part = share[box[axis]].reshape([-1 if other == axis else 1 for other in range(3)])
            before = values.take(np.maximum(behind - 1, 0), axis)
            values = before * (1 - part) + values.take(behind, axis) * part
        return values.astype(np.float32)


def largest_components(labels: np.ndarray, classes: Sequence[int]) -> np.ndarray:
    """Return labels (X, Y, Z) in which each of these classes has its largest component alone.

    Voxels are connected by faces, edges and corners. Of equally large components the first stays. The given array
    does not change.
    """
    if not classes:
        return labels
    from scipy.ndimage import find_objects, generate_binary_structure, label

    cleaned = labels.copy()
    for number, bounds in enumerate(find_objects(labels, max_label=max(classes)), start=1):
        if number in classes and bounds is not None:
            components, _ = label(labels[bounds] == number, generate_binary_structure(3, 3))
            sizes = np.bincount(components.ravel())
            sizes[BACKGROUND] = 0
            cleaned[bounds][(components != BACKGROUND) & (components != sizes.argmax())] = BACKGROUND
    return cleaned


@quiet_nibabel()
def image_like(voxels: np.ndarray, source: nib.Nifti1Image) -> nib.Nifti1Image:
    """Return integer labels as uint8 or uint16, or scores (X, Y, Z, K) as float32, as an image like `source`."""
    assert voxels.shape[:3] == source.shape[:3], f"{voxels.shape} voxels for an image of {source.shape}"
    kind = np.min_scalar_type(int(voxels.max())) if voxels.dtype.kind in "iu" else np.dtype(np.float32)
    return type(source)(voxels.astype(kind), None, _header_like(source, kind))


@quiet_nibabel()
def _header_like(source: nib.Nifti1Image, kind: np.dtype | type) -> nib.Nifti1Header:
    """Return the header of `source` for other values of this type."""
    header = source.header.copy()
    header.extensions.clear()  # their DICOM fields may name the patient
    header.set_slope_inter(1, 0)
    header["cal_min"] = 0  # the display range of intensities
    header["cal_max"] = 0
    header.set_data_dtype(kind)
    return header


@contextmanager
def saving_scores(path: Path, like: nib.Nifti1Image, classes: int) -> Iterator[ProbabilityMaps]:
    """Write float32 scores (X, Y, Z, K) on the grid of the image `like` to `path` (.nii). Raises UserError, OSError.

    Yields `open_scores(label)`, which returns a memory map (X, Y, Z) of that class.
    """
    header = _header_like(like, np.float32)
    shape = like.shape[:3]
    offset = header.single_vox_offset
    header["vox_offset"] = offset
    header.set_data_shape((*shape, classes))
    class_bytes = 4 * prod(shape)
    with replacing(path) as file:
        header.write_to(file)
        file.flush()
        # on a disk that fills later, a write to mapped memory would kill the process
        os.posix_fallocate(file.fileno(), 0, offset + class_bytes * classes)
        yield lambda label: np.memmap(file, header.get_data_dtype(), "r+", offset + class_bytes * label, shape, "F")


@quiet_nibabel()
def save_image(path: Path, image: nib.Nifti1Image) -> None:
    """Write `image` to `path` (.nii or .nii.gz), whole or not at all. Same image, same bytes. Raises OSError."""
    content = image.to_bytes()
    with replacing(path) as file:
        file.write(gzip.compress(content, LEVEL, mtime=0) if is_compressed(path.name) else content)


@contextmanager
def temporary_case(
    image: ImageLike, spacing: Sequence[float] | None, affine: Any = None, channels: int = 1
) -> Iterator[Case]:
    """Yield a case of files: the given ones, or temporary ones of an array or images, for a network of `channels`.

    Raises UserError, in its own words.
    """
    if affine is not None and not isinstance(image, np.ndarray):
        raise UserError("segment: only a NumPy array needs an affine, images and files have their own; leave it out")
    is_list = isinstance(image, list | tuple)
    images = [*image] if is_list else [image]
    if are_paths(image):
        if spacing is not None:
            raise UserError("segment: a file has a spacing of its own; leave out spacing")
        files = tuple(map(Path, images))
        yield Case(stem(files[0]), files, None)
        return
    if is_list and not all(isinstance(one, nib.spatialimages.SpatialImage) for one in images or [None]):
        what = "the paths of files, or images of nibabel, one a channel"
        raise UserError(f"segment: a list holds {what}; stack arrays as C X Y Z")
    with TemporaryDirectory() as folder:
        paths = [Path(folder, f"image_{number:04d}.nii" if is_list else "image.nii") for number in range(len(images))]
        with quiet_nibabel():
            for one, path in zip(images, paths, strict=True):
                nib.save(_as_nifti(one, spacing, affine, channels), path)
        try:
            yield Case("image", tuple(paths), None)
        except UserError as error:
            text = str(error)
            for number, path in enumerate(paths):
                text = text.replace(str(path), f"number {number}, as it was given" if is_list else "as it was given")
            raise UserError(text) from error


def are_paths(image: ImageLike) -> bool:
    """Return whether an image is given by the path of its file, or by those of its channels."""
    paths = image if isinstance(image, list | tuple) else [image]
    return bool(paths) and all(isinstance(path, str | PathLike) for path in paths)


def _as_nifti(image: ImageLike, spacing: Sequence[float] | None, affine: Any, channels: int) -> nib.Nifti1Image:
    """Return an array or an image of nibabel as an image to save. Raises UserError."""
    is_array = isinstance(image, np.ndarray)
    if not is_array and not isinstance(image, nib.spatialimages.SpatialImage):
        what = f"not {type(image).__name__}: give a NumPy array, an image of nibabel or the paths of files"
        raise UserError(f"segment: {what}")
    voxels = image if is_array else image.dataobj
    kind = image.dtype if is_array else image.get_data_dtype()
    if kind.kind not in "buif" or (is_array and image.ndim not in (3, 4)):
        raise UserError(f"segment: give numbers X Y Z, or C X Y Z, not {kind} of shape {image.shape}")
    if np.ma.is_masked(voxels):  # a file of them would show what is below the mask
        raise UserError("segment: some voxels are masked, and would count as what is below; give image.filled(VALUE)")
    if is_array:
        return _nifti(_channels_last(voxels, channels), _affine_of_array(spacing, affine))
    if spacing is not None:
        raise UserError("segment: an image of nibabel has a spacing of its own; leave out spacing")
    if isinstance(image, nib.Nifti1Image) and (nib.is_proxy(voxels) or voxels.dtype == kind):
        return image
    # Saved without a change, an array in memory would be rounded to the type of the header.
    return _nifti(np.asanyarray(voxels), image.affine)


def _channels_last(voxels: np.ndarray, channels: int) -> np.ndarray:
    """Return an array X Y Z or C X Y Z with its channels where a file has them. Raises UserError."""
    if voxels.ndim == 3:
        return voxels
    if len(voxels) != channels and voxels.shape[-1] == 1:
        return voxels[..., 0]  # Reading a file does the same.
    if len(voxels) != channels == voxels.shape[-1]:
        what = f"an array of shape {voxels.shape} has its channels last"
        raise UserError(f"segment: {what}; give C X Y Z: numpy.moveaxis(image, -1, 0)")
    return np.moveaxis(voxels, 0, -1)


def _affine_of_array(spacing: Sequence[float] | None, affine: Any) -> np.ndarray:
    """Return where an array lies, 4 x 4: as its affine says, or with its spacing (mm) and RAS+ axes.

    Raises UserError.
    """
    if affine is not None and spacing is not None:
        raise UserError("segment: an affine holds the spacing; leave out spacing")
    try:
        given = np.array(spacing if affine is None else affine)
    except ValueError:  # rows of several lengths
        given = np.empty(0)
    matrix = given.astype(float) if given.dtype.kind in "buif" else np.empty(0)
    if affine is None:
        if matrix.shape != (3,) or not ((matrix >= SMALLEST) & (matrix <= LARGEST)).all():
            what = f"three numbers from {SMALLEST:g} to {LARGEST:g}, such as (1, 1, 2.5)"
            raise UserError(f"segment: an array needs its affine, or its spacing in mm, {what}, not {spacing}")
        return np.diag([*matrix, 1.0])
    is_affine = matrix.shape == (4, 4) and np.isfinite(matrix).all() and np.array_equal(matrix[3], [0, 0, 0, 1])
    if not is_affine or np.linalg.matrix_rank(matrix) < 4:
        what = "4 x 4 finite numbers that can be inverted, the last row 0 0 0 1"
        raise UserError(f"segment: an affine is {what}, not {given.tolist()}")
    return matrix


def _nifti(voxels: np.ndarray, affine: np.ndarray) -> nib.Nifti1Image:
    """Return an image of these voxels; where NIfTI has no such type, in one that holds their values."""
    kind = voxels.dtype.newbyteorder("=")
    kind = np.dtype({"?": "u1", "e": "f4", "g": "f8"}.get(kind.char, kind))
    return nib.Nifti1Image(voxels.astype(kind), affine, dtype=kind)  # named, nibabel takes 64-bit integers, too


@quiet_nibabel()
def returned(image: ImageLike, voxels: np.ndarray, case: Case) -> np.ndarray | nib.Nifti1Image:
    """Return labels (X, Y, Z) or probabilities (K, X, Y, Z) of a case as an array where an array was given.

    Else as an image X Y Z, or X Y Z K, on the grid of its first file.
    """
    if isinstance(image, np.ndarray):
        return voxels
    source = open_image(case.id, case.images[0], case.affine)
    made = image_like(voxels if voxels.ndim == 3 else np.moveaxis(voxels, 0, -1), source)
    # Its header's affine may be rounded otherwise. Of a named form, the header keeps what the file's says.
    affines, first = affines_of(source.header, "auto")
    affine = source.affine if case.affine == "auto" or affine_fault(affines[first]) else affines[first]
    return type(made)(made.dataobj, affine, made.header)


def no_probabilities(case: Case, classes: int) -> np.ndarray:
    """Return zeros (K, X, Y, Z), float32, for the probabilities of a case on its file's grid. Raises UserError."""
    return np.zeros((classes, *open_image(case.id, case.images[0], case.affine).shape[:3]), np.float32)

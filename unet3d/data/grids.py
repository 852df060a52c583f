"""Grids: the one of a file with RAS+ axes, the one that the network sees, and resampling between them."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from math import prod
from pathlib import Path
from typing import NamedTuple

import nibabel as nib
import numpy as np
from nibabel.affines import apply_affine, voxel_sizes
from nibabel.orientations import inv_ornt_aff

from unet3d.base.errors import UserError
from unet3d.base.types import THRESHOLD
from unet3d.data.cases import Case
from unet3d.data.nifti import FORMS, MAX_VOXELS, affine_fault, affines_of, channels, form_taken, problem

SAME_GRID = 0.01  # largest distance (voxels) between corners that count as equal: headers are rounded to float32
SAME_SPACING = 1e-3  # relative
MAX_GROWTH = 32  # times the stored voxels that a resampled grid may hold: work stays in proportion to the file
SHARE_DIGITS = 4  # to which the shares of labels are rounded, so that ties are exact
CUBIC = 3  # splines of images: linear ones blur, by how much depends on where the new voxels lie
LINEAR = 1
Headers = Mapping[Path, nib.Nifti1Image]  # headers of files, by path


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
    by_form = [affines_of(one.header) for one in (first, image)]
    for form in FORMS:
        affine, other = (affines[form_taken(affines, form)] for affines in by_form)
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
    # The nearest voxel's label would lie up to half a voxel beside the image: between two voxels there is no nearest.
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

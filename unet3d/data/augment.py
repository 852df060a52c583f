"""Random changes to a patch, drawn only from the given generator. Spatial ones are one field and one resampling."""

import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from unet3d.base import process
from unet3d.base.types import IGNORE
from unet3d.config.schema import Augment

if TYPE_CHECKING:
    from monai.transforms import Compose

THIN = 3  # times shorter than the longest axis (nnU-Net's bound): tilted, such a patch would mostly leave its slab
MIN_CONTROL_POINTS = 4  # of a cubic spline


def prepare(options: Augment) -> "Compose | None":
    """Return the changes of intensity; None without any.

    Call it before workers start: they share what it loads, which takes seconds.
    """
    if options.spatial_p:
        import scipy.interpolate
        import scipy.spatial.transform  # noqa: F401
    chances = (options.noise_p, options.blur_p, options.contrast_p, options.gamma_p, options.low_resolution_p)
    return intensities(options) if any(chances) else None


def changed(image: Tensor, changes: "Compose", seed: int) -> Tensor:
    """Return the image C D H W with these changes of intensity, drawn from the seed."""
    from monai.data import get_track_meta, set_track_meta

    before = get_track_meta()  # of the whole process: others use MONAI, too
    set_track_meta(False)
    try:
        changes.set_random_state(seed=seed)
        return torch.as_tensor(changes(image)).float()
    finally:
        set_track_meta(before)


def coordinates(
    centre: np.ndarray, patch: Sequence[int], spacing: Sequence[float], options: Augment, rng: np.random.Generator
) -> Tensor | None:
    """Return where each voxel of the patch lies in the volume, float32 D H W 3 (voxels); None for a plain crop."""
    if rng.random() >= options.spatial_p:
        return None
    matrix = _affine(patch, spacing, options, rng).astype(np.float32)
    axes = [np.arange(n, dtype=np.float32) - (n - 1) / 2 for n in patch]
    grid = np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1)
    field = grid @ matrix.T
    field = field + centre.astype(np.float32)
    if options.elastic:
        field += elastic_field(patch, options.elastic, options.elastic_grid, rng)
    return torch.from_numpy(field)


def _affine(patch: Sequence[int], spacing: Sequence[float], options: Augment, rng: np.random.Generator) -> np.ndarray:
    """Return rotation (in mm: voxels are rarely cubes) and zoom about the patch's centre, 3x3, in voxels."""
    from scipy.spatial.transform import Rotation

    angles = rng.uniform(-options.rotation, options.rotation, 3)
    is_flat = [THIN * length < max(patch) for length in patch]
    tilts_flat = [any(is_flat[:k] + is_flat[k + 1 :]) for k in range(3)]
    angles[tilts_flat] = 0  # a rotation about axis k tilts the two others
    turn = Rotation.from_euler("xyz", angles, degrees=True).as_matrix()
    low, high = options.scaling
    zoom = math.exp(rng.uniform(math.log(low), math.log(high)))  # a zoom by 2 is as likely as one by 1/2
    to_mm = np.diag(np.asarray(spacing, float))
    return np.asarray(np.linalg.inv(to_mm) @ turn @ to_mm / zoom)


def elastic_field(patch: Sequence[int], std: float, grid: int, rng: np.random.Generator) -> np.ndarray:
    """Return smooth random displacements D H W 3 (voxels), after Cicek et al. 2016, section 3: std 4 on a grid of 32.

    Cubic splines through vectors ~ N(0, std) every `grid` voxels.
    """
    splines = [spline_matrix(n, grid) for n in patch]
    points = [spline.shape[1] for spline in splines]
    vectors = rng.normal(0, std, (*points, 3))
    vectors = vectors.astype(np.float32)
    field = np.einsum("ai,bj,ck,ijkd->abcd", *splines, vectors, optimize=True)
    return np.asarray(field)


@functools.lru_cache(maxsize=64)
def spline_matrix(length: int, grid: int) -> np.ndarray:
    """Return the linear map from values at control points, `grid` voxels apart and centred, to `length` voxels."""
    from scipy.interpolate import make_interp_spline

    count = max(MIN_CONTROL_POINTS, math.ceil((length - 1) / grid) + 2)
    points = (np.arange(count) - (count - 1) / 2) * grid + (length - 1) / 2
    spline = make_interp_spline(points, np.eye(count), k=3)
    return np.asarray(spline(np.arange(length)), dtype=np.float32)


def resample(image: Tensor, label: Tensor, field: Tensor, mirror: bool) -> tuple[Tensor, Tensor]:
    """Return image C X Y Z (trilinear) and label X Y Z (nearest) at D H W 3; outside as `crop` has it."""
    classes = _sample(label[None], field, "nearest", outside=IGNORE)[0]
    places = mirrored(field, label.shape) if mirror else field
    return _sample(image, places, "bilinear", outside=0), classes.to(label.dtype)


def mirrored(points: Tensor, size: Sequence[int] | int) -> Tensor:
    """Return points ... 3 in a volume, or ... along one axis, with those outside reflected.

    The mirrors are the outermost voxels' centres.
    """
    end = torch.as_tensor(size) - 1
    last = end.clamp(min=1)
    inside = last - (points.remainder(2 * last) - last).abs()
    return inside.minimum(end)  # along an axis of one voxel there is nothing to reflect at


def _sample(volume: Tensor, field: Tensor, mode: str, outside: int) -> Tensor:
    """Return C X Y Z at D H W 3, float32; reads only the part of the volume that is needed."""
    points = field.reshape(-1, 3)
    low = points.min(0).values.floor().long() - 1
    high = points.max(0).values.ceil().long() + 2
    low = low.clamp(min=0)
    high = high.clamp(min=1)
    box = tuple(slice(*ends) for ends in zip(low.tolist(), high.tolist(), strict=True))
    part = volume[(slice(None), *box)]
    if not part.numel():  # the whole patch lies outside
        return torch.full((len(volume), *field.shape[:3]), float(outside))
    size = torch.tensor(part.shape[1:])
    relative = (2 * (field - low) + 1) / size - 1  # edges at -1 and 1
    grid = relative.flip(-1)  # W H D
    shifted = part.float() - outside  # grid_sample puts 0 outside
    sampled = F.grid_sample(shifted[None], grid[None], mode=mode, align_corners=False)
    return sampled[0] + outside


def intensities(options: Augment) -> "Compose":
    """Return noise, blur, contrast, gamma and low resolution for C D H W patches.

    Call `set_random_state` before each call of it.
    """
    with process.loading("monai"):
        from monai import transforms

    sigma = tuple(options.blur)
    factors = tuple(factor - 1 for factor in options.contrast)
    gamma = tuple(options.gamma)
    zoom = tuple(options.low_resolution)
    changes = [
        transforms.RandGaussianNoise(prob=options.noise_p, std=options.noise),
        transforms.RandGaussianSmooth(sigma, sigma, sigma, prob=options.blur_p),
        transforms.RandScaleIntensity(factors=factors, prob=options.contrast_p),
        transforms.RandAdjustContrast(prob=options.gamma_p, gamma=gamma, retain_stats=True),
        transforms.RandSimulateLowResolution(options.low_resolution_p, zoom_range=zoom),
    ]
    return transforms.Compose(changes)

"""Patches from volumes, and their random changes. Spatial ones are one field and one resampling.

A patch is a pure function of the seed and its place in the run, in any process.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

from unet3d.base import process
from unet3d.base.errors import UserError
from unet3d.base.types import IGNORE
from unet3d.config.schema import Augment, Data

if TYPE_CHECKING:
    from monai.transforms import Compose

THIN = 3  # times shorter than the longest axis (nnU-Net's bound): tilted, such a patch would mostly leave its slab
MIN_CONTROL_POINTS = 4  # A cubic spline needs four.

MAX_CENTRES = 10_000  # voxels of each class that are kept as patch centres
TRIES = 20  # Sparse annotation has few places with labels.
LABELS_LISTED = 5  # wrong labels in a message

INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)  # types that labels may have

# Arguments: image C D H W, label D H W.
Transform = Callable[[Tensor, Tensor, np.random.Generator], tuple[Tensor, Tensor]]


class PatchIndex(NamedTuple):
    """A patch's place in the run."""

    micro_batch: int
    sample: int
    case: int


@dataclass(frozen=True)
class PreparedCase:
    """A training case, normalised, with the voxels that patches may be centred on."""

    case_id: str
    image: Tensor  # C X Y Z, float32
    label: Tensor  # X Y Z, int16; unlabelled voxels are IGNORE
    spacing: tuple[float, float, float]  # mm
    centres: np.ndarray  # (n, 4), int32: the number of a foreground class that occurs, ascending from 0, and a voxel

    @property
    def classes(self) -> int:
        """The number of foreground classes that occur."""
        return min(int(self.centres[-1, 0]) + 1, len(self.centres)) if len(self.centres) else 0  # each has a voxel

    def centres_of(self, number: int) -> np.ndarray:
        """Return the voxels (n, 3) of a class of this number that patches may be centred on."""
        # The array's own type: with another, NumPy would read all of it.
        ends = np.array((number, number + 1), np.int32)
        start, stop = np.searchsorted(self.centres[:, 0], ends)
        return self.centres[start:stop, 1:]

    @property
    def labels(self) -> frozenset[int]:
        """The foreground labels that occur."""
        return frozenset(int(self.label[tuple(self.centres_of(number)[0])]) for number in range(self.classes))

    def label_arrays(self) -> dict[str, np.ndarray]:
        """Return the label map and the centres by name."""
        return {"label": self.label.numpy(), "centres": self.centres}


def prepare(
    case_id: str, image: np.ndarray, label: np.ndarray, spacing: tuple[float, float, float], ignore: int | None
) -> PreparedCase:
    """Return a case from a normalised image C X Y Z and its label map X Y Z."""
    classes = label.astype(np.int16)
    if ignore is not None:
        classes[label == ignore] = IGNORE
    return PreparedCase(case_id, torch.from_numpy(image), torch.from_numpy(classes), spacing, patch_centres(classes))


def patch_centres(classes: np.ndarray) -> np.ndarray:
    """Return `PreparedCase.centres` of a label map X Y Z: at most MAX_CENTRES voxels of each foreground class."""
    centres = [np.empty((0, 4), np.int32)]
    for label in np.unique(classes):
        if label > 0:
            flat = np.flatnonzero(classes == label)
            flat = flat[subsample_indices(len(flat), MAX_CENTRES)]
            voxels = np.stack(np.unravel_index(flat, classes.shape), axis=1)
            centres.append(np.insert(voxels.astype(np.int32), 0, len(centres) - 1, axis=1))
    return np.concatenate(centres)


def subsample_indices(count: int, most: int) -> np.ndarray:
    """Return indices of at most `most` of `count` voxels, drawn at random.

    Every n-th voxel would lie in one plane if n divides a row.
    """
    if count <= most:
        return np.arange(count)
    return np.sort(np.random.default_rng(0).choice(count, most, replace=False))


@dataclass
class Patches(Dataset[tuple[Tensor, Tensor, str]]):
    """Maps a `PatchIndex` to (image C D H W, label D H W, case id)."""

    read: Callable[[int], PreparedCase]
    options: Data
    seed: int
    tile: Sequence[int]  # the size that the network returns for a patch, D H W; if smaller, its context is mirrored
    transforms: Sequence[tuple[str, Transform]] = ()  # the user's own with their import paths, applied last
    classes: int | None = None  # labels are below; None: not known

    def __post_init__(self) -> None:
        self.mirror = list(self.tile) != list(self.options.patch)
        augment = self.options.augment
        if augment.spatial_p:  # before workers start: they share what takes seconds to load
            import scipy.interpolate
            import scipy.spatial.transform  # noqa: F401
        chances = (augment.noise_p, augment.blur_p, augment.contrast_p, augment.gamma_p, augment.low_resolution_p)
        self.intensities = intensities(augment) if any(chances) else None

    def __getitem__(self, index: PatchIndex) -> tuple[Tensor, Tensor, str]:
        # The generator is seeded by the place in the run: there is no state to save or replay.
        rng = np.random.default_rng([self.seed, index.micro_batch, index.sample])
        options = self.options
        case = self.read(index.case)
        centre = choose_centre(case, self.tile, options.foreground, rng)
        field = coordinates(centre, options.patch, case.spacing, options.augment, rng)
        if field is None:
            image, label = crop(case.image, case.label, centre, options.patch, self.mirror)
        else:
            image, label = resample(case.image, case.label, field, self.mirror)
        flips = [axis for axis in options.augment.mirror if rng.random() < 0.5]
        image = image.flip([axis + 1 for axis in flips])
        label = label.flip(flips)
        if self.intensities is not None:
            image = with_changes(image, self.intensities, int(rng.integers(2**32)))
        for path, transform in self.transforms:
            result = transform(image, label, rng)
            fault = self._fault(result, image, label)
            if fault is not None:
                raise UserError(f"data.transforms=[{path}]: {fault}, for a patch of {case.case_id}")
            image, changed = result
            label = changed.to(label.dtype)
        return image, label.contiguous(), case.case_id

    def _fault(self, result: object, image: Tensor, label: Tensor) -> str | None:
        """Return what is wrong with the result of a transform of these, and what it is to be; None if nothing is."""
        if not isinstance(result, tuple | list) or len(result) != 2:
            return f"returns {type(result).__name__}; return image and label"
        new_image, new_label = result
        for name, tensor, before in (("image", new_image, image), ("label", new_label, label)):
            if not isinstance(tensor, Tensor):
                return f"returns {type(tensor).__name__} as {name}; return a torch tensor"
            if tensor.shape != before.shape:
                return f"changes the {name}'s size: {tuple(tensor.shape)} for {tuple(before.shape)}; keep it"
        if new_image.dtype is not torch.float32:
            return f"returns an image of {new_image.dtype}; return torch.float32"
        if new_label.dtype not in INTEGERS:
            return f"returns labels of {new_label.dtype}; return whole numbers, as {label.dtype}"
        values = new_label.long()
        is_odd = (values < 0) & (values != IGNORE)
        if self.classes is not None:
            is_odd |= values >= self.classes
        if is_odd.any():
            listed = ", ".join(map(str, values[is_odd].unique()[:LABELS_LISTED].tolist()))
            last = "above" if self.classes is None else f"to {self.classes - 1}"
            return f"returns the label {listed}; classes are 0 {last}, and {IGNORE} is not labelled"
        return None


def choose_centre(case: PreparedCase, tile: Sequence[int], foreground: float, rng: np.random.Generator) -> np.ndarray:
    """Return the centre of a patch (voxels, may lie between two).

    It is on a voxel of a random foreground class with a probability of `foreground`, else where labels are.
    """
    shape = np.array(case.label.shape)
    size = np.array(tile)
    start = _random_start(shape, size, rng)
    if rng.random() < foreground and case.classes:
        voxels = case.centres_of(int(rng.integers(case.classes)))
        start = voxels[rng.integers(len(voxels))] - size // 2
    else:
        for _ in range(TRIES):
            box = tuple(slice(int(first), int(first) + n) for first, n in zip(start, tile, strict=True))
            if (case.label[box] != IGNORE).any():
                break
            start = _random_start(shape, size, rng)
    # The tile that is learned from stays inside the volume, or around it along axes where it is longer.
    inside = start.clip(0, np.maximum(shape - size, 0))
    around = -((size - shape) // 2)
    start = np.where(shape > size, inside, around)
    return np.asarray(start + (size - 1) / 2)


def _random_start(shape: np.ndarray, size: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return the first voxel of a tile around any voxel, moved inside.

    Along each axis, about size / shape of the tiles lie at a border.
    """
    # A uniform start would hardly ever lie at a far corner, where a tile's statistics are least like the others'.
    start = np.floor(rng.random(3) * shape) - size // 2
    return np.asarray(start.clip(0, np.maximum(shape - size, 0)))


def crop(image: Tensor, label: Tensor, centre: np.ndarray, patch: Sequence[int], mirror: bool) -> tuple[Tensor, Tensor]:
    """Return the patch around `centre`; outside the volume IGNORE and 0, or with `mirror` the image's mirror image."""
    # Halves round up: like inference, a patch has the smaller half of an odd border before its tile.
    start = np.floor(centre - (np.array(patch) - 1) / 2 + 0.5).astype(int)
    stop = start + patch
    inside = tuple(slice(max(0, a), min(b, n)) for a, b, n in zip(start, stop, label.shape, strict=True))
    into = tuple(slice(part.start - a, part.stop - a) for part, a in zip(inside, start, strict=True))
    patch_label = label.new_full(tuple(patch), IGNORE)
    patch_label[into] = label[inside]
    if mirror:
        x, y, z = (mirrored(torch.arange(a, b), n) for a, b, n in zip(start, stop, label.shape, strict=True))
        return image[:, x[:, None, None], y[:, None], z], patch_label
    patch_image = image.new_zeros(len(image), *patch)
    patch_image[(slice(None), *into)] = image[(slice(None), *inside)]
    return patch_image, patch_label


def with_changes(image: Tensor, changes: "Compose", seed: int) -> Tensor:
    """Return the image C D H W with these changes of intensity, drawn from the seed."""
    from monai.data import get_track_meta, set_track_meta

    before = get_track_meta()  # MONAI's setting holds for the whole process.
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
    field = grid @ matrix.T + centre.astype(np.float32)
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
    vectors = rng.normal(0, std, (*points, 3)).astype(np.float32)
    return np.asarray(np.einsum("ai,bj,ck,ijkd->abcd", *splines, vectors, optimize=True))


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
    low = (points.min(0).values.floor().long() - 1).clamp(min=0)
    high = (points.max(0).values.ceil().long() + 2).clamp(min=1)
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
    changes = [
        transforms.RandGaussianNoise(prob=options.noise_p, std=options.noise),
        transforms.RandGaussianSmooth(sigma, sigma, sigma, prob=options.blur_p),
        transforms.RandScaleIntensity(factors=factors, prob=options.contrast_p),
        transforms.RandAdjustContrast(prob=options.gamma_p, gamma=tuple(options.gamma), retain_stats=True),
        transforms.RandSimulateLowResolution(options.low_resolution_p, zoom_range=tuple(options.low_resolution)),
    ]
    return transforms.Compose(changes)

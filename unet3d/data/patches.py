"""Patches from volumes. A patch is a pure function of the seed and its place in the run, in any process."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from unet3d.base.errors import UserError
from unet3d.base.types import IGNORE
from unet3d.config.schema import Data
from unet3d.data import augment
from unet3d.data.cases import Case

MAX_CENTRES = 10_000  # voxels of each class that are kept as patch centres
TRIES = 20  # to find a place with labels, which are rare in sparse annotation
LABELS_LISTED = 5  # wrong labels in a message

INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)  # types that labels may have

Transform = Callable[[Tensor, Tensor, np.random.Generator], tuple[Tensor, Tensor]]  # of image C D H W, label D H W


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
    foreground: tuple[np.ndarray, ...]  # (n, 3) voxel indices of each foreground class that occurs

    @property
    def labels(self) -> frozenset[int]:
        """The foreground labels that occur."""
        return frozenset(int(self.label[tuple(voxels[0])]) for voxels in self.foreground)


def cached(cache: dict[str, PreparedCase] | None, case: Case, make: Callable[[Case], PreparedCase]) -> PreparedCase:
    """Return `make(case)`, called once for each case if there is a cache."""
    if cache is None:
        return make(case)
    if case.id not in cache:
        cache[case.id] = make(case)
    return cache[case.id]


def prepare(
    case_id: str, image: np.ndarray, label: np.ndarray, spacing: tuple[float, float, float], ignore: int | None
) -> PreparedCase:
    """Return a case from a normalised image C X Y Z and its label map X Y Z."""
    classes = label.astype(np.int16)
    if ignore is not None:
        classes[label == ignore] = IGNORE
    return PreparedCase(case_id, torch.from_numpy(image), torch.from_numpy(classes), spacing, foreground(classes))


def foreground(classes: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return voxels (n, 3) of each foreground class of a label map X Y Z, at most MAX_CENTRES of each."""
    voxels_by_class = list[np.ndarray]()
    for number in np.unique(classes):
        if number > 0:
            flat = np.flatnonzero(classes == number)
            flat = flat[subsample_indices(len(flat), MAX_CENTRES)]
            voxels = np.stack(np.unravel_index(flat, classes.shape), axis=1)
            voxels_by_class.append(voxels.astype(np.int32))
    return tuple(voxels_by_class)


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
        self.intensities = augment.prepare(self.options.augment)

    def __getitem__(self, index: PatchIndex) -> tuple[Tensor, Tensor, str]:
        # The generator is seeded by the place in the run: there is no state to save or replay.
        rng = np.random.default_rng([self.seed, index.micro_batch, index.sample])
        options = self.options
        case = self.read(index.case)
        centre = choose_centre(case, self.tile, options.foreground, rng)
        field = augment.coordinates(centre, options.patch, case.spacing, options.augment, rng)
        if field is None:
            image, label = crop(case.image, case.label, centre, options.patch, self.mirror)
        else:
            image, label = augment.resample(case.image, case.label, field, self.mirror)
        flips = [axis for axis in options.augment.mirror if rng.random() < 0.5]
        image = image.flip([axis + 1 for axis in flips])
        label = label.flip(flips)
        if self.intensities is not None:
            image = augment.changed(image, self.intensities, int(rng.integers(2**32)))
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
    if rng.random() < foreground and case.foreground:
        voxels = case.foreground[rng.integers(len(case.foreground))]
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
        return _mirrored_crop(image, start.tolist(), patch), patch_label
    patch_image = image.new_zeros(len(image), *patch)
    patch_image[(slice(None), *into)] = image[(slice(None), *inside)]
    return patch_image, patch_label


def _mirrored_crop(image: Tensor, start: Sequence[int], patch: Sequence[int]) -> Tensor:
    """Return the patch of an image C X Y Z that begins at `start`, outside the volume its mirror image."""
    voxels = list[Tensor]()  # that the patch reads along each axis
    for first, length, size in zip(start, patch, image.shape[1:], strict=True):
        voxels.append(augment.mirrored(torch.arange(first, first + length), size))
    box = tuple(slice(int(indices.min()), int(indices.max()) + 1) for indices in voxels)
    image = image[(slice(None), *box)]  # what the patch needs, before the first axis is copied
    for axis, indices in enumerate(voxels, start=1):
        image = image.index_select(axis, indices - indices.min())
    return image

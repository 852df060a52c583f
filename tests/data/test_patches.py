"""Patches: where they lie, what their random changes move, and what a transform of one's own may return."""

from typing import Any

import numpy as np
import pytest
import torch
from guards import without
from monai.data import get_track_meta, set_track_meta
from promises import promise

from unet3d.base.errors import UserError
from unet3d.base.types import IGNORE
from unet3d.config.schema import Augment, Data
from unet3d.data import patches
from unet3d.data.patches import (
    MAX_CENTRES,
    Patches,
    PatchIndex,
    PreparedCase,
    choose_centre,
    crop,
    patch_centres,
    prepare,
    resample,
)
from unet3d.data.patches import Transform as Change

INTENSITIES = ("noise_p", "blur_p", "contrast_p", "gamma_p", "low_resolution_p")
SIZE = [8, 8, 8]


def volume(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(0)
    image = torch.from_numpy(rng.normal(size=(2, *shape)).astype(np.float32))
    return image, torch.from_numpy(rng.integers(0, 3, shape).astype(np.int16))


def of_voxels(*shape: int, labels: dict[tuple[int, int, int], int], rest: int = 0) -> PreparedCase:
    """Return a case of noise whose label map has these labels at these voxels."""
    image = np.random.default_rng(0).normal(size=(1, *shape)).astype(np.float32)
    label = np.full(shape, rest, np.uint8)
    for place, value in labels.items():
        label[place] = value
    return prepare("case1", image, label, (1.0, 1.0, 1.0), 255)


CASE = of_voxels(14, 12, 10, labels={(0, 0, 0): 1, (-1, -1, -1): 2})


def made(case: PreparedCase = CASE, tile: list[int] = SIZE, **options: Any) -> Patches:
    """Return patches of 8 voxels, or of other options, of one case."""
    transforms = options.pop("transforms", ())
    data = Data(**({"patch": SIZE} | options))
    return Patches(lambda index: case, data, 0, tile, transforms, classes=3)


def starts(case: PreparedCase, count: int) -> np.ndarray:
    """Return where this many patches of 8 voxels begin, of which none is centred on foreground."""
    rng = np.random.default_rng(0)
    return np.array([choose_centre(case, SIZE, 0.0, rng) for _ in range(count)]) - 3.5


def test_random_patches_cover_the_volume_to_its_corners_and_borders_as_often_as_inference_meets_them() -> None:
    """Of tiles centred anywhere in 40 voxels, a tenth is pushed back to each end; of uniform starts, 1 in 33."""
    found = starts(CASE, 300)
    assert (found.min(0).tolist(), found.max(0).tolist()) == ([0, 0, 0], [6, 4, 2])
    along = starts(of_voxels(40, 8, 8, labels={}), 1000)[:, 0]
    for end in (0, 32):
        assert 0.07 < (along == end).mean() < 0.16


def test_foreground_patches_contain_foreground_and_stay_inside() -> None:
    case = of_voxels(30, 30, 30, labels={(0, 0, 0): 1, (25, 3, 29): 2})
    rng = np.random.default_rng(0)
    centres = [choose_centre(case, SIZE, 1.0, rng) for _ in range(40)]
    labels = [crop(case.image, case.label, centre, SIZE, mirror=False)[1] for centre in centres]
    assert {(label.min().item(), label.max().item()) for label in labels} == {(0, 1), (0, 2)}


def test_patches_longer_than_the_volume_hold_all_of_it() -> None:
    image, label = volume(14, 12, 10)
    size = [20, 12, 13]
    centre = choose_centre(CASE, size, 0.0, np.random.default_rng(0))
    patch, classes = crop(image, label, centre, size, mirror=False)
    assert torch.equal(patch[:, 3:17, :, 1:11], image)
    assert torch.equal(classes[3:17, :, 1:11], label)
    assert (classes != IGNORE).sum() == label.numel()
    assert torch.count_nonzero(patch) == torch.count_nonzero(image)


@pytest.mark.parametrize("length", [20, 21])
def test_a_valid_network_learns_from_the_whole_volume_to_its_corners(length: int) -> None:
    """A patch of 20 voxels, of which the middle 8 are learned, in a volume of 14 x 12 x 10; of 21, after the sixth."""
    cuts = made(patch=[length] * 3, foreground=0, augment=Augment(spatial_p=0, mirror=[]))
    learned = [cuts[PatchIndex(i, 0, 0)][1][6:14, 6:14, 6:14] for i in range(200)]
    assert all((tile != IGNORE).all() for tile in learned), "only context reaches beyond the volume"
    assert {tile.max().item() for tile in learned} == {0, 1, 2}


def test_the_ignore_label_is_no_foreground() -> None:
    case = of_voxels(4, 4, 4, labels={(1, 2, 3): 1}, rest=255)
    assert case.centres.tolist() == [[0, 1, 2, 3]]
    assert (case.label == IGNORE).sum() == 63


def every_nth(count: int, most: int) -> np.ndarray:
    """Return indices at equal distances."""
    return np.arange(most) * (count // most)


@without("unet3d.data.patches.subsample_indices", every_nth)
def test_kept_centres_are_of_all_planes() -> None:
    """40 voxels for one that is kept, and rows of 10: every 40th would lie in the first plane."""
    found = patch_centres(np.ones((200, 200, 10), np.int16))[:, 1:]
    assert len(found) == MAX_CENTRES
    assert [len(np.unique(places)) for places in found.T] == [200, 200, 10]


def field(options: Augment, patch: list[int], centre: float = 0.0, spacing: tuple = (1, 1, 1)) -> torch.Tensor:
    """Return where a patch's voxels lie; it is resampled, and without options of movement nothing moves."""
    found = patches.coordinates(np.full(3, centre), patch, spacing, options, np.random.default_rng(0))
    assert found is not None
    return found


def still(**changes: Any) -> Augment:
    return Augment(**{"spatial_p": 1.0, "rotation": 0.0, "scaling": [1.0, 1.0], "elastic": 0.0} | changes)


def test_probability_zero_is_a_plain_crop() -> None:
    rng = np.random.default_rng(0)
    assert patches.coordinates(np.zeros(3), SIZE, (1, 1, 1), still(spatial_p=0.0), rng) is None


@pytest.mark.parametrize("is_mirrored", [True, False])
@pytest.mark.parametrize(("size", "distance"), [((9, 6, 5), 0), ((3, 2, 1), 0), ((12, 11, 10), 5), ((4, 4, 4), 50)])
def test_a_field_that_moves_nothing_is_a_crop_and_context_is_the_reflected_volume(
    size: tuple[int, int, int], distance: int, is_mirrored: bool
) -> None:
    """As the sliding window sees it. What is outside is not labelled, and without context it is 0, the mean."""
    image, label = volume(*size)
    patch, centre = [11, 13, 12], np.array([1.0, 2.0, 0.5]) + distance
    cut, labels = crop(image, label, centre, patch, is_mirrored)
    padded = np.pad(image.numpy(), [(0, 0), *[(12, 72)] * 3], mode="reflect" if is_mirrored else "constant")
    x, y, z = (12 + distance + first for first in (-4, -4, -5))
    expected = torch.from_numpy(padded[:, x : x + 11, y : y + 13, z : z + 12])
    assert torch.equal(cut, expected)
    warped, classes = resample(image, label, field(still(), patch) + torch.from_numpy(centre).float(), is_mirrored)
    torch.testing.assert_close(warped, expected, atol=1e-5, rtol=0)
    assert torch.equal(classes, labels)


def test_image_and_label_move_alike() -> None:
    _, label = volume(10, 10, 10)
    blocks = label.repeat_interleave(2, 0).repeat_interleave(2, 1).repeat_interleave(2, 2)
    options = still(rotation=30.0, scaling=[0.8, 1.2], elastic=2.0, elastic_grid=8)
    warped, classes = resample(blocks.float()[None], blocks, field(options, [12] * 3, 9.5), mirror=False)
    is_flat = (warped[0] - warped[0].round()).abs() < 1e-6  # away from the borders between blocks
    chosen = is_flat & (classes != IGNORE)
    assert chosen.sum() > 100
    assert torch.equal(warped[0][chosen].round().short(), classes[chosen])


def test_rotation_keeps_distances_in_millimetres() -> None:
    spacing = (1.0, 1.0, 4.0)
    plain, rotated = (
        field(still(rotation=angle), [5, 5, 5], spacing=spacing) * torch.tensor(spacing) for angle in (0.0, 90.0)
    )
    torch.testing.assert_close(rotated.norm(dim=-1), plain.norm(dim=-1), atol=1e-4, rtol=1e-4)
    assert not torch.allclose(rotated, plain, atol=0.1)


@pytest.mark.parametrize("thin", range(3))
def test_a_thin_patch_turns_in_its_plane_alone(thin: int) -> None:
    patch = [25, 25, 25]
    patch[thin] = 3
    moved = (field(still(rotation=30.0), patch) - field(still(), patch)).abs().amax((0, 1, 2))
    assert [bool(length > 0.1) for length in moved] == [axis != thin for axis in range(3)]
    assert moved[thin] < 1e-5


def test_scaling_shrinks_or_grows_what_is_seen() -> None:
    extent = [field(still(scaling=[zoom, zoom]), [9, 9, 9]).max().item() for zoom in (0.5, 1.0, 2.0)]
    assert extent == pytest.approx([8, 4, 2])


def test_an_elastic_field_passes_through_its_control_vectors() -> None:
    """65 voxels, control points every 32: they lie on voxels, where the spline equals the drawn vectors."""
    found = patches.elastic_field([65, 65, 65], 4.0, 32, np.random.default_rng(3))
    vectors = np.random.default_rng(3).normal(0, 4.0, (4, 4, 4, 3)).astype(np.float32)
    np.testing.assert_allclose(found[16::32, 16::32, 16::32], vectors[1:3, 1:3, 1:3], atol=1e-4)
    assert np.abs(np.diff(found, axis=0)).max() < 2, "neighbours move together"


@pytest.mark.slow
@pytest.mark.parametrize("kind", INTENSITIES)
def test_each_intensity_change_changes_and_repeats(kind: str) -> None:
    off = dict.fromkeys(INTENSITIES, 0.0)
    image = volume(16, 16, 16)[0]
    change = patches.intensities(Augment(**(off | {kind: 1.0})))
    first, again, other = (patches.with_changes(image.clone(), change, seed) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.equal(first, image)


@promise("Prediction", "nibabel and MONAI used ...")
@pytest.mark.parametrize("before", [True, False])
def test_making_patches_leaves_monai_as_others_use_it(before: bool) -> None:
    set_track_meta(before)
    try:
        augmented = made(augment=Augment(**dict.fromkeys(INTENSITIES, 1.0)))
        assert type(augmented[PatchIndex(0, 0, 1)][0]) is torch.Tensor
        assert get_track_meta() is before
    finally:
        set_track_meta(True)


def test_augmentation_differs_from_visit_to_visit() -> None:
    visits = [made()[PatchIndex(*place, 1)][0] for place in ((0, 0), (9, 0), (0, 1))]
    assert not torch.equal(visits[0], visits[1])
    assert not torch.equal(visits[0], visits[2])


def labelled(value: float) -> Change:
    """Return a transform that makes a corner's label another value."""

    def change(image: torch.Tensor, label: torch.Tensor, rng: np.random.Generator) -> Any:
        label = label.clone() if value == round(value) else label.float()
        label[0, 0, :2] = value
        return image, label

    return change


@promise(
    "Training",
    "a transform of one's own that returns labels of no class, another type or size",
    "exit 2 with the transform, what it returned and what it is to return",
)
@pytest.mark.parametrize(
    ("transform", "words"),
    [
        (labelled(-1), "label -1; classes are 0 to 2, and -100"),
        (labelled(3), "label 3; classes are 0 to 2"),
        (labelled(0.5), "torch.float32; return whole numbers, as torch.int16"),
        (lambda image, label, rng: (image.double(), label), "torch.float64; return torch.float32"),
        (lambda image, label, rng: (image.numpy(), label), "ndarray as image; return a torch tensor"),
        (lambda image, label, rng: (image, label[1:]), "(7, 8, 8) for (8, 8, 8)"),
        (lambda image, label, rng: image, "Tensor; return image and label"),
    ],
)
def test_what_a_transform_of_ones_own_may_not_return_is_one_line(transform: Any, words: str) -> None:
    with pytest.raises(UserError) as refused:
        made(transforms=[("mine:bad", transform)])[PatchIndex(0, 0, 1)]
    line = str(refused.value)
    assert line.startswith("data.transforms=[mine:bad]: ")
    assert words in line
    assert line.endswith("case1")


@pytest.mark.parametrize("kind", [torch.int64, torch.int8])
def test_a_transform_may_ignore_voxels_and_return_whole_numbers_of_any_size(kind: torch.dtype) -> None:
    ways = [("mine:ignore", labelled(IGNORE)), ("mine:wide", lambda image, label, rng: (image, label.to(kind)))]
    label = made(transforms=ways)[PatchIndex(0, 0, 1)][1]
    assert label.dtype is torch.int16
    assert (label[0, 0, :2] == IGNORE).all()

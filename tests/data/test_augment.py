"""Spatial changes checked by where marked voxels go, and by what nothing must change."""

import numpy as np
import pytest
import torch

from unet3d.base.types import IGNORE
from unet3d.config.schema import Augment
from unet3d.data import patches as augment
from unet3d.data.patches import crop


def still(**changes: object) -> Augment:
    """Augmentation that resamples every patch but moves nothing, but for the changes."""
    return Augment(**{"spatial_p": 1.0, "rotation": 0.0, "scaling": [1.0, 1.0], "elastic": 0.0} | changes)


def volume(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(0)
    image = torch.from_numpy(rng.normal(size=(2, *shape)).astype(np.float32))
    return image, torch.from_numpy(rng.integers(0, 3, shape).astype(np.int16))


def field(options: Augment, centre: list, patch: list, spacing: tuple = (1, 1, 1), seed: int = 0) -> torch.Tensor:
    found = augment.coordinates(np.array(centre), patch, spacing, options, np.random.default_rng(seed))
    assert found is not None
    return found


def test_no_change_is_a_crop() -> None:
    image, label = volume(12, 11, 10)
    warped, classes = augment.resample(image, label, field(still(), [5.0, 5.0, 5.0], [3, 5, 7]), mirror=False)
    torch.testing.assert_close(warped, image[:, 4:7, 3:8, 2:9], atol=1e-5, rtol=0)
    assert torch.equal(classes, label[4:7, 3:8, 2:9])


def test_outside_the_volume_is_mean_and_ignored() -> None:
    image, label = volume(4, 4, 4)
    warped, classes = augment.resample(image, label, field(still(), [0.0, 1.5, 1.5], [3, 4, 4]), mirror=False)
    assert warped[:, 0].abs().max() < 1e-5 and (classes[0] == IGNORE).all()
    assert torch.equal(classes[1:], label[:2])
    far, nothing = augment.resample(image, label, field(still(), [50.0, 1.5, 1.5], [3, 4, 4]), mirror=False)
    assert far.abs().max() == 0 and (nothing == IGNORE).all()


@pytest.mark.parametrize("size", [(9, 6, 5), (3, 2, 1)])
def test_mirrored_context_is_the_reflected_volume(size: tuple[int, int, int]) -> None:
    """As the sliding window sees it; resampled by a field that moves nothing, and cut, alike."""
    image, label = volume(*size)
    patch, centre = [11, 13, 12], np.array([1.0, 2.0, 0.5])
    start = np.rint(centre - (np.array(patch) - 1) / 2).astype(int)
    before, after = np.maximum(-start, 0), np.maximum(start + patch - np.array(size), 0)
    widths = [(0, 0), *zip(before.tolist(), after.tolist(), strict=True)]
    inside = tuple(slice(a + b, a + b + n) for a, b, n in zip(start, before, patch, strict=True))
    expected = torch.from_numpy(np.pad(image.numpy(), widths, mode="reflect"))[(slice(None), *inside)]
    cut, labels = crop(image, label, centre, patch, mirror=True)
    assert torch.equal(cut, expected)
    warped, classes = augment.resample(image, label, field(still(), centre.tolist(), patch), mirror=True)
    torch.testing.assert_close(warped, expected, atol=1e-5, rtol=0)
    assert torch.equal(classes, labels)
    assert (labels == IGNORE).any(), "labels are not mirrored"


def test_image_and_label_move_alike() -> None:
    _, label = volume(20, 20, 20)
    blocks = label.repeat_interleave(2, 0)[:20].repeat_interleave(2, 1)[:, :20].repeat_interleave(2, 2)[:, :, :20]
    options = still(rotation=30.0, scaling=[0.8, 1.2], elastic=2.0, elastic_grid=8)
    warped, classes = augment.resample(blocks.float()[None], blocks, field(options, [9.5] * 3, [12] * 3), mirror=False)
    inside = classes != IGNORE
    flat = (warped[0] - warped[0].round()).abs() < 1e-6  # away from the borders between blocks
    chosen = inside & flat
    assert chosen.sum() > 100
    assert torch.equal(warped[0][chosen].round().short(), classes[chosen])


def test_rotation_keeps_distances_in_millimetres() -> None:
    spacing = (1.0, 1.0, 4.0)
    rotated = field(still(rotation=90.0), [0.0] * 3, [5, 5, 5], spacing).double() * torch.tensor(spacing)
    plain = field(still(), [0.0] * 3, [5, 5, 5], spacing).double() * torch.tensor(spacing)
    torch.testing.assert_close(rotated.norm(dim=-1), plain.norm(dim=-1), atol=1e-4, rtol=1e-4)
    assert not torch.allclose(rotated, plain, atol=0.1)


@pytest.mark.parametrize("thin", range(3))
def test_a_thin_patch_turns_in_its_plane_alone(thin: int) -> None:
    patch = [25, 25, 25]
    patch[thin] = 3
    turned = field(still(rotation=30.0), [0.0] * 3, patch)
    assert turned[..., thin].abs().max() == pytest.approx(1, abs=1e-5)
    in_plane = [axis for axis in range(3) if axis != thin]
    assert not torch.allclose(turned[..., in_plane], field(still(), [0.0] * 3, patch)[..., in_plane], atol=0.1)


def test_scaling_shrinks_or_grows_what_is_seen() -> None:
    extent = [float(field(still(scaling=[z, z]), [0.0] * 3, [9, 9, 9]).abs().max()) for z in (0.5, 1.0, 2.0)]
    assert extent == pytest.approx([8, 4, 2])


def test_elastic_field_passes_through_its_control_vectors() -> None:
    """65 voxels, control points every 32: they lie on voxels, where the spline equals the drawn vectors."""
    rng, copy = np.random.default_rng(3), np.random.default_rng(3)
    found = augment.elastic_field([65, 65, 65], 4.0, 32, rng)
    vectors = copy.normal(0, 4.0, (4, 4, 4, 3)).astype(np.float32)
    assert augment.spline_matrix(65, 32).shape == (65, 4)
    np.testing.assert_allclose(found[16::32, 16::32, 16::32], vectors[1:3, 1:3, 1:3], atol=1e-4)


def test_elastic_field_has_the_asked_std() -> None:
    fields = [augment.elastic_field([33, 33, 33], 4.0, 16, np.random.default_rng(s)) for s in range(40)]
    assert np.std([f[0, 0, 0] for f in fields]) == pytest.approx(4, rel=0.4)
    assert np.abs(np.diff(fields[0], axis=0)).max() < 2, "neighbours move together"


def test_probability_zero_is_a_plain_crop() -> None:
    rng = np.random.default_rng(0)
    assert augment.coordinates(np.zeros(3), [4, 4, 4], (1, 1, 1), still(spatial_p=0.0), rng) is None


INTENSITIES = ("noise_p", "blur_p", "contrast_p", "gamma_p", "low_resolution_p")


@pytest.mark.slow
@pytest.mark.parametrize("kind", INTENSITIES)
def test_each_intensity_change_changes_and_repeats(kind: str) -> None:
    off = dict.fromkeys(INTENSITIES, 0.0)
    image = volume(16, 16, 16)[0]
    changed = augment.intensities(Augment(**(off | {kind: 1.0})))
    outcomes = [changed.set_random_state(seed=s)(image.clone()) for s in (1, 1, 2)]
    assert torch.equal(torch.as_tensor(outcomes[0]), torch.as_tensor(outcomes[1]))
    assert not torch.equal(torch.as_tensor(outcomes[0]), torch.as_tensor(outcomes[2]))
    assert not torch.equal(torch.as_tensor(outcomes[0]), image)
    assert torch.equal(torch.as_tensor(augment.intensities(Augment(**off))(image.clone())), image)

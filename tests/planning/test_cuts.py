"""Classes that meet in a plane of voxels: annotators cut there, and the plan does not rotate patches."""

from pathlib import Path

import nibabel as nib
import numpy as np
import pytest

from unet3d.base.types import MIB
from unet3d.config import compose
from unet3d.planning.fingerprint import read_fingerprint
from unet3d.planning.plan import Draft, choose_rotation

CASES = 10
SIDE = 16
CUT = 1  # the axis y


def ball(rng: np.random.Generator, radius: float) -> np.ndarray:
    """Return where a ball is, whose centre is near the middle."""
    centre = SIDE / 2 + rng.uniform(-1, 1, 3)
    distance = sum((grid - c) ** 2 for grid, c in zip(np.indices((SIDE, SIDE, SIDE)), centre, strict=True))
    return np.asarray(distance <= radius**2)


def cut_in_two(rng: np.random.Generator) -> np.ndarray:
    """Return labels of a ball, of which one class has what lies before a plane across y."""
    place = np.indices((SIDE, SIDE, SIDE))[CUT]
    return np.where(ball(rng, 6), np.where(place < rng.integers(7, 10), 1, 2), 0)


def nested(rng: np.random.Generator) -> np.ndarray:
    """Return labels of a ball within a ball."""
    state = rng.bit_generator.state
    outer = ball(rng, 6)
    rng.bit_generator.state = state
    return np.where(outer, np.where(ball(rng, 4), 2, 1), 0)


@pytest.mark.parametrize(("labels", "rotation"), [(cut_in_two, 0), (nested, 30)])
def test_patches_are_not_rotated_where_classes_meet_in_a_plane(labels, rotation: float, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for number in range(CASES):
        label = labels(rng).astype(np.uint8)
        image = (100 * label + rng.normal(0, 10, label.shape)).astype(np.float32)
        for folder, voxels in (("images", image), ("labels", label)):
            (tmp_path / folder).mkdir(exist_ok=True)
            nib.save(nib.Nifti1Image(voxels, np.eye(4)), tmp_path / folder / f"case{number}.nii")
    words = ["data=folders", f"data.root={tmp_path}", "data.classes=[background,front,back]", "data.fold=0"]
    config = compose.compose(["device=cpu", "model.features=[4,8]", *words])
    read = read_fingerprint(config.data)
    assert read.cut_axes == ((CUT,) if rotation == 0 else ())
    draft = Draft(config, {"model.features"}, read, 64 * MIB, None)
    choose_rotation(draft)
    assert draft.config.data.augment.rotation == rotation

    draft = Draft(config, {"data.augment.rotation"}, read, 64 * MIB, None)
    choose_rotation(draft)
    assert draft.config.data.augment.rotation == 30

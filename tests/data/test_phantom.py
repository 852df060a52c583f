"""The generated data set: the same for everyone, never half there, and not to be solved by intensity alone."""

import json
import os
import shutil
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from scipy.ndimage import binary_dilation

from unet3d.config import Phantom
from unet3d.data import synthetic
from unet3d.errors import UserError

SMALL = Phantom(cases=2, shape=[16, 20, 18])


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    first, again = (contents(synthetic.ensure_phantom(SMALL, tmp_path / name)) for name in "ab")
    assert sorted(first) == [
        "dataset.json",
        *(f"{kind}Tr/phantom_{n:03d}.nii.gz" for kind in ("images", "labels") for n in range(2)),
    ]
    assert first == again
    assert first["imagesTr/phantom_000.nii.gz"] != first["imagesTr/phantom_001.nii.gz"]


def test_what_is_there_is_used_and_other_options_get_their_own_folder(tmp_path: Path) -> None:
    folder = synthetic.ensure_phantom(SMALL, tmp_path)
    (folder / "mark").touch()
    others = [
        Phantom(cases=3, shape=[16, 20, 18]),
        Phantom(cases=2, shape=[18, 20, 16]),
        Phantom(cases=2, shape=[16, 20, 18], seed=1),
    ]
    made = [synthetic.ensure_phantom(options, tmp_path) for options in others]
    assert len({folder, *made}) == 4
    assert synthetic.ensure_phantom(SMALL, tmp_path) == folder
    assert (folder / "mark").exists()
    seeds = [contents(where)["imagesTr/phantom_000.nii.gz"] for where in (folder, made[2])]
    assert seeds[0] != seeds[1]


def test_more_cases_begin_with_the_same_ones(tmp_path: Path) -> None:
    two, three = (contents(synthetic.ensure_phantom(Phantom(n, [16, 16, 16]), tmp_path)) for n in (2, 3))
    del two["dataset.json"]
    assert two.items() < three.items()


def test_a_generation_that_stops_half_way_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = synthetic.draw_phantom

    def stops(rng: np.random.Generator, shape: list[int]) -> tuple[np.ndarray, np.ndarray]:
        if any(tmp_path.rglob("phantom_000.nii.gz")):
            raise KeyboardInterrupt
        return draw(rng, shape)

    monkeypatch.setattr(synthetic, "draw", stops)
    with pytest.raises(KeyboardInterrupt):
        synthetic.ensure_phantom(SMALL, tmp_path)
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(synthetic, "draw", draw)
    assert len(contents(synthetic.ensure_phantom(SMALL, tmp_path))) == 5


def test_what_a_killed_process_left_behind_is_no_data_set(tmp_path: Path) -> None:
    complete = synthetic.ensure_phantom(SMALL, tmp_path)
    left_behind = tmp_path / f".{complete.name}.{os.getpid()}.tmp"
    os.rename(complete, left_behind)
    (left_behind / "dataset.json").unlink()
    assert synthetic.ensure_phantom(SMALL, tmp_path) == complete
    assert len(contents(complete)) == 5


def test_a_faster_process_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename = os.rename

    def too_late(source: Path, target: Path) -> None:
        shutil.copytree(source, target)
        rename(source, target)

    monkeypatch.setattr(os, "rename", too_late)
    folder = synthetic.ensure_phantom(SMALL, tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == [folder.name]


def test_a_folder_that_cannot_be_written_is_a_users_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot be generated .*; name a folder to write to in data.root"):
        synthetic.ensure_phantom(SMALL, tmp_path / "file")


def test_the_files_are_what_scanners_write(tmp_path: Path) -> None:
    folder = synthetic.ensure_phantom(SMALL, tmp_path)
    entry = json.loads((folder / "dataset.json").read_text())["training"][1]
    image, label = nib.load(folder / entry["image"]), nib.load(folder / entry["label"])
    assert image.shape == label.shape == (16, 20, 18)
    assert nib.aff2axcodes(image.affine) == tuple("LPS")
    assert image.header.get_zooms() == (1.0, 1.0, 2.5)
    assert (image.get_data_dtype(), label.get_data_dtype()) == (np.int16, np.uint8)
    assert np.allclose(nib.affines.apply_affine(image.affine, (np.array(image.shape) - 1) / 2), 0)


@pytest.mark.parametrize("shape", [(64, 64, 32), (16, 16, 16), (24, 96, 16)])
def test_every_class_is_there_and_the_order_of_sizes_holds(shape: tuple[int, ...]) -> None:
    for seed in range(4):
        _, label = synthetic.draw_phantom(np.random.default_rng([7, seed]), shape)
        shares = np.bincount(label.ravel(), minlength=4) / label.size
        assert len(shares) == 4
        assert 0.8 < shares[0] < 0.95
        assert 0.08 < shares[1] < 0.18
        assert min(shares[2:]) > 0.002


@pytest.fixture(scope="module")
def cases() -> list[tuple[np.ndarray, np.ndarray]]:
    return [synthetic.draw_phantom(np.random.default_rng([0, n]), (64, 64, 32)) for n in range(8)]


def test_lesions_and_vessels_lie_inside_the_organ(cases: list) -> None:
    for _, label in cases:
        grown = binary_dilation(label > 1, structure=np.ones((3, 3, 1)))
        assert (label[grown] > 0).mean() > 0.999


def test_balls_stay_where_there_is_room_and_apart() -> None:
    rng = np.random.default_rng(3)
    points = np.stack(np.meshgrid(*(np.linspace(-1, 1, 40),) * 3, indexing="ij"))
    points += 0.3 * np.sin(3 * points[[1, 2, 0]])  # stretched, so that a ball of this radius does not fit as a ball
    free = np.zeros(points.shape[1:], bool)
    free[5:20, 5:35, 5:35] = True
    balls = synthetic._blobs(rng, points, free, np.array([0.2, 0.3, 0.25]))
    assert len(balls) > 1
    assert not (np.array(balls) < 0).any(0)[~free].any()
    assert (np.array(balls) < 0).sum(0).max() == 1


def test_no_classifier_of_single_voxels_solves_it(cases: list) -> None:
    """Not even the one that knows how often each class has each intensity, whatever weight it gives the rare ones."""
    bins = [np.digitize(image, np.linspace(0, 2, 200)) for image, _ in cases]
    labels = [label for _, label in cases]
    counts, _, _ = np.histogram2d(np.ravel(labels), np.ravel(bins), bins=(np.arange(5), np.arange(202)))
    for power in (0, 0.25, 0.5, 0.75, 1):
        choice = (counts * counts.sum(1, keepdims=True) ** -power).argmax(0)
        assert mean_dice([choice[b] for b in bins], labels) < 0.6


def test_the_tones_outside_the_organ_are_those_inside(cases: list) -> None:
    """Most voxels as dark as a lesion, or as bright as a vessel, are background; not counting air and its border."""
    dark = bright = lesion = vessel = 0
    for image, label in cases:
        core = np.s_[8:-8, 8:-8, :]
        image, label = image[core], label[core]
        bright += ((image > 0.95) & (label == 0)).sum()
        vessel += (label == 2).sum()
        low, high = np.quantile(image[label == 3], (0.2, 0.8))
        dark += ((image > low) & (image < high) & (label == 0)).sum()
        lesion += (label == 3).sum()
    assert bright > vessel
    assert dark > lesion / 2


def mean_dice(found: list[np.ndarray], truth: list[np.ndarray]) -> float:
    scores = [
        2 * ((p == k) & (t == k)).sum() / ((p == k).sum() + (t == k).sum())
        for p, t in zip(found, truth, strict=True)
        for k in (1, 2, 3)
    ]
    return float(np.mean(scores))

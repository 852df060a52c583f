"""A batch is a function of the seed and the step: not of workers, nor of where the run started."""

import subprocess
import sys
from itertools import islice

import numpy as np
import pytest
import torch

from unet3d.config import Augment, Data
from unet3d.data import patches
from unet3d.data.loader import PatchSampler, batches
from unet3d.data.patches import Patches, PatchIndex, PreparedCase, choose_centre, crop, prepare
from unet3d.types import IGNORE, Batch


def case(index: int) -> PreparedCase:
    rng = np.random.default_rng(index)
    image = rng.normal(size=(1, 14, 12, 10)).astype(np.float32)
    return prepare(f"case{index}", image, (image[0] > 1).astype(np.uint8), (1.0, 1.0, 2.0), None)


CASES = ["case0", "case1", "case2"]


def stream(workers: int = 0, first: int = 0, seed: int = 5, accumulate: int = 1) -> list[list[Batch]]:
    patches = Patches(case, Data(patch=[8, 8, 12]), seed, [8, 8, 12])
    return list(islice(batches(patches, CASES, 2, accumulate, seed, workers, first), 4))


def equal(a: list[list[Batch]], b: list[list[Batch]]) -> bool:
    flat = [(x, y) for s, t in zip(a, b, strict=True) for x, y in zip(s, t, strict=True)]
    return all(torch.equal(x.image, y.image) and torch.equal(x.label, y.label) and x.cases == y.cases for x, y in flat)


@pytest.mark.parametrize("workers", [1, 2])
def test_the_same_stream_for_any_number_of_workers(workers: int) -> None:
    assert equal(stream(0), stream(workers))


def test_the_same_stream_wherever_it_starts() -> None:
    assert equal(stream(first=2)[:2], stream()[2:])


def test_another_seed_is_another_stream() -> None:
    assert not equal(stream(), stream(seed=6))


PATCH = """
import sys, numpy
from unet3d.config import Augment, Data
from unet3d.data.patches import Patches, Place, prepare
case = prepare("a", numpy.ones((1, 9, 9, 9), numpy.float32), numpy.ones((9, 9, 9), numpy.uint8), (1, 1, 1), None)
patches = Patches(lambda index: case, Data(patch=[8, 8, 8], augment=Augment({options})), 0, [8, 8, 8])
before = set(sys.modules)
patches[Place(0, 0, 0)]
print("monai" in before, any(name.startswith(("monai", "scipy")) for name in set(sys.modules) - before))
"""
QUIET = "noise_p=0, blur_p=0, contrast_p=0, gamma_p=0, low_resolution_p=0"


@pytest.mark.parametrize(("options", "loads"), [("spatial_p=1", True), (f"spatial_p=1, {QUIET}", False)])
def test_what_patches_use_is_loaded_before_workers_start(options: str, loads: bool) -> None:
    program = PATCH.replace("{options}", options)
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout == f"{loads} False\n"


def test_making_batches_leaves_the_global_random_state_alone() -> None:
    """Dropout draws from it."""
    before = torch.get_rng_state()
    stream(workers=0), stream(workers=1)
    assert torch.equal(torch.get_rng_state(), before)


def test_accumulation_takes_the_micro_batches_in_order() -> None:
    flat = [batch for step in stream()[:4] for batch in step]
    grouped = [batch for step in stream(accumulate=2)[:2] for batch in step]
    assert equal([flat], [grouped])


def test_every_case_once_an_epoch_in_a_new_order() -> None:
    places = [p.case for micro in islice(PatchSampler(7, 3, seed=1), 14) for p in micro]
    epochs = [places[i : i + 7] for i in range(0, 42, 7)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1


def test_augmentation_differs_from_visit_to_visit() -> None:
    patches = Patches(case, Data(patch=[8, 8, 8]), 0, [8, 8, 8])
    assert not torch.equal(patches[PatchIndex(0, 0, 1)][0], patches[PatchIndex(9, 0, 1)][0])
    assert not torch.equal(patches[PatchIndex(0, 0, 1)][0], patches[PatchIndex(0, 1, 1)][0])


def test_patches_longer_than_the_volume_hold_all_of_it() -> None:
    prepared, size = case(0), [20, 12, 13]
    centre = choose_centre(prepared, size, 0.0, np.random.default_rng(0))
    image, label = crop(prepared.image, prepared.label, centre, size, mirror=False)
    assert torch.equal(image[:, 3:17, :, 1:11], prepared.image)
    assert (label != IGNORE).sum() == prepared.label.numel()
    assert image.abs().sum() == prepared.image.abs().sum()


@pytest.mark.parametrize("length", [20, 21])
def test_a_valid_network_learns_from_the_whole_volume_to_its_corners(length: int) -> None:
    """A patch of 20 voxels, of which the middle 8 are learned, in a volume of 14 x 12 x 10; of 21, after the sixth."""
    label = np.zeros((14, 12, 10), np.uint8)
    label[0, 0, 0], label[-1, -1, -1] = 1, 2
    prepared = prepare("a", np.ones((1, 14, 12, 10), np.float32), label, (1.0, 1.0, 1.0), None)
    options = Data(patch=[length] * 3, foreground=0, augment=Augment(spatial_p=0, mirror=[]))
    patches = Patches(lambda index: prepared, options, 0, [8, 8, 8])
    learned = [patches[PatchIndex(i, 0, 0)][1][6:14, 6:14, 6:14] for i in range(300)]
    assert all((tile != IGNORE).all() for tile in learned), "only context reaches beyond the volume"
    assert {tile.max().item() for tile in learned} == {0, 1, 2}


def test_foreground_patches_contain_foreground_and_stay_inside() -> None:
    label = np.zeros((30, 30, 30), np.uint8)
    label[0, 0, 0], label[25, 3, 29] = 1, 2
    prepared = prepare("a", np.zeros((1, 30, 30, 30), np.float32), label, (1.0, 1.0, 1.0), None)
    rng, seen = np.random.default_rng(0), set()
    for _ in range(40):
        centre = choose_centre(prepared, [8, 8, 8], 1.0, rng)
        patch = crop(prepared.image, prepared.label, centre, [8, 8, 8], mirror=False)[1]
        assert (patch != IGNORE).all()
        seen |= set(patch.unique().tolist()) - {0}
        assert patch.max() > 0
    assert seen == {1, 2}


def test_patches_without_oversampling_cover_the_volume_to_its_corners() -> None:
    prepared, rng = case(0), np.random.default_rng(0)
    starts = np.array([choose_centre(prepared, [8, 8, 8], 0.0, rng) for _ in range(300)]) - 3.5
    assert starts.min(0).tolist() == [0, 0, 0]
    assert starts.max(0).tolist() == [6, 4, 2]


def test_tiles_at_the_border_come_as_often_as_inference_meets_them() -> None:
    """Of tiles centred anywhere in 40 voxels, a tenth is pushed back to each end; of uniform starts, 1 in 33."""
    line = prepare("a", np.ones((1, 40, 8, 8), np.float32), np.zeros((40, 8, 8), np.uint8), (1.0, 1.0, 1.0), None)
    rng = np.random.default_rng(0)
    starts = np.array([choose_centre(line, [8, 8, 8], 0.0, rng)[0] for _ in range(1000)]) - 3.5
    assert 0.07 < (starts == 0).mean() < 0.16
    assert 0.07 < (starts == 32).mean() < 0.16


def test_the_ignore_label_is_no_foreground() -> None:
    label = np.full((4, 4, 4), 255, np.uint8)
    label[1, 2, 3] = 1
    prepared = prepare("a", np.zeros((1, 4, 4, 4), np.float32), label, (1.0, 1.0, 1.0), 255)
    assert [voxels.tolist() for voxels in prepared.foreground] == [[[1, 2, 3]]]
    assert (prepared.label == IGNORE).sum() == 63


def test_remembered_centres_are_of_all_planes(monkeypatch: pytest.MonkeyPatch) -> None:
    """40 voxels for one that is remembered, and rows of 10: every 40th would lie in the first plane."""
    monkeypatch.setattr(patches, "MOST_VOXELS", 100)
    (found,) = patches.foreground(np.ones((20, 20, 10), np.int16))
    assert len(found) == 100 and all(len(np.unique(found[:, axis])) == n for axis, n in enumerate((20, 20, 10)))

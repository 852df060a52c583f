"""Scores against voxel-by-voxel counting, and what happens where a score does not exist."""

import csv
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from promises import promise

from unet3d.report.held_out import case_table
from unet3d.run.record import read_scores
from unet3d.training.metrics import (
    CaseScore,
    Labels,
    Mask,
    both_csv_text,
    csv_text,
    hausdorff95,
    score_case,
    summarise,
)

NAMES = ("background", "left", "right")
MM = (1.0, 1.0, 1.0)


def counted(prediction: Labels, truth: Labels, index: int) -> tuple[float, float]:
    """Dice and IoU of one class, voxel by voxel."""
    hit = false = missed = 0
    for p, t in zip(prediction.flat, truth.flat, strict=True):
        hit += p == index and t == index
        false += p == index and t != index
        missed += p != index and t == index
    return 2 * hit / (2 * hit + false + missed), hit / (hit + false + missed)


def volume(*labels: int) -> Labels:
    """A label map of as many voxels, along x."""
    return np.array(labels, np.uint8).reshape(-1, 1, 1)


def test_dice_and_iou_equal_counting_voxel_by_voxel() -> None:
    rng = np.random.default_rng(0)
    prediction, truth = rng.integers(0, 3, (2, 7, 6, 5)).astype(np.uint8)
    score = score_case("a", prediction, truth, 3, MM)
    expected = [counted(prediction, truth, index) for index in (1, 2)]
    assert score.dice == pytest.approx([dice for dice, _ in expected])
    assert score.iou == pytest.approx([iou for _, iou in expected])
    assert score.hd95_mm == ()


def test_known_values() -> None:
    score = score_case("a", volume(0, 1, 1, 1), volume(1, 1, 1, 0), 2, MM)
    assert score.dice == (2 * 2 / 6,)
    assert score.iou == (2 / 4,)


@promise("Data", "a case, a part ...")
def test_a_score_of_0_that_no_class_in_the_truth_explains_has_a_note(tmp_path: Path) -> None:
    scores = [
        score_case("empty", volume(0, 1, 2), volume(0, 0, 0), 3, MM),
        score_case("left alone", volume(0, 1, 2), volume(0, 1, 0), 3, MM),
        score_case("missed", volume(0, 0, 0), volume(0, 1, 2), 3, MM),
        score_case("both empty", volume(0, 0, 0), volume(0, 0, 0), 3, MM),
    ]
    own = csv_text(scores, NAMES)
    for text in (own, both_csv_text(scores, NAMES, own)):
        (tmp_path / "scores.csv").write_text(text)
        rows = read_scores(tmp_path)
        notes = {row["case"]: row["note"] for row in rows}
        assert notes == {
            "empty": "no foreground in the truth",
            "left alone": "no right in the truth",
            "missed": "",
            "both empty": "",
        }
        titles = [row[0] for row in case_table(rows).rows]
        assert titles[:2] == ["empty (no foreground in the truth)", "missed"]
    assert "note" not in csv_text(scores[2:], NAMES)


def test_many_classes_do_not_wrap_around() -> None:
    truth = np.full((4, 4, 4), 299, np.uint16)
    score = score_case("a", truth.copy(), truth, 300, MM)
    assert score.dice[298] == 1
    assert score.dice[297] is None


@promise("Data", "a case, a part ...")
def test_a_class_absent_from_both_has_no_score_and_absent_from_one_zero() -> None:
    score = score_case("a", volume(0, 0, 1), volume(2, 0, 0), 4, MM, hd95=True)
    assert score.dice == (0, 0, None)
    assert score.iou == (0, 0, None)
    assert score.hd95_mm == (None, None, None)


def test_ignored_voxels_count_for_nothing() -> None:
    truth = volume(1, 1, 0, 255, 255)
    for behind in (0, 1, 2):
        score = score_case("a", volume(1, 0, 0, behind, behind), truth, 3, MM, ignore=255)
        assert score.dice == (2 / 3, None)
        assert score.iou == (1 / 2, None)


def test_a_case_that_is_ignored_throughout_has_no_score() -> None:
    score = score_case("a", volume(1, 1), volume(255, 255), 2, MM, ignore=255, hd95=True)
    assert (score.dice, score.iou, score.hd95_mm) == ((None,), (None,), (None,))


def test_shapes_and_labels_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\bcase-7\b.*\(2, 1, 1\).*\(1, 1, 1\)"):
        score_case("case-7", volume(1, 1), volume(1), 2, MM)
    with pytest.raises(ValueError, match=r"\bcase-7\b.*\btruth\b.*\b1\b"):
        score_case("case-7", volume(0, 1), volume(2, 0), 2, MM)
    with pytest.raises(ValueError, match=r"\bcase-7\b.*\bprediction\b.*\b1\b"):
        score_case("case-7", volume(0, 2), volume(0, 1), 2, MM)
    with pytest.raises(ValueError, match=r"\bprediction\b"):
        score_case("case-7", np.array([[[-1]]]), volume(0), 2, MM)


def test_hd95_is_a_distance_in_mm_along_the_axis_it_lies_on() -> None:
    prediction, truth = np.zeros((2, 12, 12, 12), np.uint8)
    truth[3, 3, 3] = prediction[3, 3, 7] = 1
    score = score_case("a", prediction, truth, 2, (1, 2.0, 2.5), hd95=True)
    assert score.hd95_mm == (pytest.approx(10.0),)


def test_hd95_of_a_slice_is_taken_along_its_border() -> None:
    """A disc and one a voxel wider: of all their voxels, a twentieth differs; of their borders, all."""
    x, y = np.meshgrid(np.arange(100), np.arange(100), indexing="ij")
    distance = np.hypot(x - 50, y - 50)
    for axis, spacing in ((0, (9, 2, 2)), (2, (2, 2, 9))):
        wide, narrow = (np.expand_dims(distance < radius, axis) for radius in (41, 40))
        assert hausdorff95(wide, narrow, spacing) == pytest.approx(2, abs=0.9)


def test_hd95_takes_surfaces_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's quantile refuses more than 2^24 distances, of which a large CT has some."""
    from monai.metrics import utils

    def many(*_: object, **__: object) -> tuple:
        return (), (torch.ones(2**24 + 1), torch.zeros(3)), ()

    monkeypatch.setattr(utils, "get_edge_surface_distance", many)
    mask = np.ones((2, 2, 2), bool)
    assert hausdorff95(mask, mask, MM) == 1


def test_hd95_of_the_same_mask_is_zero() -> None:
    mask = np.ones((4, 4, 4), bool)
    assert hausdorff95(mask, mask, MM) == 0


def test_hd95_takes_ignored_voxels_as_background() -> None:
    truth = np.zeros((10, 4, 4), np.uint8)
    prediction = truth.copy()
    truth[1:3, 1:3, 1:3] = prediction[1:3, 1:3, 1:3] = 1
    truth[8], prediction[8] = 255, 1
    assert score_case("a", prediction, truth, 2, MM, ignore=255, hd95=True).hd95_mm == (0.0,)


@pytest.mark.parametrize("which", ["truth", "prediction"])
def test_hd95_does_not_exist_where_labels_end_before_the_class_does(which: str) -> None:
    """One labelled slice of a box: each of its voxels would count as surface."""
    maps = {name: np.zeros((10, 10, 5), np.uint8) for name in ("truth", "prediction")}
    maps["truth"][2:6, 2:6, 2] = maps["prediction"][2:6, 2:6, 2] = 1
    maps["truth"][:, :, 4] = 255
    assert score_case("a", maps["prediction"], maps["truth"], 2, MM, ignore=255, hd95=True).hd95_mm == (0.0,)
    maps[which][2:6, 2:6, 3] = 1
    found = score_case("a", maps["prediction"], maps["truth"], 2, MM, ignore=255, hd95=True)
    assert found.hd95_mm == (None,) and found.dice[0] is not None


def blobs(seed: int, shape: tuple[int, int, int] = (20, 16, 12)) -> Mask:
    """Two overlapping boxes, some of them touching the border of the volume."""
    rng = np.random.default_rng(seed)
    masks = np.zeros((2, *shape), bool)
    for mask in masks:
        low = [int(rng.integers(0, n // 2)) for n in shape]
        high = [int(rng.integers(n // 2 + 1, n + 1)) for n in shape]
        mask[tuple(slice(a, b) for a, b in zip(low, high, strict=True))] = True
    return masks


@pytest.mark.parametrize("seed", range(6))
def test_cropping_to_the_masks_does_not_change_hd95(seed: int) -> None:
    from monai.metrics import compute_hausdorff_distance

    prediction, truth = blobs(seed)
    spacing = [0.7, 1.3, 2.5]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        whole = compute_hausdorff_distance(
            *(torch.from_numpy(np.pad(mask, 5))[None, None] for mask in (prediction, truth)),
            include_background=True,
            percentile=95,
            spacing=spacing,
        )
    assert hausdorff95(np.pad(prediction, 5), np.pad(truth, 5), spacing) == pytest.approx(float(whole), rel=1e-6)
    assert hausdorff95(prediction, truth, spacing) == pytest.approx(float(whole), rel=1e-6)


def test_hd95_is_computed_on_the_box_around_both_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A voxel wider than them: what lies outside moves no surface, and takes four times as long."""
    from monai.metrics import utils

    shapes, distance = [], utils.get_edge_surface_distance

    def seen(*masks: torch.Tensor, **options: object) -> tuple:
        shapes.extend(tuple(mask.shape) for mask in masks)
        return distance(*masks, **options)

    monkeypatch.setattr(utils, "get_edge_surface_distance", seen)
    prediction, truth = np.zeros((2, 50, 50, 50), bool)
    prediction[10:12, 0, 48:] = truth[11, 0, 48] = True
    assert 0 < hausdorff95(prediction, truth, MM) <= 2**0.5
    assert shapes == [(4, 2, 3)] * 2


def test_means_leave_out_what_does_not_exist() -> None:
    scores = [
        CaseScore("a", (0.5, None), (0.25, None), (2.0, None)),
        CaseScore("b", (1.0, None), (1.0, None), (None, None)),
    ]
    assert summarise(scores, NAMES) == {
        "val/dice_mean": 0.75,
        "val/dice/left": 0.75,
        "val/dice/right": None,
        "val/iou_mean": 0.625,
        "val/iou/left": 0.625,
        "val/iou/right": None,
        "val/hd95_mm/left": 2.0,
        "val/hd95_mm/right": None,
        "val/hd95_mm_cases/left": 1,
        "val/hd95_mm_cases/right": 0,
    }


def test_the_mean_is_over_classes_not_over_cases() -> None:
    scores = [CaseScore("a", (1.0, 0.0), (1.0, 0.0)), CaseScore("b", (1.0, None), (1.0, None))]
    assert summarise(scores, NAMES)["val/dice_mean"] == 0.5


def test_no_case_and_no_score_are_n_a() -> None:
    assert summarise([], NAMES)["val/dice_mean"] is None
    assert summarise([CaseScore("a", (None, None), (None, None))], NAMES)["val/iou_mean"] is None


def test_hd95_that_nobody_asked_for_is_absent() -> None:
    assert not [key for key in summarise([CaseScore("a", (1.0, 1.0), (1.0, 1.0))], NAMES) if "hd95" in key]


def test_csv_has_a_row_a_case_and_leaves_n_a_empty() -> None:
    scores = [CaseScore("a,1", (0.5, None), (0.25, None), (2.0, None)), CaseScore("b", (1.0, 0.0), (1.0, 0.0))]
    rows = list(csv.reader(csv_text(scores, NAMES).splitlines()))
    assert rows == [
        ["case", "dice/left", "dice/right", "iou/left", "iou/right", "hd95_mm/left", "hd95_mm/right"],
        ["a,1", "0.5", "", "0.25", "", "2.0", ""],
        ["b", "1.0", "0.0", "1.0", "0.0", "", ""],
    ]


def test_scores_of_overlap_load_neither_torch_nor_monai() -> None:
    code = (
        "import sys, numpy as np; from unet3d.training.metrics import score_case; a = np.zeros((2, 2, 2), int);"
        "score_case('a', a, a, 2, (1, 1, 1)); print({'torch', 'monai'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"

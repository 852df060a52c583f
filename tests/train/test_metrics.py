"""Scores against voxel-by-voxel counting, and what happens where a score does not exist."""

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from promises import promise

from unet3d.report.held_out import case_table
from unet3d.run.record import read_scores
from unet3d.training.metrics import CaseScore, Labels, both_csv_text, csv_text, hausdorff95, score_case, summarise

NAMES = ("background", "left", "right")
MM = (1.0, 1.0, 1.0)


def volume(*labels: int) -> Labels:
    """A label map of as many voxels, along x."""
    return np.array(labels, np.uint8).reshape(-1, 1, 1)


def test_dice_and_iou_equal_counting_voxel_by_voxel() -> None:
    """Of so many classes that their pairs need more than 16 bits; of each there are some, but for the last."""
    classes = 300
    prediction, truth = np.random.default_rng(0).integers(0, classes - 1, (2, 20, 20, 10)).astype(np.uint16)
    score = score_case("a", prediction, truth, classes, MM)
    pairs = list(zip(prediction.flat, truth.flat, strict=True))
    for index in (1, 2, classes - 2):
        hit = pairs.count((index, index))
        either = sum(index in pair for pair in pairs)
        assert score.iou[index - 1] == hit / either
        assert score.dice[index - 1] == pytest.approx(2 * hit / (either + hit))
    assert score.dice[-1] is score.iou[-1] is None and score.hd95_mm == ()


@promise("Data", "a case, a part ...")
def test_a_class_absent_from_both_has_no_score_and_absent_from_one_zero() -> None:
    score = score_case("a", volume(0, 0, 1), volume(2, 0, 0), 4, MM, hd95=True)
    assert score.dice == score.iou == (0, 0, None)
    assert score.hd95_mm == (None, None, None)


@promise("Data", "a case, a part ...")
def test_a_score_of_0_that_no_class_in_the_truth_explains_has_a_note(tmp_path: Path) -> None:
    empty, whole = volume(0, 0, 0), volume(0, 1, 2)
    pairs = {"a": (whole, empty), "b": (whole, volume(0, 1, 0)), "missed": (empty, whole), "d": (empty, empty)}
    scores = [score_case(name, *pair, 3, MM) for name, pair in pairs.items()]
    own = csv_text(scores, NAMES)
    for text in (own, both_csv_text(scores, NAMES, own)):
        (tmp_path / "scores.csv").write_text(text)
        rows = read_scores(tmp_path)
        assert [row["note"] for row in rows] == ["no foreground in the truth", "no right in the truth", "", ""]
        assert [row[0] for row in case_table(rows).rows][:2] == ["a (no foreground in the truth)", "missed"]
    assert "note" not in csv_text(scores[2:], NAMES)


@pytest.mark.parametrize("behind", [0, 1, 2])
def test_ignored_voxels_count_for_nothing(behind: int) -> None:
    score = score_case("a", volume(1, 0, 0, behind), volume(1, 1, 0, 255), 3, MM, ignore=255)
    assert (score.dice, score.iou) == ((2 / 3, None), (1 / 2, None))
    score = score_case("a", volume(behind), volume(255), 3, MM, ignore=255, hd95=True)
    assert score.dice == score.iou == score.hd95_mm == (None, None)


@pytest.mark.parametrize(
    ("prediction", "truth", "said"),
    [
        (volume(1, 1), volume(1), r"\(2, 1, 1\).*\(1, 1, 1\)"),
        (volume(0, 1), volume(2, 0), r"\btruth\b.*\b1\b"),
        (volume(0, 2), volume(0, 1), r"\bprediction\b.*\b1\b"),
        (np.array([[[-1]]]), volume(0), r"\bprediction\b"),
    ],
)
def test_shapes_and_labels_that_do_not_fit_are_refused(prediction: Labels, truth: Labels, said: str) -> None:
    with pytest.raises(ValueError, match=rf"\bcase-7\b.*{said}"):
        score_case("case-7", prediction, truth, 2, MM)


@pytest.mark.parametrize(("axis", "spacing"), [(0, (9, 2, 2)), (2, (2, 2, 9))])
def test_hd95_of_a_slice_is_taken_along_its_border(axis: int, spacing: tuple) -> None:
    """A disc and one a voxel wider: of all their voxels, a twentieth differs; of their borders, all."""
    x, y = np.mgrid[:100, :100]
    wide, narrow = (np.expand_dims(np.hypot(x - 50, y - 50) < radius, axis) for radius in (41, 40))
    assert hausdorff95(wide, narrow, spacing) == pytest.approx(2, abs=0.9)


@pytest.mark.parametrize("which", ["truth", "prediction"])
def test_hd95_does_not_exist_where_labels_end_before_the_class_does(which: str) -> None:
    """One labelled slice of a box: each of its voxels would count as surface. What is ignored is background."""
    maps = {name: np.zeros((10, 10, 5), np.uint8) for name in ("truth", "prediction")}
    maps["truth"][2:6, 2:6, 2] = maps["prediction"][2:6, 2:6, 2] = maps["prediction"][:, :, 4] = 1
    maps["truth"][:, :, 4] = 255
    for expected in (0.0, None):
        score = score_case("a", **maps, classes=2, spacing=MM, ignore=255, hd95=True)
        assert score.hd95_mm == (expected,) and score.dice[0] is not None
        maps[which][2:6, 2:6, 3] = 1


@given(boxes=st.lists(st.tuples(*[st.integers(0, 8), st.integers(9, 12)] * 3), min_size=2, max_size=2))
def test_hd95_is_monais_of_the_whole_volume(boxes: list[tuple[int, ...]]) -> None:
    """Whatever is left out around both masks, which may touch the border."""
    from monai.metrics import compute_hausdorff_distance

    masks = np.zeros((2, 12, 12, 12), bool)
    for mask, (a, b, c, d, e, f) in zip(masks, boxes, strict=True):
        mask[a:b, c:d, e:f] = True
    spacing = [0.7, 1.3, 2.5]
    padded = (torch.from_numpy(np.pad(mask, 5))[None, None] for mask in masks)
    with warnings.catch_warnings(action="ignore", category=FutureWarning):
        whole = compute_hausdorff_distance(*padded, include_background=True, percentile=95, spacing=spacing)
    assert hausdorff95(*masks, spacing) == pytest.approx(float(whole), rel=1e-6)


def test_hd95_takes_any_number_of_distances_within_the_box_around_both_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's quantile refuses more than 2^24, as of a large CT. What lies outside of the box takes time alone."""
    shapes = []

    def many(*masks: torch.Tensor, **_: object) -> tuple:
        shapes.extend(tuple(mask.shape) for mask in masks)
        return (), (torch.ones(2**24 + 1), torch.zeros(3)), ()

    monkeypatch.setattr("monai.metrics.utils.get_edge_surface_distance", many)
    mask = np.zeros((50, 50, 50), bool)
    mask[10:12, 0, 48:] = True
    assert hausdorff95(mask, mask, MM) == 1 and shapes == [(4, 2, 3)] * 2


MEANS = """\
val/loss 1.5
val/dice_mean 0.375
val/dice/left 0.75
val/dice/right 0.0
val/iou_mean 0.3125
val/iou/left 0.625
val/iou/right 0.0
val/hd95_mm_cases/left 1.0
val/hd95_mm_cases/right 0.0
val/hd95_mm/left 2.0
val/hd95_mm/right None
"""


def test_means_are_over_classes_and_leave_out_what_does_not_exist() -> None:
    scores = [
        CaseScore("a", (0.5, 0.0), (0.25, 0.0), (2.0, None), loss=1.0),
        CaseScore("b", (1.0, None), (1.0, None), (None, None), loss=2.0),
        CaseScore("c", (None, None), (None, None)),
    ]
    assert "".join(f"{key} {value}\n" for key, value in summarise(scores, NAMES).items()) == MEANS
    without = summarise(scores[2:], NAMES)
    assert {*without.values()} == {None} and not {"val/loss", "val/hd95_mm/left"} & without.keys()


CSV = """\
case,dice/left,dice/right,iou/left,iou/right,hd95_mm/left,hd95_mm/right
"a,1",0.5,,0.25,,2.0,
b,1.0,0.0,1.0,0.0,,
"""


def test_csv_has_a_row_a_case_and_leaves_n_a_empty() -> None:
    scores = [CaseScore("a,1", (0.5, None), (0.25, None), (2.0, None)), CaseScore("b", (1.0, 0.0), (1.0, 0.0))]
    assert csv_text(scores, NAMES).replace("\r\n", "\n") == CSV

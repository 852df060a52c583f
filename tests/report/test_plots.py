"""What the pictures show, and that nothing in them overlaps or is cut off."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from legibility import Drawn, drawing
from matplotlib.colors import to_hex

from unet3d.report import plots
from unet3d.report.plots import centre, colours

NAMES = ("background", "left", "right")
HEAVY = {"torch", "monai", "matplotlib", "wandb"}


@pytest.fixture
def draw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Drawn:
    return drawing(tmp_path, monkeypatch)


def lines(axes: Any) -> dict[str, Any]:
    return {line.get_label(): line for line in axes.lines}


# --- colours


@pytest.mark.parametrize("count", [1, 2, 7, 8, 30])
def test_every_class_has_a_colour_of_its_own(count: int) -> None:
    assert len({to_hex(colour) for colour in colours(count)}) == count


def test_a_class_keeps_its_colour_when_there_are_more() -> None:
    assert colours(7)[:3] == colours(3)


# --- curves


def training(*losses: float | str | None) -> list[dict[str, Any]]:
    return [{"step": step, "train/loss": loss} for step, loss in enumerate(losses, 1)]


def validation(step: int, **dice: float | None) -> dict[str, Any]:
    return {"step": step, **{f"val/dice/{name}": value for name, value in dice.items()}, "val/dice_mean": 0.5}


def test_curves_show_loss_and_dice_per_class_over_steps(draw: Drawn) -> None:
    records = [*training(1.0, 0.5), validation(2, left=0.25, right=None), validation(4, left=0.75, right=0.5)]
    loss, dice = draw(plots.training_curves, records).axes
    assert loss.lines[0].get_xydata().tolist() == [[1, 1.0], [2, 0.5]]
    shown = lines(dice)
    assert list(shown) == ["left", "right", "mean of classes"]
    assert shown["left"].get_xydata().tolist() == [[2, 0.25], [4, 0.75]]
    assert shown["right"].get_xydata().tolist() == [[4, 0.5]]
    assert dice.get_ylim()[0] == 0
    assert dice.get_ylim()[1] >= 1


def test_a_class_without_a_score_does_not_change_the_other_colours(draw: Drawn) -> None:
    _, dice = draw(plots.training_curves, [validation(2, left=None, right=0.5)]).axes
    assert to_hex(lines(dice)["right"].get_color()) == to_hex(colours(2)[1])


@pytest.mark.parametrize(
    ("losses", "scale"),
    [((2.0, 0.2), "linear"), ((2.0, 0.02), "log"), ((2.0, 0.02, -0.1), "linear"), ((2.0, "inf", "nan"), "linear")],
)
def test_the_loss_axis_is_logarithmic_where_that_helps(draw: Drawn, losses: tuple[float, ...], scale: str) -> None:
    assert draw(plots.training_curves, training(*losses)).axes[0].get_yscale() == scale


def test_a_loss_that_was_never_finite_is_said_to_be_so(draw: Drawn) -> None:
    (loss,) = draw(plots.training_curves, training("nan", "inf", None)).axes
    assert [text.get_text() for text in loss.texts] == ["no finite loss"]


def test_many_steps_are_smoothed_by_a_mean_of_the_steps_before(draw: Drawn) -> None:
    (loss,) = draw(plots.training_curves, training(*range(1, 501))).axes
    mean = lines(loss)["mean of 10 steps"].get_xydata()
    assert mean[0] == pytest.approx([10, 5.5])
    assert mean[-1] == pytest.approx([500, 495.5])


def test_many_classes_with_long_names_stay_legible(draw: Drawn) -> None:
    names = [f"structure_number_{i}_of_the_left_and_the_right_hemisphere" for i in range(30)]
    _, dice = draw(plots.training_curves, [*training(1, 0.5), validation(2, **dict.fromkeys(names, 0.5))]).axes
    shown = [text.get_text() for text in dice.get_legend().texts]
    assert len(shown) == 31 and all(text.startswith("structure number") and len(text) <= 24 for text in shown[:30])


# --- slices


def labels(shape: Sequence[int], *boxes: tuple[int, tuple[slice, ...]]) -> Any:
    made = np.zeros(shape, np.int64)
    for value, box in boxes:
        made[box] = value
    return made


def drawn(axes: Any) -> set[str]:
    """Colours of the classes that are drawn on an image."""
    if len(axes.images) == 1:
        return set()
    overlay = axes.images[1].get_array().reshape(-1, 4)
    return {to_hex(colour[:3]) for colour in overlay if colour[3]}


def test_the_picture_has_three_planes_of_image_truth_and_prediction(draw: Drawn) -> None:
    truth = labels((30, 20, 10), (1, np.s_[4:8, 4:8, 4:8]), (-100, np.s_[:, :, :2]))
    prediction = labels((30, 20, 10), (2, np.s_[4:8, 4:8, 4:8]))
    image = np.random.default_rng(0).random((30, 20, 10))
    figure = draw(
        plots.segmentation, image, {"truth": truth, "prediction": prediction}, (1, 1, 2.5), NAMES, title="case 7"
    )
    left, right = (to_hex(colour) for colour in colours(2))
    grid = np.array(figure.axes).reshape(3, 3)
    assert [axes.get_title() for axes in grid[0]] == ["image", "truth", "prediction"]
    dark = "#404040"  # the sagittal and the coronal plane cross what is unlabelled
    assert [[drawn(axes) for axes in row] for row in grid] == [
        [set(), {left, dark}, {right}],
        [set(), {left, dark}, {right}],
        [set(), {left}, {right}],
    ]
    assert [text.get_text() for text in figure.legends[0].texts] == ["left", "right", "unlabelled"]
    assert figure.get_suptitle() == "case 7"


def test_a_dollar_in_a_name_begins_no_formula(draw: Drawn) -> None:
    name = r"$\organ$"
    truth = labels((9, 9, 9), (1, np.s_[4:8, 4:8, 4:8]))
    picture = draw(plots.segmentation, np.zeros((9, 9, 9)), {"truth": truth}, (1, 1, 1), ("none", name), title=name)
    _, dice = draw(plots.training_curves, [*training(1, 0.5), validation(2, **{name: 0.5})]).axes
    escaped = r"\$\organ\$"
    assert picture.get_suptitle() == picture.legends[0].texts[0].get_text() == escaped
    assert dice.get_legend().texts[0].get_text() == escaped


def test_planes_have_their_true_proportions_and_say_where_they_are(draw: Drawn) -> None:
    truth = labels((30, 20, 10), (1, np.s_[4:7, 8:11, 2:5]), (255, np.s_[20:, :, 5:]))
    figure = draw(
        plots.segmentation,
        np.zeros(truth.shape),
        {"truth": truth, "prediction": truth},
        (1, 1.5, 4),
        NAMES,
        title="a",
    )
    rows = np.array(figure.axes).reshape(3, 3)[:, 0]
    assert [axes.images[0].get_extent() for axes in rows] == [[0, 30, 0, 40], [0, 30, 0, 40], [0, 30, 0, 30]]
    assert [axes.get_aspect() for axes in rows] == [1, 1, 1]
    assert [axes.get_ylabel() for axes in rows] == ["sagittal\nx = 5", "coronal\ny = 9", "axial\nz = 3"]
    assert [[text.get_text() for text in axes.texts] for axes in rows] == [["A", "S"], ["R", "S"], ["R", "A"]]


def test_a_plane_is_shown_with_its_axes_growing_to_the_right_and_upwards(draw: Drawn) -> None:
    image = np.arange(4 * 3 * 2.0).reshape(4, 3, 2)
    nothing = labels(image.shape)
    figure = draw(plots.segmentation, image, {"prediction": nothing}, (1, 1, 1), NAMES, title="a")
    axial = figure.axes[4].images[0]
    assert axial.origin == "lower"
    np.testing.assert_array_equal(axial.get_array(), image[:, :, 1].T)


def test_without_truth_there_are_two_columns_through_what_was_predicted(draw: Drawn) -> None:
    prediction = labels((20, 20, 20), (1, np.s_[15:18, 2:4, 9:12]))
    figure = draw(
        plots.segmentation, np.zeros(prediction.shape), {"prediction": prediction}, (1, 1, 1), NAMES, title="a"
    )
    grid = np.array(figure.axes).reshape(3, 2)
    assert [axes.get_title() for axes in grid[0]] == ["image", "prediction"]
    assert all(drawn(row[1]) for row in grid)


@pytest.mark.parametrize("shape", [(8, 64, 64), (64, 64, 4), (20, 30, 200), (1, 1, 1)])
def test_thin_and_tall_volumes_without_foreground_stay_legible(draw: Drawn, shape: tuple[int, int, int]) -> None:
    names = ["background", *(f"structure_number_{i}_of_the_left_and_the_right_hemisphere" for i in range(12))]
    maps = {"truth": labels(shape), "prediction": labels(shape)}
    figure = draw(plots.segmentation, np.zeros(shape), maps, (1, 1, 1), names, title="no foreground")
    assert len(figure.axes) == 9 and len(figure.legends[0].texts) == 12


def test_the_planes_through_the_centre_hold_some_of_the_mask() -> None:
    mask = np.zeros((9, 9, 9), bool)
    mask[0, :, 0] = mask[8, :, 0] = True  # its centre of mass lies between the two
    x, y, z = centre(mask)
    assert mask[x].any() and mask[:, y].any() and mask[:, :, z].any()
    assert centre(np.zeros((4, 6, 8), bool)) == [2, 3, 4]


def test_importing_the_report_loads_no_heavy_library() -> None:
    modules = "compare", "loggers", "memory_plots", "plots", "report"
    code = f"import sys; from unet3d.report import {', '.join(modules)}; print({HEAVY} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"

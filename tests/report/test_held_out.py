"""Held-out cases in a report: which are shown, what their pictures show, and the table and picture of all."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from legibility import Drawn, assert_written, drawing
from matplotlib.colors import to_hex

from unet3d.report import held_out
from unet3d.report.held_out import ERRORS, centre
from unet3d.report.plots import colours, training_curves

NAMES = ("background", "left", "right")


@pytest.fixture
def draw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Drawn:
    return drawing(tmp_path, monkeypatch)


def rows(**dice: tuple[float | None, float | None]) -> list[dict[str, Any]]:
    """Rows of scores.csv: Dice of two classes."""
    return [{"case": name, "dice/a": one, "dice/b": two, "hd95_mm/a": 2.0} for name, (one, two) in dice.items()]


# --- which cases


def names(found: list[dict[str, Any]]) -> dict[str, str]:
    return {role: case.name for role, case in held_out.chosen(found).items()}


def test_the_best_the_median_and_the_worst_are_by_the_mean_of_the_classes_that_a_case_has() -> None:
    found = rows(p=(0.9, None), q=(None, None), r=(0.2, 0.4), s=(0.5, 0.5), t=(1.0, 0.0), u=(0.8, 0.8))
    assert [case.name for case in held_out.ranked(found)] == ["r", "s", "t", "u", "p", "q"]
    assert names(found) == {"best": "p", "median": "t", "worst": "r"}
    assert held_out.chosen(found)["best"].classes == {"a": 0.9}


@pytest.mark.parametrize(
    ("found", "shown"),
    [
        (rows(a=(0.5, 0.5), b=(0.6, 0.6)), {"best": "b", "worst": "a"}),
        (rows(a=(0.5, 0.5), b=(None, None)), {"": "a"}),
        (rows(b=(None, None), a=(None, None)), {"": "a"}),
        (rows(c=(0.5, 0.5), a=(0.5, 0.5), b=(0.5, 0.5), d=(0.5, 0.5)), {"best": "d", "median": "b", "worst": "a"}),
        ([], {}),
        ([{"other": "1"}], {"": ""}),  # of a damaged file
    ],
)
def test_few_cases_equal_ones_and_such_without_a_class(found: list[dict[str, Any]], shown: dict[str, str]) -> None:
    assert names(found) == shown


def test_the_table_has_a_row_a_case_the_worst_first_and_is_bounded() -> None:
    found = rows(p=(0.9, None), r=(0.2, 0.4))
    table = held_out.case_table(found)
    assert table.columns[0] == "case" and table.columns[2:] == ["Dice a", "Dice b", "HD95 (mm) a"]
    assert table.rows == [["r", "0.300", "0.200", "0.400", "2.00"], ["p", "0.900", "0.900", "n/a", "2.00"]]
    wide = [{f"dice/{number}": 1.0 for number in range(500)} | {"case": str(case)} for case in range(300)]
    table = held_out.case_table(wide)
    assert (len(table.columns), len(table.rows)) == (202, 100)
    assert held_out.case_table([]).rows == []


# --- Dice of all


def test_dice_of_all_cases_is_points_and_of_many_a_box(draw: Drawn) -> None:
    found = held_out.dice_by_class(rows(p=(0.9, None), q=(0.1, 0.5), r=(0.2, 0.4), s=(0.5, 0.5)))
    assert found == {"a": [0.9, 0.1, 0.2, 0.5], "b": [0.5, 0.4, 0.5]}
    (axes,) = draw(held_out.score_plot, found | {"c": [0.4] * 5 + [0.6] * 4}).axes
    points = [line.get_ydata().tolist() for line in axes.lines if line.get_marker() == "o"]
    assert points[:2] == [[0.1, 0.2, 0.5, 0.9], [0.4, 0.5, 0.5]]
    assert [list(line.get_ydata()) for line in axes.lines if line.get_linewidth() == 2.2] == [[0.4, 0.4]], "one box"
    assert axes.get_ylim() == (-0.02, 1.02)
    (near,) = draw(held_out.score_plot, {"a": [0.85, 0.95]}).axes
    assert near.get_ylim() == pytest.approx((0.78, 1.02)), "close values are apart"


@pytest.mark.parametrize("count", [1, 30])
def test_scores_of_classes_with_long_names_stay_legible(draw: Drawn, count: int) -> None:
    name = "structure_number_{}_of_the_left_and_the_right_hemisphere"
    draw(held_out.score_plot, {name.format(number): [0.5, 0.6] for number in range(count)} | {"$none": []})


# --- pictures


def labels(shape: Sequence[int], *boxes: tuple[int, tuple[slice, ...]]) -> Any:
    made = np.zeros(shape, np.int64)
    for value, box in boxes:
        made[box] = value
    return made


def drawn(axes: Any) -> set[str]:
    """Colours that are painted on an image."""
    overlays = [image.get_array().reshape(-1, 4) for image in axes.images[1:]]
    return {to_hex(colour[:3]) for overlay in overlays for colour in overlay if colour[3]}


def outlined(axes: Any) -> set[str]:
    """Colours of the outlines."""
    return {to_hex(colour[:3]) for lines in axes.collections for colour in lines.get_edgecolor()}


def test_the_picture_has_three_planes_of_image_outlines_and_errors(draw: Drawn) -> None:
    truth = labels((30, 20, 10), (1, np.s_[4:8, 4:8, 4:8]), (-100, np.s_[:, :, :2]))
    prediction = labels((30, 20, 10), (2, np.s_[4:8, 4:6, 4:6]), (1, np.s_[8:9, 4:8, 4:8]), (1, np.s_[:, :, :2]))
    image = np.random.default_rng(0).random((30, 20, 10))
    layers = {"truth": truth, "prediction": prediction}
    figure = draw(held_out.segmentation, image, layers, (1, 1, 2.5), NAMES, title="case 7", where=(5, 5, 5))
    left, right = (to_hex(colour) for colour in colours(2))
    grid = np.array(figure.axes).reshape(3, 3)
    assert all(axes.get_title() for axes in grid[0])
    dark, missed, added, confused = "#404040", *(colour.lower() for colour in ERRORS.values())
    assert [[drawn(axes) for axes in row[:2]] for row in grid] == [[set(), {dark}], [set(), {dark}], [set(), set()]]
    assert [drawn(row[2]) for row in grid] == [
        {dark, missed, confused},  # what is unlabelled is no error
        {dark, missed, added, confused},
        {missed, added, confused},
    ]
    assert [outlined(row[1]) for row in grid] == [{left, right}] * 3 and not outlined(grid[0][0])
    texts = [text.get_text() for text in figure.legends[0].texts]
    assert texts[:-1] == ["left", "right", "truth", "prediction", *ERRORS]
    assert figure.get_suptitle() == "case 7"


def test_an_outline_lies_between_the_voxels_inside_and_outside_and_closes_at_the_edge(draw: Drawn) -> None:
    truth = labels((8, 8, 8), (1, np.s_[0:4, 2:4, 2:4]))
    layers = {"truth": truth, "prediction": np.zeros_like(truth)}
    figure = draw(held_out.segmentation, np.zeros((8, 8, 8)), layers, (2, 1, 1), NAMES, title="a", where=(2, 2, 2))
    (outline,) = figure.axes[7].collections  # axial: x to the right, y upwards
    (path,) = outline.get_paths()
    assert path.vertices.min(0).tolist() == [0, 2] and path.vertices.max(0).tolist() == [8, 4]
    assert path.vertices[0].tolist() == path.vertices[-1].tolist()


def test_slices_that_were_learned_have_a_column_of_their_own(draw: Drawn) -> None:
    truth = labels((9, 9, 9), (1, np.s_[2:5, 2:5, 2:5]))
    learned = np.where(np.arange(9)[:, None, None] == 3, truth, -100)
    layers = {"learned": learned, "truth": truth, "prediction": truth}
    figure = draw(held_out.segmentation, np.zeros((9, 9, 9)), layers, (1, 1, 1), NAMES, title="a", where=(4, 3, 3))
    grid = np.array(figure.axes).reshape(3, 4)
    assert drawn(grid[2][1]) == {to_hex(colours(2)[0]), "#404040"} and drawn(grid[2][3]) == set()


def test_a_dollar_in_a_name_begins_no_formula(draw: Drawn) -> None:
    name = r"$\organ$"
    truth = labels((9, 9, 9), (1, np.s_[4:8, 4:8, 4:8]))
    layers = {"truth": truth, "prediction": truth}
    picture = draw(held_out.segmentation, np.zeros((9, 9, 9)), layers, (1, 1, 1), ("none", name), title=name)
    record = {"step": 2, f"val/dice/{name}": 0.5, "val/dice_mean": 0.5}
    _, dice = draw(training_curves, [record]).axes
    escaped = r"\$\organ\$"
    assert picture.get_suptitle() == picture.legends[0].texts[0].get_text() == escaped
    assert dice.get_legend().texts[0].get_text() == escaped


def test_planes_have_their_true_proportions_and_say_where_they_are(draw: Drawn) -> None:
    truth = labels((30, 20, 10), (1, np.s_[4:7, 8:11, 2:5]), (255, np.s_[20:, :, 5:]))
    figure = draw(
        held_out.segmentation,
        np.zeros(truth.shape),
        {"truth": truth, "prediction": truth},
        (1, 1.5, 4),
        NAMES,
        title="a",
    )
    rows = np.array(figure.axes).reshape(3, 3)[:, 0]
    assert [axes.images[0].get_extent() for axes in rows] == [[0, 30, 0, 40], [0, 30, 0, 40], [0, 30, 0, 30]]
    assert [axes.get_aspect() for axes in rows] == [1, 1, 1]
    assert [axes.get_ylabel().splitlines()[-1] for axes in rows] == ["x = 5", "y = 9", "z = 3"]
    assert [[text.get_text() for text in axes.texts] for axes in rows] == [["A", "S"], ["R", "S"], ["R", "A"]]


def test_a_plane_is_shown_with_its_axes_growing_to_the_right_and_upwards(draw: Drawn) -> None:
    image = np.arange(4 * 3 * 2.0).reshape(4, 3, 2)
    nothing = labels(image.shape)
    figure = draw(held_out.segmentation, image, {"truth": nothing, "prediction": nothing}, (1, 1, 1), NAMES, title="a")
    axial = figure.axes[6].images[0]
    assert axial.origin == "lower"
    np.testing.assert_array_equal(axial.get_array(), image[:, :, 1].T)


def test_without_truth_the_planes_go_through_what_was_predicted(draw: Drawn) -> None:
    found = labels((20, 20, 20), (1, np.s_[15:18, 2:4, 9:12]))
    layers = {"truth": np.zeros_like(found), "prediction": found}
    figure = draw(held_out.segmentation, np.zeros(found.shape), layers, (1, 1, 1), NAMES, title="a")
    assert all(drawn(row[2]) == {ERRORS["false positive"].lower()} for row in np.array(figure.axes).reshape(3, 3))


@pytest.mark.parametrize("shape", [(8, 64, 64), (20, 30, 200), (1, 1, 1)])
def test_thin_and_tall_volumes_without_foreground_stay_legible(draw: Drawn, shape: tuple[int, int, int]) -> None:
    names = ["background", *(f"structure_number_{i}_of_the_left_and_the_right_hemisphere" for i in range(12))]
    maps = {"truth": labels(shape), "prediction": labels(shape)}
    figure = draw(held_out.segmentation, np.zeros(shape), maps, (1, 1, 1), names, title="no foreground " * 12)
    assert len(figure.axes) == 9 and len(figure.legends[0].texts) == 17


def test_the_planes_through_the_centre_hold_some_of_the_mask() -> None:
    mask = np.zeros((9, 9, 9), bool)
    mask[0, :, 0] = mask[8, :, 0] = True  # its centre of mass lies between the two
    x, y, z = centre(mask)
    assert mask[x].any() and mask[:, y].any() and mask[:, :, z].any()
    assert centre(np.zeros((4, 6, 8), bool)) == [2, 3, 4]


def test_pictures_are_written_as_png_and_svg(tmp_path: Path) -> None:
    truth = labels((9, 9, 9), (1, np.s_[4:8, 4:8, 4:8]))
    layers = {"truth": truth, "prediction": truth}
    assert_written(
        lambda path: held_out.segmentation(np.zeros(truth.shape), layers, (1, 1, 1), NAMES, path, "a"), tmp_path
    )

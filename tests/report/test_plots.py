"""What the pictures show, and that nothing in them overlaps or is cut off."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from legibility import Drawn, assert_written, drawing
from matplotlib.colors import to_hex

from unet3d.report import plots
from unet3d.report.plots import colours, curves_plot

NAMES = ("background", "left", "right")
HEAVY = {"torch", "monai", "matplotlib", "wandb"}


@pytest.fixture
def draw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Drawn:
    return drawing(tmp_path, monkeypatch)


def lines(axes: Any) -> dict[str, Any]:
    return {line.get_label(): line for line in axes.lines}


def marked(axes: Any, end: str) -> Any:
    """Return the one line whose name ends so."""
    (found,) = [line for name, line in lines(axes).items() if name.endswith(end)]
    return found


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
    assert list(shown)[:2] == ["left", "right"] and list(shown)[3].endswith("step 2"), "the first of equals"
    assert shown["left"].get_xydata().tolist() == [[2, 0.25], [4, 0.75]]
    assert shown["right"].get_xydata().tolist() == [[4, 0.5]]
    assert dice.get_ylim()[0] == 0
    assert dice.get_ylim()[1] >= 1


@pytest.mark.slow
def test_a_class_without_a_score_does_not_change_the_other_colours(draw: Drawn) -> None:
    _, dice = draw(plots.training_curves, [validation(2, left=None, right=0.5)]).axes
    assert to_hex(lines(dice)["right"].get_color()) == to_hex(colours(2)[1])


@pytest.mark.parametrize(
    ("losses", "scale"),
    [((2.0, 0.2), "linear"), ((2.0, 0.02), "log"), ((2.0, 0.02, -0.1), "linear"), ((2.0, "inf", "nan"), "linear")],
)
def test_the_loss_axis_is_logarithmic_where_that_helps(draw: Drawn, losses: tuple[float, ...], scale: str) -> None:
    assert draw(plots.training_curves, training(*losses)).axes[0].get_yscale() == scale


def test_the_loss_of_validations_is_drawn_beside_that_of_training(draw: Drawn) -> None:
    records = [*training(2.0, 0.02), validation(2, left=0.5) | {"val/loss": 1.5}, validation(4) | {"val/loss": "nan"}]
    loss, *_ = draw(plots.training_curves, records).axes
    shown = lines(loss)
    assert shown["training"].get_xydata().tolist() == [[1, 2.0], [2, 0.02]]
    assert shown["validation"].get_xydata().tolist()[0] == [2, 1.5] and loss.get_yscale() == "log"


def test_a_loss_that_was_never_finite_is_said_to_be_so(draw: Drawn) -> None:
    (loss,) = draw(plots.training_curves, training("nan", "inf", None)).axes
    (text,) = loss.texts
    assert text.get_text() and loss.get_yticks().tolist() == []


def test_many_steps_are_smoothed_by_a_mean_of_the_steps_before(draw: Drawn) -> None:
    (loss,) = draw(plots.training_curves, training(*range(1, 501))).axes
    (name,) = [name for name in lines(loss) if re.search(r"\b10\b", name)]
    mean = lines(loss)[name].get_xydata()
    assert mean[0] == pytest.approx([10, 5.5])
    assert mean[-1] == pytest.approx([500, 495.5])


def test_the_best_validation_is_marked_and_so_are_rate_norm_and_time(draw: Drawn) -> None:
    more = {"train/lr": 0.1, "train/grad_norm": "nan", "time/step_s": 2.0}
    best = validation(4, left=0.9) | {"val/dice_mean": 0.75}
    records = [one | more for one in training(1.0, 0.5)] + [validation(2, left=0.5), best]
    figure = draw(plots.training_curves, records)
    loss, dice, rate, norm, seconds = figure.axes
    assert marked(dice, "step 4").get_xydata().tolist() == [[4, 0.75]]
    assert marked(loss, "step 4").get_xdata() == [4, 4]
    assert [axes.get_title() for axes in (rate, norm, seconds)] == list(plots.SMALL_PANELS.values())
    assert seconds.lines[0].get_ydata().tolist() == [2.0, 2.0]
    assert rate.lines[0].get_xydata().tolist() == [[1, 0.1], [2, 0.1]] and rate.get_ylim()[0] == 0


def test_slow_first_steps_do_not_flatten_the_others(draw: Drawn) -> None:
    """A run of 40 steps that was resumed after 20: the first three of each part are observed."""
    seconds = [7.0 if step % 20 < 3 else 0.2 for step in range(40)]
    records = [one | {"time/step_s": seconds[at]} for at, one in enumerate(training(*range(1, 41)))]
    axes = draw(plots.training_curves, records).axes[-1]
    assert axes.get_ylim()[1] == pytest.approx(0.22) and axes.get_title() == "Seconds per step (some up to 7)"
    steady = [one | {"time/step_s": 0.2 + 0.2 * (at % 2)} for at, one in enumerate(training(*range(1, 41)))]
    assert draw(plots.training_curves, steady).axes[-1].get_ylim()[1] > 0.4


def test_runs_are_overlaid_by_step_and_long_ones_in_a_thousand_points(draw: Drawn) -> None:
    long = [{"step": step, "train/loss": step / 9} for step in range(1, 5001)]
    found = plots.curve(long, "train/loss")
    assert len(found[0]) <= 1000 and found[0][-1] == 5000 and not len(plots.curve(long, "a")[0])
    short = {"train/loss": plots.curve(training(1, 2), "train/loss")}
    dice = {"val/dice_mean": plots.curve([validation(3)], "val/dice_mean")}
    figure = draw(curves_plot, {f"{n}: model=a $": short | dice if n % 2 else short for n in range(20)})
    loss, dices = figure.axes
    assert len(loss.lines) == 20 and len(dices.lines) == 10 and len(dices.get_legend().texts) == 20
    assert loss.lines[0].get_xydata().tolist() == [[1, 1], [2, 2]]


def test_many_classes_with_long_names_stay_legible(draw: Drawn) -> None:
    names = [f"structure_number_{i}_of_the_left_and_the_right_hemisphere" for i in range(30)]
    _, dice = draw(plots.training_curves, [*training(1, 0.5), validation(2, **dict.fromkeys(names, 0.5))]).axes
    shown = [text.get_text() for text in dice.get_legend().texts]
    assert len(shown) == 32 and all(text.startswith("structure number") and len(text) <= 24 for text in shown[:30])


def test_importing_the_report_loads_no_heavy_library() -> None:
    modules = "held_out", "compare", "loggers", "memory_plots", "plots", "report"
    code = f"import sys; from unet3d.report import {', '.join(modules)}; print({HEAVY} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_pictures_are_written_as_png_and_svg(tmp_path: Path) -> None:
    assert_written(lambda path: plots.training_curves(training(1.0, 0.5), path), tmp_path)

"""What figures show, in golden files, and that nothing in them overlaps or is cut off; which cases they are of."""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from PIL import Image
from rendered import described, drawing
from tables import cells

from unet3d.base.types import MIB
from unet3d.memory.breakdown import TimelineRow
from unet3d.memory.ledger import CATEGORIES
from unet3d.report import held_out, memory_plots, plots
from unet3d.report.held_out import Score, segmentation
from unet3d.report.plots import colours, comparison_plot, curves_plot, training_curves

Draw = Callable[..., Figure]
LONG = "structure_number_{}_of_the_left_and_the_right_hemisphere"
RUNS = Path(__file__).parents[1] / "golden" / "runs"
CPU, GPU = (json.loads((RUNS / name / "memory.json").read_text())["measured"] for name in ("finished", "gpu"))


@pytest.fixture
def draw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Draw:
    return drawing(tmp_path, monkeypatch)


# What figures of plain values are drawn from: the function: {the figure: its arguments}.
PLAIN = """
training_curves:
  curves:
    - - {step: 1, train/loss: 1.0, train/lr: 0.1, train/grad_norm: nan, time/step_s: 2.0}
      - {step: 2, train/loss: 0.5, train/lr: 0.1, train/grad_norm: nan, time/step_s: 2.0}
      - {step: 2, val/dice_mean: 0.4, val/dice/left: 0.25, val/dice/right: null, val/loss: 1.5}
      - {step: 4, val/dice_mean: 0.6, val/dice/left: 0.75, val/dice/right: 0.5, val/loss: nan}
      - {step: 6, val/dice_mean: 0.6}
  curves_of_one_class:
    - - {step: 1, train/loss: 2.0}
      - {step: 2, train/loss: -0.01}
      - {step: 2, val/dice_mean: 0.5, val/dice/left: null, 'val/dice/$\\right$': 0.5}
  curves_never_finite: [[{step: 1, train/loss: nan}, {step: 2, train/loss: inf}, {step: 3, train/loss: null}]]
comparison_plot:
  compared:  # the third loses to the first in time and wins in Dice
    - "0: x=0": {peak_measured_bytes: 1048576, measured_kind: ledger, step_median_s: 5.0, dice_mean: 0.2}
      "1: x=1": {peak_measured_bytes: 2097152, measured_kind: ledger, step_median_s: 3, dice_mean: 0.1, dice_sd: 0.05}
      "2: x=2": {peak_measured_bytes: 3145728, measured_kind: ledger, step_median_s: 6.0, dice_mean: 0.9}
      "3: x=3": {peak_measured_bytes: 2097152, measured_kind: ledger, step_median_s: 4.0}
      "4: x=0": {peak_measured_bytes: 1048576, measured_kind: ledger, step_median_s: 5.0, dice_mean: 0.2}
    - &remark "Not comparable: the runs differ in data.patch, data.phantom.cases, data.fold, seed, device, kind of peak,
        model.features, model.norm, model.activation, optim.name, optim.lr, optim.momentum, optim.weight_decay"
  compared_kinds:  # the Dice of which differs by noise
    - a: {peak_measured_bytes: 1048576, measured_kind: ledger, step_median_s: 9, dice_mean: 0.038, dice_grid: files}
      b: {peak_measured_bytes: 2097152, measured_kind: cuda, step_median_s: 8, dice_mean: 0.0381, dice_grid: files}
      c: {peak_measured_bytes: 3145728, measured_kind: ledger, step_median_s: 7, dice_mean: 0.0382, dice_grid: files}
      d: {peak_measured_bytes: 4194304, measured_kind: cuda, step_median_s: 6, dice_mean: 0.0383, dice_grid: files}
    - ""
  compared_predictions:
    - "0: model=unet $x_{$ optimizer=adamw optimizer=adamw optimizer=adamw": {peak_predicted_bytes: 5000000000}
      "1: model=unet": {peak_predicted_bytes: 5000000000}
    - *remark
score_plot:
  scores: [{a: [0.9, 0.1, 0.2, 0.5], b: [0.5, 0.4], c: [0.4, 0.4, 0.4, 0.4, 0.4, 0.6, 0.6, 0.6, 0.6]}]
  scores_near: [{a: [0.85, 0.95]}]
phase_plot:
  phases_of_an_allocator:
    - kind: cuda allocated
      phases:
        data: {first: 1000000000, steady: 2000000000}
        backward: {first: 90000000000, steady: 70000000000}
peak_curves:
  peaks:
    - - ["batch (patches)", {plain: [[1, 1048576], [2, 2097152]], ckpt=2: [[1, 524288], [2, 1048576]]}]
      - ["first-level width (channels)", {ckpt=2: [[8, 7340032], [64, 31457280]]}]
      - ["patch (voxels)", {plain: [[262144, 94371840], [16777216, 1048576000]]}]
  peaks_with_long_names:
    - - - patch (million voxels)
        - predicted with checkpoints in 1 stage: [[0.5, 1048576], [1.5, 1048576]]
          predicted with checkpoints in 2 stages: [[0.5, 2097152], [1.5, 4194304]]
          predicted with checkpoints in 3 stages: [[0.5, 3145728], [1.5, 9437184]]
          predicted with checkpoints in 4 stages: [[0.5, 4194304], [1.5, 16777216]]
"""
FUNCTIONS = (plots.training_curves, plots.comparison_plot, held_out.score_plot)
FUNCTIONS += (memory_plots.phase_plot, memory_plots.peak_curves)


def plain_figures() -> dict[str, tuple[Any, ...]]:
    found = yaml.safe_load(PLAIN)
    return {
        name: (function, *arguments) for function in FUNCTIONS for name, arguments in found[function.__name__].items()
    }


def training(*losses: float | str) -> list[dict[str, Any]]:
    return [{"step": step, "train/loss": loss} for step, loss in enumerate(losses, 1)]


def slow_starts(count: int, resumed: int) -> list[dict[str, Any]]:
    """Records of a run whose first three steps are observed, and take long, at its start and after it was resumed."""
    seconds = [7.0 if step % resumed < 3 else 0.2 for step in range(count)]
    return [one | {"time/step_s": seconds[at]} for at, one in enumerate(training(*np.geomspace(2, 0.02, count)))]


def overlaid(count: int) -> dict[str, Any]:
    """Runs of which every other one was validated, and the last was long."""
    short = {"train/loss": plots.curve(training(1, 2), "train/loss")}
    scored = short | {"val/dice_mean": plots.curve([{"step": 3, "val/dice_mean": 0.5}], "val/dice_mean")}
    long = {"train/loss": plots.curve(training(*(step / 9 for step in range(1, 5001))), "train/loss")}
    return {f"{n}: model=a $": scored if n % 2 else short for n in range(count)} | {"long": long}


def labels(shape: Sequence[int], *boxes: tuple[int, tuple[slice, ...]]) -> Any:
    made = np.zeros(shape, np.int64)
    for value, box in boxes:
        made[box] = value
    return made


def case(truth: Any, prediction: Any, names: Sequence[str] = ("background", "left", "right"), **more: Any) -> tuple:
    """A function that draws a case, and what it takes; `more`: where planes meet, image, title, spacing, layers."""
    layers = {**more.pop("layers", {}), "truth": truth, "prediction": prediction}
    image, spacing = more.pop("image", np.zeros(truth.shape)), more.pop("spacing", (1, 1, 1))
    return partial(segmentation, **{"title": "case 7"} | more), image, layers, spacing, names


CUBE = labels((9, 9, 9), (1, np.s_[4:8, 4:8, 4:8]))
NOTHING = labels((4, 3, 2))
ERRONEOUS = case(
    labels((30, 20, 10), (1, np.s_[4:8, 4:8, 4:8]), (-100, np.s_[:, :, :2])),
    labels((30, 20, 10), (2, np.s_[4:8, 4:6, 4:6]), (1, np.s_[8:9, 4:8, 4:8]), (1, np.s_[:, :, :2])),
    where=(5, 5, 5),
    spacing=(1, 1.5, 4),
)


def entry_of(layers: dict[str, int | None]) -> dict[str, Any]:
    """A ledger's entry in which each of these layers, name: level, holds one MiB of activations."""
    nothing = dict.fromkeys(CATEGORIES, 0)
    rows = [
        {"module": name, "level": level, **nothing, "bytes": MIB, "activations": MIB} for name, level in layers.items()
    ]
    return {"peak_bytes": MIB * len(rows), "moment": {"words": "backward of up1.conv1"}, "layers": rows}


def along_the_u(depth: int) -> dict[str, Any]:
    levels = {f"down{n}.conv{i}": n for n in range(1, depth + 1) for i in (1, 2)}
    levels |= {f"up{n}.conv{i}": depth - n for n in range(1, depth + 1) for i in (1, 2)}
    return entry_of({"inc.conv1": 0, "inc.conv2": 0, **levels})


def events(count: int, peak: int) -> list[TimelineRow]:
    """The events of a step, of which the peak's allocates a MiB."""
    sizes = [MIB if at == peak else 0 for at in range(count)]
    phases = ["forward" if at < count // 2 else "backward" for at in range(count)]
    return [TimelineRow(phase, "inc.conv1", "temporaries", size) for phase, size in zip(phases, sizes, strict=True)]


STEP = [
    *(TimelineRow("data", "data", "inputs", MIB), TimelineRow("forward", "inc", "activations", 4 * MIB)),
    *(TimelineRow("backward", "inc", "grads", 2 * MIB), TimelineRow("backward", "inc", "activations", -4 * MIB)),
    *(TimelineRow("step", "step", "optimizer", 3 * MIB), TimelineRow("step", "step", "grads", -2 * MIB)),
]
FOLDS = [
    (
        f"{n}: {'long_' * 9}",
        {"": Score((0.6, 0.8), {}, 0.7, 0.1, 0.7, 0.1), "left": Score((0.5 + n / 9, None), {}, 0.5, None, None, None)},
    )
    for n in range(2)
]
CURVES_OF_MANY = {"step": 2, "val/dice_mean": 0.5} | {f"val/dice/{LONG.format(n)}": 0.5 for n in range(30)}
COMPARED = {"peak_measured_bytes": 5000 * MIB, "measured_kind": "ledger", "step_median_s": 0.1, "dice_mean": 0.1}
FIGURES: dict[str, tuple[Any, ...]] = {
    **plain_figures(),
    "curves_of_many_steps": (training_curves, slow_starts(500, 250)),
    "curves_of_many_classes": (training_curves, [CURVES_OF_MANY]),
    "curves_overlaid": (curves_plot, overlaid(20)),
    "compared_many": (comparison_plot, {f"{n}: {'optimizer=adamw ' * 9}": COMPARED for n in range(24)}, ""),
    "scores_of_many": (held_out.score_plot, {LONG.format(n): [0.5, 0.6] for n in range(30)} | {"$none": []}),
    "folds": (held_out.folds_plot, FOLDS),
    "case": ERRONEOUS,
    "case_learned": case(CUBE, CUBE, layers={"learned": np.where(np.arange(9)[:, None, None] == 5, CUBE, -100)}),
    "case_without_truth": case(np.zeros_like(CUBE), CUBE, ("none", r"$\organ$"), title=r"$\organ$"),
    "case_small": case(NOTHING, NOTHING, image=np.arange(24.0).reshape(4, 3, 2), title="no foreground " * 12),
    "case_flat": case(labels((8, 64, 64)), labels((8, 64, 64)), ["background", *map(LONG.format, range(12))]),
    "phases": (memory_plots.phase_plot, CPU),
    "phases_without_the_first_step": (memory_plots.phase_plot, GPU),
    "timeline": (memory_plots.timeline_plot, {"params": MIB // 2}, STEP),
    "timeline_with_a_late_peak": (memory_plots.timeline_plot, {"params": MIB // 2}, events(10_000, 9999)),
    "layers": (memory_plots.layer_plot, CPU),
    "layers_of_a_deep_network": (memory_plots.layer_plot, along_the_u(5)),
    "layers_without_levels": (memory_plots.layer_plot, entry_of({"data": 0, "stem": None, "body.0": None, "loss": 0})),
}


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_is_legible_and_shows(name: str, draw: Draw, golden: Callable[[str, str], None]) -> None:
    golden(f"figures/{name}.txt", described(draw(*FIGURES[name])))


def test_the_areas_of_a_step_end_at_the_bytes_alive_before_and_after_each_event(draw: Draw) -> None:
    (axes,) = draw(memory_plots.timeline_plot, {"params": MIB // 2}, STEP).axes
    outline = axes.collections[-1].get_paths()[0].vertices
    assert [max(y for x, y in outline if x == event) for event in range(1, 7)] == [1.5, 5.5, 7.5, 7.5, 6.5, 6.5]


def test_figures_are_written_as_png_on_white_paper_and_the_same_as_svg_always_alike(tmp_path: Path) -> None:
    found = []
    for _ in range(2):
        training_curves(training(1.0, 0.5), tmp_path / "figure.png")
        found.append([path.read_bytes() for path in sorted(tmp_path.iterdir())])
    assert found[0] == found[1] and found[0][1].startswith(b"<?xml")
    with Image.open(tmp_path / "figure.png") as image:
        assert image.convert("RGBA").getpixel((0, image.height - 1)) == (255, 255, 255, 255)


def test_each_class_and_category_has_one_colour_however_many_there_are() -> None:
    assert [len({*map(to_hex, colours(count))}) for count in (1, 7, 8, 30)] == [1, 7, 8, 30]
    assert colours(7)[:3] == colours(3)
    assert set(memory_plots.KINDS) == set(CATEGORIES) and len({*memory_plots.KINDS.values()}) == len(CATEGORIES)


def test_importing_the_report_loads_no_heavy_library() -> None:
    modules = "held_out, compare, loggers, memory_plots, plots, report"
    heavy = {"torch", "monai", "matplotlib", "wandb"}
    code = f"import sys; from unet3d.report import {modules}; print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


# --- which cases are shown


# Cases with the Dice of their classes | the best, the median and the worst.
CHOSEN = """
p=0.9 q= r=0.2,0.4 t=1.0,0.0   | best p, median t, worst r
a=0.5,0.5 b=0.6,0.6            | best b, worst a
b= a=                          |  a
c=0.5 a=0.5 b=0.5 d=0.5        | best d, median b, worst a
"""


@pytest.mark.parametrize(("given", "shown"), cells(CHOSEN))
def test_the_best_the_median_and_the_worst_case_are_by_the_mean_of_their_classes(given: str, shown: str) -> None:
    found = []
    for name, _, values in (case.partition("=") for case in given.split()):
        dice = dict(enumerate(map(float, filter(None, values.split(",")))))
        found.append({"case": name, **{f"dice/{number}": value for number, value in dice.items()}})
    assert ", ".join(f"{role} {case.name}" for role, case in held_out.chosen(found).items()).strip() == shown


def test_no_row_and_a_row_of_a_damaged_file_have_no_role() -> None:
    assert held_out.chosen([]) == {} and held_out.chosen([{"other": "1"}])[""].name == ""


def test_the_table_of_cases_is_bounded() -> None:
    wide = [{f"dice/{number}": 1.0 for number in range(500)} | {"case": str(case)} for case in range(300)]
    table = held_out.case_table(wide)
    assert (len(table.columns), len(table.rows)) == (202, 100)


def test_the_planes_through_the_centre_hold_some_of_the_mask() -> None:
    mask = np.zeros((9, 9, 9), bool)
    mask[0, :, 0] = mask[8, :, 0] = True  # its centre of mass lies between the two
    x, y, z = held_out.centre(mask)
    assert mask[x].any() and mask[:, y].any() and mask[:, :, z].any()
    assert held_out.centre(np.zeros((4, 6, 8), bool)) == [2, 3, 4]

"""What the pictures of memory show, in MiB, and that nothing in them overlaps or is cut off."""

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from legibility import assert_written, drawing
from matplotlib.axes import Axes
from matplotlib.colors import to_hex

from unet3d.base.types import MIB
from unet3d.config import compose
from unet3d.memory import breakdown
from unet3d.memory.ledger import CATEGORIES
from unet3d.memory.meter import LedgerMeter
from unet3d.memory.prediction import MemoryEstimate
from unet3d.report import memory_plots

Draw = Callable[..., Axes]
PHASES = ["data", "forward", "loss", "backward", "step"]
COLOUR_OF = dict(memory_plots.KINDS.values())


@cache
def meter() -> LedgerMeter:
    """The meter of some simulated steps of a small network."""
    config = compose.compose(["model=unet_tiny", "data.patch=[16,16,16]"])
    config.model.in_channels, config.model.classes = 2, 3
    return MemoryEstimate(config, config.model).meter


def entry_of(layers: dict[str, int | None]) -> dict[str, Any]:
    """A ledger's entry in which each of these layers, name: level, holds one MiB of activations."""
    nothing = dict.fromkeys(CATEGORIES, 0)
    rows = [
        {"module": name, "level": level, **nothing, "bytes": MIB, "activations": MIB} for name, level in layers.items()
    ]
    return {"peak_bytes": MIB * len(rows), "moment": {"words": "backward of up1.conv1"}, "layers": rows}


@pytest.fixture
def draw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Axes]:
    """The first axes of what was drawn."""
    call = drawing(tmp_path, monkeypatch)
    return lambda *arguments: call(*arguments).axes[0]


def legend(axes: Axes) -> dict[str, str]:
    """Names and colours of the bars and areas."""
    (found,) = axes.figure.legends
    pairs = zip(found.texts, found.legend_handles, strict=True)
    return {text.get_text(): to_hex(h.get_facecolor()) for text, h in pairs if hasattr(h, "get_facecolor")}


def lengths(axes: Axes, of: str) -> dict[str, np.ndarray]:
    """Name of a kind: its bars."""
    return {bars.get_label(): np.array([getattr(bar, of)() for bar in bars]) for bars in axes.containers}


# --- phases


@pytest.mark.slow
def test_a_phase_s_bar_is_as_long_as_its_categories_at_its_peak(draw: Callable[..., Axes]) -> None:
    entry = meter().summary()
    axes = draw(memory_plots.phase_plot, entry)
    widths = lengths(axes, "get_width")
    for category, (name, _) in memory_plots.KINDS.items():
        expected = [entry["phase_categories"][phase][category] / MIB for phase in PHASES]
        assert widths[name] == pytest.approx(expected)
    ends = [bar.get_x() + bar.get_width() for bar in axes.containers[-1]]
    assert ends == pytest.approx([entry["phases"][phase]["steady"] / MIB for phase in PHASES])
    assert [text.get_text() for text in axes.texts] == [f"{end:,.1f}" for end in ends]
    assert axes.lines[0].get_xdata() == pytest.approx([entry["phases"][phase]["first"] / MIB for phase in PHASES])
    assert [label.get_text() for label in axes.get_yticklabels()] == [*PHASES[:-1], "optimizer"]
    assert entry["kind"] in axes.get_title() and "(MiB)" in axes.get_xlabel()


def allocator(scale: float) -> dict[str, Any]:
    peaks = {"data": (1, 2), "forward": (60, 60), "loss": (61, 61), "backward": (90, 70), "step": (3, 4)}
    phases = {name: {"first": int(a * scale), "steady": int(b * scale)} for name, (a, b) in peaks.items()}
    return {"peak_bytes": int(90 * scale), "kind": "cuda allocated", "phases": phases}


@pytest.mark.parametrize("scale", [1e3, 1e9])
def test_an_allocator_that_knows_no_categories_has_plain_bars(draw: Callable[..., Axes], scale: float) -> None:
    entry = allocator(scale)
    axes = draw(memory_plots.phase_plot, entry)
    (bars,) = axes.containers
    expected = [entry["phases"][phase]["steady"] / MIB for phase in PHASES]
    assert [bar.get_width() for bar in bars] == pytest.approx(expected)
    assert len(legend(axes)) == 1
    assert [len(re.findall(r"\d[\d,.]*", text.get_text())) for text in axes.texts] == [1, 1, 1, 2, 1]
    assert f"{90 * scale / MIB:,.1f}" in axes.texts[3].get_text(), "of the first step, where it was higher"


def test_phases_whose_first_step_is_unknown_have_no_mark_for_it(draw: Callable[..., Axes]) -> None:
    entry = allocator(1e7)
    for peaks in entry["phases"].values():
        del peaks["first"]
    axes = draw(memory_plots.phase_plot, entry)
    assert not axes.lines and len(legend(axes)) == 1
    assert [text.get_text() for text in axes.texts] == [
        f"{entry['phases'][phase]['steady'] / MIB:,.1f}" for phase in PHASES
    ]


# --- timeline


def alive_bytes(start: dict[str, int], rows: list[breakdown.TimelineRow]) -> np.ndarray:
    return np.cumsum([sum(start.values()), *(row.change_bytes for row in rows)])


def test_the_areas_of_a_step_end_at_the_bytes_alive_after_every_event(draw: Callable[..., Axes]) -> None:
    start, rows = breakdown.timeline_rows(meter().ledger)
    axes = draw(memory_plots.timeline_plot, start, rows)
    outline = axes.collections[-1].get_paths()[0].vertices
    highest = np.zeros(len(rows) + 1)
    np.maximum.at(highest, outline[:, 0].astype(int), outline[:, 1])
    alive = alive_bytes(start, rows) / MIB
    assert highest[1:] == pytest.approx(np.maximum(alive[1:], alive[:-1]))  # at an event, before it and after it
    assert highest.max() == pytest.approx(meter().summary()["peak_bytes"] / MIB)
    assert axes.get_xlim() == (0, len(rows))


def test_the_peak_of_a_step_is_named_and_its_categories_lie_on_each_other(draw: Callable[..., Axes]) -> None:
    start, rows = breakdown.timeline_rows(meter().ledger)
    entry = meter().summary()
    axes = draw(memory_plots.timeline_plot, start, rows)
    peak = rows[int(alive_bytes(start, rows)[1:].argmax())]
    assert f"{entry['peak_bytes'] / MIB:,.1f} MiB, {peak.module}" in [text.get_text() for text in axes.texts]
    marker = axes.lines[0].get_xydata()[0]
    assert marker == pytest.approx([1 + rows.index(peak), entry["peak_bytes"] / MIB])
    assert [area.get_label() for area in axes.collections] == [name for name, _ in memory_plots.KINDS.values()]


def test_phases_too_narrow_for_their_names_have_none(draw: Callable[..., Axes]) -> None:
    axes = draw(memory_plots.timeline_plot, *breakdown.timeline_rows(meter().ledger))
    names = {text.get_text() for text in axes.texts}
    assert "backward" in names
    assert "data" not in names  # two events wide


@pytest.mark.parametrize("peak", [None, pytest.param(0, marks=pytest.mark.slow), 9999])
def test_a_peak_anywhere_in_many_events_is_legible(draw: Callable[..., Axes], peak: int | None) -> None:
    rows = [
        breakdown.TimelineRow("forward" if i < 5000 else "backward", "inc.conv1", "temporaries", change)
        for i, change in enumerate(MIB if i == peak else 0 for i in range(10000))
    ]
    axes = draw(memory_plots.timeline_plot, {"params": MIB // 2}, rows)
    kinds = ["params"] if peak is None else ["params", "temporaries"]
    assert set(legend(axes)) == {memory_plots.KINDS[kind][0] for kind in kinds}
    assert axes.lines[0].get_xdata()[0] == (0 if peak is None else peak + 1)


# --- along the U


def test_the_layers_at_the_peak_stand_in_the_order_of_the_network_and_make_up_the_peak(
    draw: Callable[..., Axes],
) -> None:
    entry = meter().summary()
    axes = draw(memory_plots.layer_plot, entry)
    heights = lengths(axes, "get_height")
    assert sum(heights.values()).sum() == pytest.approx(entry["peak_bytes"] / MIB)
    for category in CATEGORIES:
        name, _ = memory_plots.KINDS[category]
        assert heights.get(name, np.zeros(1)).sum() == pytest.approx(entry["categories"][category] / MIB)
    names = [label.get_text() for label in axes.get_xticklabels()]
    sizes = dict(zip(names, sum(heights.values()), strict=True))
    for layer in entry["layers"]:
        if layer["level"] is not None:
            assert sizes[layer["module"]] == pytest.approx(layer["bytes"] / MIB)
    along = [name.split(".")[0] for name in names]
    assert list(dict.fromkeys(along)) == ["data", "inc", "down1", "down2", "up1", "up2", "outc", "loss", "other"]
    assert names.index("down1.pool") < names.index("down1.conv1") < names.index("down1.conv2")


def test_what_belongs_to_no_level_is_one_bar(draw: Callable[..., Axes]) -> None:
    entry = dict(meter().summary())
    lost = [{**entry["layers"][0], "module": name, "level": None} for name in ("backward", "step")]
    entry["layers"] = [*(layer for layer in entry["layers"] if layer["level"] is not None), *lost]
    axes = draw(memory_plots.layer_plot, entry)
    assert [label.get_text() for label in axes.get_xticklabels()][-1] == "other"
    last = sum(heights[-1] for heights in lengths(axes, "get_height").values())
    assert last == pytest.approx(2 * lost[0]["bytes"] / MIB)


def test_every_level_is_named_down_the_u_and_up_again(draw: Callable[..., Axes]) -> None:
    encoder = {f"down{n}.conv{i}": n for n in range(1, 6) for i in (1, 2)}
    decoder = {f"up{n}.conv{i}": 5 - n for n in range(1, 6) for i in (1, 2)}
    deep = entry_of({"inc.conv1": 0, "inc.conv2": 0, **encoder, **decoder})
    for entry, steps in ((meter().summary(), 2), (deep, 5)):
        named = [" ".join(text.get_text().split()) for text in draw(memory_plots.layer_plot, entry).texts]
        expected = [*range(steps + 1), *range(steps - 1, -1, -1)]
        assert [re.findall(r"\d+", name) for name in named] == [[str(n)] for n in expected]


def test_a_network_without_levels_has_a_bar_per_layer(draw: Callable[..., Axes]) -> None:
    axes = draw(memory_plots.layer_plot, entry_of({"data": 0, "stem": None, "body.0": None, "loss": 0, "step": None}))
    assert [text.get_text() for text in axes.get_xticklabels()] == ["data", "stem", "body.0", "loss", "step"]
    only = draw(memory_plots.layer_plot, entry_of({"stem": None}))
    assert [text.get_text() for text in only.get_xticklabels()] == ["stem"]


# --- all of them


def test_what_bytes_are_for_has_one_colour_in_all_pictures(draw: Callable[..., Axes]) -> None:
    assert set(memory_plots.KINDS) == set(CATEGORIES)
    assert len(set(COLOUR_OF.values())) == len(COLOUR_OF)
    entry = meter().summary()
    found = [
        draw(memory_plots.phase_plot, entry),
        draw(memory_plots.timeline_plot, *breakdown.timeline_rows(meter().ledger)),
    ]
    for axes in [*found, draw(memory_plots.layer_plot, entry)]:
        for name, colour in legend(axes).items():
            assert colour == COLOUR_OF[name].lower()
    without_gradients = {phase: {**kinds, "grads": 0} for phase, kinds in entry["phase_categories"].items()}
    shown = legend(draw(memory_plots.phase_plot, entry | {"phase_categories": without_gradients}))
    assert set(COLOUR_OF) - set(shown) == {memory_plots.KINDS["grads"][0]}


def test_curves_share_their_memory_axis_and_keep_a_series_colour(draw: Callable[..., Axes]) -> None:
    panels = [
        ("batch (patches)", {"plain": [(1, MIB), (2, 2 * MIB)], "ckpt=2": [(1, MIB // 2), (2, MIB)]}),
        ("first-level width (channels)", {"ckpt=2": [(8, 7 * MIB), (64, 30 * MIB)]}),
        ("patch (voxels)", {"plain": [(64**3, 90 * MIB), (256**3, 1000 * MIB)]}),
    ]
    grid = draw(memory_plots.peak_curves, panels).figure.axes
    assert [axes.get_xlabel() for axes in grid] == [title for title, _ in panels]
    assert "(MiB)" in grid[0].get_ylabel()
    assert grid[0].lines[0].get_xydata().tolist() == [[1, 1], [2, 2]]
    assert grid[0].lines[1].get_color() == grid[1].lines[0].get_color()
    assert grid[0].get_ylim() == grid[2].get_ylim()
    assert grid[0].get_ylim()[0] == 0
    assert [text.get_text() for text in grid[0].figure.legends[0].texts] == ["plain", "ckpt=2"]


def test_a_single_curve_with_long_names_is_legible(draw: Callable[..., Axes]) -> None:
    series = {f"predicted with checkpoints in {n} stages": [(0.5, n * MIB), (1.5, n**2 * MIB)] for n in range(1, 10)}
    axes = draw(memory_plots.peak_curves, [("patch (million voxels)", series)])
    assert [text.get_text() for text in axes.figure.legends[0].texts] == list(series)


def test_pictures_are_written_as_png_and_svg(tmp_path: Path) -> None:
    assert_written(lambda path: memory_plots.phase_plot(allocator(1e7), path), tmp_path)

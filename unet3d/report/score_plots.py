"""Figures of Dice by class: of the held-out cases of a run, and of the folds of cross-validated methods."""

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from unet3d.report.plots import (
    BESIDE,
    DARK,
    LETTER,
    LINE,
    MARKERS,
    Array,
    blank,
    colours,
    grid_below,
    open_frame,
    save_picture,
    short_label,
    short_name,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from unet3d.report.folds import Score

CASES_OF_A_BOX = 8  # at least: of fewer, a box from quartile to quartile says little
LETTERS_ABREAST = 50  # of the classes' names; longer ones are turned
MOST_CLASSES = 20  # of the folds' figure


def score_plot(dice: Mapping[str, Sequence[float]], path: Path) -> None:
    """Draw the Dice of the cases, a point each, by class; of eight cases and more with a box between the quartiles.

    The axis begins at a tenth below the lowest.
    """
    figure = blank(max(4.8, 0.55 * len(dice) + 2.0), 3.6)
    axes = figure.subplots()
    palette = colours(len(dice))
    for place, values in enumerate(dice.values()):
        ordered = np.sort(np.array(values, float))
        aside = 0.16 * (np.arange(len(ordered)) * 0.618 % 1 - 0.5)  # equal values lie beside each other
        axes.plot(
            place + aside,
            ordered,
            "o",
            color=palette[place],
            mec="black",
            mew=0.4,
            ms=4,
            alpha=0.8,
            zorder=3,
        )
        if len(ordered) >= CASES_OF_A_BOX:
            _draw_box(axes, place, ordered)
    names = [short_name(name) for name in dice]
    longest = max((len(name) for name in names), default=0)
    is_long = longest * len(names) > LETTERS_ABREAST
    axes.set_xticks(range(len(dice)), names, rotation=90 if is_long else 0)
    lowest = min((value for values in dice.values() for value in values), default=0.0)
    bottom = max(0.0, np.floor(10 * lowest - 0.5) / 10)
    axes.set(
        xlim=(-0.6, len(dice) - 0.4),
        ylim=(bottom - 0.02, 1.02),
        ylabel="Dice",
        title="Dice of each held-out case",
    )
    grid_below(axes, "y")
    open_frame(axes)
    save_picture(figure, path)


def _draw_box(axes: "Axes", place: int, values: Array) -> None:
    """Draw a box from quartile to quartile, with a thick line at the median."""
    thin: dict[str, Any] = {"color": DARK, "linewidth": 1.1}
    axes.boxplot(
        [values],
        positions=[place],
        widths=0.5,
        showfliers=False,
        boxprops=thin,
        whiskerprops=thin,
        capprops=thin,
        medianprops=thin | {"linewidth": 2.2},
    )


def folds_plot(methods: Sequence[tuple[str, Mapping[str, "Score"]]], path: Path) -> None:
    """Draw the Dice of each method (label, its scores by class): one point per fold, and their mean with its SD."""
    labels = [short_label(label) for label, _ in methods]
    names = list(dict.fromkeys(name for _, scores in methods for name in scores))[:MOST_CLASSES]
    of_classes = (0.25 * len(methods) + 0.6) * len(names)
    longest = max(len(label) for label in labels)
    figure = blank(max(4.0, of_classes) + LETTER * longest + 1.6, max(4.0, LINE * len(methods) + 1.4))
    axes = figure.subplots()
    apart = 0.8 / len(methods)
    for number, (label, (marker, colour)) in enumerate(zip(labels, cycle(MARKERS), strict=False)):
        shift = apart * (number - (len(methods) - 1) / 2)
        by_class = methods[number][1]
        _draw_method(axes, [by_class.get(name) for name in names], shift, marker, colour)
        axes.plot([], [], marker, color=colour, mec="black", mew=0.5, ms=7, label=label)
    axes.set_xticks(range(len(names)), [short_name(name) if name else "mean of\nclasses" for name in names])
    if len(names) > 4:
        axes.tick_params("x", rotation=90)
    axes.set_xlim(-0.6, len(names) - 0.4)
    axes.set_ylabel("Dice: folds, their mean ± SD")
    grid_below(axes, "y")
    open_frame(axes)
    axes.legend(**BESIDE)
    save_picture(figure, path)


def _draw_method(
    axes: "Axes",
    scores: Sequence["Score | None"],
    shift: float,
    marker: str,
    colour: str,
) -> None:
    """Draw a method's scores of each class, beside the class's middle by `shift`."""
    for place, score in enumerate(scores):
        if score is None or score.mean is None:
            continue
        x = place + shift
        points = [value for value in score.folds if value is not None]
        axes.plot(
            np.full(len(points), x),
            points,
            marker,
            color=colour,
            alpha=0.45,
            ms=4,
            mew=0,
        )
        axes.errorbar(
            x,
            score.mean,
            yerr=score.sd,
            fmt=marker,
            color=colour,
            mec="black",
            mew=0.5,
            ms=7,
            capsize=3,
        )

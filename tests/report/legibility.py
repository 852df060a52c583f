"""Whether a picture can be read."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

Drawn = Callable[..., Figure]


def drawing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Drawn:
    """Calls a function with a path after its arguments; returns the figure that it saved, legible throughout.

    The files are left empty, as writing them takes longer than all else; `assert_written` looks at files.
    """
    saved: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *given, **named: saved.append(figure))

    def call(function: Callable[..., None], *arguments: Any, title: str | None = None, where: Any = None) -> Figure:
        path = folder / "figure.png"
        function(*arguments, path, *([title] if title else []), *([where] if where else []))
        assert {path.suffix, ".svg"} == {found.suffix for found in folder.glob("figure.*")}
        assert_legible(saved[-1])
        return saved[-1]

    return call


def assert_written(function: Callable[[Path], None], folder: Path) -> None:
    """The function writes the path that it is given as PNG on white paper, and the same as SVG."""
    function(folder / "figure.png")
    assert (folder / "figure.svg").read_bytes().startswith(b"<?xml")
    with Image.open(folder / "figure.png") as image:
        assert image.convert("RGBA").getpixel((0, image.height - 1)) == (255, 255, 255, 255)


def assert_legible(figure: Figure) -> None:
    """Titles, labels, legends and numbers at bars and axes lie inside the figure and not on each other."""
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw(renderer)
    texts = [*figure.texts, *(text for legend in figure.legends for text in legend.texts)]
    for axes in figure.axes:
        texts += [axes.title, axes.xaxis.label, axes.yaxis.label, *axes.texts]
        texts += axes.get_legend().texts if axes.get_legend() else []
        for index, axis in enumerate((axes.xaxis, axes.yaxis)):
            low, high = sorted(axis.get_view_interval())
            texts += [text for text in axis.get_majorticklabels() if low <= text.get_position()[index] <= high]
    boxes = {text: text.get_window_extent(renderer) for text in texts if text.get_text()}
    legends = {legend: legend.get_window_extent(renderer) for legend in figure.legends}
    for text, box in (boxes | legends).items():
        assert figure.bbox.padded(1).containsx(box.x0), text
        assert figure.bbox.padded(1).containsx(box.x1), text
        assert figure.bbox.padded(1).containsy(box.y0), text
        assert figure.bbox.padded(1).containsy(box.y1), text
    for (one, a), (other, b) in itertools.combinations(boxes.items(), 2):
        assert not a.overlaps(b), (one, other)

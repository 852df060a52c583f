"""What pages and figures say, as text that is compared with golden files; and whether a figure can be read."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.category import StrCategoryFormatter
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.ticker import FuncFormatter

BEFORE = {"h1": "# ", "h2": "## ", "summary": "> ", "dt": "* ", "dd": ": ", "th": " | ", "td": " | ", "pre": "$ "}
NO_TEXT = ("style", "title")
VOID = ("meta", "img")
MOST_POINTS = 12


class Page(HTMLParser):
    """A page's text, an element a line, of tables a row; one that is not closed fails, and a picture not within."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.text = ""
        self.tags: list[str] = []
        self.open: list[str] = []
        self.feed(html)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        self.text += "" if tag in ("th", "td", "dd") else "\n"
        self.text += f"[{dict(attrs)['alt']}]" if tag == "img" else BEFORE.get(tag, "")
        assert tag != "img" or str(dict(attrs)["src"]).startswith("data:image/png;base64,")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip() and self.open[-1] not in NO_TEXT:
            self.text += data

    def __str__(self) -> str:
        return "\n".join(line.removeprefix(" | ") for line in self.text.splitlines() if line.strip())


def drawing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Figure]:
    """Calls a function with a path after its arguments; returns the figure that it saved, legible throughout.

    The files are left empty, as writing them takes longer than all else.
    """
    saved: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *given, **named: saved.append(figure))

    def call(function: Callable[..., None], *arguments: Any) -> Figure:
        path = folder / "figure.png"
        function(*arguments, path)
        assert {path.suffix, ".svg"} == {found.suffix for found in folder.glob("figure.*")}
        assert_legible(saved[-1])
        return saved[-1]

    return call


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
    paper = figure.bbox.padded(1)
    for text, box in (boxes | legends).items():
        assert paper.xmin <= box.xmin <= box.xmax <= paper.xmax, text
        assert paper.ymin <= box.ymin <= box.ymax <= paper.ymax, text
    for (one, a), (other, b) in itertools.combinations(boxes.items(), 2):
        assert not a.overlaps(b), (one, other)


def described(figure: Figure) -> str:
    """What a figure shows: texts, colours and the data of curves, bars, areas, outlines and overlays."""
    lines = [f"= {figure.get_suptitle()}", *_legends(figure.legends)]
    for axes in figure.axes:
        lines += [f"[{axes.get_title()}] x: {axes.get_xlabel()} | y: {axes.get_ylabel()}", *_axes(axes)]
        lines += _legends([axes.get_legend()] if axes.get_legend() else [])
    return "".join(f"{line}\n".replace("\n", " / ", line.count("\n")) for line in lines)


def _axes(axes: Axes) -> Iterator[str]:
    yield f"  y {numbers(axes.get_ylim())} {axes.get_yscale()}"
    for axis in (axes.xaxis, axes.yaxis):
        if isinstance(axis.get_major_formatter(), FuncFormatter | StrCategoryFormatter):
            yield f"  names {', '.join(text.get_text() for text in axis.get_majorticklabels())}"
    for line in axes.lines:
        yield f"  line {_label(line)} {to_hex(line.get_color())} {line.get_marker()} {numbers(line.get_xydata())}"
    for bar in axes.patches:
        sizes = (bar.get_x(), bar.get_y(), bar.get_width(), bar.get_height())
        if all(sizes[2:]):
            yield f"  bar {to_hex(bar.get_facecolor())} {numbers(sizes)}"
    for image in axes.images:
        yield f"  image {numbers(image.get_extent())} {_pixels(image.get_array())}".rstrip()
    for area in axes.collections:
        colour = [*area.get_facecolor(), *area.get_edgecolor()][0]
        corners = np.concatenate([path.vertices for path in area.get_paths()])
        yield f"  area {_label(area)} {to_hex(colour)} {numbers([corners.min(0), corners.max(0)])}"
    for text in axes.texts:
        yield f"  text {text.get_text()}"


def _label(artist: Artist) -> str:
    return "" if str(artist.get_label()).startswith("_") else str(artist.get_label())


def _legends(legends: Iterable[Legend]) -> Iterator[str]:
    for legend in legends:
        entries = zip(legend.texts, legend.legend_handles, strict=True)
        yield f"  legend {', '.join(text.get_text() + _colour(handle) for text, handle in entries)}"


def _colour(handle: Any) -> str:
    colour = getattr(handle, "get_facecolor", getattr(handle, "get_color", str))()
    return f" {to_hex(colour)}" if len(colour) else ""


def _pixels(pixels: np.ndarray) -> str:
    """The values of a small grey image; of an overlay how many pixels have which colour."""
    if pixels.ndim == 2:
        return numbers(pixels) if pixels.size < 16 else ""
    painted = Counter(to_hex(pixel) for pixel in pixels.reshape(-1, 4) if pixel[3])
    return ", ".join(f"{count} {colour}" for colour, count in sorted(painted.items()))


def numbers(values: Any) -> str:
    """Points as `1 2; 3 4`; of many the first and the last."""
    rows = np.atleast_2d(np.asarray(values, float))
    texts = [" ".join(f"{value:.4g}" for value in row) for row in rows]
    return "; ".join(texts if len(texts) <= MOST_POINTS else [*texts[:2], f"... {len(texts)} in all", texts[-1]])

"""What the desk found, as Markdown."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from cuda_desk.configs import Row
from unet3d.base.types import MIB

KINDS = ("requested", "allocated", "reserved")
WITHIN = {"requested": 1e-4, "allocated": 1e-3, "reserved": 0.0}  # of what the allocator counts; else a row differs
Found = Mapping[str, Any]  # what a row measured, or {"failed": why it did not}


class Line(NamedTuple):
    """A line of a table."""

    cells: Sequence[str]
    is_right: bool


class Section(NamedTuple):
    """A table with its head."""

    title: str
    about: str
    head: Sequence[str]
    lines: Sequence[Line]

    @property
    def wrong(self) -> int:
        """Return how many lines are not right."""
        return sum(not line.is_right for line in self.lines)

    def markdown(self) -> str:
        """Return the section, with the number of its lines."""
        lines = [f"## {self.title}", "", self.about, ""]
        lines += [f"{len(self.lines)} rows: {len(self.lines) - self.wrong} as they should be, {self.wrong} not.", ""]
        lines += [f"| {' | '.join(self.head)} |", f"|{'---|' * len(self.head)}"]
        lines += [f"| {' | '.join(map(clean, line.cells))} |" for line in self.lines]
        return "\n".join([*lines, ""])


def clean(text: str) -> str:
    """Return a text as it can stand in a cell."""
    return " ".join(text.replace("|", "/").split())


def failed(title: str, error: BaseException) -> Section:
    """Return a section for a part that could not be run."""
    why = f"{type(error).__name__}: {error}"[:300]
    return Section(title, "This part did not run.", ("failed",), [Line((why,), False)])


def comparison(section: str, found: Iterable[tuple[Row, Found]]) -> Section:
    """Return the table of predicted and real peaks, of configurations."""
    head = [
        "config",
        "requested MiB, first / later",
        "error, bytes",
        "allocated, error",
        "reserved MiB, predicted:real",
    ]
    bounds = ", ".join(f"{kind} {bound:.2%}" for kind, bound in WITHIN.items())
    about = f"First step / highest of later ones; errors are predicted minus real. A row is right within: {bounds}."
    lines = [compared(row, result) for row, result in found]
    return Section(f"Predicted against the allocator: {section}", about, head, lines)


def compared(row: Row, found: Found) -> Line:
    """Return the line of one configuration."""
    name = f"{row.words}, {row.patch.replace(',', 'x')}"
    if "failed" in found:
        return Line((name, "", "", "", "", f"failed: {found['failed']}"), False)
    pairs = list(zip(found["predicted"], found["measured"], strict=True))  # of the first step, of later ones
    outside = []
    for index, kind in enumerate(KINDS):
        if any(abs(predicted[index] - real[index]) > WITHIN[kind] * real[index] for predicted, real in pairs):
            outside.append(kind)
    cells = [
        name,
        " / ".join(f"{real[0] / MIB:,.1f}" for _, real in pairs),
        " / ".join(f"{predicted[0] - real[0]:+,}" for predicted, real in pairs),
        " / ".join(f"{predicted[1] / real[1] - 1:+.2%}" for predicted, real in pairs),
        " / ".join(f"{predicted[2] / MIB:,.0f}:{real[2] / MIB:,.0f}" for predicted, real in pairs),
        f"differs: {', '.join(outside)}" if outside else "equal",
    ]
    return Line(cells, not outside)


def counts(found: Iterable[tuple[Row, Found]]) -> Section:
    """Return the table of what a step does on the device."""
    counted = ("launches", "convolutions", "normalisations", "synchronisations")
    names = (*counted, "small launches", "copies")
    lines = []
    for row, result in found:
        name = f"{row.words}, {row.patch.replace(',', 'x')}"
        if "failed" in result:
            cells = [name, f"failed: {result['failed']}", *[""] * len(names)]
            lines.append(Line(cells, False))
            continue
        measured = result["measured"]
        predicted = result["predicted"]
        differing = [f"{count} {predicted[count]:,}" for count in counted if predicted[count] != measured[count]]
        verdict = f"launches.py: {', '.join(differing)}" if differing else "equal"
        cells = [name, *(f"{measured[count]:,}" for count in names), verdict]
        lines.append(Line(cells, not differing))
    about = (
        "Of one step, by the stubs; the last column is what `launches.py` counts without them. Convolutions and "
        "normalisations are those of cuDNN. Small: of fewer blocks than the device has multiprocessors (132). "
        "Copies: memsets too."
    )
    return Section("Launches", about, ("config", *names, "by rules"), lines)

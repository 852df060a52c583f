"""What `field.py` predicts, as Markdown and as a picture."""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from field_networks import Entry

GIB = 2**30
BEGIN = "<!-- begin: python benchmarks/field.py --markdown docs/results.md -->"
END = "<!-- end -->"
PLANS = ("plain", "lean", "tiles")
MARKERS = {"plain": "o", "lean": "s", "tiles": "v"}
COLOURS = {"plain": "C3", "lean": "C0", "tiles": "C2"}
DRAWN = "cuda bf16"  # the figures of the picture
LINE = 1.12  # from the height of a name to that of the next below, as a ratio
NARROW = 12e6  # parameters; labels of smaller networks are at the left
DASH = "-"
Numbers = Mapping[str, Any]
Results = Mapping[str, Mapping[str, Numbers]]  # title -> setting -> what `field.predict` returns


def gib(size: float) -> str:
    """Return a size in GiB, with three digits."""
    number = size / GIB
    return f"{number:.1f}" if number >= 10 else f"{number:.2f}"


def tables(entries: Sequence[Entry], results: Results) -> str:
    """Return all tables; what has not been predicted is a dash."""
    parts = [f"torch {torch.__version__.partition('+')[0]}, AdamW; all sizes are predicted, in GiB (2^30 bytes)."]
    for setting in ("cuda bf16", "cuda float32"):
        if any(setting in settings for settings in results.values()):
            parts.append(f"On CUDA, {setting.split()[1]}: tensors/allocated/reserved.")
            parts.append("\n".join(cuda_table(entries, results, setting)))
    if any("cpu float32" in settings for settings in results.values()):
        parts.append("On the CPU, with one thread, tensors:")
        parts.append("\n".join(tensors_table(entries, results)))
    parts.append("What is predicted, and the CPU seconds of one core that all of a network's predictions took:")
    parts.append("\n".join(sources(entries, results)))
    return "\n\n".join(parts)


def plan_of(entry: Entry, results: Results, setting: str, plan: str) -> Numbers | None:
    """Return what is predicted of a network in a setting such as "cuda bf16"; None if nothing is."""
    settings = results.get(entry.title, {})
    return settings[setting]["plans"].get(plan) if setting in settings else None


def tensors_table(entries: Sequence[Entry], results: Results) -> Iterator[str]:
    """Yield the lines of peaks of tensors, as on the CPU."""
    heads = [f"{precision} {plan}" for precision in ("float32", "bf16") for plan in PLANS]
    yield f"| network | {' | '.join(heads)} |"
    yield f"|---|{'---:|' * len(heads)}"
    for entry in entries:
        sizes = []
        for precision in ("float32", "bf16"):
            for plan in PLANS:
                figures = plan_of(entry, results, f"cpu {precision}", plan)
                sizes.append(DASH if figures is None else gib(figures["tensors"]))
        yield f"| {entry.title} | {' | '.join(sizes)} |"


def parameters_of(entry: Entry, results: Results) -> str:
    """Return the number of a network's parameters."""
    for numbers in results.get(entry.title, {}).values():
        return f"{numbers['parameters']:,}"
    return DASH


def cuda_table(entries: Sequence[Entry], results: Results, setting: str) -> Iterator[str]:
    """Yield the lines of the three sizes on CUDA."""
    yield f"| network | {' | '.join(PLANS)} |"
    yield f"|---|{'---:|' * len(PLANS)}"
    for entry in entries:
        cells = []
        for plan in PLANS:
            figures = plan_of(entry, results, setting, plan)
            if figures is None:
                cells.append(DASH)
            else:
                cells.append("/".join(gib(figures[name]) for name in ("tensors", "allocated", "reserved")))
        yield f"| {entry.title} | {' | '.join(cells)} |"


def sources(entries: Sequence[Entry], results: Results) -> Iterator[str]:
    """Yield the lines of where each network's sizes come from, and of its command."""
    heads = ("parameters", "input N C D H W", "classes", "`--module`", "patch, batch and widths from", "CPU seconds")
    yield f"| network | {' | '.join(heads)} |"
    yield "|---|---:|---|---:|---|---|---:|"
    for entry in entries:
        settings = results.get(entry.title)
        seconds = DASH
        if settings:
            seconds = f"{sum(numbers['seconds'] for numbers in settings.values()):.0f}"
        shape = "x".join(map(str, entry.shape))
        cells = [parameters_of(entry, results), shape, str(entry.classes), f"`{entry.module}`", entry.source, seconds]
        yield f"| {entry.title} | {' | '.join(cells)} |"


def write(page: Path, text: str) -> None:
    """Put a text between the marks of a page. Raises ValueError for a page without them."""
    before, begin, rest = page.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page}: has no line {BEGIN!r}, or no line {END!r} after it")
    page.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}")


def draw(entries: Sequence[Entry], results: Results, path: Path) -> None:
    """Draw parameters and peaks of tensors; a line joins the three peaks of a network, another leads to its name."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    done = [entry for entry in entries if plan_of(entry, results, DRAWN, PLANS[-1]) is not None]
    figure, axis = pyplot.subplots(figsize=(10, 6.5))
    axis.set_xscale("log")
    axis.set_yscale("log")
    anchors = []
    for entry in done:
        numbers = results[entry.title][DRAWN]
        x = numbers["parameters"] / 1e6
        peaks = [numbers["plans"][plan]["tensors"] / GIB for plan in PLANS]
        axis.plot([x, x], [min(peaks), max(peaks)], color="0.7", linewidth=1, zorder=1)
        for plan, peak in zip(PLANS, peaks, strict=True):
            axis.plot(x, peak, MARKERS[plan], color=COLOURS[plan], markersize=6, zorder=2)
        anchors.append((entry.title, x, peaks[0]))
    for plan in PLANS:
        name = plan if plan == "plain" else f"recompute={plan}"
        axis.plot([], [], MARKERS[plan], color=COLOURS[plan], label=name)
    lowest, highest = axis.get_ylim()
    axis.set_xlim(0.7, 900)
    for is_left in (True, False):
        side = [anchor for anchor in anchors if (anchor[1] < NARROW / 1e6) == is_left]
        _name(axis, sorted(side, key=lambda anchor: -anchor[2]), is_left)
    ticks = [0.5, 1, 2, 5, 10, 20]
    axis.set_yticks([tick for tick in ticks if lowest <= tick <= highest], minor=False)
    axis.set_yticklabels([f"{tick:g}" for tick in ticks if lowest <= tick <= highest])
    axis.set_xticks([1, 3, 10, 30, 100], labels=["1", "3", "10", "30", "100"])
    axis.minorticks_off()
    axis.set_xlabel("parameters, millions")
    axis.set_ylabel("peak of a training step, GiB of tensors (predicted: bf16, as on CUDA)")
    axis.grid(alpha=0.3)
    axis.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=3, frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _name(axis: Any, anchors: Sequence[tuple[str, float, float]], is_left: bool) -> None:
    """Write names in a column beside the points, the highest first, with lines to the points; none overlap."""
    above = math.inf
    for title, x, peak in anchors:
        height = min(peak, above / LINE)
        above = height
        axis.annotate(
            title,
            xy=(x, peak),
            xytext=(0.75 if is_left else 210, height),
            va="center",
            fontsize=9,
            arrowprops={"arrowstyle": "-", "color": "0.5", "linewidth": 0.6, "shrinkB": 4},
        )

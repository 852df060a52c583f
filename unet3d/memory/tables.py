"""memory.json's entries as tables of text: what the terminal, the report and wandb show."""

from collections.abc import Mapping, Sequence
from typing import Any

from unet3d.types import Table, mib, percent

Entry = Mapping[str, Any]  # what memory.json holds under "predicted" or "measured"


NAMES = {
    "params": "weights",
    "grads": "gradients",
    "optimizer": "optimizer state",
    "activations": "activations",
    "temporaries": "temporaries",
    "inputs": "batch",
}


def moment(entry: Entry) -> str:
    """When most bytes are held: `backward of up3.conv2 (convolution_backward)`."""
    found = entry["moment"]
    return f"{found['words']} ({found['operation']})"


def phases(entry: Entry) -> Table:
    """A row a phase: its peak, and where known the bytes alive as it ends, in the first step and in later ones."""
    rows = [[phase, mib(peak["first"]), mib(peak["steady"])] for phase, peak in entry["phases"].items()]
    columns = ["phase", "peak, first step (MiB)", "peak, later steps (MiB)"]
    if not (ends := entry.get("phase_ends")):
        return Table(columns, rows)
    rows = [[*row, mib(ends[row[0]]["first"]), mib(ends[row[0]]["steady"])] for row in rows]
    return Table([*columns, "at its end, first (MiB)", "at its end, later (MiB)"], rows)


def categories(entry: Entry) -> Table:
    """A row a kind of tensor with its bytes at the peak."""
    peak = entry["peak_bytes"]
    found = entry.get("categories", {})
    return Table(
        ["at the peak", "MiB", "share"],
        [[NAMES.get(name, name), mib(size), percent(size, peak)] for name, size in found.items()],
    )


def levels(entry: Entry) -> Table:
    """A row a level of the U with its bytes at the peak."""
    rows = entry.get("levels", [])
    return Table(["level", "MiB", "share", *_kinds(rows)], [[_level(row["level"]), *_cells(row, rows)] for row in rows])


def layers(entry: Entry) -> Table:
    """A row a layer with its bytes at the peak, along the U."""
    rows = entry.get("layers", [])
    named = [[row["module"], "" if row["level"] is None else str(row["level"])] for row in rows]
    cells = [_cells(row, rows) for row in rows]
    return Table(["layer", "level", "MiB", "share", *_kinds(rows)], [a + b for a, b in zip(named, cells, strict=True)])


def _level(level: int | str) -> str:
    return "0 (full)" if level == 0 else str(level)


def _kinds(rows: Sequence[Entry]) -> list[str]:
    """Kinds of tensors that any of the rows has."""
    return [f"{name} (MiB)" for kind, name in NAMES.items() if _matters(kind, rows)]


def _matters(kind: str, rows: Sequence[Entry]) -> bool:
    return any(mib(row[kind]) != "0.0" for row in rows)


def _cells(row: Entry, rows: Sequence[Entry]) -> list[str]:
    kinds = [kind for kind in NAMES if _matters(kind, rows)]
    total = sum(other["bytes"] for other in rows)
    return [mib(row["bytes"]), percent(row["bytes"], total), *(mib(row[kind]) if row[kind] else "" for kind in kinds)]


def state(entry: Entry, parameters: int) -> Table:
    """What parameters cost: weights, gradients, optimizer state, in bytes per parameter and MiB."""
    found = entry.get("state", {})
    return Table(
        ["held for each parameter", "B/parameter", "MiB"],
        [[NAMES[role], f"{size / parameters:.2f}", mib(size)] for role, size in found.items()],
    )


def estimates(found: Mapping[str, int], peak: int) -> Table:
    """A row a usual estimate with its error against the peak; the last row is the peak."""
    rows = [[name, mib(size), f"{size / peak - 1:+.0%}"] for name, size in found.items()]
    return Table(["estimate", "MiB", "error"], [*rows, ["unet3d: the step itself, without data", mib(peak), "+0%"]])


def sentence(advice: Entry, peak: int) -> str:
    """What `advise` found, in words: what dominates the peak, at which level, and what half the width there saves."""
    place = "at full resolution (level 0)" if advice["level"] == 0 else f"at level {advice['level']}"
    place = "in the network's layers" if advice["level"] == "other" else place  # a user's own has no levels
    share = advice["bytes"] / peak
    said = f"{share:.0%} of the peak ({mib(advice['bytes'])} of {mib(peak)} MiB) is {place}, mostly "
    said += NAMES[advice["mostly"]]
    if advice["halved_peak_bytes"] is None:
        return f"{said}."
    saved = 1 - advice["halved_peak_bytes"] / peak
    lower = f"{mib(advice['halved_peak_bytes'])} MiB, {saved:.0%} less" if saved > 0 else "no less"
    return f"{said}; half the width there ({advice['override']}) would need {lower} (predicted)."

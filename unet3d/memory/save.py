"""A ledger's files in a folder, for people and for other tools."""

from pathlib import Path

from unet3d.memory import explain, export, figures
from unet3d.memory.ledger import Ledger


def write(ledger: Ledger, name: str, folder: Path) -> None:
    """Write memory/ {snapshot.pickle: all steps; timeline.csv, trace.csv, changes.txt: the last one}, and a picture.

    The picture is figures/memory_timeline.png.
    """
    start, rows = explain.timeline(ledger)
    last = sum(mark == "end" for _, mark in ledger.marks) - 1
    if not rows:  # no step was completed
        return
    files = folder / "memory"
    files.mkdir(parents=True, exist_ok=True)
    (folder / "figures").mkdir(exist_ok=True)
    export.write_snapshot(ledger, files / "snapshot.pickle")
    export.write_timeline(ledger, files / "timeline.csv")
    export.write_trace(export.trace(ledger, name, last), files / "trace.csv")
    export.write_changes(ledger, files / "changes.txt")
    figures.timeline(start, rows, folder / "figures" / "memory_timeline.png")

"""A ledger's files in a folder, for people and for other tools."""

from pathlib import Path

from unet3d.memory import explain, export, figures
from unet3d.memory.ledger import Ledger


def write(ledger: Ledger, name: str, folder: Path) -> None:
    """Write memory/{snapshot.pickle, timeline.csv, trace.csv, changes.txt} and figures/memory_timeline.png."""
    start, rows = explain.timeline(ledger)
    if not rows:  # no step was completed
        return
    files = folder / "memory"
    files.mkdir(parents=True, exist_ok=True)
    (folder / "figures").mkdir(exist_ok=True)
    export.write_snapshot(ledger, files / "snapshot.pickle")
    export.write_timeline(ledger, files / "timeline.csv")
    export.write_trace(export.trace(ledger, name), files / "trace.csv")
    export.write_changes(ledger, files / "changes.txt")
    figures.timeline(start, rows, folder / "figures" / "memory_timeline.png")

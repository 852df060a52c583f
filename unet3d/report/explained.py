"""Figures and a page of an `Explanation`, which `unet3d.memory.explain` and `unet3d.memory.predict` return."""

from pathlib import Path

from unet3d.base.errors import UserError
from unet3d.base.files import write_json, write_text
from unet3d.memory import tables
from unet3d.memory.any_network import Explanation
from unet3d.report import memory_plots, report
from unet3d.run.record import read_run
from unet3d.run.run_folder import MOST_ITEMS


def draw_layers(explanation: Explanation, path: str | Path) -> Path:
    """Draw memory at the peak by layer, as PNG, SVG or PDF by the name's ending. Return the path."""
    memory_plots.layer_plot(explanation.ledger, Path(path))
    return Path(path)


def write_page(explanation: Explanation, folder: str | Path) -> Path:
    """Write report.html, figures and memory/ with each allocation into a folder. Return the page's path.

    Raises UserError if the folder holds a run.
    """
    folder = Path(folder)
    if any((folder / name).exists() for name in ("STATUS", "metrics.jsonl")):
        raise UserError(f"{folder}: holds a run; give it its own folder")
    folder.mkdir(parents=True, exist_ok=True)
    memory = {
        "about": f"{explanation.name}: {explanation.about}",
        "parameters": explanation.parameters,
        explanation.kind: tables.folded(explanation.entry, MOST_ITEMS),
    }
    write_json(folder / "memory.json", memory)
    write_text(folder / "explained.txt", f"{explanation}\n")
    memory_plots.write_ledger_files(explanation.meter.ledger, folder)
    return report.write_report(read_run(folder))

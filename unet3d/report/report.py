"""The report of a run: figures, metrics.csv and report.html in its folder, all from its record."""

import re
import shlex
from pathlib import Path

from unet3d.base.files import write_csv, write_text
from unet3d.base.types import mib
from unet3d.config import compose
from unet3d.memory import tables
from unet3d.report import case_plots, memory_plots, plots, scores, summary
from unet3d.report.page import read_picture, render
from unet3d.run.record import RunRecord

MOST_COLUMNS = 2000  # of metrics.csv
MOST_CELLS = 10**8
MOST_CLASSES = 60  # of figures/scores.png


def write_report(run: RunRecord) -> Path:
    """Draw the figures that follow from a run's record, and write its page and metrics.csv; return the page's path."""
    draw_figures(run)
    return write_page(run)


def draw_figures(run: RunRecord) -> None:
    """Draw training curves, the Dice of all cases, and memory by phase and by layer."""
    folder = run.path / "figures"
    folder.mkdir(exist_ok=True)
    if run.records:
        plots.training_curves(run.records, folder / "curves.png")
    dice = scores.dice_by_class(run.scores)
    if dice:
        case_plots.score_plot(dict(list(dice.items())[:MOST_CLASSES]), folder / "scores.png")
    if run.memory:
        memory_plots.phase_plot(run.memory_entry, folder / "memory_phases.png")
        if "layers" in run.memory_ledger:
            memory_plots.layer_plot(run.memory_ledger, folder / "memory_layers.png")


def write_page(run: RunRecord) -> Path:
    """Write metrics.csv, and report.html with the figures that are in the folder; return the page's path."""
    if run.records:
        columns = list(dict.fromkeys(key for record in run.records for key in record))
        columns = columns[: min(MOST_COLUMNS, MOST_CELLS // len(run.records))]  # metrics.jsonl has them all
        rows = ([record.get(key) for key in columns] for record in run.records)  # empty where a record lacks it
        write_csv(run.path / "metrics.csv", columns, rows)
    page = render(
        "report.html",
        run=run,
        name=run.path.resolve().name,
        figure=lambda name, about: read_picture(run.path / "figures" / f"{name}.png", about),
        commands=_commands(run),
        scores=scores,
        summary=summary,
        tables=tables,
        mib=mib,
    )
    write_text(run.path / "report.html", page)
    return run.path / "report.html"


def _commands(run: RunRecord) -> list[str]:
    """Return the command that began the run in its folder, and one for each time it was resumed; [] if not known."""
    if run.overrides is None:
        return []
    folder = run.path.resolve()
    place = str(folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder.name)
    if re.fullmatch(r"[A-Za-z0-9_/.+%@:-]+", place) is None:
        place = compose.quoted(place)
    commands: list[list[str]] = [[f"hydra.run.dir={place}"]]
    for word in run.overrides:
        if word.startswith("resume="):
            commands.append([f"resume={place}"])
        else:
            commands[-1].append(word)
    first, *others = commands
    each = ([*first[1:], first[0]], *others)
    return [shlex.join(["python", "-m", "unet3d", "train", *words]) for words in each]

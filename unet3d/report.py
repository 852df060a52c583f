"""The report of a run: figures, metrics.csv and report.html in its folder, and the closing lines on the terminal.

A pure function of the run folder, so that it can be had again at any time, also of a run that died early.
"""

import csv
from pathlib import Path
from typing import TYPE_CHECKING

from unet3d import figures, page, readback
from unet3d.readback import RunFolder, Table

if TYPE_CHECKING:
    import rich.table


def write(folder: Path) -> Path:
    """Write figures/curves.png, figures/memory_phases.png, metrics.csv and report.html; returns the latter's path."""
    run = readback.read(folder)
    (folder / "figures").mkdir(exist_ok=True)
    if run.records:
        figures.curves(run.records, folder / "figures" / "curves.png")
        _write_csv(folder / "metrics.csv", run)
    if run.memory:
        figures.memory_phases(run.memory, folder / "figures" / "memory_phases.png")
    path = folder / "report.html"
    path.write_text(_html(run), encoding="utf-8")
    return path


def _write_csv(path: Path, run: RunFolder) -> None:
    """metrics.jsonl as a table: a row a record, a column a key, empty where a record lacks it."""
    columns = list(dict.fromkeys(key for record in run.records for key in record))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(run.records)


def _html(run: RunFolder) -> str:
    name = f"unet3d run {run.path.resolve().name}"
    pictures = run.path / "figures"
    parts = [
        page.headline(name),
        page.paragraph(readback.what_ran(run)),
        page.paragraph(f"Status: {run.status or 'unknown, there is no STATUS file'}"),
        page.facts(readback.highlights(run)),
        page.section("Scores on the held-out cases", page.table(*readback.score_table(run))),
        page.section("Prediction", page.picture(pictures / "prediction.png", "truth and prediction on three planes")),
        page.section("Training", page.picture(pictures / "curves.png", "training loss and validation Dice by step")),
        _memory(run),
        page.section("Time", page.facts(readback.timing(run))),
        page.section("Environment", page.facts({key: str(value) for key, value in run.environment.items()})),
        page.section("Config", page.code(run.config)),
    ]
    return page.page(name, parts)


def _memory(run: RunFolder) -> str:
    if not run.memory:
        return ""
    kind = run.memory["measured"]["kind"]
    about = f"Measured ({kind}): most bytes held at once in each phase of a training step, in MiB (2^20 bytes)."
    return page.section(
        "Memory",
        page.paragraph(about),
        page.paragraph(readback.prediction(run)),
        page.table(*readback.memory_table(run)),
        page.picture(run.path / "figures" / "memory_phases.png", "peak memory per phase"),
        page.table(*readback.category_table(run)),
    )


def print_summary(folder: Path) -> None:
    """Print scores per class, peak memory per phase and the run folder, for terminals and plain files alike."""
    from rich.console import Console

    run = readback.read(folder)
    console = Console(highlight=False, markup=False)
    if (scores := readback.score_table(run)).rows:
        console.print(_terminal_table("Scores on the held-out cases", scores))
    if run.memory:
        title = f"Peak memory, measured ({run.memory['measured']['kind']})"
        console.print(_terminal_table(title, readback.memory_table(run)))
        console.print(readback.prediction(run))
    for what, value in readback.timing(run).items():
        console.print(f"{what}: {value}")
    here = folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder
    console.print(f"run folder: {here}", soft_wrap=True)


def _terminal_table(title: str, table: Table) -> "rich.table.Table":
    import rich.box
    import rich.table

    made = rich.table.Table(title=title, title_justify="left", title_style="bold", box=rich.box.SIMPLE_HEAD)
    for index, column in enumerate(table.columns):
        made.add_column(column, justify="right" if index else "left", overflow="fold")
    for row in table.rows:
        made.add_row(*row)
    return made

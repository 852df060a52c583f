"""The report of a run: figures, metrics.csv and report.html in its folder, and the closing lines on the terminal.

A pure function of the run folder, so that it can be had again at any time, also of a run that died early.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unet3d import figures, page, readback, scored
from unet3d.console import NARROW, paper, terminal_table
from unet3d.memory import figures as memory_figures
from unet3d.memory import tables
from unet3d.readback import RunFolder
from unet3d.table import mib, write_csv


def write(folder: Path) -> Path:
    """Write metrics.csv, figures/curves.png, memory_phases.png, memory_layers.png, report.html; returns its path."""
    run = readback.read(folder)
    (folder / "figures").mkdir(exist_ok=True)
    if run.records:
        figures.curves(run.records, folder / "figures" / "curves.png")
        columns = list(dict.fromkeys(key for record in run.records for key in record))
        rows = ([record.get(key) for key in columns] for record in run.records)  # empty where a record lacks it
        write_csv(folder / "metrics.csv", columns, rows)
    if run.memory:
        memory_figures.phases(run.memory_entry, folder / "figures" / "memory_phases.png")
        seen = run.memory_entry.get("ledger", run.memory_entry)
        if "layers" in seen:
            memory_figures.along_the_u(seen, folder / "figures" / "memory_layers.png")
    path = folder / "report.html"
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(_html(run), encoding="utf-8")
    os.replace(temporary, path)  # half a report would count as one
    return path


def _html(run: RunFolder) -> str:
    name = f"unet3d run {run.path.resolve().name}" if "rehearsed" not in run.memory else "unet3d memory of a step"
    pictures = run.path / "figures"
    parts = [
        page.headline(name),
        *map(page.paragraph, readback.about(run)),
        page.facts(readback.highlights(run)),
        page.section(scored.title(run), page.table(*readback.score_table(run)), *_best(run)),
        page.section("Prediction", page.picture(pictures / "prediction.png", "truth and prediction on three planes")),
        page.section("Training", page.picture(pictures / "curves.png", "training loss and validation Dice by step")),
        _memory(run),
        page.section("Time", page.facts(readback.timing(run))),
        page.section("Environment", page.facts({key: str(value) for key, value in run.environment.items()})),
        page.section("Config", page.code(run.config)),
    ]
    return page.page(name, parts)


def _best(run: RunFolder) -> list[str]:
    """Scores of the best weights, where the table above is of others."""
    found = scored.best(run)
    return [page.paragraph(found[0]), page.table(*found[1])] if found else []


def _memory(run: RunFolder) -> str:
    if not run.memory:
        return ""
    entry, pictures = run.memory_entry, run.path / "figures"
    about = f"{run.memory_kind.capitalize()} ({entry['kind']}): bytes held at once in a step, in MiB (2^20 bytes)."
    return page.section(
        "Memory",
        page.paragraph(about),
        page.paragraph(readback.prediction(run)),
        page.paragraph(readback.advice(run)),
        page.table(*tables.phases(entry)),
        page.picture(pictures / "memory_phases.png", "peak memory per phase, by what it is for"),
        _owners(run, entry.get("ledger", entry)),
    )


def _owners(run: RunFolder, seen: Mapping[str, Any]) -> str:
    """Who holds the bytes; of an entry that a ledger made."""
    if "moment" not in seen:
        return page.table(*tables.categories(seen))
    pictures = run.path / "figures"
    parts = [
        page.paragraph(f"The ledger's peak, {mib(seen['peak_bytes'])} MiB: {tables.moment(seen)}."),
        page.picture(pictures / "memory_timeline.png", "memory over one step, by what it is for"),
        page.picture(pictures / "memory_layers.png", "memory at the peak, by layer along the U"),
        page.table(*tables.categories(seen)),
        page.table(*tables.levels(seen)),
        page.table(*tables.layers(seen)),
        page.table(*tables.state(seen, run.memory["parameters"])),
    ]
    return "\n".join(parts)


def print_summary(folder: Path) -> None:
    """Print scores per class, peak memory per phase and the run folder, for terminals and plain files alike."""
    run = readback.read(folder)
    console = paper(NARROW)
    print_scores(run, scored.title(run))
    if best := scored.best(run):
        console.print(terminal_table(*best))
    if run.memory:
        title = f"Memory of a step, {run.memory_kind} ({run.memory_entry['kind']})"
        console.print(terminal_table(title, tables.phases(run.memory_entry)))
        console.print(readback.prediction(run))
    for what, value in readback.timing(run).items():
        console.print(f"{what}: {value}")
    here = folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder
    console.print(f"run folder: {here}", soft_wrap=True)


def print_scores(run: RunFolder, title: str) -> None:
    """Print scores per class, of a run or of scores.csv alone."""
    if (scores := readback.score_table(run)).rows:
        paper(NARROW).print(terminal_table(title, scores))

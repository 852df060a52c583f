"""The report of a run: figures, metrics.csv and report.html in its folder, all from its record."""

import re
import shlex
from pathlib import Path
from typing import Any, NamedTuple

from unet3d.base.files import write_csv, write_text
from unet3d.base.types import Table, mib
from unet3d.config import compose
from unet3d.memory import tables
from unet3d.report import case_plots, memory_plots, methods, plots, scores, summary
from unet3d.report.page import Picture, read_picture, render
from unet3d.run.record import RunRecord

MOST_COLUMNS = 2000  # of metrics.csv
MOST_CELLS = 10**8
MOST_CLASSES = 60  # of figures/scores.png
VERSIONS = ("unet3d", "commit", "python", "torch", "monai", "numpy")  # of env.json
MOST_ROWS = 12  # of cases: more rows are folded
MOST_NAMES = 2000  # of cases: more names are not shown
PARTS = {"train": "training", "val": "validation"}  # of split.json
ON_A_CASE = "outlines of truth and prediction on the image, and where they differ, on three planes"


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
    title = f"unet3d run {run.path.resolve().name}"
    about = [summary.what_ran(run), f"Status: {run.status or 'unknown, there is no STATUS file'}"]
    if "about" in run.memory:  # `unet3d memory` wrote the folder
        title = "unet3d memory of a step"
        about = [run.memory["about"]]
    page = render(
        "report.html",
        title=title,
        about=about,
        highlights=summary.highlights(run),
        scores_title=scores.score_title(run),
        score_tables=_score_tables(run),
        **_cases(run),
        curves=_figure(run, "curves", "loss of training and validation, Dice, learning rate, gradient norm, step time"),
        memory=_memory(run),
        workspaces_title=tables.WORKSPACES,
        workspaces=tables.workspaces(run.memory_entry) if run.memory else None,
        timing=summary.timing(run),
        **_how_made(run),
        methods_title=methods.TITLE,
        methods=methods.methods_paragraph(run),
        environment=run.environment,
        config=run.config,
    )
    write_text(run.path / "report.html", page)
    return run.path / "report.html"


def _figure(run: RunRecord, name: str, about: str) -> Picture | None:
    return read_picture(run.path / "figures" / f"{name}.png", about)


def _score_tables(run: RunRecord) -> list[tuple[str, Table]]:
    """Return the tables of scores with their titles; the title of the first is the section's."""
    titled = [("", scores.score_table(run))]
    if run.has_own_grids:
        titled.append(scores.network_scores(run))
    best = scores.best_scores(run)
    if best is not None:
        titled.append(best)
    return titled


def _cases(run: RunRecord) -> dict[str, Any]:
    """Return pictures of the best, the median and the worst case, Dice of all by class, and one row per case."""
    pictures = [_figure(run, f"prediction_{role}", f"the {role} case: {ON_A_CASE}") for role in scores.ROLES]
    pictures.append(_figure(run, "prediction", f"a case: {ON_A_CASE}"))
    if run.scores:
        pictures.append(_figure(run, "scores", "Dice of each case by class"))
    table = scores.case_table(run.scores)
    folded = ""
    if len(table.rows) > MOST_ROWS:
        fewer = f" of {len(run.scores)}" if len(table.rows) < len(run.scores) else ""
        folded = f"{len(table.rows)}{fewer} cases, the worst first"
    return {
        "cases_title": scores.score_title(run, "Cases"),
        "case_pictures": pictures,
        "cases": table,
        "cases_folded": folded,
    }


def _how_made(run: RunRecord) -> dict[str, Any]:
    """Return the command lines, the split and the versions."""
    split = {
        f"{len(names)} cases for {PARTS.get(part, part)}": ", ".join(names[:MOST_NAMES])
        for part, names in run.split.items()
    }
    versions = [f"{name} {run.environment[name]}" for name in VERSIONS if name in run.environment]
    return {"command": "\n".join(_commands(run)), "split": split, "versions": ", ".join(versions)}


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


class MemoryPart(NamedTuple):
    """A sentence, a table or a picture of the section on memory."""

    text: str = ""
    table: Table | None = None
    picture: Picture | None = None


def _memory(run: RunRecord) -> list[MemoryPart]:
    """Return the section on memory from top to bottom; [] for a run without."""
    if not run.memory:
        return []
    entry = run.memory_entry
    ledger = run.memory_ledger
    predicted = run.memory.get("predicted", {})
    advice = run.memory.get("advice")
    sentences = [
        f"{run.memory_kind.capitalize()} ({entry['kind']}): peak bytes of a step, in MiB (2^20 bytes).",
        summary.prediction(run),
        tables.guessed(predicted),
        tables.with_workspaces(predicted),
        tables.largest_workspaces(entry),
        tables.cuda_sizes(entry),
        tables.sentence(advice, predicted["peak_bytes"]) if advice and predicted else "",
    ]
    of_plan = summary.receipt(run.memory, run.records)
    plan_parts = [MemoryPart(f"{summary.RECEIPT}. {summary.changes(run.memory)}", of_plan)] if of_plan else []
    moment = ""
    if "moment" in ledger:  # of a ledger
        moment = f"Peak of tensors, {mib(ledger['peak_bytes'])} MiB: reached in {tables.moment(ledger)}."
    return [
        *(MemoryPart(text=sentence) for sentence in sentences),
        MemoryPart(table=tables.single_techniques(run.memory.get("without", {}), predicted.get("peak_bytes", 0))),
        *plan_parts,
        MemoryPart(table=tables.phases(entry)),
        MemoryPart(picture=_figure(run, "memory_phases", "peak memory per phase, by category")),
        MemoryPart(text=moment),
        MemoryPart(picture=_figure(run, "memory_timeline", "memory over one step, by category")),
        MemoryPart(picture=_figure(run, "memory_layers", "memory at the peak, by layer along the U")),
        MemoryPart(table=tables.categories(ledger)),
        MemoryPart(table=tables.levels(ledger)),
        MemoryPart(table=tables.layers(ledger)),
        MemoryPart(table=tables.state(ledger, run.memory["parameters"])),
    ]

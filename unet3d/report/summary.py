"""The closing lines of a run on the terminal: scores, memory, times, and where the files are."""

from pathlib import Path

from unet3d.base.errors import escaped
from unet3d.base.terminal import NARROW, paper, terminal_table
from unet3d.memory import tables
from unet3d.report import receipt
from unet3d.report.facts import prediction, timing
from unet3d.report.methods import TITLE, methods_paragraph
from unet3d.report.score_tables import best_scores, network_scores, score_table, score_title
from unet3d.run.record import RunRecord

FILES = (
    "report.html",
    "scores.csv",
    "metrics.csv",
    "memory.json",
    "checkpoints/best.pt",
    "figures",
    "predictions",
)


def print_summary(run: RunRecord) -> None:
    """Print scores per class, peak memory per phase and where the files are, for terminals and plain files alike."""
    console = paper(NARROW)
    print_scores(run, score_title(run))
    best = best_scores(run)
    if best is not None:
        console.print(terminal_table(*best))
    if run.memory:
        _print_memory(run)
    _print_receipt(run)
    for name, value in timing(run).items():
        console.print(f"{name}: {value}")
    _print_methods(run)
    folder = run.path
    if folder.is_relative_to(Path.cwd()):
        folder = folder.relative_to(Path.cwd())
    console.print(f"run folder: {escaped(folder)}", soft_wrap=True)
    written = [name for name in FILES if (run.path / name).is_file() or any(run.path.glob(f"{name}/*.*"))]
    if written:
        console.print(f"in it: {', '.join(written)}", soft_wrap=True)


def _print_receipt(run: RunRecord) -> None:
    """Print what was planned beside what was measured, if the run kept a plan."""
    table = receipt.receipt(run.memory, run.records)
    if table is None:
        return
    console = paper(NARROW)
    console.print(terminal_table(receipt.TITLE, table))
    sentence = receipt.changes(run.memory)
    if sentence:
        console.print(escaped(sentence), soft_wrap=True)


def print_scores(run: RunRecord, title: str) -> None:
    """Print scores per class, of a run or of scores.csv alone."""
    console = paper(NARROW)
    scores = score_table(run)
    if scores.rows:
        console.print(terminal_table(title, scores))
    if run.has_own_grids:
        console.print(terminal_table(*network_scores(run)))


def _print_methods(run: RunRecord) -> None:
    """Print the paragraph for a methods section."""
    text = methods_paragraph(run)
    if text:
        paper(NARROW).print(f"{TITLE}:\n{escaped(text)}\n")


def _print_memory(run: RunRecord) -> None:
    console = paper(NARROW)
    entry = run.memory_entry
    title = f"Memory of a step, {run.memory_kind} ({entry['kind']})"
    console.print(terminal_table(title, tables.phases(entry)))
    console.print(prediction(run))
    for sentence in (
        tables.with_workspaces(entry),
        tables.largest_workspaces(entry),
        tables.cuda_sizes(entry),
    ):
        if sentence:
            console.print(escaped(sentence))

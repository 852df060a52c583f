"""The report of a run: figures, metrics.csv and report.html in its folder, and the closing lines on the terminal."""

import base64
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from unet3d.files import write_csv, write_text
from unet3d.memory import tables
from unet3d.report import memory_plots, plots, run_folder
from unet3d.report.loggers import NARROW, paper, terminal_table
from unet3d.report.run_folder import Record, RunFolder
from unet3d.types import Table, mib

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #57606a; --line: #d8dee4; --paper: #fff; --tint: #f6f8fa }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --soft: #9198a1; --line: #30363d; --paper: #0d1117; --tint: #161b22 }
}
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 60rem; padding: 2rem 1.25rem 4rem; color: var(--ink); background: var(--paper);
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 .25rem }
h2 { font-size: 1.15rem; margin: 2.5rem 0 .75rem; padding-bottom: .3rem; border-bottom: 1px solid var(--line) }
p { margin: .25rem 0 .75rem; color: var(--soft) }
dl { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: .75rem; margin: 1rem 0 }
dl div { padding: .6rem .8rem; background: var(--tint); border: 1px solid var(--line); border-radius: 8px }
dt { font-size: .8rem; color: var(--soft) }
dd { margin: 0; font-size: 1.1rem; font-weight: 600 }
.wide { overflow-x: auto }
table { border-collapse: collapse; margin: 0 0 1rem; font-variant-numeric: tabular-nums }
th, td { padding: .3rem .9rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line) }
th { font-size: .85rem; font-weight: 600; color: var(--soft); white-space: normal; overflow-wrap: break-word;
  vertical-align: bottom }
th:first-child, td:first-child { text-align: left; white-space: normal; overflow-wrap: break-word; padding-left: 0;
  min-width: 6rem; max-width: 20rem }
img { display: block; max-width: 100%; height: auto; margin: 0 0 1rem; background: #fff; border: 1px solid var(--line);
  border-radius: 8px; padding: .6rem }
pre { overflow-x: auto; padding: .9rem 1.1rem; background: var(--tint); border: 1px solid var(--line);
  border-radius: 8px; font-size: .82rem; line-height: 1.45; overflow-wrap: normal }
"""


def html_page(title: str, parts: Iterable[str]) -> str:
    """The whole document; `parts` are HTML that the functions below made."""
    meta = '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    head = f"<head>{meta}<title>{escape(title)}</title><style>{STYLE}</style></head>"
    body = "\n".join(part for part in parts if part)
    return f'<!doctype html>\n<html lang="en">\n{head}\n<body>\n{body}\n</body>\n</html>\n'


def headline(title: str) -> str:
    return f"<h1>{escape(title)}</h1>"


def paragraph(text: str) -> str:
    return f"<p>{escape(text)}</p>" if text else ""


def section(heading: str, *parts: str) -> str:
    """A heading and its parts; nothing where all parts are empty."""
    body = "\n".join(part for part in parts if part)
    return f"<h2>{escape(heading)}</h2>\n{body}" if body else ""


def facts(pairs: Mapping[str, str]) -> str:
    """Small boxes: what, and how much."""
    boxes = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in pairs.items())
    return f"<dl>{boxes}</dl>" if boxes else ""


def html_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns with their units, rows of text; nothing without rows."""
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "\n".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{head}</tr>\n{body}</table></div>' if rows else ""


def picture(path: Path, about: str) -> str:
    """A PNG file, put into the page; nothing where there is no such file. `about` is for those who cannot see it."""
    if not path.is_file():
        return ""
    data = base64.b64encode(path.read_bytes()).decode()
    return f'<img alt="{escape(about)}" src="data:image/png;base64,{data}">'


def code(text: str) -> str:
    return f"<pre>{escape(text)}</pre>" if text else ""


SCORES_TITLE = "Scores on the held-out cases"


def score_title(run: RunFolder) -> str:
    """Of the table of scores: which weights, and whether they are also the best."""
    if not (last := run_folder.last_validation(run)):
        return SCORES_TITLE
    top = _scored_best(run)
    also = ", also the best" if top and top["step"] == last["step"] else ""
    return f"{SCORES_TITLE}, {_weights(run, last['step'])} (step {last['step']}){also}"


def best_scores(run: RunFolder) -> tuple[str, Table] | None:
    """Title and scores of the best weights, from their validation; None where they are the last, or there are none."""
    top = _scored_best(run)
    if not top or top["step"] == run_folder.last_validation(run)["step"]:
        return None
    where = ", checkpoints/best.pt" if (run.path / "checkpoints" / "best.pt").is_file() else ""
    return f"Best weights (step {top['step']}{where})", run_folder.validation_table(top)


def _scored_best(run: RunFolder) -> Record:
    """The validation of the highest mean Dice, the first of equal ones, as with best.pt; empty where there is none."""
    scored = [record for record in run.records if run_folder.as_number(record.get("val/dice_mean")) is not None]
    return max(scored, key=lambda record: float(record["val/dice_mean"]), default={})


def _weights(run: RunFolder, step: int) -> str:
    optim = run_folder.read_config(run).get("optim")
    if isinstance(optim, dict) and optim.get("average") is not None:
        return "average of the weights"
    is_last = step == max(record["step"] for record in run.records)
    return "last weights" if is_last else "weights"


def write_report(folder: Path) -> Path:
    """Write metrics.csv, figures/curves.png, memory_phases.png, memory_layers.png, report.html; returns its path."""
    run = run_folder.read_run(folder)
    (folder / "figures").mkdir(exist_ok=True)
    if run.records:
        plots.training_curves(run.records, folder / "figures" / "curves.png")
        columns = list(dict.fromkeys(key for record in run.records for key in record))
        rows = ([record.get(key) for key in columns] for record in run.records)  # empty where a record lacks it
        write_csv(folder / "metrics.csv", columns, rows)
    if run.memory:
        memory_plots.phase_plot(run.memory_entry, folder / "figures" / "memory_phases.png")
        seen = run.memory_entry.get("ledger", run.memory_entry)
        if "layers" in seen:
            memory_plots.layer_plot(seen, folder / "figures" / "memory_layers.png")
    path = folder / "report.html"
    write_text(path, _html(run))
    return path


def _html(run: RunFolder) -> str:
    name = f"unet3d run {run.path.resolve().name}" if "rehearsed" not in run.memory else "unet3d memory of a step"
    pictures = run.path / "figures"
    parts = [
        headline(name),
        *map(paragraph, run_folder.about(run)),
        facts(run_folder.highlights(run)),
        section(score_title(run), html_table(*run_folder.score_table(run)), *_best(run)),
        section("Prediction", picture(pictures / "prediction.png", "truth and prediction on three planes")),
        section("Training", picture(pictures / "curves.png", "training loss and validation Dice by step")),
        _memory(run),
        section("Time", facts(run_folder.timing(run))),
        section("Environment", facts({key: str(value) for key, value in run.environment.items()})),
        section("Config", code(run.config)),
    ]
    return html_page(name, parts)


def _best(run: RunFolder) -> list[str]:
    """Scores of the best weights, where the table above is of others."""
    found = best_scores(run)
    return [paragraph(found[0]), html_table(*found[1])] if found else []


def _memory(run: RunFolder) -> str:
    if not run.memory:
        return ""
    entry, pictures = run.memory_entry, run.path / "figures"
    about = f"{run.memory_kind.capitalize()} ({entry['kind']}): bytes held at once in a step, in MiB (2^20 bytes)."
    return section(
        "Memory",
        paragraph(about),
        paragraph(run_folder.prediction(run)),
        paragraph(run_folder.advice(run)),
        html_table(*tables.phases(entry)),
        picture(pictures / "memory_phases.png", "peak memory per phase, by what it is for"),
        _owners(run, entry.get("ledger", entry)),
    )


def _owners(run: RunFolder, seen: Mapping[str, Any]) -> str:
    """Who holds the bytes; of an entry that a ledger made."""
    if "moment" not in seen:
        return html_table(*tables.categories(seen))
    pictures = run.path / "figures"
    parts = [
        paragraph(f"The ledger's peak, {mib(seen['peak_bytes'])} MiB: {tables.moment(seen)}."),
        picture(pictures / "memory_timeline.png", "memory over one step, by what it is for"),
        picture(pictures / "memory_layers.png", "memory at the peak, by layer along the U"),
        html_table(*tables.categories(seen)),
        html_table(*tables.levels(seen)),
        html_table(*tables.layers(seen)),
        html_table(*tables.state(seen, run.memory["parameters"])),
    ]
    return "\n".join(parts)


def print_summary(folder: Path) -> None:
    """Print scores per class, peak memory per phase and the run folder, for terminals and plain files alike."""
    run = run_folder.read_run(folder)
    console = paper(NARROW)
    print_scores(run, score_title(run))
    if best := best_scores(run):
        console.print(terminal_table(*best))
    if run.memory:
        title = f"Memory of a step, {run.memory_kind} ({run.memory_entry['kind']})"
        console.print(terminal_table(title, tables.phases(run.memory_entry)))
        console.print(run_folder.prediction(run))
    for what, value in run_folder.timing(run).items():
        console.print(f"{what}: {value}")
    here = folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder
    console.print(f"run folder: {here}", soft_wrap=True)


def print_scores(run: RunFolder, title: str) -> None:
    """Print scores per class, of a run or of scores.csv alone."""
    if (scores := run_folder.score_table(run)).rows:
        paper(NARROW).print(terminal_table(title, scores))

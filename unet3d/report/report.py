"""The report of a run: its page, its pictures, and its summary on the terminal, in sentences and numbers.

What pages show is escaped; they have no script and need no network. The receipt is of a run that kept a plan: what was
planned next to what was measured, and both errors. The paragraph for the methods section of a paper is
templates/methods.txt; `UNTOLD` in config/schema.py says why the others are not told.
"""

import base64
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from unet3d.base.errors import UserError, escaped
from unet3d.base.files import from_here, write_csv, write_text
from unet3d.base.terminal import NARROW, paper, terminal_table
from unet3d.base.types import Table, mib
from unet3d.config import compose, schema
from unet3d.config.words import path_option
from unet3d.memory import tables
from unet3d.report import held_out, memory_plots, plots
from unet3d.report.held_out import shown
from unet3d.run.record import RunRecord, numbers_of
from unet3d.run.run_folder import as_number

if TYPE_CHECKING:
    import jinja2

TEMPLATES = Path(__file__).with_name("templates")
MAX_PICTURE_BYTES = 2**24
PNG = b"\x89PNG\r\n\x1a\n"  # how each PNG file begins
MAX_WIDTH = 2000  # pixels on the page
MOST_COLUMNS = 2000  # Bound of metrics.csv.
MOST_CELLS = 10**8
MOST_CLASSES = 60  # Bound of figures/scores.png.
METHODS = "For a methods section"
RECEIPT = "Receipt: plan against run (planned minus measured)"
FILES = ("report.html", "scores.csv", "metrics.csv", "memory.json", "checkpoints/best.pt", "figures", "predictions")


class Picture(NamedTuple):
    """A PNG file within a page."""

    data: str  # base64
    about: str  # Text for those who cannot see it.
    width: int  # pixels on the page; at two thirds of it letters are still legible: below, the picture scrolls


def read_picture(path: Path, about: str) -> Picture | None:
    """Read a PNG file for a page; None without a file, or for one that is large or no PNG."""
    if not path.is_file() or path.stat().st_size > MAX_PICTURE_BYTES:
        return None
    content = path.read_bytes()
    if not content.startswith(PNG):
        return None
    pixels = int.from_bytes(content[16:20], "big")  # at 150 per inch; 100 on the page
    return Picture(base64.b64encode(content).decode(), about, min(pixels * 2 // 3, MAX_WIDTH))


def render(template: str, **values: Any) -> str:
    """Return a page or a paragraph: a template with these values, and with this module, without control codes."""
    text = environment().get_template(template).render(values, report=sys.modules[__name__])
    return escaped(text, keep="\n")


@cache
def environment() -> "jinja2.Environment":
    """Return what makes templates, once for a process: it compiles each once. Only pages are escaped."""
    import jinja2

    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=jinja2.select_autoescape(["html"]),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


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
    dice = held_out.dice_by_class(run.scores)
    if dice:
        held_out.score_plot(dict(list(dice.items())[:MOST_CLASSES]), folder / "scores.png")
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
    )
    write_text(run.path / "report.html", page)
    return run.path / "report.html"


def _commands(run: RunRecord) -> list[str]:
    """Return the command that began the run in its folder, and one for each time it was resumed; [] if not known."""
    if run.overrides is None:
        return []
    folder = run.path.resolve()
    place = folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else Path(folder.name)
    commands: list[list[str]] = [[]]
    for word in run.overrides:
        if word.startswith("resume="):
            commands.append([path_option("resume", place)])
        else:
            commands[-1].append(word)
    commands[0].append(path_option("hydra.run.dir", place))
    return [shlex.join(["python", "-m", "unet3d", "train", *words]) for words in commands]


def print_summary(run: RunRecord) -> None:
    """Print scores per class, peak memory per phase and where the files are, for terminals and plain files alike."""
    console = paper(NARROW)
    print_scores(run, held_out.score_title(run))
    if run.memory:
        entry = run.memory_entry
        console.print(terminal_table(f"Memory of a step, {run.memory_kind} ({entry['kind']})", tables.phases(entry)))
        console.print(prediction(run))
        for sentence in tables.on_cuda(entry):
            console.print(escaped(sentence))
    of_plan = receipt(run.memory, run.records)
    if of_plan.rows:
        console.print(terminal_table(RECEIPT, of_plan))
        if changes(run.memory):
            console.print(escaped(changes(run.memory)), soft_wrap=True)
    for name, value in timing(run).items():
        console.print(f"{name}: {value}")
    methods = methods_paragraph(run)
    if methods:
        console.print(f"{METHODS}:\n{escaped(methods)}\n")
    console.print(f"run folder: {escaped(from_here(run.path))}", soft_wrap=True)
    written = [name for name in FILES if (run.path / name).is_file() or any(run.path.glob(f"{name}/*.*"))]
    if written:
        console.print(f"in it: {', '.join(written)}", soft_wrap=True)


def print_scores(run: RunRecord, title: str) -> None:
    """Print scores per class, of a run or of scores.csv alone."""
    console = paper(NARROW)
    table = held_out.score_table(run)
    if table.rows:
        console.print(terminal_table(title, table))
    for other in held_out.other_scores(run):
        console.print(terminal_table(*other))


def what_ran(run: RunRecord) -> str:
    """Return the config in one line; "" unless it is whole."""
    config = run.settings
    try:
        model = config["model"]
        data = config["data"]
        network = model.get("path") or f"U-Net {'-'.join(map(str, model['features']))}"
        patch = "x".join(map(str, data["patch"]))
        parts = [
            f"{network} on {data['format']}",
            f"{config['steps']} steps of {config['batch'] * config['accumulate']} patches of {patch} voxels",
            f"AMP {_way(config['amp'])}",
            f"checkpointing {_way(config['ckpt'])}",
            f"recompute {_way(config.get('recompute'))}",
            f"seed {config['seed']}",
        ]
    except (AttributeError, KeyError, TypeError):  # not a whole config
        return ""
    return ", ".join(parts)


def _way(value: object) -> str:
    """Return an option that saves memory as `on`, `off` or its value."""
    if value in (None, "none"):
        return "off"
    return "on" if value is True else str(value or "off")


def highlights(run: RunRecord) -> dict[str, str]:
    """Return the few numbers of a run that matter most, by name."""
    numbers = {}
    of_classes = held_out.score_table(run).rows
    if of_classes:
        name, dice, *_ = of_classes[-1]
        numbers[f"Dice, {name}"] = dice
    best = run.best_validation
    if best:
        spacing = f", at {run.spacing}" if run.has_own_grids else ""
        dice = shown("dice", as_number(best["val/dice_mean"]))
        numbers["best Dice"] = f"{dice} (step {best['step']:,}{spacing})"
    if run.memory:
        numbers[f"peak memory, {run.memory_kind}"] = f"{mib(run.memory_entry['peak_bytes'])} MiB"
        numbers["parameters"] = f"{run.memory['parameters']:,}"
    if run.last_step is not None:
        numbers["steps done"] = f"{run.last_step:,}"
    return numbers


def timing(run: RunRecord) -> dict[str, str]:
    """Return step time, the share of it that was waiting for data, and validation time; each with its unit."""
    steps = numbers_of(run.records, "time/step_s")
    validations = numbers_of(run.records, "time/val_s")
    times = {}
    if sum(steps):
        switches = f" ({run.switches})" if run.switches else ""
        times["step, median"] = f"{median(steps):.3g} s{switches}"
        times["waiting for data"] = f"{sum(numbers_of(run.records, 'time/data_wait_s')) / sum(steps):.1%} of step time"
    if validations:
        times["validation, median"] = f"{median(validations):.3g} s"
    return times


def prediction(run: RunRecord) -> str:
    """Return the peak that was predicted before the run, and how far the measured one is from it."""
    if run.memory_kind == "predicted" and run.records:
        return "Predicted before the run, which ended before its memory was written."
    if run.memory_kind == "predicted":
        return "Predicted on tensors without data; nothing was run."
    if "error_bytes" not in run.memory:
        return "The peak was not predicted."
    predicted = mib(run.memory["predicted"]["peak_bytes"])
    error = f"{run.memory['error_bytes']:,}"
    of_ranks = [mib(size) for size in run.memory["measured"].get("rank_peak_bytes", [])]
    peaks = f"Peak of each rank, measured: {', '.join(of_ranks)} MiB. " if of_ranks else ""
    return f"{peaks}Peak predicted before the run: {predicted} MiB; predicted minus measured: {error} bytes."


class Promise(NamedTuple):
    """A number that was planned, and the same one measured."""

    name: str  # Heading with its unit.
    key: str  # Column of compare.csv.
    planned: float
    measured: float | None

    @property
    def error(self) -> float | None:
        """Return planned minus measured, as a share of what was measured."""
        return self.planned / self.measured - 1 if self.measured else None


def plan_entry(options: Mapping[str, Any], promise: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return memory.json's entry of a plan: what it promised, and which of its options the run has otherwise.

    `values` are the run's options by their dotted names.
    """
    of_no_run = {"budget", *(name for name, why in schema.options_with("untold").items() if why == "place")}
    changed = [name for name, value in options.items() if name not in of_no_run and values.get(name) != value]
    return {**promise, "changed": changed}


def promises(memory: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> list[Promise]:
    """Return what a plan promised and what memory.json and the records measured; [] without a plan.

    These are the peak of tensors, on a GPU those of its allocator, the time of a step, and of all steps and validations
    where the run has as many as were planned.
    """
    planned = {name: as_number(value) for name, value in (memory.get("plan") or {}).items()}
    measured = memory.get("measured", {})
    steps = numbers_of(records, "time/step_s")
    total = sum(steps) + sum(numbers_of(records, "time/val_s"))
    if not schema.options_with("pace").keys().isdisjoint(_changed(memory)):
        planned["seconds"] = None
    tensors = measured.get("ledger", measured).get("peak_bytes")
    rows = [("peak of tensors (MiB)", "tensors", planned.get("peak_bytes"), tensors)]
    if "ledger" in measured:
        reserved = as_number(measured.get("reserved_bytes"))
        rows.append(("peak allocated (MiB)", "allocated", planned.get("allocated_bytes"), measured.get("peak_bytes")))
        rows.append(("peak reserved (MiB)", "reserved", planned.get("reserved_bytes"), reserved))
    rows.append(("step (s)", "step", planned.get("step_s"), median(steps) if steps else None))
    rows.append(("steps and validations (s)", "seconds", planned.get("seconds"), total or None))
    return [Promise(name, key, number, found) for name, key, number, found in rows if number is not None]


def receipt(memory: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> Table:
    """Return the receipt as a table, without rows where there was no plan."""
    rows = []
    for row in promises(memory, records):
        as_text = mib if row.name.endswith("(MiB)") else "{:,.3g}".format
        measured = "" if row.measured is None else as_text(row.measured)
        rows.append([row.name, as_text(row.planned), measured, "" if row.error is None else f"{row.error:+.1%}"])
    return Table(["of a step, and in all", "planned", "measured", "error"], rows)


def changes(memory: Mapping[str, Any]) -> str:
    """Return a sentence on the options that the run has otherwise than its plan; "" where there are none."""
    changed = _changed(memory)
    return f"The command line changed what was planned: {', '.join(changed)}." if changed else ""


def _changed(memory: Mapping[str, Any]) -> list[str]:
    names = (memory.get("plan") or {}).get("changed")
    return [str(name) for name in names] if isinstance(names, list) else []


def compared_numbers(memory: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the receipt as numbers of compare.csv; {} without a plan."""
    numbers: dict[str, Any] = {}
    for row in promises(memory, records):
        numbers[f"plan_{row.key}"] = row.planned
        numbers[f"plan_{row.key}_error"] = row.error
    return numbers


def methods_paragraph(run: RunRecord) -> str:
    """Return a run as one paragraph for a paper; "" for a folder without a whole config, or of no training."""
    if not {"model", "data", "optim", "steps", "batch"} <= run.settings.keys() or run.last_step is None:
        return ""
    try:
        config = compose.from_plain(run.settings)
    except UserError:
        return ""
    return render(
        "methods.txt",
        c=config,
        run=run,
        channels=config.model.in_channels or len(run.data.get("channels", ())),
        outputs=config.model.classes or len(run.data.get("classes", ())),
        init_name=Path(config.init or "").name,
    )


def listed(items: Iterable[Any], as_text: Callable[[Any], str] = str) -> str:
    """Return `a`, `a and b`, `a, b and c`."""
    *others, last = map(as_text, items)
    return f"{', '.join(others)} and {last}" if others else last


def sizes(value: object, between: str = "x") -> str:
    """Return sizes of all levels, `3`, `3x3x3`, or of each, `3x3x1 3x3x3`."""
    if not isinstance(value, list):
        return f"{value:g}" if isinstance(value, float) else str(value)
    if any(isinstance(item, list) for item in value):
        return " ".join(map(sizes, value))
    return between.join(map(sizes, value))


def labels_of(labels: Any) -> str:
    """Return `label 1`, `labels 1 and 2`."""
    return f"labels {listed(labels)}" if isinstance(labels, list) and len(labels) > 1 else f"label {sizes(labels)}"

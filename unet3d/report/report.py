"""The report of a run: figures, metrics.csv and report.html in its folder, and the closing lines on the terminal."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from unet3d.base import shell
from unet3d.base.errors import escaped
from unet3d.base.files import write_csv, write_text
from unet3d.base.terminal import NARROW, paper, terminal_table
from unet3d.base.types import Table, mib
from unet3d.memory import tables
from unet3d.report import case_plots, memory_plots, plots
from unet3d.report.case_scores import METRICS, ROLES, case_table, dice_by_class, shown
from unet3d.report.html import element, facts, folded, html_page, html_table, picture, section
from unet3d.report.run_folder import RunFolder, as_number, finite, read_run
from unet3d.training.metrics import NETWORK, mean_of

SCORES_TITLE = "Scores on the held-out cases"
OWN_GRIDS = "on the files' own grids"
MOST_COLUMNS, MOST_CELLS = 2000, 10**8  # of metrics.csv
MOST_CLASSES = 60  # of figures/scores.png
PAGES = ("report.html", "scores.csv", "metrics.csv", "memory.json", "checkpoints/best.pt", "figures", "predictions")
VERSIONS = ("unet3d", "commit", "python", "torch", "monai", "numpy")  # of env.json
MOST_ROWS, MOST_NAMES = 12, 2000  # of cases: more rows are folded; more names are not shown


def write_report(folder: Path) -> Path:
    """Write metrics.csv, report.html and the figures that follow from the folder's files; returns the page's path."""
    run, pictures = read_run(folder), folder / "figures"
    pictures.mkdir(exist_ok=True)
    if run.records:
        plots.training_curves(run.records, pictures / "curves.png")
        columns = list(dict.fromkeys(key for record in run.records for key in record))
        columns = columns[: min(MOST_COLUMNS, MOST_CELLS // len(run.records))]  # metrics.jsonl has them all
        rows = ([record.get(key) for key in columns] for record in run.records)  # empty where a record lacks it
        write_csv(folder / "metrics.csv", columns, rows)
    if dice := dict(list(dice_by_class(run.scores).items())[:MOST_CLASSES]):
        case_plots.score_plot(dice, pictures / "scores.png")
    if run.memory:
        memory_plots.phase_plot(run.memory_entry, pictures / "memory_phases.png")
        if "layers" in (seen := run.memory_entry.get("ledger", run.memory_entry)):
            memory_plots.layer_plot(seen, pictures / "memory_layers.png")
    write_text(folder / "report.html", _html(run))
    return folder / "report.html"


def print_summary(folder: Path) -> None:
    """Print scores per class, peak memory per phase and where the files are, for terminals and plain files alike."""
    run, console = read_run(folder), paper(NARROW)
    print_scores(run, score_title(run))
    if best := best_scores(run):
        console.print(terminal_table(*best))
    if run.memory:
        title = f"Memory of a step, {run.memory_kind} ({run.memory_entry['kind']})"
        console.print(terminal_table(title, tables.phases(run.memory_entry)))
        console.print(_prediction(run))
        for words in (tables.workspace_bound, tables.largest_workspaces, tables.cuda_sizes):
            if line := words(run.memory_entry):
                console.print(escaped(line))
    for what, value in _timing(run).items():
        console.print(f"{what}: {value}")
    here = folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder
    console.print(f"run folder: {escaped(here)}", soft_wrap=True)
    if found := [name for name in PAGES if (folder / name).is_file() or any(folder.glob(f"{name}/*.*"))]:
        console.print(f"in it: {', '.join(found)}", soft_wrap=True)


def print_scores(run: RunFolder, title: str) -> None:
    """Print scores per class, of a run or of scores.csv alone."""
    console = paper(NARROW)
    if (scores := score_table(run)).rows:
        console.print(terminal_table(title, scores))
    if run.has_own_grids:
        console.print(terminal_table(*network_scores(run)))


def score_title(run: RunFolder) -> str:
    """The title of the table of scores: which weights, whether they are also the best, and on which grid."""
    return ", ".join(filter(None, (SCORES_TITLE, validated_weights(run), grid(run) if run.last_validation else "")))


def validated_weights(run: RunFolder) -> str:
    """Which weights the last validation scored; "" without a validation."""
    if not run.last_validation:
        return ""
    step, optim = run.last_validation["step"], run.settings.get("optim")
    is_last = step == max(record["step"] for record in run.records)
    weights = "last weights" if is_last else "weights"
    if isinstance(optim, dict) and optim.get("average") is not None:
        weights = "average of the weights"
    is_best = run.best_validation.get("step") == step
    return f"{weights} (step {step}){', also the best' * is_best}"


def grid(run: RunFolder) -> str:
    """On which grid the scores are; "" where there is one alone, the files' own."""
    if run.has_own_grids:
        return OWN_GRIDS
    return f"at {run.spacing}" if run.spacing else ""


def network_scores(run: RunFolder) -> tuple[str, Table]:
    """Title and scores on the network's grid, where others are on the files' own."""
    found = {str(key): [row.get(key) for row in run.scores] for key in run.scores[0]}
    columns = {key.removeprefix(NETWORK): column for key, column in found.items() if key.startswith(NETWORK)}
    spacing = f", {run.spacing}" if run.spacing else ""
    return f"The same on the network's grid{spacing}", _means(columns, counts_cases=True)


def best_scores(run: RunFolder) -> tuple[str, Table] | None:
    """Title and scores of the best weights, from their validation; None if they are the last, or there are none."""
    best = run.best_validation
    if not best or best["step"] == run.last_validation["step"]:
        return None
    where = ", checkpoints/best.pt" if (run.path / "checkpoints" / "best.pt").is_file() else ""
    spacing = f", at {run.spacing}" if run.spacing else ""
    title = f"Best weights (step {best['step']}{where}){spacing}"
    return title, _means({key: [value] for key, value in best.items()})


def score_table(run: RunFolder) -> Table:
    """A row per class with its means over the cases of scores.csv, else of the last validation; and their mean."""
    if not run.scores:
        return _means({key: [value] for key, value in run.last_validation.items()})
    return _means({str(key): [row.get(key) for row in run.scores] for key in run.scores[0]}, counts_cases=True)


def _means(cells: Mapping[str, list[Any]], counts_cases: bool = False) -> Table:
    """Means of columns `metric/class` or `val/metric/class`; in brackets how many cases have an HD95, if not all."""
    columns = {key.removeprefix("val/"): column for key, column in cells.items()}
    scores = {key: [n for cell in column if (n := finite(cell)) is not None] for key, column in columns.items()}
    classes = [key.removeprefix("dice/") for key in scores if key.startswith("dice/")]
    metrics = [metric for metric in METRICS if any(key.startswith(f"{metric}/") for key in scores)]

    def row(name: str, values: Iterable[float | None]) -> list[str]:
        found = zip(metrics, values, strict=True)
        return [name, *(shown(metric, value) for metric, value in found)]

    means = [[mean_of(scores.get(f"{metric}/{name}", ())) for metric in metrics] for name in classes]
    rows = list(map(row, classes, means))
    for line, name in zip(rows, classes if counts_cases else (), strict=False):
        cases, distances = len(scores[f"dice/{name}"]), len(scores.get(f"hd95_mm/{name}", ()))
        line[-1] += f" ({distances})" * (0 < distances != cases)
        line.append(str(cases))
    if len(classes) > 1:
        rows.append([*row("mean of classes", map(mean_of, zip(*means, strict=True))), *[""] * counts_cases])
    return Table(["class", *(METRICS[metric][0] for metric in metrics), *["cases"] * counts_cases], rows)


def _html(run: RunFolder) -> str:
    name, pictures = f"unet3d run {run.path.resolve().name}", run.path / "figures"
    about = [what_ran(run), f"Status: {run.status or 'unknown, there is no STATUS file'}"]
    if "about" in run.memory:  # `unet3d memory` wrote the folder
        name, about = "unet3d memory of a step", [run.memory["about"]]
    scores = [html_table(*score_table(run))]
    if run.has_own_grids:
        on_network_grid = network_scores(run)
        scores += [element("p", on_network_grid[0]), html_table(*on_network_grid[1])]
    if best := best_scores(run):
        scores += [element("p", best[0]), html_table(*best[1])]
    parts = [
        element("h1", name),
        *(element("p", line) for line in about),
        facts(_highlights(run)),
        section(score_title(run), *scores),
        section(_cases_title(run), *_cases(run)),
        section("Training", picture(pictures / "curves.png", "loss, Dice, learning rate, gradient norm, step time")),
        section("Memory", *(_memory(run) if run.memory else ())),
        section("Time", facts(_timing(run))),
        section("How it was made", *_made(run)),
        folded("Environment", facts(run.environment)),
        folded("Config", element("pre", run.config)),
    ]
    return html_page(name, parts)


def _cases_title(run: RunFolder) -> str:
    weights = validated_weights(run)
    return ", ".join(filter(None, ("Cases", weights, grid(run) if weights else "")))


def _cases(run: RunFolder) -> list[str]:
    """Pictures of the best, the median and the worst case, Dice of all by class, and a row a case."""
    about = "case: outlines of truth and prediction on the image, and where they differ, on three planes"
    names = {f"prediction_{role}": f"the {role} {about}" for role in ROLES} | {"prediction": f"a {about}"}
    table, pictures = case_table(run.scores), run.path / "figures"
    rows = html_table(*table)
    fewer = f" of {len(run.scores)}" if len(table.rows) < len(run.scores) else ""
    title = f"{len(table.rows)}{fewer} cases, the worst first"
    return [
        *(picture(pictures / f"{name}.png", words) for name, words in names.items()),
        picture(pictures / "scores.png", "Dice of each case by class") if run.scores else "",
        rows if len(table.rows) <= MOST_ROWS else folded(title, rows),
    ]


def _made(run: RunFolder) -> list[str]:
    """The command line, the split and the versions."""
    command = shell.training(run.overrides) if run.overrides is not None else ""
    versions = [f"{name} {run.environment[name]}" for name in VERSIONS if name in run.environment]
    parts = {"train": "training", "val": "validation"}  # older runs have the long words
    split = {f"{len(names)} cases for {parts.get(what, what)}": names for what, names in run.split.items()}
    return [
        element("pre", command),
        *(folded(title, element("p", ", ".join(names[:MOST_NAMES]))) for title, names in split.items()),
        element("p", ", ".join(versions)),
    ]


def what_ran(run: RunFolder) -> str:
    """The config in a line; "" without a whole one."""
    found = run.settings
    try:
        model, patch = found["model"], "x".join(map(str, found["data"]["patch"]))
        network = model.get("path") or "U-Net " + "-".join(map(str, model["features"]))
        work = f"{found['steps']} steps of {found['batch'] * found['accumulate']} patches of {patch} voxels"
        ways = {"AMP": found["amp"], "checkpointing": found["ckpt"]} | {n: found.get(n) for n in ("lean", "slab")}
        words = [f"{name} {'on' if way is True else way or 'off'}" for name, way in ways.items()]
        how = f"{', '.join(words)}, seed {found['seed']}"
        return f"{network} on {found['data']['format']}, {work}, {how}"
    except (AttributeError, KeyError, TypeError):  # not a whole config
        return ""


def _highlights(run: RunFolder) -> dict[str, str]:
    """The few numbers of a run that matter most."""
    found = {}
    if rows := score_table(run).rows:
        found[f"Dice, {rows[-1][0]}"] = rows[-1][1]
    if best := run.best_validation:
        spacing = f", at {run.spacing}" if run.has_own_grids else ""
        found["best Dice"] = f"{shown('dice', as_number(best['val/dice_mean']))} (step {best['step']:,}{spacing})"
    if run.memory:
        found[f"peak memory, {run.memory_kind}"] = f"{mib(run.memory_entry['peak_bytes'])} MiB"
        found["parameters"] = f"{run.memory['parameters']:,}"
    if run.records:
        found["steps done"] = f"{max(record['step'] for record in run.records):,}"
    return found


def _timing(run: RunFolder) -> dict[str, str]:
    """Step time, the share of it that was waiting for data, validation time; each with its unit."""
    steps, waits, validations = (run.values(f"time/{name}") for name in ("step_s", "data_wait_s", "val_s"))
    found = {}
    if sum(steps):
        found["step, median"] = f"{median(steps):.3g} s" + (f" ({run.switches})" if run.switches else "")
        found["waiting for data"] = f"{sum(waits) / sum(steps):.1%} of step time"
    if validations:
        found["validation, median"] = f"{median(validations):.3g} s"
    return found


def _memory(run: RunFolder) -> list[str]:
    entry, pictures = run.memory_entry, run.path / "figures"
    advice, predicted = run.memory.get("advice"), run.memory.get("predicted")
    seen = entry.get("ledger", entry)  # only a ledger knows which layers hold the bytes
    moment = f"The ledger's peak, {mib(seen['peak_bytes'])} MiB: {tables.moment(seen)}." if "moment" in seen else ""
    return [
        element("p", f"{run.memory_kind.capitalize()} ({entry['kind']}): peak bytes of a step, in MiB (2^20 bytes)."),
        element("p", _prediction(run)),
        element("p", tables.guessed(predicted or {})),
        element("p", tables.workspace_bound(predicted or {})),
        element("p", tables.largest_workspaces(entry)),
        element("p", tables.cuda_sizes(entry)),
        element("p", tables.sentence(advice, predicted["peak_bytes"]) if advice and predicted else ""),
        html_table(
            *tables.single_techniques(run.memory.get("without", {}), predicted["peak_bytes"] if predicted else 0)
        ),
        html_table(*tables.phases(entry)),
        picture(pictures / "memory_phases.png", "peak memory per phase, by category"),
        element("p", moment),
        picture(pictures / "memory_timeline.png", "memory over one step, by category"),
        picture(pictures / "memory_layers.png", "memory at the peak, by layer along the U"),
        html_table(*tables.categories(seen)),
        html_table(*tables.levels(seen)),
        html_table(*tables.layers(seen)),
        html_table(*tables.state(seen, run.memory["parameters"])),
        folded(tables.WORKSPACES, html_table(*tables.workspaces(entry))),
    ]


def _prediction(run: RunFolder) -> str:
    """The peak that was predicted before the run, and how far the measured one is from it."""
    if run.memory_kind == "predicted" and run.records:
        return "Predicted before the run, which ended before its memory was written."
    if run.memory_kind == "predicted":
        return "Predicted on tensors without data; nothing was run."
    if "error_bytes" not in run.memory:
        return "The peak was not predicted."
    peak, error = run.memory["predicted"]["peak_bytes"], run.memory["error_bytes"]
    of_ranks = [mib(size) for size in run.memory["measured"].get("rank_peak_bytes", [])]
    peaks = f"Peak of each rank, measured: {', '.join(of_ranks)} MiB. " if of_ranks else ""
    return f"{peaks}Peak predicted before the run: {mib(peak)} MiB; predicted less measured: {error:,} bytes."

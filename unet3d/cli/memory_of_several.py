"""`unet3d memory` of several configs: peaks side by side, curves, or what fits a budget; from simulated steps."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from unet3d.base import process
from unet3d.base.errors import UserError, escaped
from unet3d.base.files import write_csv
from unet3d.base.progress import track
from unet3d.base.terminal import NARROW, WIDE, narrow_tables, paper, terminal_table
from unet3d.base.types import MIB, Table, budget_bytes, mib
from unet3d.cli.memory_of_config import scaled_width, sizes_of_schedules
from unet3d.memory import remedies, tables
from unet3d.memory.meter import STEPS_FOR_PEAK
from unet3d.memory.prediction import MemoryEstimate, estimate
from unet3d.memory.technique import step_peak
from unet3d.report import memory_plots
from unet3d.report.comparison_plots import PlottedRun, comparison_plot
from unet3d.run.pretrained import with_init_names

ROWS_SHOWN = 24  # of the table of what fits
ESCAPED = re.compile(r"[\\](.)")
BATCHES = (1, 2, 4, 8)
SCALES = (0.25, 0.5, 1, 1.5, 2)  # of widths
WORK = "recompute: forward passes in a step"
SIZES = (0.5, 0.75, 1, 1.25, 1.5)  # of the patch's sides
Estimates = dict[str, MemoryEstimate | UserError]  # of each config, or why it makes no sense


class Point(NamedTuple):
    """A point of a curve: one option of a config, varied."""

    axis: str  # what varies, with its unit
    x: int
    overrides: str
    estimate: MemoryEstimate


def print_peaks(jobs: Sequence[Sequence[str]], half: bool, out: Path | None) -> None:
    """Print one row per job; with `out`, write peaks.csv, and draw them.

    A job that makes no sense is a row without numbers, and a line that says why. Raises UserError where none does.
    """
    estimates = _estimates(jobs, half)
    for name, subject in track(list(estimates.items()), "networks", len(estimates)):
        if isinstance(subject, MemoryEstimate):
            try:
                _ = subject.meter  # simulates
            except UserError as error:  # some only a simulation finds
                estimates[name] = error
    subjects = _sound(estimates)
    table = _table_of_peaks(estimates, subjects)
    console = paper(NARROW)
    console.print(narrow_tables("Predicted peak of a step", table, console.width))
    _print_skipped(estimates)
    if out is not None:
        options = [dict(word.split("=", 1) for word in words) for words in own_words(jobs)]
        _write_peaks(dict(zip(estimates, options, strict=True)), subjects, out)


def _table_of_peaks(estimates: Estimates, subjects: Mapping[str, MemoryEstimate]) -> Table:
    """Return one row per config; one that makes no sense has no numbers."""
    first_peak = next(iter(subjects.values())).step.tensors
    rows = []
    for name in estimates:
        subject = subjects.get(name)
        if subject is None:
            rows.append([name, "", "", "", "skipped"])
            continue
        change = subject.step.tensors / first_peak - 1
        rows.append(
            [
                name,
                f"{subject.parameters:,}",
                mib(subject.step.tensors),
                f"{change:+.1%}",
                tables.moment(subject.entry),
            ]
        )
    return Table(["config", "parameters", "peak (MiB, predicted)", "change", "peak reached in"], rows)


def _write_peaks(options: Mapping[str, dict[str, str]], subjects: Mapping[str, MemoryEstimate], out: Path) -> None:
    """Write peaks.csv, a column for each option that differs, and a picture, and print the folder."""
    (out / "figures").mkdir(parents=True, exist_ok=True)
    keys = list(dict.fromkeys(key for values in options.values() for key in values))
    rows: list[list] = []
    for name, values in options.items():
        subject = subjects.get(name)
        numbers = [None, None] if subject is None else [subject.parameters, subject.step.tensors]
        rows.append([name, *map(values.get, keys), *numbers])
    write_csv(out / "peaks.csv", ["config", *keys, "parameters", "peak_bytes"], rows)
    bars = [PlottedRun(name, "predicted", subject.step.tensors, None, None) for name, subject in subjects.items()]
    comparison_plot(bars, "", out / "figures" / "peaks.png")
    print(escaped(out))


def _estimates(jobs: Sequence[Sequence[str]], half: bool) -> Estimates:
    """Return the estimate of each job by the overrides that are not common to all.

    Raises UserError where two jobs have the same.
    """
    names = [" ".join(words) or "config" for words in own_words(jobs)]
    for name, count in Counter(names).items():
        if count > 1:
            raise UserError(f"{name} is asked for more than once; name each value once")
    estimates: Estimates = {}
    for name, job in zip(names, jobs, strict=True):
        try:
            estimates[name] = replace(estimate(with_init_names(job), half), steps=STEPS_FOR_PEAK)
        except UserError as error:
            estimates[name] = error
    return estimates


def own_words(jobs: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return of each job the overrides that are not common to all, as they are typed: Hydra writes `amp=False`."""
    common = set(jobs[0]).intersection(*jobs)
    typed = {"True": "true", "False": "false", "None": "null"}
    own_words = []
    for job in jobs:
        words = []
        for key, _, value in (word.partition("=") for word in job if word not in common):
            plain = typed.get(value) or ESCAPED.sub(r"\1", value)
            words.append(f"{key}={plain}")
        own_words.append(words)
    return own_words


def _sound(estimates: Estimates) -> dict[str, MemoryEstimate]:
    """Return the jobs that make sense. Raises UserError, with all reasons, where none does."""
    sound = {name: subject for name, subject in estimates.items() if isinstance(subject, MemoryEstimate)}
    if not sound:
        reasons = dict.fromkeys(str(error) for error in estimates.values())
        raise UserError("; ".join(reasons))
    return sound


def _print_skipped(estimates: Estimates) -> None:
    """Print why each config that makes no sense was skipped."""
    for name, subject in estimates.items():
        if isinstance(subject, UserError):
            print(escaped(f"skipped: {name}: {subject}"))


def print_curves(jobs: Sequence[Sequence[str]], half: bool, out: Path) -> None:
    """Write curves.csv and figures/curves.png: peak against batch size, first width and patch, a line a job."""
    estimates = _estimates(jobs, half)
    series = _sound(estimates)
    points = ((name, point) for name, subject in series.items() for point in _points(subject))
    at_most = len(jobs) * len(BATCHES + SCALES + SIZES)
    rows = []
    panels: dict[str, dict[str, list[tuple[float, int]]]] = defaultdict(lambda: defaultdict(list))
    for name, subject in series.items():
        for work, peak in _of_schedules(subject):
            words = f"recompute=auto budget={math.ceil(10 * peak / MIB) / 10}MiB"
            rows.append((WORK, work, name, words, subject.parameters, peak))
            panels[WORK][name].append((work, peak))
    for name, point in track(points, "points, at most", at_most):
        subject = point.estimate
        if not remedies.is_allowed(subject.config, subject.model):
            continue
        rows.append((point.axis, point.x, name, point.overrides, subject.parameters, subject.step.tensors))
        panels[point.axis][name].append((point.x, subject.step.tensors))
    table = out / "curves.csv"
    picture = out / "figures" / "curves.png"
    picture.parent.mkdir(parents=True, exist_ok=True)
    write_csv(table, ["varied", "x", "series", "config", "parameters", "peak_bytes"], rows)
    memory_plots.peak_curves(list(panels.items()), picture)
    _print_skipped(estimates)
    print(escaped(table))
    print(escaped(picture))


def _of_schedules(subject: MemoryEstimate) -> list[tuple[float, int]]:
    """Return work and peak of schedules of `recompute`, after the plain step; [] without that option."""
    if subject.technique.program is None:
        return []
    plain = replace(subject.config, recompute="none")
    return [(1.0, step_peak(plain, subject.model).tensors), *sizes_of_schedules(subject)]


def _points(subject: MemoryEstimate) -> Iterator[Point]:
    """Vary the batch size, the widths and the patch; not the patch where `auto` depends on it."""
    config = subject.config
    model_config = subject.model
    for batch in BATCHES:
        varied = replace(subject, config=replace(config, batch=batch))
        yield Point("batch size", batch, f"batch={batch}", varied)
    levels = range(len(model_config.features))
    for scale in SCALES if levels else ():
        scaled = remedies.resized(model_config, partial(scaled_width, scale, levels))
        overrides = " ".join(remedies.width_overrides(scaled))
        yield Point("first width (channels)", scaled.features[0], overrides, replace(subject, model=scaled))
    depends_on_patch = "auto" in (config.model.kernels, config.model.strides)
    for scale in (1,) if depends_on_patch else SIZES:
        patch = [max(1, round(length * scale)) for length in config.data.patch]
        varied = replace(subject, config=replace(config, data=replace(config.data, patch=patch)))
        overrides = f"data.patch={patch}".replace(" ", "")
        yield Point("patch (voxels)", math.prod(patch), overrides, varied)


def print_fit(overrides: Sequence[str]) -> None:
    """Print the options that no other beats, and the command line that fits `budget`. Raises UserError if none does."""
    subject = estimate(with_init_names(overrides), half=False)
    given = subject.config.budget
    if given is None:
        raise UserError("memory fit needs a budget, e.g. budget=8GiB")
    limit = budget_bytes(given)
    options, best = remedies.find_fit(subject, limit)
    every = math.ceil(len(options) / ROWS_SHOWN)
    rows = [_row_of_fit(option, limit) for option in options[::every]]
    table = Table(["peak (MiB, predicted)", "fits", "FLOPs", "segments", "changes", "overrides"], rows)
    paper(WIDE).print(terminal_table("Options, cheapest change first", table))
    for reason in remedies.untried(subject):
        print(escaped(f"not tried: {reason}"))
    if best.step.limited > limit:
        smallest = f"the smallest peak is {mib(best.step.tensors)} MiB{best.reserves}"
        raise UserError(f"budget={given}: nothing tried fits; {smallest}")
    command = process.training_command(remedies.replaced(overrides, best.overrides))
    print(f"fits: {escaped(command)}")


def _row_of_fit(option: remedies.Candidate, limit: int) -> list[str]:
    """Return what an option needs, costs and changes."""
    return [
        mib(option.step.tensors),
        "yes" if option.step.limited <= limit else "",
        f"{option.repeated:+.0%}",
        str(len(option.technique.segment_starts) or ""),
        "" if option.changes == "nothing" else option.changes,
        " ".join(option.overrides),
    ]

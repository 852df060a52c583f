"""`unet3d memory`, but for the explanation of one config: answers from simulated steps.

Peaks of several configs side by side, curves, what fits a budget, any network (`--module`), a limit (`--below`).
"""

import argparse
import json
import math
import re
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from unet3d import build
from unet3d.base import process
from unet3d.base.errors import ForeseenError, UserError, escaped, is_out_of_memory, reason, warn
from unet3d.base.files import write_csv
from unet3d.base.progress import track
from unet3d.base.terminal import NARROW, WIDE, narrow_tables, paper, terminal_table
from unet3d.base.types import MIB, Table, budget_bytes, mib
from unet3d.cli.memory_of_config import scaled_width, sizes_of_schedules
from unet3d.config.schema import Config
from unet3d.memory import any_network, remedies, tables
from unet3d.memory.any_network import Check, Explanation
from unet3d.memory.meter import STEPS_FOR_PEAK
from unet3d.memory.prediction import MemoryEstimate, estimate, left_out, recompute_line
from unet3d.recomputing.module import Recomputed, schedules_of
from unet3d.recomputing.program import Program
from unet3d.report import explained, memory_plots
from unet3d.report.plots import comparison_plot
from unet3d.run.pretrained import with_init_names

ABOVE = 1  # the exit code where the peak is more than the limit
ROWS_SHOWN = 24  # of the table of what fits
ESCAPED = re.compile(r"[\\](.)")
TYPED = {"True": "true", "False": "false", "None": "null"}
BATCHES = (1, 2, 4, 8)
SCALES = (0.25, 0.5, 1, 1.5, 2)  # of widths
WORK = "recompute: forward passes in a step"
SIZES = (0.5, 0.75, 1, 1.25, 1.5)  # of the patch's sides
POINTS = len(BATCHES + SCALES + SIZES)  # of a job, at most


def print_peaks(jobs: Sequence[Sequence[str]], half: bool, out: Path | None) -> None:
    """Print one row per job; with `out`, write peaks.csv, and draw them.

    A job that makes no sense is a row without numbers, and a line that says why. Raises UserError where none does.
    """
    estimates, skipped = _estimates(jobs, half)
    first_peak = next(iter(estimates.values())).step.tensors
    settings = settings_of(jobs)
    keys = list(dict.fromkeys(key for values in settings.values() for key in values))
    rows = []
    cells: list[list] = []
    for name, values in settings.items():
        row = [name, "", "", "", "skipped"]
        sizes: tuple[int | None, ...] = (None, None)
        subject = estimates.get(name)
        if subject is not None:
            sizes = subject.parameters, subject.step.tensors
            change = f"{subject.step.tensors / first_peak - 1:+.1%}"
            row = [name, f"{sizes[0]:,}", mib(subject.step.tensors), change, tables.moment(subject.entry)]
        rows.append(row)
        cells.append([name, *map(values.get, keys), *sizes])
    _print_table(["config", "parameters", "peak (MiB, predicted)", "change", "peak reached in"], rows)
    _print_skipped(skipped)
    if out is not None:
        (out / "figures").mkdir(parents=True, exist_ok=True)
        write_csv(out / "peaks.csv", ["config", *keys, "parameters", "peak_bytes"], cells)
        bars = {name: {"peak_predicted_bytes": subject.step.tensors} for name, subject in estimates.items()}
        comparison_plot(bars, "", out / "figures" / "peaks.png")
        print(escaped(out))


def _print_table(columns: list[str], rows: list[list[str]]) -> None:
    console = paper(NARROW)
    console.print(narrow_tables("Predicted peak of a step", Table(columns, rows), console.width))


def _estimates(jobs: Sequence[Sequence[str]], half: bool) -> tuple[dict[str, MemoryEstimate], dict[str, UserError]]:
    """Return the simulated estimate of each job by its name, and why others make no sense.

    Raises UserError, with all reasons, where none makes sense, and where two jobs have the same name.
    """
    estimates = {}
    skipped = {}
    for name, job in track(list(zip(settings_of(jobs), jobs, strict=True)), "networks"):
        try:
            subject = replace(estimate(with_init_names(job), half), steps=STEPS_FOR_PEAK)
            _ = subject.meter  # simulates, which alone finds some mistakes
            estimates[name] = subject
        except UserError as error:
            skipped[name] = error
    if not estimates:
        raise UserError("; ".join(dict.fromkeys(map(str, skipped.values()))))
    return estimates, skipped


def settings_of(jobs: Sequence[Sequence[str]]) -> dict[str, dict[str, str]]:
    """Return of each job, by its name, the options that are not common to all, as they are typed.

    Hydra writes `amp=False`. Raises UserError where two jobs have the same name.
    """
    common = set(jobs[0]).intersection(*jobs)
    settings: dict[str, dict[str, str]] = {}
    for job in jobs:
        values = {}
        for key, _, value in (word.partition("=") for word in job if word not in common):
            values[key] = TYPED.get(value) or ESCAPED.sub(r"\1", value)
        name = " ".join(f"{key}={value}" for key, value in values.items()) or "config"
        if name in settings:
            raise UserError(f"{name} is asked for more than once; name each value once")
        settings[name] = values
    return settings


def _print_skipped(skipped: Mapping[str, UserError]) -> None:
    """Print why each config that makes no sense was skipped."""
    for name, error in skipped.items():
        print(escaped(f"skipped: {name}: {error}"))


def print_curves(jobs: Sequence[Sequence[str]], half: bool, out: Path) -> None:
    """Write curves.csv and figures/curves.png: peak against batch size, first width and patch, a line a job."""
    estimates, skipped = _estimates(jobs, half)
    rows = []
    panels: dict[str, dict[str, list[tuple[float, int]]]] = defaultdict(lambda: defaultdict(list))
    points = ((name, point) for name, subject in estimates.items() for point in _points(subject))
    for name, (axis, x, overrides, parameters, peak) in track(points, "points", len(jobs) * POINTS):
        rows.append((axis, x, name, overrides, parameters, peak))
        panels[axis][name].append((x, peak))
    table = out / "curves.csv"
    picture = out / "figures" / "curves.png"
    picture.parent.mkdir(parents=True, exist_ok=True)
    write_csv(table, ["varied", "x", "series", "config", "parameters", "peak_bytes"], rows)
    memory_plots.peak_curves(list(panels.items()), picture)
    _print_skipped(skipped)
    print(escaped(table))
    print(escaped(picture))


def _points(subject: MemoryEstimate) -> Iterator[tuple[str, float, str, int, int]]:
    """Yield what varies, its value, the overrides, parameters and peak: of schedules, then of the other options."""
    if subject.technique.program is not None:
        for work, peak in sizes_of_schedules(subject):
            words = f"recompute=auto budget={math.ceil(10 * peak / MIB) / 10}MiB"
            yield WORK, work, words, subject.parameters, peak
    for axis, x, words, varied in _varied(subject):
        if remedies.is_allowed(varied.config, varied.model):
            yield axis, x, words, varied.parameters, varied.step.tensors


def _varied(subject: MemoryEstimate) -> Iterator[tuple[str, int, str, MemoryEstimate]]:
    """Vary the batch size, the widths and the patch; not the patch where `auto` depends on it."""
    config = subject.config
    model_config = subject.model
    for batch in BATCHES:
        yield "batch size", batch, f"batch={batch}", replace(subject, config=replace(config, batch=batch))
    levels = range(len(model_config.features))
    for scale in SCALES if levels else ():
        scaled = remedies.resized(model_config, partial(scaled_width, scale, levels))
        words = " ".join(remedies.width_overrides(scaled))
        yield "first width (channels)", scaled.features[0], words, replace(subject, model=scaled)
    depends_on_patch = "auto" in (config.model.kernels, config.model.strides)
    for scale in (1,) if depends_on_patch else SIZES:
        patch = [max(1, round(length * scale)) for length in config.data.patch]
        varied = replace(subject, config=replace(config, data=replace(config.data, patch=patch)))
        words = f"data.patch={patch}".replace(" ", "")
        yield "patch (voxels)", math.prod(patch), words, varied


def print_fit(overrides: Sequence[str]) -> None:
    """Print the options that no other beats, and the command line that fits `budget`. Raises UserError if none does."""
    subject = estimate(with_init_names(overrides), half=False)
    given = subject.config.budget
    if given is None:
        raise UserError("memory fit needs a budget, e.g. budget=8GiB")
    limit = budget_bytes(given)
    options, best = remedies.find_fit(subject, limit)
    every = math.ceil(len(options) / ROWS_SHOWN)
    rows = []
    for option in options[::every]:
        fits = "yes" if option.step.limited <= limit else ""
        segments = str(len(option.technique.segment_starts) or "")
        changes = "" if option.changes == "nothing" else option.changes
        flops = f"{option.repeated:+.0%}"
        rows.append([mib(option.step.tensors), fits, flops, segments, changes, " ".join(option.overrides)])
    table = Table(["peak (MiB, predicted)", "fits", "FLOPs", "segments", "changes", "overrides"], rows)
    paper(WIDE).print(terminal_table("Options, cheapest change first", table))
    for untried in remedies.untried(subject):
        print(escaped(f"not tried: {untried}"))
    if best.step.limited > limit:
        smallest = f"the smallest peak is {mib(best.step.tensors)} MiB{best.reserves}"
        raise UserError(f"budget={given}: nothing tried fits; {smallest}")
    command = process.training_command(remedies.replaced(overrides, best.overrides))
    print(f"fits: {escaped(command)}")


class OwnNetwork:
    """A network that a name such as package.module:name makes. Whatever it raises becomes a UserError of one line."""

    def __init__(self, path: str, keywords: Mapping[str, Any]) -> None:
        self.path = path
        make = build.import_object("--module", path)
        with self._failures_refused(f"cannot be made with --args {json.dumps(keywords)}"):
            network = make(**keywords)
        if not isinstance(network, nn.Module):
            raise UserError(f"--module {path}: made {type(network).__name__}, not a torch.nn.Module")
        self.network = network
        self._prepared: dict[Any, Program] = {}  # what the plans of recompute share

    def predict(self, shape: Sequence[int], config: Config, depth: int | None = None) -> Explanation:
        """Return the prediction of a step with an input of N C D H W; its `guesses` are no warnings."""
        with self._failures_refused(_step(shape)), warnings.catch_warnings(action="ignore"):
            device_type = build.device_type(config)
            return any_network.predict(self._trained(config), shape, amp=_amp(config), device=device_type, depth=depth)

    def measure(self, shape: Sequence[int], config: Config, depth: int | None) -> Explanation:
        """Return what steps on the config's device have measured."""
        device = build.device(config)
        with self._failures_refused(_step(shape)):
            self.network.to(device)
            return any_network.explain(self._trained(config), shape, amp=_amp(config), depth=depth)

    def _trained(self, config: Config) -> nn.Module:
        """Return the network as the config's recompute has it: it shares the network's weights."""
        plan: Any = config.recompute
        if plan == "none":
            return self.network
        trained = Recomputed(self.network, plan)
        schedules_of(trained).prepared = self._prepared
        return trained

    @contextmanager
    def _failures_refused(self, problem: str) -> Iterator[None]:
        """Raise UserError for whatever a stranger's network raises within, unless memory ran out."""
        try:
            yield
        except Exception as error:
            if isinstance(error, ForeseenError) or is_out_of_memory(error):
                raise
            text = f"{problem}: {reason(error)}"
            if isinstance(error, ImportError):  # MONAI goes on with advice and a trace
                text = f"needs a package that is not installed: {escaped(str(error).partition(chr(10))[0])}"
            raise UserError(f"--module {self.path}: {text}") from error


def _step(shape: Sequence[int]) -> str:
    return f"a step with --input {'x'.join(map(str, shape))} fails"


def _amp(config: Config) -> bool | str:
    """Return mixed precision as `unet3d.memory.predict` takes it."""
    return config.amp_dtype if config.amp and config.amp_dtype != "auto" else config.amp


def print_module(own: OwnNetwork, shape: Sequence[int], config: Config, flags: argparse.Namespace) -> None:
    """Print where the memory of a step goes; with `flags.out`, also write a page there. Raises UserError."""
    explanations = [own.predict(shape, config, flags.depth)]
    if flags.measure:
        explanations.append(own.measure(shape, config, flags.depth))
    print(*explanations, sep="\n\n")
    if explanations[0].program is not None:
        print(recompute_line(config, explanations[0].program))
    if flags.out is not None:
        print(escaped(explained.write_page(explanations[-1], flags.out)))


def print_peaks_of(
    own: OwnNetwork,
    shape: Sequence[int],
    jobs: Sequence[Sequence[str]],
    configs: Sequence[Config],
) -> None:
    """Print one row a config for a step of any network. Raises UserError for a network that cannot be run."""
    rows: list[list[str]] = []
    first_peak = 0
    for name, config in track(list(zip(settings_of(jobs), configs, strict=True)), "steps"):
        found = own.predict(shape, config)
        first_peak = first_peak or found.peak_bytes
        program = found.program
        work = "" if program is None else f"{program.schedule.work - 1:+.0%}" if program.saves_memory else "runs plain"
        row = [name, mib(found.peak_bytes), f"{found.peak_bytes / first_peak - 1:+.1%}", work]
        if "reserved_bytes" in found.entry:
            row.append(mib(found.entry["reserved_bytes"]))
        rows.append(row)
    heads = ["config", "peak (MiB, predicted)", "change", "forward work", "reserved (MiB)"][: max(map(len, rows))]
    rows = [row + [""] * (len(heads) - len(row)) for row in rows]
    print(f"{type(own.network).__name__}: input {'x'.join(map(str, shape))}")
    _print_table(heads, rows)


def print_check(predict: Callable[[], Explanation | MemoryEstimate], config: Config, flags: argparse.Namespace) -> int:
    """Print whether a step stays within `flags.below`. Return the exit code. Raises UserError.

    Stdout is for the answer alone: what it leaves out, and what a user's network prints, goes to stderr.
    """
    with redirect_stdout(sys.stderr):
        subject = predict()
        check = Check(subject.meter, subject.name, budget_bytes(flags.below))
    for note in (*left_out(config), *check.meter.notes, *tables.guessed(check.meter.guesses)):
        warn(note)
    print(json.dumps(check.as_json(flags.depth), indent=2) if flags.json else escaped(check.line))
    return 0 if check.fits else ABOVE

"""Answers of `unet3d memory` from simulated steps.

Where the memory of one config's step goes, with narrower networks and its family; peaks of several configs side by
side, curves, what fits a budget, any network (`--module`), a limit (`--below`).
"""

import argparse
import json
import math
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from unet3d import build
from unet3d.base import process
from unet3d.base.errors import UserError, escaped, warn
from unet3d.base.files import write_csv, write_json, write_text
from unet3d.base.progress import track
from unet3d.base.terminal import NARROW, WIDE, narrow_tables, paper, plain_text, terminal_table
from unet3d.base.types import MIB, Table, budget_bytes, mib, percent
from unet3d.config import compose
from unet3d.config.schema import Config
from unet3d.memory import breakdown, remedies, tables
from unet3d.memory.allocator import Settings
from unet3d.memory.any_network import Explanation, OwnNetwork, compare
from unet3d.memory.breakdown import dtype_name, layer_names, stage_of
from unet3d.memory.meter import STEPS_FOR_PEAK, peak_of
from unet3d.memory.prediction import MemoryEstimate, estimate, left_out, recompute_line, usual_estimates
from unet3d.memory.technique import some_schedules, step_peak
from unet3d.report import explained, memory_plots, report
from unet3d.report.plots import comparison_plot
from unet3d.run import record
from unet3d.run.pretrained import with_init_names

GROUPS_SHOWN = 10  # Groups of tensors.
ABOVE = 1  # the exit code where the peak is more than the limit
ROWS_SHOWN = 24  # Rows of the table of what fits.
ESCAPED = re.compile(r"[\\](.)")
TYPED = {"True": "true", "False": "false", "None": "null"}
BATCHES = (1, 2, 4, 8)
SCALES = (0.25, 0.5, 1, 1.5, 2)  # Times the widths.
WORK = "recompute: forward passes in a step"
SIZES = (0.5, 0.75, 1, 1.25, 1.5)  # Times the patch's sides.
POINTS = len(BATCHES + SCALES + SIZES)  # A job's curves have at most this many.


def estimated(overrides: Sequence[str], half: bool) -> MemoryEstimate:
    """Return the memory of `python train.py OVERRIDES`, whose init is read for the weights that it loads.

    Raises UserError.
    """
    subject = estimate(with_init_names(overrides), half)
    is_cpu = build.device_type(subject.config) == "cpu"  # an allocator settles later
    return replace(subject, steps=STEPS_FOR_PEAK) if is_cpu else subject


def print_explanation(overrides: Sequence[str], half: bool, out: Path | None, depth: int | None = None) -> None:
    """Print where the memory of a step goes; with `out`, also write it there, with report, figures and tables.

    Layers have their names' first `depth` parts; None: short names, or the full ones in a network of the user's.
    """
    overrides = with_init_names(overrides)
    subject = estimate(overrides, half)
    if depth is not None:
        subject.ledger.layer = layer_names(subject.meter.model, depth)
    narrower = narrowed(subject)
    relatives = family(subject, overrides)
    for network in track([subject, *narrower.values(), *relatives], "networks"):
        _ = network.meter  # simulates
    relatives.sort(key=lambda relative: -relative.parameters)
    advice = tables.peak_location(subject.entry)
    halved = narrower.get(advice["level"])
    if halved is not None:
        advice["override"] = " ".join(remedies.width_overrides(halved.model))
        advice["halved_peak_bytes"] = halved.step.tensors
    without = subject.without()
    text = plain_text(_sections(subject, advice, without, narrower, relatives), WIDE)
    print(text, end="")
    if out is None:
        return
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / "explained.txt", text)
    write_text(out / "config.yaml", compose.to_yaml(subject.config))
    memory = {"about": _summary(subject), "parameters": subject.parameters, "predicted": subject.entry}
    write_json(out / "memory.json", memory | {"advice": advice, "without": without})
    memory_plots.write_ledger_files(subject.ledger, out)
    print(escaped(report.write_report(record.read_run(out))))


def narrowed(subject: MemoryEstimate) -> dict[int, MemoryEstimate]:
    """Return the networks with half the width at a level, by level.

    A level is left out where that cannot be: where groups of 8 would have 4 channels, for example.
    """
    narrower = {}
    for level in range(len(subject.model.features)):
        model_config = remedies.resized(subject.model, partial(scaled_width, 0.5, [level]))
        if model_config != subject.model and remedies.is_allowed(subject.config, model_config):
            narrower[level] = replace(subject, model=model_config, steps=STEPS_FOR_PEAK)
    return narrower


def scaled_width(scale: float, levels: Sequence[int], level: int, width: int) -> int:
    """Return the width of a level, scaled if it is one of these levels."""
    return max(1, round(width * scale)) if level in levels else width


def family(subject: MemoryEstimate, overrides: Sequence[str]) -> list[MemoryEstimate]:
    """Return the named networks whose names begin alike, under the same overrides.

    Only the subject where the overrides set widths or name a network of the user's own.
    """
    relatives = [subject]
    model_config = subject.config.model
    try:
        named = compose.compose([f"model={subject.name}", f"data.patch={subject.config.data.patch}"]).model
    except UserError:  # the named network is too deep for this patch, or is none of the package's
        return relatives
    is_named = (named.features, named.decoder) == (model_config.features, model_config.decoder)
    if not is_named or not subject.model.features:
        return relatives
    stem = subject.name.partition("_")[0]
    rest = [override for override in overrides if not override.startswith("model=")]
    for name in compose.choices("model"):
        if name.partition("_")[0] == stem and name != subject.name:
            with suppress(UserError):  # a relative that this patch or option does not suit
                relative = estimate([f"model={name}", *rest], half=subject.dtype is torch.float16)
                relatives.append(replace(relative, steps=STEPS_FOR_PEAK))
    return relatives


def _sections(
    subject: MemoryEstimate,
    advice: Mapping[str, Any],
    without: Mapping[str, int],
    narrower: Mapping[int, MemoryEstimate],
    relatives: Sequence[MemoryEstimate],
) -> Iterator[str | tuple[str, Table]]:
    """Yield how high the peak is, when it is, what it is made of, what options do to it, and what other networks need.

    Those are lines, and tables with titles. `without`: each option that saves memory and is used, with the peak without
    it, in bytes. `narrower`: by level; `relatives`: of the family.
    """
    entry = subject.entry
    peak = subject.step.tensors
    yield _summary(subject)
    yield f"predicted peak of a step: {mib(peak)} MiB ({tables.predicted_kind(entry)}), {tables.moment(entry)}"
    yield tables.sentence(advice, peak)
    yield "What the prediction includes", _kinds_of_peak(subject)
    yield from tables.guessed(subject.meter.guesses)
    if subject.meter.for_gpu:
        yield tables.CUDA_SIZES
    for storage in subject.ledger.storages:
        if storage.operation == "aten.convolution.default" and not storage.scope.is_in_tiles:
            shape = " x ".join(map(str, storage.shape))
            yield f"the first convolution's output: {shape} {dtype_name(storage.dtype)} = {storage.bytes:,} bytes"
            break
    yield "Peak per phase", tables.phases(entry)
    yield "At the peak, by what it is for", tables.categories(entry)
    yield "At the peak, by level of the U", tables.levels(entry)
    yield "At the peak, by layer", tables.layers(entry)
    yield "At the peak, the largest groups of tensors", _groups(subject)
    if without:
        yield "Peak without each option (predicted)", tables.single_techniques(without, peak)
    if subject.dtype is torch.float32:
        further = _further(subject)
        if further.rows:
            yield "Peak with each further option alone (predicted)", further
    if subject.technique.program is not None:
        yield "Less memory for more work (recompute=auto with a budget, predicted)", _schedules(subject)
    yield "What parameters cost", tables.state(entry, subject.parameters)
    yield "Usual estimates and their error", tables.estimates(usual_estimates(subject), peak)
    if narrower:
        yield "Half the width at one level (predicted)", _widths(subject, narrower)
    if len(relatives) > 1:
        yield "Networks of this family, same patch, batch and policy (predicted)", _family_table(relatives)
        yield from _paradoxes(subject, relatives)


def _groups(subject: MemoryEstimate) -> Table:
    """Return the largest groups of equal tensors at the peak."""
    groups = breakdown.held(subject.ledger, breakdown.peak_moment(subject.ledger))[:GROUPS_SHOWN]
    rows = []
    for group in groups:
        tensors = f"{group.number} x {group.shape} {group.dtype}"
        share = percent(group.bytes, subject.step.tensors)
        rows.append([tensors, tables.NAMES[group.category], mib(group.bytes), share])
    return Table(["tensors", "for", "MiB", "share"], rows)


def _further(subject: MemoryEstimate) -> Table:
    """Return the peak with each option that saves memory and that the step does not use."""
    rows = []
    for option in remedies.single_techniques(subject):
        less = subject.step.tensors - option.step.tensors
        sizes = [mib(option.step.tensors), mib(less), percent(less, subject.step.tensors)]
        rows.append([*option.overrides, *sizes, f"{option.repeated:+.0%}", option.changes])
    return Table(["option", "peak with it (MiB)", "saved (MiB)", "share", "FLOPs", "changes"], rows)


def _schedules(subject: MemoryEstimate) -> Table:
    """Return what the plain step needs and, with recompute, steps of ever more work."""
    (_, plain), *sizes = sizes_of_schedules(subject)
    rows = [["recompute=none", "1.00", mib(plain), ""]]
    for work, size in sizes:
        rows.append(["recompute=auto", f"{work:.2f}", mib(size), percent(plain - size, plain)])
    return Table(["option", "forward passes in a step", "peak (MiB)", "saved"], rows)


def sizes_of_schedules(subject: MemoryEstimate) -> list[tuple[float, int]]:
    """Return work (in forward passes) and peak (bytes) of the plain step, and of steps by some schedules.

    From the least work on.
    """
    points = [(1.0, step_peak(replace(subject.config, recompute="none"), subject.model).tensors)]
    for technique in track(some_schedules(subject.config, subject.model, subject.dtype), "schedules"):
        assert technique.program is not None
        step = step_peak(subject.config, subject.model, technique)
        points.append((technique.program.schedule.work, step.tensors))
    return points


def _summary(subject: MemoryEstimate) -> str:
    """Return the config in a line."""
    config = subject.config
    autocast = build.policy(config, "cpu").dtype
    precision = f"amp {dtype_name(autocast)}" if autocast else dtype_name(subject.dtype)
    recompute = f"at most {config.ckpt} checkpointed segments" if config.ckpt else "no checkpointing"
    if subject.technique.program is not None:
        recompute = recompute_line(config, subject.technique.program)
    patch = "x".join(map(str, config.data.patch))
    step = f"patch {patch}, batch {config.batch}, {precision}, on {build.device_type(config)}"
    return f"{subject.name}: {subject.parameters:,} parameters; {step}; {recompute}"


def _kinds_of_peak(subject: MemoryEstimate) -> Table:
    """Return a row for each kind of predicted peak: exact, replay, or not known here."""
    rows = [["tensors", mib(subject.step.tensors), "exact count"]]
    if subject.meter.for_gpu:
        step = peak_of(subject.ledger, Settings())
        rows += [
            ["requested: with workspaces of convolutions", mib(step.requested), "estimate"],
            ["allocated: blocks given out", mib(step.allocated), "replay"],
            ["reserved by the allocator", mib(step.reserved), "replay"],
            ["reserved, PYTORCH_ALLOC_CONF=expandable_segments:True", mib(step.expandable), "replay"],
            ["CUDA context", "", "constant of the GPU, outside of the allocator; not predicted"],
        ]
    return Table(["predicted peak of a step", "MiB", "kind"], rows)


def _widths(subject: MemoryEstimate, narrower: Mapping[int, MemoryEstimate]) -> Table:
    """Return what half the width at each level saves, in bytes and in parameters."""
    rows = []
    for level, other in narrower.items():
        peak = [mib(other.step.tensors), f"{other.step.tensors / subject.step.tensors - 1:+.0%}"]
        parameters = [f"{other.parameters:,}", f"{other.parameters / subject.parameters - 1:+.0%}"]
        width = f"{subject.model.features[level]} -> {other.model.features[level]}"
        rows.append([str(level), width, *peak, *parameters])
    return Table(["level", "width", "peak (MiB)", "change", "parameters", "change"], rows)


def _family_table(relatives: Sequence[MemoryEstimate]) -> Table:
    """Return one row per network: where its memory and its parameters are."""
    columns = ["network", "widths", "parameters", "peak (MiB)", "of it at full resolution", "channels joined there"]
    rows = []
    for relative in relatives:
        peak = relative.step.tensors
        widths = "-".join(map(str, relative.model.features))
        share = f"{relative.entry['levels'][0]['bytes'] / peak:.0%}"  # The first level has full resolution.
        rows.append([relative.name, widths, f"{relative.parameters:,}", mib(peak), share, _joined(relative)])
    return Table(columns, rows)


def _joined(subject: MemoryEstimate) -> str:
    """Return the channels of the skip and of what comes from below where a U-Net joins them at full resolution."""
    stage = f"up{len(subject.model.features) - 1}"
    skip = subject.model.features[0]
    for storage in subject.ledger.storages:
        if storage.operation == "aten.cat.default" and stage_of(storage.scope.module) == stage:
            channels = storage.shape[1]
            return f"{skip} + {channels - skip} = {channels}"
    return ""


def _paradoxes(subject: MemoryEstimate, relatives: Sequence[MemoryEstimate]) -> Iterator[str]:
    """Yield a sentence for each relative with more parameters and a lower peak: how that can be."""
    for other in relatives:
        if other.parameters > subject.parameters and other.step.tensors < subject.step.tensors:
            ratio = other.parameters / subject.parameters
            joins = f"at full resolution it joins {_joined(other)} channels, {subject.name} {_joined(subject)}"
            more = f"{ratio:.1f} times the parameters of {subject.name}"
            less = f"{mib(subject.step.tensors - other.step.tensors)} MiB less"
            where = "Parameters live at the bottom of the U, activations at the top."
            yield f"{other.name} has {more} and needs {less}: {joins}. {where}"


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
        subject = estimates.get(name)
        if subject is None:
            rows.append([name, "", "", "", "skipped"])
            cells.append([name, *map(values.get, keys), None, None])
            continue
        peak = subject.step.tensors
        change = f"{peak / first_peak - 1:+.1%}"
        rows.append([name, f"{subject.parameters:,}", mib(peak), change, tables.moment(subject.entry)])
        cells.append([name, *map(values.get, keys), subject.parameters, peak])
    _print_table(["config", "parameters", "peak (MiB, predicted)", "change", "peak reached in"], rows)
    for name, error in skipped.items():
        print(escaped(f"skipped: {name}: {error}"))
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
    for name, error in skipped.items():
        print(escaped(f"skipped: {name}: {error}"))
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


def print_module(own: OwnNetwork, shape: Sequence[int], config: Config, flags: argparse.Namespace) -> None:
    """Print where the memory of a step goes; with `flags.out`, also write a page there. Raises UserError."""
    explanations = [own.explain(shape, config, flags.depth)]
    if flags.measure:
        explanations.append(own.explain(shape, config, flags.depth, is_measured=True))
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
        found = own.explain(shape, config)
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
        answer, line = compare(subject.meter, subject.name, budget_bytes(flags.below), flags.depth)
    for note in (*left_out(config), *subject.meter.notes, *tables.guessed(subject.meter.guesses)):
        warn(note)
    print(json.dumps(answer, indent=2) if flags.json else escaped(line))
    return 0 if answer["fits"] else ABOVE

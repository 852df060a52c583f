"""`unet3d memory`: one config explained, several side by side, curves, or what fits a budget; from simulated steps."""

import json
import math
import shlex
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from unet3d import build
from unet3d.base.errors import UserError, escaped, is_out_of_memory, reason
from unet3d.base.files import write_csv, write_json, write_text
from unet3d.base.progress import track
from unet3d.base.terminal import WIDE, paper, plain_text, terminal_table
from unet3d.base.types import Table, budget_bytes, mib, percent
from unet3d.config import compose
from unet3d.config.schema import Config
from unet3d.memory import analysis, budget, export, profile, tables
from unet3d.memory.allocator import Settings, replay
from unet3d.memory.meter import MEASURED_STEPS, STEPS_FOR_PEAK
from unet3d.memory.preflight import MemoryEstimate, estimate, slab_words
from unet3d.report import explained, memory_curves, memory_plots, record, report
from unet3d.run.pretrained import with_names

LARGEST = 10  # groups of tensors shown
FRONT = 24  # rows of the table of options
BATCHES = (1, 2, 4, 8)
SCALES = (0.25, 0.5, 1, 1.5, 2)  # of widths
WHERE = "Parameters live at the bottom of the U, activations at the top."
SIZES = (0.5, 0.75, 1, 1.25, 1.5)  # of the patch's sides


def print_explanation(overrides: Sequence[str], half: bool, out: Path | None) -> None:
    """Print where the memory of a step goes; with `out`, also write it there, with report, figures and tables."""
    overrides = with_names(overrides)
    subject = estimate(overrides, half)
    narrower, relatives = narrowed(subject), family(subject, overrides)
    simulate_all([subject, *narrower.values(), *relatives])
    relatives.sort(key=lambda relative: -relative.parameters)
    found = tables.peak_location(subject.entry)
    if (other := narrower.get(found["level"])) is not None:
        found |= {"override": " ".join(budget.width_overrides(other.options)), "halved_peak_bytes": other.peak}
    without = subject.without()
    text = plain_text(_parts(subject, narrower, relatives, without, tables.sentence(found, subject.peak)), WIDE)
    print(text, end="")
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        write_text(out / "explained.txt", text)
        write_text(out / "config.yaml", compose.to_yaml(subject.config))
        simulated = {"about": _summary(subject), "parameters": subject.parameters, "predicted": subject.entry}
        write_json(out / "memory.json", simulated | {"advice": found, "without": without})
        memory_plots.write_ledger_files(subject.ledger, subject.name, out)
        print(escaped(report.write_report(record.read_run(out))))


def print_module(
    path: str,
    keywords: Mapping[str, Any],
    shape: Sequence[int],
    config: Config,
    measures: bool,
    out: Path | None,
    depth: int | None = None,
) -> None:
    """Print where the memory of a step of any network goes; with `out`, also write it there. Raises UserError."""
    make = build.import_object("--module", path)
    try:
        network = make(**keywords)
    except (TypeError, ValueError, KeyError, ImportError) as error:
        raise _refused(path, f"cannot be made with --args {json.dumps(keywords)}", error) from error
    if not isinstance(network, nn.Module):
        raise UserError(f"--module {path}: made {type(network).__name__}, not a torch.nn.Module")
    target = build.device_type(config)
    amp = config.amp and (config.amp_dtype if config.amp_dtype != "auto" else True)
    try:
        with warnings.catch_warnings(action="ignore"):  # what is printed says it, too
            found = [profile.predict(network, shape, amp=amp, device=target, depth=depth)]
        if measures:
            found.append(profile.explain(network.to(build.device(config)), shape, amp=amp, depth=depth))
    except (RuntimeError, ValueError, TypeError, ImportError) as error:
        if isinstance(error, UserError) or is_out_of_memory(error):
            raise
        raise _refused(path, f"a step with --input {'x'.join(map(str, shape))} fails", error) from error
    print(*found, sep="\n\n")
    if out is not None:
        print(escaped(explained.write_page(found[-1], out)))


def _refused(path: str, what: str, error: Exception) -> UserError:
    if isinstance(error, ImportError):
        missing = escaped(str(error).partition("\n")[0])  # MONAI goes on with advice and a trace
        return UserError(f"--module {path}: needs a package that is not installed: {missing}")
    return UserError(f"--module {path}: {what}: {reason(error)}")


def simulate_all(estimates: Sequence[MemoryEstimate]) -> None:
    """Simulate each now, with a bar, rather than when it is first read."""
    for one in track(estimates, "networks", len(estimates)):
        _ = one.meter


def narrowed(subject: MemoryEstimate) -> dict[int, MemoryEstimate]:
    """By level, the network with half the width there; none where groups of 8 would have 4 channels, for example."""
    found = {}
    for level in range(len(subject.options.features)):
        options = budget.resized(subject.options, partial(_scaled, 0.5, [level]))
        if options != subject.options and budget.is_allowed(subject.config, options):
            found[level] = replace(subject, options=options, steps=STEPS_FOR_PEAK)
    return found


def _scaled(scale: float, levels: Sequence[int], level: int, width: int) -> int:
    return max(1, round(width * scale)) if level in levels else width


def family(subject: MemoryEstimate, overrides: Sequence[str]) -> list[MemoryEstimate]:
    """The named networks whose names begin alike, under the same overrides; alone if these set widths or a network."""
    own, stem, named = subject.config.model, subject.name.partition("_")[0], None
    with suppress(UserError):  # the named network is too deep for this patch
        named = compose.compose([f"model={subject.name}", f"data.patch={subject.config.data.patch}"]).model
    if named is None or not subject.options.features or (named.features, named.decoder) != (own.features, own.decoder):
        return [subject]
    rest, found = [override for override in overrides if not override.startswith("model=")], [subject]
    for name in compose.choices("model"):
        if name.partition("_")[0] == stem and name != subject.name:
            with suppress(UserError):  # a relative that this patch or option does not suit
                other = estimate([f"model={name}", *rest], half=subject.dtype is torch.float16)
                found.append(replace(other, steps=STEPS_FOR_PEAK))
    return found


def _parts(
    subject: MemoryEstimate,
    narrower: Mapping[int, MemoryEstimate],
    relatives: Sequence[MemoryEstimate],
    without: Mapping[str, int],
    sentence: str,
) -> Iterator[str | tuple[str, Table]]:
    entry, peak = subject.entry, subject.peak
    yield _summary(subject)
    yield f"predicted peak of a step: {mib(peak)} MiB ({entry['kind']}), {tables.moment(entry)}"
    yield sentence
    yield "Layers of the number", _layers(subject)
    yield from filter(None, [tables.guessed(entry), tables.cuda_sizes(entry)])
    made = [storage for storage in subject.ledger.storages if storage.operation == "aten.convolution.default"]
    for first in made[:1]:
        shape = " x ".join(map(str, first.shape))
        yield f"the first convolution's output: {shape} {_dtype(first.dtype)} = {first.bytes:,} bytes"
    yield "Each phase", tables.phases(entry)
    yield "At the peak, by what it is for", tables.categories(entry)
    yield "At the peak, by level of the U", tables.levels(entry)
    yield "At the peak, by layer", tables.layers(entry)
    groups = analysis.held(subject.ledger, subject.ledger.peak_moment())[:LARGEST]
    rows = [
        [f"{g.number} x {g.shape} {g.dtype}", tables.NAMES[g.category], mib(g.bytes), percent(g.bytes, peak)]
        for g in groups
    ]
    yield "At the peak, the largest groups of tensors", Table(["tensors", "for", "MiB", "share"], rows)
    if without:
        yield "What each way to save memory takes away (predicted)", tables.single_techniques(without, peak)
    if subject.dtype is torch.float32:
        yield "Each further way to save memory, by itself (predicted)", _further(subject)
    yield "What parameters cost", tables.state(entry, subject.parameters)
    weights = sum(p.nbytes for p in subject.meter.model.parameters())
    found = analysis.usual_estimates(subject.counts(), subject.parameters, weights, subject.saved)
    yield "Usual estimates and their error", tables.estimates(found, peak)
    if narrower:
        yield "Half the width at one level (predicted)", _widths(subject, narrower)
    if len(relatives) > 1:
        yield "Networks of this family, same patch, batch and policy (predicted)", _family(relatives)
        yield from _paradoxes(subject, relatives)


def _further(subject: MemoryEstimate) -> Table:
    """What each way to save memory that the step does not use would take away."""
    rows = []
    for o in budget.single_techniques(budget.Option((), "nothing", subject.config, subject.options)):
        less, again = subject.peak - o.peak_bytes, f"{o.recompute_fraction:+.0%}"
        rows.append([*o.overrides, mib(o.peak_bytes), mib(less), percent(less, subject.peak), again, o.changes])
    return Table(["way", "peak with it (MiB)", "takes away (MiB)", "share", "FLOPs", "changes"], rows)


def _summary(subject: MemoryEstimate) -> str:
    config, dtype = subject.config, build.policy(subject.config, "cpu", ()).dtype
    many = "any number of" if config.ckpt == "auto" else f"at most {config.ckpt}"
    work = f"{many} checkpointed segments" if config.ckpt else ", ".join(slab_words(config)) or "no checkpointing"
    return (
        f"{subject.name}: {subject.parameters:,} parameters; patch {'x'.join(map(str, config.data.patch))}, "
        f"batch {config.batch}, {f'amp {_dtype(dtype)}' if dtype else _dtype(subject.dtype)}, "
        f"{work}, on {build.device_type(config)}"
    )


def _dtype(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def _layers(subject: MemoryEstimate) -> Table:
    """A row for each layer of the prediction, with its kind: exact, replay, or not known here."""
    tensors, columns = mib(subject.peak), ["predicted peak of a step", "MiB", "kind"]
    if build.device_type(subject.config) != "cuda":
        return Table(columns, [["tensors", tensors, "exact (ledger)"]])
    native, expandable = (replay(subject.ledger.events, Settings(is_expandable)) for is_expandable in (False, True))
    workspaces = mib(subject.entry["workspace_bound_bytes"])
    rows = [
        ["tensors", tensors, "ledger, as the allocator is asked for"],
        ["allocated: blocks given out", mib(native.allocated_bytes), "replay"],
        ["reserved by the allocator", mib(native.reserved_bytes), "replay"],
        ["reserved, PYTORCH_ALLOC_CONF=expandable_segments:True", mib(expandable.reserved_bytes), "replay"],
        ["convolutions' workspaces, not included", f"at most {workspaces} more", "bound, input + output of a layer"],
        ["CUDA context", "", "constant of the GPU, outside of the allocator; not predicted"],
    ]
    return Table(columns, rows)


def _widths(subject: MemoryEstimate, narrower: Mapping[int, MemoryEstimate]) -> Table:
    """What half the width at each level saves, in bytes and in parameters."""
    rows = []
    for level, other in narrower.items():
        widths = f"{subject.options.features[level]} -> {other.options.features[level]}"
        fewer, change = other.parameters / subject.parameters - 1, other.peak / subject.peak - 1
        rows.append([str(level), widths, mib(other.peak), f"{change:+.0%}", f"{other.parameters:,}", f"{fewer:+.0%}"])
    return Table(["level", "width", "peak (MiB)", "change", "parameters", "change"], rows)


def _family(relatives: Sequence[MemoryEstimate]) -> Table:
    columns = ["network", "widths", "parameters", "peak (MiB)", "of it at full resolution", "channels joined there"]
    rows = []
    for one in relatives:
        widths, full = "-".join(map(str, one.options.features)), one.entry["levels"][0]["bytes"]
        rows.append([one.name, widths, f"{one.parameters:,}", mib(one.peak), f"{full / one.peak:.0%}", _joined(one)])
    return Table(columns, rows)


def _joined(subject: MemoryEstimate) -> str:
    """Channels of the skip and of what comes from below where a U-Net joins them at full resolution."""
    stage, skip = f"up{len(subject.options.features) - 1}", subject.options.features[0]
    made = (s for s in subject.ledger.storages if (s.operation, s.scope.module) == ("aten.cat.default", stage))
    return next((f"{skip} + {s.shape[1] - skip} = {s.shape[1]}" for s in made), "")


def _paradoxes(subject: MemoryEstimate, relatives: Sequence[MemoryEstimate]) -> Iterator[str]:
    """For relatives with more parameters and a lower peak: how that can be."""
    for other in relatives:
        if other.parameters > subject.parameters and other.peak < subject.peak:
            more = f"{other.parameters / subject.parameters:.1f} times the parameters of {subject.name}"
            joins = f"at full resolution it joins {_joined(other)} channels, {subject.name} {_joined(subject)}"
            yield f"{other.name} has {more} and needs {mib(subject.peak - other.peak)} MiB less: {joins}. {WHERE}"


def print_peaks(jobs: Sequence[Sequence[str]], half: bool, out: Path | None) -> None:
    """Print a row a job; with `out`, write peaks.csv, the layer traces of all in trace.csv, and their picture.

    A job that makes no sense is a row without numbers, and a line that says why. Raises UserError where none does.
    """
    found = _estimates(jobs, half, STEPS_FOR_PEAK if out is None else MEASURED_STEPS)
    for name, one in track(list(found.items()), "networks", len(found)):
        try:
            if isinstance(one, MemoryEstimate):
                _ = one.meter
        except UserError as error:  # some only a simulation finds
            found[name] = error
    subjects = _sound(found)
    first = next(iter(subjects.values())).peak
    rows = []
    for name, one in found.items():
        if isinstance(one, MemoryEstimate):
            change = f"{one.peak / first - 1:+.1%}"
            rows.append([name, f"{one.parameters:,}", mib(one.peak), change, tables.moment(one.entry)])
        else:
            rows.append([name, "", "", "", "skipped"])
    table = Table(["config", "parameters", "peak (MiB, ledger)", "change", "at its highest"], rows)
    paper(WIDE).print(terminal_table("Predicted peak of a step", table))
    _print_skipped(found)
    if out is None:
        return
    (out / "figures").mkdir(parents=True, exist_ok=True)
    numbers = {name: (one.parameters, one.peak) for name, one in subjects.items()}
    peaks = [[name, *numbers.get(name, (None, None))] for name in found]
    write_csv(out / "peaks.csv", ["config", "parameters", "peak_bytes"], peaks)
    calls = [row for name, one in subjects.items() for row in export.trace(one.ledger, name, MEASURED_STEPS - 1)]
    export.write_trace(calls, out / "trace.csv")
    memory_curves.trace_plot(calls, out / "figures" / "trace.png")
    print(escaped(out))


def _estimates(jobs: Sequence[Sequence[str]], half: bool, steps: int) -> dict[str, MemoryEstimate | UserError]:
    """Each job, or why it makes no sense, by the overrides that are not common to all. UserError if two have the same.

    Raises UserError where none makes sense.
    """
    common = set(jobs[0]).intersection(*jobs)
    names = [" ".join(word for word in job if word not in common) or "config" for job in jobs]
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise UserError(f"{twice[0]} is asked for more than once; name each value once")
    found: dict[str, MemoryEstimate | UserError] = {}
    for name, job in zip(names, jobs, strict=True):
        try:
            found[name] = replace(estimate(with_names(job), half), steps=steps)
        except UserError as error:
            found[name] = error
    return found


def _sound(found: Mapping[str, MemoryEstimate | UserError]) -> dict[str, MemoryEstimate]:
    """The jobs that make sense. Raises UserError, with all reasons, where none does."""
    sound = {name: one for name, one in found.items() if isinstance(one, MemoryEstimate)}
    if not sound:
        raise UserError("; ".join(dict.fromkeys(map(str, found.values()))))
    return sound


def _print_skipped(found: Mapping[str, MemoryEstimate | UserError]) -> None:
    for name, one in found.items():
        if isinstance(one, UserError):
            print(escaped(f"skipped: {name}: {one}"))


def print_curves(jobs: Sequence[Sequence[str]], half: bool, out: Path) -> None:
    """Write curves.csv and figures/curves.png: peak against batch size, first width and patch, a line a job."""
    found = _estimates(jobs, half, STEPS_FOR_PEAK)
    varied = ((name, *vary) for name, subject in _sound(found).items() for vary in _varied(subject))
    points = [
        (axis, x, series, words, one.parameters, one.peak)
        for series, axis, x, words, one in track(varied, "points, at most", len(jobs) * len(BATCHES + SCALES + SIZES))
        if budget.is_allowed(one.config, one.options)
    ]
    panels: dict[str, dict[str, list[tuple[float, int]]]] = defaultdict(lambda: defaultdict(list))
    for axis, x, series, _, _, peak in points:
        panels[axis][series].append((x, peak))
    (out / "figures").mkdir(parents=True, exist_ok=True)
    write_csv(out / "curves.csv", ["varied", "x", "series", "config", "parameters", "peak_bytes"], points)
    memory_curves.peak_curves(list(panels.items()), out / "figures" / "curves.png")
    _print_skipped(found)
    print(escaped(out / "curves.csv"), escaped(out / "figures" / "curves.png"), sep="\n")


def _varied(subject: MemoryEstimate) -> Iterator[tuple[str, int, str, MemoryEstimate]]:
    """What varies with its unit, its value, the overrides, and their estimate; one patch where `auto` depends on it."""
    config, options, data = subject.config, subject.options, subject.config.data
    for batch in BATCHES:
        yield "batch size", batch, f"batch={batch}", replace(subject, config=replace(config, batch=batch))
    for scale in SCALES if options.features else ():
        scaled = budget.resized(options, partial(_scaled, scale, range(len(options.features))))
        words = " ".join(budget.width_overrides(scaled))
        yield "first width (channels)", scaled.features[0], words, replace(subject, options=scaled)
    for scale in (1,) if "auto" in (config.model.kernels, config.model.strides) else SIZES:
        patch = [max(1, round(length * scale)) for length in data.patch]
        other = replace(subject, config=replace(config, data=replace(data, patch=patch)))
        yield "patch (voxels)", math.prod(patch), f"data.patch={patch}".replace(" ", ""), other


def print_fit(overrides: Sequence[str]) -> None:
    """Print the options that no other beats, and the command line that fits `budget`. UserError if none does."""
    subject = estimate(with_names(overrides), half=False)
    if (given := subject.config.budget) is None:
        raise UserError("memory fit needs a budget, e.g. budget=8GiB")
    limit = budget_bytes(given)
    asked = budget.Option((), "nothing", subject.config, subject.options)
    found, best = budget.find_fit(asked, limit)
    rows = []
    for o in found[:: -(-len(found) // FRONT)]:
        needs = [mib(o.peak_bytes), "yes" if o.occupied_bytes <= limit else "", f"{o.recompute_fraction:+.0%}"]
        changes = "" if o.changes == "nothing" else o.changes
        rows.append([*needs, str(o.segments) if o.segments > 1 else "", changes, " ".join(o.overrides)])
    table = Table(["peak (MiB, estimated)", "fits", "FLOPs", "segments", "changes", "overrides"], rows)
    paper(WIDE).print(terminal_table("Least memory by cost", table))
    for why in budget.untried(asked):
        print(escaped(f"not tried: {why}"))
    if best.occupied_bytes > limit:
        raise UserError(
            f"budget={given}: nothing tried fits; the smallest peak is {mib(best.peak_bytes)} MiB{best.reserves}"
        )
    print(f"fits: {escaped(shlex.join(['python', 'train.py', *budget.replaced(overrides, best.overrides)]))}")

"""`unet3d memory`: one config explained, several side by side, curves, or what fits a budget; from simulated steps."""

import math
import shlex
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from unet3d import build, compose
from unet3d.config import Config, Model
from unet3d.errors import UserError
from unet3d.files import write_csv, write_json, write_text
from unet3d.memory import analysis, budget, export, tables
from unet3d.memory.allocator import replay
from unet3d.memory.meter import ENOUGH, STEADY
from unet3d.memory.preflight import MemoryEstimate, estimate, peak_location, simulate_all
from unet3d.progress import track
from unet3d.report import memory_plots, report
from unet3d.report.loggers import WIDE, paper, plain_text, terminal_table
from unet3d.types import Table, budget_bytes, mib, percent

LARGEST = 10  # groups of tensors shown
FRONT = 24  # rows of the table of options
BATCHES = (1, 2, 4, 8)
SCALES = (0.25, 0.5, 1, 1.5, 2)  # of widths
SIZES = (0.5, 0.75, 1, 1.25, 1.5)  # of the patch's sides


def explain(overrides: Sequence[str], half: bool, out: Path | None) -> None:
    """Print where the memory of a step goes; with `out`, also write it there, with report, figures and tables."""
    subject = estimate(overrides, half)
    narrower, relatives = narrowed(subject), family(subject, overrides)
    simulate_all([subject, *narrower.values(), *relatives])
    location = peak_location(subject.entry)
    if (other := narrower.get(location["level"])) is not None:
        words = " ".join(budget.width_overrides(other.options))
        location |= {"override": words, "halved_peak_bytes": other.peak}
    relatives.sort(key=lambda relative: -relative.parameters)
    text = plain_text(_parts(subject, narrower, relatives, tables.sentence(location, subject.peak)), WIDE)
    print(text, end="")
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        write_text(out / "explained.txt", text)
        write_text(out / "config.yaml", compose.to_yaml(subject.config))
        simulated = {"rehearsed": _summary(subject), "parameters": subject.parameters, "predicted": subject.entry}
        write_json(out / "memory.json", simulated | {"advice": location})
        memory_plots.write_ledger_files(subject.ledger, subject.name, out)
        print(report.write_report(out))


def halved(config: Config, options: Model, level: int) -> Model | None:
    """The network with half the channels at one level; None if that is no network, as with 8 groups of 4 channels."""
    narrower = budget.resized(options, lambda at, width: width // 2 if at == level else width)
    return narrower if budget.is_allowed(config, narrower) else None


def narrowed(subject: MemoryEstimate) -> dict[int, MemoryEstimate]:
    """By level, the network with half the width there, where there is such a network."""
    found = {level: halved(subject.config, subject.options, level) for level in range(len(subject.options.features))}
    return {level: replace(subject, options=one, steps=ENOUGH) for level, one in found.items() if one is not None}


def family(subject: MemoryEstimate, overrides: Sequence[str]) -> list[MemoryEstimate]:
    """The named networks whose names begin alike, under the same overrides; alone if these set widths.

    Only itself, too, for a network of the user's own.
    """
    if not subject.options.features or _has_other_widths(subject):
        return [subject]
    stem, is_half = subject.name.partition("_")[0], subject.dtype is torch.float16
    rest, found = [override for override in overrides if not override.startswith("model=")], [subject]
    for name in compose.choices("model"):
        if name.partition("_")[0] == stem and name != subject.name:
            with suppress(UserError):  # a relative that this patch or option does not suit
                found.append(replace(estimate([f"model={name}", *rest], is_half), steps=ENOUGH))
    return found


def _has_other_widths(subject: MemoryEstimate) -> bool:
    """Whether an override or an experiment changes the widths of the named network."""
    own = subject.config.model
    try:
        named = compose.compose([f"model={subject.name}", f"data.patch={subject.config.data.patch}"]).model
    except UserError:  # the named network is too deep for this patch
        return True
    return (named.features, named.decoder) != (own.features, own.decoder)


def _parts(
    subject: MemoryEstimate, narrower: Mapping[int, MemoryEstimate], relatives: Sequence[MemoryEstimate], sentence: str
) -> Iterator[str | tuple[str, Table]]:
    entry, peak, made = subject.entry, subject.peak, subject.first_convolution
    yield _summary(subject)
    yield f"predicted peak of a step: {mib(peak)} MiB ({entry['kind']}), {tables.moment(entry)}"
    yield sentence
    yield "Layers of the number", _layers(subject)
    if made is not None:
        shape = " x ".join(map(str, made.shape))
        yield f"the first convolution's output: {shape} {_dtype(made.dtype)} = {made.bytes:,} bytes"
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
    yield "What parameters cost", tables.state(entry, subject.parameters)
    weights = sum(p.nbytes for p in subject.meter.model.parameters())
    found = analysis.usual_estimates(subject.counts(), subject.parameters, weights, subject.saved)
    yield "Usual estimates and their error", tables.estimates(found, peak)
    if narrower:
        yield "Half the width at one level (predicted)", _widths(subject, narrower)
    if len(relatives) > 1:
        yield "Networks of this family, same patch, batch and policy (predicted)", _family(relatives)
        yield from _paradoxes(subject, relatives)


def _summary(subject: MemoryEstimate) -> str:
    config, dtype = subject.config, build.policy(subject.config, "cpu", ()).dtype
    many = "any number of" if config.ckpt == "auto" else f"at most {config.ckpt}"
    return (
        f"{subject.name}: {subject.parameters:,} parameters; patch {'x'.join(map(str, config.data.patch))}, "
        f"batch {config.batch}, {f'amp {_dtype(dtype)}' if dtype else _dtype(subject.dtype)}, "
        f"{f'{many} checkpointed segments' if config.ckpt else 'no checkpointing'}, on {build.target(config)}"
    )


def _dtype(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def _layers(subject: MemoryEstimate) -> Table:
    """A row for each layer of the prediction, with its kind: exact, replay, or not known here."""
    tensors, columns = mib(subject.peak), ["predicted peak of a step", "MiB", "kind"]
    if build.target(subject.config) != "cuda":
        return Table(columns, [["tensors", tensors, "exact (ledger)"]])
    native, expandable = (replay(subject.ledger.events, expandable=is_expandable) for is_expandable in (False, True))
    rows = [
        ["tensors", tensors, "ledger, not yet verified on CUDA"],
        ["allocated: blocks given out", mib(native.allocated_bytes), "replay"],
        ["reserved by the allocator", mib(native.reserved_bytes), "replay"],
        ["reserved, PYTORCH_ALLOC_CONF=expandable_segments:True", mib(expandable.reserved_bytes), "replay"],
        ["convolution workspaces", "", "not known here: they are the GPU's"],
        ["CUDA context", "", "constant of the GPU, outside of the allocator; not measured here"],
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
        widths = "-".join(map(str, one.options.features))
        rows.append([one.name, widths, f"{one.parameters:,}", mib(one.peak), f"{one.share:.0%}", _joined(one)])
    return Table(columns, rows)


def _joined(subject: MemoryEstimate) -> str:
    return "" if subject.joined is None else f"{subject.joined[0]} + {subject.joined[1]} = {sum(subject.joined)}"


def _paradoxes(subject: MemoryEstimate, relatives: Sequence[MemoryEstimate]) -> Iterator[str]:
    """For relatives with more parameters and a lower peak: how that can be."""
    for other in relatives:
        if other.parameters > subject.parameters and other.peak < subject.peak:
            yield (
                f"{other.name} has {other.parameters / subject.parameters:.1f} times the parameters of {subject.name} "
                f"and needs {mib(subject.peak - other.peak)} MiB less: at full resolution it joins {_joined(other)} "
                f"channels, {subject.name} {_joined(subject)}. Parameters live at the bottom of the U, activations at the top."
            )


def print_peaks(jobs: Sequence[Sequence[str]], half: bool, out: Path | None) -> None:
    """Print a row a job; with `out`, write peaks.csv, the layer traces of all in trace.csv, and their picture."""
    subjects = _subjects(jobs, half, ENOUGH if out is None else STEADY)
    simulate_all(list(subjects.values()))
    first = next(iter(subjects.values())).peak
    rows = [
        [name, f"{one.parameters:,}", mib(one.peak), f"{one.peak / first - 1:+.1%}", tables.moment(one.entry)]
        for name, one in subjects.items()
    ]
    table = Table(["config", "parameters", "peak (MiB, ledger)", "change", "at its highest"], rows)
    paper(WIDE).print(terminal_table("Predicted peak of a step", table))
    if out is None:
        return
    (out / "figures").mkdir(parents=True, exist_ok=True)
    peaks = [[name, one.parameters, one.peak] for name, one in subjects.items()]
    write_csv(out / "peaks.csv", ["config", "parameters", "peak_bytes"], peaks)
    calls = [row for name, one in subjects.items() for row in export.trace(one.ledger, name, STEADY - 1)]
    export.write_trace(calls, out / "trace.csv")
    memory_plots.trace_plot(calls, out / "figures" / "trace.png")
    print(out)


def _subjects(jobs: Sequence[Sequence[str]], half: bool, steps: int) -> dict[str, MemoryEstimate]:
    """Each job by the overrides that are not common to all. UserError if two have the same."""
    common = set(jobs[0]).intersection(*jobs)
    names = [" ".join(word for word in job if word not in common) or "config" for job in jobs]
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise UserError(f"{twice[0]} is asked for more than once; name each value once")
    return {name: replace(estimate(job, half), steps=steps) for name, job in zip(names, jobs, strict=True)}


class CurvePoint(NamedTuple):
    """One predicted peak."""

    varied: str  # what runs along the axis, with its unit
    x: float
    series: str
    config: str  # overrides on top of the series' own config
    parameters: int
    peak_bytes: int


def print_curves(jobs: Sequence[Sequence[str]], half: bool, out: Path) -> None:
    """Write curves.csv and figures/curves.png: peak against batch size, first width and patch, a line a job."""
    varied = (point for name, one in _subjects(jobs, half, ENOUGH).items() for point in _points(one, name))
    points = sorted(track(varied, "points, at most", len(jobs) * len(BATCHES + SCALES + SIZES)))
    panels: dict[str, dict[str, list[tuple[float, int]]]] = defaultdict(lambda: defaultdict(list))
    for point in points:
        panels[point.varied][point.series].append((point.x, point.peak_bytes))
    (out / "figures").mkdir(parents=True, exist_ok=True)
    write_csv(out / "curves.csv", list(CurvePoint._fields), points)
    memory_plots.peak_curves(list(panels.items()), out / "figures" / "curves.png")
    print(out / "curves.csv", out / "figures" / "curves.png", sep="\n")


def _points(subject: MemoryEstimate, series: str) -> Iterator[CurvePoint]:
    """Peaks against batch, widths and patch, where these give a network: one patch if `auto` would give another."""
    config, patch = subject.config, subject.config.data.patch
    varied: list[tuple[str, float, list[str], MemoryEstimate]] = []
    for batch in BATCHES:
        other = replace(subject, config=replace(config, batch=batch))
        varied.append(("batch size", batch, [f"batch={batch}"], other))
    for scale in SCALES if subject.options.features else ():
        options = budget.resized(subject.options, lambda level, width, by=scale: max(1, round(width * by)))
        words = budget.width_overrides(options)
        varied.append(("first width (channels)", options.features[0], words, replace(subject, options=options)))
    for scale in (1,) if "auto" in (config.model.kernels, config.model.strides) else SIZES:
        sides = [max(1, round(length * scale)) for length in patch]
        other = replace(subject, config=replace(config, data=replace(config.data, patch=sides)))
        varied.append(("patch (voxels)", math.prod(sides), [f"data.patch={sides}".replace(" ", "")], other))
    for name, x, words, other in varied:
        if budget.is_allowed(other.config, other.options):
            yield CurvePoint(name, x, series, " ".join(words), other.parameters, other.peak)


def print_fit(overrides: Sequence[str]) -> None:
    """Print the options that no other beats, and the command line that fits `budget`. UserError if none does."""
    subject = estimate(overrides, half=False)
    if (given := subject.config.budget) is None:
        raise UserError("memory fit needs a budget, e.g. budget=8GiB")
    limit = budget_bytes(given)
    found, best = budget.find_fit(budget.Option((), "nothing", subject.config, subject.options), limit)
    rows = [
        [
            mib(option.peak_bytes),
            "yes" if option.peak_bytes <= limit else "",
            f"{option.recompute_fraction:+.0%}",
            str(option.segments) if option.segments > 1 else "",
            option.changes if option.changes != "nothing" else "",
            " ".join(option.overrides),
        ]
        for option in found[:: -(-len(found) // FRONT)]
    ]
    table = Table(["peak (MiB, estimated)", "fits", "FLOPs", "segments", "changes", "overrides"], rows)
    paper(WIDE).print(terminal_table("Least memory by cost", table))
    if best.peak_bytes > limit:
        raise UserError(f"budget={given}: nothing tried fits; the smallest peak is {mib(best.peak_bytes)} MiB")
    print(f"fits: {shlex.join(['python', 'train.py', *budget.replaced(overrides, best.overrides)])}")

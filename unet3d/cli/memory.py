"""`unet3d memory`: one config explained, or several side by side, from simulated steps."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from unet3d import build, compose
from unet3d.checks import check
from unet3d.config import Model
from unet3d.errors import UserError
from unet3d.files import write_csv, write_json, write_text
from unet3d.memory import analysis, export, tables
from unet3d.memory.allocator import replay
from unet3d.memory.analysis import usual_estimates
from unet3d.memory.budget import halved, overrides, peak_location, resized
from unet3d.memory.ledger import levels
from unet3d.memory.meter import ENOUGH, STEADY
from unet3d.memory.preflight import MemoryEstimate, estimate, simulate_all
from unet3d.progress import track
from unet3d.report import memory_plots, report
from unet3d.report.loggers import WIDE, paper, plain_text, terminal_table
from unet3d.types import Table, mib, percent

LARGEST = 10  # groups of tensors shown


def explain(overrides: Sequence[str], half: bool, out: Path | None) -> None:
    """Print where the memory of a step goes; with `out`, also write it there, with report, figures and tables."""
    subject = estimate(overrides, half)
    narrower, relatives = narrowed(subject), family(subject, overrides)
    simulate_all([subject, *narrower.values(), *relatives])
    relatives.sort(key=lambda relative: -relative.parameters)
    peaks = partial(_peak_of, narrower.values())
    advice = peak_location(subject.config, subject.options, subject.entry, peaks)
    said = plain_text(_parts(subject, narrower, relatives, advice), WIDE)
    print(said, end="")
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        write_text(out / "explained.txt", said)
        print(write_explanation(subject, advice, out))


def narrowed(subject: MemoryEstimate) -> dict[int, MemoryEstimate]:
    """By level, the network with half the width there, where there is such a network."""
    levels = range(len(subject.options.features))
    found = {level: halved(subject.config, subject.options, level) for level in levels}
    return {level: replace(subject, options=one, steps=ENOUGH) for level, one in found.items() if one is not None}


def _peak_of(looks: Iterable[MemoryEstimate], options: Model) -> int:
    return next(one.peak for one in looks if one.options == options)


def write_explanation(subject: MemoryEstimate, advice: Mapping[str, Any], out: Path) -> Path:
    """memory.json, figures, tables and report.html in a folder; returns the report's path."""
    write_text(out / "config.yaml", compose.to_yaml(subject.config))
    told = {"rehearsed": _what(subject), "parameters": subject.parameters}
    write_json(out / "memory.json", {**told, "predicted": subject.entry, "advice": advice})
    memory_plots.write_ledger_files(subject.ledger, subject.name, out)
    return report.write_report(out)


def _parts(
    subject: MemoryEstimate,
    narrower: Mapping[int, MemoryEstimate],
    relatives: Sequence[MemoryEstimate],
    advice: Mapping[str, Any],
) -> Iterator[str | tuple[str, Table]]:
    entry, peak = subject.entry, subject.peak
    yield _what(subject)
    yield f"predicted peak of a step: {mib(peak)} MiB ({entry['kind']}), {tables.moment(entry)}"
    yield tables.sentence(advice, peak)
    yield "Layers of the number", _layers(subject)
    made = subject.first_convolution
    shape = " x ".join(map(str, made.shape))
    yield f"the first convolution's output: {shape} {_dtype(made.dtype)} = {made.bytes:,} bytes"
    yield "Each phase", tables.phases(entry)
    yield "At the peak, by what it is for", tables.categories(entry)
    yield "At the peak, by level of the U", tables.levels(entry)
    yield "At the peak, by layer", tables.layers(entry)
    yield "At the peak, the largest groups of tensors", _groups(subject)
    yield "What parameters cost", tables.state(entry, subject.parameters)
    weights = sum(p.nbytes for p in subject.meter.model.parameters())
    found = usual_estimates(subject.counts(), subject.parameters, weights, subject.saved)
    yield "Usual estimates and their error", tables.estimates(found, peak)
    if narrower:
        yield "Half the width at one level (predicted)", _widths(subject, narrower)
    if len(relatives) > 1:
        yield "Networks of this family, same patch, batch and policy (predicted)", _family(relatives)
        yield from _why(subject, relatives)


def _layers(subject: MemoryEstimate) -> Table:
    """A row for each layer of the prediction, with its kind: exact, replay, or not known here."""
    tensors, columns = mib(max(levels(subject.ledger))), ["predicted peak of a step", "MiB", "kind"]
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


def _what(subject: MemoryEstimate) -> str:
    config = subject.config
    patch = "x".join(map(str, config.data.patch))
    dtype = build.policy(config, "cpu", ()).dtype
    precision = f"amp {_dtype(dtype)}" if dtype else _dtype(subject.dtype)
    many = "any number of" if config.ckpt == "auto" else f"at most {config.ckpt}"
    checkpoints = f"{many} checkpointed segments" if config.ckpt else "no checkpointing"
    return (
        f"{subject.name}: {subject.parameters:,} parameters; patch {patch}, batch {config.batch}, {precision}, "
        f"{checkpoints}, on {build.target(config)}"
    )


def _dtype(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def _groups(subject: MemoryEstimate) -> Table:
    groups = analysis.held(subject.ledger, analysis.peak_moment(subject.ledger))
    rows = [
        [f"{g.number} x {g.shape} {g.dtype}", tables.NAMES[g.category], mib(g.bytes), percent(g.bytes, subject.peak)]
        for g in groups[:LARGEST]
    ]
    return Table(["tensors", "for", "MiB", "share"], rows)


def _widths(subject: MemoryEstimate, narrower: Mapping[int, MemoryEstimate]) -> Table:
    """What each level's width is worth, in bytes and in parameters."""
    rows = []
    for level, other in narrower.items():
        fewer = f"{other.parameters / subject.parameters - 1:+.0%}"
        widths = f"{subject.options.features[level]} -> {other.options.features[level]}"
        change = f"{other.peak / subject.peak - 1:+.0%}"
        rows.append([str(level), widths, mib(other.peak), change, f"{other.parameters:,}", fewer])
    return Table(["level", "width", "peak (MiB)", "change", "parameters", "change"], rows)


def family(subject: MemoryEstimate, overrides: Sequence[str]) -> list[MemoryEstimate]:
    """The named networks whose names begin alike, under the same overrides; alone if these set widths."""
    stem = subject.name.partition("_")[0]
    names = [name for name in compose.choices("model") if name.partition("_")[0] == stem]
    if _sets_widths(subject):
        return [subject]
    rest = [override for override in overrides if not override.startswith("model=")]
    found = []
    for name in names:
        try:
            is_half = subject.dtype is torch.float16
            other = subject if name == subject.name else estimate([f"model={name}", *rest], is_half)
            found.append(other if other is subject else replace(other, steps=ENOUGH))
        except UserError:  # a relative that this patch or option does not suit
            continue
    return found


def _sets_widths(subject: MemoryEstimate) -> bool:
    """Whether something on top of the named network, an override or an experiment, sets its widths."""
    own, patch = subject.config.model, f"data.patch={subject.config.data.patch}"
    try:
        named = compose.compose([f"model={subject.name}", patch]).model
    except UserError:  # the named network is too deep for this patch
        return True
    return (named.features, named.decoder) != (own.features, own.decoder)


def _family(relatives: Sequence[MemoryEstimate]) -> Table:
    rows = [
        [
            relative.name,
            "-".join(map(str, relative.options.features)),
            f"{relative.parameters:,}",
            mib(relative.peak),
            f"{relative.share:.0%}",
            _joined(relative),
        ]
        for relative in relatives
    ]
    columns = ["network", "widths", "parameters", "peak (MiB)", "of it at full resolution", "channels joined there"]
    return Table(columns, rows)


def _joined(subject: MemoryEstimate) -> str:
    return "" if subject.joined is None else f"{subject.joined[0]} + {subject.joined[1]} = {sum(subject.joined)}"


def _why(subject: MemoryEstimate, relatives: Sequence[MemoryEstimate]) -> Iterator[str]:
    """For relatives with more parameters and a lower peak: how that can be."""
    for other in relatives:
        if other.parameters > subject.parameters and other.peak < subject.peak:
            times = other.parameters / subject.parameters
            yield (
                f"{other.name} has {times:.1f} times the parameters of {subject.name} and needs "
                f"{mib(subject.peak - other.peak)} MiB less: at full resolution it joins {_joined(other)} channels, "
                f"{subject.name} {_joined(subject)}. Parameters live at the bottom of the U, activations at the top."
            )


BATCHES = (1, 2, 4, 8)


SCALES = (0.25, 0.5, 1, 1.5, 2)  # of widths


SIZES = (0.5, 0.75, 1, 1.25, 1.5)  # of the patch's sides


class CurvePoint(NamedTuple):
    """One predicted peak."""

    varied: str  # what runs along the axis, with its unit
    x: float
    series: str
    config: str  # what differs from the series' own config
    parameters: int
    peak_bytes: int


def print_peaks(jobs: Sequence[Sequence[str]], half: bool, out: Path | None) -> None:
    """Print a row a job; with `out`, write peaks.csv, the layer traces of all in trace.csv, and their picture."""
    steps = ENOUGH if out is None else STEADY
    looks = {name: replace(estimate(job, half), steps=steps) for name, job in zip(names(jobs), jobs, strict=True)}
    simulate_all(list(looks.values()))
    first = next(iter(looks.values())).peak
    rows = [
        [name, f"{one.parameters:,}", mib(one.peak), f"{one.peak / first - 1:+.1%}", tables.moment(one.entry)]
        for name, one in looks.items()
    ]
    table = Table(["config", "parameters", "peak (MiB, ledger)", "change", "at its highest"], rows)
    paper(WIDE).print(terminal_table("Predicted peak of a step", table))
    if out is None:
        return
    (out / "figures").mkdir(parents=True, exist_ok=True)
    write_csv(
        out / "peaks.csv",
        ["config", "parameters", "peak_bytes"],
        [[name, one.parameters, one.peak] for name, one in looks.items()],
    )
    calls = [row for name, one in looks.items() for row in export.trace(one.ledger, name, STEADY - 1)]
    export.write_trace(calls, out / "trace.csv")
    memory_plots.trace_plot(calls, out / "figures" / "trace.png")
    print(out)


def print_curves(jobs: Sequence[Sequence[str]], half: bool, out: Path) -> None:
    """Write curves.csv and figures/curves.png: peak against batch size, first width and patch, a line a job."""
    looks = {name: replace(estimate(job, half), steps=ENOUGH) for name, job in zip(names(jobs), jobs, strict=True)}
    varied = (point for vary in (batches, widths, patches) for name, one in looks.items() for point in vary(one, name))
    points = list(track(varied, "points, at most", len(jobs) * len(BATCHES + SCALES + SIZES)))
    (out / "figures").mkdir(parents=True, exist_ok=True)
    write_csv(out / "curves.csv", list(CurvePoint._fields), points)
    panels = [(varied, _lines(points, varied)) for varied in dict.fromkeys(point.varied for point in points)]
    memory_plots.peak_curves(panels, out / "figures" / "curves.png")
    print(out / "curves.csv", out / "figures" / "curves.png", sep="\n")


def _lines(points: Sequence[CurvePoint], varied: str) -> dict[str, list[tuple[float, int]]]:
    lines: dict[str, list[tuple[float, int]]] = {}
    for point in points:
        if point.varied == varied:
            lines.setdefault(point.series, []).append((point.x, point.peak_bytes))
    return lines


def names(jobs: Sequence[Sequence[str]]) -> list[str]:
    """What tells each job from the others: its overrides that are not common to all. UserError if nothing does."""
    common = set(jobs[0]).intersection(*jobs)
    found = [" ".join(word for word in job if word not in common) or "config" for job in jobs]
    if twice := [name for name, count in Counter(found).items() if count > 1]:
        raise UserError(f"{twice[0]} is asked for more than once; name each value once")
    return found


def batches(subject: MemoryEstimate, series: str) -> Iterator[CurvePoint]:
    """Peak against patches a step."""
    for batch in BATCHES:
        other = replace(subject, config=replace(subject.config, batch=batch))
        yield from _point("batch size", batch, series, f"batch={batch}", other)


def widths(subject: MemoryEstimate, series: str) -> Iterator[CurvePoint]:
    """Peak against the first level's channels, all levels scaled alike."""
    for scale in SCALES if subject.options.path is None else ():  # a user's own network has no widths to scale
        options = resized(subject.options, partial(_scaled, scale))
        other = replace(subject, options=options)
        yield from _point("first width (channels)", options.features[0], series, overrides(options), other)


def patches(subject: MemoryEstimate, series: str) -> Iterator[CurvePoint]:
    """Peak against the patch's voxels; of the patch alone where `auto` would make another network for each."""
    is_open = "auto" in (subject.config.model.kernels, subject.config.model.strides)
    for scale in (1,) if is_open else SIZES:
        patch = [max(1, round(length * scale)) for length in subject.config.data.patch]
        config = replace(subject.config, data=replace(subject.config.data, patch=patch))
        voxels = patch[0] * patch[1] * patch[2]
        given = f"data.patch={patch}".replace(" ", "")
        yield from _point("patch (voxels)", voxels, series, given, replace(subject, config=config))


def _scaled(scale: float, level: int, width: int) -> int:
    return max(1, round(width * scale))


def _point(varied: str, x: float, series: str, config: str, subject: MemoryEstimate) -> Iterator[CurvePoint]:
    """The point, if there is such a network: groups must divide widths, valid convolutions must fit the patch."""
    try:
        check(replace(subject.config, model=subject.options), here=False)
    except UserError:
        return
    yield CurvePoint(varied, x, series, config, subject.parameters, subject.peak)


def print_front(front: Table) -> None:
    """Print the ways to take a step that no other beats."""
    paper(WIDE).print(terminal_table("Least memory by cost", front))

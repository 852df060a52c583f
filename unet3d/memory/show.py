"""`python -m unet3d memory`: one config explained, from its own step on tensors without data."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from unet3d import build, compose, record, report
from unet3d.config import Model
from unet3d.console import WIDE, paper, terminal_table, text
from unet3d.errors import UserError
from unet3d.memory import explain, kernels, numbers, save, tables
from unet3d.memory.advise import advise, halved
from unet3d.memory.estimates import estimates
from unet3d.memory.look import Look, look, simulate
from unet3d.memory.meter import ENOUGH
from unet3d.table import Table, mib, percent

LARGEST = 10  # groups of tensors shown


def show(overrides: Sequence[str], half: bool, out: Path | None) -> None:
    """Print where the memory of a step goes; with `out`, also write it there, with report, figures and tables."""
    subject = look(overrides, half)
    narrower, relatives = narrowed(subject), family(subject, overrides)
    simulate([subject, *narrower.values(), *relatives])
    relatives.sort(key=lambda relative: -relative.parameters)
    peaks = partial(_peak_of, narrower.values())
    advice = advise(subject.config, subject.options, subject.entry, peaks)
    said = text(_parts(subject, narrower, relatives, advice), WIDE)
    print(said, end="")
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        record.write_text(out / "explained.txt", said)
        print(write(subject, advice, out))


def narrowed(subject: Look) -> dict[int, Look]:
    """By level, the network with half the width there, where there is such a network."""
    levels = range(len(subject.options.features))
    found = {level: halved(subject.config, subject.options, level) for level in levels}
    return {level: replace(subject, options=one, steps=ENOUGH) for level, one in found.items() if one is not None}


def _peak_of(looks: Iterable[Look], options: Model) -> int:
    return next(one.peak for one in looks if one.options == options)


def probe(subject: Look) -> None:
    """Measure what this machine's kernels take for a config's convolutions, keep it for later predictions, print it."""
    device = build.device(subject.config)
    if device.type == "cuda":
        raise UserError("memory probe measures convolutions of the CPU, whose predictions use them; add device=cpu")
    table = kernels.probe(subject.ledger.sites, device)
    print(f"{len(table)} convolutions are measured on this machine: {kernels.place(device)}")
    paper(WIDE).print(terminal_table("Layers of the number", numbers.layers(subject.ledger, device.type)))


def write(subject: Look, advice: Mapping[str, Any], out: Path) -> Path:
    """memory.json, figures, tables and report.html in a folder; returns the report's path."""
    record.write_text(out / "config.yaml", compose.to_yaml(subject.config))
    told = {"rehearsed": _what(subject), "parameters": subject.parameters}
    record.write_json(out / "memory.json", {**told, "predicted": subject.entry, "advice": advice})
    save.write(subject.ledger, subject.name, out)
    return report.write(out)


def _parts(
    subject: Look, narrower: Mapping[int, Look], relatives: Sequence[Look], advice: Mapping[str, Any]
) -> Iterator[str | tuple[str, Table]]:
    entry, peak = subject.entry, subject.peak
    yield _what(subject)
    yield f"predicted peak of a step: {mib(peak)} MiB ({entry['kind']}), {tables.moment(entry)}"
    yield tables.sentence(advice, peak)
    yield "Layers of the number", numbers.layers(subject.ledger, build.target(subject.config))
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
    found = estimates(subject.counts(), subject.parameters, weights, subject.saved)
    yield "Usual estimates and their error", tables.estimates(found, peak)
    yield "Half the width at one level (predicted)", _widths(subject, narrower)
    if len(relatives) > 1:
        yield "Networks of this family, same patch, batch and policy (predicted)", _family(relatives)
        yield from _why(subject, relatives)


def _what(subject: Look) -> str:
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


def _groups(subject: Look) -> Table:
    groups = explain.held(subject.ledger, explain.peak_moment(subject.ledger))
    rows = [
        [f"{g.number} x {g.shape} {g.dtype}", tables.NAMES[g.category], mib(g.bytes), percent(g.bytes, subject.peak)]
        for g in groups[:LARGEST]
    ]
    return Table(["tensors", "for", "MiB", "share"], rows)


def _widths(subject: Look, narrower: Mapping[int, Look]) -> Table:
    """What each level's width is worth, in bytes and in parameters."""
    rows = []
    for level, other in narrower.items():
        fewer = f"{other.parameters / subject.parameters - 1:+.0%}"
        widths = f"{subject.options.features[level]} -> {other.options.features[level]}"
        change = f"{other.peak / subject.peak - 1:+.0%}"
        rows.append([str(level), widths, mib(other.peak), change, f"{other.parameters:,}", fewer])
    return Table(["level", "width", "peak (MiB)", "change", "parameters", "change"], rows)


def family(subject: Look, overrides: Sequence[str]) -> list[Look]:
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
            other = subject if name == subject.name else look([f"model={name}", *rest], is_half)
            found.append(other if other is subject else replace(other, steps=ENOUGH))
        except UserError:  # a relative that this patch or option does not suit
            continue
    return found


def _sets_widths(subject: Look) -> bool:
    """Whether something on top of the named network, an override or an experiment, sets its widths."""
    own, patch = subject.config.model, f"data.patch={subject.config.data.patch}"
    try:
        named = compose.compose([f"model={subject.name}", patch]).model
    except UserError:  # the named network is too deep for this patch
        return True
    return (named.features, named.decoder) != (own.features, own.decoder)


def _family(relatives: Sequence[Look]) -> Table:
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


def _joined(subject: Look) -> str:
    return "" if subject.joined is None else f"{subject.joined[0]} + {subject.joined[1]} = {sum(subject.joined)}"


def _why(subject: Look, relatives: Sequence[Look]) -> Iterator[str]:
    """For relatives with more parameters and a lower peak: how that can be."""
    for other in relatives:
        if other.parameters > subject.parameters and other.peak < subject.peak:
            times = other.parameters / subject.parameters
            yield (
                f"{other.name} has {times:.1f} times the parameters of {subject.name} and needs "
                f"{mib(subject.peak - other.peak)} MiB less: at full resolution it joins {_joined(other)} channels, "
                f"{subject.name} {_joined(subject)}. Parameters live at the bottom of the U, activations at the top."
            )

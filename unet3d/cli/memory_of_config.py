"""`unet3d memory` of one config: where the memory of a step goes, beside narrower networks and its family."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from unet3d import build
from unet3d.base.errors import UserError, escaped
from unet3d.base.files import write_json, write_text
from unet3d.base.progress import track
from unet3d.base.terminal import WIDE, plain_text
from unet3d.base.types import Table, mib, percent
from unet3d.config import compose
from unet3d.memory import breakdown, remedies, tables
from unet3d.memory.allocator import Settings
from unet3d.memory.breakdown import layer_names, stage_of
from unet3d.memory.meter import STEPS_FOR_PEAK, peak_of
from unet3d.memory.prediction import MemoryEstimate, estimate, recompute_line, usual_estimates
from unet3d.memory.technique import some_schedules, step_peak
from unet3d.report import memory_plots, report
from unet3d.run import record
from unet3d.run.pretrained import with_init_names

GROUPS_SHOWN = 10  # of tensors
WHERE = "Parameters live at the bottom of the U, activations at the top."
Section = str | tuple[str, Table]  # a line, or a table with its title


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
    text = plain_text([*_of_subject(subject, advice, without), *_of_others(subject, narrower, relatives)], WIDE)
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


def _of_subject(subject: MemoryEstimate, advice: Mapping[str, Any], without: Mapping[str, int]) -> Iterator[Section]:
    """Yield how high the peak is, when it is, what it is made of, and what options do to it.

    `without`: each option that saves memory and is used, with the peak without it, in bytes.
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
            yield f"the first convolution's output: {shape} {_dtype(storage.dtype)} = {storage.bytes:,} bytes"
            break
    yield "Peak per phase", tables.phases(entry)
    yield "At the peak, by what it is for", tables.categories(entry)
    yield "At the peak, by level of the U", tables.levels(entry)
    yield "At the peak, by layer", tables.layers(entry)
    yield "At the peak, the largest groups of tensors", _groups(subject)
    if without:
        yield "Peak without each option (predicted)", tables.single_techniques(without, peak)
    if subject.dtype is torch.float32:
        yield "Peak with each further option alone (predicted)", _further(subject)
    if subject.technique.program is not None:
        yield "Less memory for more work (recompute=auto with a budget, predicted)", _schedules(subject)
    yield "What parameters cost", tables.state(entry, subject.parameters)
    yield "Usual estimates and their error", tables.estimates(usual_estimates(subject), peak)


def _of_others(
    subject: MemoryEstimate,
    narrower: Mapping[int, MemoryEstimate],
    relatives: Sequence[MemoryEstimate],
) -> Iterator[Section]:
    """Yield what narrower networks, by level, and others of the family need."""
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
    precision = f"amp {_dtype(autocast)}" if autocast else _dtype(subject.dtype)
    recompute = f"at most {config.ckpt} checkpointed segments" if config.ckpt else "no checkpointing"
    if subject.technique.program is not None:
        recompute = recompute_line(config, subject.technique.program)
    patch = "x".join(map(str, config.data.patch))
    step = f"patch {patch}, batch {config.batch}, {precision}, on {build.device_type(config)}"
    return f"{subject.name}: {subject.parameters:,} parameters; {step}; {recompute}"


def _dtype(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def _kinds_of_peak(subject: MemoryEstimate) -> Table:
    """Return a row for each kind of predicted peak: exact, replay, or not known here."""
    rows = [["tensors", mib(subject.step.tensors), "exact count"]]
    if build.device_type(subject.config) == "cuda":
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
        share = f"{relative.entry['levels'][0]['bytes'] / peak:.0%}"  # of full resolution
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
            yield f"{other.name} has {more} and needs {less}: {joins}. {WHERE}"

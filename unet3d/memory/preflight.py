"""Memory before a run: estimates of configs, and what a run prints before it starts."""

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from unet3d import build
from unet3d.base.errors import UserError
from unet3d.base.progress import counting
from unet3d.base.types import host_bytes, mib
from unet3d.config import compose
from unet3d.config.schema import Config, Model
from unet3d.memory.allocator import read_settings, replay
from unet3d.memory.analysis import LayerCount, layer_counts
from unet3d.memory.budget import PASSES, Option, refuse_over_budget, refuse_over_card, warn_over_card, without_levers
from unet3d.memory.checkpoint_plan import choose_segments, predicted
from unet3d.memory.ledger import Ledger
from unet3d.memory.meter import MEASURED_STEPS, STEPS_FOR_PEAK, LedgerMeter
from unet3d.memory.simulate import SegmentStarts, fake_batch, fake_mode, fake_model, simulate, validation_peak
from unet3d.memory.tables import cuda_sizes, guessed, moment, peak_location, sentence, workspace_bound
from unet3d.training import known_bad


@dataclass(frozen=True)
class MemoryEstimate:
    """One network at one patch, batch and policy. `dtype` is the type of weights and images.

    STEPS_FOR_PEAK steps are enough for a peak.
    """

    name: str
    config: Config
    options: Model
    dtype: torch.dtype = torch.float32
    steps: int = MEASURED_STEPS

    @cached_property
    def meter(self) -> LedgerMeter:
        return predicted(self.config, self.options, self.dtype, self.steps)

    @property
    def ledger(self) -> Ledger:
        return self.meter.ledger

    @cached_property
    def entry(self) -> dict[str, Any]:  # what memory.json has under "predicted"
        return self.meter.summary()

    @cached_property
    def peak(self) -> int:  # bytes
        return self.ledger.peak_bytes()

    @cached_property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.meter.model.parameters())

    @property
    def saved(self) -> int:
        """Bytes that autograd holds as the last backward begins."""
        start = {name: start for start, name in self.ledger.marks}["backward"]
        return self.ledger.categories_at(start)["activations"]

    def without(self) -> dict[str, int]:
        """The peak without each way to save memory that the step uses; bytes."""
        if self.dtype is not torch.float32:
            return {}
        return without_levers(self.config, self.options, choose_segments(self.config, self.options).segment_starts)

    def counts(self) -> list[LayerCount]:
        """Every module's input and output in one forward pass without checkpointing."""
        with fake_mode(build.device_type(self.config)):
            policy = replace(build.policy(self.config, "cpu", ()), slabs=None)  # the modules themselves run
            model = fake_model(self.config, self.options, self.dtype)
            image = fake_batch(self.config, self.options, self.dtype).image
            return layer_counts(model, lambda: policy.forward(model, image))


def estimate(overrides: Sequence[str], half: bool) -> MemoryEstimate:
    """The memory of `python train.py OVERRIDES`; with `half`, weights and images are float16. Raises UserError."""
    config = compose.compose(overrides)
    if half and config.amp:
        raise UserError("--half makes the whole network half precision, which leaves nothing to amp=true; drop one")
    options, dtype = build.model_config_from_headers(config), torch.float16 if half else torch.float32
    return MemoryEstimate(options.path or compose.choice("model", overrides), config, options, dtype)


class Preflight(NamedTuple):
    """The first stage of each checkpointed segment, and memory.json's first entries."""

    segment_starts: SegmentStarts
    memory: dict[str, Any]


def preflight(config: Config, options: Model) -> Preflight:
    """Simulate the step and a validation window, and print what they need. Raises UserError beyond `budget`."""
    if not config.dry_run:
        build.device(config)
    is_cuda = build.device_type(config) == "cuda"
    with counting("predicting memory", 2) as counter:
        segment_starts, fraction = choose_segments(config, options)
        steps = MEASURED_STEPS if is_cuda else STEPS_FOR_PEAK  # an allocator settles later
        meter = simulate(config, options, segment_starts, steps=steps)
        counter.advance()
        if is_cuda:
            warning = known_bad.warning(build.policy(config, "cuda", ()).dtype, meter.ledger.largest_map)
            if warning is not None:
                print(f"warning: {warning}", file=sys.stderr, flush=True)
        found, parameters = meter.summary(), sum(p.numel() for p in meter.model.parameters())
        peak, names = found["peak_bytes"], [name for name, _ in meter.model.named_children()]
        peaks = f"predicted peak of a step {mib(peak)} MiB ({found['kind']}), {moment(found)}"
        print(f"{parameters:,} parameters; {peaks}", flush=True)
        if found.get("guesses"):
            print(guessed(found), flush=True)
        if config.compile:
            print("predicted without compile=true: compiled steps need more or less, which is not known", flush=True)
        if config.channels_last and is_cuda and (config.model.path or config.model.norm.startswith("batch")):
            print("predicted without the scratch memory that batch norm takes in channels last", flush=True)
        reserved = 0
        if is_cuda:
            settings, left_out = read_settings(os.environ)
            allocated, reserved = replay(meter.ledger.events, settings)
            found |= {"allocated_bytes": allocated, "reserved_bytes": reserved}
            on_cuda = f"on CUDA: {mib(allocated)} MiB allocated, {mib(reserved)} MiB reserved (replay)"
            print(on_cuda, workspace_bound(found), cuda_sizes(found), *left_out, sep="\n", flush=True)
        asked = Option((), "nothing", config, options, peak, fraction / PASSES, reserved_bytes=reserved)
        refuse_over_budget(asked)
        location, validation = peak_location(found), validation_peak(config, options, found["state"]["optimizer"])
        windows = build.windows(config, [meter.model])
        if is_cuda and not config.dry_run:
            free, total = torch.cuda.mem_get_info(build.device(config))
            if validation > free and config.inference.batch == "auto" and windows > 1:  # a run then sees fewer at once
                single = replace(config, inference=replace(config.inference, batch=1))
                validation = validation_peak(single, options, found["state"]["optimizer"])
                windows = 1
            refuse_over_card(asked, validation, windows, free, total)
            warn_over_card(asked, found["workspace_bound_bytes"], free)
        lines = [sentence(location, peak)]
        others = without_levers(config, options, segment_starts)
        if others:
            saved = ", ".join(f"without {word} {mib(size)}" for word, size in others.items())
            lines.append(f"{saved} MiB (ledger, predicted)")
        if segment_starts:
            lines.append(f"checkpointed segments: {segment_names(names, segment_starts)}")
        lines += slab_words(config)
        if validation > peak:
            times = f", {windows} windows at once" if windows > 1 else ""
            lines.append(f"validation needs more than a step: {mib(validation)} MiB (ledger, predicted){times}")
            if is_cuda:
                lines.append("sums of its windows come on top on the GPU only where they fit; else the host holds them")
        print(*lines, sep="\n", flush=True)
        if not is_cuda and max(peak, validation) > host_bytes():
            print(f"this machine has {mib(host_bytes())} MiB of memory, which is less", flush=True)
        counter.advance()
    memory: dict[str, Any] = {"parameters": parameters, "predicted": found, "advice": location}
    memory |= {"predicted_validation_bytes": validation, "without": others}
    memory["segments"] = [names[start] for start in segment_starts] or list(slab_words(config))
    return Preflight(segment_starts, memory)


def slab_words(config: Config) -> Iterator[str]:
    """How a step runs in slabs, if it does."""
    if (found := build.slabs(config)) is not None:
        kept = "raw maps are kept" if found.is_lean else "maps are made again"
        yield f"slabs of {found.rows} row{'s' * (found.rows > 1)} along {'DHW'[found.axis - 2]}; {kept}"


def segment_names(names: list[str], segment_starts: SegmentStarts) -> str:
    """`inc | down1 to up2 | up3, outc (kept)`."""
    parts = [names[a:b] for a, b in pairwise([*segment_starts, len(names)])]
    return " | ".join(f"{p[0]} to {p[-1]}" if len(p) > 2 else ", ".join(p) for p in parts) + " (kept)"

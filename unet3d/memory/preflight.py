"""Memory before a run: estimates of configs, and what a run prints before it starts."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch

from unet3d import build, compose
from unet3d.config import Config, Model
from unet3d.errors import UserError
from unet3d.memory.allocator import replay
from unet3d.memory.analysis import OTHER, LayerCount, layer_counts
from unet3d.memory.budget import PASSES, Option, refuse_over_budget
from unet3d.memory.ledger import Ledger, Storage
from unet3d.memory.meter import ENOUGH, STEADY, LedgerMeter
from unet3d.memory.segments import choose_segments, predicted
from unet3d.memory.simulate import SegmentStarts, fake_batch, fake_mode, fake_model, simulate, validation_peak
from unet3d.memory.tables import NAMES, Entry, moment, sentence
from unet3d.progress import counting, track
from unet3d.types import mib


@dataclass(frozen=True)
class MemoryEstimate:
    """One network at one patch, batch and policy. `dtype` is that of weights and images; ENOUGH steps do for a peak."""

    name: str
    config: Config
    options: Model
    dtype: torch.dtype = torch.float32
    steps: int = STEADY

    @cached_property
    def meter(self) -> LedgerMeter:
        return predicted(self.config, self.options, self.dtype, self.steps)

    @property
    def ledger(self) -> Ledger:
        return self.meter.ledger

    @cached_property
    def entry(self) -> dict[str, Any]:
        """What memory.json says under "predicted"."""
        return self.meter.summary()

    @cached_property
    def peak(self) -> int:
        """Bytes."""
        return self.ledger.peak_bytes()

    @cached_property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.meter.model.parameters())

    @property
    def share(self) -> float:
        """Of the peak, what is at full resolution."""
        return sum(row["bytes"] for row in self.entry["levels"] if row["level"] == 0) / self.peak

    @property
    def joined(self) -> tuple[int, int] | None:
        """Channels of the skip and of what comes from below where a U-Net joins them at full resolution."""
        widths, last = self.options.features, f"up{len(self.options.features) - 1}"
        made = (s.shape[1] for s in self.ledger.storages if (s.operation, s.scope.module) == ("aten.cat.default", last))
        return next(((widths[0], channels - widths[0]) for channels in made if widths), None)

    @property
    def first_convolution(self) -> Storage | None:
        """Its output."""
        return next((s for s in self.ledger.storages if s.operation == "aten.convolution.default"), None)

    @property
    def saved(self) -> int:
        """Bytes that autograd holds as the last backward begins."""
        return self.ledger.categories_at(dict((name, start) for start, name in self.ledger.marks)["backward"])[
            "activations"
        ]

    def counts(self) -> list[LayerCount]:
        """Every module's input and output in one forward pass without checkpointing."""
        with fake_mode(build.target(self.config)):
            model, policy = fake_model(self.config, self.options, self.dtype), build.policy(self.config, "cpu", ())
            image = fake_batch(self.config, self.options, self.dtype).image
            return layer_counts(model, lambda: policy.forward(model, image))


def simulate_all(estimates: Sequence[MemoryEstimate]) -> None:
    """Simulate each now, with a bar, rather than at the first question to it."""
    for one in track(estimates, "networks", len(estimates)):
        _ = one.meter


def estimate(overrides: Sequence[str], half: bool) -> MemoryEstimate:
    """The memory of `python train.py OVERRIDES`; with `half`, weights and images are float16. Raises UserError."""
    config = compose.compose(overrides)
    if half and config.amp:
        raise UserError("--half makes the whole network half precision, which leaves nothing to amp=true; drop one")
    options, dtype = build.outlined_options(config), torch.float16 if half else torch.float32
    return MemoryEstimate(options.path or compose.choice("model", overrides), config, options, dtype)


class Preflight(NamedTuple):
    """The first stage of each checkpointed segment, and memory.json's first entries."""

    segment_starts: SegmentStarts
    memory: dict[str, Any]


def preflight(config: Config, options: Model) -> Preflight:
    """Simulate the step and a validation window, and print what they need. Raises UserError beyond `budget`."""
    with counting("predicting memory", 2) as counter:
        if not config.dry_run:
            build.device(config)
        (starts, fraction), is_cuda = choose_segments(config, options), build.target(config) == "cuda"
        meter = simulate(config, options, starts, steps=STEADY if is_cuda else ENOUGH)  # an allocator settles later
        counter.advance()
        found, parameters = meter.summary(), sum(p.numel() for p in meter.model.parameters())
        peak = found["peak_bytes"]
        _print(f"{parameters:,} parameters; predicted peak of a step {mib(peak)} MiB (ledger), {moment(found)}")
        if is_cuda:
            held = replay(meter.ledger.events, expandable())
            found |= {"allocated_bytes": held.allocated_bytes, "reserved_bytes": held.reserved_bytes}
            _print(
                f"on CUDA: {mib(held.allocated_bytes)} MiB allocated, {mib(held.reserved_bytes)} MiB reserved (replay),"
            )
            _print("without convolution workspaces and the context; not yet verified on a GPU")
        refuse_over_budget(Option((), "nothing", config, options, peak, fraction / PASSES))
        location, names = peak_location(found), [name for name, _ in meter.model.named_children()]
        _print(sentence(location, peak))
        if starts:
            _print(f"checkpointed segments: {segment_names(names, starts)}")
        validation = validation_peak(config, options, found["state"]["optimizer"])
        if validation > peak:
            _print(f"validation needs more than a step: {mib(validation)} MiB (ledger, predicted)")
        counter.advance()
    memory = {
        "parameters": parameters,
        "predicted": found,
        "advice": location,
        "predicted_validation_bytes": validation,
    }
    return Preflight(starts, memory | {"segments": [names[start] for start in starts]})


def _print(line: str) -> None:
    print(line, flush=True)


def peak_location(entry: Entry) -> dict[str, Any]:
    """The level with most bytes at the peak, `OTHER` in a network without levels, and what most of them are for."""
    rows = [row for row in entry["levels"] if row["level"] != OTHER] or entry["levels"]
    row = max(rows, key=lambda row: row["bytes"])
    return {"level": row["level"], "bytes": row["bytes"], "mostly": max(NAMES, key=lambda kind: row[kind])}


def expandable() -> bool:
    """Whether the environment asks the allocator for segments that grow."""
    asked = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    return "expandable_segments:true" in asked.lower()


def segment_names(names: list[str], segment_starts: SegmentStarts) -> str:
    """`inc | down1 to up2 | up3, outc (kept)`."""
    ends = [*segment_starts[1:], len(names)]
    parts = [names[a:b] for a, b in zip(segment_starts, ends, strict=True)]
    said = [" to ".join((part[0], part[-1])) if len(part) > 2 else ", ".join(part) for part in parts]
    return f"{' | '.join(said)} (kept)"

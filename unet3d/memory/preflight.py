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
from unet3d.memory.analysis import LayerCount, layer_counts
from unet3d.memory.budget import Price, peak_location, plan, price
from unet3d.memory.ledger import Ledger, Storage, categories_at, levels
from unet3d.memory.meter import ENOUGH, STEADY, LedgerMeter
from unet3d.memory.segments import choose_segments, predicted
from unet3d.memory.simulate import SegmentStarts, fake_batch, fake_model, simulate, simulating, validation_peak
from unet3d.memory.tables import moment, sentence
from unet3d.progress import Counter, counting, track
from unet3d.types import budget_bytes, mib


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
        return max(levels(self.ledger))

    @cached_property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.meter.model.parameters())

    @property
    def share(self) -> float:
        """Of the peak, what is at full resolution."""
        found: int = next((row["bytes"] for row in self.entry["levels"] if row["level"] == 0), 0)
        return found / self.peak

    @property
    def joined(self) -> tuple[int, int] | None:
        """Channels of the skip and of what comes from below where they are joined at full resolution."""
        if self.options.path is not None:
            return None
        last = f"up{len(self.options.features) - 1}"
        made = (s for s in self.ledger.storages if s.operation == "aten.cat.default" and s.place.module == last)
        found = next(made, None)
        return None if found is None else (self.options.features[0], found.shape[1] - self.options.features[0])

    @property
    def first_convolution(self) -> Storage:
        """Its output."""
        return next(s for s in self.ledger.storages if s.operation == "aten.convolution.default")

    @property
    def saved(self) -> int:
        """Bytes that autograd holds as the last backward begins."""
        start = [start for start, name in self.ledger.marks if name == "backward"][-1]
        return categories_at(self.ledger, start)["activations"]

    def counts(self) -> list[LayerCount]:
        """Every module's input and output in one forward pass without checkpointing."""
        with simulating(self.config):
            model = fake_model(self.config, self.options, self.dtype)
            policy = build.policy(self.config, "cpu", ())
            image = fake_batch(self.config, self.options, self.dtype).image
            return layer_counts(model, lambda: policy.forward(model, image))


def simulate_all(looks: Sequence[MemoryEstimate]) -> None:
    """Rehearse each now, with a bar, rather than at the first question to it."""
    for one in track(looks, "networks", len(looks)):
        _ = one.meter


def estimate(overrides: Sequence[str], half: bool) -> MemoryEstimate:
    """The look at what `python train.py OVERRIDES` would run. `half`: weights and images in float16, without AMP.

    Raises UserError.
    """
    config = compose.compose(overrides)
    if half and config.amp:
        raise UserError("--half makes the whole network half precision, which leaves nothing to amp=true; drop one")
    options = build.outlined_options(config)
    dtype = torch.float16 if half else torch.float32
    return MemoryEstimate(options.path or compose.choice("model", overrides), config, options, dtype)


PARTS = 3  # the step as asked, with half the width where that saves most, and a validation


class Preflight(NamedTuple):
    """The first stages of checkpointed segments, and memory.json's first entries."""

    starts: SegmentStarts
    memory: dict[str, Any]


def preflight(config: Config, options: Model) -> Preflight:
    """Cut, predict and print. Raises UserError where the step's tensors need more than `budget`.

    For CUDA also what its allocator would make of them: not yet verified on a GPU.
    """
    with counting("predicting memory", PARTS) as counter:
        return _forecast(config, options, counter)


def _forecast(config: Config, options: Model, counter: Counter) -> Preflight:
    if not config.dry_run:
        build.device(config)
    (starts, again), is_cuda = choose_segments(config, options), build.target(config) == "cuda"
    meter = simulate(config, options, starts, steps=STEADY if is_cuda else ENOUGH)  # an allocator settles later
    counter.advance()
    found, names = meter.summary(), [name for name, _ in meter.model.named_children()]
    parameters, peak = sum(p.numel() for p in meter.model.parameters()), found["peak_bytes"]
    print(f"{parameters:,} parameters; predicted peak of a step {mib(peak)} MiB (ledger), {moment(found)}", flush=True)
    if is_cuda:
        held = replay(meter.ledger.events, expandable())
        found |= {"allocated_bytes": held.allocated_bytes, "reserved_bytes": held.reserved_bytes}
        print(f"on CUDA: {mib(held.allocated_bytes)} MiB allocated, {mib(held.reserved_bytes)} MiB reserved (replay),")
        print("without convolution workspaces and the context; not yet verified on a GPU", flush=True)
    if config.budget is not None and peak > budget_bytes(config.budget):
        raise UserError(plan(config, options, budget_bytes(config.budget), Price(peak, again / 3)))
    advice = peak_location(config, options, found, lambda narrower: price(config, narrower).peak)
    counter.advance()
    print(sentence(advice, peak), flush=True)
    if starts:
        print(f"checkpointed segments: {segment_names(names, starts)}", flush=True)
    validation = validation_peak(config, options, found["state"]["optimizer"])
    if validation > peak:
        print(f"validation needs more than a step: {mib(validation)} MiB (ledger, predicted)", flush=True)
    counter.advance()
    memory = {"parameters": parameters, "predicted": found, "advice": advice, "predicted_validation_bytes": validation}
    return Preflight(starts, memory | {"segments": [names[start] for start in starts]})


def expandable() -> bool:
    """Whether the environment asks the allocator for segments that grow."""
    asked = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    return "expandable_segments:true" in asked.lower()


def segment_names(names: list[str], starts: SegmentStarts) -> str:
    """`inc | down1 to up2 | up3, outc (kept)`."""
    ends = [*starts[1:], len(names)]
    parts = [names[a:b] for a, b in zip(starts, ends, strict=True)]
    said = [" to ".join((part[0], part[-1])) if len(part) > 2 else ", ".join(part) for part in parts]
    return f"{' | '.join(said)} (kept)"

"""What a run says of its memory before it begins."""

import os
from typing import Any, NamedTuple

from unet3d import build
from unet3d.checks import budget_bytes
from unet3d.config import Config, Model
from unet3d.errors import UserError
from unet3d.memory.advise import advise
from unet3d.memory.allocator import replay
from unet3d.memory.meter import ENOUGH, STEADY
from unet3d.memory.plan import Price, plan, price
from unet3d.memory.rehearsal import Starts, rehearse
from unet3d.memory.segments import cut
from unet3d.memory.tables import moment, sentence
from unet3d.memory.validation import validation_peak
from unet3d.progress import Counter, counting
from unet3d.table import mib

PARTS = 3  # the step as asked, with half the width where that saves most, and a validation


class Forecast(NamedTuple):
    """The first stages of checkpointed segments, and memory.json's first entries."""

    starts: Starts
    memory: dict[str, Any]


def forecast(config: Config, options: Model) -> Forecast:
    """Cut, predict and print. Raises UserError where the step's tensors need more than `budget`.

    For CUDA also what its allocator would make of them: not yet verified on a GPU.
    """
    with counting("predicting memory", PARTS) as counter:
        return _forecast(config, options, counter)


def _forecast(config: Config, options: Model, counter: Counter) -> Forecast:
    if not config.dry_run:
        build.device(config)
    (starts, again), is_cuda = cut(config, options), build.target(config) == "cuda"
    meter = rehearse(config, options, starts, steps=STEADY if is_cuda else ENOUGH)  # an allocator settles later
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
    advice = advise(config, options, found, lambda narrower: price(config, narrower).peak)
    counter.advance()
    print(sentence(advice, peak), flush=True)
    if starts:
        print(f"checkpointed segments: {segments(names, starts)}", flush=True)
    validation = validation_peak(config, options, found["state"]["optimizer"])
    if validation > peak:
        print(f"validation needs more than a step: {mib(validation)} MiB (ledger, predicted)", flush=True)
    counter.advance()
    memory = {"parameters": parameters, "predicted": found, "advice": advice, "predicted_validation_bytes": validation}
    return Forecast(starts, memory | {"segments": [names[start] for start in starts]})


def expandable() -> bool:
    """Whether the environment asks the allocator for segments that grow."""
    asked = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    return "expandable_segments:true" in asked.lower()


def segments(names: list[str], starts: Starts) -> str:
    """`inc | down1 to up2 | up3, outc (kept)`."""
    ends = [*starts[1:], len(names)]
    parts = [names[a:b] for a, b in zip(starts, ends, strict=True)]
    said = [" to ".join((part[0], part[-1])) if len(part) > 2 else ", ".join(part) for part in parts]
    return f"{' | '.join(said)} (kept)"

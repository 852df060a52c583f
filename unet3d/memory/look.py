"""A config rehearsed on tensors without data, with its name, for the memory command."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from unet3d import build, compose
from unet3d.config import Config, Model
from unet3d.errors import UserError
from unet3d.memory.estimates import LayerCount, layer_counts
from unet3d.memory.ledger import Ledger, Storage, categories_at, levels
from unet3d.memory.meter import STEADY, LedgerMeter
from unet3d.memory.predict import predicted
from unet3d.memory.rehearsal import dry_batch, dry_model, rehearsing
from unet3d.progress import track


@dataclass(frozen=True)
class Look:
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
        found: int = next(row["bytes"] for row in self.entry["levels"] if row["level"] == 0)
        return found / self.peak

    @property
    def joined(self) -> tuple[int, int] | None:
        """Channels of the skip and of what comes from below where they are joined at full resolution."""
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
        with rehearsing(self.config):
            model = dry_model(self.config, self.options, self.dtype)
            policy = build.policy(self.config, "cpu", ())
            image = dry_batch(self.config, self.options, self.dtype).image
            return layer_counts(model, lambda: policy.forward(model, image))


def simulate(looks: Sequence[Look]) -> None:
    """Rehearse each now, with a bar, rather than at the first question to it."""
    for one in track(looks, "networks", len(looks)):
        _ = one.meter


def look(overrides: Sequence[str], half: bool) -> Look:
    """The look at what `python train.py OVERRIDES` would run. `half`: weights and images in float16, without AMP.

    Raises UserError.
    """
    config = compose.compose(overrides)
    if half and config.amp:
        raise UserError("--half makes the whole network half precision, which leaves nothing to amp=true; drop one")
    options = build.outlined_options(config)
    dtype = torch.float16 if half else torch.float32
    return Look(compose.choice("model", overrides), config, options, dtype)

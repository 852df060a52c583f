"""A predicted peak of a training step beside a limit: `unet3d.memory.assert_below`, and `unet3d memory --below`."""

import os
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import AdamW

from unet3d.base.errors import UserError
from unet3d.base.types import MIB, budget_bytes, mib
from unet3d.memory.allocator import read_settings
from unet3d.memory.analysis import describe
from unet3d.memory.levels import by_layer, cut_name
from unet3d.memory.meter import LedgerMeter
from unet3d.memory.peak import Peak, peak_of
from unet3d.memory.profile import Example, MakeOptimizer, predict
from unet3d.training.step import LossFunction

VERSION = 2  # of `Check.as_json`


@dataclass(frozen=True)
class Check:
    """A predicted peak of a training step beside a limit. Sizes are bytes, layers have their full names."""

    name: str  # of the network
    device: str  # cpu or cuda
    limit: int
    parameters: int
    step: Peak
    moment: Mapping[str, Any]  # when most tensors are held, as `describe` says it
    layers: Mapping[str, int]  # what each layer holds then, the largest first
    guesses: Sequence[str] = ()  # where values were taken as 0
    notes: Sequence[str] = ()  # what the replay leaves out

    @property
    def compared(self) -> str:
        """Return the kind of peak that the limit is for, as that of `budget=`."""
        return "reserved" if self.device == "cuda" else "tensors"

    @property
    def margin(self) -> int:
        """Return the limit minus the peak; negative where the peak is more."""
        return self.limit - self.step.limited

    @property
    def fits(self) -> bool:
        """Return whether the peak is at most the limit."""
        return self.margin >= 0

    @property
    def line(self) -> str:
        """Return the peak, the limit, the difference and the largest layer, in one line."""
        kind = self.compared
        if self.guesses:
            kind = f"{kind}, GUESSED"
        distance = "at"
        if self.margin:
            distance = f"{_size(abs(self.margin))} {'below' if self.fits else 'above'}"
        layer, size = next(iter(self.layers.items()))
        return (
            f"{self.name}: predicted peak of a step {mib(self.step.limited)} MiB ({kind}, {self.device}), "
            f"{distance} the limit of {mib(self.limit)} MiB; "
            f"most at the peak: {layer}, {_size(size)}"
        )

    def as_json(self, depth: int | None = None) -> dict[str, Any]:
        """Return the object of `--json`, whose names stay as long as its version.

        Its `layers` are summed up by the first `depth` parts of their names; None: by all.
        """
        totals = Counter[str]()
        for name, size in self.layers.items():
            totals[name if depth is None else cut_name(depth, name)] += size
        largest, most = next(iter(self.layers.items()))
        kinds = ("tensors", "allocated", "reserved") if self.device == "cuda" else ("tensors",)
        return {
            "version": VERSION,
            "kind": "predicted",
            "network": self.name,
            "parameters": self.parameters,
            "device": self.device,
            "fits": self.fits,
            "compared": self.compared,
            "limit_bytes": self.limit,
            "peak_bytes": {kind: getattr(self.step, kind) for kind in kinds},
            "margin_bytes": self.margin,
            "workspace_bytes": self.step.requested - self.step.tensors if self.device == "cuda" else None,
            "reached_in": {name: self.moment[name] for name in ("phase", "module", "operation", "is_recomputed")},
            "layer": {"name": largest, "bytes": most},
            "layers": [{"name": name, "bytes": size} for name, size in totals.most_common()],
            "guesses": list(self.guesses),
        }


def check_step(meter: LedgerMeter, name: str, limit: int) -> Check:
    """Return a check of predicted steps, which a meter has recorded, against a limit in bytes."""
    ledger = meter.ledger
    ledger.layer = str
    moment = ledger.peak_moment()
    sizes = Counter[str]()
    for row in by_layer(ledger, moment):
        sizes[row["module"]] = row["bytes"]
    notes: list[str] = []
    if meter.for_gpu:
        _, notes = read_settings(os.environ)
    return Check(
        name=name,
        device="cuda" if meter.for_gpu else "cpu",
        limit=limit,
        parameters=sum(parameter.numel() for parameter in meter.model.parameters()),
        step=peak_of(ledger),
        moment=describe(ledger, moment),
        layers=dict(sizes.most_common()),
        guesses=meter.guesses,
        notes=notes,
    )


def assert_below(
    model: nn.Module,
    example: Example,
    limit: str | int,
    *,
    loss: LossFunction | None = None,
    optimizer: MakeOptimizer = AdamW,
    amp: bool | str = False,
    label: Tensor | None = None,
    device: str | None = None,
) -> None:
    """Raise AssertionError where the predicted peak of a training step of `model` is more than `limit`, as "8GiB".

    The limit may be a number of bytes, too. The other arguments are those of `unet3d.memory.predict`: `example` is an
    image N C D H W, or its shape. The limit is for tensors on the CPU, and with device="cuda" for what the allocator
    reserves. `model` may be on meta. Its error is the line of `unet3d memory --below`. Raises UserError.
    """
    __tracebackhide__ = True  # pytest then shows the line of the test
    limit_bytes = _limit_bytes(limit)
    explanation = predict(model, example, loss, optimizer, amp, label, device)
    check = check_step(explanation.meter, explanation.name, limit_bytes)
    for note in check.notes:
        warnings.warn(note, stacklevel=2)
    if not check.fits:
        raise AssertionError(check.line)


def _limit_bytes(limit: str | int) -> int:
    """Return the bytes of a limit. Raises UserError."""
    if isinstance(limit, str):
        return budget_bytes(limit, "limit=")
    if isinstance(limit, bool) or not isinstance(limit, int) or limit <= 0:
        raise UserError(f"limit={limit!r}: give an amount and a unit, as limit='8GiB', or a number of bytes")
    return limit


def _size(size: int) -> str:
    """Return bytes as MiB, or as bytes where that would be 0.0."""
    return f"{mib(size)} MiB" if size >= MIB / 10 else f"{size} bytes"

"""What to say when memory ran out all the same: when, who held it, and what would need less."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

from unet3d.config import Config, Model
from unet3d.memory import explain
from unet3d.memory.ledger import Ledger, alive_at
from unet3d.memory.plan import levers, price
from unet3d.memory.tables import NAMES
from unet3d.table import mib

LARGEST = 5  # groups of tensors named
REMEDIES = 4


def moment(ledger: Ledger) -> Iterator[str]:
    """When it was and the largest owners then alive, by the last event that the ledger saw.

    To be asked before the frames of the error are cleared. The ledger steps aside after the first steps, which repeat.
    """
    now = len(ledger.events)
    alive = sum(storage.bytes for storage in alive_at(ledger, now))
    done = sum(name == "end" for _, name in ledger.marks)
    phase = ledger.marks[-1][1]
    if phase == "end":
        peak = explain.peak_moment(ledger)
        words = explain.describe(ledger, peak)["words"]
        yield f"not in the first {done} steps, whose peak was in {words}; held then:"
        now = peak
    else:
        when = f"before step {done + 1}" if phase == "before" else f"in {phase} of step {done + 1}"
        yield f"{when}, {mib(alive)} MiB of tensors alive:"
    for group in explain.held(ledger, now)[:LARGEST]:
        yield f"  {mib(group.bytes):>10} MiB  {group.number} x {group.shape} {group.dtype}, {NAMES[group.category]}"


def in_validation(config: Config, step: int) -> Iterator[str]:
    """The same for the validation after a step, whose memory is no step's: batch and ckpt change nothing there."""
    window = "x".join(map(str, config.data.patch))
    yield f"in the validation after step {step}, of windows of {window} voxels on the device, one at a time,"
    yield "and of whole volumes in host memory, with 4 bytes for each class of each voxel;"
    yield "what would need less, in a new run: a smaller data.patch there, a wider data.spacing, smaller volumes here;"
    yield "this run can go on where there is more memory, or its last.pt be used by predict and score as it is"


def remedies(config: Config, options: Model) -> Iterator[str]:
    """What would need less, each on top of those before; first what a run that goes on may change.

    Without the budget, which was too high: `ckpt=auto` would use all of it.
    """
    yield "what would need less, each on top of those before (predicted peak of a step):"
    now, added = price(config, options), ""
    yield f"  {mib(now.peak):>10} MiB  as it was"
    if config.budget is not None:
        config, before, added = replace(config, budget=None), now, " budget=null"
        now = price(config, options)
        if now.peak < before.peak:
            yield f"  {mib(now.peak):>10} MiB {added}"
    is_new = False
    for lever, cost in islice(levers(config, options, now, cut_first=True), REMEDIES):
        if not is_new and not lever.override.startswith("ckpt="):
            yield "and in a new run, for one that goes on stays as it was:"
            is_new = True
        yield f"  {mib(cost.peak):>10} MiB  {lever.override}{added}"

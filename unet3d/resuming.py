"""What a run that goes on must have in common with what it was. Free of torch."""

from collections.abc import Mapping
from typing import Any

from unet3d.errors import UserError

# What a resumed run may not change: it would be another run. Paths and ways of working may.
FIXED = (
    *("model.", "data.", "loss.", "seed", "batch", "accumulate", "amp"),
    *("optim.name", "optim.average", "optim.weight_decay", "optim.momentum", "optim.betas"),
)
FREE = ("data.root", "data.split", "data.cache", "data.allow_outside", "amp_dtype")  # what they come to is compared
SNAPSHOTS = ("last.pt", "previous.pt", "best.pt")  # to go on from: the first that is whole


def refuse_changes(before: Mapping[Any, Any], now: Mapping[Any, Any]) -> list[str]:
    """The options that differ between two configs as plain values, `name: before -> now`, but for `resume`.

    Raises UserError with those that would make it another run.
    """
    old, new = flat(before, "."), flat(now, ".")
    changed = {
        name: f"{name}: {old[name]} -> {new[name]}"
        for name in sorted(old.keys() & new.keys())  # an option that came later is, by default, what was done before
        if old[name] != new[name] and name != "resume"
    }
    refused = [change for name, change in changed.items() if name.startswith(FIXED) and name not in FREE]
    if refused:
        raise UserError(f"resume: a run goes on as it was; start a new one to change {'; '.join(refused)}")
    return list(changed.values())


def refuse_fewer_steps(reached: int, steps: int) -> None:
    """Raise UserError where a run is beyond the steps that are asked for."""
    if reached > steps:
        raise UserError(f"steps={steps}: the run is at step {reached} already; give as many or more")


def flat(tree: Mapping[Any, Any], separator: str, prefix: str = "") -> dict[str, Any]:
    """`{a: {b: 1}}` as `{a<separator>b: 1}`."""
    values: dict[str, Any] = {}
    for key, value in tree.items():
        nested = isinstance(value, Mapping)
        values |= flat(value, separator, f"{prefix}{key}{separator}") if nested else {f"{prefix}{key}": value}
    return values

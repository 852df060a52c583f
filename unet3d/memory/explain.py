"""What a ledger's events mean: who holds the bytes at the peak, at which level of the U, and when that is.

Pure functions of the event list, the same for a measured step and a predicted one.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

from unet3d.memory.breakdown import by_layer, by_level, layer
from unet3d.memory.ledger import (
    CATEGORIES,
    Ledger,
    Row,
    Storage,
    alive_at,
    categories_at,
    category,
    levels,
    peak_moment,
    phase_spans,
)
from unet3d.step import PHASES


def summary(ledger: Ledger) -> dict[str, Any]:
    """What memory.json says of a step beside its peaks, in bytes: `moment`, `categories`, `levels` and `layers` of the
    peak, `phase_categories` and `phase_ends` of every phase, and `state`, what parameters cost.
    """
    moment = peak_moment(ledger)
    return {
        "moment": describe(ledger, moment),
        "categories": categories_at(ledger, moment),
        "phase_categories": {phase: categories_at(ledger, at) for phase, at in steady_moments(ledger).items()},
        "phase_ends": phase_ends(ledger),
        "levels": by_level(ledger, moment),
        "layers": by_layer(ledger, moment),
        "state": state_bytes(ledger),
    }


def describe(ledger: Ledger, moment: int) -> dict[str, Any]:
    """The allocation that led to a moment: its phase, module and operation, and in words."""
    storage = ledger.storages[ledger.events[moment - 1][0]]
    phase = next(name for start, name in reversed(ledger.marks) if start < moment)
    module, operation = layer(storage.place.module), operation_name(storage.operation)
    done = "recomputation" if storage.place.is_recomputed else phase
    of = "the loss" if module == "loss" else module
    words = done if module in (phase, "before", "end") else f"{done} of {of}"
    return {
        "phase": phase,
        "module": module,
        "operation": operation,
        "is_recomputed": storage.place.is_recomputed,
        "words": words,
    }


def operation_name(operation: str) -> str:
    """`aten.convolution_backward.default` as people say it."""
    return operation.removeprefix("aten.").partition(".")[0]


def steady_moments(ledger: Ledger) -> dict[str, int]:
    """For each phase, the moment in the last step when most bytes were alive."""
    alive = levels(ledger)
    best: dict[str, int] = {}
    for name, start, end in last_step(ledger):
        moment = max(range(start, end + 1), key=lambda at: (alive[at], -at))
        if name not in best or alive[moment] > alive[best[name]]:
            best[name] = moment
    return best


def last_step(ledger: Ledger) -> list[tuple[str, int, int]]:
    """The phases of the last complete step."""
    spans = phase_spans(ledger)
    ends = [i for i, (name, _, _) in enumerate(spans) if name == "end"]
    if not ends:
        return []
    first = ends[-2] + 1 if len(ends) > 1 else 0
    return [span for span in spans[first : ends[-1]] if span[0] in PHASES]


def phase_ends(ledger: Ledger) -> dict[str, dict[str, int]]:
    """Bytes alive as each phase ends, in the first step and in the last: what statements between phases would see.

    With several micro-batches, as the phase of the last one ends.
    """
    alive = levels(ledger)
    steps: list[dict[str, int]] = [{}]
    for name, _, end in phase_spans(ledger):
        if name == "end":
            steps.append({})
        elif name in PHASES:
            steps[-1][name] = alive[end]
    steps = [step for step in steps if len(step) == len(PHASES)]
    return {phase: {"first": steps[0][phase], "steady": steps[-1][phase]} for phase in PHASES if steps}


def state_bytes(ledger: Ledger) -> dict[str, int]:
    """Bytes of weights (with buffers) and gradients as the last update begins, of optimizer state after it."""
    begins = [start for start, name in ledger.marks if name == "step"]
    ends = [start for start, name in ledger.marks if name == "end"]
    before, after = (categories_at(ledger, moments[-1] if moments else 0) for moments in (begins, ends))
    return {"params": before["params"], "grads": before["grads"], "optimizer": after["optimizer"]}


class Group(NamedTuple):
    """Storages of one shape, type and purpose."""

    number: int
    shape: tuple[int, ...]
    dtype: str
    category: str
    bytes: int  # of all of them


def appeared(ledger: Ledger, start: int, end: int) -> list[Group]:
    """What is alive at event `end` and was not at `start`, largest group first."""
    return _groups(ledger, (s for s in alive_at(ledger, end) if s.born >= start))


def vanished(ledger: Ledger, start: int, end: int) -> list[Group]:
    """What was alive at event `start` and is no more at `end`, largest group first."""
    return _groups(ledger, (s for s in alive_at(ledger, start) if s.died is not None and s.died < end))


def held(ledger: Ledger, moment: int) -> list[Group]:
    """What is alive at a moment, largest group first."""
    return _groups(ledger, alive_at(ledger, moment))


def _groups(ledger: Ledger, storages: Iterable[Storage]) -> list[Group]:
    counts: Counter[tuple] = Counter()
    for s in storages:
        counts[s.shape, str(s.dtype).removeprefix("torch."), category(ledger, s), s.bytes] += 1
    found = [Group(n, shape, dtype, kind, n * size) for (shape, dtype, kind, size), n in counts.items()]
    return sorted(found, key=lambda group: -group.bytes)


def timeline(ledger: Ledger) -> tuple[dict[str, int], list[Row]]:
    """Bytes alive by category as the last step begins, and every event from there to its end."""
    spans = last_step(ledger)
    if not spans:
        return dict.fromkeys(CATEGORIES, 0), []
    alive, rows = levels(ledger), []
    for phase, start, end in spans:
        for event in range(start, end):
            index, change = ledger.events[event]
            s = ledger.storages[index]
            name = operation_name(s.operation)
            rows.append(Row(event, phase, layer(s.place.module), name, category(ledger, s), change, alive[event + 1]))
    return categories_at(ledger, spans[0][1]), rows

"""A ledger's events in numbers and words: who holds the bytes at the peak, by phase, and each event of a step."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from unet3d.memory.ledger import Ledger
from unet3d.memory.levels import by_layer, by_level
from unet3d.memory.tracker import WHOLE
from unet3d.training.step import PHASES

PhaseBytes = dict[str, dict[str, int]]  # phase -> bytes in the "first" step, where known, and in later ones, "steady"


def summarise_ledger(ledger: Ledger) -> dict[str, Any]:
    """Return a step's entries in memory.json beside its peaks, in bytes; `state` is what parameters cost."""
    peak_moment = ledger.peak_moment()
    phase_categories = {}
    for phase, moment in _steady_moments(ledger).items():
        phase_categories[phase] = ledger.categories_at(moment)
    return {
        "moment": describe(ledger, peak_moment),
        "categories": ledger.categories_at(peak_moment),
        "phase_categories": phase_categories,
        "phase_ends": phase_ends(ledger),
        "levels": by_level(ledger, peak_moment),
        "layers": by_layer(ledger, peak_moment),
        "state": state_bytes(ledger),
    }


def describe(ledger: Ledger, moment: int) -> dict[str, Any]:
    """Return the allocation that led to a moment: its phase, module and operation, and in words."""
    index, _ = ledger.events[moment - 1]
    storage = ledger.storages[index]
    phase = next(name for start, name in reversed(ledger.marks) if start < moment)
    module = ledger.layer(storage.scope.module)
    is_recomputed = storage.scope.is_recomputed
    work = "recomputation" if is_recomputed else phase
    owner = {"loss": "the loss", WHOLE: f"the network's {WHOLE}"}.get(module, module)
    is_outside = module in (phase, f"({phase})", "before", "end")
    return {
        "phase": phase,
        "module": module,
        "operation": operation_name(storage.operation),
        "is_recomputed": is_recomputed,
        "words": work if is_outside else f"{work} of {owner}",
    }


def operation_name(operation: str) -> str:
    """Return `convolution_backward` for `aten.convolution_backward.default`."""
    return operation.removeprefix("aten.").partition(".")[0]


def dtype_name(dtype: Any) -> str:
    """Return `float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def last_step(ledger: Ledger) -> list[tuple[str, int, int]]:
    """Return the `phase_spans` of the last complete step; empty without one."""
    spans = ledger.phase_spans()
    ends = [index for index, (name, _, _) in enumerate(spans) if name == "end"]
    if not ends:
        return []
    begin = ends[-2] + 1 if len(ends) > 1 else 0
    return [span for span in spans[begin : ends[-1]] if span[0] in PHASES]


def _steady_moments(ledger: Ledger) -> dict[str, int]:
    """Return, for each phase, the moment in the last step when most bytes were alive."""
    alive = ledger.alive_bytes()
    moments = defaultdict[str, list[int]](list)
    for name, start, end in last_step(ledger):
        moments[name] += range(start, end + 1)
    return {name: max(phase_moments, key=alive.__getitem__) for name, phase_moments in moments.items()}


def by_phase(values: Iterable[tuple[str, int]], combine: Callable[[int, int], int] = max) -> PhaseBytes:
    """Return a value per phase, from (phase, value) in order of time.

    `combine` merges the values of several micro-batches.
    """
    steps: list[dict[str, int]] = [{}]
    for name, value in values:
        if name == "end":
            steps.append({})
        elif name in PHASES:
            steps[-1][name] = combine(steps[-1].get(name, 0), value)
    whole_steps = [step for step in steps if len(step) == len(PHASES)]
    return first_and_steady(whole_steps)


def first_and_steady(steps: list[dict[str, int]]) -> PhaseBytes:
    """Return the first step's values, and the highest of the later steps (of the first without another)."""
    if not steps:
        return {}
    first = steps[0]
    later = steps[1:] or steps
    phases = {}
    for phase in PHASES:
        phases[phase] = {"first": first[phase], "steady": max(step[phase] for step in later)}
    return phases


def phase_ends(ledger: Ledger) -> PhaseBytes:
    """Return the bytes alive as each phase ends, of the last micro-batch: what statements between phases would see."""
    alive = ledger.alive_bytes()
    values = ((name, alive[end]) for name, _, end in ledger.phase_spans())
    return by_phase(values, lambda earlier, last: last)


def state_bytes(ledger: Ledger) -> dict[str, int]:
    """Return the bytes of weights (with buffers) and gradients as the last update begins, of optimizer state after."""
    moments = {name: start for start, name in ledger.marks}  # the last of each name
    before = ledger.categories_at(moments.get("step", 0))
    after = ledger.categories_at(moments.get("end", 0))
    return {
        "params": before["params"],
        "grads": before["grads"],
        "optimizer": after["optimizer"],
    }


class Group(NamedTuple):
    """Storages of one shape, type and category."""

    number: int
    shape: tuple[int, ...]
    dtype: str
    category: str
    bytes: int  # of all of them


def held(ledger: Ledger, moment: int) -> list[Group]:
    """Return the storages alive at a moment in groups, the largest first."""
    counts: Counter[tuple] = Counter()
    for storage in ledger.alive_at(moment):
        alike = (storage.shape, dtype_name(storage.dtype), ledger.category(storage), storage.bytes)
        counts[alike] += 1
    groups = []
    for (shape, dtype, category, size), number in counts.items():
        groups.append(Group(number, shape, dtype, category, number * size))
    return sorted(groups, key=lambda group: -group.bytes)


class TimelineRow(NamedTuple):
    """One event of a ledger. `module` and `category` belong to its storage."""

    phase: str
    module: str
    category: str
    change_bytes: int  # > 0: allocated


def timeline_rows(ledger: Ledger) -> tuple[dict[str, int], list[TimelineRow]]:
    """Return the bytes alive by category as the last step begins, and every event from there to its end."""
    spans = last_step(ledger)
    rows = []
    for phase, start, end in spans:
        for index, change in ledger.events[start:end]:
            if not change:  # of a storage that does not count
                continue
            storage = ledger.storages[index]
            layer = ledger.layer(storage.scope.module)
            rows.append(TimelineRow(phase, layer, ledger.category(storage), change))
    begin = spans[0][1] if spans else 0
    return ledger.categories_at(begin), rows

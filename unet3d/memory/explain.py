"""What a ledger's events mean: who holds the bytes at the peak, at which level of the U, and when that is.

Pure functions of the event list, the same for a measured step and a predicted one.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

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

OTHER = "other"  # what belongs to no level: gradients on their way, the optimizer's temporaries


def summary(ledger: Ledger) -> dict[str, Any]:
    """What memory.json says of the peak: `moment`, `categories`, `phase_categories`, `levels`, `layers`, `state`."""
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
    words = f"{done} of {module}" if module not in (*PHASES, "before", "end") else done
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


def layer(path: str) -> str:
    """A module path cut to the level of a layer: `up1.block.conv2.norm` is `up1.conv2`."""
    return ".".join([part for part in path.split(".") if part != "block"][:2])


def depth(ledger: Ledger) -> int:
    """Steps down of the U whose stages the ledger saw."""
    found = (re.match(r"down(\d+)", s.place.module) for s in ledger.storages)
    return max((int(match[1]) for match in found if match), default=0)


def level(path: str, down: int) -> int | None:
    """The level of the U that a module works on: 0 is full resolution. The batch and the loss are there too."""
    stage = path.partition(".")[0]
    if stage in ("inc", "outc", "data", "loss"):
        return 0
    if found := re.fullmatch(r"(down|up)(\d+)", stage):
        return int(found[2]) if found[1] == "down" else down - int(found[2])
    return None


def by_level(ledger: Ledger, moment: int) -> list[dict[str, Any]]:
    """A row a level, shallowest first, then `other`: its bytes, also by category."""
    down = depth(ledger)

    def key(storage: Storage) -> int | str:
        found = level(storage.place.module, down)
        return OTHER if found is None else found

    return [{"level": found, **row} for found, row in _grouped(ledger, moment, key).items()]


def by_layer(ledger: Ledger, moment: int) -> list[dict[str, Any]]:
    """A row a layer, along the U: its level, its bytes, also by category."""
    down = depth(ledger)
    rows = _grouped(ledger, moment, lambda s: layer(s.place.module))
    made = sorted(ledger.storages, key=lambda s: s.role is not None)  # weights lie in no order of work
    order = dict.fromkeys(layer(s.place.module) for s in made)
    return [{"module": key, "level": level(key, down), **rows[key]} for key in order if key in rows]


def _grouped(ledger: Ledger, moment: int, key: Callable[[Storage], int | str]) -> dict[Any, dict[str, int]]:
    rows: dict[Any, dict[str, int]] = {}
    for storage in alive_at(ledger, moment):
        row = rows.setdefault(key(storage), {"bytes": 0} | dict.fromkeys(CATEGORIES, 0))
        row["bytes"] += storage.bytes
        row[category(ledger, storage)] += storage.bytes
    return dict(sorted(rows.items(), key=lambda item: (isinstance(item[0], str), item[0])))


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
    """Bytes alive as each phase ends, in the first step and in the last: what statements between phases would see."""
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

"""A ledger as files: for PyTorch's memory visualiser, a spreadsheet, a text editor."""

import pickle
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

from unet3d.base.files import replacing, write_csv, write_text
from unet3d.base.types import mib
from unet3d.memory.analysis import Group, changed_groups, describe, last_step
from unet3d.memory.ledger import Ledger, Storage

TRACE_COLUMNS = ("layer_idx", "call_idx", "layer_type", "exp", "hook_type", "mem_all", "mem_cached")
GROUPS = 12  # largest groups listed of each sign and phase; the rest is summed up


def write_snapshot(ledger: Ledger, path: Path) -> None:
    """Write a pickle for pytorch.org/memory_viz and torch/cuda/_memory_viz.py, as device 0.

    Sizes in bytes. The addresses are not an allocator's: each storage takes the lowest gap that holds it, and the one
    segment is as long as that needs. A frame says what made the storage, and gives its event as the line number.
    """
    with replacing(path) as file:
        pickle.dump(viewer_snapshot(ledger), file, protocol=4)  # the viewer reads 2 to 4


def viewer_snapshot(ledger: Ledger) -> dict[str, list]:
    """`segments` and `device_traces` in the layout of `torch.cuda.memory._snapshot`."""
    addresses = first_fit(ledger)
    end = max((a + s.bytes for a, s in zip(addresses, ledger.storages, strict=True)), default=0)
    # The viewer fails where there are categories and none is "unknown", so the segment has that one.
    opening = {"frames": [{"filename": "all storages", "line": 0, "name": "ledger"}], "category": "unknown"}
    trace: list[dict[str, Any]] = [{"action": "segment_alloc", "addr": 0, "size": end, "stream": 0, **opening}]
    steps = [0, *accumulate(int(name == "end") for _, name in ledger.marks)]  # that ended before each mark
    frames = [_frames(ledger, storage, steps[storage.phase] + 1) for storage in ledger.storages]
    for index, change in ledger.events:
        where = {"addr": addresses[index], "size": abs(change), "stream": 0, "frames": frames[index]}
        if change > 0:
            trace.append({"action": "alloc", **where, "category": ledger.category(ledger.storages[index])})
        elif change < 0:
            trace += [{"action": action, **where} for action in ("free_requested", "free_completed")]
    alive = sorted(
        (addresses[i], frames[i], s.bytes) for i, s in enumerate(ledger.storages) if s.died is None and s.bytes
    )
    return {"segments": [_segment(alive, end)] if end else [], "device_traces": [trace if end else []]}


def first_fit(ledger: Ledger) -> list[int]:
    """For each storage, the lowest address at which its bytes were free when it appeared."""
    taken: list[tuple[int, int]] = []  # (start, end) of what is alive, in order
    addresses = [0] * len(ledger.storages)
    for index, change in ledger.events:
        if change < 0:
            del taken[bisect_left(taken, (addresses[index],))]
            continue
        if not change:
            continue
        address = 0
        for start, end in taken:
            if start - address >= change:
                break
            address = end
        addresses[index] = address
        insort(taken, (address, address + change))
    return addresses


def _segment(alive: list[tuple[int, list, int]], end: int) -> dict[str, Any]:
    """The segment at the last event. Its blocks leave no gap, because the viewer adds up their sizes to place them."""
    parts: list[tuple[int, int, str, list]] = []
    cursor = 0
    for address, frames, size in [*alive, (end, [], 0)]:
        parts += [(cursor, address - cursor, "inactive", []), (address, size, "active_allocated", frames)]
        cursor = address + size
    keys = ("address", "size", "state", "frames")
    blocks = [{**dict(zip(keys, part, strict=True)), "requested_size": part[1]} for part in parts if part[1]]
    used = sum(size for _, _, size in alive)
    sizes = {"total_size": end, "allocated_size": used, "active_size": used, "requested_size": used}
    return {"device": 0, "address": 0, "stream": 0, "segment_type": "large", **sizes, "blocks": blocks}


def _frames(ledger: Ledger, storage: Storage, step: int) -> list[dict[str, Any]]:
    """A stack of two, innermost first: what made the storage, and in which step (from 1) and phase."""
    made = describe(ledger, storage.born + 1)
    is_adopted = storage.operation == "adopted"  # made by nothing that the ledger saw
    words = f"{ledger.category(storage)} of {ledger.layer(storage.scope.module)}" if is_adopted else made["words"]
    what = f"{words}, {str(storage.dtype).removeprefix('torch.')} {storage.shape}"
    innermost = {"filename": what, "line": storage.born, "name": made["operation"]}
    return [innermost, {"filename": "step", "line": step, "name": made["phase"]}]


def trace(ledger: Ledger, experiment: str, step: int) -> list[dict[str, Any]]:
    """The crossings of one step (from 0) as rows of TRACE_COLUMNS; empty if the ledger holds no such step.

    `layer_idx` counts leaf modules as first entered, `call_idx` crossings; `mem_all`: bytes alive, `mem_cached`: None.
    """
    ends = [start for start, name in ledger.marks if name == "end"]
    alive, order, rows = ledger.alive_bytes(), dict[str, int](), list[dict[str, Any]]()
    for moment, crossing in ledger.crossings:
        # Right: a module may be entered before the step's first event, a backward is over before its step's last.
        if bisect_right(ends, moment) == step:
            index = order.setdefault(crossing.module, len(order))
            values = (index, len(rows), crossing.layer, experiment, crossing.hook, alive[moment], None)
            rows.append(dict(zip(TRACE_COLUMNS, values, strict=True)))
    return rows


def write_trace(rows: Iterable[Mapping[str, Any]], path: Path) -> None:
    """Write the rows of `trace` as CSV; None is an empty cell."""
    write_csv(path, TRACE_COLUMNS, ([row[column] for column in TRACE_COLUMNS] for row in rows))


def write_changes(ledger: Ledger, path: Path) -> None:
    """Write what each phase of the last complete step, if any, added (+) and removed (-), a line for alike storages."""
    alive, lines = ledger.alive_bytes(), []
    for phase, start, end in last_step(ledger):
        lines.append(f"{phase}: {end - start} events, from {mib(alive[start])} MiB to {mib(alive[end])} MiB")
        lines += [*_table(dict(zip("+-", changed_groups(ledger, start, end), strict=True))), ""]
    write_text(path, "\n".join(lines))


def _table(signed: dict[str, list[Group]]) -> Iterator[str]:
    """The largest groups of each sign, in columns as wide as the widest cell of all."""
    shown = [(sign, group) for sign, groups in signed.items() for group in groups[:GROUPS]]
    rows = [(sign, f"{g.number:3}", f"{g.shape} {g.dtype}", mib(g.bytes), g.category) for sign, g in shown]
    number, what, wide = (max((len(row[column]) for row in rows), default=0) for column in (1, 2, 3))
    for sign, groups in signed.items():
        for _, n, tensor, size, kind in (row for row in rows if row[0] == sign):
            yield f"{sign} | {n:>{number}} * {tensor:<{what}} | {size:>{wide}} MiB | {kind}"
        if rest := groups[GROUPS:]:
            yield f"{sign} | ... and {len(rest)} more groups, {mib(sum(group.bytes for group in rest))} MiB"

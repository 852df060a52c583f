"""A ledger as a file for PyTorch's memory visualiser."""

import pickle
from bisect import bisect_left, insort
from itertools import accumulate
from pathlib import Path
from typing import Any

from unet3d.base.files import replacing
from unet3d.memory.breakdown import describe, dtype_name
from unet3d.memory.ledger import ADOPTED, Ledger, Storage

Frames = list[dict[str, Any]]


def write_snapshot(ledger: Ledger, path: Path) -> None:
    """Write a pickle for pytorch.org/memory_viz and torch/cuda/_memory_viz.py, as device 0.

    Sizes in bytes. The addresses are not an allocator's: each storage takes the lowest gap that holds it, and the one
    segment is as long as that needs. A frame says what made the storage, and gives its event as the line number.
    """
    with replacing(path) as file:
        pickle.dump(viewer_snapshot(ledger), file, protocol=4)  # the viewer reads 2 to 4


def viewer_snapshot(ledger: Ledger) -> dict[str, list]:
    """Return `segments` and `device_traces` in the layout of `torch.cuda.memory._snapshot`."""
    addresses = first_fit(ledger)
    ends = (address + s.bytes for address, s in zip(addresses, ledger.storages, strict=True))
    end = max(ends, default=0)
    if not end:
        return {"segments": [], "device_traces": [[]]}
    steps_ended = [0, *accumulate(int(name == "end") for _, name in ledger.marks)]  # before each mark
    frames = [_frames(ledger, storage, steps_ended[storage.phase] + 1) for storage in ledger.storages]
    alive = [
        (address, frame, storage.bytes)
        for address, frame, storage in zip(addresses, frames, ledger.storages, strict=True)
        if storage.died is None and storage.bytes
    ]
    return {"segments": [_segment(sorted(alive), end)], "device_traces": [_actions(ledger, addresses, frames, end)]}


def _actions(ledger: Ledger, addresses: list[int], frames: list[Frames], end: int) -> list[dict[str, Any]]:
    """Return the opening of the segment, and the allocations and releases in it."""
    actions: list[dict[str, Any]] = [
        {
            "action": "segment_alloc",
            "addr": 0,
            "size": end,
            "stream": 0,
            "frames": [{"filename": "all storages", "line": 0, "name": "ledger"}],
            "category": "unknown",  # the viewer fails where there are categories and none is "unknown"
        }
    ]
    for index, change in ledger.events:
        block = {"addr": addresses[index], "size": abs(change), "stream": 0, "frames": frames[index]}
        if change > 0:
            category = ledger.category(ledger.storages[index])
            actions.append({"action": "alloc", **block, "category": category})
        elif change < 0:
            actions += [{"action": "free_requested", **block}, {"action": "free_completed", **block}]
    return actions


def first_fit(ledger: Ledger) -> list[int]:
    """Return, for each storage, the lowest address at which its bytes were free when it appeared."""
    taken: list[tuple[int, int]] = []  # (start, end) of what is alive, in order
    addresses = [0 for _ in ledger.storages]
    for index, change in ledger.events:
        if change < 0:
            del taken[bisect_left(taken, (addresses[index],))]
        if change <= 0:
            continue
        address = 0
        for start, end in taken:
            if start - address >= change:
                break
            address = end
        addresses[index] = address
        insort(taken, (address, address + change))
    return addresses


def _segment(alive: list[tuple[int, Frames, int]], end: int) -> dict[str, Any]:
    """Return the segment at the last event, from (address, frames, size) of each storage in order.

    Its blocks leave no gap, because the viewer adds up their sizes to place them.
    """
    blocks = []
    cursor = 0
    for address, frames, size in [*alive, (end, [], 0)]:
        if address > cursor:
            blocks.append(_block(cursor, address - cursor, "inactive", []))
        if size:
            blocks.append(_block(address, size, "active_allocated", frames))
        cursor = address + size
    used = sum(size for _, _, size in alive)
    return {
        "device": 0,
        "address": 0,
        "stream": 0,
        "segment_type": "large",
        "total_size": end,
        "allocated_size": used,
        "active_size": used,
        "requested_size": used,
        "blocks": blocks,
    }


def _block(address: int, size: int, state: str, frames: Frames) -> dict[str, Any]:
    return {"address": address, "size": size, "state": state, "frames": frames, "requested_size": size}


def _frames(ledger: Ledger, storage: Storage, step: int) -> Frames:
    """Return a stack of two, innermost first: what made the storage, and in which step (from 1) and phase."""
    origin = describe(ledger, storage.born + 1)
    words = origin["words"]
    if storage.operation == ADOPTED:  # made by nothing that the ledger saw
        words = f"{ledger.category(storage)} of {ledger.layer(storage.scope.module)}"
    description = f"{words}, {dtype_name(storage.dtype)} {storage.shape}"
    innermost = {"filename": description, "line": storage.born, "name": origin["operation"]}
    return [innermost, {"filename": "step", "line": step, "name": origin["phase"]}]

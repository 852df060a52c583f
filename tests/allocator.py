"""What torch's CPU allocator did, from the profiler's events: no dispatch mode on, no hook."""

import json
from bisect import bisect_right
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as dispatch_modes

Events = list[dict[str, Any]]


def recorded(steps: Callable[[], None]) -> Events:
    """The profiler's events of `steps`, `[memory]` among them, times in microseconds."""
    assert not dispatch_modes(), "an observer is on: it holds tensors, and is called between operations"
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        steps()
    with TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        events: Events = json.loads(path.read_text())["traceEvents"]
    return events


def peak_bytes(events: Events, within: Sequence[str] = ()) -> int:
    """Return the most bytes alive at once of those taken during the record.

    `within`: operations of which only what outlives a call counts, not what it makes and releases on its way.
    """
    calls = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X" and e["name"] in within)
    starts = [start for start, _ in calls]

    def call(time: float) -> int:
        index = bisect_right(starts, time) - 1
        return index if index >= 0 and time <= calls[index][1] else -1

    changes: list[list[float]] = []
    births: dict[int, int] = {}
    for event in sorted((e for e in events if e["name"] == "[memory]"), key=lambda e: e["ts"]):
        size, address = event["args"]["Bytes"], event["args"]["Addr"]
        if size > 0:
            births[address] = len(changes)
        elif address not in births:
            continue  # older than the record
        else:
            born = changes[births.pop(address)]
            if call(event["ts"]) >= 0 and call(event["ts"]) == call(born[0]):
                born[1] = 0
                continue
        changes.append([event["ts"], size])
    alive = most = 0
    for _, size in changes:
        alive += int(size)
        most = max(most, alive)
    return most

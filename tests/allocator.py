"""What torch's CPU allocator did, from the profiler's events: no dispatch mode on, no hook."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import SkipTest

from torch.profiler import ProfilerActivity, profile

TRIES = 3
Events = list[dict[str, Any]]


def recorded(steps: Callable[[], None]) -> Events:
    """The profiler's events of `steps`, `[memory]` among them, times in microseconds.

    Their order is that of their times, read from the CPU that each event happened on. Skips the test where these
    clocks disagree so that one operation begins in another and ends outside.
    """
    for _ in range(TRIES):
        with on_one_cpu(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            steps()
        with TemporaryDirectory() as folder:
            path = Path(folder, "trace.json")
            profiler.export_chrome_trace(str(path))
            events: Events = json.loads(path.read_text())["traceEvents"]
        if are_nested(events):
            return events
    raise SkipTest("the clocks of this machine's CPUs disagree: the order of the allocator's events is not known")


@contextmanager
def on_one_cpu() -> Iterator[None]:
    """Keep the calling thread on one CPU, and so on one clock."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {sorted(allowed)[os.getpid() % len(allowed)]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


def are_nested(events: Events) -> bool:
    """Whether each operation of a thread lies in another or outside it, as calls do."""
    ends: dict[Any, list[int]] = {}
    for thread, begin, end in sorted(spans(events), key=lambda span: (str(span[0]), span[1], -span[2])):
        around = ends.setdefault(thread, [])
        while around and around[-1] <= begin:
            around.pop()
        if around and end > around[-1]:
            return False
        around.append(end)
    return True


def spans(events: Events) -> Iterator[tuple[Any, int, int]]:
    """Thread, begin and end (nanoseconds) of each operation."""
    for event in events:
        if event["ph"] == "X" and event.get("cat") == "cpu_op":
            begin = round(event["ts"] * 1000)
            yield event["tid"], begin, begin + round(event["dur"] * 1000)

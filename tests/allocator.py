"""What torch's CPU allocator did, from the profiler's events: no dispatch mode on, no hook."""

import json
from collections.abc import Callable
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

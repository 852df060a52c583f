"""Workspaces of convolutions on CUDA, which no tensor holds, measured by the counters of torch's allocator."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from unet3d.memory.ledger import Ledger
from unet3d.memory.tracker import ModuleScope
from unet3d.recomputing.workspaces import CONVOLUTION, CONVOLUTION_BACKWARD

REQUESTED = "requested_bytes.all.current"
REQUESTED_PEAK = "requested_bytes.all.peak"
PEAKS = ("allocated_bytes.all.peak", REQUESTED_PEAK, "reserved_bytes.all.peak")
MOST_ROWS = 100  # of `largest_excesses`
R = TypeVar("R")


class Counters:
    """The counters of torch's CUDA allocator, whose peaks last from one `restart` to the next.

    torch keeps one peak for everybody: what somebody else counts in the process is restarted as well.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._highest: dict[str, int] = {}  # peaks before the last operation that was measured

    def read(self) -> dict[str, Any]:
        """Return them by torch's names, such as `requested_bytes.all.peak`."""
        stats = torch.cuda.memory_stats(self._device)
        for name, highest in self._highest.items():
            stats[name] = max(highest, stats[name])
        return stats

    def restart(self) -> None:
        """Let new peaks begin at what is held now."""
        self._highest = {}
        torch.cuda.reset_peak_memory_stats(self._device)

    def excess(self, compute: Callable[[], R]) -> tuple[R, int]:
        """Return the result of `compute`, and its peak of requested bytes minus the larger of those before and after.

        A result made after the workspace is freed, such as a bias's gradient, is counted in what is held after: the
        excess is too small by its bytes.
        """
        before = self.read()
        for name in PEAKS:
            self._highest[name] = before[name]
        torch.cuda.reset_peak_memory_stats(self._device)
        result = compute()
        after = torch.cuda.memory_stats(self._device)
        held = max(before[REQUESTED], after[REQUESTED])
        return result, after[REQUESTED_PEAK] - held


class CudaLedger(Ledger):
    """A ledger that measures what convolutions request of the allocator beside tensors.

    That is cuDNN's workspace, and copies of maps that are not contiguous. `excesses` holds the most bytes of one call,
    by layer and phase.
    """

    def __init__(self, scope: Callable[[], ModuleScope], device_type: str, counters: Counters) -> None:
        super().__init__(scope, device_type)
        self.excesses: dict[tuple[str, str], int] = defaultdict(int)
        self._counters = counters

    def compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func not in (CONVOLUTION, CONVOLUTION_BACKWARD):
            return func(*args, **kwargs)
        result, excess = self._counters.excess(lambda: func(*args, **kwargs))
        layer = self.layer(self._scope().module)
        phase = self.marks[-1][1]
        self.excesses[layer, phase] = max(self.excesses[layer, phase], excess)
        return result

    def largest_excesses(self) -> list[dict[str, Any]]:
        """Return one row per layer and phase, the largest first."""
        largest = sorted(self.excesses.items(), key=lambda item: -item[1])
        rows = []
        for (layer, phase), size in largest[:MOST_ROWS]:
            rows.append({"module": layer, "phase": phase, "bytes": size})
        return rows

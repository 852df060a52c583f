"""What convolutions take on a GPU beside their results: predicted for fake tensors, measured by torch's counters."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

from unet3d.memory.allocator import EMPTY_CACHE
from unet3d.memory.ledger import Ledger, ModuleScope
from unet3d.recomputing import workspaces
from unet3d.recomputing.workspaces import CONVOLUTION, CONVOLUTION_BACKWARD


class GpuLedger(Ledger):
    """A ledger of fake tensors that stand for tensors on a GPU: copies within convolutions count while they are there.

    See `_convolution` and `convolution_backward` in torch's Convolution.cpp, and its cuDNN stubs. `workspaces` holds
    (events before it, bytes) of each convolution, an estimate: see `workspaces.py`. They are in `requests` alone.
    """

    def __init__(self, scope: Callable[[], ModuleScope] = lambda: ModuleScope(""), device_type: str = "cpu") -> None:
        super().__init__(scope, device_type)
        self.workspaces: list[tuple[int, int]] = []
        self.empties_cache = False  # before the last step, as a run does: see `CudaMeter`

    def requests(self) -> list[tuple[int, int]]:
        """Return the events with those of workspaces, each of which is released at once, and of an emptied cache."""
        scratch: list[tuple[int, list[tuple[int, int]]]] = []
        for number, (moment, size) in enumerate(self.workspaces):
            if size:
                index = len(self.storages) + number
                scratch.append((moment, [(index, size), (index, -size)]))
        ends = [moment for moment, name in self.marks if name == "end"]
        if self.empties_cache and len(ends) > 1:
            scratch.append((ends[-2], [(EMPTY_CACHE, 0)]))
            scratch.sort(key=lambda item: item[0])
        requests: list[tuple[int, int]] = []
        done = 0
        for moment, events in scratch:
            requests += self.events[done:moment] + events
            done = moment
        return requests + self.events[done:]

    def compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is CONVOLUTION:
            image, weight, *others = args
            image = self._laid_out(image, _format(image, weight))
            result = func(image, weight, *others, **kwargs)
            self._take_workspaces(func, (image, weight, *others), result)
            return result
        if func is CONVOLUTION_BACKWARD:
            gradient, image, weight, *others = args
            wanted = _format(image, weight)
            if others[-1][1]:  # the weight's gradient is wanted, for which the image is read
                image = self._laid_out(image, wanted)
            gradient = self._laid_out(gradient, wanted)
            result = func(gradient, image, weight, *others, **kwargs)
            self._take_workspaces(func, (gradient, image, weight, *others), result)
            del gradient  # before the image
            return result
        return func(*args, **kwargs)

    def _take_workspaces(self, func: Any, arguments: Sequence[Any], result: Any) -> None:
        """Count results, before copies go, in the order in which they are made, each with its workspace."""
        results = result if func is CONVOLUTION_BACKWARD else [result]
        sizes = workspaces.bytes_of_call(func, arguments, result)
        for tensor, size in zip(results, sizes, strict=True):
            self.count(tensor, str(func))
            self.workspaces.append((len(self.events), size))

    def _laid_out(self, tensor: Tensor, wanted: torch.memory_format) -> Tensor:
        """Return the tensor in a memory format, counted if it is a copy."""
        tensor = tensor.contiguous(memory_format=wanted)
        self.count(tensor, "aten.clone.default")
        return tensor


def _format(image: Tensor, weight: Tensor) -> torch.memory_format:
    """Return how cuDNN's maps lie: with channels last where the image or the weight does."""
    formats = {suggest_memory_format(image), suggest_memory_format(weight)}
    return torch.channels_last_3d if torch.channels_last_3d in formats else torch.contiguous_format


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

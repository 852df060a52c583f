"""What a training step needs at most: the one record of it."""

import os
from typing import NamedTuple

from unet3d.memory.allocator import Settings, read_settings, replay
from unet3d.memory.ledger import Ledger, most_held
from unet3d.memory.meter import GpuLedger


class Peak(NamedTuple):
    """The most bytes that a step holds. Those of CUDA's allocator are 0 for a step on the CPU."""

    tensors: int
    requested: int = 0  # Tensors and workspaces of convolutions.
    allocated: int = 0  # Blocks given out.
    reserved: int = 0  # Taken from the driver, by this environment's settings.
    expandable: int = 0  # The same by expandable_segments.

    @property
    def limited(self) -> int:
        """Return the bytes that a budget limits: tensors on the CPU, what the allocator reserves on CUDA."""
        return max(self.tensors, self.reserved)

    @property
    def of_allocator(self) -> dict[str, int]:
        """Return the allocator's bytes as memory.json has them; {} on the CPU."""
        return {"allocated_bytes": self.allocated, "reserved_bytes": self.reserved} if self.reserved else {}


def peak_of(ledger: Ledger, settings: Settings | None = None) -> Peak:
    """Return the peak of the steps of a ledger; for CUDA by a replay of its allocator.

    `settings`: of the allocator; None: those of this environment.
    """
    tensors = most_held(ledger.events)
    if not isinstance(ledger, GpuLedger):
        return Peak(tensors)
    if settings is None:
        settings, _ = read_settings(os.environ)
    requests = ledger.requests()
    allocated, reserved = replay(requests, settings)
    _, expandable = replay(requests, Settings(expandable=True))
    return Peak(tensors, most_held(requests), allocated, reserved, expandable)

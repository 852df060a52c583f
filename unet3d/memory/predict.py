"""The peak of a run before it: its own build and its own step, cut into its own segments, on tensors without data.

Error class: exact against the ledger of the real run on the CPU, to the byte. What kernels take within one operation is
in neither.
"""

from typing import Any

import torch

from unet3d.config import Config, Model
from unet3d.memory.meter import STEADY, LedgerMeter
from unet3d.memory.rehearsal import rehearse
from unet3d.memory.segments import cut


def predict(config: Config, options: Model) -> dict[str, Any]:
    """`peak_bytes`, `phases`, `categories` and more in bytes as `Meter.summary` gives them, and `parameters`."""
    meter = predicted(config, options)
    return {**meter.summary(), "parameters": sum(p.numel() for p in meter.model.parameters())}


def predicted(config: Config, options: Model, dtype: torch.dtype = torch.float32, steps: int = STEADY) -> LedgerMeter:
    """The meter that holds the ledger of the rehearsed steps. `dtype` is that of weights and images."""
    return rehearse(config, options, cut(config, options).starts, dtype, steps=steps)

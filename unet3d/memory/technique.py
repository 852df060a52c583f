"""The choice of a config's technique, segments or a program, and the prediction of its step."""

from typing import Any

import torch

from unet3d.config.schema import Config, Model
from unet3d.memory.checkpoint_plan import choose_segments
from unet3d.memory.meter import MEASURED_STEPS, LedgerMeter
from unet3d.memory.recompute_plan import choose_program
from unet3d.memory.simulate import simulate
from unet3d.recomputing.instructions import SavedSchedule
from unet3d.recomputing.plans import Technique


def choose_technique(
    config: Config,
    model_config: Model,
    dtype: torch.dtype = torch.float32,
    before: SavedSchedule | None = None,
) -> Technique:
    """Return the segments of `ckpt`, or the program of `recompute`.

    `dtype` is the type of weights and images; `before` is the schedule of the run that is resumed. Raises UserError
    where the network has neither.
    """
    if config.recompute != "none":
        return choose_program(config, model_config, dtype, before)
    return choose_segments(config, model_config)


def predict(config: Config, model_config: Model) -> dict[str, Any]:
    """Return `peak_bytes`, `phases` and more in bytes, as `LedgerMeter.summary` gives them, and `parameters`."""
    meter = predicted(config, model_config)
    parameters = sum(p.numel() for p in meter.model.parameters())
    return {**meter.summary(), "parameters": parameters}


def predicted(
    config: Config,
    model_config: Model,
    dtype: torch.dtype = torch.float32,
    steps: int = MEASURED_STEPS,
) -> LedgerMeter:
    """Return the meter with the ledger of the simulated steps. `dtype` is the type of weights and images."""
    return simulate(config, model_config, choose_technique(config, model_config, dtype), dtype, steps=steps)

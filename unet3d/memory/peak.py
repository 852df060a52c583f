"""The peak of a step of a config, simulated once for equal steps."""

from typing import NamedTuple

from unet3d.config.schema import Config, Model, Optim
from unet3d.memory.meter import STEPS_FOR_PEAK
from unet3d.memory.simulate import memoized, reserved_bytes, simulate, step_key
from unet3d.memory.stage_profile import profile_stages
from unet3d.recomputing.plans import PLAIN, Technique

PLAIN_SGD = Optim(name="sgd", momentum=0, weight_decay=0, clip=None)  # changes a step's update alone


class StepPeak(NamedTuple):
    """Predicted peaks of a step, in bytes."""

    peak_bytes: int  # most alive in tensors
    reserved_bytes: int  # by CUDA's allocator; 0 on the CPU

    @property
    def occupied_bytes(self) -> int:
        """Return the bytes that a budget limits: tensors on the CPU, what the allocator reserves on CUDA."""
        return max(self.peak_bytes, self.reserved_bytes)


def step_peak(config: Config, model_config: Model, technique: Technique = PLAIN) -> StepPeak:
    """Return what a step of a config peaks at with a technique. Equal steps are simulated once."""
    if technique == PLAIN:
        profile = profile_stages(config, model_config)
        return StepPeak(profile.peak, profile.reserved)
    return _simulated(step_key(config), model_config, technique)


@memoized
def _simulated(config: Config, model_config: Model, technique: Technique) -> StepPeak:
    ledger = simulate(config, model_config, technique, steps=STEPS_FOR_PEAK).ledger
    return StepPeak(ledger.peak_bytes(), reserved_bytes(config, ledger))

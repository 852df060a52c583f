"""What a training step needs: of a plan's config, with its validation, and of a network by schedule and patch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import NamedTuple

import torch

from unet3d.base.fit import fit
from unet3d.base.types import MIB
from unet3d.config.schema import Config, Model
from unet3d.memory.fake_tensors import fake_mode
from unet3d.memory.meter import Peak
from unet3d.memory.prediction import smallest_validation
from unet3d.memory.remedies import Candidate, refuse_step
from unet3d.memory.simulate import fake_model, memoized
from unet3d.memory.technique import step_peak
from unet3d.model.geometry import Triple
from unet3d.training import optim

COUNTER = 4  # Bytes of the number of steps that Adam keeps for each parameter.
USUAL_BYTES = 2600  # A voxel of a patch, of nnU-Net's step in float32; only a first guess.
# A schedule is how a step saves memory, by `amp` and `recompute`; with its usual share of the bytes in float32.
SCHEDULES = {
    (False, "none"): 1.0,
    (True, "none"): 0.52,
    (True, "lean"): 0.27,
    (True, "tiles"): 0.22,
    (True, "auto"): 0.22,
}
Schedule = tuple[bool, str]
MeasureStep = Callable[[Config, Triple], Peak]  # Returns the peak of a step of a config with another patch.


class Step(NamedTuple):
    """A run's step and validation, predicted."""

    config: Config
    needs: Peak  # What the step needs.
    validation_bytes: int
    work: float  # Multiplications that are done twice, as a share of a step's.

    @property
    def limited(self) -> int:
        """Return the bytes that a budget limits: of the step or of validation, whichever needs more."""
        return max(self.needs.limited, self.validation_bytes)


@memoized
def predicted_step(config: Config) -> Step:
    """Return the prediction of a run as its config says, in one simulation or, with recompute, a few."""
    found = Candidate(config, config.model)
    validation = smallest_validation(found, _optimizer_bytes(config))
    return Step(config, found.step, validation.bytes, found.repeated)


def _parameters(config: Config) -> list[int]:
    """Return the bytes of each of the network's parameters."""
    with torch.random.fork_rng([]), fake_mode("cpu"):
        model = fake_model(config, config.model, torch.float32)
        return [parameter.nbytes for parameter in model.parameters()]


def _optimizer_bytes(config: Config) -> int:
    """Return the bytes of what the optimizer keeps between steps."""
    sizes = _parameters(config)
    names = optim.state_names(config.optim)
    counters = COUNTER * len(sizes) if "step" in names else 0
    return len(names - {"step"}) * sum(sizes) + counters


def state_bytes(config: Config) -> int:
    """Return the bytes of weights, gradients and the optimizer's state."""
    return 2 * sum(_parameters(config)) + _optimizer_bytes(config)


def by_schedule(config: Config, recompute: str, budget: int | None = None) -> Config:
    """Return the config with another schedule; "auto" keeps a budget (bytes)."""
    text = None if budget is None else f"{budget / MIB:.6f}MiB"
    return replace(config, recompute=recompute, ckpt=0, budget=text)


def measure_config(network: Callable[[Triple], Model]) -> MeasureStep:
    """Return the measure of steps of the package's networks, which may depend on the patch."""

    def measure(config: Config, patch: Triple) -> Peak:
        model = network(patch)
        config = replace(config, model=model, data=replace(config.data, patch=list(patch)))
        refuse_step(config)
        return step_peak(config, model)

    return measure


class Search:
    """The search for the largest patches of a network; each step is simulated once."""

    def __init__(self, config: Config, measure: MeasureStep) -> None:
        self.config = config
        self.measure = measure
        self.peaks: dict[tuple[Schedule, Triple, int | None], Peak] = {}

    def needs(self, schedule: Schedule, patch: Triple, budget: int) -> Peak:
        """Return what a step needs. The budget (bytes) counts for `recompute=auto`. Raises UserError."""
        amp, recompute = schedule
        limit = budget if recompute == "auto" else None
        key = (schedule, patch, limit)
        if key not in self.peaks:
            config = by_schedule(replace(self.config, amp=amp), recompute, limit)
            self.peaks[key] = self.measure(config, patch)
        return self.peaks[key]

    def largest(
        self, schedule: Schedule, patches: Sequence[Triple], budget: int
    ) -> tuple[Triple | None, Triple | None]:
        """Return the largest patch that fits a budget (bytes), and the next one; None for one that is not there.

        `patches`: the largest first.
        """

        def measure(patch: Triple) -> int:
            return self.needs(schedule, patch, budget).limited

        def guess(patch: Triple) -> float:
            known = {prod(other): peak.limited for (way, other, _), peak in self.peaks.items() if way == schedule}
            return _interpolated(known or {1: usual}, prod(patch))

        usual = USUAL_BYTES * SCHEDULES[schedule] * self.config.batch
        number = fit(patches, measure, budget, guess)
        if number is None:
            return None, patches[-1]
        return patches[number], patches[number - 1] if number else None


def _interpolated(bytes_of: Mapping[int, float], voxels: int) -> float:
    """Return about the bytes of a patch, by the two known patches that are nearest in voxels, or by one and 0."""
    nearest, *others = sorted(bytes_of, key=lambda known: abs(known - voxels))
    slope = bytes_of[nearest] / nearest
    if others and (bytes_of[others[0]] - bytes_of[nearest]) / (others[0] - nearest) > 0:
        slope = (bytes_of[others[0]] - bytes_of[nearest]) / (others[0] - nearest)
    return bytes_of[nearest] + slope * (voxels - nearest)

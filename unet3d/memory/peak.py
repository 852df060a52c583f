"""The peak of a step of a config: simulated once for equal steps, or estimated for steps in slabs."""

from dataclasses import replace
from math import prod
from typing import NamedTuple

from unet3d import build
from unet3d.config.schema import Config, Model, Optim
from unet3d.memory.analysis import last_step
from unet3d.memory.meter import STEPS_FOR_PEAK
from unet3d.memory.simulate import SegmentStarts, memoized, reserved_bytes, simulate, step_key
from unet3d.memory.stage_profile import StageProfile, profile_stages

PLAIN_SGD = Optim(name="sgd", momentum=0, weight_decay=0, clip=None)  # changes a step's update alone


class StepPeak(NamedTuple):
    """Predicted peaks of a step, in bytes."""

    peak_bytes: int  # most alive in tensors
    reserved_bytes: int  # by CUDA's allocator; 0 on the CPU


class SimulatedStep(NamedTuple):
    """Figures of simulated steps."""

    peak: StepPeak
    weight_bytes: int
    flops: int  # of convolutions as forward runs them, recomputed ones too; gradient convolutions are not counted


def step_peak(config: Config, model_config: Model, segment_starts: SegmentStarts = ()) -> StepPeak:
    """Return what a step of a config peaks at with these segments. Equal steps are simulated once."""
    if segment_starts or config.lean or config.slab:
        return _simulated(step_key(config), model_config, segment_starts, STEPS_FOR_PEAK).peak
    profile = profile_stages(config, model_config)
    return StepPeak(profile.peak, profile.reserved)


def forward_recompute_fraction_in_slabs(config: Config, model_config: Model) -> float:
    """Return what a step with `lean` or `slab` convolves beyond a plain forward pass, as a share of that."""
    step = _simulated(step_key(config), model_config, (), STEPS_FOR_PEAK)
    return _beyond_forward(config, model_config, step)


def estimated_in_slabs(config: Config, model_config: Model) -> tuple[int, float]:
    """Return the peak with `lean` or `slab`, and the share of a forward pass that such a step recomputes.

    Both are from one micro-batch of a first step. A peak early in backward is overestimated by the gradients.
    """
    first = replace(step_key(config), optim=PLAIN_SGD, accumulate=1)
    step = _simulated(first, model_config, (), 1)
    profile = _plain_profile(config, model_config)
    peak = step.peak.peak_bytes + profile.optimizer_state
    others = config.accumulate - 1
    if others:
        micro_batch = 0
        if build.device_type(config) == "cpu":
            voxels = build.patches_per_rank(config) * prod(config.data.patch)
            micro_batch = voxels * (4 * (model_config.in_channels or 0) + 2)
        loss_bytes = 4  # that the step reads at its end
        peak += others * (micro_batch + loss_bytes) + step.weight_bytes  # as many bytes of gradients
    return max(profile.update, peak), _beyond_forward(config, model_config, step)


def _beyond_forward(config: Config, model_config: Model, step: SimulatedStep) -> float:
    profile = _plain_profile(config, model_config)
    return step.flops / max(1, sum(profile.flops)) - 1


def _plain_profile(config: Config, model_config: Model) -> StageProfile:
    plain = replace(config, lean=False, slab=0)
    return profile_stages(plain, model_config)


@memoized
def _simulated(config: Config, model_config: Model, segment_starts: SegmentStarts, steps: int) -> SimulatedStep:
    meter = simulate(config, model_config, segment_starts, steps=steps)
    ledger = meter.ledger
    spans = {phase: (start, end) for phase, start, end in last_step(ledger)}
    begin, _ = spans["forward"]
    _, end = spans["backward"]
    flops = sum(count for event, _, count in ledger.convolutions if begin <= event <= end)
    return SimulatedStep(
        peak=StepPeak(ledger.peak_bytes(), reserved_bytes(config, ledger)),
        weight_bytes=sum(parameter.nbytes for parameter in meter.model.parameters()),
        flops=flops,
    )

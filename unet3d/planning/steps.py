"""Which patches there are, the largest first, what a training step on one needs, and how long it takes.

Patches are in the proportions of a data set's volumes, or of what a network takes. `nnunet_plan` is what nnU-Net's own
planner chooses (version 2, `3d_fullres`), for comparisons: `like=nnunet`. Its network follows `architecture`; what is
here is its measure of memory, a count of numbers that convolutions return. That count knows neither types nor what a
step keeps, so it is used for nothing else.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from statistics import median
from typing import NamedTuple

import torch

from unet3d import build
from unet3d.base.fit import fit
from unet3d.base.progress import counting
from unet3d.base.types import MIB, Batch, sizes_text
from unet3d.config.schema import Config, Model
from unet3d.memory.fake_tensors import fake_mode
from unet3d.memory.meter import Peak
from unet3d.memory.prediction import smallest_validation
from unet3d.memory.remedies import Candidate, refuse_step
from unet3d.memory.simulate import fake_model, make_learner, memoized
from unet3d.memory.technique import choose_technique, step_peak
from unet3d.model import geometry
from unet3d.model.architecture import Levels, Spacing, levels_of, median_shape, target_spacing
from unet3d.model.geometry import Triple
from unet3d.training import optim
from unet3d.training.step import train_step
from unet3d.training.switches import switched

MOST_LEVELS = 7  # Deeper maps of large patches would halve again and again what all of it is seen by already.
NEARLY = 1.05  # An axis is rounded up to a multiple of the strides where that adds at most 5 %.
MOST_CUT = 0.75  # Else it is rounded down, where at least this share of it is left.
LEAST_VOXELS = 16**3  # Of a patch that is smaller than its volume.
LONGEST = 2048  # Voxels of an axis, as data.patch has it.
LEAST = 16  # Voxels of an axis of a network's smallest patch.
CUBE: Triple = (1, 1, 1)
VOXEL = (1.0, 1.0, 1.0)  # mm
COUNT = 560_000_000  # numbers that convolutions return for one patch, at most, for each COUNT_GB of target
COUNT_GB = 8
FIRST_VOLUME = 256**3  # voxels of the patch that is shrunk
LEAST_BATCH = 2  # Patches a step, as nnU-Net's: their variety is worth more than a larger patch.
MOST_COVERED = 0.05  # Share of a data set's voxels in one batch.
CONVOLUTIONS = 2  # Convolutions of a level, down and up.
AXES = (2, 1, 0)  # z, y, x
Padding = Callable[[Sequence[int]], Triple]  # Returns the least patch of at least a size that a network takes.
COUNTER = 4  # Bytes of the number of steps that Adam keeps for each parameter.
WARM_UP_STEPS = 1
TIMED_STEPS = 3
PATIENCE = 20.0  # Seconds that a step may take to be measured at its own size; else a smaller one is.
SMALL = 64 * 64 * 32  # Voxels of a patch whose step is always measured.
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


class SizedPatch(NamedTuple):
    """A patch (voxels) that the strides of its levels divide."""

    patch: Triple
    levels: Levels

    @property
    def voxels(self) -> int:
        return prod(self.patch)


def sized_patches(spacing: Sequence[float], shape: Sequence[float], levels: int | None = None) -> list[SizedPatch]:
    """Return patches from about a median volume (voxels) down, each shorter in the axis that is relatively longest.

    The first is at most the volume where the strides allow it; a volume of fewer than 16^3 voxels has one patch, which
    holds all of it. `levels`: the depth that all have; None: by their sizes.
    """
    shape = [min(length, LONGEST) for length in shape]
    strides = _levels(spacing, shape, levels)
    if prod(shape) < LEAST_VOXELS:
        return [SizedPatch(strides.padded(shape), strides)]
    lengths = [_useful(length, unit) for length, unit in zip(shape, strides.units, strict=True)]
    sizes: list[SizedPatch] = []
    while not sizes or prod(lengths) >= LEAST_VOXELS:
        strides = _levels(spacing, lengths, levels)
        patch = strides.padded(lengths)
        if not sizes or prod(patch) < sizes[-1].voxels:
            sizes.append(SizedPatch(patch, strides))
        axis = max(range(3), key=lambda axis: lengths[axis] / shape[axis])
        step = strides.units[axis]
        if lengths[axis] <= step:
            step = max(1, lengths[axis] // 2)
        lengths[axis] -= step
        if lengths[axis] < 1:
            break
    return sizes


def _levels(spacing: Sequence[float], size: Sequence[float], count: int | None) -> Levels:
    """Return the levels for maps of a size (voxels), `count` of them or as many as suit it."""
    levels = levels_of(spacing, size, count)
    if count is None and len(levels.kernels) > MOST_LEVELS:
        return levels_of(spacing, size, MOST_LEVELS)
    return levels


def _useful(length: float, unit: int) -> int:
    """Return a multiple of `unit` voxels near the length of a volume, below it where little is lost by that."""
    above = int(-(-length // unit) * unit)
    below = int(length // unit * unit)
    if above <= NEARLY * length or below < MOST_CUT * length:
        return above
    return below


def level_options(levels: Levels) -> dict[str, int | list[list[int]]]:
    """Return kernels and strides as options: the usual size where all are it, else a list of them."""
    options: dict[str, int | list[list[int]]] = {}
    for name, triples, usual in (("model.kernels", levels.kernels, 3), ("model.strides", levels.strides, 2)):
        are_usual = all(set(triple) == {usual} for triple in triples)
        options[name] = usual if are_usual else [list(triple) for triple in triples]
    return options


def patches_of_network(padded: Padding, proportions: Triple | None = None) -> list[Triple]:
    """Return all patches that a network takes: cubes, or those of given proportions, which grow one axis at a time."""
    patches = [padded((LEAST, LEAST, LEAST))]
    while True:
        lengths = [max(patches[-1]) + 1] * 3
        if proportions is not None:
            lengths = list(patches[-1])
            shares = [length / part for length, part in zip(lengths, proportions, strict=True)]
            lengths[shares.index(min(shares))] += 1
        patch = padded(lengths)
        if max(patch) > LONGEST:
            return patches[::-1]
        patches.append(patch)


def padded_by_rules(size: Sequence[int]) -> Triple:
    """Return the least patch of at least this size that a network by nnU-Net's rules takes, for cubic voxels."""
    return levels_of(VOXEL, size).padded(size)


def padded_to(units: Sequence[int]) -> Padding:
    """Return the padding to multiples of `units`, twice each at least."""

    def padded(size: Sequence[int]) -> Triple:
        x, y, z = (max(2, -(-length // unit)) * unit for length, unit in zip(size, units, strict=True))
        return x, y, z

    return padded


class NnunetPlan(NamedTuple):
    """A plan as nnU-Net makes it. Axes x, y, z."""

    spacing: Spacing  # mm
    patch: Triple  # voxels
    batch: int
    levels: Levels
    outputs: int  # What nnU-Net counts for the patch.


def nnunet_plan(
    shapes: Sequence[Sequence[int]],
    spacings: Sequence[Sequence[float]],
    classes: int,
    gigabytes: float = COUNT_GB,
    cases: int | None = None,
) -> NnunetPlan:
    """Return nnU-Net's plan for cases of these shapes (voxels) and spacings (mm), axes x, y, z.

    `classes` counts the background. `gigabytes` is nnU-Net's target. `cases`: the number of training cases; None: as
    many as there are shapes. nnU-Net takes shapes after cropping to what is not 0.
    """
    target = target_spacing(shapes, spacings)
    shape = median_shape(shapes, spacings, target)
    coarsest = max(AXES, key=lambda axis: target[axis])
    order = sorted(AXES, key=lambda axis: axis != coarsest)  # nnU-Net's: the coarsest first; it decides ties
    limit = COUNT * gigabytes / COUNT_GB
    scale = (FIRST_VOLUME * prod(target[axis] for axis in order)) ** (1 / 3)
    lengths = [min(round(scale / mm), length) for mm, length in zip(target, shape, strict=True)]
    levels = levels_of(target, lengths)
    patch = levels.padded(lengths)
    while nnunet_count(patch, levels, classes) > limit:
        longest = max(reversed(order), key=lambda axis: patch[axis] / shape[axis])
        lengths = list(patch)
        lengths[longest] -= levels.units[longest]
        unit = levels_of(target, lengths).units[longest]  # a shorter axis may be halved less often
        lengths[longest] = patch[longest] - unit
        levels = levels_of(target, lengths)
        patch = levels.padded(lengths)
    count = nnunet_count(patch, levels, classes)
    most = round(prod(shape) * (cases or len(shapes)) * MOST_COVERED / prod(patch))
    batch = max(LEAST_BATCH, min(round(limit / count * LEAST_BATCH), most))
    return NnunetPlan(target, patch, batch, levels, count)


def nnunet_count(patch: Sequence[int], levels: Levels, classes: int) -> int:
    """Return how many numbers the convolutions of nnU-Net's network return for one patch, as its planner counts them.

    Of its outputs only that at full resolution counts.
    """
    size = list(patch)
    count = classes * prod(size)
    for level, width in enumerate(levels.features):
        if level:
            size = [length // stride for length, stride in zip(size, levels.strides[level - 1], strict=True)]
        is_deepest = level == len(levels.strides)
        convolutions = CONVOLUTIONS if is_deepest else 2 * CONVOLUTIONS + 1  # down, up and transposed
        count += convolutions * width * prod(size)
    return count


@dataclass(frozen=True)
class Step(Candidate):
    """A run's step and validation, predicted."""

    @cached_property
    def validation_bytes(self) -> int:
        return smallest_validation(self, state_bytes(self.config)[1]).bytes

    @property
    def limited(self) -> int:
        """Return the bytes that a budget limits: of the step or of validation, whichever needs more."""
        return max(self.step.limited, self.validation_bytes)


@memoized
def predicted_step(config: Config) -> Step:
    """Return the prediction of a run as its config says, in one simulation or, with recompute, a few."""
    return Step(config, config.model)


def state_bytes(config: Config) -> tuple[int, int]:
    """Return the bytes of the weights, of their gradients and the optimizer's state, and of that state alone."""
    with torch.random.fork_rng([]), fake_mode("cpu"):
        weights = [weight.nbytes for weight in fake_model(config, config.model, torch.float32).parameters()]
    names = optim.state_names(config.optim)
    counters = COUNTER * len(weights) if "step" in names else 0
    optimizer = len(names - {"step"}) * sum(weights) + counters
    return 2 * sum(weights) + optimizer, optimizer


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


def largest(
    needs: Callable[[Triple], Peak], patches: Sequence[Triple], budget: int, usual: float
) -> tuple[Triple | None, Triple | None]:
    """Return the largest patch that fits a budget (bytes), and the next one; None for one that is not there.

    `patches`: the largest first; `usual`: about how many bytes a voxel needs. `needs` remembers what it has simulated.
    """
    number = fit(patches, lambda patch: needs(patch).limited, budget, lambda patch: usual * prod(patch))
    if number is None:
        return None, patches[-1]
    return patches[number], patches[number - 1] if number else None


def is_here(config: Config) -> bool:
    """Return whether the device that a config is for is in this machine."""
    return build.device_type(config) == "cpu" or torch.cuda.is_available()


def step_time(config: Config) -> tuple[float, str]:
    """Return the seconds of a step of a config here, and how they are known: a long one's by a smaller patch."""
    smaller = shrunk(config)
    seconds = measured_step(smaller) * prod(config.data.patch) / prod(smaller.data.patch)
    if smaller is config:
        return seconds, "measured"
    if seconds <= PATIENCE:
        return measured_step(config), "measured"
    return seconds, f"extrapolated from a measured step on patches of {sizes_text(smaller.data.patch)}"


def shrunk(config: Config) -> Config:
    """Return the config, a large one with a patch of few voxels, which leaves more than one of each map."""
    patch = list(config.data.patch)
    while prod(patch) > SMALL:
        axis = patch.index(max(patch))
        shorter = list(patch)
        shorter[axis] //= 2
        if patch[axis] % 2 or geometry.larger_patch(shorter, config.model) != shorter:
            break
        patch = shorter
    return config if patch == config.data.patch else replace(config, data=replace(config.data, patch=patch))


def measured_step(config: Config) -> float:
    """Return the median seconds of a step, of random images, without a loader."""
    device = build.device(config)
    model_config = config.model
    assert model_config.in_channels is not None and model_config.classes is not None
    with torch.random.fork_rng(), switched(config.cuda, config.deterministic):
        learner = make_learner(config, model_config, choose_technique(config, model_config), device=device)
        image = torch.randn(config.batch, model_config.in_channels, *config.data.patch)
        label = torch.randint(model_config.classes, (config.batch, *config.data.patch)).short()
        batches = [Batch(image, label) for _ in range(config.accumulate)]
        seconds = []
        with counting("measuring steps", WARM_UP_STEPS + TIMED_STEPS) as counter:
            for number in range(WARM_UP_STEPS + TIMED_STEPS):
                started = time.perf_counter()
                train_step(*learner, batches, clip=config.optim.clip)
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                if number >= WARM_UP_STEPS:
                    seconds.append(time.perf_counter() - started)
                counter.advance()
    return median(seconds)

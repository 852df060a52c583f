"""The largest patch whose training step and validation fit a budget, by few simulations on tensors without data."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from unet3d.base.progress import counting
from unet3d.base.types import MIB
from unet3d.config.schema import Config
from unet3d.memory.fake_tensors import fake_mode
from unet3d.memory.peak import Peak
from unet3d.memory.prediction import smallest_validation
from unet3d.memory.segments import profile_stages
from unet3d.memory.simulate import fake_model
from unet3d.memory.technique import choose_technique, step_peak
from unet3d.memory.variants import PASSES
from unet3d.model.geometry import Triple
from unet3d.planning.largest import Points, largest
from unet3d.planning.sized_patches import SizedPatch, SizedSeries
from unet3d.training import optim

COUNTER = 4  # bytes of the number of steps that Adam keeps for each parameter
LEAN_OF_TILES = 1.15  # bytes of a step with recompute=lean, at least, for each of recompute=tiles
SHARE_BY_TILES = 0.25  # first guess of the bytes a voxel that recompute=tiles leaves of the plain step's
Make = Callable[[SizedPatch], Config]  # the config of a run with a patch, whose model leaves nothing open


class Fit(NamedTuple):
    """A run's step and validation, predicted."""

    config: Config
    step: Peak
    step_recompute_fraction: float  # convolution FLOPs computed twice, as a share of a step's
    validation_bytes: int

    @property
    def occupied_bytes(self) -> int:
        """Return the bytes that a budget limits: of the step or of validation, whichever needs more."""
        return max(self.step.limited, self.validation_bytes)


def fit_of(config: Config) -> Fit:
    """Return the prediction of a run as its config says, in one simulation or, with recompute, a few."""
    model = config.model
    technique = choose_technique(config, model)
    step = step_peak(config, model, technique)
    validation = smallest_validation(config, model, technique, step.tensors, optimizer_bytes(config))
    return Fit(config, step, technique.forward_recompute_fraction / PASSES, validation.bytes)


def _parameters(config: Config) -> list[int]:
    """Return the bytes of each of the network's parameters."""
    with torch.random.fork_rng([]), fake_mode("cpu"):
        model = fake_model(config, config.model, torch.float32)
        return [parameter.nbytes for parameter in model.parameters()]


def optimizer_bytes(config: Config) -> int:
    """Return the bytes of what the optimizer keeps between steps."""
    sizes = _parameters(config)
    names = optim.state_names(config.optim)
    counters = COUNTER * len(sizes) if "step" in names else 0
    return len(names - {"step"}) * sum(sizes) + counters


def plain(config: Config) -> Config:
    """Return the config without recomputation."""
    return replace(config, recompute="none", ckpt=0, budget=None)


def largest_as_given(sizes: Sequence[SizedPatch], make: Make, budget: int) -> SizedPatch | None:
    """Return the largest patch whose step fits by the schedule of its config; None without one.

    `sizes`: the largest first, which is tried first.
    """
    guess = {sizes[0].voxels: budget}
    return _largest(sizes, lambda size: fit_of(make(size)), budget, guess, "patches")


def largest_recomputed(sizes: Sequence[SizedPatch], make: Make, budget: int) -> SizedPatch | None:
    """Return the largest patch whose step fits by recompute=tiles; None without one. `sizes`: the largest first.

    The first guess follows from a plain step.
    """
    middle = sizes[len(sizes) // 2]
    config = plain(make(middle))
    profile = profile_stages(config, config.model)
    of_voxels = SHARE_BY_TILES * max(0, profile.step.tensors - profile.update)
    guess = {1: float(profile.update), middle.voxels: profile.update + of_voxels}

    def measure(size: SizedPatch) -> Fit:
        return fit_of(replace(make(size), recompute="tiles", ckpt=0, budget=None))

    return _largest(sizes, measure, budget, guess, "patches with recompute=tiles")


def _largest(
    sizes: Sequence[SizedPatch],
    measure: Callable[[SizedPatch], Fit],
    budget: int,
    guess: Points,
    work: str,
) -> SizedPatch | None:
    """Return the largest patch whose step and validation fit; None without one."""
    series = SizedSeries(sizes)
    with counting(work) as counter:

        def occupied(patch: Triple) -> int:
            size = measure(series.of(patch)).occupied_bytes
            counter.advance()
            return size

        patch = largest(series, occupied, budget, guess).patch
    return None if patch is None else series.of(patch)


def cheapest(config: Config, budget: int) -> Fit | None:
    """Return the step of a config that fits and costs the least time: recomputing nothing, little, or what it must.

    None where none fits.
    """
    fit = fit_of(plain(config))
    if fit.occupied_bytes <= budget:
        return fit
    by_tiles = fit_of(replace(config, recompute="tiles", ckpt=0, budget=None))
    schedules = ["auto"]
    if LEAN_OF_TILES * by_tiles.step.limited <= budget:
        schedules = ["lean", "auto"]
    for recompute in schedules:
        fit = fit_of(replace(config, recompute=recompute, ckpt=0, budget=f"{budget / MIB:.6f}MiB"))
        if fit.occupied_bytes <= budget:
            return fit
    return by_tiles if by_tiles.occupied_bytes <= budget else None


def allocated_bytes(config: Config) -> int:
    """Return what CUDA's allocator would give out for a step at most, by a replay; 0 for a step on the CPU."""
    return step_peak(config, config.model).allocated


def state_bytes(config: Config) -> int:
    """Return the bytes of weights, gradients and the optimizer's state."""
    return 2 * sum(_parameters(config)) + optimizer_bytes(config)

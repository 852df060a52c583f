"""The largest patch whose training step and validation fit a budget, by few simulations on tensors without data."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from unet3d.base.errors import UserError
from unet3d.base.progress import counting
from unet3d.base.types import MIB
from unet3d.config.schema import Config
from unet3d.memory.budget import Candidate, simulated
from unet3d.memory.fake_tensors import fake_mode
from unet3d.memory.preflight import smallest_validation
from unet3d.memory.simulate import fake_model
from unet3d.memory.stage_profile import profile_stages
from unet3d.memory.technique import choose_technique
from unet3d.planning.sized_patches import SizedPatch
from unet3d.training import optim

MOST_RECOMPUTED = 4  # patches whose schedules are searched: each takes seconds
MOST_PLAIN = 8  # patches whose plain step is simulated
SHARE_BY_TILES = 0.25  # first guess of the bytes a voxel that recompute=tiles leaves of the plain step's
Make = Callable[[SizedPatch], Config]  # the config of a run with a patch, whose model leaves nothing open


class Fit(NamedTuple):
    """A run's step and validation, predicted."""

    config: Config
    candidate: Candidate
    validation_bytes: int

    @property
    def occupied_bytes(self) -> int:
        """Return the bytes that a budget limits: of the step or of validation, whichever needs more."""
        return max(self.candidate.occupied_bytes, self.validation_bytes)


@dataclass
class Search:
    """A search for the largest of some patches, the largest first, that fits `budget` bytes."""

    sizes: Sequence[SizedPatch]
    budget: int
    slope: float = 0.0  # bytes a voxel
    intercept: float = 0.0  # bytes beside them

    def largest(self, measure: Callable[[int], int], most: int, first: int | None = None) -> int | None:
        """Return the index of the first patch of which `measure` gives at most the budget; None without one.

        At most `most` patches are measured, the next by a line through the last two.
        """
        known: dict[int, int] = {}
        index = first if first is not None else len(self.sizes) // 2
        for _ in range(most):
            known[index] = measure(index)
            fitting = [i for i, size in known.items() if size <= self.budget]
            failing = [i for i, size in known.items() if size > self.budget]
            best = min(fitting, default=len(self.sizes))
            worst = max((i for i in failing if i < best), default=-1)
            if best == worst + 1:
                break
            self._fit_line(known)
            guess = self.guess()
            index = min(max(guess, worst + 1), best - 1)
        return best if best < len(self.sizes) else None

    def guess(self) -> int:
        """Return the index of the first patch that fits by the line."""
        for index, size in enumerate(self.sizes):
            if self.intercept + self.slope * size.voxels <= self.budget:
                return index
        return len(self.sizes) - 1

    def _fit_line(self, known: dict[int, int]) -> None:
        """Put the line through the two measured patches nearest to the budget, or through the only one."""
        nearest = sorted(known, key=lambda index: abs(known[index] - self.budget))[:2]
        first = nearest[0]
        if len(nearest) == 2:
            second = nearest[1]
            voxels = self.sizes[first].voxels - self.sizes[second].voxels
            slope = (known[first] - known[second]) / voxels if voxels else 0.0
            if slope > 0:
                self.slope = slope
                self.intercept = known[first] - slope * self.sizes[first].voxels
                return
        self.intercept = min(self.intercept, 0.9 * known[first])
        self.slope = (known[first] - self.intercept) / self.sizes[first].voxels


def fit_of(config: Config) -> Fit:
    """Return the prediction of a run as its config says, in one simulation or, with recompute, a few."""
    model = config.model
    candidate = simulated(Candidate((), "nothing", config, model))
    technique = choose_technique(config, model)
    validation = smallest_validation(config, model, technique, candidate.peak_bytes, optimizer_bytes(config))
    return Fit(config, candidate, validation.peak_bytes)


def weight_bytes(config: Config) -> int:
    """Return the bytes of the network's weights."""
    with torch.random.fork_rng([]), fake_mode("cpu"):
        model = fake_model(config, config.model, torch.float32)
        return sum(parameter.nbytes for parameter in model.parameters())


def optimizer_bytes(config: Config) -> int:
    """Return the bytes of what the optimizer keeps between steps, but for a number for each parameter."""
    of_weights = optim.state_names(config.optim) - {"step"}
    return len(of_weights) * weight_bytes(config)


def plain(config: Config) -> Config:
    """Return the config without recomputation."""
    return replace(config, recompute="none", ckpt=0, budget=None)


def largest_plain(sizes: Sequence[SizedPatch], make: Make, budget: int) -> int | None:
    """Return the index of the largest patch whose step without recomputation fits; None without one."""
    search = Search(sizes, budget)
    with counting("patches without recomputation, at most", MOST_PLAIN) as counter:

        def measure(index: int) -> int:
            size = fit_of(plain(make(sizes[index]))).occupied_bytes
            counter.advance()
            return size

        return search.largest(measure, MOST_PLAIN, first=0)


def largest_recomputed(sizes: Sequence[SizedPatch], make: Make, budget: int) -> int | None:
    """Return the index of the largest patch whose step fits by recompute=tiles; None without one.

    The first guess follows from a plain step.
    """
    search = Search(sizes, budget)
    middle = len(sizes) // 2
    profile = profile_stages(plain(make(sizes[middle])), make(sizes[middle]).model)
    search.intercept = float(profile.update)
    of_voxels = max(0, profile.peak - profile.update)
    search.slope = SHARE_BY_TILES * of_voxels / sizes[middle].voxels
    with counting("patches with recompute=tiles, at most", MOST_RECOMPUTED) as counter:

        def measure(index: int) -> int:
            config = replace(make(sizes[index]), recompute="tiles", ckpt=0, budget=None)
            size = fit_of(config).occupied_bytes
            counter.advance()
            return size

        return search.largest(measure, MOST_RECOMPUTED, first=search.guess())


def cheapest_schedules(config: Config, budget: int) -> list[Fit]:
    """Return the steps of a config that fit, by the time they cost: plain, lean, and as much as the budget asks for.

    Raises UserError where none fits.
    """
    fits: list[Fit] = []
    for recompute in ("none", "lean", "auto"):
        if recompute == "auto" and fits:
            break
        changed = replace(config, recompute=recompute, ckpt=0, budget=f"{budget / MIB:.6f}MiB")
        fit = fit_of(changed)
        if fit.occupied_bytes <= budget:
            fits.append(fit)
            if recompute == "none":
                break
    if not fits:
        size = fit.occupied_bytes
        raise UserError(
            f"budget: {size:,} bytes are needed for data.patch={config.data.patch}; give more, or a smaller patch"
        )
    return fits


def state_bytes(config: Config) -> int:
    """Return the bytes of weights, gradients and the optimizer's state."""
    return 2 * weight_bytes(config) + optimizer_bytes(config)

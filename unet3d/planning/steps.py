"""What a training step needs, and how long it takes: of a plan's config, and of a network by schedule and patch."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from statistics import median
from typing import NamedTuple

import torch

from unet3d import build
from unet3d.base.fit import fit
from unet3d.base.progress import counting
from unet3d.base.types import MIB, Batch
from unet3d.config.schema import Config, Model
from unet3d.memory.fake_tensors import fake_mode
from unet3d.memory.meter import Peak
from unet3d.memory.prediction import smallest_validation
from unet3d.memory.remedies import Candidate, refuse_step
from unet3d.memory.simulate import fake_model, memoized
from unet3d.memory.technique import choose_technique, step_peak
from unet3d.model import geometry
from unet3d.model.geometry import Triple
from unet3d.planning.draft import sizes_text
from unet3d.training import optim
from unet3d.training.step import train_step
from unet3d.training.switches import switched

COUNTER = 4  # Bytes of the number of steps that Adam keeps for each parameter.
WARM_UP = 1  # Steps before those that are timed.
STEPS = 3  # Steps that are timed.
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
    validation = smallest_validation(found, state_bytes(config)[1])
    return Step(config, found.step, validation.bytes, found.repeated)


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
            return usual * prod(patch)

        usual = USUAL_BYTES * SCHEDULES[schedule] * self.config.batch
        number = fit(patches, measure, budget, guess)
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
        policy = build.policy(config, device.type, choose_technique(config, model_config))
        model = policy.formatted(build.model(model_config, config.seed).to(device)).train()
        loss = build.loss(config, model_config.classes, device, model_config.output_regions)
        optimizer = optim.optimizer(config.optim, model)
        image = torch.randn(config.batch, model_config.in_channels, *config.data.patch)
        label = torch.randint(model_config.classes, (config.batch, *config.data.patch)).short()
        batches = [Batch(image, label) for _ in range(config.accumulate)]
        seconds = []
        with counting("measuring steps", WARM_UP + STEPS) as counter:
            for number in range(WARM_UP + STEPS):
                started = time.perf_counter()
                train_step(model, loss, optimizer, policy.scaler(), policy, batches, clip=config.optim.clip)
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                if number >= WARM_UP:
                    seconds.append(time.perf_counter() - started)
                counter.advance()
    return median(seconds)

"""How long a training step takes on this machine, measured, and what a given time is for."""

import re
import time
from dataclasses import replace
from math import prod
from statistics import median
from typing import NamedTuple

import torch

from unet3d import build
from unet3d.base.errors import UserError
from unet3d.base.progress import counting
from unet3d.base.types import Batch
from unet3d.config.schema import Config
from unet3d.memory.technique import choose_technique
from unet3d.model import geometry
from unet3d.training import optim
from unet3d.training.step import train_step
from unet3d.training.switches import switched

WARM_UP = 1  # steps before those that count
STEPS = 3  # that count
PATIENCE = 20.0  # seconds that a step may take to be measured at its own size; else a smaller one is
SMALL = 64 * 64 * 32  # voxels of a patch whose step is always measured
UNITS = {"s": 1, "min": 60, "m": 60, "h": 3600, "d": 86400}


class StepTime(NamedTuple):
    """Seconds of a training step."""

    seconds: float
    basis: str  # how they are known


def seconds_of(text: str) -> float:
    """Return the seconds of `8h`, `90min`, `1.5 d`. Raises UserError."""
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)\s*(s|min|m|h|d)", text.strip().lower())
    if match is None or not float(match[1]):
        raise UserError(f"time={text}: give an amount and a unit, min, h or d, e.g. time=8h")
    return float(match[1]) * UNITS[match[2]]


def is_here(config: Config) -> bool:
    """Return whether the device that a config is for is in this machine."""
    return build.device_type(config) == "cpu" or torch.cuda.is_available()


def step_time(config: Config) -> StepTime:
    """Return what a step of a config takes here: measured, or for a long one extrapolated from a smaller patch."""
    voxels = prod(config.data.patch)
    smaller = shrunk(config)
    if smaller is None:
        return StepTime(measured_step(config), "measured")
    small = measured_step(smaller)
    smaller_voxels = prod(smaller.data.patch)
    seconds = small * voxels / smaller_voxels
    if seconds <= PATIENCE:
        return StepTime(measured_step(config), "measured")
    size = "x".join(map(str, smaller.data.patch))
    return StepTime(seconds, f"extrapolated from a measured step on patches of {size}")


def shrunk(config: Config) -> Config | None:
    """Return the config with a patch of a few voxels, which leaves more than one of each map; None for a small one."""
    patch = list(config.data.patch)
    while prod(patch) > SMALL:
        axis = patch.index(max(patch))
        shorter = list(patch)
        shorter[axis] //= 2
        if patch[axis] % 2 or geometry.larger_patch(shorter, config.model) != shorter:
            break
        patch = shorter
    if patch == config.data.patch:
        return None
    return replace(config, data=replace(config.data, patch=patch))


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

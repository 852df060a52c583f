"""How long a step takes on this machine, measured, and what follows: steps, learning rate, validations, mirrorings."""

import re
import time
from dataclasses import replace
from math import ceil, prod
from statistics import median

import torch

from unet3d import build
from unet3d.base.errors import UserError
from unet3d.base.progress import counting, duration
from unet3d.base.types import Batch
from unet3d.config.schema import Config
from unet3d.memory.technique import choose_technique
from unet3d.model import geometry
from unet3d.planning.draft import Draft, sizes_text
from unet3d.training import optim
from unet3d.training.step import train_step
from unet3d.training.switches import switched

WARM_UP = 1  # Steps before those that count.
STEPS = 3  # Steps that count.
PATIENCE = 20.0  # Seconds that a step may take to be measured at its own size; else a smaller one is.
SMALL = 64 * 64 * 32  # Voxels of a patch whose step is always measured.
DEFAULT_STEPS = 2000  # Without a time.
MOST_STEPS = 250_000  # nnU-Net's number.
FEW = 300  # Steps of a given time, below which a line warns.
VALIDATIONS = 2
MIRROR_SHARE = 0.1  # Of the time, at most, for validations that average over mirrorings.
FORWARD = 1 / 3  # Of the time of a step: backward takes two of them.
LONG = 10_000  # Steps from which on the learning rate is lower.
LONG_RATE = 1e-3
UNITS = {"s": 1, "min": 60, "m": 60, "h": 3600, "d": 86400}


def seconds_of(text: str) -> float:
    """Return the seconds of `8h`, `90min`, `1.5 d`. Raises UserError."""
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)\s*(s|min|m|h|d)", text.strip().lower())
    if match is None or not float(match[1]):
        raise UserError(f"time={text}: give an amount and a unit, min, h or d, e.g. time=8h")
    return float(match[1]) * UNITS[match[2]]


def is_here(config: Config) -> bool:
    """Return whether the device that a config is for is in this machine."""
    return build.device_type(config) == "cpu" or torch.cuda.is_available()


def _step_time(config: Config) -> tuple[float, str]:
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


def choose_steps(draft: Draft) -> None:
    """Choose steps and validations from a step that is measured here, if its device is."""
    if not is_here(draft.config):
        _set_steps(draft, DEFAULT_STEPS)
        reason = "the default: how long a step takes is unknown, since this machine has no such device"
        instead = "python -m unet3d plan ... time=8h, on the machine itself"
        draft.decide("steps", f"{draft.config.steps:,}", reason, instead)
        return
    seconds, basis = _step_time(draft.config)
    each = f"{seconds:.3g} s each ({basis})"
    draft.promise["step_s"] = round(seconds, 4)
    validation = _mirrored_validation(draft, _validation_seconds(draft, seconds))
    steps = DEFAULT_STEPS
    reason = f"the default without time=; {each}"
    if draft.seconds is not None:
        left = draft.seconds - VALIDATIONS * validation
        steps = max(1, min(MOST_STEPS, int(left / seconds)))
        reason = f"{each}, and {VALIDATIONS} validations of {duration(validation)} (estimated)"
    if draft.is_given("steps"):
        reason = f"as given; {each}"
    _set_steps(draft, steps)
    steps = draft.config.steps
    total = steps * seconds + ceil(steps / (draft.config.eval_every or steps)) * validation
    draft.promise["seconds"] = round(total, 1)
    draft.decide("steps", f"{steps:,}", f"{reason}: {duration(total)} in all (predicted)")
    if draft.seconds is not None and steps < FEW and not draft.is_given("steps"):
        draft.warnings.append(f"steps: {steps} in {duration(draft.seconds)} are few to learn from; give more time")


def _mirrored_validation(draft: Draft, seconds: float) -> float:
    """Choose whether validations average over mirrorings, if there is a time; return the seconds that one takes.

    `seconds` is what one takes without.
    """
    mirrorings = 2 ** len(draft.config.data.augment.mirror)
    if draft.seconds is not None and not draft.is_given("inference.mirror"):
        is_mirrored = VALIDATIONS * seconds * mirrorings <= MIRROR_SHARE * draft.seconds
        draft.set("inference.mirror", is_mirrored)
        reason = f"with {mirrorings} passes a window a validation takes {duration(seconds * mirrorings)} (estimated)"
        choice = f"inference.mirror={is_mirrored}".lower()
        draft.decide("mirrored windows", choice, reason, f"inference.mirror={not is_mirrored}".lower())
    return seconds * mirrorings if draft.config.inference.mirror else seconds


def _set_steps(draft: Draft, steps: int) -> None:
    draft.set("steps", steps)
    draft.set("eval_every", ceil(draft.config.steps / VALIDATIONS))


def choose_rate(draft: Draft) -> None:
    """Choose the learning rate of AdamW's one cycle by the number of steps."""
    if draft.is_given("optim.lr", "optim.name", "optim.schedule"):
        draft.decide("learning rate", f"{draft.config.optim.lr:g}", "as given")
        return
    rate = draft.config.optim.lr
    if draft.config.steps >= LONG:
        rate = min(rate, LONG_RATE)
    draft.set("optim.lr", rate)
    kind = f"{draft.config.optim.name}, {draft.config.optim.schedule}"
    length = f"fewer than {LONG:,} steps" if draft.config.steps < LONG else f"{LONG:,} steps or more"
    reason = f"{kind}, of {length} (a rule of thumb, not measured)"
    draft.decide("learning rate", f"{rate:g}", reason, f"optim.lr={rate / 3:.2g}")


def _validation_seconds(draft: Draft, step_seconds: float) -> float:
    """Return the estimated seconds of a validation without mirrorings: its windows' forward passes."""
    config = draft.config
    patch = config.data.patch
    of_window = FORWARD * step_seconds / (config.batch * config.accumulate)
    stride = [max(1.0, (1 - config.inference.overlap) * size) for size in patch]
    windows = 0
    for shape, stored in draft.fingerprint.held_out:
        lengths = [round(n * mm / wanted) for n, mm, wanted in zip(shape, stored, draft.spacing, strict=True)]
        windows += prod(1 + ceil(max(0, n - p) / s) for n, p, s in zip(lengths, patch, stride, strict=True))
    return windows * of_window

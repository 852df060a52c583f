"""Decisions that follow from the time: steps, learning rate, validations, and whether these average mirrorings."""

from math import ceil, prod

from unet3d.base.progress import duration
from unet3d.planning import timing
from unet3d.planning.draft import Draft
from unet3d.planning.from_fingerprint import spacing_of

DEFAULT_STEPS = 2000  # without a time
MOST_STEPS = 250_000  # nnU-Net's number
FEW = 300  # steps of a given time, below which a line warns
VALIDATIONS = 2
MIRROR_SHARE = 0.1  # of the time, at most, for validations that average over mirrorings
FORWARD = 1 / 3  # of the time of a step: backward takes two of them
LONG = 10_000  # steps from which on the learning rate is lower
LONG_RATE = 1e-3


def choose_steps(draft: Draft) -> None:
    """Choose steps, learning rate and validations from a step that is measured here, if its device is."""
    if not timing.is_here(draft.config):
        _choose_unmeasured(draft)
        return
    step = timing.step_time(draft.config)
    draft.promise["step_s"] = round(step.seconds, 4)
    validation = _mirrored_validation(draft, _validation_seconds(draft, step.seconds))
    steps = DEFAULT_STEPS
    reason = f"the default without time=; {step.seconds:.3g} s each ({step.basis})"
    if draft.seconds is not None:
        left = draft.seconds - VALIDATIONS * validation
        steps = max(1, min(MOST_STEPS, int(left / step.seconds)))
        validations = f"{VALIDATIONS} validations of {duration(validation)} (estimated)"
        reason = f"{step.seconds:.3g} s each ({step.basis}), and {validations}"
    if draft.is_given("steps"):
        reason = f"as given; {step.seconds:.3g} s each ({step.basis})"
    _set_steps(draft, steps)
    steps = draft.config.steps
    total = steps * step.seconds + ceil(steps / (draft.config.eval_every or steps)) * validation
    draft.promise["seconds"] = round(total, 1)
    draft.decide("steps", f"{steps:,}", f"{reason}: {duration(total)} in all (predicted)")
    if draft.seconds is not None and steps < FEW and not draft.is_given("steps"):
        draft.warnings.append(f"steps: {steps} in {duration(draft.seconds)} are few to learn from; give more time")
    _choose_rate(draft)


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


def _choose_unmeasured(draft: Draft) -> None:
    """Leave the number of steps to the default: how long one takes is not known."""
    _set_steps(draft, DEFAULT_STEPS)
    reason = "the default: how long a step takes is unknown, since this machine has no such device"
    draft.decide("steps", f"{draft.config.steps:,}", reason, "python -m unet3d plan ... time=8h, on the machine itself")
    _choose_rate(draft)


def _set_steps(draft: Draft, steps: int) -> None:
    draft.set("steps", steps)
    draft.set("eval_every", ceil(draft.config.steps / VALIDATIONS))


def _choose_rate(draft: Draft) -> None:
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
    windows = 0
    spacing = spacing_of(draft)
    for shape, stored in draft.fingerprint.held_out:
        lengths = [round(n * mm / wanted) for n, mm, wanted in zip(shape, stored, spacing, strict=True)]
        stride = [max(1.0, (1 - config.inference.overlap) * size) for size in patch]
        counts = [1 + ceil(max(0, n - p) / s) for n, p, s in zip(lengths, patch, stride, strict=True)]
        windows += prod(counts)
    return windows * of_window

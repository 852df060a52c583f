"""The lines and options of a chosen step: each decision with its reason and the next best choice."""

from math import prod

from unet3d.base.progress import duration
from unet3d.base.types import mib, percent
from unet3d.model.architecture import LEAST_LENGTH
from unet3d.planning import fits
from unet3d.planning.draft import Draft, sizes_text
from unet3d.planning.for_budget import (
    BATCHES,
    FIRST_ON_CPU,
    FIRST_WIDTHS,
    LEAST_BATCH,
    LEAST_STEPS,
    SHARE_OF_DATA,
    Choice,
    voxels_of_data,
)
from unet3d.planning.from_fingerprint import shape_of, spacing_of
from unet3d.planning.sized_patches import LONGEST, MOST_LEVELS

WEIGHTS = "a quarter of the budget does not hold weights, gradients and the optimizer's state"
LARGE_PART = 0.8  # of the budget: where less is used, a line says why


def note_step(draft: Draft, choice: Choice) -> None:
    """Set the options of the chosen step, and add a line for each decision."""
    fit = choice.fit
    config = fit.config
    for name, value in (
        ("model.features", config.model.features),
        ("model.kernels", config.model.kernels),
        ("model.strides", config.model.strides),
        ("data.patch", config.data.patch),
        ("batch", config.batch),
        ("accumulate", config.accumulate),
        ("recompute", config.recompute),
        ("ckpt", config.ckpt),
        ("budget", config.budget or draft.config.budget),
    ):
        draft.set(name, value)
    _note_network(draft, choice)
    _note_patch(draft, choice)
    _note_batch(draft, choice)
    _note_schedule(draft, choice)
    _note_budget(draft, choice)
    draft.promise["device"] = draft.device
    draft.promise["peak_bytes"] = fit.step.tensors
    if fit.step.reserved:
        draft.promise["allocated_bytes"] = fits.allocated_bytes(config)
        draft.promise["reserved_bytes"] = fit.step.reserved
    draft.promise["validation_bytes"] = fit.validation_bytes


def _note_network(draft: Draft, choice: Choice) -> None:
    model = draft.config.model
    levels = choice.larger[-1].levels
    depth = len(model.features)
    deepest = [length // unit for length, unit in zip(draft.config.data.patch, levels.units, strict=True)]
    limit = f"axes of like spacing, while {LEAST_LENGTH} voxels are left"
    if depth == MOST_LEVELS:
        limit = f"{MOST_LEVELS} levels at most"
    reason = f"halved to {sizes_text(deepest)} voxels: {limit}"
    if depth == 1:
        reason = "no axis is long enough to be halved"
    instead = f"{depth - 1} levels" if depth > 2 else ""
    if draft.is_given("model.features"):
        reason = "as given"
        instead = ""
    draft.decide("levels", f"{depth}", reason, instead)
    flat = [level for level, kernel in enumerate(levels.kernels) if 1 in kernel]
    uneven = [level for level, stride in enumerate(levels.strides) if 1 in stride]
    if flat or uneven:
        kernels = f"kernels of 1 across the coarse axis at levels {_listed(flat)}" if flat else "kernels of 3"
        strides = f"strides of 1 after levels {_listed(uneven)}" if uneven else "strides of 2"
        reason = f"spacing {sizes_text([round(mm, 3) for mm in spacing_of(draft)])} mm, and lengths of the patch"
        draft.decide("kernels", f"{kernels}; {strides}", reason, "model.kernels=3 model.strides=2")
    else:
        draft.decide("kernels", "3, strides 2, at all levels", "the axes' spacings are within a factor of two")
    first = choice.first_width
    reason = "as given"
    instead = ""
    if not draft.is_given("model.features"):
        reason = _reason_of_width(draft, choice)
        instead = f"half: {first // 2}, ..." if first > 8 else f"double: {2 * first}, ..."
    draft.decide("widths", ", ".join(map(str, model.features)), reason, instead)


def _reason_of_width(draft: Draft, choice: Choice) -> str:
    if choice.first_width < FIRST_ON_CPU:
        return f"{WEIGHTS} of wider levels"
    if choice.seconds_a_voxel is not None:
        time = duration(draft.seconds or 0)
        return (
            f"the widest that allow {LEAST_STEPS} steps in {time} (measured on a small patch), not below {FIRST_ON_CPU}"
        )
    if draft.device == "cuda":
        is_full = choice.first_width == FIRST_WIDTHS[0]
        return "as nnU-Net's" if is_full else f"narrower than nnU-Net's: {WEIGHTS} of those"
    return "on a CPU half of nnU-Net's: a quarter of the work; time= may allow more"


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))


def _note_patch(draft: Draft, choice: Choice) -> None:
    patch = draft.config.data.patch
    shape = shape_of(draft)
    chosen = choice.larger[-1]
    extent = [mm / step for mm, step in zip(draft.fingerprint.foreground, spacing_of(draft), strict=True)]
    covers = f"the median volume is {sizes_text(shape)}, its foreground {sizes_text([round(n) for n in extent])}"
    instead = ""
    if draft.is_given("data.patch"):
        reason = "as given"
    elif chosen == choice.sizes[0]:
        limit = "a larger patch would be padding" if max(shape) <= LONGEST else f"{LONGEST:,} voxels an axis at most"
        reason = f"{covers}: {limit}"
    elif chosen == choice.larger[0]:
        reason = f"{covers}: the time allows no larger one"
        instead = f"{sizes_text(choice.sizes[0].patch)} with more time"
    else:
        reason = f"{covers}: the largest of its proportions that fits"
        instead = f"{sizes_text(choice.larger[-2].patch)} with more memory"
    draft.decide("patch", sizes_text(patch), reason, instead)
    if instead and any(length < whole for length, whole in zip(patch, map(round, extent), strict=True)):
        size = f"{sizes_text(patch)} is smaller than the foreground, {sizes_text([round(n) for n in extent])} voxels"
        remedy = "give more time" if chosen == choice.larger[0] else "give more memory"
        draft.warnings.append(f"patch: {size}: no patch shows all of it; {remedy}")


def _note_batch(draft: Draft, choice: Choice) -> None:
    config = choice.fit.config
    patches = config.batch * config.accumulate
    if draft.is_given("batch", "accumulate"):
        draft.decide("batch", f"{config.batch}, accumulate={config.accumulate}", "as given")
    elif config.accumulate > 1:
        parts = f"{config.batch}, accumulate={config.accumulate}"
        reason = f"{patches} patches a step for variety, one at a time, so that they may be larger"
        draft.decide("batch", parts, reason, f"batch={patches}, a smaller patch")
    else:
        reason = f"at least {LEAST_BATCH} for variety; {_limit_of_batch(draft, choice)}"
        draft.decide("batch", str(config.batch), reason, f"batch={max(1, config.batch // 2)}")


def _limit_of_batch(draft: Draft, choice: Choice) -> str:
    """Return why a step has no more patches."""
    config = choice.fit.config
    voxels = prod(config.data.patch)
    rate = choice.seconds_a_voxel
    if choice.larger[-1] != choice.larger[0]:
        return "larger patches come before more of them"
    if config.batch >= BATCHES[draft.device]:
        return f"{BATCHES[draft.device]} at most"
    if (config.batch + 1) * voxels > SHARE_OF_DATA * voxels_of_data(draft):
        return f"one more would be over {SHARE_OF_DATA:.0%} of all voxels"
    seconds = 0.0 if rate is None else (config.batch + 1) * voxels * rate * LEAST_STEPS
    if draft.seconds is not None and seconds > draft.seconds:
        return f"one more would leave fewer than {LEAST_STEPS} steps in the time"
    return "one more does not fit"


def _note_schedule(draft: Draft, choice: Choice) -> None:
    fit = choice.fit
    config = fit.config
    work = fit.step_recompute_fraction
    if config.recompute == "none" and not config.ckpt:
        reason = "the plain step fits, which computes nothing twice"
        instead = "recompute=lean, in less memory"
        draft.decide("schedule", "recompute=none", reason, instead)
        return
    schedule = f"recompute={config.recompute}" if config.recompute != "none" else f"ckpt={config.ckpt}"
    reason = f"{work:.1%} more multiplications than the plain step, which does not fit"
    if draft.is_given("recompute", "ckpt"):
        draft.decide("schedule", schedule, f"as given: {work:.1%} more multiplications than the plain step")
        return
    draft.decide("schedule", schedule, reason, "ckpt=2, which computes whole stages twice, and a smaller patch")


def _note_budget(draft: Draft, choice: Choice) -> None:
    fit = choice.fit
    kind = "reserved by the allocator" if draft.device == "cuda" else "tensors"
    size = fit.occupied_bytes
    share = percent(size, draft.budget)
    step = f"a step {mib(fit.step.limited)}, a validation window {mib(fit.validation_bytes)} MiB"
    reason = f"{step} ({kind}, predicted): {share} of {mib(draft.budget)} MiB"
    if size < LARGE_PART * draft.budget:
        reason += f"; {mib(draft.budget - size)} MiB stay unused: {_why_unused(draft, choice)}"
    draft.decide("peak", f"{mib(size)} MiB", reason)


def _why_unused(draft: Draft, choice: Choice) -> str:
    fit = choice.fit
    if draft.is_given("data.patch"):
        return "the patch is given"
    if choice.larger[-1] != choice.sizes[0]:
        if choice.larger[-1] == choice.larger[0]:
            return "the time allows no larger patch"
        return "the next larger patch does not fit"
    whole = "no larger patch lies within the median volume"
    if max(shape_of(draft)) > LONGEST:
        whole = f"a patch has {LONGEST:,} voxels an axis at most"
    if fit.config.batch >= BATCHES[draft.device]:
        return f"{whole}, and {fit.config.batch} of them are enough for a step"
    if fit.config.accumulate > 1:
        return f"{whole}, and two at once do not fit"
    return f"{whole}, and {_limit_of_batch(draft, choice)}"

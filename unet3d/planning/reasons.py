"""The lines and options of a chosen step: each decision with its reason and the next best choice."""

from math import prod

from unet3d.base.types import mib, percent
from unet3d.planning import fits
from unet3d.planning.draft import Draft, sizes_text
from unet3d.planning.fits import Fit
from unet3d.planning.for_budget import (
    BATCHES,
    FIRST_ON_CPU,
    LEAST_BATCH,
    LEAST_STEPS,
    SHARE_OF_DATA,
    Choice,
    voxels_of_data,
)
from unet3d.planning.from_fingerprint import shape_of, spacing_of

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
    _note_batch(draft, fit)
    _note_schedule(draft, choice)
    _note_budget(draft, choice)
    draft.promise["device"] = draft.device
    draft.promise["peak_bytes"] = fit.candidate.peak_bytes
    if fit.candidate.reserved_bytes:
        draft.promise["allocated_bytes"] = fits.allocated_bytes(config)
        draft.promise["reserved_bytes"] = fit.candidate.reserved_bytes
    draft.promise["validation_bytes"] = fit.validation_bytes


def _note_network(draft: Draft, choice: Choice) -> None:
    model = draft.config.model
    levels = choice.larger[-1].levels
    depth = len(model.features)
    deepest = [length // unit for length, unit in zip(draft.config.data.patch, levels.units, strict=True)]
    reason = f"axes are halved while 4 voxels are left, here {sizes_text(deepest)}, and spacings are alike"
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
        return "weights of wider levels and their state would fill a quarter of the budget"
    if choice.seconds_a_voxel is not None:
        return f"the most whose small step, measured, leaves {LEAST_STEPS} steps in the time, at least {FIRST_ON_CPU}"
    if draft.device == "cuda":
        return "nnU-Net's first 32, doubled to 320, or less where their state would fill a quarter of the budget"
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
        reason = f"{covers}: a larger patch would be padding"
    elif chosen == choice.larger[0]:
        reason = f"{covers}: the time allows no larger one"
        instead = f"{sizes_text(choice.sizes[0].patch)} with more time"
    else:
        reason = f"{covers}: the largest of its proportions that fits"
        instead = f"{sizes_text(choice.larger[-2].patch)} with more memory"
    draft.decide("patch", sizes_text(patch), reason, instead)


def _note_batch(draft: Draft, fit: Fit) -> None:
    config = fit.config
    patches = config.batch * config.accumulate
    if draft.is_given("batch", "accumulate"):
        draft.decide("batch", f"{config.batch}, accumulate={config.accumulate}", "as given")
    elif config.accumulate > 1:
        choice = f"{config.batch}, accumulate={config.accumulate}"
        reason = f"{patches} patches a step for variety, one at a time, so that they may be larger"
        draft.decide("batch", choice, reason, f"batch={patches}, a smaller patch")
    else:
        limits = f"{BATCHES[draft.device]}, {SHARE_OF_DATA:.0%} of all voxels, memory and time"
        reason = f"{LEAST_BATCH} for variety, and as many more as {limits} allow"
        draft.decide("batch", str(config.batch), reason, f"batch={max(1, config.batch // 2)}")


def _note_schedule(draft: Draft, choice: Choice) -> None:
    fit = choice.fit
    config = fit.config
    work = fit.candidate.step_recompute_fraction
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
    draft.decide("schedule", schedule, reason, "ckpt=auto, which computes whole stages twice, and a smaller patch")


def _note_budget(draft: Draft, choice: Choice) -> None:
    fit = choice.fit
    kind = "reserved by the allocator" if draft.device == "cuda" else "tensors"
    size = fit.occupied_bytes
    share = percent(size, draft.budget)
    step = f"a step {mib(fit.candidate.occupied_bytes)}, a validation window {mib(fit.validation_bytes)} MiB"
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
    most = SHARE_OF_DATA * voxels_of_data(draft) / prod(fit.config.data.patch)
    if fit.config.batch >= BATCHES[draft.device]:
        return f"the patch is the whole volume, and {fit.config.batch} of them are enough for a step"
    if fit.config.batch + 1 > most:
        return f"the patch is the whole volume, and one more would be over {SHARE_OF_DATA:.0%} of all data"
    if fit.config.accumulate > 1:
        return "the patch is the whole volume, and two at once do not fit"
    return "the patch is the whole volume, and one more does not fit, or takes too much of the time"

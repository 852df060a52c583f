"""The whole plan, and its decisions that follow from the budget: precision, widths, patch, batch, and schedule."""

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from math import inf, prod
from operator import attrgetter

import torch

from unet3d.base.errors import UserError
from unet3d.base.fit import fit
from unet3d.base.progress import counting, duration
from unet3d.base.types import mib, percent, sizes_text
from unet3d.config import rules
from unet3d.config.schema import Config
from unet3d.model import half_precision
from unet3d.model.architecture import LEAST_LENGTH, Levels
from unet3d.planning import plan, steps
from unet3d.planning.fingerprint import Fingerprint
from unet3d.planning.plan import Draft, changed, with_options
from unet3d.planning.steps import SizedPatch, Step, by_schedule, predicted_step, state_bytes

FIRST_WIDTHS = (32, 24, 16, 8)  # Channels of the first level, in order of preference.
FIRST_ON_CPU = 16  # Without a time.
MOST_WIDTH = 10  # Times the first width: 320 for 32.
STATE_SHARE = 0.25  # Of the budget, at most for weights, gradients and the optimizer's state.
BATCHES = {"cpu": 4, "cuda": 16}  # Patches a step at most: on a CPU more steps are worth more.
SHARE_OF_DATA = 0.05  # Of all voxels, that a batch has at most.
LEAST_STEPS = 900  # In the given time, before patch and batch grow and the network is made wider.
SLOWER_BY_AMP = 1.1  # Times float32's time, at most, for half the bytes of activations.
LEAN_OF_TILES = 1.15  # Bytes of a step with recompute=lean, at least, for each of recompute=tiles.
SHARE_BY_TILES = 0.25  # First guess of the bytes a voxel that recompute=tiles leaves of the plain step's.
LARGE_PART = 0.8  # Of the budget: where less is used, a line says why.
WEIGHTS = "a quarter of the budget does not hold weights, gradients and the optimizer's state"


def make_plan(
    config: Config,
    given: Collection[str],
    fingerprint: Fingerprint,
    budget: int,
    seconds: float | None = None,
) -> Draft:
    """Return the plan of a run in `budget` bytes and, if given, this many seconds; `given` options stay as they are.

    Raises UserError where no patch fits.
    """
    model = replace(config.model, **fingerprint.model)
    draft = Draft(replace(config, model=model), given, fingerprint, budget, seconds)
    draft.set("model.activation", "leaky_relu")
    plan.choose_spacing(draft)
    plan.choose_intensity(draft)
    plan.choose_mirrors(draft)
    plan.choose_rotation(draft)
    choose_precision(draft)
    choose_step(draft)
    plan.choose_steps(draft)
    plan.choose_rate(draft)
    return draft


def choose_precision(draft: Draft) -> None:
    """Choose mixed precision: on CUDA always, on a CPU by the time of a small step."""
    if draft.is_given("amp"):
        draft.decide("precision", f"amp={draft.config.amp}".lower(), "as given")
        return
    gain = ""
    if draft.device == "cuda":
        gain = ", and the time of tensor cores"
    elif half_precision.has_kernels(torch.bfloat16):
        gain = "; this CPU computes in bf16"
    if gain:
        draft.set("amp", True)
        draft.decide("precision", "amp=true, bf16", f"half the bytes of activations{gain}", "amp=false")
        return
    widths = [width for width in _first_widths(draft) if width >= FIRST_ON_CPU]
    config = by_schedule(with_patch(draft, widths[-1], _small(_sizes(draft))), "none")
    seconds, seconds_by_amp = (steps.measured_step(replace(config, amp=amp)) for amp in (False, True))
    is_worth = seconds_by_amp <= SLOWER_BY_AMP * seconds
    draft.set("amp", is_worth)
    time = f"a small step takes {seconds_by_amp / seconds:.2f} times float32's time on this CPU (measured)"
    choice, instead = (f"amp={amp}".lower() for amp in (is_worth, not is_worth))
    draft.decide("precision", choice, f"half the bytes of activations; {time}", instead)


def _sizes(draft: Draft) -> list[SizedPatch]:
    """Return the patches to choose from, the largest first. Raises UserError where no run takes any of them."""
    config = draft.config
    levels = len(config.model.features) if draft.is_given("model.features") else None
    if draft.is_given("data.patch"):
        first = steps.sized_patches(draft.spacing, config.data.patch, levels)[0]
        x, y, z = config.data.patch
        return [SizedPatch((x, y, z), first.levels)]
    sizes = steps.sized_patches(draft.spacing, draft.shape, levels)
    taken = []
    for size in sizes:
        with suppress(UserError):
            with_patch(draft, _first_widths(draft)[0], size)
            taken.append(size)
    return taken or sizes[:1]


def _first_widths(draft: Draft) -> list[int]:
    """Return the channels of the first level to choose from, in order of preference: those that groups divide."""
    model = draft.config.model
    divisor = model.groups if model.norm == "group" else 1
    if model.widen == "second":
        divisor *= 2
    return [width for width in FIRST_WIDTHS if width % divisor == 0] or list(FIRST_WIDTHS)


def _small(sizes: Sequence[SizedPatch]) -> SizedPatch:
    """Return the largest patch whose step is short on any machine."""
    return next((size for size in sizes if size.voxels <= steps.SMALL), sizes[-1])


def with_patch(draft: Draft, first_width: int, size: SizedPatch) -> Config:
    """Return the config with a patch, and the network that suits it. Raises UserError for what no run takes."""
    most = MOST_WIDTH * first_width
    features = [min(most, first_width * 2**level) for level in range(len(size.levels.kernels))]
    options = {"model.features": features, **steps.level_options(size.levels)}
    config = with_options(changed(draft.config, "data.patch", list(size.patch)), options, draft.given)
    rules.check(config, here=False)
    return config


def choose_step(draft: Draft) -> None:
    """Choose widths, patch, batch and schedule together: the largest patch that fits, then the cheapest step of it.

    Raises UserError where no patch fits.
    """
    sizes = _sizes(draft)
    width, reason_of_width, rate = _first_width(draft, sizes)
    sizes_in_time = sizes
    if rate is not None and draft.seconds is not None:
        most_voxels = draft.seconds / LEAST_STEPS / (steps.LEAST_BATCH * rate)
        sizes_in_time = [size for size in sizes if size.voxels <= most_voxels] or sizes[-1:]
    step, size = _largest_step(draft, width, sizes_in_time)
    limit = "larger patches come before more of them"
    if size == sizes_in_time[0]:
        step, limit = _grown(draft, step, rate)
    config = step.config
    of_network = ("model.features", "model.kernels", "model.strides", "data.patch")
    for name in (*of_network, "batch", "accumulate", "recompute", "ckpt"):
        draft.set(name, attrgetter(name)(config))
    draft.set("budget", config.budget or draft.config.budget)
    _decide_network(draft, size.levels, width, reason_of_width)
    unused = _decide_patch(draft, size, sizes_in_time, sizes)
    unused_by_batch = _decide_batch(draft, limit)
    if size == sizes[0] and not draft.is_given("data.patch"):
        unused = f"{unused}, and {unused_by_batch}"
    _decide_schedule(draft, step)
    _promise(draft, step, unused)


def _first_width(draft: Draft, sizes: Sequence[SizedPatch]) -> tuple[int, str, float | None]:
    """Return the channels of the first level, the most for which memory and time allow, why, and the pace with them.

    The pace is the seconds of a step for each voxel of its batch, measured on a small patch; None without a time, or
    where the device is not here.
    """
    small = _small(sizes)
    seconds = draft.seconds if steps.is_here(draft.config) else None

    @cache
    def pace(width: int) -> float:
        config = by_schedule(with_patch(draft, width, small), "none")
        return steps.measured_step(replace(config, batch=1, accumulate=1)) / small.voxels

    widths = _first_widths(draft)
    if draft.is_given("model.features"):
        return FIRST_WIDTHS[0], "as given", None if seconds is None else pace(widths[0])
    narrowest = widths[-1]
    widths = [width for width in widths if width >= FIRST_ON_CPU]
    reason = ""
    if seconds is not None:
        most = seconds / (LEAST_STEPS * BATCHES[draft.device] * sizes[0].voxels)
        widths = [width for width in widths if pace(width) <= most] or widths[-1:]
        time = f"{LEAST_STEPS} steps in {duration(seconds)}"
        reason = f"the widest that allow {time} (measured on a small patch), not below {FIRST_ON_CPU}"
    elif draft.device == "cpu":
        widths = widths[-1:]
        reason = "on a CPU half of nnU-Net's: a quarter of the work; time= may allow more"
    middle = sizes[len(sizes) // 2]
    limit = STATE_SHARE * draft.budget
    for width in (*widths, narrowest):
        if state_bytes(with_patch(draft, width, middle))[0] <= limit:
            break
    if width < FIRST_ON_CPU:
        reason = f"{WEIGHTS} of wider levels"
    elif not reason:
        reason = "as nnU-Net's" if width == FIRST_WIDTHS[0] else f"narrower than nnU-Net's: {WEIGHTS} of those"
    return width, reason, None if seconds is None else pace(width)


def _largest_step(draft: Draft, width: int, sizes: Sequence[SizedPatch]) -> tuple[Step, SizedPatch]:
    """Return the step of the largest patch that fits by the given schedule, or the cheapest one, and that patch.

    `sizes`: the largest first. Raises UserError where none fits.
    """
    are_parts_given = draft.is_given("batch", "accumulate")
    batch = {"batch": steps.LEAST_BATCH, "accumulate": 1}
    draft_at_once = replace(draft, config=with_options(draft.config, batch, draft.given))

    def at_once(size: SizedPatch) -> Config:
        return with_patch(draft_at_once, width, size)

    def in_parts(size: SizedPatch) -> Config:
        config = at_once(size)
        return config if are_parts_given else replace(config, batch=1, accumulate=steps.LEAST_BATCH)

    if draft.is_given("recompute", "ckpt"):
        size = _largest(draft, sizes, at_once, lambda size: draft.budget * size.voxels / sizes[0].voxels)
        return predicted_step(at_once(size)), size
    plain = predicted_step(by_schedule(at_once(sizes[0]), "none"))
    if plain.limited <= draft.budget:
        return plain, sizes[0]
    state, _ = state_bytes(plain.config)
    of_patch = SHARE_BY_TILES * (plain.step.tensors - state) * in_parts(sizes[0]).batch / plain.config.batch
    size = _largest(
        draft,
        sizes,
        lambda size: by_schedule(in_parts(size), "tiles"),
        lambda size: state + of_patch * size.voxels / sizes[0].voxels,
    )
    configs = [at_once(size), in_parts(size)] if size == sizes[0] else [in_parts(size)]
    return _cheapest(configs, draft.budget), size


def _largest(
    draft: Draft,
    sizes: Sequence[SizedPatch],
    make: Callable[[SizedPatch], Config],
    guess: Callable[[SizedPatch], float],
) -> SizedPatch:
    """Return the largest patch whose step fits; `guess` says about how many bytes one needs.

    Raises UserError where none fits.
    """
    with counting("patches") as counter:

        def measure(size: SizedPatch) -> int:
            needed = predicted_step(make(size)).limited
            counter.advance()
            return needed

        number = fit(sizes, measure, draft.budget, guess)
    if number is None:
        smallest = sizes_text(sizes[-1].patch)
        raise UserError(f"budget={mib(draft.budget)} MiB: no patch fits, not even {smallest}; give a larger budget")
    return sizes[number]


def _cheapest(configs: Sequence[Config], budget: int) -> Step:
    """Return the step that fits and costs the least time, recomputing nothing, little, or what it must.

    `configs` differ in their batches, the preferred one first; the last fits with recompute=tiles.
    """
    plans = {"none": None, "lean": budget, "auto": budget, "tiles": None}
    ways = [by_schedule(config, plan, limit) for config in configs for plan, limit in plans.items()]

    def measure(way: Config) -> float:
        if way.recompute == "lean" and predicted_step(by_schedule(way, "tiles")).step.limited * LEAN_OF_TILES > budget:
            return inf
        return predicted_step(way).limited

    number = fit(ways, measure, budget)
    assert number is not None, "the last way has been measured"
    return predicted_step(ways[number])


def _grown(draft: Draft, step: Step, rate: float | None) -> tuple[Step, str]:
    """Return the step with as many patches as fit, are useful and leave time for enough steps, and why not more."""
    config = step.config
    voxels = prod(config.data.patch)
    voxels_of_data = prod(draft.shape) * draft.fingerprint.training_cases
    limits = {f"{BATCHES[draft.device]} at most": BATCHES[draft.device]}
    limits[f"one more would be over {SHARE_OF_DATA:.0%} of all voxels"] = int(SHARE_OF_DATA * voxels_of_data / voxels)
    if rate is not None and draft.seconds is not None:
        most = int(draft.seconds / LEAST_STEPS / (voxels * rate))
        limits[f"one more would leave fewer than {LEAST_STEPS} steps in the time"] = most
    of_patch = max(1, (step.limited - state_bytes(config)[0]) // config.batch)
    most = min(limits.values())
    if not draft.is_given("batch", "accumulate") and config.accumulate == 1 and step.limited + of_patch <= draft.budget:
        batches = range(most, config.batch, -1)
        number = fit(
            batches,
            lambda batch: predicted_step(replace(config, batch=batch)).limited,
            draft.budget,
            lambda batch: step.limited + (batch - config.batch) * of_patch,
        )
        if number is not None:
            step = predicted_step(replace(config, batch=batches[number]))
    reached = [reason for reason, most in limits.items() if step.config.batch >= most]
    return step, (*reached, "one more does not fit")[0]


def _decide_network(draft: Draft, levels: Levels, first_width: int, reason_of_width: str) -> None:
    """Add the lines of levels, kernels and widths."""
    features = draft.config.model.features
    depth = len(features)
    deepest = [length // unit for length, unit in zip(draft.config.data.patch, levels.units, strict=True)]
    limit = f"axes of like spacing, while {LEAST_LENGTH} voxels are left"
    if depth == steps.MOST_LEVELS:
        limit = f"{steps.MOST_LEVELS} levels at most"
    reason = f"halved to {sizes_text(deepest)} voxels: {limit}"
    if depth == 1:
        reason = "no axis is long enough to be halved"
    fewer = f"{depth - 1} levels" if depth > 2 else ""
    other = f"half: {first_width // 2}, ..." if first_width > 8 else f"double: {2 * first_width}, ..."
    if draft.is_given("model.features"):
        reason = "as given"
        fewer = other = ""
    draft.decide("levels", f"{depth}", reason, fewer)
    flat = [str(level) for level, kernel in enumerate(levels.kernels) if 1 in kernel]
    uneven = [str(level) for level, stride in enumerate(levels.strides) if 1 in stride]
    if flat or uneven:
        kernels = f"kernels of 1 across the coarse axis at levels {', '.join(flat)}" if flat else "kernels of 3"
        strides = f"strides of 1 after levels {', '.join(uneven)}" if uneven else "strides of 2"
        reason = f"spacing {sizes_text([round(mm, 3) for mm in draft.spacing])} mm, and lengths of the patch"
        draft.decide("kernels", f"{kernels}; {strides}", reason, "model.kernels=3 model.strides=2")
    else:
        draft.decide("kernels", "3, strides 2, at all levels", "the axes' spacings are within a factor of two")
    draft.decide("widths", ", ".join(map(str, features)), reason_of_width, other)


def _decide_patch(draft: Draft, size: SizedPatch, in_time: Sequence[SizedPatch], sizes: Sequence[SizedPatch]) -> str:
    """Add the line of the patch, of those that the time allows and of all; return why it leaves memory unused."""
    patch = sizes_text(size.patch)
    extent = [round(mm / step) for mm, step in zip(draft.fingerprint.foreground, draft.spacing, strict=True)]
    covers = f"the median volume is {sizes_text(draft.shape)}, its foreground {sizes_text(extent)}"
    larger = None
    remedy = ""
    if draft.is_given("data.patch"):
        limit = "the patch is given"
    elif size == sizes[0]:
        limit = "a larger patch would be padding"
        if max(draft.shape) > steps.LONGEST:
            limit = f"a patch has {steps.LONGEST:,} voxels an axis at most"
    elif size == in_time[0]:
        limit = "the time allows no larger patch"
        larger = sizes[0]
        remedy = "more time"
    else:
        limit = "the next larger one of these proportions does not fit"
        larger = in_time[in_time.index(size) - 1]
        remedy = "more memory"
    reason = "as given" if draft.is_given("data.patch") else f"{covers}: {limit}"
    instead = f"{sizes_text(larger.patch)} with {remedy}" if larger else ""
    draft.decide("patch", patch, reason, instead)
    if remedy and any(length < whole for length, whole in zip(size.patch, extent, strict=True)):
        problem = f"{patch} is smaller than the foreground, {sizes_text(extent)} voxels: no patch shows all of it"
        draft.warnings.append(f"patch: {problem}; give {remedy}")
    return limit


def _decide_batch(draft: Draft, limit: str) -> str:
    """Add the line of the batch, which has no more patches because of a limit; return why it leaves memory unused."""
    batch = draft.config.batch
    accumulate = draft.config.accumulate
    if draft.is_given("batch", "accumulate"):
        draft.decide("batch", f"{batch}, accumulate={accumulate}", "as given")
    elif accumulate > 1:
        patches = batch * accumulate
        reason = f"{patches} patches a step for variety, one at a time, so that they may be larger"
        draft.decide("batch", f"{batch}, accumulate={accumulate}", reason, f"batch={patches}, a smaller patch")
    else:
        reason = f"at least {steps.LEAST_BATCH} for variety; {limit}"
        draft.decide("batch", str(batch), reason, f"batch={max(1, batch // 2)}")
    if batch >= BATCHES[draft.device]:
        return f"{batch} patches are enough for a step"
    return "two at once do not fit" if accumulate > 1 else limit


def _decide_schedule(draft: Draft, step: Step) -> None:
    """Add the line of the schedule."""
    config = step.config
    if config.recompute == "none" and not config.ckpt:
        reason = "the plain step fits, which computes nothing twice"
        draft.decide("schedule", "recompute=none", reason, "recompute=lean, in less memory")
        return
    schedule = f"recompute={config.recompute}" if config.recompute != "none" else f"ckpt={config.ckpt}"
    work = f"{step.repeated:.1%} more multiplications than the plain step"
    if draft.is_given("recompute", "ckpt"):
        draft.decide("schedule", schedule, f"as given: {work}")
    else:
        instead = "ckpt=2, which computes whole stages twice, and a smaller patch"
        draft.decide("schedule", schedule, f"{work}, which does not fit", instead)


def _promise(draft: Draft, step: Step, unused: str) -> None:
    """Add the line of the peak, and what the plan promises of it; `unused`: why more of the budget is not used."""
    kind = "reserved by the allocator" if draft.device == "cuda" else "tensors"
    sizes = f"a step {mib(step.step.limited)}, a validation window {mib(step.validation_bytes)} MiB"
    reason = f"{sizes} ({kind}, predicted): {percent(step.limited, draft.budget)} of {mib(draft.budget)} MiB"
    if step.limited < LARGE_PART * draft.budget:
        reason += f"; {mib(draft.budget - step.limited)} MiB stay unused: {unused}"
    draft.decide("peak", f"{mib(step.limited)} MiB", reason)
    draft.promise |= {"device": draft.device, "peak_bytes": step.step.tensors, **step.step.of_allocator}
    draft.promise["validation_bytes"] = step.validation_bytes

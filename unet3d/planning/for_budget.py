"""Decisions that follow from the budget: precision, widths, patch, batch and the schedule of the step."""

from dataclasses import replace
from math import prod
from typing import NamedTuple

import torch

from unet3d.base.errors import UserError
from unet3d.base.types import mib
from unet3d.config import rules
from unet3d.config.schema import Config
from unet3d.model import geometry, half_precision
from unet3d.planning import fits, timing
from unet3d.planning.draft import Draft, sizes_text
from unet3d.planning.fits import Fit
from unet3d.planning.from_fingerprint import shape_of, spacing_of
from unet3d.planning.sized_patches import SizedPatch, sized_patches

FIRST_WIDTHS = (32, 24, 16, 8)  # channels of the first level, in order of preference
FIRST_ON_CPU = 16  # without a time
MOST_WIDTH = 10  # times the first width: 320 for 32
STATE_SHARE = 0.25  # of the budget, at most for weights, gradients and the optimizer's state
BATCHES = {"cpu": 4, "cuda": 16}  # patches a step at most: on a CPU more steps are worth more
LEAST_BATCH = 2  # patches a step: their variety is worth more than a larger patch
SHARE_OF_DATA = 0.05  # of all voxels, that a batch has at most
LEAST_STEPS = 900  # in the given time, before patch and batch grow and the network is made wider
SLOWER_BY_AMP = 1.1  # times float32's time, at most, for half the bytes of activations


def choose_precision(draft: Draft) -> None:
    """Choose mixed precision: on CUDA always, on a CPU by the time of a small step."""
    if draft.is_given("amp"):
        draft.decide("precision", _amp(draft.config.amp), "as given")
        return
    if draft.device == "cuda":
        draft.set("amp", True)
        reason = "half the bytes of activations, and the time of tensor cores"
        draft.decide("precision", "amp=true, bf16", reason, "amp=false")
        return
    if half_precision.has_kernels(torch.bfloat16):
        draft.set("amp", True)
        reason = "half the bytes of activations; this CPU computes in bf16"
        draft.decide("precision", "amp=true, bf16", reason, "amp=false")
        return
    sizes = _sizes(draft)
    widths = [width for width in _first_widths(draft) if width >= FIRST_ON_CPU]
    small = with_patch(draft, widths[-1], _small(sizes))
    config = fits.plain(small)
    seconds = timing.measured_step(replace(config, amp=False))
    seconds_by_amp = timing.measured_step(replace(config, amp=True))
    ratio = seconds_by_amp / seconds
    is_worth = ratio <= SLOWER_BY_AMP
    draft.set("amp", is_worth)
    reason = (
        f"half the bytes of activations; a small step takes {ratio:.2f} times float32's time on this CPU (measured)"
    )
    draft.decide("precision", _amp(is_worth), reason, _amp(not is_worth))


def _amp(is_on: bool) -> str:
    """Return the option as the command line has it."""
    return "amp=true" if is_on else "amp=false"


def _sizes(draft: Draft) -> list[SizedPatch]:
    """Return the patches to choose from, the largest first. Raises UserError where no run takes any of them."""
    config = draft.config
    spacing = spacing_of(draft)
    levels = None
    if draft.is_given("model.features"):
        levels = len(config.model.features)
    if draft.is_given("data.patch"):
        first = sized_patches(spacing, config.data.patch, levels)[0]
        x, y, z = config.data.patch
        return [SizedPatch((x, y, z), first.levels)]
    sizes = sized_patches(spacing, shape_of(draft), levels)
    return [size for size in sizes if _is_taken(draft, size)] or sizes[:1]


def _is_taken(draft: Draft, size: SizedPatch) -> bool:
    """Return whether a run takes a patch, beside the options that are given."""
    try:
        with_patch(draft, _first_widths(draft)[0], size)
    except UserError:
        return False
    return True


def _first_widths(draft: Draft) -> list[int]:
    """Return the channels of the first level to choose from, in order of preference: those that groups divide."""
    model = draft.config.model
    divisor = model.groups if model.norm == "group" else 1
    if model.widen == "second":
        divisor *= 2
    return [width for width in FIRST_WIDTHS if width % divisor == 0] or list(FIRST_WIDTHS)


def _small(sizes: list[SizedPatch]) -> SizedPatch:
    """Return the largest patch whose step is short on any machine."""
    for size in sizes:
        if size.voxels <= timing.SMALL:
            return size
    return sizes[-1]


def with_patch(draft: Draft, first_width: int, size: SizedPatch) -> Config:
    """Return the config with a patch, and the network that suits it. Raises UserError for what no run takes."""
    config = draft.config
    model = config.model
    levels = size.levels
    if not draft.is_given("model.features"):
        model = replace(model, features=_widths(first_width, len(levels.kernels)))
    if not draft.is_given("model.kernels"):
        model = replace(model, kernels=plain_sizes(levels.kernels, 3))
    if not draft.is_given("model.strides"):
        model = replace(model, strides=plain_sizes(levels.strides, 2))
    data = replace(config.data, patch=list(size.patch))
    config = replace(config, model=model, data=data)
    rules.check(config, here=False)
    return config


def _widths(first: int, levels: int) -> list[int]:
    """Return the channels of each level: twice those of the level before, up to a limit."""
    most = MOST_WIDTH * first
    return [min(most, first * 2**level) for level in range(levels)]


def plain_sizes(triples: list[geometry.Triple], usual: int) -> int | list[list[int]]:
    """Return the usual size where all are it, else a list of them."""
    if all(set(triple) == {usual} for triple in triples):
        return usual
    return [list(triple) for triple in triples]


class Choice(NamedTuple):
    """The step that was chosen, and what it was chosen from."""

    fit: Fit
    first_width: int
    larger: list[SizedPatch]  # patches from the largest that the time allows down to the chosen one
    sizes: list[SizedPatch]  # all, the largest first
    seconds_a_voxel: float | None  # of a plain step on a small patch, measured; None where it is not known


def choose_step(draft: Draft) -> Choice:
    """Return widths, patch, batch and schedule together: the largest patch that fits, then the cheapest step of it.

    Raises UserError where no patch fits.
    """
    whole_sizes = _sizes(draft)
    rates = _seconds_a_voxel(draft, whole_sizes)
    width = _first_width(draft, whole_sizes, rates)
    rate = rates.get(width)
    sizes = _in_time(draft, whole_sizes, rate)
    batch = draft.config.batch if draft.is_given("batch") else LEAST_BATCH
    accumulate = draft.config.accumulate if draft.is_given("accumulate") else 1
    config_of_batch = replace(draft.config, batch=batch, accumulate=accumulate)
    whole = replace(draft, config=config_of_batch)

    def make(size: SizedPatch) -> Config:
        return with_patch(whole, width, size)

    def make_in_parts(size: SizedPatch) -> Config:
        config = make(size)
        if draft.is_given("batch", "accumulate"):
            return config
        return replace(config, batch=1, accumulate=LEAST_BATCH)

    fit: Fit | None = None
    size: SizedPatch | None = sizes[0]
    if draft.is_given("recompute", "ckpt"):
        size = fits.largest_as_given(sizes, make, draft.budget)
        fit = None if size is None else fits.fit_of(make(size))
    else:
        fit = fits.fit_of(fits.plain(make(sizes[0])))
        if fit.occupied_bytes > draft.budget:
            fit = None
            size = fits.largest_recomputed(sizes, make_in_parts, draft.budget)
    if size is None:
        smallest = sizes_text(sizes[-1].patch)
        raise UserError(f"budget={mib(draft.budget)} MiB: no patch fits, not even {smallest}; give a larger budget")
    if fit is None and size == sizes[0]:
        fit = fits.cheapest(make(size), draft.budget)  # no patch is larger: all patches of a step at once
    if fit is None:
        fit = fits.cheapest(make_in_parts(size), draft.budget)
    assert fit is not None, "one step with this patch fits"
    if size == sizes[0] and fit.config.accumulate == whole.config.accumulate:
        fit = _grown(draft, fit, rate)
    larger = sizes[: sizes.index(size) + 1]
    return Choice(fit, width, larger, whole_sizes, rate)


def _seconds_a_voxel(draft: Draft, sizes: list[SizedPatch]) -> dict[int, float]:
    """Return the seconds of a step for each voxel of its batch, by first width, measured on a small patch.

    {} without a time, or where the device is not here.
    """
    if draft.seconds is None or not timing.is_here(draft.config):
        return {}
    small = _small(sizes)
    widths = _first_widths(draft)
    if draft.is_given("model.features"):
        widths = widths[:1]
    rates = {}
    for width in widths:
        config = fits.plain(with_patch(draft, width, small))
        seconds = timing.measured_step(replace(config, batch=1, accumulate=1))
        rates[width] = seconds / small.voxels
    return rates


def _first_width(draft: Draft, sizes: list[SizedPatch], rates: dict[int, float]) -> int:
    """Return the channels of the first level: the most for which memory and time allow."""
    if draft.is_given("model.features"):
        return FIRST_WIDTHS[0]
    allowed = _first_widths(draft)
    widths = [width for width in allowed if width >= FIRST_ON_CPU]
    if rates and draft.seconds is not None:
        voxels = LEAST_STEPS * BATCHES[draft.device] * sizes[0].voxels
        enough = [width for width in widths if draft.seconds >= voxels * rates[width]]
        widths = enough or widths[-1:]
    elif draft.device == "cpu":
        widths = widths[-1:]
    middle = sizes[len(sizes) // 2]
    least = allowed[-1]
    for width in (*widths, least):
        config = with_patch(draft, width, middle)
        if fits.state_bytes(config) <= STATE_SHARE * draft.budget:
            return width
    return least


def _in_time(draft: Draft, sizes: list[SizedPatch], rate: float | None) -> list[SizedPatch]:
    """Return the patches of which the given time allows enough steps; the smallest where it allows none."""
    if rate is None or draft.seconds is None:
        return sizes
    seconds_of_step = draft.seconds / LEAST_STEPS
    most_voxels = seconds_of_step / (LEAST_BATCH * rate)
    in_time = [size for size in sizes if size.voxels <= most_voxels]
    return in_time or sizes[-1:]


def _grown(draft: Draft, fit: Fit, rate: float | None) -> Fit:
    """Return the step with as many patches as fit, are useful and leave time for enough steps.

    The first number tried follows from the bytes of a patch; from there it goes up or down by one.
    """
    if draft.is_given("batch", "accumulate"):
        return fit
    batch = fit.config.batch
    voxels = prod(fit.config.data.patch)
    share_of_data = SHARE_OF_DATA * voxels_of_data(draft)
    limits = [BATCHES[draft.device], int(share_of_data / voxels)]
    if rate is not None and draft.seconds is not None:
        seconds_of_step = draft.seconds / LEAST_STEPS
        limits.append(int(seconds_of_step / (voxels * rate)))
    of_all_patches = fit.occupied_bytes - fits.state_bytes(fit.config)
    of_patch = max(1, of_all_patches // batch)
    room = draft.budget - fit.occupied_bytes
    most = min(limits)
    known = {batch: fit}
    number = max(batch, min(most, batch + int(room / of_patch)))
    while number not in known and number <= most:
        known[number] = fits.fit_of(replace(fit.config, batch=number))
        number += 1 if known[number].occupied_bytes <= draft.budget else -1
    fitting = [number for number, grown in known.items() if grown.occupied_bytes <= draft.budget]
    return known[max(fitting)]


def voxels_of_data(draft: Draft) -> float:
    """Return the voxels of all training cases at the spacing that the network sees, by their median."""
    voxels_of_case = prod(shape_of(draft))
    return voxels_of_case * draft.fingerprint.training_cases

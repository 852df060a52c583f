"""Decisions that follow from the budget: precision, widths, patch, batch and the schedule of the step."""

from dataclasses import replace
from math import prod
from typing import NamedTuple

import torch

from unet3d.base.errors import UserError
from unet3d.base.types import mib
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
LEAST_STEPS = 1000  # in the given time, before patch and batch grow
STEPS_FOR_WIDTH = 2000  # in the given time, before the network is made wider
SLOWER_BY_AMP = 1.1  # times float32's time, at most, for half the bytes of maps


def choose_precision(draft: Draft) -> None:
    """Choose mixed precision: on CUDA always, on a CPU by the time of a small step."""
    if draft.is_given("amp"):
        draft.decide("precision", f"amp={draft.config.amp}".lower(), "as given")
        return
    if draft.device == "cuda":
        draft.set("amp", True)
        draft.decide("precision", "amp=true, bf16", "half the bytes of maps, and the time of tensor cores", "amp=false")
        return
    if half_precision.has_kernels(torch.bfloat16):
        draft.set("amp", True)
        draft.decide("precision", "amp=true, bf16", "half the bytes of maps; this CPU computes in bf16", "amp=false")
        return
    small = with_patch(draft, FIRST_ON_CPU, _small(_sizes(draft)))
    seconds = {amp: timing.measured_step(replace(fits.plain(small), amp=amp)) for amp in (False, True)}
    ratio = seconds[True] / seconds[False]
    is_worth = ratio <= SLOWER_BY_AMP
    draft.set("amp", is_worth)
    reason = f"half the bytes of maps; a small step takes {ratio:.2f} times float32's time on this CPU (measured)"
    draft.decide("precision", f"amp={is_worth}".lower(), reason, f"amp={not is_worth}".lower())


def _sizes(draft: Draft) -> list[SizedPatch]:
    """Return the patches to choose from, the largest first."""
    config = draft.config
    levels = len(config.model.features) if draft.is_given("model.features") else None
    if draft.is_given("data.patch"):
        sizes = sized_patches(spacing_of(draft), config.data.patch, levels)
        x, y, z = config.data.patch
        return [SizedPatch((x, y, z), sizes[0].levels)]
    return sized_patches(spacing_of(draft), shape_of(draft), levels)


def _small(sizes: list[SizedPatch]) -> SizedPatch:
    """Return the largest patch whose step is short on any machine."""
    return next((size for size in sizes if size.voxels <= timing.SMALL), sizes[-1])


def with_patch(draft: Draft, first_width: int, size: SizedPatch) -> Config:
    """Return the config with a patch, and the network that suits it."""
    config = draft.config
    model = config.model
    if not draft.is_given("model.features"):
        levels = range(len(size.levels.kernels))
        features = [min(MOST_WIDTH * first_width, first_width * 2**level) for level in levels]
        model = replace(model, features=features)
    if not draft.is_given("model.kernels"):
        model = replace(model, kernels=plain_sizes(size.levels.kernels, 3))
    if not draft.is_given("model.strides"):
        model = replace(model, strides=plain_sizes(size.levels.strides, 2))
    data = replace(config.data, patch=list(size.patch))
    return replace(config, model=model, data=data)


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
    rate = _seconds_a_voxel(draft, whole_sizes)
    width = _first_width(draft, whole_sizes, rate)
    sizes = _in_time(draft, whole_sizes, rate.get(width))
    batch = draft.config.batch if draft.is_given("batch") else LEAST_BATCH
    whole = replace(draft, config=replace(draft.config, batch=batch, accumulate=_accumulate(draft, 1)))

    def make(size: SizedPatch) -> Config:
        return with_patch(whole, width, size)

    def make_in_parts(size: SizedPatch) -> Config:
        config = make(size)
        return config if draft.is_given("batch", "accumulate") else replace(config, batch=1, accumulate=LEAST_BATCH)

    is_given = draft.is_given("recompute", "ckpt")
    if is_given:
        size = fits.largest_as_given(sizes, make, draft.budget)
    elif fits.fit_of(fits.plain(make(sizes[0]))).occupied_bytes <= draft.budget:
        size = sizes[0]
    else:
        size = fits.largest_recomputed(sizes, make_in_parts, draft.budget)
    if size is None:
        smallest = sizes_text(sizes[-1].patch)
        raise UserError(f"budget={mib(draft.budget)} MiB: no patch fits, not even {smallest}; give a larger budget")
    fit = fits.fit_of(make(size)) if is_given else None
    if fit is None and size == sizes[0]:
        fit = fits.cheapest(make(size), draft.budget)  # no patch is larger: all patches of a step at once
    if fit is None:
        fit = fits.cheapest(make_in_parts(size), draft.budget)
    assert fit is not None, "one step with this patch fits"
    if size == sizes[0] and fit.config.accumulate == whole.config.accumulate:
        fit = _grown(draft, fit, rate.get(width))
    return Choice(fit, width, sizes[: sizes.index(size) + 1], whole_sizes, rate.get(width))


def _accumulate(draft: Draft, usual: int) -> int:
    return draft.config.accumulate if draft.is_given("accumulate") else usual


def _seconds_a_voxel(draft: Draft, sizes: list[SizedPatch]) -> dict[int, float]:
    """Return the seconds of a step for each voxel of its batch, by first width, measured on a small patch.

    {} without a time, or where the device is not here.
    """
    if draft.seconds is None or not timing.is_here(draft.config):
        return {}
    small = _small(sizes)
    rates = {}
    widths = FIRST_WIDTHS if not draft.is_given("model.features") else FIRST_WIDTHS[:1]
    for width in widths:
        config = replace(fits.plain(with_patch(draft, width, small)), batch=1, accumulate=1)
        rates[width] = timing.measured_step(config) / small.voxels
    return rates


def _first_width(draft: Draft, sizes: list[SizedPatch], rate: dict[int, float]) -> int:
    """Return the channels of the first level: the most for which memory and time allow."""
    if draft.is_given("model.features"):
        return FIRST_WIDTHS[0]
    widths = [width for width in FIRST_WIDTHS if width >= FIRST_ON_CPU]
    if rate and draft.seconds is not None:
        voxels = sizes[0].voxels * BATCHES[draft.device]
        enough = [width for width in widths if draft.seconds >= STEPS_FOR_WIDTH * voxels * rate[width]]
        widths = enough or [FIRST_ON_CPU]
    elif draft.device == "cpu":
        widths = [FIRST_ON_CPU]
    for width in (*widths, FIRST_WIDTHS[-1]):
        state = fits.state_bytes(with_patch(draft, width, sizes[len(sizes) // 2]))
        if state <= STATE_SHARE * draft.budget:
            return width
    return FIRST_WIDTHS[-1]


def _in_time(draft: Draft, sizes: list[SizedPatch], rate: float | None) -> list[SizedPatch]:
    """Return the patches of which the given time allows enough steps; the smallest where it allows none."""
    if rate is None or draft.seconds is None:
        return sizes
    most = draft.seconds / (LEAST_STEPS * LEAST_BATCH * rate)
    return [size for size in sizes if size.voxels <= most] or sizes[-1:]


def _grown(draft: Draft, fit: Fit, rate: float | None) -> Fit:
    """Return the step with as many patches as fit, are useful and leave time for enough steps."""
    if draft.is_given("batch", "accumulate"):
        return fit
    voxels = prod(fit.config.data.patch)
    most = min(BATCHES[draft.device], int(SHARE_OF_DATA * voxels_of_data(draft) / voxels))
    if rate is not None and draft.seconds is not None:
        most = min(most, int(draft.seconds / (LEAST_STEPS * voxels * rate)))
    batch = fit.config.batch
    room = draft.budget - fit.occupied_bytes
    state = fits.state_bytes(fit.config)
    of_patch = max(1, (fit.occupied_bytes - state) // batch)
    known = {batch: fit}
    number = max(batch, min(most, batch + int(room / of_patch)))
    while number not in known and number <= most:
        known[number] = fits.fit_of(replace(fit.config, batch=number))
        number += 1 if known[number].occupied_bytes <= draft.budget else -1
    return known[max(number for number, grown in known.items() if grown.occupied_bytes <= draft.budget)]


def voxels_of_data(draft: Draft) -> float:
    """Return the voxels of all training cases at the spacing that the network sees, by their median."""
    return prod(shape_of(draft)) * draft.fingerprint.training_cases

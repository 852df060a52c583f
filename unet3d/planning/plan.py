"""A plan from a data set's fingerprint, a budget and a time: what follows from the data alone is decided here."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from math import prod

import numpy as np

from unet3d.base.errors import UserError
from unet3d.config.schema import Config
from unet3d.data.grids import MAX_GROWTH
from unet3d.data.nifti import MAX_VOXELS
from unet3d.model.architecture import COARSE, FINER_PERCENTILE, median_shape, target_spacing
from unet3d.planning.draft import Draft, changed, sizes_text
from unet3d.planning.fingerprint import Fingerprint
from unet3d.planning.for_budget import choose_precision, choose_step
from unet3d.planning.patches import nnunet_plan, plain_sizes
from unet3d.planning.timing import choose_rate, choose_steps

ACTIVATION = "leaky_relu"
SPACING_VARIATION = 1.1  # Ratio of the spacings of cases from which on they are resampled.
FINER = 0.99  # Times the median: an axis below it has another percentile, and is not just rounded.
COARSER = 1.05  # Times the spacing, at once, while a run would refuse it.
AXES = ("x (left-right)", "y (back-front)", "z (down-up)")


def make_plan(
    config: Config,
    given: Collection[str],
    fingerprint: Fingerprint,
    budget: int,
    seconds: float | None = None,
) -> Draft:
    """Return the plan of a run in `budget` bytes and, if given, so many seconds; `given` options stay as they are.

    Raises UserError where no patch fits.
    """
    model = replace(config.model, **fingerprint.model)
    draft = Draft(replace(config, model=model), given, fingerprint, budget, seconds)
    draft.set("model.activation", ACTIVATION)
    choose_spacing(draft)
    choose_intensity(draft)
    choose_mirrors(draft)
    choose_rotation(draft)
    choose_precision(draft)
    choose_step(draft)
    choose_steps(draft)
    choose_rate(draft)
    return draft


def like_nnunet(config: Config, given: Collection[str], fingerprint: Fingerprint) -> tuple[Config, set[str]]:
    """Return the config as nnU-Net's planner would choose it, but for `given` options, and all that is then given.

    Raises UserError for a spacing that no run takes.
    """
    chosen = nnunet_plan(
        fingerprint.shapes,
        fingerprint.spacings,
        fingerprint.model["classes"],
        cases=fingerprint.cases,
    )
    most = max(map(partial(growth, target=chosen.spacing), fingerprint.shapes, fingerprint.spacings))
    if most > MAX_GROWTH and "data.spacing" not in given:
        spacing = sizes_text(chosen.spacing)
        problem = f"{most:,.0f} times the voxels of a case, and a run takes {MAX_GROWTH} times at most"
        raise UserError(f"like=nnunet: a spacing of {spacing} mm makes {problem}; leave it out, or give data.spacing")
    options = {
        "data.spacing": list(chosen.spacing),
        "data.patch": list(chosen.patch),
        "model.features": chosen.levels.features,
        "model.kernels": plain_sizes(chosen.levels.kernels, 3),
        "model.strides": plain_sizes(chosen.levels.strides, 2),
        "batch": chosen.batch,
    }
    for name, value in options.items():
        if name not in given:
            config = changed(config, name, value)
    return config, {*given, *options}


def choose_spacing(draft: Draft) -> None:
    """Choose the spacing that cases are resampled to: as stored where they agree, else the target of the rules."""
    shapes = draft.fingerprint.shapes
    spacings = draft.fingerprint.spacings
    if draft.is_given("data.spacing"):
        spacing = draft.config.data.spacing
        draft.decide("spacing", "as stored" if spacing is None else f"{sizes_text(spacing)} mm", "as given")
        return
    if (np.max(spacings, axis=0) <= SPACING_VARIATION * np.min(spacings, axis=0)).all():
        reason = f"the cases' spacings differ by less than {SPACING_VARIATION - 1:.0%}: nothing is resampled"
        draft.set("data.spacing", None)
        draft.decide("spacing", "as stored", reason, f"data.spacing=[{_listed(draft.spacing)}]")
        return
    target = list(target_spacing(shapes, spacings))
    reason = "the median of the cases"
    for axis, median in enumerate(np.median(spacings, axis=0)):
        if target[axis] < FINER * median:
            coarse = f"where {median:.3g} mm, the median, is over {COARSE} times as coarse as the other axes"
            reason += f", and along {AXES[axis]}, {coarse}, the {FINER_PERCENTILE}th percentile"
    target = [_rounded(mm) for mm in target]
    taken = target
    while any(growth(shape, mm, taken) > MAX_GROWTH for shape, mm in zip(shapes, spacings, strict=True)):
        taken = [_rounded(COARSER * mm) for mm in taken]
    if taken != target:
        too_many = f"a case would be resampled to over {MAX_GROWTH} times its voxels"
        reason += f", {_listed(target)} mm, made coarser: {too_many}"
    draft.set("data.spacing", taken)
    draft.decide("spacing", f"{sizes_text(taken)} mm", reason, "data.spacing=null, as stored")


def growth(shape: Sequence[int], spacing: Sequence[float], target: Sequence[float]) -> float:
    """Return how many voxels a case has at a target spacing (mm), for each of its own."""
    resampled = median_shape([shape], [spacing], target)
    return prod(resampled) / min(prod(shape), MAX_VOXELS / MAX_GROWTH)


def _rounded(mm: float) -> float:
    return float(f"{mm:.3g}")


def _listed(values: Sequence[float]) -> str:
    return ",".join(f"{value:.3g}" for value in values)


def choose_intensity(draft: Draft) -> None:
    """Choose the rule of intensities: data.intensity=ct also where no name says that the channels are CT."""
    if draft.is_given("data.intensity"):
        return
    channels = draft.fingerprint.intensities
    are_named = all(channel.name.upper() == "CT" for channel in channels)
    is_ct = all(channel.is_ct_like for channel in channels)
    choice = "z-score per volume"
    instead = "data.intensity=none, as stored"
    if not is_ct and not are_named:
        has_ct = any(channel.is_ct_like for channel in channels)
        reason = "not every channel is CT" if has_ct else "no channel is CT"
    elif any(channel.foreground_std == 0 for channel in channels):
        draft.set("data.intensity", "zscore")
        reason = "the foreground has one value: on a scale of CT every image would become constant"
    else:
        choice = "one scale for all cases"
        instead = "data.intensity=zscore, each volume by its own mean"
        reason = "the data set calls every channel CT"
        if not are_named:
            draft.set("data.intensity", "ct")
            reason = "whole numbers, with air near -1000 and tissue above 0: CT, though no name says so"
    draft.decide("intensity", choice, reason, instead)


def choose_mirrors(draft: Draft) -> None:
    """Choose the axes that training mirrors: not those along which two classes always keep their order."""
    if draft.is_given("data.augment.mirror"):
        return
    ordered = draft.fingerprint.ordered_axes
    mirrored = [axis for axis in range(3) if axis not in ordered]
    draft.set("data.augment.mirror", mirrored)
    reason = "no two classes keep their order along an axis in all sampled cases"
    instead = "data.augment.mirror=[0]"
    if ordered:
        kept = f"along {_names(ordered)} two classes keep their order in all sampled cases"
        reason = f"{kept}: a mirrored patch would swap them"
        instead = "data.augment.mirror=[0,1,2]"
    draft.decide("mirroring", _names(mirrored) or "none", reason, instead)


def choose_rotation(draft: Draft) -> None:
    """Choose not to rotate patches where classes meet in a plane of voxels: a rotated one would show another cut."""
    cut = draft.fingerprint.cut_axes
    if not cut or draft.is_given("data.augment.rotation"):
        return
    usual = draft.config.data.augment.rotation
    draft.set("data.augment.rotation", 0.0)
    reason = f"across {_names(cut)} classes meet in a plane of voxels: a rotated patch would show another cut"
    draft.decide("rotation", "none", reason, f"data.augment.rotation={usual:g}")


def _names(axes: Sequence[int]) -> str:
    return ", ".join(AXES[axis] for axis in axes)

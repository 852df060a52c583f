"""Decisions that follow from the data set alone: spacing, intensities, mirrored axes, and rotation."""

from collections.abc import Sequence
from math import prod

import numpy as np

from unet3d.data.grids import MAX_GROWTH
from unet3d.data.nifti import MAX_VOXELS
from unet3d.model.architecture import COARSE, FINER_PERCENTILE, median_shape, target_spacing
from unet3d.planning.draft import Draft, Triple, sizes_text

SPACING_VARIATION = 1.1  # ratio of the spacings of cases from which on they are resampled
FINER = 0.99  # times the median: an axis below it has another percentile, and is not just rounded
COARSER = 1.05  # times the spacing, at once, while a run would refuse it
AXES = ("x (left-right)", "y (back-front)", "z (down-up)")


def choose_spacing(draft: Draft) -> None:
    """Choose the spacing that cases are resampled to: as stored where they agree, else the target of the rules."""
    fingerprint = draft.fingerprint
    spacings = fingerprint.spacings
    if draft.is_given("data.spacing"):
        spacing = draft.config.data.spacing
        draft.decide("spacing", "as stored" if spacing is None else f"{sizes_text(spacing)} mm", "as given")
        return
    if (np.max(spacings, axis=0) <= SPACING_VARIATION * np.min(spacings, axis=0)).all():
        reason = f"the cases' spacings differ by less than {SPACING_VARIATION - 1:.0%}: nothing is resampled"
        draft.set("data.spacing", None)
        draft.decide("spacing", "as stored", reason, f"data.spacing=[{_listed(spacing_of(draft))}]")
        return
    target = list(target_spacing(fingerprint.shapes, spacings))
    reason = "the median of the cases"
    for axis, median in enumerate(np.median(spacings, axis=0)):
        if target[axis] < FINER * median:
            coarse = f"where {median:.3g} mm, the median, is over {COARSE} times as coarse as the other axes"
            reason += f", and along {AXES[axis]}, {coarse}, the {FINER_PERCENTILE}th percentile"
    target = [_rounded(mm) for mm in target]
    taken = _coarse_enough(target, fingerprint.shapes, spacings)
    if taken != target:
        too_many = f"a case would be resampled to over {MAX_GROWTH} times its voxels"
        reason += f", {_listed(target)} mm, made coarser: {too_many}"
    draft.set("data.spacing", taken)
    draft.decide("spacing", f"{sizes_text(taken)} mm", reason, "data.spacing=null, as stored")


def _coarse_enough(
    target: list[float],
    shapes: Sequence[Sequence[int]],
    spacings: Sequence[Sequence[float]],
) -> list[float]:
    """Return a target spacing (mm), coarser where a run would refuse how many voxels a case has by it."""
    while any(growth(shape, mm, target) > MAX_GROWTH for shape, mm in zip(shapes, spacings, strict=True)):
        target = [_rounded(COARSER * mm) for mm in target]
    return target


def growth(shape: Sequence[int], spacing: Sequence[float], target: Sequence[float]) -> float:
    """Return how many voxels a case has at a target spacing (mm), for each of its own."""
    resampled = median_shape([shape], [spacing], target)
    return prod(resampled) / min(prod(shape), MAX_VOXELS / MAX_GROWTH)


def _rounded(mm: float) -> float:
    return float(f"{mm:.3g}")


def _listed(values: Sequence[float]) -> str:
    return ",".join(f"{value:.3g}" for value in values)


def spacing_of(draft: Draft) -> Triple:
    """Return the spacing (mm) that the network sees, of the median case where it is as stored."""
    spacing = draft.config.data.spacing
    if spacing is not None:
        x, y, z = spacing
        return x, y, z
    return target_spacing(draft.fingerprint.shapes, draft.fingerprint.spacings)


def shape_of(draft: Draft) -> Triple:
    """Return the median shape (voxels) that the network sees."""
    return median_shape(draft.fingerprint.shapes, draft.fingerprint.spacings, spacing_of(draft))


def choose_intensity(draft: Draft) -> None:
    """Choose the rule of intensities: data.intensity=ct also where no name says that the channels are CT."""
    channels = draft.fingerprint.intensities
    if draft.is_given("data.intensity"):
        return
    are_named = all(channel.name.upper() == "CT" for channel in channels)
    is_ct = all(channel.is_ct_like for channel in channels)
    if (is_ct or are_named) and any(channel.foreground_std == 0 for channel in channels):
        draft.set("data.intensity", "zscore")
        reason = "the foreground has one value: on a scale of CT every image would become constant"
        draft.decide("intensity", "z-score per volume", reason, "data.intensity=none, as stored")
    elif is_ct and not are_named:
        draft.set("data.intensity", "ct")
        reason = "whole numbers, with air near -1000 and tissue above 0: CT, though no name says so"
        draft.decide(
            "intensity", "one scale for all cases", reason, "data.intensity=zscore, each volume by its own mean"
        )
    elif are_named:
        reason = "the data set calls every channel CT"
        draft.decide(
            "intensity", "one scale for all cases", reason, "data.intensity=zscore, each volume by its own mean"
        )
    else:
        has_ct = any(channel.is_ct_like for channel in channels)
        reason = "not every channel is CT" if has_ct else "no channel is CT"
        draft.decide("intensity", "z-score per volume", reason, "data.intensity=none, as stored")


def choose_mirrors(draft: Draft) -> None:
    """Choose the axes that training mirrors: not those along which two classes always keep their order."""
    if draft.is_given("data.augment.mirror"):
        return
    ordered = draft.fingerprint.ordered_axes
    mirrored = [axis for axis in range(3) if axis not in ordered]
    draft.set("data.augment.mirror", mirrored)
    choice = ", ".join(AXES[axis] for axis in mirrored) or "none"
    reason = "no two classes keep their order along an axis in all sampled cases"
    instead = "data.augment.mirror=[0]"
    if ordered:
        names = ", ".join(AXES[axis] for axis in ordered)
        reason = f"along {names} two classes keep their order in all sampled cases: a mirrored patch would swap them"
        instead = "data.augment.mirror=[0,1,2]"
    draft.decide("mirroring", choice, reason, instead)


def choose_rotation(draft: Draft) -> None:
    """Choose not to rotate patches where classes meet in a plane of voxels: a rotated one would show another cut."""
    cut = draft.fingerprint.cut_axes
    if not cut or draft.is_given("data.augment.rotation"):
        return
    usual = draft.config.data.augment.rotation
    draft.set("data.augment.rotation", 0.0)
    names = ", ".join(AXES[axis] for axis in cut)
    reason = f"across {names} classes meet in a plane of voxels: a rotated patch would show another cut"
    draft.decide("rotation", "none", reason, f"data.augment.rotation={usual:g}")

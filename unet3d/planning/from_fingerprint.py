"""Decisions that follow from the data set alone: spacing, intensities, mirrored axes, and rotation."""

from collections.abc import Sequence

import numpy as np

from unet3d.planning.architecture import median_shape, target_spacing
from unet3d.planning.draft import Draft, Triple, sizes_text

SPACING_VARIATION = 1.1  # ratio of the spacings of cases from which on they are resampled
AXES = ("x (left-right)", "y (back-front)", "z (down-up)")


def choose_spacing(draft: Draft) -> None:
    """Choose the spacing that cases are resampled to: as stored where they agree, else the target of the rules."""
    fingerprint = draft.fingerprint
    spacing = draft.config.data.spacing
    if draft.is_given("data.spacing") and spacing is not None:
        draft.decide("spacing", f"{sizes_text(spacing)} mm", "as given")
        return
    target = common_spacing(fingerprint.shapes, fingerprint.spacings)
    if draft.is_given("data.spacing"):
        draft.decide("spacing", "as stored", "as given")
    elif target is None:
        reason = f"the cases' spacings differ by less than {SPACING_VARIATION - 1:.0%}: nothing is resampled"
        draft.set("data.spacing", None)
        draft.decide("spacing", "as stored", reason, f"data.spacing=[{_listed(spacing_of(draft))}]")
    else:
        draft.set("data.spacing", target)
        reason = "the median of the cases, or the 10th percentile along an axis that is three times coarser"
        draft.decide("spacing", f"{sizes_text(target)} mm", reason, "data.spacing=null, as stored")


def common_spacing(shapes: Sequence[Sequence[int]], spacings: Sequence[Sequence[float]]) -> list[float] | None:
    """Return the target spacing (mm) of cases whose spacings vary; None where they do not."""
    low = np.min(spacings, axis=0)
    high = np.max(spacings, axis=0)
    if (high <= SPACING_VARIATION * low).all():
        return None
    return [float(f"{mm:.3g}") for mm in target_spacing(shapes, spacings)]


def _listed(values: Triple) -> str:
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
    if is_ct and not are_named:
        draft.set("data.intensity", "ct")
        reason = "whole numbers, with air near -1000 and tissue above 0: CT, though no name says so"
        draft.decide("intensity", "ct", reason, "data.intensity=zscore, each volume by its own mean")
    elif are_named:
        reason = "the channel is called CT: one scale for all cases"
        draft.decide("intensity", "auto: ct", reason, "data.intensity=zscore")
    else:
        reason = "no CT: each volume by its own mean and deviation"
        draft.decide("intensity", "auto: zscore", reason, "data.intensity=none")


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

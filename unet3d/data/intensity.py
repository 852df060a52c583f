"""Intensities: rules by which a network's input is made comparable between volumes, and how they are applied."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from unet3d.base.errors import UserError
from unet3d.data.nifti import GREYS
from unet3d.data.patches import subsample_indices

SAMPLED_VOXELS = 10_000  # foreground voxels a case, enough to settle the scale of CT
CT_PERCENTILES = [0.5, 99.5]
KINDS = ("zscore", "ct", "none")


@dataclass(frozen=True)
class Intensity:
    """`zscore`: each volume to mean 0, std 1. `ct`: clip to low..high, then subtract mean and divide by std."""

    kind: str
    low: float = 0.0
    high: float = 0.0
    mean: float = 0.0
    std: float = 1.0


def _kinds(choice: str, channels: Sequence[str]) -> list[str]:
    """Return the kind of rule of each channel for data.intensity."""
    if choice != "auto":
        return [choice for _ in channels]
    return ["ct" if name.upper() == "CT" else "zscore" for name in channels]


def needs_foreground(choice: str, channels: Sequence[str]) -> bool:
    """Return whether a rule follows from the foreground of the training cases."""
    return "ct" in _kinds(choice, channels)


def foreground_sample(image: np.ndarray, label: np.ndarray, ignore: int | None) -> np.ndarray:
    """Return intensities (C, n) of foreground voxels of an image (C, X, Y, Z), at most SAMPLED_VOXELS."""
    is_used = label > 0
    if ignore is not None:
        is_used &= label != ignore
    voxels = image[:, is_used]
    return voxels[:, subsample_indices(voxels.shape[1], SAMPLED_VOXELS)]


def intensity_rules(choice: str, channels: Sequence[str], foreground: Iterable[np.ndarray]) -> tuple[Intensity, ...]:
    """Return one rule a channel; `foreground` yields intensities (C, n) of training cases, used only for CT."""
    kinds = _kinds(choice, channels)
    if "ct" not in kinds:
        return tuple(Intensity(kind) for kind in kinds)
    values = np.concatenate(list(foreground), axis=1)
    if not values.size:
        what = "no training case has a foreground voxel to take the scale from"
        raise UserError(f"data.intensity=ct: {what}; use zscore")
    rules = list[Intensity]()
    for name, channel, kind in zip(channels, values, kinds, strict=True):
        rule = _ct(channel) if kind == "ct" else Intensity(kind)
        _refuse_constant(rule, f" in channel {name}" if len(channels) > 1 else "")
        rules.append(rule)
    return tuple(rules)


def _ct(values: np.ndarray) -> Intensity:
    """Return nnU-Net's percentiles, mean and std (arXiv:1809.10486): CT numbers mean the same in every scan."""
    low, high = np.percentile(values, CT_PERCENTILES)
    clipped = values.clip(low, high)
    with np.errstate(over="ignore"):
        std = float(clipped.std())
    if not 0 < std < math.inf:  # the squares left the range of float32
        clipped = clipped.astype(np.float64)
        std = float(clipped.std())
    return Intensity(
        kind="ct",
        low=float(low),
        high=float(high),
        mean=float(clipped.mean()),
        std=std,
    )


def _refuse_constant(rule: Intensity, where: str) -> None:
    """Raise UserError for a rule of CT whose ends are one value, or so near that float32 has no steps between them."""
    if rule.kind != "ct":
        return
    step = np.spacing(np.float32(max(abs(rule.low), abs(rule.high))))
    if rule.high - rule.low < step * GREYS:
        values = f"one value, {rule.low:g}" if rule.low == rule.high else f"nearly one value, {rule.low:.9g}"
        what = f"the foreground of the training cases has {values}{where}"
        raise UserError(f"data.intensity=ct: {what}: every image would become constant; use zscore")


def checked_intensity(values: Any) -> Intensity:
    """Return the rule that a checkpoint holds as plain values. Raises ValueError or TypeError if they are not one."""
    rule = Intensity(**values)
    is_sound = rule.kind in KINDS
    for number in (rule.low, rule.high, rule.mean, rule.std):
        is_sound &= isinstance(number, int | float) and math.isfinite(number)
    if not is_sound or rule.std <= 0:
        raise ValueError(f"not a rule of intensity: {values}")
    return rule


def normalise(image: np.ndarray, rules: Sequence[Intensity]) -> np.ndarray:
    """Return float32 C X Y Z with each channel's rule applied; a constant channel becomes 0."""
    normal = [_apply(channel, rule) for channel, rule in zip(image, rules, strict=True)]
    return np.stack(normal)


def normalise_in_place(image: np.ndarray, rules: Sequence[Intensity]) -> None:
    """Apply each channel's rule to an image, float32 C X Y Z, a channel at a time in memory."""
    for channel, rule in zip(image, rules, strict=True):
        channel[...] = _apply(channel, rule)


def _apply(channel: np.ndarray, rule: Intensity) -> np.ndarray:
    """Return a channel (X, Y, Z) with the rule applied, float32."""
    if rule.kind == "none":
        return channel.astype(np.float32)
    if rule.kind == "ct":
        clipped = channel.clip(rule.low, rule.high)
        scaled: np.ndarray = (clipped - rule.mean) / rule.std
        return scaled.astype(np.float32)
    mean = channel.mean(dtype=np.float64)
    std = 1.0
    if channel.min() < channel.max():
        std = channel.std(dtype=np.float64)
    normal: np.ndarray = (channel - mean) / std
    return normal.astype(np.float32)

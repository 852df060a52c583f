"""Intensity normalisation, one rule a channel, as plain values that travel with a snapshot."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from unet3d.errors import UserError


@dataclass(frozen=True)
class Intensity:
    """`zscore`: each volume to mean 0, std 1. `ct`: clip to low..high, then subtract mean and divide by std."""

    kind: str
    low: float = 0.0
    high: float = 0.0
    mean: float = 0.0
    std: float = 1.0


def checked(values: Any) -> Intensity:
    """The rule of a snapshot's plain values. Raises ValueError or TypeError for what is none."""
    rule = Intensity(**values)
    numbers = [float(number) for number in (rule.low, rule.high, rule.mean, rule.std)]
    if rule.kind not in ("zscore", "ct", "none") or not np.isfinite(numbers).all() or rule.std <= 0:
        raise ValueError(f"no rule of intensity: {values}")
    return rule


def rules(choice: str, channels: Sequence[str], foreground: Iterable[np.ndarray]) -> tuple[Intensity, ...]:
    """One rule a channel. `foreground` yields training foreground intensities (C, voxels), read only for CT.

    CT numbers mean the same in every scan, so their range is taken from the training set: percentiles 0.5 and 99.5 of
    the foreground, its mean and std (nnU-Net, arXiv:1809.10486). Other modalities have no such scale.
    """
    kinds = [_kind(choice, name) for name in channels]
    if "ct" not in kinds:
        return tuple(Intensity(kind) for kind in kinds)
    values = np.concatenate(list(foreground), axis=1)
    if not values.size:
        raise UserError("data.intensity=ct: no training case has a foreground voxel to take the scale from; use zscore")
    return tuple(_ct(values[i]) if kind == "ct" else Intensity(kind) for i, kind in enumerate(kinds))


def normalise(image: np.ndarray, rules: Sequence[Intensity]) -> np.ndarray:
    """Float32 C X Y Z with each channel's rule applied; a constant channel becomes 0."""
    assert len(image) == len(rules), (len(image), len(rules))
    return np.stack([_apply(channel, rule) for channel, rule in zip(image, rules, strict=True)])


def _kind(choice: str, channel: str) -> str:
    if choice == "auto":
        return "ct" if channel.upper() == "CT" else "zscore"
    return choice


def _ct(values: np.ndarray) -> Intensity:
    low, high = np.percentile(values, [0.5, 99.5])
    clipped = values.clip(low, high)
    return Intensity("ct", float(low), float(high), float(clipped.mean()), float(clipped.std()) if low < high else 1.0)


def _apply(channel: np.ndarray, rule: Intensity) -> np.ndarray:
    if rule.kind == "none":
        return channel.astype(np.float32)
    if rule.kind == "ct":
        return ((channel.clip(rule.low, rule.high) - rule.mean) / rule.std).astype(np.float32)
    std = channel.std(dtype=np.float64) if np.ptp(channel) else 1.0
    normal: np.ndarray = (channel - channel.mean(dtype=np.float64)) / std
    return normal.astype(np.float32)

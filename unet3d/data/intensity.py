"""Rules that make the intensities of volumes comparable, and in what an image is unlike those of training."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from unet3d.base.errors import UserError
from unet3d.data.nifti import GREYS
from unet3d.data.patches import subsample_indices
from unet3d.data.volume import Grid

SAMPLED_VOXELS = 10_000  # foreground voxels a case, enough to settle the scale of CT
CT_PERCENTILES = [0.5, 99.5]
KINDS = ("zscore", "ct", "none")
OTHER_SHARE = 0.25  # more or less of a volume's voxels beyond an end than in any training case
OTHER_CONTRAST = 5.0  # times less or more than in any training case
OTHER_SPACING = 1.5  # times
OTHER_EXTENT = 3.0  # times, along an axis: fields of view differ more than voxels
Bounds = tuple[tuple[float, ...], tuple[float, ...]]  # the least and the most of each of some numbers


@dataclass(frozen=True)
class Intensity:
    """`zscore`: each volume to mean 0, std 1. `ct`: clip to low..high, then subtract mean and divide by std."""

    kind: str
    low: float = 0.0
    high: float = 0.0
    mean: float = 0.0
    std: float = 1.0


def kinds_of(choice: str, channels: Sequence[str]) -> list[str]:
    """Return the kind of rule of each channel for data.intensity; `ct` follows from the training cases' foreground."""
    if choice != "auto":
        return [choice for _ in channels]
    return ["ct" if name.upper() == "CT" else "zscore" for name in channels]


def foreground_sample(image: np.ndarray, label: np.ndarray, ignore: int | None) -> np.ndarray:
    """Return intensities (C, n) of foreground voxels of an image (C, X, Y, Z), at most SAMPLED_VOXELS."""
    is_used = label > 0
    if ignore is not None:
        is_used &= label != ignore
    return sampled(image[:, is_used])


def intensity_rules(choice: str, channels: Sequence[str], foreground: Iterable[np.ndarray]) -> tuple[Intensity, ...]:
    """Return one rule a channel; `foreground` yields intensities (C, n) of training cases, used only for CT."""
    kinds = kinds_of(choice, channels)
    if "ct" not in kinds:
        return tuple(Intensity(kind) for kind in kinds)
    values = np.concatenate(list(foreground), axis=1)
    if not values.size:
        what = "no training case has a foreground voxel to take the scale from"
        raise UserError(f"data.intensity=ct: {what}; use zscore")
    places = [f" in channel {name}" if len(channels) > 1 else "" for name in channels]
    triples = zip(kinds, values, places, strict=True)
    return tuple(_ct(channel, where) if kind == "ct" else Intensity(kind) for kind, channel, where in triples)


def _ct(values: np.ndarray, where: str) -> Intensity:
    """Return nnU-Net's percentiles, mean and std (arXiv:1809.10486): CT numbers mean the same in every scan.

    Raises UserError where they are one value, or so near that float32 has no steps between them.
    """
    low, high = np.percentile(values, CT_PERCENTILES)
    if high - low < np.spacing(np.float32(max(abs(low), abs(high)))) * GREYS:
        one = f"one value, {low:g}" if low == high else f"nearly one value, {low:.9g}"
        what = f"the foreground of the training cases has {one}{where}"
        raise UserError(f"data.intensity=ct: {what}: every image would become constant; use zscore")
    clipped = values.clip(low, high)
    with np.errstate(over="ignore"):
        std = float(clipped.std())
    if not 0 < std < math.inf:  # the squares left the range of float32
        clipped = clipped.astype(np.float64)
        std = float(clipped.std())
    return Intensity("ct", float(low), float(high), float(clipped.mean()), std)


def checked_intensity(values: Any) -> Intensity:
    """Return the rule that a checkpoint holds as plain values. Raises ValueError or TypeError if they are not one."""
    rule = Intensity(**values)
    if rule.kind not in KINDS or not _are_finite((rule.low, rule.high, rule.mean, rule.std)) or rule.std <= 0:
        raise ValueError(f"not a rule of intensity: {values}")
    return rule


def normalise(image: np.ndarray, rules: Sequence[Intensity]) -> np.ndarray:
    """Return an image, float32 C X Y Z, once each channel's rule is applied in place; a constant channel becomes 0."""
    for channel, rule in zip(image, rules, strict=True):
        channel[...] = _apply(channel, rule)
    return image


def _apply(channel: np.ndarray, rule: Intensity) -> np.ndarray:
    """Return a channel with the rule applied."""
    if rule.kind == "none":
        return channel
    mean, std = rule.mean, rule.std
    if rule.kind == "ct":
        channel = channel.clip(rule.low, rule.high)
    else:
        mean = channel.mean(dtype=np.float64)
        std = channel.std(dtype=np.float64) if channel.min() < channel.max() else 1.0
    normal: np.ndarray = (channel - mean) / std
    return normal


@dataclass(frozen=True)
class Seen:
    """The images of the training cases: the least and the most of some numbers of each.

    Those of a channel, once the rule was applied, are its 0.5th and 99.5th percentile, the contrast between them, and
    the shares of voxels that the rule clips at its low and its high end; of other rules, beyond the percentiles of all.
    """

    spacing: Bounds  # mm, of the files, along each axis, RAS+
    extent: Bounds  # mm
    channels: tuple[Bounds, ...]  # () where no voxel was measured

    @classmethod
    def of(cls, grids: Sequence[Grid], samples: Sequence[np.ndarray], rules: Sequence[Intensity]) -> "Seen":
        """Return the record of the files' grids, and of `sampled` voxels of some cases with the rules applied."""
        channels = list[Bounds]()
        for voxels, rule in zip(zip(*samples, strict=True), rules, strict=False):  # none where none was measured
            (low, _), (_, high) = _bounds(map(_percentiles, voxels))
            rows = []
            for of_case in voxels:
                start, stop = _percentiles(of_case)
                rows.append((start, stop, stop - start, *_beyond(of_case, rule, low, high)))
            channels.append(_bounds(rows))
        return cls(_bounds(grid.spacing for grid in grids), _bounds(map(_extent, grids)), tuple(channels))

    @classmethod
    def read(cls, values: Mapping[str, Any], channels: int) -> "Seen":
        """Return the record that a checkpoint holds. Raises ValueError, TypeError or KeyError for what is none."""
        entries = values["channels"]
        if len(entries) not in (0, channels):
            raise ValueError("its record of images is of other channels")
        spacing, extent = (_checked_bounds(values[name], 3) for name in ("spacing", "extent"))
        return cls(spacing, extent, tuple(_checked_bounds(entry, 5) for entry in entries))

    @classmethod
    def merged(cls, records: Sequence["Seen"]) -> "Seen":
        """Return what one of several networks, at least, has seen."""
        by_channel = zip(*(record.channels for record in records if record.channels), strict=True)
        return cls(
            _bounds(chain(*(record.spacing for record in records))),
            _bounds(chain(*(record.extent for record in records))),
            tuple(_bounds(chain(*bounds)) for bounds in by_channel),
        )

    def differences(
        self, image: np.ndarray, rules: Sequence[Intensity], grid: Grid, is_resampled: bool
    ) -> Iterator[str]:
        """Yield in words, with both numbers, in what an image is far from those of training.

        `image` (C, X, Y, Z) has the rules applied, and lies on `grid`; `is_resampled`: to the spacing of training.
        """
        for number, (voxels, bounds, rule) in enumerate(zip(sampled(image), self.channels, rules, strict=False)):
            words = _difference(voxels, bounds, rule)
            if words:
                yield f"channel {number}: {words}" if len(rules) > 1 else words
        if not is_resampled and _is_far(grid.spacing, self.spacing, OTHER_SPACING):
            words = f"its spacing is {_lengths(grid.spacing)} mm, in training {_range(self.spacing)}"
            yield f"{words}, and data.spacing is not set: resample it?"
        elif _is_far(_extent(grid), self.extent, OTHER_EXTENT):
            yield f"it covers {_lengths(_extent(grid))} mm, in training {_range(self.extent)}: another field of view?"


def _difference(voxels: np.ndarray, bounds: Bounds, rule: Intensity) -> str:
    """Return in words in what voxels (n) of a channel are far from those of training; "" where they are not."""
    (low, _, least_contrast, *least_shares), (_, high, most_contrast, *most_shares) = bounds
    shares = _beyond(voxels, rule, low, high)
    if rule.kind == "ct":
        low, high = rule.low, rule.high
    odd = []
    for share, least, most, end in zip(
        shares, least_shares, most_shares, (f"below {low:g}", f"above {high:g}"), strict=True
    ):
        limit = f"at most {_percent(most)}" if share > most else f"at least {_percent(least)}"
        words = f"{_percent(share)} of its voxels are {end}, in training {limit}: other units?"
        odd.append((max(share - most, least - share), words))
    excess, words = max(odd)
    if rule.kind != "zscore" and (excess > OTHER_SHARE or (excess > 0 and max(shares) == 1)):
        return words
    start, stop = _percentiles(voxels)
    contrast = stop - start
    unit = " standard deviations" if rule.kind == "zscore" else ""
    words = f"99 % of its voxels span {contrast:.3g}{unit}, in training"
    if contrast * OTHER_CONTRAST < least_contrast:
        return f"{words} {least_contrast:.3g} or more: outliers, a margin or other units?"
    if contrast > most_contrast * OTHER_CONTRAST > 0:
        return f"{words} {most_contrast:.3g} or less: outliers or other units?"
    return ""


def sampled(image: np.ndarray) -> np.ndarray:
    """Return voxels (C, n) of a volume (C, X, Y, Z): SAMPLED_VOXELS, or all of a smaller one."""
    voxels = image.reshape(len(image), -1)
    return voxels[:, subsample_indices(voxels.shape[1], SAMPLED_VOXELS)]


def _percentiles(voxels: np.ndarray) -> tuple[float, float]:
    low, high = np.percentile(voxels.astype(np.float64), CT_PERCENTILES).tolist()
    return low, high


def _beyond(voxels: np.ndarray, rule: Intensity, low: float, high: float) -> tuple[float, float]:
    """Return the shares of voxels (n) that the rule has clipped at its ends; of others, beyond `low` and `high`."""
    if rule.kind == "ct":
        ends = _apply(np.array([rule.low, rule.high], np.float32), rule)
        return float((voxels <= ends[0]).mean()), float((voxels >= ends[1]).mean())
    return float((voxels < low).mean()), float((voxels > high).mean())


def _bounds(rows: Iterable[Sequence[float]]) -> Bounds:
    """Return the least and the most in each column."""
    columns = list(zip(*rows, strict=True))
    return tuple(map(min, columns)), tuple(map(max, columns))


def _checked_bounds(values: Any, count: int) -> Bounds:
    """Return the bounds of this number of numbers that a file holds. Raises ValueError, TypeError."""
    least, most = map(tuple, values)
    if not len(least) == len(most) == count or not _are_finite(least + most):
        raise ValueError("its record of images holds other than numbers")
    return least, most


def _extent(grid: Grid) -> tuple[float, ...]:
    return tuple(size * step for size, step in zip(grid.shape, grid.spacing, strict=True))


def _is_far(values: Sequence[float], bounds: Bounds, factor: float) -> bool:
    """Return whether a length is more than a factor beyond the bounds of its axis."""
    triples = zip(values, *bounds, strict=True)
    return any(value * factor < low or value > high * factor for value, low, high in triples)


def _range(bounds: Bounds) -> str:
    low, high = map(_lengths, bounds)
    return low if low == high else f"{low} to {high}"


def _lengths(lengths: Sequence[float]) -> str:
    return "x".join(f"{length:.3g}" for length in lengths)


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %" if 0 < share < 0.01 else f"{100 * share:.0f} %"


def _are_finite(values: Iterable[object]) -> bool:
    """Return whether all values are finite numbers."""
    return all(type(value) in (int, float) and math.isfinite(value) for value in values)  # type: ignore[arg-type]

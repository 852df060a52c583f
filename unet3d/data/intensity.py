"""Rules that make the intensities of volumes comparable, and in what an image is unlike those of training."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from unet3d.base.errors import UserError
from unet3d.data.grids import Grid
from unet3d.data.nifti import GREYS
from unet3d.data.patches import subsample_indices

SAMPLED_VOXELS = 10_000  # foreground voxels a case, enough to settle the scale of CT
CT_PERCENTILES = [0.5, 99.5]
KINDS = ("zscore", "ct", "none")
OTHER_SHARE = 0.25  # more or less of a volume's voxels beyond an end than in any training case
OTHER_CONTRAST = 5.0  # times less or more than in any training case
OTHER_SPACING = 1.5  # times
OTHER_EXTENT = 3.0  # times, along an axis: fields of view differ more than voxels
Range = tuple[float, float]
Triple = tuple[float, ...]  # along x, y, z (mm)


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
    rules = list[Intensity]()
    for name, channel, kind in zip(channels, values, kinds, strict=True):
        where = f" in channel {name}" if len(channels) > 1 else ""
        rules.append(_ct(channel, where) if kind == "ct" else Intensity(kind))
    return tuple(rules)


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
class SeenChannel:
    """The least and the most of each number in the training cases' channel, once the rule was applied."""

    span: Range  # lowest 0.5th and highest 99.5th percentile of a case
    contrast: Range  # between these percentiles of one case
    below: Range  # share of a case's voxels that the rule clips at its low end; of other rules, below `span`
    above: Range

    @classmethod
    def of(cls, samples: Sequence[np.ndarray], rule: Intensity) -> "SeenChannel":
        """Return the record of voxels (n) of each case, to which the rule was applied."""
        percentiles = [_percentiles(sample) for sample in samples]
        span = _range(*percentiles)
        below, above = zip(*(_beyond(sample, rule, span) for sample in samples), strict=True)
        return cls(span, _range(high - low for low, high in percentiles), _range(below), _range(above))

    def differences(self, voxels: np.ndarray, rule: Intensity) -> Iterator[str]:
        """Yield in words in what voxels (n) are far from those of training, at most once."""
        low, high = (rule.low, rule.high) if rule.kind == "ct" else self.span
        shares = _beyond(voxels, rule, self.span)
        odd = []
        for share, (least, most), end in zip(
            shares, (self.below, self.above), (f"below {low:g}", f"above {high:g}"), strict=True
        ):
            limit = f"at most {_percent(most)}" if share > most else f"at least {_percent(least)}"
            words = f"{_percent(share)} of its voxels are {end}, in training {limit}: other units?"
            odd.append((max(share - most, least - share), words))
        excess, words = max(odd)
        is_far = excess > OTHER_SHARE or (excess > 0 and max(shares) == 1)
        if rule.kind != "zscore" and is_far:
            yield words
            return
        start, stop = _percentiles(voxels)
        least, most = self.contrast
        unit = " standard deviations" if rule.kind == "zscore" else ""
        words = f"99 % of its voxels span {stop - start:.3g}{unit}, in training"
        if (stop - start) * OTHER_CONTRAST < least:
            yield f"{words} {least:.3g} or more: outliers, a margin or other units?"
        elif stop - start > most * OTHER_CONTRAST > 0:
            yield f"{words} {most:.3g} or less: outliers or other units?"


@dataclass(frozen=True)
class Seen:
    """The images of the training cases: the least and the most along each axis, RAS+, and each channel's voxels."""

    spacing: tuple[Triple, Triple]  # mm, of the files
    extent: tuple[Triple, Triple]  # mm
    channels: tuple[SeenChannel, ...]  # () where no voxel was measured

    @classmethod
    def of(cls, grids: Sequence[Grid], samples: Sequence[np.ndarray], rules: Sequence[Intensity]) -> "Seen":
        """Return the record of the files' grids, and of `sampled` voxels of some cases with the rules applied."""
        by_channel = zip(*samples, strict=True)  # none where no voxel was measured
        channels = tuple(SeenChannel.of(voxels, rule) for voxels, rule in zip(by_channel, rules, strict=False))
        return cls(_ranges(grid.spacing for grid in grids), _ranges(map(_extent, grids)), channels)

    @classmethod
    def read(cls, values: Mapping[str, Any], channels: int) -> "Seen":
        """Return the record that a checkpoint holds. Raises ValueError, TypeError or KeyError for what is none."""
        entries = values["channels"]
        if len(entries) not in (0, channels):
            raise ValueError("its record of images is of other channels")
        names = SeenChannel.__annotations__
        seen = [SeenChannel(**{name: _numbers(entry[name], 2) for name in names}) for entry in entries]
        (low, high), (least, most) = values["spacing"], values["extent"]
        return cls((_numbers(low, 3), _numbers(high, 3)), (_numbers(least, 3), _numbers(most, 3)), tuple(seen))

    @classmethod
    def merged(cls, records: Sequence["Seen"]) -> "Seen":
        """Return what one of several networks, at least, has seen."""
        channels = []
        for parts in zip(*(record.channels for record in records if record.channels), strict=True):
            names = SeenChannel.__annotations__
            channels.append(SeenChannel(**{name: _range(*(getattr(part, name) for part in parts)) for name in names}))
        spacings = [bounds for record in records for bounds in record.spacing]
        extents = [bounds for record in records for bounds in record.extent]
        return cls(_ranges(spacings), _ranges(extents), tuple(channels))

    def differences(
        self, image: np.ndarray, rules: Sequence[Intensity], grid: Grid, is_resampled: bool
    ) -> Iterator[str]:
        """Yield in words, with both numbers, in what an image is far from those of training.

        `image` (C, X, Y, Z) has the rules applied, and lies on `grid`; `is_resampled`: to the spacing of training.
        """
        voxels = sampled(image)
        for number, (channel, rule) in enumerate(zip(self.channels, rules, strict=False)):
            name = f"channel {number}: " if len(rules) > 1 else ""
            for words in channel.differences(voxels[number], rule):
                yield f"{name}{words}"
        if not is_resampled and _is_far(grid.spacing, self.spacing, OTHER_SPACING):
            words = f"its spacing is {_words(grid.spacing)} mm, in training {_bounds(self.spacing)}"
            yield f"{words}, and data.spacing is not set: resample it?"
        elif _is_far(_extent(grid), self.extent, OTHER_EXTENT):
            yield f"it covers {_words(_extent(grid))} mm, in training {_bounds(self.extent)}: another field of view?"


def sampled(image: np.ndarray) -> np.ndarray:
    """Return voxels (C, n) of a volume (C, X, Y, Z): SAMPLED_VOXELS, or all of a smaller one."""
    voxels = image.reshape(len(image), -1)
    return voxels[:, subsample_indices(voxels.shape[1], SAMPLED_VOXELS)]


def _percentiles(voxels: np.ndarray) -> Range:
    low, high = np.percentile(voxels.astype(np.float64), CT_PERCENTILES).tolist()
    return low, high


def _beyond(voxels: np.ndarray, rule: Intensity, span: Range) -> Range:
    """Return the shares of voxels (n) that the rule has clipped at its low and at its high end; else beyond `span`."""
    if rule.kind == "ct":
        low, high = _apply(np.array([rule.low, rule.high], np.float32), rule)
        return float((voxels <= low).mean()), float((voxels >= high).mean())
    return float((voxels < span[0]).mean()), float((voxels > span[1]).mean())


def _range(*values: Iterable[float]) -> Range:
    """Return the least and the most of all these numbers."""
    numbers = [*chain(*values)]
    return min(numbers), max(numbers)


def _ranges(rows: Iterable[Sequence[float]]) -> tuple[Triple, Triple]:
    """Return the least and the most in each column."""
    columns = list(zip(*rows, strict=True))
    return tuple(map(min, columns)), tuple(map(max, columns))


def _extent(grid: Grid) -> Triple:
    return tuple(size * step for size, step in zip(grid.shape, grid.spacing, strict=True))


def _is_far(values: Sequence[float], bounds: tuple[Triple, Triple], factor: float) -> bool:
    """Return whether a length is more than a factor beyond the bounds of its axis."""
    triples = zip(values, *bounds, strict=True)
    return any(value * factor < low or value > high * factor for value, low, high in triples)


def _bounds(bounds: tuple[Triple, Triple]) -> str:
    low, high = map(_words, bounds)
    return low if low == high else f"{low} to {high}"


def _words(lengths: Sequence[float]) -> str:
    return "x".join(f"{length:.3g}" for length in lengths)


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %" if 0 < share < 0.01 else f"{100 * share:.0f} %"


def _numbers(values: Any, count: int) -> Any:
    """Return finite numbers of a file as a tuple. Raises ValueError, TypeError."""
    numbers = tuple(values)
    if len(numbers) != count or not _are_finite(numbers):
        raise ValueError("its record of images holds other than numbers")
    return numbers


def _are_finite(values: Iterable[object]) -> bool:
    """Return whether all values are finite numbers."""
    return all(type(value) in (int, float) and math.isfinite(value) for value in values)  # type: ignore[arg-type]

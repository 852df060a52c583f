"""The fingerprint of a data set: sizes from the headers of all cases, classes and intensities from a sample of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import numpy as np

from unet3d import build
from unet3d.base.errors import UserError
from unet3d.base.progress import track
from unet3d.base.types import Table, percent
from unet3d.config.schema import Data
from unet3d.data.cases import Case, DatasetInfo, read_dataset
from unet3d.data.check import check_cases
from unet3d.data.intensity import foreground_sample
from unet3d.data.patches import subsample_indices
from unet3d.data.splits import split
from unet3d.data.volume import Grid, ImageFiles, LabelValues, read_volume

CASES_SAMPLED = 20  # training cases whose voxels are read
VOXELS_SAMPLED = 5 * 10**8  # Most voxels read, but for those of the first cases.
LEAST_SAMPLED = 3  # cases, however large
LEAST_ORDERED = 8  # cases with two classes, before their order or their border counts
FLAT_SHARE = 0.9  # Places where classes touch within a voxel of one plane: annotators cut there.
CUT_SHARE = 0.9  # Cases that are cut so.
VOXELS_OF_CASE = 20_000  # intensities of a channel that are kept
PERCENTILES = (0.5, 50, 99.5)
AIR = -900  # CT numbers (Hounsfield units) of air lie below, of soft tissue and bone above 0
Triple = tuple[float, float, float]


class ChannelIntensity(NamedTuple):
    """Intensities of a channel in the sampled cases: of all voxels, and of those with a foreground class."""

    name: str
    percentiles: Sequence[float]  # Those of PERCENTILES.
    mean: float
    std: float
    foreground: tuple[float, float] | None  # mean and SD; None without foreground
    is_ct_like: bool  # air is near -1000 and all numbers are whole


@dataclass(frozen=True)
class Fingerprint:
    """Sizes, intensities and classes of a data set, from which a plan follows. Axes are x, y, z in RAS."""

    name: str
    training_cases: int
    held_out: list[tuple[tuple[int, int, int], Triple]]  # shape (voxels) and spacing (mm) of each held-out case
    sampled_cases: int
    shapes: list[tuple[int, int, int]]  # Each case's, as stored (voxels).
    spacings: list[Triple]  # Each case's, as stored (mm).
    classes: list[tuple[str, float, float]]  # Each one's name, share of voxels, and of cases; those of regions overlap.
    model: Mapping[str, Any]  # options of the network that follow from the data
    channels: list[ChannelIntensity]
    ordered_axes: tuple[int, ...]  # along which two classes keep their order in every sampled case
    cut_axes: tuple[int, ...]  # across which classes meet in a plane of voxels, in nearly every sampled case
    foreground: Triple  # median extent of the foreground in the sampled cases (mm)


class CaseSample(NamedTuple):
    """Counts, intensities and places of one sampled case."""

    counts: np.ndarray  # voxels of each label
    voxels: np.ndarray  # intensities (C, n)
    foreground: np.ndarray  # intensities of foreground voxels (C, n)
    centres: np.ndarray  # mean place of each label (labels, 3), share of the volume; NaN where it is absent
    extent: np.ndarray  # The foreground's lengths (mm); NaN without any.
    flat: np.ndarray | None  # share of the places where labels touch that lie in a plane across each axis (3)


def read_fingerprint(data: Data) -> Fingerprint:
    """Return the fingerprint of a data set, with progress. Raises UserError that lists every problem of headers."""
    dataset = read_dataset(data)
    train, val = split(dataset, data)
    cases = list(dict.fromkeys([*train, *val]))
    headers = check_cases(dataset, cases, data).sound_headers()
    grid_of: dict[str, Grid] = {}
    for case in cases:
        grid = headers[case.id].stored
        assert grid is not None, "sound_headers raises for a case without a grid"
        grid_of[case.id] = grid
    chosen = _chosen(train, grid_of)
    samples = [_sample(dataset, case, data) for case in track(chosen, "sampling intensities and labels", len(chosen))]
    return Fingerprint(
        name=dataset.name,
        training_cases=len(train),
        held_out=[(grid_of[case.id].shape, grid_of[case.id].spacing) for case in val],
        sampled_cases=len(samples),
        shapes=[grid.shape for grid in grid_of.values()],
        spacings=[grid.spacing for grid in grid_of.values()],
        classes=_class_shares(dataset, samples),
        model=build.options_of_data(dataset),
        channels=[_intensity(name, number, samples) for number, name in enumerate(dataset.channels)],
        ordered_axes=_ordered_axes(samples),
        cut_axes=_cut_axes(samples),
        foreground=_median_extent(samples),
    )


def _chosen(train: Sequence[Case], grid_of: dict[str, Grid]) -> list[Case]:
    """Return training cases, evenly spread, that are few and small enough to be read."""
    step = -(-len(train) // CASES_SAMPLED)
    chosen: list[Case] = []
    voxels = 0
    for case in train[::step]:
        voxels += prod(grid_of[case.id].shape)
        if voxels > VOXELS_SAMPLED and len(chosen) >= LEAST_SAMPLED:
            break
        chosen.append(case)
    return chosen


def _sample(dataset: DatasetInfo, case: Case, data: Data) -> CaseSample:
    """Return a sample of a case. Raises UserError for one that cannot be read."""
    labels = dataset.label_count
    values = LabelValues.of_files(dataset)
    volume = read_volume(case, values, None, ImageFiles(data))
    label = volume.label
    assert label is not None, volume.case_id
    counts = np.bincount(label.ravel(), minlength=labels)[:labels]
    image = volume.image.reshape(len(volume.image), -1)
    voxels = image[:, subsample_indices(image.shape[1], VOXELS_OF_CASE)]
    centres = np.empty((labels, 3))
    extent = np.full(3, np.nan)
    for axis in range(3):
        planes = np.moveaxis(label, axis, 0)
        profiles = np.array([np.bincount(plane.ravel(), minlength=labels)[:labels] for plane in planes])
        with np.errstate(invalid="ignore"):  # 0 / 0 of a label that is absent
            centres[:, axis] = np.arange(len(planes)) @ profiles / counts / len(planes)
        rows = np.flatnonzero(profiles[:, 1:].any(1))
        if rows.size:
            extent[axis] = (rows[-1] - rows[0] + 1) * volume.grid.spacing[axis]
    foreground = foreground_sample(volume.image, label, dataset.ignore)
    return CaseSample(counts, voxels, foreground, centres, extent, _flat_shares(label, labels))


def _flat_shares(label: np.ndarray, labels: int) -> np.ndarray | None:
    """Return the share of the places where two foreground labels touch that lie in a plane across each axis (3).

    The plane is the median one with its neighbours. None where no two of them touch.
    """
    flat = np.zeros(3)
    touching = 0
    for axis in range(3):
        along = np.moveaxis(label, axis, 0)
        before = along[:-1]
        after = along[1:]
        is_foreground = (before > 0) & (before < labels) & (after > 0) & (after < labels)
        places = np.nonzero(is_foreground & (before != after))[0]
        touching += places.size
        if places.size:
            flat[axis] = (np.abs(places - np.median(places)) <= 1).sum()
    return flat / touching if touching else None


def _class_shares(dataset: DatasetInfo, samples: Sequence[CaseSample]) -> list[tuple[str, float, float]]:
    """Return the shares of each class, or of the background and of each region, which holds several labels."""
    counts = np.array([sample.counts for sample in samples])
    regions = dataset.regions
    labels_of = [(label,) for label in range(dataset.label_count)] if regions is None else [(0,), *regions.labels]
    shares = []
    for name, labels in zip(dataset.classes, labels_of, strict=True):
        held = counts[:, labels].sum(1)
        shares.append((name, float(held.sum() / max(1, counts.sum())), float((held > 0).mean())))
    return shares


def _intensity(name: str, channel: int, samples: Sequence[CaseSample]) -> ChannelIntensity:
    values = np.concatenate([sample.voxels[channel] for sample in samples])
    foreground = np.concatenate([sample.foreground[channel] for sample in samples])
    percentiles = np.percentile(values, PERCENTILES).tolist()
    is_ct_like = percentiles[0] <= AIR and percentiles[-1] > 0 and bool((values == np.rint(values)).all())
    of_foreground = (float(foreground.mean()), float(foreground.std())) if foreground.size else None
    return ChannelIntensity(name, percentiles, float(values.mean()), float(values.std()), of_foreground, is_ct_like)


def _ordered_axes(samples: Sequence[CaseSample]) -> tuple[int, ...]:
    """Return the axes along which two foreground classes keep their order in every sampled case that has both."""
    centres = np.array([sample.centres[1:] for sample in samples])
    difference = centres[:, :, None] - centres[:, None]
    is_known = ~np.isnan(difference)
    enough = is_known.sum(0) >= LEAST_ORDERED
    always = (np.where(is_known, difference, 1) > 0).all(0)
    return tuple(np.flatnonzero((enough & always).any((0, 1))).tolist())


def _cut_axes(samples: Sequence[CaseSample]) -> tuple[int, ...]:
    """Return the axes across which classes meet in a plane, in nearly every sampled case where they touch."""
    shares = [sample.flat for sample in samples if sample.flat is not None]
    if len(shares) < LEAST_ORDERED:
        return ()
    is_cut = (np.array(shares) >= FLAT_SHARE).mean(0) >= CUT_SHARE
    return tuple(np.flatnonzero(is_cut).tolist())


def _median_extent(samples: Sequence[CaseSample]) -> Triple:
    extents = np.array([sample.extent for sample in samples])
    known = extents[~np.isnan(extents).any(1)]
    if not known.size:
        raise UserError("no sampled training case has a foreground voxel; check the label maps")
    x, y, z = np.median(known, axis=0).tolist()
    return x, y, z


def tables(fingerprint: Fingerprint) -> list[tuple[str, Table]]:
    """Return the fingerprint as titled tables for people."""
    rows = [_spread("size x y z (voxels)", fingerprint.shapes)]
    rows.append(_spread("spacing x y z (mm)", fingerprint.spacings))
    title = (
        f"{fingerprint.name}: {len(fingerprint.shapes)} cases with labels, {fingerprint.training_cases} to learn from"
    )
    parts = [(title, Table(["headers of all cases", "smallest", "median", "largest"], rows))]
    rows = [[name, percent(voxels, 1), percent(cases, 1)] for name, voxels, cases in fingerprint.classes]
    sample = f"of {fingerprint.sampled_cases} cases"
    parts.append((f"Classes, {sample}", Table(["class", "share of voxels", "share of cases"], rows)))
    rows = []
    for channel in fingerprint.channels:
        cells = [f"{number:.4g}" for number in channel.percentiles]
        cells.append(f"{channel.mean:.3g} ± {channel.std:.3g}")
        cells.append("{:.3g} ± {:.3g}".format(*channel.foreground) if channel.foreground else "")
        rows.append([channel.name, *cells, "yes" if channel.is_ct_like else "no"])
    head = ["channel", "0.5 %", "median", "99.5 %", "mean ± SD", "foreground", "like CT"]
    parts.append((f"Intensities, {sample}", Table(head, rows)))
    return parts


def _spread(name: str, triples: Sequence[Sequence[float]]) -> list[str]:
    """Return the smallest, median and largest of each axis."""
    quantiles = np.quantile(triples, (0, 0.5, 1), axis=0)
    return [name, *(" x ".join(f"{value:.3g}" for value in row) for row in quantiles)]

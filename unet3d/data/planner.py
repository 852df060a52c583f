"""Patch, spacing and levels that suit the sizes of a data set, from headers alone."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from math import prod
from operator import mul
from typing import TypeVar

import numpy as np

from unet3d.base.errors import UserError
from unet3d.config.rules import check, effective_model
from unet3d.config.schema import Config, Model
from unet3d.data.cases import Case
from unet3d.data.grids import Grid
from unet3d.data.headers import read_grid
from unet3d.model import geometry
from unet3d.model.geometry import Triple
from unet3d.planning.architecture import ISOTROPIC, levels_of, target_spacing

SPACING_VARIATION = 1.1  # ratio of the spacings of cases from which on they are resampled
MIN_PATCH_FILL = 0.5  # smallest share of a patch that volumes must fill
CASES_SAMPLED = 200  # whose sizes are compared with the patch
T = TypeVar("T")


def sampled(items: Sequence[T]) -> Sequence[T]:
    """Return at most CASES_SAMPLED of the items, evenly spread."""
    step = -(-len(items) // CASES_SAMPLED)
    return items[:: step or 1]


def read_grids(cases: Sequence[Case], spacing: Sequence[float] | None) -> list[Grid]:
    """Return the grids that the network sees of some cases; those that cannot be read are left out."""
    return list(_readable_grids(sampled(cases), spacing))


def _readable_grids(cases: Sequence[Case], spacing: Sequence[float] | None) -> Iterator[Grid]:
    for case in cases:
        with contextlib.suppress(UserError):  # `check_cases` reports it
            yield read_grid(case, spacing)


def unsuitable_patch(config: Config, targets: Sequence[Grid | None]) -> str | None:
    """Return why a patch does not suit cases with these grids, and one that does; None if it suits.

    It does not where most of it is padding in most of these cases. A grid is None where it could not be read.
    """
    grids = [grid for grid in sampled(targets) if grid is not None]
    patch = config.data.patch
    model_config = effective_model(config.model)
    output = geometry.output_size(patch, model_config)  # valid convolutions return less than they take
    shares = [filled(output, grid.shape) for grid in grids]
    share = float(np.median(shares)) if shares else 1.0
    if share >= MIN_PATCH_FILL:
        return None
    median = np.median([grid.shape for grid in grids], axis=0)
    x, y, z = (int(n) for n in median)
    part = "it"
    remedy = "give a smaller one"
    if output != tuple(patch):
        part = f"its output of {'x'.join(map(str, output))}"
    elif model_config.features:
        other = suitable_patch(config, model_config, (x, y, z), grids[0].spacing)
        if other is not None:
            remedy = f"data.patch={other} suits them".replace(", ", ",")
    volumes = f"volumes of {x}x{y}x{z} voxels, the median in training"
    what = f"{volumes}, fill {100 * share:.0f}% of {part}, the rest is padding"
    return f"data.patch={patch}: {what}; {remedy}"


def suitable_options(config: Config, stored: Sequence[Grid | None]) -> list[str]:
    """Return options that suit cases stored on these grids better than the config's.

    Their median spacing for all, and levels and patch for it, as nnU-Net plans (arXiv:1809.10486, 2.2), but a patch of
    no more voxels than the config's.
    """
    grids = [grid for grid in sampled(stored) if grid is not None]
    model_config = effective_model(config.model)
    if not grids:
        return []
    if not model_config.features or model_config.padding == "valid":
        return []
    options: dict[str, object] = {}
    spacing = config.data.spacing
    if spacing is None:
        spacing = common_spacing([grid.shape for grid in grids], [grid.spacing for grid in grids])
        if spacing is not None:
            options["data.spacing"] = spacing
    spacing = spacing or list(grids[0].spacing)
    is_anisotropic = max(spacing) > ISOTROPIC * min(spacing)
    if is_anisotropic and _is_isotropic(model_config):
        options["model.kernels"] = "auto"
        options["model.strides"] = "auto"
        adapted = replace(config.model, kernels="auto", strides="auto")
        config = replace(config, model=adapted)
    sizes = [np.multiply(grid.shape, grid.spacing) / spacing for grid in grids]
    x, y, z = (round(n) for n in np.median(sizes, axis=0))
    patch = suitable_patch(config, effective_model(config.model), (x, y, z), spacing)
    if patch and options and patch != config.data.patch:
        options["data.patch"] = patch
    return [f"{name}={value}".replace(" ", "") for name, value in options.items()]


def common_spacing(shapes: Sequence[Sequence[int]], spacings: Sequence[Sequence[float]]) -> list[float] | None:
    """Return the target spacing (mm) of cases whose spacings vary; None where they do not."""
    low = np.min(spacings, axis=0)
    high = np.max(spacings, axis=0)
    if (high <= SPACING_VARIATION * low).all():
        return None
    return [float(f"{mm:.3g}") for mm in target_spacing(shapes, spacings)]


def _is_isotropic(model_config: Model) -> bool:
    """Return whether all kernels and strides are given, and equal along the axes."""
    if "auto" in (model_config.kernels, model_config.strides):
        return False
    sizes = [
        *geometry.kernels(model_config),
        *geometry.strides(model_config),
    ]
    return all(len({*size}) == 1 for size in sizes)


def filled(patch: Sequence[int], sizes: Sequence[int]) -> float:
    """Return the share of a patch that a volume of these sizes (voxels) fills."""
    shares = [min(p, n) / p for p, n in zip(patch, sizes, strict=True)]
    return prod(shares)


def suitable_patch(
    config: Config,
    model_config: Model,
    sizes: Triple,
    spacing: Sequence[float],
) -> list[int] | None:
    """Return a patch for volumes of these sizes (voxels), whose maps the strides divide; None without one.

    It has no more voxels than the config's.
    """
    if model_config.strides == "auto":
        strides = levels_of(spacing, sizes, len(model_config.features)).strides
    else:
        strides = geometry.strides(model_config)
    units = list[int]()
    for axis, size in enumerate(sizes):
        units.append(_unit([stride[axis] for stride in strides], size))
    above = [-(-size // unit) * unit for size, unit in zip(sizes, units, strict=True)]
    below = [size // unit * unit for size, unit in zip(sizes, units, strict=True)]
    patch = above if filled(above, sizes) >= MIN_PATCH_FILL else below
    while prod(patch) > prod(config.data.patch):
        shrinkable = [axis for axis in range(3) if patch[axis] > units[axis]]
        if not shrinkable:
            return None
        longest = max(shrinkable, key=patch.__getitem__)
        patch[longest] -= units[longest]
    other = replace(config, data=replace(config.data, patch=patch))
    try:
        check(other, here=False)
    except UserError:
        return None
    return patch


def _unit(strides: Sequence[int], size: int) -> int:
    """Return what a length along an axis of this size (voxels) is to be a multiple of.

    The product of the strides, as far as it reaches.
    """
    return max(
        (unit for unit in accumulate(strides, mul) if unit <= size),
        default=1,
    )

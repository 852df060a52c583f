"""Whether a patch is mostly padding in the volumes of a data set, from headers alone."""

import contextlib
from collections.abc import Iterator, Sequence
from math import prod
from typing import TypeVar

import numpy as np

from unet3d.base.errors import UserError
from unet3d.config.rules import effective_model
from unet3d.config.schema import Model
from unet3d.data.cases import Case
from unet3d.data.grids import Grid
from unet3d.data.headers import read_grid
from unet3d.model import geometry

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


def mostly_padding(model: Model, patch: list[int], targets: Sequence[Grid | None]) -> str | None:
    """Return a line for a patch most of which is padding in most cases with these grids; None for any other patch.

    A grid is None where it could not be read.
    """
    grids = [grid for grid in sampled(targets) if grid is not None]
    output = geometry.output_size(patch, effective_model(model))  # valid convolutions return less than they take
    shares = [filled(output, grid.shape) for grid in grids]
    share = float(np.median(shares)) if shares else 1.0
    if share >= MIN_PATCH_FILL:
        return None
    x, y, z = (int(n) for n in np.median([grid.shape for grid in grids], axis=0))
    part = "it" if output == tuple(patch) else f"its output of {'x'.join(map(str, output))}"
    volumes = f"volumes of {x}x{y}x{z} voxels, the median in training"
    problem = f"{volumes}, fill {100 * share:.0f}% of {part}, the rest is padding"
    return f"data.patch={patch}: {problem}; give a smaller one, or let python -m unet3d plan choose it"


def filled(patch: Sequence[int], sizes: Sequence[int]) -> float:
    """Return the share of a patch that a volume of these sizes (voxels) fills."""
    shares = [min(p, n) / p for p, n in zip(patch, sizes, strict=True)]
    return prod(shares)

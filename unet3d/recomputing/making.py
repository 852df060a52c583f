"""A map written tile by tile, also over a source of which the next tile still reads rows."""

import itertools
from collections.abc import Mapping, Sequence

from torch import Tensor

from unet3d.recomputing.graph import Value
from unet3d.recomputing.state import State
from unet3d.recomputing.tiles import MapPlan, TilePlan, make_rows


def make_into(
    plan: MapPlan, target: Tensor, maps: Mapping[Value, Tensor], state: State, over: Value | None = None
) -> None:
    """Write a map into a target; `over`: the source whose memory that is."""
    waits = over is not None and reads_back(plan.tiles, over)
    before: tuple[TilePlan, Tensor] | None = None  # rows to be written once the tile behind them is made
    for tile in plan.tiles:
        rows = make_rows(plan, tile, maps, state)
        if before is not None:
            _write(target, *before, state.axis)
        before = (tile, rows)
        if not waits:
            _write(target, *before, state.axis)
            before = None
        del rows
    if before is not None:
        _write(target, *before, state.axis)


def _write(target: Tensor, tile: TilePlan, rows: Tensor, axis: int) -> None:
    first, end = tile.span
    target.narrow(axis, first, end - first).copy_(rows)


def reads_back(tiles: Sequence[TilePlan], source: Value) -> bool:
    """Return whether a tile reads rows of a source that lie within the tile before it."""
    return any(after.spans[source][0] < before.span[1] for before, after in itertools.pairwise(tiles))


def reads_far_back(tiles: Sequence[TilePlan], source: Value) -> bool:
    """Return whether a tile reads rows of a source that lie before the tile before it."""
    return any(after.spans[source][0] < before.span[0] for before, after in itertools.pairwise(tiles))


def waiting_numbers(tiles: Sequence[TilePlan], value: Value, axis: int) -> int:
    """Return the numbers of the rows of a map that wait to be written, at most."""
    longest = max(end - first for first, end in (tile.span for tile in tiles))
    return value.shape.numel() // value.shape[axis] * longest

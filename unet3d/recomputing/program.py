"""The program of all passes over images of one size: maps, their tiles, and schedules."""

import copy
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor

from unet3d.recomputing import search
from unet3d.recomputing.along import spans
from unet3d.recomputing.costs import Sizes
from unet3d.recomputing.graph import Value
from unet3d.recomputing.maps import Map, Maps
from unet3d.recomputing.rules import Span
from unet3d.recomputing.schedule import EMPTY, Schedule
from unet3d.recomputing.tiles import MapPlan, plan_map, tile_spans


@dataclass(eq=False, repr=False)
class Program:
    """The program that all passes over images of one size share."""

    maps: Maps
    numbers: int  # of a tile
    on_cpu: bool
    wanted: frozenset[Value]  # values of which a gradient is needed
    schedule: Schedule = EMPTY
    sizes: Sizes | None = None  # by which schedules are chosen; None while they are measured
    fixed_bytes: int = 0  # of weights, buffers, image and random numbers, which are there through all of a pass
    plain_bytes: int | None = None  # predicted of the network's own pass, like `peak_bytes`; None: not known
    plans: dict[Any, MapPlan] = field(default_factory=dict)
    spans: dict[int, list[Span]] = field(default_factory=dict)  # the parts of groups, by the index of their maps

    def __repr__(self) -> str:
        return f"Program({self.schedule.work} forward passes, {self.peak_bytes} bytes)"

    @property
    def peak_bytes(self) -> int:
        """Predicted bytes of tensors that are alive at once in the forward and the backward pass, at most."""
        return self.fixed_bytes + self.schedule.peak_bytes

    @property
    def saves_memory(self) -> bool:
        """Whether the schedule needs less than the network's own pass, as far as that is known."""
        return self.plain_bytes is None or self.peak_bytes < self.plain_bytes

    def serves(self, image: Tensor) -> bool:
        """Return whether the program is for images of this size."""
        return image.shape == self.maps.graph.image.shape

    @cached_property
    def schedules(self) -> list[Schedule]:
        """Schedules that could be taken, from the least work to the least memory."""
        assert self.sizes is not None
        return search.front(self.sizes)

    def by(self, schedule: Schedule) -> "Program":
        """Return the program that follows another schedule."""
        program = copy.copy(self)
        program.schedule = schedule
        return program

    def plan(self, map_: Map, through: tuple[Value, ...] = (), without: Value | None = None) -> MapPlan:
        """Return the tiles of a map; `through`: sources that are in passing; `without`: one that gets no gradient."""
        key = (map_.index, through, without)
        if key not in self.plans:
            rows = tile_spans(map_, self.maps.axis, self.numbers, self.on_cpu)
            if through:
                map_ = self.maps.through(map_, frozenset(through))
            wanted = self.wanted - {without}
            self.plans[key] = plan_map(map_, self.maps.axis, rows, wanted, frozenset(through))
        return self.plans[key]

    def parts(self, map_: Map) -> list[Span]:
        """Return the parts in which a group is carried out; none where it is run at once."""
        if map_.index not in self.spans:
            self.spans[map_.index] = spans(map_.along, map_.passing, self.numbers)
        return self.spans[map_.index]

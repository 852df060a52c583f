"""The program of all passes over images of one size: maps, their tiles, and a schedule."""

from dataclasses import dataclass, field
from typing import Any

from unet3d.recomputing.along import spans
from unet3d.recomputing.graph import Value
from unet3d.recomputing.maps import Map, Maps
from unet3d.recomputing.rules import Span
from unet3d.recomputing.schedule import Schedule
from unet3d.recomputing.tiles import MapPlan, plan_map


@dataclass(eq=False)
class Program:
    """The program that all passes over images of one size share."""

    maps: Maps
    numbers: int  # of a tile
    on_cpu: bool
    wanted: frozenset[Value]  # values of which a gradient is needed
    schedule: Schedule
    plans: dict[Any, MapPlan] = field(default_factory=dict)
    spans: dict[int, list[Span]] = field(default_factory=dict)  # the parts of groups, by the index of their maps

    def plan(self, map_: Map, through: tuple[Value, ...] = (), without: Value | None = None) -> MapPlan:
        """Return the tiles of a map; `through`: sources that are in passing; `without`: one that gets no gradient."""
        key = (map_.index, through, without)
        if key not in self.plans:
            if through:
                map_ = self.maps.through(map_, frozenset(through))
            self.plans[key] = plan_map(
                map_,
                axis=self.maps.axis,
                numbers=self.numbers,
                on_cpu=self.on_cpu,
                wanted=self.wanted - {without},
            )
        return self.plans[key]

    def parts(self, map_: Map) -> list[Span]:
        """Return the parts in which a group is carried out; none where it is run at once."""
        if map_.index not in self.spans:
            self.spans[map_.index] = spans(map_.along, map_.passing, self.numbers)
        return self.spans[map_.index]

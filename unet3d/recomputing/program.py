"""The program of all passes over images of one size: maps, their tiles, schedules, and which of these a step follows.

All rows that a tile needs are known before the first step: `TilePlan` has them for each value.
"""

import copy
import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

from torch import Tensor

from unet3d.base.errors import UserError
from unet3d.base.fit import fit
from unet3d.base.types import mib
from unet3d.recomputing import search
from unet3d.recomputing.compiler import Sizes
from unet3d.recomputing.graph import DROPOUTS, Value, gives_view
from unet3d.recomputing.groups import spans
from unet3d.recomputing.maps import Map, Maps
from unet3d.recomputing.readable import Code
from unet3d.recomputing.rules import RULES, Span
from unet3d.recomputing.search import EMPTY, Schedule, compile_schedule

MOST = 2  # times the rows asked for: tiles are as much larger, so that torch convolves them by oneDNN
PLANS = ("lean", "tiles", "auto")  # little work, little memory, what a budget allows
WORTH_FOR_LEAN = 1.3  # Percent of memory that 1 % of a forward pass is worth.
WORTH_FOR_TILES = 0.1
FEW = 50  # times fewer numbers than the largest value has: so small is an excitation beside the map that it scales

Streamed = tuple[int, ...]  # sources of a map that are computed tile by tile, and not stored


@dataclass(frozen=True, eq=False)
class TilePlan:
    """A tile of a map: the rows of each fused value and of each source."""

    span: Span  # the rows of the map
    spans: Mapping[Value, Span]  # Spans of sources and fused values.
    inputs: Mapping[Value, Sequence[Span]]  # Spans that each fused value is made from.


@dataclass(frozen=True, eq=False)
class MapPlan:
    """All tiles of a map, and what backward needs to know of the fused values."""

    map: Map
    tiles: Sequence[TilePlan]
    wanted: frozenset[Value]  # values of which a gradient is needed
    ends: frozenset[Value]  # fused values whose gradients go no further: they are maps elsewhere

    @cached_property
    def read(self) -> Set[Value]:
        """Values that gradients are computed from, and those from which rows among them are made."""
        read: set[Value] = set()
        for value in self.map.fused:
            if value in self.wanted and value not in self.ends:
                read.update(read_by_gradient(value))
        for value in reversed(self.map.fused):
            if value in read:
                read.update(value.inputs)
        return read


def plan_tile(map_: Map, axis: int, span: Span) -> TilePlan:
    """Return the rows of all values from which these rows are made."""
    spans: dict[Value, Span] = {map_.value: span}
    inputs: dict[Value, Sequence[Span]] = {}
    for value in reversed(map_.fused):
        inputs[value] = RULES[value.op].rows(value, axis, spans[value])
        for source, (low, high) in zip(value.inputs, inputs[value], strict=True):
            first, end = spans.get(source, (low, high))
            spans[source] = (min(first, low), max(end, high))
    return TilePlan(span, spans, inputs)


def tile_spans(map_: Map, axis: int, numbers: int, on_cpu: bool) -> list[Span]:
    """Return the rows of each tile of a map: the largest fused value has about `numbers` numbers."""
    length = map_.value.shape[axis]
    if length == 1:
        return [(0, 1)]
    largest = max(value.shape.numel() for value in (*map_.fused, *map_.sources) if len(value.shape) == 5)
    if not on_cpu:
        count = min(length, math.ceil(largest / numbers))
    else:
        weighted = [value for value in map_.fused if value.op not in DROPOUTS]
        weights = [weight.shape.numel() for value in weighted for weight in value.weights()]
        if largest <= max(weights, default=0):  # A second gradient of a weight would lie with each tile but the first.
            numbers = largest
        rows = max(1, round(numbers * length / largest))
        count = math.ceil(length / rows)
        for value in map_.fused:
            rule = RULES[value.op]
            fewest_of_value = rule.fewest_rows(value, axis)
            if fewest_of_value is not None:
                fewest = math.ceil(fewest_of_value * length / value.shape[axis])
                if fewest <= MOST * rows:  # Otherwise a tile is convolved as two images.
                    count = min(count, max(1, length // fewest))
    return list(pairwise(length * index // count for index in range(count + 1)))


def read_by_gradient(value: Value) -> Sequence[Value]:
    """Return the values from which the gradient of an operation is computed."""
    reads = RULES[value.op].reads
    if reads == "result":
        return [value]
    return value.inputs if reads == "inputs" else []


def reads_back(tiles: Sequence[TilePlan], source: Value) -> bool:
    """Return whether a tile reads rows of a source that lie within the tile before it."""
    return any(after.spans[source][0] < before.span[1] for before, after in pairwise(tiles))


def reads_far_back(tiles: Sequence[TilePlan], source: Value) -> bool:
    """Return whether a tile reads rows of a source that lie before the tile before it."""
    return any(after.spans[source][0] < before.span[0] for before, after in pairwise(tiles))


@dataclass(eq=False, repr=False)
class Program:
    """The program that all passes over images of one size share."""

    maps: Maps
    numbers: int  # Numbers in a tile.
    on_cpu: bool
    wanted: frozenset[Value]  # values of which a gradient is needed
    schedule: Schedule = EMPTY
    sizes: Sizes | None = None  # Schedules are chosen by these; None while they are measured.
    fixed_bytes: int = 0  # Weights, buffers, image and random numbers stay through all of a pass.
    plain_bytes: int | None = None  # predicted of the network's own pass, like `peak_bytes`; None: not known
    # What its network's code names, and what it was traced from: networks that are equal in that have the same graph.
    traced: tuple[Code, tuple[Any, ...]] | None = None
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

    def plan(self, map_: Map, streamed: Streamed = (), without: Value | None = None) -> MapPlan:
        """Return the tiles of a map; `streamed`: sources that are not stored; `without`: one that gets no gradient."""
        key = (map_.index, streamed, without)
        if key not in self.plans:
            spans_of_tiles = tile_spans(map_, self.maps.axis, self.numbers, self.on_cpu)
            ends = frozenset(self.maps.maps[index].value for index in streamed)
            if streamed:
                map_ = self.maps.streaming(map_, ends)
            tiles = [plan_tile(map_, self.maps.axis, span) for span in spans_of_tiles]
            self.plans[key] = MapPlan(map_, tiles, self.wanted - {without}, ends)
        return self.plans[key]

    def parts(self, map_: Map) -> list[Span]:
        """Return the parts in which a group is carried out; none where it is run at once."""
        if map_.index not in self.spans:
            self.spans[map_.index] = spans(map_.along, map_.fused, self.numbers)
        return self.spans[map_.index]


# Plans


class Technique(NamedTuple):
    """A way to save the memory of maps: backward computes them a second time."""

    segment_starts: tuple[int, ...] = ()  # the first stage of each checkpointed segment; (): no checkpointing
    program: Program | None = None  # Schedule of recomputation.
    window_program: Program | None = None  # Passes without gradients follow it, too.
    forward_recompute_fraction: float = 0.0  # convolution FLOPs computed twice, as a share of a forward pass


PLAIN = Technique()


def by_plan(program: Program, plan: str, budget: int | None = None) -> Program:
    """Return the program by the schedule of a plan, and for "auto" of a budget in bytes.

    Raises UserError for a budget that neither a schedule nor the network's own pass keeps.
    """
    if plan == "lean":
        plain = math.inf if program.plain_bytes is None else program.plain_bytes - program.fixed_bytes
        return program.by(leanest(program.schedules, plain))
    if plan == "tiles":
        return program.by(smallest(program.schedules))
    assert budget is not None
    number = fit(program.schedules, lambda schedule: schedule.peak_bytes, budget - program.fixed_bytes)
    if number is not None:
        return program.by(program.schedules[number])
    least = program.by(least_memory(program.schedules))
    if program.plain_bytes is not None and program.plain_bytes <= budget:
        return least
    raise UserError(
        f"budget={mib(budget)}MiB: a step needs at least {mib(least.peak_bytes)} MiB of tensors; take a smaller patch "
        "or a smaller network"
    )


def without_backward(program: Program) -> Program:
    """Return the program whose pass keeps nothing for a backward pass."""
    assert program.sizes is not None
    return program.by(compile_schedule(program.sizes, [0] * (program.sizes.count + 1)))


def leanest(schedules: Sequence[Schedule], plain: float = math.inf) -> Schedule:
    """Return the schedule that weighs memory and work best, of those with little more than the least work.

    Where that needs no less than the `plain` pass (bytes without weights and image), twice as much more work may be
    taken for one that does.
    """
    least_work = min(schedule.work for schedule in schedules)
    best = _best(schedules, least_work + search.LITTLE_WORK, WORTH_FOR_LEAN)
    if best.peak_bytes < plain:
        return best
    most_work = least_work + 2 * search.LITTLE_WORK
    saving = [schedule for schedule in schedules if schedule.peak_bytes < plain and schedule.work <= most_work]
    return _best(saving or [best], most_work, WORTH_FOR_LEAN)


def smallest(schedules: Sequence[Schedule]) -> Schedule:
    """Return the schedule of bearable work that needs least memory, or hardly more at much less work."""
    return _best(schedules, search.MOST_WORK, WORTH_FOR_TILES)


def least_memory(schedules: Sequence[Schedule]) -> Schedule:
    """Return the schedule of least memory, whatever its work."""
    return min(schedules, key=lambda schedule: schedule.peak_bytes)


def _best(schedules: Sequence[Schedule], most_work: float, worth: float) -> Schedule:
    """Return the schedule that weighs memory and work best, of those of at most that work if there are any."""

    def cost(schedule: Schedule) -> float:
        return math.log(schedule.peak_bytes) + worth * schedule.work

    bearable = [schedule for schedule in schedules if schedule.work <= most_work]
    return min(bearable or schedules, key=cost)


def work_line(program: Program) -> str:
    """Return the work of a program, and which operations have no rule: not those of few numbers, which cost nothing."""
    percent = round(100 * (program.schedule.work - 1))
    work = f"{percent} % more forward work" if percent > 0 else "no more forward work"
    largest = max(value.shape.numel() for value in program.maps.graph.values)
    whole: dict[str, None] = {}
    for map_ in program.maps.whole:
        if FEW * max(value.shape.numel() for value in (*map_.fused, *map_.sources)) < largest:
            continue
        value = next((value for value in map_.fused if not gives_view(value.target)), map_.value)
        whole[f"{value.op} in {value.layer}" if value.layer else value.op] = None
    if not whole:
        return work
    first = ", ".join(list(whole)[:3])
    more = f" and {len(whole) - 3} others" if len(whole) > 3 else ""
    return f"{work}; checkpointed as a whole (correct, saves less): {first}{more}"


def describe(program: Program, plan: str, held: int = 0) -> str:
    """Return a line: the bytes of a schedule and of the network's own pass, the schedule's work, what has no rule.

    `held`: bytes that lie in memory besides, and are counted in both.
    """
    kinds = ["weights", "gradients", "activations"]
    if not program.on_cpu:
        kinds.append("workspaces of cuDNN")
    if held:
        kinds.append(f"{mib(held)} MiB held")
    *first, last = kinds
    size = f"{mib(program.peak_bytes)} MiB"
    if program.plain_bytes is not None:
        size = f"{size} instead of {mib(program.plain_bytes)} MiB"
    sizes = f"{size} (predicted) for {', '.join(first)} and {last}"
    if program.saves_memory:
        return f"recompute={plan}: {sizes}, {work_line(program)}"
    assert program.plain_bytes is not None
    line = f"recompute={plan}: would need {sizes}, so the network runs plain"
    if plan == "lean" and program.by(smallest(program.schedules)).saves_memory:
        return f"{line}; plan='tiles' would need less"
    return line

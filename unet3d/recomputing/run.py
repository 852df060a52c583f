"""The executor: carries out a schedule's instructions, in a forward pass and its backward pass."""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import zip_longest

import torch
from torch import Tensor

from unet3d.recomputing import state as of_pass
from unet3d.recomputing.compiler import (
    Backward,
    BeginBackward,
    Compute,
    Instruction,
    NormBackward,
    Place,
    Release,
    Target,
)
from unet3d.recomputing.compute import RowGradient, Sink, TileRun, apart, compute_group, gradients_of_group
from unet3d.recomputing.graph import Value
from unet3d.recomputing.maps import Map
from unet3d.recomputing.program import MapPlan, Program, TilePlan, reads_back
from unet3d.recomputing.rules import memory_of, rows_of, shape_of_rows
from unet3d.recomputing.rules.normalisation import norm_of, take_statistics
from unet3d.recomputing.state import State


class Executor:
    """The maps and gradients of one pass."""

    def __init__(self, program: Program, state: State, autocast: torch.dtype | None, device: torch.device) -> None:
        self.program = program
        self.state = state
        self.device = device
        self.autocast = autocast
        self.maps: dict[Value, Tensor] = {}
        self.gradients: dict[Value, Tensor | None] = {}  # None: of an output that the loss does not use
        self.memory_of_outputs: dict[Value, int] = {}  # that no map reads: their gradients are not ours to write over
        self.versions: list[tuple[str, Tensor, tuple[int, int]]] = []
        self.by_index = program.maps.maps
        self.instructions = list(program.schedule.instructions)

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        """Return the outputs."""
        graph = self.program.maps.graph
        self.maps[graph.image] = image.to(self.state.dtype)
        if not self.program.on_cpu:
            self.state.convert(self.program.maps.converted_weights)
        turn = self.instructions.index(BeginBackward())
        for instruction in self.instructions[:turn]:
            self._execute(instruction)
        outputs = tuple(self.maps[value] for value in graph.outputs)
        read_again: dict[str, Tensor] = {}  # in backward, by names
        for number, value in enumerate(graph.outputs):
            if self.program.maps.users[value]:
                self.maps[value] = self.maps[value].detach()  # The output itself will hold this pass, in a circle.
                read_again[f"output {number}"] = self.maps[value]
            else:
                self.memory_of_outputs[value] = memory_of(self.maps.pop(value))
        self.instructions = self.instructions[turn + 1 :]
        for name in self.program.maps.weights_read_again:
            read_again[name] = self.state.weights[name]
        for what, tensor in read_again.items():
            if not tensor.is_inference():
                self.versions.append((what, tensor, _version_of(tensor)))
        return outputs

    def refuse_changes(self) -> None:
        """Raise RuntimeError, as autograd does, if what backward reads was changed in place since forward."""
        for what, tensor, version in self.versions:
            if _version_of(tensor) != version:
                raise RuntimeError(
                    f"recompute: {what} was changed in place between forward and backward, which reads it again; "
                    "change a copy of it (clone())"
                )

    def backward(self, image: Tensor, gradients: Sequence[Tensor | None]) -> Tensor | None:
        """Return the gradient of the image, if it is wanted; the weights' gradients are in the state."""
        graph = self.program.maps.graph
        self.maps[graph.image] = image.to(self.state.dtype)
        for value, gradient in zip(graph.outputs, gradients, strict=True):
            if gradient is not None and value not in self.memory_of_outputs:
                gradient = gradient.clone()  # The gradients of its readers are added to it.
            self.gradients[value] = gradient
        del gradients, gradient
        for instruction in self.instructions:
            self._execute(instruction)
        for map_ in self.by_index:
            if map_.value not in self.program.wanted:  # nothing before it is trained, and no gradient was completed
                self._close_sums(map_)
        self.state.close_gradients()
        return self.gradients.pop(graph.image, None)

    def _execute(self, instruction: Instruction) -> None:
        assert not isinstance(instruction, BeginBackward)
        map_ = self.by_index[instruction.map]
        if isinstance(instruction, Release):
            self.maps.pop(map_.value, None)
            return
        with of_pass.observer.works_on(map_.value.layer, not isinstance(instruction, Compute)):
            match instruction:
                case Compute(_, inplace_on, streamed):
                    self._compute(map_, inplace_on, self._values(streamed))
                case NormBackward(_, streamed):
                    plan = None if streamed is None else self.program.plan(map_, self._values(streamed))
                    self._norm_backward(map_, plan)
                case Backward(_, targets, streamed, is_two_pass):
                    self._backward(map_, targets, self._values(streamed), is_two_pass)
            self.state.forget_prepared()

    def _values(self, indices: Sequence[int]) -> tuple[Value, ...]:
        return tuple(self.by_index[index].value for index in indices)

    # Maps

    def _compute(self, map_: Map, inplace_on: int | None, streamed: tuple[Value, ...]) -> None:
        value = map_.value
        if map_.rule is None:
            sources = [self.maps[source] for source in map_.sources]
            with self._precision():
                result = compute_group(map_, sources, self.state, self.program.parts(map_))
            self.maps[value] = apart(result, sources)
        else:
            source = None if inplace_on is None else self.by_index[inplace_on].value
            self.maps[value] = self._compute_tiled(self.program.plan(map_, streamed), source)
            if source is not None:
                del self.maps[source]
        for norm in map_.norms:
            if norm not in self.state.statistics:
                take_statistics(norm, self.maps[value], self.state)

    def _compute_tiled(self, plan: MapPlan, inplace_on: Value | None) -> Tensor:
        """Return a map; `inplace_on`: the source in whose memory it may lie."""
        if len(plan.tiles) == 1:
            return apart(self._rows(plan, plan.tiles[0]), [self.maps[source] for source in plan.map.sources])
        if inplace_on is not None and self.maps[inplace_on].dtype == self.state.dtype:
            target = self.maps[inplace_on]
            waits = reads_back(plan.tiles, inplace_on)
        else:  # A group's result, as float32 in half precision, has no place for the map.
            target = self._empty(plan.map.value.shape)
            waits = False
        waiting: list[tuple[Tensor, Tensor]] = []  # rows that are written once the tile behind them is made
        for tile in plan.tiles:
            waiting.append((rows_of(target, self.state.axis, tile.span), self._rows(plan, tile)))
            if not waits or len(waiting) > 1:
                Tensor.copy_(*waiting.pop(0))
        for place, rows in waiting:
            place.copy_(rows)
        return target

    def _rows(self, plan: MapPlan, tile: TilePlan) -> Tensor:
        return TileRun(plan, tile, self.maps, self.state).compute()

    # Gradients

    def _norm_backward(self, map_: Map, plan: MapPlan | None = None) -> None:
        """Complete the gradient of a map; `plan`: by which its rows are made first, where it is not there."""
        gradient = self.gradients[map_.value]
        if gradient is None:
            return
        self._close_sums(map_)
        if plan is None:
            self._complete(map_, self.maps[map_.value], gradient)
            return
        for tile in plan.tiles:
            raw = self._rows(plan, tile)
            self._complete(map_, raw, rows_of(gradient, self.state.axis, tile.span))
            del raw

    def _close_sums(self, map_: Map) -> None:
        for norm in map_.norms:
            norm_of(norm, self.state).close_sums()

    def _complete(self, map_: Map, raw: Tensor, gradient: Tensor) -> None:
        """Add the part that follows from the statistics, to as few rows at a time as in a tile."""
        axis = self.state.axis
        length = raw.shape[axis]
        count = max(1, self.program.numbers * length // max(raw.numel(), 1))
        for first in range(0, length, count):
            span = (first, min(first + count, length))
            for norm in map_.norms:
                norm_of(norm, self.state).complete(rows_of(raw, axis, span), rows_of(gradient, axis, span))

    def _backward(
        self,
        map_: Map,
        targets: Sequence[Target],
        streamed: tuple[Value, ...] = (),
        is_two_pass: bool = False,
    ) -> None:
        """Send the gradient of a map to its sources.

        In two passes, a first over the tiles takes the sums, and a second writes the last source's gradient over its
        map, completed.
        """
        gradient = self.gradients.pop(map_.value)
        places = {self.by_index[source].value: place for source, place in targets}
        image = self.program.maps.graph.image
        if image in self.program.wanted and image in map_.sources:  # which schedules do not know
            places[image] = "new" if self.gradients.get(image) is None else "add"
        if gradient is None:
            for value, place in places.items():
                if place != "add":
                    self.gradients[value] = None
                if place == "map":
                    self.maps.pop(value, None)
            return
        may_overwrite = map_.value not in self.memory_of_outputs
        if map_.rule is None:
            self._send_group(map_, gradient, places)
        elif is_two_pass:
            source = self.by_index[targets[-1].source]
            then = {value: place for value, place in places.items() if place == "gradient" or value is source.value}
            now = {value: place for value, place in places.items() if value not in then}
            self._send(self.program.plan(map_, streamed, source.value), gradient, now, may_overwrite=False)
            self.state.forget_prepared()
            self._close_sums(source)
            self.state.takes_sums = False
            self._send(self.program.plan(map_, streamed), gradient, then, may_overwrite, completed=source)
            self.state.takes_sums = True
        else:
            self._send(self.program.plan(map_, streamed), gradient, places, may_overwrite)
        if self.memory_of_outputs.get(map_.value) == memory_of(gradient):
            # A loss wrote the gradient over the output: autograd holds it until backward ends.
            gradient.data = gradient.new_empty(0)

    def _send_group(self, map_: Map, gradient: Tensor, places: Mapping[Value, Place]) -> None:
        sources = [self.maps[source] for source in map_.sources]
        wanted = [source in self.program.wanted for source in map_.sources]
        with self._precision():
            gradients = gradients_of_group(map_, sources, gradient, self.state, wanted, self.program.parts(map_))
        self.state.close_tile()
        of_source = dict(zip(map_.sources, gradients, strict=True))
        kept = [gradient]
        for value, place in places.items():
            of_value = of_source[value]
            known = self.gradients.get(value) if place == "add" else None
            if known is not None and of_value is not None:
                known.add_(of_value)
            elif of_value is not None:
                self.gradients[value] = apart(of_value, kept)
                kept.append(of_value)
            elif place != "add":
                self.gradients[value] = None

    def _send(
        self,
        plan: MapPlan,
        gradient: Tensor,
        places: Mapping[Value, Place],
        may_overwrite: bool,
        completed: Map | None = None,
    ) -> None:
        """Send a gradient by tiles; `completed`: a source whose gradient also gets its statistics' part."""
        axis = self.state.axis
        # The gradients of a sum's terms may all be rows of the gradient: what is written over it comes last.
        sinks: dict[Value, Sink] = {}
        for value in sorted(places, key=lambda value: places[value] == "gradient"):
            sinks[value] = self._sink(plan, value, places[value], gradient)
            if completed is not None and places[value] == "map":
                sinks[value].complete = partial(self._complete, completed)
        for tile, following in zip_longest(plan.tiles, plan.tiles[1:]):
            rows = rows_of(gradient, axis, tile.span)
            sent = TileRun(plan, tile, self.maps, self.state).send(rows, may_overwrite, sinks)
            self.state.close_tile()
            del rows
            for value, sink in sinks.items():
                first, end = tile.spans[value]
                part = sent.get(value)
                if part is None:
                    part = RowGradient(self._empty(shape_of_rows(value, axis, (first, end))).zero_(), True)
                sink.add(first, part, end if following is None else following.spans[value][0])
                del part
            sent.clear()  # before the next tile's rows are made
        for value, sink in sinks.items():
            sink.clear(value.shape[axis])
            self.gradients[value] = sink.target
            if places[value] == "map":
                self.maps.pop(value, None)

    def _sink(self, plan: MapPlan, value: Value, place: Place, gradient: Tensor) -> Sink:
        """Return where the gradient of a source is collected."""
        axis = self.state.axis
        known = self.gradients.get(value) if place == "add" else None
        if known is not None:
            return Sink(axis, known, adds=True)
        if len(plan.tiles) == 1 and plan.tiles[0].spans[value] == (0, value.shape[axis]):
            return Sink(axis)
        if place == "gradient":
            return Sink(axis, gradient)
        return Sink(axis, self.maps[value] if place == "map" else self._empty(value.shape))

    def _empty(self, shape: Sequence[int]) -> Tensor:
        return torch.empty(shape, dtype=self.state.dtype, device=self.device)

    def _precision(self) -> torch.autocast:
        """Return the context in which groups run, in the precision of the pass.

        Converted weights are forgotten: autocast would hold them until the outermost context ends.
        """
        is_autocast = self.autocast is not None
        return torch.autocast(self.device.type, dtype=self.autocast, enabled=is_autocast, cache_enabled=False)


def _version_of(tensor: Tensor) -> tuple[int, int]:
    """Return what is another number once a tensor was written to, or given other memory by `.data =`."""
    return tensor._version, memory_of(tensor)

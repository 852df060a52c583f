"""The executor: carries out a schedule's instructions, in a forward pass and its backward pass."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from unet3d.recomputing import normalisation, observer
from unet3d.recomputing.graph import Value
from unet3d.recomputing.instructions import Complete, Free, Instruction, Make, Place, Send, SendTwice, Target, Turn
from unet3d.recomputing.making import make_into
from unet3d.recomputing.maps import Map
from unet3d.recomputing.program import Program
from unet3d.recomputing.rules import draw_masks
from unet3d.recomputing.state import State
from unet3d.recomputing.statistics import take_statistics
from unet3d.recomputing.tiles import MapPlan, RowGradient, Sink, make_rows, send_gradient
from unet3d.recomputing.whole import apart, gradients_of_whole, make_whole


class Pass:
    """The maps and gradients of one pass."""

    def __init__(self, program: Program, state: State, autocast: torch.dtype | None, device: torch.device) -> None:
        self.program = program
        self.state = state
        self.autocast = autocast
        self.device = device
        self.maps: dict[Value, Tensor] = {}
        self.gradients: dict[Value, Tensor | None] = {}  # None: of an output that the loss does not use
        self.arrived: set[Value] = set()  # outputs, whose gradients are not ours to write over
        self.memory_of_outputs: dict[Value, int] = {}
        self.by_index = program.maps.maps
        self.instructions = list(program.schedule.instructions)

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        """Return the outputs."""
        graph = self.program.maps.graph
        self.maps[graph.image] = image.to(self.state.dtype)
        draw_masks(graph.values, self.state, self.device)
        if not self.program.on_cpu:
            self.state.convert(self.program.maps.converted_weights)
        turn = next(place for place, step in enumerate(self.instructions) if isinstance(step, Turn))
        for instruction in self.instructions[:turn]:
            self._carry_out(instruction)
        outputs = tuple(self.maps[value] for value in graph.outputs)
        users = self.program.maps.users
        for value in set(graph.outputs):
            if not users[value]:
                self.memory_of_outputs[value] = self.maps.pop(value).untyped_storage()._cdata
        self.instructions = self.instructions[turn + 1 :]
        return outputs

    def backward(self, image: Tensor, gradients: Sequence[Tensor | None]) -> Tensor | None:
        """Return the gradient of the image, if it is wanted; the weights' gradients are in the state."""
        graph = self.program.maps.graph
        self.maps[graph.image] = image.to(self.state.dtype)
        users = self.program.maps.users
        for value, gradient in zip(graph.outputs, gradients, strict=True):
            known = self.gradients.get(value)
            if known is not None and gradient is not None:
                gradient = known + gradient
            elif gradient is None:
                gradient = known
            elif users[value]:
                gradient = gradient.clone()
            self.gradients[value] = gradient
        self.arrived = set(graph.outputs)
        del gradients, gradient, known
        for instruction in self.instructions:
            self._carry_out(instruction)
        self.state.close_gradients()
        return self.gradients.pop(graph.image, None)

    def _carry_out(self, instruction: Instruction) -> None:
        if isinstance(instruction, Free | Turn):
            self._follow(instruction)
            return
        layer = self.by_index[instruction.map].value.layer
        is_backward = not isinstance(instruction, Make)
        with observer.observer.works_on(layer, is_backward):
            self._follow(instruction)

    def _follow(self, instruction: Instruction) -> None:
        match instruction:
            case Make(index, over, through):
                sources = tuple(self.by_index[source].value for source in through)
                self._make(self.by_index[index], over, sources)
            case Free(index):
                self.maps.pop(self.by_index[index].value, None)
            case Complete(index):
                self._complete(self.by_index[index])
            case Send(index, targets):
                self._send(self.by_index[index], targets)
            case SendTwice(index, targets):
                self._send_twice(self.by_index[index], targets)
        self.state.forget_prepared()

    # Maps

    def _make(self, map_: Map, over: int | None, through: tuple[Value, ...]) -> None:
        if map_.rule is None:
            self.maps[map_.value] = self._make_whole(map_)
        else:
            self._make_by_tiles(map_, over, through)
        for norm in map_.norms:
            if norm not in self.state.statistics:
                take_statistics(norm, self.maps[map_.value], self.state)

    def _make_whole(self, map_: Map) -> Tensor:
        sources = [self.maps[source] for source in map_.sources]
        with self._types():
            result = make_whole(map_, sources, self.state, self.program.parts(map_))
        return apart(result, sources)

    def _make_by_tiles(self, map_: Map, over: int | None, through: tuple[Value, ...]) -> None:
        plan = self.program.plan(map_, through)
        value = map_.value
        if len(plan.tiles) == 1:
            rows = make_rows(plan, plan.tiles[0], self.maps, self.state)
            sources = [self.maps[source] for source in plan.map.sources]
            self.maps[value] = apart(rows, sources)
            return
        source = None if over is None else self.by_index[over].value
        target = None if source is None else self.maps[source]
        if target is None:
            target = torch.empty(value.shape, dtype=self.state.dtype, device=self.device)
        make_into(plan, target, self.maps, self.state, source)
        if source is not None:
            del self.maps[source]
        self.maps[value] = target

    # Gradients

    def _complete(self, map_: Map) -> None:
        raw = self.maps[map_.value]
        gradient = self.gradients[map_.value]
        if gradient is None:
            return
        if map_.value in self.arrived:
            gradient = gradient.clone()
            self.gradients[map_.value] = gradient
            self.arrived.discard(map_.value)
        for norm in map_.norms:
            normalisation.close_sums(norm, self.state)
        self._complete_rows(map_, raw, gradient)

    def _complete_rows(self, map_: Map, raw: Tensor, gradient: Tensor) -> None:
        """Add the part that follows from the statistics, to as few rows at a time as in a tile."""
        axis = self.state.axis
        length = raw.shape[axis]
        rows = self.program.numbers * length // max(raw.numel(), 1)
        rows = max(1, rows)
        for first in range(0, length, rows):
            count = min(rows, length - first)
            part_of_raw = raw.narrow(axis, first, count)
            part = gradient.narrow(axis, first, count)
            for norm in map_.norms:
                normalisation.complete(norm, part_of_raw, part, self.state)

    def _send(self, map_: Map, targets: Sequence[Target]) -> None:
        gradient = self.gradients.pop(map_.value)
        if gradient is None:
            self._send_nothing(targets)
        elif map_.rule is None:
            self._send_whole(map_, gradient, targets)
        else:
            may_overwrite = map_.value not in self.arrived
            plan = self.program.plan(map_)
            self._send_by_tiles(plan, gradient, targets, may_overwrite)
        if gradient is not None:
            self._give_up(map_.value, gradient)

    def _give_up(self, value: Value, gradient: Tensor) -> None:
        """Release an output's gradient that a loss wrote over the output: autograd holds it until backward ends."""
        if self.memory_of_outputs.get(value) == gradient.untyped_storage()._cdata:
            gradient.data = gradient.new_empty(0)

    def _send_nothing(self, targets: Sequence[Target]) -> None:
        for source, place in targets:
            value = self.by_index[source].value
            if place == "map":
                self.maps.pop(value, None)
            if place != "add":
                self.gradients[value] = None

    def _send_whole(self, map_: Map, gradient: Tensor, targets: Sequence[Target]) -> None:
        sources = [self.maps[source] for source in map_.sources]
        wanted = [source in self.program.wanted for source in map_.sources]
        with self._types():
            gradients = gradients_of_whole(map_, sources, gradient, self.state, wanted, self.program.parts(map_))
        self.state.close_tile()
        of_source = dict(zip(map_.sources, gradients, strict=True))
        memory: list[Tensor] = [gradient]
        image = self.program.maps.graph.image
        of_image = of_source.get(image)
        if image in self.program.wanted and of_image is not None:
            known = self.gradients.get(image)
            if known is not None:
                of_image = known + of_image
            self.gradients[image] = of_image
        for source, place in targets:
            value = self.by_index[source].value
            of_value = of_source[value]
            known = None
            if place == "add":
                known = self.gradients.get(value)
            if known is not None and of_value is not None:
                known.add_(of_value)
            elif of_value is not None:
                of_value_in_type = of_value.to(self.maps[value].dtype)
                self.gradients[value] = apart(of_value_in_type, memory)
                memory.append(of_value)
            elif place != "add":
                self.gradients[value] = None

    def _send_by_tiles(
        self,
        plan: MapPlan,
        gradient: Tensor,
        targets: Sequence[Target],
        may_overwrite: bool,
        completed: Map | None = None,
    ) -> None:
        """Send a gradient to the sources; `completed`: a source whose gradient also gets its statistics' part."""
        places = {self.by_index[source].value: place for source, place in targets}
        image = self.program.maps.graph.image
        if image in plan.wanted and image in plan.map.sources and completed is None:
            places[image] = "new" if self.gradients.get(image) is None else "add"
        # The gradients of a sum's terms may all be rows of the gradient: what is written over it comes last.
        values = sorted(places, key=lambda value: places[value] == "gradient")
        sinks: dict[Value, Sink | None] = {}
        for value in values:
            sink = self._sink(plan, value, places[value], gradient)
            if sink is not None and completed is not None and value is completed.value:
                sink.complete = partial(self._complete_rows, completed)
            sinks[value] = sink
        for number, tile in enumerate(plan.tiles):
            rows = gradient
            if len(plan.tiles) > 1:
                first, end = tile.span
                rows = gradient.narrow(self.state.axis, first, end - first)
            sent = send_gradient(plan, tile, self.maps, rows, may_overwrite, values, self.state)
            self.state.close_tile()
            del rows
            self._collect(plan, number, sinks, sent, completed)
            sent.clear()  # before the next tile's rows are made
        for value, sink in sinks.items():
            if sink is not None:
                sink.close()
                self.gradients[value] = sink.target
            if places[value] == "map":
                self.maps.pop(value, None)

    def _collect(
        self,
        plan: MapPlan,
        number: int,
        sinks: Mapping[Value, Sink | None],
        sent: Sequence[RowGradient],
        completed: Map | None,
    ) -> None:
        """Write or keep the gradients that a tile sends to the rows of its sources."""
        spans = plan.tiles[number].spans
        is_last = number + 1 == len(plan.tiles)
        for (value, sink), of_rows in zip(sinks.items(), sent, strict=True):
            low, high = spans[value]
            done = high  # no later tile adds to the rows before
            if not is_last:
                done, _ = plan.tiles[number + 1].spans[value]
            if of_rows.rows is None:
                of_rows = self._zeros(value, low, high)
            if completed is not None and value is completed.value:
                of_rows = self._completed(completed, of_rows, low, sink, done)
            if sink is not None:
                sink.add(low, of_rows, done)
                continue
            assert of_rows.rows is not None
            others = [] if of_rows.is_own else [of_rows.rows]
            self.gradients[value] = apart(of_rows.rows, others)

    def _completed(self, map_: Map, gradient: RowGradient, low: int, sink: Sink | None, done: int) -> RowGradient:
        """Return a gradient whose final rows have the statistics' part; rows that the next tile adds to wait."""
        assert gradient.rows is not None
        axis = self.state.axis
        rows = gradient.rows
        if not gradient.is_own:
            rows = rows.clone()
        if sink is not None:
            rows = sink.with_open(rows)
            high = low + rows.shape[axis]
            done = min(max(done, low), high)
        count = done - low
        raw = self.maps[map_.value].narrow(axis, low, count)
        self._complete_rows(map_, raw, rows.narrow(axis, 0, count))
        return RowGradient(rows, True)

    def _zeros(self, value: Value, low: int, high: int) -> RowGradient:
        shape = list(value.shape)
        shape[self.state.axis] = high - low
        zeros = torch.zeros(shape, dtype=self.state.dtype, device=self.device)
        return RowGradient(zeros, True)

    def _sink(self, plan: MapPlan, value: Value, place: Place, gradient: Tensor) -> Sink | None:
        """Return where the gradient of a source is collected; None where one tile has all of it."""
        known = self.gradients.get(value)
        if place == "add" and known is not None:
            return Sink(known, self.state.axis, adds=True)
        whole = (0, value.shape[self.state.axis])
        if len(plan.tiles) == 1 and plan.tiles[0].spans[value] == whole:
            return None
        if place == "map":
            return Sink(self.maps[value], self.state.axis, adds=False)
        if place == "gradient":
            return Sink(gradient, self.state.axis, adds=False)
        target = torch.empty(value.shape, dtype=self.state.dtype, device=self.device)
        return Sink(target, self.state.axis, adds=False)

    def _send_twice(self, map_: Map, targets: Sequence[Target]) -> None:
        """Take the sums in a first pass over the tiles; write the last source's gradient over its map in a second."""
        *others, last = targets
        source = self.by_index[last.source]
        gradient = self.gradients.pop(map_.value)
        if gradient is None:
            self._send_nothing(targets)
            return
        plan = self.program.plan(map_, without=source.value)
        now = [target for target in others if target.place != "gradient"]
        self._send_by_tiles(plan, gradient, now, may_overwrite=False)
        self.state.forget_prepared()
        for norm in source.norms:
            normalisation.close_sums(norm, self.state)
        self.state.takes_sums = False
        plan = self.program.plan(map_)
        then = [target for target in targets if target not in now]
        self._send_by_tiles(plan, gradient, then, map_.value not in self.arrived, completed=source)
        self.state.takes_sums = True
        self._give_up(map_.value, gradient)

    @contextmanager
    def _types(self) -> Iterator[None]:
        """Run operations without a rule in the precision of the pass that began.

        Converted weights are forgotten: autocast would hold them until the outermost context ends.
        """
        is_autocast = self.autocast is not None
        with torch.autocast(self.device.type, dtype=self.autocast, enabled=is_autocast, cache_enabled=False):
            yield

"""The executor: carries out a schedule's instructions, in a forward pass and its backward pass."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from unet3d.recomputing import state as of_pass
from unet3d.recomputing.graph import Value
from unet3d.recomputing.instructions import (
    Backward,
    BackwardTwoPass,
    BeginBackward,
    Compute,
    Instruction,
    NormBackward,
    NormBackwardTiled,
    Release,
    Target,
)
from unet3d.recomputing.maps import Map
from unet3d.recomputing.program import Program
from unet3d.recomputing.rules import normalisation
from unet3d.recomputing.rules.channels import take_statistics
from unet3d.recomputing.sending import TileSender, make_into
from unet3d.recomputing.state import State
from unet3d.recomputing.tiles import make_rows
from unet3d.recomputing.whole import apart, gradients_of_whole, make_whole


class Executor:
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
        self.versions: list[tuple[str, Tensor, tuple[int, int]]] = []
        self.sender = TileSender(program, state, device, self.maps, self.gradients)
        self.by_index = program.maps.maps
        self.instructions = list(program.schedule.instructions)

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        """Return the outputs."""
        graph = self.program.maps.graph
        self.maps[graph.image] = image.to(self.state.dtype)
        if not self.program.on_cpu:
            self.state.convert(self.program.maps.converted_weights)
        turn = next(place for place, step in enumerate(self.instructions) if isinstance(step, BeginBackward))
        for instruction in self.instructions[:turn]:
            self._execute_observed(instruction)
        outputs = tuple(self.maps[value] for value in graph.outputs)
        users = self.program.maps.users
        for value in set(graph.outputs):
            if not users[value]:
                self.memory_of_outputs[value] = self.maps.pop(value).untyped_storage()._cdata
            else:
                self.maps[value] = self.maps[value].detach()  # The output itself will hold this pass, in a circle.
        self.instructions = self.instructions[turn + 1 :]
        for what, tensor in self._read_again():
            if not tensor.is_inference():
                self.versions.append((what, tensor, _version_of(tensor)))
        return outputs

    def _read_again(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what backward reads again, by its name."""
        graph = self.program.maps.graph
        for number, value in enumerate(graph.outputs):
            if value in self.maps:
                yield f"output {number}", self.maps[value]
        for name in self.program.maps.weights_read_again:
            yield name, self.state.weights[name]

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
        self.arrived = {value for value in graph.outputs if not users[value]}
        del gradients, gradient, known
        for instruction in self.instructions:
            self._execute_observed(instruction)
        for map_ in self.by_index:
            if map_.value not in self.program.wanted:  # nothing before it is trained, and no gradient was completed
                for norm in map_.norms:
                    normalisation.close_sums(norm, self.state)
        self.state.close_gradients()
        return self.gradients.pop(graph.image, None)

    def _execute_observed(self, instruction: Instruction) -> None:
        if isinstance(instruction, Release | BeginBackward):
            self._execute(instruction)
            return
        layer = self.by_index[instruction.map].value.layer
        is_backward = not isinstance(instruction, Compute)
        with of_pass.observer.works_on(layer, is_backward):
            self._execute(instruction)

    def _execute(self, instruction: Instruction) -> None:
        match instruction:
            case Compute(index, inplace_on, streamed):
                self._compute(self.by_index[index], inplace_on, self._values(streamed))
            case Release(index):
                self.maps.pop(self.by_index[index].value, None)
            case NormBackward(index):
                self._norm_backward(self.by_index[index])
            case NormBackwardTiled(index, streamed):
                self._norm_backward_tiled(self.by_index[index], self._values(streamed))
            case Backward(index, targets, streamed):
                self._backward(self.by_index[index], targets, self._values(streamed))
            case BackwardTwoPass(index, targets, streamed):
                self._backward_two_pass(self.by_index[index], targets, self._values(streamed))
        self.state.forget_prepared()

    def _values(self, indices: Sequence[int]) -> tuple[Value, ...]:
        return tuple(self.by_index[index].value for index in indices)

    # Maps

    def _compute(self, map_: Map, inplace_on: int | None, streamed: tuple[Value, ...]) -> None:
        if map_.rule is None:
            self.maps[map_.value] = self._compute_group(map_)
        else:
            self._compute_tiled(map_, inplace_on, streamed)
        for norm in map_.norms:
            if norm not in self.state.statistics:
                take_statistics(norm, self.maps[map_.value], self.state)

    def _compute_group(self, map_: Map) -> Tensor:
        sources = [self.maps[source] for source in map_.sources]
        with self._types():
            result = make_whole(map_, sources, self.state, self.program.parts(map_))
        return apart(result, sources)

    def _compute_tiled(self, map_: Map, inplace_on: int | None, streamed: tuple[Value, ...]) -> None:
        plan = self.program.plan(map_, streamed)
        value = map_.value
        if len(plan.tiles) == 1:
            rows = make_rows(plan, plan.tiles[0], self.maps, self.state)
            sources = [self.maps[source] for source in plan.map.sources]
            self.maps[value] = apart(rows, sources)
            return
        source = None if inplace_on is None else self.by_index[inplace_on].value
        target = None if source is None else self.maps[source]
        if target is not None and target.dtype != self.state.dtype:  # of a group, as float32 in half precision
            target = None
        if target is None:
            target = torch.empty(value.shape, dtype=self.state.dtype, device=self.device)
        grad_can_reuse_input = source is not None and target is self.maps[source]
        make_into(plan, target, self.maps, self.state, source if grad_can_reuse_input else None)
        if source is not None:
            del self.maps[source]
        self.maps[value] = target

    # Gradients

    def _norm_backward(self, map_: Map) -> None:
        gradient = self._incomplete_gradient(map_)
        if gradient is not None:
            self.sender.complete(map_, self.maps[map_.value], gradient)

    def _norm_backward_tiled(self, map_: Map, streamed: tuple[Value, ...]) -> None:
        gradient = self._incomplete_gradient(map_)
        if gradient is not None:
            self.sender.norm_backward_tiled(self.program.plan(map_, streamed), gradient)

    def _incomplete_gradient(self, map_: Map) -> Tensor | None:
        """Return the gradient that is to be completed, when all sums are there."""
        gradient = self.gradients[map_.value]
        if gradient is None:
            return None
        for norm in map_.norms:
            normalisation.close_sums(norm, self.state)
        return gradient

    def _backward(self, map_: Map, targets: Sequence[Target], streamed: tuple[Value, ...] = ()) -> None:
        gradient = self.gradients.pop(map_.value)
        if gradient is None:
            self._send_nothing(targets)
        elif map_.rule is None:
            self._backward_group(map_, gradient, targets)
        else:
            may_overwrite = map_.value not in self.arrived
            plan = self.program.plan(map_, streamed)
            self.sender.send(plan, gradient, targets, may_overwrite)
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

    def _backward_group(self, map_: Map, gradient: Tensor, targets: Sequence[Target]) -> None:
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

    def _backward_two_pass(self, map_: Map, targets: Sequence[Target], streamed: tuple[Value, ...] = ()) -> None:
        """Take the sums in a first pass over the tiles; write the last source's gradient over its map in a second."""
        *others, last = targets
        source = self.by_index[last.source]
        gradient = self.gradients.pop(map_.value)
        if gradient is None:
            self._send_nothing(targets)
            return
        plan = self.program.plan(map_, streamed, source.value)
        now = [target for target in others if target.place != "gradient"]
        self.sender.send(plan, gradient, now, may_overwrite=False)
        self.state.forget_prepared()
        for norm in source.norms:
            normalisation.close_sums(norm, self.state)
        self.state.takes_sums = False
        plan = self.program.plan(map_, streamed)
        then = [target for target in targets if target not in now]
        self.sender.send(plan, gradient, then, map_.value not in self.arrived, completed=source)
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


def _version_of(tensor: Tensor) -> tuple[int, int]:
    """Return what is another number once a tensor was written to, or given other memory by `.data =`."""
    return tensor._version, tensor.untyped_storage()._cdata

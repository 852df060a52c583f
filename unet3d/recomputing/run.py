"""A network's pass by its program, as one autograd function: its executor carries out a schedule's instructions."""

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from unet3d.base.errors import UserError
from unet3d.model import half_precision
from unet3d.recomputing import state as of_pass
from unet3d.recomputing.compiler import Backward, BeginBackward, Compute, Instruction, NormBackward, Place, Release
from unet3d.recomputing.compute import RowGradient, Sink, TileRun, apart, compute_group, gradients_of_group
from unet3d.recomputing.graph import Value, Weight, derive
from unet3d.recomputing.maps import Map, Maps
from unet3d.recomputing.program import MapPlan, Program, Streamed, TilePlan, reads_back
from unet3d.recomputing.readable import tensors_of
from unet3d.recomputing.rules import memory_of, rows_of, shape_of_rows
from unet3d.recomputing.rules.normalisation import norm_of, take_statistics
from unet3d.recomputing.state import State

Places = Mapping[Value, Place]  # Places of sources' gradients.


class Executor:
    """The maps and gradients of one pass."""

    def __init__(self, program: Program, state: State, autocast: torch.dtype | None, device: torch.device) -> None:
        self.program = program
        self.state = state
        self.device = device
        self.autocast = autocast
        self.maps: dict[Value, Tensor] = {}
        self.gradients: dict[Value, Tensor | None] = {}  # None: of an output that the loss does not use
        # No map reads these outputs: their gradients are the caller's, and not written over.
        self.memory_of_outputs: dict[Value, int] = {}
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
            self.execute(instruction)
        outputs = tuple(self.maps[value] for value in graph.outputs)
        read_again: dict[str, Tensor] = {}  # Backward reads these again, by name.
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
            self.execute(instruction)
        for map_ in self.by_index:
            if map_.value not in self.program.wanted:  # Nothing before it is trained, and no gradient was completed.
                self._close_sums(map_)
        self.state.close_gradients()
        return self.gradients.pop(graph.image, None)

    def execute(self, instruction: Instruction) -> None:
        """Carry out one instruction."""
        assert not isinstance(instruction, BeginBackward)
        map_ = self.by_index[instruction.map]
        if isinstance(instruction, Release):
            self.maps.pop(map_.value, None)
            return
        with of_pass.observer.works_on(map_.value.layer, not isinstance(instruction, Compute)):
            match instruction:
                case Compute(_, inplace_on, streamed):
                    self._compute(map_, inplace_on, streamed)
                case NormBackward(_, streamed):
                    self._norm_backward(map_, streamed)
                case Backward():
                    self._backward(map_, instruction)
            self.state.forget_prepared()

    # Maps

    def _compute(self, map_: Map, inplace_on: int | None, streamed: Streamed) -> None:
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

    def _norm_backward(self, map_: Map, streamed: Streamed | None) -> None:
        """Complete the gradient of a map; its rows are made first where it is not there."""
        gradient = self.gradients[map_.value]
        if gradient is None:
            return
        self._close_sums(map_)
        if streamed is None:
            self._complete(map_, self.maps[map_.value], gradient)
            return
        plan = self.program.plan(map_, streamed)
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

    def _backward(self, map_: Map, instruction: Backward) -> None:
        """Send the gradient of a map to its sources.

        In two passes, a first over the tiles takes the sums, and a second writes the last source's gradient over its
        map, completed.
        """
        _, targets, streamed, is_two_pass = instruction
        gradient = self.gradients.pop(map_.value)
        places: dict[Value, Place] = {self.by_index[source].value: place for source, place in targets}
        image = self.program.maps.graph.image
        if image in self.program.wanted and image in map_.sources:  # Schedules do not know the image.
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

    def _send_group(self, map_: Map, gradient: Tensor, places: Places) -> None:
        sources = [self.maps[source] for source in map_.sources]
        with self._precision():
            gradients = gradients_of_group(map_, sources, gradient, self.state, self.program)
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
        self, plan: MapPlan, gradient: Tensor, places: Places, may_overwrite: bool, completed: Map | None = None
    ) -> None:
        """Send a gradient by tiles; `completed`: a source whose gradient also gets its statistics' part."""
        axis = self.state.axis
        # The gradients of a sum's terms may all be rows of the gradient: what is written over it comes last.
        sinks: dict[Value, Sink] = {}
        for value in sorted(places, key=lambda value: places[value] == "gradient"):
            place = places[value]
            known = self.gradients.get(value) if place == "add" else None
            if known is not None:
                sinks[value] = Sink(axis, known, adds=True)
            elif len(plan.tiles) == 1 and plan.tiles[0].spans[value] == (0, value.shape[axis]):
                sinks[value] = Sink(axis)
            elif place == "gradient":
                sinks[value] = Sink(axis, gradient)
            else:
                sinks[value] = Sink(axis, self.maps[value] if place == "map" else self._empty(value.shape))
            if completed is not None and place == "map":
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
            sent.clear()  # The next tile's rows are made without them.
        for value, sink in sinks.items():
            sink.clear(value.shape[axis])
            self.gradients[value] = sink.target
            if places[value] == "map":
                self.maps.pop(value, None)

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


# The pass as one autograd function


def call_by_program(program: Program, network: nn.Module, image: Tensor) -> Any:
    """Return what the network returns for an image N C D H W; backward follows the program's schedule.

    The network's modules are not called.
    """
    graph = program.maps.graph
    if not program.serves(image):
        raise ValueError(f"an image of {tuple(image.shape)}: the program is for {tuple(graph.image.shape)}")
    autocast = autocast_dtype(image)
    tensors = tensors_of(network)
    weights = derived_tensors(program.maps, tensors)
    names = [name for name in program.maps.weights if weights[name].requires_grad]
    state = State(program.maps.axis, autocast or image.dtype, weights, program.on_cpu)
    run = Executor(program, state, autocast, image.device)
    outputs = RecomputeFunction.apply(run, names, image, *(weights[name] for name in names))
    if graph.is_in(state.dtype):
        outputs = [output.to(value.dtype) for output, value in zip(outputs, graph.outputs, strict=True)]
    with torch.no_grad():
        for name in graph.counters:
            tensors[name].add_(1)
    return _returned(program, image, outputs, weights)


def refuse_hooks_of_saved_tensors() -> None:
    """Raise UserError if hooks of saved tensors are on: a pass saves its image and weights, and none of its maps."""
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        raise UserError(
            "recompute: a pass within saved_tensors_hooks or torch.utils.checkpoint saves no maps that these could "
            "change or make again; call the network outside of them"
        )


def _returned(program: Program, image: Tensor, outputs: Sequence[Tensor], weights: Mapping[str, Tensor]) -> Any:
    """Return what the network returns, in its structure; outputs of which plain has no gradient have none."""
    graph = program.maps.graph
    tensors = {graph.image: image}
    for value, output in zip(graph.outputs, outputs, strict=True):
        tensors[value] = output if value in program.wanted else output.detach()
        if program.maps.users[value] and tensors[value].requires_grad:
            tensors[value].register_hook(partial(_refuse_use_of_part, weakref.ref(tensors[value])))
    returned = []
    for leaf in graph.returned:
        if isinstance(leaf, Value):
            leaf = tensors[leaf]
        elif isinstance(leaf, Weight):
            leaf = weights[leaf.name]
        returned.append(leaf)
    return returned[0] if graph.out_spec is None else _structured(graph.out_spec, iter(returned))


def _structured(spec: Any, leaves: Iterator[Any]) -> Any:
    """Return leaves in a structure; `tree_unflatten` would make a tuple of torch.Size."""
    if spec.is_leaf():
        return next(leaves)
    children = [_structured(child, leaves) for child in spec.children()]
    if spec.type is torch.Size:
        return torch.Size(children)
    return _pytree.SUPPORTED_NODES[spec.type].unflatten_fn(children, spec.context)


def _refuse_use_of_part(reference: weakref.ref[Tensor], gradient: Tensor) -> None:
    """Raise RuntimeError where somebody takes the gradient of an output from which the network computes others.

    It is that of the loss alone: what comes through the other outputs arrives within the pass.
    """
    output = reference()
    if output is not None and (output.retains_grad or len(output._backward_hooks or ()) > 1):
        raise RuntimeError(
            "recompute: retain_grad() or a hook of an output from which the network computes others would get a part "
            "of its gradient; take it of the network without recompute"
        )


class RecomputeFunction(torch.autograd.Function):
    """A pass by a schedule. Weights are inputs, so that hooks, frozen weights and `torch.autograd.grad` work."""

    @staticmethod
    def forward(ctx: Any, run: Executor, names: Sequence[str], image: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.run = run
        ctx.names = names
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(image, *weights)
        with _without_autocast(run):
            return run.forward(image)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        image, *_ = ctx.saved_tensors  # This raises if a tensor was changed in between, or after a first backward pass.
        run = ctx.run
        ctx.run = None
        if run is None:
            raise RuntimeError("recompute: a pass goes backward once; call the network again for a second backward")
        if torch.is_grad_enabled():
            raise RuntimeError(
                "recompute: with create_graph=True, gradients would have no gradient themselves; take second "
                "derivatives, as of a gradient penalty, of the network without recompute"
            )
        run.refuse_changes()
        names = ctx.names
        with _without_autocast(run):
            of_image = run.backward(image, list(gradients))
        of_weights = [run.state.gradients.pop(name, None) for name in names]
        if of_image is not None:
            of_image = of_image.to(image.dtype)
        return None, None, of_image, *of_weights

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Any:
        raise RuntimeError("recompute: forward-mode differentiation; take it of the network without recompute")


@contextmanager
def _without_autocast(run: Executor) -> Any:
    """Turn autocast off: rules convert by themselves."""
    is_half_on_cpu = run.state.dtype in half_precision.DTYPES and run.device.type == "cpu"
    kernels = half_precision.convolutions() if is_half_on_cpu else nullcontext()
    with torch.autocast(run.device.type, enabled=False), kernels:
        yield


def derived_tensors(maps: Maps, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return parameters, buffers, constants and what is computed from them before the pass, which autograd follows."""
    known = {**maps.graph.constants, **tensors}
    return known | derive(maps.derived_before, known, maps.weights | maps.graph.returned_weights())


def autocast_dtype(image: Tensor) -> torch.dtype | None:
    """Return the type of mixed precision on the image's device; None where it is off."""
    device_type = image.device.type
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None

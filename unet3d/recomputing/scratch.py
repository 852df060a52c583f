"""Bytes beside maps and gradients while an instruction runs, measured on tensors without data.

Each instruction is carried out once, as a pass would do it, on its first two tiles and its last two: the others are
like the second. `Backward` in two passes alone runs all tiles. `plain_bytes` measures the network's own pass.
"""

import weakref
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from unet3d.recomputing import fake_kernels, workspaces
from unet3d.recomputing.compiler import TWO_PASS_WORK, Target, Workspace
from unet3d.recomputing.fake_kernels import GradientSums
from unet3d.recomputing.function import derived_tensors
from unet3d.recomputing.graph import Value
from unet3d.recomputing.maps import Map
from unet3d.recomputing.program import MapPlan, Program
from unet3d.recomputing.readable import tensors_of
from unet3d.recomputing.run import Executor
from unet3d.recomputing.state import State
from unet3d.recomputing.trace import unseen, without_hooks
from unet3d.recomputing.workspaces import CONVOLUTION, CONVOLUTION_BACKWARD


class PeakBytes(TorchDispatchMode):
    """The most bytes of tensors, made since `reset`, that were alive at once.

    `has_workspaces`: those of convolutions on a GPU are with them.
    """

    def __init__(self, has_workspaces: bool = False) -> None:
        super().__init__()
        self._has_workspaces = has_workspaces
        self.bytes = 0
        self.peak = 0
        self._alive: dict[int, Any] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # with True, torch loads its compiler

    def reset(self) -> None:
        """Begin anew with nothing."""
        self.bytes = 0
        self.peak = 0
        self._alive.clear()

    def adopt(self, *tensors: Tensor) -> None:
        """Leave tensors out of the count, and what is written into them."""
        for tensor in tensors:
            self._watch(tensor, 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = fake_kernels.run(func, args, kwargs or {})
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor) and tensor.device.type != "meta":
                self._watch(tensor, tensor.untyped_storage().nbytes())
        if self._has_workspaces and func in (CONVOLUTION, CONVOLUTION_BACKWARD):
            size = max(workspaces.bytes_of_call(func, args, result))
            self.peak = max(self.peak, self.bytes + size)
        return result

    def _watch(self, tensor: Tensor, size: int) -> None:
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in self._alive:
            return
        self._alive[address] = weakref.ref(storage, partial(self._release, address, size))
        self.bytes += size
        self.peak = max(self.peak, self.bytes)

    def _release(self, address: int, size: int, _: Any) -> None:
        if self._alive.pop(address, None) is not None:
            self.bytes -= size


class _PlainBytes(PeakBytes):
    """The same of autograd's own passes: a sum of gradients lies where its first term was."""

    def __init__(self, has_workspaces: bool) -> None:
        super().__init__(has_workspaces)
        self._sums = GradientSums()

    def __enter__(self) -> "_PlainBytes":
        self._sums.try_out()
        super().__enter__()
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._sums.is_in_place(func, args):
            storage = args[0].untyped_storage()
            self._release(storage._cdata, storage.nbytes(), None)
        return super().__torch_dispatch__(func, types, args, kwargs)


class _Loss(torch.autograd.Function):
    """A loss of a network's outputs that keeps nothing, and whose gradients all arrive as backward begins."""

    @staticmethod
    def forward(ctx: Any, *outputs: Tensor) -> Tensor:
        ctx.outputs = [(output.shape, output.dtype, output.device) for output in outputs]
        return outputs[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        return tuple(torch.empty(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.outputs)


def plain_bytes(network: nn.Module, image: Tensor, autocast: torch.dtype | None, on_cpu: bool) -> int | None:
    """Return what `Program.peak_bytes` predicts of a schedule, of the network's own forward and backward pass.

    The network runs once more, under autograd, on tensors without data, and is left as it was. Arguments are those of
    `prepare`. None where it does not run so.
    """
    tensors = tensors_of(network)
    count = _PlainBytes(has_workspaces=not on_cpu)
    try:
        with unseen(network, image.device), torch.enable_grad():
            _run_plain(network, tensors, image, autocast, count)
    except Exception:  # A network of others may raise anything, and no pass needs this number.
        return None
    return fixed_bytes(tensors, image) + count.peak


def _run_plain(
    network: nn.Module,
    tensors: Mapping[str, Tensor],
    image: Tensor,
    autocast: torch.dtype | None,
    count: _PlainBytes,
) -> None:
    """Run a forward and a backward pass of a network on tensors without data, and count what these make."""
    with FakeTensorMode(allow_non_fake_inputs=True) as fakes:
        fake_tensors: dict[str, Tensor] = {name: fakes.from_tensor(tensor) for name, tensor in tensors.items()}
        fake_image = torch.empty_strided(image.shape, image.stride(), dtype=image.dtype, device=image.device)
        fake_image.requires_grad_(image.requires_grad)
        count.adopt(fake_image, *fake_tensors.values())
        nothing = torch.empty(0, device=image.device)
        with count:
            with torch.autocast(image.device.type, dtype=autocast, enabled=autocast is not None):
                outputs = torch.func.functional_call(without_hooks(network), fake_tensors, (fake_image,))
                torch.clear_autocast_cache()  # as where the outermost context ends
            leaves = _pytree.tree_leaves(outputs)
            loss = _Loss.apply(*(leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad))
            del outputs, leaves
            loss.backward(nothing.to(loss.dtype))


def fixed_bytes(tensors: Mapping[str, Tensor], image: Tensor) -> int:
    """Return the bytes of weights, buffers and image, which are there before a pass and after it."""
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors.values()}
    return sum(storages.values()) + image.nbytes


class Scratch(NamedTuple):
    """Bytes beside maps and all gradients, in the instructions of one map."""

    workspace: Workspace
    streamed: Workspace  # the same, with cheap stems streamed
    norm_backward: int  # its gradient, by what its statistics give


def scratch_bytes(
    program: Program,
    weights: dict[str, Tensor],
    dtype: torch.dtype,
    autocast: torch.dtype | None,
    device: torch.device,
) -> list[Scratch]:
    """Return what lies beside the maps and gradients in the instructions of each map."""
    with FakeTensorMode(allow_non_fake_inputs=True) as fakes:
        fake_weights: dict[str, Tensor] = {}
        for name, tensor in weights.items():
            fake_weights[name] = fakes.from_tensor(tensor.detach()).requires_grad_(tensor.requires_grad)
        fake_weights = derived_tensors(program.maps, fake_weights)
        state = State(program.maps.axis, dtype, fake_weights, program.on_cpu)
        run = Executor(_shortened(program), state, autocast, device)
        with torch.no_grad():
            if not program.on_cpu:
                state.convert(program.maps.converted_weights)
            meter = _Meter(program, run, dtype, device)
            made = [meter.compute(map_) for map_ in program.maps.maps]
            return [meter.scratch(map_, of_make) for map_, of_make in zip(program.maps.maps, made, strict=True)]


def _shortened(program: Program) -> Program:
    """Return a program whose maps have their first two tiles, or parts, and their last two alone."""
    short = replace(program, plans={}, spans={})
    for map_ in program.maps.maps:
        if map_.rule is None:
            parts = program.parts(map_)
            short.spans[map_.index] = [*parts[:2], *parts[-2:]] if len(parts) > 4 else parts
            continue
        short.plans[map_.index, (), None] = _shortened_plan(program.plan(map_))
        stems = streamable_sources(program, map_)
        if stems:
            short.plans[map_.index, stems, None] = _shortened_plan(program.plan(map_, stems))
    return short


def _shortened_plan(plan: MapPlan) -> MapPlan:
    if len(plan.tiles) <= 4:
        return plan
    return replace(plan, tiles=[*plan.tiles[:2], *plan.tiles[-2:]])


def streamable_sources(program: Program, map_: Map) -> tuple[Value, ...]:
    """Return the sources of a map that are made from the image, and can be streamed."""
    stems = []
    for other in program.maps.maps:
        if other.value in map_.sources and other.sources == (program.maps.graph.image,):
            stems.append(other)
    if any(other.rule is None for other in (map_, *stems)):
        return ()
    return tuple(other.value for other in stems)


def is_normalised(program: Program, map_: Map) -> bool:
    """Return whether the gradient of a map has a part that its statistics give."""
    return any(norm in program.wanted for norm in map_.norms)


class _Meter:
    """Carries out one instruction at a time and counts its bytes."""

    def __init__(self, program: Program, run: Executor, dtype: torch.dtype, device: torch.device) -> None:
        self.program = program
        self.run = run
        self.short = run.program
        self.operations = sum(map_.operations for map_ in program.maps.maps)
        self.dtype = dtype
        self.device = device
        self.count = PeakBytes(has_workspaces=not program.on_cpu)
        self.given: set[int] = set()  # storages that are not counted

    def scratch(self, map_: Map, of_make: int) -> Scratch:
        """Return the bytes of all instructions of a map; those of `compute` are known."""
        workspace = self._workspace(map_, of_make)
        streamed = workspace
        stems = streamable_sources(self.program, map_)
        if stems:
            streamed = self._workspace(map_, max(of_make, self.compute(map_, stems)), stems)
        return Scratch(workspace, streamed, self._norm_backward(map_))

    def _workspace(self, map_: Map, of_make: int, streamed: tuple[Value, ...] = ()) -> Workspace:
        """Return the bytes of instructions; `streamed`: sources that are computed tile by tile, and not stored."""
        read = tuple(value for value in streamed if value in self.program.plan(map_).read)
        return Workspace(
            compute=of_make,
            backward=self._backward(map_, read),
            backward_two_pass=self._backward_two_pass(map_, read),
            norm_backward_tiled=0 if map_.rule is None else self._norm_backward(map_, self.short.plan(map_, streamed)),
        )

    def compute(self, map_: Map, streamed: tuple[Value, ...] = ()) -> int:
        """Return the bytes beside the map while it is made."""
        self._provide(map_, streamed)
        return self._measured(lambda: self.run._compute(map_, None, streamed))

    def _backward(self, map_: Map, streamed: tuple[Value, ...]) -> int:
        """Return the bytes beside maps and gradients while the gradient of a map is sent."""
        if map_.value not in self.program.wanted:
            return 0
        self._provide(map_, streamed)
        self._provide_gradient(map_)
        targets = [Target(other.index, "new") for other in self._wanted(map_)]
        return self._measured(lambda: self.run._backward(map_, targets, streamed))

    def _backward_two_pass(self, map_: Map, streamed: tuple[Value, ...]) -> int:
        """Return the same where the gradient of a normalised source is written over the source, at most."""
        most = 0
        if map_.rule is None or map_.operations > TWO_PASS_WORK * self.operations:
            return most
        # With tiles left out, the rows between them would count as rows that no tile reads, and be completed at once.
        self.run.program = self.program
        for source in self._wanted(map_):
            if source.norms and source.value not in streamed:
                targets = [*self._others(map_, source), Target(source.index, "map")]
                self._provide(map_, streamed)
                self._provide_gradient(map_)
                send = partial(self.run._backward, map_, targets, streamed, is_two_pass=True)
                most = max(most, self._measured(send))
        self.run.program = self.short
        return most

    def _others(self, map_: Map, source: Map) -> list[Target]:
        """Return the targets beside one: the first that is as large as the map over its gradient."""
        others = [other for other in self._wanted(map_) if other is not source]
        alike = [other.index for other in others if other.value.shape == map_.value.shape]
        return [Target(other.index, "gradient" if other.index in alike[:1] else "new") for other in others]

    def _norm_backward(self, map_: Map, plan: MapPlan | None = None) -> int:
        """Return the bytes while what statistics give is added to a map's gradient; `plan`: its rows are made first."""
        if not is_normalised(self.program, map_):
            return 0
        self._provide(map_, plan.ends if plan else ())
        self._provide_gradient(map_)
        self.run.maps[map_.value] = self._given(map_.value, self._dtype(map_))
        for norm in map_.norms:
            exact = self.run.state.statistics[norm].mean.dtype
            first, second = (torch.empty(map_.value.shape[:2], dtype=exact, device=self.device) for _ in range(2))
            self.run.state.sums[norm] = (first, second)
        return self._measured(lambda: self.run._norm_backward(map_, plan))

    def _wanted(self, map_: Map) -> list[Map]:
        """Return the sources of a map that need a gradient."""
        wanted = self.program.wanted.intersection(map_.sources)
        return [other for other in self.run.by_index if other.value in wanted]

    def _provide(self, map_: Map, streamed: Collection[Value] = ()) -> None:
        """Put the sources there, and let views of weights be no tensors of their own."""
        self.count.reset()
        if streamed:
            map_ = self.program.maps.streaming(map_, frozenset(streamed))
        self.count.adopt(*(self.run.state.weights[name] for name in map_.weights))
        known = {other.value: other for other in self.run.by_index}
        for source in map_.sources:
            dtype = self._dtype(known[source]) if source in known else self.dtype
            self.run.maps[source] = self._given(source, dtype)

    def _provide_gradient(self, map_: Map) -> None:
        readers = [other for other in self.run.by_index if map_.value in other.sources]
        dtype = self._dtype(map_)
        if dtype.is_floating_point and readers and all(other.rule is not None for other in readers):
            dtype = self.dtype
        self.run.gradients[map_.value] = self._given(map_.value, dtype)

    def _given(self, value: Value, dtype: torch.dtype) -> Tensor:
        """Return a tensor for a map or its gradient that is left out of the count."""
        tensor = torch.empty(value.shape, dtype=dtype, device=self.device)
        self.count.adopt(tensor)
        self.given.add(tensor.untyped_storage()._cdata)
        return tensor

    def _dtype(self, map_: Map) -> torch.dtype:
        if map_.rule is None or not map_.value.dtype.is_floating_point:
            return map_.value.dtype
        return self.dtype

    def _measured(self, instruct: Callable[[], None]) -> int:
        """Return the peak of an instruction without the maps and gradients that it made, and forget all."""
        run = self.run
        with self.count:
            instruct()
        made = [*run.maps.values(), *run.gradients.values(), *run.state.gradients.values()]
        size_of = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in made if t is not None}
        own = sum(size for address, size in size_of.items() if address not in self.given)
        self.given.clear()
        for known in (run.maps, run.gradients, run.state.sums, run.state.gradients, run.state.prepared):
            known.clear()
        return max(0, self.count.peak - own)

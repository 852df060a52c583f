"""Workspace of an instruction, bytes besides maps and gradients, measured on tensors without data.

Each instruction is carried out once, as a pass would do it, on its first two tiles and its last two: the others are
like the second. `Backward` in two passes alone runs all tiles. `plain_bytes` measures the network's own pass.
"""

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from unet3d.recomputing import fake_kernels, workspaces
from unet3d.recomputing.compiler import TWO_PASS_WORK, Backward, Compute, Instruction, NormBackward, Target, Workspace
from unet3d.recomputing.fake_kernels import GradientSums
from unet3d.recomputing.graph import Value
from unet3d.recomputing.maps import Map
from unet3d.recomputing.program import Program, Streamed
from unet3d.recomputing.readable import tensors_of
from unet3d.recomputing.run import Executor, derived_tensors
from unet3d.recomputing.state import State
from unet3d.recomputing.trace import unseen, without_hooks
from unet3d.recomputing.workspaces import CONVOLUTION, CONVOLUTION_BACKWARD

T = TypeVar("T")


class PeakBytes(TorchDispatchMode):
    """The most bytes of tensors, made since `reset`, that were alive at once.

    `has_workspaces`: those of convolutions on a GPU are with them. `sums`: of autograd's own passes, where a sum of
    gradients lies where its first term was.
    """

    def __init__(self, has_workspaces: bool, sums: GradientSums | None = None) -> None:
        super().__init__()
        self._has_workspaces = has_workspaces
        self._sums = sums
        self.bytes = 0
        self.peak = 0
        self._alive: dict[int, Any] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # With True, torch loads its compiler.

    def __enter__(self) -> "PeakBytes":
        if self._sums is not None:
            self._sums.try_out()
        super().__enter__()
        return self

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
        if self._sums is not None and self._sums.is_in_place(func, args):
            storage = args[0].untyped_storage()
            self._release(storage._cdata, storage.nbytes(), None)
            del storage
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

    The network runs again, under autograd, on tensors without data, and is left as it was. Arguments are those of
    `prepare`. None where it does not run so.
    """
    tensors = tensors_of(network)
    count = PeakBytes(not on_cpu, GradientSums())
    try:
        with (
            unseen(network, image.device),
            torch.enable_grad(),
            FakeTensorMode(allow_non_fake_inputs=True) as fakes,
        ):
            fake_tensors: dict[str, Tensor] = {name: fakes.from_tensor(tensor) for name, tensor in tensors.items()}
            fake_image = torch.empty_strided(image.shape, image.stride(), dtype=image.dtype, device=image.device)
            fake_image.requires_grad_(image.requires_grad)
            count.adopt(fake_image, *fake_tensors.values())
            nothing = torch.empty(0, device=image.device)
            with count:
                with torch.autocast(image.device.type, dtype=autocast, enabled=autocast is not None):
                    outputs = torch.func.functional_call(without_hooks(network), fake_tensors, (fake_image,))
                    torch.clear_autocast_cache()  # The outermost context ends so.
                leaves = _pytree.tree_leaves(outputs)
                loss = _Loss.apply(*(leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad))
                del outputs, leaves
                loss.backward(nothing.to(loss.dtype))
    except Exception:  # A network of others may raise anything, and no pass needs this number.
        return None
    return fixed_bytes(tensors, image) + count.peak


def fixed_bytes(tensors: Mapping[str, Tensor], image: Tensor) -> int:
    """Return the bytes of weights, buffers and image, which are there before a pass and after it."""
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors.values()}
    return sum(storages.values()) + image.nbytes


def scratch_bytes(
    program: Program, weights: dict[str, Tensor], image: Tensor, autocast: torch.dtype | None
) -> list[tuple[Workspace, Workspace]]:
    """Return the workspaces in the instructions of each map; also where stems are streamed."""
    with FakeTensorMode(allow_non_fake_inputs=True) as fakes:
        fake_weights: dict[str, Tensor] = {}
        for name, tensor in weights.items():
            fake_weights[name] = fakes.from_tensor(tensor.detach()).requires_grad_(tensor.requires_grad)
        fake_weights = derived_tensors(program.maps, fake_weights)
        state = State(program.maps.axis, autocast or image.dtype, fake_weights, program.on_cpu)
        meter = _Meter(program, Executor(_shortened(program), state, autocast, image.device))
        with torch.no_grad():
            if not program.on_cpu:
                state.convert(program.maps.converted_weights)
            made = [meter.compute(map_) for map_ in program.maps.maps]
            return [meter.workspaces(map_, of_make) for map_, of_make in zip(program.maps.maps, made, strict=True)]


def _shortened(program: Program) -> Program:
    """Return a program whose maps have their first two tiles, or parts, and their last two alone."""
    short = replace(program, plans={}, spans={})
    for map_ in program.maps.maps:
        if map_.rule is None:
            short.spans[map_.index] = _ends(program.parts(map_))
            continue
        for streamed in {(), streamable_sources(program, map_)}:
            plan = program.plan(map_, streamed)
            short.plans[map_.index, streamed, None] = replace(plan, tiles=_ends(plan.tiles))
    return short


def _ends(tiles: Sequence[T]) -> list[T]:
    """Return the first two and the last two."""
    return [*tiles[:2], *tiles[2:][-2:]]


def streamable_sources(program: Program, map_: Map) -> Streamed:
    """Return the sources of a map that are made from the image, and can be streamed."""
    stems = []
    for other in program.maps.maps:
        if other.value in map_.sources and other.sources == (program.maps.graph.image,):
            stems.append(other)
    if any(other.rule is None for other in (map_, *stems)):
        return ()
    return tuple(other.index for other in stems)


def is_normalised(program: Program, map_: Map) -> bool:
    """Return whether the gradient of a map has a part that its statistics give."""
    return any(norm in program.wanted for norm in map_.norms)


class _Meter:
    """Carries out one instruction at a time and counts its bytes."""

    def __init__(self, program: Program, run: Executor) -> None:
        self.program = program
        self.run = run
        self.short = run.program
        self.operations = sum(map_.operations for map_ in program.maps.maps)
        self.count = PeakBytes(has_workspaces=not program.on_cpu)
        self.given: set[int] = set()  # Storages that are not counted.

    def workspaces(self, map_: Map, of_make: int) -> tuple[Workspace, Workspace]:
        """Return the bytes of all instructions of a map, those of `compute` known; also with streamed stems."""
        of_norm = self._norm_backward(map_)
        workspace = self._workspace(map_, of_make, of_norm)
        stems = streamable_sources(self.program, map_)
        if not stems:
            return workspace, workspace
        return workspace, self._workspace(map_, max(of_make, self.compute(map_, stems)), of_norm, stems)

    def _workspace(self, map_: Map, of_make: int, of_norm: int, streamed: Streamed = ()) -> Workspace:
        """Return the bytes of instructions, where sources are `streamed`."""
        reads = self.program.plan(map_).read if streamed else ()
        read = tuple(index for index in streamed if self.run.by_index[index].value in reads)
        return Workspace(
            compute=of_make,
            backward=self._backward(map_, read),
            backward_two_pass=self._backward_two_pass(map_, read),
            norm_backward=of_norm,
            norm_backward_tiled=0 if map_.rule is None else self._norm_backward(map_, streamed),
        )

    def compute(self, map_: Map, streamed: Streamed = ()) -> int:
        """Return the workspace of making the map."""
        self._provide(map_, streamed)
        return self._measured(Compute(map_.index, None, streamed))

    def _backward(self, map_: Map, streamed: Streamed) -> int:
        """Return the workspace of sending the gradient of a map."""
        if map_.value not in self.program.wanted:
            return 0
        self._provide(map_, streamed)
        self._provide_gradient(map_)
        targets = tuple(Target(other.index, "new") for other in self._wanted(map_))
        return self._measured(Backward(map_.index, targets, streamed))

    def _backward_two_pass(self, map_: Map, streamed: Streamed) -> int:
        """Return the same where the gradient of a normalised source is written over the source, at most."""
        most = 0
        if map_.rule is None or map_.operations > TWO_PASS_WORK * self.operations:
            return most
        # With tiles left out, the rows between them would count as rows that no tile reads, and be completed at once.
        self.run.program = self.program
        wanted = self._wanted(map_)
        for source in wanted:
            if source.norms and source.index not in streamed:
                # Of the other sources, the gradient of the first that is as large as the map lies over its gradient.
                others = [other for other in wanted if other is not source]
                alike = [other.index for other in others if other.value.shape == map_.value.shape]
                targets = [Target(other.index, "gradient" if other.index in alike[:1] else "new") for other in others]
                targets.append(Target(source.index, "map"))
                self._provide(map_, streamed)
                self._provide_gradient(map_)
                instruction = Backward(map_.index, tuple(targets), streamed, is_two_pass=True)
                most = max(most, self._measured(instruction))
        self.run.program = self.short
        return most

    def _norm_backward(self, map_: Map, streamed: Streamed | None = None) -> int:
        """Return the bytes while what statistics give is added to a map's gradient; `streamed`: its rows are made."""
        if not is_normalised(self.program, map_):
            return 0
        self._provide(map_, streamed or ())
        self._provide_gradient(map_)
        self.run.maps[map_.value] = self._given(map_.value, self._dtype(map_))
        for norm in map_.norms:
            mean, *_ = self.run.state.statistics[norm]
            shape, dtype, device = map_.value.shape[:2], mean.dtype, self.run.device
            first, second = (torch.empty(shape, dtype=dtype, device=device) for _ in range(2))
            self.run.state.sums[norm] = (first, second)
        return self._measured(NormBackward(map_.index, streamed))

    def _wanted(self, map_: Map) -> list[Map]:
        """Return the sources of a map that need a gradient."""
        wanted = self.program.wanted.intersection(map_.sources)
        return [other for other in self.run.by_index if other.value in wanted]

    def _provide(self, map_: Map, streamed: Streamed) -> None:
        """Put the sources there, and let views of weights be no new tensors."""
        self.count.reset()
        if streamed:
            map_ = self.program.plan(map_, streamed).map
        self.count.adopt(*(self.run.state.weights[name] for name in map_.weights))
        for source in map_.sources:
            index = self.program.maps.index_of.get(source)
            dtype = self.run.state.dtype if index is None else self._dtype(self.run.by_index[index])
            self.run.maps[source] = self._given(source, dtype)

    def _provide_gradient(self, map_: Map) -> None:
        readers = [other for other in self.run.by_index if map_.value in other.sources]
        dtype = self._dtype(map_)
        if dtype.is_floating_point and readers and all(other.rule is not None for other in readers):
            dtype = self.run.state.dtype
        self.run.gradients[map_.value] = self._given(map_.value, dtype)

    def _given(self, value: Value, dtype: torch.dtype) -> Tensor:
        """Return a tensor for a map or its gradient that is left out of the count."""
        tensor = torch.empty(value.shape, dtype=dtype, device=self.run.device)
        self.count.adopt(tensor)
        self.given.add(tensor.untyped_storage()._cdata)
        return tensor

    def _dtype(self, map_: Map) -> torch.dtype:
        if map_.rule is None or not map_.value.dtype.is_floating_point:
            return map_.value.dtype
        return self.run.state.dtype

    def _measured(self, instruction: Instruction) -> int:
        """Return the peak of an instruction without the maps and gradients that it made, and forget all."""
        run = self.run
        with self.count:
            run.execute(instruction)
        made = [*run.maps.values(), *run.gradients.values(), *run.state.gradients.values()]
        size_of = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in made if t is not None}
        own = sum(size for address, size in size_of.items() if address not in self.given)
        self.given.clear()
        for known in (run.maps, run.gradients, run.state.sums, run.state.gradients, run.state.prepared):
            known.clear()
        return max(0, self.count.peak - own)

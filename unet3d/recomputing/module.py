"""`unet3d.recompute`: any network, trained by a schedule of its own."""

import copy
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from unet3d.base.errors import UserError
from unet3d.base.types import MIB, budget_bytes
from unet3d.recomputing import search
from unet3d.recomputing.function import InTiles, derived_tensors
from unet3d.recomputing.groups import first_of_group
from unet3d.recomputing.maps import Maps
from unet3d.recomputing.program import Program
from unet3d.recomputing.rules import State
from unet3d.recomputing.run import Pass
from unet3d.recomputing.schedule import Schedule
from unet3d.recomputing.scratch import scratch_bytes
from unet3d.recomputing.sizes import sizes_of, wanted_values
from unet3d.recomputing.trace import trace

Plan = Literal["lean", "tiles", "auto"]
PLANS = ("lean", "tiles", "auto")
TILES = 24  # of the largest value, on the CPU
CUDA_TILE = 2**22  # numbers; with less, a GPU waits for launches


class Prediction(NamedTuple):
    """A prediction of the memory that a step with a schedule needs, as bytes of tensors."""

    fixed_bytes: int  # weights, buffers, image, and what the caller says is held beside them
    schedule: Schedule
    schedules: tuple[Schedule, ...]  # that could have been chosen, from the least work to the least memory

    @property
    def peak_bytes(self) -> int:
        """The most bytes alive in the forward and the backward pass."""
        return self.fixed_bytes + self.schedule.peak_bytes


def recompute(
    model: nn.Module,
    example: Tensor,
    plan: Plan = "lean",
    budget: str | None = None,
    held: str | None = None,
) -> "Recomputed":
    """Return a network that trains as `model` does, with the same parameters, in less memory.

    `example` is an image N C D H W as the network will get it; the schedule is found for its size, and for each other
    size when the first such image comes. `plan`: "lean" makes no convolution a second time, "tiles" needs least memory,
    "auto" takes the least work with which weights, gradients, maps and what is `held` beside them (the optimizer's
    state, say) fit into the `budget`, as "6GiB". Prints a line that says what to expect.
    """
    recomputed = Recomputed(model, plan, budget, held)
    if model.training:
        program = recomputed.program(example, _autocast_dtype(example) or example.dtype)
        print(recomputed.describe(program))
    return recomputed


class Recomputed(nn.Module):
    """A network with the parameters, buffers and names of another, whose training pass follows a schedule.

    In evaluation, and without gradients, it is the network itself.
    """

    def __init__(
        self, model: nn.Module, plan: Plan = "lean", budget: str | None = None, held: str | None = None
    ) -> None:
        super().__init__()
        if plan not in PLANS:
            raise UserError(f"plan={plan}: choose {', '.join(PLANS)}")
        if (plan == "auto") != (budget is not None):
            raise UserError(f"plan={plan}, budget={budget}: a budget goes with plan=auto, and only with it")
        self._modules = model._modules
        self._parameters = model._parameters
        self._buffers = model._buffers
        self._network = [model]  # not a child: names stay those of the model
        self.training = model.training
        self.plan = plan
        self.budget = None if budget is None else budget_bytes(budget)
        self.held = 0 if held is None else budget_bytes(held)
        self.programs: dict[Any, Program] = {}
        self.predictions: dict[Any, Prediction] = {}

    @property
    def network(self) -> nn.Module:
        """The network itself."""
        return self._network[0]

    def train(self, mode: bool = True) -> "Recomputed":
        """Set the mode, of the network too."""
        super().train(mode)
        self.network.training = mode
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> "Recomputed":
        other = Recomputed(copy.deepcopy(self.network, memo), "lean")
        other.plan = self.plan
        other.budget = self.budget
        other.held = self.held
        other.programs = dict(self.programs)
        other.predictions = dict(self.predictions)
        return other

    def forward(self, image: Tensor) -> Any:
        """Return what the network returns for an image N C D H W."""
        if not torch.is_grad_enabled() or not self.training:
            return self.network(image)
        autocast = _autocast_dtype(image)
        dtype = autocast or image.dtype
        program = self.program(image, dtype)
        graph = program.maps.graph
        tensors = self._tensors()
        weights = derived_tensors(program.maps, tensors)
        names = _trained(program.maps, weights)
        state = State(program.maps.axis, dtype, weights)
        run = Pass(program, state, autocast, image.device)
        outputs = InTiles.apply(run, names, image, *(weights[name] for name in names))
        with torch.no_grad():
            for name in graph.counters:
                tensors[name].add_(1)
        return outputs[0] if graph.out_spec is None else _pytree.tree_unflatten(outputs, graph.out_spec)

    def program(self, image: Tensor, dtype: torch.dtype) -> Program:
        """Return what passes over images of this size have in common; it is made once for each size and mode."""
        modes = tuple(module.training for module in self.network.modules())
        trained = tuple(parameter.requires_grad for parameter in self.network.parameters())
        key = (image.shape, image.requires_grad, dtype, image.dtype, image.device, modes, trained)
        if key not in self.programs:
            program, prediction = self._make_program(image, dtype)
            self.programs[key] = program
            self.predictions[id(program)] = prediction
        return self.programs[key]

    def prediction(self, program: Program) -> Prediction:
        """Return what a step with a program needs."""
        return self.predictions[id(program)]

    def describe(self, program: Program) -> str:
        """Return a line: the predicted peak, the extra work, and what stays whole."""
        prediction = self.prediction(program)
        line = f"recompute={self.plan}: predicted peak {prediction.peak_bytes / MIB:,.1f} MiB of tensors (weights, "
        line += f"gradients, maps), work of {prediction.schedule.work:.2f} forward passes (1.00: no convolution twice)"
        whole: dict[str, None] = {}
        for map_ in program.maps.whole:
            value = first_of_group(map_.passing)
            whole[f"{value.op} in {value.layer}" if value.layer else value.op] = None
        if whole:
            first = ", ".join(list(whole)[:3])
            more = f" and {len(whole) - 3} others" if len(whole) > 3 else ""
            line += f"; without a rule for rows, so run again in backward, under autograd: {first}{more}"
        return line

    def _tensors(self) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = dict(self.network.named_parameters(remove_duplicate=False))
        return tensors | dict(self.network.named_buffers(remove_duplicate=False))

    def _make_program(self, image: Tensor, dtype: torch.dtype) -> tuple[Program, Prediction]:
        if image.dim() != 5:
            raise UserError(f"recompute: the image has {image.dim()} dimensions, not the 5 of N C D H W")
        graph = trace(self.network, image)
        size = list(image.shape[2:])
        maps = Maps(graph, axis=2 + size.index(max(size)))
        tensors = self._tensors()
        trained = {name: t.nbytes for name, t in tensors.items() if t.requires_grad}
        names = frozenset(trained) | {derived.name for derived in graph.derived}
        wanted = wanted_values(maps, names, image.requires_grad)
        on_cpu = image.device.type == "cpu"
        numbers = max(value.shape.numel() for value in graph.values if len(value.shape) == 5) // TILES
        if not on_cpu:
            numbers = max(numbers, CUDA_TILE)
        program = Program(maps, numbers, on_cpu, wanted, Schedule((), 0, 0.0))
        scratch = scratch_bytes(program, tensors, dtype, _autocast_dtype(image), image.device)
        schedules = tuple(search.front(sizes_of(program, dtype, trained, scratch)))
        of_network = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors.values()}
        fixed = sum(of_network.values()) + image.nbytes + self.held
        if dtype != image.dtype:
            fixed += image.numel() * dtype.itemsize
        program.schedule = self._choose(schedules, fixed)
        return program, Prediction(fixed, program.schedule, schedules)

    def _choose(self, schedules: tuple[Schedule, ...], fixed: int) -> Schedule:
        if self.plan == "lean":
            return search.leanest(schedules)
        if self.plan == "tiles":
            return search.smallest(schedules)
        assert self.budget is not None
        schedule = search.within(schedules, self.budget - fixed)
        if schedule is None:
            least = fixed + min(schedule.peak_bytes for schedule in schedules)
            raise UserError(
                f"budget={self.budget / MIB:,.0f}MiB: a step needs at least {least / MIB:,.0f} MiB of tensors; "
                "take a smaller patch or a smaller network"
            )
        return schedule


def _autocast_dtype(image: Tensor) -> torch.dtype | None:
    """Return the type of mixed precision on the image's device; None where it is off."""
    device_type = image.device.type
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None


def _trained(maps: Maps, weights: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the weights that the graph reads and that need a gradient."""
    return [name for name in maps.weights if weights[name].requires_grad]

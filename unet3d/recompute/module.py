"""`unet3d.recompute`: any network, trained by a schedule of its own."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from unet3d.recompute.graph import trace
from unet3d.recompute.maps import Maps
from unet3d.recompute.rules import State
from unet3d.recompute.run import InTiles, Pass, Program, derived_tensors
from unet3d.recompute.schedule import Schedule, Sizes, compile_schedule, every_map
from unet3d.recompute.scratch import scratch_bytes
from unet3d.recompute.sizes import sizes_of, wanted_values


class Recomputed(nn.Module):
    """A network with the same parameters, buffers and names as another, whose training pass follows a schedule."""

    def __init__(self, model: nn.Module, tiles: int = 12) -> None:
        super().__init__()
        self._modules = model._modules
        self._parameters = model._parameters
        self._buffers = model._buffers
        self._network = [model]  # not a child: names stay those of the model
        self.training = model.training
        self.tiles = tiles
        self.programs: dict[Any, Program] = {}

    @property
    def network(self) -> nn.Module:
        """The network itself."""
        return self._network[0]

    def train(self, mode: bool = True) -> "Recomputed":
        """Set the mode of the network, too."""
        super().train(mode)
        self.network.training = mode
        return self

    def forward(self, image: Tensor) -> Any:
        """Return what the network returns for N C D H W."""
        if not torch.is_grad_enabled() or not self.training:
            return self.network(image)
        autocast = None
        if torch.is_autocast_enabled(image.device.type):
            autocast = torch.get_autocast_dtype(image.device.type)
        dtype = autocast or image.dtype
        program = self.program(image, dtype)
        tensors: dict[str, Tensor] = dict(self.network.named_parameters(remove_duplicate=False))
        tensors |= dict(self.network.named_buffers(remove_duplicate=False))
        weights = derived_tensors(program.maps, tensors)
        graph = program.maps.graph
        names = _trained(program.maps, weights)
        state = State(program.maps.axis, dtype, autocast is not None, weights)
        run = Pass(program, state, autocast, image.device)
        outputs = InTiles.apply(run, names, image, *(weights[name] for name in names))
        with torch.no_grad():
            for name in graph.counters:
                tensors[name].add_(1)
        return _pytree.tree_unflatten(outputs, graph.out_spec) if graph.out_spec is not None else outputs[0]

    def program(self, image: Tensor, dtype: torch.dtype) -> Program:
        """Return what passes over images of this size have in common; it is made once for each."""
        modes = tuple(module.training for module in self.network.modules())
        trained = tuple(parameter.requires_grad for parameter in self.network.parameters())
        key = (image.shape, image.requires_grad, dtype, image.device, modes, trained)
        if key not in self.programs:
            self.programs[key] = self._make_program(image, dtype)
        return self.programs[key]

    def _make_program(self, image: Tensor, dtype: torch.dtype) -> Program:
        graph = trace(self.network, image)
        size = list(image.shape[2:])
        axis = 2 + size.index(max(size))
        maps = Maps(graph, axis)
        tensors: dict[str, Tensor] = dict(self.network.named_parameters(remove_duplicate=False))
        trained = {name: t.numel() * t.itemsize for name, t in tensors.items() if t.requires_grad}
        tensors |= dict(self.network.named_buffers(remove_duplicate=False))
        names = frozenset(trained) | {derived.name for derived in graph.derived}
        wanted = wanted_values(maps, names, image.requires_grad)
        widest = max(v.shape.numel() for v in graph.values if len(v.shape) == 5)
        on_cpu = image.device.type == "cpu"
        empty = Schedule((), 0, 0.0)
        program = Program(maps, widest // self.tiles, on_cpu, wanted, empty)
        autocast = dtype if dtype != image.dtype else None
        scratch = scratch_bytes(program, dict(tensors), dtype, autocast, image.device)
        sizes = sizes_of(program, dtype, trained, scratch)
        self.sizes = sizes
        program.schedule = self.choose(sizes)
        return program

    def choose(self, sizes: Sizes) -> Schedule:
        """Return the schedule for these sizes."""
        return compile_schedule(sizes, every_map(sizes))


def _trained(maps: Maps, weights: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the weights that the graph reads and that need a gradient."""
    names = [weight.name for value in maps.graph.values for weight in value.weights()]
    return [name for name in dict.fromkeys(names) if weights[name].requires_grad]

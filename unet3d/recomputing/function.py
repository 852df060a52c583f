"""A network's pass by its program, as a single autograd function, and the weights that it takes."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils import _pytree

from unet3d.model import half_precision
from unet3d.recomputing.derived import derive
from unet3d.recomputing.maps import Maps
from unet3d.recomputing.program import Program
from unet3d.recomputing.run import Pass
from unet3d.recomputing.state import State


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
    names = _trained(program.maps, weights)
    state = State(program.maps.axis, autocast or image.dtype, weights, program.on_cpu)
    run = Pass(program, state, autocast, image.device)
    outputs = InTiles.apply(run, names, image, *(weights[name] for name in names))
    with torch.no_grad():
        for name in graph.counters:
            tensors[name].add_(1)
    return outputs[0] if graph.out_spec is None else _pytree.tree_unflatten(outputs, graph.out_spec)


class InTiles(torch.autograd.Function):
    """A pass by a schedule. Weights are inputs, so that hooks, frozen weights and `torch.autograd.grad` work."""

    @staticmethod
    def forward(ctx: Any, run: Pass, names: Sequence[str], image: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.run = run
        ctx.names = names
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(image, *weights)
        with _without_autocast(run):
            return run.forward(image)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        image, *_ = ctx.saved_tensors  # raises if a tensor was changed in between, or after a first backward pass
        run = ctx.run
        ctx.run = None
        names = ctx.names
        with _without_autocast(run):
            of_image = run.backward(image, list(gradients))
        of_weights = [run.state.gradients.pop(name, None) for name in names]
        if of_image is not None:
            of_image = of_image.to(image.dtype)
        return None, None, of_image, *of_weights


@contextmanager
def _without_autocast(run: Pass) -> Any:
    """Turn autocast off: rules convert by themselves."""
    with ExitStack() as contexts:
        contexts.enter_context(torch.autocast(run.device.type, enabled=False))
        is_half = run.state.dtype in half_precision.DTYPES
        if is_half and run.device.type == "cpu":
            contexts.enter_context(half_precision.convolutions())
        yield


def derived_tensors(maps: Maps, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return parameters, buffers, constants and what is computed from them before the pass, which autograd follows."""
    known = {**maps.graph.constants, **tensors}
    return known | derive(maps.derived_before, known, maps.weights)


def tensors_of(network: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by all their names."""
    tensors: dict[str, Tensor] = dict(network.named_parameters(remove_duplicate=False))
    return tensors | dict(network.named_buffers(remove_duplicate=False))


def autocast_dtype(image: Tensor) -> torch.dtype | None:
    """Return the type of mixed precision on the image's device; None where it is off."""
    device_type = image.device.type
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None


def _trained(maps: Maps, weights: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the weights that the graph reads and that need a gradient."""
    return [name for name in maps.weights if weights[name].requires_grad]

"""A network's pass by its program, as a single autograd function, and the weights that it takes."""

import functools
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from unet3d.base.errors import UserError
from unet3d.model import half_precision
from unet3d.recomputing.graph import Value, Weight, derive
from unet3d.recomputing.maps import Maps
from unet3d.recomputing.program import Program
from unet3d.recomputing.readable import tensors_of
from unet3d.recomputing.run import Executor
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
            tensors[value].register_hook(functools.partial(_refuse_use_of_part, weakref.ref(tensors[value])))
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
        image, *_ = ctx.saved_tensors  # raises if a tensor was changed in between, or after a first backward pass
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

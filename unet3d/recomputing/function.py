"""A pass by a schedule as a single autograd function, and the weights that it takes."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from unet3d.recomputing.derived import derive
from unet3d.recomputing.maps import Maps
from unet3d.recomputing.run import Pass
from unet3d.training import half_precision


class InTiles(torch.autograd.Function):
    """A pass by a schedule. Weights are inputs, so that hooks, frozen weights and `torch.autograd.grad` work."""

    @staticmethod
    def forward(ctx: Any, run: Pass, names: Sequence[str], image: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.run = run
        ctx.names = names
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(image, *weights)
        with _quiet(run):
            return run.forward(image)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        image, *_ = ctx.saved_tensors  # raises if a tensor was changed in between, or after a first backward pass
        run = ctx.run
        ctx.run = None
        names = ctx.names
        with _quiet(run):
            of_image = run.backward(image, list(gradients))
        of_weights = [run.state.gradients.pop(name, None) for name in names]
        if of_image is not None:
            of_image = of_image.to(image.dtype)
        return None, None, of_image, *of_weights


@contextmanager
def _quiet(run: Pass) -> Any:
    """Let rules say themselves in which precision they compute."""
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

"""Checks of what a user's own network or loss returns; errors name it by its path in the config."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from unet3d.base.errors import UserError


def refuse_odd_logits(
    output: object,
    path: str,
    classes: int,
    sizes: Sequence[int],
    may_be_several: bool = False,
) -> None:
    """Raise UserError unless the network at `path` returned logits for images of `sizes`, N D H W.

    `may_be_several`: a tuple of logits, for deep supervision, of which the first are of the images' size.
    """
    scales: tuple[Any, ...] = (output,)
    if may_be_several and isinstance(output, tuple) and output:
        scales = output
    batch, *size = sizes
    expected = (batch, classes, *size)
    for number, logits in enumerate(scales, start=1):
        shape = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        is_coarser = number > 1 and len(shape) == 5 and shape[:2] == expected[:2]
        if shape != expected and not is_coarser:
            which = "" if len(scales) == 1 else f" as number {number}"
            advice = f"return logits N K D H W of the image's size, here {expected}"
            raise UserError(f"model.path={path}: returns{which} {shape}; {advice}")
        if not logits.is_floating_point():
            raise UserError(f"model.path={path}: returns {logits.dtype}; return logits, floating-point numbers")
        if may_be_several and torch.is_grad_enabled() and not logits.requires_grad:
            fault = "returns logits without a gradient: they are detached, or none of its parameters requires one"
            raise UserError(f"model.path={path}: {fault}")


def refuse_odd_loss(value: object, path: str, has_gradient: bool) -> None:
    """Raise UserError unless the loss at `path` returned a number that can be learned from.

    `has_gradient`: whether the logits require a gradient.
    """
    if not isinstance(value, Tensor):
        raise UserError(f"loss.path={path}: returns {type(value).__name__}; return a torch tensor, one number")
    if value.dim() or not value.is_floating_point():
        fault = f"returns {value.dtype} of shape {tuple(value.shape)}"
        raise UserError(f"loss.path={path}: {fault}; return one floating-point number, as by .mean()")
    if has_gradient and torch.is_grad_enabled() and not value.requires_grad:
        raise UserError(f"loss.path={path}: returns a number without a gradient; compute it from the logits by torch")

"""A module of a user's own: put back as it was after steps of it, or copied without data."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.weak import TensorWeakRef


@contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """Put a model's weights, buffers, gradients and modes back afterwards; copies wait in host memory."""
    weights = list(model.parameters())
    weight_copies = [weight.detach().to("cpu", copy=True) for weight in weights]
    gradients = [parameter.grad for parameter in model.parameters()]
    modes = {module: module.training for module in model.modules()}
    registered: list[Any] = [(module._parameters, dict(module._parameters)) for module in modes]
    buffers = [_BufferCopies(module._buffers) for module in modes]
    for parameter in model.parameters():
        parameter.grad = None
    try:
        yield
    finally:
        for place, before in registered:  # a step may have put another tensor there
            place.clear()
            place.update(before)
        for buffer_copies in buffers:
            buffer_copies.put_back()
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        for module, mode in modes.items():
            module.training = mode
        for weight, value in zip(weights, weight_copies, strict=True):
            _write_over(weight, value)


class _BufferCopies:
    """A module's buffers as they were. They are not held: a step that puts others in their place frees them."""

    def __init__(self, place: dict[str, Any]) -> None:
        self.place = place
        self.copies: dict[str, tuple[TensorWeakRef, Tensor, torch.device] | None] = {}
        for name, buffer in place.items():
            if buffer is None:
                self.copies[name] = None
            else:
                value = buffer.detach().to("cpu", copy=True)
                self.copies[name] = (TensorWeakRef(buffer), value, buffer.device)

    def put_back(self) -> None:
        """Put each buffer, or a copy of one that is gone, back into its place."""
        self.place.clear()
        for name, entry in self.copies.items():
            if entry is None:
                self.place[name] = None
                continue
            reference, value, device = entry
            buffer = reference()
            if buffer is None:
                buffer = value.to(device)
            else:
                _write_over(buffer, value)
            self.place[name] = buffer


@torch.no_grad()
def _write_over(tensor: Tensor, value: Tensor) -> None:
    """Give a tensor these values, unless it has them: what is expanded cannot be written to, and is not."""
    if not torch.equal(tensor.to("cpu"), value):
        tensor.copy_(value)


def on_fake_tensors(model: nn.Module) -> nn.Module:
    """Return a copy whose weights and buffers have shapes and no data, within `fake_mode`; other tensors are shared."""
    copies: dict[int, Any] = {}
    modules = list(model.modules())
    for module in modules:
        for attribute in tree_leaves(list(vars(module).values())):
            if isinstance(attribute, Tensor):
                copies[id(attribute)] = attribute
            elif isinstance(attribute, nn.Module) and attribute not in modules:
                modules.append(attribute)
    for tensor in (*model.parameters(), *model.buffers()):
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        if isinstance(tensor, nn.Parameter):
            fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
        copies[id(tensor)] = fake
    return copy.deepcopy(model, copies)

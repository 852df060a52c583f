"""Copies that torch's convolutions make on a GPU of what does not lie as their kernels want it."""

from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

from unet3d.memory.ledger import CONVOLUTION, CONVOLUTION_BACKWARD, Ledger


class GpuLedger(Ledger):
    """A ledger of fake tensors that stand for tensors on a GPU: copies within convolutions count while they are there.

    See `_convolution` and `convolution_backward` in torch's Convolution.cpp, and its cuDNN stubs.
    """

    def compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is CONVOLUTION:
            image, weight, *others = args
            image = self._laid_out(image, _format(image, weight))
            result = func(image, weight, *others, **kwargs)
            self.count(result, str(func))  # before the copy goes
            return result
        if func is CONVOLUTION_BACKWARD:
            gradient, image, weight, *others = args
            wanted = _format(image, weight)
            if others[-1][1]:  # the weight's gradient is wanted, for which the image is read
                image = self._laid_out(image, wanted)
            gradient = self._laid_out(gradient, wanted)
            result = func(gradient, image, weight, *others, **kwargs)
            self.count(result, str(func))
            del gradient  # before the image
            return result
        return func(*args, **kwargs)

    def _laid_out(self, tensor: Tensor, wanted: torch.memory_format) -> Tensor:
        """Return the tensor in a memory format, counted if it is a copy."""
        tensor = tensor.contiguous(memory_format=wanted)
        self.count(tensor, "aten.clone.default")
        return tensor


def _format(image: Tensor, weight: Tensor) -> torch.memory_format:
    """Return how cuDNN's maps lie: with channels last where the image or the weight does."""
    formats = {suggest_memory_format(image), suggest_memory_format(weight)}
    return torch.channels_last_3d if torch.channels_last_3d in formats else torch.contiguous_format

"""A convolution's call done again, and how much its kernels may take on the CPU."""

from math import prod
from typing import Any

import torch

from unet3d.memory.dry import dry
from unet3d.memory.ledger import CONVOLUTIONS, Site

OPERATIONS = {function.name().removeprefix("aten::"): function for function in CONVOLUTIONS}
BLOCK = 16  # channels; oneDNN's layouts round up to it
PER_THREAD = 512 * 1024  # bytes; oneDNN's own buffers, seen up to 310 KiB


def arguments(site: Site, device: torch.device) -> list[Any]:
    """What a call was given, its tensors filled with a small constant."""

    def made(value: Any) -> Any:
        if not isinstance(value, tuple):
            return value
        if len(value) == 3 and isinstance(value[2], str):
            shape, strides, dtype = value
            return torch.empty_strided(shape, strides, dtype=getattr(torch, dtype), device=device).fill_(0.01)
        return list(value)

    return [made(value) for value in site.arguments]


def call(site: Site, given: list[Any]) -> list[torch.Tensor]:
    """Do it; returns its outputs."""
    result = OPERATIONS[site.operation](*given)
    return [result] if isinstance(result, torch.Tensor) else [t for t in result if t is not None]


def most(site: Site) -> int:
    """An upper bound in bytes for a call on the CPU, outputs included.

    Counted with channels rounded up to 16 per group: forward 2 x (input + output) + weight; backward 2 x input + 3 x
    gradient of the output + (2 + threads) x weight in float32; 512 KiB per thread; where no oneDNN kernel of the
    direct kind is at work (oneDNN off, or torch chose its own, as it does for small batches of one; kernels above 3;
    dilation), the unfolded input of one image, times images or threads, whichever are more.

    Held in 2454 random calls (float32 and bfloat16; 1, 2 and 4 threads; strided, grouped, dilated, transposed; torch
    2.13, oneDNN 3.12 on or off, AMD EPYC). It says nothing of cuDNN's workspaces.
    """
    threads = torch.get_num_threads()
    with dry():
        told = arguments(site, torch.device("cpu"))
        results = call(site, told)
        is_backward = site.operation == "convolution_backward"
        outer = told.pop(0) if is_backward else results[0]  # the output, or its gradient
        given, weight, _, *options = told[:9]
        columns = _columns(given, weight, outer, options)
    groups, size = options[-1], given.element_size()
    inside, outside = (t.shape[0] * _channels(t.shape[1], groups) * prod(t.shape[2:]) * size for t in (given, outer))
    weights = _channels(weight.shape[0], groups) * _up(weight.shape[1]) * prod(weight.shape[2:])
    if is_backward:
        copies = 2 * inside + 3 * outside + (2 + threads) * weights * 4
    else:
        copies = 2 * (inside + outside) + weights * size
    return int(sum(t.untyped_storage().nbytes() for t in results) + copies + threads * PER_THREAD + columns)


def _channels(channels: int, groups: int) -> int:
    return _up(channels) if groups == channels else groups * _up(channels // groups)


def _up(channels: int) -> int:
    return -(-channels // BLOCK) * BLOCK


def _columns(given: torch.Tensor, weight: torch.Tensor, outer: torch.Tensor, options: list) -> int:
    """Bytes of the unfolded input, as matrix products need it; 0 if a direct kernel does the work."""
    _, _, dilation, is_transposed, _, _ = options
    backend = str(torch._C._select_conv_backend(given, weight, None, *options))
    if "Slow" not in backend and max(weight.shape[2:]) <= 3 and max(dilation) == 1:
        return 0
    wide, narrow = (outer, given) if is_transposed else (given, outer)
    unfolded = prod(weight.shape[2:]) * wide.shape[1] * prod(narrow.shape[2:]) * given.element_size()
    return int(unfolded) * max(given.shape[0], torch.get_num_threads())

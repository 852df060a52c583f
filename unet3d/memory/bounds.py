"""A convolution's call done again, and how much its kernels may take on the CPU."""

from math import prod
from typing import Any

import torch
from torch import Tensor

from unet3d import half_precision
from unet3d.half_precision import Options
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

    The sum of these, with channels rounded up to 16 per group:

    - forward 2 x (input + output) + weight, one output more if transposed;
    - backward 2 x input + 3 x gradient of the output + (2 + threads) x weight in float32;
    - 512 KiB per thread;
    - the unfolded input of one image, times images or threads, whichever are more, where no oneDNN kernel of the direct
      kind is at work: oneDNN off, small batches of one, which torch computes itself, kernels above 3, dilation;
    - without AVX512 the unfolded input of one plane for each thread.

    Where `half_precision` computes the call, this is the sum for its largest slab in float32, and the slab itself.

    Held in 2,400 random calls (float32, bfloat16, float16; 1 and 2 threads; strided, grouped, dilated,
    transposed; torch 2.13, oneDNN 3.12, AMD EPYC with AVX512 and restricted to AVX2). It says nothing of cuDNN's
    workspaces.
    """
    with dry():
        given = arguments(site, torch.device("cpu"))
        results = call(site, given)
        is_backward = site.operation == "convolution_backward"
        outer = given.pop(0) if is_backward else results[0]  # the output, or its gradient
        inner, weight, _, *rest = given[:9]
        options = Options(*rest)
        outputs = sum(tensor.untyped_storage().nbytes() for tensor in results)
        if half_precision.is_served(inner, weight, options):
            return int(outputs + _served(inner, weight, outer, options, is_backward))
        return int(outputs + _scratch(inner, weight, outer, options, is_backward))


def _served(inner: Tensor, weight: Tensor, outer: Tensor, options: Options, is_backward: bool) -> int:
    """Of a call that is computed in float32: weights, the largest slab with its results, and the kernel's own."""
    parts = half_precision.slabs(inner, outer.shape, weight, options)
    near, far = max(slab.end - slab.start for slab in parts), max(slab.high - slab.low for slab in parts)
    planes = (near, far) if options.is_transposed else (far, near)
    slabs = [
        torch.empty((*whole.shape[:2], max(n, whole.shape[2] if len(parts) == 1 else 0), *whole.shape[3:]))
        for whole, n in zip((inner, outer), planes, strict=True)
    ]
    weights, times = weight.float(), 3 if is_backward else 1  # the slab's gradient and the sum of all slabs
    held = sum(slab.nbytes for slab in slabs) + times * weights.nbytes
    held += 2 * slabs[0].nbytes if is_backward else 0  # its gradient, and the planes that the next slab adds to
    return held + _scratch(slabs[0], weights, slabs[1], options, is_backward)


def _scratch(inner: Tensor, weight: Tensor, outer: Tensor, options: Options, is_backward: bool) -> int:
    """What a kernel of torch or oneDNN takes for itself."""
    threads, size = torch.get_num_threads(), inner.element_size()
    inside, outside = (
        t.shape[0] * _channels(t.shape[1], options.groups) * prod(t.shape[2:]) * size for t in (inner, outer)
    )
    weights = _channels(weight.shape[0], options.groups) * _up(weight.shape[1]) * prod(weight.shape[2:])
    if is_backward:
        copies = 2 * inside + 3 * outside + (2 + threads) * weights * 4
    else:
        copies = 2 * (inside + outside) + options.is_transposed * outside + weights * size
    return int(copies + threads * PER_THREAD + _columns(inner, weight, outer, options))


def _channels(channels: int, groups: int) -> int:
    return _up(channels) if groups == channels else groups * _up(channels // groups)


def _up(channels: int) -> int:
    return -(-channels // BLOCK) * BLOCK


def _columns(inner: Tensor, weight: Tensor, outer: Tensor, options: Options) -> int:
    """Bytes of unfolded input and copied weights, as matrix products need them; 0 if a direct kernel does the work.

    Of whole images, but where oneDNN has direct kernels with AVX512 alone: of one plane for each thread.
    """
    backend = str(torch._C._select_conv_backend(inner, weight, None, *options))
    has_direct = "Slow" not in backend and max(weight.shape[2:]) <= 3 and max(options.dilation) == 1
    if has_direct and torch.backends.cpu.get_cpu_capability() == "AVX512":
        return 0
    wide, narrow = (outer, inner) if options.is_transposed else (inner, outer)
    channels, threads = _channels(wide.shape[1], options.groups), torch.get_num_threads()
    plane = prod(weight.shape[2:]) * channels * prod(narrow.shape[3:]) * inner.element_size()
    planes = threads if has_direct else narrow.shape[2] * max(inner.shape[0], threads)
    return int(plane) * planes + (1 + threads) * weight.numel() * 4

"""Half-precision 3D convolutions on CPUs that have no half-precision arithmetic, or do it wrongly.

Without AVX512 (fp16: without AVX512-FP16), such convolutions do not reach oneDNN: torch computes them 85 to 128 times
slower than float32 ones (pytorch#118499, #183815). With AVX512 but no bf16 instructions, oneDNN emulates them in twice
the time of float32. Inside `convolutions()` they take and return half-precision tensors and compute in float32, one
slab of planes along D at a time. This happens in torch's dispatcher, below autocast, autograd, checkpointing and the
memory ledger: tensors kept between operations stay half precision, and float32 lives within one call only.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from itertools import pairwise, zip_longest
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor

DTYPES = (torch.bfloat16, torch.float16)
SLAB_BYTES = 4 * 2**20  # Float32 input and output of a slab; 2 to 8 MiB take the same time, 32 a fifth more.
ONEDNN = 20_480  # Up to this C x D x H of an image alone, torch leaves oneDNN for its slow kernel.
FEWEST_PRODUCTS = 2**16  # products of a convolution; below, conversion takes longer than torch's slow kernel
Gradients = tuple[Tensor | None, ...]  # Input, weight and bias; None where not asked for.


class Options(NamedTuple):
    """The arguments of `aten::convolution` after the bias; one number for each axis D H W."""

    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    is_transposed: bool
    output_padding: Sequence[int]
    groups: int

    def of_slab(self) -> "Options":
        """Return the arguments for a slab: its planes hold the padding along D already."""
        return self._replace(padding=[0, *self.padding[1:]])


class Slab(NamedTuple):
    """Planes along D, from and to, that one call reads of the input and computes of the output.

    Slabs divide the output, or a transposed convolution's input. Where the input is padded, some planes lie outside.
    """

    inner: tuple[int, int]
    outer: tuple[int, int]


class _Registration:
    """The kernels of this module in torch's dispatcher, which the whole process shares."""

    lock = Lock()
    users = 0
    library: torch.library.Library | None = None


@contextmanager
def convolutions() -> Iterator[None]:
    """Compute here the half-precision 3D convolutions on the CPU that torch does slowly or wrongly.

    It serves the whole process, may be nested and used by several threads; after the last exit nothing is registered.
    """
    ours = _Registration
    with ours.lock:
        if ours.library is None:
            ours.library = torch.library.Library("aten", "IMPL")
            for name, function in (("convolution", _convolution), ("convolution_backward", _convolution_backward)):
                native = torch.library.get_kernel(f"aten::{name}", "CPU")  # torch's own kernel
                ours.library.impl(name, partial(function, native), "CPU", with_keyset=True)
        ours.users += 1
    try:
        yield
    finally:
        with ours.lock:
            ours.users -= 1
            if ours.users == 0 and ours.library is not None:
                ours.library._destroy()
                ours.library = None


def has_kernels(dtype: torch.dtype) -> bool:
    """Return whether oneDNN has convolutions of this half-precision type for this CPU, and does not emulate them."""
    if not (torch.backends.mkldnn.is_available() and torch._C._get_mkldnn_enabled()):
        return False
    if dtype is torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    is_supported = bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return is_supported and not emulates_bf16()


@cache
def emulates_bf16() -> bool:
    """Return whether oneDNN emulates bf16, as on CPUs with AVX512 but no bf16 instructions. False where unknown."""
    if not hasattr(torch.cpu, "get_capabilities"):  # an older torch
        return False
    capabilities = torch.cpu.get_capabilities()
    known = [name for name in ("avx512_bf16", "amx_bf16", "bf16") if name in capabilities]
    if not known:
        return False
    return not any(capabilities[name] for name in known)


def computes_here(x: Tensor, weight: Tensor, options: Options) -> bool:
    """Return whether a convolution is computed here and not by torch.

    Torch 2.13 is wrong in two corners also on CPUs that have bf16 instructions. Where a padded map is shorter along D
    than the kernel and the output is longer than 1, oneDNN leaves the weight gradient partly unwritten and may write
    beyond it. With AMX, a stride along W and an output of width 1, results are wrong (pytorch#169688, #188426).
    """
    if x.dtype not in DTYPES or x.dim() != 5 or weight.dtype is not x.dtype:
        return False
    if not has_kernels(x.dtype):
        places = x.shape[2:] if options.is_transposed else output_shape(x, weight, options)[2:]
        return x.shape[0] * weight.numel() * math.prod(places) >= FEWEST_PRODUCTS
    is_short = x.shape[2] < weight.shape[2]
    is_strided = options.stride[2] > 1
    if options.is_transposed or not (is_short or is_strided):
        return False
    _, _, depth, _, width = output_shape(x, weight, options)
    return (is_short and depth > 1) or (is_strided and width == 1)


def output_shape(x: Tensor, weight: Tensor, options: Options) -> list[int]:
    """Return N C D H W of a convolution's result."""
    channels = weight.shape[0]
    if options.is_transposed:
        channels = weight.shape[1] * options.groups
    sizes = []
    for axis in range(3):
        size = x.shape[axis + 2]
        stride = options.stride[axis]
        reach = options.dilation[axis] * (weight.shape[axis + 2] - 1)
        padded = 2 * options.padding[axis]
        if options.is_transposed:
            sizes.append((size - 1) * stride - padded + reach + options.output_padding[axis] + 1)
        else:
            sizes.append((size + padded - reach - 1) // stride + 1)
    return [x.shape[0], channels, *sizes]


def slabs(x: Tensor, outer: Sequence[int], weight: Tensor, options: Options) -> list[Slab]:
    """Return how to cut a convolution of x with an output of shape `outer`; one slab where it is small or uncuttable.

    Along D, the input of a transposed convolution is cut, else the output.
    """
    stride = options.stride[0]
    reach = options.dilation[0] * (weight.shape[2] - 1) + 1  # planes that a kernel covers
    depth = x.shape[2] if options.is_transposed else outer[2]
    count = math.ceil(4 * (x.numel() + math.prod(outer)) / SLAB_BYTES)
    if x.shape[0] == 1:  # no slab may be one that torch would compute by its slow kernel
        planes_per_cut = 1 if options.is_transposed else stride
        fewest = ONEDNN // (x.shape[1] * x.shape[3] * planes_per_cut) + 1
        count = min(count, depth // fewest)
    if options.is_transposed and (reach != stride or options.padding[0] or options.output_padding[0]):
        count = 1  # outputs of slabs would overlap
    count = max(1, min(count, depth))
    ends = [depth * (index + 1) // count for index in range(count)]
    cuts = []
    for start, end in pairwise([0, *ends]):
        low = start * stride - options.padding[0]
        touched = (low, low + (end - 1 - start) * stride + reach)
        cuts.append(Slab((start, end), touched) if options.is_transposed else Slab(touched, (start, end)))
    return cuts


def _convolution(
    native: Any,
    keys: Any,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *arguments: Any,
) -> Tensor:
    """Compute `aten::convolution` in float32, slab by slab, or let torch's own kernel do it."""
    options = Options(*arguments)
    call: Callable[..., Tensor] = partial(native.call_boxed, keys)
    if not computes_here(x, weight, options):
        return call(x, weight, bias, *arguments)
    shape = output_shape(x, weight, options)
    parts = slabs(x, shape, weight, options)
    weight = weight.float()
    if bias is not None:
        bias = bias.float()
    if len(parts) == 1:
        # The layout of torch's own kernel for this type, as predictions expect it, and of several slabs.
        return call(x.float(), weight, bias, *arguments).to(x.dtype, memory_format=torch.contiguous_format)
    result = x.new_empty(shape)
    for slab in parts:
        planes = _planes(x, *slab.inner)
        result[:, :, slice(*slab.outer)] = call(planes, weight, bias, *options.of_slab())
    return result


def _convolution_backward(
    native: Any,
    keys: Any,
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias_sizes: Any,
    *arguments: Any,
) -> Gradients:
    """Compute `aten::convolution_backward` in float32, slab by slab, or let torch's own kernel do it."""
    *convolution_arguments, output_mask = arguments
    options = Options(*convolution_arguments)
    call: Callable[..., tuple[Any, ...]] = partial(native.call_boxed, keys)
    if not computes_here(x, weight, options):
        return call(grad, x, weight, bias_sizes, *arguments)
    parts = slabs(x, grad.shape, weight, options)
    weight = weight.float()
    if len(parts) == 1:
        gradients = call(grad.float(), x.float(), weight, bias_sizes, *arguments)
        return _rounded(gradients, x.dtype)
    input_gradient = torch.zeros_like(x) if output_mask[0] else None  # a stride may leave planes without a gradient
    shared = weight.new_empty(0)  # float32 planes of it that the next slab adds to, so that they are rounded once
    sums: list[Tensor | None] = []  # gradients for weight and bias
    for slab, following in zip_longest(parts, parts[1:], fillvalue=None):
        assert slab is not None
        low, high = slab.inner
        planes = _planes(grad, *slab.outer), _planes(x, low, high)
        piece, *others = call(*planes, weight, bias_sizes, *options.of_slab(), output_mask)
        if input_gradient is not None:
            if shared.numel():
                piece[:, :, : shared.shape[2]] += shared
            complete = high if following is None else following.inner[0]
            first = max(low, 0)
            last = min(complete, high, x.shape[2])
            if last > first:
                input_gradient[:, :, first:last] = piece[:, :, first - low : last - low]
            shared = piece[:, :, complete - low :].clone()
        if not sums:
            sums = others
            continue
        for total, part in zip(sums, others, strict=True):
            if total is not None:
                total.add_(part)
    return input_gradient, *_rounded(sums, x.dtype)


def _planes(x: Tensor, low: int, high: int) -> Tensor:
    """Return planes `low` to `high` along D of N C D H W in float32; planes outside are 0."""
    first = max(low, 0)
    last = min(high, x.shape[2])
    inside = x[:, :, first : max(first, last)]
    if (first, last) == (low, high):
        return inside.float()
    planes = x.new_zeros((*x.shape[:2], high - low, *x.shape[3:]), dtype=torch.float32)
    offset = first - low
    planes[:, :, offset : offset + inside.shape[2]] = inside
    return planes


def _rounded(tensors: Iterable[Tensor | None], dtype: torch.dtype) -> Gradients:
    """Return the tensors in a half-precision type."""
    return tuple(None if tensor is None else tensor.to(dtype) for tensor in tensors)

"""Half-precision 3D convolutions on CPUs that have no half-precision arithmetic of their own, or do it wrongly.

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
from itertools import pairwise
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor

DTYPES = (torch.bfloat16, torch.float16)
SLAB_BYTES = 4 * 2**20  # about, of a slab's float32 input and output; 2 to 8 MiB take the same time, 32 a fifth more
ONEDNN = 20_480  # where an image alone has C x D x H up to this, torch leaves oneDNN for its slow kernel
FEWEST = 2**16  # products of a convolution; below, conversion takes longer than torch's slow kernel
Gradients = tuple[Tensor | None, ...]  # of input, weight and bias; None where not asked for


class Options(NamedTuple):
    """Of `aten::convolution`; one number for each axis D H W."""

    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    is_transposed: bool
    output_padding: Sequence[int]
    groups: int

    def of_slab(self) -> "Options":
        """Without padding along D: a slab's planes hold it, and a transposed convolution in slabs has none."""
        return self._replace(padding=[0, *self.padding[1:]])


class Slab(NamedTuple):
    """Planes along D that one call computes: `start` to `end` of the output, or of a transposed convolution's input.

    `low` to `high` are the planes of the other side that they touch; where the input is padded, some lie outside.
    """

    start: int
    end: int
    low: int
    high: int


class _Registration:
    """Our kernels in torch's dispatcher, which is the process's."""

    lock = Lock()
    users = 0
    library: torch.library.Library | None = None


@contextmanager
def convolutions() -> Iterator[None]:
    """Within, half-precision 3D convolutions on the CPU that torch does slowly or wrongly are computed here.

    Nested or in several threads, it serves the whole process until the last one leaves; then nothing stays registered.
    """
    ours = _Registration
    with ours.lock:
        if ours.library is None:
            ours.library = torch.library.Library("aten", "IMPL")
            for name, function in (("convolution", _convolution), ("convolution_backward", _convolution_backward)):
                native = torch.library.get_kernel(f"aten::{name}", "CPU")
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
    """Whether oneDNN has convolutions of this half-precision type for this CPU, and does not emulate them."""
    if not (torch.backends.mkldnn.is_available() and torch._C._get_mkldnn_enabled()):
        return False
    if dtype is torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()) and not emulates_bf16()


@cache
def emulates_bf16() -> bool:
    """Whether oneDNN emulates bf16, as it does on CPUs with AVX512 but no bf16 instructions. False if unknown."""
    able = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}  # an older torch has none
    known = [able[name] for name in ("avx512_bf16", "amx_bf16", "bf16") if name in able]
    return bool(known) and not any(known)


def computes_here(x: Tensor, weight: Tensor, options: Options) -> bool:
    """Whether a convolution is computed here and not by torch.

    Torch 2.13 is wrong in two corners also on CPUs that have bf16 instructions. Where a padded map is shorter along D
    than the kernel and the output is longer than 1, oneDNN leaves the weight gradient partly unwritten and may write
    beyond it. With AMX, a stride along W and an output of width 1, results are wrong (pytorch#169688, #188426).
    """
    if x.dtype not in DTYPES or x.dim() != 5 or weight.dtype is not x.dtype:
        return False
    if not has_kernels(x.dtype):
        places = math.prod(x.shape[2:] if options.is_transposed else output_shape(x, weight, options)[2:])
        return x.shape[0] * weight.numel() * places >= FEWEST
    is_short, is_strided = x.shape[2] < weight.shape[2], options.stride[2] > 1
    if options.is_transposed or not (is_short or is_strided):
        return False
    _, _, depth, _, width = output_shape(x, weight, options)
    return (is_short and depth > 1) or (is_strided and width == 1)


def output_shape(x: Tensor, weight: Tensor, options: Options) -> list[int]:
    """N C D H W of a convolution's result."""
    stride, padding, dilation, is_transposed, extra, groups = options
    axes = zip(x.shape[2:], weight.shape[2:], stride, padding, dilation, extra, strict=True)
    if is_transposed:
        sizes = [(n - 1) * s - 2 * p + d * (k - 1) + e + 1 for n, k, s, p, d, e in axes]
        return [x.shape[0], weight.shape[1] * groups, *sizes]
    return [x.shape[0], weight.shape[0], *((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d, _ in axes)]


def slabs(x: Tensor, outer: Sequence[int], weight: Tensor, options: Options) -> list[Slab]:
    """How to cut a convolution of x with an output of this shape; one slab where it is small or cannot be cut."""
    stride, padding = options.stride[0], options.padding[0]
    reach = options.dilation[0] * (weight.shape[2] - 1) + 1
    depth = x.shape[2] if options.is_transposed else outer[2]
    count = math.ceil(4 * (x.numel() + math.prod(outer)) / SLAB_BYTES)
    if x.shape[0] == 1:
        fewest = ONEDNN // (x.shape[1] * x.shape[3] * (1 if options.is_transposed else stride)) + 1
        count = min(count, depth // fewest)
    if options.is_transposed and (reach != stride or padding or options.output_padding[0]):
        count = 1  # the outputs of slabs would overlap
    count = max(1, min(count, depth))
    ends = [depth * (index + 1) // count for index in range(count)]
    return [Slab(a, z, a * stride - padding, (z - 1) * stride - padding + reach) for a, z in pairwise([0, *ends])]


def _convolution(native: Any, keys: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *given: Any) -> Tensor:
    options = Options(*given)
    call: Callable[..., Tensor] = partial(native.call_boxed, keys)
    if not computes_here(x, weight, options):
        return call(x, weight, bias, *given)
    shape = output_shape(x, weight, options)
    parts = slabs(x, shape, weight, options)
    weight, bias = weight.float(), None if bias is None else bias.float()
    if len(parts) == 1:
        return call(x.float(), weight, bias, *given).to(x.dtype)
    found = x.new_empty(shape)
    for slab in parts:
        if options.is_transposed:
            found[:, :, slab.low : slab.high] = call(_planes(x, slab.start, slab.end), weight, bias, *given)
        else:
            found[:, :, slab.start : slab.end] = call(_planes(x, slab.low, slab.high), weight, bias, *options.of_slab())
    return found


def _convolution_backward(
    native: Any, keys: Any, grad: Tensor, x: Tensor, weight: Tensor, bias_sizes: Any, *given: Any
) -> Gradients:
    options, wanted = Options(*given[:-1]), given[-1]
    call: Callable[..., tuple[Any, ...]] = partial(native.call_boxed, keys)
    if not computes_here(x, weight, options):
        return call(grad, x, weight, bias_sizes, *given)
    parts = slabs(x, grad.shape, weight, options)
    whole = weight.float()
    if len(parts) == 1:
        return _rounded(call(grad.float(), x.float(), whole, bias_sizes, *given), x.dtype)
    of_input = _InputGradient(x) if wanted[0] else None
    of_weights: list[Tensor | None] = []
    for slab, following in zip(parts, [*parts[1:], None], strict=True):
        if options.is_transposed:
            pieces = _planes(grad, slab.low, slab.high), _planes(x, slab.start, slab.end)
            low, complete = slab.start, slab.end
        else:
            pieces = _planes(grad, slab.start, slab.end), _planes(x, slab.low, slab.high)
            low, complete = slab.low, following.low if following else slab.high
        first, *others = call(*pieces, whole, bias_sizes, *options.of_slab(), wanted)
        if of_input is not None:
            of_input.add(first, low, complete)
        sums = zip(of_weights, others, strict=True)
        of_weights = [a if a is None else a.add_(b) for a, b in sums] if of_weights else others
    return of_input.map if of_input else None, *_rounded(of_weights, x.dtype)


class _InputGradient:
    """A half-precision map filled from float32 slabs, whose overlaps are added in float32 and rounded once."""

    def __init__(self, x: Tensor) -> None:
        self.map = torch.zeros_like(x)  # a stride beyond the kernel leaves planes without a gradient
        self._open: Tensor | None = None  # planes that the next slab adds to

    def add(self, piece: Tensor, low: int, complete: int) -> None:
        """A slab's gradient from plane `low` on; no later slab touches the planes before `complete`."""
        if self._open is not None:
            piece[:, :, : self._open.shape[2]] += self._open
        high = low + piece.shape[2]
        first, last = max(low, 0), min(complete, high, self.map.shape[2])
        if last > first:
            self.map[:, :, first:last] = piece[:, :, first - low : last - low]
        self._open = piece[:, :, complete - low :].clone() if complete < high else None


def _planes(x: Tensor, low: int, high: int) -> Tensor:
    """Planes `low` to `high` along D of N C D H W in float32; those outside are 0."""
    first, last = max(low, 0), min(high, x.shape[2])
    inside = x[:, :, first : max(first, last)]
    if (first, last) == (low, high):
        return inside.float()
    found = x.new_zeros((*x.shape[:2], high - low, *x.shape[3:]), dtype=torch.float32)
    found[:, :, first - low : first - low + inside.shape[2]] = inside
    return found


def _rounded(found: Iterable[Tensor | None], dtype: torch.dtype) -> Gradients:
    return tuple(None if tensor is None else tensor.to(dtype) for tensor in found)

"""How much scratch memory cuDNN takes within a convolution on a GPU: a rule that was fitted to measurements.

Tensor cores read maps with channels last. Of N C D H W maps in half precision or TF32, cuDNN therefore transposes the
input, the output and the filter in a workspace, each with its channels filled up to a multiple of 8 (TF32: 4). The
gradient of a filter is summed up in parts besides that. `benchmarks/workspaces.py` compares the rule with a GPU's
allocator; docs/results.md has what it found. Other GPUs and other versions of cuDNN may choose other engines.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

CONVOLUTION = torch.ops.aten.convolution.default
CONVOLUTION_BACKWARD = torch.ops.aten.convolution_backward.default
KIB = 2**10
HALF = (torch.bfloat16, torch.float16)
ALIGNED_BYTES = 16  # The channels of a voxel are filled up to a multiple of it.
THIN_CHANNELS = 32  # at most, of filters one voxel deep that are computed without a workspace
# The gradient of a filter is the sum of parts in float32. Of filters of few channels, a part is TILE_ROWS rows,
# an output each, and a multiple of TILE_COLUMNS columns.
FEW_OUTPUTS = 24
FEW_CHANNELS = 32
TILE_ROWS = 32
TILE_COLUMNS = 128
PARTS = 120  # Parts for at most FEW_OUTPUTS, of a map of at least MANY_VOXELS, all images together.
MANY_VOXELS = 2**17
FEWER_PARTS_SUMS = 1_536 * KIB  # Sums of a smaller map.
MOST_SUMS = 21 * 2**20  # measured
PARTS_BY_VOXELS = ((600_000, 1), (2_000_000, 35), (math.inf, 53))  # Parts for more outputs, by voxels.
# Of other filters, by their number of channels, of a map of SOME_VOXELS at least.
SOME_VOXELS = 2**15
THIN_SUMS = 1_872 * KIB  # one voxel deep along an axis
SUMS = ((64, 1_728 * KIB), (128, 3_584 * KIB))


def bytes_of_call(func: Any, arguments: Sequence[Any], result: Any) -> list[int]:
    """Return the bytes of the workspace with which each result of CONVOLUTION or CONVOLUTION_BACKWARD is made, in turn.

    `result` is the output, or the gradients of input, filter and bias. Convolutions in groups count as without one:
    torch computes those of a channel each by its own kernel.
    """
    if func is CONVOLUTION:
        image, weight, *others = arguments
        groups = others[-1]
        return [0 if groups != 1 else forward_bytes(image, weight, result, is_transposed=others[-3])]
    gradient, image, weight, *others = arguments
    groups = others[-2]
    of_image, of_weight, _ = result
    sizes = [0, 0, 0]
    if groups != 1:
        return sizes
    if of_image is not None:
        sizes[0] = image_gradient_bytes(image, weight, gradient, is_transposed=others[-4])
    if of_weight is not None:
        sizes[1] = weight_gradient_bytes(image, weight, gradient)
    return sizes


def forward_bytes(image: Tensor, weight: Tensor, output: Tensor, is_transposed: bool) -> int:
    """Return the workspace of a convolution of N C D H W."""
    if not _uses_tensor_cores(image) or _reads_one_voxel(weight) or _has_channels_last(image):
        return 0
    unit = ALIGNED_BYTES // image.element_size()
    is_filled_up = image.shape[1] % unit != 0 or output.shape[1] % unit != 0
    if image.dtype == torch.float16 and is_filled_up:  # its kernels take any number of channels
        return output.nbytes if image.shape[1] == 1 else image.nbytes + output.nbytes + weight.nbytes
    return 0 if image.shape[1] == 1 else image_gradient_bytes(image, weight, output, is_transposed)


def image_gradient_bytes(image: Tensor, weight: Tensor, gradient: Tensor, is_transposed: bool) -> int:
    """Return the workspace of the gradient of a convolution's input; `gradient` is that of its output."""
    if not _uses_tensor_cores(image) or _reads_one_voxel(weight):
        return 0
    if _is_flat(weight) and not is_transposed and max(image.shape[1], gradient.shape[1]) <= THIN_CHANNELS:
        return 0
    return _transposed_bytes(image, weight, gradient)


def weight_gradient_bytes(image: Tensor, weight: Tensor, gradient: Tensor) -> int:
    """Return the workspace of the gradient of a convolution's filter; `gradient` is that of its output."""
    sums = _sums_bytes(weight, gradient) if _uses_tensor_cores(image) else 0
    return _transposed_bytes(image, weight, gradient) + sums


def _uses_tensor_cores(image: Tensor) -> bool:
    """Return whether a type is half precision, or float32 where torch lets cuDNN's convolutions use TF32.

    "none" means what holds for all of cuDNN.
    """
    if image.dtype != torch.float32:
        return image.dtype in HALF
    backends: Any = torch.backends
    cudnn = backends.cudnn
    precisions = (cudnn.conv.fp32_precision, cudnn.fp32_precision, backends.fp32_precision)
    return next((precision for precision in precisions if precision != "none"), "none") == "tf32"


def _has_channels_last(image: Tensor) -> bool:
    return suggest_memory_format(image) != torch.contiguous_format


def _reads_one_voxel(weight: Tensor) -> bool:
    return math.prod(weight.shape[2:]) == 1


def _is_flat(weight: Tensor) -> bool:
    """Return whether a filter is one voxel deep along an axis."""
    return 1 in weight.shape[2:]


def _transposed_bytes(image: Tensor, weight: Tensor, output: Tensor) -> int:
    """Return the bytes of both maps and the filter with their channels filled up; 0 where channels are last already."""
    if _has_channels_last(image):
        return 0
    unit = ALIGNED_BYTES // image.element_size()
    inputs = _filled_up(image.shape[1], unit)
    outputs = _filled_up(output.shape[1], unit)
    numbers = image.numel() // image.shape[1] * inputs
    numbers += output.numel() // output.shape[1] * outputs
    numbers += inputs * outputs * math.prod(weight.shape[2:])
    return numbers * image.element_size()


def _sums_bytes(weight: Tensor, gradient: Tensor) -> int:
    """Return the bytes of the parts, in float32, of which the gradient of a filter is the sum."""
    outputs, inputs = weight.shape[:2]
    voxels = gradient.numel() // gradient.shape[1]
    columns = _filled_up(inputs * math.prod(weight.shape[2:]), TILE_COLUMNS)
    part = TILE_ROWS * columns * torch.float32.itemsize
    if _is_flat(weight):
        return THIN_SUMS if voxels >= SOME_VOXELS else 0
    has_few = outputs <= FEW_OUTPUTS and inputs > FEW_OUTPUTS // 2
    if has_few and voxels >= SOME_VOXELS:
        return min(PARTS * part, MOST_SUMS) if voxels >= MANY_VOXELS else FEWER_PARTS_SUMS
    if max(outputs, inputs) <= FEW_CHANNELS:
        return part * next(parts for most, parts in PARTS_BY_VOXELS if voxels <= most)
    if voxels < SOME_VOXELS:
        return 0
    return next((size for channels, size in SUMS if max(outputs, inputs) <= channels), 0)


def _filled_up(count: int, unit: int) -> int:
    return -(-count // unit) * unit

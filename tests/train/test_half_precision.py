"""Half-precision convolutions in float32 slabs: right against float64, bit-equal when repeated, gone afterwards.

The path is forced here where the CPU has kernels of its own, so that these tests show the same on every machine.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from unet3d import build
from unet3d.base.types import Batch
from unet3d.config import compose
from unet3d.memory.meter import open_meter
from unet3d.memory.prediction import MemoryEstimate
from unet3d.memory.technique import choose_technique
from unet3d.model import half_precision
from unet3d.model.half_precision import Options, computes_here, convolutions, slabs
from unet3d.model.unet import UNet3D
from unet3d.recomputing.program import Technique
from unet3d.training import optim
from unet3d.training.step import train_step

aten = torch.ops.aten
DTYPES = half_precision.DTYPES
ONES, ZEROS = (1, 1, 1), (0, 0, 0)
Case = tuple[Sequence[int], int, Sequence[int], Options]  # shape, output channels, kernel
CLOSE = 5e-3  # of the largest value; bf16 rounds to 0.004


@pytest.fixture
def force(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Behave as on a CPU with or without half-precision kernels, with slabs of so many bytes."""

    def use(has_kernels: bool, slab_bytes: int = half_precision.SLAB_BYTES, fewest: int = 0) -> None:
        monkeypatch.setattr(half_precision, "has_kernels", lambda dtype: has_kernels)
        monkeypatch.setattr(half_precision, "SLAB_BYTES", slab_bytes)
        monkeypatch.setattr(half_precision, "FEWEST_PRODUCTS", fewest)

    return use


def results(
    dtype: torch.dtype, x: Tensor, weight: Tensor, bias: Tensor, grad: Tensor, options: Options
) -> list[Tensor]:
    """Output, and gradients of input, weight and bias."""
    x, weight, bias, grad = (tensor.to(dtype) for tensor in (x, weight, bias, grad))
    out = aten.convolution(x, weight, bias, *options)
    return [out, *aten.convolution_backward(grad, x, weight, [len(bias)], *options, [True] * 3)]


def error(dtype: torch.dtype, case: Case, slab_bytes: Sequence[int] = (half_precision.SLAB_BYTES,)) -> float:
    """Largest error against float64, as a share of the largest value, of inputs that the type can represent."""
    torch.manual_seed(0)
    shape, out, kernel, options = case
    inner, groups = shape[1], options.groups
    channels = (inner, out // groups) if options.is_transposed else (out, inner // groups)
    x, weight, bias = (torch.randn(*size).to(dtype).double() for size in (shape, (*channels, *kernel), (out,)))
    grad = torch.randn_like(aten.convolution(x, weight, bias, *options)).to(dtype).double()
    true = results(torch.float64, x, weight, bias, grad, options)
    pairs = []
    for size in slab_bytes:
        with convolutions(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(half_precision, "SLAB_BYTES", size)
            pairs += zip(results(dtype, x, weight, bias, grad, options), true, strict=True)
    assert all(f.dtype is dtype and f.shape == t.shape for f, t in pairs)
    return max(((f.double() - t).abs().max() / t.abs().max()).item() for f, t in pairs)


def cases() -> Iterator[Case]:
    """Shape, outputs, kernel, options: those of networks, and odd sizes."""
    kernels = ((3, 3, 3), (1, 3, 3), (2, 2, 2))
    strides = (ONES, (2, 2, 2), (2, 1, 1), (3, 3, 3))
    channels = ((4, 6, 1), (4, 8, 2))
    sizes = ((9, 6, 5), (4, 5, 6))
    every = product(kernels, strides, (False, True), (False, True), sizes)
    for index, (kernel, stride, padded, is_transposed, size) in enumerate(every):
        inner, out, groups = channels[(index + index // 2) % 2]  # with each size and each kind in turn
        padding = tuple(k // 2 if padded else 0 for k in kernel)
        yield (2, inner, *size), out, kernel, Options(stride, padding, ONES, is_transposed, ZEROS, groups)
    yield (1, 4, 9, 6, 5), 6, (3, 3, 3), Options(ONES, (2, 2, 2), (2, 2, 2), False, ZEROS, 1)
    yield (1, 4, 9, 6, 5), 6, (3, 3, 3), Options((2, 2, 2), ONES, ONES, True, ONES, 1)
    yield (1, 16, 44, 64, 3), 4, (3, 3, 3), Options(ONES, ONES, ONES, False, ZEROS, 1)  # two slabs of one image
    yield (2, 4, 5, 4, 4), 4, (2, 2, 2), Options((3, 3, 3), ZEROS, ONES, True, ZEROS, 1)  # planes between the slabs


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_results_are_right_for_any_shape_and_slab(force: Callable, dtype: torch.dtype) -> None:
    force(has_kernels=False)
    for case in cases():
        assert error(dtype, case, slab_bytes=(2**30, 2**14, 1)) < CLOSE, case


SAME = Options(ONES, ONES, ONES, False, ZEROS, 1)


@pytest.mark.parametrize(
    ("depth", "kernel", "padding"), [(2, 3, 1), (2, 5, 2), (3, 5, 2), (4, 5, 2), (4, 5, 1), (6, 7, 3), (1, 2, 1)]
)
def test_maps_shorter_than_their_kernel_have_right_gradients(
    force: Callable, depth: int, kernel: int, padding: int
) -> None:
    """oneDNN's bf16 kernel leaves these weight gradients partly unwritten (torch 2.13, AVX512-BF16)."""
    force(has_kernels=True)
    options = SAME._replace(padding=(padding, 1, 1))
    map_, weight = (
        torch.empty(shape, dtype=torch.bfloat16) for shape in ((2, 16, depth, 12, 12), (16, 16, kernel, 3, 3))
    )
    assert computes_here(map_, weight, options) and not computes_here(
        map_, weight[:, :, :1], options._replace(padding=(0, 1, 1))
    )
    assert error(torch.bfloat16, ((2, 16, depth, 12, 12), 16, (kernel, 3, 3), options)) < CLOSE


def test_outputs_one_voxel_wide_that_a_stride_made_are_not_left_to_amx(force: Callable) -> None:
    """pytorch#169688 and #188426 report wrong results there."""
    force(has_kernels=True)
    options = SAME._replace(stride=(1, 1, 2))
    narrow, wide = (torch.empty(2, 8, 8, 8, width, dtype=torch.bfloat16) for width in (2, 4))
    weight = torch.empty(8, 8, 3, 3, 3, dtype=torch.bfloat16)
    assert computes_here(narrow, weight, options) and not computes_here(wide, weight, options)
    assert not computes_here(narrow, weight, SAME)
    assert error(torch.bfloat16, (narrow.shape, 8, (3, 3, 3), options)) < CLOSE


def test_torch_computes_what_it_computes_well(force: Callable) -> None:
    x, weight = torch.randn(2, 8, 9, 8, 8), torch.randn(8, 8, 3, 3, 3)
    force(has_kernels=True)
    for dtype in (*DTYPES, torch.float32, torch.float64):
        plain = results(dtype, x, weight, weight[:, 0, 0, 0, 0], torch.ones_like(x), SAME)
        with convolutions():
            inside = results(dtype, x, weight, weight[:, 0, 0, 0, 0], torch.ones_like(x), SAME)
        assert all(map(torch.equal, plain, inside))
    force(has_kernels=False)
    assert computes_here(x.half(), weight.half(), SAME)
    assert not computes_here(x, weight, SAME)
    assert not computes_here(x[0].half(), weight[:, :, 0].half(), SAME), "2D"
    force(has_kernels=False, fewest=2**16)
    assert not computes_here(x[:1, :, :2, :2, :2].half(), weight.half(), SAME), "conversion would take longer"


def test_nothing_of_ours_stays_registered() -> None:
    def registered() -> list[bool]:
        has = torch._C._dispatch_has_kernel_for_dispatch_key
        return [has(f"aten::{name}", "CPU") for name in ("convolution", "convolution_backward")]

    before = registered()
    assert not any(before)
    with pytest.raises(KeyError), convolutions():
        with convolutions():
            assert all(registered())
        assert all(registered())
        raise KeyError
    assert registered() == before


@pytest.mark.parametrize("batch", [1, 2])
def test_slabs_cover_the_depth_in_pieces_of_their_size_that_onednn_takes(batch: int) -> None:
    x, weight = torch.empty(batch, 16, 96, 64, 96), torch.empty(16, 16, 3, 3, 3)
    found = slabs(x, x.shape, weight, SAME)
    outer = [slab.outer for slab in found]
    assert [start for start, _ in outer] == [0, *(end for _, end in outer[:-1])] and outer[-1][1] == 96
    assert [slab.inner for slab in found] == [(start - 1, end + 1) for start, end in outer]
    planes = [end - start for start, end in outer]
    each = 2 * x.nbytes // 96
    if batch == 1:  # of one image, torch gives smaller maps to its slow kernel
        assert all(n * 16 * 64 > 20_480 for n in planes) and len(found) > 1
    else:
        assert (max(planes) - 1) * each < half_precision.SLAB_BYTES, "but for a plane, as slabs are of one size"


def network(*overrides: str) -> tuple[Any, UNet3D, Batch]:
    torch.manual_seed(0)
    small = ["model=unet_tiny", "model.features=[8,16]", "data.patch=[16,16,16]", "batch=2"]
    config = compose.compose([*small, *overrides])
    config.model.in_channels = 1
    config.model.classes = 3
    batch = Batch(torch.randn(2, 1, 16, 16, 16), torch.randint(0, 3, (2, 16, 16, 16), dtype=torch.int16))
    return config, build.model(config.model, seed=0), batch


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_checkpointing_changes_no_bit_in_half_precision(force: Callable, dtype: str) -> None:
    force(has_kernels=False, slab_bytes=2**16)
    found = []
    for segment_starts in ((), (0, 1, 2)):
        config, model, batch = network("amp=true", f"amp_dtype={dtype}", "optim=sgd")
        policy = build.policy(config, "cpu", Technique(segment_starts))
        result = train_step(
            model, build.loss(config, 3), optim.optimizer(config.optim, model), policy.scaler(), policy, [batch]
        )
        found.append((result, [p.detach() for p in model.parameters()]))
    (first, weights), (second, others) = found
    assert first == second and all(map(torch.equal, weights, others))


@pytest.mark.slow
def test_the_prediction_has_every_byte_of_the_measured_ledger(force: Callable) -> None:
    force(has_kernels=False, slab_bytes=2**16)
    config, model, batch = network("amp=true", "ckpt=2")
    expected = MemoryEstimate(config, config.model).entry
    policy = build.policy(config, "cpu", choose_technique(config, config.model))
    optimizer = optim.optimizer(config.optim, model)
    meter = open_meter(model, optimizer)
    for _ in range(3):
        new = Batch(batch.image.clone(), batch.label.clone())
        train_step(
            model, build.loss(config, 3), optimizer, policy.scaler(), policy, [new], meter.mark, config.optim.clip
        )
    assert meter.summary()["phases"] == expected["phases"]


@pytest.mark.parametrize(
    ("able", "emulates"),
    [
        ({"architecture": "x86_64", "avx512_bf16": False, "amx_bf16": False}, True),
        ({"architecture": "x86_64", "avx512_bf16": True, "amx_bf16": False}, False),
        ({"architecture": "arm64", "bf16": True}, False),
        ({"architecture": "another"}, False),
    ],
)
def test_bf16_that_onednn_would_emulate_is_computed_here(
    able: dict, emulates: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: able, raising=False)
    half_precision.emulates_bf16.cache_clear()
    assert half_precision.emulates_bf16() is emulates
    if emulates:
        assert not half_precision.has_kernels(torch.bfloat16)
    half_precision.emulates_bf16.cache_clear()

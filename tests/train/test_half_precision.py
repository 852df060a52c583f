"""Half-precision convolutions in float32 slabs: right against float64, bit-equal when repeated, gone afterwards.

The path is forced here where the CPU has kernels of its own, so that these tests show the same on every machine.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from unet3d import build
from unet3d.base.types import Batch
from unet3d.config import compose
from unet3d.memory.meter import open_meter
from unet3d.memory.prediction import MemoryEstimate
from unet3d.memory.technique import choose_technique
from unet3d.model import half_precision
from unet3d.model.half_precision import DTYPES, SLAB_BYTES, Options, computes_here, convolutions, slabs
from unet3d.recomputing.program import PLAIN
from unet3d.training import optim
from unet3d.training.step import train_step

aten = torch.ops.aten
ONES, ZEROS, TWOS, THREES = (1, 1, 1), (0, 0, 0), (2, 2, 2), (3, 3, 3)
SAME = Options(ONES, ONES, ONES, False, ZEROS, 1)
Case = tuple[Sequence[int], int, Sequence[int], Options]  # shape, output channels, kernel
CLOSE = 5e-3  # of the largest value; bf16 rounds to 0.004


@contextmanager
def forced(has_kernels: bool, slab_bytes: int = SLAB_BYTES, fewest: int = 0) -> Iterator[None]:
    """Behave as on a CPU with or without half-precision kernels, with slabs of so many bytes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(half_precision, "has_kernels", lambda dtype: has_kernels)
        patch.setattr(half_precision, "SLAB_BYTES", slab_bytes)
        patch.setattr(half_precision, "FEWEST_PRODUCTS", fewest)
        yield


def results(tensors: Sequence[Tensor], options: Options, dtype: torch.dtype) -> list[Tensor]:
    """Output, and gradients of input, weight and bias."""
    x, weight, bias, grad = (tensor.to(dtype) for tensor in tensors)
    out = aten.convolution(x, weight, bias, *options)
    return [out, *aten.convolution_backward(grad, x, weight, [len(bias)], *options, [True] * 3)]


def drawn(case: Case, dtype: torch.dtype) -> list[Tensor]:
    """Input, weight, bias and gradient in numbers that the type can represent."""
    torch.manual_seed(0)
    shape, out, kernel, options = case
    inner, groups = shape[1], options.groups
    channels = (inner, out // groups) if options.is_transposed else (out, inner // groups)
    x, weight, bias = (torch.randn(*size).to(dtype).double() for size in (shape, (*channels, *kernel), (out,)))
    grad = torch.randn_like(aten.convolution(x, weight, bias, *options)).to(dtype).double()
    return [x, weight, bias, grad]


def assert_right(case: Case, dtype: torch.dtype) -> None:
    """Results are those in float64, up to rounding."""
    tensors = drawn(case, dtype)
    with convolutions():
        found = results(tensors, case[-1], dtype)
    for mine, true in zip(found, results(tensors, case[-1], torch.float64), strict=True):
        assert mine.dtype is dtype and mine.shape == true.shape
        assert (mine.double() - true).abs().max() < CLOSE * true.abs().max()


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Convolutions of networks, and of odd sizes."""
    kernel = draw(st.sampled_from([THREES, (1, 3, 3), TWOS]))
    stride, is_transposed = draw(st.sampled_from([ONES, TWOS, (2, 1, 1), THREES])), draw(st.booleans())
    padding = draw(st.sampled_from([ZEROS, tuple(length // 2 for length in kernel)]))
    size, groups = draw(st.sampled_from([(9, 6, 5), (4, 5, 6), (5, 4, 4)])), draw(st.sampled_from([1, 2]))
    return (2, 4, *size), 6 * groups, kernel, Options(stride, padding, ONES, is_transposed, ZEROS, groups)


@given(case=cases(), slab_bytes=st.sampled_from([2**30, 2**14, 1]), dtype=st.sampled_from(DTYPES))
@example(((1, 4, 9, 6, 5), 6, THREES, Options(ONES, TWOS, TWOS, False, ZEROS, 1)), 1, torch.bfloat16)
@example(((1, 4, 9, 6, 5), 6, THREES, Options(TWOS, ONES, ONES, True, ONES, 1)), 1, torch.bfloat16)
@example(((1, 16, 44, 64, 3), 4, THREES, SAME), 1, torch.bfloat16)  # two slabs of one image
@example(((2, 4, 5, 4, 4), 12, TWOS, Options(TWOS, ZEROS, ONES, True, ZEROS, 2)), 1, torch.float16)
def test_results_are_right_for_any_shape_and_slab(case: Case, slab_bytes: int, dtype: torch.dtype) -> None:
    with forced(has_kernels=False, slab_bytes=slab_bytes):
        assert_right(case, dtype)


STRIDED = SAME._replace(stride=(1, 1, 2))


@pytest.mark.parametrize(
    ("has_kernels", "size", "kernel", "options", "here"),
    [
        (True, (2, 12, 12), THREES, SAME, True),  # oneDNN leaves these weight gradients partly unwritten
        (True, (4, 12, 12), (5, 3, 3), SAME, True),
        (True, (3, 12, 12), THREES, SAME, False),
        (True, (8, 8, 2), THREES, STRIDED, True),  # with AMX, by pytorch#169688 and #188426
        (True, (8, 8, 4), THREES, STRIDED, False),
        (True, (8, 8, 2), THREES, SAME, False),
        (False, (8, 8, 4), THREES, SAME, True),
        (False, (3, 2, 2), THREES, SAME, False),  # conversion would take longer
    ],
)
def test_what_torch_does_slowly_or_wrongly_is_computed_here(
    has_kernels: bool, size: tuple, kernel: tuple, options: Options, here: bool
) -> None:
    """Maps shorter than their kernel, and outputs one voxel wide that a stride made (torch 2.13, AVX512-BF16)."""
    case = (2, 16, *size), 16, kernel, options
    x, weight, *_ = drawn(case, torch.bfloat16)
    with forced(has_kernels, fewest=2**18):
        assert computes_here(x.bfloat16(), weight.bfloat16(), options) == here
        assert not computes_here(x, weight, options)
        assert not computes_here(x[0].bfloat16(), weight[:, :, 0].bfloat16(), options), "2D"
        assert_right(case, torch.bfloat16)


def test_nothing_of_ours_stays_registered() -> None:
    def registered() -> list[bool]:
        has = torch._C._dispatch_has_kernel_for_dispatch_key
        return [has(f"aten::{name}", "CPU") for name in ("convolution", "convolution_backward")]

    with pytest.raises(KeyError), convolutions():
        with convolutions():
            pass
        assert all(registered())
        raise KeyError
    assert not any(registered())


def test_slabs_are_of_their_size_but_of_one_image_large_enough_for_onednn() -> None:
    weight, planes = torch.empty(16, 16, 3, 3, 3), []
    for batch in (1, 2):
        x = torch.empty(batch, 16, 96, 64, 96)
        planes.append([end - start for _, (start, end) in slabs(x, x.shape, weight, SAME)])
    assert [*map(sum, planes)] == [96, 96]
    assert min(planes[0]) * 16 * 64 > 20_480 and len(planes[0]) > 1
    assert (max(planes[1]) - 1) * 2 * x.nbytes // 96 < SLAB_BYTES, "but for a plane, as slabs are of one size"


@pytest.mark.slow
def test_a_training_in_slabs_has_the_predicted_bytes_and_checkpointing_changes_no_bit() -> None:
    small = ("model=unet_tiny", "model.features=[8,16]", "data.patch=[16,16,16]", "batch=2", "amp=true", "ckpt=2")
    config = compose.compose(small)
    config.model.in_channels, config.model.classes = 1, 3
    chosen, found = choose_technique(config, config.model), []
    with forced(has_kernels=False, slab_bytes=2**16):
        for technique in (chosen, PLAIN):
            policy, model = build.policy(config, "cpu", technique), build.model(config.model, seed=0)
            loss, optimizer = build.loss(config, 3), optim.optimizer(config.optim, model)
            meter = open_meter(model, optimizer)
            torch.manual_seed(0)
            for _ in range(3):
                batch = Batch(torch.randn(2, 1, 16, 16, 16), torch.randint(0, 3, (2, 16, 16, 16)).short())
                result = train_step(
                    model, loss, optimizer, policy.scaler(), policy, [batch], meter.mark, config.optim.clip
                )
            found.append((result, *map(Tensor.tolist, model.parameters())))
            if technique is chosen:
                assert meter.summary()["phases"] == MemoryEstimate(config, config.model).entry["phases"]
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("able", "emulates"),
    [
        ({"avx512_bf16": False, "amx_bf16": False}, True),
        ({"avx512_bf16": True, "amx_bf16": False}, False),
        ({"architecture": "another"}, False),
    ],
)
def test_bf16_that_onednn_would_emulate_is_computed_here(
    able: dict, emulates: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: able, raising=False)
    half_precision.emulates_bf16.cache_clear()
    assert half_precision.emulates_bf16() is emulates
    assert not (emulates and half_precision.has_kernels(torch.bfloat16))
    half_precision.emulates_bf16.cache_clear()

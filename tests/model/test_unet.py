"""The U-Net: its size for any input, every option, joining and cropping, and sizes in plain integers."""

from collections.abc import Callable
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from promises import promise
from torch import nn

from unet3d.base.errors import UserError
from unet3d.config import rules
from unet3d.config.compose import compose
from unet3d.config.schema import Model
from unet3d.model import geometry
from unet3d.model.blocks import LeanSwish, Swish, crop, join
from unet3d.model.unet import UNet3D

Network = Callable[..., UNet3D]
Options = Callable[..., Model]


def ramp(*size: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(size).numel())).reshape(1, 1, *size)


def test_crop_is_centred_and_an_odd_surplus_loses_the_last_plane() -> None:
    assert crop(ramp(1, 1, 6), torch.Size((1, 1, 2))).flatten().tolist() == [2, 3]
    assert crop(ramp(1, 1, 5), torch.Size((1, 1, 4))).flatten().tolist() == [0, 1, 2, 3]


def test_join_crops_whichever_is_larger_and_keeps_what_a_long_stride_made_where_it_was() -> None:
    """A stride of 3 makes 8 voxels 3, and those 9: the surplus is at the end."""
    joined = join(ramp(8, 5, 8), 100 + ramp(4, 6, 9))
    assert torch.equal(joined[:, :1], ramp(8, 5, 8)[:, :, 2:6])
    assert torch.equal(joined[:, 1:], 100 + ramp(4, 6, 9)[..., :5, :8])


def test_lean_swish_equals_the_plain_one_and_torchs_and_keeps_one_tensor_less() -> None:
    found, kept = [], []
    for activation in (LeanSwish(), Swish(), F.silu):
        x, tensors = torch.linspace(-8, 8, 101).requires_grad_(), set()
        with torch.autograd.graph.saved_tensors_hooks(lambda t, of=tensors: of.add(t.data_ptr()) or t, lambda t: t):
            y = activation(x)
        found.append((y.detach(), *torch.autograd.grad(y.sum(), x)))
        kept.append(len(tensors))
    torch.testing.assert_close(found[0], found[1], atol=1e-6, rtol=0)
    torch.testing.assert_close(found[0], found[2], atol=1e-6, rtol=0)
    assert kept[:2] == [1, 2]


@cache
def without_norm(word: str) -> UNet3D:
    options = compose(["model=unet_tiny", "model.norm=none", word]).model
    options.in_channels, options.classes = 1, 3
    with torch.device("meta"):
        return UNet3D(options)


@given(size=st.tuples(*[st.integers(1, 40)] * 3))
@pytest.mark.parametrize(
    "word", ["model.downsampling=max_pool", "model.downsampling=strided_conv", "model.blocks=[1,2,1]"]
)
def test_the_output_has_the_size_of_any_input(word: str, size: tuple[int, int, int]) -> None:
    assert without_norm(word)(torch.empty(1, 1, *size, device="meta")).shape == (1, 3, *size)


@pytest.mark.parametrize(
    "word",
    [
        *("norm=batch", "norm=batch_current", "norm=group", "norm=none", "activation=leaky_relu", "activation=prelu"),
        *("activation=silu", "activation=swish", "activation=swish_lean", "upsampling=trilinear", "upsampling=nearest"),
        *("up_reduce=false", "up_bias=false", "conv_bias=false", "norm_affine=false", "residual=true", "dropout=0.2"),
        *("widen=second", "inplace=true", "blocks=[1,2]", "decoder=[4]", "features=[8]", "features=[4,8,8,16,16]"),
    ],
)
def test_every_option_trains_and_changes_the_network(network: Network, word: str) -> None:
    small = ("model=unet_tiny", "model.features=[8,16]")
    model, plain = network(*small, f"model.{word}"), network(*small)
    model(torch.randn(2, 1, 17, 10, 9)).square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert repr(model) != repr(plain)


def test_residual_block_is_its_input_when_convolutions_are_zero(network: Network) -> None:
    block = network("model=unet_tiny", "model.residual=true", "model.norm=none", "model.features=[4]").inc.block
    nn.init.zeros_(block.conv2.conv.weight)
    x = torch.randn(1, 1, 4, 4, 4)
    assert torch.equal(block(x), block.project(x).relu())


def test_deep_supervision_has_a_head_a_level_in_training_only(network: Network) -> None:
    model = network("model=nnunet_hippocampus", "model.features=[4,8,8,8]")
    x = torch.randn(1, 1, 16, 24, 16)
    assert [tuple(y.shape[2:]) for y in model(x)] == [(16, 24, 16), (8, 12, 8), (4, 6, 4)]
    assert model.eval()(x).shape == (1, 3, 16, 24, 16)


def test_stage_count_is_what_checkpointing_is_checked_against(options: Options) -> None:
    switches = [f"model.{f.name}={not f.default}" for f in fields(Model) if isinstance(f.default, bool)]
    for word in ("model=unet_tiny", "model.blocks=[1,2,1,3]", *switches):
        with torch.device("meta"):
            model = UNet3D(options("model=unet", word))
        assert len(model) == rules.stages(model.options), word
    assert [name for name, _ in model.named_children()][-3:] == ["up2", "up3", "outc"]


@promise("Prediction", "a network exported by `torch.export`", "computes the same, also for other sizes")
@pytest.mark.slow
def test_an_exported_network_computes_the_same_for_any_size(options: Options, tmp_path: Path) -> None:
    from torch.export import Dim, export  # a second to load

    network = UNet3D(options("model=unet_tiny", "model.features=[4,8]")).eval()
    free = {0: Dim("n", max=64), 2: 8 * Dim("d", max=64), 3: 8 * Dim("h", max=64), 4: 8 * Dim("w", max=64)}
    torch.export.save(export(network, (torch.zeros(2, 1, 16, 24, 32),), dynamic_shapes=(free,)), tmp_path / "net.pt2")
    image = torch.randn(3, 1, 32, 16, 24)
    assert torch.allclose(torch.export.load(tmp_path / "net.pt2").module()(image), network(image), atol=1e-4)


@pytest.mark.parametrize("downsampling", ["max_pool", "strided_conv"])
@pytest.mark.parametrize("kernels", ["3", "[3,5,1]"])
def test_predicted_size_is_the_networks(options: Options, downsampling: str, kernels: str) -> None:
    words = (f"model.downsampling={downsampling}", f"model.kernels={kernels}", "model.upsampling=nearest")
    model = options("model=unet_tiny", *words)
    model.padding = "valid"
    lengths = [[n for n in range(30, 110) if geometry.lengths(n, model, axis)] for axis in range(3)]
    sizes = [*zip(*lengths, strict=False)][:5]
    assert len(sizes) == 5
    with torch.device("meta"):
        network = UNet3D(model)
        for size in sizes:
            assert network(torch.empty(1, 1, *size)).shape[2:] == geometry.output_size(size, model)


@pytest.mark.parametrize(("size", "nearest"), [((130, 131, 116), "[132, 132, 116]"), ((8, 132, 116), "[92, 132, 116]")])
def test_a_length_that_does_not_fit_names_the_nearest_that_does(options: Options, size: tuple, nearest: str) -> None:
    with pytest.raises(UserError) as error:
        geometry.output_size(size, options("model=cicek2016", "data.patch=[132,132,116]"))
    assert str(error.value).endswith(f"data.patch={nearest}")


def test_level_sizes(options: Options) -> None:
    found = geometry.level_sizes((33, 17, 5), options("model=unet_small"))
    assert found == [(33, 17, 5), (17, 9, 3), (9, 5, 2), (5, 3, 1)]


@pytest.mark.parametrize("value", ["three", [3, 3], [[3, 3], 3, 3], 0, [True, 3, 3]])
def test_malformed_kernels_are_refused(value: object) -> None:
    with pytest.raises(UserError, match=r"^k"):
        geometry.triples("k", value, 3)

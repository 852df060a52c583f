"""Exact parameter counts, golden shapes, and every option of the model."""

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from promises import promise
from torch import nn

from unet3d.config import rules
from unet3d.config.schema import Model
from unet3d.model.unet import UNet3D

COUNTS = {
    "forum_large": 40_158_853,
    "forum_mid": 14_496_517,
    "forum_small": 3_433_477,
    "forum_32": 5_838_981,
    "nnunet_hippocampus": 5_603_177,
}


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(("name", "expected"), COUNTS.items())
def test_published_parameter_counts(options: Callable[..., Model], name: str, expected: int) -> None:
    with torch.device("meta"):
        assert count(UNet3D(options(f"model={name}"))) == expected


def test_forum_concatenations(options: Callable[..., Model]) -> None:
    """Channels joined at full resolution: 64+64 in the large net, 64+128 in the smaller one."""
    with torch.device("meta"):
        large, mid = UNet3D(options("model=forum_large")), UNet3D(options("model=forum_mid"))
    assert large.up4.block.conv1.conv.in_channels == 128
    assert mid.up3.block.conv1.conv.in_channels == 192


@pytest.mark.parametrize("size", [(33, 17, 5), (31, 40, 24), (9, 1, 2), (320, 150, 26)])
@pytest.mark.parametrize("override", ["model.downsampling=max_pool", "model.downsampling=strided_conv"])
def test_the_output_has_the_size_of_any_input(options: Callable[..., Model], size: tuple, override: str) -> None:
    with torch.device("meta"):
        model = UNet3D(options("model=unet", override)).eval()
        assert model(torch.empty(1, 1, *size)).shape == (1, 3, *size)


def test_one_voxel_without_instance_norm(network: Callable[..., UNet3D]) -> None:
    assert network("model=unet", "model.norm=group")(torch.randn(1, 1, 1, 1, 1)).shape == (1, 3, 1, 1, 1)


def test_strides_and_kernels_per_axis(network: Callable[..., UNet3D]) -> None:
    model = network("model=unet_tiny", "model.strides=[[2,2,1],[2,1,2]]", "model.kernels=[[3,3,1],3,[1,3,3]]")
    assert [model.down1.pool.stride, model.down2.pool.stride] == [(2, 2, 1), (2, 1, 2)]
    assert model.inc.block.conv1.conv.kernel_size == (3, 3, 1)
    assert model.up1.block.conv1.conv.kernel_size == (3, 3, 3)
    assert model(torch.randn(1, 1, 9, 8, 7)).shape == (1, 3, 9, 8, 7)


@pytest.mark.parametrize(
    "override",
    [
        *(f"model.norm={n}" for n in ("instance", "batch", "batch_current", "group", "none")),
        *(f"model.activation={a}" for a in ("relu", "leaky_relu", "prelu", "silu", "swish", "swish_lean")),
        *(f"model.upsampling={u}" for u in ("transposed", "trilinear", "nearest")),
        *("model.up_reduce=false", "model.up_bias=false", "model.conv_bias=false", "model.norm_affine=false"),
        *("model.residual=true", "model.dropout=0.2", "model.widen=second", "model.inplace=true"),
        "model.blocks=[1,2]",
        *("model.decoder=[4]", "model.features=[8]", "model.features=[4,8,8,16,16]"),
    ],
)
def test_every_option_trains(network: Callable[..., UNet3D], override: str) -> None:
    model = network("model=unet_tiny", "model.features=[8,16]", override)
    model(torch.randn(2, 1, 17, 10, 9)).square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_options_change_what_they_name(network: Callable[..., UNet3D]) -> None:
    def has(kind: type, *overrides: str) -> bool:
        return any(isinstance(m, kind) for m in network("model=unet_tiny", *overrides).modules())

    assert has(nn.Dropout3d, "model.dropout=0.1") and not has(nn.Dropout3d)
    assert has(nn.ConvTranspose3d) and not has(nn.ConvTranspose3d, "model.upsampling=nearest")
    assert has(nn.MaxPool3d) and not has(nn.MaxPool3d, "model.downsampling=strided_conv")
    assert not has(nn.InstanceNorm3d, "model.norm=none")


def test_residual_block_is_its_input_when_convolutions_are_zero(network: Callable[..., UNet3D]) -> None:
    block = network("model=unet_tiny", "model.residual=true", "model.norm=none", "model.features=[4]").inc.block
    nn.init.zeros_(block.conv2.conv.weight)
    x = torch.randn(1, 1, 4, 4, 4)
    assert torch.equal(block(x), block.project(x).relu())


def test_deep_supervision_has_a_head_a_level_in_training_only(network: Callable[..., UNet3D]) -> None:
    model = network("model=nnunet_hippocampus", "model.features=[4,8,8,8]")
    x = torch.randn(1, 1, 16, 24, 16)
    assert [tuple(y.shape[2:]) for y in model(x)] == [(16, 24, 16), (8, 12, 8), (4, 6, 4)]
    assert model.eval()(x).shape == (1, 3, 16, 24, 16)


def test_stage_count_is_what_checkpointing_is_checked_against(options: Callable[..., Model]) -> None:
    switches = {item.name: item.default for item in fields(Model) if isinstance(item.default, bool)}
    switched = [("model=unet", f"model.{name}={not default}") for name, default in switches.items()]
    with torch.device("meta"):
        models = [UNet3D(options(f"model={name}")) for name in ("unet_tiny", "unet", "forum_large")]
        models += [UNet3D(options(*words)) for words in switched]
        models.append(UNet3D(options("model=unet", "model.blocks=[1,2,1,3]")))
    for model in models:
        assert len(model) == rules.stages(model.options), model.options
    assert [name for name, _ in models[0].named_children()] == [*("inc", "down1", "down2", "up1", "up2", "outc")]


@promise("Prediction", "a network exported by `torch.export`", "computes the same, also for other sizes")
@pytest.mark.slow
def test_an_exported_network_computes_the_same_for_any_size(options: Callable[..., Model], tmp_path: Path) -> None:
    from torch.export import Dim, export  # a second to load

    network = UNet3D(options("model=unet_tiny", "model.features=[4,8]", "model.in_channels=1")).eval()
    free = {0: Dim("n", max=64), 2: 8 * Dim("d", max=64), 3: 8 * Dim("h", max=64), 4: 8 * Dim("w", max=64)}
    torch.export.save(export(network, (torch.zeros(2, 1, 16, 24, 32),), dynamic_shapes=(free,)), tmp_path / "net.pt2")
    loaded = torch.export.load(tmp_path / "net.pt2").module()
    for size in ((1, 1, 32, 16, 40), (3, 1, 16, 16, 24)):
        image = torch.randn(size)
        assert torch.allclose(loaded(image), network(image), atol=1e-4)

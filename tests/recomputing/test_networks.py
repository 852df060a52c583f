"""Networks as they are used: their losses, gradients, buffers and evaluation stay the same in each plan."""

import copy
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import pytest
import torch
from equality import assert_same, drawn_schedules, run, traced_once
from promises import promise
from torch import nn
from torch.utils._pytree import tree_leaves

from unet3d.model.unet import UNet3D
from unet3d.recomputing.module import Recomputed, schedules_of

OURS = (
    "",
    "model.norm=batch model.activation=leaky_relu model.inplace=true model.deep_supervision=true",
    "model.norm=group model.groups=2 model.activation=swish model.residual=true model.downsampling=strided_conv",
    "model.norm=none model.upsampling=trilinear model.conv_bias=false model.dropout=0.2",
    "model.norm=batch_current model.upsampling=nearest model.up_reduce=false model.activation=swish_lean",
    "model.padding=valid model.widen=second model.norm_affine=false model.up_bias=false model.inplace=true",
    "model.kernels=[[1,3,3],3,3] model.strides=[[1,2,2],2] model.decoder=[4,6] model.norm=batch model.residual=true",
)


def check(model: nn.Module, image: torch.Tensor, seeds: Sequence[int] = (1,)) -> None:
    """Compare passes by random schedules, and evaluation after them."""
    model = model.double().train()
    image = image.double()
    plain = run(copy.deepcopy(model), image)
    with traced_once():
        for seed in seeds:
            with drawn_schedules(seed, tiles=4):
                network = Recomputed(copy.deepcopy(model))
                assert_same(run(network, image), plain)
    expected = copy.deepcopy(schedules_of(network).network).eval()
    with torch.no_grad():
        outputs = zip(tree_leaves(network.eval()(image)), tree_leaves(expected(image)), strict=True)
    for output, expected_output in outputs:
        torch.testing.assert_close(output, expected_output, rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("overrides", OURS)
def test_our_network(overrides: str, network: Callable[..., UNet3D]) -> None:
    words = ["model=unet_tiny", "model.features=[4,6,8]", *overrides.split()]
    size = (17, 8, 12)
    if "valid" in overrides:
        size = (44, 44, 44)
        words.append("data.patch=[44,44,44]")
    image = torch.randn(2, 1, *size)
    check(network(*words), image, seeds=[2])


def _dyn(**options: Any) -> nn.Module:
    from monai.networks import nets

    norm = ("INSTANCE", {"affine": True})
    kernels, strides, filters = [3, 3, 3], [1, 2, 2], [4, 6, 8]
    return nets.DynUNet(3, 1, 3, kernels, strides, strides[1:], filters=filters, norm_name=norm, **options)


def _monai(name: str, *arguments: Any, **options: Any) -> nn.Module:
    from monai.networks import nets

    return attrgetter(name)(nets)(*arguments, **options)


MONAI: dict[str, tuple[Callable[[], nn.Module], tuple[int, int, int]]] = {
    "DynUNet": (_dyn, (16, 8, 8)),
    "DynUNet, residual, supervised": (
        lambda: _dyn(res_block=True, deep_supervision=True, deep_supr_num=1),
        (8, 16, 8),
    ),
    "BasicUNet": (lambda: _monai("BasicUNet", 3, 1, 3, features=(4, 4, 4, 4, 4, 4), dropout=0.1), (16, 16, 32)),
    "SegResNet": (lambda: _monai("SegResNet", 3, 8, 1, 3, blocks_down=(1, 1), blocks_up=(1,)), (12, 8, 8)),
    "AttentionUnet": (lambda: _monai("AttentionUnet", 3, 1, 3, (4, 8), (2,)), (12, 8, 8)),
    "UNet": (lambda: _monai("UNet", 3, 1, 3, (4, 8), (2,), num_res_units=2), (8, 8, 12)),
    "UNETR": (
        lambda: _monai("UNETR", 1, 3, (16, 16, 16), 4, 8, 8, 2, dropout_rate=0.2),
        (16, 16, 16),
    ),
    "SwinTransformer, of SwinUNETR": (
        lambda: _monai(
            *("swin_unetr.SwinTransformer", 1, 12, (4, 4, 4), (2, 2, 2), (2, 1, 1, 1), (1, 2, 3, 4)),
            attn_drop_rate=0.2,
            drop_path_rate=0.3,
            spatial_dims=3,
        ),
        (32, 16, 16),
    ),
    "DenseNet": (lambda: _monai("DenseNet", 3, 1, 2, 4, 2, (2, 2), dropout_prob=0.1), (16, 16, 16)),
    "VarAutoEncoder": (lambda: _monai("VarAutoEncoder", 3, (1, 16, 8, 8), 1, 4, (4, 8), (2, 2)), (16, 8, 8)),
    "MedNeXt": (
        lambda: _monai(
            *("MedNeXt", 3, 4, 1, 2),
            kernel_size=3,
            blocks_down=(1,),
            blocks_bottleneck=1,
            blocks_up=(1,),
            deep_supervision=True,
            global_resp_norm=True,
        ),
        (8, 8, 16),
    ),
}


@promise(
    "Resume",
    "an operation that `recompute` has no rule for",
    "runs again under autograd in backward, in groups; a line names it",
)
@pytest.mark.slow
@pytest.mark.parametrize(("make", "size"), MONAI.values(), ids=[*MONAI])
def test_networks_of_monai(make: Callable[[], nn.Module], size: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    images = 1 if max(size) > 16 else 2
    check(make(), torch.randn(images, 1, *size))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["PlainConvUNet", "ResidualEncoderUNet"])
def test_networks_of_nnunet(name: str) -> None:
    from dynamic_network_architectures.architectures import unet

    torch.manual_seed(0)
    blocks = ([1, 3, 4], [1, 1]) if name == "ResidualEncoderUNet" else (2, 2)
    model = getattr(unet, name)(
        *(1, 3, [4, 6, 8], nn.Conv3d, 3, [1, 2, 2], blocks[0], 3, blocks[1]),
        conv_bias=True,
        norm_op=nn.InstanceNorm3d,
        norm_op_kwargs={"affine": True},
        nonlin=nn.LeakyReLU,
        nonlin_kwargs={"inplace": True},
        deep_supervision=True,
    )
    check(model, torch.randn(2, 1, 8, 16, 8))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["UNet3D", "ResidualUNetSE3D"])
def test_networks_of_pytorch_3dunet(name: str) -> None:
    from pytorch3dunet.unet3d import model

    torch.manual_seed(0)
    check(getattr(model, name)(1, 2, f_maps=[4, 8], num_groups=2, num_levels=2), torch.randn(2, 1, 12, 8, 8))

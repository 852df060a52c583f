"""Networks of others as they are used: their outputs, gradients and buffers stay the same."""

import copy
from operator import attrgetter

import pytest
import torch
import yaml
from dynamic_network_architectures.architectures import unet
from equality import assert_same, drawn_schedules, run
from monai.networks import nets
from promises import promise
from pytorch3dunet.unet3d import model as wolny
from torch import nn

from unet3d.recomputing.module import Recomputed

# Of each: an image N C D H W, and what the network is given.
MONAI = yaml.safe_load("""
DynUNet: [2x1x16x8x8, [3, 1, 3, [3, 3, 3], [1, 2, 2], [2, 2]],
  {filters: [4, 6, 8], norm_name: [INSTANCE, {affine: true}]}]
DynUNet, residual: [2x1x8x16x8, [3, 1, 3, [3, 3, 3], [1, 2, 2], [2, 2]],
  {filters: [4, 6, 8], norm_name: INSTANCE, res_block: true, deep_supervision: true, deep_supr_num: 1}]
BasicUNet: [1x1x16x16x32, [3, 1, 3], {features: [4, 4, 4, 4, 4, 4], dropout: 0.1}]
SegResNet: [2x1x12x8x8, [3, 8, 1, 3], {blocks_down: [1, 1], blocks_up: [1]}]
AttentionUnet: [2x1x12x8x8, [3, 1, 3, [4, 8], [2]], {}]
UNet: [2x1x8x8x12, [3, 1, 3, [4, 8], [2]], {num_res_units: 2}]
UNETR: [2x1x16x16x16, [1, 3, [16, 16, 16], 4, 8, 8, 2], {dropout_rate: 0.2}]
swin_unetr.SwinTransformer: [1x1x32x16x16, [1, 12, [4, 4, 4], [2, 2, 2], [2, 1, 1, 1], [1, 2, 3, 4]],
  {attn_drop_rate: 0.2, drop_path_rate: 0.3, spatial_dims: 3}]
DenseNet: [2x1x16x16x16, [3, 1, 2, 4, 2, [2, 2]], {dropout_prob: 0.1}]
VarAutoEncoder: [2x1x16x8x8, [3, [1, 16, 8, 8], 1, 4, [4, 8], [2, 2]], {}]
MedNeXt: [2x1x8x8x16, [3, 4, 1, 2], {kernel_size: 3, blocks_down: [1], blocks_bottleneck: 1, blocks_up: [1],
  deep_supervision: true, global_resp_norm: true}]
""")


def monai_network(name: str) -> nn.Module:
    """Return a network of MONAI by its line above."""
    torch.manual_seed(0)
    _, arguments, options = MONAI[name]
    network: nn.Module = attrgetter(name.partition(",")[0])(nets)(*arguments, **options)
    return network


def check(model: nn.Module, size: str) -> None:
    """Compare a pass by a random schedule."""
    model = model.double().train()
    image = torch.randn(*map(int, size.split("x"))).double()
    plain = run(copy.deepcopy(model), image)
    with drawn_schedules(seed=1, tiles=4):
        assert_same(run(Recomputed(model), image), plain)


@promise(
    "Resume",
    "an operation that `recompute` has no rule for",
    "runs again under autograd in backward, in groups; a line names it",
)
@pytest.mark.slow
@pytest.mark.parametrize("name", MONAI)
def test_networks_of_monai(name: str) -> None:
    check(monai_network(name), MONAI[name][0])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "blocks"), [("PlainConvUNet", (2, 2)), ("ResidualEncoderUNet", ([1, 3, 4], [1, 1]))])
def test_networks_of_nnunet(name: str, blocks: tuple) -> None:
    torch.manual_seed(0)
    model = getattr(unet, name)(
        *(1, 3, [4, 6, 8], nn.Conv3d, 3, [1, 2, 2], blocks[0], 3, blocks[1]),
        conv_bias=True,
        norm_op=nn.InstanceNorm3d,
        norm_op_kwargs={"affine": True},
        nonlin=nn.LeakyReLU,
        nonlin_kwargs={"inplace": True},
        deep_supervision=True,
    )
    check(model, "2x1x8x16x8")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["UNet3D", "ResidualUNetSE3D"])
def test_networks_of_pytorch_3dunet(name: str) -> None:
    torch.manual_seed(0)
    check(getattr(wolny, name)(1, 2, f_maps=[4, 8], num_groups=2, num_levels=2), "2x1x12x8x8")

"""The networks of `field.py`: each with the patch, batch and widths of its paper, its planner or its tutorial.

Each is a `--module` of the command line, and a `model.path`, once Python finds this folder:

    export PYTHONPATH=benchmarks
    python -m unet3d memory --module field_networks:resenc --input 2x1x192x192x192 device=cuda amp=true amp_dtype=bf16
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn

Shape = tuple[int, ...]
WIDTHS = [32, 64, 128, 256, 320, 320]  # of nnU-Net's plans for six stages
TUTORIAL_WIDTHS = (16, 32, 64, 128, 256)
PLANNER = "nnU-Net's planner (images of 1 mm, at least 256 voxels an axis), estimate below"
OUR_CHOICE = "of our choice: as MONAI's UNet"


class Entry(NamedTuple):
    """A network of the table, and what it is trained on."""

    title: str
    make: Callable[..., nn.Module]
    shape: Shape  # of the input, N C D H W
    classes: int
    source: str  # of these sizes and the widths
    side: int = 64  # voxels along each axis, of the steps that `--check` runs

    @property
    def module(self) -> str:
        """Return the name that `--module` takes."""
        return f"field_networks:{self.make.__name__}"

    @property
    def checked_shape(self) -> Shape:
        """Return the shape of the steps that `--check` runs."""
        return (1, self.shape[1], self.side, self.side, self.side)


def plain_conv_unet(in_channels: int = 1, classes: int = 3) -> nn.Module:
    """Return nnU-Net's PlainConvUNet of six stages, with deep supervision."""
    from dynamic_network_architectures.architectures.unet import PlainConvUNet

    strides = [1, 2, 2, 2, 2, 2]
    return PlainConvUNet(in_channels, 6, WIDTHS, nn.Conv3d, 3, strides, 2, classes, 2, **_units())


def resenc(in_channels: int = 1, classes: int = 3) -> nn.Module:
    """Return nnU-Net's ResEnc of six stages, with deep supervision: M and L differ in their patch alone."""
    from dynamic_network_architectures.architectures.unet import ResidualEncoderUNet

    strides = [1, 2, 2, 2, 2, 2]
    blocks = [1, 3, 4, 6, 6, 6]
    return ResidualEncoderUNet(in_channels, 6, WIDTHS, nn.Conv3d, 3, strides, blocks, classes, 1, **_units())


def _units() -> dict[str, Any]:
    return {
        "conv_bias": True,
        "norm_op": nn.InstanceNorm3d,
        "norm_op_kwargs": {"eps": 1e-5, "affine": True},
        "nonlin": nn.LeakyReLU,
        "nonlin_kwargs": {"inplace": True},
        "deep_supervision": True,
    }


def dynunet(in_channels: int = 1, classes: int = 2) -> nn.Module:
    """Return MONAI's DynUNet for the spleen, without deep supervision."""
    from monai.networks.nets import DynUNet

    kernels = [[3, 3, 1], *[[3, 3, 3]] * 5]
    strides = [[1, 1, 1], [2, 2, 1], *[[2, 2, 2]] * 4]
    return DynUNet(3, in_channels, classes, kernels, strides, strides[1:], filters=WIDTHS)


def segresnet(in_channels: int = 4, classes: int = 3) -> nn.Module:
    """Return MONAI's SegResNet with 16 filters."""
    from monai.networks.nets import SegResNet

    blocks = (1, 2, 2, 4)
    return SegResNet(3, 16, in_channels, classes, dropout_prob=0.2, blocks_down=blocks, blocks_up=(1, 1, 1))


def basic_unet(in_channels: int = 1, classes: int = 2) -> nn.Module:
    """Return MONAI's BasicUNet with its default widths, 32 to 256."""
    from monai.networks.nets import BasicUNet

    return BasicUNet(3, in_channels, classes)


def unet(in_channels: int = 1, classes: int = 2) -> nn.Module:
    """Return MONAI's UNet with two residual units and batch norm."""
    from monai.networks.nets import UNet

    strides = (2, 2, 2, 2)
    return UNet(3, in_channels, classes, TUTORIAL_WIDTHS, strides, num_res_units=2, norm="batch")


def attention_unet(in_channels: int = 1, classes: int = 2) -> nn.Module:
    """Return MONAI's AttentionUnet with the widths of the UNet."""
    from monai.networks.nets import AttentionUnet

    return AttentionUnet(3, in_channels, classes, TUTORIAL_WIDTHS, (2, 2, 2, 2))


def vnet(in_channels: int = 1, classes: int = 2) -> nn.Module:
    """Return MONAI's VNet, of 16 to 256 channels."""
    from monai.networks.nets import VNet

    return VNet(3, in_channels, classes)


def unetr(in_channels: int = 1, classes: int = 14, side: int = 96) -> nn.Module:
    """Return MONAI's UNETR, for patches of a side in voxels."""
    from monai.networks.nets import UNETR

    return UNETR(in_channels, classes, (side, side, side))


def swin_unetr(in_channels: int = 1, classes: int = 14) -> nn.Module:
    """Return MONAI's SwinUNETR with 48 features, without its own checkpointing."""
    from monai.networks.nets import SwinUNETR

    return SwinUNETR(in_channels, classes, feature_size=48)


def pytorch_3dunet(in_channels: int = 1, classes: int = 2) -> nn.Module:
    """Return pytorch-3dunet's UNet3D of 32 to 256 channels."""
    from pytorch3dunet.unet3d.model import UNet3D

    return UNet3D(in_channels, classes, f_maps=32)


def mednext_l(in_channels: int = 1, classes: int = 3) -> nn.Module:
    """Return MONAI's MedNeXt-L with kernels of 3 and deep supervision, without its authors' checkpointing."""
    from monai.networks.nets import MedNeXtL

    network: nn.Module = MedNeXtL(in_channels=in_channels, out_channels=classes, deep_supervision=True)
    return network


def mednext_s(in_channels: int = 1, classes: int = 3) -> nn.Module:
    """Return MONAI's MedNeXt-S with kernels of 3 and deep supervision."""
    from monai.networks.nets import MedNeXtS

    network: nn.Module = MedNeXtS(in_channels=in_channels, out_channels=classes, deep_supervision=True)
    return network


ENTRIES = (
    Entry(
        "nnU-Net PlainConvUNet",
        plain_conv_unet,
        (2, 1, 128, 128, 128),
        3,
        f"{PLANNER} 560 million (`default_experiment_planner.py`)",
    ),
    Entry(
        "nnU-Net ResEnc M",
        resenc,
        (2, 1, 128, 128, 128),
        3,
        f"{PLANNER} 680 million (`residual_encoder_unet_planners.py`)",
    ),
    Entry(
        "nnU-Net ResEnc L",
        resenc,
        (2, 1, 192, 192, 192),
        3,
        "the same, 2,100 million",
    ),
    Entry(
        "MONAI DynUNet",
        dynunet,
        (2, 1, 192, 160, 64),
        2,
        "tutorial `dynunet_pipeline`, Task09_Spleen",
    ),
    Entry(
        "MONAI SegResNet",
        segresnet,
        (1, 4, 224, 224, 144),
        3,
        "tutorial `brats_segmentation_3d`",
    ),
    Entry("MONAI BasicUNet", basic_unet, (8, 1, 96, 96, 96), 2, f"default widths; patch and batch {OUR_CHOICE}"),
    Entry(
        "MONAI UNet",
        unet,
        (8, 1, 96, 96, 96),
        2,
        "tutorial `spleen_segmentation_3d`: two images, four patches each",
    ),
    Entry("MONAI AttentionUnet", attention_unet, (8, 1, 96, 96, 96), 2, OUR_CHOICE),
    Entry("MONAI VNet", vnet, (2, 1, 128, 128, 64), 2, "arXiv 1606.04797"),
    Entry(
        "MONAI UNETR",
        unetr,
        (4, 1, 96, 96, 96),
        14,
        "tutorial `unetr_btcv_segmentation_3d`: four patches of an image",
    ),
    Entry(
        "MONAI SwinUNETR",
        swin_unetr,
        (4, 1, 96, 96, 96),
        14,
        "tutorial `swin_unetr_btcv_segmentation_3d`, without its `use_checkpoint=True`",
    ),
    Entry(
        "pytorch-3dunet UNet3D",
        pytorch_3dunet,
        (1, 1, 80, 170, 170),
        2,
        "its `resources/3DUnet_confocal_boundary/train_config.yml`; batch and classes of our choice",
    ),
    Entry(
        "MedNeXt-L (MONAI)",
        mednext_l,
        (2, 1, 128, 128, 128),
        3,
        "patch: MedNeXt issue 5; batch of our choice; not checkpointed, unlike its authors' code",
    ),
    Entry(
        "MedNeXt-S (MONAI)",
        mednext_s,
        (2, 1, 80, 160, 160),
        3,
        "patch: MedNeXt issue 7; batch of our choice",
    ),
)

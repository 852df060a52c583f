"""The networks that `peers.py` and `curve.py` train: other libraries', and our own with each way to save memory."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from unet3d import build
from unet3d.config import compose
from unet3d.config.schema import Config
from unet3d.memory.technique import choose_technique
from unet3d.training.policy import MemoryPolicy, amp_dtype

WIDTHS = (32, 64, 128, 256)
NNUNETS = ["model.activation=leaky_relu", "model.inplace=true", "model.downsampling=strided_conv"]


class Task(NamedTuple):
    """What a network is trained on: random images of one channel, and random labels."""

    patch: tuple[int, ...] = (96, 96, 32)  # voxels
    widths: tuple[int, ...] = WIDTHS  # channels of each level
    classes: int = 5
    batch: int = 1
    amp: str = "off"  # or bf16, fp16
    deep_supervision: bool = False
    device: str = "cpu"

    @property
    def strides(self) -> list[int]:
        """Return the strides from each level to the one below."""
        return [2] * (len(self.widths) - 1)


class FinestFirst(nn.Module):
    """A network whose deep supervision's outputs are as our loss takes them."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, image: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Return the logits, or those of all scales."""
        output = self.network(image)
        return tuple(output) if isinstance(output, list | tuple) else output


def plain_conv_unet(task: Task) -> nn.Module:
    """Return nnU-Net's network for Task04, without the heads of deep supervision unless asked for."""
    from dynamic_network_architectures.architectures.unet import PlainConvUNet

    stages = len(task.widths)
    return PlainConvUNet(
        *(1, stages, list(task.widths), nn.Conv3d, 3, [1, *task.strides], 2, task.classes, 2),
        conv_bias=True,
        norm_op=nn.InstanceNorm3d,
        norm_op_kwargs={"eps": 1e-5, "affine": True},
        nonlin=nn.LeakyReLU,
        nonlin_kwargs={"inplace": True},
        deep_supervision=task.deep_supervision,
    )


def residual_encoder_unet(task: Task) -> nn.Module:
    """Return nnU-Net's ResEnc, with 1, 2, 2, 2 blocks: with its 1, 3, 4, 6, weights would hide the maps of a patch."""
    from dynamic_network_architectures.architectures.unet import ResidualEncoderUNet

    stages = len(task.widths)
    blocks = [1, 2, 2, 2] if stages == 4 else [1] * stages
    return ResidualEncoderUNet(
        *(1, stages, list(task.widths), nn.Conv3d, 3, [1, *task.strides], blocks, task.classes, [1] * (stages - 1)),
        conv_bias=True,
        norm_op=nn.InstanceNorm3d,
        norm_op_kwargs={"eps": 1e-5, "affine": True},
        nonlin=nn.LeakyReLU,
        nonlin_kwargs={"inplace": True},
    )


def dynunet(task: Task, is_residual: bool = False) -> nn.Module:
    """Return MONAI's nnU-Net."""
    from monai.networks.nets import DynUNet

    return DynUNet(
        *(3, 1, task.classes, [3] * len(task.widths), [1, *task.strides], task.strides),
        filters=list(task.widths),
        norm_name=("INSTANCE", {"affine": True}),
        res_block=is_residual,
    )


def residual_dynunet(task: Task) -> nn.Module:
    """Return MONAI's nnU-Net with residual blocks."""
    return dynunet(task, is_residual=True)


def basic_unet(task: Task) -> nn.Module:
    """Return MONAI's BasicUNet, one level deeper than the widths say: it has five."""
    from monai.networks.nets import BasicUNet

    first, *others = task.widths
    return BasicUNet(3, 1, task.classes, features=(first, first, *others, first))


def segresnet(task: Task) -> nn.Module:
    """Return MONAI's SegResNet; the widths of its four levels are doubled from one to the next."""
    from monai.networks.nets import SegResNet

    return SegResNet(3, task.widths[0], 1, task.classes)


def residual_unet(task: Task) -> nn.Module:
    """Return MONAI's UNet with two residual units; its first convolution halves the size."""
    from monai.networks.nets import UNet

    return UNet(3, 1, task.classes, task.widths, task.strides, num_res_units=2)


def attention_unet(task: Task) -> nn.Module:
    """Return MONAI's AttentionUnet."""
    from monai.networks.nets import AttentionUnet

    return AttentionUnet(3, 1, task.classes, task.widths, task.strides)


def vnet(task: Task) -> nn.Module:
    """Return MONAI's VNet, of 16 to 256 channels."""
    from monai.networks.nets import VNet

    return VNet(3, 1, task.classes)


def unetr(task: Task) -> nn.Module:
    """Return MONAI's UNETR, with 16 channels at full resolution."""
    from monai.networks.nets import UNETR

    return UNETR(1, task.classes, task.patch, feature_size=16)


def swin_unetr(task: Task) -> nn.Module:
    """Return MONAI's SwinUNETR, with 24 channels at full resolution."""
    from monai.networks.nets import SwinUNETR

    return SwinUNETR(1, task.classes, feature_size=24)


def pytorch_3dunet(task: Task) -> nn.Module:
    """Return pytorch-3dunet's UNet3D."""
    from pytorch3dunet.unet3d.model import UNet3D

    return UNet3D(1, task.classes, f_maps=task.widths[0], num_levels=len(task.widths))


PLAIN_CONV_UNET = "nnU-Net PlainConvUNet"
OURS = "unet3d"
THEIRS: dict[str, Callable[[Task], nn.Module]] = {
    PLAIN_CONV_UNET: plain_conv_unet,
    "nnU-Net ResidualEncoderUNet": residual_encoder_unet,
    "MONAI DynUNet": dynunet,
    "MONAI DynUNet, residual": residual_dynunet,
    "MONAI BasicUNet": basic_unet,
    "MONAI SegResNet": segresnet,
    "MONAI UNet": residual_unet,
    "MONAI AttentionUnet": attention_unet,
    "MONAI VNet": vnet,
    "pytorch-3dunet UNet3D": pytorch_3dunet,
    "MONAI UNETR": unetr,
    "MONAI SwinUNETR": swin_unetr,
}
# nnU-Net's network as unet3d builds it, in words of a configuration.
WAYS = [f"{OURS} ckpt=2"]
MAX_POOLING = "unet3d model=unet"  # our default network of these widths: max-pooling, ReLU
NETWORKS = (OURS, *WAYS, MAX_POOLING, *THEIRS)


def network_of(name: str, task: Task) -> nn.Module:
    """Return a network, on the task's device."""
    if name in THEIRS:
        network: nn.Module = FinestFirst(THEIRS[name](task))
    else:
        network = build.model(config_of(name, task).model, 0)
        if name != MAX_POOLING and not task.deep_supervision:
            _take_weights(network, plain_conv_unet(task))
    if next(network.parameters()).device.type != task.device:  # a fake network, which cannot be moved, is made there
        network = network.to(task.device)
    return network


def policy_of(name: str, task: Task) -> MemoryPolicy:
    """Return how the network's step saves memory, beside what `unet3d.recompute` does."""
    if name in THEIRS:
        dtype = None if task.amp == "off" else amp_dtype(task.amp, task.device)
        return MemoryPolicy(task.device, dtype)
    config = config_of(name, task)
    technique = choose_technique(config, config.model)
    return build.policy(config, task.device, technique)


def config_of(name: str, task: Task) -> Config:
    """Return the configuration of a network of ours."""
    words = name.split()[1:]
    if name != MAX_POOLING:
        words = ["model=unet", *NNUNETS, *words]
    words += [f"model.features={list(task.widths)}", f"model.deep_supervision={task.deep_supervision}"]
    words += [f"data.patch={list(task.patch)}", f"batch={task.batch}", "optim=sgd", "optim.lr=0.01"]
    if task.amp != "off":
        words += ["amp=true", f"amp_dtype={task.amp}"]
    config = compose.compose(words)
    config.model.in_channels = 1
    config.model.classes = task.classes
    config.device = task.device
    return config


def _take_weights(network: nn.Module, theirs: Any) -> None:
    """Fill ours with the weights of nnU-Net's network. ValueError if the logits then differ."""
    stages: Sequence[Any] = list(network.children())
    blocks = [(stage[0].convs, stages[level].block) for level, stage in enumerate(theirs.encoder.stages)]
    depth = len(blocks)
    for step, (convs, up) in enumerate(zip(theirs.decoder.stages, theirs.decoder.transpconvs, strict=True)):
        stage = stages[depth + step]
        stage.up.load_state_dict(up.state_dict())
        blocks.append((convs.convs, stage.block))
    for convs, block in blocks:
        for unit, ours in zip(convs, (block.conv1, block.conv2), strict=True):
            weight = unit.conv.weight
            if len(weight) * 2 == weight.shape[1] and block is not blocks[0][1]:  # they join the skip behind, we before
                weight = weight.roll(len(weight), 1)
            ours.conv.weight.data.copy_(weight.detach())
            ours.conv.bias.data.copy_(unit.conv.bias.detach())
            ours.norm.load_state_dict(unit.norm.state_dict())
    stages[-1].conv.load_state_dict(theirs.decoder.seg_layers[-1].state_dict())
    image = torch.randn(1, 1, 32, 32, 32)
    with torch.no_grad():
        if not torch.allclose(network(image), theirs(image), rtol=1e-3, atol=1e-4):
            raise ValueError("nnU-Net's network and ours differ")

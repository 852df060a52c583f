"""The 3D U-Net: a plain sequence of stages, so that whoever runs it may cut it anywhere."""

from torch import nn

from unet3d.config import Model
from unet3d.model import geometry
from unet3d.model.blocks import DoubleConv, Down, Inc, OutConv, Up, upsampler
from unet3d.model.geometry import Triple

ONES: Triple = (1, 1, 1)


class UNet3D(nn.Sequential):
    """N C D H W image in; N K D' H' W' logits out (in training with deep supervision: a tuple, finest first).

    Stages `inc, down1.., up1.., outc`; no forward of its own. After Cicek et al. 2016, arXiv:1606.06650. `options` must
    be concrete: channels, classes, kernels and strides set.
    """

    def __init__(self, options: Model) -> None:
        super().__init__()
        assert options.in_channels is not None and options.classes is not None
        self.options = options
        kernels, strides = geometry.kernels(options), geometry.strides(options)
        self.add_module("inc", Inc(_encoder_block(options.in_channels, 0, options, kernels[0], ONES)))
        for level, stride in enumerate(strides, start=1):
            self.add_module(f"down{level}", _down(level, options, kernels[level], stride))
        for number, level in enumerate(reversed(range(len(strides))), start=1):
            self.add_module(f"up{number}", _up(level, options, kernels[level], strides[level]))
        self.add_module("outc", OutConv(_decoder_width(0, options), options.classes))
        self.apply(_he_normal)


def _encoder_block(in_channels: int, level: int, options: Model, kernel: Triple, stride: Triple) -> DoubleConv:
    width = options.features[level]
    # Section 2: "doubling the number of channels already before max pooling" avoids bottlenecks.
    mid = width if options.widen == "first" else max(1, width // 2)
    return DoubleConv(in_channels, mid, width, options, kernel, stride)


def _down(level: int, options: Model, kernel: Triple, stride: Triple) -> Down:
    in_channels = options.features[level - 1]
    if options.downsampling == "strided_conv":
        return Down(None, _encoder_block(in_channels, level, options, kernel, stride))
    # An odd length keeps its last plane (ceil_mode); the decoder's surplus is cropped where the skip is joined.
    pool = nn.MaxPool3d(stride, stride, ceil_mode=options.padding == "same")
    return Down(pool, _encoder_block(in_channels, level, options, kernel, ONES))


def _up(level: int, options: Model, kernel: Triple, stride: Triple) -> Up:
    below = _decoder_width(level + 1, options)
    skip = options.features[level]
    raised = skip if options.up_reduce else below
    width = _decoder_width(level, options)
    assert options.classes is not None
    head = nn.Conv3d(width, options.classes, 1) if options.deep_supervision and level > 0 else None
    block = DoubleConv(skip + raised, width, width, options, kernel, ONES)
    return Up(upsampler(below, raised, options, stride), block, head)


def _decoder_width(level: int, options: Model) -> int:
    """Channels that leave the decoder at `level`; at the deepest level, the encoder's."""
    if level == len(options.features) - 1 or options.decoder is None:
        return options.features[level]
    return options.decoder[level]


def _he_normal(module: nn.Module) -> None:
    if isinstance(module, nn.Conv3d | nn.ConvTranspose3d):
        nn.init.kaiming_normal_(module.weight, a=0.01)
        if module.bias is not None:
            nn.init.zeros_(module.bias)

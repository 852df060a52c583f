"""The 3D U-Net: a plain sequence of stages, so activation checkpointing may start a segment at any of them."""

from collections import OrderedDict

from torch import nn

from unet3d.config.schema import Model
from unet3d.model import geometry
from unet3d.model.blocks import DoubleConv, Down, Inc, OutConv, Up, conv_unit, upsampler
from unet3d.model.geometry import ONES, Triple

KAIMING_SLOPE = 0.01  # The initial weights assume a leaky ReLU with it.


class UNet3D(nn.Sequential):
    """N C D H W image in; N K D' H' W' logits out (in training with deep supervision: a tuple, finest first).

    Stages `inc, down1.., up1.., outc`; no own forward. After Cicek et al. 2016, arXiv:1606.06650. `options` must
    be concrete: channels, classes, kernels and strides set.
    """

    def __init__(self, options: Model) -> None:
        super().__init__()
        assert options.in_channels is not None and options.classes is not None
        self.options = options
        kernels = geometry.kernels(options)
        strides = geometry.strides(options)
        self.add_module("inc", Inc(_encoder_block(options.in_channels, 0, options, kernels[0], ONES)))
        for level, stride in enumerate(strides, start=1):
            self.add_module(f"down{level}", _down(level, options, kernels[level], stride))
        for level in reversed(range(len(strides))):
            number = len(strides) - level
            self.add_module(f"up{number}", _up(level, options, kernels[level], strides[level]))
        width = _decoder_widths(options)[0]
        self.add_module("outc", OutConv(width, options.classes))
        _initialise(self, has_shortcuts=options.blocks is not None)


def _encoder_block(in_channels: int, level: int, options: Model, kernel: Triple, stride: Triple) -> nn.Module:
    """Return the two convolution units of an encoder level, or the blocks of nnU-Net's ResEnc (arXiv:2404.09556).

    The stem is before the first of these.
    """
    width = options.features[level]
    if options.blocks is None:
        # Section 2: "doubling the number of channels already before max pooling" avoids bottlenecks.
        middle = max(1, width // 2) if options.widen == "second" else width
        return DoubleConv(in_channels, middle, width, options, kernel, stride)
    layers: dict[str, nn.Module] = {}
    if level == 0:
        layers["stem"] = conv_unit(in_channels, width, options, kernel, ONES, last=False)
        in_channels = width
    for number in range(1, options.blocks[level] + 1):
        layers[f"block{number}"] = DoubleConv(in_channels, width, width, options, kernel, stride)
        in_channels = width
        stride = ONES
    return nn.Sequential(OrderedDict(layers))


def _down(level: int, options: Model, kernel: Triple, stride: Triple) -> Down:
    """Return the stage that goes down to this level of the encoder."""
    above = options.features[level - 1]
    if options.downsampling == "strided_conv":
        return Down(None, _encoder_block(above, level, options, kernel, stride))
    # An odd length keeps its last plane (ceil_mode); `join` crops the decoder's surplus.
    pool = nn.MaxPool3d(stride, stride, ceil_mode=options.padding == "same")
    return Down(pool, _encoder_block(above, level, options, kernel, ONES))


def _up(level: int, options: Model, kernel: Triple, stride: Triple) -> Up:
    """Return the stage that goes up to this level of the decoder."""
    assert options.classes is not None
    widths = _decoder_widths(options)
    width = widths[level]
    below = widths[level + 1]
    skip = options.features[level]
    raised = skip if options.up_reduce else below
    head = None
    if options.deep_supervision and level > 0:
        head = nn.Conv3d(width, options.classes, 1)
    block: nn.Module
    if options.blocks is None:
        block = DoubleConv(skip + raised, width, width, options, kernel, ONES)
    else:  # The decoder has one unit where the encoder has residual blocks.
        block = nn.Sequential(OrderedDict(conv1=conv_unit(skip + raised, width, options, kernel, ONES, last=False)))
    return Up(upsampler(below, raised, options, stride), block, head)


def _decoder_widths(options: Model) -> list[int]:
    """Return the width of each level on the way up; the deepest is the encoder's."""
    widths = options.decoder or options.features[:-1]
    return [*widths, options.features[-1]]


def _initialise(network: nn.Module, has_shortcuts: bool) -> None:
    """Draw the weights of all convolutions after He et al. 2015 (arXiv:1502.01852); biases are 0.

    Residual blocks with shortcuts begin as these: their last norm's scale is 0 (arXiv:1706.02677), as in nnU-Net.
    """
    for module in network.modules():
        if isinstance(module, nn.Conv3d | nn.ConvTranspose3d):
            nn.init.kaiming_normal_(module.weight, a=KAIMING_SLOPE)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, DoubleConv) and has_shortcuts:
            for name, parameter in module.conv2.named_parameters():
                if name.startswith("norm."):
                    nn.init.zeros_(parameter)

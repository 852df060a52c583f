"""The 3D U-Net: a plain sequence of stages, so activation checkpointing may start a segment at any of them."""

from torch import nn

from unet3d.config.schema import Model
from unet3d.model import geometry
from unet3d.model.blocks import DoubleConv, Down, Inc, OutConv, Up, upsampler
from unet3d.model.geometry import ONES, Triple


class UNet3D(nn.Sequential):
    """N C D H W image in; N K D' H' W' logits out (in training with deep supervision: a tuple, finest first).

    Stages `inc, down1.., up1.., outc`; no forward of its own. After Cicek et al. 2016, arXiv:1606.06650. `options` must
    be concrete: channels, classes, kernels and strides set.
    """

    def __init__(self, options: Model) -> None:
        super().__init__()
        assert options.in_channels is not None and options.classes is not None
        self.options = options
        is_strided = options.downsampling == "strided_conv"
        kernels, strides = geometry.kernels(options), geometry.strides(options)
        decoder = [*(options.decoder or options.features[:-1]), options.features[-1]]  # width of each level
        self.add_module("inc", Inc(_encoder_block(options.in_channels, 0, options, kernels[0], ONES)))
        for level, stride in enumerate(strides, start=1):
            # An odd length keeps its last plane (ceil_mode); `join` crops the decoder's surplus.
            pool = None if is_strided else nn.MaxPool3d(stride, stride, ceil_mode=options.padding == "same")
            above, block_stride = options.features[level - 1], stride if is_strided else ONES
            block = _encoder_block(above, level, options, kernels[level], block_stride)
            self.add_module(f"down{level}", Down(pool, block))
        for level in reversed(range(len(strides))):
            skip, width, below = options.features[level], decoder[level], decoder[level + 1]
            raised = skip if options.up_reduce else below
            head = nn.Conv3d(width, options.classes, 1) if options.deep_supervision and level > 0 else None
            block = DoubleConv(skip + raised, width, width, options, kernels[level], ONES)
            up = Up(upsampler(below, raised, options, strides[level]), block, head)
            self.add_module(f"up{len(strides) - level}", up)
        self.add_module("outc", OutConv(decoder[0], options.classes))
        for module in self.modules():
            if isinstance(module, nn.Conv3d | nn.ConvTranspose3d):
                nn.init.kaiming_normal_(module.weight, a=0.01)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)


def _encoder_block(in_channels: int, level: int, options: Model, kernel: Triple, stride: Triple) -> DoubleConv:
    width = options.features[level]
    # Section 2: "doubling the number of channels already before max pooling" avoids bottlenecks.
    mid = width if options.widen == "first" else max(1, width // 2)
    return DoubleConv(in_channels, mid, width, options, kernel, stride)

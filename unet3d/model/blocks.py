"""The blocks of the U-Net: convolution units, and stages that map a state to a new state.

A stage does not change the state it gets, so activation checkpointing can run a group of stages twice.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from unet3d.config.schema import Model
from unet3d.model.geometry import ONES, Triple


def conv_unit(inputs: int, channels: int, options: Model, kernel: Triple, stride: Triple, last: bool) -> nn.Module:
    """Return convolution, normalisation, activation and dropout.

    The `last` unit of a residual block has no activation and no dropout: they follow the sum.
    """
    x, y, z = (size // 2 if options.padding == "same" else 0 for size in kernel)
    layers: dict[str, nn.Module] = {}
    layers["conv"] = nn.Conv3d(inputs, channels, kernel, stride, (x, y, z), bias=options.conv_bias)
    normalisation = norm(channels, options)
    if normalisation is not None:
        layers["norm"] = normalisation
    if not last:
        layers["act"] = activation(options)
        if options.dropout:
            layers["dropout"] = nn.Dropout3d(options.dropout)
    return nn.Sequential(OrderedDict(layers))


def norm(channels: int, options: Model) -> nn.Module | None:
    """Return the normalisation of N C D H W maps; None for model.norm=none."""
    kinds: dict[str, Callable[[], nn.Module | None]] = {
        "instance": lambda: nn.InstanceNorm3d(channels, affine=options.norm_affine),
        "batch": lambda: nn.BatchNorm3d(channels, affine=options.norm_affine),
        # the paper's: the current statistics in evaluation too (arXiv:1606.06650, section 3)
        "batch_current": lambda: nn.BatchNorm3d(channels, affine=options.norm_affine, track_running_stats=False),
        "group": lambda: nn.GroupNorm(options.groups, channels, affine=options.norm_affine),
        "none": lambda: None,
    }
    return kinds[options.norm]()


def activation(options: Model) -> nn.Module:
    """Return the activation; it is in place only where the config's rules allow that."""
    kinds: dict[str, Callable[[], nn.Module]] = {
        "relu": lambda: nn.ReLU(options.inplace),
        "leaky_relu": lambda: nn.LeakyReLU(options.negative_slope, options.inplace),
        "prelu": nn.PReLU,
        "silu": lambda: nn.SiLU(options.inplace),
        "swish": Swish,
        "swish_lean": LeanSwish,
    }
    return kinds[options.activation]()


class Swish(nn.Module):
    """x * sigmoid(x) as plain operations: autograd keeps x and sigmoid(x)."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(x)


class LeanSwish(nn.Module):
    """x * sigmoid(x) with its gradient written out: autograd keeps only x, and backward recomputes sigmoid(x)."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = _LeanSwish.apply(x)
        return result


class _LeanSwish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        x: Tensor = ctx.saved_tensors[0]
        sigmoid = torch.sigmoid(x)
        slope = sigmoid * (1 + x * (1 - sigmoid))
        return grads[0] * slope


class FeatureState(NamedTuple):
    """The maps that one stage hands to the next."""

    x: Tensor  # N C D H W, the current map
    skips: tuple[Tensor, ...] = ()  # the encoder's maps that the decoder still joins, shallowest first
    sides: tuple[Tensor, ...] = ()  # deep supervision's logits, deepest first


class DoubleConv(nn.Module):
    """Two convolution units, in a residual network plus the input. N C D H W -> N C' D' H' W'."""

    def __init__(self, inputs: int, middle: int, channels: int, options: Model, kernel: Triple, stride: Triple) -> None:
        super().__init__()
        is_residual = options.residual or options.blocks is not None
        self.conv1 = conv_unit(inputs, middle, options, kernel, stride, last=False)
        self.conv2 = conv_unit(middle, channels, options, kernel, ONES, last=is_residual)
        self.act: nn.Module | None = None
        self.project: nn.Module | None = None
        if not is_residual:
            return
        self.act = activation(options)
        if inputs != channels or stride != ONES:
            self.project = projection(inputs, channels, options, stride)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv2(self.conv1(x))
        if self.act is None:
            return y
        shortcut = x if self.project is None else self.project(x)
        result: Tensor = self.act(y + crop(shortcut, y.shape[2:]))
        return result


def projection(inputs: int, channels: int, options: Model, stride: Triple) -> nn.Module:
    """Return what gives a residual block's input the channels and the size of its output.

    With `options.blocks`, the mean over each stride comes before the convolution, after He et al. 2019
    (arXiv:1812.01187, ResNet-D), so that no voxel is left out.
    """
    if options.blocks is None:
        return nn.Conv3d(inputs, channels, 1, stride, bias=options.conv_bias)
    layers: dict[str, nn.Module] = {}
    if stride != ONES:
        layers["pool"] = nn.AvgPool3d(stride, stride, ceil_mode=True)  # Its map is as large as a padded convolution's.
    if inputs != channels:
        layers["conv"] = nn.Conv3d(inputs, channels, 1, bias=False)
        normalisation = norm(channels, options)
        if normalisation is not None:
            layers["norm"] = normalisation
    return nn.Sequential(OrderedDict(layers))


class Inc(nn.Module):
    """The full-resolution level of the encoder: an image N C D H W in, a state out."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, image: Tensor) -> FeatureState:
        return FeatureState(self.block(image))


class Down(nn.Module):
    """Keep the current map as a skip and go one level down."""

    def __init__(self, pool: nn.Module | None, block: nn.Module) -> None:
        super().__init__()
        self.pool = pool
        self.block = block

    def forward(self, state: FeatureState) -> FeatureState:
        x = state.x if self.pool is None else self.pool(state.x)
        return FeatureState(self.block(x), (*state.skips, state.x), state.sides)


class Up(nn.Module):
    """Go one level up and join the level's skip; with a head, add this level's logits to the sides."""

    def __init__(self, up: nn.Module, block: nn.Module, head: nn.Module | None) -> None:
        super().__init__()
        self.up = up
        self.block = block
        self.head = head

    def forward(self, state: FeatureState) -> FeatureState:
        # Intermediate maps get no name: a name would keep them alive through the block, where the step has its peak.
        x = self.block(join(state.skips[-1], self.up(state.x)))
        sides = state.sides
        if self.head is not None and self.training:
            sides = (*sides, self.head(x))
        return FeatureState(x, state.skips[:-1], sides)


class OutConv(nn.Module):
    """The head: logits at full resolution; in training with deep supervision, of all levels, finest first."""

    def __init__(self, in_channels: int, classes: int) -> None:
        super().__init__()
        self.conv = nn.Conv3d(in_channels, classes, 1)

    def forward(self, state: FeatureState) -> Tensor | tuple[Tensor, ...]:
        logits: Tensor = self.conv(state.x)
        if not state.sides:
            return logits
        return (logits, *reversed(state.sides))


def join(skip: Tensor, x: Tensor) -> Tensor:
    """Concatenate the common part of two maps: N C D H W and N C' D' H' W' -> N C+C' min(D,D') ...

    Valid convolutions made x smaller by an equal border; a stride that does not divide made it larger at the end.
    """
    d, h, w = map(min, skip.shape[2:], x.shape[2:])
    return torch.cat((crop(skip, torch.Size((d, h, w))), x[..., :d, :h, :w]), dim=1)


def crop(x: Tensor, size: torch.Size) -> Tensor:
    """Return the centre of ... D H W; an odd surplus loses its last plane."""
    if x.shape[-3:] == size:
        return x
    for axis in (-3, -2, -1):
        surplus = x.shape[axis] - size[axis]
        x = x.narrow(axis, surplus // 2, size[axis])
    return x


def upsampler(in_channels: int, out_channels: int, options: Model, stride: Triple) -> nn.Module:
    """Return the way to the finer level: a transposed convolution, or a 1x1x1 convolution and interpolation."""
    if options.upsampling == "transposed":
        return nn.ConvTranspose3d(in_channels, out_channels, stride, stride, bias=options.up_bias)
    layers: dict[str, nn.Module] = {}
    if in_channels != out_channels:  # it commutes with the interpolation, so it runs on the small map
        layers["reduce"] = nn.Conv3d(in_channels, out_channels, 1, bias=options.up_bias)
    factors = tuple(map(float, stride))
    layers["interpolate"] = nn.Upsample(scale_factor=factors, mode=options.upsampling)
    return nn.Sequential(OrderedDict(layers))

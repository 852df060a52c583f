"""The stages of the U. Each maps a state to a state and leaves the one it got as it was.

That makes a run of stages safe to execute twice, which is what activation checkpointing does.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from unet3d.config import Model
from unet3d.model import layers
from unet3d.model.geometry import Triple


class State(NamedTuple):
    """What flows along the U."""

    x: Tensor  # N C D H W, the current map
    skips: tuple[Tensor, ...] = ()  # the encoder's maps still to be joined, shallowest first
    sides: tuple[Tensor, ...] = ()  # deep supervision's logits, deepest first


class DoubleConv(nn.Module):
    """Two convolution units; with `options.residual`, plus the input."""

    def __init__(
        self, in_channels: int, mid_channels: int, out_channels: int, options: Model, kernel: Triple, stride: Triple
    ) -> None:
        super().__init__()
        ones = (1, 1, 1)
        self.conv1 = layers.unit(in_channels, mid_channels, options, kernel, stride, last=False)
        self.conv2 = layers.unit(mid_channels, out_channels, options, kernel, ones, last=options.residual)
        self.project: nn.Module | None = None
        self.act: nn.Module | None = None
        if options.residual:
            self.act = layers.activation(options)
            if in_channels != out_channels or stride != ones:
                self.project = nn.Conv3d(in_channels, out_channels, 1, stride, bias=options.conv_bias)

    def forward(self, x: Tensor) -> Tensor:
        """N C D H W -> N C' D' H' W'."""
        y: Tensor = self.conv2(self.conv1(x))
        if self.act is None:
            return y
        shortcut = x if self.project is None else self.project(x)
        result: Tensor = self.act(y + crop(shortcut, y.shape[2:]))
        return result


class Inc(nn.Module):
    """The full-resolution level of the encoder: image in, state out."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, image: Tensor) -> State:
        """N C D H W -> State."""
        return State(self.block(image))


class Down(nn.Module):
    """Keep the current map as a skip and go one level down."""

    def __init__(self, pool: nn.Module | None, block: nn.Module) -> None:
        super().__init__()
        self.pool = pool
        self.block = block

    def forward(self, state: State) -> State:
        x = state.x if self.pool is None else self.pool(state.x)
        return State(self.block(x), (*state.skips, state.x), state.sides)


class Up(nn.Module):
    """Come one level up, join the level's skip; with a head, add this level's logits to the sides."""

    def __init__(self, up: nn.Module, block: nn.Module, head: nn.Module | None) -> None:
        super().__init__()
        self.up = up
        self.block = block
        self.head = head

    def forward(self, state: State) -> State:
        # Not one intermediate map is given a name: a name would keep it alive through the block, the peak of the step.
        x = self.block(join(state.skips[-1], self.up(state.x)))
        sides = (*state.sides, self.head(x)) if self.head is not None and self.training else state.sides
        return State(x, state.skips[:-1], sides)


class OutConv(nn.Module):
    """The head: logits of the full resolution; in training with deep supervision, all of them, finest first."""

    def __init__(self, in_channels: int, classes: int) -> None:
        super().__init__()
        self.conv = nn.Conv3d(in_channels, classes, 1)

    def forward(self, state: State) -> Tensor | tuple[Tensor, ...]:
        logits: Tensor = self.conv(state.x)
        return (logits, *reversed(state.sides)) if state.sides else logits


def join(skip: Tensor, x: Tensor) -> Tensor:
    """Concatenate along channels what both cover: N C D H W and N C' D' H' W' -> N C+C' min(D,D') ...

    Valid convolutions made `x` smaller by an equal border; a size that the stride does not divide made it larger at
    the end.
    """
    d, h, w = (min(a, b) for a, b in zip(skip.shape[2:], x.shape[2:], strict=True))
    return torch.cat((crop(skip, torch.Size((d, h, w))), x[..., :d, :h, :w]), dim=1)


def crop(x: Tensor, size: torch.Size) -> Tensor:
    """The centre of ... D H W; an odd surplus loses its last plane."""
    if x.shape[-3:] == size:
        return x
    for axis, (have, want) in enumerate(zip(x.shape[-3:], size, strict=True), start=-3):
        x = x.narrow(axis, (have - want) // 2, want)
    return x


def upsampler(in_channels: int, out_channels: int, options: Model, stride: Triple) -> nn.Module:
    """From one level to the finer one: transposed convolution, or interpolation after an optional 1x1x1 convolution.

    The 1x1x1 convolution commutes with the interpolation, so it runs on the small map.
    """
    if options.upsampling == "transposed":
        return nn.ConvTranspose3d(in_channels, out_channels, stride, stride, bias=options.up_bias)
    factor = tuple(float(s) for s in stride)
    up = nn.Sequential()
    if in_channels != out_channels:
        up.add_module("reduce", nn.Conv3d(in_channels, out_channels, 1, bias=options.up_bias))
    up.add_module("interpolate", nn.Upsample(scale_factor=factor, mode=options.upsampling))
    return up

"""A small network of attention in windows, as SwinUNETR has it: views, a mask, a table of positions, dropout."""

from monai.networks.nets.swin_unetr import BasicLayer
from torch import nn


def block(channels: int = 8, window: int = 4, dropout: float = 0.0) -> nn.Module:
    """Return attention and a perceptron, each behind a layer norm and beside a shortcut; and so again, shifted."""
    return BasicLayer(channels, 2, 2, 3 * [window], [0.0, 0.0], drop=dropout, attn_drop=dropout)


def windows(channels: int = 8, window: int = 4, dropout: float = 0.0) -> nn.Module:
    """Return two blocks at half the size, between convolutions."""
    return nn.Sequential(
        *(nn.Conv3d(1, channels, 2, 2), block(channels, window, dropout), nn.InstanceNorm3d(channels)),
        *(nn.ConvTranspose3d(channels, channels, 2, 2), nn.ReLU(), nn.Conv3d(channels, 3, 3, padding=1)),
    )

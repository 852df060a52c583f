"""A small network of attention in windows, as SwinUNETR has it: views, a mask, a table of positions, dropout."""

import torch
from torch import Tensor, nn


class WindowAttention(nn.Module):
    """Attention of the tokens N D H W C within windows; a mask and learned biases are of pairs of tokens."""

    def __init__(self, channels: int, heads: int, window: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.window = window
        self.qkv = nn.Linear(channels, 3 * channels)
        self.projection = nn.Linear(channels, channels)
        self.dropout = nn.Dropout(dropout)
        self.positions = nn.Parameter(torch.randn(2 * window**3 - 1, heads))
        places = torch.arange(window**3)
        self.register_buffer("differences", places[:, None] - places[None] + window**3 - 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return what the tokens take from those of their window."""
        images, *size, channels = x.shape
        w = self.window
        d, h, v = (length // w for length in size)
        tokens = x.roll((1, 1, 1), (1, 2, 3)).view(images, d, w, h, w, v, w, channels)
        tokens = tokens.permute(0, 1, 3, 5, 2, 4, 6, 7).reshape(-1, w**3, channels)
        qkv = self.qkv(tokens).reshape(len(tokens), w**3, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = qkv[0] @ qkv[1].transpose(-2, -1)
        scores = scores + self.positions[self.differences.view(-1)].view(w**3, w**3, -1).permute(2, 0, 1)
        mask = torch.zeros(len(tokens), w**3, w**3, dtype=x.dtype)
        mask[:, : w**2, w:] = -3
        scores = (scores.view(1, *scores.shape) + mask[None, :, None]).view(scores.shape)
        mixed = self.dropout(scores.softmax(-1)) @ qkv[2]
        tokens = self.dropout(self.projection(mixed.transpose(1, 2).reshape(-1, w**3, channels)))
        tokens = tokens.view(images, d, h, v, w, w, w, channels).permute(0, 1, 4, 2, 5, 3, 6, 7)
        return tokens.reshape(x.shape).roll((-1, -1, -1), (1, 2, 3))


class Block(nn.Module):
    """Attention and a perceptron, each behind a layer norm and beside a shortcut."""

    def __init__(self, channels: int, heads: int = 2, window: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(channels) for _ in range(2))
        self.attention = WindowAttention(channels, heads, window, dropout)
        self.perceptron = nn.Sequential(
            nn.Linear(channels, 4 * channels),
            nn.GELU(),
            nn.Dropout(dropout),
            nn.Linear(4 * channels, channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the map N C D H W."""
        x = x.permute(0, 2, 3, 4, 1)
        x = x + self.attention(self.norms[0](x))
        x = x + self.perceptron(self.norms[1](x))
        return x.permute(0, 4, 1, 2, 3)


class Windows(nn.Module):
    """Two blocks at half the size, between convolutions, and a shortcut around them."""

    def __init__(self, channels: int = 8, window: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.down = nn.Conv3d(1, channels, 2, 2)
        self.blocks = nn.Sequential(
            Block(channels, window=window, dropout=dropout), Block(channels, window=window, dropout=dropout)
        )
        self.norm = nn.InstanceNorm3d(channels)
        self.up = nn.ConvTranspose3d(2 * channels, channels, 2, 2)
        self.head = nn.Conv3d(channels, 3, 3, padding=1)

    def forward(self, image: Tensor) -> Tensor:
        """Return logits."""
        first = self.down(image)
        joined = torch.cat([self.norm(first), self.blocks(first)], 1)
        logits: Tensor = self.head(self.up(joined).relu())
        return logits

"""An operation between convolutions, at random sizes, along each axis, in small tiles: as torch computes it."""

from collections.abc import Callable, Sequence

import torch
from equality import assert_equal
from torch import Tensor, nn

from unet3d.recomputing.maps import Maps
from unet3d.recomputing.trace import trace

SHAPES = ((13, 5, 4), (5, 11, 4), (3, 4, 9))  # rows lie along the longest axis
TILES = 5  # of the largest map: few rows at a time
ALL = (0, 1, 2)
CHANNELS = 4
Operation = nn.Module | Callable[..., Tensor]


class Between(nn.Module):
    """An operation between convolutions; the first convolution's result may have another reader."""

    def __init__(self, operation: Operation, inputs: int, outputs: int, is_read_again: bool) -> None:
        super().__init__()
        self.first = nn.ModuleList(nn.Conv3d(2, CHANNELS, 3, padding=1) for _ in range(inputs))
        self.operation = operation
        self.last = nn.Conv3d(outputs, 3, 3, padding=1)
        self.again = nn.Conv3d(CHANNELS, 2, 1) if is_read_again else None

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        """Return logits."""
        maps = [layer(image) for layer in self.first]
        logits = self.last(self.operation(*maps))
        if self.again is None:
            return (logits,)
        return logits, self.again(maps[0])


def check(operation: Operation, inputs: int = 1, outputs: int = CHANNELS, axes: Sequence[int] = ALL) -> None:
    """Compare the operation with rows along some axes of D H W, in tiles of a few rows, and in one tile."""
    for number in axes:
        shape = SHAPES[number]
        torch.manual_seed(number)
        network = Between(operation, inputs, outputs, is_read_again=number % 2 == 0)
        image = torch.randn(1 + number % 2, 2, *shape)
        assert_equal(network, image, seeds=[number], tiles=(TILES, 1) if number == axes[0] else (TILES,))


def serves(operation: Operation, outputs: int = CHANNELS) -> bool:
    """Return whether all of a network has rules."""
    network = Between(operation, 1, outputs, is_read_again=False).train()
    return not Maps(trace(network, torch.randn(1, 2, *SHAPES[0])), axis=2).whole

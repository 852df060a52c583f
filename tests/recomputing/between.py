"""An operation between convolutions, at random sizes, along each axis, in small tiles: as torch computes it."""

import copy
import inspect
from collections.abc import Callable, Sequence

import torch
from equality import assert_equal
from torch import Tensor, nn

from unet3d.recomputing.maps import Maps
from unet3d.recomputing.trace import trace

SHAPES = ((13, 5, 4), (5, 11, 4), (3, 4, 9))  # rows lie along the longest axis
TILES = 5  # of the largest map: few rows at a time
CHANNELS = 4
Operation = nn.Module | Callable[..., Tensor]


def inputs_of(operation: Operation) -> int:
    """Return how many maps an operation takes."""
    return 1 if isinstance(operation, nn.Module) else len(inspect.signature(operation).parameters)


class Between(nn.Module):
    """A copy of an operation between convolutions; the first convolution's result may have another reader."""

    def __init__(self, operation: Operation, is_read_again: bool = False) -> None:
        super().__init__()
        inputs = inputs_of(operation)
        outputs = operation(*torch.rand(inputs, 1, CHANNELS, *SHAPES[0])).shape[1]
        self.first = nn.ModuleList(nn.Conv3d(2, CHANNELS, 3, padding=1) for _ in range(inputs))
        self.operation = copy.deepcopy(operation)
        self.last = nn.Conv3d(outputs, 3, 3, padding=1)
        self.again = nn.Conv3d(CHANNELS, 2, 1) if is_read_again else None

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        """Return logits."""
        maps = [layer(image) for layer in self.first]
        logits = self.last(self.operation(*maps))
        if self.again is None:
            return (logits,)
        return logits, self.again(maps[0])


def check(operation: Operation, axes: Sequence[int] = (0,)) -> None:
    """Compare the operation with rows along some axes of D H W, in tiles of a few rows, and in one tile."""
    for number in axes:
        torch.manual_seed(number)
        network = Between(operation, is_read_again=number % 2 == 0)
        image = torch.randn(1 + number % 2, 2, *SHAPES[number])
        assert_equal(network, image, seeds=[number], tiles=(TILES, 1) if number == axes[0] else (TILES,))


def whole_groups(operation: Operation) -> list:
    """Return the maps of a network that are groups of operations without a rule."""
    return Maps(trace(Between(operation).train(), torch.randn(1, 2, *SHAPES[0])), axis=2).whole


def serves(operation: Operation) -> bool:
    """Return whether all of a network has rules."""
    return not whole_groups(operation)

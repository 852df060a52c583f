"""Random networks: convolutions, normalisations, activations, skips, sums and gates in any order."""

import random
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RandomNetwork(nn.Module):
    """A network of a few random operations; each reads one or two of the maps before it, so that maps branch."""

    def __init__(self, seed: int, operations: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        torch.manual_seed(seed)
        self.image_channels = draw.choice([1, 2])
        self.stem = nn.Conv3d(self.image_channels, 4, 3, padding=1)
        self.steps = nn.ModuleList()
        self.reads = []
        for number in range(operations):
            kind = draw.choice(KINDS)
            step = kind(draw)
            self.steps.append(step)
            recent = range(max(0, number - 3), number + 1)
            self.reads.append(tuple(draw.choice(recent) for _ in range(step.inputs)))
        self.heads = sorted(draw.sample(range(operations), draw.choice([0, 0, 1])))
        self.last = nn.Conv3d(4, 2, 1)

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        """Return logits, and some maps."""
        maps = [self.stem(image)]
        for step, reads in zip(self.steps, self.reads, strict=True):
            maps.append(step(*(maps[index] for index in reads)))
        read = {index for reads in self.reads for index in reads}
        unread = [x for index, x in enumerate(maps) if index not in read]
        logits = self.last(_fitted(unread[-1], image))
        return (logits, *unread[:-1], *(maps[index + 1] for index in self.heads))


def _fitted(x: Tensor, like: Tensor) -> Tensor:
    """Return a map with the rows of another, by slices and padding, as a U-Net crops it."""
    for dimension in (2, 3, 4):
        x = x.narrow(dimension, 0, min(x.shape[dimension], like.shape[dimension]))
    missing = [like.shape[dimension] - x.shape[dimension] for dimension in (4, 3, 2)]
    if not any(missing):
        return x
    return F.pad(x, [0, missing[0], 0, missing[1], 0, missing[2]])


class Step(nn.Module):
    """A module or function of one map of 4 channels, or of two, the second brought to the size of the first."""

    def __init__(self, operation: Callable[..., Tensor], inputs: int = 1) -> None:
        super().__init__()
        self.operation = operation
        self.inputs = inputs

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        """Return the map."""
        return self.operation(x, *(_fitted(y, x) for y in others))


class Joined(nn.Module):
    """Two maps behind one another, and a convolution of both."""

    def __init__(self, kernel: int) -> None:
        super().__init__()
        self.convolution = nn.Conv3d(8, 4, kernel, padding=kernel // 2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the map."""
        return self.convolution(torch.cat([x, y], 1))


def _convolution(draw: random.Random) -> nn.Module:
    kernel = draw.choice([1, 2, 3, 3])
    dilation = draw.choice([1, 1, 2]) if kernel == 3 else 1
    padding = dilation * (kernel // 2)
    return Step(nn.Conv3d(4, 4, kernel, 1, padding, dilation, draw.choice([1, 2, 4]), draw.random() < 0.5))


def _down_and_up(draw: random.Random) -> nn.Module:
    stride = draw.choice([2, 2, 3, (1, 2, 2)])
    kernel = draw.choice([2, 3]) if stride == 2 else stride
    down = draw.choice([nn.Conv3d(4, 4, kernel, stride, 1), nn.MaxPool3d(stride, ceil_mode=True)])
    ups = [nn.ConvTranspose3d(4, 4, stride, stride), nn.Upsample(scale_factor=stride), _trilinear(stride)]
    middle = draw.choice([nn.Conv3d(4, 4, 3, padding=1), nn.Identity(), _normalisation(draw)])
    return Step(nn.Sequential(down, middle, draw.choice(ups)))


def _trilinear(stride: int | tuple[int, ...]) -> nn.Module:
    return nn.Upsample(scale_factor=stride, mode="trilinear")


def _normalisation(draw: random.Random) -> nn.Module:
    affine = draw.random() < 0.7
    norms = [
        nn.InstanceNorm3d(4, affine=affine, track_running_stats=draw.random() < 0.3),
        nn.BatchNorm3d(4, affine=affine),
        nn.GroupNorm(draw.choice([1, 2, 4]), 4, affine=affine),
    ]
    return Step(draw.choice(norms))


def _activation(draw: random.Random) -> nn.Module:
    layers = [nn.ReLU(), nn.LeakyReLU(0.1), nn.PReLU(4), nn.SiLU(), nn.Sigmoid(), nn.GELU(), nn.Dropout3d(0.3)]
    return Step(draw.choice([*layers, nn.Dropout(0.3), nn.Softmax(1)]))


def _unit(draw: random.Random) -> nn.Module:
    """Return what networks are made of: convolution, normalisation and an activation in place."""
    activation = draw.choice([nn.ReLU(inplace=True), nn.LeakyReLU(0.01, inplace=True)])
    return Step(nn.Sequential(nn.Conv3d(4, 4, 3, padding=1), _normalisation(draw), activation))


def _change(draw: random.Random) -> nn.Module:
    functions = [
        lambda x: torch.cat([x[:, 2:], F.relu(x[:, :2])], 1),
        lambda x: torch.cat(x.chunk(2, 1)[::-1], 1),
        lambda x: x * x.mean((2, 3, 4), keepdim=True).sigmoid(),
        lambda x: x * x.mean(1, keepdim=True),
        lambda x: 1 - 2 * x,
        lambda x: F.pad(x, (1, 0, 0, 1, 1, 1)),
        lambda x: x.flip(2),
        lambda x: x.split(1, 1)[1].repeat(1, 4, 1, 1, 1),
        lambda x: x.transpose(2, 4).contiguous().transpose(2, 4).contiguous(),
    ]
    return Step(draw.choice(functions))


def _of_two(draw: random.Random) -> nn.Module:
    functions = [
        torch.add,
        torch.add,
        torch.sub,
        lambda x, y: x * y.sigmoid(),
        lambda x, y: x + y.mean((2, 3, 4), keepdim=True),
        lambda x, y: F.leaky_relu(x + y[:, :1]),
        lambda x, y: torch.add(x, y, alpha=2),
    ]
    return Step(draw.choice([*functions, Joined(1), Joined(3)]), 2)


KINDS = (_convolution, _down_and_up, _normalisation, _activation, _unit, _unit, _change, _of_two, _of_two, _of_two)

"""Random networks of the operations of test_rules.py, in any order, with skips and branches."""

import copy
import random

import torch
import torch.nn.functional as F
from between import CHANNELS, inputs_of
from test_rules import ALONG_AXES, OTHERS, WITH_RULE
from torch import Tensor, nn

TABLE = ALONG_AXES | WITH_RULE | OTHERS
# One writes over what others read. The other gives a batch norm before it a turned gradient, for which torch's kernel
# on the CPU is wrong where there is one image: half of a finite difference away, in float64.
OPERATIONS = [TABLE[name] for name in TABLE if name not in ("dropout that is off", "tokens")]
UNIT = [nn.Conv3d(CHANNELS, CHANNELS, 3, padding=1), nn.InstanceNorm3d(CHANNELS, affine=True), nn.LeakyReLU(0.1, True)]
MOST = 20_000  # numbers of a map
LARGEST = 100.0


class RandomNetwork(nn.Module):
    """A network of a few random operations; each reads one or two of the maps before it, so that maps branch."""

    def __init__(self, seed: int, operations: int, image: Tensor) -> None:
        super().__init__()
        draw = random.Random(seed)
        torch.manual_seed(seed)
        self.stem = nn.Conv3d(image.shape[1], CHANNELS, 3, padding=1)
        self.steps = nn.ModuleList()
        self.reads: list[list[int]] = []
        maps = [self.stem(image)]
        while len(self.reads) < operations:
            step = copy.deepcopy(draw.choice([*OPERATIONS, *(nn.Sequential(*UNIT) for _ in range(20))]))
            reads = [draw.randrange(max(0, len(maps) - 4), len(maps)) for _ in range(inputs_of(step))]
            try:
                x = step(*_fitted([maps[index] for index in reads]))
            except (RuntimeError, ValueError):  # of a size that the operation does not take
                continue
            if x.shape[1] == CHANNELS and x.numel() <= MOST and x.abs().max() <= LARGEST:
                maps.append(x)
                self.reads.append(reads)
                self.steps.append(Step(step))
        self.last = nn.Conv3d(CHANNELS, 2, 1)

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        """Return logits, and the maps that nothing reads."""
        maps = [self.stem(image)]
        for step, reads in zip(self.steps, self.reads, strict=True):
            maps.append(step(*_fitted([maps[index] for index in reads])))
        read = {index for reads in self.reads for index in reads}
        *others, last = [x for index, x in enumerate(maps) if index not in read]
        return self.last(_fitted([image, last])[1]), *others


class Step(nn.Module):
    """A module or function as a layer."""

    def __init__(self, operation: nn.Module) -> None:
        super().__init__()
        self.operation = operation

    def forward(self, *maps: Tensor) -> Tensor:
        """Return the map."""
        return self.operation(*maps)


def _fitted(maps: list[Tensor]) -> list[Tensor]:
    """Return maps with the rows of the first, by slices and padding, as a U-Net crops them."""
    first, *others = maps
    fitted = [first]
    for x in others:
        for dimension in (2, 3, 4):
            x = x.narrow(dimension, 0, min(x.shape[dimension], first.shape[dimension]))
        missing = [first.shape[dimension] - x.shape[dimension] for dimension in (4, 3, 2)]
        fitted.append(F.pad(x, [0, missing[0], 0, missing[1], 0, missing[2]]) if any(missing) else x)
    return fitted

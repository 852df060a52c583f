"""Residual blocks at full size: what is written over gradients and sources, or sent in parts, is as in plain."""

from collections import Counter

import pytest
import torch
from equality import assert_equal, drawn_schedules, traced_once
from torch import Tensor, nn

from unet3d.recomputing.compiler import Backward, Compute
from unet3d.recomputing.module import Recomputed, schedules_of

SEEDS = range(12)


class Residual(nn.Module):
    """A stem whose normalised map is also the shortcut over two convolutions; two read their sum, which is a map."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv3d(1, 4, 3, padding=1)
        self.first = nn.Conv3d(4, 4, 3, padding=1)
        self.second = nn.Conv3d(4, 4, 3, padding=1)
        self.last = nn.Conv3d(4, 2, 3, padding=1)
        self.head = nn.Conv3d(4, 2, 1)
        self.norms = nn.ModuleList(nn.InstanceNorm3d(4, affine=True) for _ in range(3))

    def forward(self, image: Tensor) -> Tensor:
        """Return logits N 2 D H W."""
        shortcut = torch.relu(self.norms[0](self.stem(image)))
        inner = torch.relu(self.norms[1](self.first(shortcut)))
        total = torch.relu(self.norms[2](self.second(inner)) + shortcut)
        logits: Tensor = self.last(total) + self.head(total)
        return logits


def kinds_of(seed: int, image: Tensor) -> Counter[str]:
    """Return how often a drawn schedule takes each of the ways that save a map."""
    with drawn_schedules(seed, tiles=8):
        program = schedules_of(Recomputed(Residual().double().train())).program(image)
    sends: Counter[int] = Counter()
    kinds: Counter[str] = Counter()
    for step in program.schedule.instructions:
        if isinstance(step, Backward):
            sends[step.map] += 1
            kinds["in parts"] += sends[step.map] > 1
            kinds["over gradient"] += step.is_two_pass and any(target.place == "gradient" for target in step.targets)
        if isinstance(step, Compute) and step.inplace_on is not None:
            is_convolution = program.maps.maps[step.map].value.op == "conv3d"
            kinds["over source"] += is_convolution
    return kinds


@pytest.fixture
def little_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the stem and the sum count as little work, as in a network of usual size."""
    monkeypatch.setattr("unet3d.recomputing.prepare.CHEAP_STEM", 0.3)
    monkeypatch.setattr("unet3d.recomputing.compiler.TWO_PASS_WORK", 0.3)


@pytest.mark.usefixtures("little_work")
def test_a_residual_block_is_plain() -> None:
    image = torch.randn(1, 1, 16, 5, 4)
    kinds: Counter[str] = Counter()
    with traced_once():
        for seed in SEEDS:
            kinds += kinds_of(seed, image.double())
    assert set(kinds) == {"in parts", "over gradient", "over source"}
    assert_equal(Residual(), image, seeds=SEEDS)

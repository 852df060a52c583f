"""Maps that backward reads and that are not there, gradients written over others: every way, and its bytes."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from equality import assert_equal, drawn_schedules, traced_once
from torch import Tensor, nn

from unet3d.memory.ledger import Ledger, most_held
from unet3d.recomputing.compiler import Backward, Compute, NormBackward, Release
from unet3d.recomputing.module import Recomputed, schedules_of
from unet3d.recomputing.program import Program

SEEDS = range(12)
SIZE = (48, 32, 24)
CLOSE = 16 * 2**10  # bytes: statistics, weights of norms


class Branches(nn.Module):
    """Two convolutions of the image, of which one is only added; the sum is joined with what follows, and normalised.

    Statistics of what is joined make it a map, though its rows are copies of others' rows.
    """

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.shortcut = nn.Conv3d(1, width, 3, padding=1)
        self.stem = nn.Conv3d(1, width, 3, padding=1)
        self.first = nn.Conv3d(width, width, 3, padding=1)
        self.second = nn.Conv3d(width, width, 3, padding=1)
        self.down = nn.Conv3d(width, 2 * width, 3, 2, 1)
        self.last = nn.Conv3d(3 * width, width, 3, padding=1)
        self.head = nn.Conv3d(width, 2, 1)
        self.of_stem = nn.InstanceNorm3d(width, affine=True)
        self.of_first = nn.BatchNorm3d(width)
        self.of_second = nn.InstanceNorm3d(width)
        self.of_joined = nn.GroupNorm(2, 3 * width)

    def forward(self, image: Tensor) -> Tensor:
        """Return logits N 2 D H W."""
        shortcut = self.shortcut(image)
        inner = torch.relu(self.of_stem(self.stem(image)))
        inner = torch.relu(self.of_first(self.first(inner)))
        total = torch.relu(self.of_second(self.second(inner))) + shortcut
        low = torch.relu(self.down(total))
        up = nn.functional.interpolate(low, scale_factor=2)
        joined = torch.cat([total, up], 1)
        logits: Tensor = self.head(torch.relu(self.last(self.of_joined(joined))))
        return logits


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


def kinds_of(program: Program) -> Counter[str]:
    """Return how often a schedule takes each of the ways that save a map."""
    kinds: Counter[str] = Counter()
    maps: set[int] = set()
    gradients: set[int] = set()
    sent: set[int] = set()
    for step in program.schedule.instructions:
        match step:
            case Compute(index, over, _):
                kinds["over source"] += over is not None and program.maps.maps[index].value.op == "conv3d"
                maps.discard(-1 if over is None else over)
                maps.add(index)
            case Release(index):
                maps.discard(index)
            case NormBackward(_, through) if through is not None:
                kinds["completed by rows"] += 1
                kinds["completed by rows through rows"] += bool(through)
            case Backward(index, targets, through):
                sources = {target.source for target in targets}
                kinds["sent through rows"] += bool(through)
                kinds["not read"] += bool(sources - maps - set(through))
                kinds["sent on at once"] += any(other > index for other in gradients)
                kinds["in parts"] += index in sent
                kinds["over gradient"] += step.is_two_pass and any(target.place == "gradient" for target in targets)
                sent.add(index)
                maps -= {target.source for target in targets if target.place == "map"}
                gradients.discard(index)
                gradients |= sources
    return +kinds


@pytest.fixture
def thin_stem(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the convolutions of the image count as little work, as in a network of usual width."""
    monkeypatch.setattr("unet3d.recomputing.prepare.CHEAP_STEM", 0.3)


BRANCHES = {"completed by rows", "completed by rows through rows", "sent through rows", "not read", "sent on at once"}


@pytest.mark.usefixtures("thin_stem")
@pytest.mark.parametrize(
    ("make", "ways"), ((Branches, BRANCHES), (Residual, {"in parts", "over gradient", "over source"}))
)
def test_schedules_that_take_each_way_are_plain(
    make: Callable[[], nn.Module], ways: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if make is Residual:  # whose sum is little work, too
        monkeypatch.setattr("unet3d.recomputing.compiler.TWO_PASS_WORK", 0.3)
    image = torch.randn(2, 1, 16, 6, 4)
    kinds: Counter[str] = Counter()
    with traced_once():
        for seed in SEEDS:
            with drawn_schedules(seed, tiles=8):
                kinds += kinds_of(schedules_of(Recomputed(make().double().train())).program(image.double()))
    assert ways <= set(kinds)
    assert_equal(make(), image, seeds=SEEDS)


class _OverLogits(torch.autograd.Function):
    """A loss whose gradient is written over the logits, as that of a training step is."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        ctx.logits = logits.detach()
        return logits.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Tensor:
        gradient: Tensor = ctx.logits
        ctx.logits = None
        return gradient


@pytest.mark.slow
@pytest.mark.usefixtures("thin_stem")
@pytest.mark.parametrize("seed", SEEDS[:4])
def test_the_bytes_are_as_counted(seed: int) -> None:
    torch.manual_seed(0)
    image = torch.randn(1, 1, *SIZE)
    with drawn_schedules(seed, tiles=12, measures=True):
        network = Recomputed(Branches(8).train())
        program = schedules_of(network).program(image)
        _OverLogits.apply(network(image)).backward()
        network.zero_grad(set_to_none=True)
        ledger = Ledger()
        with ledger:
            ledger.count([*network.parameters(), *network.buffers(), image])
            _OverLogits.apply(network(image)).backward()
    assert abs(most_held(ledger.events) - program.peak_bytes) <= CLOSE

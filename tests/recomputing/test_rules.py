"""Each operation that has a rule, and some that have none, between convolutions: as torch computes it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from between import CHANNELS, SHAPES, Operation, check, serves, whole_groups
from equality import assert_equal
from promises import promise
from torch import Tensor, nn

from unet3d.base.errors import UserError
from unet3d.recomputing.rules import RULES, rule
from unet3d.recomputing.rules.pointwise import Pointwise

CONVOLUTIONS = """kernel_size stride padding dilation groups
    1 1 0 1 1
    3 1 1 1 1
    3 1 2 2 4, of each channel
    5 2 2 1 2
    4 3 2 1 1
    1/3/2 1/2/1 0/1/1 1 4
    1 2 0 1 2, with rows that no kernel reads, also behind the last
    1 1 1 1 1, with rows of bias alone
    2 3 3 1 1"""
TRANSPOSED = """kernel_size stride padding output_padding groups dilation
    2 2 0 0 1 1
    4 2 1 0 2 1
    3 2 1 0 1 2
    5 1 2 0 1 1
    1/2/2 1/2/2 0 0 1 1
    3 2 0 1 1 1, with a last row that no kernel reaches
    1 2 0 1 4 1, with rows between kernels
    2 4 1 3 1 1"""


def layers(kind: type[nn.Module], text: str) -> dict[str, nn.Module]:
    """Return a layer for each line, with the settings of the first line."""
    names, *lines = text.splitlines()
    made = {}
    for line in lines:
        words = [tuple(map(int, word.split("/"))) for word in line.partition(",")[0].split()]
        settings: Any = dict(zip(names.split(), (3 * word if len(word) == 1 else word for word in words), strict=True))
        settings["groups"] = settings["groups"][0]
        made[f"{kind.__name__} {line.strip()}"] = kind(CHANNELS, CHANNELS, bias=settings["groups"] != 2, **settings)
    return made


# Whose rows depend on the axis along which they lie.
ALONG_AXES: dict[str, Operation] = {
    **layers(nn.Conv3d, CONVOLUTIONS),
    **layers(nn.ConvTranspose3d, TRANSPOSED),
    **{f"padding {mode}": nn.Conv3d(4, 4, 3, padding=1, padding_mode=mode) for mode in ("reflect", "circular")},
    "padding same": nn.Conv3d(CHANNELS, CHANNELS, 3, padding="same"),
    "instance, tracked": nn.InstanceNorm3d(CHANNELS, affine=True, track_running_stats=True),
    "batch": nn.BatchNorm3d(CHANNELS),
    "batch, slow": nn.BatchNorm3d(CHANNELS, momentum=0.01, affine=False),
    "batch, not tracked": nn.BatchNorm3d(CHANNELS, track_running_stats=False),
    "group": nn.GroupNorm(2, CHANNELS),
    "each channel": nn.GroupNorm(CHANNELS, CHANNELS, affine=False),
    "behind another": nn.Sequential(nn.InstanceNorm3d(CHANNELS), nn.ReLU(inplace=True), nn.BatchNorm3d(CHANNELS)),
    "norm of rows that no tile reads": nn.Sequential(nn.InstanceNorm3d(CHANNELS), nn.ReLU(), nn.MaxPool3d(2)),
    "max": nn.MaxPool3d(2),
    "max, ceil": nn.MaxPool3d(3, ceil_mode=True),
    "max, overlapping": nn.MaxPool3d(3, 2, 1),
    "max, of two axes": nn.MaxPool3d((1, 2, 2)),
    "average, ceil": nn.AvgPool3d(2, ceil_mode=True),
    "average, padded": nn.AvgPool3d(2, 2, (0, 1, 1), count_include_pad=False),
    "average, of all": nn.AdaptiveAvgPool3d(1),
    "nearest": nn.Upsample(scale_factor=(1, 3, 2)),
    "nearest, 2.05": nn.Upsample(scale_factor=2.05),
    **{f"trilinear, {n}": nn.Upsample(scale_factor=n, mode="trilinear") for n in (1.5, 2, 2.05, 3)},
    "trilinear, corners": nn.Upsample(scale_factor=2, mode="trilinear", align_corners=True),
    "numbers of each row": lambda x: x * torch.arange(1, x.shape[4] + 1, dtype=x.dtype),
    "sum": lambda x, y: x + y,
    "weighted difference": lambda x, y: torch.sub(x, y, alpha=0.5),
    "quotient": lambda x, y: x / (y.abs() + 1),
    "gate of each voxel": lambda x, y: x * y.mean(1, keepdim=True).sigmoid(),
    "gate of each channel": lambda x, y: x * y.mean((2, 3, 4), keepdim=True).sigmoid(),
    "gate of each row": lambda x, y: x * y.mean((3, 4), keepdim=True),
    "gate of the batch": lambda x, y: x * y.mean(0, keepdim=True),
    "difference to one channel": lambda x, y: y[:, :1] - x,
    "sum that is read twice": lambda x, y: (x + y) * (x - y),
    "gradients that are one": lambda x, y: x * x.mean(1, keepdim=True) + F.relu(y),
    "joined": lambda x, y: torch.cat([F.relu(x), y], 1),
    "joined along rows": lambda x, y: torch.cat([x, y], -1),
    "joined with itself": lambda x: torch.cat([x, x], 1),
    "in place": lambda x, y: (2 * x).add_(y),
}


@pytest.mark.parametrize("name", ALONG_AXES)
def test_operations_along_any_axis_are_plain(name: str) -> None:
    check(ALONG_AXES[name], axes=(0, 1, 2))


def each_image(x: Tensor) -> list[int]:
    return [len(x), 1, 1, 1, 1]


# Of one map, with a rule: else results would be right, but maps whole.
WITH_RULE: dict[str, Operation] = {
    "relu": nn.ReLU(),
    "leaky relu": nn.LeakyReLU(0.1),
    "prelu": nn.PReLU(),
    "prelu of channels": nn.PReLU(CHANNELS),
    "activations": nn.Sequential(nn.ELU(), nn.SELU(), nn.GELU("tanh"), nn.SiLU(), nn.Mish(), nn.Hardtanh(), nn.Tanh()),
    "bent activations": nn.Sequential(
        nn.CELU(), nn.GELU(), nn.Hardswish(), nn.Softplus(), nn.LogSigmoid(), nn.Softsign()
    ),
    "hard activations": nn.Sequential(nn.ReLU6(), nn.Hardsigmoid()),
    "numbers of each voxel": lambda x: (-x.square()).exp() * x.abs(),
    "in place": nn.Sequential(nn.InstanceNorm3d(4), nn.SiLU(inplace=True), nn.ReLU(inplace=True), nn.Dropout3d(0.1)),
    "softmax": nn.Sequential(nn.Softmax(1), nn.LogSoftmax(4)),
    "dropout": nn.Dropout(0.5),
    "dropout of all": nn.Dropout3d(1.0),
    "drop path": lambda x: x * x.new_empty(each_image(x)).bernoulli_(0.7).div_(0.7),
    "a map twice": lambda x: (x + x) * (x * x) - (x - x),
    "powers": lambda x: x**2 + (x * x + 1).sqrt() * (x * x + 1).rsqrt(),
    "rows": lambda x: F.relu(x[:, :, 1:-1, 1:, :-1])[:, :, -9:, -2:, -3:-1].narrow(2, 1, 4),
    "layout": lambda x: F.leaky_relu(F.dropout(x, 0.5, training=False).contiguous()),
    "padded": lambda x: F.pad(x, (1, 2, -1, 1, 0, 0)),
    "repeated": lambda x: x[:, :1].repeat(1, CHANNELS, 1, 2, 1),
    "sum of channels": lambda x: x * x.sum((1,), keepdim=True) + x.mean(-1, keepdim=True),
    "limited": lambda x: x.clamp(-0.5, 0.5),
    "gate of rows": lambda x: x * x.mean((-1, -2, -3), keepdim=True).sigmoid(),
    "gate of rows and channels": lambda x: x * x.mean((1, 2, 3, 4), keepdim=True),
    "gate of rows and an axis": lambda x: x * x.mean((2, 4), keepdim=True),
    "adaptive pooling": lambda x: x * F.adaptive_avg_pool3d(F.silu(x), 1).sigmoid(),
    "pooling": lambda x: x * F.avg_pool3d(x, x.shape[2:]),
    "gate by sums": lambda x: x * (x.sum((2, 3, 4), keepdim=True) / 100).sigmoid(),
    "norm of rows": lambda x: x * torch.linalg.vector_norm(F.relu(x), dim=(2, 3, 4), keepdim=True),
    "chunk": lambda x: F.leaky_relu(x.chunk(2, 1)[0]),
    "split": lambda x: F.relu(x.split(2, 1)[0]) * x.split(2, 1)[1].sigmoid(),
    "overlapping slices": lambda x: F.relu(x[:, :2]) + F.relu(x[:, 1:3]),
}


@pytest.mark.parametrize("name", WITH_RULE)
def test_operations_with_a_rule_are_plain(name: str) -> None:
    check(WITH_RULE[name])
    assert serves(WITH_RULE[name])


class Embedding(nn.Module):
    """A parameter of numbers for each voxel, or of each channel of a map that is one voxel."""

    def __init__(self, operation: Callable[[Tensor, Tensor], Tensor], shape: tuple[int, ...] = SHAPES[0]) -> None:
        super().__init__()
        self.operation = operation
        self.numbers = nn.Parameter(torch.rand(1, CHANNELS, *shape) + 0.1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the map."""
        return self.operation(x, self.numbers)


class Tokens(nn.Module):
    """A module of maps whose voxels lie in one dimension."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        """Return the map."""
        return self.layer(x.flatten(2)).view(x.shape)


def drawn_before(x: Tensor) -> Tensor:
    """Return a map of numbers between which others are drawn that nothing reads."""
    noise = torch.rand(CHANNELS, 1, 1, 1, dtype=x.dtype)
    F.dropout(x, 0.5)
    return F.dropout(x * noise, 0.5) + torch.randn_like(x)


def changed_behind_dropouts_that_are_off(x: Tensor) -> Tensor:
    """Return a sum with a map that is changed by another name."""
    y = x
    for draw in (F.dropout, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout):
        y = draw(draw(y, 0.0, training=True), 0.5, training=False)
    y.relu_()
    return y + x


def masked(x: Tensor) -> Tensor:
    """Return a product with constants that are written into, as attention in windows makes its mask."""
    mask = torch.zeros(1, 1, 1, 1, x.shape[4], dtype=x.dtype)
    mask[..., 1:3] = 2
    mask[..., 2:] += 1
    return x * mask


OTHERS: dict[str, Operation] = {
    "leaky relu of another sign": nn.LeakyReLU(-0.1),
    "softmax along rows": nn.Softmax(2),
    "gated linear unit": lambda x: F.glu(x, 1),
    "numbers": lambda x: 1 - 2 * x + 3 / (x * x + 1) + 2**x,
    "maximum": lambda x, y: torch.maximum(x, y),
    "each second row": lambda x: x[:, :, ::2, :, ::2],
    "turned": lambda x: x.transpose(2, 4).flip(2),
    "padded along rows": lambda x: F.pad(x, (1, 2, 0, 1, 2, 1), value=0.5),
    "cropped": lambda x: F.pad(x, (-1, 1, 1, -1, 0, -1)),
    "padded by reflection": lambda x: F.pad(x, (1, 2, 0, 0, 0, 0), mode="reflect"),
    "repeated along rows": lambda x: x.repeat(2, 1, 1, 2, 1),
    "spread": lambda x: x[:, :1].expand(-1, CHANNELS, -1, -1, -1),
    "largest channel": lambda x: x * x.amax(1, keepdim=True),
    "masked": lambda x: torch.where(x > 0, x, 0.1 * x) * ((x > 0) & (x < 1)).to(x.dtype),
    "tokens": lambda x: F.dropout(F.layer_norm(x.flatten(2).mT, (CHANNELS,)), 0.5).mT.reshape(x.shape),
    "channels of tokens": lambda x: F.dropout1d(x.flatten(2), 0.5).view(x.shape),
    "batch norm of tokens": Tokens(nn.BatchNorm1d(CHANNELS)),
    "instance norm of tokens": Tokens(nn.InstanceNorm1d(CHANNELS, track_running_stats=True)),
    "sum with a parameter": Embedding(torch.add),
    "quotient by a parameter": Embedding(torch.div),
    "a parameter of the shape of its map": Embedding(lambda x, y: F.adaptive_avg_pool3d(x, 1).relu() + y, (1, 1, 1)),
    "constants that are written into": masked,
    "dropout that is off": changed_behind_dropouts_that_are_off,
    "drop path, rounded down": lambda x: x / 0.7 * (torch.rand(each_image(x), dtype=x.dtype) + 0.7).floor_(),
    "noise": lambda x: x + torch.randn_like(x) * x.mean(1, keepdim=True).exp(),
    "noise of turned maps": lambda x: x + torch.rand_like(x.transpose(1, 4)).transpose(1, 4),
    "noise in place": lambda x: x + torch.empty_like(x).normal_(1, 2),
    "noise in place of a map": lambda x: x + (2 * x).uniform_(),
    "bits": lambda x: x * torch.bernoulli(x.detach(), 0.3),
    "bits of constants": lambda x: x * torch.bernoulli(torch.full(each_image(x), 0.5, dtype=x.dtype)),
    "numbers of channels": lambda x: x * torch.normal(0.0, 1.0, (CHANNELS, 1, 1, 1), dtype=x.dtype),
    "whole numbers": lambda x: x[:, torch.randperm(CHANNELS)] * torch.randint(0, 3, each_image(x)),
    "dropout of turned maps": lambda x: F.dropout(x.transpose(1, 4), 0.5).transpose(1, 4).relu(),
    "several, one after another": drawn_before,
}


@promise(
    "What is seen, what is refused, what runs plain",
    "dropout, drop path, noise as of `randn_like`",
    "drawn once a pass, in plain's order: equal seeds give equal numbers",
)
@pytest.mark.parametrize("name", OTHERS)
def test_other_operations_are_plain(name: str) -> None:
    """Random numbers are drawn once, in the network's order, and as torch draws them for tensors of this layout."""
    check(OTHERS[name])


TO_TWO_DIMENSIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean without dimensions": lambda x: x.mean((2, 3, 4)),
    "flat": lambda x: x.flatten(2).mean(-1),
    "view": lambda x: x.view(*x.shape[:2], -1).sum(2),
    "pooled and flat": lambda x: F.adaptive_avg_pool3d(x, 1).flatten(1),
}


@pytest.mark.parametrize("name", TO_TWO_DIMENSIONS)
def test_excitations_of_two_dimensions_are_computed_from_rows(name: str) -> None:
    """What has no rule is no larger than the means of rows."""

    def excited(x: Tensor) -> Tensor:
        means = TO_TWO_DIMENSIONS[name](x)
        return x * torch.sigmoid(means @ torch.ones(CHANNELS, CHANNELS, dtype=x.dtype))[:, :, None, None, None]

    check(excited, axes=[1])
    (group,) = whole_groups(excited)
    assert max(source.shape.numel() for source in (*group.sources, *group.fused)) <= CHANNELS * SHAPES[0][0]


def test_a_constant_that_changes_after_it_was_read_is_refused() -> None:
    """What is computed of weights is computed before all maps."""

    def changed(x: Tensor) -> Tensor:
        numbers = torch.ones(CHANNELS, 1, 1, 1, dtype=x.dtype)
        y = x + numbers[:]
        numbers.mul_(2)
        return y * numbers

    with pytest.raises(UserError, match=r"was read before.*change a copy"):
        check(changed)


class Named(nn.Module):
    """A parameter that has the name of an operation, of a tensor that is computed from it."""

    def __init__(self) -> None:
        super().__init__()
        self.mul = nn.Parameter(torch.rand(CHANNELS, 1, 1, 1))

    def forward(self, image: Tensor) -> Tensor:
        """Return a map."""
        doubled = self.mul * 2
        return F.conv3d(image, self.mul[:, None].expand(-1, image.shape[1], -1, -1, -1)) + doubled - self.mul


@pytest.mark.parametrize(
    ("network", "tiles"),
    (
        (nn.Sequential(nn.InstanceNorm3d(2, affine=True), nn.Conv3d(2, 3, 3, padding=1)), 8),
        (nn.Sequential(nn.BatchNorm3d(2), nn.Conv3d(2, 3, 3, padding=1)), 8),
        (Named(), 8),
        (nn.Sequential(nn.Conv3d(2, 4, 3, padding=1), nn.Conv3d(4, 4, 1, padding=1), nn.Conv3d(4, 2, 1)), 20),
    ),
    ids=["instance norm of the image", "batch norm of the image", "the name of an operation", "a tile of bias alone"],
)
def test_networks_without_a_map_around_the_operation_are_plain(network: nn.Module, tiles: int) -> None:
    assert_equal(network, torch.randn(2, 2, 9, 5, 4), seeds=[0, 1], tiles=[tiles])


def test_a_rule_is_registered_by_its_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    """The example of docs/extending.md, whether a reader has added it or not."""
    monkeypatch.delitem(RULES, "hardshrink", raising=False)
    assert not serves(nn.Hardshrink())
    monkeypatch.setitem(RULES, "hardshrink", None)  # so that it is forgotten behind the test
    rule("hardshrink")(Pointwise)
    check(nn.Hardshrink())
    assert serves(nn.Hardshrink())

"""Each operation that has a rule, and some that have none, between convolutions: as torch computes it."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from between import ALL, CHANNELS, SHAPES, Between, Operation, check, serves
from equality import assert_equal
from torch import Tensor, nn

from unet3d.base.errors import UserError
from unet3d.recomputing.maps import Maps
from unet3d.recomputing.rules import RULES, rule
from unet3d.recomputing.rules.pointwise import Pointwise
from unet3d.recomputing.trace import trace


@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "dilation", "groups"),
    [
        (1, 1, 0, 1, 1),
        (3, 1, 1, 1, 1),
        (3, 2, 1, 1, 1),
        (3, 1, 2, 2, 4),  # depthwise
        (5, 2, 2, 1, 2),
        (4, 3, 2, 1, 1),
        ((1, 3, 2), (1, 2, 1), (0, 1, 1), 1, 4),
        (1, 2, 0, 1, 2),  # rows that no kernel reads, also behind the last
        (2, 2, 0, 1, 1),
        (1, 1, 1, 1, 1),  # rows of bias alone
        (1, 1, 2, 1, 1),
        (2, 3, 3, 1, 1),
    ],
)
def test_convolutions(kernel: int, stride: int, padding: int, dilation: int, groups: int) -> None:
    check(nn.Conv3d(CHANNELS, CHANNELS, kernel, stride, padding, dilation, groups, bias=groups != 2), axes=ALL)


def test_a_tile_of_bias_alone() -> None:
    """A tile of one row, at either end, that reads no row of its source."""
    network = nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), nn.Conv3d(4, 4, 1, padding=1), nn.Conv3d(4, 2, 1))
    assert_equal(network, torch.randn(1, 1, 9, 4, 4), seeds=[0, 1], tiles=[20])


@pytest.mark.parametrize("mode", ["reflect", "circular", "replicate", "same", "valid"])
def test_padding_of_convolutions(mode: str) -> None:
    if mode in ("same", "valid"):
        check(nn.Conv3d(CHANNELS, CHANNELS, 3, padding=mode))
    else:
        check(nn.Conv3d(CHANNELS, CHANNELS, 3, padding=1, padding_mode=mode))


@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "output_padding", "dilation", "groups"),
    [
        (2, 2, 0, 0, 1, 1),
        (3, 2, 1, 1, 1, 1),
        (4, 2, 1, 0, 1, 2),
        (3, 2, 1, 0, 2, 1),
        (3, 3, 0, 0, 1, 4),
        (5, 1, 2, 0, 1, 1),
        ((1, 2, 2), (1, 2, 2), 0, 0, 1, 1),
        (3, 2, 0, 1, 1, 1),  # a last row that no kernel reaches
        (1, 2, 0, 1, 1, 1),  # rows between kernels
        (2, 4, 1, 3, 1, 1),
    ],
)
def test_transposed_convolutions(
    kernel: int, stride: int, padding: int, output_padding: int, dilation: int, groups: int
) -> None:
    check(
        nn.ConvTranspose3d(CHANNELS, CHANNELS, kernel, stride, padding, output_padding, groups, True, dilation),
        axes=ALL,
    )


NORMS = {
    "instance": nn.InstanceNorm3d(CHANNELS),
    "instance, affine, tracked": nn.InstanceNorm3d(CHANNELS, affine=True, track_running_stats=True),
    "batch": nn.BatchNorm3d(CHANNELS),
    "batch, slow": nn.BatchNorm3d(CHANNELS, momentum=0.01, affine=False),
    "batch, not tracked": nn.BatchNorm3d(CHANNELS, track_running_stats=False),
    "group": nn.GroupNorm(2, CHANNELS),
    "layer": nn.GroupNorm(1, CHANNELS),
    "each channel": nn.GroupNorm(CHANNELS, CHANNELS, affine=False),
    "behind another": nn.Sequential(nn.InstanceNorm3d(CHANNELS, affine=True), nn.ReLU(), nn.BatchNorm3d(CHANNELS)),
    "of rows that no tile reads": nn.Sequential(nn.InstanceNorm3d(CHANNELS), nn.ReLU(), nn.MaxPool3d(2)),
}


@pytest.mark.parametrize("norm", NORMS.values(), ids=[*NORMS])
def test_normalisations(norm: nn.Module) -> None:
    check(norm)


@pytest.mark.parametrize("norm", [nn.InstanceNorm3d(2, affine=True), nn.BatchNorm3d(2), nn.GroupNorm(1, 2)])
def test_a_normalisation_of_the_image(norm: nn.Module) -> None:
    assert_equal(nn.Sequential(norm, nn.Conv3d(2, 3, 3, padding=1)), torch.randn(2, 2, 9, 5, 4), seeds=[0, 1])


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(CHANNELS), nn.InstanceNorm1d(CHANNELS, track_running_stats=True)])
def test_normalisations_of_tokens(norm: nn.Module) -> None:
    """Running statistics change once a pass, however often the map is made."""
    check(Tokens(norm))


class Tokens(nn.Module):
    """A module of maps whose voxels lie in one dimension."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        """Return the map."""
        return self.layer(x.flatten(2)).view(x.shape)


ACTIVATIONS = [
    *(nn.ReLU(), nn.ReLU6(), nn.LeakyReLU(0.1), nn.LeakyReLU(-0.1), nn.PReLU(), nn.PReLU(CHANNELS), nn.ELU()),
    *(nn.CELU(), nn.SELU(), nn.GELU(), nn.GELU("tanh"), nn.SiLU(), nn.Mish(), nn.Sigmoid(), nn.Tanh()),
    *(nn.Softplus(), nn.Softsign(), nn.Hardswish(), nn.Hardsigmoid(), nn.Hardtanh(), nn.LogSigmoid()),
    *(nn.Softmax(1), nn.LogSoftmax(1), nn.Softmax(2), nn.Softmax(4), nn.Dropout(0.5), nn.Dropout3d(0.5)),
    *(nn.Dropout(1.0), nn.Dropout3d(1.0)),
]


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_activations(activation: nn.Module) -> None:
    check(activation, axes=[0])


@pytest.mark.parametrize(
    "activation",
    [nn.ReLU(inplace=True), nn.LeakyReLU(0.1, inplace=True), nn.SiLU(inplace=True), nn.Hardswish(inplace=True)],
    ids=str,
)
def test_activations_in_place(activation: nn.Module) -> None:
    check(nn.Sequential(nn.InstanceNorm3d(CHANNELS), activation))


def each_image(x: Tensor) -> list[int]:
    return [len(x), 1, 1, 1, 1]


def drawn_before(x: Tensor) -> Tensor:
    """Return a map of numbers between which others are drawn that nothing reads."""
    noise = torch.rand(CHANNELS, 1, 1, 1, dtype=x.dtype)
    F.dropout(x, 0.5)
    return F.dropout(x * noise, 0.5) + torch.randn_like(x)


RANDOM = {
    "drop path": lambda x: x * x.new_empty(each_image(x)).bernoulli_(0.7).div_(0.7),
    "drop path, rounded down": lambda x: x / 0.7 * (torch.rand(each_image(x), dtype=x.dtype) + 0.7).floor_(),
    "noise": lambda x: x + torch.randn_like(x) * x.mean(1, keepdim=True).exp(),
    "noise of turned maps": lambda x: x + torch.rand_like(x.transpose(1, 4)).transpose(1, 4),
    "noise in place": lambda x: x + torch.empty_like(x).normal_(1, 2),
    "noise in place of a map": lambda x: x + (2 * x).uniform_(),
    "bits": lambda x: x * torch.bernoulli(x.detach(), 0.3),
    "bits of constants": lambda x: x * torch.bernoulli(torch.full(each_image(x), 0.5, dtype=x.dtype)),
    "numbers of channels": lambda x: x * torch.normal(0.0, 1.0, (CHANNELS, 1, 1, 1), dtype=x.dtype),
    "whole numbers": lambda x: x * torch.randint(0, 3, each_image(x)),
    "an order of channels": lambda x: x[:, torch.randperm(CHANNELS)],
    "dropout of turned maps": lambda x: F.dropout(x.transpose(1, 4), 0.5).transpose(1, 4).relu(),
    "several, one after another": drawn_before,
}


@pytest.mark.parametrize("operation", RANDOM.values(), ids=[*RANDOM])
def test_random_numbers_are_plain(operation: Operation) -> None:
    """They are drawn once, in the network's order, and as torch draws them for tensors of this layout."""
    check(operation, axes=[0])


def test_a_drop_path_has_rules() -> None:
    assert serves(RANDOM["drop path"])


@pytest.mark.parametrize("draw", [F.dropout, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout])
def test_a_dropout_that_is_off_is_its_map(draw: Operation) -> None:
    """So that an operation in place behind it changes the map, too."""

    def changed(x: Tensor) -> Tensor:
        y = draw(draw(x, 0.0, training=True), 0.5, training=False)
        y.relu_()
        return y + x

    check(changed, axes=[0])


def test_a_constant_that_changes_after_it_was_read_is_refused() -> None:
    """What is computed of weights is computed before all maps."""

    def changed(x: Tensor) -> Tensor:
        numbers = torch.ones(CHANNELS, 1, 1, 1, dtype=x.dtype)
        y = x + numbers[:]
        numbers.mul_(2)
        return y * numbers

    with pytest.raises(UserError, match=r"was read before.*change a copy"):
        check(changed, axes=[0])


RESAMPLINGS = {
    "max": nn.MaxPool3d(2),
    "max, ceil": nn.MaxPool3d(3, ceil_mode=True),
    "max, overlapping": nn.MaxPool3d(3, 2, 1),
    "max, of two axes": nn.MaxPool3d((1, 2, 2)),
    "average": nn.AvgPool3d(2),
    "average, ceil": nn.AvgPool3d(2, ceil_mode=True),
    "average, padded": nn.AvgPool3d(2, 2, (0, 1, 1), count_include_pad=False),
    "average, of all": nn.AdaptiveAvgPool3d(1),
    "nearest": nn.Upsample(scale_factor=2),
    "nearest, of two axes": nn.Upsample(scale_factor=(1, 3, 2)),
    "nearest, 2.05": nn.Upsample(scale_factor=2.05),
    "trilinear": nn.Upsample(scale_factor=2, mode="trilinear"),
    "trilinear, 3": nn.Upsample(scale_factor=3, mode="trilinear"),
    "trilinear, 1.5": nn.Upsample(scale_factor=1.5, mode="trilinear"),
    "trilinear, 2.05": nn.Upsample(scale_factor=2.05, mode="trilinear"),
    "trilinear, corners": nn.Upsample(scale_factor=2, mode="trilinear", align_corners=True),
}


@pytest.mark.parametrize("operation", RESAMPLINGS.values(), ids=[*RESAMPLINGS])
def test_resampling(operation: nn.Module) -> None:
    check(operation, axes=ALL)


OF_TWO = {
    "sum": torch.add,
    "difference": torch.sub,
    "weighted sum": lambda x, y: torch.add(x, y, alpha=3),
    "weighted difference": lambda x, y: torch.sub(x, y, alpha=0.5),
    "product": torch.mul,
    "quotient": lambda x, y: x / (y.abs() + 1),
    "gate of each voxel": lambda x, y: x * y.mean(1, keepdim=True).sigmoid(),
    "gate of each channel": lambda x, y: x * y.mean((2, 3, 4), keepdim=True).sigmoid(),
    "gate of each row": lambda x, y: x * y.mean((3, 4), keepdim=True),
    "gate of the batch": lambda x, y: x * y.mean(0, keepdim=True),
    "sum over channels": lambda x, y: x + y.mean((2, 3, 4), keepdim=True),
    "difference to one channel": lambda x, y: y[:, :1] - x,
    "sum that is read twice": lambda x, y: (x + y) * (x - y),
    "gradients that are one": lambda x, y: x * x.mean(1, keepdim=True) + F.relu(y),
    "maximum": torch.maximum,
    "behind one another along rows": lambda x, y: torch.cat([x, y], -1),
    "in place": lambda x, y: (2 * x).add_(y),
}


@pytest.mark.parametrize("operation", OF_TWO.values(), ids=[*OF_TWO])
def test_operations_of_two(operation: Operation) -> None:
    check(operation, inputs=2)


def test_maps_behind_one_another() -> None:
    check(lambda x, y: torch.cat([F.relu(x), y], 1), inputs=2, outputs=2 * CHANNELS)
    check(lambda x: torch.cat([x, x], 1), outputs=2 * CHANNELS)


OF_ONE = {
    "sum with itself": lambda x: x + x,
    "difference to itself": lambda x: x - x,
    "square": lambda x: x * x,
    "numbers": lambda x: 1 - 2 * x + 3 / (x * x + 1),
    "powers": lambda x: x**2 + 2**x,
    "roots": lambda x: (x * x + 1).sqrt() * (x * x + 1).rsqrt(),
    "rows": lambda x: F.relu(x[:, :, 1:-1, 1:, :-1]),
    "last rows": lambda x: x[:, :, -2:, -2:, -3:-1],
    "each second row": lambda x: x[:, :, ::2, :, ::2],
    "narrowed": lambda x: F.relu(x.narrow(2, 1, 2)),
    "identity": lambda x: F.relu(F.dropout(x, 0.5, training=False)),
    "layout": lambda x: F.leaky_relu(x.contiguous()),
    "turned": lambda x: x.transpose(2, 4).flip(2),
    "padded": lambda x: F.pad(x, (1, 2, 0, 1, 2, 1), value=0.5),
    "padded along one axis": lambda x: F.pad(x, (1, 2, 0, 0, 0, 0), mode="reflect"),
    "cropped": lambda x: F.pad(x, (-1, 1, 1, -1, 0, -1)),
    "repeated": lambda x: x[:, :1].repeat(1, CHANNELS, 1, 1, 1),
    "repeated along rows": lambda x: x.repeat(2, 1, 1, 2, 1),
    "spread": lambda x: x[:, :1].expand(-1, CHANNELS, -1, -1, -1),
    "sum of channels": lambda x: x * x.sum((1,), keepdim=True),
    "mean along rows": lambda x: x * x.mean(-1, keepdim=True),
    "largest channel": lambda x: x * x.amax(1, keepdim=True),
    "limited": lambda x: x.clamp(-0.5, 0.5) + x.clamp_min(0),
    "masked": lambda x: x * ((x > 0) & (x < 1)).to(x.dtype),
    "chosen": lambda x: torch.where(x > 0, x, 0.1 * x),
    "tokens": lambda x: F.dropout(F.layer_norm(x.flatten(2).mT, (CHANNELS,)), 0.5).mT.reshape(x.shape),
    "channels of tokens": lambda x: F.dropout1d(x.flatten(2), 0.5).view(x.shape),
}


@pytest.mark.parametrize("operation", OF_ONE.values(), ids=[*OF_ONE])
def test_operations_of_one(operation: Operation) -> None:
    check(operation, axes=[0])


OVER_ALL_ROWS: dict[str, Operation] = {
    "mean": lambda x: x * x.mean((2, 3, 4), keepdim=True).sigmoid(),
    "of dimensions from the last on": lambda x: x * x.mean((-1, -2, -3), keepdim=True),
    "mean of channels, too": lambda x: x * x.mean((1, 2, 3, 4), keepdim=True),
    "mean of two axes": lambda x: x * x.mean((2, 4), keepdim=True),
    "adaptive pooling": lambda x: x * F.adaptive_avg_pool3d(F.silu(x), 1).sigmoid(),
    "pooling": lambda x: x * F.avg_pool3d(x, x.shape[2:]),
    "sum": lambda x: x * (x.sum((2, 3, 4), keepdim=True) / 100).sigmoid(),
    "norm": lambda x: x * torch.linalg.vector_norm(F.relu(x), dim=(2, 3, 4), keepdim=True),
}
TO_TWO_DIMENSIONS: dict[str, Operation] = {
    "mean without dimensions": lambda x: x.mean((2, 3, 4)),
    "flat": lambda x: x.flatten(2).mean(-1),
    "view": lambda x: x.view(*x.shape[:2], -1).sum(2),
    "pooled and flat": lambda x: F.adaptive_avg_pool3d(x, 1).flatten(1),
}


@pytest.mark.parametrize("operation", OVER_ALL_ROWS.values(), ids=[*OVER_ALL_ROWS])
def test_means_over_all_rows_have_a_rule(operation: Operation) -> None:
    check(operation, axes=[0])
    assert serves(operation)


@pytest.mark.parametrize("operation", TO_TWO_DIMENSIONS.values(), ids=[*TO_TWO_DIMENSIONS])
def test_excitations_of_two_dimensions_are_computed_from_rows(operation: Operation) -> None:
    """What has no rule is no larger than the means of rows."""

    def excited(x: Tensor) -> Tensor:
        return x * torch.sigmoid(operation(x) @ torch.ones(CHANNELS, CHANNELS, dtype=x.dtype))[:, :, None, None, None]

    check(excited, axes=[1])
    network = Between(excited, 1, CHANNELS, is_read_again=False).train()
    image = torch.randn(1, 2, *SHAPES[0])
    (group,) = Maps(trace(network, image), axis=2).whole
    assert max(source.shape.numel() for source in (*group.sources, *group.fused)) <= CHANNELS * SHAPES[0][0]


PARTS = {
    "slice": lambda x: F.relu(x[:, :2]),
    "chunk": lambda x: F.leaky_relu(x.chunk(2, 1)[0]),
    "split": lambda x: F.relu(x.split(2, 1)[0]) * x.split(2, 1)[1].sigmoid(),
    "gated linear unit": lambda x: F.glu(x, 1),
    "overlapping slices": lambda x: F.relu(x[:, :2]) + F.relu(x[:, 1:3]),
}


@pytest.mark.parametrize("operation", PARTS.values(), ids=[*PARTS])
def test_parts_of_channels(operation: Operation) -> None:
    """What follows in place must not be written over the map that they are a part of."""
    check(operation, outputs=2)


class Embedding(nn.Module):
    """A parameter of numbers for each voxel."""

    def __init__(self, operation: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.operation = operation
        self.of_shape = nn.ParameterList(torch.rand(1, CHANNELS, *shape) + 0.1 for shape in SHAPES)

    def forward(self, x: Tensor) -> Tensor:
        """Return the map."""
        weight = next(weight for weight in self.of_shape if weight.shape[2:] == x.shape[2:])
        return self.operation(x, weight)


@pytest.mark.parametrize("operation", [torch.add, torch.sub, torch.mul, torch.div])
def test_parameters_of_each_voxel(operation: Callable[[Tensor, Tensor], Tensor]) -> None:
    check(Embedding(operation))


class Named(nn.Module):
    """A parameter that has the name of an operation, of a tensor that is computed from it."""

    def __init__(self) -> None:
        super().__init__()
        self.mul = nn.Parameter(torch.rand(CHANNELS, 1, 1, 1))

    def forward(self, image: Tensor) -> Tensor:
        """Return a map."""
        doubled = self.mul * 2
        return F.conv3d(image, self.mul[:, None].expand(-1, image.shape[1], -1, -1, -1)) + doubled - self.mul


def test_a_parameter_with_the_name_of_an_operation() -> None:
    assert_equal(Named(), torch.randn(1, 2, 9, 5, 4), seeds=[0])


class PooledEmbedding(nn.Module):
    """A parameter of numbers for each channel of a map that is one voxel."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = nn.Parameter(torch.rand(1, CHANNELS, 1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Return the map."""
        return F.relu(F.adaptive_avg_pool3d(x, 1)) + self.numbers


def test_a_parameter_of_the_shape_of_its_map() -> None:
    """Its gradient must not lie in the memory of the map's, which is written over."""
    check(PooledEmbedding(), axes=[0])


def test_constants_of_each_row() -> None:
    check(lambda x: x * torch.arange(1, x.shape[4] + 1, dtype=x.dtype))


def test_constants_that_are_written_into() -> None:
    """As attention in windows makes its mask."""

    def masked(x: Tensor) -> Tensor:
        mask = torch.zeros(1, 1, 1, 1, x.shape[4], dtype=x.dtype)
        mask[..., 1:3] = 2
        mask[..., 2:] += 1
        return x * mask

    check(masked)


@pytest.mark.parametrize(
    "operation",
    [
        nn.Conv3d(CHANNELS, CHANNELS, 3, 2, 1, groups=2),
        nn.ConvTranspose3d(CHANNELS, CHANNELS, 3, 2, 1, 1),
        nn.Sequential(nn.InstanceNorm3d(CHANNELS), nn.LeakyReLU(inplace=True), nn.Dropout3d(0.1)),
        nn.Sequential(nn.BatchNorm3d(CHANNELS), nn.PReLU(), nn.MaxPool3d(2), nn.Upsample(scale_factor=2)),
        nn.Sequential(nn.GroupNorm(2, CHANNELS), nn.SiLU(), nn.AvgPool3d(2), nn.Softmax(1)),
        nn.Upsample(scale_factor=2, mode="trilinear"),
    ],
    ids=str,
)
def test_what_networks_are_made_of_has_rules(operation: nn.Module) -> None:
    """Else their maps would be whole: right, but without a gain."""
    assert serves(operation)


def test_a_rule_is_registered_by_its_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    """The example of docs/extending.md, whether a reader has added it or not."""
    monkeypatch.delitem(RULES, "hardshrink", raising=False)
    assert not serves(nn.Hardshrink())
    monkeypatch.setitem(RULES, "hardshrink", None)  # so that it is forgotten behind the test
    rule("hardshrink")(Pointwise)
    check(nn.Hardshrink(), axes=[0])
    assert serves(nn.Hardshrink())

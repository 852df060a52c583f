"""Operations without a rule, in groups and in parts of them: as torch computes them, and with few maps."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from attention import block, windows
from equality import assert_equal, assert_same, drawn_schedules, run
from torch import Tensor, nn

from unet3d.recomputing.maps import Maps
from unet3d.recomputing.module import Recomputed, schedules_of
from unet3d.recomputing.trace import trace

CHANNELS = 8
SIZE = (8, 4, 4)


class Tokens(nn.Module):
    """An operation on tokens N L C between convolutions."""

    def __init__(self, operation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first = nn.Conv3d(1, CHANNELS, 3, padding=1)
        self.operation = operation
        self.last = nn.Conv3d(CHANNELS, 2, 3, padding=1)

    def forward(self, image: Tensor) -> Tensor:
        """Return logits."""
        maps = self.first(image)
        tokens = self.operation(maps.flatten(2).transpose(1, 2))
        logits: Tensor = self.last(tokens.transpose(1, 2).reshape(maps.shape))
        return logits


class Parts(nn.Module):
    """A function of tokens and three parts of channels: of a layer, or of a table of positions."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.qkv = nn.Linear(CHANNELS, 3 * CHANNELS)
        self.table = nn.Parameter(torch.randn(128, CHANNELS))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        """Return the tokens."""
        return self.function(x, self.qkv(x), self.table)


def heads(qkv: Tensor) -> Tensor:
    """Return queries, keys and values of four heads behind one another."""
    return qkv.unflatten(2, (3, 4, -1)).permute(2, 0, 3, 1, 4)


def by_einsum(x: Tensor, qkv: Tensor, table: Tensor) -> Tensor:
    q, k, v = heads(qkv).unbind(0)
    scores = torch.einsum("nhid,nhjd->nhij", q, k) + table[:4, :1, None]
    return torch.einsum("nhij,nhjd->nhid", scores.softmax(dim=-1), v).transpose(1, 2).flatten(2)


def by_matmul(x: Tensor, qkv: Tensor, table: Tensor) -> Tensor:
    q, k, v = (part.unflatten(2, (4, -1)).transpose(1, 2) for part in qkv.chunk(3, -1))
    return (torch.matmul(q, k.transpose(2, 3)) * table[:4, :1, None]).softmax(3).matmul(v).transpose(1, 2).flatten(2)


def by_one_call(x: Tensor, qkv: Tensor, table: Tensor) -> Tensor:
    q, k, v = heads(qkv)
    return F.scaled_dot_product_attention(q, k, v + table[:4, :1, None]).transpose(1, 2).flatten(2)


def rotary(halves: Callable[[Tensor], tuple[Tensor, ...]]) -> Callable[..., Tensor]:
    """Return a function that turns each half of the channels by numbers of the table, which is taken apart."""

    def turned(x: Tensor, qkv: Tensor, table: Tensor) -> Tensor:
        sine, cosine = halves(table.sin())
        first, second = x.unflatten(2, (2, -1)).unbind(2)
        return torch.cat([first * cosine - second * sine, second * cosine + first * sine], 2).cumsum(1)

    return turned


def with_shared_terms(x: Tensor, qkv: Tensor, table: Tensor) -> Tensor:
    """Return a sum to whose terms one parameter is added."""
    return ((x + table) + (F.silu(qkv)[..., :CHANNELS] + table)).tanh()


class Normed(nn.Module):
    """A batch norm of tokens, which updates running statistics, and a layer that runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(CHANNELS)
        self.layer = nn.utils.parametrizations.weight_norm(nn.Linear(CHANNELS, CHANNELS))

    def forward(self, x: Tensor) -> Tensor:
        """Return the tokens."""
        y = self.layer(F.silu(self.layer(x)))
        return self.norm(y.transpose(1, 2)).transpose(1, 2).cumsum(1)


class Exits(nn.Module):
    """Tokens that a convolution reads between two layers, and views that both sides read."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv3d(1, CHANNELS, 1)
        self.layers = nn.ModuleList(nn.Linear(CHANNELS, CHANNELS) for _ in range(3))
        self.heads = nn.ModuleList(nn.Conv3d(CHANNELS, 2, 1) for _ in range(2))

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        """Return logits of both heads, and tokens."""
        x = self.first(image).permute(0, 2, 3, 4, 1)
        y = self.layers[0](x)
        z = self.layers[1](y.flip(1)) + x
        tokens = self.layers[2](y[:, ::2])
        return self.heads[0](y.permute(0, 4, 1, 2, 3)), self.heads[1](z.permute(0, 4, 1, 2, 3)), tokens


class Noisy(nn.Module):
    """Attention with all that draws random numbers: each layer, of maps and tokens, and a drop path."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv3d(1, CHANNELS, 3, padding=1)
        self.dropout = nn.Dropout(0.3)
        self.norm = nn.LayerNorm(CHANNELS)
        self.qkv = nn.Linear(CHANNELS, 3 * CHANNELS)
        self.last = nn.Conv3d(CHANNELS, 2, 3, padding=1)

    def forward(self, image: Tensor) -> Tensor:
        """Return logits."""
        maps = self.dropout(F.dropout3d(self.first(image), 0.3))
        tokens = self.dropout(maps.flatten(2).transpose(1, 2))
        q, k, v = heads(self.qkv(self.norm(tokens))).unbind(0)
        self.dropout(q)
        mixed = self.dropout((q @ k.transpose(2, 3)).softmax(-1)) @ v
        mixed = self.dropout(mixed.transpose(1, 2).flatten(2))
        kept = mixed.new_empty(len(mixed), 1, 1).bernoulli_(0.7)
        tokens = tokens + mixed * kept.div_(0.7) + torch.randn_like(mixed) * mixed
        maps = tokens.transpose(1, 2).reshape(maps.shape)
        logits: Tensor = self.last(self.dropout(maps) + maps)
        return logits


class Patches(nn.Module):
    """Patches of the image as tokens, by reshapes: no value is a map N C D H W, but for the image and the logits."""

    def __init__(self, returns_maps: bool) -> None:
        super().__init__()
        self.returns_maps = returns_maps
        self.first = nn.Linear(8, CHANNELS)
        self.blocks = nn.Sequential(nn.LayerNorm(CHANNELS), Parts(by_matmul), nn.Dropout(0.2))
        self.last = nn.Linear(CHANNELS, 8)

    def forward(self, image: Tensor) -> Tensor:
        """Return logits."""
        images, _, d, h, w = image.shape
        patches = image.view(images, d // 2, 2, h // 2, 2, w // 2, 2).permute(0, 1, 3, 5, 2, 4, 6)
        tokens = self.first(patches.reshape(images, -1, 8))
        logits: Tensor = self.last(tokens + self.blocks(tokens))
        return logits.view(image.shape) if self.returns_maps else logits


WIDE = (nn.Linear(CHANNELS, 256), nn.Softmax(-1), nn.Linear(256, CHANNELS))
OPERATIONS: dict[str, Callable[[], nn.Module]] = {
    "views": lambda: Tokens(lambda x: x.view(len(x), 4, -1, CHANNELS).transpose(1, 2).flip(2).reshape(x.shape)),
    "dropout": lambda: Tokens(nn.Sequential(nn.Linear(CHANNELS, 5), nn.Dropout(0.3), nn.Linear(5, CHANNELS))),
    "tokens split into all of them and one": lambda: Tokens(
        nn.Sequential(nn.Unflatten(1, (1, 128)), *WIDE, nn.Flatten(1, 2))
    ),
    "running statistics": lambda: Tokens(Normed()),
    "shared weights": lambda: Tokens(Parts(with_shared_terms)),
    "einsum": lambda: Tokens(Parts(by_einsum)),
    "matmul": lambda: Tokens(Parts(by_matmul)),
    "one call": lambda: Tokens(Parts(by_one_call)),
    "two exits": Exits,
    "a table's halves": lambda: Tokens(Parts(rotary(lambda table: table.chunk(2, -1)))),
    "a table's columns": lambda: Tokens(Parts(rotary(lambda table: table.unflatten(1, (2, -1)).unbind(1)))),
    "random numbers": Noisy,
    "patches": lambda: Patches(returns_maps=True),
    "patches to tokens": lambda: Patches(returns_maps=False),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_groups_are_plain(name: str) -> None:
    torch.manual_seed(0)
    assert_equal(OPERATIONS[name](), torch.randn(2, 1, *SIZE), seeds=[0, 1], tiles=[1, 40])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_random_numbers_of_half_precision(dtype: torch.dtype) -> None:
    """With another seed, results would differ by far more than rounding."""
    torch.manual_seed(0)
    network = Noisy().train()
    image = torch.randn(2, 1, *SIZE)
    results = []
    for passes, seed in ((network, 1), (Recomputed(network), 1), (network, 2)):
        torch.manual_seed(seed)
        with torch.autocast("cpu", dtype):
            results.append(passes(image).detach().float())
    plain, recomputed, other = results
    assert float((recomputed - plain).abs().max()) < 0.1 * float((other - plain).abs().max())


@pytest.mark.parametrize("last", [nn.Conv3d, nn.ConvTranspose3d])
def test_a_convolution_reads_a_group_that_ends_in_float32(last: type[nn.Module]) -> None:
    """Autocast takes a layer norm of half precision to float32, and the convolution behind it to half precision."""
    torch.manual_seed(0)
    network = Tokens(nn.LayerNorm(CHANNELS))
    network.last = last(CHANNELS, 2, 2, 2)
    image = torch.randn(2, 1, *SIZE)
    gradients = []
    for passes in (network.train(), Recomputed(network)):
        with torch.autocast("cpu", torch.bfloat16):
            logits = passes(image)
        gradients.append(torch.autograd.grad(logits.float().square().mean(), [*network.parameters()]))
    for plain, recomputed in zip(*gradients, strict=True):
        assert torch.allclose(plain, recomputed, rtol=0.05, atol=0.02 * float(plain.abs().max()))


@pytest.mark.parametrize("tiles", [1, 30])
def test_windows_are_plain(tiles: int) -> None:
    """In parts of some windows, and all at once; each part has its share of mask and dropout."""
    torch.manual_seed(0)
    network = windows(window=2, dropout=0.2).double().train()
    image = torch.randn(1, 1, 16, 8, 8, dtype=torch.float64)
    plain = run(copy.deepcopy(network), image)
    with drawn_schedules(0, tiles):
        recomputed = Recomputed(network)
        assert_same(run(recomputed, image), plain)
        program = schedules_of(recomputed).program(image)
    most = max(len(program.parts(map_)) for map_ in program.maps.whole)
    assert most > 4 if tiles > 1 else most == 0


def test_a_block_has_few_maps_and_no_mask() -> None:
    """Of two blocks: two of a shortcut each, and what goes into the windows and comes out of them.

    What a mask is made of is derived within the attention, and is no tensor of the whole pass.
    """
    network = nn.Sequential(nn.Conv3d(1, CHANNELS, 1), block(), nn.Conv3d(CHANNELS, 2, 1)).train()
    maps = Maps(trace(network, torch.randn(1, 1, *SIZE)), axis=2)
    assert len(maps.whole) <= 9
    assert any(map_.along is not None and "matmul" in {value.op for value in map_.fused} for map_ in maps.whole)
    assert all(value.op != "softmax" for map_ in maps.maps for value in (map_.value, *map_.sources))
    assert maps.graph.derived
    assert not maps.derived_before

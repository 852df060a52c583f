"""Operations without a rule, in groups and in parts of them: as torch computes them, and with few maps."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from attention import Block, Windows
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


def check(network: nn.Module, images: int = 2, tiles: int = 6) -> None:
    """Compare passes by several schedules with plain's."""
    torch.manual_seed(0)
    assert_equal(network, torch.randn(images, 1, *SIZE), seeds=[0, 1, 3], tiles=[tiles])


def whole_maps(network: nn.Module) -> Maps:
    return Maps(trace(network.train(), torch.randn(1, 1, *SIZE)), axis=2)


@pytest.mark.parametrize("last", [nn.Conv3d, nn.ConvTranspose3d])
def test_a_convolution_reads_a_group_that_ends_in_float32(last: type[nn.Module]) -> None:
    """Autocast takes a layer norm of half precision to float32, and the convolution behind it to half precision."""
    torch.manual_seed(0)
    network = Tokens(nn.LayerNorm(CHANNELS))
    network.last = last(CHANNELS, 2, 2, 2)
    network.train()
    image = torch.randn(2, 1, *SIZE)
    gradients = []
    for passes in (network, Recomputed(network)):
        network.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            logits = passes(image)
        logits.float().square().mean().backward()
        gradients.append([weight.grad.clone() for weight in network.parameters() if weight.grad is not None])
    for plain, recomputed in zip(*gradients, strict=True):
        assert torch.allclose(plain, recomputed, rtol=0.05, atol=0.02 * float(plain.abs().max()))


class Heads(nn.Module):
    """Attention of all tokens, in one of the ways to write it."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.qkv = nn.Linear(CHANNELS, 3 * CHANNELS)
        self.bias = nn.Parameter(torch.randn(4, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Return the tokens."""
        if self.way == "chunk":
            q, k, v = (part.unflatten(2, (4, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        elif self.way == "unbind":
            q, k, v = self.qkv(x).view(len(x), -1, 3, 4, 2).permute(0, 3, 2, 1, 4).unbind(2)
        else:
            q, k, v = self.qkv(x).unflatten(2, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        if self.way in ("einsum", "unbind"):
            scores = torch.einsum("nhid,nhjd->nhij", q, k) + self.bias
            mixed = torch.einsum("nhij,nhjd->nhid", scores.softmax(dim=-1), v)
        elif self.way in ("matmul", "chunk"):
            mixed = (torch.matmul(q, k.transpose(2, 3)) * self.bias).softmax(3).matmul(v)
        else:
            mixed = F.scaled_dot_product_attention(q, k, v + self.bias)
        return mixed.transpose(1, 2).flatten(2)


class Shared(nn.Module):
    """A layer that runs twice in a group, and a parameter that is added to two terms of a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(CHANNELS, CHANNELS)
        self.position = nn.Parameter(torch.randn(2, 128, CHANNELS))

    def forward(self, x: Tensor) -> Tensor:
        """Return the tokens."""
        y = self.layer(F.silu(self.layer(x)))
        return ((x + self.position) + (y + self.position)).tanh()


class Normed(nn.Module):
    """A batch norm of tokens, which updates running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        """Return the tokens."""
        return self.norm(x.transpose(1, 2)).transpose(1, 2).cumsum(1)


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


class Rotary(nn.Module):
    """A table of positions, taken apart: each half of the channels is turned by its numbers."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.table = nn.Parameter(torch.randn(128, CHANNELS))

    def forward(self, x: Tensor) -> Tensor:
        """Return the tokens."""
        if self.way == "unbind":
            sine, cosine = self.table.sin().unflatten(1, (2, -1)).unbind(1)
        elif self.way == "chunk":
            sine, cosine = self.table.chunk(2, -1)
        else:
            sine, cosine = torch.split(self.table, CHANNELS // 2, -1)
        first, second = x.unflatten(2, (2, -1)).unbind(2)
        return torch.cat([first * cosine - second * sine, second * cosine + first * sine], 2).cumsum(1)


class Noisy(nn.Module):
    """Attention with all that draws random numbers: each layer, of maps and tokens, and a drop path."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv3d(1, CHANNELS, 3, padding=1)
        self.of_channels = nn.Dropout3d(0.3)
        self.dropout = nn.Dropout(0.3)
        self.norm = nn.LayerNorm(CHANNELS)
        self.qkv = nn.Linear(CHANNELS, 3 * CHANNELS)
        self.last = nn.Conv3d(CHANNELS, 2, 3, padding=1)

    def forward(self, image: Tensor) -> Tensor:
        """Return logits."""
        maps = self.dropout(self.of_channels(self.first(image)))
        tokens = self.dropout(maps.flatten(2).transpose(1, 2))
        q, k, v = self.qkv(self.norm(tokens)).unflatten(2, (3, 4, -1)).permute(2, 0, 3, 1, 4).unbind(0)
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
        self.blocks = nn.Sequential(nn.LayerNorm(CHANNELS), Heads("matmul"), nn.Dropout(0.2))
        self.last = nn.Linear(CHANNELS, 8)

    def forward(self, image: Tensor) -> Tensor:
        """Return logits."""
        images, _, d, h, w = image.shape
        patches = image.view(images, d // 2, 2, h // 2, 2, w // 2, 2).permute(0, 1, 3, 5, 2, 4, 6)
        tokens = self.first(patches.reshape(images, -1, 8))
        logits: Tensor = self.last(tokens + self.blocks(tokens))
        return logits.view(image.shape) if self.returns_maps else logits


OPERATIONS: dict[str, Callable[[], nn.Module]] = {
    "views": lambda: Tokens(lambda x: x.view(len(x), 4, -1, CHANNELS).transpose(1, 2).flip(2).reshape(x.shape)),
    "dropout": lambda: Tokens(nn.Sequential(nn.Linear(CHANNELS, 5), nn.Dropout(0.3), nn.Linear(5, CHANNELS))),
    "shared weights": lambda: Tokens(Shared()),
    "running statistics": lambda: Tokens(Normed()),
    "weight norm": lambda: Tokens(nn.utils.parametrizations.weight_norm(nn.Linear(CHANNELS, CHANNELS))),
    "einsum": lambda: Tokens(Heads("einsum")),
    "matmul": lambda: Tokens(Heads("matmul")),
    "one call": lambda: Tokens(Heads("call")),
    "chunks": lambda: Tokens(Heads("chunk")),
    "one of several": lambda: Tokens(Heads("unbind")),
    "two exits": Exits,
    "a table's halves": lambda: Tokens(Rotary("chunk")),
    "a table's parts": lambda: Tokens(Rotary("split")),
    "a table's columns": lambda: Tokens(Rotary("unbind")),
    "random numbers": Noisy,
    "patches": lambda: Patches(returns_maps=True),
    "patches to tokens": lambda: Patches(returns_maps=False),
}


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("tiles", [1, 40])
def test_groups_are_plain(name: str, tiles: int) -> None:
    torch.manual_seed(0)
    check(OPERATIONS[name](), tiles=tiles)


def test_tokens_may_be_split_into_all_of_them_and_one() -> None:
    wide = (nn.Linear(CHANNELS, 256), nn.Softmax(-1), nn.Linear(256, CHANNELS))
    check(Tokens(nn.Sequential(nn.Unflatten(1, (1, 128)), *wide, nn.Flatten(1, 2))), images=1, tiles=40)


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


@pytest.mark.parametrize("tiles", [1, 30])
def test_windows_are_plain(tiles: int) -> None:
    """In parts of some windows, and all at once; each part has its share of mask and dropout."""
    torch.manual_seed(0)
    network = Windows(window=2, dropout=0.2).double().train()
    image = torch.randn(1, 1, 16, 8, 8, dtype=torch.float64)
    plain = run(copy.deepcopy(network), image)
    for seed in (0, 3):
        with drawn_schedules(seed, tiles):
            recomputed = Recomputed(copy.deepcopy(network))
            assert_same(run(recomputed, image), plain)
            program = schedules_of(recomputed).program(image.requires_grad_())
            image.requires_grad_(False)
        most = max(len(program.parts(map_)) for map_ in program.maps.whole)
        assert most > 4 if tiles > 1 else most == 0


def test_a_block_has_few_maps() -> None:
    """Two of the perceptron's shortcut and the attention's, and what goes into the windows and comes out of them."""
    maps = whole_maps(nn.Sequential(nn.Conv3d(1, CHANNELS, 1), Block(CHANNELS), nn.Conv3d(CHANNELS, 2, 1)))
    assert len(maps.whole) <= 5
    assert any(map_.along is not None and "matmul" in {value.op for value in map_.fused} for map_ in maps.whole)
    assert all(value.op != "softmax" for map_ in maps.maps for value in (map_.value, *map_.sources))


def test_what_a_mask_is_made_of_is_forgotten() -> None:
    """It is derived within the attention, and is no tensor of the whole pass."""
    maps = whole_maps(nn.Sequential(nn.Conv3d(1, CHANNELS, 1), Block(CHANNELS), nn.Conv3d(CHANNELS, 2, 1)))
    assert maps.graph.derived
    assert not maps.derived_before

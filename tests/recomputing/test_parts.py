"""Parts of forward without gradients, in another precision or of constants, what forward returns, what is refused."""

import copy
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from equality import assert_close, assert_same, drawn_schedules, run
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils._pytree import tree_leaves, tree_structure

from unet3d.base.errors import UserError
from unet3d.recomputing.module import Recomputed


class Parts(nn.Module):
    """A network with a part that a test gives, and with outputs in a structure that a test gives."""

    def __init__(
        self, part: Callable[..., Tensor], structure: Callable[..., Any] = lambda net, image, *maps: maps
    ) -> None:
        super().__init__()
        self.first = nn.Conv3d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm3d(4)
        self.middle = nn.Conv3d(4, 4, 3, padding=1)
        self.mix = nn.Linear(4, 4)
        self.head = nn.Conv3d(4, 2, 1)
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros(()))
        self.part = part
        self.structure = structure

    def forward(self, image: Tensor) -> Any:
        """Return logits, and what the part gives."""
        y = self.first(image)
        z = self.part(self, image, y)
        return self.structure(self, image, self.head(F.relu(self.middle(y + z))), z)


def make(part: Callable[..., Tensor], **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return Parts(part, **options).double().train()


def image() -> Tensor:
    return torch.randn(2, 1, 9, 6, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.fixture(autouse=True)
def any_schedule() -> Iterator[None]:
    """Without a search: these tests hold for each schedule."""
    with drawn_schedules(seed=3, tiles=5):
        yield


def constants(_: Parts, image: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.linspace(0, 1, image.shape[2], dtype=image.dtype).view(1, 1, -1, 1, 1).sin() + 0 * y.shape[0]


def weights(net: Parts, image: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        weight = net.middle.weight / net.middle.weight.norm()
    return F.conv3d(y, weight, padding=1)


def branch(net: Parts, image: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        z: Tensor = net.norm(net.middle(y))
    return z.sigmoid()


def encoder(net: Parts, image: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        z = F.leaky_relu_(net.norm(net.first(image)))
    return F.relu_(z)


def within_autocast(net: Parts, image: Tensor, y: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        with torch.no_grad():
            z = net.middle(y)
        twice: Tensor = z * 2
    return twice


def gradients_within(net: Parts, image: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        z = net.middle(y)
        with torch.enable_grad():
            z = net.norm(z)
        twice: Tensor = z * 2
    return twice


def the_same(net: Parts, image: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        return F.dropout(y, 0.0).contiguous()


def data(net: Parts, image: Tensor, y: Tensor) -> Tensor:
    return F.conv3d(y.data, net.middle.weight.data, padding=1)


def distance(net: Parts, image: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        target = net.norm(net.first(image))
    return F.mse_loss(y, target)


def crop(net: Parts, image: Tensor, y: Tensor) -> Tensor:
    pooled = F.avg_pool3d(y, 3, 1)
    half = (torch.tensor(y.shape)[2:] - torch.tensor(pooled.shape)[2:]) / 2
    return F.pad(pooled, torch.stack((half, half)).t().flip(0).flatten().int().tolist())


def fourier(net: Parts, image: Tensor, y: Tensor) -> Tensor:
    waves = torch.fft.rfftn(y, dim=(2, 3, 4)) * net.norm.weight.view(-1, 1, 1, 1)
    back: Tensor = torch.fft.irfftn(waves, s=y.shape[2:], dim=(2, 3, 4))
    total: Tensor = back + waves.abs().mean()
    return total


def noise(net: Parts, image: Tensor, y: Tensor) -> Tensor:
    drawn = torch.randn_like(y)
    return drawn.mul_(y).add_(net.middle(y)) + drawn


def counter(net: Parts, image: Tensor, y: Tensor) -> Tensor:
    net.calls.add_(1)
    return net.calls * y


def spectral(net: Parts, image: Tensor, y: Tensor) -> Tensor:
    z: Tensor = net.middle(y)
    return z


def spectral_tokens(net: Parts, image: Tensor, y: Tensor) -> Tensor:
    tokens: Tensor = net.mix(y.flatten(2).transpose(1, 2))
    return tokens.transpose(1, 2).reshape(y.shape)


@pytest.mark.parametrize(
    "part",
    [
        *(constants, weights, branch, encoder, within_autocast, gradients_within, the_same, data, distance, crop),
        *(noise, fourier, counter, spectral, spectral_tokens),
    ],
)
def test_parts_are_equal(part: Callable[..., Tensor]) -> None:
    """Gradients are None where plain's are, and buffers are changed once a pass."""
    model = make(part)
    if part in (spectral, spectral_tokens):
        parametrizations.spectral_norm(model.get_submodule("middle" if part is spectral else "mix"))
    network = Recomputed(copy.deepcopy(model))
    for _ in range(2):
        assert_same(run(network, image()), run(model, image()))
        assert network(image())[1].requires_grad is model(image())[1].requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_part_outside_of_mixed_precision(dtype: torch.dtype) -> None:
    """Beside a large number, half precision would lose all."""

    def part(net: Parts, image: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            exact = net.norm(y.float()) + 3000
            return F.conv3d(exact - 3000, net.middle.weight, padding=1)

    model = make(part).float()
    results = []
    for network in (Recomputed(copy.deepcopy(model)), copy.deepcopy(model)):
        with torch.autocast("cpu", dtype):
            outputs = network(image().float())
        assert outputs[1].dtype == torch.float32
        (outputs[0].float().square().mean() + outputs[1].square().mean()).backward()
        results.append((outputs[1].detach(), *(parameter.grad for parameter in network.parameters())))
    for result, expected in zip(*results, strict=True):
        assert (result is None) is (expected is None)
        if result is not None:
            assert_close(result, expected, 0.05)


class Named(NamedTuple):
    """Outputs with names."""

    logits: Tensor
    aux: Tensor | None


STRUCTURES: dict[str, Callable[..., Any]] = {
    "no tensors": lambda net, image, y, z: {"out": y, "aux": None, "count": 3, "share": 0.5, "name": "a", "deep": True},
    "sizes": lambda net, image, y, z: (y, image.shape),
    "named": lambda net, image, y, z: Named(y, None),
    "image": lambda net, image, y, z: (y, image),
    "parameter": lambda net, image, y, z: (y, net.head.weight),
    "of a parameter": lambda net, image, y, z: (y, net.head.weight.square().sum()),
    "constant": lambda net, image, y, z: (y, torch.arange(3)),
    "detached": lambda net, image, y, z: [y, z.detach()],
    "classes": lambda net, image, y, z: (y, y.argmax(1)),
    "the same twice": lambda net, image, y, z: (y, z, y),
}


@pytest.mark.parametrize("structure", STRUCTURES.values(), ids=[*STRUCTURES])
def test_structures_of_outputs(structure: Callable[..., Any]) -> None:
    """What is not computed from the image comes back as it is; what has no gradient in plain has none."""
    plain = make(spectral, structure=structure)
    network = Recomputed(copy.deepcopy(plain))
    x = image().requires_grad_()
    results = [model(x) for model in (network, plain)]
    assert tree_structure(results[0]) == tree_structure(results[1])
    leaves = [tree_leaves(result) for result in results]
    for output, expected in zip(*leaves, strict=True):
        assert type(output) is type(expected)
        if isinstance(output, Tensor):
            assert output.requires_grad is expected.requires_grad
            assert_close(output.detach(), expected.detach(), 1e-12)
        else:
            assert output == expected
        assert (output is x) is (expected is x)
    gradients = []
    for model, outputs in zip((network, plain), leaves, strict=True):
        followed = [output for output in outputs if isinstance(output, Tensor) and output.requires_grad]
        torch.autograd.backward([output.square().sum() for output in followed])
        gradients.append([parameter.grad for parameter in model.parameters()])
    for gradient, expected in zip(*gradients, strict=True):
        assert (gradient is None) is (expected is None)
        if gradient is not None and expected is not None:
            assert_close(gradient, expected, 1e-12)


def mixed(net: Parts, image: Tensor, y: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return (y @ y.transpose(3, 4)).mean() * y


def in_place(net: Parts, image: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        return y.mul_(2)


def number(net: Parts, image: Tensor, y: Tensor) -> Tensor:
    return y * y.mean().item()


def by_numpy(net: Parts, image: Tensor, y: Tensor) -> Tensor:
    return y * float(y.detach().numpy().mean())


def set_data(net: Parts, image: Tensor, y: Tensor) -> Tensor:
    net.head.weight.data = net.head.weight.data * 2
    return y


def clipped(net: Parts, image: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        net.head.weight.clamp_(-1, 1)
    return y


def picked(net: Parts, image: Tensor, y: Tensor) -> Tensor:
    return y[y > 0].mean() * y


def filled(net: Parts, image: Tensor, y: Tensor) -> Tensor:
    z = torch.zeros(y.shape, dtype=y.dtype)
    z[:, 0] = y[:, 0]
    return z


def averaged(net: Parts, image: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        net.calls.mul_(0.9).add_(y.mean())
    return y * net.calls


def into_a_map(net: Parts, image: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        z = y * 2
        torch.mul(y, 3, out=z)
    return z


def inference(net: Parts, image: Tensor, y: Tensor) -> Tensor:
    with torch.inference_mode():
        z: Tensor = net.middle(y)
    return z


LINES = {
    mixed: "turns on torch.autocast",
    in_place: "shares memory",
    number: "takes a number out of a tensor",
    by_numpy: "NumPy",
    set_data: "sets .data",
    clipped: "head.weight is changed by clamp_",
    picked: "depends on the numbers",
    filled: "writes numbers of a map",
    averaged: "writes numbers of a map",
    into_a_map: "writes over a map",
    inference: "inference_mode",
}


@pytest.mark.parametrize(("part", "line"), LINES.items(), ids=[part.__name__ for part in LINES])
def test_parts_that_are_refused_with_their_place(part: Callable[..., Tensor], line: str) -> None:
    lines, first = inspect.getsourcelines(part)
    with pytest.raises(UserError, match=re.escape(line)) as error:
        Recomputed(make(part))(image())
    text = str(error.value)
    assert "\n" not in text
    numbers = range(first, first + len(lines))
    calls = range(1, 1 + len(inspect.getsourcelines(Parts)[0]) + inspect.getsourcelines(Parts)[1])
    assert any(f"{__file__}:{place}" in text for place in numbers) or any(
        f'"{__file__}", line {place}, in' in text for place in (*numbers, *calls)
    )


def test_gradients_that_stay_off_are_refused() -> None:
    def part(net: Parts, image: Tensor, y: Tensor) -> Tensor:
        torch.set_grad_enabled(False)
        return y

    with torch.enable_grad(), pytest.raises(UserError, match="turns gradients off"):
        Recomputed(make(part))(image())


def test_spectral_norm_by_a_hook_is_named() -> None:
    model = make(spectral)
    torch.nn.utils.spectral_norm(model.get_submodule("middle"))
    with pytest.raises(UserError, match=r"middle: torch\.nn\.utils\.spectral_norm .*parametrizations\.spectral_norm"):
        Recomputed(model)(image())


def test_an_output_of_a_class_of_its_own_is_refused() -> None:
    @dataclass
    class Outputs:
        logits: Tensor

    network = Recomputed(make(spectral, structure=lambda net, image, y, z: Outputs(y)))
    with pytest.raises(UserError, match="Outputs; return a tensor"):
        network(image())

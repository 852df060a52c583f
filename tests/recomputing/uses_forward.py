"""Uses of networks whose forward leaves something behind, draws numbers, or calls what a trace cannot carry."""

import functools
import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint
from uses import Block, Net, World, acted, light, made, own, row, table

LOG: list[Any] = []


class Reverse(torch.autograd.Function):
    """The identity, whose gradient is turned."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return the same."""
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """Return the opposite."""
        return -gradient


class Sign(torch.autograd.Function):
    """A sign whose gradient passes straight through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return -1, 0 or 1."""
        return x.sign()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """Return the same."""
        return gradient


def averaged(self: Any, x: Tensor) -> Tensor:
    """Return maps without their mean over passes, which is a buffer that is assigned."""
    self.mean = 0.9 * self.mean + 0.1 * x.detach().mean()
    return x - self.mean


def counted(self: Any, x: Tensor) -> Tensor:
    """Return maps times the number of passes."""
    self.step = self.step + 1
    return x * self.step


def skipped(self: Any, x: Tensor) -> Tensor:
    """Return maps that lay in a list meanwhile."""
    self.skips.append(x)
    return self.skips.pop() * 2


def without_gradient(self: Any, x: Tensor) -> Tensor:
    """Return maps over their largest number and a constant, which have no gradient."""
    with torch.no_grad():
        largest = x.amax() + torch.arange(3.0).sum()
    return x / largest


def in_modes(self: Any, x: Tensor) -> Tensor:
    """Return maps, computed with gradients in any case, and without autocast."""
    with torch.enable_grad(), torch.autocast("cpu", enabled=False):
        return x.tanh()


def path_dropped(self: Any, x: Tensor) -> Tensor:
    """Return maps with a path that is left out of some images."""
    keep = x.new_empty(x.shape[0], 1, 1, 1, 1).bernoulli_(0.5)
    return x + self.block(x) * keep.div_(0.5)


def rotated(self: Any, x: Tensor) -> Tensor:
    """Return maps that are turned by tables, which are parts of a constant and of a parameter."""
    sine, cosine = self.turns.chunk(2)
    one, other = self.gains.unbind(0)
    left, right = x.split(2, 1)
    return torch.cat([left * cosine - right * sine, right * cosine + left * sine], 1) * one + other


def sampled(self: Any, x: Tensor) -> Tensor:
    """Return what a variational autoencoder draws of maps."""
    mean, deviation = x.chunk(2, 1)
    drawn = mean + torch.randn_like(deviation) * (deviation / 2).exp()
    return torch.cat([drawn, mean], 1)


def cropped(self: Any, x: Tensor) -> Tensor:
    """Return a part of maps, whose size a small tensor computes."""
    start = (torch.tensor(x.shape[2:]) - torch.tensor([4, 4, 4])) // 2
    return x[:, :, int(start[0]) :, int(start[1]) :]


def through(act: Callable[[Any, Tensor], Any], self: Any, x: Tensor) -> Tensor:
    """Return maps after something is done with them; what that returns, if anything, is taken in their place."""
    found = act(self, x)
    return found if isinstance(found, Tensor) else x


def fresh(make: Callable[[], dict[str, Any]], module: Any) -> Any:
    """Return the module, with attributes and buffers."""
    for name, value in make().items():
        is_buffer = isinstance(value, Tensor) and name == "mean"
        module.register_buffer(name, value) if is_buffer else setattr(module, name, value)
    return module


def passed(w: World, act: Callable[[Any, Tensor], Any], make: Callable[[], dict[str, Any]] = dict) -> None:
    """Let first maps pass through something, in a network with attributes."""
    w.later.append(LOG.clear)
    acted(w, lambda: fresh(make, own(lambda self, x: self.head(through(act, self, self.encode(x))))))
    w.note(log=LOG)


def in_layer(w: World, act: Callable[[Any, Tensor], Any], make: Callable[[], dict[str, Any]] = dict) -> None:
    """Let maps pass through something in a layer with attributes."""
    network = light()
    network.block = fresh(make, made(type("Layer", (Block,), {"forward": lambda self, x: through(act, self, x)})))
    acted(w, lambda: network)


def with_mean() -> dict[str, Any]:
    """Return a buffer."""
    return {"mean": torch.zeros((), dtype=torch.float64)}


# What is done with maps, and attributes that it needs.
MAPS: dict[str, Any] = {
    "a loss that is kept": (lambda self, x: setattr(self, "aux_loss", x.mean()), "refused: changes aux_loss,"),
    "a count": (counted, lambda: {"step": 0}, "refused: changes step,"),
    "a list of losses": (lambda self, x: self.log.append(x.mean()), lambda: {"log": []}, "refused: changes log,"),
    "the size of the image": (lambda self, x: setattr(self, "size", x.shape[2:]), "refused: changes size,"),
    "a list that is empty again": (skipped, lambda: {"skips": []}),
    "a setting that is set to what it is": (lambda self, x: setattr(self, "gain", 2.0), lambda: {"gain": 2.0}),
    "a buffer that is assigned": (averaged, with_mean, "refused: changes mean,"),
    "a buffer in place by maps": (lambda self, x: x - self.mean.add_(x.detach().mean()), with_mean, "refused: mean"),
    "a buffer that counts": (lambda self, x: (self.mean.add_(1), x)[1], with_mean),
    "a tensor that counts": row(
        lambda self, x: (self.sum.add_(1), x)[1], lambda: {"sum": torch.zeros(1)}, "refused: changes sum,"
    ),
    "a parameter that forward changes": (lambda self, x: self.head.bias.data.mul_(0.9) is None, "refused: bias"),
    "an attribute that forward deletes": row(
        lambda self, x: vars(self).pop("once", None), lambda: {"once": 1}, "refused: once"
    ),
    "a mode that forward sets": (lambda self, x: self.block.train(False), "refused: changes block.*training,"),
    "a global list": (lambda self, x: LOG.append(tuple(x.shape)), "refused: LOG,"),
    "Python's random numbers": (lambda self, x: x * random.random(), "refused: random"),
    "Python's generator": row(
        lambda self, x: x * self.rng.random(), lambda: {"rng": random.Random(1)}, "refused: changes rng,"
    ),
    "NumPy's random numbers": (lambda self, x: x * float(np.random.rand()), "refused: random"),
    "NumPy's generator": row(
        lambda self, x: x * self.rng.random(), lambda: {"rng": np.random.default_rng(1)}, "refused: changes rng,"
    ),
    "torch's random number": lambda self, x: x * torch.rand(1),
    "torch's generator": row(
        lambda self, x: x * torch.rand((), generator=self.rng),
        lambda: {"rng": torch.Generator().manual_seed(3)},
        "refused: generator",
    ),
    "noise of an autoencoder": sampled,
    "dropout, twice": lambda self, x: F.dropout(F.dropout3d(x, 0.5) * 2, 0.3),
    "drop path": path_dropped,
    "rotary tables": row(
        rotated,
        lambda: {
            "turns": torch.linspace(0, 1, 10).view(2, 5).double(),
            "gains": nn.Parameter(torch.tensor([2.0, 3.0]).double()),
        },
    ),
    "an iterator": (lambda self, x: x * next(self.it), lambda: {"it": itertools.count(1)}, "refused: changes it,"),
    "a cache of a function": (lambda self, x: x * self.f(3), lambda: {"f": functools.lru_cache(lambda n: n * 2.0)}),
    "a hook of a tensor": (lambda self, x: x.register_hook(torch.neg), "refused: hook"),
    "a hook of a parameter": (lambda self, x: self.head.weight.register_hook(torch.neg), "refused: hook"),
    "a gradient that is kept": (lambda self, x: (x.retain_grad(), x)[1], "refused: retain|maps|hook"),
    "a turned gradient": (lambda self, x: Reverse.apply(x), "refused: Reverse"),
    "a straight-through sign": (lambda self, x: Sign.apply(x - 1), "refused: Sign"),
    "a straight-through sign by detach": lambda self, x: x + (x.sign() - x).detach(),
    "a checkpoint within": lambda self, x: checkpoint(self.block, x, use_reentrant=False),
    "a reentrant checkpoint within": lambda self, x: checkpoint(self.block, x, use_reentrant=True),
    "no_grad within": without_gradient,
    "enable_grad and autocast within": in_modes,
    "detach of a part": lambda self, x: x - x.detach().mean(),
    "data": lambda self, x: x.data,
    "data in place": (lambda self, x: (x.data.clamp_(max=0.5), x)[1], "refused: shares memory"),
    "a leaf within": (lambda self, x: x.detach().requires_grad_() * 2, "refused: requires_grad"),
    "a gradient within": (lambda self, x: x + torch.autograd.grad(x.square().sum(), x)[0], "refused: grad"),
    "a number of the maps": (lambda self, x: x * float(x.detach().mean()), "refused: numbers of a tensor"),
    "a branch by numbers": (lambda self, x: x if x.mean() > 0 else -x, "refused: traced"),
    "maps as an array": (lambda self, x: x + torch.from_numpy(x.detach().numpy() * 2), "refused: numpy|traced"),
    "in place on a view": (lambda self, x: [x.add_(0), x[:, :2].mul_(2), x][2] * 1, "refused: memory|view"),
    "whether gradients are wanted": lambda self, x: x * 2 if torch.is_grad_enabled() and x.requires_grad else x,
    "whether it is traced": lambda self, x: (
        x if torch.compiler.is_compiling() or torch.compiler.is_exporting() else 2 * x
    ),
    "an error of its own": (lambda self, x: {}["not today"], "refused: not today"),
    "a boolean index": (lambda self, x: x * x[x > 0].mean(), "refused: traced|index|data-dependent"),
    "a crop by small tensors": cropped,
}
IN_LAYER: dict[str, Any] = {
    "a loss that a layer keeps": (lambda self, x: setattr(self, "aux", x.mean()), "refused: changes block.aux,"),
    "a count of a layer": (counted, lambda: {"step": 0}, "refused: changes block.step,"),
    "a buffer of a layer that is assigned": (averaged, with_mean, "refused: changes block.mean,"),
    "a turned gradient in a layer": (lambda self, x: Reverse.apply(self.conv(x)), "refused: Reverse"),
    "a hook of a tensor in a layer": (lambda self, x: x.register_hook(torch.neg), "refused: hook"),
}


def with_spectral_norm() -> Any:
    """Return a network whose block changes buffers by its power iteration."""
    network = light()
    parametrizations.spectral_norm(network.block.conv)
    return network


NETWORKS: dict[str, Any] = {
    "a function on weights": row(
        lambda: own(lambda self, x: F.conv3d(x, Reverse.apply(self.first.weight))[:, :2]), "refused: Reverse"
    ),
    "the image in place": row(
        lambda: own(lambda self, x: self.head(self.encode(x.mul_(2)))), "refused: image|in place|leaf"
    ),
    "the image's copy in place": lambda: own(lambda self, x: self.head(self.encode(x.clone().mul_(2)))),
    "a view of the image in place": row(
        lambda: own(lambda self, x: self.head(self.encode(x.view_as(x).clamp_(-1, 1)))), "refused: image|memory|leaf"
    ),
    "in place after dropout of rate 0": lambda: own(lambda self, x: self.head(F.dropout3d(self.first(x), 0.0).mul_(2))),
    "whether the image wants gradients": lambda: own(
        lambda self, x: self.head(self.encode(x)) * (2 if x.requires_grad else 1)
    ),
    "spectral norm": with_spectral_norm,
    "a norm that is called twice": lambda: own(lambda self, x: self.head(self.norm(self.norm(self.first(x)))), Net),
    "a network without maps": lambda: nn.Sequential(nn.Flatten(), nn.Linear(270, 4)).double(),
    "an identity": (nn.Identity, "refused: image"),
}
FORWARD = table(passed, MAPS) | table(in_layer, IN_LAYER) | table(acted, NETWORKS)

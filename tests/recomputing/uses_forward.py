"""Uses of networks whose forward leaves something behind, draws numbers, or calls what a trace cannot carry."""

import functools
import itertools
import random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint
from uses import Act, Block, Make, Net, World, acted, light, made, own, table

LOG: list[Any] = []
alone = torch.no_grad()  # alone(f)(x) is f(x) without gradients


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


def averaged(self: Any, x: Tensor) -> Tensor:
    """Return maps without their mean over passes, which is a buffer that is assigned."""
    self.mean = 0.9 * self.mean + 0.1 * x.detach().mean()
    return x - self.mean


def counted(self: Any, x: Tensor) -> Tensor:
    """Return maps times the number of passes."""
    self.step = self.step + 1
    return x * self.step


def in_modes(self: Any, x: Tensor) -> Tensor:
    """Return maps, parts of which are computed with gradients in any case, without, and without autocast."""
    with torch.enable_grad(), torch.autocast("cpu", enabled=False):
        x = x.tanh()
        with torch.no_grad():
            constant = self.block(x) / torch.arange(3.0).sum()
            with torch.enable_grad():
                again = self.block(constant)
            constant = constant + 2 * again
    return x * constant


def cropped(self: Any, x: Tensor) -> Tensor:
    """Return a part of maps, whose size and place a small tensor computes, within zeros."""
    half = (torch.tensor(x.shape)[2:] - torch.tensor([4, 4, 4])) / 2
    part = x[:, :, int(half[0]) :, int(half[1]) :]
    return F.pad(part, torch.stack((half, half)).t().flip(0).flatten().int().tolist())


def of_waves(self: Any, x: Tensor) -> Tensor:
    """Return maps by their Fourier transform, of complex numbers."""
    waves = torch.fft.rfftn(x, dim=(2, 3, 4)) * self.first.bias.view(-1, 1, 1, 1)
    return torch.fft.irfftn(waves, s=x.shape[2:], dim=(2, 3, 4)) + waves.abs().mean()


def filled(self: Any, x: Tensor) -> Tensor:
    """Return zeros into which maps are written."""
    zeros = torch.zeros(x.shape, dtype=x.dtype)
    zeros[:, 0] = x[:, 0]
    return zeros


def in_context(context: Make, act: Act) -> Act:
    """Return an act within a context that is entered in forward."""

    def run(self: Any, x: Tensor) -> Any:
        with context():
            return act(self, x)

    return run


def passed(w: World, act: Act, make: Make = dict, in_layer: bool = False) -> None:
    """Let maps pass through something, in a network or a layer with attributes and, of the name `mean`, a buffer.

    What the act returns, if it is a tensor, is taken in the place of the maps.
    """

    def through(self: Any, x: Tensor) -> Tensor:
        found = act(self, x)
        return found if isinstance(found, Tensor) else x

    def forward(self: Any, x: Tensor) -> Tensor:
        return self.head(through(self, self.encode(x)))

    network = own(forward)
    owner = network
    if in_layer:
        network = light()
        owner = network.block = made(type("Layer", (Block,), {"forward": through}))
    for name, value in make().items():
        owner.register_buffer(name, value) if name == "mean" else setattr(owner, name, value)
    w.later.append(LOG.clear)
    acted(w, lambda: network)
    w.note(log=LOG)


def with_mean() -> dict[str, Any]:
    """Return a buffer."""
    return {"mean": torch.zeros((), dtype=torch.float64)}


# What is done with maps, and attributes that it needs.
MAPS = {
    "a loss that is kept": (lambda self, x: setattr(self, "aux_loss", x.mean()), "refused: changes aux_loss,"),
    "a count": (counted, lambda: {"step": 0}, "refused: changes step,"),
    "a list of losses": (lambda self, x: self.log.append(x.mean()), lambda: {"log": []}, "refused: changes log,"),
    "a list that is empty again": (lambda self, x: [self.all.append(x), self.all.pop() * 2][1], lambda: {"all": []}),
    "a setting that is set to what it is": (lambda self, x: setattr(self, "gain", 2.0), lambda: {"gain": 2.0}),
    "a buffer that is assigned": (averaged, with_mean, "refused: changes mean,"),
    "a buffer in place by maps": (lambda self, x: x - self.mean.add_(x.detach().mean()), with_mean, "refused: mean"),
    "a tensor that counts": (
        lambda self, x: self.sum.add_(1) is None,
        lambda: {"sum": torch.zeros(1)},
        "refused: changes sum,",
    ),
    "a buffer that counts": (lambda self, x: x * self.mean.add_(1), with_mean),
    "a parameter that forward changes": (lambda self, x: self.head.bias.data.mul_(0.9) is None, "refused: bias"),
    "a parameter that forward clips": (
        lambda self, x: alone(torch.clamp_)(self.head.weight, -1) is None,
        "refused: head.weight is changed by clamp_.*uses_forward",
    ),
    "a parameter's data that forward sets": (
        lambda self, x: setattr(self.head.weight, "data", self.head.weight.data * 2),
        "refused: uses_forward.*sets .data",
    ),
    "an attribute that forward deletes": (
        lambda self, x: vars(self).pop("once", None),
        lambda: {"once": 1},
        "refused: once",
    ),
    "a mode that forward sets": (lambda self, x: self.block.train(False), "refused: changes block.*training,"),
    "gradients that stay off": (lambda self, x: torch.set_grad_enabled(False), "refused: turns gradients off"),
    "a global list": (lambda self, x: LOG.append(tuple(x.shape)), "refused: LOG,"),
    "Python's random numbers": (lambda self, x: x * random.random(), "refused: random"),
    "NumPy's random numbers": (lambda self, x: x * float(np.random.rand()), "refused: random"),
    "NumPy's generator": (
        lambda self, x: x * self.rng.random(),
        lambda: {"rng": np.random.default_rng(1)},
        "refused: changes rng,",
    ),
    "torch's random number": lambda self, x: x * torch.rand(1),
    "torch's generator": (
        lambda self, x: x * torch.rand((), generator=self.rng),
        lambda: {"rng": torch.Generator().manual_seed(3)},
        "refused: generator",
    ),
    "bits by maps": (lambda self, x: x * torch.bernoulli(x.sigmoid()), "refused: uses_forward"),
    "random slopes": (lambda self, x: F.rrelu(x, training=True), "refused: uses_forward"),
    "an iterator": (lambda self, x: x * next(self.it), lambda: {"it": itertools.count(1)}, "refused: changes it,"),
    "a cache of a function": (lambda self, x: x * self.f(3), lambda: {"f": functools.lru_cache(lambda n: n * 2.0)}),
    "a hook of a tensor": (lambda self, x: x.register_hook(torch.neg), "refused: hook"),
    "a gradient that is kept": (lambda self, x: x.retain_grad(), "refused: retain|maps|hook"),
    "a turned gradient": (lambda self, x: Reverse.apply(x), "refused: Reverse"),
    "a checkpoint within": lambda self, x: checkpoint(self.block, x, use_reentrant=False),
    "a reentrant checkpoint within": lambda self, x: checkpoint(self.block, x, use_reentrant=True),
    "modes within": in_modes,
    "a largest number without a gradient": lambda self, x: x / alone(torch.amax)(x),
    "weights without a gradient": lambda self, x: F.conv3d(x, alone(F.normalize)(self.block.conv.weight), padding=1),
    "a branch without a gradient": lambda self, x: x + F.relu_(alone(self.block)(x)),
    "a distance to what has no gradient": lambda self, x: x * F.mse_loss(x, alone(self.block)(x)),
    "the same map without a gradient": lambda self, x: x * alone(F.dropout)(x, 0.0).contiguous(),
    "detach of a part": lambda self, x: x - x.detach().mean(),
    "data": lambda self, x: x + F.conv3d(x.data, self.block.conv.weight.data, padding=1),
    "data in place": (lambda self, x: [x.data.clamp_(max=0.5), x][1], "refused: shares memory"),
    "numbers written into zeros": (filled, "refused: writes numbers of a map.*uses_forward"),
    "a map as a place for another": (
        lambda self, x: alone(torch.mul)(x, 3, out=alone(torch.mul)(x, 2)),
        "refused: writes over a map.*uses_forward",
    ),
    "autocast within": (
        in_context(lambda: torch.autocast("cpu", torch.bfloat16), lambda self, x: (x @ x.mT).mean() * x),
        "refused: turns on torch.autocast",
    ),
    "inference mode within": (
        in_context(torch.inference_mode, lambda self, x: self.block(x)),
        "refused: uses_forward.*inference_mode",
    ),
    "a leaf within": (lambda self, x: x.detach().requires_grad_() * 2, "refused: requires_grad"),
    "a gradient within": (lambda self, x: x + torch.autograd.grad(x.square().sum(), x)[0], "refused: grad"),
    "a number of the maps": (lambda self, x: x * x.mean().item(), "refused: takes a number.*uses_forward"),
    "a branch by numbers": (lambda self, x: x if x.mean() > 0 else -x, "refused: traced at .*uses_forward"),
    "maps as an array": (lambda self, x: x + torch.from_numpy(x.detach().numpy() * 2), "refused: numpy|traced"),
    "in place on a view": (lambda self, x: [x.add_(0), x[:, :2].mul_(2), x][2] * 1, "refused: memory|view"),
    "whether gradients are wanted": lambda self, x: x * 2 if torch.is_grad_enabled() and x.requires_grad else x,
    "whether it is traced": lambda self, x: (
        x if torch.compiler.is_compiling() or torch.compiler.is_exporting() else 2 * x
    ),
    "an error of its own": (lambda self, x: {}["not today"], "refused: not today"),
    "a boolean index": (lambda self, x: x * x[x > 0].mean(), "refused: depends on the numbers.*uses_forward"),
    "a crop by small tensors": cropped,
    "complex numbers": of_waves,
}
IN_LAYER = {
    "a count of a layer": (counted, lambda: {"step": 0}, "refused: changes block.step,"),
    "a buffer of a layer that is assigned": (averaged, with_mean, "refused: changes block.mean,"),
    "a turned gradient in a layer": (lambda self, x: Reverse.apply(self.conv(x)), dict, "refused: Reverse"),
}


def with_norm(norm: Act) -> Any:
    """Return a network whose block has its weights from a norm of them."""
    network = light()
    norm(network.block.conv)
    return network


# Networks by their forward, or in whole.
FORWARDS = {
    "a function on weights": (lambda self, x: F.conv3d(x, Reverse.apply(self.first.weight))[:, :2], "refused: Reverse"),
    "the image in place": (lambda self, x: self.head(self.encode(x.mul_(2))), "refused: image|in place|leaf"),
    "an attribute of the image": (
        lambda self, x: [setattr(x, "spacing", 2.0), self.head(self.encode(x))][1],
        "refused: sets spacing of the image",
    ),
    "an attribute of logits": (
        lambda self, x: [y := self.head(self.encode(x)), setattr(y, "spacing", 2.0)][0],
        "refused: sets spacing of the image or of an output",
    ),
    "the image's copy in place": lambda self, x: self.head(self.encode(x.clone().mul_(2))),
    "a view of the image in place": (
        lambda self, x: self.head(self.encode(x.view_as(x).clamp_(-1, 1))),
        "refused: image|memory|leaf",
    ),
    "whether the image wants gradients": lambda self, x: self.head(self.encode(x)) * (2 if x.requires_grad else 1),
    "layers that are called twice": lambda self, x: self.head(self.block(self.norm(self.block(self.encode(x))))),
}
NETWORKS = {
    "spectral norm": lambda: with_norm(parametrizations.spectral_norm),
    "spectral norm by a hook": (
        lambda: with_norm(nn.utils.spectral_norm),
        "refused: block.conv: .*parametrizations.spectral_norm",
    ),
    "a network without maps": lambda: nn.Sequential(nn.Flatten(), nn.Linear(270, 4)).double(),
    "an identity": (nn.Identity, "refused: image"),
}
FORWARD = (
    table(passed, MAPS)
    | table(functools.partial(passed, in_layer=True), IN_LAYER)
    | table(lambda w, forward: acted(w, lambda: own(forward, Net)), FORWARDS)
    | table(acted, NETWORKS)
)

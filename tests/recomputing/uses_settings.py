"""Uses of a network whose settings change after the first pass: all that forward can read."""

import functools
import os
import sys
import weakref
from collections.abc import Mapping
from dataclasses import make_dataclass
from enum import Enum
from operator import attrgetter
from types import MappingProxyType, MethodType, SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune
from uses import (
    Act,
    Block,
    Light,
    Make,
    World,
    acted,
    image,
    light,
    made,
    of_class,
    own,
    put,
    scaled,
    table,
    with_dropout,
)

from unet3d.recomputing import module

HERE = sys.modules[__name__]
GAIN = 1.0
FACTORS = [1.0, 3.0]
GETTER = getattr
CONV = "block.conv"
NUMBERS = "refused: depends on the numbers of a tensor"


class Hidden:
    """An object whose number is a property, kept under another name."""

    def __init__(self) -> None:
        self._known = [1.0]

    gain = property(lambda self: self._known[0], lambda self, value: self._known.insert(0, value))


class Called(SimpleNamespace):
    """An object whose special method reads its number and a variable of the module."""

    def __call__(self) -> float:
        """Return the product."""
        return self.gain * FACTORS[0]


def plain() -> Called:
    """Return an object with a number, while the variable of the module is as it was."""
    FACTORS[:] = [1.0, 3.0]
    return Called(gain=1.0)


def tensor(*numbers: float) -> Tensor:
    """Return numbers, or one without a dimension."""
    return torch.tensor(numbers if len(numbers) > 1 else numbers[0], dtype=torch.float64)


def itself(held: Any) -> Any:
    """Return what is held."""
    return held


def first(held: Any) -> Any:
    """Return the first item, or value of a dict."""
    return next(iter(held.values() if isinstance(held, Mapping) else held))


def call(held: Any) -> Any:
    """Call what is held."""
    return held()


def set_gain(held: Any) -> None:
    """Set an object's number."""
    held.gain = 3.0


def closure(gain: float = 1.0) -> tuple[Act, Act]:
    """Return functions that read and set a number."""

    def write(value: float) -> None:
        nonlocal gain
        gain = value

    return lambda: gain, write


def reader(items: list[float]) -> Any:
    """Return a function that reads the first item of a list, and has a default argument."""
    return lambda factor=1.0: items[0] * factor


def holding(held: Any, read: Act) -> Any:
    """Return a network whose forward reads a number or a function of what it holds, and applies it to the image."""

    def forward(self: Any, x: Tensor) -> Tensor:
        found = read(self.kept)
        return self.first(found(x) if callable(found) else x * found)

    return own(forward, kept=held)


def changed(w: World, make: Make, read: Act, change: Act) -> None:
    """Change what a network holds."""
    acted(w, lambda: holding(make(), read), lambda w, net: change(net.kept))


def replaced(w: World, before: Any, after: Any, read: Act) -> None:
    """Put something else in the place of what a network holds."""
    acted(w, lambda: holding(before, read), put(kept=after))


read_gain = attrgetter("gain")
# What the network holds, the number that forward reads of it, and how it is changed.
HELD = {
    "an item of a dict": (lambda: {"gain": 1.0}, first, lambda held: held.update(gain=3.0)),
    "a set": (lambda: {1.0}, sum, lambda held: held.add(2.0)),
    "a dataclass": (make_dataclass("Options", [("gain", float, 1.0)]), read_gain, set_gain),
    "slots": (type("A", (), {"__slots__": ("gain",)}), lambda held: getattr(held, "gain", 1.0), set_gain),
    "an object with a property": (Hidden, read_gain, set_gain),
    "the class of an object": (lambda: type("A", (), {"gain": 1.0})(), read_gain, lambda held: set_gain(type(held))),
    "an item of an array": (lambda: np.ones(3), lambda held: float(held[0]), lambda held: held.fill(3.0)),
    "OmegaConf": (lambda: OmegaConf.create({"a": [1.0]}), lambda held: held.a[0], lambda held: held.a.insert(0, 3.0)),
    "a proxy of a dict": (
        lambda: (d := {"a": 1.0}, MappingProxyType(d)),
        lambda held: held[1]["a"],
        lambda held: held[0].update(a=2.0),
    ),
    "a weak reference": (
        lambda: (p := plain(), weakref.ref(p)),
        lambda held: held[1]().gain,
        lambda held: set_gain(held[0]),
    ),
    "what a special method reads": (plain, call, lambda held: FACTORS.reverse()),
    "the environment": (
        lambda: os.environ.update(GAIN="1"),
        lambda held: float(os.environ["GAIN"]),
        lambda held: os.environ.update(GAIN="3"),
    ),
    "a getter by another name": (plain, lambda held: GETTER(held, "ga" + "in"), set_gain),
    "a closure": (closure, lambda held: held[0](), lambda held: held[1](3.0)),
    "a default argument": (lambda: reader([1.0]), call, lambda held: setattr(held, "__defaults__", (5.0,))),
    "the object of a method": (lambda: plain().__call__, call, lambda held: set_gain(held.__self__)),
    "a tensor in a list": (lambda: [tensor(1)], first, lambda held: held[0].fill_(3)),
    "a tensor by its array": (lambda: tensor(1, 1), lambda held: held[0], lambda held: held.numpy().fill(3)),
    "a tensor read by float": (lambda: tensor(1, 1), lambda held: float(held[0]), lambda held: held.fill_(3), NUMBERS),
}
# What the network holds, what is put in its place, and the number or function that forward takes of it.
REPLACED = {
    "a tuple": ((1.0, 2.0), (2.0, 1.0), first),
    "a tuple for a list": ([1.0], (1.0,), lambda held: 3.0 if isinstance(held, list) else 1.0),
    "NumPy's number": (np.float32(1), np.float32(3), float),
    "a function": (torch.relu, torch.tanh, itself),
    "a partial": (functools.partial(torch.mul, other=2.0), functools.partial(torch.mul, other=3.0), itself),
    "an enum": (*Enum("Mode", {"LOW": 1.0, "HIGH": 3.0}), lambda held: held.value),
}


class Layers(nn.Module):
    """A network of containers of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), nn.ReLU())
        self.blocks = nn.ModuleList([nn.Conv3d(4, 4, 1)])
        self.named = nn.ModuleDict({"a": nn.Conv3d(4, 4, 1)})

    def forward(self, x: Tensor) -> Tensor:
        """Return the last map."""
        for layer in (self.first, *self.blocks, *self.named.values()):
            x = layer(x)
        return x


def freeze(path: str) -> Act:
    """Return an act: a layer is frozen, and no other."""
    return lambda w, net: net.requires_grad_(True).get_submodule(path).requires_grad_(False) is None


def behind_frozen(norm: Make) -> tuple[Make, Act]:
    """Return a network whose norm comes behind a frozen layer, and a step by an image without gradients."""

    def layers() -> nn.Module:
        return nn.Sequential(nn.Conv3d(1, 4, 3).requires_grad_(False), norm(), nn.Conv3d(4, 2, 1))

    return lambda: made(layers), lambda w, net: w.step(net, image())


def take(name: str) -> Act:
    """Return an act: an attribute of the network is deleted."""
    return lambda w, net: delattr(net, name)


def parameter(path: str, make: Act, *names: str) -> Act:
    """Return an act: other parameters, made of the old ones, stand in their places."""

    def act(w: World, net: Any) -> None:
        layer = net.get_submodule(path)
        for name in names or ("weight",):
            setattr(layer, name, nn.Parameter(make(getattr(layer, name).detach())))

    return act


def gained_forward(self: Any, x: Tensor) -> Tensor:
    """Return logits of maps that are multiplied by a number."""
    return self.head(self.encode(x) * self.gain)


def optional(self: Any, x: Tensor) -> Tensor:
    """Return logits, with what was added later."""
    maps = self.encode(x)
    extra = getattr(self, "extra", None)
    return self.head(maps if extra is None else extra(maps) if callable(extra) else maps * extra)


def bent(*names: str) -> Act:
    """Return a method of other layers than before: a tangent of what these give one after another."""
    return lambda self, x: torch.tanh(functools.reduce(lambda x, name: getattr(self, name)(x), reversed(names), x))


def bound(path: str, method: str, *names: str) -> Act:
    """Return an act: an object has a method of its own."""
    return lambda w, net: put(path, **{method: MethodType(bent(*names), net.get_submodule(path))})(w, net)


def with_buffer(mask: Tensor, read: Act = itself) -> Any:
    """Return a network that multiplies by a buffer."""
    network = scaled(lambda net: read(net.mask))
    network.register_buffer("mask", mask)
    return network


def with_lists() -> Any:
    """Return a network with layers and parameters in plain lists."""
    return own(
        lambda self, x: self.head(
            functools.reduce(lambda x, layer: layer(x), self.layers, self.encode(x)) * self.gains[0]
        ),
        layers=[nn.Conv3d(4, 4, 1).double()],
        gains=[nn.Parameter(torch.ones(4, 1, 1, 1).double())],
    )


def change_class(**members: Any) -> Act:
    """Return an act: attributes of the class that the network had before it was wrapped are set."""

    def act(w: World, net: Any) -> None:
        kind = [kind for kind in type(net).__mro__ if kind.__name__ == "Kind"][-1]
        for name, value in members.items():
            setattr(kind, name, value)

    return act


def prune_for_a_while(w: World, net: Any) -> None:
    """Prune a layer, which is refused while a hook applies the mask."""
    prune.l1_unstructured(net.block.conv, "weight", 0.5)
    w.refused(net, "hook")
    prune.remove(net.block.conv, "weight")


def load_doubled(w: World, net: Any) -> None:
    """Load a checkpoint of twice the weights, and one of which each tensor takes the place of the old one."""
    net.load_state_dict({name: value * 2 for name, value in net.state_dict().items()})
    w.step(net)
    net.load_state_dict({name: value * 2 for name, value in net.state_dict().items()}, assign=True)


# A network, and what changes of it after a pass.
CHANGED = {
    "a number for a while": (lambda: scaled(lambda net: getattr(net, "gain", 1.0)), put(gain=3.0), take("gain")),
    "a number of the class": (lambda: of_class(forward=gained_forward, gain=1.0), change_class(gain=3.0)),
    "a property": (lambda: of_class(forward=gained_forward, gain=vars(Hidden)["gain"], _known=[1.0]), put(gain=3.0)),
    "a global number": (lambda: scaled(lambda net: GAIN), lambda w, net: w.patch(HERE, "GAIN", 3.0)),
    "a function of torch": (light, lambda w, net: w.patch(F, "relu", lambda x, inplace=False: torch.tanh(x))),
    "a dilation": (light, put(CONV, dilation=(2, 2, 2), padding=(2, 2, 2))),
    "settings of a norm": (
        made,
        put("norm", eps=0.5),
        put("norm", momentum=0.7),
        put("norm", track_running_stats=False),
    ),
    "a norm in evaluation": (made, lambda w, net: net.norm.eval()),
    "a norm of cumulative statistics, in evaluation": (made, lambda w, net: put(momentum=None)(w, net.norm.eval())),
    "a norm of cumulative statistics": (
        made,
        put("norm", momentum=None),
        "refused: norm: BatchNorm3d with momentum=None .*momentum",
    ),
    "modes that are set layer by layer": (
        lambda: own(lambda self, x: [self.head(self.encode(x))] * (2 if self.training else 1)),
        lambda w, net: (net.eval(), w.forward(net), [put(training=True)(w, layer) for layer in net.modules()]),
    ),
    "a rate of dropout": (with_dropout, put("1", p=0.5)),
    "layers of containers": (
        lambda: made(Layers),
        lambda w, net: net.first.__setitem__(1, nn.Tanh()),
        lambda w, net: net.blocks.append(nn.Tanh()),
        lambda w, net: net.named.update({"b": nn.ELU()}),
        lambda w, net: put("blocks.0", weight=net.named["a"].weight)(w, net),
    ),
    "plain lists of layers and parameters": (
        with_lists,
        lambda w, net: net.layers.append(nn.Tanh()),
        lambda w, net: put(stride=(2, 1, 1))(w, net.layers[0]),
        lambda w, net: net.gains[0].data.fill_(3),
    ),
    "a layer's forward": (light, bound("block", "forward", "conv"), put("block", forward=torch.tanh)),
    "the network's forward": (light, bound("", "forward", "head", "first")),
    "another method": (light, bound("", "encode", "first")),
    "methods of the class": (
        lambda: of_class(forward=Light.forward),
        change_class(encode=bent("first")),
        change_class(forward=bent("head", "first")),
    ),
    "another class of the object": (light, put("block", __class__=type("Other", (Block,), {"forward": bent("conv")}))),
    "weight norm for a while": (
        light,
        lambda w, net: parametrizations.weight_norm(net.block.conv),
        lambda w, net: parametrize.remove_parametrizations(net.block.conv, "weight"),
    ),
    "a layer that is pruned for a while": (light, prune_for_a_while),
    "layers that are frozen in turn": (
        made,
        *(freeze(name) for name in ("first", "norm", "block", "head")),
        lambda w, net: w.step(net, image()),
    ),
    "an instance norm behind what is frozen": behind_frozen(lambda: nn.InstanceNorm3d(4, affine=True)),
    "a batch norm behind what is frozen": behind_frozen(lambda: nn.BatchNorm3d(4)),
    "a group norm behind what is frozen": behind_frozen(lambda: nn.GroupNorm(2, 4)),
    "a parameter of another shape": (light, parameter("head", lambda old: old[:1]), "refused: expected bias"),
    "other parameters": (
        light,
        parameter(CONV, lambda old: 2 * old),
        parameter("head", lambda old: old[:1], "weight", "bias"),
        lambda w, net: setattr(net.first.bias, "data", torch.ones(4).double()),
        put("head", bias=None),
    ),
    "things added to the wrapper": (
        lambda: own(optional),
        lambda w, net: net.register_buffer("extra", torch.full((1,), 3.0)),
        take("extra"),
        lambda w, net: net.register_parameter("extra", nn.Parameter(torch.full((1,), 2.0).double())),
        take("extra"),
        lambda w, net: put(extra=made(Block))(w, net),
    ),
    "a checkpoint": (made, load_doubled),
    "a buffer": (lambda: with_buffer(tensor(1)), lambda w, net: net.mask.fill_(3), put(mask=tensor(1, 2, 3, 4, 5))),
    "a buffer read by float": (lambda: with_buffer(tensor(1), float), NUMBERS),
}


def counted(w: World, *acts: Act) -> None:
    """Train after acts on what forward does not read; a second schedule would be warned of."""
    w.patch(module, "MANY_PROGRAMS", 2)
    acted(w, light, *acts)


COUNTED = {
    "what a loop keeps in the network": (
        lambda w, net: put(steps=0, losses=[])(w, net),
        put(steps=1, last=torch.ones(2)),
        lambda w, net: net.losses.append(1.0),
    ),
    "a setting that is set to what it is": put(CONV, padding=(1, 1, 1)),
}
SETTINGS = table(changed, HELD) | table(replaced, REPLACED) | table(acted, CHANGED) | table(counted, COUNTED)

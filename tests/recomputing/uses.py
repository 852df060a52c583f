"""Uses of a network in loops of people's own: what they leave, on the plain network and on the one that recomputes."""

import copy
import dataclasses
import functools
import io
import random
import re
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from types import FunctionType, MethodType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from equality import difference
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import unet3d
from unet3d.base.errors import UserError

IMAGE = (1, 1, 9, 6, 5)
Act = Callable[..., Any]  # what is done with a network and what belongs to it
Make = Callable[[], Any]
EQUAL, RAISES, REFUSED, PLAIN = "equal", "raises", "refused", "plain"
MACHINERY = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_is_full_backward_hook")
SHARED: dict[Any, tuple[nn.Module, Any, Any]] = {}  # networks by their kind, plain or wrapped


class World:
    """Where a use takes place: it wraps networks or leaves them, and takes note of what can be observed."""

    def __init__(self, wraps: bool) -> None:
        self.wraps = wraps
        self.seen: list[tuple[str, Any]] = []
        self.models: list[nn.Module] = []
        self.later: list[Callable[[], object]] = []
        self.error: Exception | None = None
        self.printed = io.StringIO()
        self.steps = 0

    def wrap(self, model: nn.Module, **options: Any) -> Any:
        """Return the network that the use is about: the model itself, or the one that recomputes."""
        self.models.append(model)
        return unet3d.recompute(model, **options) if self.wraps else model

    def shared(self, kind: Make) -> Any:
        """Return a network that uses of its kind share, in the state in which it began; they change no attributes."""
        key = (kind, self.wraps)
        if key not in SHARED:
            model = made(kind)
            SHARED[key] = model, self.wrap(model), copy.deepcopy(model.state_dict())
        model, net, state = SHARED[key]
        net.load_state_dict(state)
        net.zero_grad()
        self.models = [model]
        return net

    def patch(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute, until the use is over."""
        self.later.append(functools.partial(setattr, owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    def note(self, **what: Any) -> None:
        """Keep what it is now."""
        self.seen.extend((name, snapshot(value)) for name, value in what.items())

    def forward(self, net: nn.Module, *args: Any) -> Any:
        """Return the outputs of a pass, of an ordinary image if none is given, with generators at a known place."""
        self.steps += 1
        seed_all(self.steps)
        outputs = net(*(args or [image()]))
        self.note(outputs=outputs)
        return outputs

    def step(self, net: nn.Module, x: Tensor | None = None, loss: Act | None = None) -> None:
        """Run a training pass with its backward pass, and take note of what both leave."""
        x = image().requires_grad_() if x is None else x
        net.zero_grad()
        outputs = self.forward(net, x)
        (loss or total)(outputs).backward()
        self.note(outputs_after=outputs, image=x)
        self.note_state(net)

    def refused(self, net: nn.Module, words: str) -> None:
        """Expect that the network that recomputes refuses a pass; the plain one has none."""
        seen = len(self.seen)
        if self.wraps:
            with pytest.raises(UserError, match=words):
                net(image())
        del self.seen[seen:]  # by hooks that run before the pass

    def note_state(self, net: nn.Module) -> None:
        """Keep parameters, their gradients and buffers."""
        self.note(parameters=dict(net.named_parameters()), buffers=dict(net.named_buffers()))

    def note_end(self) -> None:
        """Keep what the networks and generators are when the use is over."""
        for model in self.models:
            for path, module in model.named_modules():
                for name, value in vars(module).items():
                    if name not in MACHINERY:
                        self.note(**{f"{path}.{name}": len(value) if name.endswith("_hooks") else value})
            self.note_state(model)
        self.note(torch=torch.get_rng_state(), python=random.getstate(), numpy=np.random.get_state()[1:3])


Use = tuple[Callable[[World], object], str]  # what is done; its outcome, and a pattern of what is said


def table(run: Callable[..., object], rows: Mapping[str, Any]) -> dict[str, Use]:
    """Return uses by their names; a row is what `run` takes, and perhaps a text such as "refused: a pattern"."""
    uses = {}
    for name, row in rows.items():
        *parts, last = row if isinstance(row, tuple) else (row,)
        if not isinstance(last, str):
            parts, last = [*parts, last], EQUAL
        uses[name] = (lambda w, parts=parts: run(w, *parts)), last
    return uses


def check(use: Use) -> None:
    """Carry a use out on the plain network and on the one that recomputes, and compare what is seen."""
    run, expected = use
    expected, _, words = expected.partition(": ")
    found, text = outcome(carried_out(run, wraps=False), carried_out(run, wraps=True))
    assert found == expected, f"{found}: {text}"
    assert re.search(words, text), f"{found}, but the words are: {text}"


def carried_out(run: Callable[[World], object], wraps: bool) -> World:
    """Return the world after a use, with the error that ended it, if any did."""
    world = World(wraps)
    seed_all(0)
    try:
        with redirect_stdout(world.printed), warnings.catch_warnings(), torch.enable_grad():
            warnings.filterwarnings("ignore", ".*(create_graph|Anomaly|torch.jit).*")
            run(world)
    except Exception as error:
        world.error = error
    finally:
        for undo in reversed(world.later):
            undo()
    if world.error is None:
        world.note_end()
    return world


def outcome(plain: World, wrapped: World) -> tuple[str, str]:
    """Return what a use came to, and in words what was refused or raised, or what is different."""
    for expected, result in zip(plain.seen, wrapped.seen, strict=False):
        if text := difference(expected, result):
            return "different", f"{expected[0]}: {text}"
    error, expected_error = wrapped.error, plain.error
    if error is not None and type(error) is not type(expected_error):
        return REFUSED if type(error) in (UserError, RuntimeError) else "crash", f"{type(error).__name__}: {error}"
    if type(error) is not type(expected_error) or (error is None and len(plain.seen) != len(wrapped.seen)):
        return "different", f"plain raises {expected_error!r}, and {len(plain.seen)} things are seen"
    if error is not None:
        is_earlier = len(wrapped.seen) < len(plain.seen)
        return REFUSED if is_earlier else RAISES, str(error)
    ours = [line for line in wrapped.printed.getvalue().splitlines() if line.startswith("recompute")]
    return PLAIN if any("plain" in line for line in ours) else EQUAL, "; ".join(ours)


def snapshot(value: Any, around: tuple[int, ...] = ()) -> Any:
    """Return a tree of tensors and words of what can be seen of a value, so that later changes of it do not matter."""
    if id(value) in around:
        return "itself"
    inner = functools.partial(snapshot, around=(*around, id(value)))
    name = type(value).__name__
    match value:
        case Tensor():
            if type(value) not in (Tensor, nn.Parameter):
                return name  # such as a tensor without data, left by a trace
            is_leaf = value.is_leaf
            return value.detach().clone(), name, value.requires_grad, is_leaf, inner(value.grad) if is_leaf else None
        case float():
            return torch.tensor(value, dtype=torch.float64)
        case np.ndarray():
            return name, inner(value.tolist())
        case Mapping():
            return name, [(str(key), inner(item)) for key, item in list(value.items())]
        case set() | frozenset():
            return name, sorted(map(repr, value))
        case list() | tuple() | deque():
            return name, [inner(item) for item in value]
        case random.Random():
            return name, str(value.getstate())
        case np.random.Generator():
            return name, str(value.bit_generator.state)
        case nn.Module():
            return "a module", inner([dict(value.named_parameters()), dict(value.named_buffers())])
        case FunctionType() | MethodType():
            return "a function"
        case type():
            return "a class"
    return name, inner(vars(value)) if hasattr(value, "__dict__") else repr(value).partition(" at 0x")[0]


# Images, losses and networks


def seed_all(seed: int) -> None:
    """Set all generators."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def image(*shape: int, seed: int = 1) -> Tensor:
    """Return an image N C D H W."""
    return torch.randn(shape or IMAGE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def total(outputs: Any) -> Tensor:
    """Return a loss in which each number of each output has a weight of its own."""
    generator = torch.Generator().manual_seed(6)
    loss = torch.zeros((), dtype=torch.float64)
    leaves = tree_leaves(vars(outputs) if dataclasses.is_dataclass(outputs) else outputs)
    for output in {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}.values():
        if output.requires_grad:
            weights = torch.randn(output.shape, generator=generator, dtype=torch.float64)
            loss = loss + (output * weights).sum() + (output * output).mean()
    return loss


class Block(nn.Module):
    """A convolution and an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv3d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """Return a map of the same size."""
        return F.relu(self.conv(x))


class Light(nn.Module):
    """A small network, quickly traced."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv3d(1, 4, 3, padding=1)
        self.block = Block()
        self.head = nn.Conv3d(4, 2, 1)

    def encode(self, x: Tensor) -> Tensor:
        """Return the first maps."""
        return F.relu(self.first(x))

    def forward(self, x: Tensor) -> Any:
        """Return logits."""
        return self.head(self.block(self.encode(x)))


class Net(Light):
    """A small network with a normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm3d(4)

    def encode(self, x: Tensor) -> Tensor:
        """Return the first maps."""
        return F.relu(self.norm(self.first(x)))


class Two(Net):
    """A network that returns logits and maps before them, which its backward pass needs."""

    def forward(self, x: Tensor) -> Any:
        """Return logits and maps."""
        maps = self.encode(x)
        return self.head(self.block(maps)), maps


def made(kind: Make = Net) -> Any:
    """Return a network in float64; those of one kind have the same weights."""
    torch.manual_seed(0)
    return kind().double().train()


def light() -> Any:
    """Return a network that is quickly traced."""
    return made(Light)


def of_class(*bases: type[nn.Module], **members: Any) -> Any:
    """Return a network of a class of its own, which has the name Kind."""
    return made(type("Kind", bases or (Light,), members))


def own(forward: Act, kind: type[nn.Module] = Light, /, **attributes: Any) -> Any:
    """Return a network with a forward and attributes of its own."""
    network = of_class(kind, forward=forward)
    put(**attributes)(None, network)
    return network


def scaled(number: Act, /, **attributes: Any) -> Any:
    """Return a network that multiplies its first maps by a number, which it reads from its attributes."""
    return own(lambda self, x: self.head(self.first(x) * number(self)), **attributes)


def gained(**attributes: Any) -> Any:
    """Return a network that multiplies its first maps by `self.gain`."""
    return scaled(lambda net: net.gain, **attributes)


def unbiased() -> Any:
    """Return a network whose gradients are all far from zero."""
    return made(lambda: nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv3d(4, 2, 1)))


def with_dropout() -> Any:
    """Return a network with dropout of no number."""
    return made(lambda: nn.Sequential(nn.Conv3d(1, 4, 3), nn.Dropout3d(0.0), nn.Conv3d(4, 2, 1)))


# What is done with a network


def put(path: str = "", /, **values: Any) -> Act:
    """Return an act: attributes of a module are set."""

    def act(w: World, net: Any) -> None:
        for name, value in values.items():
            setattr(net.get_submodule(path), name, value)

    return act


def acted(w: World, make: Make, *acts: Act) -> None:
    """Wrap a network and train it, also after each act; what an act returns as a tuple is noted."""
    net = w.wrap(make())
    w.step(net)
    for act in acts:
        found = act(w, net)
        w.note(found=found if isinstance(found, tuple) else None)
        w.step(net)
    w.step(net)

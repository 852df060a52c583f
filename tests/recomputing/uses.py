"""Uses of a network in loops of people's own: what they leave, on the plain network and on the one that recomputes."""

import copy
import dataclasses
import functools
import io
import random
import re
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stdout
from enum import Enum
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import unet3d
from unet3d.base.errors import UserError

# Of numbers of a type, relative to the largest number of a tensor, or to 1.
CLOSE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.03, torch.float16: 0.01}
IMAGE = (1, 1, 9, 6, 5)
EQUAL, RAISES, REFUSED, PLAIN = "equal", "raises", "refused", "plain"
OURS = re.compile(r"^recompute")  # lines that are printed for the user of recompute, not by the network
MACHINERY = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_is_full_backward_hook")
SHARED: dict[Any, tuple[nn.Module, Any, Any]] = {}  # networks by their kind, plain or wrapped


class Shot(NamedTuple):
    """A tensor at a moment."""

    values: Tensor
    needs_gradient: bool
    is_leaf: bool
    is_parameter: bool
    gradient: Tensor | None


class World:
    """Where a use takes place: it wraps networks or leaves them, and takes note of what can be observed."""

    def __init__(self, wraps: bool) -> None:
        self.wraps = wraps
        self.seen: list[tuple[str, Any]] = []
        self.models: list[nn.Module] = []
        self.later: list[Callable[[], object]] = []
        self.error: Exception | None = None
        self.printed = ""
        self.steps = 0

    def wrap(self, model: nn.Module, **options: Any) -> Any:
        """Return the network that the use is about: the model itself, or the one that recomputes."""
        self.models.append(model)
        return unet3d.recompute(model, **options) if self.wraps else model

    def shared(self, kind: Callable[[], nn.Module]) -> Any:
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

    def forward(self, net: nn.Module, *args: Any, **options: Any) -> Any:
        """Return the outputs of a pass, of an ordinary image if none is given, with generators at a known place."""
        self.steps += 1
        seed_all(self.steps)
        outputs = net(*(args if args or options else [image()]), **options)
        self.note(outputs=outputs)
        return outputs

    def step(self, net: nn.Module, x: Tensor | None = None, loss: Callable[[Any], Tensor] | None = None) -> Any:
        """Run a training pass with its backward pass, take note of what both leave, and return the outputs."""
        x = image().requires_grad_() if x is None else x
        net.zero_grad()
        outputs = self.forward(net, x)
        (total if loss is None else loss)(outputs).backward()
        self.note(outputs_after=outputs, image=x, gradient_of_image=x.grad if x.is_leaf else None)
        self.note_state(net)
        return outputs

    def refused(self, net: nn.Module, words: str) -> None:
        """Expect that the network that recomputes refuses a pass; the plain one has none."""
        seen = len(self.seen)
        if self.wraps:
            with pytest.raises(UserError, match=words):
                net(image())
        del self.seen[seen:]

    def note_state(self, net: nn.Module) -> None:
        """Keep parameters, gradients and buffers by their names."""
        parameters = dict(net.named_parameters())
        gradients = {name: parameter.grad for name, parameter in parameters.items()}
        self.note(parameters=parameters, gradients=gradients, buffers=dict(net.named_buffers()))

    def note_end(self) -> None:
        """Keep what the networks and generators are when the use is over."""
        for model in self.models:
            for path, module in model.named_modules():
                attributes = {name: value for name, value in vars(module).items() if name not in MACHINERY}
                attributes.update({name: len(hooks) for name, hooks in attributes.items() if name.endswith("_hooks")})
                self.note(**{f"{path or 'the network'}: {name}": value for name, value in attributes.items()})
            self.note_state(model)
        self.note(torch=torch.get_rng_state(), python=random.getstate(), numpy=np.random.get_state()[1:3])


class Use(NamedTuple):
    """A line of a table: what is done, its outcome, and a pattern of what is said."""

    run: Callable[[World], object]
    outcome: str
    words: str


def row(*parts: Any) -> tuple[Any, ...]:
    """Return a row of a table."""
    return parts


def table(run: Callable[..., object], rows: Mapping[str, Any]) -> dict[str, Use]:
    """Return uses by their names; a row is what `run` takes, and perhaps a text such as "refused: a pattern"."""
    uses = {}
    for name, row in rows.items():
        parts = row if isinstance(row, tuple) else (row,)
        *parts, text = parts if isinstance(parts[-1], str) else (*parts, EQUAL)
        outcome, _, words = text.partition(": ")
        assert outcome in (EQUAL, RAISES, REFUSED, PLAIN), name
        uses[name] = Use(lambda w, parts=parts: run(w, *parts), outcome, words)
    return uses


def check(use: Use) -> None:
    """Carry a use out on the plain network and on the one that recomputes, and compare what is seen."""
    plain = carried_out(use.run, wraps=False)
    found, text = outcome(plain, carried_out(use.run, wraps=True))
    assert found == use.outcome, f"{found}: {text}"
    assert re.search(use.words, text), f"{found}, but the words are: {text}"


def carried_out(use: Callable[[World], object], wraps: bool) -> World:
    """Return the world after a use, with the error that ended it, if any did."""
    world = World(wraps)
    printed = io.StringIO()
    seed_all(0)
    try:
        with redirect_stdout(printed), warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*(create_graph|Anomaly|torch.jit).*")
            use(world)
    except Exception as error:
        world.error = error
    finally:
        for undo in reversed(world.later):
            undo()
    if world.error is None:
        world.note_end()
    world.printed = printed.getvalue()
    return world


def outcome(plain: World, wrapped: World) -> tuple[str, str]:
    """Return what a use came to, and in words what was refused or raised, or what is different."""
    difference = first_difference(plain, wrapped)
    error = wrapped.error
    if difference:
        return "different", difference
    if error is not None and type(error) is not type(plain.error):
        kind = REFUSED if type(error) in (UserError, RuntimeError) else "crash"
        return kind, f"{type(error).__name__}: {error}"
    if plain.error is not None and error is None:
        return "different", f"plain raises {type(plain.error).__name__}: {plain.error}"
    if len(wrapped.seen) < len(plain.seen):
        return REFUSED, f"earlier than plain: {error}"
    if error is not None:
        return RAISES, str(error)
    ours = [line for line in wrapped.printed.splitlines() if OURS.search(line)]
    return (PLAIN if any("plain" in line for line in ours) else EQUAL), "; ".join(ours)


def first_difference(plain: World, wrapped: World) -> str:
    """Return the first thing that is not as in plain, in words; empty for none as far as the wrapped one came."""
    names = [name for name, _ in plain.seen]
    for place, ((name, expected), (other, result)) in enumerate(zip(plain.seen, wrapped.seen, strict=False)):
        where = f"{name} (number {names[: place + 1].count(name)})"
        if name != other:
            return f"{where} is missing, here is {other}"
        for difference in differences(expected, result, where, largest(expected)):
            return difference
    if wrapped.error is None and plain.error is None and len(plain.seen) != len(wrapped.seen):
        return f"{len(wrapped.seen)} things are seen, plain {len(plain.seen)}"
    return ""


def snapshot(value: Any, around: tuple[int, ...] = ()) -> Any:
    """Return what can be seen of a value, so that later changes of it do not matter."""
    if id(value) in around:
        return "itself"
    around = (*around, id(value))
    if isinstance(value, Tensor):
        if type(value) not in (Tensor, nn.Parameter):
            return type(value).__name__  # such as a tensor without data, left by a trace
        is_parameter = isinstance(value, nn.Parameter)
        gradient = value.grad.detach().clone() if value.is_leaf and value.grad is not None else None
        return Shot(value.detach().clone(), value.requires_grad, value.is_leaf, is_parameter, gradient)
    if isinstance(value, np.ndarray):
        return "array", snapshot(value.tolist(), around) if value.dtype == object else torch.from_numpy(value.copy())
    if isinstance(value, bool | int | float | complex | str | bytes | None | torch.dtype | torch.Size | Enum):
        return value
    name = type(value).__name__
    if isinstance(value, Mapping):
        return name, [(str(key), snapshot(item, around)) for key, item in list(value.items())]
    if isinstance(value, set | frozenset):
        return name, sorted(map(repr, value))
    if isinstance(value, list | tuple | deque):
        return name, [snapshot(item, around) for item in value]
    if isinstance(value, random.Random):
        return name, str(value.getstate())
    if isinstance(value, np.random.Generator):
        return name, str(value.bit_generator.state)
    if isinstance(value, nn.Module):
        return "a module", snapshot([dict(value.named_parameters()), dict(value.named_buffers())], around)
    if isinstance(value, FunctionType | MethodType | type):
        return "a class" if isinstance(value, type) else "a function"
    return name, snapshot(vars(value), around) if hasattr(value, "__dict__") else repr(value).partition(" at 0x")[0]


def differences(expected: Any, result: Any, where: str, scale: float) -> Iterator[str]:
    """Yield in words where two snapshots are not the same; `scale` is the largest number around."""
    if isinstance(expected, Shot) and isinstance(result, Shot):
        for name in ("needs_gradient", "is_leaf", "is_parameter"):
            if getattr(expected, name) != getattr(result, name):
                yield f"{where}: {name} is {getattr(result, name)}, plain {getattr(expected, name)}"
        yield from differences(expected.values, result.values, where, scale)
        yield from differences(expected.gradient, result.gradient, f"the gradient of {where}", scale)
    elif isinstance(expected, Tensor) and isinstance(result, Tensor):
        yield from differences_of_tensors(expected, result, where, scale)
    elif type(expected) is not type(result):
        yield f"{where}: {shortly(result)}, plain {shortly(expected)}"
    elif isinstance(expected, list | tuple):
        if len(expected) != len(result):
            yield f"{where}: {len(result)} items, plain {len(expected)}: {shortly(result)}, plain {shortly(expected)}"
        for place, (one, other) in enumerate(zip(expected, result, strict=False)):
            key = one[0] if isinstance(one, tuple) and one and isinstance(one[0], str) else place
            yield from differences(one, other, f"{where}[{key}]" if isinstance(expected, list) else where, scale)
    elif isinstance(expected, float):
        if not abs(expected - result) <= CLOSE[torch.float64] * max(1, abs(expected)) and expected == expected:
            yield f"{where}: {result}, plain {expected}"
    elif expected != result:
        yield f"{where}: {shortly(result)}, plain {shortly(expected)}"


def differences_of_tensors(expected: Tensor, result: Tensor, where: str, scale: float) -> Iterator[str]:
    """Yield in words how two tensors differ."""
    for name in ("shape", "dtype"):
        if getattr(expected, name) != getattr(result, name):
            yield f"{where}: {name} {getattr(result, name)}, plain {getattr(expected, name)}"
            return
    if not expected.is_floating_point():
        if not torch.equal(expected, result):
            yield f"{where}: other numbers"
        return
    is_same = (expected == result) | (expected.isnan() & result.isnan())
    difference = (expected.double() - result.double()).abs().masked_fill(is_same, 0)
    if not (difference <= CLOSE[expected.dtype] * scale).all():
        yield f"{where}: {float(difference.max()):.2g} off of {float(expected.abs().max()):.2g}"


def largest(tree: Any) -> float:
    """Return the largest number of tensors in a snapshot, or 1."""
    if isinstance(tree, Shot):
        return max(largest(tree.values), largest(tree.gradient))
    if isinstance(tree, Tensor) and tree.is_floating_point() and tree.numel():
        return max(1.0, float(tree.double().nan_to_num(posinf=0, neginf=0).abs().max()))
    return max(map(largest, tree), default=1.0) if isinstance(tree, list | tuple) else 1.0


def shortly(value: Any) -> str:
    """Return a value in a few words."""
    text = f"a tensor {tuple(value.values.shape)}" if isinstance(value, Shot) else repr(value)
    return text if len(text) < 200 else f"{text[:200]} ..."


# Images, losses and networks


def seed_all(seed: int) -> None:
    """Set all generators."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def image(*shape: int, seed: int = 1) -> Tensor:
    """Return an image N C D H W."""
    return torch.randn(shape or IMAGE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def tensors_in(tree: Any) -> list[Tensor]:
    """Return the tensors of outputs of any structure, each once."""
    leaves = tree_leaves(vars(tree) if dataclasses.is_dataclass(tree) else tree)
    return list({id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}.values())


def total(outputs: Any) -> Tensor:
    """Return a loss in which each number of each output has a weight of its own."""
    generator = torch.Generator().manual_seed(6)
    loss = torch.zeros((), dtype=torch.float64)
    for output in tensors_in(outputs):
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


def made(kind: Callable[[], nn.Module] = Net) -> Any:
    """Return a network in float64; those of one kind have the same weights."""
    torch.manual_seed(0)
    return kind().double().train()


def light() -> Any:
    """Return a network that is quickly traced."""
    return made(Light)


def of_class(*bases: type[nn.Module], **members: Any) -> Any:
    """Return a network of a class of its own, which has the name Kind."""
    return made(type("Kind", bases or (Light,), members))


def own(forward: Callable[[Any, Tensor], Any], kind: type[nn.Module] = Light, /, **attributes: Any) -> Any:
    """Return a network with a forward and attributes of its own."""
    network = of_class(kind, forward=forward)
    for name, value in attributes.items():
        setattr(network, name, value)
    return network


def scaled(number: Callable[[Any], Any], /, **attributes: Any) -> Any:
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


def put(path: str = "", /, **values: Any) -> Callable[[World, Any], None]:
    """Return an act: attributes of a module are set."""

    def act(w: World, net: Any) -> None:
        for name, value in values.items():
            setattr(net.get_submodule(path), name, value)

    return act


def acted(w: World, make: Callable[[], Any], *acts: Callable[[World, Any], Any]) -> Any:
    """Wrap a network and train it, also after each act; what an act returns as a tuple is noted."""
    net = w.wrap(make())
    w.step(net)
    for act in acts:
        found = act(w, net)
        w.note(found=found if isinstance(found, tuple) else None)
        w.step(net)
    w.step(net)
    return net

"""Uses of hooks, and of a network's class: methods of its own, copies, states, and what is added to it."""

import copy
import functools
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as everywhere
from uses import (
    Block,
    Light,
    Two,
    World,
    acted,
    gained,
    image,
    light,
    made,
    of_class,
    own,
    put,
    table,
    total,
)

# 1. Hooks

Register = Callable[[World, Any], Any]


def noting(w: World) -> Callable[..., None]:
    """Return a hook that keeps what it is given, and changes nothing."""
    return lambda owner, *given: w.note(hook=(type(owner).__name__, *given))


def counting(w: World) -> Callable[..., None]:
    """Return a hook of all modules, which differ where a network is wrapped."""
    return lambda owner, *given: w.note(hook=len(given))


def doubling(owner: Any, given: Any, out: Any = None) -> Any:
    """Return twice what a hook is given: the first input, or the output."""
    return (2 * given[0],) if not isinstance(out, Tensor) else 2 * out


OF_LAYERS: dict[str, Register] = {
    "a forward hook": lambda w, net: net.block.register_forward_hook(noting(w)),
    "a forward hook with arguments": lambda w, net: net.block.register_forward_hook(noting(w), with_kwargs=True),
    "a forward hook that changes": lambda w, net: net.block.register_forward_hook(doubling),
    "a forward pre-hook": lambda w, net: net.block.register_forward_pre_hook(noting(w)),
    "a forward pre-hook that changes": lambda w, net: net.block.register_forward_pre_hook(doubling),
    "a backward hook": lambda w, net: net.block.register_full_backward_hook(noting(w)),
    "a backward pre-hook": lambda w, net: net.block.register_full_backward_pre_hook(noting(w)),
    "a hook of all modules": lambda w, net: everywhere.register_module_forward_hook(counting(w)),
    "a pre-hook of all modules": lambda w, net: everywhere.register_module_forward_pre_hook(counting(w)),
    "a backward hook of all modules": lambda w, net: everywhere.register_module_full_backward_hook(counting(w)),
}
OF_NETWORK: dict[str, Register] = {
    "a forward hook of the network": lambda w, net: net.register_forward_hook(doubling),
    "a forward pre-hook of the network": lambda w, net: net.register_forward_pre_hook(doubling),
    "a backward hook of the network": lambda w, net: net.register_full_backward_hook(counting(w)),
    "a backward pre-hook of the network": lambda w, net: net.register_full_backward_pre_hook(doubling),
    "a forward hook of the model": lambda w, net: w.models[-1].register_forward_hook(doubling),
}


def hooked(w: World, register: Register, runs: bool) -> None:
    """Add a hook after a pass: it runs, or is refused in training until it is removed."""
    net = w.wrap(light())
    w.step(net)
    handle = register(w, net)
    w.later.append(handle.remove)
    with torch.no_grad():
        w.forward(net)
    w.step(net) if runs else w.refused(net, "hooks would not run")
    handle.remove()
    w.step(net)


def hooked_before(w: World, register: Register) -> None:
    """Add a hook before the network is wrapped."""
    model = light()
    w.models.append(model)
    w.later.append(register(w, model).remove)
    w.models.pop()
    acted(w, lambda: model)


def optimizers_in_hooks(w: World, net: Any) -> None:
    """Let each parameter be optimised once its gradient is there."""
    for parameter in net.parameters():
        optimizer = torch.optim.SGD([parameter], 0.1)
        parameter.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())


def hooks_of_tensors(w: World, net: Any) -> None:
    """Add hooks to parameters and an image."""
    net.head.weight.register_hook(lambda gradient: 2 * gradient)
    net.first.weight.register_post_accumulate_grad_hook(lambda parameter: w.note(hook=parameter.grad))
    x = image().requires_grad_()
    x.register_hook(lambda gradient: w.note(hook=gradient))
    w.step(net, x)


def hooked_output(w: World, kind: Callable[[], nn.Module], place: int) -> None:
    """Add hooks to an output, and to the node that computes it."""
    outputs = w.forward(net := w.wrap(made(kind)))
    output = (outputs if isinstance(outputs, tuple) else (outputs,))[place]
    output.register_hook(lambda gradient: 3 * gradient)
    output.register_hook(lambda gradient: w.note(hook=gradient))
    total(outputs).backward()
    w.note_state(net)


def hooks_of_state(w: World, net: Any) -> tuple[Any, ...]:
    """Add hooks to what is stored and loaded."""
    net.register_state_dict_post_hook(lambda module, state, prefix, _: state.update({f"{prefix}more": 1}))
    net.block.register_state_dict_pre_hook(lambda module, prefix, _: w.note(hook=prefix))
    net.register_load_state_dict_pre_hook(lambda module, state, *_: state.pop("more", None))
    net.block.register_load_state_dict_post_hook(lambda module, keys: w.note(hook=keys.missing_keys))
    return net.state_dict(), str(net.load_state_dict(net.state_dict()))


def hook_of_registration(w: World, net: Any) -> None:
    """Add a hook for each new parameter."""
    hook = everywhere.register_module_parameter_registration_hook(lambda module, name, parameter: w.note(hook=name))
    w.later.append(hook.remove)
    net.head.bias = nn.Parameter(torch.ones(2, dtype=torch.float64))


HOOKS = (
    table(hooked, {name: (register, False) for name, register in OF_LAYERS.items()})
    | table(hooked, {name: (register, True) for name, register in OF_NETWORK.items()})
    | table(
        hooked_before,
        {
            f"{name}, before": (OF_LAYERS[name], "refused: hooks would not run")
            for name in ("a forward hook", "a forward pre-hook", "a backward hook", "a hook of all modules")
        }
        | {f"{name}, before": register for name, register in OF_NETWORK.items() if "of the network" in name},
    )
    | table(
        acted,
        {
            "optimizers in hooks of parameters": (light, optimizers_in_hooks),
            "hooks of parameters and the image": (light, hooks_of_tensors),
            "hooks of the state": (light, hooks_of_state),
            "a hook of registration": (light, hook_of_registration),
        },
    )
    | table(
        hooked_output,
        {
            "a hook of logits": (Light, 0),
            "a hook of logits beside maps": (Two, 0),
            "a hook of an inner output": (Two, 1, "refused: hook of an output"),
        },
    )
)

# 2. The class of the network


class FrozenNorm(Light):
    """A network whose normalisation stays in evaluation, and which says so."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm3d(4)

    def train(self, mode: bool = True) -> Any:
        """Set the mode of all layers but one."""
        super().train(mode)
        self.norm.eval()
        self.trained = mode
        return self

    def forward(self, x: Tensor) -> Any:
        """Return logits."""
        return self.head(self.norm(self.encode(x)))


class Versioned(Light):
    """A network with a state of its own."""

    def state_dict(self, *args: Any, **options: Any) -> Any:
        """Return the state, with a version."""
        return {**super().state_dict(*args, **options), "version": 2}

    def load_state_dict(self, state: Any, *args: Any, **options: Any) -> Any:
        """Take the state, without its version."""
        return super().load_state_dict({key: state[key] for key in state if key != "version"}, *args, **options)

    def get_extra_state(self) -> Any:
        """Return more."""
        return {"epoch": 3}

    def set_extra_state(self, state: Any) -> None:
        """Take more."""
        self.epoch = state["epoch"]


class Delegating(nn.Module):
    """A network that gives attributes of another as its own, and counts what is set."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Light()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        vars(self).setdefault("names", []).append(name)
        super().__setattr__(name, value)

    def forward(self, x: Tensor) -> Any:
        """Return logits."""
        return self.inner(x)


class Tools(Light):
    """A network with methods of all kinds."""

    scale = 2.0
    tiny = classmethod(lambda cls: cls())
    square = staticmethod(lambda x: x * x)
    count = property(lambda self: sum(parameter.numel() for parameter in self.parameters()))

    def __len__(self) -> int:
        return 3

    def __getitem__(self, place: int) -> nn.Module:
        return (self.first, self.block, self.head)[place]

    def __iter__(self) -> Iterator[nn.Module]:
        return iter((self.first, self.block, self.head))

    def __contains__(self, layer: object) -> bool:
        return layer is self.first

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tools)

    def __hash__(self) -> int:
        return 5

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.left = True

    def extra_repr(self) -> str:
        """Return a text."""
        return "tools"


class Small(Light):
    """A network whose slots are its own."""

    __slots__ = ("gain",)

    def forward(self, x: Tensor) -> Any:
        """Return logits."""
        return self.head(self.encode(x) * getattr(self, "gain", 1.0))


class Registry(type):
    """A class of classes that takes note of each class."""

    known: list[str] = []  # noqa: RUF012

    def __init__(cls, name: str, bases: tuple[type, ...], members: dict[str, Any]) -> None:
        super().__init__(name, bases, members)
        cls.known.append(name)


class Around(nn.Module):
    """A network around another."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.stem = made(lambda: nn.Conv3d(1, 1, 3, padding=1))
        self.body = body

    def forward(self, x: Tensor) -> Any:
        """Return what the other returns."""
        return self.body(self.stem(x))


class Picklable(Light):
    """A network with a number, of a class that pickle finds."""

    gain = 1.0

    def forward(self, x: Tensor) -> Any:
        """Return logits."""
        return self.head(self.encode(x) * self.gain)


def used_tools(w: World, net: Any) -> tuple[Any, ...]:
    """Return what methods of a class return."""
    with net as entered:
        assert entered is net
    layers = [type(layer).__name__ for layer in net]
    numbers = (len(net), net.first in net, hash(net), net.scale, net.square(3.0), net.count, net.left)
    return layers, net[0], net.tiny(), net == made(Tools), *numbers


def identified(w: World, net: Any) -> tuple[Any, ...]:
    """Return what a network is, as others see it."""
    kinds = (isinstance(net, Tools), issubclass(type(net), Light), isinstance(net, nn.Sequential), callable(net))
    names = [
        [name for name, _ in found] for found in (net.named_modules(), net.named_children(), net.named_parameters())
    ]
    text = (
        repr(net).partition("(")[2],
        "encode" in dir(net),
        hasattr(net, "missing"),
        type(net).__name__,
        type(net).__doc__,
    )
    return kinds, text, names, [type(layer).__name__ for layer in net.modules()][1:], list(net.state_dict(prefix="a."))


def around(name: str, path: str = "") -> Callable[[World, Any], None]:
    """Return an act: a method of a module is wrapped in another that doubles what it returns."""

    def act(w: World, net: Any) -> None:
        owner = net.get_submodule(path)
        old = getattr(owner, name)
        setattr(owner, name, functools.wraps(old)(lambda *args: 2 * old(*args)))

    return act


def with_buffers() -> Any:
    """Return a network with buffers that a checkpoint holds, and others."""
    model = light()
    model.register_buffer("grid", torch.ones(2), persistent=False)
    model.block.register_buffer("grid", torch.ones(2), persistent=False)
    model.register_buffer("kept", torch.ones(2))
    return model


def states_between(w: World, net: Any) -> tuple[Any, ...]:
    """Return states of the network and of the plain one, each loaded into the other."""
    other = with_buffers()
    found = net.state_dict(), str(other.load_state_dict(net.state_dict())), str(net.load_state_dict(other.state_dict()))
    net.register_buffer("more", torch.ones(2), persistent=False)
    return *found, net.state_dict()


def changed_copy(make: Callable[[Any], Any]) -> Callable[[World, Any], tuple[Any, ...]]:
    """Return an act: a copy is trained, and after changes of a setting and weights once more."""

    def act(w: World, net: Any) -> tuple[Any, ...]:
        other = make(net)
        w.step(other)
        other.gain = 3.0
        with torch.no_grad():
            other.head.bias.mul_(2)
        w.step(other)
        return isinstance(other, nn.Module), other.head.weight is net.head.weight, other.training, net.gain

    return act


def through_file(net: Any) -> Any:
    """Return a network that was saved as a whole."""
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def own_steps(w: World, net: Any) -> None:
    """Train by methods of the network's own that call it."""
    net.training_step(image()).backward()
    total(net.again(image())).backward()
    w.note_state(net)


def knows_the_network() -> Any:
    """Return a network with a layer that reads a number of the whole."""
    model = light()
    model.block = made(type("Knowing", (Block,), {"forward": lambda self, x: self.conv(x) * self.root[0].gain}))
    model.gain = 1.0
    model.block.root = [model]
    return model


def know_the_wrapper(w: World, net: Any) -> None:
    """Let a layer know the network as it is used."""
    net.block.root = [net]
    net.gain = 3.0


def exported(w: World, net: Any) -> tuple[Any, ...]:
    """Return what the exported network returns."""
    found = torch.export.export(net.eval(), (image(),), strict=False).module()(image())
    net.train()
    return (found,)


def wrapped_child(w: World, make: Callable[[], Any]) -> None:
    """Train a network with a child that recomputes, also after changes of the child."""
    net = Around(w.wrap(make()))
    w.step(net)
    net.eval()
    w.forward(net)
    net.train()
    net.body.gain = 3.0
    net.requires_grad_(False)
    net.body.head.requires_grad_(True)
    w.step(net)
    w.note(state=net.state_dict(), names=[name for name, _ in net.named_modules()])


def wrapped_within(w: World) -> None:
    """Wrap a network with a child that is wrapped."""
    acted(w, lambda: Around(w.wrap(light())))


def child_in_place(w: World) -> None:
    """Put a wrapped child in its own place."""
    net = light()
    net.block = w.wrap(net.block)
    w.step(net)
    w.step(net)


def by_two(w: World) -> None:
    """Wrap one model by two networks, and train all three."""
    model = gained(gain=1.0)
    for net in (*(nets := [w.wrap(model), w.wrap(model)]), model):
        w.step(net)
    nets[0].gain = 3.0
    for net in (*nets, model):
        w.step(net)


def step_by(change: Callable[[Any], object]) -> Callable[[World, Any], object]:
    """Return an act that is a change of the network alone."""
    return lambda w, net: change(net)


TAKEN = ("_schedules", "network", "plan", "budget", "held", "programs", "prepared", "is_silent", "_network", "program")
CLASSES = table(
    acted,
    {
        "a frozen normalisation": (
            lambda: made(FrozenNorm),
            lambda w, net: (net.train() is net, net.norm.training),
            lambda w, net: (net.eval() is net, w.forward(net), net.train() is net),
            step_by(lambda net: net.norm.train()),
            step_by(lambda net: net.train()),
        ),
        "training set by name": (light, put(training=False), put(training=True)),
        "a state of its own": (
            lambda: made(Versioned),
            lambda w, net: (net.state_dict(), net.load_state_dict(net.state_dict()) and None, net.epoch),
        ),
        "parameters of its own": (
            lambda: of_class(parameters=lambda self, recurse=True: self.head.parameters(recurse)),
            lambda w, net: torch.optim.SGD(net.parameters(), 0.1).step(),
        ),
        "attributes of an inner network": (
            lambda: made(Delegating),
            lambda w, net: (net.head.out_channels, net.encode(image()), net.names),
            lambda w, net: (setattr(net, "gain", 3.0), net.names),
        ),
        "a call of its own": lambda: of_class(__call__=lambda self, x: 2 * Light.__call__(self, x)),
        "moves of its own": (
            lambda: of_class(
                _apply=lambda self, *args: setattr(self, "applied", True) or nn.Module._apply(self, *args)
            ),
            lambda w, net: (net.to("cpu") is net, net.applied),
        ),
        "tools of a class": (lambda: made(Tools), used_tools),
        "what it is": (lambda: made(Tools), identified),
        "a training step of its own": (
            lambda: of_class(training_step=lambda self, x: total(self(x)), again=lambda self, x: self.forward(x)),
            own_steps,
        ),
        "a forward around the forward": (light, around("forward"), step_by(lambda net: delattr(net, "forward"))),
        "a forward around a layer": (
            light,
            around("forward", "block"),
            step_by(lambda net: delattr(net.block, "forward")),
        ),
        "a method around a method": (light, around("encode")),
        "a layer that knows the network": (knows_the_network, know_the_wrapper),
        "an export": (light, exported),
        "a missing attribute": (light, lambda w, net: net.missing, "raises: missing"),
        "a sequence of layers": (
            lambda: made(lambda: nn.Sequential(nn.Conv3d(1, 4, 3), nn.ReLU(), nn.Conv3d(4, 2, 1))),
            lambda w, net: (len(net), [type(layer).__name__ for layer in net], net[:2](image())),
            lambda w, net: net.__setitem__(1, nn.Tanh()),
            lambda w, net: net.append(nn.Tanh()),
            lambda w, net: net.__delitem__(1),
        ),
        "parts of the network": (
            light,
            lambda w, net: (net.block(net.encode(image())).sum().backward(), net.forward(image())),
        ),
        "slots of the class": (lambda: made(Small), "refused: Small.*__slots__"),
        "names that are taken": (
            lambda: own(
                lambda self, x: self.head(self.encode(x)) * self.held * self.budget, **dict.fromkeys(TAKEN, 2.0)
            ),
            lambda w, net: tuple(getattr(net, name) for name in TAKEN),
            put(held=3.0, budget=5.0, program=lambda: 1, _schedules=None),
        ),
        "a deep copy": (lambda: gained(gain=1.0), changed_copy(copy.deepcopy)),
        "a shallow copy": (lambda: gained(gain=1.0), changed_copy(copy.copy)),
        "a deep copy of its own": (
            lambda: of_class(Tools, __deepcopy__=lambda self, memo: made(Tools), gain=1.0),
            changed_copy(copy.deepcopy),
        ),
        "a pickle": (lambda: made(Picklable), changed_copy(lambda net: pickle.loads(pickle.dumps(net)))),
        "a file of the whole network": (lambda: made(Picklable), changed_copy(through_file)),
        "states between networks": (with_buffers, states_between),
        "a state that does not fit": (
            light,
            lambda w, net: net.load_state_dict({"a": torch.ones(2)}),
            "raises: state_dict",
        ),
        "functions applied to all modules": (
            light,
            lambda w, net: (
                net.apply(lambda layer: nn.init.ones_(layer.weight) if isinstance(layer, nn.Conv3d) else None) is net
            ),
        ),
        "gradients set to zero": (light, lambda w, net: (net.zero_grad(set_to_none=False), net.head.weight.grad)),
        "a sum of classes": (
            lambda: of_class(Tools, FrozenNorm),
            lambda w, net: (net.train() is net, net.norm.training),
        ),
        "an annotation of a class": lambda: of_class(__init_subclass__=classmethod(lambda cls, **_: None)),
        "a class of classes": lambda: made(Registry("Registered", (Light,), {})),
    },
) | table(
    lambda w, run, *args: run(w, *args),
    {
        "wrapped twice": (lambda w: w.wrap(w.wrap(light())), "refused: recomputes already"),
        "a wrapped child": (wrapped_child, lambda: gained(gain=1.0)),
        "a wrapped child of a wrapped network": wrapped_within,
        "a child that is wrapped in place": child_in_place,
        "one model wrapped by two, and itself": by_two,
    },
)

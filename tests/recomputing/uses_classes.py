"""Uses of hooks, and of a network's class: methods of its own, copies, states, and what is added to it."""

import copy
import functools
import io
import pickle
from collections.abc import Iterator
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as everywhere
from uses import Act, Light, Make, Net, Two, World, acted, gained, image, light, made, of_class, own, put, table, total

# 1. Hooks


def noting(w: World) -> Act:
    """Return a hook that keeps what it is given, and changes nothing."""
    return lambda owner, *given: w.note(hook=(type(owner).__name__, *given))


def counting(w: World) -> Act:
    """Return a hook of modules that differ where a network is wrapped."""
    return lambda owner, *given: w.note(hook=len(given))


def doubling(w: World) -> Act:
    """Return a hook that gives twice what it is given: the first input, or the output."""
    return lambda owner, given, *out: 2 * out[0] if out and isinstance(out[0], Tensor) else (2 * given[0],)


def register(kind: str, hook: Act, path: str = "") -> Act:
    """Return an act: a hook is added to a module, and its handle returned."""
    return lambda w, net: getattr(net.get_submodule(path), f"register_{kind}_hook")(hook(w))


KINDS = ("forward", "forward_pre", "full_backward", "full_backward_pre")
OF_LAYERS = {f"a {kind} hook": register(kind, noting, "block") for kind in KINDS} | {
    "a forward hook that changes": register("forward", doubling, "block"),
    "a hook of all modules": lambda w, net: everywhere.register_module_forward_hook(counting(w)),
    "a pre-hook of all modules": lambda w, net: everywhere.register_module_forward_pre_hook(counting(w)),
}
OF_NETWORK = {
    f"a {kind} hook of the network": register(kind, doubling) for kind in KINDS if kind != "full_backward"
} | {
    "a full_backward hook of the network": register("full_backward", counting),
    "a forward hook of the model": lambda w, net: w.models[-1].register_forward_hook(doubling(w)),
}


def hooked(w: World, register: Act, runs: bool) -> None:
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


def hooked_before(w: World, register: Act) -> None:
    """Add a hook before the network is wrapped."""
    model = light()
    w.later.append(register(w, model).remove)
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


def hooked_output(w: World, kind: Make, place: int) -> None:
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


BEFORE = ("a forward hook", "a full_backward hook", "a hook of all modules")
OF_TENSORS = {
    "optimizers in hooks of parameters": (light, optimizers_in_hooks),
    "hooks of parameters and the image": (light, hooks_of_tensors),
    "hooks of the state": (light, hooks_of_state),
}
OF_OUTPUTS = {
    "a hook of logits beside maps": (Two, 0),
    "a hook of an inner output": (Two, 1, "refused: hook of an output"),
}
HOOKS = (
    table(hooked, {name: (register, False) for name, register in OF_LAYERS.items()})
    | table(hooked, {name: (register, True) for name, register in OF_NETWORK.items()})
    | table(hooked_before, {f"{name}, before": (OF_LAYERS[name], "refused: hooks would not run") for name in BEFORE})
    | table(hooked_before, {"a hook of the network, before": register("forward", doubling)})
    | table(acted, OF_TENSORS)
    | table(hooked_output, OF_OUTPUTS)
)

# 2. The class of the network


def train_but_the_norm(self: Any, mode: bool = True) -> Any:
    """Set the mode of all layers but one, and take note of it."""
    Net.train(self, mode)
    self.norm.eval()
    self.trained = mode
    return self


def versioned_state(self: Any, *args: Any, **options: Any) -> Any:
    """Return the state, with a version."""
    return {**Light.state_dict(self, *args, **options), "version": 2}


def load_versioned(self: Any, state: Any, *args: Any, **options: Any) -> Any:
    """Take the state, without its version."""
    return Light.load_state_dict(self, {key: state[key] for key in state if key != "version"}, *args, **options)


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

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tools)

    def __hash__(self) -> int:
        return 5


class Picklable(Light):
    """A network with a number, of a class that pickle finds."""

    gain = 1.0

    def forward(self, x: Tensor) -> Any:
        """Return logits."""
        return self.head(self.encode(x) * self.gain)


def saved_and_loaded(network: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(network, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def used_tools(w: World, net: Any) -> tuple[Any, ...]:
    """Return what methods of a class return."""
    layers = [type(layer).__name__ for layer in net]
    return layers, net[0], net.tiny(), net == made(Tools), len(net), hash(net), net.scale, net.square(3.0), net.count


def identified(w: World, net: Any) -> tuple[Any, ...]:
    """Return what a network is, as others see it."""
    kinds = (isinstance(net, Tools), issubclass(type(net), Light), isinstance(net, nn.Sequential), callable(net))
    names = [
        [name for name, _ in found] for found in (net.named_modules(), net.named_children(), net.named_parameters())
    ]
    text = repr(net).partition("(")[2], "encode" in dir(net), type(net).__name__, type(net).__doc__
    return kinds, text, names, [type(layer).__name__ for layer in net.modules()][1:], list(net.state_dict(prefix="a."))


def around(name: str, path: str = "") -> Act:
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


def changed_copy(make: Act) -> Act:
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


def wrapped_by_two(w: World, model: Any) -> None:
    """Wrap one model by two networks, and train all three, also after a change by one."""
    nets = [w.wrap(model), w.wrap(model), model]
    for gain in (1.0, 3.0):
        nets[0].gain = gain
        for net in nets:
            w.step(net)


def wrapped_child(w: World, model: Any) -> None:
    """Train a network with a child that recomputes, also after changes of the child."""
    net = nn.Sequential(made(lambda: nn.Conv3d(1, 1, 3, padding=1)), w.wrap(model))
    w.step(net)
    net.eval()
    w.forward(net)
    net.train()
    net[1].gain = 3.0
    net.requires_grad_(False)
    net[1].head.requires_grad_(True)
    w.step(net)
    w.note(state=net.state_dict(), names=[name for name, _ in net.named_modules()])


TAKEN = ("_schedules", "network", "plan", "budget", "held", "programs", "prepared", "is_silent", "_network", "program")
METHODS = {
    "a frozen normalisation": (
        lambda: of_class(Net, train=train_but_the_norm),
        lambda w, net: (net.train() is net, net.norm.training),
        lambda w, net: (net.eval() is net, w.forward(net), net.train() is net),
        lambda w, net: net.norm.train(),
        lambda w, net: net.train(),
    ),
    "a state of its own": (
        lambda: of_class(state_dict=versioned_state, load_state_dict=load_versioned),
        lambda w, net: (net.state_dict(), str(net.load_state_dict(net.state_dict()))),
    ),
    "parameters of its own": (
        lambda: of_class(parameters=lambda self, recurse=True: self.head.parameters(recurse)),
        lambda w, net: torch.optim.SGD(net.parameters(), 0.1).step(),
    ),
    "a call of its own": lambda: of_class(__call__=lambda self, x: 2 * Light.__call__(self, x)),
    "tools of a class": (lambda: made(Tools), used_tools),
    "what it is": (lambda: made(Tools), identified),
    "a training step of its own": (
        lambda: of_class(training_step=lambda self, x: total(self(x))),
        lambda w, net: (net.training_step(image()).backward(), total(net.forward(image())).backward()),
    ),
    "a forward around the forward": (
        light,
        around("forward"),
        lambda w, net: (copy.deepcopy(net)(image()), net.eval()(image()), net.train()(image(0, 1, 9, 6, 5))),
        lambda w, net: delattr(net, "forward"),
    ),
    "a method around the forward": (
        light,
        lambda w, net: put(own=net.forward, forward=MethodType(lambda self, x: 2 * self.own(x), net))(w, net),
        lambda w, net: (net.eval()(image()), net.train() is net),
    ),
    "an export": (
        light,
        lambda w, net: (torch.export.export(net, (image(),), strict=False).module()(image()),),
    ),
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
    "slots of the class": (lambda: of_class(__slots__=("gain",)), "refused: Kind.*__slots__"),
    "names that are taken": (
        lambda: own(lambda self, x: self.head(self.encode(x)) * self.held * self.budget, **dict.fromkeys(TAKEN, 2.0)),
        lambda w, net: tuple(getattr(net, name) for name in TAKEN),
        put(held=3.0, budget=5.0, program=lambda: 1, _schedules=None),
    ),
    "a deep copy": (lambda: gained(gain=1.0), changed_copy(copy.deepcopy)),
    "a shallow copy": (lambda: gained(gain=1.0), changed_copy(copy.copy)),
    "a pickle": (lambda: made(Picklable), changed_copy(lambda net: pickle.loads(pickle.dumps(net)))),
    "saved whole": (lambda: made(Picklable), changed_copy(saved_and_loaded)),
    "states between networks": (with_buffers, states_between),
    "a state that does not fit": (
        light,
        lambda w, net: net.load_state_dict({"a": torch.ones(2)}),
        "raises: state_dict",
    ),
}
WRAPPED = {
    "wrapped twice": (lambda w: w.wrap(w.wrap(light())), "refused: recomputes already"),
    "a wrapped child": lambda w: wrapped_child(w, gained(gain=1.0)),
    "one model wrapped by two, and itself": lambda w: wrapped_by_two(w, gained(gain=1.0)),
}
CLASSES = table(acted, METHODS) | table(lambda w, run: run(w), WRAPPED)

"""Uses of losses, images and whatever else stands around a pass, and of what a network returns."""

import copy
import functools
import itertools
import threading
from collections import defaultdict, deque, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call
from torch.optim.swa_utils import AveragedModel, update_bn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from uses import (
    IMAGE,
    Block,
    Layers,
    Light,
    Net,
    Two,
    World,
    acted,
    gained,
    image,
    light,
    made,
    own,
    put,
    table,
    total,
    unbiased,
)

from unet3d.recomputing import module

# 1. Losses

Act = Callable[[Any, Tensor, Any], Any]


class Sums(Net):
    """A network that returns logits and a sum that plain autograd does not keep."""

    def forward(self, x: Tensor) -> Any:
        """Return logits and the sum."""
        maps = self.norm(self.first(x))
        summed = maps + self.block(maps)
        return self.head(F.relu(summed)), summed


def lossed(w: World, kind: Callable[[], nn.Module], *acts: Act) -> None:
    """Run two passes, each with acts on the network, the image and the outputs, and take note of all that they leave."""
    net = w.shared(kind)
    for _ in range(2):
        x = image().requires_grad_()
        outputs = w.forward(net, x)
        for act in acts:
            w.note(found=act(net, x, outputs))
        w.note(outputs_after=outputs, image=x, gradient_of_image=x.grad)
        w.note_state(net)


def back(net: Any, x: Tensor, out: Any) -> None:
    """Go back from all outputs."""
    total(out).backward()


def gradients(loss: Callable[[Any], Tensor], *names: str, **options: bool) -> Act:
    """Return an act: gradients of a loss by parameters or the image."""

    def act(net: Any, x: Tensor, out: Any) -> Any:
        by = [x if name == "x" else net.get_parameter(name) for name in names]
        return torch.autograd.grad(loss(out), by, **options)

    return act


def doubled(path: str) -> Act:
    """Return an act: a tensor of the network, or the image, is changed in place."""

    def act(net: Any, x: Tensor, out: Any) -> None:
        owner, _, name = path.rpartition(".")
        with torch.no_grad():
            (x if path == "image" else getattr(net.get_submodule(owner), name)).mul_(2)

    return act


def penalised(net: Any, x: Tensor, out: Tensor) -> None:
    """Go back from logits and a penalty of the gradient's norm."""
    (gradient,) = torch.autograd.grad(out, x, torch.ones_like(out), create_graph=True)
    (out.mean() + (gradient.flatten(1).norm(dim=1) - 1).square().mean()).backward()


def changed_after_loss(change: Callable[[Any], Any]) -> Act:
    """Return an act: outputs are changed between the loss and its backward pass."""

    def act(net: Any, x: Tensor, out: Any) -> None:
        loss = total(out)
        with torch.no_grad():
            change(out)
        loss.backward()

    return act


def of_loss(loss: Callable[[Any], Tensor]) -> Act:
    """Return an act: go back from a loss of the outputs."""
    return lambda net, x, out: loss(out).backward()


IN_PLACE: dict[str, Callable[[Tensor], object]] = {
    "clamp": lambda output: output.clamp_(min=0.1),
    "mul": lambda output: output.mul_(3),
    "relu": lambda output: F.relu(output, inplace=True),
    "sigmoid": lambda output: output.sigmoid_(),
    "an item": lambda output: output.__setitem__((slice(None), 0), 2.0),
    "a view": lambda output: output.flatten(2)[:, :1].mul_(2),
    "the detached output": lambda output: output.detach().mul_(2),
}


def written(w: World, kind: Callable[[], nn.Module], place: int, act: Callable[[Tensor], object]) -> None:
    """Let the loss write over an output."""
    lossed(w, kind, lambda net, x, out: act(out[place]) is None, lambda net, x, out: [*out], back)


SECOND, TWICE, MODIFIED = "refused: second derivatives", "refused: second backward", "raises: modified"
LOSSES: dict[str, Any] = {
    "logits changed without autograd": (Two, changed_after_loss(lambda out: out[0].data.zero_())),
    "maps changed after the loss": (Two, changed_after_loss(lambda out: out[1].mul_(2)), MODIFIED),
    "outputs changed after backward": (Two, back, lambda net, x, out: [output.data.mul_(2) for output in out]),
    "a gradient penalty": (Light, penalised, SECOND),
    "a second derivative by backward": (
        Light,
        lambda net, x, out: out.square().sum().backward(create_graph=True),
        SECOND,
    ),
    "a graph of gradients that nobody uses": (Light, gradients(total, "head.bias", create_graph=True), SECOND),
    "a second derivative of the loss alone": (
        Light,
        lambda net, x, out: torch.autograd.grad(out.pow(3).sum(), out, create_graph=True)[0].square().sum().backward(),
    ),
    "gradients of some tensors": (Light, gradients(total, "first.weight", "x", "head.bias")),
    "gradients of a tensor that is not used": (
        Two,
        gradients(lambda out: out[1].sum(), "head.weight", "first.weight", allow_unused=True),
    ),
    "a gradient that is given": (
        Two,
        lambda net, x, out: torch.autograd.backward(out, [torch.ones_like(o) for o in out]),
    ),
    "a gradient of logits by maps": (
        Two,
        lambda net, x, out: torch.autograd.grad(out[0].sum(), out[1]),
        "refused: not have been used|activation|output",
    ),
    "a gradient that an inner output keeps": (
        Two,
        lambda net, x, out: (out[1].retain_grad(), back(net, x, out)),
        "refused: retain_grad|hook|output",
    ),
    "a gradient that logits keep": (Light, lambda net, x, out: (out.retain_grad(), back(net, x, out), out.grad)),
    "a graph that is retained": (
        Light,
        lambda net, x, out: [total(out).backward(retain_graph=True) for _ in "ab"],
        TWICE,
    ),
    "a graph that is retained once": (Light, lambda net, x, out: total(out).backward(retain_graph=True)),
    "gradients of two losses": (
        Two,
        *(gradients(lambda out, i=i: out[i].mean(), "first.weight", retain_graph=True) for i in (0, 1)),
        TWICE,
    ),
    "a second backward": (
        Light,
        lambda net, x, out: [loss.backward() for loss in [total(out)] * 2],
        "raises: second time",
    ),
    "logits as a flat view": (Two, of_loss(lambda out: out[0].view(-1).square().sum() + out[1].view(1, 4, -1).mean())),
    "a loss of logits alone": (Two, of_loss(lambda out: out[0].square().mean())),
    "a loss of maps alone": (Two, of_loss(lambda out: out[1].square().mean())),
    "a loss of a part of an output": (Two, of_loss(lambda out: out[0][:, 0, 2].square().sum())),
    "a loss with the weights": (
        Light,
        lambda net, x, out: (total(out) + sum(p.square().sum() for p in net.parameters())).backward(),
    ),
    "a loss of detached outputs": (Two, of_loss(lambda out: (out[0] * out[1].detach().mean()).sum())),
    "a loss that is not a number": (Light, of_loss(lambda out: (out * float("nan")).sum())),
    "infinite gradients": (Light, of_loss(lambda out: out.flatten()[0] * float("inf") + out.sum())),
    "a pass whose loss is never used": (Light,),
    "the image changed before backward": (Light, doubled("image"), back, MODIFIED),
    "a first weight changed before backward": (Light, doubled("first.weight"), back, MODIFIED),
    "a weight changed before backward": (Light, doubled("block.conv.weight"), back, MODIFIED),
    "a bias changed before backward": (Light, doubled("head.bias"), back, "refused: modified"),
    "a norm changed before backward": (Net, doubled("norm.weight"), back, MODIFIED),
}

# 2. Images and other arguments


class Image(Tensor):
    """A tensor of a class of its own, as MONAI's MetaTensor."""


def of_image(w: World, make: Callable[[], Tensor]) -> None:
    """Train by an ordinary image, and twice by a special one."""
    net = w.wrap(made())
    w.step(net)
    w.step(net, make())
    w.step(net, make())


IMAGES: dict[str, Any] = {
    "an image without gradients": image,
    "a batch of another size": lambda: image(2, 1, 5, 8, 6),
    "a slice of an image": lambda: image(1, 1, 18, 12, 5)[:, :, ::2, 3:9],
    "an expanded image": lambda: image(1, 1, 1, 1, 5).expand(*IMAGE),
    "an image channels last": lambda: image(2, 1, 9, 6, 5).to(memory_format=torch.channels_last_3d),
    "an image that is computed": lambda: image().requires_grad_() * 2,
    "a parameter as an image": lambda: nn.Parameter(image()),
    "an image of a class of its own": lambda: image().as_subclass(Image),
    "an image with nothing in it": lambda: image(0, 1, 9, 6, 5),
    "an image of another type": (lambda: image().float(), "refused: float|type|dtype"),
    "an image of other channels": (lambda: image(1, 2, 9, 6, 5), "refused: channels"),
    "an image without a batch": (lambda: image(1, 9, 6, 5), "refused: N C D H W"),
}


def with_flag(self: Any, x: Any, is_deep: bool = False, scale: Any = 1.0) -> Any:
    """Return logits, perhaps with maps."""
    maps = self.encode(x) * scale
    return (self.head(maps), maps) if is_deep else self.head(maps)


def given(w: World, forward: Callable[..., Any], *args: Any, **options: Any) -> None:
    """Train twice by some arguments."""
    net = w.wrap(own(forward))
    for _ in range(2):
        total(w.forward(net, *args, **options)).backward()
        w.note_state(net)


ONE = "refused: one image"
ARGUMENTS: dict[str, Any] = {
    "a default argument of forward": lambda w: given(w, with_flag, image()),
    "an image by name": lambda w: given(w, with_flag, x=image()),
    "a flag": (lambda w: given(w, with_flag, image(), True), ONE),
    "a flag by name": (lambda w: given(w, with_flag, image(), is_deep=True), ONE),
    "a tensor as another argument": (lambda w: given(w, with_flag, image(), scale=torch.ones(1)), ONE),
    "an argument with a wrong name": (lambda w: given(w, with_flag, image(), depth=3), "raises: depth"),
    "a list as an image": (
        lambda w: given(w, lambda self, x: self.head(self.encode(x[0])), [image()]),
        "refused: list",
    ),
    "a dict as an image": (
        lambda w: given(w, lambda self, x: self.head(self.encode(x["a"])), {"a": image()}),
        "refused: dict",
    ),
}

# 3. Loops


def optimised(w: World, make: Callable[[Any], Any]) -> None:
    """Train for three steps, with gradients clipped; no gradient is rounding alone, which Adam would scale up."""
    net = w.wrap(unbiased())
    optimizer = make(net)
    for _ in range(3):
        w.step(net)
        w.note(norm=nn.utils.clip_grad_norm_(net.parameters(), 0.5))
        optimizer.step()


def accumulated(w: World) -> None:
    """Train by passes that come before the backward passes of others, in orders of their own."""
    net = w.shared(Net)
    for order in (1, -1):
        losses = [total(w.forward(net, image(seed=seed))) / 3 for seed in range(3)]
        for loss in losses[::order]:
            loss.backward()
        w.note_state(net)
    total(w.forward(net) * w.forward(net, image(seed=2))).backward()
    w.note_state(net)


def composed(w: World) -> None:
    """Let a pass follow a pass of the same network."""
    net = w.wrap(own(lambda self, x: self.head(self.encode(x))[:, :1]))
    total(w.forward(net, w.forward(net))).backward()
    w.note_state(net)


def changed_before_backward(w: World, make: Callable[[], Any], *acts: Callable[[World, Any], Any]) -> None:
    """Change the network between a pass and its backward pass."""
    net = w.wrap(make())
    loss, modules = total(w.forward(net)), [*net.modules()][1:]
    for act in acts:
        act(w, net)
    loss.backward()
    w.note(modules=modules)
    w.note_state(net)


def without_training(w: World, net: Any) -> None:
    """Run passes without gradients and in evaluation."""
    with torch.no_grad():
        w.forward(net)
    w.step(net)
    with torch.inference_mode():
        w.note(outputs=net(image()).clone())
    net.eval()
    w.step(net)
    net.train()


def taught(w: World) -> None:
    """Train by a teacher that is a copy, averaged over steps."""
    net = w.wrap(made())
    w.step(net)
    teacher = copy.deepcopy(net).requires_grad_(False)
    average = AveragedModel(net, use_buffers=True)
    target = w.forward(teacher)
    w.step(net, loss=lambda logits: (logits - target - 1).square().mean())
    torch.optim.SGD(net.parameters(), 0.1).step()
    average.update_parameters(net)
    update_bn([image(seed=seed) for seed in range(3)], net)
    w.note_state(average)
    w.forward(average)
    w.step(average.module)


def closed(w: World) -> None:
    """Optimise by a closure."""
    net = w.wrap(light())
    optimizer = torch.optim.LBFGS(net.parameters(), 0.01, max_iter=2)
    w.note(loss=optimizer.step(lambda: w.step(net).square().mean()))
    w.note_state(net)


def loss_scaled(w: World) -> None:
    """Train with a scaled loss."""
    net = w.wrap(light())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(2):
        w.step(net, loss=lambda logits: scaler.scale(total(logits)))
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_value_(net.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()


def mixed(w: World, dtype: torch.dtype, make: Callable[[], Any]) -> None:
    """Train in mixed precision, after a pass without."""
    net = w.wrap(make().float())
    w.step(net, image().float())
    for is_on in (True, False, True):
        with torch.autocast("cpu", dtype, enabled=is_on):
            outputs = net(image().float())
        w.note(outputs=outputs)
        total(outputs).backward()
        w.note(gradients=[(parameter.grad / parameter.grad.norm()).to(dtype) for parameter in net.parameters()])
        net.zero_grad()


def pooled() -> Any:
    """Return a network in which an operation of float32 comes before a normalisation."""
    first = functools.partial(nn.Conv3d, 1, 8, 3, padding=1, bias=False)
    return made(lambda: nn.Sequential(first(), nn.MaxPool3d(3, 2, 1), nn.BatchNorm3d(8), nn.Conv3d(8, 2, 1)))


def functional(w: World, net: Any) -> None:
    """Call the network with other parameters."""
    state = {name: (2 * value).detach().requires_grad_() for name, value in net.named_parameters()}
    total(outputs := functional_call(net, state, (image(),))).backward()
    w.note(outputs=outputs, gradients={name: value.grad for name, value in state.items()})


def dual(w: World, net: Any) -> None:
    """Call the network in forward mode."""
    with forward_ad.dual_level():
        outputs = net(forward_ad.make_dual(image(), image(seed=2)))
        w.note(outputs=outputs, tangent=forward_ad.unpack_dual(outputs).tangent)


def within(context: Callable[[], Any]) -> Callable[[World, Any], None]:
    """Return an act: a step in a context."""

    def act(w: World, net: Any) -> None:
        with context():
            w.step(net)

    return act


def checkpointed(is_reentrant: bool) -> Callable[[World, Any], None]:
    """Return an act: a pass in a checkpoint."""
    return lambda w, net: total(checkpoint(net, image().requires_grad_(), use_reentrant=is_reentrant)).backward()


def in_threads(w: World, net: Any) -> None:
    """Train in another thread, go back in another, and train in two at once."""
    found: dict[int, Any] = {}

    def work(seed: int) -> None:
        x = image(seed=seed).requires_grad_()
        found[seed] = torch.autograd.grad(total(net(x)), [x, *net.parameters()])

    loss = total(w.forward(net))
    for works in ((lambda: w.step(net),), (loss.backward,), (lambda: work(1), lambda: work(2))):
        threads = [threading.Thread(target=each) for each in works]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    w.note(found=[found[seed] for seed in (1, 2)])


def with_default_type(w: World, net: Any) -> None:
    """Let new tensors be of another type."""
    w.later.append(functools.partial(torch.set_default_dtype, torch.get_default_dtype()))
    torch.set_default_dtype(torch.float64)


def planned(w: World, options: dict[str, Any]) -> None:
    """Train by another plan, also after a change."""
    net = w.wrap(light(), **options)
    w.step(net)
    put("block.conv", dilation=(2, 2, 2), padding=(2, 2, 2))(w, net)
    w.step(net)


def saving_nothing(w: World, make: Callable[[], Any], *acts: Callable[[World, Any], Any]) -> None:
    """Let each network's own pass need no memory, so that no schedule saves any."""
    w.patch(module, "plain_bytes", lambda *_: 0)
    acted(w, make, *acts)


def differentiated_twice(w: World, net: Any) -> None:
    """Go back through gradients."""
    x = image().requires_grad_()
    logits, maps = w.forward(net, x)
    maps.retain_grad()
    (gradient,) = torch.autograd.grad(logits.square().sum(), x, create_graph=True)
    gradient.square().sum().backward(retain_graph=True)
    total(logits).backward()
    w.note(gradient=gradient, maps=maps.grad)
    w.note_state(net)


FUNC = "refused: vmap|torch.func|functorch|functional_call|forward.mode|setup_context"
SAVED = "refused: saved_tensors_hooks or torch.utils.checkpoint"
PACKED = functools.partial(torch.autograd.graph.saved_tensors_hooks, torch.clone, lambda x: x * 2)
AROUND: dict[str, Any] = {
    "passes without training in between": (
        lambda: made(lambda: nn.Sequential(Net(), nn.Dropout3d(0.5))),
        without_training,
    ),
    "float32 numbers": (made, lambda w, net: (net.float() is net, net.double() is net)),
    "a functional call": (light, functional, "refused: first.weight.*functional_call"),
    "a functional map": (unbiased, lambda w, net: torch.func.vmap(net)(image(3, *IMAGE)), FUNC),
    "a product with the jacobian": (unbiased, lambda w, net: torch.func.jvp(net, (image(),), (image(seed=2),)), FUNC),
    "a dual number": (unbiased, dual, FUNC),
    "a jacobian": (
        unbiased,
        lambda w, net: torch.autograd.functional.vjp(net, image(), torch.ones(1, 2, 9, 6, 5).double()),
    ),
    "a check of gradients": (
        unbiased,
        lambda w, net: torch.autograd.gradcheck(net, image(1, 1, 1, 1, 2).requires_grad_()),
        TWICE,
    ),
    "anomalies are looked for": (light, within(torch.autograd.detect_anomaly)),
    "tensors saved on the CPU": (light, within(torch.autograd.graph.save_on_cpu), SAVED),
    "saved tensors that are changed": (light, within(PACKED), SAVED),
    "a checkpoint around it": (light, checkpointed(False), SAVED),
    "a reentrant checkpoint around it": (light, checkpointed(True), SAVED),
    "gradients enabled within": (light, torch.no_grad()(within(torch.enable_grad))),
    "autocast around the loss": (
        light,
        lambda w, net: torch.autocast("cpu", torch.bfloat16)(back)(net, image(), w.forward(net)),
    ),
    "backward without gradients": (light, lambda w, net: torch.no_grad()(back)(net, image(), w.forward(net))),
    "a compiled wrapper": (light, lambda w, net: w.step(torch.compile(net, backend="eager")) is None),
    "threads": (unbiased, in_threads),
    "another default type": (
        lambda: own(lambda self, x: self.head(self.encode(x)) + torch.full((), 0.1)),
        with_default_type,
    ),
}
PLANS: dict[str, Any] = {
    "tiles": {"plan": "tiles"},
    "a budget": {"plan": "auto", "budget": "1GiB"},
    "what is held": {"held": 2**20},
    "an example": {"example": image()},
    "an example as a shape": {"example": IMAGE},
    "an example as an array": {"example": image().numpy()},
    "a budget that is too small": ({"plan": "auto", "budget": "0.000001MiB"}, "refused: needs at least"),
}
LOOPS = (
    table(written, {f"{name} in place of logits": (Two, 0, act) for name, act in IN_PLACE.items()})
    | table(written, {f"{name} in place of maps": (Two, 1, act, MODIFIED) for name, act in IN_PLACE.items()})
    | table(
        written,
        {
            f"{name} in place of a sum": (Sums, 1, IN_PLACE[name], "refused: output 1 was changed")
            for name in ("clamp", "a view")
        },
    )
    | table(lossed, LOSSES)
    | table(of_image, IMAGES)
    | table(lambda w, run: run(w), ARGUMENTS)
    | table(acted, AROUND)
    | table(
        optimised,
        {
            "fused AdamW": lambda net: torch.optim.AdamW(net.parameters(), 0.01, fused=True),
            "SGD with groups": lambda net: torch.optim.SGD(
                [{"params": p, "lr": 0.1} for p in net.parameters()], 0.2, 0.9
            ),
            "Adam for each": lambda net: torch.optim.Adam(net.parameters(), 0.01, foreach=True),
        },
    )
    | table(
        lambda w, run, *args: run(w, *args),
        {
            "accumulation, and two passes before their backward": accumulated,
            "a pass of a pass": composed,
            "a teacher, an averaged model and an update of batch norm": taught,
            "a closure of an optimizer": closed,
            "a scaled loss": loss_scaled,
            "autocast": (mixed, torch.bfloat16, unbiased),
            "autocast of float16": (mixed, torch.float16, unbiased),
            "autocast before a normalisation": (mixed, torch.bfloat16, pooled),
        },
    )
    | table(
        changed_before_backward,
        {
            "an optimizer before backward": (
                light,
                lambda w, net: (w.step(net), torch.optim.SGD(net.parameters(), 1.0).step()),
                MODIFIED,
            ),
            "a tensor changed before backward": (
                lambda: gained(gain=torch.ones(4, 1, 1, 1)),
                lambda w, net: net.gain.fill_(3),
                MODIFIED,
            ),
            "settings changed before backward": (
                lambda: gained(gain=2.0),
                put(gain=3.0),
                lambda w, net: (net.eval(), net.requires_grad_(False)),
            ),
            "a layer changed before backward": (light, lambda w, net: put(block=made(Block))(w, net)),
        },
    )
    | table(
        planned,
        PLANS,
    )
    | table(
        saving_nothing,
        {
            "a network that saves nothing": (lambda: made(Layers), put("dropped", p=0.2), "plain"),
            "second derivatives where nothing is saved": (lambda: made(Two), differentiated_twice, "plain"),
            "a checkpoint around what saves nothing": (lambda: made(Layers), checkpointed(False), "plain"),
        },
    )
)
# 4. Outputs

Pair = namedtuple("Pair", ["logits", "maps"])


@dataclass
class Result:
    """Outputs as a dataclass."""

    logits: Tensor
    maps: Any = None


Build = Callable[[Any, Tensor, Tensor, Tensor], Any]


def returned(w: World, build: Build) -> None:
    """Run two passes of a network whose outputs are built of itself, the image, logits and maps."""
    model = own(lambda self, x: (lambda maps: build(self, x, self.head(maps), maps))(self.encode(x)))
    model.register_buffer("mask", torch.ones(2))
    model.kept = []
    net = w.wrap(model)
    for _ in range(2):
        x = image().requires_grad_()
        outputs = w.forward(net, x)
        w.note(same=[one is other for one, other in itertools.pairwise(tree_leaves(outputs))])
        total(outputs).backward()
        w.note(after=outputs, gradient=x.grad)
        w.note_state(net)


BUILT: dict[str, Any] = {
    "a list": lambda net, x, logits, maps: [logits, maps],
    "a dict": lambda net, x, logits, maps: {"out": logits, "aux": maps},
    "a named tuple": lambda net, x, logits, maps: Pair(logits, maps),
    "a dataclass of outputs": (lambda net, x, logits, maps: Result(logits, maps), "refused: Result"),
    "a namespace of outputs": (lambda net, x, logits, maps: SimpleNamespace(out=logits), "refused: SimpleNamespace"),
    "a structure in a structure": lambda net, x, logits, maps: {"a": [logits, (maps, {"b": maps * 2})]},
    "None and logits": lambda net, x, logits, maps: (logits, None),
    "a number, a text and a size": lambda net, x, logits, maps: {"a": logits, "b": 3, "c": "net", "d": x.shape},
    "None": (lambda net, x, logits, maps: None, "refused: returns nothing"),
    "the image itself": lambda net, x, logits, maps: (logits, x),
    "a view of the image": lambda net, x, logits, maps: (logits, x[:, :, :3]),
    "logits twice": lambda net, x, logits, maps: (logits, logits),
    "views of logits": lambda net, x, logits, maps: (logits, logits[:, :1], logits.flatten(2)),
    "two halves of logits": lambda net, x, logits, maps: logits.chunk(2, 1),
    "a view of maps": lambda net, x, logits, maps: (logits, maps[:, :2]),
    "detached logits and maps": lambda net, x, logits, maps: (logits, logits.detach(), maps.detach()),
    "classes and a mask": lambda net, x, logits, maps: (logits, logits.argmax(1), logits > 0),
    "a parameter": lambda net, x, logits, maps: (logits, net.head.weight),
    "a buffer and a constant": lambda net, x, logits, maps: (logits, net.mask, torch.ones(2)),
    "a loss and no logits": lambda net, x, logits, maps: logits.square().mean(),
    "nothing that needs a gradient": (lambda net, x, logits, maps: x.detach() * 2, "raises: does not require grad"),
    "logits of another type": lambda net, x, logits, maps: logits.float(),
    "logits of other strides": lambda net, x, logits, maps: (logits.transpose(1, 4), logits.mean().expand(3)),
    "a list that the network keeps": (
        lambda net, x, logits, maps: net.kept.append(logits) or net.kept,
        "refused: changes kept,",
    ),
    "an iterator of outputs": (lambda net, x, logits, maps: iter([logits, maps]), "refused: iterator"),
    "a deque of outputs": lambda net, x, logits, maps: deque([logits, maps]),
    "a dict with a default of outputs": lambda net, x, logits, maps: defaultdict(list, out=[logits]),
    "a tensor of a class of its own": (lambda net, x, logits, maps: logits.as_subclass(Image), "refused: Image"),
    "outputs of the mode": lambda net, x, logits, maps: [logits] * (2 if net.training else 1),
}
OUTPUTS = table(returned, BUILT)

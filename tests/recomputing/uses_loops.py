"""Uses of losses, images and whatever else stands around a pass, and of what a network returns."""

import copy
import itertools
import threading
from collections import namedtuple
from dataclasses import make_dataclass
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
    EQUAL,
    IMAGE,
    Act,
    Block,
    Light,
    Make,
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
    with_dropout,
)

from unet3d.recomputing import module
from unet3d.training.losses import LossOptions, dice_ce

# 1. Losses


class Sums(Net):
    """A network that returns logits and a sum that plain autograd does not keep."""

    def forward(self, x: Tensor) -> Any:
        """Return logits and the sum."""
        maps = self.norm(self.first(x))
        summed = maps + self.block(maps)
        return self.head(F.relu(summed)), summed


def lossed(w: World, kind: Make, *acts: Act) -> None:
    """Run two passes, each with acts on the network, the image and the outputs, and note what they leave."""
    net = w.shared(kind)
    for _ in range(2):
        x = image().requires_grad_()
        outputs = w.forward(net, x)
        for act in acts:
            w.note(found=act(net, x, outputs))
        w.note(outputs_after=outputs, image=x, gradient_of_image=x.grad)
        w.note_state(net)


def of_loss(loss: Act) -> Act:
    """Return an act: go back from a loss of the outputs."""
    return lambda net, x, out: loss(out).backward()


back = of_loss(total)


def gradients(loss: Act, *names: str, **options: bool) -> Act:
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


IN_PLACE = {
    "clamp": lambda output: output.clamp_(min=0.1),
    "a view": lambda output: output.flatten(2)[:, :1].mul_(2),
    "a view of the detached output": lambda output: output.detach().flatten(2)[:, :1].mul_(2),
}


def written(w: World, kind: Make, place: int, act: Act) -> None:
    """Let the loss write over an output."""
    lossed(w, kind, lambda net, x, out: act(out[place]) is None, lambda net, x, out: [*out], back)


# Which network returns what at which place, and what is said if a loss writes over it.
PLACES = {
    "logits": (Two, 0, EQUAL),
    "maps": (Two, 1, "raises: changed in place"),
    "a sum": (Sums, 1, "refused: output 1 was changed"),
}
WRITTEN = {
    f"{name} in place of {what}": (kind, place, act, text)
    for name, act in IN_PLACE.items()
    for what, (kind, place, text) in PLACES.items()
}
SECOND, TWICE, MODIFIED = "refused: second derivatives", "refused: second backward", "raises: modified|changed in place"
LOSSES = {
    "outputs changed after backward": (Two, back, lambda net, x, out: [output.data.mul_(2) for output in out]),
    "a gradient penalty": (Light, penalised, SECOND),
    "gradients of some tensors": (Light, gradients(total, "first.weight", "x", "head.bias")),
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
    "a second backward": (
        Light,
        lambda net, x, out: [loss.backward() for loss in [total(out)] * 2],
        "raises: second time",
    ),
    "a loss that writes over logits": (
        Light,
        of_loss(lambda out: dice_ce(out, torch.zeros(1, 9, 6, 5).long(), LossOptions())),
    ),
    "a loss of maps alone": (Two, of_loss(lambda out: out[1].square().mean())),
    "a loss that is not a number": (Light, of_loss(lambda out: (out * float("nan")).sum())),
    "the image changed before backward": (Light, doubled("image"), back, MODIFIED),
    "a weight changed before backward": (Light, doubled("block.conv.weight"), back, MODIFIED),
    "a bias changed before backward": (Light, doubled("head.bias"), back, "refused: modified"),
}

# 2. Images and other arguments


class Image(Tensor):
    """A tensor of a class of its own, as MONAI's MetaTensor."""


def of_image(w: World, make: Make) -> None:
    """Train by an ordinary image, and twice by a special one."""
    net = w.wrap(made())
    w.step(net)
    w.step(net, make())
    w.step(net, make())


IMAGES = {
    "an image without gradients": image,
    "a batch of another size": lambda: image(2, 1, 5, 8, 6),
    "a slice of an image": lambda: image(1, 1, 18, 12, 5)[:, :, ::2, 3:9],
    "an image of a class of its own": lambda: image().as_subclass(Image),
    "an image with nothing in it": lambda: image(0, 1, 9, 6, 5),
    "an image of another type": (lambda: image().float(), "refused: float|type|dtype"),
    "an image without a batch": (lambda: image(1, 9, 6, 5), "refused: 4 dimensions"),
}


def with_flag(self: Any, x: Any, is_deep: bool = False) -> Any:
    """Return logits, perhaps with maps; an image may lie in a list or a dict."""
    maps = self.encode(x["a"] if isinstance(x, dict) else x)
    return (self.head(maps), maps) if is_deep else self.head(maps)


def called(w: World, call: Act) -> None:
    """Train twice by a call of the network."""
    net = w.wrap(own(with_flag))
    for _ in range(2):
        w.note(outputs=(outputs := call(net)))
        total(outputs).backward()
        w.note_state(net)


ARGUMENTS = {
    "a default argument of forward": lambda net: net(image()),
    "an image by name": lambda net: net(x=image()),
    "two images": (lambda net: net(image(), image()), "refused: was given Tensor, Tensor; .* one image"),
    "a flag by name": (lambda net: net(image(), is_deep=True), "refused: was given Tensor, is_deep=bool; .* one image"),
    "a wrong name": (lambda net: net(img=image()), "refused: missing a required argument: 'x'; .* one image"),
    "a dict as an image": (lambda net: net({"a": image()}), "refused: dict"),
}

# 3. Loops


def accumulated(w: World) -> None:
    """Train by passes that come before the backward passes of others, in orders of their own."""
    net = w.shared(Net)
    for order in (1, -1):
        losses = [total(w.forward(net, image(batch, 1, 9, 6, 5))) / 3 for batch in (1, 2, 1)]
        for loss in losses[::order]:
            loss.backward()
        w.note_state(net)
    total(w.forward(net) * w.forward(net, image(seed=2))).backward()
    w.note_state(net)


def changed_before_backward(w: World, make: Make, *acts: Act) -> None:
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


def optimised(w: World) -> None:
    """Train with a scaled loss and clipped gradients."""
    net = w.wrap(unbiased())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    optimizer = torch.optim.SGD(net.parameters(), 0.01, momentum=0.9)
    for _ in range(3):
        w.step(net, loss=lambda logits: scaler.scale(total(logits)))
        scaler.unscale_(optimizer)
        w.note(norm=nn.utils.clip_grad_norm_(net.parameters(), 0.5))
        scaler.step(optimizer)
        scaler.update()


def mixed(w: World, dtype: torch.dtype, make: Make) -> None:
    """Train in mixed precision, after a pass without."""
    net = w.wrap(make().float())
    w.step(net, image().float())
    for is_on in (True, False, True):
        with torch.autocast("cpu", dtype, enabled=is_on):
            outputs = net(image().float())
        w.note(outputs=outputs)
        total(outputs).backward()
        gradients = [parameter.grad for parameter in net.parameters() if parameter.grad is not None]
        w.note(gradients=[(gradient / gradient.norm()).to(dtype) for gradient in gradients])
        net.zero_grad()


def autocast_around_loss(w: World) -> None:
    """Go back within autocast from a pass in float32."""
    net = w.wrap(unbiased().float())
    outputs = net(image().float())
    with torch.autocast("cpu", torch.bfloat16):
        total(outputs).backward()
    w.note_state(net)


def exactly(self: Any, x: Tensor) -> Tensor:
    """Return logits of maps beside a large number, where half precision would lose all."""
    maps = self.first(x)
    with torch.autocast("cpu", enabled=False):
        exact = maps.float().sigmoid() + 3000
        return F.conv3d(exact - 3000, self.head.weight).to(maps.dtype)


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


def within(context: Make) -> Act:
    """Return an act: a step in a context."""

    def act(w: World, net: Any) -> None:
        with context():
            w.step(net)

    return act


def checkpointed(is_reentrant: bool) -> Act:
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


def planned(w: World, options: dict[str, Any]) -> None:
    """Train by another plan, also after a change."""
    net = w.wrap(light(), **options)
    w.step(net)
    put("block.conv", dilation=(2, 2, 2), padding=(2, 2, 2))(w, net)
    w.step(net)


def saving_nothing(w: World, make: Make, *acts: Act) -> None:
    """Let each network's own pass need no memory, so that no schedule saves any."""
    w.patch(module, "plain_bytes", lambda *_: 0)
    acted(w, make, *acts)


FUNC = "refused: vmap|torch.func|functorch|functional_call|forward.mode|setup_context"
SAVED = "refused: saved_tensors_hooks or torch.utils.checkpoint"
AROUND = {
    "passes without training in between": (
        lambda: made(lambda: nn.Sequential(Net(), nn.Dropout3d(0.5))),
        without_training,
    ),
    "float32 numbers": (made, lambda w, net: (net.float() is net, net.double() is net)),
    "a functional call": (light, functional, "refused: first.weight.*functional_call"),
    "a dual number": (unbiased, dual, FUNC),
    "tensors saved on the CPU": (light, within(torch.autograd.graph.save_on_cpu), SAVED),
    "a checkpoint around it": (light, checkpointed(False), SAVED),
    "a reentrant checkpoint around it": (light, checkpointed(True)),
    "gradients enabled within": (light, torch.no_grad()(within(torch.enable_grad))),
    "threads": (unbiased, in_threads),
}
PLANS = {
    "tiles": {"plan": "tiles"},
    "an example": {"example": image()},
    "an example as a shape": ({"example": IMAGE}, "refused: the example is a"),
    "an example as an array": ({"example": image().numpy()}, "refused: the example is a"),
    "a budget that is too small": ({"plan": "auto", "budget": "0.000001MiB"}, "refused: needs at least"),
}
RUNS = {
    "accumulation, and two passes before their backward": accumulated,
    "a teacher, an averaged model and an update of batch norm": taught,
    "a scaled loss and clipped gradients": optimised,
    "autocast": lambda w: mixed(w, torch.bfloat16, unbiased),
    "autocast around the loss": autocast_around_loss,
    "a part without autocast": lambda w: mixed(w, torch.float16, lambda: own(exactly, Net)),
}
BEFORE_BACKWARD = {
    "an optimizer before backward": (
        light,
        lambda w, net: (w.step(net), torch.optim.SGD(net.parameters(), 0.1).step()),
        MODIFIED,
    ),
    "a tensor changed before backward": (
        lambda: gained(gain=torch.ones(4, 1, 1, 1)),
        lambda w, net: net.gain.fill_(3),
        MODIFIED,
    ),
    "settings changed before backward": (lambda: gained(gain=2.0), put(gain=3.0), lambda w, net: net.eval()),
    "a layer changed before backward": (light, lambda w, net: put(block=made(Block))(w, net)),
}
LOOPS = (
    table(written, WRITTEN)
    | table(lossed, LOSSES)
    | table(of_image, IMAGES)
    | table(called, ARGUMENTS)
    | table(acted, AROUND)
    | table(lambda w, run: run(w), RUNS)
    | table(changed_before_backward, BEFORE_BACKWARD)
    | table(planned, PLANS)
    | table(saving_nothing, {"a network that saves nothing": (with_dropout, put("1", p=0.2), "plain")})
)

# 4. Outputs

Pair = namedtuple("Pair", ["logits", "maps"])
RESULT = make_dataclass("Result", ["logits", "maps"])


def returned(w: World, build: Act) -> None:
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


BUILT = {
    "a dataclass of outputs": (lambda net, x, logits, maps: RESULT(logits, maps), "refused: Result"),
    "a structure in a structure": lambda net, x, logits, maps: {
        **{"a": [logits, (maps, None, Pair(maps * 2, x.shape))], "b": 3, "c": "net"}
    },
    "None": (lambda net, x, logits, maps: None, "refused: returns nothing"),
    "the image and views": lambda net, x, logits, maps: (logits, x, x[:, :, :3], logits[:, :1], logits.flatten(2)),
    "detached logits and maps": lambda net, x, logits, maps: (logits, logits.detach(), maps.detach()),
    "the same twice": lambda net, x, logits, maps: (logits, maps, logits),
    "classes and a mask": lambda net, x, logits, maps: (logits, logits.argmax(1), logits > 0),
    "parameters, a buffer and a constant": lambda net, x, logits, maps: (
        (logits, net.head.weight, net.head.weight.square().sum(), net.mask, torch.ones(2))
    ),
    "a loss and no logits": lambda net, x, logits, maps: logits.square().mean(),
    "nothing that needs a gradient": (lambda net, x, logits, maps: x.detach() * 2, "raises: does not require grad"),
    "logits of another type": lambda net, x, logits, maps: logits.float(),
    "logits of other strides": lambda net, x, logits, maps: (logits.transpose(1, 4), logits.mean().expand(3)),
    "a list that the network keeps": (
        lambda net, x, logits, maps: net.kept.append(logits) or net.kept,
        "refused: changes kept,",
    ),
    "a tensor of a class of its own": (lambda net, x, logits, maps: logits.as_subclass(Image), "refused: Image"),
    "outputs of the mode": lambda net, x, logits, maps: [logits] * (2 if net.training else 1),
}
OUTPUTS = table(returned, BUILT)

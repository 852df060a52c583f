"""What users add to the package's network or change in it: `lean` and `slab` compute the same, or refuse it by name."""

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from guards import without, yes
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrizations
from torch.nn.utils.stateless import _reparametrize_module
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from training import TINY

from unet3d import build
from unet3d.base.errors import UserError
from unet3d.config import compose
from unet3d.config.schema import Model
from unet3d.memory.simulate import simulate
from unet3d.model.blocks import DoubleConv, FeatureState, Up
from unet3d.model.unet import UNet3D
from unet3d.training import rows, slab_rules
from unet3d.training.policy import MemoryPolicy
from unet3d.training.slab_run import SlabOptions

Change = Callable[[Any], Any]
WAYS = {"lean": SlabOptions(4, True, 2, True), "slab": SlabOptions(4, False, 2, True)}


def network(**options: Any) -> Any:
    size = {"features": [4, 6], "in_channels": 1, "classes": 2, "kernels": [[3] * 3] * 2, "strides": [[2] * 3]}
    return build.model(Model(**(size | options)), 0).double()


def layers(model: Any, kind: type) -> Iterator[tuple[Any, str, Any]]:
    """Each layer of a type, with its parent and its name there."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, kind):
                yield parent, name, child


def put(path: str, make: Callable[[Any], nn.Module]) -> Change:
    """Return a change that puts what is made from a module into its place."""

    def change(model: Any) -> None:
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, make(model.get_submodule(path)))

    return change


def become(path: str, kind: type) -> Change:
    def change(model: Any) -> None:
        model.get_submodule(path).__class__ = kind

    return change


def at(path: str, act: Callable[[Any], Any]) -> Change:
    def change(model: Any) -> None:
        act(model.get_submodule(path))

    return change


class Gate(nn.Module):
    """A stage of one's own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((1,), 2.0))

    def forward(self, state: FeatureState) -> FeatureState:
        return FeatureState(state.x * self.weight, state.skips, state.sides)


class Standardised(nn.Conv3d):
    def forward(self, x: Tensor) -> Tensor:
        return self._conv_forward(x, self.weight - self.weight.mean(), self.bias)


class Doubled(nn.GroupNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class Cubed(nn.Module):
    """A layer of one's own."""

    def forward(self, x: Tensor) -> Tensor:
        return x**3


class GatedBlock(DoubleConv):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / 2


class GatedUp(Up):
    def forward(self, state: FeatureState) -> FeatureState:
        return super().forward(state)


class Tripled(UNet3D):
    def forward(self, image: Tensor) -> Any:
        return super().forward(image) * 3


class Halved(Tensor):
    """A tensor that computes in a way of its own."""


def with_a_stage(model: Any) -> None:
    last = model.outc
    del model.outc
    model.add_module("gate", Gate())
    model.add_module("outc", last)


def a_norm_twice(model: Any) -> None:
    model.up1.block.conv2.norm = model.inc.block.conv2.norm


def activation_first(model: Any) -> None:
    unit = model.inc.block.conv1
    model.inc.block.conv1 = nn.Sequential(OrderedDict(conv=unit.conv, act=unit.act, norm=unit.norm))


def of_another_type(model: Any) -> None:
    conv = model.inc.block.conv1.conv
    conv.weight = nn.Parameter(conv.weight.detach().as_subclass(Halved))


def twice(*arguments: Any) -> Any:
    return arguments[-1] * 2


def conv(kernel: int = 3, **options: Any) -> Callable[[Any], nn.Module]:
    def make(old: Any) -> nn.Module:
        return nn.Conv3d(old.in_channels, old.out_channels, kernel, **{"padding": kernel // 2, **options})

    return make


CONV, ACT = "inc.block.conv1.conv", "inc.block.conv1.act"
NORM, BATCH = "down1.block.conv1.norm", {"norm": "batch"}
TRILINEAR, DROPOUT = {"upsampling": "trilinear"}, {"dropout": 0.3}


def compute_weight(model: UNet3D) -> None:
    """Make a weight of another one, as adapters of low rank do."""
    layer: Any = model.get_submodule(CONV)
    layer._parameters["weight"] = layer.weight * 0.5


REFUSED: dict[str, tuple[Change, str, dict[str, Any]]] = {  # what changes, what the line names, options
    "a head of the last decoder": (
        lambda model: setattr(model.get_submodule("up1"), "head", nn.Conv3d(4, 3, 1).double()),
        r"up1\.head \(Conv3d\)",
        {},
    ),
    "a weight that is computed": (compute_weight, f"{CONV} .*weight that is computed", {}),
    "a stage": (with_a_stage, r"gate \(Gate\)", {}),
    "a subclass of a stage": (become("up1", GatedUp), "up1 .*GatedUp", {}),
    "a subclass of the network": (lambda model: setattr(model, "__class__", Tripled), "Tripled", {}),
    "a subclass of a block": (become("inc.block", GatedBlock), "inc.block .*GatedBlock", {}),
    "a subclass of a convolution": (become(CONV, Standardised), f"{CONV} .*Standardised", {}),
    "a subclass of a norm": (become(NORM, Doubled), f"{NORM} .*Doubled", {"norm": "group", "groups": 2}),
    "another layer": (put(ACT, lambda old: Cubed()), f"{ACT} .*Cubed", {}),
    "a parameter of a block": (at("inc.block", lambda m: setattr(m, "gain", nn.Parameter(torch.ones(1)))), "gain", {}),
    "a child of a block": (at("inc.block", lambda m: m.add_module("gate", nn.Conv3d(4, 4, 1))), "inc.block.gate", {}),
    "a child of a layer": (at(CONV, lambda m: m.add_module("extra", nn.ReLU())), f"{CONV}.extra", {}),
    "a buffer of a layer": (at(ACT, lambda m: m.register_buffer("scale", torch.ones(1))), "scale", {}),
    "a missing layer": (at("inc.block.conv1", lambda m: delattr(m, "conv")), "inc.block.conv1 without conv", {}),
    "a layer more": (at("inc.block.conv1", lambda m: m.append(nn.Identity())), "inc.block.conv1.3 .Identity", {}),
    "a forward of its own": (at(ACT, lambda m: setattr(m, "forward", twice)), f"{ACT} .*forward", {}),
    "a method of its own": (at(CONV, lambda m: setattr(m, "_conv_forward", twice)), "_conv_forward", {}),
    "a forward hook": (at(CONV, lambda m: m.register_forward_hook(twice)), f"{CONV} .*hook", {}),
    "a forward hook of a stage": (at("down1", lambda m: m.register_forward_pre_hook(twice)), "down1 .*hook", {}),
    "a backward hook": (at(CONV, lambda m: m.register_full_backward_hook(twice)), f"{CONV} .*hook", {}),
    "a backward pre-hook": (at("up1", lambda m: m.register_full_backward_pre_hook(twice)), "up1 .*hook", {}),
    "a hook of a weight": (at(CONV, lambda m: m.weight.register_hook(twice)), "hooks of weight", {}),
    "a hook of a gradient": (
        at(CONV, lambda m: m.weight.register_post_accumulate_grad_hook(lambda w: None)),
        "hooks of weight",
        {},
    ),
    "weight_norm": (at(CONV, parametrizations.weight_norm), f"{CONV} .*Parametrized", {}),
    "spectral_norm": (at(CONV, parametrizations.spectral_norm), f"{CONV} .*Parametrized", {}),
    "spectral_norm, the old one": (at(CONV, nn.utils.spectral_norm), CONV, {}),
    "a weight of another kind": (of_another_type, "weight of type Halved", {}),
    "weights of two types": (at("outc", lambda m: m.bfloat16()), "outc.conv.* torch.bfloat16", {}),
    "padding_mode": (put(CONV, conv(padding_mode="reflect")), "padding_mode=reflect", {}),
    "padding in words": (put(CONV, conv(padding="same")), "padding=same", {}),
    "padding beyond the kernel": (put(CONV, conv(padding=3)), r"padding=\(3, 3, 3\)", {}),
    "dilation": (put(CONV, conv(padding=2, dilation=2)), "dilation", {}),
    "groups": (put("inc.block.conv2.conv", conv(groups=2)), "groups=2", {}),
    "a kernel that is not the stride": (
        put("up1.up", lambda old: nn.ConvTranspose3d(6, 4, 4, 2, 1)),
        "kernel_size",
        {},
    ),
    "an output_padding": (put("up1.up", lambda old: nn.ConvTranspose3d(6, 4, 2, 2, 0, 1)), "output_padding", {}),
    "windows that overlap": (put("down1.pool", lambda old: nn.MaxPool3d(3, 2, 1)), "kernel_size=3", {}),
    "align_corners": (
        put(
            "up1.up.interpolate", lambda old: nn.Upsample(scale_factor=(2.0,) * 3, mode="trilinear", align_corners=True)
        ),
        "align_corners",
        TRILINEAR,
    ),
    "a broken factor": (at("up1.up.interpolate", lambda m: setattr(m, "scale_factor", (1.5,) * 3)), "1.5", TRILINEAR),
    "another mode": (
        at("up1.up.interpolate", lambda m: setattr(m, "mode", "nearest-exact")),
        "nearest-exact",
        TRILINEAR,
    ),
    "a norm in two places": (a_norm_twice, "up1.block.conv2.norm .*inc.block.conv2.norm", {}),
    "a dropout in two places": (
        lambda model: setattr(model.up1.block.conv2, "dropout", model.inc.block.conv1.dropout),
        "up1.block.conv2.dropout",
        DROPOUT,
    ),
    "another dropout": (put("inc.block.conv1.dropout", lambda old: nn.Dropout(0.3)), "conv1.dropout", DROPOUT),
    "activation before norm": (activation_first, "inc.block.conv1 .*conv, act, norm", {}),
    "running statistics": (
        put(NORM, lambda old: nn.InstanceNorm3d(6, track_running_stats=True)),
        f"{NORM} .*InstanceNorm3d",
        {},
    ),
    "a cumulative average": (at(NORM, lambda m: setattr(m, "momentum", None)), "momentum=None", BATCH),
    "statistics switched off": (at(NORM, lambda m: setattr(m, "track_running_stats", False)), "track_running", BATCH),
    "statistics taken away": (at(NORM, lambda m: setattr(m, "running_mean", None)), NORM, BATCH),
    "a slope below zero": (
        at(ACT, lambda m: setattr(m, "negative_slope", -0.1)),
        "negative_slope",
        {"activation": "leaky_relu"},
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_exact_rule_is_refused_by_name(case: str) -> None:
    change, named, options = REFUSED[case]
    model = network(**options)
    change(model)
    for name, way in WAYS.items():
        with pytest.raises(UserError, match=rf"^{name}\b[^\n]*{named}[^\n]*ckpt=auto"):
            MemoryPolicy(slabs=way).forward(model, torch.zeros(1, 1, 8, 8, 8).double())


def test_hooks_of_all_modules_and_a_changed_class_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, image, policy = network(), torch.zeros(1, 1, 8, 8, 8).double(), MemoryPolicy(slabs=WAYS["lean"])
    handle = register_module_forward_hook(lambda *_: None)
    try:
        with pytest.raises(UserError, match="all modules"):
            policy.forward(model, image)
    finally:
        handle.remove()
    policy.forward(model, image)
    monkeypatch.setattr(nn.InstanceNorm3d, "forward", twice)
    with pytest.raises(UserError, match=r"inc\.block\.conv1\.norm .*another forward"):
        policy.forward(model, image)


def none_replaced() -> Iterator[str]:
    return iter(())


class OwnFunctions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class OwnDispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@without("unet3d.training.slab_rules._replaced", none_replaced)
@pytest.mark.parametrize(
    ("target", "named"),
    [
        ("torch.nn.Module.__call__", r"Module\.__call__"),
        ("torch.nn.Conv3d.__call__", r"Conv3d\.__call__"),
        ("torch.nn.Conv3d._conv_forward", r"Conv3d\._conv_forward"),
        ("unet3d.model.blocks.join", r"blocks\.join"),
        ("unet3d.model.blocks.crop", r"blocks\.crop"),
        ("torch.nn.functional.instance_norm", r"functional\.instance_norm"),
        ("torch.nn.functional.conv3d", r"functional\.conv3d"),
        ("torch.cat", r"torch\.cat"),
    ],
)
@pytest.mark.parametrize("way", WAYS)
def test_methods_and_functions_that_others_have_replaced_are_refused(
    target: str, named: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, image = network(), torch.zeros(1, 1, 8, 8, 8).double()
    with monkeypatch.context() as patch:
        patch.setattr(target, twice)
        with pytest.raises(UserError, match=rf"^{way}\b[^\n]*{named}[^\n]*ckpt=auto"):
            slab_rules.refuse_unknown(model, way)
    MemoryPolicy(slabs=WAYS[way]).forward(model, image)


@without("unet3d.training.slab_rules._is_original", yes)
def test_a_forward_that_was_replaced_before_the_rules_were_read_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.ReLU, "forward", twice)
    monkeypatch.setitem(slab_rules.FORWARD, nn.ReLU, twice)
    with pytest.raises(UserError, match=r"ReLU\.forward"):
        slab_rules.refuse_unknown(network(), "lean")


@without("unet3d.training.slab_rules._replaced", none_replaced)
@pytest.mark.parametrize("mode", [OwnFunctions, OwnDispatch])
def test_modes_of_others_are_refused_and_those_of_torch_are_not(mode: type) -> None:
    model, image, policy = network(), torch.zeros(1, 1, 8, 8, 8).double(), MemoryPolicy(slabs=WAYS["slab"])
    with mode(), pytest.raises(UserError, match=rf"^slab\b[^\n]*mode {mode.__name__}\b"):
        policy.forward(model, image)
    with torch.device("cpu"), FakeTensorMode(allow_non_fake_inputs=True):
        policy.forward(model, image)


class Calling(nn.Module):
    """A network within another that takes its step by a policy."""

    def __init__(self, network: nn.Module, policy: MemoryPolicy) -> None:
        super().__init__()
        self.network, self.policy = network, policy

    def forward(self, image: Tensor) -> Any:
        return self.policy.forward(self.network, image)


@without("unet3d.training.slab_run._Run.has_its_parameters", yes)
@pytest.mark.parametrize("way", WAYS)
def test_a_functional_call_with_other_weights_gives_their_gradients_or_is_refused(way: str) -> None:
    image = torch.randn(1, 1, 8, 8, 8, generator=torch.Generator().manual_seed(1)).double()
    plain, calling = (Calling(network(), MemoryPolicy(slabs=slabs)) for slabs in (None, WAYS[way]))
    others = {name: p.detach() * 0.5 for name, p in plain.named_parameters()}
    leaves = [{name: t.clone().requires_grad_() for name, t in others.items()} for _ in range(2)]
    for model, weights in zip((plain, calling), leaves, strict=True):
        with _reparametrize_module(model, weights):
            model(image).sin().sum().backward()
        assert all(p.grad is None for p in model.parameters())
    largest = max(t.grad.norm() for t in leaves[0].values())
    assert all((t.grad - leaves[1][name].grad).norm() < 1e-9 * largest for name, t in leaves[0].items())
    logits = functional_call(calling, leaves[1], (image,))  # which puts the network's own weights back
    with pytest.raises(RuntimeError, match="were replaced"):
        logits.sin().sum().backward()
    with pytest.raises(UserError, match="computed from others"):
        functional_call(calling, {name: t * 1 for name, t in leaves[1].items()}, (image,))
    with pytest.raises(RuntimeError):  # torch's own refusal of such functions under its transforms
        torch.func.grad(lambda weights: functional_call(calling, weights, (image,)).sin().sum())(others)


def every(kind: type, make: Callable[[Any], nn.Module]) -> Change:
    def change(model: Any) -> None:
        for parent, name, child in layers(model, kind):
            setattr(parent, name, make(child))

    return change


def tied(kind: type) -> Change:
    """Return a change that gives all layers of a type the weight of one."""

    def change(model: Any) -> None:
        first, *others = (child for _, _, child in layers(model, kind) if child.weight.shape in ((1,), (4,)))
        for other in others:
            other.weight = first.weight

    return change


SHARED = nn.PReLU()
EQUAL: dict[str, tuple[Change, dict[str, Any]]] = {
    "a weight of all activations": (tied(nn.PReLU), {"activation": "prelu"}),
    "a weight of several norms": (tied(nn.InstanceNorm3d), {"norm_affine": True}),
    "a convolution in two places": (
        lambda model: setattr(model.up1.block.conv2, "conv", model.inc.block.conv2.conv),
        {},
    ),
    "one activation everywhere": (every(nn.ReLU, lambda old: SHARED), {}),
    "another norm and activation": (
        lambda model: (put(NORM, lambda old: nn.GroupNorm(2, 6))(model), put(ACT, lambda old: nn.SiLU())(model)),
        BATCH,
    ),
    "a norm in evaluation": (at(NORM, lambda m: m.eval()), BATCH),
    "a wide head": (put("outc.conv", conv(5)), {}),
    "a wide shortcut": (put("down1.block.project", conv(3)), {"residual": True}),
}


@pytest.mark.parametrize("case", EQUAL)
def test_what_has_one_gives_the_gradients_of_autograd(case: str) -> None:
    change, options = EQUAL[case]
    model = network(**options)
    change(model)
    model.double()
    image = torch.randn(2, 1, 12, 8, 8, generator=torch.Generator().manual_seed(1)).double()
    found = []
    for way in (None, *WAYS.values()):
        one = copy.deepcopy(model)
        logits = MemoryPolicy(slabs=way).forward(one, image)
        logits.sin().sum().backward()
        found.append([logits.detach(), *(p.grad for p in one.parameters())])
    largest = max(tensor.norm() for tensor in found[0])
    for other in found[1:]:
        assert all((a - b).norm() < 1e-9 * largest for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize(
    ("norm", "batch", "is_refused"), [("group", 1, True), ("group", 2, False), ("instance", 2, True)]
)
def test_one_voxel_is_normalised_or_refused_as_the_layer_does_it(norm: str, batch: int, is_refused: bool) -> None:
    """A group of one channel: its variance is 0, not 0 / 0."""
    image, gradients = torch.randn(batch, 1, 2, 2, 2).double(), list[Tensor]()
    for way in (None, *WAYS.values()):
        model = network(norm=norm, groups=2, features=[2, 2], activation="silu")
        policy = MemoryPolicy(slabs=way)
        if is_refused:
            with pytest.raises(ValueError, match=r"Expected more than 1|expected more than 1"):
                policy.forward(model, image)
        else:
            policy.forward(model, image).sin().sum().backward()
            gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert all((found - gradients[0]).norm() < 1e-9 * gradients[0].norm() for found in gradients)


def test_every_layer_of_the_rules_is_known_to_the_other() -> None:
    assert rows.RULES.keys() == slab_rules.LAYERS.keys()


def test_a_prediction_of_memory_refuses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """`unet3d memory` and a run make one before the first step."""
    config = compose.compose([*TINY, "lean=true", "model.in_channels=1", "model.classes=2"])
    monkeypatch.setattr("unet3d.model.unet.DoubleConv", GatedBlock)
    with pytest.raises(UserError, match=r"^lean=true\b.*inc\.block"):
        simulate(config, build.model_config_from_headers(config), (), steps=1)

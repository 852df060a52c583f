"""`lean` and `slab` change rounding alone: outputs, gradients, buffers against plain autograd, for every option."""

import copy
import dataclasses
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from unet3d import build, compose
from unet3d.config import Model
from unet3d.errors import UserError
from unet3d.memory.simulate import simulate
from unet3d.model.unet import UNet3D
from unet3d.training import rows, slab_run
from unet3d.training.policy import MemoryPolicy
from unet3d.training.slab_run import SlabOptions

EXACT = 1e-12  # relative, in float64
SIZES = (((12, 8, 8), 2), ((11, 9, 13), 4))  # D H W, and along which axis the rows are
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"features": [4]},
    {"features": [4, 6]},
    {"decoder": [5, 7]},
    {"kernels": [[1, 3, 3], 3, 3], "strides": [[1, 2, 2], 2]},
    {"kernels": 5},
    {"strides": [2, 3]},
    {"conv_bias": False},
    {"widen": "second"},
    {"norm": "batch"},
    {"norm": "batch_current"},
    {"norm": "group", "groups": 2},
    {"norm": "none"},
    {"norm": "none", "activation": "leaky_relu", "inplace": True},
    {"norm": "none", "inplace": True},
    {"norm": "none", "activation": "silu", "inplace": True},
    {"norm_affine": False},
    {"activation": "leaky_relu", "inplace": True},
    {"activation": "leaky_relu", "negative_slope": 0.0},
    {"activation": "relu", "inplace": True},
    {"activation": "prelu"},
    {"activation": "silu"},
    {"activation": "swish"},
    {"activation": "swish_lean"},
    {"downsampling": "strided_conv"},
    {"upsampling": "trilinear"},
    {"upsampling": "nearest"},
    {"up_reduce": False},
    {"upsampling": "trilinear", "up_reduce": False},
    {"up_bias": False},
    {"residual": True},
    {"residual": True, "downsampling": "strided_conv"},
    {"dropout": 0.3},
    {"deep_supervision": True},
)
VALID = {"padding": "valid", "features": [4, 6], "residual": True}


def network(dtype: torch.dtype, **options: Any) -> UNet3D:
    """With weights and biases that no initial value makes 0 or 1."""
    found = build.model(Model(**{"in_channels": 2, "classes": 3, "features": [4, 6, 8], **options}), 0)
    assert isinstance(found, UNet3D)
    torch.manual_seed(1)
    for parameter in found.parameters():
        if parameter.dim() == 1:
            parameter.data.add_(0.3 * torch.randn_like(parameter))
    return found.to(dtype)


def outcome(model: UNet3D, policy: MemoryPolicy, image: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs, buffers and evaluation output, and gradients by parameter, of two passes with the same dropout."""
    torch.manual_seed(5)
    outputs = []
    for _ in range(2):  # the second adds to the gradients of the first
        found = policy.forward(model, image)
        outputs = list(found) if isinstance(found, tuple) else [found]
        numbers = torch.Generator().manual_seed(3)
        weights = [torch.randn(t.shape, generator=numbers, dtype=torch.float64).to(t.dtype) for t in outputs]
        with policy.convolutions():
            sum((t * w).sum() for t, w in zip(outputs, weights, strict=True)).backward()
    model.eval()
    with torch.no_grad():
        evaluated = policy.forward(model, image)
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert len(gradients) == len(list(model.parameters()))
    return [*(t.detach() for t in outputs), *model.buffers(), evaluated], gradients


def error(found: Tensor, expected: Tensor) -> float:
    """Relative."""
    return ((found - expected).norm() / expected.norm().clamp(min=1e-30)).item()


def errors(
    plain: MemoryPolicy, other: MemoryPolicy, dtype: torch.dtype, size: Any, batch: int, **options: Any
) -> tuple[float, float]:
    """The largest relative errors of outputs and of a parameter's gradient, where that is more than rounding."""
    model = network(dtype, **options)
    image = torch.randn(batch, 2, *size, generator=torch.Generator().manual_seed(2)).to(dtype)
    expected, gradients = outcome(copy.deepcopy(model), plain, image)
    outputs, found = outcome(model, other, image)
    of_outputs = max(error(a.double(), b.double()) for a, b in zip(outputs, expected, strict=True))
    every, total = torch.cat([g.flatten() for g in found]), torch.cat([g.flatten() for g in gradients])
    pairs = [(a, b) for a, b in zip(found, gradients, strict=True) if b.norm() > 1e-4 * total.norm()]
    is_half = other.dtype is not None  # where a bias before a normalisation has a gradient of mere rounding
    return of_outputs, error(every, total) if is_half else max([error(every, total), *(error(*pair) for pair in pairs)])


@pytest.mark.parametrize("is_lean", [True, False], ids=["lean", "slab"])
@pytest.mark.parametrize("options", [*OPTIONS, VALID], ids=str)
def test_every_option_alone_has_the_gradients_of_autograd(options: dict[str, Any], is_lean: bool) -> None:
    for size, axis in SIZES if options is not VALID else (((40, 40, 42), 2), ((40, 42, 40), 3)):
        policy = MemoryPolicy(slabs=SlabOptions(3, is_lean, axis, True))
        assert max(errors(MemoryPolicy(), policy, torch.float64, size, 2, **options)) < EXACT


@pytest.mark.parametrize("seed", range(10))
def test_random_mixtures_have_the_gradients_of_autograd(seed: int) -> None:
    """Of all options at once, on odd sizes, along any axis, with slabs of any height."""
    choose = random.Random(seed)
    mixture: dict[str, Any] = {}
    for option in choose.sample(OPTIONS[3:], len(OPTIONS[3:])):
        if choose.random() < 0.4:
            mixture |= option
    mixture = {"groups": 2} | mixture
    if mixture.get("activation") not in ("relu", "leaky_relu"):
        mixture.pop("inplace", None)
    size, batch = [choose.randint(12, 19) for _ in range(3)], choose.randint(1, 2)
    for is_lean in (True, False):
        policy = MemoryPolicy(slabs=SlabOptions(choose.randint(1, 7), is_lean, choose.randint(2, 4), True))
        found = errors(MemoryPolicy(), policy, torch.float64, size, batch, **mixture)
        assert max(found) < EXACT, (mixture, size, policy)


@pytest.mark.parametrize("is_lean", [True, False], ids=["lean", "slab"])
@pytest.mark.parametrize("norm", ["instance", "batch", "group"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_as_near_to_float32_as_plain_mixed_precision(
    dtype: torch.dtype, norm: str, is_lean: bool
) -> None:
    slabs = SlabOptions(4, is_lean, 2, True)
    ours, plain = (
        errors(MemoryPolicy(), policy, torch.float32, (16, 16, 16), 2, norm=norm, groups=2, activation="leaky_relu")
        for policy in (MemoryPolicy(dtype=dtype, slabs=slabs), MemoryPolicy(dtype=dtype))
    )
    assert ours[0] < 1.1 * plain[0] and ours[1] < 1.1 * plain[1]


@pytest.mark.parametrize("is_lean", [True, False], ids=["lean", "slab"])
@pytest.mark.parametrize("norm", ["instance", "batch", "group"])
def test_in_float32_they_differ_by_rounding(norm: str, is_lean: bool) -> None:
    policy = MemoryPolicy(slabs=SlabOptions(4, is_lean, 2, True))
    assert max(errors(MemoryPolicy(), policy, torch.float32, (16, 16, 16), 2, norm=norm, groups=2)) < 1e-4


@pytest.mark.parametrize("is_lean", [True, False], ids=["lean", "slab"])
def test_backward_is_of_the_mode_and_the_weights_of_its_forward_pass(is_lean: bool) -> None:
    policy = MemoryPolicy(slabs=SlabOptions(4, is_lean, 2, True))
    image, gradients = torch.randn(1, 2, 12, 12, 12), []
    for switches in (False, True):
        model = network(torch.float32, dropout=0.3, deep_supervision=True)
        torch.manual_seed(0)
        loss = sum(t.square().sum() for t in policy.forward(model, image))
        model.train(not switches)
        loss.backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    loss = policy.forward(model, image).sum()
    with torch.no_grad():
        model.outc.conv.bias.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    loss = policy.forward(model, image).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="call forward again"):
        loss.backward()


@pytest.mark.parametrize("is_lean", [True, False], ids=["lean", "slab"])
def test_frozen_weights_get_no_gradient_and_others_the_same(is_lean: bool) -> None:
    policy, image = MemoryPolicy(slabs=SlabOptions(4, is_lean, 2, True)), torch.randn(1, 2, 12, 12, 12).double()
    plain, other = network(torch.float64), network(torch.float64)
    for model in (plain, other):
        model.inc.requires_grad_(False)
        model.up1.block.conv1.norm.requires_grad_(False)
    plain(image).sin().sum().backward()
    policy.forward(other, image).sin().sum().backward()
    for a, b in zip(plain.parameters(), other.parameters(), strict=True):
        assert (a.grad is None and b.grad is None) or (a.grad - b.grad).norm() < 1e-9
    assert not policy.forward(other.requires_grad_(False), image).requires_grad


def test_every_layer_of_the_network_has_a_rule() -> None:
    """A new layer needs one, in train/rows.py."""
    missing = rows.node_of.dispatch(nn.Module)
    networks = [network(torch.float32, **options) for options in (*OPTIONS, VALID)]
    layers = {type(m) for model in networks for m in model.modules() if not [*m.children()]}
    assert len(layers) > 10
    assert not [layer.__name__ for layer in layers if rows.node_of.dispatch(layer) is missing]
    values = {(f.name, value) for f in dataclasses.fields(Model) for value in f.metadata["among"]}
    assert values <= {(name, getattr(model.options, name)) for model in networks for name, _ in values}


def test_a_layer_without_a_rule_is_named() -> None:
    model = network(torch.float32)
    model.inc.block.conv1.act = nn.GELU()
    with pytest.raises(ValueError, match="no rule for the layer GELU"):
        slab_run.forward(model, torch.zeros(1, 2, 8, 8, 8), SlabOptions(4, True, 2, True), None)


@pytest.mark.parametrize("name", compose.choices("model"))
def test_every_named_network_takes_them(name: str) -> None:
    patch = "data.patch=[92,92,92]" if name.startswith("cicek2016") else "data.patch=[32,32,32]"
    patch = "data.patch=[108,108,12]" if name == "cicek2016_2d" else patch
    config = compose.compose([f"model={name}", patch, "batch=1"])
    config.model.in_channels, config.model.classes = config.model.in_channels or 1, config.model.classes or 3
    ways = [config, *(dataclasses.replace(config, **way) for way in ({"lean": True}, {"slab": 16}))]
    plain, lean, slab = (dict(simulate(way, config.model, (), steps=1).ledger.phase_peaks()) for way in ways)
    assert slab["backward"] < lean["backward"] < plain["backward"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["slab=-1"], "slab=-1: use 0"),
        (["slab=true"], "slab=True: use 0"),
        (["slab=often"], "slab=often: use 0"),
        (["slab=65"], "64 rows; use fewer"),
        (["lean=true", "slab=8"], "drop one"),
        (["lean=true", "ckpt=2"], "lean=true and ckpt=2"),
        (["slab=auto", "ckpt=auto"], "slab=auto and ckpt=auto"),
        (["slab=4", "model.path=mypkg.parts:mine"], "not model.path=mypkg.parts:mine"),
    ],
)
def test_what_cannot_be_combined_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        compose.compose(overrides)

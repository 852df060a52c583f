"""`lean` and `slab` change rounding alone: outputs, gradients, buffers against plain autograd, for every option."""

import copy
import dataclasses
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from unet3d import build
from unet3d.base.errors import UserError
from unet3d.config import compose
from unet3d.config.schema import Model
from unet3d.memory.simulate import simulate
from unet3d.model.unet import UNet3D
from unet3d.training import rows
from unet3d.training.policy import MemoryPolicy
from unet3d.training.slab_run import SlabOptions

EXACT = 1e-12  # relative, in float64
FEATURES = [4, 8, 8]
SIZES = (((12, 8, 8), 2), ((11, 9, 13), 4))  # D H W, and along which axis the rows are
MIXTURES: tuple[dict[str, Any], ...] = (  # of all values of all options, with those that they share code with
    {},
    {"features": [4], "norm": "batch", "activation": "leaky_relu", "inplace": True},
    {"features": [4, 6], "norm": "none", "inplace": True, "upsampling": "nearest", "up_bias": False},
    {"decoder": [6, 10], "kernels": [[1, 3, 3], 3, 3], "strides": [[1, 2, 2], 2], "norm": "batch_current"},
    {"kernels": 5, "conv_bias": False, "activation": "silu"},
    {"strides": [2, 3], "norm_affine": False, "activation": "prelu"},
    {"widen": "second", "norm": "group", "groups": 2, "activation": "swish"},
    {"norm": "none", "activation": "silu", "inplace": True, "downsampling": "strided_conv"},
    {"norm": "none", "activation": "leaky_relu", "inplace": True, "dropout": 0.3},
    {"norm": "batch", "upsampling": "trilinear", "up_reduce": False, "norm_affine": False},
    {"norm": "none", "upsampling": "trilinear", "activation": "swish_lean", "residual": True},
    {"norm": "batch", "up_reduce": False, "deep_supervision": True, "inplace": True},
    {
        **{"norm": "group", "groups": 2, "downsampling": "strided_conv", "residual": True},
        **{"activation": "leaky_relu", "negative_slope": 0.0},
    },
    {"upsampling": "nearest", "inplace": True, "residual": True, "deep_supervision": True, "dropout": 0.3},
)
VALID = {"padding": "valid", "features": [4, 6], "residual": True}
VALID_SIZES = (((20, 18, 22), 4), ((22, 20, 18), 2))
both_ways = pytest.mark.parametrize("is_lean", [True, False], ids=["lean", "slab"])


def network(dtype: torch.dtype, **options: Any) -> UNet3D:
    """With weights and biases that no initial value makes 0 or 1."""
    found = build.model(Model(**{"in_channels": 2, "classes": 3, "features": FEATURES, **options}), 0)
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
        with policy.cpu_half_precision():
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


@both_ways
@pytest.mark.parametrize("options", [*MIXTURES, VALID], ids=str)
def test_every_option_has_the_gradients_of_autograd(options: dict[str, Any], is_lean: bool) -> None:
    sizes = VALID_SIZES if options is VALID else SIZES
    size, axis = sizes[([*MIXTURES, VALID].index(options) + is_lean) % 2]
    policy = MemoryPolicy(slabs=SlabOptions(3, is_lean, axis, True))
    assert max(errors(MemoryPolicy(), policy, torch.float64, size, 2, **options)) < EXACT


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_random_mixtures_have_the_gradients_of_autograd(seed: int) -> None:
    """Of all options at once, on odd sizes, along any axis, with slabs of any height."""
    choose = random.Random(seed)
    values = [(name, value) for mixture in MIXTURES[3:] for name, value in mixture.items()]
    mixture = {"groups": 2, **dict(value for value in choose.sample(values, len(values)) if choose.random() < 0.3)}
    if mixture.get("activation", "relu") not in ("relu", "leaky_relu"):
        mixture.pop("inplace", None)
    size = [choose.randint(10, 15) for _ in range(3)]
    batch = choose.randint(1, 2)
    for is_lean in (True, False):
        slabs = SlabOptions(choose.randint(1, 7), is_lean, choose.randint(2, 4), True)
        found = errors(MemoryPolicy(), MemoryPolicy(slabs=slabs), torch.float64, size, batch, **mixture)
        assert max(found) < EXACT, (mixture, size, slabs)


@pytest.mark.parametrize(
    ("dtype", "norm", "is_lean"),
    [
        (torch.bfloat16, "instance", True),
        (torch.float16, "batch", False),
        pytest.param(torch.float16, "instance", False, marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, "batch", True, marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, "group", False, marks=pytest.mark.slow),
        pytest.param(torch.float16, "group", True, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_half_precision_is_as_near_to_float32_as_plain_mixed_precision(
    dtype: torch.dtype, norm: str, is_lean: bool
) -> None:
    slabs = SlabOptions(4, is_lean, 2, True)
    ours, plain = (
        errors(MemoryPolicy(), policy, torch.float32, (16, 16, 16), 2, norm=norm, groups=2, activation="leaky_relu")
        for policy in (MemoryPolicy(dtype=dtype, slabs=slabs), MemoryPolicy(dtype=dtype))
    )
    assert ours[0] < 1.1 * plain[0] and ours[1] < 1.1 * plain[1]


@pytest.mark.parametrize(("norm", "is_lean"), [("instance", True), ("batch", False), ("group", True)])
def test_in_float32_they_differ_by_rounding(norm: str, is_lean: bool) -> None:
    policy = MemoryPolicy(slabs=SlabOptions(4, is_lean, 2, True))
    assert max(errors(MemoryPolicy(), policy, torch.float32, (16, 16, 16), 2, norm=norm, groups=2)) < 1e-4


@both_ways
def test_backward_is_of_the_mode_and_the_weights_of_its_forward_pass(is_lean: bool) -> None:
    policy = MemoryPolicy(slabs=SlabOptions(4, is_lean, 2, True))
    image = torch.randn(1, 2, 12, 12, 12)
    gradients = []
    for switches in (False, True):
        model = network(torch.float32, dropout=0.3, deep_supervision=True)
        torch.manual_seed(0)
        loss = sum(t.square().sum() for t in policy.forward(model, image))
        model.train(not switches)
        loss.backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@both_ways
def test_a_second_backward_and_one_after_an_update_are_refused(is_lean: bool) -> None:
    policy = MemoryPolicy(slabs=SlabOptions(4, is_lean, 2, True))
    image = torch.randn(1, 2, 12, 12, 12)
    model = network(torch.float32)
    loss = policy.forward(model, image).sum()
    with torch.no_grad():
        model.outc.conv.bias.add_(1)
    with pytest.raises(RuntimeError, match="inplace"):
        loss.backward()
    assert all(p.grad is None for p in model.parameters())
    loss = policy.forward(model, image).sum()
    loss.backward(retain_graph=True)
    gradients = [p.grad.clone() for p in model.parameters()]
    with pytest.raises(RuntimeError, match="forward"):
        loss.backward()
    assert all(torch.equal(p.grad, gradient) for p, gradient in zip(model.parameters(), gradients, strict=True))


@both_ways
def test_frozen_weights_get_no_gradient_and_others_the_same(is_lean: bool) -> None:
    policy = MemoryPolicy(slabs=SlabOptions(4, is_lean, 2, True))
    image = torch.randn(1, 2, 12, 12, 12).double()
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
    """A new layer needs one, in training/rows.py and in training/slab_rules.py, and its option a place in MIXTURES."""
    networks = [network(torch.float32, **options) for options in (*MIXTURES, VALID)]
    layers = {type(m) for model in networks for m in model.modules() if not [*m.children()]}
    assert len(layers) > 10
    assert not [layer.__name__ for layer in layers if layer not in rows.RULES]
    values = {(f.name, value) for f in dataclasses.fields(Model) for value in f.metadata["among"]}
    assert not values - {(name, getattr(model.options, name)) for model in networks for name, _ in values}


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        ["model=unet_tiny", "model.features=[8,16]", "data.patch=[24,16,16]"],
        pytest.param(
            ["model=nnunet_hippocampus", "model.features=[8,16,32]", "data.patch=[24,16,16]"], marks=pytest.mark.slow
        ),
    ],
    ids=lambda overrides: overrides[0],
)
def test_they_lower_the_peak_of_backward(overrides: list[str]) -> None:
    config = compose.compose([*overrides, "batch=1"])
    config.model.in_channels = config.model.in_channels or 1
    config.model.classes = config.model.classes or 3
    ways = [config, dataclasses.replace(config, lean=True), dataclasses.replace(config, slab=12)]
    plain, lean, slab = (dict(simulate(way, config.model, (), steps=1).ledger.phase_peaks()) for way in ways)
    assert slab["backward"] < lean["backward"] < plain["backward"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["slab=-1"], r"slab=-1\b.*\bauto\b"),
        (["slab=true"], r"slab=True\b.*\bauto\b"),
        (["slab=often"], r"slab=often\b.*\bauto\b"),
        (["slab=65"], r"slab=65\b.*\b64\b"),
        (["lean=true", "slab=8"], r"lean=true\b.*\bslab=8\b"),
        (["lean=true", "ckpt=2"], r"lean=true\b.*\bckpt=2\b"),
        (["slab=auto", "ckpt=auto"], r"slab=auto\b.*\bckpt=auto\b"),
        (["slab=4", "model.path=mypkg.parts:mine"], r"slab=4\b.*\bmodel\.path=mypkg\.parts:mine"),
    ],
)
def test_what_cannot_be_combined_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        compose.compose(overrides)
